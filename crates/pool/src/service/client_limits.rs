//! Rate limits of each process at the control socket: they bound the CPU time that a process can
//! take from the memory node.
//!
//! Each connection has credit for the requests of a normal set-up. Requests beyond the credit take
//! tokens from a token bucket of the process. When the bucket is empty, the service stops reading
//! from that process until tokens are available: its requests wait in its own sockets and do not
//! delay other processes. A process may open `OPENINGS` connections with credit, and one more per
//! `OPENING_EACH`; further connections start without credit.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use units::TokenBucket;

use crate::protocol::Request;
use crate::socket::Peer;

/// Cost of setting up a QP: its memory, queues and state changes.
const EACH_QP: u32 = 8;
/// Minimum credit of a connection.
const CREDIT_MIN: u32 = 512;
/// Capacity of the request bucket of a process.
const BURST: u32 = 256;
/// Time in which the request bucket gains one token.
const EACH: Duration = Duration::from_millis(1);
/// Capacity of the bucket for connections with credit, and the time in which it gains one token.
const OPENINGS: u32 = 256;
const OPENING_EACH: Duration = Duration::from_secs(1);

/// Identity to which requests are charged.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PeerIdentity {
    /// A process of this host.
    Process(Peer),
    /// Another host, by its address, because its processes cannot be told apart.
    Host(IpAddr),
}

impl fmt::Display for PeerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(Peer::Process(pid)) => write!(f, "process:{pid}"),
            Self::Process(Peer::Outside(inode)) => write!(f, "pidfd:{inode}"),
            Self::Process(Peer::User(user)) => write!(f, "user:{user}"),
            Self::Host(address) => write!(f, "host:{address}"),
        }
    }
}

/// The token buckets of all processes that are connected or were recently. Times are relative to
/// the service's start.
pub struct ClientLimits {
    buckets: HashMap<PeerIdentity, Buckets>,
    /// Initial credit of a connection.
    credit: u32,
}

struct Buckets {
    requests: TokenBucket,
    openings: TokenBucket,
}

impl Buckets {
    fn new(now: Duration) -> Self {
        Self {
            requests: TokenBucket::new(BURST, EACH, now),
            openings: TokenBucket::new(OPENINGS, OPENING_EACH, now),
        }
    }
}

impl ClientLimits {
    /// No buckets yet. `qps` is the maximum number of QPs of a compute node.
    pub fn new(qps: u32) -> Self {
        Self { buckets: HashMap::new(), credit: CREDIT_MIN.max(EACH_QP * qps) }
    }

    /// Takes a connection token and returns the credit of a new connection; 0 if the bucket is
    /// empty.
    pub fn open(&mut self, identity: PeerIdentity, now: Duration) -> u32 {
        let bucket = self.buckets.entry(identity).or_insert_with(|| Buckets::new(now));
        if bucket.openings.wait(now).is_some() {
            return 0;
        }
        bucket.openings.take(1, now);
        self.credit
    }

    /// Charges `cost` to the connection's `credit` and, beyond that, to the process's bucket.
    pub fn asked(&mut self, identity: PeerIdentity, credit: &mut u32, cost: u32, now: Duration) {
        let paid = cost.min(*credit);
        *credit -= paid;
        if cost > paid {
            let bucket = self.buckets.entry(identity).or_insert_with(|| Buckets::new(now));
            bucket.requests.take(cost - paid, now);
        }
    }

    /// Time until a connection with `credit` may be read from again; `None`: now.
    pub fn wait(&self, identity: PeerIdentity, credit: u32, now: Duration) -> Option<Duration> {
        if credit > 0 {
            return None;
        }
        self.buckets.get(&identity)?.requests.wait(now)
    }

    /// Removes the buckets that are full.
    pub fn forget(&mut self, now: Duration) {
        self.buckets
            .retain(|_, bucket| !bucket.requests.is_full(now) || !bucket.openings.is_full(now));
    }
}

/// Cost of a request to the pool, in units of one NIC verb.
pub fn cost(request: &Request) -> u32 {
    match request {
        Request::AwaitMemory { .. } | Request::ManagementState => 1,
        Request::ResetAccess { .. } | Request::ResetManagement { .. } | Request::Goodbye => 4,
        Request::Status => 4,
        // These visit the QPs and windows of all groups, or every entry of the table.
        Request::Admit(_) | Request::Audit => 16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends requests on one connection whenever it may be read; returns the number sent in `time`.
    fn asks(
        limits: &mut ClientLimits,
        process: i32,
        start: Duration,
        time: Duration,
        cost: u32,
    ) -> u32 {
        let (mut now, mut count) = (start, 0);
        let mut credit = limits.open(PeerIdentity::Process(Peer::Process(process)), now);
        while now < start + time {
            match limits.wait(PeerIdentity::Process(Peer::Process(process)), credit, now) {
                Some(wait) => now += wait,
                None => {
                    limits.asked(
                        PeerIdentity::Process(Peer::Process(process)),
                        &mut credit,
                        cost,
                        now,
                    );
                    count += 1;
                    now += Duration::from_micros(1);
                }
            }
        }
        count
    }

    #[test]
    fn credit_covers_setup_and_further_requests_are_limited() {
        let start = Duration::from_secs(1000);
        let mut limits = ClientLimits::new(1);
        let second = Duration::from_secs(1);
        let first = asks(&mut limits, 1, start, Duration::from_millis(2), 1);
        assert!(first >= CREDIT_MIN + BURST, "{first}");
        let then = asks(&mut limits, 1, start + second, 10 * second, 1);
        assert!((10_000..=10_000 + CREDIT_MIN + BURST + 1).contains(&then), "{then}");
        let dear = asks(&mut limits, 2, start, 10 * second, 4);
        assert!((2500..=2500 + (CREDIT_MIN + BURST) / 4 + 1).contains(&dear), "{dear}");
    }

    #[test]
    fn connections_of_a_process_share_one_bucket() {
        let now = Duration::from_secs(1000);
        let mut limits = ClientLimits::new(1);
        let (mut a, mut b, c) = (0, 0, 0);
        limits.asked(PeerIdentity::Process(Peer::Process(1)), &mut a, BURST, now);
        assert_eq!(limits.wait(PeerIdentity::Process(Peer::Process(1)), b, now), None);
        limits.asked(PeerIdentity::Process(Peer::Process(1)), &mut b, 10, now);
        assert_eq!(limits.wait(PeerIdentity::Process(Peer::Process(1)), a, now), Some(10 * EACH));
        assert_eq!(
            limits.wait(PeerIdentity::Process(Peer::Process(1)), 1, now),
            None,
            "a connection with credit is not delayed"
        );
        assert_eq!(limits.wait(PeerIdentity::Process(Peer::Process(2)), c, now), None);
    }

    #[test]
    fn reconnecting_does_not_refill_the_bucket() {
        let start = Duration::from_secs(1000);
        let mut limits = ClientLimits::new(1);
        let with_credit = |limits: &mut ClientLimits, now| {
            (0..1000)
                .filter(|_| limits.open(PeerIdentity::Process(Peer::Process(1)), now) > 0)
                .count() as u32
        };
        assert_eq!(with_credit(&mut limits, start), OPENINGS + 1);
        // Closing the connections and reconnecting does not refill the bucket.
        limits.forget(start);
        assert_eq!(with_credit(&mut limits, start + 10 * OPENING_EACH), 10);
        let later = start + 2 * OPENINGS * OPENING_EACH;
        limits.forget(later);
        assert!(limits.buckets.is_empty());
        assert_eq!(with_credit(&mut limits, later), OPENINGS + 1);
    }
}

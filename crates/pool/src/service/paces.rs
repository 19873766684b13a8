//! The pace of each process at the control socket: what it may make the memory node's CPU do.
//!
//! A connection asks as much as setting up takes (its credit) at once. What it asks beyond that is taken
//! from what its process has, which is refilled at a steady rate. Who has used that up is read from again
//! when some is there: its requests wait in its own sockets, and nobody else's do. Every process may open
//! `OPENINGS` connections with credit, and one more in `OPENING_EACH`; others start without.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use rnic::bucket::TokenBucket as Pace;
use rnic::port::shm::Peer;

use crate::protocol::Request;

/// What setting up a QP takes: its memory, its queues, its states.
const EACH_QP: u32 = 8;
/// The least that a connection may ask at once.
const CREDIT_MIN: u32 = 512;
/// What all connections of a process may ask at once beyond that.
const BURST: u32 = 256;
/// The time in which a process may ask one more.
const EACH: Duration = Duration::from_millis(1);
/// Connections of a process that have credit, and the time in which there is one more.
const OPENINGS: u32 = 256;
const OPENING_EACH: Duration = Duration::from_secs(1);

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Asker {
    /// A process of this host.
    Process(Peer),
    /// Another host, by its address: nobody can tell its processes apart.
    Host(IpAddr),
}

/// The paces of all processes that are connected, or were lately. Times are since the service was started.
pub struct Paces {
    askers: HashMap<Asker, Of>,
    /// What a connection may ask at once.
    credit: u32,
}

struct Of {
    requests: Pace,
    openings: Pace,
}

impl Of {
    fn new(now: Duration) -> Self {
        Self {
            requests: Pace::new(BURST, EACH, now),
            openings: Pace::new(OPENINGS, OPENING_EACH, now),
        }
    }
}

impl Paces {
    /// Nobody has asked for anything. A compute node sets up `qps` QPs at most.
    pub fn new(qps: u32) -> Self {
        Self { askers: HashMap::new(), credit: CREDIT_MIN.max(EACH_QP * qps) }
    }

    /// The credit of a connection that `process` opens.
    pub fn open(&mut self, asker: Asker, now: Duration) -> u32 {
        let of = self.askers.entry(asker).or_insert_with(|| Of::new(now));
        if of.openings.wait(now).is_some() {
            return 0;
        }
        of.openings.take(1, now);
        self.credit
    }

    /// A connection of `process` with `credit` has asked for what costs so much.
    pub fn asked(&mut self, asker: Asker, credit: &mut u32, cost: u32, now: Duration) {
        let paid = cost.min(*credit);
        *credit -= paid;
        if cost > paid {
            let of = self.askers.entry(asker).or_insert_with(|| Of::new(now));
            of.requests.take(cost - paid, now);
        }
    }

    /// How long a connection with `credit` is not to be read from.
    pub fn wait(&self, asker: Asker, credit: u32, now: Duration) -> Option<Duration> {
        if credit > 0 {
            return None;
        }
        self.askers.get(&asker)?.requests.wait(now)
    }

    /// Forgets processes of which there is nothing to be remembered.
    pub fn forget(&mut self, now: Duration) {
        self.askers.retain(|_, of| !of.requests.is_full(now) || !of.openings.is_full(now));
    }
}

/// What a request to the pool costs, where a verb of the NIC costs 1.
pub fn cost(request: &Request) -> u32 {
    match request {
        Request::AwaitMemory { .. } | Request::ManagementState => 1,
        Request::ResetAccess { .. } | Request::ResetManagement { .. } | Request::Goodbye => 4,
        Request::Status => 4,
        // QPs and windows of all groups; every entry of the table.
        Request::Admit(_) | Request::Audit => 16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asks on one connection whenever it is read from; how often in `time`.
    fn asks(paces: &mut Paces, process: i32, start: Duration, time: Duration, cost: u32) -> u32 {
        let (mut now, mut count) = (start, 0);
        let mut credit = paces.open(Asker::Process(Peer::Process(process)), now);
        while now < start + time {
            match paces.wait(Asker::Process(Peer::Process(process)), credit, now) {
                Some(wait) => now += wait,
                None => {
                    paces.asked(Asker::Process(Peer::Process(process)), &mut credit, cost, now);
                    count += 1;
                    now += Duration::from_micros(1);
                }
            }
        }
        count
    }

    #[test]
    fn setting_up_is_not_slowed_and_the_rest_has_a_rate() {
        let start = Duration::from_secs(1000);
        let mut paces = Paces::new(1);
        let second = Duration::from_secs(1);
        let first = asks(&mut paces, 1, start, Duration::from_millis(2), 1);
        assert!(first >= CREDIT_MIN + BURST, "{first}");
        let then = asks(&mut paces, 1, start + second, 10 * second, 1);
        assert!((10_000..=10_000 + CREDIT_MIN + BURST + 1).contains(&then), "{then}");
        let dear = asks(&mut paces, 2, start, 10 * second, 4);
        assert!((2500..=2500 + (CREDIT_MIN + BURST) / 4 + 1).contains(&dear), "{dear}");
    }

    #[test]
    fn connections_of_a_process_share_its_rate_and_others_have_their_own() {
        let now = Duration::from_secs(1000);
        let mut paces = Paces::new(1);
        let (mut a, mut b, c) = (0, 0, 0);
        paces.asked(Asker::Process(Peer::Process(1)), &mut a, BURST, now);
        assert_eq!(paces.wait(Asker::Process(Peer::Process(1)), b, now), None);
        paces.asked(Asker::Process(Peer::Process(1)), &mut b, 10, now);
        assert_eq!(paces.wait(Asker::Process(Peer::Process(1)), a, now), Some(10 * EACH));
        assert_eq!(
            paces.wait(Asker::Process(Peer::Process(1)), 1, now),
            None,
            "one that has credit goes on"
        );
        assert_eq!(paces.wait(Asker::Process(Peer::Process(2)), c, now), None);
    }

    #[test]
    fn to_open_connections_anew_gives_no_more() {
        let start = Duration::from_secs(1000);
        let mut paces = Paces::new(1);
        let with_credit = |paces: &mut Paces, now| {
            (0..1000).filter(|_| paces.open(Asker::Process(Peer::Process(1)), now) > 0).count()
                as u32
        };
        assert_eq!(with_credit(&mut paces, start), OPENINGS + 1);
        // Closing them, and coming back, is no way round that.
        paces.forget(start);
        assert_eq!(with_credit(&mut paces, start + 10 * OPENING_EACH), 10);
        let later = start + 2 * OPENINGS * OPENING_EACH;
        paces.forget(later);
        assert!(paces.askers.is_empty());
        assert_eq!(with_credit(&mut paces, later), OPENINGS + 1);
    }
}

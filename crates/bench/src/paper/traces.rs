//! Traces of allocations of mixed sizes, and their replay (FineMem §6.3, figures 13 and 14).
//!
//! The traces were published with FineMem. They are the requests of four allocators to the
//! operating system under programs of mimalloc-bench; `crates/bench/traces` has the files and their
//! licence. The traces contain allocations only, so the replay needs a rule for frees: a thread
//! holds at most [`HELD_BYTES`], and frees its oldest blocks until the next block fits.
//!
//! Each thread replays consecutive requests, starting at a random position of the trace (the paper
//! uses a separate trace for each node). No request is issued before its time in the trace.

use std::collections::VecDeque;
use std::io::Read;
use std::sync::OnceLock;

use flate2::read::GzDecoder;

use super::churn::donated;
use super::measure::{Outcome, Thread};
use units::Random;

/// Limit of the bytes that a thread holds: two of the largest blocks.
pub const HELD_BYTES: u64 = 4 << 20;
/// Factor by which the donated memory exceeds that of the microbenchmark with a single block size.
const SPARE: u64 = 3;
/// Number of block orders: 4 KiB to 2 MiB.
pub const ORDERS: usize = 10;
const CHUNK_BYTES: u64 = 4096;

/// A recorded trace.
#[derive(Debug)]
pub struct Trace {
    /// `ALLOCATOR.PROGRAM`.
    pub name: &'static str,
    /// The file, compressed with gzip.
    packed: &'static [u8],
    /// The parsed file; filled at the first use.
    parsed: OnceLock<Vec<Request>>,
}

/// An allocation of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Time since the start of the program.
    pub at_us: u64,
    /// Size: 4 KiB shifted left by the order.
    pub order: u32,
}

macro_rules! traces {
    ($($name:literal),* $(,)?) => {
        /// All traces: jemalloc, mimalloc, ptmalloc, tcmalloc under the programs that the paper
        /// names.
        pub static TRACES: [Trace; [$($name),*].len()] = [$(Trace {
            name: $name,
            packed: include_bytes!(concat!("../../traces/", $name, ".txt.gz")),
            parsed: OnceLock::new(),
        }),*];
    };
}

traces!(
    "je.larson",
    "je.sh8bench",
    "mi.larson",
    "mi.rptest",
    "sys.larson",
    "sys.rptest",
    "tcg.larson",
    "tcg.lean",
);

impl PartialEq for Trace {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Trace {
    /// The requests, in order.
    pub fn requests(&self) -> &[Request] {
        self.parsed.get_or_init(|| {
            let mut text = String::new();
            let unpacked = GzDecoder::new(self.packed).read_to_string(&mut text);
            unpacked.expect("a compiled-in trace is intact");
            text.lines().map(|line| request(line).expect("a line of two numbers")).collect()
        })
    }

    /// The number of requests of each order.
    pub fn orders(&self) -> [u64; ORDERS] {
        let mut orders = [0; ORDERS];
        self.requests().iter().for_each(|r| orders[r.order as usize] += 1);
        orders
    }
}

fn request(line: &str) -> Option<Request> {
    let (at, order) = line.split_once(' ')?;
    let order = order.trim().parse().ok().filter(|order| *order < ORDERS as u32)?;
    Some(Request { at_us: at.parse().ok()?, order })
}

/// Parameters of a replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Replay {
    /// The trace.
    pub trace: &'static Trace,
    /// Number of requests that each thread replays.
    pub requests: u32,
}

impl Replay {
    /// Bytes that a memory node donates for `threads` threads: several times the held bytes. A
    /// block of 2 MiB needs an empty section, and with mixed sizes a nearly full pool has few of
    /// them.
    pub fn donated(&self, threads: u32) -> u64 {
        donated(SPARE * u64::from(threads) * HELD_BYTES)
    }
}

/// Replays requests on one thread.
///
/// # Errors
/// Errors of the pool.
pub(super) fn run<T: Thread>(
    thread: &T,
    replay: &Replay,
    rng: &mut Random,
) -> Result<Outcome, pool::Error> {
    let (pool, requests) = (thread.pool(), replay.trace.requests());
    let count = (replay.requests as usize).min(requests.len());
    let from = rng.below((requests.len() - count + 1) as u64) as usize;
    let requests = &requests[from..from + count];
    let mut outcome = Outcome::default();
    let (mut held, mut held_bytes) = (VecDeque::new(), 0);
    thread.wait(thread.barrier().wait());
    let begin = thread.now_ns();
    let first = requests.first().map_or(0, |r| r.at_us);
    for request in requests {
        let due = begin + (request.at_us - first) * 1000;
        let early = due.saturating_sub(thread.now_ns());
        if early > 0 {
            thread.pause_ns(early);
        }
        let bytes = CHUNK_BYTES << request.order;
        while held_bytes + bytes > HELD_BYTES {
            let Some(oldest) = held.pop_front() else { break };
            let oldest: scheme::Grant = oldest;
            held_bytes -= oldest.len;
            let start = thread.now_ns();
            thread.wait(pool.free(oldest))?;
            outcome.free.record_ns(thread.now_ns() - start);
        }
        let start = thread.now_ns();
        let grant = thread.wait(pool.allocate_bytes_in(thread.group(), bytes))?;
        outcome.allocate.record_ns(thread.now_ns() - start);
        held_bytes += grant.len;
        held.push_back(grant);
    }
    let last = requests.last().map_or(0, |r| r.at_us - first);
    let elapsed_ns = thread.now_ns() - begin;
    outcome.late.record_ns(elapsed_ns.saturating_sub(last * 1000));
    outcome.rate_per_s = count as f64 * 1e9 / elapsed_ns.max(1) as f64;
    for grant in held {
        thread.wait(pool.free(grant))?;
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_complete_and_in_order() {
        let requests: usize = TRACES.iter().map(|t| t.requests().len()).sum();
        assert_eq!(requests, 68_686);
        for trace in &TRACES {
            let requests = trace.requests();
            assert!(requests.is_sorted_by_key(|r| r.at_us), "{}", trace.name);
            assert_eq!(trace.orders().iter().sum::<u64>(), requests.len() as u64);
        }
        // As the paper states: tcmalloc requests 2 MiB, jemalloc and ptmalloc mostly 4 KiB.
        let orders = |name| TRACES.iter().find(|t| t.name == name).expect("a trace").orders();
        assert_eq!(orders("tcg.larson")[9], orders("tcg.larson").iter().sum::<u64>());
        for name in ["je.larson", "sys.larson"] {
            assert!(orders(name).iter().skip(1).all(|n| *n < orders(name)[0]), "{name}");
        }
    }

    #[test]
    fn invalid_line_is_not_a_request() {
        assert_eq!(request("12 3"), Some(Request { at_us: 12, order: 3 }));
        assert_eq!((request("12"), request("12 10"), request("x 1")), (None, None, None));
    }
}

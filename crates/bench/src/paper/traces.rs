//! Traces of allocations of mixed sizes, and how they are replayed (FineMem §6.3, figures 13 and 14).
//!
//! The traces are those that were published with FineMem: what four allocators asked of the operating system under
//! programs of mimalloc-bench; `crates/bench/traces` has them, with their licence. They record allocations only, so
//! who replays them needs a rule for frees. Ours: a thread holds [`HELD_BYTES`] at most, and frees its oldest
//! block until the next one fits.
//!
//! Each thread replays requests that follow each other, from a place in the trace that the seed picks for it (the paper has
//! collected a trace for each node), none of them before its time.

use std::collections::VecDeque;
use std::io::Read;
use std::sync::OnceLock;

use flate2::read::GzDecoder;

use super::churn::donated;
use super::load::{Dice, Outcome, Thread};

/// Bytes that a thread holds at most: two of the largest blocks.
pub const HELD_BYTES: u64 = 4 << 20;
/// How many times as much is donated as the churn of one size has.
const SPARE: u64 = 3;
/// Orders of blocks: 4 KiB to 2 MiB.
pub const ORDERS: usize = 10;
const CHUNK_BYTES: u64 = 4096;

/// A trace.
#[derive(Debug)]
pub struct Trace {
    /// `ALLOCATOR.PROGRAM`.
    pub name: &'static str,
    packed: &'static [u8],
    read: OnceLock<Vec<Request>>,
}

/// An allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// When, since the program started.
    pub at_us: u64,
    /// Of 4 KiB shifted by so much.
    pub order: u32,
}

macro_rules! traces {
    ($($name:literal),* $(,)?) => {
        /// All of them: jemalloc, mimalloc, ptmalloc, tcmalloc under programs that the paper names.
        pub static TRACES: [Trace; [$($name),*].len()] = [$(Trace {
            name: $name,
            packed: include_bytes!(concat!("../../traces/", $name, ".txt.gz")),
            read: OnceLock::new(),
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
    /// Its requests, in order.
    pub fn requests(&self) -> &[Request] {
        self.read.get_or_init(|| {
            let mut text = String::new();
            let unpacked = GzDecoder::new(self.packed).read_to_string(&mut text);
            unpacked.expect("a trace that is built in is whole");
            text.lines().map(|line| request(line).expect("a line of two numbers")).collect()
        })
    }

    /// How many requests there are of each order.
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

/// Requests that a thread replays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Replay {
    /// The trace.
    pub trace: &'static Trace,
    /// How many of its requests each thread makes.
    pub requests: u32,
}

impl Replay {
    /// Bytes that a memory node donates for so many threads: several times what they hold, since a block of 2 MiB needs a
    /// whole section, and where all sizes are mixed few are empty in a pool that is nearly full.
    pub fn donated(&self, threads: u32) -> u64 {
        donated(SPARE * u64::from(threads) * HELD_BYTES)
    }
}

/// One thread's part.
///
/// # Errors
/// As the pool's operations.
pub(super) fn run<T: Thread>(
    thread: &T,
    replay: &Replay,
    dice: &mut Dice,
) -> Result<Outcome, pool::Error> {
    let (pool, all) = (thread.pool(), replay.trace.requests());
    let count = (replay.requests as usize).min(all.len());
    let from = dice.below((all.len() - count + 1) as u64) as usize;
    let some = &all[from..from + count];
    let mut outcome = Outcome::default();
    let (mut held, mut held_bytes) = (VecDeque::new(), 0);
    thread.wait(thread.member().meet());
    let begin = thread.now_ns();
    let first = some.first().map_or(0, |r| r.at_us);
    for request in some {
        let due = begin + (request.at_us - first) * 1000;
        let early = due.saturating_sub(thread.now_ns());
        if early > 0 {
            thread.pause_ns(early);
        }
        let bytes = CHUNK_BYTES << request.order;
        while held_bytes + bytes > HELD_BYTES {
            let Some(oldest) = held.pop_front() else { break };
            let oldest: pool::scheme::Grant = oldest;
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
    let last = some.last().map_or(0, |r| r.at_us - first);
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
    fn the_traces_are_whole_and_in_order() {
        let requests: usize = TRACES.iter().map(|t| t.requests().len()).sum();
        assert_eq!(requests, 68_686);
        for trace in &TRACES {
            let all = trace.requests();
            assert!(all.is_sorted_by_key(|r| r.at_us), "{}", trace.name);
            assert_eq!(trace.orders().iter().sum::<u64>(), all.len() as u64);
        }
        // What the paper says of them: tcmalloc asks for 2 MiB, jemalloc and ptmalloc mostly for 4 KiB.
        let of = |name| TRACES.iter().find(|t| t.name == name).expect("it is there").orders();
        assert_eq!(of("tcg.larson")[9], of("tcg.larson").iter().sum::<u64>());
        for name in ["je.larson", "sys.larson"] {
            assert!(of(name).iter().skip(1).all(|n| *n < of(name)[0]), "{name}");
        }
    }

    #[test]
    fn a_line_that_is_no_request_is_seen() {
        assert_eq!(request("12 3"), Some(Request { at_us: 12, order: 3 }));
        assert_eq!((request("12"), request("12 10"), request("x 1")), (None, None, None));
    }
}

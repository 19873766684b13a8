//! Simulation of the pager: its real logic under a model of the kernel and of the transport. A seed
//! determines the program, the sizes, and the order of all events.
//!
//! ```text
//!   program's threads      handlers   worker   device   children     NIC
//!          |                  |         |        |         |          |
//!          v                  v         v        |         v          v
//!   +-------------+       +-------------------+  |   +--------------------+
//!   | model of    | <---> |  pages::Pages     | <--> | model of the       |
//!   | the kernel  |       |  (product code)   |  |   | transport          |
//!   +-------------+       +-------------------+  |   +--------------------+
//!          |                                     |
//!          +------------> oracle <---------------+
//! ```
//!
//! - [`fiber`]: threads, of which one runs at a time. Each is suspended wherever another thread
//!   could interfere: before each lock, each change of the page table, each page that the kernel
//!   moves, and while it waits.
//! - [`crate::memory::model`]: the kernel. It asserts the contract of [`crate::memory::Memory`].
//! - [`transport`]: chunks. It asserts that no slot is overwritten or freed while a transfer of it
//!   is in flight.
//! - [`liar`]: a memory node that returns other bytes than were written.
//! - [`oracle`]: the expected content of each page.
//! - [`world`]: a process, and the checks after each step and at the end.
//! - [`rival`]: another process of the run, and changes of the bound that both share.
//! - [`observer`]: what a memory node learns from the transfers, by the classifiers of [`learner`].
//! - [`kinds`]: programs and sizes. [`explore`]: all orders of a small world.
//!
//! `GRANARY_PAGER_SEEDS=FROM..TO` sets the seeds. A failed seed is run again with a trace.

mod explore;
pub(crate) mod fiber;
mod kinds;
pub(crate) mod learner;
mod liar;
mod observer;
mod oracle;
mod pattern;
mod program;
pub(crate) mod random;
mod rival;
mod threads;
mod transport;
mod world;

use std::ops::Range;

use crate::memory::model::Odds;
use crate::policy::counted::Calls;
use fiber::{Choice, Schedule};
use kinds::Kind;
use random::Random;
use world::Summary;

/// A random order. Each seed prefers some fibers, and changes between them more or less often.
pub(crate) struct RandomOrder {
    random: Random,
    weights: Vec<u32>,
    /// Average number of steps of a fiber before another fiber runs.
    stay: u32,
}

impl RandomOrder {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed, 20);
        let weights = (0..32).map(|_| random.pick(&[1, 4, 4, 16])).collect();
        let stay = random.pick(&[1, 2, 8, 40]);
        Self { random, weights, stay }
    }
}

impl Schedule for RandomOrder {
    fn choose(&mut self, choice: &Choice<'_>) -> usize {
        if let Some(last) = choice.last
            && !self.random.once_in(self.stay)
        {
            return last;
        }
        let weight = |fiber: usize| self.weights[fiber % self.weights.len()];
        let sum: u32 = choice.runnable.iter().map(|&fiber| weight(fiber)).sum();
        let mut left = self.random.below(sum);
        for &fiber in choice.runnable {
            match left.checked_sub(weight(fiber)) {
                Some(rest) => left = rest,
                None => return fiber,
            }
        }
        unreachable!("the weights' sum is {sum}")
    }
}

fn run_seed(kind: Kind, seed: u64) -> Result<Summary, String> {
    world::run(&kinds::setup(kind, seed), seed, &mut RandomOrder::new(seed))
}

/// Returns the seeds to run.
fn seeds() -> Range<u64> {
    if let Ok(range) = std::env::var("GRANARY_PAGER_SEEDS") {
        let ends = range
            .split_once("..")
            .and_then(|(from, to)| Some(from.parse::<u64>().ok()?..to.parse::<u64>().ok()?));
        return ends.unwrap_or_else(|| panic!("GRANARY_PAGER_SEEDS={range}: expected FROM..TO"));
    }
    let is_full = std::env::var_os("GRANARY_TEST_FULL").is_some_and(|value| value == "1");
    0..if is_full { 12_000 } else { 1_000 }
}

/// Runs the seeds of a kind.
fn run_kind(kind: Kind) {
    let mut sum = Summary::default();
    let seeds = seeds();
    for seed in seeds.clone() {
        match run_seed(kind, seed) {
            Ok(summary) => sum.add(&summary),
            Err(_) => fail(kind, seed),
        }
    }
    if seeds.end - seeds.start >= 1_000 {
        let Summary { steps, faults, taken_out, written, read, read_ahead, .. } = sum;
        let least = [steps / 1_000, faults, taken_out, written, read, read_ahead];
        assert!(least.iter().all(|count| *count >= 100), "the seeds test little: {sum:?}");
    }
}

/// Runs a failed seed again, with a trace.
fn fail(kind: Kind, seed: u64) -> ! {
    fiber::set_trace(true);
    let error = run_seed(kind, seed).err();
    let trace = fiber::take_trace().join("\n");
    fiber::set_trace(false);
    let error = error.unwrap_or_else(|| "the second run of the seed is not wrong".into());
    let setup = kinds::setup(kind, seed);
    panic!("{trace}\n{setup:?}\nwrong: {kind:?} seed {seed}: {error}");
}

macro_rules! kinds {
    ($($test:ident: $kind:ident,)*) => {
        $(
            #[test]
            fn $test() {
                run_kind(Kind::$kind);
            }
        )*
    };
}

kinds! {
    sequential_pages_keep_their_content: Sequential,
    random_pages_keep_their_content: Random,
    working_sets_keep_their_content: WorkingSets,
    strides_keep_their_content: Strides,
    pages_that_threads_share_keep_their_content: SamePages,
    dropped_pages_read_as_zeros: Drops,
    pages_keep_their_content_with_a_full_pool: FullPool,
    children_see_their_parent_at_the_fork: Forks,
    pages_keep_their_content_while_the_limit_changes: Resizes,
    pages_keep_their_content_with_a_shared_bound: Leases,
    moved_pages_keep_their_content: Moves,
    devices_write_to_pinned_pages: Pins,
    copied_pages_keep_their_content: Copies,
    pages_keep_their_content_with_a_small_shelf: SmallShelf,
    inherited_pages_keep_their_content: Inherits,
    compacted_pages_keep_their_content: Compacts,
    pages_keep_their_content_in_all_events_together: All,
}

#[test]
fn policy_is_told_where_each_mapped_page_was() {
    let mut sum = Summary::default();
    for seed in 0..200 {
        let setup = kinds::setup(Kind::Random, seed);
        // Each page that is read is mapped at once.
        let (handlers, odds) = (1, Odds::default());
        let setup =
            world::Setup { handlers, odds, inline: true, alone: true, compacts: false, ..setup };
        let done = world::run(&setup, seed, &mut RandomOrder::new(seed)).unwrap();
        assert_eq!(done.calls.refetched, done.read + done.words, "seed {seed}: {done:?}");
        assert_eq!(done.calls.left_behind, 0, "seed {seed}: no stream is followed");
        sum.add(&done);
    }
    // A page that was taken out was still on the shelf at some faults.
    let Calls { arrived, refetched, recent, restored, .. } = sum.calls;
    assert!(arrived.min(restored).min(recent).min(refetched - recent) >= 1_000, "{sum:?}");
    assert_eq!(restored, sum.restored, "{sum:?}");
}

#[test]
fn policy_is_told_what_streams_leave_behind() {
    let mut sum = Summary::default();
    (0..200).for_each(|seed| sum.add(&run_seed(Kind::Sequential, seed).unwrap()));
    assert!(sum.calls.left_behind >= 1_000, "{sum:?}");
}

/// Compaction looks at a page without its lock, while another thread frees the page's slot and with
/// it the chunk.
#[test]
fn compaction_meets_slots_of_freed_chunks() {
    for (kind, seed) in [(Kind::Leases, 8152), (Kind::Inherits, 7635)] {
        run_seed(kind, seed).unwrap();
    }
}

/// With one empty position, victims without a position came back. The policy took them for pages
/// that cannot leave, and named the page of the last fault instead, fault after fault.
#[test]
fn victims_are_no_more_than_the_empty_positions() {
    run_seed(Kind::SmallShelf, 11_030).unwrap();
}

#[test]
fn a_seed_runs_the_same_way_twice() {
    for seed in 0..20 {
        fiber::set_trace(true);
        let first = run_seed(Kind::All, seed).map(|summary| (summary, fiber::take_trace()));
        let second = run_seed(Kind::All, seed).map(|summary| (summary, fiber::take_trace()));
        assert_eq!(first, second, "seed {seed}");
    }
    fiber::set_trace(false);
}

#[test]
fn pages_are_compacted_while_the_program_runs() {
    let mut sum = Summary::default();
    (0..200).for_each(|seed| sum.add(&run_seed(Kind::Compacts, seed).unwrap()));
    assert!(sum.compacted >= 500, "{sum:?}");
}

/// Runs 50 programs that wait in vain for pages, or for the kernel's moves. Returns the number of
/// programs that were ended for the reason `why`.
fn ended_for(kind: Kind, refuses_moves: bool, why: &str) -> usize {
    let run = |seed: &u64| {
        let setup = kinds::setup(kind, *seed);
        let (stuck_s, compacts) = (Some(1), false);
        let setup = world::Setup { stuck_s, refuses_moves, compacts, ..setup };
        let error = world::run(&setup, *seed, &mut RandomOrder::new(*seed)).err();
        // A program that needs neither ends, and may leave the thread that keeps pages behind.
        let is_end =
            |error: &String| error.contains("status 118") || error.contains("no thread can go on");
        assert!(error.as_ref().is_none_or(is_end), "seed {seed}: {error:?}");
        error.is_some_and(|error| error.contains(why))
    };
    (0..50).filter(run).count()
}

#[test]
fn fault_that_finds_no_page_ends_the_process_after_the_limit() {
    let ended = ended_for(Kind::Random, false, "other threads have kept all pages");
    assert!(ended >= 25, "{ended} of 50");
}

#[test]
fn mremap_that_the_kernel_refuses_ends_the_process_after_the_limit() {
    let why = "the kernel has refused to move a page for mremap for 1 s";
    let ended = ended_for(Kind::Moves, true, why);
    assert!(ended >= 25, "{ended} of 50");
}

//! All orders of a small world, up to a number of preemptions.
//!
//! A run is repeated from its start, each time with another order. A thread goes on until it waits,
//! except at the *preemptions*, where another thread runs. Most errors of concurrent programs need
//! one or two preemptions. When a thread waits, the next thread is a choice too, but this choice is
//! not a preemption.

use super::fiber::{self, Choice, Schedule};
use super::program::{Order, Program};
use super::world::{self, Setup};
use crate::config::{Hide, Paths};
use crate::memory::model::Odds;
use crate::pages::Sizes;
use crate::policy::Name;

/// A decision of an order: one thread among those that could run.
#[derive(Clone, Copy, Debug)]
struct Decision {
    taken: u32,
    /// Number of threads that could run.
    choices: u32,
    /// The first choice continues a thread, so the others are preemptions.
    continues: bool,
}

/// An order that follows decisions, and then always takes the first choice.
struct Followed {
    decisions: Vec<Decision>,
    at: usize,
    /// Decisions after this one are not varied.
    depth: usize,
    /// The thread that ran last.
    last: usize,
}

impl Schedule for Followed {
    fn choose(&mut self, choice: &Choice<'_>) -> usize {
        // The first choice: the same thread, or the next one in the order of their numbers.
        let after = choice.runnable.iter().copied().find(|&fiber| fiber > self.last);
        let first = choice.last.or(after).unwrap_or(choice.runnable[0]);
        self.last = self.pick(choice, first);
        self.last
    }
}

impl Followed {
    fn pick(&mut self, choice: &Choice<'_>, first: usize) -> usize {
        if choice.runnable.len() == 1 || self.at >= self.depth {
            return first;
        }
        let others = choice.runnable.iter().copied().filter(|&fiber| fiber != first);
        if self.at == self.decisions.len() {
            self.decisions.push(Decision {
                taken: 0,
                choices: choice.runnable.len() as u32,
                continues: choice.last.is_some(),
            });
        }
        let decision = self.decisions[self.at];
        assert_eq!(decision.choices, choice.runnable.len() as u32, "the run is not the same");
        self.at += 1;
        match decision.taken {
            0 => first,
            taken => others.clone().nth(taken as usize - 1).expect("fewer than the choices"),
        }
    }
}

/// Advances the last decision that has a further choice, and drops the decisions behind it. Returns
/// false if no decision has a further choice.
fn advance(decisions: &mut Vec<Decision>, preemptions: usize) -> bool {
    while let Some(mut last) = decisions.pop() {
        let is_preemption = |d: &Decision| d.continues && d.taken > 0;
        let used = decisions.iter().filter(|d| is_preemption(d)).count();
        let may = last.taken + 1 < last.choices && (!last.continues || used < preemptions);
        if may {
            last.taken += 1;
            decisions.push(last);
            return true;
        }
    }
    false
}

/// Runs a world in all orders with at most `preemptions` preemptions among the first `depth`
/// decisions. Stops after `max` orders. Returns the number of orders.
fn explore(setup: &Setup, preemptions: usize, depth: usize, max: u32) -> u32 {
    let mut decisions = Vec::new();
    for run in 1..=max {
        let mut order = Followed { decisions, at: 0, depth, last: 0 };
        if let Err(error) = world::run(setup, 0, &mut order) {
            fiber::set_trace(true);
            let mut again = Followed { at: 0, last: 0, ..order };
            let second = world::run(setup, 0, &mut again).err();
            let trace = fiber::take_trace().join("\n");
            fiber::set_trace(false);
            assert_eq!(second.as_ref(), Some(&error), "the run is the same");
            panic!("{trace}\nwrong: order {run} of {setup:?}: {error}");
        }
        decisions = order.decisions;
        if !advance(&mut decisions, preemptions) {
            return run;
        }
    }
    max
}

/// Two threads use three pages, of which two may be present.
fn small() -> Setup {
    let sizes =
        Sizes { limit: 2, window: 1, windows: 1, writes: 1, positions: 64, stock: 1, keep: 0 };
    let program = |step, drops| Program {
        order: Order::Stride(step),
        operations: 3,
        writes: 1,
        drops,
        ..Program::default()
    };
    Setup {
        pages: 3,
        sizes,
        programs: vec![program(1, 0), program(-1, 3)],
        handlers: 1,
        inline: false,
        paths: Paths::Two,
        odds: Odds::default(),
        copied_run: None,
        chunk_pages: 4,
        capacity: u32::MAX,
        resizes: 0,
        shared_units: None,
        pins: 0,
        inherits: false,
        policy: Name::default(),
        advised: true,
        alone: false,
        compacts: false,
        sealed: false,
        lie: None,
        stuck_s: None,
        refuses_moves: false,
        hide: Hide::Off,
        max_steps: 20_000,
    }
}

#[test]
fn every_order_of_a_small_world_keeps_contents() {
    let is_full = std::env::var_os("GRANARY_TEST_FULL").is_some_and(|value| value == "1");
    let (preemptions, max) = if is_full { (2, 400_000) } else { (1, 20_000) };
    let worlds = [(false, Paths::Two), (true, Paths::Two), (true, Paths::Linux)];
    for (inline, paths) in worlds {
        let setup = Setup { inline, paths, ..small() };
        let orders = explore(&setup, preemptions, 400, max);
        assert!(orders > 100, "{orders} orders");
        eprintln!("inline {inline}, {}: {orders} orders", paths.name());
    }
}

use std::cell::RefCell;
use std::rc::Rc;

use proptest::prelude::*;

use super::*;
use crate::sim::fiber;
use crate::sim::random::Random;

fn owner(pid: u32) -> Owner {
    Owner::new(pid, 77)
}

fn alive(_: Owner) -> bool {
    true
}

#[test]
fn slot_words_round_trip() {
    for (pid, start, units) in [(1, 0, 0), ((1 << 22) - 1, u64::MAX, UNITS_MAX), (4711, 99, 5)] {
        for is_changing in [false, true] {
            let held = Held { owner: Owner::new(pid, start), units, is_changing };
            assert_eq!(Held::decode(held.encode()), Some(held));
        }
    }
    assert_eq!(Held::decode(0), None);
}

#[test]
fn a_damaged_total_allows_no_lease() {
    let ledger = Ledger::in_memory(4, 16 * UNIT_PAGES);
    assert_eq!(ledger.total(), Some(16));
    let slot = (ledger.claim(owner(1)).unwrap().0, owner(1));
    for damaged in [0, u64::MAX, 5 << 32 | 5, u64::from(!(1u32 << 31)) << 32 | 1 << 31] {
        ledger.words[TOTAL].store(damaged, Ordering::Release);
        assert_eq!(ledger.total(), None);
        assert_eq!(ledger.take(slot, 0, 4, false), Ok(0));
        assert_eq!(ledger.view(slot.0, 0), None);
    }
}

#[test]
fn damaged_words_cause_no_panic_and_no_growth() {
    let ledger = Ledger::in_memory(4, 16 * UNIT_PAGES);
    let slot = (ledger.claim(owner(1)).unwrap().0, owner(1));
    assert_eq!(ledger.take(slot, 0, 4, false), Ok(4));
    for index in 1..ledger.words.len() {
        for damaged in [0, 1, u64::MAX, 1 << 31, 1 << 63, 0xffff_0000_ffff] {
            ledger.words[index].store(damaged, Ordering::Release);
            let got = ledger.take(slot, 4, 100, false).unwrap_or(0);
            assert!(got <= 16, "word {index} is {damaged:#x}: {got} units");
            let _ = ledger.release(slot, 4 + got, got);
            let _ = (ledger.view(slot.0, 4), ledger.members().count());
            ledger.audit(alive);
            ledger.wake_all();
            for word in &ledger.words[1..] {
                word.store(0, Ordering::Release);
            }
            ledger.set_total(16 * UNIT_PAGES);
            let claimed = ledger.claim(owner(1)).unwrap();
            assert_eq!(claimed, (slot.0, 0));
            assert_eq!(ledger.take(slot, 0, 4, false), Ok(4));
        }
    }
}

#[test]
fn a_program_keeps_the_units_of_its_process_across_exec() {
    let ledger = Ledger::in_memory(4, 16 * UNIT_PAGES);
    let slot = (ledger.claim(owner(1)).unwrap().0, owner(1));
    assert_eq!(ledger.take(slot, 0, 6, false), Ok(6));
    assert_eq!(ledger.claim(owner(1)), Some((slot.0, 6)));
    let other = ledger.claim(owner(2)).unwrap();
    assert!(other.0 != slot.0 && other.1 == 0);
}

#[test]
fn units_of_ended_processes_are_counted_out() {
    let ledger = Ledger::in_memory(2, 16 * UNIT_PAGES);
    for pid in [1, 2] {
        let slot = (ledger.claim(owner(pid)).unwrap().0, owner(pid));
        assert_eq!(ledger.take(slot, 0, 8, false), Ok(8));
    }
    assert_eq!(ledger.claim(owner(3)), None, "no slot is free");
    assert!(ledger.audit(|owner| owner.pid() != 1));
    assert_eq!((ledger.given(), ledger.peak()), (8, 16));
    let slot = (ledger.claim(owner(3)).unwrap().0, owner(3));
    assert_eq!(ledger.take(slot, 0, 20, false), Ok(8));
    assert_eq!(ledger.take(slot, 8, 4, true), Ok(4), "guaranteed units may exceed the total");
    assert_eq!(ledger.leave(slot, 12), Ok(()));
    assert_eq!(ledger.given(), 8);
}

#[test]
fn an_audit_fails_while_a_process_changes_its_lease() {
    let ledger = Ledger::in_memory(2, 16 * UNIT_PAGES);
    let index = ledger.claim(owner(1)).unwrap().0;
    let held = Held { owner: owner(1), units: 3, is_changing: true };
    ledger.words[HEADER + index].store(held.encode(), Ordering::Release);
    assert!(!ledger.audit(alive));
    assert!(ledger.audit(|_| false), "a killed process changes nothing any more");
    assert_eq!(ledger.members().count(), 0);
}

#[test]
fn this_process_is_alive_and_an_ended_one_is_not() {
    let own = Owner::current();
    assert!(own.is_alive() && own.pid() == std::process::id());
    let other = Owner { start: (own.start + 1) & ((1 << START_BITS) - 1), ..own };
    assert!(!other.is_alive(), "a later process with the same id");
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let ended = Owner::new(child.id(), 0);
    child.wait().unwrap();
    assert!(!ended.is_alive());
}

#[test]
fn a_process_without_threads_is_over_when_it_is_a_zombie() {
    let line = |state: &str, threads: u32| {
        let zeros = "0 ".repeat(16);
        format!("7 (a) b) {state} {zeros}{threads} 0 4321 5 6")
    };
    let stat = |state, threads| {
        let stat = Stat::parse(&line(state, threads)).unwrap();
        assert_eq!(stat.start, 4321);
        stat.is_over
    };
    assert!(!stat("S", 1) && stat("Z", 1) && !stat("Z", 3));
    assert!(Stat::parse("7 (x) S 1").is_none());
}

#[test]
fn a_process_with_more_than_its_share_gives_units_to_one_with_less() {
    let view = View { total: 64, given: 64, own: 60, processes: 2, neediest: Some(4) };
    assert_eq!(surplus(&view, 0, false), 7, "a quarter of what exceeds the equal share");
    assert_eq!(surplus(&view, 20, false), 20, "units without a page at once");
    let near = View { own: 34, neediest: Some(30), ..view };
    assert_eq!(surplus(&near, 0, false), 2);
    let equal = View { own: 32, neediest: Some(32), ..view };
    assert_eq!(surplus(&equal, 0, false), 0);
    let satisfied = View { neediest: None, ..view };
    assert_eq!((surplus(&satisfied, 9, false), surplus(&satisfied, 9, true)), (0, 8));
    let idle = View { own: 20, neediest: Some(44), ..view };
    assert_eq!((surplus(&idle, 0, false), surplus(&idle, 0, true)), (0, 2));
    let least = View { own: 4, neediest: Some(60), ..view };
    assert_eq!(surplus(&least, 3, true), 0, "the guaranteed units stay");
}

proptest! {
    /// After the total has changed, one review of each process brings the sum of the leases to the
    /// total, or to the guaranteed units.
    #[test]
    fn shares_of_an_excess_add_up(
        own in prop::collection::vec(GUARANTEED_UNITS..5_000, 1..40),
        total in 0u32..40_000,
    ) {
        let given: u32 = own.iter().sum();
        let processes = own.len() as u32;
        let view = |own| View { total, given, own, processes, neediest: None };
        let left: u32 = own.iter().map(|&own| own - surplus(&view(own), 0, false)).sum();
        prop_assert!(left <= total.max(processes * GUARANTEED_UNITS).min(given));
        let least = total.min(given).saturating_sub(processes);
        prop_assert!(left >= least, "{left} units are left of {given}, the total is {total}");
    }

    #[test]
    fn leases_never_exceed_the_total(
        steps in prop::collection::vec((0u32..4, 0u32..30, 0u8..8), 1..200),
    ) {
        let ledger = Ledger::in_memory(4, 32 * UNIT_PAGES);
        let slot = |index: u32| (index as usize, owner(index + 1));
        (0..4).for_each(|index| {
            ledger.claim(owner(index + 1)).unwrap();
        });
        let mut own = [0; 4];
        let mut total = 32;
        for (index, units, step) in steps {
            let at = index as usize;
            match step {
                0..=3 => {
                    let before: u32 = own.iter().sum();
                    let got = ledger.take(slot(index), own[at], units, false).unwrap();
                    prop_assert_eq!(got, units.min(total.max(before) - before));
                    own[at] += got;
                }
                4 | 5 => {
                    let units = units.min(own[at]);
                    ledger.release(slot(index), own[at], units).unwrap();
                    own[at] -= units;
                }
                6 => prop_assert!(ledger.audit(alive)),
                _ => {
                    total = units;
                    ledger.set_total(total * UNIT_PAGES);
                }
            }
            prop_assert_eq!(ledger.given(), own.iter().sum::<u32>());
        }
    }
}

/// The units of the simulated processes, by their own counting.
struct Truth {
    /// Units of each process.
    own: RefCell<Vec<u32>>,
    /// The fiber that runs each process; `None` before its start.
    fibers: RefCell<Vec<Option<usize>>>,
}

impl Truth {
    fn is_alive(&self, index: usize) -> bool {
        self.fibers.borrow()[index].is_none_or(|fiber| !fiber::is_killed(fiber))
    }

    fn sum(&self) -> u32 {
        let own = self.own.borrow();
        own.iter().enumerate().filter(|(index, _)| self.is_alive(*index)).map(|(_, own)| own).sum()
    }
}

const PROCESSES: usize = 4;
const TOTAL_UNITS: u32 = 10;

fn process(ledger: Ledger, truth: &Truth, index: usize, mut random: Random) {
    truth.fibers.borrow_mut()[index] = fiber::current();
    if random.once_in(2) {
        fiber::kill_after(random.within(1..=60));
    }
    let owner = owner(index as u32 + 1);
    let is_alive = |owner: Owner| truth.is_alive(owner.pid() as usize - 1);
    let Some((slot, _)) = ledger.claim(owner) else { return };
    let slot = (slot, owner);
    let own = || truth.own.borrow()[index];
    for _ in 0..random.within(1..=12) {
        match random.below(5) {
            0 | 1 => {
                let got = ledger.take(slot, own(), random.within(1..=6), false);
                truth.own.borrow_mut()[index] += got.expect("the slot is this process's");
            }
            2 | 3 => {
                let before = own();
                let units = random.within(0..=before);
                // No page is in these units any more.
                truth.own.borrow_mut()[index] -= units;
                ledger.release(slot, before, units).expect("the slot is this process's");
            }
            _ => {
                ledger.audit(is_alive);
            }
        }
    }
    if random.once_in(2) {
        let before = std::mem::take(&mut truth.own.borrow_mut()[index]);
        ledger.leave(slot, before).expect("the slot is this process's");
    }
}

/// Processes lease, give back, audit, and are killed at any point of it, in random orders.
#[test]
fn killed_processes_neither_exceed_the_total_nor_keep_units() {
    let mut killed = 0;
    for seed in 0..4_000 {
        let ledger = Ledger::in_memory(PROCESSES, TOTAL_UNITS * UNIT_PAGES);
        let truth = Rc::new(Truth {
            own: RefCell::new(vec![0; PROCESSES]),
            fibers: RefCell::new(vec![None; PROCESSES]),
        });
        for index in 0..PROCESSES {
            let (truth, random) = (truth.clone(), Random::new(seed, index as u64));
            fiber::spawn(format!("process {index}"), move || {
                process(ledger, &truth, index, random);
            });
        }
        let mut order = crate::sim::RandomOrder::new(seed);
        let check = || {
            let sum = truth.sum();
            assert!(sum <= TOTAL_UNITS, "{sum} units are leased");
        };
        let steps = fiber::run(&mut order, || false, check, 10_000);
        steps.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert!(ledger.audit(|owner| truth.is_alive(owner.pid() as usize - 1)));
        assert_eq!(ledger.given(), truth.sum(), "seed {seed}");
        assert!(ledger.peak() <= TOTAL_UNITS);
        killed += (0..PROCESSES).filter(|index| !truth.is_alive(*index)).count();
    }
    assert!(killed > 1_000, "{killed} processes were killed");
}

//! Random programs and random callers: limits and accounting hold under any order of events.

use proptest::prelude::*;

use super::machine::{Machine, Place};
use super::*;

const PAGES: u32 = 3000;

#[derive(Clone, Debug)]
enum Step {
    /// Accesses `count` pages from `start` at a stride.
    Walk {
        thread: u32,
        start: u32,
        count: u32,
        stride: i32,
    },
    /// Accesses pages of several walks by turns.
    Interleave {
        thread: u32,
        starts: [u32; 3],
        count: u32,
    },
    /// Lets the oldest or all windows arrive.
    Arrive {
        all: bool,
    },
    /// Reclaims pages that were read ahead.
    Reclaim(u32),
    /// Changes pages without a call of the prefetcher.
    Place {
        start: u32,
        count: u32,
        kind: u8,
    },
    Latency(u64),
    Blanks(u32),
    Advice(Advice),
    Bounds(Range<u32>),
}

fn step() -> impl Strategy<Value = Step> {
    let walk = (0u32..20, 0..PAGES, 1u32..400, prop_oneof![Just(1), Just(-1), -300i32..300]);
    let walk =
        walk.prop_map(|(thread, start, count, stride)| Step::Walk { thread, start, count, stride });
    let starts = [0..PAGES, 0..PAGES, 0..PAGES];
    let interleave = (0u32..3, starts, 1u32..300)
        .prop_map(|(thread, starts, count)| Step::Interleave { thread, starts, count });
    let advice = prop_oneof![Just(Advice::Normal), Just(Advice::Sequential), Just(Advice::Random)];
    let bounds = (0..PAGES, 0..PAGES).prop_map(|(a, b)| Step::Bounds(a.min(b)..a.max(b) + 1));
    prop_oneof![
        6 => walk,
        2 => interleave,
        2 => any::<bool>().prop_map(|all| Step::Arrive { all }),
        1 => (0u32..200).prop_map(Step::Reclaim),
        1 => (0..PAGES, 1u32..500, 0u8..4)
            .prop_map(|(start, count, kind)| Step::Place { start, count, kind }),
        1 => prop_oneof![Just(0u64), 0u64..500, Just(u64::MAX)].prop_map(Step::Latency),
        1 => (0u32..65).prop_map(Step::Blanks),
        1 => advice.prop_map(Step::Advice),
        1 => bounds,
    ]
}

fn perform(machine: &mut Machine, step: Step) {
    match step {
        Step::Walk { thread, start, count, stride } => {
            let pages = (0..i64::from(count)).map(|n| i64::from(start) + n * i64::from(stride));
            let bounds = machine.bounds.clone();
            let pages = pages.filter(|page| (0..i64::from(PAGES)).contains(page));
            let pages = pages.map(|page| page as u32).filter(|page| bounds.contains(page));
            machine.access_all(thread, pages);
        }
        Step::Interleave { thread, starts, count } => {
            let pages = (0..count).flat_map(|n| starts.map(|start| start + n));
            let bounds = machine.bounds.clone();
            machine.access_all(thread, pages.filter(|page| bounds.contains(page)));
        }
        Step::Arrive { all } => {
            let oldest = machine.flights.first().map(|flight| flight.id);
            machine.deliver(|flight, _| all || Some(flight.id) == oldest);
        }
        Step::Reclaim(pages) => (0..pages).for_each(|_| machine.reclaim_oldest()),
        Step::Place { start, count, kind } => {
            let kinds = [Place::Absent, Place::Remote, Place::Evicted, Place::Resident];
            let end = (start + count).min(PAGES);
            for place in &mut machine.places[start as usize..end as usize] {
                if !matches!(place, Place::Fetching(_) | Place::Ready(_)) {
                    *place = kinds[usize::from(kind)];
                }
            }
        }
        Step::Latency(latency) => machine.latency = latency,
        Step::Blanks(blanks) => machine.blanks = blanks,
        Step::Advice(advice) => machine.advice = advice,
        Step::Bounds(bounds) => machine.bounds = bounds,
    }
}

proptest! {
    #[test]
    fn any_order_of_events_keeps_limits_and_totals(
        steps in prop::collection::vec(step(), 1..60),
        window_pages in 0u32..70,
        strides: bool,
        clusters: bool,
        threads in 0u32..6,
        local in 1usize..2000,
        shelf in 0usize..600,
        base in prop_oneof![Just(0), Just(u32::MAX - PAGES), Just(77_777)],
    ) {
        let settings = Settings { window_pages, strides, threads, clusters };
        let mut machine = Machine::new(settings, PAGES);
        (machine.local, machine.shelf, machine.base) = (local, shelf, base);
        for step in steps {
            perform(&mut machine, step);
            machine.check();
        }
        machine.deliver(|_, _| true);
        machine.reclaim_all();
        machine.check();
        // Each page that was posted has met one fate in the model.
        prop_assert_eq!(machine.posted, machine.mapped + machine.reclaimed);
    }

    /// If the caller maps whole runs, and windows do not overlap, the fate of each page is known.
    #[test]
    fn used_pages_were_mapped_and_reclaimed_pages_are_wasted(
        walks in prop::collection::vec((300u32..700, 1u32..400, any::<[bool; 2]>()), 1..40),
    ) {
        const AREA: u32 = 1000;
        let mut machine = Machine::new(Settings::default(), AREA * walks.len() as u32);
        (machine.local, machine.shelf, machine.latency) = (usize::MAX, usize::MAX, 0);
        for (area, (start, count, [is_backward, reclaims])) in (0..).zip(walks) {
            let start = area * AREA + start;
            let pages = start..(start + count).min(area * AREA + 700);
            match is_backward {
                false => machine.access_all(1, pages),
                true => machine.access_all(1, pages.rev()),
            }
            if reclaims {
                machine.deliver(|_, _| true);
                machine.reclaim_all();
            }
            machine.check();
            let counters = machine.streams.counters();
            let Machine { mapped, reclaimed, .. } = machine;
            prop_assert!(counters.used <= mapped, "{counters:?}, {mapped} mapped");
            prop_assert!(counters.wasted >= reclaimed, "{counters:?}, {reclaimed} reclaimed");
        }
    }
}

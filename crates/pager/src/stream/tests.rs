//! Access sequences: the number of faults, and the fate of the pages that were read ahead.

use super::machine::{Machine, Place};
use super::*;

const PAGES: u32 = 1 << 16;

fn machine() -> Machine {
    Machine::new(Settings::default(), PAGES)
}

/// A deterministic random number below `limit` (SplitMix64).
fn random(state: &mut u64, limit: u32) -> u32 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((mixed ^ (mixed >> 31)) % u64::from(limit)) as u32
}

/// Checks a sequential pass over `pages` pages: about one fault for each 64 pages.
#[track_caller]
fn assert_sequential(machine: &mut Machine, pages: u32) {
    machine.check();
    let counters = machine.streams.counters();
    let faults = machine.faults as f64 / f64::from(pages);
    assert!(faults < 1.1 / 64.0, "{faults} faults a page: {counters:?}");
    assert!(machine.accuracy() > 0.99, "{counters:?}");
    assert!(counters.coverage().unwrap() > 0.99, "{counters:?}");
}

#[test]
fn sequential_pass_faults_once_per_window() {
    let mut machine = machine();
    machine.access_all(1, 0..PAGES);
    assert_sequential(&mut machine, PAGES);
    let windows: Vec<_> =
        machine.windows.iter().map(|w| (w.first.0 - 1_000_000, w.pages)).collect();
    assert_eq!(windows[..4], [(3, 4), (7, 16), (23, 64), (87, 64)]);
    // The last window reaches the end of the mapping, and no page is left over.
    assert_eq!(machine.streams.counters().outstanding(), 0);
}

#[test]
fn backward_pass_faults_once_per_window() {
    let mut machine = machine();
    machine.access_all(1, (0..PAGES).rev());
    assert_sequential(&mut machine, PAGES);
    assert!(machine.windows.iter().all(|window| window.step == -1));
    assert_eq!(machine.streams.counters().outstanding(), 0);
}

#[test]
fn window_length_follows_the_setting() {
    for window_pages in [1, 3, 10, 64] {
        let mut machine = Machine::new(Settings { window_pages, ..Settings::default() }, PAGES);
        machine.access_all(1, 0..10_000);
        machine.check();
        assert_eq!(machine.windows.iter().map(|w| w.pages).max(), Some(window_pages));
    }
}

#[test]
fn stride_is_read_ahead_only_where_it_is_on() {
    for (stride, strides, is_planned) in [
        (3, true, true),
        (64, true, true),
        (256, true, true),
        (300, true, false),
        (3, false, false),
    ] {
        for is_backward in [false, true] {
            let settings = Settings { strides, ..Settings::default() };
            let mut machine = Machine::new(settings, PAGES);
            let pages: Vec<u32> = (0..PAGES).step_by(stride).collect();
            match is_backward {
                false => machine.access_all(1, pages),
                true => machine.access_all(1, pages.into_iter().rev()),
            }
            machine.check();
            let counters = machine.streams.counters();
            let step = if is_backward { -(stride as i32) } else { stride as i32 };
            assert!(machine.windows.iter().all(|w| w.step == step && w.pages <= 16));
            assert_eq!(!machine.windows.is_empty(), is_planned, "{stride} {strides}");
            if is_planned {
                assert!(machine.accuracy() > 0.99, "{counters:?}");
                assert!(counters.coverage().unwrap() > 0.95, "{stride} {counters:?}");
            }
        }
    }
}

#[test]
fn three_arrays_in_one_thread_are_three_streams() {
    let mut machine = machine();
    let third = PAGES / 3;
    machine.access_all(1, (0..third).flat_map(|at| [at, third + at, 2 * third + at]));
    assert_sequential(&mut machine, PAGES);
}

#[test]
fn threads_have_streams_of_their_own() {
    let mut machine = machine();
    let half = PAGES / 2;
    for at in 0..half {
        machine.access(1, at);
        machine.access(2, PAGES - 1 - at);
    }
    assert_sequential(&mut machine, PAGES);
}

#[test]
fn stream_continues_in_other_threads() {
    for change in [1, 2, 10, 100, 1000] {
        let mut machine = machine();
        for at in 0..PAGES {
            machine.access(at / change % 5, at);
        }
        assert_sequential(&mut machine, PAGES);
    }
}

#[test]
fn random_faults_issue_next_to_nothing() {
    for (pages, threads) in [(1 << 20, 1), (1 << 20, 40), (20_000, 8), (8192, 1), (1024, 1)] {
        let mut machine = Machine::new(Settings::default(), pages);
        machine.local = pages as usize / 4;
        let mut state = u64::from(pages);
        while machine.faults < 50_000 {
            let page = random(&mut state, pages);
            machine.access(random(&mut state, threads), page);
        }
        machine.check();
        let issued = machine.posted as f64 / machine.faults as f64;
        assert!(issued < 0.02, "{issued} pages a fault, {pages} pages, {threads} threads");
    }
}

#[test]
fn random_faults_do_not_displace_a_stream() {
    for pages in [PAGES, 1 << 20] {
        let mut machine = Machine::new(Settings::default(), pages);
        // The stream faults once in 640 faults.
        let mut state = 5;
        for at in 0..PAGES / 2 {
            machine.access(1, at);
            for _ in 0..10 {
                machine.access(1, PAGES / 2 + random(&mut state, pages - PAGES / 2));
            }
        }
        machine.check();
        let counters = machine.streams.counters();
        assert!(machine.accuracy() > 0.95, "{counters:?}");
        assert!(counters.used > u64::from(PAGES / 2 - 300), "{counters:?}");
    }
}

#[test]
fn random_faults_do_not_displace_confident_contexts() {
    let mut machine = Machine::new(Settings::default(), 1 << 20);
    // Short, because all streams reach their windows at the same time.
    machine.latency = 1;
    let mut state = 3;
    for at in 0..3000 {
        machine.access_all(1, (0..16).map(|array| array * 4096 + at));
        if at > 100 && at % 4 == 0 {
            machine.access(1, (1 << 19) + random(&mut state, 1 << 19));
        }
    }
    machine.check();
    let counters = machine.streams.counters();
    assert!(counters.used > 16 * 2900 && machine.accuracy() > 0.95, "{counters:?}");
    assert!(machine.faults < 3000 / 4 + 16 * 3000 / 55, "{} faults", machine.faults);
}

/// Each finished stream leaves a confident context that no fault hits again.
#[test]
fn finished_streams_make_room_for_new_ones() {
    let mut machine = machine();
    // Otherwise waste would end these streams.
    machine.shelf = PAGES as usize;
    machine.access_all(1, (0..PAGES / 2048).flat_map(|array| array * 2048..array * 2048 + 700));
    machine.check();
    let counters = machine.streams.counters();
    let arrays = f64::from(PAGES / 2048);
    assert!(counters.used as f64 / (arrays * 700.0) > 0.9, "{counters:?}");
    assert!((machine.faults as f64) < arrays * 30.0, "{} faults", machine.faults);
}

#[test]
fn stream_skips_resident_blocks() {
    let mut machine = machine();
    machine.local = PAGES as usize;
    for block in (0..PAGES / 64).filter(|block| block % 3 == 2) {
        machine.places[block as usize * 64..][..64].fill(Place::Resident);
    }
    machine.access_all(1, 0..PAGES);
    machine.check();
    assert!(machine.accuracy() > 0.99);
    assert!(machine.faults < u64::from(PAGES / 40), "{} faults", machine.faults);
}

#[test]
fn first_touch_maps_zeros_in_growing_runs() {
    let mut machine = machine();
    machine.places.fill(Place::Absent);
    let runs: Vec<u32> =
        (0..300).filter_map(|page| machine.access(1, page)).map(|plan| plan.map).collect();
    assert_eq!(runs, [1, 1, 4, 16, 64, 64, 64, 64, 64]);
    assert!(machine.windows.is_empty(), "there is nothing to read");
    // Evicted pages are mapped in the same way, and the pages behind them are read ahead.
    machine.places.fill(Place::Evicted);
    let runs: Vec<u32> =
        (1000..1200).filter_map(|page| machine.access(1, page)).map(|plan| plan.map).collect();
    assert_eq!(runs[..5], [1, 1, 4, 16, 64]);
    assert!(!machine.windows.is_empty());
    machine.check();
}

#[test]
fn late_windows_make_more_windows_ahead() {
    let mut machine = machine();
    machine.latency = 150;
    machine.access_all(1, 0..10_000);
    let early = machine.streams.counters().late;
    let ahead = machine.flights.len();
    assert!((2..=AHEAD).contains(&ahead), "{ahead} windows");
    machine.access_all(1, 10_000..20_000);
    let late = machine.streams.counters().late - early;
    assert!(late <= 10_000 / 64 / 16, "{late} of {early} were late at first");
    // A faster pool: after a while one window is enough again.
    machine.latency = 20;
    machine.access_all(1, 20_000..60_000);
    let (first, ..) = machine.last_window().unwrap();
    assert!(first < 60_000 + 64, "{first}");
    machine.check();
}

#[test]
fn stream_has_at_most_four_windows_in_flight() {
    let mut machine = machine();
    machine.latency = u64::MAX;
    for page in 0..PAGES {
        machine.access(1, page);
        assert!(machine.flights.len() <= AHEAD);
    }
    // No window arrives, so the rest of the pages is read by faults.
    assert_eq!(machine.flights.len(), AHEAD);
    machine.check();
    machine.deliver(|_, _| true);
    machine.check();
    assert_eq!(machine.streams.counters().wasted, 0);
}

#[test]
fn all_streams_have_at_most_eight_windows_in_flight() {
    let mut machine = machine();
    machine.latency = u64::MAX;
    machine.access_all(1, (0..1000).flat_map(|at| (0..12).map(move |array| array * 4096 + at)));
    assert_eq!(machine.flights.len(), 8);
    machine.deliver(|_, _| true);
    machine.latency = 300;
    machine.access_all(1, (1000..4000).flat_map(|at| (0..12).map(move |array| array * 4096 + at)));
    machine.check();
    assert!(machine.accuracy() > 0.9, "{:?}", machine.streams.counters());
}

#[test]
fn rest_of_a_window_is_planned_again() {
    let mut machine = machine();
    machine.blanks = 20;
    machine.access_all(1, 0..10_000);
    machine.check();
    // Each 64 pages are read in four windows. The first page of each is found missing, and the
    // second one is late.
    assert!(machine.faults < 10_000 * 8 / 64, "{} faults", machine.faults);
    assert!(machine.accuracy() > 0.99);
    machine.blanks = 0;
    let faults = machine.faults;
    machine.access_all(1, 10_000..11_000);
    assert!(machine.faults - faults > 850, "a window that is not posted brings nothing");
    machine.blanks = 64;
    let faults = machine.faults;
    machine.access_all(1, 11_000..20_000);

    assert!(machine.faults - faults < 9000 / 50, "{} faults", machine.faults - faults);
    machine.check();
}

#[test]
fn wasteful_windows_suspend_the_context() {
    let mut machine = machine();
    machine.latency = 10;
    machine.access_all(1, 0..200);
    assert_eq!(machine.last_window(), Some((215, 64, 1)));
    // The window ahead is reclaimed: the next ones are shorter.
    machine.reclaim_all();
    machine.access_all(1, 200..216);
    let planned = machine.windows.iter().map(|w| (w.first.0 - machine.base, w.pages));
    assert_eq!(planned.collect::<Vec<_>>()[5..], [(215, 64), (216, 32), (279, 32)]);
    machine.deliver(|_, _| true);
    machine.reclaim_all();
    // Suspended: 64 faults without a window. Then the stream begins again.
    let planned = machine.windows.len();
    let faults = machine.faults;
    let mut page = 216;
    while machine.windows.len() == planned {
        machine.access(1, page);
        page += 1;
    }
    assert_eq!(machine.faults - faults, 65);
    assert_eq!(machine.last_window(), Some((page, 4, 1)));
    machine.access_all(1, page..PAGES);
    machine.check();
    assert!(machine.faults - faults < 70 + u64::from(PAGES / 60));
}

#[test]
fn scattered_short_runs_are_not_read_far_ahead() {
    // 5 pages in a row, then a jump: without feedback 20 pages would be read ahead for each 5.
    let mut machine = machine();
    machine.shelf = 64;
    let mut state = 1;
    for _ in 0..2000 {
        let start = random(&mut state, PAGES - 5);
        machine.access_all(1, start..start + 5);
    }
    machine.check();
    let issued = machine.posted as f64 / 10_000.0;
    assert!(issued < 0.3, "{issued} pages for each page that the program needed");
}

#[test]
fn stream_crosses_the_windows_of_another_direction() {
    let mut machine = machine();
    machine.latency = 10;
    // A forward stream leaves windows ahead of it, which a backward stream reaches.
    machine.access_all(1, 10_000..10_300);
    let faults = machine.faults;
    machine.access_all(1, (10_300..14_000).rev());
    assert!(machine.faults - faults < 3700 / 64 + 12, "{} faults", machine.faults - faults);
    machine.check();
}

#[test]
fn caution_ends_with_used_windows() {
    let mut machine = machine();
    machine.shelf = 64;
    for run in 0..100 {
        machine.access_all(1, run * 300..run * 300 + 5);
    }
    let first_window = |machine: &mut Machine, start: u32| {
        let planned = machine.windows.len();
        (start..).position(|page| {
            machine.access(1, page);
            machine.windows.len() > planned
        })
    };
    assert_eq!(first_window(&mut machine, 31_000), Some(8), "probation of 9 faults");
    machine.access_all(1, 31_009..33_000);
    assert_eq!(first_window(&mut machine, 40_000), Some(2), "probation of 3 faults");
}

#[test]
fn window_is_wasteful_above_a_quarter() {
    for (reclaimed, pages) in [(16, 64), (17, 32)] {
        let mut machine = machine();
        machine.latency = 10;
        machine.access_all(1, 0..200);
        (0..reclaimed).for_each(|_| machine.reclaim_oldest());
        machine.access_all(1, 200..216);
        assert_eq!(machine.last_window(), Some((279, pages, 1)));
        machine.check();
    }
}

#[test]
fn inexact_prediction_gives_no_confidence() {
    let mut machine = machine();
    machine.latency = 0;
    machine.access_all(1, 0..3);
    assert_eq!(machine.last_window(), Some((3, 4, 1)));
    // Not the first page of the window: the next window is not longer.
    machine.access(1, 5);
    assert_eq!(machine.last_window(), Some((7, 4, 1)));
    // So one fault elsewhere in the zone ends the stream. The trend of the newest faults begins
    // another one there.
    machine.access(1, 200);
    assert_eq!(machine.last_window(), Some((201, 4, 1)));
    // After an exact prediction the stream survives such a fault.
    machine.access_all(1, 1000..1004);
    assert_eq!(machine.last_window(), Some((1007, 16, 1)));
    machine.access(1, 1200);
    assert_eq!(machine.last_window(), Some((1007, 16, 1)));
    machine.access(1, 1007);
    assert_eq!(machine.last_window(), Some((1023, 64, 1)));
    machine.check();
}

#[test]
fn window_of_a_displaced_context_is_used() {
    let mut machine = Machine::new(Settings { threads: 1, ..Settings::default() }, PAGES);
    machine.latency = 0;
    machine.access_all(1, 0..200);
    assert_eq!(machine.last_window(), Some((215, 64, 1)));
    let used = machine.streams.counters().used;
    // The second thread takes the contexts of the first one, and leaves its windows.
    machine.access(2, 50_000);
    let wasted = machine.streams.counters().wasted;
    assert_eq!(wasted, 63, "the run in which the stream ended");
    machine.access_all(1, 215..279);
    let counters = machine.streams.counters();
    assert!(counters.used - used >= 60, "{counters:?}");
    assert_eq!((counters.wasted, counters.demand), (wasted, 4));
    machine.check();
}

#[test]
fn run_that_ends_behind_its_half_is_used() {
    for (page, wasted) in [(215 + 31, 32), (215 + 32, 0)] {
        let mut machine = Machine::new(Settings { threads: 1, ..Settings::default() }, PAGES);
        machine.latency = 10;
        machine.access_all(1, 0..200);
        machine.access(1, page);
        machine.access(2, 50_000);
        machine.check();
        assert_eq!(machine.streams.counters().wasted, wasted);
    }
}

#[test]
fn turned_stream_is_found_again() {
    let mut machine = machine();
    machine.local = 64;
    for _ in 0..20 {
        machine.access_all(1, (0..2000).chain((0..2000).rev()));
    }
    machine.check();
    assert!(machine.accuracy() > 0.9, "{:?}", machine.streams.counters());
    assert!(machine.faults < 80_000 / 40, "{}", machine.faults);
}

#[test]
fn advice_controls_reading_ahead() {
    let mut machine = machine();
    machine.advice = Advice::Random;
    machine.access_all(1, 0..500);
    assert_eq!((machine.windows.len(), machine.faults), (0, 500));
    machine.advice = Advice::Sequential;
    machine.access(1, 20_000);
    assert_eq!(machine.last_window(), Some((20_001, 16, 1)));
    machine.access_all(1, 20_001..30_000);
    machine.check();
    assert!(machine.accuracy() > 0.99);
    // Backward faults are followed all the same, as soon as they have a trend.
    machine.access_all(1, (40_000..50_000).rev());
    assert_eq!(machine.last_window().unwrap().2, -1);
    machine.check();
}

#[test]
fn pages_behind_a_stream_are_its_victims() {
    let mut machine = machine();
    machine.access_all(1, 0..1000);
    let behind = machine.behind.clone();
    assert!(behind.windows(2).all(|pair| pair[0].end == pair[1].start), "{behind:?}");
    // Two runs of grace before the run in which the stream is.
    let end = behind.last().unwrap().end;
    let run = machine.windows.iter().rev().map(|w| w.first.0 - machine.base);
    let run = run.clone().find(|first| *first < 1000).unwrap();
    assert_eq!(run - end, 128);
    machine.advice = Advice::Sequential;
    machine.behind.clear();
    machine.access_all(2, (20_000..30_000).rev());
    let behind = machine.behind.clone();
    assert!(behind.windows(2).skip(2).all(|pair| pair[1].end == pair[0].start), "{behind:?}");
    let run = machine.windows.iter().rev().map(|w| w.first.0 - machine.base);
    let run = run.clone().find(|first| *first >= 20_000).unwrap();
    assert_eq!(behind.last().unwrap().start, run + 1, "no grace");
}

#[test]
fn numbers_of_pages_do_not_overflow() {
    let settings = Settings { strides: true, ..Settings::default() };
    for step in [1i64, -1, 7, -7, 256, -256] {
        for base in [0, u32::MAX - 2000] {
            let mut machine = Machine::new(settings, 2000);
            machine.base = base;
            let first = if step > 0 { 0 } else { 1999 };
            let pages = (0..).map(|n| first + n * step).take_while(|at| (0..2000).contains(at));
            machine.access_all(1, pages.map(|page| page as u32));
            machine.check();
            // The page u32::MAX itself, as the last one and as a neighbour of the first.
            let mut streams = Streams::new(settings);
            for page in [0, 1, 2, 3, u32::MAX - 2, u32::MAX - 1, u32::MAX, 0, u32::MAX, 2, 1, 0] {
                let found = Found::Remote;
                let (page, bounds) = (PageId(page), 0..u32::MAX);
                let plan = streams.fault(&Fault {
                    thread: 1,
                    page,
                    bounds,
                    advice: Advice::Normal,
                    found,
                });
                let last = |w: &Window| w.iter().last().unwrap().0;
                assert!(plan.issue.iter().flatten().all(|w| last(w) < u32::MAX && w.pages <= 64));
            }
        }
    }
}

#[test]
fn windows_stay_within_their_mapping() {
    // Other mappings lie directly before and behind the one that is read.
    let mut machine = machine();
    machine.bounds = 100..1000;
    machine.access_all(1, (100..1000).chain((100..1000).rev()));
    machine.check();
    assert!(machine.places[..100].iter().all(|place| *place == Place::Remote));
    assert!(machine.places[1000..].iter().all(|place| *place == Place::Remote));
}

#[test]
fn unknown_windows_change_nothing() {
    let mut streams = Streams::new(Settings::default());
    streams.arrived(WindowId(7), 64);
    streams.reclaimed(WindowId(7), 64);
    assert_eq!(streams.counters(), Counters::default());
    let mut machine = machine();
    machine.access_all(1, 0..200);
    machine.deliver(|_, _| true);
    let before = machine.streams.counters();
    let id = machine.windows.last().unwrap().id;
    machine.streams.arrived(id, 64);
    assert_eq!(machine.streams.counters(), before);
    machine.check();
}

/// Prints the cost of a fault. Run it with `--release -- --ignored --nocapture`.
#[test]
#[ignore = "prints times and asserts nothing; make test-full runs it"]
fn cost_of_a_fault() {
    const FAULTS: u32 = 100_000;
    type Step = Box<dyn FnMut(&mut Streams, u32)>;
    let time = |name: &str, mut fault: Step| {
        let mut streams = Streams::new(Settings::default());
        (0..1000).for_each(|n| fault(&mut streams, n));
        // The shortest of several rounds, because other programs use the processor too.
        let mut round = || {
            let start = std::time::Instant::now();
            (0..FAULTS).for_each(|n| fault(&mut streams, n));
            start.elapsed()
        };
        let shortest = (0..20).map(|_| round()).min().unwrap();
        let ns = shortest.as_nanos() as f64 / f64::from(FAULTS);
        println!("{name}: {ns:.0} ns a fault, {:?}", streams.counters());
    };
    let mut state = 1;
    let at = |thread, page, found| {
        let page = PageId(page);
        Fault { thread, page, bounds: 0..u32::MAX, advice: Advice::Normal, found }
    };
    time(
        "random",
        Box::new(move |streams, _| {
            std::hint::black_box(streams.fault(&at(1, random(&mut state, 1 << 26), Found::Remote)));
        }),
    );
    time(
        "random, 16 threads",
        Box::new(move |streams, n| {
            std::hint::black_box(streams.fault(&at(
                n % 16,
                random(&mut state, 1 << 26),
                Found::Remote,
            )));
        }),
    );
    time(
        "random within 16 MiB",
        Box::new(move |streams, _| {
            std::hint::black_box(streams.fault(&at(1, random(&mut state, 4096), Found::Remote)));
        }),
    );
    // A window arrives at once, and the next fault is at its first page.
    let mut next = (1000, Found::Remote);
    time(
        "sequential",
        Box::new(move |streams, _| {
            let (page, found) = next;
            let plan = streams.fault(&at(1, page, found));
            next = (page + 1, Found::Remote);
            for window in plan.issue.iter().flatten() {
                streams.arrived(window.id, window.pages);
                next = (window.first.0, Found::Ready(window.id));
            }
        }),
    );
}

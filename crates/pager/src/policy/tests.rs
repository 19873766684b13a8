//! Tests of all policies against a model of residency.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const LIMIT: u32 = 512;
/// The end of the page numbers.
const END: u32 = 100_100;

fn policy(name: Name, seed: u64) -> AnyPolicy {
    name.policy(LIMIT, END, seed).unwrap()
}

/// The calls of a program and a pager, as numbers.
#[derive(Clone, Debug)]
enum Step {
    Fault { page: u32, pages: u32, kind: u8 },
    Evict { max: u32 },
    Remove { page: u32, pages: u32 },
    Return { max: u32 },
    LeftBehind { page: u32, pages: u32 },
    Unneeded { page: u32, pages: u32 },
}

fn step() -> impl Strategy<Value = Step> {
    let page = 0u32..4000;
    prop_oneof![
        8 => (page.clone(), 1u32..=64, any::<u8>())
            .prop_map(|(page, pages, kind)| Step::Fault { page, pages, kind }),
        4 => (1u32..=64).prop_map(|max| Step::Evict { max }),
        1 => (page.clone(), 1u32..=64).prop_map(|(page, pages)| Step::Remove { page, pages }),
        2 => (1u32..=64).prop_map(|max| Step::Return { max }),
        1 => (page.clone(), 1u32..=64)
            .prop_map(|(page, pages)| Step::LeftBehind { page, pages }),
        1 => (page, 1u32..=1000).prop_map(|(page, pages)| Step::Unneeded { page, pages }),
    ]
}

/// A policy beside the true set of resident pages.
struct Model {
    policy: AnyPolicy,
    resident: HashSet<u32>,
}

impl Model {
    fn new(name: Name) -> Self {
        Self { policy: policy(name, 7), resident: HashSet::new() }
    }

    fn victim(&mut self, max: u32) -> Result<Option<Run>, TestCaseError> {
        let Some(run) = self.policy.victim_run(max) else {
            prop_assert!(self.resident.is_empty(), "resident pages but no victim");
            return Ok(None);
        };
        prop_assert!((1..=max).contains(&run.pages), "{run:?} with max {max}");
        for page in run.start..run.end() {
            prop_assert!(self.resident.contains(&page), "victim {page} is not resident");
            prop_assert!(!self.policy.holds(page), "victim {page} is still held");
        }
        Ok(Some(run))
    }

    fn evict(&mut self, max: u32) -> Result<(), TestCaseError> {
        if let Some(run) = self.victim(max)? {
            (run.start..run.end()).for_each(|page| assert!(self.resident.remove(&page)));
        }
        Ok(())
    }

    fn apply(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match *step {
            Step::Fault { page, pages, kind } => {
                let run = Run { start: page, pages };
                match kind % 4 {
                    0 => self.policy.arrived(run),
                    1 => self.policy.restored(run),
                    kind => self.policy.refetched(run, kind == 2),
                }
                self.resident.extend(page..run.end());
                while self.resident.len() > LIMIT as usize {
                    self.evict(64)?;
                }
            }
            Step::Evict { max } => self.evict(max)?,
            Step::Remove { page, pages } => {
                self.policy.removed(Run { start: page, pages });
                self.resident.retain(|held| !(page..page + pages).contains(held));
            }
            Step::Return { max } => {
                if let Some(run) = self.victim(max)? {
                    self.policy.returned(run);
                }
            }
            Step::LeftBehind { page, pages } => self.policy.left_behind(Run { start: page, pages }),
            Step::Unneeded { page, pages } => self.policy.unneeded(Run { start: page, pages }),
        }
        prop_assert_eq!(self.policy.pages() as usize, self.resident.len());
        Ok(())
    }
}

proptest! {
    #[test]
    fn each_resident_page_becomes_a_victim_once(
        index in 0..Name::ALL.len(),
        steps in proptest::collection::vec(step(), 1..400),
    ) {
        let mut model = Model::new(Name::ALL[index]);
        let capacity = model.policy.capacity();
        for step in &steps {
            model.apply(step)?;
        }
        prop_assert!(model.resident.iter().all(|page| model.policy.holds(*page)));
        prop_assert!(model.policy.capacity() <= capacity, "the policy has allocated");
        while !model.resident.is_empty() {
            model.evict(64)?;
        }
        prop_assert_eq!(model.policy.victim_run(1), None);
    }
}

#[test]
fn same_seed_gives_the_same_victims() {
    for name in Name::ALL {
        let victims = |seed| {
            let mut policy = policy(name, seed);
            let mut victims = Vec::new();
            for at in 0..4000u32 {
                policy.arrived(Run { start: at * 7919 % 100_000, pages: 1 + at % 3 });
                if policy.pages() > LIMIT {
                    victims.push(policy.victim_run(64));
                }
            }
            victims
        };
        assert_eq!(victims(1), victims(1), "{name}");
        let random = !matches!(name, Name::Fifo | Name::Segmented | Name::S3Fifo);
        assert_eq!(victims(1) != victims(2), random, "{name}");
    }
}

#[test]
fn fifo_evicts_runs_in_the_order_of_arrival() {
    let mut fifo = policy(Name::Fifo, 0);
    fifo.arrived(Run { start: 10, pages: 4 });
    fifo.arrived(Run { start: 50, pages: 1 });
    fifo.arrived(Run { start: 12, pages: 4 });
    let run = |start, pages| Some(Run { start, pages });
    assert_eq!(fifo.victim_run(3), run(10, 3));
    assert_eq!(fifo.victim_run(3), run(13, 1));
    assert_eq!(fifo.victim_run(3), run(50, 1));
    assert_eq!(fifo.victim_run(3), run(14, 2));
    assert_eq!(fifo.victim_run(3), None);
}

#[test]
fn windows_that_streams_have_left_go_first() {
    for name in [Name::Stream, Name::Contest] {
        let mut policy = policy(name, 0);
        for block in 0..8 {
            policy.arrived(Run { start: block * 64, pages: 64 });
        }
        let window = |block: u32| Run { start: block * 64, pages: 64 };
        policy.left_behind(window(2));
        policy.left_behind(Run { start: 230, pages: 60 });
        assert_eq!(policy.victim_run(64), Some(window(2)), "{name}");
        assert_eq!(policy.victim_run(10), Some(Run { start: 230, pages: 10 }), "{name}");
        assert_eq!(policy.victim_run(64), Some(Run { start: 240, pages: 16 }), "{name}");
        assert_eq!(policy.victim_run(64), Some(Run { start: 256, pages: 34 }), "{name}");
    }
}

#[test]
fn pages_that_cannot_leave_do_not_keep_others_from_leaving() {
    for name in Name::ALL {
        let mut policy = policy(name, 3);
        // Whole blocks, because the classes of `duel` are made of blocks.
        let blocks: Vec<u32> = (0..64).map(|at| at * 20).collect();
        let is_pinned = |page: u32| !(page / 64 / 20).is_multiple_of(4);
        let (pinned, others): (Vec<u32>, Vec<u32>) =
            blocks.iter().map(|block| block * 64).partition(|page| is_pinned(*page));
        pinned.iter().for_each(|page| policy.arrived(Run { start: *page, pages: 8 }));
        // Memory is full, so the other pages are new ones.
        let run = policy.victim_run(1).expect("pages are held");
        policy.returned(run);
        others.iter().for_each(|page| policy.arrived(Run { start: *page, pages: 8 }));
        let mut left = HashSet::new();
        let mut calls = 0;
        while left.len() < 16 * 8 {
            calls += 1;
            assert!(calls < 20_000, "{name}: only {} pages could leave", left.len());
            let run = policy.victim_run(4).expect("pinned pages are held");
            for page in run.start..run.end() {
                match is_pinned(page) {
                    true => policy.returned(Run { start: page, pages: 1 }),
                    false => assert!(left.insert(page)),
                }
            }
        }
        assert_eq!(policy.pages(), 48 * 8, "{name}");
    }
}

#[test]
fn bip_keeps_old_pages_while_new_ones_pass() {
    let limit = 4096;
    let mut bip = Name::Bip.policy(limit, END, 1).unwrap();
    let mut resident = HashSet::new();
    for page in 0..20_000 {
        bip.arrived(Run { start: page, pages: 1 });
        resident.insert(page);
        while bip.pages() > limit {
            let run = bip.victim_run(64).unwrap();
            (run.start..run.end()).for_each(|page| assert!(resident.remove(&page)));
        }
    }
    let old = resident.iter().filter(|page| **page < limit).count();
    assert!(old > 3500, "{old} of the {limit} first pages are resident");
}

#[test]
fn stale_entries_take_no_memory_beyond_that_of_the_start() {
    for name in Name::ALL {
        let mut policy = policy(name, 0);
        let capacity = policy.capacity();
        for round in 0..200_000u32 {
            let run = Run { start: round % 50 * 3, pages: 1 };
            policy.arrived(run);
            policy.left_behind(run);
            policy.removed(run);
        }
        assert_eq!(policy.pages(), 0, "{name}");
        assert!(policy.capacity() <= capacity, "{name} has allocated");
    }
}

#[test]
fn queues_with_many_stale_pages_are_compacted() {
    let mut queues = queues::Queues::new(64, 1 << 20, 0).unwrap();
    let stale_max = runs::compact_from(0);
    for at in 0..10 * stale_max {
        let page = Run { start: 2 * at, pages: 1 };
        queues.add(page, false, 0);
        queues.remove(page);
        assert!(queues.main.len() <= stale_max);
    }
}

#[test]
fn single_pages_of_a_full_memory_take_no_memory_beyond_that_of_the_start() {
    for name in Name::ALL {
        let mut policy = policy(name, 0);
        let capacity = policy.capacity();
        let mut random = units::Random::new(1);
        for at in 0..100_000u32 {
            // No two pages are neighbours.
            let run = Run { start: 2 * random.below(5_000) as u32, pages: 1 };
            match at % 8 {
                0 => policy.removed(run),
                1 => policy.left_behind(run),
                2 => policy.restored(run),
                3 => policy.refetched(run, true),
                4 => policy.refetched(run, false),
                _ => policy.arrived(run),
            }
            while policy.pages() > LIMIT {
                policy.victim_run(8);
            }
        }
        assert!(policy.capacity() <= capacity, "{name} has allocated");
    }
}

#[test]
fn names_round_trip_as_text() {
    for name in Name::ALL {
        assert_eq!(name.to_string().parse(), Ok(name));
    }
    let error = "lru".parse::<Name>().unwrap_err();
    assert!(error.to_string().contains("s3fifo"), "{error}");
}

/// Runs accesses through a policy that holds `LIMIT` pages.
fn replay(policy: &mut impl Policy, accesses: impl IntoIterator<Item = u32>) {
    let (mut resident, mut seen) = (HashSet::new(), HashSet::new());
    for page in accesses {
        if resident.contains(&page) {
            continue;
        }
        while resident.len() >= LIMIT as usize {
            let run = policy.victim_run(1).expect("pages are resident");
            (run.start..run.end()).for_each(|page| assert!(resident.remove(&page)));
        }
        let run = Run { start: page, pages: 1 };
        match seen.insert(page) {
            true => policy.arrived(run),
            false => policy.refetched(run, false),
        }
        resident.insert(page);
    }
}

#[test]
fn contest_follows_newest_in_a_cyclic_scan() {
    let mut policy = Contest::new(LIMIT, END, 3).unwrap();
    replay(&mut policy, (0..40_000).map(|at| at * 11 % 700));
    assert_eq!(policy.followed(), contest::Rule::Newest);
}

#[test]
fn contest_follows_oldest_in_a_moving_working_set() {
    let mut policy = Contest::new(LIMIT, END, 3).unwrap();
    let mut random = units::Random::new(5);
    let moving = (0..200_000u32).map(|at| (at / 40 + random.below(450) as u32) % 3000);
    replay(&mut policy, moving);
    assert_eq!(policy.followed(), contest::Rule::Oldest);
}

#[test]
fn duel_follows_bip_in_a_cyclic_scan() {
    let limit = 20_000;
    let settings = duel::Settings { window: 1024, ..duel::SETTINGS };
    let mut duel = Duel::with(settings, limit, END, 1).unwrap();
    let mut resident = HashSet::new();
    for at in 0..400_000 {
        let run = Run { start: at % 24_000, pages: 1 };
        match resident.insert(run.start) {
            true if at < 24_000 => duel.arrived(run),
            true => duel.refetched(run, false),
            false => {}
        }
        while resident.len() as u32 > limit {
            let run = duel.victim_run(64).unwrap();
            (run.start..run.end()).for_each(|page| assert!(resident.remove(&page)));
        }
    }
    assert_eq!(duel.followed(), Rule::Bip);
}

/// Prints the time of the calls for a page that comes and one that goes.
#[test]
#[ignore = "prints times and asserts nothing; make test-full runs it"]
fn cost_of_a_page() {
    const LIMIT: u32 = 1 << 16;
    for (what, run_pages) in [("single pages", 1), ("runs of 64", 64)] {
        for name in Name::ALL {
            let mut policy = name.policy(LIMIT, 4 * LIMIT, 1).unwrap();
            let mut random = units::Random::new(1);
            let (mut start, mut pages) = (std::time::Instant::now(), 0u32);
            while pages < 64 * LIMIT {
                let at = random.below(u64::from(4 * LIMIT / run_pages)) as u32 * run_pages;
                if policy.holds(at) {
                    continue;
                }
                policy.refetched(Run { start: at, pages: run_pages }, at.is_multiple_of(8));
                while policy.pages() > LIMIT {
                    policy.victim_run(16);
                }
                pages += run_pages;
                if pages == 8 * LIMIT {
                    start = std::time::Instant::now();
                }
            }
            let ns = start.elapsed().as_nanos() / u128::from(56 * LIMIT);
            println!("{what}, {name}: {ns} ns a page");
        }
    }
}

#[test]
fn pages_that_the_program_does_not_need_are_the_next_victims() {
    for name in Name::ALL {
        let mut policy = policy(name, 0);
        for block in 0..LIMIT / RUN_PAGES {
            policy.arrived(Run { start: block * RUN_PAGES, pages: RUN_PAGES });
        }
        // Parts of the range are not held, and the second call continues the first.
        policy.removed(Run { start: 130, pages: 10 });
        policy.unneeded(Run { start: 100, pages: 50 });
        policy.unneeded(Run { start: 150, pages: 20 });
        let mut victims = Vec::new();
        while victims.len() < 60 {
            let run = policy.victim_run(16).unwrap();
            assert!(run.pages <= 16, "{name}");
            victims.extend(run.start..run.end());
        }
        victims.sort_unstable();
        assert!(victims.iter().copied().eq((100..130).chain(140..170)), "{name}: {victims:?}");
        assert!(!policy.holds(100), "{name}");
        let before = policy.pages();
        let run = policy.victim_run(16).unwrap();
        assert_eq!(policy.pages(), before - run.pages, "{name}");
        assert!(!(100..170).contains(&run.start), "{name}: {run:?}");
    }
}

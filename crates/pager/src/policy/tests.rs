//! Tests of all policies against a model of residency.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const LIMIT: u32 = 512;

/// The calls of a program and a pager, as numbers.
#[derive(Clone, Debug)]
enum Step {
    Fault { page: u32, pages: u32, kind: u8 },
    Evict { max: u32 },
    Remove { page: u32, pages: u32 },
    Vanish { page: u32 },
    LeftBehind { page: u32, pages: u32 },
}

fn step() -> impl Strategy<Value = Step> {
    let page = 0u32..4000;
    prop_oneof![
        8 => (page.clone(), 1u32..=64, any::<u8>())
            .prop_map(|(page, pages, kind)| Step::Fault { page, pages, kind }),
        4 => (1u32..=64).prop_map(|max| Step::Evict { max }),
        1 => (page.clone(), 1u32..=64).prop_map(|(page, pages)| Step::Remove { page, pages }),
        1 => page.clone().prop_map(|page| Step::Vanish { page }),
        1 => (page, 1u32..=64).prop_map(|(page, pages)| Step::LeftBehind { page, pages }),
    ]
}

/// A policy beside the true set of resident pages.
struct Model {
    policy: AnyPolicy,
    resident: HashSet<u32>,
    /// Pages that left without notice, and that the policy may still hold.
    stale: HashSet<u32>,
}

impl Model {
    fn new(name: Name) -> Self {
        let policy = name.policy(LIMIT, 7);
        Self { policy, resident: HashSet::new(), stale: HashSet::new() }
    }

    fn evict(&mut self, max: u32) -> Result<(), TestCaseError> {
        let Some(run) = self.policy.victim_run(max) else {
            prop_assert!(self.resident.is_empty(), "resident pages but no victim");
            return Ok(());
        };
        prop_assert!((1..=max).contains(&run.pages), "{run:?} with max {max}");
        for page in run.start..run.end() {
            let known = self.resident.remove(&page) || self.stale.remove(&page);
            prop_assert!(known, "page {page} is a victim, but is not held");
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
                for page in page..run.end() {
                    self.stale.remove(&page);
                    self.resident.insert(page);
                }
                while self.resident.len() > LIMIT as usize {
                    self.evict(64)?;
                }
            }
            Step::Evict { max } => self.evict(max)?,
            Step::Remove { page, pages } => {
                self.policy.removed(Run { start: page, pages });
                for page in page..page + pages {
                    self.resident.remove(&page);
                    self.stale.remove(&page);
                }
            }
            Step::Vanish { page } => {
                if self.resident.remove(&page) {
                    self.stale.insert(page);
                }
            }
            Step::LeftBehind { page, pages } => self.policy.left_behind(Run { start: page, pages }),
        }
        prop_assert_eq!(self.policy.pages() as usize, self.resident.len() + self.stale.len());
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
        for step in &steps {
            model.apply(step)?;
        }
        let Model { policy, resident, .. } = &mut model;
        policy.sweep(&mut |page| resident.contains(&page));
        prop_assert_eq!(policy.pages() as usize, resident.len());
        model.stale.clear();
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
            let mut policy = name.policy(LIMIT, seed);
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
    let mut fifo = Name::Fifo.policy(LIMIT, 0);
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
fn stream_evicts_a_left_window_after_its_grace() {
    let mut stream = Name::Stream.policy(LIMIT, 0);
    for block in 0..8 {
        stream.arrived(Run { start: block * 64, pages: 64 });
    }
    let window = |block: u32| Run { start: block * 64, pages: 64 };
    stream.left_behind(window(2));
    stream.left_behind(window(3));
    stream.left_behind(window(4));
    assert_eq!(stream.victim_run(64), Some(window(2)));
    stream.left_behind(window(5));
    assert_eq!(stream.victim_run(10), Some(Run { start: 192, pages: 10 }));
    assert_eq!(stream.victim_run(64), Some(Run { start: 202, pages: 54 }));
}

#[test]
fn bip_keeps_old_pages_while_new_ones_pass() {
    let limit = 4096;
    let mut bip = Name::Bip.policy(limit, 1);
    let mut resident = HashSet::new();
    let mut page = 0;
    for _ in 0..20_000 {
        bip.arrived(Run { start: page, pages: 1 });
        resident.insert(page);
        page += 1;
        while bip.pages() > limit {
            let run = bip.victim_run(64).unwrap();
            (run.start..run.end()).for_each(|page| assert!(resident.remove(&page)));
        }
    }
    let old = resident.iter().filter(|page| **page < limit).count();
    assert!(old > 3500, "{old} of the {limit} first pages are resident");
}

#[test]
fn stale_entries_take_bounded_memory() {
    for name in Name::ALL {
        let mut policy = name.policy(LIMIT, 0);
        for round in 0..200_000u32 {
            let run = Run { start: round % 50 * 3, pages: 1 };
            policy.arrived(run);
            policy.left_behind(run);
            policy.removed(run);
        }
        assert_eq!(policy.pages(), 0, "{name}");
        let text = format!("{policy:?}");
        assert!(text.len() < 500_000, "{name} holds {} bytes of text", text.len());
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
    let mut policy = Contest::new(LIMIT, 3);
    replay(&mut policy, (0..40_000).map(|at| at * 11 % 700));
    assert_eq!(policy.followed(), contest::Rule::Newest);
}

#[test]
fn contest_follows_oldest_in_a_moving_working_set() {
    let mut policy = Contest::new(LIMIT, 3);
    let mut random = units::Random::new(5);
    let moving = (0..200_000u32).map(|at| (at / 40 + random.below(450) as u32) % 3000);
    replay(&mut policy, moving);
    assert_eq!(policy.followed(), contest::Rule::Oldest);
}

#[test]
fn duel_follows_bip_in_a_cyclic_scan() {
    let limit = 20_000;
    let settings = duel::Settings { window: 1024, ..duel::SETTINGS };
    let mut duel = Duel::with(settings, limit, 1);
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

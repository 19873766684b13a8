//! The game of an observer (TDMEM §3): from what a memory node sees of the transfers, which of two
//! programs runs.
//!
//! The transfers are those of the pager itself, and the time is the step of the simulation. Before
//! the observer watches, each program writes all pages and then uses random pages, so that the
//! number of chunks does not grow any more: the growth would tell the programs apart too.

use std::collections::BTreeMap;

use super::learner::{self, FEATURES, Run, Success, correlation, slot_features};
use super::pattern::Pattern;
use super::program::{Order, Program};
use super::transport::Post;
use super::world::{self, Setup};
use super::{Kind, RandomOrder, kinds};
use crate::config::{Hide, Paths};
use crate::memory::model::Odds;
use crate::pages::Sizes;
use crate::policy::Name;
use crate::transport::Direction;

/// What an observer knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum View {
    /// The places of stores, in their order.
    Stores,
    /// The places of stores and loads, in their order.
    Places,
    /// The times, and how many pages move together.
    Times,
}

const VIEWS: [View; 3] = [View::Stores, View::Places, View::Times];
const HIDES: [Hide; 3] = [Hide::Off, Hide::Writes, Hide::Reads];
const SEEDS: [u64; 3] = [2611, 7, 90_001];
/// Runs of a game: half of them are learned, half judged.
const RUNS: u64 = 200;
/// Pages of a program.
const PAGES: u32 = 384;
/// Pages that move while the observer watches.
const MOVES: usize = 400;
/// Stores among them that an observer of stores compares, the same number for all programs. A slot
/// that is stored to again was loaded in between, so that more stores would tell more.
const STORES: usize = 100;

fn setup(pattern: Pattern, hide: Hide) -> Setup {
    let sizes =
        Sizes { limit: 128, window: 8, windows: 4, writes: 2, positions: 128, stock: 8, keep: 8 };
    let program = Program { order: Order::Pattern(pattern), operations: 700, ..Program::default() };
    Setup {
        pages: PAGES,
        sizes,
        programs: vec![program],
        handlers: 1,
        inline: false,
        odds: Odds::default(),
        copied_run: None,
        chunk_pages: 32,
        policy: Name::default(),
        paths: Paths::Two,
        advised: false,
        alone: false,
        compacts: false,
        sealed: true,
        hide,
        max_steps: 2_000_000,
        ..kinds::setup(Kind::Sequential, 0)
    }
}

/// Runs a program, and returns the posts up to the first [`MOVES`] pages.
fn observe(pattern: Pattern, hide: Hide, seed: u64) -> Vec<Post> {
    let posts = world::watch(&setup(pattern, hide), seed, &mut RandomOrder::new(seed));
    let mut moves = 0;
    let seen: Vec<Post> = posts
        .unwrap_or_else(|error| panic!("{pattern:?}, {hide:?}, seed {seed}: {error}"))
        .into_iter()
        .take_while(|post| {
            let is_seen = moves < MOVES;
            moves += post.slots.len();
            is_seen
        })
        .collect();
    assert!(moves >= MOVES, "{pattern:?}, {hide:?}, seed {seed}: only {moves} pages move");
    seen
}

fn features(view: View, posts: &[Post]) -> [f64; FEATURES] {
    match view {
        View::Stores => stores(posts),
        View::Places => places(posts),
        View::Times => times(posts),
    }
}

/// Number of slots, and the slots of each page that moves.
fn slots(posts: &[Post], is_seen: impl Fn(Direction) -> bool) -> (u32, Vec<f64>) {
    let all = posts.iter().flat_map(|post| &post.slots).max().expect("pages move") + 1;
    let seen = posts.iter().filter(|post| is_seen(post.direction));
    (all, seen.flat_map(|post| &post.slots).map(|slot| f64::from(*slot)).collect())
}

fn stores(posts: &[Post]) -> [f64; FEATURES] {
    let (all, mut slots) = slots(posts, |direction| direction == Direction::Write);
    assert!(slots.len() >= STORES, "only {} stores", slots.len());
    slots.truncate(STORES);
    slot_features(&slots, all)
}

/// Half of the features are those of the slots. The others tell how long ago a place that is loaded
/// was used before.
fn places(posts: &[Post]) -> [f64; FEATURES] {
    let (all, slots) = slots(posts, |_| true);
    let mut last = BTreeMap::new();
    let (mut ages, mut origins, mut loads, mut unknown) = ([0.0; 10], Vec::new(), 0.0, 0.0);
    let moves = posts.iter().flat_map(|post| post.slots.iter().map(|slot| (post.direction, *slot)));
    for (now, (direction, slot)) in moves.enumerate() {
        let before = last.insert(slot, now);
        match (direction, before) {
            (Direction::Write, _) => continue,
            (Direction::Read, None) => unknown += 1.0,
            (Direction::Read, Some(before)) => {
                let age = ((now - before) as u32).ilog2() as usize;
                ages[age.min(ages.len() - 1)] += 1.0;
                origins.push(before as f64);
            }
        }
        loads += 1.0;
    }
    let known = origins.len().max(2) as f64;
    let near = |most: f64| {
        let near = origins.windows(2).filter(|pair| (pair[1] - pair[0]).abs() <= most);
        near.count() as f64 / known
    };
    let mut all_features = [0.0; FEATURES];
    let (by_slot, by_age) = all_features.split_at_mut(16);
    by_slot.copy_from_slice(&slot_features(&slots, all)[..16]);
    by_age[..10].copy_from_slice(&ages.map(|count| count / known));
    by_age[10..].copy_from_slice(&[
        unknown / loads,
        loads / slots.len() as f64,
        near(1.0),
        near(4.0),
        near(16.0),
        match origins.len() {
            0..=2 => 0.0,
            _ => correlation(&origins[1..], &origins[..origins.len() - 1]),
        },
    ]);
    all_features
}

fn times(posts: &[Post]) -> [f64; FEATURES] {
    let n = posts.len() as f64;
    let gaps: Vec<f64> =
        posts.windows(2).map(|pair| f64::from(pair[1].step - pair[0].step)).collect();
    let sizes: Vec<f64> = posts.iter().map(|post| post.slots.len() as f64).collect();
    let mean = |list: &[f64]| list.iter().sum::<f64>() / list.len() as f64;
    let deviation = |list: &[f64]| {
        let middle = mean(list);
        (list.iter().map(|x| (x - middle).powi(2)).sum::<f64>() / list.len() as f64).sqrt()
    };
    let mut batches = [0.0; 12];
    let mut gap_sizes = [0.0; 8];
    for post in posts {
        let size = (post.slots.len() as u32).ilog2().min(5) as usize;
        let at = if post.direction == Direction::Read { size } else { 6 + size };
        batches[at] += 1.0 / n;
    }
    for gap in &gaps {
        gap_sizes[((*gap as u32 + 1).ilog2() as usize).min(7)] += 1.0 / n;
    }
    let after = |list: &[f64], lag: usize| correlation(&list[lag..], &list[..list.len() - lag]);
    let mut all = batches.to_vec();
    all.extend(gap_sizes);
    all.extend([mean(&sizes), deviation(&sizes), mean(&gaps), deviation(&gaps)]);
    all.push(gaps.iter().sum::<f64>() / sizes.iter().sum::<f64>());
    all.push(posts.iter().filter(|post| post.direction == Direction::Write).count() as f64 / n);
    all.extend((1..=3).flat_map(|lag| [after(&gaps, lag), after(&sizes, lag)]));
    all.try_into().expect("12 + 8 + 4 + 2 + 6 features")
}

/// The success of each view's observer.
fn game(pair: [Pattern; 2], hide: Hide, seed: u64) -> [Success; VIEWS.len()] {
    let seen: Vec<(Vec<Post>, bool)> = (0..RUNS)
        .map(|at| {
            let is_first = at.is_multiple_of(2);
            let pattern = pair[usize::from(!is_first)];
            (observe(pattern, hide, seed * 1_000 + at), is_first)
        })
        .collect();
    VIEWS.map(|view| {
        let runs: Vec<Run> =
            seen.iter().map(|(posts, is_first)| (features(view, posts), *is_first)).collect();
        let (learned, judged) = runs.split_at(RUNS as usize / 2);
        learner::success(learned, judged)
    })
}

/// The mean success of the games of each seed, and a line of the table on the success.
fn mean_of_seeds(pair: [Pattern; 2], hide: Hide) -> [f64; VIEWS.len()] {
    let is_full = std::env::var_os("GRANARY_TEST_FULL").is_some_and(|value| value == "1");
    let seeds = if is_full { &SEEDS[..] } else { &SEEDS[..1] };
    let games: Vec<_> = seeds.iter().map(|seed| game(pair, hide, *seed)).collect();
    let means = std::array::from_fn(|view| {
        Success::mean(&games.iter().map(|game| game[view]).collect::<Vec<_>>()).best()
    });
    let [stores, places, times] = means;
    println!(
        "{pair:?}, hide {}: stores {stores:.2}, places {places:.2}, times {times:.2}",
        hide.name()
    );
    means
}

/// Plays the games of a pair of programs. `--nocapture` prints the success, of which
/// `docs/user/security.md` has a table.
fn play(pair: [Pattern; 2]) {
    let [shown, ..] = HIDES.map(|hide| {
        let [stores, places, times] = mean_of_seeds(pair, hide);
        // The order of loads and stores, the times and the batches tell the program, whatever is
        // hidden.
        assert!(places >= 0.75, "{pair:?}, {hide:?}: places {places}");
        assert!(times >= 0.85, "{pair:?}, {hide:?}: times {times}");
        if hide != Hide::Off {
            assert!(stores <= 0.75, "{pair:?}, {hide:?}: stores {stores}");
        }
        stores
    });
    assert!(shown >= 0.8, "{pair:?}, control: stores {shown}");
}

#[test]
fn observer_of_times_tells_sequential_from_random_accesses() {
    play([Pattern::Sequential, Pattern::Random]);
}

#[test]
fn observer_of_times_tells_k_means_from_quicksort() {
    play([Pattern::KMeans, Pattern::Quicksort]);
}

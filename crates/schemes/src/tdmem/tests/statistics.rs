//! Statistical tests of the pages that STOREs draw. Each test has a control: a way to choose pages
//! that the test must reject. Seeds are fixed, and the limits are so wide that a correct choice
//! fails with a probability below 10^-4.

use super::*;

const PAGES: u32 = 4096;
/// Pages in use at a time. They are few, so that draws are nearly independent of each other.
const NAMES: u32 = 32;
const STORES: usize = 250_000;
const SEEDS: [u64; 3] = [1, 2, 3];

/// A way to choose a free page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Choice {
    /// The engine's.
    Engine,
    /// The next free page behind the last chosen one.
    Linear,
    /// The page that was freed last.
    LastFreed,
    /// The lower of two random free pages.
    Skewed,
}

/// A STORE of a page: its name, and the page that was chosen.
#[derive(Clone, Copy)]
struct Store {
    name: u32,
    page: u32,
}

/// Pages for the controls.
struct Control {
    choice: Choice,
    random: Random,
    free: Vec<u32>,
    is_free: Vec<bool>,
    last: u32,
}

impl Control {
    fn new(choice: Choice, seed: u64) -> Self {
        let (free, is_free) = ((0..PAGES).collect(), vec![true; PAGES as usize]);
        Self { choice, random: Random::new(Some(seed)).unwrap(), free, is_free, last: PAGES - 1 }
    }

    fn draw(&mut self) -> u32 {
        let mut any = || self.random.below(self.free.len() as u32) as usize;
        let at = match self.choice {
            Choice::Skewed => {
                let (a, b) = (any(), any());
                if self.free[a] < self.free[b] { a } else { b }
            }
            Choice::LastFreed => self.free.len() - 1,
            Choice::Engine | Choice::Linear => {
                let behind = |i: u32| (self.last + i) % PAGES;
                let next = (1..=PAGES).map(behind).find(|page| self.is_free[*page as usize]);
                let next = next.expect("a page is free");
                self.last = next;
                self.is_free[next as usize] = false;
                return next;
            }
        };
        self.free.swap_remove(at)
    }

    fn add(&mut self, page: u32) {
        match self.choice {
            Choice::Linear => self.is_free[page as usize] = true,
            _ => self.free.push(page),
        }
    }
}

/// STOREs that each replace the page of their name, with names in order.
fn replacing(choice: Choice, seed: u64) -> Vec<Store> {
    let mut places = vec![None; NAMES as usize];
    let mut bench = Bench::new(PAGES, 0, seed);
    let mut control = Control::new(choice, seed);
    let next = |i: usize| {
        let name = i as u32 % NAMES;
        let old: Option<u32> = places[name as usize];
        let page = match choice {
            Choice::Engine => {
                let replaced = old.map_or(0, |page| bench.layout.page(page));
                let answer = bench.store_over(1, 1, replaced);
                bench.layout.page_at(answer.remote_addr).unwrap()
            }
            _ => {
                let page = control.draw();
                old.into_iter().for_each(|page| control.add(page));
                page
            }
        };
        places[name as usize] = Some(page);
        Store { name, page }
    };
    (0..STORES).map(next).collect()
}

/// Number of standard deviations by which a chi-square statistic differs from its mean.
fn deviation(statistic: f64, freedom: usize) -> f64 {
    (statistic - freedom as f64) / (2.0 * freedom as f64).sqrt()
}

/// Chi-square of the pages in 256 bins: neither too uneven nor too even.
fn is_uniform(stores: &[Store]) -> bool {
    const BINS: usize = 256;
    let mut counts = [0.0; BINS];
    for store in stores {
        counts[store.page as usize * BINS / PAGES as usize] += 1.0;
    }
    let expected = stores.len() as f64 / BINS as f64;
    let statistic: f64 = counts.iter().map(|n: &f64| (n - expected).powi(2) / expected).sum();
    deviation(statistic, BINS - 1).abs() < 4.0
}

/// Kolmogorov-Smirnov test against the uniform distribution.
fn has_uniform_distribution(stores: &[Store]) -> bool {
    let mut counts = vec![0u32; PAGES as usize];
    stores.iter().for_each(|store| counts[store.page as usize] += 1);
    let (mut below, mut largest, n) = (0.0, 0f64, stores.len() as f64);
    for (page, count) in (1..).zip(counts) {
        below += f64::from(count) / n;
        largest = largest.max((below - f64::from(page) / f64::from(PAGES)).abs());
    }
    largest * n.sqrt() < 2.23
}

fn correlation(pairs: impl Iterator<Item = (f64, f64)> + Clone) -> f64 {
    let n = pairs.clone().count() as f64;
    let mean = |values: &dyn Fn((f64, f64)) -> f64| pairs.clone().map(values).sum::<f64>() / n;
    let (x, y) = (mean(&|p| p.0), mean(&|p| p.1));
    let product = mean(&|p| (p.0 - x) * (p.1 - y));
    product / (mean(&|p| (p.0 - x).powi(2)) * mean(&|p| (p.1 - y).powi(2))).sqrt()
}

/// Autocorrelation of the pages at lags 1 to 64.
fn has_no_autocorrelation(stores: &[Store]) -> bool {
    let at = |i: usize| f64::from(stores[i].page);
    let limit = 4.8 / (stores.len() as f64).sqrt();
    (1..=64).all(|lag| {
        let pairs = (lag..stores.len()).map(|i| (at(i - lag), at(i)));
        correlation(pairs).abs() < limit
    })
}

/// Runs of pages in the lower and in the upper half.
fn has_as_many_runs_as_chance(stores: &[Store]) -> bool {
    let upper = |store: &Store| store.page >= PAGES / 2;
    let n = stores.len() as f64;
    let p = stores.iter().filter(|store| upper(store)).count() as f64 / n;
    let changes = stores.windows(2).filter(|pair| upper(&pair[0]) != upper(&pair[1])).count();
    let (mean, variance) = (2.0 * p * (1.0 - p) * n, 4.0 * p * (1.0 - p) * n * p * (1.0 - p));
    ((changes as f64 - mean) / variance.sqrt()).abs() < 4.5
}

/// Independence of the name and the page: correlation, and chi-square of blocks of names and pages.
fn is_independent_of_the_name(stores: &[Store]) -> bool {
    const BLOCKS: usize = 16;
    let pairs = stores.iter().map(|store| (f64::from(store.name), f64::from(store.page)));
    let mut cells = [[0f64; BLOCKS]; BLOCKS];
    for store in stores {
        let block = |value: u32, end: u32| value as usize * BLOCKS / end as usize;
        cells[block(store.name, NAMES)][block(store.page, PAGES)] += 1.0;
    }
    let row = |i: usize| cells[i].iter().sum::<f64>();
    let column = |j: usize| cells.iter().map(|row| row[j]).sum::<f64>();
    let n = stores.len() as f64;
    let term = |i, j| {
        let expected = row(i) * column(j) / n;
        if expected > 0.0 { (cells[i][j] - expected).powi(2) / expected } else { 0.0 }
    };
    let all = (0..BLOCKS).flat_map(|i| (0..BLOCKS).map(move |j| (i, j)));
    let statistic: f64 = all.map(|(i, j)| term(i, j)).sum();
    correlation(pairs).abs() < 4.8 / n.sqrt()
        && deviation(statistic, (BLOCKS - 1) * (BLOCKS - 1)).abs() < 4.5
}

/// Checks that a test accepts the engine's choice for all seeds and rejects the controls.
fn check(name: &str, accepts: impl Fn(&[Store]) -> bool, rejected: &[Choice]) {
    for seed in SEEDS {
        assert!(accepts(&replacing(Choice::Engine, seed)), "{name}: seed {seed}");
        for control in rejected {
            assert!(!accepts(&replacing(*control, seed)), "{name} accepts {control:?}");
        }
    }
}

#[test]
fn pages_are_uniform() {
    let controls = [Choice::Linear, Choice::LastFreed, Choice::Skewed];
    check("chi-square", is_uniform, &controls);
    check("Kolmogorov-Smirnov", has_uniform_distribution, &controls[1..]);
}

#[test]
fn pages_have_no_order() {
    let controls = [Choice::Linear, Choice::LastFreed];
    check("autocorrelation", has_no_autocorrelation, &controls);
    check("runs", has_as_many_runs_as_chance, &controls);
}

#[test]
fn pages_do_not_depend_on_the_name() {
    check("independence", is_independent_of_the_name, &[Choice::LastFreed]);
}

/// Number of STOREs after an INVALIDATE PAGE that choose the same page again, of `STORES`.
fn returns(choice: Choice, seed: u64) -> usize {
    let mut bench = Bench::new(PAGES, 0, seed);
    let mut control = Control::new(choice, seed);
    let mut last = None;
    let mut returns = 0;
    for _ in 0..STORES {
        let page = match choice {
            Choice::Engine => {
                let at = bench.store(1, 1);
                assert_eq!(bench.invalidate(1, at), Status::Done);
                bench.layout.page_at(at).unwrap()
            }
            _ => {
                let page = control.draw();
                control.add(page);
                page
            }
        };
        returns += usize::from(last == Some(page));
        last = Some(page);
    }
    returns
}

#[test]
fn pages_return_as_often_as_chance() {
    let mean = STORES as f64 / f64::from(PAGES);
    let as_chance = |returns: usize| (returns as f64 - mean).abs() < 5.0 * mean.sqrt();
    for seed in SEEDS {
        assert!(as_chance(returns(Choice::Engine, seed)), "seed {seed}");
        assert!(!as_chance(returns(Choice::LastFreed, seed)));
        assert!(!as_chance(returns(Choice::Linear, seed)));
        // A STORE that replaces a page never returns to it.
        let mut places = [None; NAMES as usize];
        for Store { name, page } in replacing(Choice::Engine, seed) {
            assert_ne!(places[name as usize].replace(page), Some(page));
        }
    }
}

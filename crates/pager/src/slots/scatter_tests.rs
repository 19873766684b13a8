//! Statistical tests of random placement, each with a control (placement in order) that must fail.
//!
//! An observer at the memory node sees the slots of the stores in their order, and no times. Seeds
//! are fixed, so the tests cannot fail by chance.

use super::*;
use crate::sim::learner::{self, Success, correlation, slot_features};
use crate::sim::random::Random as Seeded;
use crate::transport::ChunkHandle;

const CHUNK_PAGES: u32 = 64;
const CHUNKS: u32 = 64;
/// Pages of the program: three quarters of the slots.
const PAGES: u32 = CHUNKS * CHUNK_PAGES * 3 / 4;
const SEEDS: [u64; 3] = [2611, 7, 90_001];

/// The stores of a program, with the memory node's view of them.
struct Stores {
    slots: Slots,
    of_pages: Vec<SlotId>,
}

impl Stores {
    fn new(hide: Hide, seed: u64) -> Self {
        let mut slots = Slots::new(CHUNK_PAGES as usize * crate::sys::PAGE_BYTES);
        let mut random = Seeded::new(seed, 30);
        slots.hide(hide, Box::new(move || random.bits()));
        let mut stores = Self { slots, of_pages: Vec::new() };
        let mut held = 0;
        while stores.of_pages.len() < PAGES as usize {
            match stores.slots.allocate() {
                Some(slot) => stores.of_pages.push(slot),
                None => {
                    stores.slots.add_pool_chunk(ChunkHandle(held));
                    held += 1;
                }
            }
        }
        // The rest of the pool, so that all runs have the same number of slots. Some pages move to
        // each of these chunks, because a chunk without a page would be freed.
        while held < CHUNKS {
            stores.slots.add_pool_chunk(ChunkHandle(held));
            held += 1;
            let first = stores.slots.allocate_open().expect("an empty chunk");
            let index = (first.0 / u64::from(CHUNK_PAGES)) as u32;
            for at in 0..8 {
                let slot = match at {
                    0 => first,
                    _ => stores.slots.allocate_in(index).expect("room for eight"),
                };
                let page = ((8 * held + at) * 37 % PAGES) as usize;
                let other = std::mem::replace(&mut stores.of_pages[page], slot);
                assert!(stores.slots.free(other).is_none());
            }
        }
        // The free slots are in the last chunks still. After some stores they are everywhere.
        let mut random = Seeded::new(seed, 32);
        for _ in 0..4 * PAGES {
            stores.store(random.below(PAGES));
        }
        stores
    }

    /// Stores a page, as a write-back does: to another slot if the placement hides.
    fn store(&mut self, page: u32) -> u32 {
        let old = self.of_pages[page as usize];
        let slot = match self.slots.needs_another(old) {
            false => old,
            true => {
                let slot = self.slots.allocate().expect("a quarter of the slots is free");
                assert!(self.slots.free(old).is_none(), "no chunk becomes empty");
                slot
            }
        };
        self.of_pages[page as usize] = slot;
        slot.0 as u32
    }
}

/// Programs whose stores the observer sees.
#[derive(Clone, Copy, Debug)]
enum Program {
    /// Page after page.
    Sequential,
    /// Random pages.
    Random,
    /// A quarter of the pages gets nine of ten stores.
    Skewed,
}

/// Pages and slots of the first `count` stores of a program.
fn observe(hide: Hide, program: Program, seed: u64, count: usize) -> Vec<(u32, u32)> {
    let mut stores = Stores::new(hide, seed);
    let mut random = Seeded::new(seed, 31);
    let mut page = random.below(PAGES);
    let mut next = || {
        page = match program {
            Program::Sequential => (page + 1) % PAGES,
            Program::Random => random.below(PAGES),
            Program::Skewed if random.once_in(10) => random.below(PAGES),
            Program::Skewed => random.below(PAGES / 4),
        };
        page
    };
    (0..count).map(|_| next()).map(|page| (page, stores.store(page))).collect()
}

fn slots_of(seen: &[(u32, u32)]) -> Vec<f64> {
    seen.iter().map(|&(_, slot)| f64::from(slot)).collect()
}

/// Chi-square statistic over its degrees of freedom, as a number of standard deviations. A program
/// that stores its pages in turn uses the slots more evenly than by chance, because a slot is in
/// use until its page is stored again. So only large values count.
fn chi_square_sigmas(counts: &[u64], expected: &[f64]) -> f64 {
    let terms = counts.iter().zip(expected).map(|(count, e)| (*count as f64 - e).powi(2) / e);
    let freedom = counts.len() as f64 - 1.0;
    (terms.sum::<f64>() - freedom) / (2.0 * freedom).sqrt()
}

fn uniform_sigmas(hide: Hide, program: Program, seed: u64) -> f64 {
    let seen = observe(hide, program, seed, 1_000_000);
    let mut bins = [0u64; 256];
    let per_bin = CHUNKS * CHUNK_PAGES / 256;
    seen.iter().for_each(|(_, slot)| bins[(slot / per_bin) as usize] += 1);
    chi_square_sigmas(&bins, &[seen.len() as f64 / 256.0; 256])
}

/// Largest distance of the distribution of slots from the uniform one, times the root of the number
/// of stores (Kolmogorov-Smirnov).
fn kolmogorov(hide: Hide, program: Program, seed: u64) -> f64 {
    let mut slots = slots_of(&observe(hide, program, seed, 20_000));
    slots.sort_by(f64::total_cmp);
    let (n, all) = (slots.len() as f64, f64::from(CHUNKS * CHUNK_PAGES));
    let distance = |(at, slot): (usize, &f64)| (at as f64 / n - (slot + 0.5) / all).abs();
    slots.iter().enumerate().map(distance).fold(0.0, f64::max) * n.sqrt()
}

/// Correlation of two lists, in standard deviations of that of independent lists.
fn correlation_sigmas(one: &[f64], other: &[f64]) -> f64 {
    correlation(one, other) * (one.len() as f64).sqrt()
}

/// The largest autocorrelation of lags 1 to 64.
fn order_sigmas(hide: Hide, program: Program, seed: u64) -> f64 {
    let slots = slots_of(&observe(hide, program, seed, 100_000));
    let at = |lag: usize| correlation_sigmas(&slots[lag..], &slots[..slots.len() - lag]).abs();
    (1..=64).map(at).fold(0.0, f64::max)
}

/// Number of runs above and below the middle, in standard deviations (Wald-Wolfowitz).
fn runs_sigmas(hide: Hide, program: Program, seed: u64) -> f64 {
    let slots = observe(hide, program, seed, 100_000);
    let above: Vec<bool> = slots.iter().map(|(_, s)| *s >= CHUNKS * CHUNK_PAGES / 2).collect();
    let n = above.len() as f64;
    let up = above.iter().filter(|up| **up).count() as f64;
    let runs = 1.0 + above.windows(2).filter(|pair| pair[0] != pair[1]).count() as f64;
    let mean = 1.0 + 2.0 * up * (n - up) / n;
    (runs - mean).abs() / ((mean - 1.0) * (mean - 2.0) / (n - 1.0)).sqrt()
}

/// Dependence of the block of the slot on the block of the page (chi-square of a table of 16 x 16).
fn link_sigmas(hide: Hide, program: Program, seed: u64) -> f64 {
    let seen = observe(hide, program, seed, 200_000);
    let mut table = [[0u64; 16]; 16];
    for (page, slot) in &seen {
        table[(page * 16 / PAGES) as usize][(slot * 16 / (CHUNKS * CHUNK_PAGES)) as usize] += 1;
    }
    let rows = table.map(|row| row.iter().sum::<u64>() as f64);
    let columns = std::array::from_fn::<f64, 16, _>(|c| table.iter().map(|r| r[c] as f64).sum());
    let n = seen.len() as f64;
    let mut sum = 0.0;
    for (row, total) in table.iter().zip(rows) {
        for (count, column) in row.iter().zip(columns) {
            let expected = total * column / n;
            sum += (*count as f64 - expected).powi(2) / expected;
        }
    }
    let freedom = 15.0 * 15.0;
    (sum - freedom) / (2.0f64 * freedom).sqrt()
}

/// Checks a statistic with the random placement below a limit, and above with placement in order.
fn check(name: &str, limit: f64, programs: &[Program], statistic: fn(Hide, Program, u64) -> f64) {
    for &program in programs {
        for (seed, hide) in SEEDS.iter().flat_map(|s| [(*s, Hide::Writes), (*s, Hide::Reads)]) {
            let value = statistic(hide, program, seed);
            assert!(value < limit, "{name}, {program:?}, {hide:?}, seed {seed}: {value}");
        }
    }
    let control = [Program::Sequential, Program::Skewed];
    let most =
        control.map(|p| statistic(Hide::Off, p, SEEDS[0]).abs()).into_iter().fold(0., f64::max);
    assert!(most > 3.0 * limit, "{name}: the control passes with {most}");
}

const ALL: [Program; 3] = [Program::Sequential, Program::Random, Program::Skewed];

/// A page that is seldom stored keeps its slot for long, so with a skewed program some slots get
/// fewer stores.
#[test]
fn stores_are_uniform_over_the_slots() {
    let even = [Program::Sequential, Program::Random];
    check("chi-square", 5.0, &even, uniform_sigmas);
    // 2.2 is exceeded with a probability of 10^-4.
    check("Kolmogorov-Smirnov", 2.2, &even, kolmogorov);
}

#[test]
fn stores_have_no_order() {
    check("autocorrelation", 5.0, &ALL, order_sigmas);
    check("runs", 5.0, &ALL, runs_sigmas);
}

#[test]
fn slots_tell_nothing_about_pages() {
    check("page and slot", 5.0, &ALL, link_sigmas);
}

#[test]
fn page_returns_to_an_earlier_slot_by_chance_only() {
    for seed in SEEDS {
        let mut stores = Stores::new(Hide::Writes, seed);
        let mut before = vec![[u32::MAX; 2]; PAGES as usize];
        let (mut returned, mut count) = (0u32, 0u32);
        for page in (0..40).flat_map(|_| 0..PAGES) {
            let slot = stores.store(page);
            let [older, old] = before[page as usize];
            assert_ne!(slot, old, "the old slot is in use while the new one is drawn");
            if older != u32::MAX {
                (returned, count) = (returned + u32::from(slot == older), count + 1);
            }
            before[page as usize] = [old, slot];
        }
        let expected = f64::from(count) / f64::from(CHUNKS * CHUNK_PAGES - PAGES);
        let sigmas = (f64::from(returned) - expected) / expected.sqrt();
        // The slot of two stores ago may be in use by another page, which makes returns rarer.
        assert!(sigmas < 5.0, "seed {seed}: {returned} returns, {expected} by chance");
    }
}

/// The success of an observer who knows the slots of stores in their order, and no times.
fn observers_success(hide: Hide, seed: u64) -> Success {
    let run = |at: u64| {
        let program = if at.is_multiple_of(2) { Program::Sequential } else { Program::Random };
        let slots = slots_of(&observe(hide, program, seed * 1_000 + at, 400));
        (slot_features(&slots, CHUNKS * CHUNK_PAGES), at.is_multiple_of(2))
    };
    let (learned, judged): (Vec<_>, Vec<_>) =
        ((0..100).map(run).collect(), (100..200).map(run).collect());
    learner::success(&learned, &judged)
}

#[test]
fn observer_cannot_tell_programs_apart() {
    let control = observers_success(Hide::Off, SEEDS[0]);
    println!("hide off: {control:.2?}");
    assert!(control.regression.min(control.nearest) >= 0.95, "without hiding: {control:?}");
    for hide in [Hide::Writes, Hide::Reads] {
        let mean = Success::mean(&SEEDS.map(|seed| observers_success(hide, seed)));
        println!("hide {}: {mean:.2?}", hide.name());
        for share in [mean.regression, mean.nearest] {
            assert!((0.43..=0.57).contains(&share), "{hide:?}: {mean:?}");
        }
    }
}

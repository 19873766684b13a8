//! Synthetic access patterns: what a policy must handle, in pure form.

use units::Random;

use super::replay::Access;

/// An access pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// All pages in turn, again and again.
    CyclicScan,
    /// Independent accesses with Zipf's distribution of exponent 0.99, in shuffled order of pages.
    Zipf,
    /// Half of the accesses at random to 15 % of the pages, half a cyclic scan of the others.
    HotAndScan,
    /// Random accesses to a working set, which moves on by its own size six times.
    Moving,
}

/// Pages of a pattern; those of the working set in [`Pattern::Moving`].
pub const PAGES: u32 = 16_000;

impl Pattern {
    /// All patterns.
    pub const ALL: [Self; 4] = [Self::CyclicScan, Self::Zipf, Self::HotAndScan, Self::Moving];

    /// The pages that are in use at a time.
    pub fn pages(self) -> u32 {
        if self == Self::Moving { PAGES * 2 / 5 } else { PAGES }
    }

    /// Makes the accesses. Their number is in proportion to that of the design's simulations.
    pub fn accesses(self) -> Vec<Access> {
        let mut random = Random::new(7);
        let pages: Vec<u32> = match self {
            Self::CyclicScan => (0..15 * PAGES).map(|at| at % PAGES).collect(),
            Self::Zipf => zipf(&mut random),
            Self::HotAndScan => {
                let hot = PAGES * 15 / 100;
                let mut at = 0;
                let mut access = |_| {
                    if random.below(2) == 0 {
                        return random.below(hot.into()) as u32;
                    }
                    at = (at + 1) % (PAGES - hot);
                    hot + at
                };
                (0..20 * PAGES).map(&mut access).collect()
            }
            Self::Moving => {
                let set = self.pages();
                let access = |at: u32| {
                    let base = at / (4 * PAGES) * set % (5 * set);
                    base + random.below(set.into()) as u32
                };
                (0..24 * PAGES).map(access).collect()
            }
        };
        pages.into_iter().map(|page| Access { page, thread: 1 }).collect()
    }
}

fn zipf(random: &mut Random) -> Vec<u32> {
    let mut order: Vec<u32> = (0..PAGES).collect();
    random.shuffle(&mut order);
    let mut sums = Vec::with_capacity(PAGES as usize);
    let mut sum = 0.0;
    for rank in 1..=PAGES {
        sum += f64::from(rank).powf(-0.99);
        sums.push(sum);
    }
    let access = |_| {
        let at = random.below(1 << 52) as f64 / (1u64 << 52) as f64 * sum;
        order[sums.partition_point(|upto| *upto < at).min(order.len() - 1)]
    };
    (0..20 * PAGES).map(access).collect()
}

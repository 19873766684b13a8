//! Zipf's distribution, as YCSB draws from it (Gray et al., SIGMOD'94, "Quickly generating
//! billion-record synthetic databases").

use units::Random;

/// Exponent of YCSB.
const THETA: f64 = 0.99;

/// Zipf's distribution over ranks, of which 0 is drawn most often.
#[derive(Clone, Debug)]
pub struct Zipf {
    ranks: u64,
    zeta: f64,
    alpha: f64,
    eta: f64,
}

impl Zipf {
    /// The distribution over this number of ranks, above zero. Takes time in proportion to it.
    pub fn new(ranks: u64) -> Self {
        let zeta = |n: u64| (1..=n).map(|rank| (rank as f64).powf(-THETA)).sum::<f64>();
        let all = zeta(ranks);
        let eta = (1.0 - (2.0 / ranks as f64).powf(1.0 - THETA)) / (1.0 - zeta(2) / all);
        Self { ranks, zeta: all, alpha: 1.0 / (1.0 - THETA), eta }
    }

    /// Draws a rank.
    pub fn draw(&self, random: &mut Random) -> u64 {
        let uniform = (random.bits() >> 11) as f64 / (1_u64 << 53) as f64;
        let scaled = uniform * self.zeta;
        if scaled < 1.0 {
            return 0;
        }
        if scaled < 1.0 + 0.5_f64.powf(THETA) {
            return 1.min(self.ranks - 1);
        }
        let share = (self.eta * uniform - self.eta + 1.0).powf(self.alpha);
        ((self.ranks as f64 * share) as u64).min(self.ranks - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_the_shares_of_the_distribution() {
        let (zipf, mut random) = (Zipf::new(1000), Random::new(1));
        let mut counts = vec![0_u32; 1000];
        (0..1_000_000).for_each(|_| counts[zipf.draw(&mut random) as usize] += 1);
        let expected = |rank: usize| 1e6 * ((rank + 1) as f64).powf(-THETA) / zipf.zeta;
        for rank in [0, 1] {
            let off = f64::from(counts[rank]) / expected(rank) - 1.0;
            assert!(off.abs() < 0.02, "rank {rank}: {off}");
        }
        // The method is exact for the first two ranks, and an approximation beyond.
        let tail: u32 = counts[100..].iter().sum();
        let off = f64::from(tail) / (100..1000).map(expected).sum::<f64>() - 1.0;
        assert!(off.abs() < 0.05, "{off}");
    }

    #[test]
    fn few_ranks_are_no_special_case() {
        for ranks in 1..5 {
            let (zipf, mut random) = (Zipf::new(ranks), Random::new(2));
            assert!((0..1000).all(|_| zipf.draw(&mut random) < ranks));
        }
    }
}

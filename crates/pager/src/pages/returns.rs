//! Pages that come back from the pool, by the number of pages that were taken out in between.
//!
//! That number is the room that was missing: under a bound that is larger by it, the page would
//! have stayed. Stamps of the replacement policy measure it (`RECENT_STAMPS`).

use super::RECENT_STAMPS;

/// Stamps up to which a page comes back soon: four times the limit was taken out in between.
const SOON: usize = 4 * RECENT_STAMPS as usize;

/// Counts of pages by the stamps between their eviction and their return.
#[derive(Debug)]
pub struct Returns([u64; SOON]);

impl Default for Returns {
    fn default() -> Self {
        Self([0; SOON])
    }
}

impl Returns {
    /// Counts pages that come back at stamp `now` and were taken out at `stamp`.
    pub(crate) fn note(&mut self, now: u8, stamp: u8, pages: u32) {
        if let Some(count) = self.0.get_mut(usize::from(now.wrapping_sub(stamp))) {
            *count += u64::from(pages);
        }
    }

    /// Returns the number of pages that came back soon.
    pub fn pages(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Returns the number of stamps within which nine of ten of these pages came back.
    pub fn stamps(&self) -> u64 {
        let (all, mut seen) = (self.pages(), 0);
        let reaches = |count: &u64| {
            seen += count;
            10 * seen >= 9 * all
        };
        self.0.iter().position(reaches).map_or(0, |at| at as u64 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_come_back_late_do_not_count() {
        let mut returns = Returns::default();
        assert_eq!((returns.pages(), returns.stamps()), (0, 1));
        returns.note(3, 250, 90);
        returns.note(3, 3, 9);
        returns.note(0, 1, 1000);
        assert_eq!((returns.pages(), returns.stamps()), (99, 10));
        returns.note(40, 9, 200);
        assert_eq!((returns.pages(), returns.stamps()), (299, 32));
    }
}

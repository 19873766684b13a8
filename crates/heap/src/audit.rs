//! Counts of a group, and their comparison with a recount.

use std::collections::HashSet;

use crate::state::{Counts, State};
use crate::stats::Stats;

impl<C> State<C> {
    /// Adds the counts of this group.
    pub fn add_to(&self, stats: &mut Stats) {
        stats.held_chunks += self.chunks.len() - self.vacant.len();
        stats.empty_chunks += self.empty.len();
        for (class, counts) in stats.classes.iter_mut().zip(&self.counts) {
            class.live_blocks += counts.live;
            class.limbo_blocks += counts.limbo;
            class.slabs += counts.slabs;
        }
    }

    /// Compares counts, lists and limbo with a recount of all bitmaps.
    pub fn audit(&self) -> Result<(), String> {
        let mut counts = vec![Counts::default(); self.classes.count()];
        for slot in 0..self.chunks.len() as u32 {
            self.audit_chunk(slot, &mut counts)?;
        }
        equal("counts of the classes", &self.counts, &counts)?;
        self.audit_limbo()?;
        let is_empty = |slot: &u32| {
            self.chunks[*slot as usize].as_ref().is_some_and(|chunk| chunk.slabs_used == 0)
        };
        let mut empty = self.empty.clone();
        empty.sort_unstable();
        let recount: Vec<u32> = (0..self.chunks.len() as u32).filter(is_empty).collect();
        equal("empty chunks", &empty, &recount)?;
        let vacant = self.chunks.iter().filter(|chunk| chunk.is_none()).count();
        equal("slots without a chunk", &self.vacant.len(), &vacant)
    }

    fn audit_chunk(&self, slot: u32, counts: &mut [Counts]) -> Result<(), String> {
        let mut slabs_used = 0;
        for number in self.slabs_of(slot) {
            let slab = &self.slabs[number as usize];
            equal("list of a slab", &slab.link.list, &self.wanted_list(number))?;
            let Some(class) = slab.class else {
                equal("blocks of an unused slab", &(slab.used, slab.live), &(0, 0))?;
                continue;
            };
            slabs_used += 1;
            let (used, live) = slab.recount();
            equal("used and live blocks of a slab", &(slab.used, slab.live), &(used, live))?;
            let counts = &mut counts[class.index()];
            counts.slabs += 1;
            counts.live += u64::from(live);
            counts.limbo += u64::from(used - live);
        }
        let counted = self.chunks[slot as usize].as_ref().map_or(0, |chunk| chunk.slabs_used);
        equal("used slabs of a chunk", &counted, &slabs_used)
    }

    fn audit_limbo(&self) -> Result<(), String> {
        let limbo: u64 = self.counts.iter().map(|counts| counts.limbo).sum();
        equal("blocks in limbo", &(self.limbo.len() as u64), &limbo)?;
        let mut seen = HashSet::new();
        for freed in &self.limbo {
            let is_in_limbo = self.slabs[freed.slab as usize].is_in_limbo(freed.block);
            if !is_in_limbo || !seen.insert((freed.slab, freed.block)) {
                let (slab, block) = (freed.slab, freed.block);
                return Err(format!(
                    "block {block} of slab {slab} is in limbo twice, or not at all"
                ));
            }
        }
        match self.limbo.iter().is_sorted_by_key(|freed| freed.epoch) {
            true => Ok(()),
            false => Err("limbo is not sorted by epoch".into()),
        }
    }
}

fn equal<T: PartialEq + std::fmt::Debug>(
    object: &str,
    kept: &T,
    counted: &T,
) -> Result<(), String> {
    match kept == counted {
        true => Ok(()),
        false => Err(format!("{object}: kept as {kept:?}, counted as {counted:?}")),
    }
}

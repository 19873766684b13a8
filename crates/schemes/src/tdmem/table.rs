//! The donor's tables: the owner of each page, and the free pages of each tier.
//!
//! Only the engine changes them, in the NIC's thread. The memory node's CPU reads them for its
//! status and its audit. Therefore all cells are atomic, but there is no lock, and no operation is
//! a read-modify-write.
//!
//! A page takes 6 bytes: its owner (2), and a place in the free list (4). A draw moves the last
//! entry of the list to the place of the drawn one, so that no page needs to know its place.

use std::ops::Range;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::Tier;
use super::layout::Owner;
use super::random::Random;

/// The free pages among consecutive pages. One thread at a time may change the list.
pub struct FreePages {
    range: Range<u32>,
    pages: Box<[AtomicU32]>,
    len: AtomicU32,
}

impl FreePages {
    /// A list in which all pages of `range` are free.
    pub fn new(range: Range<u32>) -> Self {
        let pages = range.clone().map(AtomicU32::new).collect();
        let len = AtomicU32::new(range.end.saturating_sub(range.start));
        Self { range, pages, len }
    }

    /// The pages, free or not.
    pub fn range(&self) -> Range<u32> {
        self.range.clone()
    }

    /// Number of free pages.
    pub fn len(&self) -> u32 {
        self.len.load(Ordering::Acquire)
    }

    /// Returns true if no page is free.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes a free page; each one has the same probability.
    pub fn draw(&self, random: &mut Random) -> Option<u32> {
        let last = self.len().checked_sub(1)?;
        let drawn = &self.pages[random.below(last + 1) as usize];
        let page = drawn.load(Ordering::Relaxed);
        drawn.store(self.pages[last as usize].load(Ordering::Relaxed), Ordering::Relaxed);
        self.len.store(last, Ordering::Release);
        Some(page)
    }

    /// Adds a page of the range that was drawn before.
    pub fn add(&self, page: u32) {
        let len = self.len();
        if let Some(end) = self.pages.get(len as usize) {
            end.store(page, Ordering::Relaxed);
            self.len.store(len + 1, Ordering::Release);
        }
    }

    /// The free pages.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.pages[..self.len() as usize].iter().map(|page| page.load(Ordering::Relaxed))
    }
}

/// What the engine counts.
#[derive(Default)]
pub struct Counts {
    /// Pages drawn for a STORE.
    pub draws: AtomicU64,
    /// Pages that a compute node freed, also by replacing them.
    pub frees: AtomicU64,
    /// Pages freed for a departed compute node.
    pub reclaimed: AtomicU64,
    /// Commands that were refused.
    pub refused: AtomicU64,
    /// STOREs into another tier than the target tier.
    pub fallbacks: AtomicU64,
    /// STOREs that overwrote their own page, because no page was free.
    pub overwrites: AtomicU64,
}

/// Counts an event. Only the engine writes the counts.
pub fn count(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

/// The tables of a memory node.
pub struct Tables {
    owners: Box<[AtomicU16]>,
    tiers: [FreePages; 2],
    /// Counters.
    pub counts: Counts,
}

impl Tables {
    /// Tables in which all of `pages` pages are free. The first `fast` pages are those of tier
    /// `fast`.
    pub fn new(pages: u32, fast: u32) -> Self {
        let fast = fast.min(pages);
        Self {
            owners: (0..pages).map(|_| AtomicU16::new(0)).collect(),
            tiers: [FreePages::new(0..fast), FreePages::new(fast..pages)],
            counts: Counts::default(),
        }
    }

    /// Number of pages.
    pub fn pages(&self) -> u32 {
        self.owners.len() as u32
    }

    /// Number of free pages.
    pub fn free(&self) -> u32 {
        self.tiers.iter().map(FreePages::len).sum()
    }

    /// The free pages of a tier of the memory node.
    pub fn tier(&self, tier: Tier) -> &FreePages {
        &self.tiers[usize::from(tier != Tier::Fast)]
    }

    /// The tier that contains a page.
    pub fn tier_of(&self, page: u32) -> Tier {
        match self.tiers[0].range.contains(&page) {
            true => Tier::Fast,
            false => Tier::Dram,
        }
    }

    /// The owner of a page; 0 if the page is free or does not exist.
    pub fn owner(&self, page: u32) -> Owner {
        self.owners.get(page as usize).map_or(0, |owner| owner.load(Ordering::Acquire))
    }

    /// Sets the owner of a page that exists.
    pub fn set_owner(&self, page: u32, owner: Owner) {
        self.owners[page as usize].store(owner, Ordering::Release);
    }

    /// Takes a free page of `target`, or of another tier if `target` has none.
    pub fn draw(&self, target: Tier, random: &mut Random) -> Option<u32> {
        let others = Tier::DONOR.into_iter().filter(|tier| *tier != target);
        let page = self.tier(target).draw(random).or_else(|| {
            let page = others.into_iter().find_map(|tier| self.tier(tier).draw(random))?;
            count(&self.counts.fallbacks);
            Some(page)
        })?;
        count(&self.counts.draws);
        Some(page)
    }

    /// Frees a page, which must be clear.
    pub fn free_page(&self, page: u32) {
        self.set_owner(page, 0);
        self.tier(self.tier_of(page)).add(page);
    }

    /// Checks that each page is either free once, or owned by an owner for which `exists` is true.
    ///
    /// # Errors
    /// A description of the first wrong page.
    pub fn audit(&self, exists: impl Fn(Owner) -> bool) -> Result<(), String> {
        let mut is_free = vec![false; self.owners.len()];
        for tier in &self.tiers {
            for page in tier.iter() {
                if !tier.range.contains(&page) {
                    return Err(format!("page {page} is in the free list of another tier"));
                }
                if std::mem::replace(&mut is_free[page as usize], true) {
                    return Err(format!("page {page} is in the free list twice"));
                }
            }
        }
        for (page, is_free) in (0..).zip(is_free) {
            match (self.owner(page), is_free) {
                (0, true) => {}
                (0, false) => {
                    return Err(format!("page {page} is lost: neither free nor owned"));
                }
                (owner, true) => {
                    return Err(format!("page {page} is free, and belongs to owner {owner}"));
                }
                (owner, false) if !exists(owner) => {
                    return Err(format!(
                        "page {page} belongs to owner {owner}, which has departed"
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

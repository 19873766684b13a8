//! The building blocks of the policies: a set of pages, a queue of runs, and windows left behind.
//!
//! They work on *blocks*, aligned groups of 64 pages: a run is cut where a block ends. A queue may
//! hold stale parts, and the set says which pages count. So removing a page costs one operation on
//! the set, and no search in a queue.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use units::Random;

use super::{RUN_PAGES, Run};

/// Hashes a block's number by one multiplication. The program chooses the numbers, and can only
/// slow itself down with them.
#[derive(Debug, Default)]
pub(super) struct BlockHasher(u64);

impl Hasher for BlockHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Calls `visit` with the parts of a run by block, each with the block's number.
pub(super) fn blocks(run: Run, mut visit: impl FnMut(u32, Run)) {
    let mut start = run.start;
    while start < run.end() {
        let block = start / RUN_PAGES;
        let end = run.end().min((block + 1) * RUN_PAGES);
        visit(block, Run { start, pages: end - start });
        start = end;
    }
}

/// Returns the mask of a run in its block.
fn bits_of(run: Run) -> u64 {
    mask(run.pages) << (run.start % RUN_PAGES)
}

/// Returns a mask of the `pages` lowest bits, 1 to 64.
fn mask(pages: u32) -> u64 {
    u64::MAX >> (64 - pages)
}

/// Calls `visit` with each run of set bits of a block's mask.
fn runs_of(block: u32, mut bits: u64, mut visit: impl FnMut(Run)) {
    while bits != 0 {
        let at = bits.trailing_zeros();
        let pages = (bits >> at).trailing_ones();
        visit(Run { start: block * RUN_PAGES + at, pages });
        bits &= !(mask(pages) << at);
    }
}

/// A set of pages, as one bit for each page of each block that has any.
#[derive(Clone, Debug, Default)]
pub(super) struct PageSet {
    blocks: HashMap<u32, u64, BuildHasherDefault<BlockHasher>>,
    pages: u32,
}

impl PageSet {
    /// Number of pages.
    pub fn len(&self) -> u32 {
        self.pages
    }

    /// Adds a run, and calls `new` with its parts that were not in the set.
    pub fn insert(&mut self, run: Run, mut new: impl FnMut(Run)) {
        blocks(run, |block, part| {
            let bits = bits_of(part);
            let held = self.blocks.entry(block).or_default();
            let added = bits & !*held;
            *held |= bits;
            self.pages += added.count_ones();
            runs_of(block, added, &mut new);
        });
    }

    /// Removes a run, and calls `gone` with its parts that were in the set.
    pub fn remove(&mut self, run: Run, mut gone: impl FnMut(Run)) {
        blocks(run, |block, part| {
            let bits = bits_of(part);
            let Some(held) = self.blocks.get_mut(&block) else { return };
            let removed = bits & *held;
            *held &= !bits;
            if *held == 0 {
                self.blocks.remove(&block);
            }
            self.pages -= removed.count_ones();
            runs_of(block, removed, &mut gone);
        });
    }

    /// Calls `visit` with each part of a run that is in the set.
    pub fn each_part(&self, run: Run, mut visit: impl FnMut(Run)) {
        blocks(run, |block, part| {
            let held = bits_of(part) & self.blocks.get(&block).copied().unwrap_or(0);
            runs_of(block, held, &mut visit);
        });
    }

    /// Returns the first part of a run that is in the set.
    pub fn first_part(&self, run: Run) -> Option<Run> {
        let mut first = None;
        blocks(run, |block, part| {
            let held = bits_of(part) & self.blocks.get(&block).copied().unwrap_or(0);
            runs_of(block, held, |part| first = first.or(Some(part)));
        });
        first
    }

    /// Keeps only the pages for which `keep` returns true.
    pub fn retain(&mut self, mut keep: impl FnMut(u32) -> bool) {
        self.pages = 0;
        self.blocks.retain(|block, held| {
            let bits = *held;
            for bit in (0..RUN_PAGES).filter(|bit| bits >> bit & 1 == 1) {
                if !keep(block * RUN_PAGES + bit) {
                    *held &= !(1 << bit);
                }
            }
            self.pages += held.count_ones();
            *held != 0
        });
    }
}

/// A run in a queue, with the number of times that it goes round before it leaves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queued {
    pub run: Run,
    pub credit: u8,
}

/// A queue of runs, which may have stale parts.
#[derive(Debug, Default)]
pub(super) struct RunQueue {
    runs: VecDeque<Queued>,
    pages: u32,
}

impl RunQueue {
    /// Number of pages, stale ones included.
    pub fn len(&self) -> u32 {
        self.pages
    }

    /// Appends a run. It joins the last one if it continues that one in the same block.
    pub fn push(&mut self, run: Run, credit: u8) {
        self.pages += run.pages;
        match self.runs.back_mut() {
            Some(last)
                if last.run.end() == run.start
                    && !run.start.is_multiple_of(RUN_PAGES)
                    && last.credit == credit =>
            {
                last.run.pages += run.pages;
            }
            _ => self.runs.push_back(Queued { run, credit }),
        }
    }

    /// Removes the first run.
    pub fn pop(&mut self) -> Option<Queued> {
        let first = self.runs.pop_front()?;
        self.pages -= first.run.pages;
        Some(first)
    }

    /// Puts the rest of a run back to the front.
    fn unpop(&mut self, queued: Queued) {
        self.pages += queued.run.pages;
        self.runs.push_front(queued);
    }

    /// Removes the first run of at most `max` pages that are in `set`, and takes them from the set.
    /// Drops stale parts before it. A run with credit goes to the end and loses one.
    pub fn take(&mut self, set: &mut PageSet, max: u32) -> Option<Run> {
        loop {
            let Queued { run, credit } = self.pop()?;
            let Some(part) = set.first_part(run) else { continue };
            if credit > 0 {
                self.push(Run { start: part.start, pages: run.end() - part.start }, credit - 1);
                continue;
            }
            let part = Run { pages: part.pages.min(max), ..part };
            if part.end() < run.end() {
                let rest = Run { start: part.end(), pages: run.end() - part.end() };
                self.unpop(Queued { run: rest, credit });
            }
            set.remove(part, |_| ());
            return Some(part);
        }
    }

    /// As [`RunQueue::take`], from a random run. Of a long run only `max` pages are taken, so it is
    /// chosen more often: each page is taken with the same probability.
    pub fn take_random(&mut self, set: &mut PageSet, random: &mut Random, max: u32) -> Option<Run> {
        let parts_max = u64::from(RUN_PAGES.div_ceil(max));
        let tries = if self.runs.is_empty() { 0 } else { 2 * RUN_PAGES };
        for _ in 0..tries {
            let index = random.below(self.runs.len() as u64) as usize;
            let parts = self.runs[index].run.pages.div_ceil(max);
            if random.below(parts_max) < u64::from(parts) {
                self.runs.swap(0, index);
                break;
            }
        }
        self.take(set, max)
    }

    /// Drops stale parts, and all but the first part of a page. `left` starts as the pages that
    /// count and loses those that the queue holds.
    pub fn compact(&mut self, left: &mut PageSet) {
        let runs = std::mem::take(&mut self.runs);
        self.pages = 0;
        for Queued { run, credit } in runs {
            left.remove(run, |part| self.push(part, credit));
        }
    }
}

/// Windows that streams leave before the oldest of them is evicted.
const GRACE_WINDOWS: usize = 2;
/// Windows left behind that are remembered at most. Older ones are forgotten.
const LEFT_MAX: usize = 64;

/// Windows that streams have left, the oldest first. A page of them is in another queue too.
#[derive(Debug, Default)]
pub(super) struct LeftWindows(VecDeque<Run>);

impl LeftWindows {
    /// Adds a window.
    pub fn push(&mut self, window: Run) {
        self.0.push_back(window);
        if self.0.len() > LEFT_MAX {
            self.0.pop_front();
        }
    }

    /// Takes at most `max` pages of the oldest window from the set, once [`GRACE_WINDOWS`] others
    /// were left after it.
    pub fn take(&mut self, set: &mut PageSet, max: u32) -> Option<Run> {
        while self.0.len() > GRACE_WINDOWS {
            let window = self.0.pop_front()?;
            let Some(part) = set.first_part(window) else { continue };
            let part = Run { pages: part.pages.min(max), ..part };
            if part.end() < window.end() {
                self.0.push_front(Run { start: part.end(), pages: window.end() - part.end() });
            }
            set.remove(part, |_| ());
            return Some(part);
        }
        None
    }
}

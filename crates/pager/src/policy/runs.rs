//! The building blocks of the policies: a set of pages, a queue of runs, and windows left behind.
//!
//! They work on *blocks*, aligned groups of 64 pages: a run is cut where a block ends. A queue may
//! hold stale parts, and the set says which pages count. So removing a page costs one operation on
//! the set, and no search in a queue.
//!
//! All memory is allocated at the start, because the calls come from the fault path. [`room`]
//! bounds the queues. They grow beyond it only if more pages are resident than the limit allows.

use std::collections::VecDeque;
use std::hash::Hasher;
use std::io;

use units::Random;

use super::{RUN_PAGES, Run};
use crate::page_table::Words;

/// Stale pages of the queues that are always permitted.
const STALE_PAGES: u32 = 16 * RUN_PAGES;

/// Returns the number of pages in queues, stale ones included, from which on the queues are
/// compacted, if `pages` pages count.
pub(super) fn compact_from(pages: u32) -> u32 {
    pages.saturating_add(pages / 2).saturating_add(STALE_PAGES)
}

/// Returns the number of runs for which a queue has memory from the start, if at most `limit` pages
/// count. A run has at least one page.
fn room(limit: u32) -> usize {
    compact_from(limit) as usize + 2 * RUN_PAGES as usize
}

/// Hashes a page's number by one multiplication. The program chooses the numbers, and can only
/// slow itself down with them.
#[derive(Debug, Default)]
pub(super) struct PageHasher(u64);

impl Hasher for PageHasher {
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

/// A set of pages, as one bit for each page: two words for each block. The first word has the
/// pages, the second one is used by [`RunQueue::compact`].
#[derive(Debug)]
pub(super) struct PageSet {
    words: Words,
    pages: u32,
}

impl PageSet {
    /// Creates an empty set of pages below `end`.
    pub fn new(end: u32) -> io::Result<Self> {
        let blocks = end.div_ceil(RUN_PAGES) as usize;
        Ok(Self { words: Words::new(2 * blocks)?, pages: 0 })
    }

    /// Number of pages.
    pub fn len(&self) -> u32 {
        self.pages
    }

    fn held(&self, block: u32) -> u64 {
        self.words.get(2 * block as usize)
    }

    fn set_held(&mut self, block: u32, bits: u64) {
        self.words.set(2 * block as usize, bits);
    }

    /// Returns true if the set has the page.
    pub fn has(&self, page: u32) -> bool {
        self.held(page / RUN_PAGES) >> (page % RUN_PAGES) & 1 == 1
    }

    /// Adds a run, and calls `new` with its parts that were not in the set.
    pub fn insert(&mut self, run: Run, mut new: impl FnMut(Run)) {
        blocks(run, |block, part| {
            let held = self.held(block);
            let added = bits_of(part) & !held;
            self.set_held(block, held | added);
            self.pages += added.count_ones();
            runs_of(block, added, &mut new);
        });
    }

    /// Removes a run.
    pub fn remove(&mut self, run: Run) {
        blocks(run, |block, part| {
            let held = self.held(block);
            let removed = bits_of(part) & held;
            self.set_held(block, held & !removed);
            self.pages -= removed.count_ones();
        });
    }

    /// Calls `visit` with each part of a run that is in the set.
    pub fn each_part(&self, run: Run, mut visit: impl FnMut(Run)) {
        blocks(run, |block, part| runs_of(block, bits_of(part) & self.held(block), &mut visit));
    }

    /// Returns the first part of a run that is in the set.
    pub fn first_part(&self, run: Run) -> Option<Run> {
        let mut first = None;
        blocks(run, |block, part| {
            if first.is_none() {
                let mut held = bits_of(part) & self.held(block);
                // Only the lowest run of bits is needed.
                held &= !(held.wrapping_add(held & held.wrapping_neg()) & held);
                runs_of(block, held, |part| first = Some(part));
            }
        });
        first
    }

    /// Marks the pages of a run, and calls `new` with its parts that are in the set and were not
    /// marked.
    fn mark(&mut self, run: Run, mut new: impl FnMut(Run)) {
        blocks(run, |block, part| {
            let at = 2 * block as usize + 1;
            let marked = self.words.get(at);
            let added = bits_of(part) & self.held(block) & !marked;
            self.words.set(at, marked | added);
            runs_of(block, added, &mut new);
        });
    }

    /// Removes the marks of the blocks of a run.
    fn unmark(&mut self, run: Run) {
        blocks(run, |block, _| self.words.set(2 * block as usize + 1, 0));
    }
}

/// A run in a queue, with the number of times that it goes round before it leaves: 8 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queued {
    start: u32,
    pages: u8,
    credit: u8,
}

impl Queued {
    fn new(run: Run, credit: u8) -> Self {
        debug_assert!((1..=RUN_PAGES).contains(&run.pages), "{run:?}");
        Self { start: run.start, pages: run.pages as u8, credit }
    }

    fn run(self) -> Run {
        Run { start: self.start, pages: u32::from(self.pages) }
    }
}

/// A queue of runs, which may have stale parts. No run crosses the end of a block.
#[derive(Debug)]
pub(super) struct RunQueue {
    runs: VecDeque<Queued>,
    pages: u32,
}

impl RunQueue {
    /// Creates an empty queue, with memory for `limit` pages that count.
    pub fn new(limit: u32) -> Self {
        Self { runs: VecDeque::with_capacity(room(limit)), pages: 0 }
    }

    /// Returns the number of runs for which the queue has memory.
    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.runs.capacity()
    }

    /// Number of pages, stale ones included.
    pub fn len(&self) -> u32 {
        self.pages
    }

    /// Appends a run. It joins the last one if it continues that one in the same block.
    pub fn push(&mut self, run: Run, credit: u8) {
        self.pages += run.pages;
        match self.runs.back_mut() {
            Some(last)
                if last.run().end() == run.start
                    && !run.start.is_multiple_of(RUN_PAGES)
                    && last.credit == credit =>
            {
                last.pages += run.pages as u8;
            }
            _ => self.runs.push_back(Queued::new(run, credit)),
        }
    }

    /// Removes the first run. Returns it with its credit.
    pub fn pop(&mut self) -> Option<(Run, u8)> {
        let first = self.runs.pop_front()?;
        self.pages -= first.run().pages;
        Some((first.run(), first.credit))
    }

    /// Removes the first run of at most `max` pages that are in `set`, and takes them from the set.
    /// Drops stale parts before it. A run with credit goes to the end and loses one.
    pub fn take(&mut self, set: &mut PageSet, max: u32) -> Option<Run> {
        loop {
            let (run, credit) = self.pop()?;
            let Some(part) = set.first_part(run) else { continue };
            if credit > 0 {
                self.push(Run { start: part.start, pages: run.end() - part.start }, credit - 1);
                continue;
            }
            let part = Run { pages: part.pages.min(max), ..part };
            if part.end() < run.end() {
                let rest = Run { start: part.end(), pages: run.end() - part.end() };
                self.pages += rest.pages;
                self.runs.push_front(Queued::new(rest, credit));
            }
            set.remove(part);
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
            let parts = self.runs[index].run().pages.div_ceil(max);
            if random.below(parts_max) < u64::from(parts) {
                self.runs.swap(0, index);
                break;
            }
        }
        self.take(set, max)
    }

    /// Drops stale parts, and all but the first part of a page. Marks the pages that are left.
    pub fn compact(&mut self, set: &mut PageSet) {
        self.pages = 0;
        let before = self.runs.len();
        let mut is_first = true;
        for _ in 0..before {
            let Some(queued) = self.runs.pop_front() else { break };
            set.mark(queued.run(), |part| {
                // Until then the last run is one of those that are still to be looked at.
                if std::mem::take(&mut is_first) {
                    self.pages += part.pages;
                    self.runs.push_back(Queued::new(part, queued.credit));
                } else {
                    self.push(part, queued.credit);
                }
            });
        }
    }

    pub fn unmark(&self, set: &mut PageSet) {
        self.runs.iter().for_each(|queued| set.unmark(queued.run()));
    }
}

/// Windows left behind that are remembered at most. Older ones are forgotten.
const LEFT_MAX: usize = 64;

/// Windows that streams have left, the oldest first. A page of them is in another queue too.
#[derive(Debug)]
pub(super) struct LeftWindows(VecDeque<Run>);

impl LeftWindows {
    /// Creates an empty queue.
    pub fn new() -> Self {
        Self(VecDeque::with_capacity(LEFT_MAX))
    }

    /// Returns an empty queue without memory.
    pub fn none() -> Self {
        Self(VecDeque::new())
    }

    /// Adds a window.
    pub fn push(&mut self, window: Run) {
        if self.0.len() == LEFT_MAX {
            self.0.pop_front();
        }
        self.0.push_back(window);
    }

    /// Adds a window. It joins the newest one if it continues that one.
    pub fn join(&mut self, window: Run) {
        match self.0.back_mut() {
            Some(newest) if newest.end() == window.start => newest.pages += window.pages,
            _ => self.push(window),
        }
    }

    /// Takes at most `max` pages of the oldest window from the set.
    pub fn take(&mut self, set: &mut PageSet, max: u32) -> Option<Run> {
        let part = self.next(max, |window| set.first_part(window))?;
        set.remove(part);
        Some(part)
    }

    /// Returns at most `max` pages of the oldest window of which `first` finds a part, and removes
    /// the window up to their end.
    pub fn next(&mut self, max: u32, first: impl Fn(Run) -> Option<Run>) -> Option<Run> {
        loop {
            let window = self.0.pop_front()?;
            let Some(part) = first(window) else { continue };
            let part = Run { pages: part.pages.min(max), ..part };
            if part.end() < window.end() {
                self.0.push_front(Run { start: part.end(), pages: window.end() - part.end() });
            }
            return Some(part);
        }
    }

    /// Returns the number of windows for which there is memory.
    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compaction_keeps_the_order_of_pages_and_drops_stale_ones() {
        let mut set = PageSet::new(1024).unwrap();
        let (mut main, mut new) = (RunQueue::new(64), RunQueue::new(64));
        let run = |start, pages| Run { start, pages };
        // The last run would join the first one if that came behind it.
        for (run, credit) in [(run(8, 8), 0), (run(100, 4), 1), (run(200, 8), 0), (run(0, 8), 0)] {
            set.insert(run, |part| main.push(part, credit));
        }
        set.insert(run(300, 4), |part| new.push(part, 0));
        new.push(run(100, 2), 0);
        set.remove(run(202, 3));
        for round in 0..3 {
            let before = main.len() + new.len();
            main.compact(&mut set);
            new.compact(&mut set);
            main.unmark(&mut set);
            new.unmark(&mut set);
            assert_eq!((main.len(), new.len()), (25, 4), "round {round}: {before} pages before");
        }
        let left: Vec<_> = std::iter::from_fn(|| main.pop()).collect();
        let expected = [(8, 8, 0), (100, 4, 1), (200, 2, 0), (205, 3, 0), (0, 8, 0)];
        assert_eq!(left, expected.map(|(start, pages, credit)| (run(start, pages), credit)));
    }
}

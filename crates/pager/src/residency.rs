//! The eviction queue: resident pages in the order in which they are evicted.
//!
//! The order is first in, first out, by runs of pages. The staging area gives pages a second
//! chance: a page that is used again while it is staged returns without I/O to the end of the
//! queue. The queue holds each page at most once; the QUEUED bit of the page's entry (see
//! [`crate::page_table`]) marks queued pages. A queue entry is stale when its page is no longer
//! resident. Stale entries are dropped when they reach the front, or by [`Residency::compact`] when
//! the queue is too long.

use std::collections::VecDeque;

use crate::page_table::{PageId, PageTable, State};

/// A run of consecutive pages that became resident together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    start: u32,
    pages: u32,
}

/// The queue of resident pages.
#[derive(Debug, Default)]
pub struct Residency {
    runs: VecDeque<Run>,
    queued: usize,
}

impl Residency {
    /// Number of pages in the queue, stale entries included.
    pub fn len(&self) -> usize {
        self.queued
    }

    /// True if the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.queued == 0
    }

    /// Appends pages that have become resident. A page that is already queued keeps its position.
    pub fn push(&mut self, table: &PageTable, start: PageId, pages: u32) {
        for page in start.0..start.0 + pages {
            if table.set_queued(PageId(page), true) {
                continue;
            }
            self.queued += 1;
            match self.runs.back_mut() {
                Some(run) if run.start + run.pages == page => run.pages += 1,
                _ => self.runs.push_back(Run { start: page, pages: 1 }),
            }
        }
    }

    /// Removes at most `count` consecutive pages from the front and clears their QUEUED bits.
    pub fn pop(&mut self, table: &PageTable, count: u32) -> Option<(PageId, u32)> {
        let run = self.runs.front_mut()?;
        let start = PageId(run.start);
        let pages = run.pages.min(count);
        run.start += pages;
        run.pages -= pages;
        if run.pages == 0 {
            self.runs.pop_front();
        }
        self.queued -= pages as usize;
        for page in start.0..start.0 + pages {
            table.set_queued(PageId(page), false);
        }
        Some((start, pages))
    }

    /// Drops stale entries if the queue is longer than `limit` pages.
    pub fn compact(&mut self, table: &PageTable, limit: usize) {
        if self.queued <= limit {
            return;
        }
        for run in std::mem::take(&mut self.runs) {
            for page in run.start..run.start + run.pages {
                let page = PageId(page);
                let entry = table.load(page);
                table.set_queued(page, false);
                self.queued -= 1;
                if entry.state() == State::Resident || entry.is_busy() {
                    self.push(table, page, 1);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_table::Entry;

    fn make_resident(table: &PageTable, page: u32) {
        table.lock(PageId(page));
        let _ = table.unlock(PageId(page), Entry::resident(None));
    }

    #[test]
    fn pages_are_popped_once_in_fifo_order() {
        let table = PageTable::new(100).unwrap();
        let mut queue = Residency::default();
        queue.push(&table, PageId(10), 4);
        queue.push(&table, PageId(50), 1);
        queue.push(&table, PageId(12), 4);
        assert_eq!(queue.len(), 7);
        assert_eq!(queue.pop(&table, 3), Some((PageId(10), 3)));
        assert_eq!(queue.pop(&table, 3), Some((PageId(13), 1)));
        assert_eq!(queue.pop(&table, 3), Some((PageId(50), 1)));
        assert_eq!(queue.pop(&table, 3), Some((PageId(14), 2)));
        assert_eq!(queue.pop(&table, 3), None);
        assert!(!table.load(PageId(10)).is_queued());
    }

    #[test]
    fn compaction_drops_stale_entries() {
        let table = PageTable::new(1000).unwrap();
        let mut queue = Residency::default();
        queue.push(&table, PageId(0), 500);
        make_resident(&table, 7);
        make_resident(&table, 400);
        queue.compact(&table, 600);
        assert_eq!(queue.len(), 500);
        queue.compact(&table, 100);
        assert_eq!(queue.pop(&table, 64), Some((PageId(7), 1)));
        assert_eq!(queue.pop(&table, 64), Some((PageId(400), 1)));
        assert!(queue.is_empty());
    }
}

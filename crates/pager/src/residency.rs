//! Which page goes next.
//!
//! First in, first out, in runs; the second chance is the staging area, from which a page that is
//! used again comes back without I/O and to the end of the queue. The queue holds a page once: the
//! QUEUED bit of its entry says so (see [`crate::page_table`]), and an entry for a page that is no
//! longer resident is dropped when it comes up, or when stale entries outnumber the others.

use std::collections::VecDeque;

use crate::page_table::{PageId, PageTable, State};

/// A run of pages that became resident together.
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
    /// Pages in the queue, stale ones included.
    pub fn len(&self) -> usize {
        self.queued
    }

    /// True if the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.queued == 0
    }

    /// Appends pages that have become resident. Those that are in the queue stay where they are.
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

    /// Takes at most `count` pages from the front, all contiguous. They are no longer queued.
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
        let _ = table.unlock(PageId(page), Entry::dirty(None));
    }

    #[test]
    fn pages_leave_in_the_order_of_arrival_once() {
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
    fn stale_entries_are_dropped_when_they_are_many() {
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

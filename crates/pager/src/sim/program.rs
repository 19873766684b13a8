//! Threads of the simulated program, and their operations on memory.

use std::rc::Rc;

use super::fiber::{pause, trace, wait_until};
use super::pattern::Pattern;
use super::threads;
use super::world::World;
use crate::memory::model::{Bytes, WORDS};
use crate::page_table::PageId;
use crate::pages::Hand;

/// Order in which a thread uses pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Pages at a constant distance, which may be negative.
    Stride(i32),
    /// Random pages.
    Random,
    /// Random pages below this number, and sometimes any page.
    Working(u32),
    /// The order of a whole program. The program first writes all pages and uses random ones, and
    /// the transfers that follow are recorded.
    Pattern(Pattern),
}

/// Operations of one thread.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub order: Order,
    /// Number of operations.
    pub operations: u32,
    /// Accesses for each write, on average; 0 for no writes. The next fields count operations for
    /// each drop, raw drop, move and fork alike.
    pub writes: u32,
    pub drops: u32,
    pub raw_drops: u32,
    pub moves: u32,
    pub forks: u32,
}

impl Default for Program {
    fn default() -> Self {
        Self {
            order: Order::Random,
            operations: 40,
            writes: 2,
            drops: 0,
            raw_drops: 0,
            moves: 0,
            forks: 0,
        }
    }
}

/// Maximum number of pages of a drop or a move.
const RANGE_PAGES: u32 = 6;

/// Runs a thread of the program.
pub(crate) fn run(world: &Rc<World>, index: u32, program: &Program) {
    let thread = index + 1;
    let pages = world.setup.pages;
    let once_in = |n: u32| world.random.borrow_mut().once_in(n);
    let below = |n: u32| world.random.borrow_mut().below(n);
    let mut listed = match program.order {
        Order::Pattern(pattern) => {
            (0..pages).for_each(|page| access(world, thread, page, true));
            (0..2 * pages).for_each(|_| access(world, thread, below(pages), once_in(2)));
            world.pool.watch(true);
            pattern.list(pages, program.operations, &mut world.random.borrow_mut())
        }
        _ => Vec::new(),
    }
    .into_iter();
    let mut page = below(pages);
    for _ in 0..program.operations {
        page = match program.order {
            Order::Stride(step) => {
                (i64::from(page) + i64::from(step)).rem_euclid(pages.into()) as u32
            }
            Order::Random => below(pages),
            Order::Working(count) if !once_in(16) => below(count.min(pages)),
            Order::Working(_) => below(pages),
            Order::Pattern(_) => listed.next().expect("a page for each operation"),
        };
        if once_in(program.drops) {
            drop_pages(world, page..pages.min(page + 1 + below(RANGE_PAGES)));
        } else if once_in(program.raw_drops) {
            drop_raw(world, page);
        } else if once_in(program.moves) {
            move_pages(world);
        } else if once_in(program.forks) {
            lock_space(world);
            threads::fork(world, thread, || {
                for _ in 0..below(3) {
                    access(world, thread, below(pages), once_in(2));
                }
            });
            world.space.set(false);
        } else {
            access(world, thread, page, once_in(program.writes));
        }
    }
    world.pool.watch(false);
    world.running.set(world.running.get() - 1);
}

/// Reads a page, and perhaps writes to it.
fn access(world: &World, thread: u32, page: u32, write: bool) {
    wait_until("waits for the end of a move", || !world.excluded.borrow()[page as usize]);
    world.users.borrow_mut()[page as usize] += 1;
    let kind = world.random.borrow_mut().below(16);
    let at = world.random.borrow_mut().below(WORDS as u32) as usize;
    world.pages.memory.access(thread, PageId(page), write, |content| {
        let mut oracle = world.oracle.borrow_mut();
        oracle.sees(page, content);
        trace(|| format!("thread {thread} accesses page {page}: {content:?}, write {write}"));
        if write {
            edit(world, content, kind, at);
            oracle.writes(page, content);
        }
    });
    world.users.borrow_mut()[page as usize] -= 1;
}

/// Changes a page: one word, all words, or nothing.
fn edit(world: &World, content: &mut Bytes, kind: u32, at: usize) {
    let stamp = world.stamp.get() + 1;
    world.stamp.set(stamp);
    match kind {
        0 => content.0.fill(0),
        // A word that fits into an entry of the page table, and a word that does not fit.
        1 => content.0.fill(stamp << 24),
        2 => content.0.fill(stamp | 1 << 63),
        // The same content again.
        3 | 4 => {}
        _ => content.0[at] = stamp,
    }
}

fn lock_space(world: &World) {
    wait_until("waits for the address space", || !world.space.get());
    world.space.set(true);
}

/// Drops pages as `madvise` does, while other threads may use them.
fn drop_pages(world: &World, range: std::ops::Range<u32>) {
    lock_space(world);
    let protection = world.lock_protection();
    trace(|| format!("drop of {range:?}"));
    range.clone().for_each(|page| world.oracle.borrow_mut().drop_begins(page));
    world.pages.drop_range(range.clone());
    range.for_each(|page| world.oracle.borrow_mut().drop_ends(page));
    trace(|| "end of the drop".into());
    drop(protection);
    world.space.set(false);
    threads::wake_worker(world);
}

/// Drops a page by a raw system call. The kernel drops only mapped pages.
fn drop_raw(world: &World, page: u32) {
    wait_until("waits for the end of a move", || !world.excluded.borrow()[page as usize]);
    world.raw_drops.set(true);
    if world.pages.memory.drop_raw(PageId(page)) {
        world.oracle.borrow_mut().dropped(page);
    }
}

/// Moves pages as `mremap` does.
fn move_pages(world: &World) {
    let pages = world.setup.pages;
    let count = world.random.borrow_mut().within(1..=RANGE_PAGES.min(pages / 2));
    let from = world.random.borrow_mut().below(pages - count + 1);
    let to = world.random.borrow_mut().below(pages - count + 1);
    if from.abs_diff(to) < count {
        return;
    }
    lock_space(world);
    let both = || (from..from + count).chain(to..to + count);
    // A program must not use pages while it moves them.
    both().for_each(|page| world.excluded.borrow_mut()[page as usize] = true);
    wait_until("waits for the users of pages", || {
        both().all(|page| world.users.borrow()[page as usize] == 0)
    });
    trace(|| format!("move of {from}..{} to {to}", from + count));
    {
        let _protection = world.lock_protection();
        world.pages.drop_range(to..to + count);
        (to..to + count).for_each(|page| world.oracle.borrow_mut().dropped(page));
    }
    pause();
    let mut hand = Hand::default();
    {
        let _protection = world.lock_protection();
        for at in 0..count {
            world.pages.move_page(&mut hand, PageId(from + at), PageId(to + at));
            world.oracle.borrow_mut().moved(from + at, to + at);
        }
    }
    {
        let _protection = world.lock_protection();
        world.pages.drop_range(from..from + count);
    }
    assert!(!hand.has_blank(), "the mover keeps no position");
    trace(|| "end of the move".into());
    both().for_each(|page| world.excluded.borrow_mut()[page as usize] = false);
    world.space.set(false);
    threads::wake_worker(world);
}

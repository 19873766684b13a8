//! The pager's threads, a device, and the children of forks. The loops are those of
//! [`crate::fault`], [`crate::worker`] and [`crate::fork`], over the model.

use std::rc::Rc;

use super::fiber::{pause, point, spawn, trace, wait_until};
use super::world::World;
use crate::memory::model::{Bytes, Event, WORDS};
use crate::page_table::PageId;
use crate::pages::compact::Pass;
use crate::pages::standstill::Cause;
use crate::pages::{Hand, Request};
use crate::slots::{Epoch, SlotId};
use crate::stats::Counter;
use crate::stream::Advice;
use crate::transport::FrameId;

/// Maximum number of pages that the worker takes out at once.
const BATCH_PAGES: u32 = 64;
/// Number of pages that the handler takes out after a fault in addition to the number that the
/// fault mapped.
const CATCH_UP_PAGES: u32 = 2;

/// A process's memory at its fork.
pub(crate) struct Copied {
    /// Mapped pages.
    pub mapped: Vec<Option<Box<Bytes>>>,
    /// The possible contents of each page.
    pub expected: Vec<Vec<Box<Bytes>>>,
}

/// The handler: reads events and serves faults.
pub(crate) fn handler(world: &Rc<World>) {
    let mut hand = Hand::default();
    let memory = &world.pages.memory;
    loop {
        wait_until("waits for events", || memory.has_events() || world.is_idle());
        if !memory.has_events() {
            break;
        }
        let max = world.random.borrow_mut().within(1..=8);
        let events = memory.read_events(max as usize);
        for event in events {
            match event {
                Event::Fork => follow(world),
                Event::Fault { page, is_protected: true, .. } => {
                    if let Some(entry) = world.pages.table.lock_or_wait(page) {
                        memory.unprotect(page);
                        world.pages.settle(page, entry);
                    }
                }
                Event::Fault { page, thread, write, is_protected: false } => {
                    serve(world, &mut hand, page, thread, write);
                }
            }
        }
        if !world.handler_reclaims() {
            world.pages.reap(&mut hand);
            if world.worker_reclaims() && world.pages.has_work() {
                wake_worker(world);
            }
        }
    }
    world.blanks.set(world.blanks.get() + u32::from(hand.has_blank()));
    world.servers.set(world.servers.get() - 1);
}

fn serve(world: &World, hand: &mut Hand, page: PageId, thread: u32, write: bool) {
    world.pages.stats.add(Counter::Faults, 1);
    let advices = [Advice::Normal, Advice::Normal, Advice::Sequential, Advice::Random];
    let over_limit = world.forking.thread.get() == Some(thread);
    let request = Request {
        page,
        address: 0,
        thread,
        write,
        bounds: 0..world.setup.pages,
        advice: match world.setup.advised {
            true => world.random.borrow_mut().pick(&advices),
            false => Advice::Normal,
        },
        over_limit,
        alone: world.setup.alone,
    };
    if over_limit {
        world.over_limit.set(world.over_limit.get() + 1);
    }
    let pages = world.pages.fault(hand, &request);
    trace(|| format!("served {page:?}: {pages}"));
    if pages == 0 && world.pages.is_standstill() {
        wake_worker(world);
    }
    if world.waits_for_transfers() {
        assert!(world.pages.state().flights.is_idle(), "{page:?} is served, transfers are left");
    }
    if over_limit {
        world.over_limit.set(world.over_limit.get() - 1);
    }
    if world.handler_reclaims() {
        world.pages.work(hand, pages + CATCH_UP_PAGES);
    }
    // Compaction is due at times that do not depend on faults.
    if world.setup.compacts && world.random.borrow_mut().once_in(4) {
        wake_worker(world);
    }
}

pub(crate) fn wake_worker(world: &World) {
    world.worker_wakes.set(world.worker_wakes.get() + 1);
}

/// The worker: works on pages, frees chunks, and does its part of forks.
pub(crate) fn worker(world: &Rc<World>) {
    let mut hand = Hand::default();
    let mut pass = Pass::default();
    loop {
        let seen = world.worker_wakes.get();
        world.pages.free_emptied();
        help_fork(world, &mut hand);
        if world.pages.relieve_refused().is_some() {
            pause();
            continue;
        }
        if world.worker_reclaims() {
            while world.pages.work(&mut hand, BATCH_PAGES) && !world.forking.is_asked.get() {}
        }
        let is_idle = world.random.borrow_mut().once_in(2);
        world.pages.review_lease(is_idle);
        world.pages.return_pages(&mut hand, || world.forking.is_asked.get());
        if world.setup.compacts {
            world.pages.reap(&mut hand);
            if world.pages.compact(&mut hand, &mut pass).more {
                pause();
                continue;
            }
        }
        world.pages.update_gauges();
        wait_until("waits for work", || world.worker_wakes.get() != seen || world.is_idle());
        if world.worker_wakes.get() == seen {
            break;
        }
    }
    assert!(!hand.has_blank(), "the worker keeps no position");
    world.servers.set(world.servers.get() - 1);
}

/// The worker's part of a fork: writes all pages of the shelf back, and freezes all slots.
fn help_fork(world: &World, hand: &mut Hand) {
    if !world.forking.is_asked.get() {
        return;
    }
    let protection = world.lock_protection();
    world.pages.flush(hand);
    let epoch = world.pages.slots().freeze();
    drop(protection);
    world.forking.epoch.set(epoch.0);
    world.forking.is_asked.set(false);
}

/// Follows a fork: takes the snapshot for the child.
fn follow(world: &Rc<World>) {
    let copied = world.forking.snapshot.take().expect("a fork has been made");
    let mut slots: Vec<Option<SlotId>> = vec![None; world.setup.pages as usize];
    {
        let _protection = world.lock_protection();
        let visit = |page: PageId, slot| slots[page.0 as usize] = Some(slot);
        world.pages.visit_slots(0..world.setup.pages, |_| {}, visit);
    }
    world.pages.end_standstill(Cause::Prepared);
    let epoch = Epoch(world.forking.epoch.get());
    world.children.set(world.children.get() + 1);
    let parent = world.clone();
    spawn("child", move || child(&parent, &copied, &slots, epoch));
    world.forking.children_added.set(world.forking.children_added.get() + 1);
}

/// A forked child: reads the pages of its parent as they were at the fork.
fn child(world: &World, copied: &Copied, slots: &[Option<SlotId>], epoch: Epoch) {
    let reads = world.random.borrow_mut().within(0..=world.setup.pages);
    for _ in 0..reads {
        let page = world.random.borrow_mut().below(world.setup.pages) as usize;
        point();
        let seen = match (&copied.mapped[page], slots[page]) {
            (Some(content), _) => content.clone(),
            (None, Some(slot)) => read_slot(world, PageId(page as u32), slot),
            (None, None) => Bytes::zeros(),
        };
        let expected = &copied.expected[page];
        assert!(
            expected.contains(&seen),
            "page {page}: a child sees {seen:?} (slot {:?}) instead of {expected:?}",
            slots[page]
        );
    }
    let emptied = world.pages.slots().remove_dependent(epoch);
    world.pages.note_emptied(emptied);
    wake_worker(world);
    world.children.set(world.children.get() - 1);
}

fn read_slot(world: &World, page: PageId, slot: SlotId) -> Box<Bytes> {
    wait_until("waits for frames", || !world.child_frames.get());
    world.child_frames.set(true);
    let frame = FrameId(world.setup.sizes.first_child_frame());
    let mut content = Bytes::zeros();
    // SAFETY: the frame is used by this fiber alone, and the content is a local page.
    unsafe {
        let to = content.0.as_mut_ptr().cast();
        world.pages.read_now(&[(page, slot, frame, to)]);
    }
    world.child_frames.set(false);
    content
}

/// Moves pages of transfers in flight.
pub(crate) fn nic(world: &World) {
    loop {
        wait_until("waits for transfers", || world.pool.is_active() || world.is_over.get());
        if !world.pool.is_active() {
            return;
        }
        world.pool.advance();
        point();
    }
}

/// Changes the limit from time to time.
pub(crate) fn resizer(world: &World) {
    let full = world.setup.sizes.limit;
    for round in 0..world.setup.resizes {
        let steps = world.random.borrow_mut().within(1..=60);
        (0..steps).for_each(|_| point());
        let is_last = round + 1 == world.setup.resizes;
        let limit = if is_last { full } else { world.random.borrow_mut().within(full / 2..=full) };
        trace(|| format!("limit {limit}"));
        world.pages.state().limit = limit;
        world.allowed.set(world.allowed.get().max(limit));
        wake_worker(world);
    }
    world.running.set(world.running.get() - 1);
}

/// A device that pins pages and writes to them later.
pub(crate) fn device(world: &World) {
    for _ in 0..world.setup.pins {
        let page = world.random.borrow_mut().below(world.setup.pages);
        point();
        if world.excluded.borrow()[page as usize] || !world.pages.memory.pin(PageId(page)) {
            continue;
        }
        trace(|| format!("page {page} is pinned"));
        let steps = world.random.borrow_mut().within(1..=80);
        (0..steps).for_each(|_| point());
        let stamp = world.stamp.get() + 1;
        world.stamp.set(stamp);
        world.pages.memory.write_pinned(PageId(page), |content| {
            let mut oracle = world.oracle.borrow_mut();
            oracle.sees(page, content);
            content.0[WORDS / 2] = stamp;
            oracle.writes(page, content);
        });
        trace(|| format!("page {page} is written by a device"));
    }
    world.running.set(world.running.get() - 1);
}

/// A promoted child's thread that moves the inherited pages once the parent has ended.
pub(crate) fn heir(world: &World) {
    let steps = world.random.borrow_mut().within(1..=400);
    (0..steps).for_each(|_| point());
    let mut hand = Hand::default();
    while world.pages.slots().inherited() > 0 {
        world.pages.move_inherited(&mut hand);
        pause();
    }
    wait_until("waits for children that need inherited pages", || {
        !world.pages.slots().has_dependents()
    });
    trace(|| "the parent's page server is released".into());
    world.pages.backing.release_inheritance();
    world.running.set(world.running.get() - 1);
}

/// Forks. The calling thread belongs to the program and holds `space`.
pub(crate) fn fork(world: &World, thread: u32, mut touch: impl FnMut()) {
    let forking = &world.forking;
    forking.thread.set(Some(thread));
    world.pages.begin_standstill(Cause::Prepared);
    let added_before = forking.children_added.get();
    forking.is_asked.set(true);
    wake_worker(world);
    touch();
    wait_until("waits for the worker's part of a fork", || !forking.is_asked.get());
    let protection = world.lock_protection();
    touch();
    point();
    if world.random.borrow_mut().once_in(4) {
        // `fork` takes locks of libc, which threads of the program hold while they access pages.
        let used = world.users.borrow().iter().position(|users| *users > 0);
        wait_until("waits for a lock of libc", || {
            used.is_none_or(|page| world.users.borrow()[page] == 0)
        });
    }
    let expected = (0..world.setup.pages).map(|page| world.oracle.borrow().contents(page));
    let copied = Copied { expected: expected.collect(), mapped: world.pages.memory.fork() };
    forking.snapshot.replace(Some(copied));
    wait_until("waits for the handler to read a fork's event", || !world.pages.memory.is_forking());
    forking.thread.set(None);
    drop(protection);
    wait_until("waits for the snapshot", || forking.children_added.get() != added_before);
    pause();
}

//! Tests of eviction. In most tests the test evicts and writes back itself; the last ones run the
//! evictor thread.

use std::sync::Arc;

use super::*;
use crate::Config;

/// Creates a pager with a handler thread, which shares the test's descriptors, and without an
/// evictor thread. So only the tests evict. The bound is larger than the memory that the tests
/// touch.
fn pager() -> Arc<Pager> {
    let config = Config::new(4 << 20, "memory:64MiB");
    let pager = Pager::new(&config, Pager::open_transport(&config).unwrap()).unwrap();
    let handler = pager.clone();
    std::thread::spawn(move || handler.handler());
    pager
}

/// Maps pages and fills them.
fn map(pager: &Pager, pages: usize, byte: u8) -> *mut u8 {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let start = pager.map(pages * PAGE_BYTES, protection).unwrap() as *mut u8;
    fill(pager, start, pages, byte);
    start
}

/// Writes to pages, and waits until the handler has finished: the kernel wakes the writing thread
/// before the handler has stored the page's entry.
fn fill(pager: &Pager, start: *mut u8, pages: usize, byte: u8) {
    // SAFETY: pages that the test has mapped.
    unsafe { start.write_bytes(byte, pages * PAGE_BYTES) };
    let first = first_page(pager, start);
    let busy = |page| pager.table.load(PageId(first.0 + page)).is_busy();
    while (0..pages as u32).any(busy) {
        std::thread::yield_now();
    }
}

fn first_page(pager: &Pager, start: *mut u8) -> PageId {
    pager.region().page(start as usize)
}

/// Evicts all resident pages. The handler queues a page only after it has woken the thread that
/// touched the page, so the loop checks the number of resident pages instead of the queue's length.
fn evict(pager: &Pager) {
    let mut evictor = Evictor::default();
    while pager.resident() > 0 {
        evictor.make_room(pager, pager.evict_lock());
        std::thread::yield_now();
    }
}

/// Evicts all resident pages and writes them to their slots.
fn store(pager: &Pager) {
    evict(pager);
    pager.flush_staging(&pager.evict_lock());
}

/// Returns the slot of a stored page.
fn slot(pager: &Pager, page: PageId) -> SlotId {
    let entry = pager.table.load(page);
    match entry.frame() {
        Some(frame) => pager.staging.slot(FrameId(frame)).expect("it is stored"),
        None => SlotId(entry.slot().expect("it is stored")),
    }
}

/// Returns the content of a slot.
fn content(pager: &Pager, slot: SlotId) -> Vec<u8> {
    let frame = pager.child_frames();
    pager.transfer(Lane::Sync, false, &[(slot, frame)]);
    // SAFETY: a frame that only this test uses.
    unsafe { std::slice::from_raw_parts(pager.staging.address(frame), PAGE_BYTES).to_vec() }
}

#[test]
fn page_evicted_as_zeros_frees_its_slot() {
    const PAGES: usize = 70;
    let pager = pager();
    let start = map(&pager, PAGES, 1);
    store(&pager);
    assert_eq!(pager.slots().held(), (1, 0));
    let first = first_page(&pager, start);
    // Pages that are written again keep their slots.
    fill(&pager, start, PAGES, 0);
    let slots: Vec<_> = (0..PAGES as u32)
        .filter(|&page| pager.table.load(PageId(first.0 + page)).slot().is_some())
        .collect();
    assert_eq!(slots.len(), PAGES);
    evict(&pager);
    assert_eq!(pager.table.load(first).state(), State::Absent);
    assert_eq!(pager.stats.get(Counter::PagesZeroEvicted), PAGES as u64);
    assert_eq!(pager.slots().held(), (0, 0), "no slot is used any more");
}

#[test]
fn frozen_slot_keeps_content_when_page_is_stored_again() {
    let pager = pager();
    let start = map(&pager, 2, 1);
    store(&pager);
    let first = first_page(&pager, start);
    let old = slot(&pager, first);
    let other = slot(&pager, PageId(first.0 + 1));
    let epoch = pager.slots().freeze();
    pager.slots().end_freezing();
    // The second page is dropped. Its slot is free only when no child needs it.
    pager.advise(start as usize + PAGE_BYTES, PAGE_BYTES, libc::MADV_DONTNEED).unwrap();
    fill(&pager, start, 1, 2);
    let more = map(&pager, 300, 3);
    store(&pager);
    let new = slot(&pager, first);
    assert_ne!(new, old);
    assert_eq!(content(&pager, old), [1; PAGE_BYTES], "the content at the freeze");
    assert_eq!(content(&pager, other), [1; PAGE_BYTES], "also for a page that was dropped");
    assert_eq!(content(&pager, new), [2; PAGE_BYTES]);
    // A slot that is not frozen is overwritten in place.
    fill(&pager, start, 1, 4);
    store(&pager);
    assert_eq!(slot(&pager, first), new);
    let emptied = pager.slots().remove_dependent(epoch);
    pager.note_emptied(emptied);
    pager.advise(more as usize, 300 * PAGE_BYTES, libc::MADV_DONTNEED).unwrap();
    pager.advise(start as usize, PAGE_BYTES, libc::MADV_DONTNEED).unwrap();
    assert_eq!(pager.slots().held(), (0, 0), "frozen slots are free once no child needs them");
}

/// Maps pages of `byte`, makes them unreadable, and evicts them.
fn evict_unreadable(byte: u8) -> (Arc<Pager>, *mut u8, PageId) {
    let pager = pager();
    let start = map(&pager, 3, byte);
    let first = first_page(&pager, start);
    pager.protect(start as usize, 3 * PAGE_BYTES, libc::PROT_NONE).unwrap();
    evict(&pager);
    (pager, start, first)
}

#[test]
fn unreadable_page_is_evicted_with_its_content() {
    let (pager, start, first) = evict_unreadable(7);
    pager.flush_staging(&pager.evict_lock());
    for page in 0..3 {
        assert_eq!(content(&pager, slot(&pager, PageId(first.0 + page))), [7; PAGE_BYTES]);
    }
    pager.protect(start as usize, 3 * PAGE_BYTES, libc::PROT_READ).unwrap();
    // SAFETY: pages that the test has mapped, readable again.
    let found = unsafe { std::slice::from_raw_parts(start, 3 * PAGE_BYTES) };
    assert!(found.iter().all(|byte| *byte == 7));
}

#[test]
fn unreadable_zero_page_gets_no_slot() {
    let (pager, _, first) = evict_unreadable(0);
    for page in 0..3 {
        assert_eq!(pager.table.load(PageId(first.0 + page)).state(), State::Absent);
    }
    assert_eq!(pager.stats.get(Counter::PagesZeroEvicted), 3);
}

#[test]
fn locked_page_is_not_evicted() {
    let pager = pager();
    let start = map(&pager, 4, 1);
    let first = first_page(&pager, start);
    let locked = PageId(first.0 + 2);
    pager.table.set_pinned(locked, true);
    let mut evictor = Evictor::default();
    while pager.resident() > 1 {
        evictor.make_room(&pager, pager.evict_lock());
        std::thread::yield_now();
    }
    assert_eq!(evictor.make_room(&pager, pager.evict_lock()), 0);
    assert_eq!(pager.table.load(locked).state(), State::Resident);
    pager.table.set_pinned(locked, false);
    evict(&pager);
    assert_ne!(
        pager.table.load(locked).state(),
        State::Resident,
        "the locked page stayed in the queue"
    );
}

#[test]
fn emptied_chunks_are_freed() {
    let pager = pager();
    let start = map(&pager, 300, 1);
    store(&pager);
    pager.advise(start as usize, 300 * PAGE_BYTES, libc::MADV_DONTNEED).unwrap();
    assert!(!pager.emptied.lock().unwrap().is_empty());
    pager.free_emptied_chunks();
    assert!(pager.emptied.lock().unwrap().is_empty());
}

#[test]
fn runs_are_of_consecutive_pages() {
    let runs_of = |pages: &[u32]| -> Vec<(usize, usize)> {
        let taken: Vec<_> = pages.iter().map(|page| (PageId(*page), Entry::ABSENT)).collect();
        runs(&taken).into_iter().map(|run| (run.start, run.end)).collect()
    };
    assert_eq!(runs_of(&[]), []);
    assert_eq!(runs_of(&[0, 1, 2, 5, 7, 8]), [(0, 3), (3, 4), (4, 6)]);
}

#[test]
fn range_counts_as_dropped_only_when_covered() {
    let ranges = [4, 8, 4].map(|iov_len| libc::iovec { iov_base: std::ptr::null_mut(), iov_len });
    let expected = [(0, 0), (3, 0), (4, 1), (11, 1), (12, 2), (15, 2), (16, 3), (99, 3)];
    for (bytes, count) in expected {
        assert_eq!(count_covered(&ranges, bytes), count, "{bytes} bytes");
    }
}

/// Frames that are being written cannot be reused, so pages stay resident and keep their content.
#[test]
fn pages_stay_resident_without_free_frames() {
    let pager = pager();
    let start = map(&pager, 6, 5);
    let mut frames = Vec::new();
    while let Some(frame) = pager.staging.allocate(|_| false) {
        // The pages of frames are not examined before the frames are Clean.
        pager.staging.fill(frame, PageId(0), None);
        pager.staging.start_writing(1, &mut frames);
    }
    let mut evictor = Evictor::default();
    while pager.residency().len() < 6 {
        std::thread::yield_now();
    }
    assert_eq!(evictor.make_room(&pager, pager.evict_lock()), 0);
    let first = first_page(&pager, start);
    // One frame is free, so only one page of the run is dropped.
    assert!(pager.staging.leave(frames[0]) == LeavingSlot::Unstored(None));
    pager.staging.set_slot(frames[0], SlotId(0));
    assert_eq!(pager.staging.written(frames[0]), Some(SlotId(0)));
    assert_eq!(evictor.make_room(&pager, pager.evict_lock()), 1);
    let states = (0..6).map(|page| pager.table.load(PageId(first.0 + page)).state());
    assert_eq!(states.filter(|&state| state == State::Resident).count(), 5);
    assert_eq!(pager.resident(), 5);
    // SAFETY: pages that the test has mapped.
    let found = unsafe { std::slice::from_raw_parts(start, 6 * PAGE_BYTES) };
    assert!(found.iter().all(|byte| *byte == 5));
}

/// Waits until `holds` returns true, at most ten seconds.
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = sys::now_ns() + 10_000_000_000;
    while !holds() {
        assert!(sys::now_ns() < end, "timeout: not reached within 10 s: {what}");
        std::thread::yield_now();
    }
}

/// Creates a pager whose bound of 512 pages is reached, and starts its evictor thread.
fn full_with_evictor(prepare: impl FnOnce(&Pager, PageId)) -> Arc<Pager> {
    let config = Config::new(4 << 20, "memory:64MiB");
    let mut pager = Pager::new(&config, Pager::open_transport(&config).unwrap()).unwrap();
    Arc::get_mut(&mut pager).expect("the only reference").limit = 512;
    let (handler, evictor) = (pager.clone(), pager.clone());
    std::thread::spawn(move || handler.handler());
    let start = map(&pager, 512, 1);
    wait_until("all pages are queued", || pager.residency().len() == 512);
    prepare(&pager, first_page(&pager, start));
    std::thread::spawn(move || evictor.evictor());
    wait_until("the evictor sleeps", || pager.evictor_sleeps.load(Ordering::SeqCst));
    pager
}

#[test]
fn evictor_stops_at_the_high_water_mark() {
    let pager = full_with_evictor(|_, _| ());
    assert_eq!(pager.high_water(), BATCH, "one batch is enough");
    assert_eq!(pager.resident(), 512 - BATCH);
}

#[test]
fn evictor_sleeps_while_all_pages_are_locked() {
    let mut first = PageId(0);
    let pager = full_with_evictor(|pager, page| {
        first = page;
        (0..512).for_each(|page| pager.table.set_pinned(PageId(first.0 + page), true));
    });
    assert_eq!(pager.resident(), 512);
    (0..512).for_each(|page| pager.table.set_pinned(PageId(first.0 + page), false));
    pager.wake_evictor(true);
    wait_until("there is room", || pager.resident() == 512 - BATCH);
}

#[test]
fn waiting_evictor_measures_unpaged_memory() {
    let pager = full_with_evictor(|_, _| ());
    wait_until("unpaged memory is measured", || pager.stats.get(Counter::UnpagedBytes) > 0);
}

#[test]
fn sampling_interval_doubles_without_changes() {
    let pager = pager();
    // Other tests of this process map memory, which triggers measurements.
    wait_until("nothing has changed", || pager.sample_unpaged(unpaged::SAMPLE_MS_MIN) == 20);
    wait_until("at most a second", || pager.sample_unpaged(unpaged::SAMPLE_MS_MAX) == 1000);
    wait_until("at most a second", || pager.sample_unpaged(700) == 1000);
}

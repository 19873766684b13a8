//! Edge cases of slots: the last page of a chunk, inherited slots, a pool that was full.

use super::*;
use crate::store::FileTransport;

/// Pages of a chunk of 1 MiB.
const PAGES: usize = 256;

fn pool(chunks: u32) -> FileTransport {
    FileTransport::open(&format!("memory:{chunks}MiB"), 4).unwrap()
}

fn allocate(slots: &mut Slots, pool: &FileTransport, count: usize) -> Vec<SlotId> {
    (0..count).map(|_| slots.allocate(pool).unwrap()).collect()
}

#[test]
fn inherited_slot_names_its_page_and_is_frozen() {
    let slot = SlotId::inherited(PageId(5));
    assert_eq!(slot.inherited_page(), Some(PageId(5)));
    assert_eq!(SlotId(5).inherited_page(), None);
    let mut slots = Slots::new(1 << 20);
    slots.inherit(2);
    assert!(slots.is_frozen(slot));
    assert_eq!((slots.free(slot), slots.inherited()), (None, 1));
    assert_eq!((slots.free(SlotId::inherited(PageId(6))), slots.inherited()), (None, 0));
}

#[test]
fn free_page_search_stays_within_the_chunk() {
    for pages in [1u32, 4, 63, 64, 65, 256] {
        let words = pages.div_ceil(64) as usize;
        let mut used = vec![0; words];
        for page in 0..pages {
            assert_eq!(free_page(&used, 0, pages), Some(page));
            assert_eq!(free_page(&used, page, pages), Some(page));
            set(&mut used, page, true);
        }
        assert_eq!(free_page(&used, 0, pages), None, "{pages} pages");
        assert_eq!(free_page(&used, pages, pages), None, "{pages} pages");
        set(&mut used, 0, false);
        assert_eq!(free_page(&used, pages - 1, pages), Some(0), "from the start again");
    }
}

#[test]
fn slot_location_follows_from_its_index() {
    let pool = pool(2);
    let mut slots = Slots::new(1 << 20);
    assert_eq!(slots.chunk_bytes(), 1 << 20);
    let allocated = allocate(&mut slots, &pool, PAGES + 3);
    for (n, slot) in allocated.iter().enumerate() {
        assert_eq!(slots.place(*slot).offset_bytes as usize, n % PAGES * PAGE_BYTES);
    }
    assert_ne!(slots.place(allocated[0]).location, slots.place(allocated[PAGES]).location);
}

#[test]
fn next_slot_follows_the_last_one_even_if_that_was_freed() {
    let pool = pool(1);
    let mut slots = Slots::new(1 << 20);
    let [first, second] = [0; 2].map(|_| slots.allocate(&pool).unwrap());
    assert_eq!(slots.free(second), None);
    assert_eq!(slots.allocate(&pool).unwrap().0, first.0 + 2);
}

#[test]
fn chunk_is_reused_when_a_quarter_of_it_is_free() {
    for (freed, chunks) in [(PAGES / 4 - 1, 3), (PAGES / 4, 2)] {
        let pool = pool(4);
        let mut slots = Slots::new(1 << 20);
        let allocated = allocate(&mut slots, &pool, 2 * PAGES);
        for slot in &allocated[..freed] {
            assert_eq!(slots.free(*slot), None);
        }
        slots.allocate(&pool).unwrap();
        assert_eq!(slots.held(), (chunks, 0), "{freed} were free");
    }
}

#[test]
fn full_pool_is_tried_again_after_the_interval() {
    let pool = pool(1);
    let taken = pool.allocate_chunk().unwrap();
    let mut slots = Slots::new(1 << 20);
    allocate(&mut slots, &pool, PAGES);
    assert_eq!(slots.held(), (0, 1));
    pool.free_chunk(taken).unwrap();
    // As if the pool had just been full, independent of the test's speed.
    slots.full_since = Some(Instant::now() + Duration::from_secs(3600));
    allocate(&mut slots, &pool, PAGES);
    assert_eq!(slots.held(), (0, 2));
    slots.full_since = Instant::now().checked_sub(FULL_RETRY_INTERVAL);
    allocate(&mut slots, &pool, 1);
    assert_eq!(slots.held(), (1, 2));
}

#[test]
fn chunks_emptied_while_frozen_are_freed_by_the_thaw() {
    let pool = pool(2);
    let mut slots = Slots::new(1 << 20);
    let allocated = allocate(&mut slots, &pool, PAGES);
    let location = slots.place(allocated[0]).location;
    slots.freeze();
    slots.end_freezing();
    for slot in allocated {
        assert_eq!(slots.free(slot), None);
    }
    assert_eq!(slots.held(), (1, 0));
    assert_eq!(slots.thaw(), [Emptied(location)]);
    assert_eq!(slots.held(), (0, 0));
}

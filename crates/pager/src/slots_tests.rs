//! Tests of slots.

use super::*;
use crate::store::FileTransport;
use crate::transport::Transport;
use proptest::prelude::*;
use std::collections::HashSet;

/// Pages of a chunk of 1 MiB.
const PAGES: usize = 256;

fn pool(chunks: u32) -> FileTransport {
    FileTransport::open(&format!("memory:{chunks}MiB"), 4).unwrap()
}

fn allocate(slots: &mut Slots, pool: &FileTransport, count: usize) -> Vec<SlotId> {
    (0..count).map(|_| allocate_one(slots, pool)).collect()
}

fn allocate_one(slots: &mut Slots, pool: &FileTransport) -> SlotId {
    loop {
        if let Some(slot) = slots.allocate() {
            return slot;
        }
        match slots.wants_pool().then(|| pool.allocate_chunk()) {
            Some(Ok(handle)) => slots.add_pool_chunk(handle),
            Some(Err(_)) => slots.note_full(),
            None => slots.add_overflow_chunk(),
        }
    }
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
    let [first, second] = [0; 2].map(|_| allocate_one(&mut slots, &pool));
    assert_eq!(slots.free(second), None);
    assert_eq!(allocate_one(&mut slots, &pool).0, first.0 + 2);
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
        allocate_one(&mut slots, &pool);
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
fn chunks_emptied_while_frozen_are_freed_with_the_last_child() {
    let pool = pool(2);
    let mut slots = Slots::new(1 << 20);
    let allocated = allocate(&mut slots, &pool, PAGES);
    let location = slots.place(allocated[0]).location;
    let epoch = slots.freeze();
    slots.end_freezing();
    for slot in allocated {
        assert_eq!(slots.free(slot), None);
    }
    assert_eq!(slots.held(), (1, 0));
    assert_eq!(slots.remove_dependent(epoch), [Emptied(location)]);
    assert_eq!(slots.held(), (0, 0));
}

/// Children overlap without a gap, as in a server with a process per request.
#[test]
fn slots_are_freed_although_children_overlap() {
    let pool = pool(4);
    let mut slots = Slots::new(1 << 20);
    let mut page = allocate_one(&mut slots, &pool);
    let mut previous = slots.freeze();
    slots.end_freezing();
    for _ in 0..10_000 {
        // The page is stored again, in another slot, and the next child is made before the previous
        // one ends.
        assert!(slots.is_frozen(page));
        assert_eq!(slots.free(page), None);
        page = allocate_one(&mut slots, &pool);
        assert!(!slots.is_frozen(page), "no child has seen this slot");
        let next = slots.freeze();
        slots.end_freezing();
        assert_eq!(slots.remove_dependent(std::mem::replace(&mut previous, next)), []);
        assert!(slots.deferred.len() <= 1, "{} slots wait", slots.deferred.len());
    }
    assert_eq!(slots.held(), (1, 0));
}

/// A child that lives for long needs the slots of its own fork, and no slots of later forks.
#[test]
fn old_child_keeps_only_the_slots_of_its_fork() {
    let pool = pool(4);
    let mut slots = Slots::new(1 << 20);
    let old = allocate_one(&mut slots, &pool);
    let daemon = slots.freeze();
    slots.end_freezing();
    assert_eq!(slots.free(old), None);
    let newer = allocate_one(&mut slots, &pool);
    let short = slots.freeze();
    slots.add_dependent(short);
    slots.end_freezing();
    assert_eq!(slots.free(newer), None);
    assert_eq!(slots.remove_dependent(short), []);
    assert_eq!(slots.deferred.len(), 2, "the second child of that fork lives");
    assert_eq!(slots.remove_dependent(short), []);
    let waiting: Vec<_> = slots.deferred.iter().map(|deferred| deferred.slot).collect();
    assert_eq!(waiting, [old]);
    assert_eq!(slots.remove_dependent(daemon).len(), 1);
    assert_eq!((slots.held(), slots.has_dependents()), ((0, 0), false));
}

fn free_location(pool: &FileTransport, emptied: impl IntoIterator<Item = Emptied>) {
    for Emptied(location) in emptied {
        if let ChunkLocation::Pool(handle) = location {
            pool.free_chunk(handle).unwrap();
        }
    }
}

#[test]
fn consecutive_allocations_are_adjacent() {
    let pool = pool(4);
    let mut slots = Slots::new(1 << 20);
    let first = allocate_one(&mut slots, &pool);
    for page in 1..256 {
        assert_eq!(allocate_one(&mut slots, &pool).0, first.0 + page);
    }
    assert_eq!(pool.chunks_held(), 1);
    allocate_one(&mut slots, &pool);
    assert_eq!(pool.chunks_held(), 2);
}

#[test]
fn full_pool_overflows_and_is_tried_again() {
    let pool = pool(1);
    let mut slots = Slots::new(1 << 20);
    let allocated: Vec<_> = (0..300).map(|_| allocate_one(&mut slots, &pool)).collect();
    assert_eq!(slots.held(), (1, 1));
    assert!(matches!(slots.place(allocated[299]).location, ChunkLocation::Overflow(0)));
    for &slot in &allocated[..256] {
        free_location(&pool, slots.free(slot));
    }
    assert_eq!((slots.held(), pool.chunks_held()), ((0, 1), 0));
    for _ in 0..256 {
        allocate_one(&mut slots, &pool);
    }
    assert_eq!(slots.held(), (1, 1), "the pool is used again once it has room");
}

#[test]
fn frozen_slots_are_not_reused_while_a_child_needs_them() {
    let pool = pool(8);
    let mut slots = Slots::new(1 << 20);
    let old = allocate_one(&mut slots, &pool);
    let epoch = slots.freeze();
    let during = allocate_one(&mut slots, &pool);
    assert!(slots.is_frozen(during));
    slots.end_freezing();
    let new = allocate_one(&mut slots, &pool);
    assert!(slots.is_frozen(old) && !slots.is_frozen(new));
    assert_eq!((slots.free(old), slots.free(during)), (None, None));
    let mut later: Vec<_> = (0..400).map(|_| allocate_one(&mut slots, &pool)).collect();
    assert!(!later.contains(&old) && !later.contains(&during));
    assert_eq!(slots.remove_dependent(epoch), []);
    assert!(!slots.is_frozen(new));
    later.push(new);
    for slot in later {
        free_location(&pool, slots.free(slot));
    }
    assert_eq!(slots.held(), (0, 0), "slots freed while frozen are free without the child");
}

/// A thread that cannot write now gives the new slots back and tries again, as often as the fork
/// takes.
#[test]
fn unused_slots_are_not_kept_for_a_fork_in_progress() {
    let pool = pool(8);
    let mut slots = Slots::new(1 << 20);
    let kept = allocate_one(&mut slots, &pool);
    slots.freeze();
    for _ in 0..10_000 {
        let unused = allocate_one(&mut slots, &pool);
        assert!(slots.is_frozen(unused));
        assert_eq!(slots.give_back(unused), None, "the chunk of {kept:?}");
    }
    assert_eq!(slots.held(), (1, 0));
}

#[test]
fn word_slots_have_no_place_and_no_print() {
    let mut slots = Slots::new(1 << 20);
    let doubles = [1.5f64, -2.0, 1e6].map(f64::to_bits);
    let patterns = [0x0101_0101_0101_0101, u64::MAX, 7, 1 << 43];
    for word in doubles.into_iter().chain(patterns) {
        let slot = SlotId::word(word).unwrap_or_else(|| panic!("{word:#x} has a slot"));
        assert_eq!(slots.source(slot), Source::Word(word));
        assert!(slots.is_frozen(slot));
        assert_eq!((slots.print(slot), slots.free(slot)), (None, None));
    }
    assert_eq!(SlotId::word(0x0123_4567_89ab_cdef), None);
    let inherited = SlotId::inherited(PageId(9));
    assert_eq!((inherited.as_word(), slots.print(inherited)), (None, None));
    assert_eq!(slots.source(inherited), Source::Inherited(PageId(9)));
    assert_eq!(slots.held(), (0, 0));
}

#[test]
fn fingerprint_stays_with_its_slot_until_that_is_freed() {
    let pool = pool(2);
    let mut slots = Slots::new(1 << 20);
    let allocated = allocate(&mut slots, &pool, PAGES + 3);
    for (print, slot) in (1..).zip(&allocated) {
        assert_eq!(slots.print(*slot), None);
        slots.set_print(*slot, print);
    }
    for (print, slot) in (1..).zip(&allocated) {
        assert_eq!(slots.print(*slot), Some(print));
    }
    let _ = slots.free(allocated[PAGES]);
    slots.cursor = 0;
    assert_eq!(allocate_one(&mut slots, &pool), allocated[PAGES]);
    assert_eq!(slots.print(allocated[PAGES]), None);
    // A frozen slot keeps its content, but no page has it any more.
    let _ = slots.freeze();
    slots.end_freezing();
    assert_eq!(slots.print(allocated[1]), Some(2));
}

#[test]
fn stretch_is_used_again_only_after_it_was_freed() {
    let mut slots = Slots::new(1 << 20);
    slots.add_overflow_chunk();
    let first = slots.allocate().expect("a slot of the new chunk");
    let emptied = slots.free(first);
    assert_eq!(emptied, Some(Emptied(ChunkLocation::Overflow(0))));
    slots.add_overflow_chunk();
    let second = slots.allocate().expect("a slot of the new chunk");
    assert_eq!(slots.place(second).location, ChunkLocation::Overflow(1));
    slots.note_freed(0);
    slots.add_overflow_chunk();
    let third = slots.allocate().expect("a slot of the new chunk");
    assert_eq!(slots.place(third).location, ChunkLocation::Overflow(0));
}

proptest! {
    #[test]
    fn words_are_kept_exactly(word: u64, shift in 0u32..64, kind in 0u8..4) {
        let word = match kind {
            0 => word << shift,
            1 => word >> shift,
            2 => (word & 0xffff_ffff) << 32 | word & 0xffff_ffff,
            _ => word,
        };
        if let Some(slot) = SlotId::word(word) {
            prop_assert_eq!(slot.as_word(), Some(word));
            prop_assert_eq!(slot.inherited_page(), None);
            prop_assert!(slot.0 < 1 << 48, "the page table holds 48 bits");
        } else {
            prop_assert!(word.leading_zeros() < 20 && word.trailing_zeros() < 20);
        }
    }

    #[test]
    fn slots_are_unique_and_empty_chunks_are_freed(
        steps in prop::collection::vec(0u32..1000, 1..800)
    ) {
        let pool = pool(2);
        let mut slots = Slots::new(1 << 20);
        let mut held: Vec<SlotId> = Vec::new();
        for step in steps {
            if step < 700 || held.is_empty() {
                for _ in 0..step % 7 { held.push(allocate_one(&mut slots, &pool)); }
            } else {
                let slot = held.swap_remove(step as usize % held.len());
                free_location(&pool, slots.free(slot));
            }
            prop_assert_eq!(held.iter().collect::<HashSet<_>>().len(), held.len());
            prop_assert_eq!(slots.held().0, pool.chunks_held());
        }
        for slot in held {
            free_location(&pool, slots.free(slot));
        }
        prop_assert_eq!((slots.held(), pool.chunks_held()), ((0, 0), 0));
    }

    /// A model keeps, for each child, the set of slots that were used at its fork. None of them
    /// may be allocated while the child lives, and all slots that no child needs are free.
    #[test]
    fn frozen_slots_are_kept_for_the_children_that_need_them(
        steps in prop::collection::vec((0u8..5, 0usize..1000), 1..400)
    ) {
        let pool = pool(8);
        let mut slots = Slots::new(1 << 20);
        let mut held: Vec<SlotId> = Vec::new();
        let mut children: Vec<(Epoch, Vec<SlotId>)> = Vec::new();
        for (kind, at) in steps {
            match kind {
                0 => {
                    let slot = allocate_one(&mut slots, &pool);
                    prop_assert!(!children.iter().any(|(_, needs)| needs.contains(&slot)));
                    prop_assert!(!slots.is_frozen(slot));
                    held.push(slot);
                }
                1 if !held.is_empty() => {
                    let slot = held.swap_remove(at % held.len());
                    let _ = slots.free(slot);
                }
                2 => {
                    children.push((slots.freeze(), held.clone()));
                    slots.end_freezing();
                }
                3 if !children.is_empty() => {
                    let child = children[at % children.len()].clone();
                    slots.add_dependent(child.0);
                    children.push(child);
                }
                4 if !children.is_empty() => {
                    let (epoch, _) = children.swap_remove(at % children.len());
                    let _ = slots.remove_dependent(epoch);
                }
                _ => {}
            }
            for slot in &held {
                let needed = children.iter().any(|(_, needs)| needs.contains(slot));
                prop_assert_eq!(slots.is_frozen(*slot), needed);
            }
            let mut used: Vec<_> = children.iter().flat_map(|(_, needs)| needs.clone()).collect();
            used.extend(&held);
            used.sort();
            used.dedup();
            let live: u32 = slots.chunks.iter().flatten().map(|chunk| chunk.live).sum();
            prop_assert_eq!(live as usize, used.len(), "no slot is kept that no child needs");
        }
    }
}

/// Slots in chunks of 64 KiB, of which `kept` of each chunk are used.
fn sparse(kept: &[usize]) -> (Slots, Vec<SlotId>) {
    const PAGES: usize = 16;
    let mut slots = Slots::new(PAGES * PAGE_BYTES);
    let mut all = Vec::new();
    for chunk in 0..kept.len() {
        slots.add_pool_chunk(ChunkHandle(chunk as u32));
        all.extend(std::iter::from_fn(|| slots.allocate_open()));
    }
    assert_eq!(all.len(), kept.len() * PAGES);
    let is_kept = |index: usize| index % PAGES < kept[index / PAGES];
    let (used, unused): (Vec<_>, Vec<_>) =
        all.into_iter().enumerate().partition(|(index, _)| is_kept(*index));
    for (_, slot) in unused {
        assert_eq!(slots.free(slot), None, "each chunk keeps a slot");
    }
    (slots, used.into_iter().map(|(_, slot)| slot).collect())
}

#[test]
fn as_many_chunks_are_closed_as_the_others_can_replace() {
    for (kept, closed) in [
        (&[16, 16][..], 0),
        (&[16, 9, 8], 0),
        (&[16, 8, 8], 1),
        (&[1, 1, 1, 1], 3),
        (&[15, 1, 15, 1], 2),
        (&[12, 12, 12, 12], 1),
    ] {
        let (mut slots, used) = sparse(kept);
        assert_eq!(slots.close_sparse(), closed, "{kept:?}");
        let moved: Vec<_> = used.into_iter().filter(|slot| slots.is_closed(*slot)).collect();
        for slot in moved {
            let new = slots.allocate().expect("an open chunk has room");
            assert!(!slots.is_closed(new), "{kept:?}");
            let _ = slots.free(slot);
        }
        assert_eq!(slots.held().0, kept.len() as u32 - closed, "{kept:?}");
        slots.reopen();
        let Usage { live, held } = slots.usage();
        assert!(live == kept.iter().sum::<usize>() as u64 && held - live < 16, "{kept:?}");
    }
}

#[test]
fn closed_chunk_gives_out_no_slot_until_it_is_reopened() {
    // The last chunk is the open one.
    let (mut slots, used) = sparse(&[15, 16, 2]);
    assert_eq!(slots.close_sparse(), 0, "two pages more than the others have room for");
    assert_eq!(slots.free(used[0]), None);
    assert_eq!(slots.close_sparse(), 1);
    assert_eq!(slots.free(used[31]), None, "the closed chunk keeps a slot");
    let free: Vec<_> = std::iter::from_fn(|| slots.allocate()).collect();
    assert_eq!(free.len(), 2);
    assert!(!free.iter().any(|slot| slots.is_closed(*slot)));
    slots.reopen();
    assert!(slots.allocate().is_some());
}

#[test]
fn chunks_with_frozen_slots_are_not_closed() {
    let (mut slots, _) = sparse(&[3, 3, 3]);
    let epoch = slots.freeze();
    slots.end_freezing();
    assert_eq!(slots.close_sparse(), 0);
    assert!(slots.remove_dependent(epoch).is_empty());
    assert_eq!(slots.close_sparse(), 2);
}

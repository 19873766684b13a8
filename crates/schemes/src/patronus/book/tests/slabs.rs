//! The slab allocator.

use proptest::prelude::*;

use super::world::CHUNK;
use crate::patronus::book::slabs::{Memory, Piece};
use crate::patronus::message::Outcome;
use crate::rpc::blocks::Blocks;

fn memory(chunks: u32) -> Memory {
    Memory::new(Blocks::new(chunks, CHUNK, true), CHUNK)
}

#[test]
fn sizes_have_four_steps_to_a_power_of_two() {
    let mut memory = memory(64);
    let mut len = |bytes| {
        let piece = memory.take(bytes).unwrap();
        memory.place(piece).len
    };
    let lens = [1, 64, 65, 80, 81, 112, 113, 128, 129, 161, 193, 896, 1024].map(&mut len);
    assert_eq!(lens, [64, 64, 80, 80, 96, 112, 128, 128, 160, 192, 224, 896, 1024]);
    assert_eq!([1025, 4096, 4097, 8193].map(&mut len), [4096, 4096, 8192, 16_384]);
}

#[test]
fn slab_is_a_chunk_while_it_has_objects() {
    let mut memory = memory(2);
    let slots: Vec<_> = (0..CHUNK / 64).map(|_| memory.take(64).unwrap()).collect();
    assert_eq!(memory.free_chunks(), 1);
    let next = memory.take(64).unwrap();
    assert_eq!(memory.free_chunks(), 0, "a full slab has no slot");
    assert_eq!(memory.take(4096), Err(Outcome::Empty));
    memory.give(slots[5], false);
    assert_eq!(memory.take(60), Ok(slots[5]), "a slot is used again");
    slots.into_iter().for_each(|slot| memory.give(slot, false));
    assert_eq!(memory.free_chunks(), 1);
    assert_eq!(memory.take(8192), Err(Outcome::NoBlock));
    assert_eq!(memory.take(u64::MAX), Err(Outcome::NoBlock));
    memory.give(next, false);
    memory.take(8192).unwrap();
}

#[test]
fn slot_under_an_old_window_is_used_last() {
    let mut memory = memory(1);
    let slots: Vec<_> = (0..CHUNK / 64).map(|_| memory.take(64).unwrap()).collect();
    assert!(!memory.is_adequate());
    memory.give(slots[0], true);
    memory.give(slots[1], false);
    memory.give(slots[2], true);
    let order = [1, 0, 2].map(|at| Ok(slots[at]));
    assert_eq!([64, 64, 64].map(|bytes| memory.take(bytes)), order);
}

#[test]
fn small_chunks_have_no_slabs() {
    let mut memory = Memory::new(Blocks::new(4, 128, true), 128);
    assert!(matches!(memory.take(1), Ok(Piece::Block(_))));
}

proptest! {
    /// Pieces are long enough and never overlap; when all are given back, all memory is free.
    #[test]
    fn pieces_do_not_overlap(
        chunks in 1u32..40,
        steps in prop::collection::vec(
            (any::<bool>(), 1u64..9000, any::<prop::sample::Index>()),
            1..200,
        ),
    ) {
        let mut memory = memory(chunks);
        let mut held: Vec<Piece> = Vec::new();
        for (take, bytes, which) in steps {
            if take {
                let bytes = if which.index(3) > 0 { bytes % 300 + 1 } else { bytes };
                let Ok(piece) = memory.take(bytes) else { continue };
                let place = memory.place(piece);
                prop_assert!(place.len >= bytes && place.offset.is_multiple_of(16));
                prop_assert!(place.offset + place.len <= u64::from(chunks) * CHUNK);
                for other in held.iter().map(|piece| memory.place(*piece)) {
                    prop_assert!(
                        place.offset + place.len <= other.offset
                            || other.offset + other.len <= place.offset
                    );
                }
                held.push(piece);
            } else if !held.is_empty() {
                memory.give(held.swap_remove(which.index(held.len())), false);
            }
            memory.audit(held.iter().copied()).unwrap();
        }
        held.drain(..).for_each(|piece| memory.give(piece, false));
        memory.audit(std::iter::empty()).unwrap();
        prop_assert_eq!(memory.free_chunks(), u64::from(chunks));
    }
}

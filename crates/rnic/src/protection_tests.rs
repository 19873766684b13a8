//! The key table by itself: ranges to the byte, masks of a UMR, counts, what is named.

use super::*;
use crate::engine::tests::bed::{ALL, memory};
use crate::wqe::umr::{MASK_LEN, MASK_START};

const F: FunctionId = FunctionId::PHYSICAL;
const PD: Pdn = Pdn::new(3);
const QP: Qpn = Qpn::new(7);
/// Address of the region's first byte, and its length.
const START: u64 = 0x10_0000;
const LEN: u64 = 4096;

/// A table with one region.
fn table() -> (KeyTable, Key) {
    let mut table = KeyTable::new(1 << 20);
    let region = table.register(F, PD, memory(LEN as usize), START, ALL).unwrap();
    (table, region)
}

fn by(privileged: bool) -> Executor {
    Executor { qpn: QP, pd: PD, privileged }
}

fn through(tag: u64) -> Through {
    Through { qpn: QP, pd: PD, tag }
}

#[test]
fn a_range_ends_with_its_last_byte() {
    let (table, region) = table();
    let local = |addr, len| table.local(region, addr, len, Access::LOCAL_READ, PD).map(Span::len);
    assert_eq!(local(START, LEN), Ok(LEN));
    assert_eq!(local(START + LEN - 1, 1), Ok(1));
    // No bytes lie at the end, too.
    assert_eq!(local(START + LEN, 0), Ok(0));
    for (addr, len) in [
        (START, LEN + 1),
        (START + LEN, 1),
        (START + 1, LEN),
        (START - 1, 1),
        (START + LEN + 1, 0),
        (START, u64::MAX),
        (u64::MAX, 2),
    ] {
        assert_eq!(local(addr, len), Err(Refusal::Range), "{len} bytes at {addr:#x}");
    }
}

#[test]
fn no_table_has_more_keys_than_indices_have_numbers() {
    assert_eq!(KeyTable::new(u32::MAX).max, KeyIndex::MAX - FIRST_INDEX);
    assert_eq!(KeyTable::new(5).max, 5);
}

#[test]
fn a_umr_changes_only_what_its_mask_names() {
    let (mut table, region) = table();
    let window = table.allocate_window(F, PD, MwKind::Type2).unwrap();
    let bind = Umr::bind(window, 9, QP, Access::REMOTE_ALL, region, START, 64);
    // Without its length it would be as long as the free window: nothing.
    let umr = Umr { mask: bind.mask & !MASK_LEN, ..bind };
    assert_eq!(table.umr(&umr, by(false)), Err(Refusal::Form));
    // Without its start it is addressed from where the free window was: 0.
    let umr = Umr { mask: bind.mask & !MASK_START, ..bind };
    assert_eq!(table.umr(&umr, by(false)), Ok(true));
    let info = table.describe(F, window.index()).unwrap();
    assert_eq!((info.start, info.len, info.tag), (0, 64, 9));
}

/// Binding a type-1 window to no bytes unbinds it, if the mask names its length.
#[test]
fn a_type_1_window_is_emptied_by_a_length_that_counts() {
    let (mut table, region) = table();
    let window = table.allocate_window(F, PD, MwKind::Type1).unwrap();
    let bind = Umr::bind_type1(window, 9, Access::REMOTE_ALL, region, START, 64);
    assert_eq!(table.umr(&bind, by(false)), Ok(true));
    let window = Key::new(window.index(), 9);
    let empty = Umr::bind_type1(window, 10, Access::REMOTE_ALL, region, START, 0);
    let uncounted = Umr { mask: empty.mask & !MASK_LEN, ..empty };
    assert_eq!(table.umr(&uncounted, by(false)), Err(Refusal::Form));
    assert!(table.describe(F, window.index()).unwrap().bound);
    assert_eq!(table.umr(&empty, by(false)), Ok(false));
    assert!(!table.describe(F, window.index()).unwrap().bound);
}

#[test]
fn a_qp_is_named_while_a_window_is_bound_to_it() {
    let (mut table, region) = table();
    let windows = [0, 1].map(|_| table.allocate_window(F, PD, MwKind::Type2).unwrap());
    for window in windows {
        assert_eq!(table.may_name(QP), window != windows[0]);
        let bind = Umr::bind(window, window.tag(), QP, Access::REMOTE_READ, region, START, 64);
        assert_eq!(table.umr(&bind, by(false)), Ok(true));
    }
    assert_eq!(table.describe(F, region.index()).unwrap().windows, 2);
    table.invalidate(windows[0], by(false)).unwrap();
    assert!(table.may_name(QP));
    table.invalidate(windows[1], by(false)).unwrap();
    assert!(!table.may_name(QP));
    assert_eq!(table.describe(F, region.index()).unwrap().windows, 0);
}

#[test]
fn an_index_is_used_again_after_as_many_others_as_wait() {
    let mut table = KeyTable::new(1 << 20);
    let mut ended = Vec::new();
    for _ in 0..QUARANTINE {
        let window = table.allocate_window(F, PD, MwKind::Type2).unwrap();
        assert!(!ended.contains(&window.index()), "{} wait", ended.len());
        table.deallocate_window(F, window).unwrap();
        ended.push(window.index());
    }
    let window = table.allocate_window(F, PD, MwKind::Type2).unwrap();
    assert_eq!(window.index(), ended[0]);
}

/// Bits that the guard's value and the QP's tag share count once.
#[test]
fn a_guard_compares_its_word_with_value_and_tag_together() {
    let mut table = KeyTable::new(1 << 20);
    let words = memory(64);
    words.store_be64(8, 0b0111);
    let region = table.register(F, PD, words, START, ALL).unwrap();
    let guard = GuardSpec { region, addr: START + 8, value: 0b0110, mask: 0xff };
    let guarded = table.allocate_guarded(F, PD, &guard).unwrap();
    let plain = table.allocate_window(F, PD, MwKind::Type1).unwrap();
    for (tag, admits) in [(0b0001, true), (0b0011, true), (0b0111, true), (0, false), (8, false)] {
        assert_eq!(table.guard_admits(guarded.index(), tag), admits, "tag {tag:#b}");
        assert!(table.guard_admits(plain.index(), tag), "it has no guard");
        let bind = Umr::bind_type1(guarded, 9, Access::REMOTE_ALL, region, START, 64);
        let bind = Umr { key: table_key(&table, guarded), ..bind };
        assert_eq!(table.umr(&bind, by(false)), Ok(true));
        let read =
            table.remote(table_key(&table, guarded), START, 8, Access::REMOTE_READ, through(tag));
        assert_eq!(read.is_ok(), admits, "tag {tag:#b}");
    }
}

/// The key of an index as it is now.
fn table_key(table: &KeyTable, key: Key) -> Key {
    Key::new(key.index(), table.describe(F, key.index()).unwrap().tag)
}

#[test]
fn what_opens_a_range_is_found_by_its_bytes() {
    let (mut table, region) = table();
    let window = table.allocate_window(F, PD, MwKind::Type2).unwrap();
    let keys = |table: &KeyTable, start, len| -> Vec<KeyIndex> {
        table.over(start, len).iter().map(|opening| opening.key.index()).collect()
    };
    // A free window opens nothing.
    assert_eq!(keys(&table, START, LEN), [region.index()]);
    let bind = Umr::bind(window, 9, QP, Access::REMOTE_READ, region, START + 64, 64);
    assert_eq!(table.umr(&bind, by(false)), Ok(true));
    let both = [region.index(), window.index()];
    for (start, len, found) in [
        (START, LEN, &both[..]),
        (START + 64, 1, &both),
        (START + 127, 1, &both),
        (START + 63, 1, &both[..1]),
        (START + 128, 1, &both[..1]),
        (START - 1, 1, &[]),
        (START - 1, 2, &both[..1]),
        (START + LEN, 1, &[]),
        (START + LEN - 1, 1, &both[..1]),
    ] {
        assert_eq!(keys(&table, start, len), found, "{len} bytes at {start:#x}");
    }
}

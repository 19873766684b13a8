//! Unit tests of the key table: range checks to the byte, UMR masks, counts, lookups by QP and by
//! range.

use super::*;
use crate::engine::tests::bed::{ALL, memory};
use verbs::wqe::umr::{MASK_LEN, MASK_START};

const F: FunctionId = FunctionId::PHYSICAL;
const PD: Pdn = Pdn::new(3);
const QP: Qpn = Qpn::new(7);
/// Address of the region's first byte.
const START: u64 = 0x10_0000;
const LEN: u64 = 4096;

/// Creates a table with one region.
fn table() -> (KeyTable, Key) {
    let mut table = KeyTable::new(1 << 20);
    let region = table.register(F, PD, memory(LEN as usize), START, ALL).unwrap();
    (table, region)
}

fn by(privileged: bool) -> ExecutingQp {
    ExecutingQp { qpn: QP, pd: PD, privileged }
}

fn through(tag: u64) -> AccessingQp {
    AccessingQp { qpn: QP, pd: PD, tag }
}

#[test]
fn range_check_is_exact_to_the_byte() {
    let (table, region) = table();
    let local = |addr, len| table.local(region, addr, len, Access::LOCAL_READ, PD).map(Span::len);
    assert_eq!(local(START, LEN), Ok(LEN));
    assert_eq!(local(START + LEN - 1, 1), Ok(1));
    // An empty range may lie at the end.
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
fn key_table_capacity_is_limited_by_index_width() {
    assert_eq!(KeyTable::new(u32::MAX).max, KeyIndex::MAX - FIRST_INDEX);
    assert_eq!(KeyTable::new(5).max, 5);
}

#[test]
fn umr_changes_only_masked_fields() {
    let (mut table, region) = table();
    let window = table.allocate_window(F, PD, MwKind::Type2).unwrap();
    let bind = Umr::bind(window, 9, QP, Access::REMOTE_ALL, region, START, 64);
    // Without its length, the window would have the length of the free window: 0.
    let umr = Umr { mask: bind.mask & !MASK_LEN, ..bind };
    assert_eq!(table.umr(&umr, by(false)), Err(Refusal::Form));
    // Without its start, the window starts at the start of the free window: 0.
    let umr = Umr { mask: bind.mask & !MASK_START, ..bind };
    assert_eq!(table.umr(&umr, by(false)), Ok(true));
    let info = table.describe(F, window.index()).unwrap();
    assert_eq!((info.start, info.len, info.tag), (0, 64, 9));
}

/// A type-1 window is unbound by a bind with length 0, but only if the UMR's mask includes the
/// length.
#[test]
fn masked_zero_length_unbinds_a_type_1_window() {
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
fn qp_has_windows_while_a_window_is_bound_to_it() {
    let (mut table, region) = table();
    let windows = [0, 1].map(|_| table.allocate_window(F, PD, MwKind::Type2).unwrap());
    for window in windows {
        assert_eq!(table.may_have_window(QP), window != windows[0]);
        let bind = Umr::bind(window, window.tag(), QP, Access::REMOTE_READ, region, START, 64);
        assert_eq!(table.umr(&bind, by(false)), Ok(true));
    }
    assert_eq!(table.describe(F, region.index()).unwrap().windows, 2);
    table.invalidate(windows[0], by(false)).unwrap();
    assert!(table.may_have_window(QP));
    table.invalidate(windows[1], by(false)).unwrap();
    assert!(!table.may_have_window(QP));
    assert_eq!(table.describe(F, region.index()).unwrap().windows, 0);
}

#[test]
fn key_index_is_reused_after_the_quarantine() {
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

/// The guard compares the word with the bitwise OR of value and tag: a bit may be set in both.
#[test]
fn guard_compares_its_word_with_value_or_tag() {
    let mut table = KeyTable::new(1 << 20);
    let words = memory(64);
    words.store_be64(8, 0b0111);
    let region = table.register(F, PD, words, START, ALL).unwrap();
    let guard = GuardSpec { region, addr: START + 8, value: 0b0110, mask: 0xff };
    let guarded = table.allocate_guarded(F, PD, &guard).unwrap();
    let plain = table.allocate_window(F, PD, MwKind::Type1).unwrap();
    for (tag, admits) in [(0b0001, true), (0b0011, true), (0b0111, true), (0, false), (8, false)] {
        assert_eq!(table.guard_admits(guarded.index(), tag), admits, "tag {tag:#b}");
        assert!(
            table.guard_admits(plain.index(), tag),
            "a window without a guard admits every tag"
        );
        let bind = Umr::bind_type1(guarded, 9, Access::REMOTE_ALL, region, START, 64);
        let bind = Umr { key: table_key(&table, guarded), ..bind };
        assert_eq!(table.umr(&bind, by(false)), Ok(true));
        let read =
            table.remote(table_key(&table, guarded), START, 8, Access::REMOTE_READ, through(tag));
        assert_eq!(read.is_ok(), admits, "tag {tag:#b}");
    }
}

/// The current key of an index.
fn table_key(table: &KeyTable, key: Key) -> Key {
    Key::new(key.index(), table.describe(F, key.index()).unwrap().tag)
}

#[test]
fn keys_over_a_range_are_found_to_the_byte() {
    let (mut table, region) = table();
    let window = table.allocate_window(F, PD, MwKind::Type2).unwrap();
    let keys = |table: &KeyTable, start, len| -> Vec<KeyIndex> {
        table.keys_over(start, len).iter().map(|range| range.key.index()).collect()
    };
    // A free window gives access to nothing.
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

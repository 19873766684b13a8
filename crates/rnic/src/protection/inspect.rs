//! Read-only inspection of the key table, for control verbs and tools. The data path does not use
//! it.

use super::{AllowedQps, BOUND_COUNTS, Entry, KeyTable, Kind};
use crate::error::Error;
use verbs::direct::{KeyInfo, KeyKind};
use verbs::{Access, FunctionId, Key, KeyIndex, MwKind, Pdn, Qpn};

/// The memory range that a key makes accessible.
pub(crate) struct KeyRange {
    pub key: Key,
    pub pd: Pdn,
    /// The only QP that may use the key, unless `open` is set.
    pub qpn: Qpn,
    /// Every QP of the PD may use the key; if the window is guarded, only QPs that the guard
    /// admits.
    pub open: bool,
    pub access: Access,
    pub start: u64,
    pub len: u64,
}

impl KeyTable {
    pub fn describe(&self, function: FunctionId, index: KeyIndex) -> Result<KeyInfo, Error> {
        let e = self.owned(function, index)?;
        let region = e.kind == Kind::Region;
        Ok(KeyInfo {
            kind: match (region, e.open()) {
                (true, _) => KeyKind::Mr,
                (false, true) => KeyKind::Mw(MwKind::Type1),
                (false, false) => KeyKind::Mw(MwKind::Type2),
            },
            tag: e.tag,
            pd: e.pd,
            bound: e.kind != Kind::Free,
            qpn: e.qpn,
            access: e.access | self.engines.rights(index),
            start: e.start,
            len: e.span.len(),
            windows: if region { e.link } else { 0 },
        })
    }

    /// Returns whether a window may be bound to `qpn`. Approximate (hashed count): no false
    /// negatives, possible false positives.
    pub fn may_have_window(&self, qpn: Qpn) -> bool {
        self.bound_counts[qpn.index() % BOUND_COUNTS] > 0
    }

    /// Returns whether the window's guard, if it has one, currently admits a QP with `tag`.
    pub fn guard_admits(&self, index: KeyIndex, tag: u64) -> bool {
        let e = &self.entries[index.index()];
        e.admits != AllowedQps::Guarded || self.guards.admits(index, tag)
    }

    /// Returns the keys that give access to any of the `len` bytes from `start`. Regions with an
    /// engine are left out, because only the engine knows which accesses it allows.
    pub fn keys_over(&self, start: u64, len: u64) -> Vec<KeyRange> {
        let end = start.saturating_add(len);
        let range = |(at, e): (usize, &Entry)| {
            let opens =
                matches!(e.kind, Kind::Bound | Kind::Region) && e.admits != AllowedQps::Engine;
            let first = self.owners_address(e);
            let meets = first < end && start < first.saturating_add(e.span.len());
            (opens && meets).then(|| KeyRange {
                key: Key::new(KeyIndex::new(at as u32), e.tag),
                pd: e.pd,
                qpn: e.qpn,
                open: e.open(),
                access: e.access,
                start: first,
                len: e.span.len(),
            })
        };
        self.entries.iter().enumerate().filter_map(range).collect()
    }

    /// Address of a key's first byte in its region, also for a zero-based window.
    fn owners_address(&self, e: &Entry) -> u64 {
        match e.kind {
            Kind::Bound => {
                let region = &self.entries[e.link as usize];
                region.start.wrapping_add(e.span.offset_in(region.span))
            }
            _ => e.start,
        }
    }
}

//! Engines behind memory regions: logic that decides over each access of a peer, and acts after
//! each WRITE of a peer.
//!
//! ```text
//!   peer's request ──> key, PD, rights, range ──> may_read, may_write ──> bytes moved
//!                      (once per step or packet)                             │ the WRITE has ended
//!                                                                            v
//!                                                                         written
//! ```
//!
//! The owner of a region chooses its engine when it registers the region. Accesses through the
//! region's lkey do not pass the engine. No hardware has engines.
//!
//! Invariants:
//! - A region keeps its engine from registration to deregistration, and has no windows.
//! - The engine is called only in the step that executes the access.
//! - The entry of the region in the key table has no remote rights; they are kept here.

use verbs::{Access, KeyIndex, RegionEngine};

/// Bytes of a region that a peer accesses, as its engine sees them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineAccess {
    /// The tag of the QP through which the peer accesses the region.
    pub tag: u64,
    /// Offset of the first byte in the region.
    pub offset: u64,
    pub len: u64,
}

/// The engine of a region.
struct EngineOfRegion {
    /// The remote rights of the region's key.
    rights: Access,
    engine: Box<dyn RegionEngine>,
}

/// Engines of all regions, by key index. Kept apart from the key table, so that its entries stay
/// small.
#[derive(Default)]
pub(crate) struct RegionEngines(Vec<Option<EngineOfRegion>>);

impl RegionEngines {
    /// Sets the remote rights and the engine of the region at `index`.
    pub fn set(&mut self, index: KeyIndex, rights: Access, engine: Box<dyn RegionEngine>) {
        if self.0.len() <= index.index() {
            self.0.resize_with(index.index() + 1, || None);
        }
        self.0[index.index()] = Some(EngineOfRegion { rights, engine });
    }

    /// Drops the engine of the region at `index`, if it has one.
    pub fn remove(&mut self, index: KeyIndex) {
        if let Some(entry) = self.0.get_mut(index.index()) {
            *entry = None;
        }
        // So that `is_empty` is exact.
        while let Some(None) = self.0.last() {
            self.0.pop();
        }
    }

    /// True if no region has an engine.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the remote rights of the region at `index`; none if it has no engine.
    pub fn rights(&self, index: KeyIndex) -> Access {
        match self.0.get(index.index()) {
            Some(Some(entry)) => entry.rights,
            _ => Access::NONE,
        }
    }

    /// Returns whether the engine of the region at `index` allows the operation `need`. No engine
    /// allows atomics, because an engine would have to see their result too.
    pub fn allows(&self, index: KeyIndex, need: Access, access: EngineAccess) -> bool {
        let Some(Some(EngineOfRegion { engine, .. })) = self.0.get(index.index()) else {
            return false;
        };
        let EngineAccess { tag, offset, len } = access;
        match need {
            Access::REMOTE_READ => engine.may_read(tag, offset, len),
            Access::REMOTE_WRITE => engine.may_write(tag, offset, len),
            _ => false,
        }
    }

    /// Calls the engine of the region at `index` after a WRITE. Returns false if the region has no
    /// engine.
    pub fn written(&mut self, index: KeyIndex, access: EngineAccess) -> bool {
        let Some(Some(entry)) = self.0.get_mut(index.index()) else { return false };
        entry.engine.written(access.tag, access.offset, access.len);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An engine that admits every access.
    struct Open;

    impl RegionEngine for Open {
        fn may_read(&self, _tag: u64, _offset: u64, _len: u64) -> bool {
            true
        }

        fn may_write(&self, _tag: u64, _offset: u64, _len: u64) -> bool {
            true
        }

        fn written(&mut self, _tag: u64, _offset: u64, _len: u64) {}
    }

    #[test]
    fn table_is_empty_after_its_last_engine() {
        let mut engines = RegionEngines::default();
        let access = EngineAccess { tag: 0, offset: 0, len: 1 };
        let [a, b, c] = [2, 5, 9].map(KeyIndex::new);
        for index in [a, c] {
            engines.set(index, Access::REMOTE_ALL, Box::new(Open));
        }
        for (removed, left) in [(b, [true, true]), (c, [true, false]), (a, [false, false])] {
            assert!(!engines.is_empty());
            engines.remove(removed);
            assert_eq!([a, c].map(|index| engines.written(index, access)), left);
            let reads = |index| engines.allows(index, Access::REMOTE_READ, access);
            assert_eq!([a, c].map(reads), left);
        }
        assert!(engines.is_empty());
    }
}

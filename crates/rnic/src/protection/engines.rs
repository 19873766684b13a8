//! Regions with an engine, in the key table.

use super::{AllowedQps, KeyTable, Refusal};
use crate::error::Error;
use crate::region_engines::EngineAccess;
use verbs::{Access, DmaMemory, FunctionId, Key, Pdn, RegionEngine};

impl KeyTable {
    /// Asks the engine of the region `key`. Not inlined, so that the check of other keys stays
    /// short.
    #[inline(never)]
    pub(super) fn ask_engine(
        &self,
        key: Key,
        need: Access,
        access: EngineAccess,
    ) -> Result<(), Refusal> {
        match self.engines.allows(key.index(), need, access) {
            true => Ok(()),
            false => Err(Refusal::Engine),
        }
    }

    /// Returns whether any region has an engine.
    #[inline]
    pub fn has_engines(&self) -> bool {
        !self.engines.is_empty()
    }

    /// Calls the engine of the region `key` after a WRITE of `len` bytes at `addr` through a QP
    /// with `tag`. Returns false if the region has no engine. The caller has checked the WRITE in
    /// the same step.
    pub fn write_ended(&mut self, key: Key, addr: u64, len: u64, tag: u64) -> bool {
        let found = self.entries.get(key.index().index());
        let Some(e) = found.filter(|e| e.admits == AllowedQps::Engine) else { return false };
        let offset = addr.wrapping_sub(e.start);
        self.engines.written(key.index(), EngineAccess { tag, offset, len })
    }

    /// Registers a region with an engine; its first byte has address 0.
    pub fn register_with_engine(
        &mut self,
        function: FunctionId,
        pd: Pdn,
        memory: DmaMemory,
        access: Access,
        engine: Box<dyn RegionEngine>,
    ) -> Result<Key, Error> {
        let key = self.register(function, pd, memory, 0, access)?;
        self.entries[key.index().index()].admits = AllowedQps::Engine;
        self.engines.set(key.index(), engine);
        Ok(key)
    }

    /// Returns like [`KeyTable::region`], for a region that can be changed: one without an engine.
    pub fn changeable_region(&self, function: FunctionId, key: Key) -> Result<(Pdn, u64), Error> {
        let found = self.region(function, key)?;
        match self.entries[key.index().index()].admits {
            AllowedQps::Engine => Err(Error::HasEngine(key.index())),
            _ => Ok(found),
        }
    }
}

//! Regions with an engine, in the key table.

use super::{AllowedQps, KeyTable, Refusal};
use crate::dma::Span;
use crate::error::Error;
use crate::region_engines::EngineAccess;
use verbs::{Access, DmaMemory, FunctionId, Key, Pdn, RegionEngine};

impl KeyTable {
    /// Checks a remote access whose right the key's entry lacks. A region with an engine has its
    /// remote rights beside the engine, so that the check of other keys does not look for engines.
    #[cold]
    #[inline(never)]
    pub(super) fn ask_engine(
        &self,
        key: Key,
        addr: u64,
        len: u64,
        need: Access,
        tag: u64,
    ) -> Result<Span, Refusal> {
        let e = &self.entries[key.index().index()];
        if !self.engines.rights(key.index()).allows(need) {
            return Err(Refusal::Rights);
        }
        let span = e.range(addr, len)?;
        let access = EngineAccess { tag, offset: addr.wrapping_sub(e.start), len };
        match self.engines.allows(key.index(), need, access) {
            true => Ok(span),
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
        let (local, remote) = (access.0 & Access::LOCAL_ALL.0, access.0 & Access::REMOTE_ALL.0);
        let key = self.register(function, pd, memory, 0, Access(local))?;
        self.entries[key.index().index()].admits = AllowedQps::Engine;
        self.engines.set(key.index(), Access(remote), engine);
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

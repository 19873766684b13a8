//! The key table: memory regions, memory windows, and the protection check of every access.
//!
//! A key is a 24-bit index and an 8-bit tag (IBTA vol. 1, §10.6). Each index is in one of four
//! states:
//!
//! ```text
//!            reg_mr                 dereg_mr, refused while windows are bound
//!   unused ---------> region ------------------------------------------------> unused
//!            alloc_mw         bind (UMR)            dealloc_mw
//!   unused ---------> free <-----------> bound      free or bound ----------> unused
//!                           unbind (UMR), LOCAL_INV, SEND with invalidate
//! ```
//!
//! Invariants:
//! - A bound window lies in a region of its own PD. The region counts the window and outlives it.
//! - The tag changes with every bind and every reuse of an index, so older keys are invalid.
//! - The guard word of a guarded window lies in a region, which also counts the window (see
//!   `guard`).
//! - A region with an engine has no windows (see `region_engines`).
//! - A host pointer leaves this module only as a `Span` that passed a check, valid for one step.

mod engines;
mod inspect;
mod refusal;

use crate::dma::Span;
use crate::error::{Error, Object};
use crate::guard::{Guard, Guards};
use crate::region_engines::RegionEngines;
use crate::spec::{GuardSpec, RegionChange};
use std::collections::VecDeque;
use verbs::wqe::umr::{self, Umr, UmrFlags};
use verbs::{Access, DmaMemory, FunctionId, Key, KeyIndex, MwKind, Pdn, Qpn};

pub(crate) use inspect::KeyRange;
pub use refusal::Refusal;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Unused,
    Region,
    Free,
    Bound,
}

/// QPs that may use a key, among the QPs of its PD.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AllowedQps {
    /// The QP that the window is bound to (type-2 windows).
    OneQp,
    /// All QPs (regions, type-1 windows).
    All,
    /// The QPs that the guard word admits (guarded type-1 windows).
    Guarded,
    /// The QPs that the engine allows the access (regions with an engine).
    Engine,
}

/// Fields of a key that the data path reads.
#[derive(Clone, Copy, Debug)]
struct Entry {
    kind: Kind,
    tag: u8,
    /// The remote rights of a region with an engine are in the table of engines.
    access: Access,
    pd: Pdn,
    /// The QP that a type-2 window is bound to; otherwise NONE.
    qpn: Qpn,
    admits: AllowedQps,
    /// Bound windows: index of the region. Regions: number of windows bound to the region plus
    /// number of guard words in it.
    link: u32,
    start: u64,
    /// Host memory of the key, `span.len()` bytes.
    span: Span,
}

/// Fields of a key that only control verbs read.
struct Owner {
    function: FunctionId,
    /// The memory of a region; keeps the memory mapped.
    memory: Option<DmaMemory>,
}

/// Bytes of one key in the table.
#[cfg(test)]
pub(crate) const KEY_BYTES: usize = size_of::<Entry>() + size_of::<Owner>();

/// The QP through which a peer uses a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccessingQp {
    pub qpn: Qpn,
    pub pd: Pdn,
    /// The tag that the QP's owner has set, compared with guard words.
    pub tag: u64,
}

/// The QP whose WQE changes a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExecutingQp {
    pub qpn: Qpn,
    pub pd: Pdn,
    pub privileged: bool,
}

/// All keys of one namespace of the NIC.
pub(crate) struct KeyTable {
    entries: Vec<Entry>,
    owners: Vec<Owner>,
    guards: Guards,
    engines: RegionEngines,
    free: VecDeque<u32>,
    max: u32,
    /// Counts of bound windows, hashed by the low bits of the QP number that the windows are bound
    /// to.
    bound_counts: Vec<u32>,
}

/// Number of counters in [`KeyTable::bound_counts`]. QP numbers that differ by a multiple of this
/// share a counter.
const BOUND_COUNTS: usize = 1 << 16;

/// First usable index. Indices 0 and 1 are never valid, so a zeroed key and mlx5's invalid lkey
/// 0x100 name nothing.
const FIRST_INDEX: u32 = 2;

impl Entry {
    const UNUSED: Entry = Entry {
        kind: Kind::Unused,
        tag: 0,
        access: Access::NONE,
        pd: Pdn::new(0),
        qpn: Qpn::NONE,
        admits: AllowedQps::OneQp,
        link: 0,
        start: 0,
        span: Span::EMPTY,
    };

    /// True unless the key is a type-2 window.
    #[inline]
    fn open(&self) -> bool {
        self.admits != AllowedQps::OneQp
    }

    /// Returns the `len` bytes at `addr` if they lie inside the key's range.
    #[inline]
    fn range(&self, addr: u64, len: u64) -> Result<Span, Refusal> {
        let offset = addr.wrapping_sub(self.start);
        if offset > self.span.len() || len > self.span.len() - offset {
            return Err(Refusal::Range);
        }
        Ok(self.span.part(offset, len))
    }
}

impl KeyTable {
    pub fn new(max: u32) -> Self {
        let unused = || Owner { function: FunctionId::PHYSICAL, memory: None };
        Self {
            entries: vec![Entry::UNUSED; FIRST_INDEX as usize],
            owners: (0..FIRST_INDEX).map(|_| unused()).collect(),
            guards: Guards::default(),
            engines: RegionEngines::default(),
            free: VecDeque::new(),
            max: max.min(KeyIndex::MAX - FIRST_INDEX),
            bound_counts: vec![0; BOUND_COUNTS],
        }
    }

    // --- protection checks of the data path ---------------------------------------------------

    /// Returns the entry of a key of `pd`. For a key of another PD the result is always
    /// `Refusal::Pd`, whatever the tag. Otherwise a client could find a neighbour's tag by trying
    /// tags and observing how its WQEs fail.
    #[inline]
    fn entry(&self, key: Key, pd: Pdn) -> Result<&Entry, Refusal> {
        let e = self.entries.get(key.index().index()).ok_or(Refusal::NoKey)?;
        match e.kind {
            Kind::Unused => Err(Refusal::NoKey),
            _ if e.pd != pd => Err(Refusal::Pd),
            _ if e.tag != key.tag() => Err(Refusal::Tag),
            _ => Ok(e),
        }
    }

    /// Checks a local access by a QP of `pd`: the key must be a region's (IBTA vol. 1, §10.6).
    #[inline]
    pub fn local(
        &self,
        key: Key,
        addr: u64,
        len: u64,
        need: Access,
        pd: Pdn,
    ) -> Result<Span, Refusal> {
        let e = self.entry(key, pd)?;
        if e.kind != Kind::Region {
            return Err(Refusal::NoKey);
        }
        if !e.access.allows(need) {
            return Err(Refusal::Rights);
        }
        e.range(addr, len)
    }

    /// Checks an access by the peer of the QP `by`. The key may be that of a region whose engine
    /// (if any) allows the access, of a bound type-1 window whose guard (if any) admits the QP, or
    /// of a type-2 window bound to this QP (IBTA vol. 1, §10.6).
    #[inline]
    pub fn remote(
        &self,
        key: Key,
        addr: u64,
        len: u64,
        need: Access,
        by: AccessingQp,
    ) -> Result<Span, Refusal> {
        let e = self.entry(key, by.pd)?;
        match e.kind {
            Kind::Bound if e.qpn != by.qpn && !e.open() => return Err(Refusal::Qpn),
            Kind::Bound | Kind::Region => {}
            _ => return Err(Refusal::Free),
        }
        if !e.access.allows(need) {
            return self.ask_engine(key, addr, len, need, by.tag);
        }
        let span = e.range(addr, len)?;
        if e.admits == AllowedQps::Guarded && !self.guards.admits(key.index(), by.tag) {
            return Err(Refusal::Guard);
        }
        Ok(span)
    }

    /// Zeroes `target` by returning its pages to the kernel, if the region `key` is thin memory
    /// ([`DmaMemory::thin`]). Otherwise returns false and changes nothing. The caller has checked
    /// `target` against `key`.
    pub fn discard(&self, key: Key, target: Span) -> bool {
        let owner = self.owners.get(key.index().index());
        owner.and_then(|owner| owner.memory.as_ref()).is_some_and(|memory| {
            memory.discard(target.offset_in(Span::of(memory)) as usize, target.len() as usize)
        })
    }

    // --- windows -------------------------------------------------------------------------------

    /// Executes a UMR for `by`. Returns true if the window is bound afterwards.
    ///
    /// All new values are computed and checked before the first change, so a rejected UMR changes
    /// nothing.
    pub fn umr(&mut self, u: &Umr, by: ExecutingQp) -> Result<bool, Refusal> {
        let old = *self.entry(u.key, by.pd)?;
        if old.kind == Kind::Region {
            return Err(Refusal::NoKey);
        }
        if u.mask & umr::MASK_FREE == 0 {
            return Err(Refusal::Form);
        }
        if u.flags.has(UmrFlags::CHECK_FREE) && old.kind != Kind::Free {
            return Err(Refusal::Bound);
        }
        if u.flags.has(UmrFlags::CHECK_QPN) {
            match old.kind {
                _ if old.open() => return Err(Refusal::Type),
                Kind::Bound if old.qpn == by.qpn => {}
                Kind::Bound => return Err(Refusal::Qpn),
                _ => return Err(Refusal::Free),
            }
        }
        let mut new = old;
        if u.mask & umr::MASK_MKEY != 0 {
            new.tag = u.tag;
        }
        if u.mask & umr::MASK_ACCESS != 0 {
            new.access = Access(u.access.0 & Access::REMOTE_ALL.0);
        }
        // Binding a type-1 window with length 0 unbinds it (IBTA vol. 1, §10.6.7).
        let emptied = old.open() && u.mask & umr::MASK_LEN != 0 && u.len == 0 && u.klm.len == 0;
        if u.free || emptied {
            // Any QP of the PD may rebind and unbind a type-1 window.
            if !old.open() && !u.flags.has(UmrFlags::CHECK_QPN) && !by.privileged {
                return Err(Refusal::Privilege);
            }
            self.replace(u.key.index(), Entry { kind: Kind::Free, ..new });
            return Ok(false);
        }
        if u.mask & umr::MASK_QPN != 0 {
            new.qpn = u.qpn;
        }
        if old.open() {
            if new.qpn != Qpn::NONE {
                return Err(Refusal::Type);
            }
        } else {
            let others = old.kind == Kind::Bound && old.qpn != by.qpn;
            if (others || new.qpn != by.qpn) && !by.privileged {
                return Err(Refusal::Privilege);
            }
        }
        if u.mask & umr::MASK_START != 0 {
            new.start = u.start;
        }
        let len = if u.mask & umr::MASK_LEN != 0 { u.len } else { old.span.len() };
        // A zero-based window is addressed from 0 (IBTA vol. 1, §10.6).
        let based = new.start == u.klm.addr || new.start == 0;
        if !based || len != u.klm.len as u64 || len == 0 {
            return Err(Refusal::Form);
        }
        // Words must be aligned in the window's address space and in host memory.
        if new.access.allows(Access::REMOTE_ATOMIC) && new.start % 8 != u.klm.addr % 8 {
            return Err(Refusal::Form);
        }
        let region = self.entry(u.klm.lkey, by.pd).map_err(|_| Refusal::Region)?;
        let writes = Access(new.access.0 & WRITING.0) != Access::NONE;
        let allows_bind = region.kind == Kind::Region && region.admits != AllowedQps::Engine;
        if !allows_bind || writes && !region.access.allows(Access::LOCAL_WRITE) {
            return Err(Refusal::Region);
        }
        new.span = region.range(u.klm.addr, len).map_err(|_| Refusal::Region)?;
        new.kind = Kind::Bound;
        new.link = u.klm.lkey.index().raw();
        self.replace(u.key.index(), new);
        Ok(true)
    }

    /// Executes LOCAL_INV, or the invalidation of a SEND: frees a type-2 window that is bound to
    /// the QP `by` (IBTA vol. 1, §10.6).
    pub fn invalidate(&mut self, key: Key, by: ExecutingQp) -> Result<(), Refusal> {
        let old = self.may_invalidate(key, by)?;
        self.replace(key.index(), Entry { kind: Kind::Free, ..old });
        Ok(())
    }

    /// Returns whether [`KeyTable::invalidate`] would succeed.
    pub fn check_invalidate(&self, key: Key, by: ExecutingQp) -> Result<(), Refusal> {
        self.may_invalidate(key, by).map(|_| ())
    }

    fn may_invalidate(&self, key: Key, by: ExecutingQp) -> Result<Entry, Refusal> {
        let e = *self.entry(key, by.pd)?;
        match e.kind {
            Kind::Bound | Kind::Free if e.open() => Err(Refusal::Type),
            Kind::Bound if e.qpn != by.qpn => Err(Refusal::Qpn),
            Kind::Bound => Ok(e),
            Kind::Free => Err(Refusal::Free),
            _ => Err(Refusal::NoKey),
        }
    }

    /// Replaces the entry of a window by `new` and updates the counts of the regions.
    fn replace(&mut self, index: KeyIndex, mut new: Entry) {
        let old = self.entries[index.index()];
        if old.kind == Kind::Bound {
            let region = &mut self.entries[old.link as usize];
            assert!(
                region.kind == Kind::Region && region.link > 0,
                "the region of a bound window exists"
            );
            region.link -= 1;
            self.bound_counts[old.qpn.index() % BOUND_COUNTS] -= 1;
        }
        if new.kind == Kind::Bound {
            self.entries[new.link as usize].link += 1;
            self.bound_counts[new.qpn.index() % BOUND_COUNTS] += 1;
        } else {
            new.qpn = Qpn::NONE;
            new.link = 0;
            new.span = Span::EMPTY;
        }
        self.entries[index.index()] = new;
    }

    // --- control verbs -------------------------------------------------------------------------

    fn allocate(&mut self, entry: Entry, owner: Owner) -> Result<Key, Error> {
        let used = self.entries.len() - FIRST_INDEX as usize;
        let index = if used < self.max as usize && self.free.len() < QUARANTINE {
            self.entries.push(Entry::UNUSED);
            self.owners.push(Owner { function: FunctionId::PHYSICAL, memory: None });
            (self.entries.len() - 1) as u32
        } else {
            let limit = self.max as u64;
            self.free.pop_front().ok_or(Error::Limit { what: "keys of the NIC", limit })?
        };
        let at = index as usize;
        // Unused entries keep the tag of their last key.
        let tag = self.entries[at].tag.wrapping_add(1);
        self.entries[at] = Entry { tag, ..entry };
        self.owners[at] = owner;
        Ok(Key::new(KeyIndex::new(index), tag))
    }

    pub fn register(
        &mut self,
        function: FunctionId,
        pd: Pdn,
        memory: DmaMemory,
        iova: u64,
        access: Access,
    ) -> Result<Key, Error> {
        let span = Span::of(&memory);
        let entry = Entry {
            kind: Kind::Region,
            admits: AllowedQps::All,
            pd,
            access,
            start: iova,
            span,
            ..Entry::UNUSED
        };
        self.allocate(entry, Owner { function, memory: Some(memory) })
    }

    pub fn allocate_window(
        &mut self,
        function: FunctionId,
        pd: Pdn,
        kind: MwKind,
    ) -> Result<Key, Error> {
        let admits = match kind {
            MwKind::Type1 => AllowedQps::All,
            MwKind::Type2 => AllowedQps::OneQp,
        };
        let entry = Entry { kind: Kind::Free, pd, admits, ..Entry::UNUSED };
        self.allocate(entry, Owner { function, memory: None })
    }

    /// Creates a type-1 window whose guard word lies in a region of `function`.
    pub fn allocate_guarded(
        &mut self,
        function: FunctionId,
        pd: Pdn,
        guard: &GuardSpec,
    ) -> Result<Key, Error> {
        let region = guard.region.index();
        let found = *self.owned(function, region)?;
        if found.kind != Kind::Region || found.tag != guard.region.tag() {
            return Err(Error::Unknown(Object::Key(region)));
        }
        let word = found.range(guard.addr, 8).ok().filter(|word| word.is_word());
        let word = word.ok_or(Error::Argument {
            what: "the address of a guard word",
            value: guard.addr,
            must: "8-byte aligned and inside the region",
        })?;
        let entry = Entry { kind: Kind::Free, pd, admits: AllowedQps::Guarded, ..Entry::UNUSED };
        let key = self.allocate(entry, Owner { function, memory: None })?;
        let (value, mask) = (guard.value, guard.mask);
        self.guards.set(key.index(), Guard { word, region, value, mask });
        self.entries[region.index()].link += 1;
        Ok(key)
    }

    /// Returns the entry at `index` if `function` owns it.
    fn owned(&self, function: FunctionId, index: KeyIndex) -> Result<&Entry, Error> {
        let object = Object::Key(index);
        let e = self.entries.get(index.index()).filter(|e| e.kind != Kind::Unused);
        let e = e.ok_or(Error::Unknown(object))?;
        if self.owners[index.index()].function != function {
            return Err(Error::Foreign { object, caller: function });
        }
        Ok(e)
    }

    /// Returns the PD and length of a region that no window or guard uses.
    pub fn region(&self, function: FunctionId, key: Key) -> Result<(Pdn, u64), Error> {
        let e = *self.owned(function, key.index())?;
        if e.kind != Kind::Region || e.tag != key.tag() {
            return Err(Error::Unknown(Object::Key(key.index())));
        }
        if e.link > 0 {
            let (object, users) = (Object::Key(key.index()), e.link);
            return Err(Error::InUse { object, users, by: "memory windows" });
        }
        Ok((e.pd, e.span.len()))
    }

    /// Destroys a region; returns its PD and length.
    pub fn deregister(&mut self, function: FunctionId, key: Key) -> Result<(Pdn, u64), Error> {
        let what = self.region(function, key)?;
        self.retire(key.index());
        Ok(what)
    }

    /// Changes a region that passed [`KeyTable::changeable_region`]; returns its new key.
    pub fn reregister(&mut self, key: Key, to: RegionChange) -> Key {
        let index = key.index();
        let e = &mut self.entries[index.index()];
        e.tag = e.tag.wrapping_add(1);
        e.pd = to.pd.unwrap_or(e.pd);
        e.access = to.access.unwrap_or(e.access);
        if let Some((memory, iova)) = to.memory {
            (e.start, e.span) = (iova, Span::of(&memory));
            self.owners[index.index()].memory = Some(memory);
        }
        Key::new(index, self.entries[index.index()].tag)
    }

    /// Destroys a window, bound or free; returns its PD. The tag of `key` is ignored, because binds
    /// have changed it.
    pub fn deallocate_window(&mut self, function: FunctionId, key: Key) -> Result<Pdn, Error> {
        let e = *self.owned(function, key.index())?;
        if e.kind == Kind::Region {
            return Err(Error::Unknown(Object::Key(key.index())));
        }
        self.replace(key.index(), Entry { kind: Kind::Free, ..e });
        self.retire(key.index());
        Ok(e.pd)
    }

    fn retire(&mut self, index: KeyIndex) {
        if let Some(guard) = self.guards.take(index) {
            let region = &mut self.entries[guard.region.index()];
            assert!(
                region.kind == Kind::Region && region.link > 0,
                "the region of a guard word exists"
            );
            region.link -= 1;
        }
        if self.has_engines() {
            self.engines.remove(index);
        }
        let tag = self.entries[index.index()].tag;
        self.entries[index.index()] = Entry { tag, ..Entry::UNUSED };
        self.owners[index.index()].memory = None;
        self.free.push_back(index.raw());
    }

    /// Destroys all keys of `function`: windows first, then regions.
    pub fn remove_function(&mut self, function: FunctionId, keys: impl Iterator<Item = KeyIndex>) {
        let mut regions = Vec::new();
        // Sorted, so that the order is the same in every run.
        let mut keys = Vec::from_iter(keys);
        keys.sort_unstable_by_key(|index| index.raw());
        for index in keys {
            assert_eq!(self.owners[index.index()].function, function);
            let e = self.entries[index.index()];
            if e.kind == Kind::Region {
                regions.push(index);
            } else {
                self.replace(index, Entry { kind: Kind::Free, ..e });
                self.retire(index);
            }
        }
        for index in regions {
            assert_eq!(
                self.entries[index.index()].link,
                0,
                "the windows of a region belong to its function"
            );
            self.retire(index);
        }
    }
}

/// Rights to change memory.
const WRITING: Access = Access(Access::REMOTE_WRITE.0 | Access::REMOTE_ATOMIC.0);

/// Number of freed indices that are kept back while unused indices remain. Delays the reuse of an
/// index.
const QUARANTINE: usize = 64;

#[cfg(test)]
#[path = "protection_tests.rs"]
mod tests;

//! Memory windows as the mechanism that opens chunks: a type-2 window per lane, or one type-1
//! window.

use std::ops::Range;

use scheme::index::EntryId;
use scheme::{Error, Lane, MAX_GROUP};
use verbs::wqe::Umr;
use verbs::{Access, Key, MemoryRegion, MemoryWindow, Nic, Qpn};

use super::blocks::Blocks;

/// Addresses of the blocks, for binds.
struct Ranges {
    mr: Key,
    base: u64,
    blocks: Blocks,
}

impl Ranges {
    fn of<M: MemoryRegion>(memory: &M, blocks: Blocks) -> Self {
        Self { mr: memory.key(), base: memory.memory().addr(), blocks }
    }

    /// Address and size of a block.
    fn of_entry(&self, entry: EntryId) -> (u64, u32) {
        let (offset, bytes) = self.blocks.range(entry);
        (self.base + offset, bytes as u32)
    }
}

/// Type-2 windows, each bound to one QP. Entry e uses `lanes` windows, beginning with e * lanes.
pub struct Type2<N: Nic> {
    ranges: Ranges,
    lanes: usize,
    windows: Vec<N::Mw>,
    /// Keys of the windows as of their last bind.
    keys: Vec<Key>,
}

impl<N: Nic> Type2<N> {
    /// Allocates the windows for `blocks`.
    pub fn new(
        nic: &N,
        pd: &N::Pd,
        memory: &N::Mr,
        blocks: Blocks,
        lanes: usize,
    ) -> Result<Self, Error> {
        let windows = nic.alloc_mws(pd, blocks.count() as usize * lanes)?;
        let keys = windows.iter().map(|w| w.key()).collect();
        Ok(Self { ranges: Ranges::of(memory, blocks), lanes, windows, keys })
    }

    /// Windows per block.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// Keys of a block, by lane.
    pub fn keys(&self, entry: EntryId) -> &[Key] {
        &self.keys[self.windows_of(entry)]
    }

    fn windows_of(&self, entry: EntryId) -> Range<usize> {
        let first = entry.as_usize() * self.lanes;
        first..first + self.lanes
    }

    /// The UMR that binds a block's window to `qpn` and changes its tag.
    pub fn bind(&mut self, entry: EntryId, lane: Lane, qpn: Qpn) -> Umr {
        let windows = self.windows_of(entry);
        let key = &mut self.keys[windows][lane.0 as usize];
        let tag = key.tag().wrapping_add(1);
        let (start, len) = self.ranges.of_entry(entry);
        let umr = Umr::bind(*key, tag, qpn, Access::REMOTE_ALL, self.ranges.mr, start, len);
        *key = Key::new(key.index(), tag);
        umr
    }

    /// The UMR that unbinds a block's window.
    pub fn unbind(&self, entry: EntryId, lane: Lane) -> Umr {
        Umr::unbind(self.keys(entry)[lane.0 as usize], true)
    }

    /// Allocates new windows for a block and deallocates the old ones, which invalidates their
    /// keys.
    pub fn replace(&mut self, nic: &N, pd: &N::Pd, entry: EntryId) -> Result<(), Error> {
        for at in self.windows_of(entry) {
            self.windows[at] = nic.alloc_mw(pd)?;
            self.keys[at] = self.windows[at].key();
        }
        Ok(())
    }
}

/// Type-1 windows: one per block, each bound to some block or unbound.
pub struct Type1<N: Nic> {
    ranges: Ranges,
    windows: Vec<N::Mw>,
    keys: Vec<Key>,
    /// Index of the window of each block.
    of: Vec<u32>,
    /// Blocks that are open before they are allocated; `None` if allocations open them.
    ahead: Option<Vec<bool>>,
}

impl<N: Nic> Type1<N> {
    /// Allocates the windows for `blocks`. `ahead`: windows are bound before allocations instead of
    /// by them.
    pub fn new(
        nic: &N,
        pd: &N::Pd,
        memory: &N::Mr,
        blocks: Blocks,
        ahead: bool,
    ) -> Result<Self, Error> {
        let count = blocks.count();
        let windows = nic.alloc_type1_mws(pd, count as usize)?;
        let keys = windows.iter().map(|w| w.key()).collect();
        let ahead = ahead.then(|| vec![false; count as usize]);
        let ranges = Ranges::of(memory, blocks);
        Ok(Self { ranges, windows, keys, of: (0..count).collect(), ahead })
    }

    /// True if an allocation of the block needs no bind.
    pub fn is_ahead(&self, entry: EntryId) -> bool {
        self.ahead.as_ref().is_some_and(|ahead| ahead[entry.as_usize()])
    }

    /// Key of a block.
    pub fn key(&self, entry: EntryId) -> Key {
        self.keys[self.window_of(entry)]
    }

    fn window_of(&self, entry: EntryId) -> usize {
        self.of[entry.as_usize()] as usize
    }

    /// The UMR that binds a block's window to the block, also if it was bound elsewhere.
    pub fn bind(&mut self, entry: EntryId) -> Umr {
        let (start, len) = self.ranges.of_entry(entry);
        if let Some(ahead) = &mut self.ahead {
            ahead[entry.as_usize()] = true;
        }
        self.change(entry, Access::REMOTE_ALL, start, len)
    }

    /// The UMR that invalidates a block's key: an unbind, or a bind for the next owner if windows
    /// are bound before allocations.
    pub fn close(&mut self, entry: EntryId) -> Umr {
        match self.ahead {
            Some(_) => self.bind(entry),
            None => self.change(entry, Access::NONE, self.ranges.of_entry(entry).0, 0),
        }
    }

    fn change(&mut self, entry: EntryId, access: Access, start: u64, len: u32) -> Umr {
        let window = self.window_of(entry);
        let key = &mut self.keys[window];
        let tag = key.tag().wrapping_add(1);
        let umr = Umr::bind_type1(*key, tag, access, self.ranges.mr, start, len);
        *key = Key::new(key.index(), tag);
        umr
    }

    /// Swaps the windows of two blocks. A bind of the first block is then a rebind of the window
    /// that opened the second.
    pub fn exchange(&mut self, a: EntryId, b: EntryId) {
        self.of.swap(a.as_usize(), b.as_usize());
    }

    /// Allocates a new window for a block and deallocates the old one, which invalidates its key.
    pub fn replace(&mut self, nic: &N, pd: &N::Pd, entry: EntryId) -> Result<(), Error> {
        let at = self.window_of(entry);
        let [new] = &nic.alloc_type1_mws(pd, 1)?[..] else {
            return Err(Error::Protocol {
                attempt: "replacing a memory window".into(),
                why: "the NIC did not return exactly one window".into(),
            });
        };
        (self.windows[at], self.keys[at]) = (new.clone(), new.key());
        if let Some(ahead) = &mut self.ahead {
            ahead[entry.as_usize()] = false;
        }
        Ok(())
    }
}

const _: () = assert!(MAX_GROUP <= u8::MAX as usize);

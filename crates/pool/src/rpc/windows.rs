//! Windows as what opens chunks: of type 2, one for each lane, or of type 1, one for all.

use fabric::wqe::Umr;
use fabric::{Access, Key, MemoryRegion, MemoryWindow, Nic, Qpn};

use crate::Error;
use crate::scheme::{Lane, MAX_GROUP};

/// The chunks as windows see them.
struct Chunks {
    mr: Key,
    base: u64,
    bytes: u64,
}

impl Chunks {
    fn of<M: MemoryRegion>(memory: &M, bytes: u64) -> Self {
        Self { mr: memory.key(), base: memory.memory().addr(), bytes }
    }

    fn start(&self, entry: u32) -> u64 {
        self.base + entry as u64 * self.bytes
    }
}

/// Type-2 windows: entry e has those from e * lanes on, each bound to one QP.
pub struct Type2<N: Nic> {
    chunks: Chunks,
    lanes: usize,
    windows: Vec<N::Mw>,
    /// The windows' keys as their last bind left them.
    keys: Vec<Key>,
}

impl<N: Nic> Type2<N> {
    /// Allocates the windows for `count` chunks of `bytes`.
    pub fn new(
        nic: &N,
        pd: &N::Pd,
        memory: &N::Mr,
        (count, bytes): (u32, u64),
        lanes: usize,
    ) -> Result<Self, Error> {
        let windows = nic.alloc_mws(pd, count as usize * lanes)?;
        let keys = windows.iter().map(|w| w.key()).collect();
        Ok(Self { chunks: Chunks::of(memory, bytes), lanes, windows, keys })
    }

    /// Windows of a chunk.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// The keys of a chunk, by lane.
    pub fn keys(&self, entry: u32) -> &[Key] {
        &self.keys[entry as usize * self.lanes..][..self.lanes]
    }

    /// The UMR that binds a window of a chunk to `qpn`, and changes its tag.
    pub fn bind(&mut self, entry: u32, lane: Lane, qpn: Qpn) -> Umr {
        let key = &mut self.keys[entry as usize * self.lanes + lane.0 as usize];
        let tag = key.tag().wrapping_add(1);
        let (start, len) = (self.chunks.start(entry), self.chunks.bytes as u32);
        let umr = Umr::bind(*key, tag, qpn, Access::REMOTE_ALL, self.chunks.mr, start, len);
        *key = Key::new(key.index(), tag);
        umr
    }

    /// The UMR that unbinds a window of a chunk.
    pub fn unbind(&self, entry: u32, lane: Lane) -> Umr {
        Umr::unbind(self.keys(entry)[lane.0 as usize], true)
    }

    /// Takes new windows for a chunk. The old ones are deallocated: their keys are dead.
    pub fn replace(&mut self, nic: &N, pd: &N::Pd, entry: u32) -> Result<(), Error> {
        let from = entry as usize * self.lanes;
        for at in from..from + self.lanes {
            self.windows[at] = nic.alloc_mw(pd)?;
            self.keys[at] = self.windows[at].key();
        }
        Ok(())
    }
}

/// Type-1 windows: as many as there are chunks, each over some chunk or over none.
pub struct Type1<N: Nic> {
    chunks: Chunks,
    windows: Vec<N::Mw>,
    keys: Vec<Key>,
    /// The window of each chunk.
    of: Vec<u32>,
}

impl<N: Nic> Type1<N> {
    /// Allocates the windows for `count` chunks of `bytes`.
    pub fn new(
        nic: &N,
        pd: &N::Pd,
        memory: &N::Mr,
        (count, bytes): (u32, u64),
    ) -> Result<Self, Error> {
        let windows = nic.alloc_type1_mws(pd, count as usize)?;
        let keys = windows.iter().map(|w| w.key()).collect();
        Ok(Self { chunks: Chunks::of(memory, bytes), windows, keys, of: (0..count).collect() })
    }

    /// The key of a chunk.
    pub fn key(&self, entry: u32) -> Key {
        self.keys[self.of[entry as usize] as usize]
    }

    /// The UMR that takes a chunk's window to it, from wherever it was: a bind or a rebind.
    pub fn bind(&mut self, entry: u32) -> Umr {
        let (start, len) = (self.chunks.start(entry), self.chunks.bytes as u32);
        self.change(entry, Access::REMOTE_ALL, start, len)
    }

    /// The UMR that unbinds the window of a chunk.
    pub fn unbind(&mut self, entry: u32) -> Umr {
        self.change(entry, Access::NONE, self.chunks.start(entry), 0)
    }

    fn change(&mut self, entry: u32, access: Access, start: u64, len: u32) -> Umr {
        let key = &mut self.keys[self.of[entry as usize] as usize];
        let tag = key.tag().wrapping_add(1);
        let umr = Umr::bind_type1(*key, tag, access, self.chunks.mr, start, len);
        *key = Key::new(key.index(), tag);
        umr
    }

    /// Gives each of two chunks the other's window: a bind of the first is then a rebind of what
    /// opened the second.
    pub fn exchange(&mut self, a: u32, b: u32) {
        self.of.swap(a as usize, b as usize);
    }

    /// Takes a new window for a chunk. The old one is deallocated: its key is dead.
    pub fn replace(&mut self, nic: &N, pd: &N::Pd, entry: u32) -> Result<(), Error> {
        let at = self.of[entry as usize] as usize;
        let [new] = &nic.alloc_type1_mws(pd, 1)?[..] else {
            return Err(Error::Protocol {
                attempt: "replacing a memory window".into(),
                why: "the NIC gave another number of windows than 1".into(),
            });
        };
        (self.windows[at], self.keys[at]) = (new.clone(), new.key());
        Ok(())
    }
}

const _: () = assert!(MAX_GROUP <= u8::MAX as usize);

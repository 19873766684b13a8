//! Which chunk is whose, and the windows over each: the memory node's books.
//!
//! ```text
//! entry e: bytes [e * chunk, (e + 1) * chunk) of the donated memory
//!          windows e * lanes .. (e + 1) * lanes, one for each access QP of a group
//! ```
//!
//! Invariants: an entry is on the free list exactly if nobody owns it; windows of a free entry are
//! unbound; the bytes of a free entry are zero.

use fabric::wqe::Umr;
use fabric::{Access, Key, MemoryRegion, MemoryWindow, Nic, Qpn};

use super::{Outcome, Reply};
use crate::Error;
use crate::scheme::{ClientId, GroupId, Lane, MAX_GROUP};
use crate::settings::Settings;

/// Whose a chunk is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// It is free.
    Nobody,
    /// A compute node's.
    Client(ClientId),
}

struct Entry {
    owner: Owner,
    group: GroupId,
    /// A free of it has begun.
    leaving: bool,
}

/// The books.
pub struct Table<N: Nic> {
    memory: N::Mr,
    chunk_bytes: u64,
    lanes: usize,
    entries: Vec<Entry>,
    windows: Vec<N::Mw>,
    /// The windows' keys as their last bind left them.
    keys: Vec<Key>,
    free: Vec<u32>,
}

impl<N: Nic> Table<N> {
    /// Takes memory and windows for all chunks.
    pub fn new(nic: &N, pd: &N::Pd, settings: &Settings) -> Result<Self, Error> {
        let chunks = settings.chunks() as u32;
        let lanes = settings.lanes() as usize;
        let memory = nic.alloc_dma((chunks as u64 * settings.chunk_bytes) as usize)?;
        let windows = nic.alloc_mws(pd, chunks as usize * lanes)?;
        let entry = |_| Entry { owner: Owner::Nobody, group: GroupId(0), leaving: false };
        Ok(Self {
            memory: nic.reg_mr(pd, &memory, Access::LOCAL_ALL)?,
            chunk_bytes: settings.chunk_bytes,
            lanes,
            entries: (0..chunks).map(entry).collect(),
            keys: windows.iter().map(|w| w.key()).collect(),
            windows,
            free: (0..chunks).rev().collect(),
        })
    }

    /// Chunks in all.
    pub fn chunks(&self) -> u64 {
        self.entries.len() as u64
    }

    /// Chunks that are free.
    pub fn free(&self) -> u64 {
        self.free.len() as u64
    }

    /// Windows of a chunk.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// Takes a free chunk for a compute node.
    pub fn take(&mut self, client: ClientId, group: GroupId) -> Option<u32> {
        let entry = self.free.pop()?;
        let owner = Owner::Client(client);
        self.entries[entry as usize] = Entry { owner, group, leaving: false };
        Some(entry)
    }

    /// Begins to take a chunk back. False if it is not the compute node's or leaves already.
    pub fn start_free(&mut self, entry: u32, client: ClientId) -> bool {
        match self.entries.get_mut(entry as usize) {
            Some(e) if e.owner == Owner::Client(client) && !e.leaving => {
                e.leaving = true;
                true
            }
            _ => false,
        }
    }

    /// The group that a chunk was taken for.
    pub fn group_of(&self, entry: u32) -> GroupId {
        self.entries[entry as usize].group
    }

    /// The UMR that binds a window of a chunk to `qpn`, and changes its tag.
    pub fn bind(&mut self, entry: u32, lane: Lane, qpn: Qpn) -> Umr {
        let key = &mut self.keys[entry as usize * self.lanes + lane.0 as usize];
        let tag = key.tag().wrapping_add(1);
        let start = self.memory.memory().addr() + entry as u64 * self.chunk_bytes;
        let umr = Umr::bind(
            *key,
            tag,
            qpn,
            Access::REMOTE_ALL,
            self.memory.key(),
            start,
            self.chunk_bytes as u32,
        );
        *key = Key::new(key.index(), tag);
        umr
    }

    /// The UMR that unbinds a window of a chunk.
    pub fn unbind(&self, entry: u32, lane: Lane) -> Umr {
        Umr::unbind(self.keys[entry as usize * self.lanes + lane.0 as usize], true)
    }

    /// The reply that grants a chunk whose windows are bound.
    pub fn grant(&self, number: u64, entry: u32) -> Reply {
        let mut keys = [Key::default(); MAX_GROUP];
        let from = entry as usize * self.lanes;
        keys[..self.lanes].copy_from_slice(&self.keys[from..from + self.lanes]);
        Reply {
            number,
            outcome: Outcome::Done,
            entry,
            addr: self.memory.memory().addr() + entry as u64 * self.chunk_bytes,
            len: self.chunk_bytes,
            lanes: self.lanes,
            keys,
        }
    }

    /// Takes new windows for a chunk. The old ones are deallocated: their keys are dead.
    pub fn replace_windows(&mut self, nic: &N, pd: &N::Pd, entry: u32) -> Result<(), Error> {
        let from = entry as usize * self.lanes;
        for at in from..from + self.lanes {
            self.windows[at] = nic.alloc_mw(pd)?;
            self.keys[at] = self.windows[at].key();
        }
        Ok(())
    }

    /// Clears a chunk. Its keys are dead.
    pub fn clear(&self, entry: u32) {
        let at = entry as u64 * self.chunk_bytes;
        self.memory.memory().zero(at as usize, self.chunk_bytes as usize);
    }

    /// Puts a chunk on the free list. It is clear, its keys are dead.
    pub fn release(&mut self, entry: u32) {
        let e = &mut self.entries[entry as usize];
        assert_ne!(e.owner, Owner::Nobody, "entry {entry} is released twice");
        e.owner = Owner::Nobody;
        e.leaving = false;
        self.free.push(entry);
    }

    /// The chunks of a compute node.
    pub fn owned_by(&self, client: ClientId) -> Vec<u32> {
        let owner = Owner::Client(client);
        (0..self.entries.len() as u32)
            .filter(|e| self.entries[*e as usize].owner == owner)
            .collect()
    }

    /// Checks that every chunk is exactly once free or owned by somebody who `exists`.
    pub fn audit(&self, exists: impl Fn(Owner) -> bool) -> Result<(), Error> {
        let wrong = |why: String| Error::Protocol { attempt: "auditing the pool".into(), why };
        let mut seen = vec![false; self.entries.len()];
        for entry in &self.free {
            let at = *entry as usize;
            if std::mem::replace(&mut seen[at], true) {
                return Err(wrong(format!("chunk {entry} is twice on the free list")));
            }
            if self.entries[at].owner != Owner::Nobody {
                return Err(wrong(format!("chunk {entry} is free and owned")));
            }
        }
        for (at, entry) in self.entries.iter().enumerate() {
            if !exists(entry.owner) {
                return Err(wrong(format!(
                    "chunk {at} is owned by {:?}, who is gone",
                    entry.owner
                )));
            }
            if entry.owner == Owner::Nobody && !seen[at] {
                return Err(wrong(format!("chunk {at} is lost: nobody's, and not free")));
            }
        }
        Ok(())
    }
}

//! The allocation table: the owner and state of each block. All cores of the memory node share it.
//!
//! ```text
//! entry: a block of the donated memory, in most schemes a chunk (see `blocks`)
//!
//! free ──take──> owned ──start_free──> leaving ──release──> free
//!   └─set aside for a compute node <──> (open for its owner: before its allocation, or after
//!                                        its free)
//! ```
//!
//! Invariants: each chunk lies in exactly one block that is free or owned. A free block is closed
//! and its bytes are zero. A block that is set aside has an owner and counts as available. The lock
//! of the table is held while entries are read or changed, and never while the core waits.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use scheme::index::{EntryId, IndexRange};
use scheme::{ClientId, Error, GroupId, MAX_GROUP};
use verbs::{Key, Nic};

use super::blocks::{Blocks, Free};
use super::regions::Regions;
use super::windows::{Type1, Type2};
use super::{Outcome, Reply};
use crate::blocks::ChunkIndex;
use crate::blocks::Order;

/// Allocation state of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkState {
    /// The compute node that owns the chunk.
    pub owner: Option<ClientId>,
    /// True if the chunk is set aside: open for its owner but not allocated.
    pub aside: bool,
    /// True if a free of the chunk is in progress.
    pub leaving: bool,
}

/// Owner of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// The block is free.
    Free,
    /// The block belongs to a compute node.
    Client(ClientId),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    Owned,
    /// A free of the block is in progress.
    Leaving,
    /// The block was set aside, and a core closes it, possibly not its owner's core. It cannot be
    /// freed.
    Closing,
    /// The block is open for its owner but not allocated: set aside.
    Aside,
}

struct Entry {
    owner: Owner,
    group: GroupId,
    state: State,
}

/// Mechanism that opens chunks.
pub enum Protection<N: Nic> {
    /// A type-2 window per lane, bound to the lane's QP.
    Type2(Type2<N>),
    /// One type-1 window for all QPs.
    Type1(Type1<N>),
    /// A memory region.
    Regions(Regions<N>),
    /// The region over all chunks, which has this key.
    Open(Key),
}

/// The allocation table.
pub struct Table<N: Nic> {
    pub protection: Protection<N>,
    lanes: usize,
    base: u64,
    blocks: Blocks,
    entries: Vec<Entry>,
    free: Free,
    aside: BTreeMap<ClientId, VecDeque<EntryId>>,
    aside_count: u64,
    /// Cores that have announced "empty" to their compute nodes.
    announced_empty: Vec<bool>,
}

impl<N: Nic> Table<N> {
    /// All `blocks`, which begin at address `base`, are free.
    pub fn new(
        protection: Protection<N>,
        lanes: usize,
        base: u64,
        blocks: Blocks,
        cores: usize,
    ) -> Self {
        let entry = |_| Entry { owner: Owner::Free, group: GroupId(0), state: State::Free };
        Self {
            protection,
            lanes,
            base,
            blocks,
            entries: blocks.entries().map(entry).collect(),
            free: Free::all(blocks),
            aside: BTreeMap::new(),
            aside_count: 0,
            announced_empty: vec![false; cores],
        }
    }

    /// Number of chunks.
    pub fn chunks(&self) -> u64 {
        self.blocks.chunks() as u64
    }

    /// State of the block that contains a chunk.
    pub fn state_of(&self, chunk: ChunkIndex) -> ChunkState {
        let owned = |entry: &EntryId| self.entries[entry.as_usize()].owner != Owner::Free;
        let entry = self.blocks.over(chunk).find(owned).unwrap_or(EntryId::from(chunk));
        let e = &self.entries[entry.as_usize()];
        let owner = match e.owner {
            Owner::Free => None,
            Owner::Client(client) => Some(client),
        };
        ChunkState {
            owner,
            aside: e.state == State::Aside,
            leaving: matches!(e.state, State::Leaving | State::Closing),
        }
    }

    /// Chunks without an owner.
    pub fn free_chunks(&self) -> Vec<ChunkIndex> {
        self.free.entries().flat_map(|entry| self.blocks.block(entry).chunks().iter()).collect()
    }

    /// True if a chunk is set aside.
    pub fn is_any_aside(&self) -> bool {
        self.aside_count > 0
    }

    /// Number of chunks that are free or set aside.
    pub fn available(&self) -> u64 {
        self.free.chunks() + self.aside_count
    }

    /// Allocates a free block of an order to a compute node.
    pub fn take(&mut self, client: ClientId, group: GroupId, order: Order) -> Option<EntryId> {
        let entry = self.free.take(order)?;
        let owner = Owner::Client(client);
        self.entries[entry.as_usize()] = Entry { owner, group, state: State::Owned };
        Some(entry)
    }

    /// Begins to free a block. False if the compute node does not own the block, or if its free has
    /// begun already.
    pub fn start_free(&mut self, entry: EntryId, client: ClientId) -> bool {
        match self.entries.get_mut(entry.as_usize()) {
            Some(e) if e.owner == Owner::Client(client) && e.state == State::Owned => {
                e.state = State::Leaving;
                true
            }
            _ => false,
        }
    }

    /// The group for which a block was allocated.
    pub fn group_of(&self, entry: EntryId) -> GroupId {
        self.entries[entry.as_usize()].group
    }

    /// Sets a block aside for its owner.
    pub fn set_aside(&mut self, entry: EntryId, client: ClientId) {
        let e = &mut self.entries[entry.as_usize()];
        assert_eq!(e.owner, Owner::Client(client), "entry {entry} is set aside for its owner");
        assert_ne!(e.state, State::Aside, "entry {entry} is set aside twice");
        e.state = State::Aside;
        self.aside.entry(client).or_default().push_back(entry);
        self.aside_count += 1;
    }

    /// Number of blocks that are set aside for a compute node.
    pub fn aside_for(&self, client: ClientId) -> usize {
        self.aside.get(&client).map_or(0, VecDeque::len)
    }

    /// Allocates the block that was set aside first for a compute node.
    pub fn take_aside(&mut self, client: ClientId, group: GroupId) -> Option<EntryId> {
        let entry = self.aside.get_mut(&client)?.pop_front()?;
        self.aside_count -= 1;
        self.entries[entry.as_usize()].state = State::Owned;
        self.entries[entry.as_usize()].group = group;
        Some(entry)
    }

    /// Takes the block that was set aside first for a compute node, to be closed. The compute node
    /// cannot free it a second time.
    pub fn take_aside_to_close(&mut self, client: ClientId) -> Option<EntryId> {
        let entry = self.aside.get_mut(&client)?.pop_front()?;
        self.aside_count -= 1;
        self.entries[entry.as_usize()].state = State::Closing;
        Some(entry)
    }

    /// Takes up to `most` blocks that are set aside, to be closed: in turn from each compute node.
    pub fn take_aside_of_all(&mut self, most: usize) -> Vec<EntryId> {
        let mut taken = Vec::new();
        while taken.len() < most && self.aside_count > 0 {
            for entries in self.aside.values_mut() {
                if taken.len() < most
                    && let Some(entry) = entries.pop_front()
                {
                    self.aside_count -= 1;
                    self.entries[entry.as_usize()].state = State::Closing;
                    taken.push(entry);
                }
            }
        }
        taken
    }

    /// The reply that grants an open block.
    pub fn grant(&self, number: u64, entry: EntryId) -> Reply {
        let mut keys = [Key::default(); MAX_GROUP];
        match &self.protection {
            Protection::Type2(windows) => {
                keys[..self.lanes].copy_from_slice(windows.keys(entry));
            }
            // All lanes use the same key.
            Protection::Type1(windows) => keys[..self.lanes].fill(windows.key(entry)),
            Protection::Regions(regions) => keys[..self.lanes].fill(regions.key(entry)),
            Protection::Open(key) => keys[..self.lanes].fill(*key),
        }
        let (offset, len) = self.blocks.range(entry);
        Reply {
            number,
            outcome: Outcome::Done,
            entry,
            addr: self.base + offset,
            len,
            lanes: self.lanes,
            keys,
        }
    }

    /// Returns a block to the free list. It must be cleared, and its keys must be dead.
    pub fn release(&mut self, entry: EntryId) {
        let e = &mut self.entries[entry.as_usize()];
        assert_ne!(e.owner, Owner::Free, "entry {entry} is released twice");
        *e = Entry { owner: Owner::Free, group: GroupId(0), state: State::Free };
        self.free.give(entry);
    }

    /// Begins to free all blocks of a compute node, including those set aside. Excludes blocks that
    /// another core is closing, because that core releases them.
    pub fn owned_by(&mut self, client: ClientId) -> Vec<EntryId> {
        self.aside_count -= self.aside.remove(&client).map_or(0, |aside| aside.len()) as u64;
        let owner = Owner::Client(client);
        let mut owned = Vec::new();
        for (at, entry) in self.blocks.entries().zip(&mut self.entries) {
            if entry.owner == owner && entry.state != State::Closing {
                entry.state = State::Leaving;
                owned.push(at);
            }
        }
        owned
    }

    /// True if no chunk is available. Records that this core announces "empty".
    pub fn announce_empty(&mut self, core: usize) -> bool {
        let empty = self.available() == 0;
        self.announced_empty[core] |= empty;
        empty
    }

    /// True if this core must announce "available" after it has announced "empty".
    pub fn announce_available(&mut self, core: usize) -> bool {
        self.available() > 0 && std::mem::take(&mut self.announced_empty[core])
    }

    /// Cores that must announce "available", which may be asleep.
    pub fn cores_to_wake(&self) -> Vec<usize> {
        if self.available() == 0 {
            return Vec::new();
        }
        (0..self.announced_empty.len()).filter(|core| self.announced_empty[*core]).collect()
    }

    /// Checks that every chunk is exactly once free, or owned by a compute node that `exists`.
    pub fn audit(&self, exists: impl Fn(ClientId) -> bool) -> Result<(), Error> {
        let wrong = |why: String| Error::Protocol { attempt: "auditing the pool".into(), why };
        let mut covered = vec![false; self.blocks.chunks() as usize];
        let mut cover = |entry: EntryId| {
            let chunks = self.blocks.block(entry).chunks();
            chunks.iter().find(|chunk| std::mem::replace(&mut covered[chunk.as_usize()], true))
        };
        for entry in self.free.entries() {
            if self.entries[entry.as_usize()].owner != Owner::Free {
                return Err(wrong(format!("chunk {entry} is free and owned")));
            }
            if let Some(chunk) = cover(entry) {
                return Err(wrong(format!("chunk {chunk} is on the free list twice")));
            }
        }
        let mut aside = BTreeSet::new();
        for (client, entries) in &self.aside {
            for entry in entries {
                let e = &self.entries[entry.as_usize()];
                if e.owner != Owner::Client(*client) || e.state != State::Aside {
                    return Err(wrong(format!(
                        "chunk {entry} is set aside for compute node {}, which does not own it",
                        client.0
                    )));
                }
                if !aside.insert(*entry) {
                    return Err(wrong(format!("chunk {entry} is set aside twice")));
                }
            }
        }
        if aside.len() as u64 != self.aside_count {
            return Err(wrong(format!(
                "{} chunks are set aside, but the count is {}",
                aside.len(),
                self.aside_count
            )));
        }
        for (at, entry) in self.blocks.entries().zip(&self.entries) {
            let Owner::Client(client) = entry.owner else { continue };
            if !exists(client) {
                let gone = client.0;
                return Err(wrong(format!(
                    "chunk {at} belongs to compute node {gone}, which is gone"
                )));
            }
            if (entry.state == State::Aside) != aside.contains(&at) {
                return Err(wrong(format!("chunk {at} is set aside but on no list")));
            }
            if let Some(chunk) = cover(at) {
                return Err(wrong(format!(
                    "chunk {chunk} is owned, and also free or owned a second time"
                )));
            }
        }
        match covered.iter().position(|covered| !covered) {
            Some(chunk) => Err(wrong(format!("chunk {chunk} is lost: neither owned nor free"))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::CHUNK_ORDER;
    use crate::rpc::regions::Regions;
    use rnic::nic::SoftNic;

    /// One core closes blocks that are set aside for a compute node while another core retires that
    /// node.
    #[test]
    fn retire_excludes_blocks_that_another_core_closes() {
        let protection = Protection::Regions(Regions::<SoftNic>::new(3));
        let mut table = Table::new(protection, 1, 0, Blocks::new(3, 4096, false), 2);
        let client = ClientId(7);
        let taken: Vec<EntryId> = (0..3)
            .map(|_| table.take(client, GroupId(0), CHUNK_ORDER).expect("a free one"))
            .collect();
        table.set_aside(taken[0], client);
        table.set_aside(taken[1], client);
        let closing = table.take_aside_of_all(1);
        assert_eq!(closing, [taken[0]]);
        let mut left = table.owned_by(client);
        left.sort_unstable();
        let mut others = taken[1..].to_vec();
        others.sort_unstable();
        assert_eq!(left, others, "each chunk is closed exactly once");
        closing.into_iter().chain(left).for_each(|entry| table.release(entry));
        table.audit(|_| false).expect("a consistent table");
    }
}

//! Which chunk is whose: the memory node's books, which all its cores share.
//!
//! ```text
//! entry: a block of the donated memory, in most schemes a chunk (see `blocks`)
//!
//! free ──take──> owned ──start_free──> leaving ──release──> free
//!   └─set aside for a compute node <──> (opened for it: before its allocation, or after its free)
//! ```
//!
//! Invariants: a chunk lies in a block that is free or in one that somebody owns, and in no other such one; what opened a free entry is
//! closed, and its bytes are zero. An entry that is aside has an owner, and counts as available.
//! The lock over the books is held for as long as they are looked at or changed, never while
//! anything is waited for.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fabric::{Key, Nic};

use super::blocks::{Blocks, Free};
use super::books::ChunkState;
use super::regions::Regions;
use super::windows::{Type1, Type2};
use super::{Outcome, Reply};
use crate::Error;
use crate::scheme::{ClientId, GroupId, MAX_GROUP};

/// Whose a chunk is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// It is free.
    Nobody,
    /// A compute node's.
    Client(ClientId),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    Owned,
    /// A free of it has begun.
    Leaving,
    /// It was aside, and a core closes it, which need not be its owner's. Nobody can free it.
    Closing,
    /// It is opened for its owner, who does not have it yet, or any more.
    Aside,
}

struct Entry {
    owner: Owner,
    group: GroupId,
    state: State,
}

/// What opens chunks.
pub enum Doors<N: Nic> {
    /// A window for each lane, bound to its QP.
    Type2(Type2<N>),
    /// One window for all QPs.
    Type1(Type1<N>),
    /// An MR.
    Regions(Regions<N>),
}

/// The books.
pub struct Table<N: Nic> {
    pub doors: Doors<N>,
    lanes: usize,
    base: u64,
    blocks: Blocks,
    entries: Vec<Entry>,
    free: Free,
    aside: BTreeMap<ClientId, VecDeque<u32>>,
    aside_count: u64,
    /// Cores whose compute nodes were told that there is no memory.
    told: Vec<bool>,
}

impl<N: Nic> Table<N> {
    /// All `blocks` from address `base` on are free.
    pub fn new(doors: Doors<N>, lanes: usize, base: u64, blocks: Blocks, cores: usize) -> Self {
        let entry = |_| Entry { owner: Owner::Nobody, group: GroupId(0), state: State::Free };
        Self {
            doors,
            lanes,
            base,
            blocks,
            entries: (0..blocks.count()).map(entry).collect(),
            free: Free::all(blocks),
            aside: BTreeMap::new(),
            aside_count: 0,
            told: vec![false; cores],
        }
    }

    /// Chunks in all.
    pub fn chunks(&self) -> u64 {
        self.blocks.chunks() as u64
    }

    /// What is said of the block that a chunk lies in.
    pub fn state_of(&self, chunk: u32) -> ChunkState {
        let owned = |entry: &u32| self.entries[*entry as usize].owner != Owner::Nobody;
        let entry = self.blocks.over(chunk).find(owned).unwrap_or(chunk);
        let e = &self.entries[entry as usize];
        let owner = match e.owner {
            Owner::Nobody => None,
            Owner::Client(client) => Some(client),
        };
        ChunkState {
            owner,
            aside: e.state == State::Aside,
            leaving: matches!(e.state, State::Leaving | State::Closing),
        }
    }

    /// Chunks that are nobody's.
    pub fn free_chunks(&self) -> Vec<u32> {
        self.free.entries().flat_map(|entry| self.blocks.block(entry).chunks()).collect()
    }

    /// True if some chunk is aside for somebody.
    pub fn is_any_aside(&self) -> bool {
        self.aside_count > 0
    }

    /// Chunks that are nobody's, or aside.
    pub fn available(&self) -> u64 {
        self.free.chunks() + self.aside_count
    }

    /// Takes 2^`order` free chunks for a compute node.
    pub fn take(&mut self, client: ClientId, group: GroupId, order: u32) -> Option<u32> {
        let entry = self.free.take(order)?;
        let owner = Owner::Client(client);
        self.entries[entry as usize] = Entry { owner, group, state: State::Owned };
        Some(entry)
    }

    /// Begins to take a chunk back. False if it is not the compute node's or leaves already.
    pub fn start_free(&mut self, entry: u32, client: ClientId) -> bool {
        match self.entries.get_mut(entry as usize) {
            Some(e) if e.owner == Owner::Client(client) && e.state == State::Owned => {
                e.state = State::Leaving;
                true
            }
            _ => false,
        }
    }

    /// The group that a chunk was taken for.
    pub fn group_of(&self, entry: u32) -> GroupId {
        self.entries[entry as usize].group
    }

    /// Sets a chunk of a compute node aside for it.
    pub fn set_aside(&mut self, entry: u32, client: ClientId) {
        let e = &mut self.entries[entry as usize];
        assert_eq!(e.owner, Owner::Client(client), "entry {entry} is set aside for its owner");
        assert_ne!(e.state, State::Aside, "entry {entry} is set aside twice");
        e.state = State::Aside;
        self.aside.entry(client).or_default().push_back(entry);
        self.aside_count += 1;
    }

    /// How many chunks are aside for a compute node.
    pub fn aside_for(&self, client: ClientId) -> usize {
        self.aside.get(&client).map_or(0, VecDeque::len)
    }

    /// Takes what has been aside for a compute node for longest, to be given to it.
    pub fn take_aside(&mut self, client: ClientId, group: GroupId) -> Option<u32> {
        let entry = self.aside.get_mut(&client)?.pop_front()?;
        self.aside_count -= 1;
        self.entries[entry as usize].state = State::Owned;
        self.entries[entry as usize].group = group;
        Some(entry)
    }

    /// Takes what has been aside for a compute node for longest, to be closed: it is not its any more, also if
    /// it frees it once more.
    pub fn take_aside_to_close(&mut self, client: ClientId) -> Option<u32> {
        let entry = self.aside.get_mut(&client)?.pop_front()?;
        self.aside_count -= 1;
        self.entries[entry as usize].state = State::Closing;
        Some(entry)
    }

    /// Takes up to `most` chunks that are aside for anybody, to be closed: a bit of each one's.
    pub fn take_aside_of_all(&mut self, most: usize) -> Vec<u32> {
        let mut taken = Vec::new();
        while taken.len() < most && self.aside_count > 0 {
            for entries in self.aside.values_mut() {
                if taken.len() < most
                    && let Some(entry) = entries.pop_front()
                {
                    self.aside_count -= 1;
                    self.entries[entry as usize].state = State::Closing;
                    taken.push(entry);
                }
            }
        }
        taken
    }

    /// The reply that grants a chunk that is open.
    pub fn grant(&self, number: u64, entry: u32) -> Reply {
        let mut keys = [Key::default(); MAX_GROUP];
        match &self.doors {
            Doors::Type2(windows) => {
                keys[..self.lanes].copy_from_slice(windows.keys(entry));
            }
            // One key for all lanes.
            Doors::Type1(windows) => keys[..self.lanes].fill(windows.key(entry)),
            Doors::Regions(regions) => keys[..self.lanes].fill(regions.key(entry)),
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

    /// Puts a chunk on the free list. It is clear, its keys are dead.
    pub fn release(&mut self, entry: u32) {
        let e = &mut self.entries[entry as usize];
        assert_ne!(e.owner, Owner::Nobody, "entry {entry} is released twice");
        *e = Entry { owner: Owner::Nobody, group: GroupId(0), state: State::Free };
        self.free.give(entry);
    }

    /// The chunks of a compute node, those that are aside among them: they are so no more. Without those
    /// that another core closes just now, which releases them.
    pub fn owned_by(&mut self, client: ClientId) -> Vec<u32> {
        self.aside_count -= self.aside.remove(&client).map_or(0, |aside| aside.len()) as u64;
        let owner = Owner::Client(client);
        let mut owned = Vec::new();
        for (at, entry) in self.entries.iter_mut().enumerate() {
            if entry.owner == owner && entry.state != State::Closing {
                entry.state = State::Leaving;
                owned.push(at as u32);
            }
        }
        owned
    }

    /// A core tells a compute node of its own that there is no memory, unless there is.
    pub fn tell_empty(&mut self, core: usize) -> bool {
        let empty = self.available() == 0;
        self.told[core] |= empty;
        empty
    }

    /// Whether a core has to tell its compute nodes that there is memory again; once.
    pub fn tell_available(&mut self, core: usize) -> bool {
        self.available() > 0 && std::mem::take(&mut self.told[core])
    }

    /// Cores that have to tell so, and may sleep.
    pub fn cores_to_wake(&self) -> Vec<usize> {
        if self.available() == 0 {
            return Vec::new();
        }
        (0..self.told.len()).filter(|core| self.told[*core]).collect()
    }

    /// Checks that every chunk is exactly once free, aside, or owned by somebody who `exists`.
    pub fn audit(&self, exists: impl Fn(ClientId) -> bool) -> Result<(), Error> {
        let wrong = |why: String| Error::Protocol { attempt: "auditing the pool".into(), why };
        let mut covered = vec![false; self.blocks.chunks() as usize];
        let mut cover = |entry: u32| {
            let chunks = self.blocks.block(entry).chunks();
            chunks.into_iter().find(|c| std::mem::replace(&mut covered[*c as usize], true))
        };
        for entry in self.free.entries() {
            if self.entries[entry as usize].owner != Owner::Nobody {
                return Err(wrong(format!("chunk {entry} is free and owned")));
            }
            if let Some(chunk) = cover(entry) {
                return Err(wrong(format!("chunk {chunk} is twice on the free list")));
            }
        }
        let mut aside = BTreeSet::new();
        for (client, entries) in &self.aside {
            for entry in entries {
                let e = &self.entries[*entry as usize];
                if e.owner != Owner::Client(*client) || e.state != State::Aside {
                    return Err(wrong(format!(
                        "chunk {entry} is aside for compute node {}, who does not own it",
                        client.0
                    )));
                }
                if !aside.insert(*entry) {
                    return Err(wrong(format!("chunk {entry} is aside twice")));
                }
            }
        }
        if aside.len() as u64 != self.aside_count {
            return Err(wrong(format!(
                "{} chunks are aside, {} are counted",
                aside.len(),
                self.aside_count
            )));
        }
        for (at, entry) in (0..).zip(&self.entries) {
            let Owner::Client(client) = entry.owner else { continue };
            if !exists(client) {
                let gone = client.0;
                return Err(wrong(format!("chunk {at} is of compute node {gone}, who is gone")));
            }
            if (entry.state == State::Aside) != aside.contains(&at) {
                return Err(wrong(format!("chunk {at} is aside for nobody")));
            }
            if let Some(chunk) = cover(at) {
                return Err(wrong(format!("chunk {chunk} is owned, and free or owned once more")));
            }
        }
        match covered.iter().position(|covered| !covered) {
            Some(chunk) => Err(wrong(format!("chunk {chunk} is lost: nobody's, and not free"))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::regions::Regions;
    use fabric::soft::SoftNic;

    /// One core closes what is aside for a compute node while another learns that it has gone.
    #[test]
    fn what_one_core_closes_is_not_taken_back_by_another() {
        let doors = Doors::Regions(Regions::<SoftNic>::new(3));
        let mut table = Table::new(doors, 1, 0, Blocks::new(3, 4096, false), 2);
        let client = ClientId(7);
        let taken: Vec<u32> =
            (0..3).map(|_| table.take(client, GroupId(0), 0).expect("a free one")).collect();
        table.set_aside(taken[0], client);
        table.set_aside(taken[1], client);
        let closing = table.take_aside_of_all(1);
        assert_eq!(closing, [taken[0]]);
        let mut left = table.owned_by(client);
        left.sort_unstable();
        let mut others = taken[1..].to_vec();
        others.sort_unstable();
        assert_eq!(left, others, "each chunk is closed once");
        closing.into_iter().chain(left).for_each(|entry| table.release(entry));
        table.audit(|_| false).expect("a whole table");
    }
}

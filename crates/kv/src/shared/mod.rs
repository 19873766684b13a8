//! An index that several compute nodes change (mode `shared`): RACE hashing without a mirror.
//!
//! Each client has an own [`SharedStore`] over one root. All clients can reach all memory, so the
//! scheme gives no protection between them (`shared-region`).
//!
//! | step | rule |
//! | --- | --- |
//! | a new key | the slot is *tentative* first: readers pass over it. The client reads both buckets again, removes a tentative slot of the same key or its own, and a second CAS makes the slot final |
//! | a change | one CAS of the slot, from one block to another |
//! | a split | freezes all slots, copies them into two new subtables, and one CAS on the old header decides |
//! | a stale directory | leads to a subtable that was split: its header names the successors |
//! | an unlinked block | is free when the epochs of all clients have passed |
//!
//! RACE inserts with one CAS, and removes the higher of two slots with one key afterwards. Then a
//! reader can see the higher one, the lower one, and the higher one again. So a new key takes one
//! round trip more here.

mod access;
mod blocking;
mod change;
mod collect;
mod create;
mod directory;
mod double;
mod epochs;
mod fresh;
mod insert;
mod look;
mod members;
mod read;
mod scan;
mod split;
mod tend;
mod words;

use std::sync::Arc;

use parking_lot::Mutex;

use self::directory::Directory;
use self::epochs::{Epochs, Running};
use crate::blocks::SharedBlocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::hash::Hasher;
use crate::layout::root::DATABASES;
use crate::layout::table::Shape;
use crate::place::Place;
use crate::reach::Reach;
use crate::store::Form;
use crate::store::Key;
use crate::store::scratch::Buffers;
use crate::store::trips::{Counters, Operation, Trip, Trips};

/// How a client locks a subtable that it splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitLock {
    /// Until the split has ended, as published. The lock of a client that crashes stays for ever.
    Plain,
    /// For this many milliseconds. Then another client goes on with the split from what is in
    /// memory. A client whose lease has ended does no harm if it goes on too.
    Lease(u64),
    /// By an exclusive right to the subtable's header ([`Reach::open`]), which ends by itself if
    /// the client crashes or hangs. Then the next client that waits for the header goes on with the
    /// split from what is in memory (Patronus §7.2.3). No clock of a client is read.
    ///
    /// Clients wait for the end of a split in [`Reach::open`], and not by looking again and again.
    /// Over memory without exclusive rights, any number of clients split at once.
    Exclusive,
}

/// Settings of a shared store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedSettings {
    /// Which verbs are posted together.
    pub form: Form,
    /// Groups of buckets in a subtable. None: as many as fit 16 KiB. For the first client only.
    pub groups: Option<u16>,
    /// The lock of a split.
    pub lock: SplitLock,
    /// Milliseconds between two ticks of the epochs.
    pub tick_ms: u64,
    /// Milliseconds for which a client may hold the epochs back until the others read whether its
    /// connection lives.
    pub suspect_ms: u64,
    /// No split begins while more bytes than this wait for the epochs of other clients.
    pub limbo_max: u64,
    /// Attempts of one operation, of which each waits for another client.
    pub attempts: u32,
}

impl Default for SharedSettings {
    fn default() -> Self {
        Self {
            form: Form::Fused,
            groups: None,
            lock: SplitLock::Lease(10),
            tick_ms: 1,
            suspect_ms: 20,
            limbo_max: 4 << 20,
            attempts: 1_000_000,
        }
    }
}

/// A client of an index that several clients change.
///
/// Operations of one client and of several are linearizable for each key. If a round trip breaks
/// off, the operation returns [`Error::Stopped`] and may or may not have taken effect; the client
/// can go on. A client that ends at any verb loses nothing that any client has written.
///
/// Each client must call [`SharedStore::tend`] once in about 10 ms, also while it is idle.
/// [`crate`] has an example.
pub struct SharedStore<R, B, E> {
    reach: R,
    blocks: B,
    environment: E,
    settings: SharedSettings,
    root: Place,
    hasher: Hasher,
    shape: Shape,
    slab: u32,
    /// Shared with the other handles of this client.
    epochs: Arc<Epochs>,
    directories: [Mutex<Option<Directory>>; DATABASES],
    /// Subtables that were split, and that a directory may name still.
    split: Mutex<Vec<split::Old>>,
    buffers: Buffers,
    counters: Counters,
}

/// An operation that runs: its round trips are counted, and no block that it knows is used again.
struct Op<'a> {
    trip: Trip<'a>,
    running: Running<'a>,
}

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// Place of the root.
    pub fn root(&self) -> Place {
        self.root
    }

    /// Number of this client: [`SharedStore::strike`] takes it.
    pub fn client(&self) -> u32 {
        self.epochs.client()
    }

    /// Counters of round trips.
    pub fn trips(&self, kind: Operation) -> Trips {
        self.counters.of(kind)
    }

    /// The allocator.
    pub fn blocks(&self) -> &B {
        &self.blocks
    }

    /// The way to remote memory.
    pub fn reach(&self) -> &R {
        &self.reach
    }

    /// Bytes of unlinked blocks of this client that other clients may still read.
    pub fn limbo_bytes(&self) -> u64 {
        self.epochs.limbo_bytes()
    }

    fn key<'a>(&self, db: u8, bytes: &'a [u8]) -> Result<Key<'a>, Error> {
        if usize::from(db) >= DATABASES {
            return Err(Error::NoDatabase(db));
        }
        Ok(Key { db, bytes, hash: self.hasher.hash(bytes) })
    }

    fn directory(&self, db: u8) -> &Mutex<Option<Directory>> {
        &self.directories[usize::from(db)]
    }

    /// Begins an operation, after a tick if one is due.
    async fn begin(&self, kind: Operation) -> Result<Op<'_>, Error> {
        self.tick().await?;
        Ok(Op { trip: self.counters.begin(kind), running: self.epochs.begin() })
    }
}

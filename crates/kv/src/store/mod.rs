//! A store that one compute node owns (mode `alone`).

mod access;
mod ahead;
mod atomically;
mod blocking;
mod cache;
mod change;
mod compact;
mod create;
mod database;
mod evict;
mod evict_slabs;
mod flush;
mod gone;
mod image;
mod keys;
mod look;
mod many;
mod merge;
mod owned;
pub(crate) mod pieces;
mod read;
mod recover;
mod scan;
pub(crate) mod scratch;
mod split;
mod stats;
mod sweep;
pub(crate) mod trips;
mod value;
mod walk;
mod watch;
mod whole;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

pub use ahead::{AHEAD_MAX, Ahead};
pub use atomically::{Transaction, Wanted};
pub use cache::CacheStats;
pub use change::{Condition, Expiry, Outcome, SetOptions, Update};
pub use evict::{Candidates, Eviction};
pub use evict_slabs::Cleared;
pub use read::Pinned;
pub use scan::{Cursor, Scanned};
pub use stats::Stats;
pub use sweep::Tell;
pub use trips::{Operation, Trips};
pub use walk::Visited;
pub use watch::Watch;

use self::database::Database;
use self::scratch::Buffers;
use self::trips::{Counters, Trip};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::hash::{Hasher, KeyHash};
use crate::layout::root::DATABASES;
use crate::layout::table::{BucketWord, Shape, Spot};
use crate::place::Place;
use crate::reach::Reach;
use crate::table::{Budget, Local, Mirror, Table};
use crate::ticket::{Hold, Name, Ticket, Tickets};
pub use crate::uses::Measure;

/// Which verbs are posted together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// The steps and round trips of the paper.
    Published,
    /// Block and slot are written in one round trip, because one QP keeps their order.
    #[default]
    Fused,
}

/// Settings of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Which verbs are posted together.
    pub form: Form,
    /// Keeps a copy of the index at the compute node: 16 bytes a slot. Form `published` has none.
    pub mirror: bool,
    /// Maximum bytes of the copy. Subtables beyond this limit are read in remote memory.
    pub index_cache: u64,
    /// Maximum bytes of the value cache at the compute node; 0: none. Only a mirrored store has
    /// one.
    pub cache_bytes: u64,
    /// Groups of buckets in a subtable. None: as many as fit 16 KiB.
    pub groups: Option<u16>,
    /// The stripes (QP groups) number 2 to the power of this value, at most 64.
    pub stripe_bits: u8,
    /// The notes that the store takes of the uses of keys, for the choice of keys to evict.
    pub measure: Measure,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            form: Form::Fused,
            mirror: true,
            index_cache: u64::MAX,
            cache_bytes: 0,
            groups: None,
            stripe_bits: 0,
            measure: Measure::Recency,
        }
    }
}

/// A store of keys and values in remote memory.
///
/// Any number of tasks and threads can use a store. Operations on one key take effect in the order
/// in which their futures are polled for the first time. A future that is dropped before its end
/// leaves the store [interrupted](Error::Interrupted) if the future had begun to change remote
/// memory.
pub struct Store<R, B, E> {
    reach: R,
    blocks: B,
    environment: E,
    settings: Settings,
    root: Place,
    generation: u64,
    journal: atomically::Journal,
    hasher: Hasher,
    shape: Shape,
    slab: u32,
    databases: [Database; DATABASES],
    tickets: Tickets,
    watches: Arc<watch::Watches>,
    due: sweep::Due,
    buffers: Buffers,
    cache: cache::Cache,
    mirrors: Arc<Budget>,
    counters: Counters,
    /// Number of the next split or merge.
    sequence: AtomicU64,
    interrupted: AtomicBool,
    /// True: count uses of keys; false: note the time of the last use.
    counts_uses: AtomicBool,
    removed: stats::Removed,
    /// Number of the memory nodes whose keys [`Store::forget_gone`] has deleted.
    forgotten: AtomicU32,
}

/// A key of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key<'a> {
    pub(crate) db: u8,
    pub(crate) bytes: &'a [u8],
    pub(crate) hash: KeyHash,
}

impl Key<'_> {
    fn name(&self) -> Name {
        Name::new(self.db, self.hash.tag)
    }
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Place of the root.
    pub fn root(&self) -> Place {
        self.root
    }

    /// The number of this owner: the root counts owners.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Number of keys of database `db`, with those that have expired and are not deleted yet.
    pub fn len(&self, db: u8) -> u64 {
        self.databases.get(usize::from(db)).map_or(0, Database::keys)
    }

    /// True if database `db` has no key.
    pub fn is_empty(&self, db: u8) -> bool {
        self.len(db) == 0
    }

    /// Counters of round trips.
    pub fn trips(&self, kind: Operation) -> Trips {
        self.counters.of(kind)
    }

    /// The allocator.
    pub fn blocks(&self) -> &B {
        &self.blocks
    }

    /// The environment.
    pub fn environment(&self) -> &E {
        &self.environment
    }

    /// The way to remote memory.
    pub fn reach(&self) -> &R {
        &self.reach
    }

    fn key<'a>(&self, db: u8, bytes: &'a [u8]) -> Result<Key<'a>, Error> {
        if usize::from(db) >= DATABASES {
            return Err(Error::NoDatabase(db));
        }
        if self.interrupted.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        Ok(Key { db, bytes, hash: self.hasher.hash(bytes) })
    }

    fn database(&self, key: &Key<'_>) -> &Database {
        &self.databases[usize::from(key.db)]
    }

    fn ticket(&self, key: &Key<'_>, hold: Hold) -> Ticket<'_> {
        self.tickets.one(key.name(), hold)
    }

    fn trip(&self, kind: Operation) -> Trip<'_> {
        self.counters.begin(kind)
    }

    /// The stripe of a hash's upper half, or of a tag.
    fn stripe(&self, prefix: u64) -> u32 {
        crate::hash::index(prefix, self.settings.stripe_bits.into()) as u32
    }

    /// True if the store may mirror subtables.
    fn has_mirrors(&self) -> bool {
        self.settings.mirror && self.settings.form == Form::Fused
    }

    /// An empty mirror, unless the store has none or their memory has reached its limit.
    fn new_mirror(&self) -> Option<Mirror> {
        if self.has_mirrors() { Mirror::new(self.shape, &self.mirrors) } else { None }
    }

    /// A subtable without keys that no directory names yet.
    ///
    /// `knows_tags`: a mirror has the tags of all keys that the subtable gets at first. Without
    /// them the subtable has no mirror.
    fn new_table(&self, spot: Spot, db: u8, word: BucketWord, knows_tags: bool) -> Arc<Table> {
        let mirror = if knows_tags { self.new_mirror() } else { None };
        let local = Local::new(self.shape, word, mirror);
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        Table::new(spot, db, self.stripe(word.prefix << 16), sequence, local)
    }
}

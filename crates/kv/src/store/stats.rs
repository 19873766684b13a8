//! Counts of keys and bytes.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Store;
use super::cache::CacheStats;
use crate::blocks::{Blocks, Usage};
use crate::environment::Environment;
use crate::layout::directory::Sizes;
use crate::layout::root::DATABASES;
use crate::reach::Reach;

/// Keys that the store itself has deleted.
#[derive(Debug, Default)]
pub(super) struct Removed {
    pub evicted: AtomicU64,
    pub expired: AtomicU64,
    pub moved: AtomicU64,
    pub gone: AtomicU64,
}

/// Counts of keys and bytes of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Keys of each database.
    pub keys: [u64; DATABASES],
    /// Bytes of remote memory, by use.
    pub usage: Usage,
    /// Bytes of directories and subtables, a part of `usage.live`.
    pub index_bytes: u64,
    /// Number of subtables.
    pub tables: u64,
    /// Number of subtables that the compute node mirrors.
    pub mirrored: u64,
    /// Bytes of the mirrors, without expiries.
    pub mirror_bytes: u64,
    /// Keys evicted since the store was opened.
    pub evicted: u64,
    /// Expired keys deleted since the store was opened.
    pub expired: u64,
    /// Blocks moved by compaction since the store was opened.
    pub moved: u64,
    /// Memory nodes that are gone.
    pub gone_nodes: u32,
    /// Keys that were lost with memory nodes since the store was opened.
    pub gone: u64,
    /// The value cache.
    pub cache: CacheStats,
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Number of keys of database `db` that have an expiry, in subtables with a mirror.
    pub fn volatile(&self, db: u8) -> u64 {
        let tables = self.databases.get(usize::from(db)).map(|own| own.tables());
        let timed = |table: std::sync::Arc<crate::table::Table>| {
            let local = table.local.lock();
            local.mirror.as_ref().map_or(0, |mirror| mirror.expiries.len() as u64)
        };
        tables.unwrap_or_default().into_iter().map(timed).sum()
    }

    /// Changes the maximum bytes of the value cache. Without effect on a store without a mirror.
    pub fn resize_cache(&self, bytes: u64) {
        if self.has_mirrors() {
            self.cache.resize(bytes);
        }
    }

    /// Counts of keys and bytes.
    pub fn stats(&self) -> Stats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut stats = Stats {
            usage: self.blocks.usage(),
            evicted: load(&self.removed.evicted),
            expired: load(&self.removed.expired),
            moved: load(&self.removed.moved),
            gone_nodes: self.blocks.gone_nodes(),
            gone: load(&self.removed.gone),
            mirror_bytes: self.mirrors.used(),
            cache: self.cache.stats(),
            ..Stats::default()
        };
        for (db, database) in self.databases.iter().enumerate() {
            stats.keys[db] = database.keys();
            let root = database.root();
            if root.header.is_none() {
                continue;
            }
            let sizes = Sizes::of(root.depth, self.slab);
            stats.index_bytes += (sizes.header_bytes() + 8 * sizes.words) as u64;
            for table in database.tables() {
                stats.tables += 1;
                stats.mirrored += u64::from(table.is_mirrored);
                stats.index_bytes += table.blocks().map(|(_, bytes)| u64::from(bytes)).sum::<u64>();
            }
        }
        stats
    }
}

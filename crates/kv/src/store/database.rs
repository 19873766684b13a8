//! A database of a store, and its directory.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use parking_lot::RwLock;

use crate::gate::Gate;
use crate::hash::index;
use crate::layout::root::DirectoryRoot;
use crate::place::Place;
use crate::table::Table;

/// A database.
#[derive(Debug)]
pub(crate) struct Database {
    pub number: u8,
    keys: AtomicI64,
    /// Closed by the task that changes directory or subtables.
    pub structure: Gate,
    /// None: the database is empty.
    pub directory: RwLock<Option<Directory>>,
}

/// A directory.
#[derive(Debug)]
pub(crate) struct Directory {
    pub depth: u32,
    pub header: Place,
    pub pieces: Vec<Place>,
    pub tables: Vec<Arc<Table>>,
}

impl Directory {
    pub fn root(&self) -> DirectoryRoot {
        DirectoryRoot { depth: self.depth, header: self.header }
    }

    /// The subtables, each of them once, in the order of their prefixes.
    pub fn distinct(&self) -> Vec<Arc<Table>> {
        let mut tables = self.tables.clone();
        tables.dedup_by(|a, b| Arc::ptr_eq(a, b));
        tables
    }
}

impl Database {
    pub fn new(number: u8) -> Self {
        let (structure, directory) = (Gate::default(), RwLock::new(None));
        Self { number, keys: AtomicI64::new(0), structure, directory }
    }

    /// The subtable of the prefix (a hash's upper half, or a tag).
    pub fn table(&self, prefix: u64) -> Option<Arc<Table>> {
        let directory = self.directory.read();
        let directory = directory.as_ref()?;
        directory.tables.get(index(prefix, directory.depth)).cloned()
    }

    pub fn tables(&self) -> Vec<Arc<Table>> {
        self.directory.read().as_ref().map(Directory::distinct).unwrap_or_default()
    }

    pub fn root(&self) -> DirectoryRoot {
        self.directory.read().as_ref().map(Directory::root).unwrap_or_default()
    }

    pub fn keys(&self) -> u64 {
        self.keys.load(Ordering::Relaxed).max(0) as u64
    }

    pub fn count(&self, change: i64) {
        self.keys.fetch_add(change, Ordering::Relaxed);
    }
}

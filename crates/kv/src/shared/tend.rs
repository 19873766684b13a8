//! Work that no operation waits for.

use std::collections::BTreeSet;

use super::SharedStore;
use crate::blocks::SharedBlocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::directory::Entry;
use crate::place::Address;
use crate::reach::Reach;
use crate::store::trips::Operation;

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// Does the work that no operation waits for: ticks, retires subtables that this client has
    /// split, and gives free blocks back.
    ///
    /// A background task of each client calls this once in about 10 ms, also while the client runs
    /// no operations. Otherwise no unlinked block of another client becomes free.
    pub async fn tend(&self) -> Result<(), Error> {
        self.tick_after(self.settings.tick_ms).await?;
        let databases: BTreeSet<u8> = self.split.lock().iter().map(|old| old.db).collect();
        for db in databases {
            self.settle(db).await?;
        }
        self.blocks.tend().await
    }

    /// Ticks, and retires the subtables of database `db` that this client has split and that no
    /// directory names any more.
    pub async fn settle(&self, db: u8) -> Result<(), Error> {
        self.tick_after(0).await?;
        let op = self.begin(Operation::Maintain).await?;
        // A doubling that another client has begun keeps subtables from being retired.
        self.finish_doubling(&op, db).await?;
        self.bury(&op).await
    }

    /// Address of this client's word in the block of epochs.
    pub fn client_word(&self) -> Address {
        self.epochs.client_word(self.client())
    }

    /// Number of blocks that the index of one database has: root, epochs, directory, subtables.
    #[doc(hidden)]
    pub async fn index_blocks(&self, db: u8) -> Result<usize, Error> {
        let op = self.begin(Operation::Maintain).await?;
        self.load(&op, db).await?;
        let directory = self.directory(db).lock();
        let Some(directory) = &*directory else { return Ok(2) };
        let table = |word| Entry::parse(word).map(|entry| entry.table.bits());
        let tables: Result<BTreeSet<u64>, _> = directory.words().map(table).collect();
        let tables = tables.map_err(Error::malformed(self.root_word(db)))?;
        Ok(3 + directory.pieces.len() + tables.len())
    }
}

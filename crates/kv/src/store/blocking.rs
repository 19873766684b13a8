//! The blocking form of each operation.

use verbs::executor::block_on;

use super::{
    Cursor, Outcome, Pinned, Scanned, SetOptions, Settings, Store, Transaction, Update, Wanted,
};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::place::Place;
use crate::reach::Reach;

/// Blocking calls. Futures that run under [`block_on`] must not make them.
impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// [`Store::create`], blocking.
    pub fn create_blocking(
        reach: R,
        blocks: B,
        environment: E,
        settings: Settings,
    ) -> Result<Self, Error> {
        block_on(Self::create(reach, blocks, environment, settings))
    }

    /// [`Store::open`], blocking.
    pub fn open_blocking(
        reach: R,
        blocks: B,
        environment: E,
        settings: Settings,
        root: Place,
    ) -> Result<Self, Error> {
        block_on(Self::open(reach, blocks, environment, settings, root))
    }

    /// [`Store::get`], blocking.
    pub fn get_blocking(&self, db: u8, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        block_on(self.get(db, key))
    }

    /// [`Store::get_pinned`], blocking; a use of the key.
    pub fn get_pinned_blocking(&self, db: u8, key: &[u8]) -> Result<Option<Pinned<'_, B>>, Error> {
        block_on(self.get_pinned(db, key, true))
    }

    /// [`Store::get_many`], blocking.
    pub fn get_many_blocking(&self, db: u8, keys: &[&[u8]]) -> Result<Vec<Option<Vec<u8>>>, Error> {
        block_on(self.get_many(db, keys))
    }

    /// [`Store::set`], blocking.
    pub fn set_blocking(
        &self,
        db: u8,
        key: &[u8],
        value: &[u8],
        options: SetOptions,
    ) -> Result<Outcome, Error> {
        block_on(self.set(db, key, value, options))
    }

    /// [`Store::delete`], blocking.
    pub fn delete_blocking(&self, db: u8, key: &[u8]) -> Result<bool, Error> {
        block_on(self.delete(db, key))
    }

    /// [`Store::update`], blocking.
    pub fn update_blocking<'v>(
        &self,
        db: u8,
        key: &[u8],
        change: impl FnMut(Option<&[u8]>, u64) -> Update<'v>,
    ) -> Result<bool, Error> {
        block_on(self.update(db, key, change))
    }

    /// [`Store::expire`], blocking.
    pub fn expire_blocking(
        &self,
        db: u8,
        key: &[u8],
        at: u64,
        is_wanted: impl FnMut(u64) -> bool,
    ) -> Result<bool, Error> {
        block_on(self.expire(db, key, at, is_wanted))
    }

    /// [`Store::scan`], blocking.
    pub fn scan_blocking(&self, db: u8, cursor: Cursor, count: usize) -> Result<Scanned, Error> {
        block_on(self.scan(db, cursor, count))
    }

    /// [`Store::atomically`], blocking.
    pub fn atomically_blocking<T>(
        &self,
        keys: &[Wanted<'_>],
        change: impl FnMut(&mut Transaction) -> T,
    ) -> Result<T, Error> {
        block_on(self.atomically(keys, change))
    }

    /// [`Store::flush`], blocking.
    pub fn flush_blocking(&self, db: u8) -> Result<(), Error> {
        block_on(self.flush(db))
    }

    /// [`Store::compact`], blocking.
    pub fn compact_blocking(&self, share: u32) -> Result<usize, Error> {
        block_on(self.compact(share))
    }
}

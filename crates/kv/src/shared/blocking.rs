//! The blocking form of each operation.

use verbs::executor::block_on;

use super::{SharedSettings, SharedStore};
use crate::blocks::SharedBlocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::place::Place;
use crate::reach::Reach;
use crate::region::RegionBlocks;
use crate::store::{Cursor, Outcome, Scanned, SetOptions, Update};

/// Blocking calls. Futures that run under [`block_on`] must not make them.
impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// [`SharedStore::get`], blocking.
    pub fn get_blocking(&self, db: u8, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        block_on(self.get(db, key))
    }

    /// [`SharedStore::set`], blocking.
    pub fn set_blocking(
        &self,
        db: u8,
        key: &[u8],
        value: &[u8],
        options: SetOptions,
    ) -> Result<Outcome, Error> {
        block_on(self.set(db, key, value, options))
    }

    /// [`SharedStore::delete`], blocking.
    pub fn delete_blocking(&self, db: u8, key: &[u8]) -> Result<bool, Error> {
        block_on(self.delete(db, key))
    }

    /// [`SharedStore::update`], blocking.
    pub fn update_blocking<'v>(
        &self,
        db: u8,
        key: &[u8],
        change: impl FnMut(Option<&[u8]>, u64) -> Update<'v>,
    ) -> Result<(), Error> {
        block_on(self.update(db, key, change))
    }

    /// [`SharedStore::expire`], blocking.
    pub fn expire_blocking(
        &self,
        db: u8,
        key: &[u8],
        at: u64,
        is_wanted: impl FnMut(u64) -> bool,
    ) -> Result<bool, Error> {
        block_on(self.expire(db, key, at, is_wanted))
    }

    /// [`SharedStore::exists`], blocking.
    pub fn exists_blocking(&self, db: u8, key: &[u8]) -> Result<bool, Error> {
        block_on(self.exists(db, key))
    }

    /// [`SharedStore::scan`], blocking.
    pub fn scan_blocking(&self, db: u8, cursor: Cursor, count: usize) -> Result<Scanned, Error> {
        block_on(self.scan(db, cursor, count))
    }

    /// [`SharedStore::len`], blocking.
    pub fn len_blocking(&self, db: u8) -> Result<u64, Error> {
        block_on(self.len(db))
    }

    /// [`SharedStore::tend`], blocking.
    pub fn tend_blocking(&self) -> Result<(), Error> {
        block_on(self.tend())
    }

    /// [`SharedStore::leave`], blocking.
    pub fn leave_blocking(self) -> Result<(), Error> {
        block_on(self.leave())
    }
}

impl<R: Reach + Clone, E: Environment + Clone> SharedStore<R, RegionBlocks<R>, E> {
    /// [`SharedStore::join`], blocking.
    pub fn join_blocking(
        reach: R,
        environment: E,
        settings: SharedSettings,
        region: Place,
    ) -> Result<Self, Error> {
        block_on(Self::join(reach, environment, settings, region))
    }
}

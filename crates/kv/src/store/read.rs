//! Operations that read one key.

use std::ops::Deref;
use std::sync::Arc;

use super::gone::Losses;
use super::look::{Hit, Seen, Want};
use super::scratch::Scratch;
use super::trips::{Operation, Trip};
use super::{Key, Measure, Store};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::reach::Reach;
use crate::table::Table;
use crate::ticket::Hold;

/// A value in a buffer of the store, which is used again when this is dropped.
///
/// The value's blocks are not used again either while this lives.
pub struct Pinned<'s, B: Blocks> {
    value: Scratch<'s>,
    expiry: u64,
    _pin: B::Pin,
}

impl<B: Blocks> Pinned<'_, B> {
    /// The expiry, in milliseconds since 1970; 0: none.
    pub fn expiry(&self) -> u64 {
        self.expiry
    }
}

impl<B: Blocks> Deref for Pinned<'_, B> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.value
    }
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Reads a value. `None`: the key is not there.
    pub async fn get(&self, db: u8, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let mut value = Vec::new();
        Ok(self.get_into(db, key, &mut value).await?.map(|_| value))
    }

    /// Appends a value to `value`. Returns the expiry (0: none). `None`: the key is not there.
    ///
    /// With a `value` that has room, the call allocates no memory of the process.
    pub async fn get_into(
        &self,
        db: u8,
        key: &[u8],
        value: &mut Vec<u8>,
    ) -> Result<Option<u64>, Error> {
        self.read_into(db, key, value, true).await
    }

    /// Like [`Store::get_into`]. `is_use`: the read counts as a use of the key.
    async fn read_into(
        &self,
        db: u8,
        key: &[u8],
        value: &mut Vec<u8>,
        is_use: bool,
    ) -> Result<Option<u64>, Error> {
        let key = self.key(db, key)?;
        let ticket = self.ticket(&key, Hold::Shared);
        ticket.valid().await;
        let trip = self.trip(Operation::Get);
        let _pin = self.blocks.pin();
        let mut buffer = self.buffers.take();
        let mut losses = Losses::default();
        let start = value.len();
        loop {
            match self.get_once(&trip, &key, &mut buffer, value, is_use).await {
                Ok(expiry) => return Ok(expiry),
                Err(error) => losses.meet(error)?,
            }
            // A piece of the value was lost after the look-up.
            buffer.clear();
            value.truncate(start);
        }
    }

    async fn get_once(
        &self,
        trip: &Trip<'_>,
        key: &Key<'_>,
        buffer: &mut Vec<u8>,
        value: &mut Vec<u8>,
        is_use: bool,
    ) -> Result<Option<u64>, Error> {
        let Some((table, hit)) = self.find(trip, key, Want::Value, buffer).await? else {
            return Ok(None);
        };
        if is_use {
            self.used(&table, hit.slot, false);
        }
        self.load(trip, hit.word.place, &hit.whole(buffer)?, value).await?;
        Ok(Some(hit.expiry))
    }

    /// Reads a value into a buffer of the store. `is_use`: the read counts as a use of the key.
    pub async fn get_pinned(
        &self,
        db: u8,
        key: &[u8],
        is_use: bool,
    ) -> Result<Option<Pinned<'_, B>>, Error> {
        let pin = self.blocks.pin();
        let mut value = self.buffers.take();
        let expiry = self.read_into(db, key, &mut value, is_use).await?;
        Ok(expiry.map(|expiry| Pinned { value, expiry, _pin: pin }))
    }

    /// Tests whether a key is there. The call is no use of the key.
    pub async fn exists(&self, db: u8, key: &[u8]) -> Result<bool, Error> {
        Ok(self.expiry(db, key).await?.is_some())
    }

    /// The expiry of a key in milliseconds since 1970; 0: none. `None`: the key is not there. The
    /// call is no use of the key.
    pub async fn expiry(&self, db: u8, key: &[u8]) -> Result<Option<u64>, Error> {
        self.inspect(db, key, |_, hit| hit.expiry).await
    }

    /// Returns the measure of a key's uses, for OBJECT IDLETIME and OBJECT FREQ.
    ///
    /// With [`Measure::Recency`](super::Measure::Recency) the seconds since the last use, in steps
    /// of 8; with [`Measure::Frequency`](super::Measure::Frequency) the logarithmic count. The call
    /// is no use. `None`: the key is not there.
    pub async fn worth(&self, db: u8, key: &[u8]) -> Result<Option<u64>, Error> {
        self.inspect(db, key, |table, hit| {
            let (measure, now) = (self.measured(), self.environment.now());
            let local = table.local.lock();
            local.uses.told(hit.slot, measure, now)
        })
        .await
    }

    /// Sets what [`worth`](Self::worth) returns of a key, if the store's measure is `measure`.
    ///
    /// A key that was used longer ago than the measure reaches counts as used at its beginning.
    pub async fn set_worth(
        &self,
        db: u8,
        key: &[u8],
        measure: Measure,
        told: u64,
    ) -> Result<(), Error> {
        if measure != self.measured() {
            return Ok(());
        }
        self.inspect(db, key, |table, hit| {
            table.local.lock().uses.tell(hit.slot, told, measure, self.environment.now());
        })
        .await?;
        Ok(())
    }

    /// Calls `with` for a key that is there, under the key's ticket. Reads no value.
    async fn inspect<T>(
        &self,
        db: u8,
        key: &[u8],
        with: impl FnOnce(&Table, &Hit) -> T,
    ) -> Result<Option<T>, Error> {
        let key = self.key(db, key)?;
        let ticket = self.ticket(&key, Hold::Shared);
        ticket.valid().await;
        let trip = self.trip(Operation::Exists);
        let _pin = self.blocks.pin();
        let mut buffer = self.buffers.take();
        let found = self.find(&trip, &key, Want::Presence, &mut buffer).await?;
        Ok(found.map(|(table, hit)| with(&table, &hit)))
    }

    /// Looks for a key that has not expired. The caller holds a ticket and a pin.
    async fn find(
        &self,
        trip: &Trip<'_>,
        key: &Key<'_>,
        want: Want,
        buffer: &mut Vec<u8>,
    ) -> Result<Option<(Arc<Table>, Hit)>, Error> {
        let (mut before, start) = (None, buffer.len());
        let mut losses = Losses::default();
        loop {
            let Some(table) = self.database(key).table(key.hash.upper) else { return Ok(None) };
            let seen = match self.look(trip, &table, key, want, buffer, None).await {
                Ok(seen) => seen,
                Err(error) => {
                    losses.meet(error)?;
                    buffer.truncate(start);
                    continue;
                }
            };
            match seen {
                Some(Seen { hit, .. }) => {
                    let alive = hit.filter(|hit| self.is_alive(hit));
                    return Ok(alive.map(|hit| (table, hit)));
                }
                // The directory changes before the subtable does, so another subtable has the key
                // now. The same one means that remote memory has a foreign prefix.
                None => {
                    if before == Some(table.spot.header) {
                        return Err(self.foreign_prefix(&table));
                    }
                    before = Some(table.spot.header);
                }
            }
        }
    }
}

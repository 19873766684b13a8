//! Operations that read one key.

use std::ops::{Deref, Range};
use std::sync::Arc;

use super::look::{Hit, Seen, Want};
use super::scratch::Scratch;
use super::trips::{Operation, Trip};
use super::{Key, Store};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::{HEADER_BYTES, Kind};
use crate::reach::Reach;
use crate::table::Table;
use crate::ticket::Hold;

/// A value in a buffer of the store, which is used again when this is dropped.
///
/// The value's blocks are not used again either while this lives.
pub struct Pinned<'s, B: Blocks + 's> {
    /// A whole block, or the value alone.
    bytes: Scratch<'s>,
    value: Range<usize>,
    expiry: u64,
    _pin: B::Pin<'s>,
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
        &self.bytes[self.value.clone()]
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
        let key = self.key(db, key)?;
        let ticket = self.ticket(&key, Hold::Shared);
        ticket.valid().await;
        let trip = self.trip(Operation::Get);
        let _pin = self.blocks.pin();
        let mut buffer = self.buffers.take();
        let Some(hit) = self.seek(&trip, &key, Want::Value, &mut buffer).await? else {
            return Ok(None);
        };
        let block = self.parsed(&hit, &buffer)?;
        self.load(&trip, hit.word.place, &block, value).await?;
        Ok(Some(hit.expiry))
    }

    /// Reads a value into a buffer of the store.
    pub async fn get_pinned(&self, db: u8, key: &[u8]) -> Result<Option<Pinned<'_, B>>, Error> {
        let key = self.key(db, key)?;
        let ticket = self.ticket(&key, Hold::Shared);
        ticket.valid().await;
        let trip = self.trip(Operation::Get);
        let pin = self.blocks.pin();
        let mut bytes = self.buffers.take();
        let Some(hit) = self.seek(&trip, &key, Want::Value, &mut bytes).await? else {
            return Ok(None);
        };
        let block = self.parsed(&hit, &bytes)?;
        let start = hit.block.as_ref().map_or(0, |block| block.start);
        let start = start + HEADER_BYTES + block.key.len();
        let mut value = start..start + block.rest.len();
        if block.head.kind != Kind::String {
            let mut whole = self.buffers.take();
            self.load(&trip, hit.word.place, &block, &mut whole).await?;
            (value, bytes) = (0..whole.len(), whole);
        }
        Ok(Some(Pinned { bytes, value, expiry: hit.expiry, _pin: pin }))
    }

    /// Tests whether a key is there. The call is no use of the key.
    pub async fn exists(&self, db: u8, key: &[u8]) -> Result<bool, Error> {
        Ok(self.expiry(db, key).await?.is_some())
    }

    /// The expiry of a key in milliseconds since 1970; 0: none. `None`: the key is not there. The
    /// call is no use of the key.
    pub async fn expiry(&self, db: u8, key: &[u8]) -> Result<Option<u64>, Error> {
        let key = self.key(db, key)?;
        let ticket = self.ticket(&key, Hold::Shared);
        ticket.valid().await;
        let trip = self.trip(Operation::Exists);
        let _pin = self.blocks.pin();
        let mut buffer = self.buffers.take();
        let found = self.find(&trip, &key, Want::Presence, &mut buffer).await?;
        Ok(found.map(|(_, hit)| hit.expiry))
    }

    /// Returns the measure of a key's uses, for OBJECT IDLETIME and OBJECT FREQ.
    ///
    /// With [`Measure::Recency`](super::Measure::Recency) the seconds since the last use, in steps
    /// of 8; with [`Measure::Frequency`](super::Measure::Frequency) the logarithmic count. The call
    /// is no use. `None`: the key is not there.
    pub async fn worth(&self, db: u8, key: &[u8]) -> Result<Option<u64>, Error> {
        let key = self.key(db, key)?;
        let ticket = self.ticket(&key, Hold::Shared);
        ticket.valid().await;
        let trip = self.trip(Operation::Exists);
        let _pin = self.blocks.pin();
        let mut buffer = self.buffers.take();
        let found = self.find(&trip, &key, Want::Presence, &mut buffer).await?;
        Ok(found.map(|(table, hit)| {
            let (measure, now) = (self.measured(), self.environment.now());
            let local = table.local.lock();
            local.uses.told(hit.slot, measure, now)
        }))
    }

    /// Looks for a key that has not expired, and notes the use. The caller holds a ticket and a
    /// pin.
    async fn seek(
        &self,
        trip: &Trip<'_>,
        key: &Key<'_>,
        want: Want,
        buffer: &mut Vec<u8>,
    ) -> Result<Option<Hit>, Error> {
        let found = self.find(trip, key, want, buffer).await?;
        Ok(found.map(|(table, hit)| {
            self.used(&table, hit.slot, false);
            hit
        }))
    }

    /// Looks for a key that has not expired. The caller holds a ticket and a pin.
    async fn find(
        &self,
        trip: &Trip<'_>,
        key: &Key<'_>,
        want: Want,
        buffer: &mut Vec<u8>,
    ) -> Result<Option<(Arc<Table>, Hit)>, Error> {
        let (mut before, mut losses) = (None, 0);
        loop {
            let Some(table) = self.database(key).table(key.hash.upper) else { return Ok(None) };
            let looked = match self.look(trip, &table, key, want, buffer, None).await {
                Ok(looked) => looked,
                Err(error) => {
                    self.outlive(error, &mut losses).await?;
                    buffer.clear();
                    continue;
                }
            };
            match looked {
                Some(Seen { hit, .. }) => {
                    let alive = hit.filter(|hit| !hit.has_passed(&self.environment));
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

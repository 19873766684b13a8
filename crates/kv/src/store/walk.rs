//! Reads whole subtables while no writer is inside, for images of the store at one time.

use super::Store;
use super::trips::Operation;
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::table::Slot;
use crate::reach::Reach;

/// A key with its value, as [`Store::walk`] reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visited<'a> {
    /// Position of the key.
    pub position: u64,
    /// The key.
    pub key: &'a [u8],
    /// The value.
    pub value: &'a [u8],
    /// The expiry in milliseconds since 1970; 0: none.
    pub expiry: u64,
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// The position of a key in the order in which [`Store::walk`] goes through a database.
    pub fn position(&self, key: &[u8]) -> u64 {
        self.hasher.hash(key).upper
    }

    /// Reads the keys of the subtable at position `from`, those at lower positions excepted. Then
    /// calls `done` with the position of the next subtable (`None`: there is none), before the
    /// next writer enters. 0 is the first position.
    pub async fn walk(
        &self,
        db: u8,
        from: u64,
        mut each: impl FnMut(Visited<'_>),
        done: impl FnOnce(Option<u64>),
    ) -> Result<(), Error> {
        self.key(db, b"")?;
        let trip = self.trip(Operation::Scan);
        loop {
            let Some(table) = self.databases[usize::from(db)].table(from) else {
                done(None);
                return Ok(());
            };
            let closed = table.gate.close().await;
            let word = {
                let local = table.local.lock();
                if !local.covers(from) {
                    continue;
                }
                local.word
            };
            let _pin = self.blocks.pin();
            let slots = self.slots(&trip, &table).await?;
            let mut buffer = self.buffers.take();
            let mut value = self.buffers.take();
            let words = slots.iter().filter_map(|word| Slot::parse(*word));
            for slot in words.filter(|slot| !self.blocks.is_gone(slot.place)) {
                buffer.clear();
                value.clear();
                self.read_block(&trip, slot, &mut buffer).await?;
                let block = self.parse(slot, &buffer)?;
                let position = block.head.upper;
                if position >= from {
                    self.load(&trip, slot.place, &block, &mut value).await?;
                    let (key, expiry) = (block.key, block.head.expiry);
                    each(Visited { position, key, value: &value, expiry });
                }
            }
            let next = match word.depth {
                0 => None,
                depth => (word.prefix << 16).checked_add(1 << (64 - depth)),
            };
            done(next);
            drop(closed);
            return Ok(());
        }
    }
}

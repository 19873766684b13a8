//! Reads the keys of a database in the order of their positions, for images of one time.

use super::Store;
use super::access::Steps;
use super::look::Want;
use super::trips::{Operation, Trip};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::class;
use crate::layout::table::Slot;
use crate::reach::{Reach, Step};
use crate::table::Table;

/// Keys of one step: writers of the subtable wait meanwhile.
const KEYS: usize = 64;
/// Bytes after which a step takes no further key. A value in pieces counts as this much.
const BYTES: usize = 128 << 10;

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
        self.hasher.hash(key).tag
    }

    /// Reads some keys from position `from` on: at most 64 of one subtable, and about 128 KiB of
    /// values or one longer value. Then calls `done` with the position of the next step (`None`:
    /// there is none), before the next writer enters. 0 is the first position.
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
            let mut keys = self.positions(&trip, &table).await?;
            keys.retain(|(position, _)| *position >= from);
            keys.sort_unstable_by_key(|(position, _)| *position);
            let step = self.step(&keys)?;
            self.visit_all(&trip, &keys[..step], &mut each).await?;
            let next = match (keys.get(step), word.depth) {
                (Some((position, _)), _) => Some(*position),
                (None, 0) => None,
                (None, depth) => (word.prefix << 16).checked_add(1 << (64 - depth)),
            };
            done(next);
            drop(closed);
            return Ok(());
        }
    }

    /// The positions and words of a subtable's keys, while no writer is inside.
    async fn positions(&self, trip: &Trip<'_>, table: &Table) -> Result<Vec<(u64, Slot)>, Error> {
        let is_there = |word: &Slot| !self.blocks.is_gone(word.place);
        if let Some(mirror) = &table.local.lock().mirror {
            let slots = mirror.slots.iter().zip(&mirror.tags);
            let keys = slots.filter_map(|(word, tag)| Some((*tag, Slot::parse(*word)?)));
            return Ok(keys.filter(|(_, word)| is_there(word)).collect());
        }
        let slots = self.slots(trip, table).await?;
        let words = slots.iter().filter_map(|word| Slot::parse(*word)).filter(is_there);
        let mut keys: Vec<(u64, Slot)> = words.map(|word| (0, word)).collect();
        let words: Vec<Slot> = keys.iter().map(|(_, word)| *word).collect();
        let tell = |i: usize, _, key: &[u8]| keys[i].0 = self.hasher.hash(key).tag;
        self.read_keys(trip, words.into_iter(), tell).await?;
        Ok(keys)
    }

    /// Number of the keys that one step reads. Keys of one position are in one step.
    fn step(&self, keys: &[(u64, Slot)]) -> Result<usize, Error> {
        let (mut step, mut bytes) = (0, 0);
        while let Some((position, word)) = keys.get(step) {
            let is_same = step > 0 && keys[step - 1].0 == *position;
            if !is_same && (step >= KEYS || bytes >= BYTES) {
                break;
            }
            bytes += match word.length {
                class::PIECES => BYTES,
                _ => self.read_bytes(*word, Want::Value, 0)?,
            };
            step += 1;
        }
        Ok(step)
    }

    /// Reads the blocks of `keys` in one round trip, and then the values in pieces.
    async fn visit_all(
        &self,
        trip: &Trip<'_>,
        keys: &[(u64, Slot)],
        each: &mut impl FnMut(Visited<'_>),
    ) -> Result<(), Error> {
        let lengths = keys.iter().map(|(_, word)| self.read_bytes(*word, Want::Value, 0));
        let lengths = lengths.collect::<Result<Vec<usize>, Error>>()?;
        let mut buffer = self.buffers.take();
        buffer.resize(lengths.iter().sum(), 0);
        if !keys.is_empty() {
            let mut rest = buffer.as_mut_slice();
            let mut steps = Steps::new();
            for ((_, word), length) in keys.iter().zip(&lengths) {
                let (into, more) = rest.split_at_mut(*length);
                steps.push(Step::Read { at: word.place.at(0), into });
                rest = more;
            }
            self.run(trip, &mut steps).await?;
        }
        let mut value = self.buffers.take();
        let mut start = 0;
        for ((position, word), length) in keys.iter().zip(&lengths) {
            let whole = self.checked(*word, &buffer, start..start + length)?;
            start += length;
            let block = whole.block(&buffer);
            if self.lacks_pieces(&block) {
                continue;
            }
            value.clear();
            self.load(trip, word.place, &block, &mut value).await?;
            let (key, expiry) = (block.key, block.head.expiry);
            each(Visited { position: *position, key, value: &value, expiry });
        }
        Ok(())
    }
}

//! Whole blocks whose checksums were compared: blocks that were read, and those of the value cache.

use std::ops::Range;
use std::sync::Arc;

use super::Store;
use super::cache::{Standing, copied};
use super::look::Hit;
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::{Block, Head};
use crate::layout::table::Slot;
use crate::layout::{Malformed, class};
use crate::reach::Reach;
use crate::table::Table;

/// A whole block whose checksum was compared.
///
/// Only this module makes values of this type, so no block is used without a comparison, and none
/// is compared twice.
#[derive(Clone, Debug)]
pub(super) struct Whole {
    head: Head,
    bytes: Bytes,
}

#[derive(Clone, Debug)]
enum Bytes {
    /// A range of the operation's buffer.
    Read(Range<usize>),
    /// A block of the value cache, whose checksum was compared when it was read.
    Cached(Arc<[u8]>),
}

impl Whole {
    /// The block. `buffer` is the buffer of the look-up.
    pub fn block<'b>(&'b self, buffer: &'b [u8]) -> Block<'b> {
        let bytes = match &self.bytes {
            Bytes::Read(range) => &buffer[range.clone()],
            Bytes::Cached(bytes) => bytes,
        };
        Block::divide(self.head, bytes)
    }
}

impl Hit {
    /// The whole block of the key, if the look-up wanted the block.
    pub fn whole<'b>(&'b self, buffer: &'b [u8]) -> Result<Block<'b>, Error> {
        let Some(whole) = &self.block else {
            let what = Malformed("a look-up has not read the block of its key");
            return Err(Error::Malformed { at: self.word.place.at(0), what });
        };
        Ok(whole.block(buffer))
    }
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Compares the checksum of the block that `word` names, which was read into `range`.
    pub(super) fn checked(
        &self,
        word: Slot,
        buffer: &[u8],
        range: Range<usize>,
    ) -> Result<Whole, Error> {
        let block = self.parse(word, &buffer[range.clone()])?;
        let bytes = Bytes::Read(range.start..range.start + block.bytes());
        Ok(Whole { head: block.head, bytes })
    }

    /// The block that a slot of a mirror names, if the value cache has the block.
    pub(super) fn cached(&self, word: Slot, expiry: u64) -> Option<Whole> {
        if word.length == class::PIECES {
            return None;
        }
        let bytes = self.cache.read(word.place)?;
        let head = Head { expiry, ..Head::parse(&bytes).ok()? };
        Some(Whole { head, bytes: Bytes::Cached(bytes) })
    }

    /// Caches the value of a key, if `slot` of the mirror still names the block.
    ///
    /// The caller holds a ticket of the key. `flush` and `forget_gone` take no tickets, but change
    /// the mirror before they forget cached blocks. So no block is cached after it is forgotten.
    pub(super) fn keep(
        &self,
        table: &Table,
        slot: usize,
        word: Slot,
        block: &[u8],
        standing: Option<Standing>,
    ) {
        if word.length == class::PIECES || !self.cache.admits(block.len()) {
            return;
        }
        let block = copied(block);
        let local = table.local.lock();
        let Some(mirror) = local.mirror.as_ref().filter(|_| !local.gone) else { return };
        if mirror.slots[slot] == word.word() {
            self.cache.keep(word.place, block, standing);
        }
    }

    /// Caches the block that a look-up has read.
    pub(super) fn keep_read(&self, table: &Table, hit: &Hit, buffer: &[u8]) {
        if let Some(Whole { bytes: Bytes::Read(range), .. }) = &hit.block {
            self.keep(table, hit.slot, hit.word, &buffer[range.clone()], None);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use verbs::executor::block_on;

    use super::*;
    use crate::layout::block::{COMPARED, HEADER_BYTES};
    use crate::memory::{Arena, Client, Hand, Memory};
    use crate::place::Address;
    use crate::store::{Condition, Expiry, Form, SetOptions, Settings, Update, Wanted};

    type MemoryStore = Store<Arc<Client>, Arena, Arc<Hand>>;

    const FORMS: [(Form, bool, u64); 4] = [
        (Form::Published, false, 0),
        (Form::Fused, false, 0),
        (Form::Fused, true, 0),
        (Form::Fused, true, 1 << 20),
    ];

    fn store((form, mirror, cache_bytes): (Form, bool, u64)) -> (Arc<Memory>, MemoryStore) {
        let memory = Memory::new(4096);
        let client = Arc::new(Client::new(memory.clone(), false));
        let arena = Arena::new(memory.clone(), 0, 1 << 20);
        let settings =
            Settings { form, mirror, cache_bytes, groups: Some(2), ..Settings::default() };
        let store = block_on(Store::create(client, arena, Hand::new(0, 1), settings)).unwrap();
        (memory, store)
    }

    /// The operations that read whole blocks, each for one key.
    fn read_all(store: &MemoryStore, key: &[u8]) -> [Result<Option<Vec<u8>>, Error>; 5] {
        let mut updated = None;
        let keep = |value: Option<&[u8]>, _| {
            updated = value.map(<[u8]>::to_vec);
            Update::Keep
        };
        let update = block_on(store.update(0, key, keep)).map(|_| updated);
        let wanted = [Wanted { db: 0, key, is_read: true }];
        let read = |call: &mut crate::store::Transaction| call.get(0).map(<[u8]>::to_vec);
        let (condition, get) = (Condition::IfAbsent, true);
        let options = SetOptions { condition, get, expiry: Expiry::Keep };
        [
            block_on(store.get(0, key)),
            block_on(store.get_many(0, &[key])).map(|mut values| values.remove(0)),
            update,
            block_on(store.atomically(&wanted, read)),
            block_on(store.set(0, key, b"other", options)).map(|outcome| outcome.old),
        ]
    }

    #[test]
    fn checksum_of_a_block_is_compared_once_a_read() {
        for form in FORMS {
            let (_, store) = store(form);
            // The second value is in pieces. Its list is the block that is compared.
            for (key, value) in [(b"a", vec![1; 100]), (b"b", vec![2; 9000])] {
                block_on(store.set(0, key, &value, SetOptions::default())).unwrap();
                let before = COMPARED.get();
                for result in read_all(&store, key) {
                    assert_eq!(result.unwrap().as_ref(), Some(&value), "{form:?}");
                }
                let is_cached = form.2 != 0 && value.len() == 100;
                let expected = if is_cached { 1 } else { 5 };
                assert_eq!(COMPARED.get() - before, expected, "{form:?}");
                let before = COMPARED.get();
                let put = |_: Option<&[u8]>, _| Update::Put(Cow::Borrowed(b"new"), Expiry::Never);
                block_on(store.update(0, key, put)).unwrap();
                assert_eq!(COMPARED.get() - before, u64::from(!is_cached), "{form:?}");
            }
        }
    }

    #[test]
    fn damaged_value_is_refused_by_each_read() {
        for form in FORMS {
            let (memory, store) = store(form);
            let value: Vec<u8> = (0..200).map(|i| i ^ 0x5a).collect();
            block_on(store.set(0, b"key", &value, SetOptions::default())).unwrap();
            let mut bytes = vec![0; 1 << 20];
            memory.read(Address { node: 0, offset: 0 }, &mut bytes);
            let found = bytes.windows(value.len()).position(|window| window == value);
            let start = found.expect("the value is in the memory") as u64;
            // The value, its length, and the checksum.
            let block = start - (HEADER_BYTES + 3) as u64;
            for offset in (start..start + 200).step_by(7).chain([block + 11, block]) {
                let at = Address { node: 0, offset };
                let right = bytes[offset as usize];
                memory.write(at, &[right ^ 4]);
                for result in read_all(&store, b"key") {
                    let error = result.expect_err("a damaged value was returned");
                    assert!(matches!(error, Error::Malformed { .. }), "{form:?}: {error}");
                }
                memory.write(at, &[right]);
            }
            assert_eq!(block_on(store.get(0, b"key")).unwrap(), Some(value));
            assert_eq!(store.stats().cache.values, u64::from(form.2 != 0), "{form:?}");
        }
    }
}

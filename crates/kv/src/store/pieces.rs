//! Values in pieces: writing, reading and listing, for stores of both modes.
//!
//! A value that fits no slab lies in pieces. The block of its key has a list of the pieces, and
//! lists chain.

use super::Key;
use super::access::Steps;
use super::scratch::{Buffers, Scratch};
use super::trips::Trip;
use crate::blocks::Length;
use crate::error::Error;
use crate::layout::block::{
    self, Block, HEADER_BYTES, Head, Kind, LIST_HEAD_BYTES, VALUE_MAX, list_bytes, list_head,
    piece_word, string_bytes,
};
use crate::layout::table::Slot;
use crate::layout::{Malformed, class};
use crate::place::Place;
use crate::reach::Step;

/// The longest list of pieces that is read in one READ.
const LIST_READ: u32 = 64 << 10;

/// Places of blocks, with their bytes.
pub(crate) type Places = Vec<(Place, u32)>;

/// What values in pieces need of a store.
pub(crate) trait Pieces {
    /// Bytes of a slab.
    fn slab(&self) -> u32;

    /// The buffers of operations.
    fn buffers(&self) -> &Buffers;

    /// True if the memory node of a place has ended.
    fn is_gone(&self, place: Place) -> bool;

    /// Executes `steps` in one round trip.
    async fn run(&self, trip: &Trip<'_>, steps: &mut [Step<'_>]) -> Result<(), Error>;
}

/// The length code of a block of `length` bytes. `None`: the value lies in pieces.
fn code(slab: u32, length: usize) -> Option<u8> {
    if length > slab as usize { None } else { class::code(slab, length as u32) }
}

/// Bytes that an operation reads of the block with length code `code`, of which `left` bytes are
/// left in the slab.
pub(crate) fn block_bytes(slab: u32, code: u8, left: u32) -> u32 {
    class::length(slab, code).unwrap_or(left.min(LIST_READ))
}

/// True if a block of `bytes` at `place` ends within its slab.
pub(crate) fn is_in_slab(slab: u32, place: Place, bytes: u32) -> bool {
    let start = place.at(0).offset % u64::from(slab);
    start + u64::from(bytes) <= u64::from(slab)
}

/// Encodes the block of `key` and `value` in memory from `allocate`. Pieces are written, the block
/// is not. Returns the slot's word, and the bytes of the block.
pub(crate) async fn encode<'s>(
    store: &'s impl Pieces,
    trip: &Trip<'_>,
    key: &Key<'_>,
    value: &[u8],
    expiry: u64,
    mut allocate: impl AsyncFnMut(u32, Length) -> Result<Place, Error>,
) -> Result<(Slot, Scratch<'s>), Error> {
    let bytes = key.bytes.len();
    // Half a slab, so that a list of pieces has room behind the key.
    let most = store.slab() as usize / 2 - HEADER_BYTES;
    if bytes > most {
        return Err(Error::KeyTooLong { bytes, most });
    }
    if value.len() > VALUE_MAX {
        return Err(Error::ValueTooLong(value.len()));
    }
    let head = Head {
        key: bytes as u32,
        value: value.len() as u32,
        kind: Kind::String,
        db: key.db,
        upper: key.hash.upper,
        expiry,
    };
    let length = string_bytes(bytes, value.len());
    let (code, place, encoded) = match code(store.slab(), length) {
        Some(code) => {
            let place = allocate(length as u32, Length::Named).await?;
            let mut encoded = store.buffers().take();
            encoded.resize(length, 0);
            block::encode(place, &head, key.bytes, &[value], &mut encoded);
            (code, place, encoded)
        }
        None => {
            let (place, encoded) = write(store, trip, (&head, key.bytes), value, allocate).await?;
            (class::PIECES, place, encoded)
        }
    };
    Ok((Slot { fingerprint: key.hash.fingerprint(), length: code, place }, encoded))
}

/// Writes `value` in pieces, in one round trip. Returns the place of the block with the list, and
/// its bytes, which are not written.
async fn write<'s>(
    store: &'s impl Pieces,
    trip: &Trip<'_>,
    (head, key): (&Head, &[u8]),
    value: &[u8],
    mut allocate: impl AsyncFnMut(u32, Length) -> Result<Place, Error>,
) -> Result<(Place, Scratch<'s>), Error> {
    let slab = store.slab() as usize;
    let mut entries = Vec::new();
    let mut lists = Vec::new();
    let mut steps = Steps::new();
    for piece in value.chunks(slab) {
        let place = allocate(piece.len() as u32, Length::Named).await?;
        entries.extend_from_slice(&piece_word(place, piece.len() as u32).to_be_bytes());
        steps.push(Step::Write { at: place.at(0), from: piece });
    }
    let crc = crc32fast::hash(value);
    // From the last list to the first, because each list names its successor.
    let first = (slab - list_bytes(key.len(), 0)) / 8 * 8;
    let each = (slab - list_bytes(0, 0)) / 8 * 8;
    let (mine, others) = entries.split_at(first.min(entries.len()));
    let mut next = 0;
    for entries in others.chunks(each).rev() {
        let bytes = list_bytes(0, entries.len() / 8);
        let place = allocate(bytes as u32, Length::Named).await?;
        let head = Head { key: 0, kind: Kind::Continuation, expiry: 0, ..*head };
        let mut list = vec![0; bytes];
        let begin = list_head(crc, entries.len() as u32 / 8, next);
        block::encode(place, &head, &[], &[&begin, entries], &mut list);
        lists.push((place, list));
        next = piece_word(place, bytes as u32);
    }
    steps.extend(lists.iter().map(|(place, list)| Step::Write { at: place.at(0), from: list }));
    store.run(trip, &mut steps).await?;
    let length = list_bytes(key.len(), mine.len() / 8);
    let place = allocate(length as u32, Length::Open).await?;
    let mut encoded = store.buffers().take();
    encoded.resize(length, 0);
    let head = Head { kind: Kind::Pieces, ..*head };
    let begin: [u8; LIST_HEAD_BYTES] = list_head(crc, mine.len() as u32 / 8, next);
    block::encode(place, &head, key, &[&begin, mine], &mut encoded);
    Ok((place, encoded))
}

/// Appends the value of `block` to `out`. A value in pieces takes further round trips.
pub(crate) async fn load(
    store: &impl Pieces,
    trip: &Trip<'_>,
    place: Place,
    block: &Block<'_>,
    out: &mut Vec<u8>,
) -> Result<(), Error> {
    if block.head.kind == Kind::String {
        out.extend_from_slice(block.rest);
        return Ok(());
    }
    let malformed = Error::malformed(place.at(0));
    let crc = block.list().map_err(&malformed)?.crc;
    let (pieces, _) = list(store, trip, place, block).await?;
    let (start, bytes) = (out.len(), block.head.value as usize);
    let room: usize = pieces.iter().map(|(_, bytes)| *bytes as usize).sum();
    if room < bytes || room > bytes + store.slab() as usize {
        return Err(malformed(Malformed("the pieces of a value have another length in all")));
    }
    out.resize(start + bytes, 0);
    {
        let mut rest = &mut out[start..];
        let mut steps = Steps::new();
        for (place, bytes) in &pieces {
            let (into, more) = rest.split_at_mut((*bytes as usize).min(rest.len()));
            steps.push(Step::Read { at: place.at(0), into });
            rest = more;
        }
        store.run(trip, &mut steps).await?;
    }
    if crc32fast::hash(&out[start..]) != crc {
        return Err(malformed(Malformed("the checksum of a value in pieces differs")));
    }
    Ok(())
}

/// The pieces of the value of `block`, and the lists that continue its list. Each list takes a
/// round trip.
pub(crate) async fn list(
    store: &impl Pieces,
    trip: &Trip<'_>,
    place: Place,
    block: &Block<'_>,
) -> Result<(Places, Places), Error> {
    let (mut pieces, mut lists) = (Vec::new(), Vec::new());
    if block.head.kind == Kind::String {
        return Ok((pieces, lists));
    }
    let malformed = Error::malformed(place.at(0));
    let list = block.list().map_err(&malformed)?;
    for piece in list.pieces() {
        pieces.push(piece.map_err(&malformed)?);
    }
    let most = (block.head.value as usize).div_ceil(store.slab() as usize);
    let mut next = list.next;
    let mut bytes = store.buffers().take();
    while let Some((place, length)) = next {
        if store.is_gone(place) {
            // The value is lost. The blocks that are known can be freed.
            lists.push((place, length));
            break;
        }
        let malformed = Error::malformed(place.at(0));
        if !is_in_slab(store.slab(), place, length) {
            return Err(malformed(Malformed("a list of pieces reaches beyond its slab")));
        }
        lists.push((place, length));
        bytes.resize(length as usize, 0);
        store.run(trip, &mut [Step::Read { at: place.at(0), into: &mut bytes }]).await?;
        let block = Block::parse(place, &bytes).map_err(&malformed)?;
        let list = block.list().map_err(&malformed)?;
        let before = pieces.len();
        for piece in list.pieces() {
            pieces.push(piece.map_err(&malformed)?);
        }
        // Each list has a piece, so lists that name each other end here too.
        if pieces.len() == before || pieces.len() > most {
            return Err(malformed(Malformed("a list of pieces has too many or no pieces")));
        }
        next = list.next;
    }
    Ok((pieces, lists))
}

//! Errors of a heap.

use crate::place::Place;

/// An error of a heap.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The source of chunks failed.
    #[error("{attempt}: {source}")]
    Source {
        /// The operation that failed.
        attempt: &'static str,
        /// The source's error.
        #[source]
        source: pool::Error,
    },
    /// No block is as long as requested.
    #[error(
        "allocating a block of {bytes} bytes: the longest block of this heap has {most} bytes; cut \
         the value into pieces (Classes::pieces)"
    )]
    TooLong {
        /// Bytes requested.
        bytes: u64,
        /// Bytes of the longest block.
        most: u64,
    },
    /// The heap has no such group.
    #[error("using group {group}: the source of chunks has {groups} groups; use one of them")]
    NoGroup {
        /// The group named.
        group: u16,
        /// Number of groups.
        groups: u16,
    },
    /// No live block begins at the place.
    #[error(
        "freeing the block at {place}: no live block begins there; the block was freed before, or \
         the place was never allocated: correct the caller"
    )]
    NotLive {
        /// The place named.
        place: Place,
    },
    /// The heap has no chunk at the place.
    #[error(
        "{attempt} the chunk at {place}: the heap has no chunk there (any more); use the places \
         that Heap::sparse returns, and ignore this error if the chunk was given back meanwhile"
    )]
    NoChunk {
        /// The operation that failed.
        attempt: &'static str,
        /// The place named.
        place: Place,
    },
    /// The source returned a chunk that the heap cannot use.
    #[error(
        "using a chunk at {place}: {why}; the source of chunks names a wrong first chunk, or a \
         chunk twice"
    )]
    BadChunk {
        /// The chunk's place, or the reason why it has none.
        place: String,
        /// The reason.
        why: &'static str,
    },
    /// A block that is in use according to the caller cannot exist.
    #[error(
        "rebuilding the heap: no block of {bytes} bytes can be in use at {place}: {why}; the list \
         of used places is damaged, or belongs to another pool"
    )]
    Used {
        /// The place of the block.
        place: Place,
        /// Bytes of the block.
        bytes: u64,
        /// The reason.
        why: &'static str,
    },
    /// A setting has an invalid value.
    #[error("{setting} = {value}: {why}")]
    Setting {
        /// Name of the setting.
        setting: &'static str,
        /// Its value.
        value: u64,
        /// The values allowed.
        why: &'static str,
    },
    /// The heap's counts and bitmaps contradict each other, which is a bug of the heap.
    #[error("auditing group {group} of the heap: {why}; report this as a bug")]
    Audit {
        /// The group.
        group: u16,
        /// The contradiction.
        why: String,
    },
}

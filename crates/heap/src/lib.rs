//! A heap over the chunks of a pool: blocks of any length, with all metadata at the compute node.
//!
//! A memory node allocates whole chunks. A [`Heap`] divides chunks into blocks of size classes
//! ([`Classes`]), and gives back the chunks in which no block is left. Chunks have no header: a
//! compute node that restarts lists the blocks in use from its own index, and makes the heap again
//! ([`Heap::rebuild`]).
//!
//! ```
//! use heap::{Heap, PoolChunks, Settings};
//! use pool::{GroupId, Pool};
//! use verbs::executor::block_on;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let settings = pool::Settings { donate_bytes: 1 << 20, ..pool::Settings::default() };
//! let pool = Pool::embedded(pool::Settings { chunk_bytes: 4096, ..settings })?;
//! # let probe = pool.allocate_blocking()?;
//! # let first_chunk_addr = probe.addr - probe.addr % 4096;
//! # pool.free_blocking(probe)?;
//! let chunks = PoolChunks::new(pool.clone(), 0, first_chunk_addr)?;
//! let heap = Heap::new(chunks, Settings::default())?;
//!
//! let block = block_on(heap.allocate(GroupId(0), 1000))?;
//! assert_eq!(block.bytes, 1024);
//! let (grant, offset) = heap.locate(block.place).unwrap();
//! pool.write_blocking(&grant, offset, b"value")?;
//!
//! // A reader that knows the place keeps the block from being used again.
//! let guard = heap.pin(GroupId(0));
//! heap.free(block.place)?;
//! assert_eq!(heap.stats().limbo_bytes(), 1024);
//! drop(guard);
//! block_on(heap.give_back_all(GroupId(0)))?;
//! assert_eq!(heap.stats().held_bytes(), 0);
//! # Ok(())
//! # }
//! ```
//!
//! # Groups
//!
//! A chunk belongs to a QP group of the compute node, and an index and its blocks lie in chunks of
//! one group so that one QP can order accesses to both. Each group of the heap has a state of its
//! own behind a mutex. By convention one thread allocates in a group, and other threads take its
//! lock only to free a block or to look up a chunk. A mutex for each group is enough because each
//! call holds it for a bounded number of steps, and never across an await: an inbox for the frees
//! of other threads would cost an atomic exchange too, and would have to be drained. Calls on
//! blocks allocate no memory once the heap has grown to its size.
//!
//! # Background work
//!
//! The heap starts no thread and has no clock. The caller's background task calls [`Heap::refill`],
//! which keeps a reserve of empty chunks so that [`Heap::try_allocate`] need not wait, and
//! [`Heap::give_back`], which frees the chunks beyond the reserve. [`Heap::pending`] shows whether
//! there is work.
//!
//! # Parts
//!
//! | module | content |
//! | --- | --- |
//! | `heap` | the API |
//! | `place`, `classes` | places and lengths of blocks |
//! | `source` | where chunks come from: the trait, and the pool |
//! | `epoch` | guards, and the time after which a freed block is used again |
//! | `state`, `slab`, `lists` | chunks, slabs and limbo of a group |
//! | `evacuate` | sparse chunks, and chunks that get no new blocks |
//! | `rebuild` | the state from a list of used blocks |
//! | `directory` | the group and the chunk of a place |
//! | `returns` | chunks whose free has not succeeded yet |
//! | `stats`, `audit` | counts, and their comparison with a recount |

#![forbid(unsafe_code)]

mod audit;
mod classes;
mod directory;
mod epoch;
mod error;
mod evacuate;
mod heap;
mod lists;
mod place;
mod rebuild;
mod returns;
mod slab;
mod source;
mod state;
mod stats;

pub use classes::{Class, Classes, SLAB_BYTES_MAX};
pub use epoch::{Epochs, Guard};
pub use error::Error;
pub use heap::{Block, ChunkUse, Heap, Pending, Settings};
pub use place::{Place, UNIT_BYTES};
pub use source::{ChunkSource, PoolChunks};
pub use stats::{ClassStats, Stats};

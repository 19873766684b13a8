//! A concurrent queue in remote memory, under permissions with leases (Patronus §6.1, §7.3.2).
//!
//! ```text
//! metadata block ── head ──────────────┐        tail ────────┐
//!                                      v                     v
//!                previous <── segment ──next──> segment ──next──> segment
//!                             entries           entries           entries
//! ```
//!
//! The queue is a lock-free list of segments. An insert takes an index of the last segment by FAA,
//! and WRITEs the entry there: two round trips without the memory node's CPU. The producer that
//! finds the segment full allocates another one, writes its entry there, links the new segment by
//! CAS, and moves the tail by CAS. The tail may be stale: it is at or behind the head, and the
//! links lead from it to the last segment.
//!
//! **Permissions.** Each member holds a shared permission for the metadata block, which it extends
//! and renews, and one for the segment that it uses. The producer that links a segment has the
//! permission of the allocation; every other one acquires the segment once.
//!
//! **Skipped entries.** A producer that ends or hangs between FAA and WRITE leaves an entry that is
//! never written. A consumer that finds such an entry for longer than its patience acquires the
//! segment exclusively. The memory node grants this only when no other permission for the segment
//! is open any more. So no WRITE to the entry can still take effect, and the consumer marks the
//! entry as skipped. A producer whose permission ended before its WRITE reads the entry under a new
//! permission: a skipped entry is inserted again, with another index.
//!
//! **Segments come back.** A consumer that has taken all entries of a segment moves the tail past
//! it, then the head. A consumer that begins with a segment frees the previous one, which the
//! segment names until then. Producers that still know the freed segment are refused
//! ([`Error::NoSuchObject`]), and go on from the tail. A segment that its producer has allocated
//! and not linked yet is in no list: if this producer ends just then, the segment goes back when
//! the last member of the domain has left.
//!
//! | file | content |
//! | --- | --- |
//! | `layout.rs` | metadata block, segment, entry |
//! | `held.rs` | permissions that are kept as long as they are used |
//! | `producer.rs` | inserts |
//! | `consumer.rs` | entries taken in order, skipped entries, segments freed |

mod consumer;
mod held;
mod layout;
mod producer;
#[cfg(test)]
mod tests;

use std::time::Duration;

use pool::{Error, Grant, LeaseTerms, Object, Others};
use verbs::Nic;

pub use consumer::Consumer;
pub use held::Connection;
use held::{Held, has_ended};
pub use layout::{ENTRIES_MAX, ENTRY_BYTES, METADATA_BYTES, PAYLOAD_BYTES, Payload};
use layout::{Link, Shape};
pub use producer::Producer;

/// Lease of the metadata block that is asked for. The memory node gives its longest one if that is
/// shorter.
const METADATA_LEASE: Duration = Duration::from_secs(1);

/// Steps of an operation after which the queue is taken to be damaged. Each step but the last one
/// means that another member was faster, or that a permission has ended. With more producers than
/// entries of a segment, a producer may find more than a thousand full segments in a row.
const STEPS_MAX: u32 = 1 << 16;

/// Bytes of a segment with this number of entries.
pub fn segment_bytes(entries: u64) -> u64 {
    layout::entry_offset(entries)
}

/// Creates a queue. Returns its name: that of the metadata block. The queue exists until the last
/// member of the domain has left.
///
/// # Errors
/// [`Error::Setting`] if `entries` is not 1 to [`ENTRIES_MAX`]; errors of the pool.
pub async fn create<N: Nic>(connection: &Connection<N>, entries: u64) -> Result<Object, Error> {
    if !(1..=ENTRIES_MAX).contains(&entries) {
        return Err(Error::Setting {
            setting: "entries",
            value: entries.to_string(),
            why: format!("must be 1 to {ENTRIES_MAX}"),
        });
    }
    let Connection { pool, group, .. } = connection;
    let terms = LeaseTerms::shared_write(METADATA_LEASE);
    let bytes = METADATA_BYTES as u64;
    let metadata = pool.allocate_object_in(*group, bytes, Others::Write, &terms).await?;
    let mut metadata = Held::allocated(connection, metadata);
    let shape = Shape::new(metadata.object(), entries);
    let first = allocate_segment(connection, &shape).await?;
    let content = shape.metadata(Link::to(first.object()));
    let grant = metadata.open(connection).await?;
    pool.write(&grant, 0, &content).await?;
    Ok(*metadata.object())
}

/// Allocates an empty segment.
async fn allocate_segment<N: Nic>(
    connection: &Connection<N>,
    shape: &Shape,
) -> Result<Held, Error> {
    let Connection { pool, group, lease, .. } = connection;
    let (bytes, terms) = (shape.segment_bytes(), LeaseTerms::shared_write(*lease));
    let segment = pool.allocate_object_in(*group, bytes, Others::Own, &terms).await?;
    Ok(Held::allocated(connection, segment))
}

/// The metadata block, as a member of the queue holds it.
struct Metadata<N: Nic> {
    connection: Connection<N>,
    held: Held,
    shape: Shape,
}

impl<N: Nic> Metadata<N> {
    /// Joins the queue with the name `queue`.
    async fn open(connection: Connection<N>, queue: &Object) -> Result<Self, Error> {
        let mut held = Held::new(*queue, LeaseTerms::shared_write(METADATA_LEASE));
        let grant = held.open(&connection).await?;
        let mut content = [0; METADATA_BYTES];
        connection.pool.read(&grant, 0, &mut content).await?;
        let shape = Shape::of(queue, &content).ok_or_else(|| Error::Protocol {
            attempt: "joining a queue".into(),
            why: format!("object {queue} is not the metadata block of a queue"),
        })?;
        Ok(Self { connection, held, shape })
    }

    async fn grant(&mut self) -> Result<Grant, Error> {
        self.held.open(&self.connection).await
    }

    /// The segment to which the head or the tail links.
    async fn segment(&mut self, at: u64) -> Result<Segment, Error> {
        let grant = self.grant().await?;
        let link = Link::of(self.connection.word(&grant, at).await?);
        let link = link.ok_or_else(|| damaged("looking for a segment", "it has no segment"))?;
        Ok(self.linked(link))
    }

    /// The segment to which `link` links, without a permission yet.
    fn linked(&self, link: Link) -> Segment {
        let terms = LeaseTerms::shared_write(self.connection.lease);
        Segment { link, held: Held::new(self.shape.segment(link), terms) }
    }

    /// Moves the head or the tail from one segment to the next one. Returns false if the head or
    /// the tail was at another segment.
    async fn advance(&mut self, at: u64, from: Link, to: Link) -> Result<bool, Error> {
        let grant = self.grant().await?;
        let (from, to) = (from.word(), to.word());
        Ok(self.connection.pool.compare_and_swap(&grant, at, from, to).await? == from)
    }
}

/// A segment, as a member of the queue holds it.
struct Segment {
    link: Link,
    held: Held,
}

/// The error of an operation on a queue whose content is not that of a queue.
fn damaged(attempt: &str, why: &str) -> Error {
    Error::Protocol { attempt: attempt.into(), why: format!("the queue is damaged: {why}") }
}

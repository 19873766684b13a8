//! The loop of a thread whose clients insert into concurrent queues (Patronus §6.1).
//!
//! ```text
//! the first thread creates the queues ─┬─ producers join ─> warm-up ─┬─> inserts ─┬─ counts
//!                                   barrier                      barrier      barrier
//! ```
//!
//! The clients of a thread are coroutines. Each is a producer with permissions of its own.

use std::time::Duration;

use units::Random;

use super::outcome::LeaseOutcome;
use super::work::counts;
use crate::Error;
use crate::paper::load::Load;
use crate::paper::measure::{Outcome, Thread};
use crate::queue::{Connection, PAYLOAD_BYTES, Producer, create, segment_bytes};
use pool::join::join;

/// Parameters of the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueWork {
    /// Number of queues, which the clients share equally.
    pub queues: u32,
    /// Entries of a segment.
    pub entries: u64,
    /// Clients of each thread.
    pub clients: u32,
    /// Lease of the permission of a segment, in microseconds.
    pub lease_us: u64,
    /// True: a producer revokes its permission of a segment that it leaves. False: the lease ends
    /// it.
    pub revokes: bool,
}

/// Inserts into each queue before the measurement.
const WARM_UP_INSERTS: u64 = 4096;

impl QueueWork {
    /// Inserts of each client before the measured ones: enough for the memory node to allocate its
    /// windows, for which it stands still.
    pub fn warm_up(&self, threads: u32) -> u32 {
        let clients = u64::from(threads) * u64::from(self.clients);
        let inserts = WARM_UP_INSERTS * u64::from(self.queues);
        u32::try_from(inserts.div_ceil(clients)).unwrap_or(u32::MAX)
    }

    /// Bytes that the memory node donates for `threads` threads with `inserts` inserts of each
    /// client. Segments are not freed, because nothing is taken.
    pub fn donated(&self, threads: u32, inserts: u32, chunk_bytes: u64) -> u64 {
        let clients = u64::from(threads) * u64::from(self.clients);
        let linked = (clients * u64::from(inserts)).div_ceil(self.entries);
        // Each client may have allocated a segment that it does not link.
        let segments = linked + clients + 2 * u64::from(self.queues);
        let bytes = segment_bytes(self.entries);
        let each = match bytes > chunk_bytes / 4 {
            true => bytes.next_power_of_two().max(chunk_bytes),
            // Slots of a slab are at most a quarter larger than an object.
            false => bytes + bytes / 4,
        };
        (segments * each).next_multiple_of(chunk_bytes) + 16 * chunk_bytes
    }
}

/// Runs the loop on one thread.
///
/// # Errors
/// Errors of the pool.
pub fn run<T: Thread>(
    thread: &T,
    load: &Load,
    work: QueueWork,
    mut random: Random,
) -> Result<Outcome, Error> {
    let connection = Connection {
        pool: thread.pool().clone(),
        group: thread.group(),
        lease: Duration::from_micros(work.lease_us),
        revokes: work.revokes,
    };
    if thread.index() == 0 {
        let made = (0..work.queues).map(|_| thread.wait(create(&connection, work.entries)));
        load.objects.set(made.collect::<Result<_, _>>()?);
    }
    thread.wait(thread.barrier().wait());
    let queues = load.objects.get();
    let mut producers = Vec::new();
    for client in 0..work.clients {
        let number = thread.index() * work.clients + client;
        let queue = &queues[(number % work.queues) as usize];
        producers.push(thread.wait(Producer::open(connection.clone(), queue))?);
    }
    insert(thread, &mut producers, work.warm_up(load.threads))?;
    let before = counts(thread)?;
    // A random delay, so that the threads do not run in lockstep.
    thread.pause_ns(random.below(20_000));
    let begin = thread.now_ns();
    let mut lease = insert(thread, &mut producers, load.rounds)?;
    let elapsed_ns = (thread.now_ns() - begin).max(1);
    lease.counts = counts(thread)?.since(&before);
    let inserts = u64::from(load.rounds) * u64::from(work.clients);
    let rate_per_s = inserts as f64 * 1e9 / elapsed_ns as f64;
    Ok(Outcome { lease, rate_per_s, ..Outcome::default() })
}

/// Has each producer insert `rounds` entries.
fn insert<T: Thread>(
    thread: &T,
    producers: &mut [Producer<T::Nic>],
    rounds: u32,
) -> Result<LeaseOutcome, Error> {
    let width = producers.len();
    let inserts = producers.iter_mut().map(|producer| async move {
        let mut outcome = LeaseOutcome::default();
        for _ in 0..rounds {
            let start = thread.now_ns();
            producer.insert(&[0x5a; PAYLOAD_BYTES]).await?;
            outcome.cycle.record_ns(thread.now_ns() - start);
        }
        Ok::<_, Error>(outcome)
    });
    let outcomes = thread.wait(join(inserts, width));
    let mut joined = LeaseOutcome::default();
    for outcome in outcomes {
        joined.join(&outcome?);
    }
    Ok(joined)
}

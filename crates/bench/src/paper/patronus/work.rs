//! The loops of a thread whose clients use leases.
//!
//! ```text
//! each thread allocates its objects ──> windows ──> warm-up ──┬─ counts ─┬─> cycles ─┬─ counts
//!                                                          barrier    barrier     barrier
//! ```
//!
//! Before the warm-up, each thread holds many permissions at once, so that the memory node has
//! allocated the windows that it needs. An allocation of 100 us (Patronus §5.6) would delay all
//! requests of a core.
//!
//! The clients of a thread are coroutines: futures that the thread executes together. The objects
//! of [`Cycle::Exclusive`] are shared by all threads; the first thread allocates them.
//!
//! A permission opens a whole object. In the published form, only such a permission has its header
//! beside the object (contiguity, Patronus §5.4).

use std::time::Duration;

use pool::join::join;
use pool::{LeaseTerms, Object, Others};
use units::Random;

use super::cycles;
use super::outcome::{Counts, LeaseOutcome};
use crate::Error;
use crate::paper::load::Load;
use crate::paper::measure::{Outcome, Thread};

/// Parameters of the loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LeaseWork {
    /// The cycle that a client repeats.
    pub cycle: Cycle,
    /// Clients of each thread.
    pub clients: u32,
    /// Bytes of a permission and of an access.
    pub bytes: u64,
    /// Length of a lease in microseconds.
    pub lease_us: u64,
}

/// A cycle that a client repeats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cycle {
    /// Permissions of a random object of the thread, shared and for writing.
    Lifecycle(Lifecycle),
    /// A request that changes nothing at the memory node: the revocation of a permission that has
    /// ended. The bare RPC of the paper.
    Request,
    /// An exclusive permission of one of `objects` objects, random, of all threads.
    Exclusive {
        /// Number of objects.
        objects: u32,
        /// Time for which the client hangs while it holds the permission, in microseconds.
        hang_us: u64,
        /// True: the client revokes the permission. False: the lease ends it.
        revokes: bool,
    },
    /// A READ that the memory node's NIC refuses, one behind it on the same QP, and the next one.
    Refused,
}

/// A cycle of [`Cycle::Lifecycle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifecycle {
    /// Permissions that follow each other.
    pub permissions: u32,
    /// Accesses by each permission, READs and WRITEs by turns.
    pub accesses: u32,
    /// Extensions of each permission.
    pub extensions: u32,
    /// True: the client revokes each permission. False: the lease ends it.
    pub revokes: bool,
}

/// Objects of a thread: the "large memory region" of the paper (§7.1). They are so many that few
/// clients have permissions of one object.
const OBJECTS: u32 = 256;
/// Requests of a thread in flight before the warm-up.
const IN_FLIGHT: usize = 4;
/// Permissions that a thread with one client holds at once before the warm-up.
const HELD: u32 = 64;
/// Further ones for each client of a thread: their leases are longer in proportion, so that as many
/// permissions more are open at once.
const HELD_EACH: u32 = 8;
/// Lease of these permissions.
const HELD_LEASE: Duration = Duration::from_secs(1);
/// Lease of the first permission of each object: as short as possible.
const FIRST: Duration = Duration::from_micros(50);

impl Lifecycle {
    /// Requests and accesses of a cycle.
    fn requests(&self) -> u32 {
        self.permissions * (1 + self.accesses + self.extensions + u32::from(self.revokes))
    }
}

impl LeaseWork {
    /// Size of a chunk in bytes: slabs have many objects.
    pub const CHUNK_BYTES: u64 = 64 << 10;

    /// Bytes that the memory node donates for `threads` threads.
    pub fn donated(&self, threads: u32, chunk_bytes: u64) -> u64 {
        let objects = match self.cycle {
            Cycle::Exclusive { objects, .. } => objects,
            _ => threads * OBJECTS,
        };
        // Slots are longer than their objects by at most a quarter, and by a header.
        u64::from(objects) * (self.bytes + 32) * 3 / 2 + 16 * chunk_bytes
    }

    /// Requests and accesses of a cycle.
    pub fn requests(&self) -> u32 {
        match self.cycle {
            Cycle::Lifecycle(lifecycle) => lifecycle.requests(),
            _ => 1,
        }
    }

    /// Length of a lease.
    pub fn lease(&self) -> Duration {
        Duration::from_micros(self.lease_us)
    }
}

/// State that the clients of a thread share.
pub(super) struct Subject<'a, T: Thread> {
    pub thread: &'a T,
    pub work: LeaseWork,
    /// The objects, of which each cycle uses one.
    pub objects: Vec<Object>,
}

impl<T: Thread> Subject<'_, T> {
    /// A random object.
    pub fn random_object(&self, random: &mut Random) -> &Object {
        &self.objects[random.below(self.objects.len() as u64) as usize]
    }
}

/// Runs the loop on one thread.
///
/// # Errors
/// Errors of the pool.
pub fn run<T: Thread>(
    thread: &T,
    load: &Load,
    work: LeaseWork,
    mut random: Random,
) -> Result<Outcome, Error> {
    let subject = Subject { thread, work, objects: objects(thread, load, work)? };
    if let Cycle::Lifecycle(_) = work.cycle {
        hold_many(&subject)?;
    }
    cycles::run(&subject, load.warm_up(), &mut random)?;
    let before = counts(thread)?;
    // A random delay, so that the threads do not run in lockstep.
    thread.pause_ns(random.below(20_000));
    let begin = thread.now_ns();
    let mut lease = cycles::run(&subject, load.rounds, &mut random)?;
    let elapsed_ns = (thread.now_ns() - begin).max(1);
    lease.counts = counts(thread)?.since(&before);
    let cycles = u64::from(load.rounds) * u64::from(work.clients);
    let rate_per_s = cycles as f64 * 1e9 / elapsed_ns as f64;
    Ok(Outcome { lease, rate_per_s, ..Outcome::default() })
}

/// Acquires permissions, and revokes them when all are there.
fn hold_many<T: Thread>(subject: &Subject<'_, T>) -> Result<(), Error> {
    let (thread, pool) = (subject.thread, subject.thread.pool());
    let terms = LeaseTerms::shared_write(HELD_LEASE);
    let acquire = |object| pool.acquire_in(thread.group(), object, &terms);
    let count = (HELD + HELD_EACH * (subject.work.clients - 1)).min(OBJECTS) as usize;
    let held = thread.wait(join(subject.objects[..count].iter().map(acquire), IN_FLIGHT));
    let held = held.into_iter().collect::<Result<Vec<_>, _>>()?;
    let ended = thread.wait(join(held.iter().map(|held| pool.revoke(held)), IN_FLIGHT));
    Ok(ended.into_iter().collect::<Result<_, _>>()?)
}

/// The memory node's counters at a moment at which no thread has a request in flight. Only the
/// first thread reads them; those of the others are zero.
pub(super) fn counts<T: Thread>(thread: &T) -> Result<Counts, Error> {
    thread.wait(thread.barrier().wait());
    let counts = match thread.index() {
        0 => Counts::of(&thread.pool().node_status()?),
        _ => Counts::default(),
    };
    thread.wait(thread.barrier().wait());
    Ok(counts)
}

/// The objects of a thread. Their first permissions end by their leases.
fn objects<T: Thread>(thread: &T, load: &Load, work: LeaseWork) -> Result<Vec<Object>, Error> {
    let (pool, group) = (thread.pool(), thread.group());
    let allocate = |count: u32, others| {
        let terms = LeaseTerms::shared_write(FIRST);
        let one = |_| pool.allocate_object_in(group, work.bytes, others, &terms);
        // Together, so that the set-up takes little time.
        let all = thread.wait(join((0..count).map(one), IN_FLIGHT));
        all.into_iter().map(|result| result.map(|(object, _)| object)).collect::<Result<_, _>>()
    };
    let Cycle::Exclusive { objects, .. } = work.cycle else {
        return Ok(allocate(OBJECTS, Others::None)?);
    };
    if thread.index() == 0 {
        load.objects.set(allocate(objects, Others::Write)?);
    }
    thread.wait(thread.barrier().wait());
    Ok(load.objects.get())
}

/// Runs a future for each client of a thread together, and joins their outcomes.
pub(super) fn join_clients<T: Thread, F>(
    subject: &Subject<'_, T>,
    client: impl FnMut(u32) -> F,
) -> Result<LeaseOutcome, Error>
where
    F: Future<Output = Result<LeaseOutcome, Error>>,
{
    let clients = subject.work.clients;
    let outcomes = subject.thread.wait(join((0..clients).map(client), clients as usize));
    let mut joined = LeaseOutcome::default();
    for outcome in outcomes {
        joined.join(&outcome?);
    }
    Ok(joined)
}

//! The loops of the measures, at one compute node.

use std::cell::Cell;
use std::time::{Duration, Instant};

use pool::join::join;
use pool::protocol::Status;
use pool::{Error, Grant, LeaseTerms, Object, Others, Permission, Pool};
use verbs::executor::block_on;

use super::{BYTES, IN_FLIGHT, Measure, SHORT};

/// The object of the loops that extend and read.
const KEPT: usize = 0;
/// The first object of the loops that revoke, one for each task.
const REVOKED: usize = 1;
/// The first object of the loops that leave leases to expire.
const EXPIRING: usize = REVOKED + IN_FLIGHT;
/// Objects of these loops. They keep the permissions of one object few.
const ROTATED: usize = 4 * IN_FLIGHT;
const OBJECTS: usize = EXPIRING + ROTATED;
/// Operations between readings of the clock.
const BATCH: u32 = 16;
/// Extensions of a lifecycle (Patronus §7.2).
const EXTENSIONS: u32 = 8;
/// READs with one permission (Patronus §7.2).
const READS: usize = 3;
/// Lease of permissions that are revoked.
const LONG: Duration = Duration::from_secs(600);
/// Lease that [`READS`] do not outlast, except after a stall.
const READING: Duration = Duration::from_millis(1);
/// Time by which each extension of a loop exceeds the one before. The memory node's unit is a
/// microsecond: a shorter step could ask for no change.
const STEP: Duration = Duration::from_micros(4);

/// Executes requests once, so that a measurement includes no first use of memory.
///
/// # Errors
/// Errors of the pool.
pub fn warm_up(subject: &mut Subject, measure: Measure) -> Result<(), Error> {
    subject.run(measure, Duration::from_millis(1)).map(drop)
}

/// A compute node with what the loops need.
pub struct Subject {
    pool: Pool,
    objects: Vec<Object>,
    /// Of the loops that extend and read.
    permission: Option<Permission>,
    /// A chunk without a lease.
    grant: Option<Grant>,
    /// Time that the next extension asks for.
    next: Duration,
}

impl Subject {
    /// Allocates the objects, if the scheme has any. In scheme `rpc-data`, permissions are local.
    ///
    /// # Errors
    /// Errors of the pool.
    pub fn new(pool: Pool) -> Result<Self, Error> {
        let mut subject =
            Self { pool, objects: Vec::new(), permission: None, grant: None, next: 2 * LONG };
        if subject.pool.has_objects() {
            let allocate = |_| -> Result<Object, Error> {
                let terms = exclusive();
                let pool = &subject.pool;
                let (object, first) = pool.allocate_object_blocking(BYTES, Others::None, &terms)?;
                pool.revoke_blocking(&first)?;
                Ok(object)
            };
            subject.objects = (0..OBJECTS).map(allocate).collect::<Result<_, _>>()?;
            subject.permission = Some(subject.acquire(KEPT, &exclusive())?);
            subject.grant = Some(subject.pool.allocate_blocking()?);
        }
        Ok(subject)
    }

    /// The connection.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Waits until leases that nothing revokes have ended, so that the window operations of
    /// their ends do not count for the next measure. `standing`: permissions that stay.
    ///
    /// # Errors
    /// Errors of the pool.
    pub fn settle(&self, standing: u64) -> Result<(), Error> {
        while permissions(&self.pool.node_status()?) > standing {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Runs a measure for `duration`, and returns the seconds of a unit.
    ///
    /// # Errors
    /// Errors of the pool.
    pub fn run(&mut self, measure: Measure, duration: Duration) -> Result<f64, Error> {
        match measure {
            Measure::Pair => timed(duration, || self.pair(REVOKED)),
            Measure::Pairs => self.pairs(duration),
            Measure::Expiring => self.expiring(duration),
            Measure::ExtendByCas | Measure::ExtendByRpc => self.extend(duration),
            Measure::Extended => timed(duration, || {
                let permission = self.acquire(REVOKED, &exclusive())?;
                for i in 1..=EXTENSIONS {
                    self.pool.extend_blocking(&permission, LONG + i * STEP)?;
                }
                self.pool.revoke_blocking(&permission)
            }),
            Measure::Reacquired => {
                timed(duration, || (0..=EXTENSIONS).try_for_each(|_| self.pair(REVOKED)))
            }
            Measure::ReadPermission => {
                let permission = self.permission.as_ref().expect("a scheme with leases");
                timed(duration, || self.pool.read_blocking(permission, 0, &mut buffer()))
            }
            Measure::ReadGrant => {
                let grant = self.grant.as_ref().expect("a scheme with leases");
                timed(duration, || self.pool.read_blocking(grant, 0, &mut buffer()))
            }
            Measure::ThreeReads => self.three_reads(duration),
            Measure::ThreeReadsByRpc => {
                let permission = self.permission.as_ref().expect("a scheme with objects");
                let read = || self.pool.read_blocking(permission, 0, &mut buffer());
                timed(duration, || (0..READS).try_for_each(|_| read()))
            }
            Measure::RefusedWithSpare | Measure::RefusedWithout => self.refused(duration),
            Measure::AllocatePair => timed(duration, || {
                let grant = self.pool.allocate_blocking()?;
                self.pool.free_blocking(grant)
            }),
            Measure::AllocatePairs => {
                in_flight(duration, |_| self.pool.allocate(), |grant| self.pool.free(grant))
            }
        }
    }

    fn acquire(&self, object: usize, terms: &LeaseTerms) -> Result<Permission, Error> {
        self.pool.acquire_blocking(&self.objects[object], terms)
    }

    fn pair(&self, object: usize) -> Result<(), Error> {
        let permission = self.acquire(object, &exclusive())?;
        self.pool.revoke_blocking(&permission)
    }

    fn pairs(&self, duration: Duration) -> Result<f64, Error> {
        let terms = &exclusive();
        let acquire = |at| self.pool.acquire(&self.objects[REVOKED + at], terms);
        let revoke = |permission| async move { self.pool.revoke(&permission).await };
        in_flight(duration, acquire, revoke)
    }

    /// Shared permissions, so that an acquisition does not wait for the end of an earlier one.
    fn expiring(&self, duration: Duration) -> Result<f64, Error> {
        let terms = &LeaseTerms::shared_write(SHORT).wait(Duration::ZERO);
        let turns: [Cell<usize>; IN_FLIGHT] = Default::default();
        let turns = &turns;
        let acquire = |at: usize| {
            let turn = turns[at].replace(turns[at].get() + 1);
            let object = EXPIRING + (at + turn * IN_FLIGHT) % ROTATED;
            self.pool.acquire(&self.objects[object], terms)
        };
        in_flight(duration, acquire, |_| async { Ok(()) })
    }

    fn extend(&mut self, duration: Duration) -> Result<f64, Error> {
        let permission = self.permission.as_ref().expect("a scheme with leases");
        let (pool, next) = (&self.pool, &mut self.next);
        timed(duration, || {
            *next += STEP;
            pool.extend_blocking(permission, *next).map(drop)
        })
    }

    fn three_reads(&self, duration: Duration) -> Result<f64, Error> {
        let terms = LeaseTerms::shared_read(READING).wait(Duration::ZERO);
        let mut turn = 0;
        timed(duration, || {
            // A permission that expired before its READs were over gives no result.
            loop {
                turn += 1;
                let permission = self.acquire(EXPIRING + turn % ROTATED, &terms)?;
                let read = || self.pool.read_blocking(&permission, 0, &mut buffer());
                match (0..READS).try_for_each(|_| read()) {
                    Err(Error::Expired { .. }) => {}
                    result => return result,
                }
            }
        })
    }

    /// The median over refusals. Between two of them, the broken QP becomes a spare again.
    fn refused(&self, duration: Duration) -> Result<f64, Error> {
        let grant = self.grant.as_ref().expect("a scheme with leases");
        // The range directly behind the grant: its key does not open it.
        let mut forged = *grant;
        forged.addr += grant.len;
        let (start, mut times) = (Instant::now(), Vec::new());
        while times.is_empty() || start.elapsed() < duration {
            while self.pool.restore_spares() {}
            let since = Instant::now();
            match self.pool.read_blocking(&forged, 0, &mut buffer()) {
                Err(Error::Access { .. }) => {}
                result => {
                    let why = format!("a READ with a forged address ended with {result:?}");
                    return Err(Error::Protocol { attempt: "measuring refusals".into(), why });
                }
            }
            self.pool.read_blocking(grant, 0, &mut buffer())?;
            times.push(since.elapsed().as_secs_f64());
        }
        Ok(super::ratios::median(&times))
    }
}

/// Repeats `begin` and `end` in [`IN_FLIGHT`] tasks of this thread, which have the numbers from 0,
/// and returns the seconds of a pair.
///
/// All tasks advance together, because the memory node answers all requests that it finds. The odd
/// tasks begin half a pair ahead, so that requests of both kinds are in flight, as with independent
/// tasks.
fn in_flight<T, B, E>(
    duration: Duration,
    begin: impl Fn(usize) -> B,
    end: impl Fn(T) -> E,
) -> Result<f64, Error>
where
    B: Future<Output = Result<T, Error>>,
    E: Future<Output = Result<(), Error>>,
{
    let (start, begin, end) = (Instant::now(), &begin, &end);
    let task = |at: usize| async move {
        let mut held = if at % 2 == 1 { Some(begin(at).await?) } else { None };
        let mut units = 0_u64;
        while units == 0 || start.elapsed() < duration {
            match held.take() {
                None => held = Some(begin(at).await?),
                Some(held) => {
                    end(held).await?;
                    units += 1;
                }
            }
        }
        if let Some(held) = held {
            end(held).await?;
            units += 1;
        }
        Ok(units)
    };
    let done = block_on(join((0..IN_FLIGHT).map(task), IN_FLIGHT));
    let units = done.into_iter().sum::<Result<u64, Error>>()?;
    Ok(start.elapsed().as_secs_f64() / units as f64)
}

/// An exclusive permission that does not wait: nothing conflicts with it.
fn exclusive() -> LeaseTerms {
    LeaseTerms::exclusive(LONG).wait(Duration::ZERO)
}

fn buffer() -> [u8; BYTES as usize] {
    [0; BYTES as usize]
}

/// Repeats a unit for `duration`, and returns its seconds.
fn timed(duration: Duration, mut unit: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    let (start, mut units) = (Instant::now(), 0_u64);
    loop {
        (0..BATCH).try_for_each(|_| unit())?;
        units += u64::from(BATCH);
        let elapsed = start.elapsed();
        if elapsed >= duration {
            return Ok(elapsed.as_secs_f64() / units as f64);
        }
    }
}

/// Permissions of a memory node that have not ended.
pub fn permissions(status: &Status) -> u64 {
    status.node.lease.as_ref().map_or(0, |lease| lease.permissions)
}

/// Window operations of a memory node between two states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowOperations {
    /// Binds, unbinds and handovers.
    pub operations: u64,
    /// Permissions granted.
    pub permissions: u64,
}

impl WindowOperations {
    /// The window operations so far.
    pub fn of(status: &Status) -> Self {
        let lease = status.node.lease.clone().unwrap_or_default();
        let operations = lease.binds + lease.unbinds + lease.handovers;
        Self { operations, permissions: lease.grants }
    }

    /// The operations for each permission since `before`.
    pub fn each_since(&self, before: &Self) -> f64 {
        let permissions = self.permissions.saturating_sub(before.permissions).max(1);
        self.operations.saturating_sub(before.operations) as f64 / permissions as f64
    }
}

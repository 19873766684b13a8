//! Waits of a second compute node for the end of a lease, and of the memory node for work.

use std::time::{Duration, Instant};

use pool::{Error, LeaseTerms, Object, Others, Permission, Pool};
use serde::{Deserialize, Serialize};

use super::BYTES;
use bench_report::histogram::Latencies;

/// Longest wait beyond the lease.
const PATIENCE: Duration = Duration::from_secs(10);

/// Task of a process that holds a permission until it is killed.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Next {
    /// The object.
    pub object: Object,
    /// The lease.
    pub lease: Duration,
}

impl Next {
    /// Acquires the object exclusively, after its holder: blocks until that one's lease has ended.
    ///
    /// # Errors
    /// Errors of the pool.
    pub fn acquire(&self, pool: &Pool) -> Result<Permission, Error> {
        let terms = LeaseTerms::exclusive(self.lease).wait(self.lease + PATIENCE);
        pool.acquire_blocking(&self.object, &terms)
    }
}

/// Allocates an object that all compute nodes of the domain may acquire.
///
/// # Errors
/// Errors of the pool.
pub fn shared_object(pool: &Pool) -> Result<Object, Error> {
    let terms = LeaseTerms::exclusive(PATIENCE);
    let (object, first) = pool.allocate_object_blocking(BYTES, Others::Write, &terms)?;
    pool.revoke_blocking(&first)?;
    Ok(object)
}

/// Acquires an object, as the process that is killed.
///
/// # Errors
/// Errors of the pool.
pub fn hold(pool: &Pool, task: &Next) -> Result<Permission, Error> {
    task.acquire(pool)
}

/// Measures the lateness with which leases end, in as many trials: `holder` acquires an object and
/// leaves the lease to expire, and `waiter` acquires the object after it.
///
/// The time begins with the holder's request, which comes before the lease, and ends with the reply
/// to the waiter. So it includes both messages, and is an upper bound.
///
/// # Errors
/// Errors of the pool.
pub fn expiries(
    holder: &Pool,
    waiter: &Pool,
    lease: Duration,
    trials: u32,
) -> Result<Latencies, Error> {
    let next = Next { object: shared_object(holder)?, lease };
    let mut lateness = Latencies::new();
    for _ in 0..trials {
        let since = Instant::now();
        next.acquire(holder)?;
        let permission = next.acquire(waiter)?;
        lateness.record(since.elapsed().saturating_sub(lease));
        waiter.revoke_blocking(&permission)?;
    }
    holder.free_object_blocking(&next.object)?;
    Ok(lateness)
}

/// Counts the wake-ups of the memory node's control threads during `duration`.
///
/// A request for the state may itself wake a thread. `count` returns the counter; the wake-ups of
/// one request are the fewest between two calls that follow each other directly.
///
/// # Errors
/// Errors of `count`.
pub fn wakeups<E>(mut count: impl FnMut() -> Result<u64, E>, duration: Duration) -> Result<u64, E> {
    let (mut before, mut each) = (count()?, u64::MAX);
    for _ in 0..5 {
        let now = count()?;
        each = each.min(now.saturating_sub(before));
        before = now;
    }
    // The time without requests is what is measured.
    std::thread::sleep(duration);
    Ok(count()?.saturating_sub(before).saturating_sub(each))
}

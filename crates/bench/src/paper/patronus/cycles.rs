//! The cycles of a client.

use std::time::Duration;

use pool::{Error as PoolError, LeaseTerms, Permission};
use units::Random;

use super::outcome::LeaseOutcome;
use super::work::{Cycle, Lifecycle, Subject, join_clients};
use crate::Error;
use crate::paper::measure::Thread;

/// Cycles in which a lease may end for each cycle that counts. A lease that is shorter than the
/// cycle's requests take would never let the loop end.
const EXPIRED_EACH: u64 = 50;

/// Runs `rounds` cycles of each client of a thread.
///
/// # Errors
/// Errors of the pool; [`Error::Node`] if leases end too early for the cycle.
pub fn run<T: Thread>(
    subject: &Subject<'_, T>,
    rounds: u32,
    random: &mut Random,
) -> Result<LeaseOutcome, Error> {
    match subject.work.cycle {
        Cycle::Lifecycle(lifecycle) => join_clients(subject, |at| {
            let random = Random::new(random.bits());
            lifecycles(subject, lifecycle, at, rounds, random)
        }),
        Cycle::Request => join_clients(subject, |_| requests(subject, rounds)),
        Cycle::Exclusive { hang_us, revokes, .. } => {
            exclusive(subject, hang_us, revokes, rounds, random)
        }
        Cycle::Refused => super::spare::refused(subject, rounds),
    }
}

/// Lifecycles of one client. The odd clients begin with a request more, so that requests of both
/// kinds are in flight, as with independent clients.
async fn lifecycles<T: Thread>(
    subject: &Subject<'_, T>,
    lifecycle: Lifecycle,
    at: u32,
    rounds: u32,
    mut random: Random,
) -> Result<LeaseOutcome, Error> {
    let (pool, group) = (subject.thread.pool(), subject.thread.group());
    let terms = LeaseTerms::shared_write(subject.work.lease());
    if (at + subject.thread.index()) % 2 == 1 {
        // Its lease ends it.
        let object = subject.random_object(&mut random);
        pool.acquire_in(group, object, &terms).await?;
    }
    let mut outcome = LeaseOutcome::default();
    let mut done = 0;
    while done < rounds {
        let start = subject.thread.now_ns();
        match cycle(subject, (lifecycle, &terms), &mut random, &mut outcome).await {
            Ok(()) => {
                outcome.cycle.record_ns(subject.thread.now_ns() - start);
                done += 1;
            }
            Err(PoolError::Expired { .. }) => outcome.expired += 1,
            Err(error) => return Err(error.into()),
        }
        if outcome.expired > EXPIRED_EACH * u64::from(rounds) {
            let lease_us = subject.work.lease_us;
            return Err(Error::Node(format!("leases of {lease_us} us end within their cycles")));
        }
    }
    Ok(outcome)
}

async fn cycle<T: Thread>(
    subject: &Subject<'_, T>,
    (lifecycle, terms): (Lifecycle, &LeaseTerms),
    random: &mut Random,
    outcome: &mut LeaseOutcome,
) -> Result<(), PoolError> {
    let (thread, pool) = (subject.thread, subject.thread.pool());
    let mut buffer = vec![0; subject.work.bytes as usize];
    for _ in 0..lifecycle.permissions {
        let (start, object) = (thread.now_ns(), subject.random_object(random));
        let permission = pool.acquire_in(thread.group(), object, terms).await?;
        outcome.acquire.record_ns(thread.now_ns() - start);
        for access in 0..lifecycle.accesses {
            let start = thread.now_ns();
            match access % 2 {
                0 => pool.read(&permission, 0, &mut buffer).await?,
                _ => pool.write(&permission, 0, &buffer).await?,
            }
            outcome.access.record_ns(thread.now_ns() - start);
        }
        for extension in 1..=lifecycle.extensions {
            let start = thread.now_ns();
            // Each extension asks for more than the one before, so that none is without effect.
            pool.extend(&permission, subject.work.lease() * (extension + 1)).await?;
            outcome.extend.record_ns(thread.now_ns() - start);
        }
        if lifecycle.revokes {
            pool.revoke(&permission).await?;
        }
    }
    Ok(())
}

/// Requests that change nothing, of one client.
async fn requests<T: Thread>(subject: &Subject<'_, T>, rounds: u32) -> Result<LeaseOutcome, Error> {
    let (thread, pool) = (subject.thread, subject.thread.pool());
    let terms = LeaseTerms::shared_write(subject.work.lease());
    let ended = pool.acquire_in(thread.group(), &subject.objects[0], &terms).await?;
    pool.revoke(&ended).await?;
    let mut outcome = LeaseOutcome::default();
    for _ in 0..rounds {
        let start = thread.now_ns();
        pool.revoke(&ended).await?;
        outcome.cycle.record_ns(thread.now_ns() - start);
    }
    Ok(outcome)
}

/// Exclusive permissions of a thread with one client, which hangs while it holds them.
fn exclusive<T: Thread>(
    subject: &Subject<'_, T>,
    hang_us: u64,
    revokes: bool,
    rounds: u32,
    random: &mut Random,
) -> Result<LeaseOutcome, Error> {
    let (thread, pool) = (subject.thread, subject.thread.pool());
    let terms = LeaseTerms::exclusive(subject.work.lease());
    let mut outcome = LeaseOutcome::default();
    for _ in 0..rounds {
        let object = subject.random_object(random);
        let start = thread.now_ns();
        let permission: Permission =
            thread.wait(pool.acquire_in(thread.group(), object, &terms))?;
        outcome.acquire.record_ns(thread.now_ns() - start);
        thread.pause_ns(Duration::from_micros(hang_us).as_nanos() as u64);
        if revokes {
            thread.wait(pool.revoke(&permission))?;
        }
        outcome.cycle.record_ns(thread.now_ns() - start);
    }
    Ok(outcome)
}

//! A single access in flight.

use std::future::Future;
use std::iter::once;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use verbs::{Completion, Nic, Status};

use super::Inner;
use super::access_qp::{Group, Work};
use super::buffer::{BounceBuffer, Buffer};
use super::inner::Repeat;
use super::path::{PathIndex, Posted};
use crate::Error;
use scheme::{Grant, GroupId, Lane};

/// Maximum number of times that operations are reposted after another operation broke their QP.
pub(super) const TRIES: u32 = 64;

/// Memory that an operation in flight reads or writes; kept until the operation has ended.
pub(super) enum HeldMemory<'a, N: Nic> {
    Buffer(&'a Buffer<N>),
    Place(BounceBuffer<N>),
    /// The data was copied into the request.
    Nothing,
}

/// An access in flight: wait for it, or await it.
///
/// Dropping it abandons the access but does not cancel it: the access may still read or write the
/// buffer, which stays registered until the access has ended.
#[must_use = "an abandoned access may still move bytes"]
pub struct Operation<'a, N: Nic> {
    pool: &'a Inner<N>,
    group: GroupId,
    index: PathIndex,
    work: Work<'a>,
    /// End of the grant's lease.
    until: Duration,
    pub(super) hold: HeldMemory<'a, N>,
    posted: Option<Posted<N>>,
    tries: u32,
}

impl<'a, N: Nic> Operation<'a, N> {
    #[inline]
    pub(super) fn post(
        pool: &'a Inner<N>,
        grant: &Grant,
        lane: Lane,
        work: Work<'a>,
        hold: HeldMemory<'a, N>,
    ) -> Result<Self, Error> {
        let group = grant.group;
        let index = pool.group(group).path_index(grant.function, lane);
        let posted = Some(pool.post(group, index, once(&work))?);
        Ok(Self { pool, group, index, work, until: grant.until, hold, posted, tries: 0 })
    }

    fn group(&self) -> &'a Group<N> {
        self.pool.group(self.group)
    }

    /// Waits for completion; spins briefly, then sleeps.
    #[inline]
    pub fn wait(mut self) -> Result<(), Error> {
        self.finish()
    }

    #[inline]
    pub(super) fn finish(&mut self) -> Result<(), Error> {
        loop {
            let completer = self.group().path(self.index).completer();
            let Some(Posted { pending, epoch }) = &mut self.posted else {
                unreachable!("waited for an operation that has ended")
            };
            // After an error the operation may be in flight: dropping it abandons it.
            let (completion, epoch) = (completer.wait_for(pending)?, *epoch);
            self.posted = None;
            if self.ended(&completion, epoch)? {
                return Ok(());
            }
        }
    }

    /// True if the operation is complete; false if it was reposted.
    #[inline]
    fn ended(&mut self, completion: &Completion, epoch: u64) -> Result<bool, Error> {
        if completion.status == Status::Success {
            self.count();
            return Ok(true);
        }
        self.failed(completion.status, epoch)?;
        Ok(false)
    }

    /// Reposts the operation if it was only flushed, on the re-established QP.
    #[cold]
    fn failed(&mut self, status: Status, epoch: u64) -> Result<(), Error> {
        let repeat = if self.work.is_idempotent() { Repeat::Always } else { Repeat::IfNotExecuted };
        let path = self.group().path(self.index);
        if !self.pool.may_repost(path, epoch, status, repeat, &mut self.tries)? {
            return Err(self.pool.refused(self.work.name(), status, self.until));
        }
        self.pool.check_lease(self.until, self.work.name())?;
        self.posted = Some(self.group().post(self.index, once(&self.work))?);
        Ok(())
    }

    #[inline]
    fn count(&self) {
        self.group().counts.add(&self.work);
    }
}

impl<N: Nic> Future for Operation<'_, N> {
    type Output = Result<(), Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        loop {
            let posted = this.posted.as_mut().expect("polled after completion");
            let completion = match Pin::new(&mut posted.pending).poll(cx) {
                Poll::Pending => return Poll::Pending,
                // The operation may be in flight: dropping it abandons it.
                Poll::Ready(Err(e)) => return Poll::Ready(Err(e.into())),
                Poll::Ready(Ok(completion)) => completion,
            };
            let epoch = posted.epoch;
            this.posted = None;
            match this.ended(&completion, epoch) {
                Ok(true) => return Poll::Ready(Ok(())),
                Ok(false) => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }
}

impl<N: Nic> Drop for Operation<'_, N> {
    fn drop(&mut self) {
        let Some(posted) = self.posted.take() else { return };
        match std::mem::replace(&mut self.hold, HeldMemory::Nothing) {
            HeldMemory::Buffer(buffer) => self.pool.abandon(posted, Box::new(buffer.clone())),
            HeldMemory::Place(place) => self.pool.abandon(posted, Box::new(place)),
            HeldMemory::Nothing => {}
        }
    }
}

impl super::access_qp::Counts {
    /// Counts a completed READ.
    #[inline]
    pub fn add_read(&self, bytes: usize) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes_read.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a completed WRITE.
    #[inline]
    pub fn add_write(&self, bytes: usize) {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.bytes_written.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a completed CAS or FAA.
    #[inline]
    pub fn add_atomic(&self) {
        self.atomics.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a completed operation.
    #[inline]
    pub fn add(&self, work: &Work<'_>) {
        match work {
            Work::Read { to, .. } => self.add_read(to.len as usize),
            Work::Write { from, .. } => self.add_write(from.len as usize),
            Work::WriteInline { data, .. } => self.add_write(data.len()),
            Work::CompareSwap { .. } | Work::FetchAdd { .. } => self.add_atomic(),
        }
    }
}

//! Batches of transfers between chunks and registered memory, with one doorbell per QP.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use verbs::executor::block_on;
use verbs::{Completion, Nic, Status};

use super::access_qp::Work;
use super::inner::Repeat;
use super::path::{PathIndex, Posted};
use super::{Buffer, Inner, Pool};
use crate::Error;
use scheme::{Grant, GroupId, Lane};

/// A transfer between a chunk and a buffer.
///
/// For a permission, the grant is `&permission.grant()`:
///
/// ```
/// use pool::{Buffer, DefaultNic, Error, Lane, Pool, Transfer};
/// use pool::scheme::Permission;
///
/// fn load(pool: &Pool, permission: &Permission, to: &Buffer<DefaultNic>) -> Result<(), Error> {
///     let grant = &permission.grant();
///     let transfer = Transfer { grant, offset: 0, buffer_offset: 0, len: grant.len as u32 };
///     pool.read_into(&transfer, to, Lane(0))?.wait()
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Transfer<'a> {
    /// The chunk.
    pub grant: &'a Grant,
    /// Offset in the chunk.
    pub offset: u64,
    /// Offset in the buffer.
    pub buffer_offset: usize,
    /// Bytes to transfer.
    pub len: u32,
}

/// A virtual QP of this compute node: its group and its index in the group.
pub(super) type Qp = (GroupId, PathIndex);

impl<N: Nic> Pool<N> {
    /// Reads several pieces of chunks into one buffer and waits for completion.
    pub fn read_batch_blocking(
        &self,
        transfers: &[Transfer<'_>],
        buffer: &Buffer<N>,
        lane: Lane,
    ) -> Result<(), Error> {
        if self.inner.by_rpc().is_some() {
            return block_on(self.read_batch_by_rpc(transfers, buffer));
        }
        self.start_read_batch(transfers, buffer, lane)?.wait()
    }

    /// Writes several pieces from one buffer to chunks and waits for completion.
    pub fn write_batch_blocking(
        &self,
        transfers: &[Transfer<'_>],
        buffer: &Buffer<N>,
        lane: Lane,
    ) -> Result<(), Error> {
        if self.inner.by_rpc().is_some() {
            return block_on(self.write_batch_by_rpc(transfers, buffer));
        }
        self.start_write_batch(transfers, buffer, lane)?.wait()
    }

    /// Reads several pieces of chunks into one buffer.
    pub async fn read_batch(
        &self,
        transfers: &[Transfer<'_>],
        buffer: &Buffer<N>,
        lane: Lane,
    ) -> Result<(), Error> {
        if self.inner.by_rpc().is_some() {
            return self.read_batch_by_rpc(transfers, buffer).await;
        }
        self.start_read_batch(transfers, buffer, lane)?.done().await
    }

    /// Writes several pieces from one buffer to chunks.
    pub async fn write_batch(
        &self,
        transfers: &[Transfer<'_>],
        buffer: &Buffer<N>,
        lane: Lane,
    ) -> Result<(), Error> {
        if self.inner.by_rpc().is_some() {
            return self.write_batch_by_rpc(transfers, buffer).await;
        }
        self.start_write_batch(transfers, buffer, lane)?.done().await
    }

    /// Starts to read several pieces of chunks into one buffer.
    pub fn start_read_batch(
        &self,
        transfers: &[Transfer<'_>],
        buffer: &Buffer<N>,
        lane: Lane,
    ) -> Result<Batch<N>, Error> {
        self.start_batch(transfers, buffer, lane, Inner::read_work)
    }

    /// Starts to write several pieces from one buffer to chunks.
    pub fn start_write_batch(
        &self,
        transfers: &[Transfer<'_>],
        buffer: &Buffer<N>,
        lane: Lane,
    ) -> Result<Batch<N>, Error> {
        self.start_batch(transfers, buffer, lane, Inner::write_work)
    }

    fn start_batch(
        &self,
        transfers: &[Transfer<'_>],
        buffer: &Buffer<N>,
        lane: Lane,
        work: impl Fn(&Inner<N>, &Transfer<'_>, &Buffer<N>, Lane) -> Result<Work<'static>, Error>,
    ) -> Result<Batch<N>, Error> {
        let inner = &self.inner;
        let mut works = Vec::with_capacity(transfers.len());
        for t in transfers {
            let qp = inner.qp_of(t.grant, lane)?;
            works.push(Part { qp, until: t.grant.until, work: work(inner, t, buffer, lane)? });
        }
        Batch::post(inner.clone(), buffer.clone(), works)
    }
}

/// Transfers in flight that were posted together. Dropping it abandons them, see
/// [`Operation`](super::Operation).
///
/// ```
/// use pool::{Lane, Transfer};
///
/// # let settings = pool::Settings { donate_bytes: 8 << 20, ..pool::Settings::default() };
/// # let pool = pool::Pool::embedded(settings)?;
/// let grants = [pool.allocate_blocking()?, pool.allocate_blocking()?];
/// let buffer = pool.buffer(8192)?;
/// let pieces = [0, 1].map(|i| Transfer {
///     grant: &grants[i],
///     offset: 0,
///     buffer_offset: i * 4096,
///     len: 4096,
/// });
/// let batch = pool.start_read_batch(&pieces, &buffer, Lane(0))?;
/// // Other work of this thread.
/// batch.wait()?;
/// assert_eq!(pool.stats().bytes_read, 8192);
/// # Ok::<(), pool::Error>(())
/// ```
#[must_use = "an abandoned transfer may still move bytes"]
pub struct Batch<N: Nic> {
    pool: Arc<Inner<N>>,
    buffer: Buffer<N>,
    /// Sorted by QP.
    works: Vec<Part>,
    /// Posted parts, each with its range of `works`.
    posted: SmallVec<[(Posted<N>, usize, usize); 2]>,
    tries: u32,
}

/// A transfer of a batch.
struct Part {
    qp: Qp,
    /// End of the grant's lease.
    until: Duration,
    work: Work<'static>,
}

impl<N: Nic> Inner<N> {
    /// The QP that an access to `grant` on `lane` uses.
    pub(super) fn qp_of(&self, grant: &Grant, lane: Lane) -> Result<Qp, Error> {
        self.check_group(grant.group)?;
        Ok((grant.group, self.group(grant.group).path_index(grant.function, lane)))
    }
}

impl<N: Nic> Batch<N> {
    fn post(pool: Arc<Inner<N>>, buffer: Buffer<N>, mut works: Vec<Part>) -> Result<Self, Error> {
        works.sort_by_key(|part| part.qp);
        let mut batch = Self { pool, buffer, works, posted: SmallVec::new(), tries: 0 };
        let mut start = 0;
        while start < batch.works.len() {
            let qp = batch.works[start].qp;
            let run = batch.works[start..].iter().take_while(|part| part.qp == qp).count();
            let end = start + run.min(batch.pool.burst);
            let posted = batch.post_range(start, end)?;
            batch.posted.push((posted, start, end));
            start = end;
        }
        Ok(batch)
    }

    fn post_range(&self, start: usize, end: usize) -> Result<Posted<N>, Error> {
        let (group, index) = self.works[start].qp;
        self.pool.post(group, index, self.works[start..end].iter().map(|part| &part.work))
    }

    /// Waits until all transfers have ended; spins briefly, then sleeps. Returns one of the errors
    /// if any transfer failed.
    pub fn wait(mut self) -> Result<(), Error> {
        let mut result = Ok(());
        while let Some((mut posted, start, end)) = self.posted.pop() {
            let (group, index) = self.works[start].qp;
            let completer = self.pool.group(group).path(index).completer();
            let ended = completer.wait_for(&mut posted.pending);
            result = self.settle(ended, posted, start, end).and(result);
        }
        result
    }

    /// Polls without waiting, and returns true if all transfers have ended. Afterwards, it returns
    /// true again.
    ///
    /// Makes no system call, except where the NIC runs in the calling thread, and after a failed
    /// access, which establishes the QP again.
    ///
    /// # Errors
    /// One of the errors of the transfers. Others may still be in flight: poll again.
    pub fn poll(&mut self) -> Result<bool, Error> {
        while let Some((posted, start, end)) = self.posted.last_mut() {
            let (start, end) = (*start, *end);
            let Some(completion) = posted.pending.try_wait()? else { return Ok(false) };
            let (posted, ..) = self.posted.pop().expect("just seen");
            self.settle(Ok(completion), posted, start, end)?;
        }
        Ok(true)
    }

    /// Resolves when all transfers have ended. Returns one of the errors if any transfer failed.
    pub async fn done(mut self) -> Result<(), Error> {
        let mut result = Ok(());
        while let Some((posted, start, end)) = self.posted.last_mut() {
            let (start, end) = (*start, *end);
            // Polled in place: if this future is dropped here, `posted` still contains the part,
            // which is in flight.
            let ended = (&mut posted.pending).await;
            let (posted, ..) = self.posted.pop().expect("just seen");
            result = self.settle(ended, posted, start, end).and(result);
        }
        result
    }

    /// Handles the completion of a part; reposts the part if it was flushed. A part without a
    /// completion is abandoned.
    fn settle(
        &mut self,
        ended: Result<Completion, verbs::Error>,
        posted: Posted<N>,
        start: usize,
        end: usize,
    ) -> Result<(), Error> {
        let epoch = posted.epoch;
        let status = match ended {
            Ok(completion) => completion.status,
            Err(error) => {
                self.pool.abandon(posted, Box::new(self.buffer.clone()));
                return Err(error.into());
            }
        };
        let parts = &self.works[start..end];
        let (group, index) = parts[0].qp;
        let group = self.pool.group(group);
        if status == Status::Success {
            parts.iter().for_each(|part| group.counts.add(&part.work));
            return Ok(());
        }
        let op = parts[0].work.name();
        let until = parts.iter().map(|part| part.until).min().unwrap_or(Grant::FOREVER);
        let (path, repeat) = (group.path(index), Repeat::Always);
        if !self.pool.may_repost(path, epoch, status, repeat, &mut self.tries)? {
            return Err(self.pool.refused(op, status, until));
        }
        self.pool.check_lease(until, op)?;
        let posted = self.post_range(start, end)?;
        self.posted.push((posted, start, end));
        Ok(())
    }
}

impl<N: Nic> Drop for Batch<N> {
    fn drop(&mut self) {
        for (posted, ..) in self.posted.drain(..) {
            self.pool.abandon(posted, Box::new(self.buffer.clone()));
        }
    }
}

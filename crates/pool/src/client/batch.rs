//! Many transfers between chunks and registered memory, with one doorbell for each QP.

use fabric::{Completion, Nic, Status};

use super::operation::Hold;
use super::path::{Posted, Way, Work};
use super::{Buffer, Inner, Pool};
use crate::Error;
use crate::scheme::{Grant, GroupId, Lane};

/// A transfer between a chunk and a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Transfer<'a> {
    /// The chunk.
    pub grant: &'a Grant,
    /// First byte in the chunk.
    pub offset: u64,
    /// First byte in the buffer.
    pub buffer_offset: usize,
    /// Bytes.
    pub len: u32,
}

/// A QP of this compute node: its group, and which it is there.
type Qp = (GroupId, Way);

/// How often a batch is posted again because a QP was broken by others.
const TRIES: u32 = 64;

impl<N: Nic> Pool<N> {
    /// Reads many pieces into one buffer and waits for all of them.
    pub fn read_batch_blocking(
        &self,
        transfers: &[Transfer<'_>],
        buffer: &Buffer<N>,
        lane: Lane,
    ) -> Result<(), Error> {
        self.start_read_batch(transfers, buffer, lane)?.wait()
    }

    /// Writes many pieces from one buffer and waits for all of them.
    pub fn write_batch_blocking(
        &self,
        transfers: &[Transfer<'_>],
        buffer: &Buffer<N>,
        lane: Lane,
    ) -> Result<(), Error> {
        self.start_write_batch(transfers, buffer, lane)?.wait()
    }

    /// Reads many pieces into one buffer.
    pub async fn read_batch(
        &self,
        transfers: &[Transfer<'_>],
        buffer: &Buffer<N>,
        lane: Lane,
    ) -> Result<(), Error> {
        self.start_read_batch(transfers, buffer, lane)?.done().await
    }

    /// Writes many pieces from one buffer.
    pub async fn write_batch(
        &self,
        transfers: &[Transfer<'_>],
        buffer: &Buffer<N>,
        lane: Lane,
    ) -> Result<(), Error> {
        self.start_write_batch(transfers, buffer, lane)?.done().await
    }

    /// Starts to read many pieces into one buffer.
    pub fn start_read_batch<'a>(
        &'a self,
        transfers: &[Transfer<'_>],
        buffer: &'a Buffer<N>,
        lane: Lane,
    ) -> Result<Batch<'a, N>, Error> {
        let inner = &*self.inner;
        let work =
            |t: &Transfer<'_>| Ok((inner.qp_of(t.grant, lane)?, inner.read_work(t, buffer, lane)?));
        Batch::post(inner, buffer, transfers.iter().map(work).collect::<Result<_, Error>>()?)
    }

    /// Starts to write many pieces from one buffer.
    pub fn start_write_batch<'a>(
        &'a self,
        transfers: &[Transfer<'_>],
        buffer: &'a Buffer<N>,
        lane: Lane,
    ) -> Result<Batch<'a, N>, Error> {
        let inner = &*self.inner;
        let work = |t: &Transfer<'_>| {
            Ok((inner.qp_of(t.grant, lane)?, inner.write_work(t, buffer, lane)?))
        };
        Batch::post(inner, buffer, transfers.iter().map(work).collect::<Result<_, Error>>()?)
    }
}

/// Transfers that were posted together: wait for all of them. Given up if dropped, see
/// [`Operation`](super::Operation).
#[must_use = "transfers that nobody waits for may still move bytes"]
pub struct Batch<'a, N: Nic> {
    pool: &'a Inner<N>,
    buffer: &'a Buffer<N>,
    /// Sorted by QP.
    works: Vec<(Qp, Work<'static>)>,
    /// What was posted, with the range of `works` that it is of.
    posted: Vec<(Posted<N>, usize, usize)>,
    tries: u32,
}

impl<N: Nic> Inner<N> {
    /// The QP that accesses to `grant` on a lane take.
    fn qp_of(&self, grant: &Grant, lane: Lane) -> Result<Qp, Error> {
        self.check_group(grant.group)?;
        Ok((grant.group, self.group(grant.group).way(grant.function, lane)))
    }
}

impl<'a, N: Nic> Batch<'a, N> {
    fn post(
        pool: &'a Inner<N>,
        buffer: &'a Buffer<N>,
        mut works: Vec<(Qp, Work<'static>)>,
    ) -> Result<Self, Error> {
        works.sort_by_key(|(qp, _)| *qp);
        let mut batch = Self { pool, buffer, works, posted: Vec::new(), tries: 0 };
        let mut start = 0;
        while start < batch.works.len() {
            let qp = batch.works[start].0;
            let run = batch.works[start..].iter().take_while(|(q, _)| *q == qp).count();
            let end = start + run.min(pool.burst);
            let posted = batch.post_range(start, end)?;
            batch.posted.push((posted, start, end));
            start = end;
        }
        Ok(batch)
    }

    fn post_range(&self, start: usize, end: usize) -> Result<Posted<N>, Error> {
        let (group, way) = self.works[start].0;
        let list: Vec<Work<'static>> = self.works[start..end].iter().map(|(_, w)| *w).collect();
        self.pool.post(group, way, &list)
    }

    /// Waits for all of them; spins briefly, then sleeps. If some fail, an error of one of them is
    /// returned, after all have ended.
    pub fn wait(mut self) -> Result<(), Error> {
        let mut result = Ok(());
        while let Some((posted, start, end)) = self.posted.pop() {
            let completer = &self.pool.group(self.works[start].0.0).completer;
            let Posted { pending, epoch } = posted;
            let ended = completer.wait(pending).map_err(Error::from);
            result = self.settle(ended, epoch, start, end).and(result);
        }
        result
    }

    /// Ends when all of them have. If some fail, an error of one of them is returned.
    pub async fn done(mut self) -> Result<(), Error> {
        let mut result = Ok(());
        while let Some((posted, start, end)) = self.posted.last_mut() {
            let (epoch, start, end) = (posted.epoch, *start, *end);
            // In place: dropped here, it is still known to be in flight.
            let ended = (&mut posted.pending).await.map_err(Error::from);
            self.posted.pop();
            result = self.settle(ended, epoch, start, end).and(result);
        }
        result
    }

    /// Takes note of how a part ended; it may have to be posted again.
    fn settle(
        &mut self,
        ended: Result<Completion, Error>,
        epoch: u64,
        start: usize,
        end: usize,
    ) -> Result<(), Error> {
        let status = ended?.status;
        let ((group, way), work) = self.works[start];
        let group = self.pool.group(group);
        if status == Status::Success {
            self.works[start..end].iter().for_each(|(_, work)| group.counts.add(work));
            return Ok(());
        }
        self.pool.recover(group.path(way), epoch)?;
        self.tries += 1;
        if !matches!(status, Status::Flushed | Status::RetryExceeded) || self.tries > TRIES {
            return Err(Error::Access { op: work.name(), status });
        }
        let posted = self.post_range(start, end)?;
        self.posted.push((posted, start, end));
        Ok(())
    }
}

impl<N: Nic> Drop for Batch<'_, N> {
    fn drop(&mut self) {
        for (posted, ..) in self.posted.drain(..) {
            self.pool.abandon(posted, Hold::Buffer(self.buffer));
        }
    }
}

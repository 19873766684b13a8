//! READ, WRITE, CAS and FAA in a scheme whose memory node's CPU executes them on request.
//!
//! Slices are cut into the longest requests of the scheme, of which several are in flight at a
//! time. A request runs to completion even if its future is dropped, because its reply would
//! otherwise be written to the slot of another request. There is no registered memory to read into
//! and no work request to post: batches pass through slices, and an ordered list is one request
//! after another.

use verbs::executor::block_on;
use verbs::{Nic, Status};

use super::detached::Detached;
use super::{Buffer, Inner, Pool, Step, Transfer};
use crate::Error;
use crate::join::join;
use scheme::{Access, Atomic, Grant, Lane, Right, RpcAccess};

/// Requests of one slice, or of one batch, that are in flight at a time.
const IN_FLIGHT: usize = 8;

impl<N: Nic> Inner<N> {
    /// Access by requests, if the scheme has it.
    #[inline]
    pub(super) fn by_rpc(&self) -> Option<&dyn RpcAccess> {
        if self.is_one_sided {
            return None;
        }
        match self.scheme.access() {
            Access::ByRpc(rpc) => Some(rpc),
            Access::OneSided | Access::Paged(_) => None,
        }
    }

    fn rpc(&self) -> &dyn RpcAccess {
        self.by_rpc().expect("a scheme with access by requests")
    }

    async fn read_by_rpc(&self, grant: &Grant, at: u64, into: &mut [u8]) -> Result<(), Error> {
        self.check_lease(grant.until, "read")?;
        self.data_request(self.rpc().read(grant, at, into)).await
    }

    async fn write_by_rpc(&self, grant: &Grant, at: u64, from: &[u8]) -> Result<(), Error> {
        self.check_lease(grant.until, "write")?;
        self.data_request(self.rpc().write(grant, at, from)).await
    }

    async fn atomic_by_rpc(&self, grant: &Grant, at: u64, atomic: Atomic) -> Result<u64, Error> {
        let old = self.data_request(self.rpc().atomic(grant, at, atomic)).await?;
        self.group(grant.group).counts.add_atomic();
        Ok(old)
    }
}

/// The bytes of a slice that begins at `offset`, for each request its offset and length.
fn parts(rpc: &dyn RpcAccess, offset: u64, len: usize) -> impl Iterator<Item = (u64, usize)> {
    let most = rpc.data_bytes();
    (0..len).step_by(most).map(move |at| (offset + at as u64, most.min(len - at)))
}

/// The first error of several requests.
fn all(results: Vec<Result<(), Error>>) -> Result<(), Error> {
    results.into_iter().collect()
}

impl<N: Nic> Pool<N> {
    /// Reads bytes that were checked.
    #[cold]
    pub(super) async fn read_by_rpc(
        &self,
        grant: &Grant,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), Error> {
        let (rpc, len) = (self.inner.rpc(), into.len());
        let parts = parts(rpc, offset, len).zip(into.chunks_mut(rpc.data_bytes()));
        let reads = parts.map(|((at, len), part)| {
            let (inner, grant) = (self.inner.clone(), *grant);
            let read = async move {
                let mut bytes = vec![0; len];
                inner.read_by_rpc(&grant, at, &mut bytes).await?;
                Ok::<_, Error>(bytes)
            };
            let read = Detached::new::<N::Cq>(read, drop);
            async move {
                part.copy_from_slice(&read.await?);
                Ok(())
            }
        });
        all(join(reads, IN_FLIGHT).await)?;
        self.inner.group(grant.group).counts.add_read(len);
        Ok(())
    }

    /// [`Pool::read_by_rpc`], blocking. A slice of one request needs no copy.
    #[cold]
    pub(super) fn read_by_rpc_blocking(
        &self,
        grant: &Grant,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), Error> {
        let len = into.len();
        if !(1..=self.inner.rpc().data_bytes()).contains(&len) {
            return block_on(self.read_by_rpc(grant, offset, into));
        }
        block_on(self.inner.read_by_rpc(grant, offset, into))?;
        self.inner.group(grant.group).counts.add_read(len);
        Ok(())
    }

    /// Writes bytes to a range that was checked.
    #[cold]
    pub(super) async fn write_by_rpc(
        &self,
        grant: &Grant,
        offset: u64,
        from: &[u8],
    ) -> Result<(), Error> {
        let rpc = self.inner.rpc();
        let parts = parts(rpc, offset, from.len()).zip(from.chunks(rpc.data_bytes()));
        let writes = parts.map(|((at, _), part)| {
            let (inner, grant, bytes) = (self.inner.clone(), *grant, part.to_vec());
            let write = async move { inner.write_by_rpc(&grant, at, &bytes).await };
            Detached::new::<N::Cq>(write, drop)
        });
        all(join(writes, IN_FLIGHT).await)?;
        self.inner.group(grant.group).counts.add_write(from.len());
        Ok(())
    }

    /// [`Pool::write_by_rpc`], blocking. A slice of one request needs no copy.
    #[cold]
    pub(super) fn write_by_rpc_blocking(
        &self,
        grant: &Grant,
        offset: u64,
        from: &[u8],
    ) -> Result<(), Error> {
        if !(1..=self.inner.rpc().data_bytes()).contains(&from.len()) {
            return block_on(self.write_by_rpc(grant, offset, from));
        }
        block_on(self.inner.write_by_rpc(grant, offset, from))?;
        self.inner.group(grant.group).counts.add_write(from.len());
        Ok(())
    }

    /// Executes an atomic operation, after a check of the word.
    #[cold]
    pub(super) async fn atomic_by_rpc(
        &self,
        grant: &Grant,
        op: &'static str,
        offset: u64,
        atomic: Atomic,
    ) -> Result<u64, Error> {
        self.inner.check_word(grant, op, offset)?;
        let (inner, grant) = (self.inner.clone(), *grant);
        let atomic = async move { inner.atomic_by_rpc(&grant, offset, atomic).await };
        Detached::new::<N::Cq>(atomic, drop).await
    }

    /// [`Pool::atomic_by_rpc`], blocking.
    #[cold]
    pub(super) fn atomic_by_rpc_blocking(
        &self,
        grant: &Grant,
        op: &'static str,
        offset: u64,
        atomic: Atomic,
    ) -> Result<u64, Error> {
        self.inner.check_word(grant, op, offset)?;
        block_on(self.inner.atomic_by_rpc(grant, offset, atomic))
    }

    /// Reads several pieces into one buffer, several at a time.
    #[cold]
    pub(super) async fn read_batch_by_rpc(
        &self,
        transfers: &[Transfer<'_>],
        buffer: &Buffer<N>,
    ) -> Result<(), Error> {
        for t in transfers {
            self.inner.check_transfer(t, buffer, Right::Read, "read")?;
        }
        let reads = transfers.iter().map(|t| self.read_piece(*t, buffer));
        all(join(reads, IN_FLIGHT).await)
    }

    /// Writes several pieces from one buffer, several at a time.
    #[cold]
    pub(super) async fn write_batch_by_rpc(
        &self,
        transfers: &[Transfer<'_>],
        buffer: &Buffer<N>,
    ) -> Result<(), Error> {
        for t in transfers {
            self.inner.check_transfer(t, buffer, Right::Write, "write")?;
        }
        let writes = transfers.iter().map(|t| self.write_piece(*t, buffer));
        all(join(writes, IN_FLIGHT).await)
    }

    async fn read_piece(&self, t: Transfer<'_>, buffer: &Buffer<N>) -> Result<(), Error> {
        let mut bytes = vec![0; t.len as usize];
        self.read_by_rpc(t.grant, t.offset, &mut bytes).await?;
        buffer.memory().write(t.buffer_offset, &bytes);
        Ok(())
    }

    async fn write_piece(&self, t: Transfer<'_>, buffer: &Buffer<N>) -> Result<(), Error> {
        let mut bytes = vec![0; t.len as usize];
        buffer.memory().read(t.buffer_offset, &mut bytes);
        self.write_by_rpc(t.grant, t.offset, &bytes).await
    }

    /// Executes an ordered list, one step after another. If the future is dropped, at most the
    /// step in flight still takes effect.
    #[cold]
    pub(super) async fn run_by_rpc(
        &self,
        lane: Lane,
        steps: &mut [Step<'_, N>],
    ) -> Result<(), Error> {
        self.inner.check_list(lane, steps)?;
        let count = steps.len();
        for (done, step) in steps.iter_mut().enumerate() {
            let op = step.name();
            let status = match self.step_by_rpc(step).await {
                Ok(()) => continue,
                Err(Error::NoSuchObject { .. } | Error::Expired { .. }) => Status::RemoteAccess,
                Err(Error::ManagementBroken { .. }) => Status::Flushed,
                Err(e) => return Err(e),
            };
            return Err(Error::List { done, steps: count, op, status });
        }
        Ok(())
    }

    async fn step_by_rpc(&self, step: &mut Step<'_, N>) -> Result<(), Error> {
        let op = step.name();
        match step {
            Step::Read { grant, offset, into } => self.read_by_rpc(grant, *offset, into).await,
            Step::Write { grant, offset, from } => self.write_by_rpc(grant, *offset, from).await,
            Step::ReadInto(transfer, buffer) => self.read_piece(*transfer, buffer).await,
            Step::WriteFrom(transfer, buffer) => self.write_piece(*transfer, buffer).await,
            Step::CompareAndSwap { grant, offset, expected, new, old } => {
                let atomic = Atomic::CompareAndSwap { expected: *expected, new: *new };
                **old = self.atomic_by_rpc(grant, op, *offset, atomic).await?;
                Ok(())
            }
            Step::FetchAndAdd { grant, offset, add, old } => {
                let atomic = Atomic::FetchAndAdd { add: *add };
                **old = self.atomic_by_rpc(grant, op, *offset, atomic).await?;
                Ok(())
            }
        }
    }
}

//! READ, WRITE, CAS and FAA on the chunk of a grant.

use std::borrow::Borrow;

use verbs::executor::block_on;
use verbs::{Nic, Remote, Sge};

use super::access_qp::Work;
use super::buffer::BOUNCE_MAX;
use super::detached::Detached;
use super::operation::{HeldMemory, Operation};
use super::{Buffer, Inner, Pool, Transfer};
use crate::Error;
use scheme::{Access, Atomic, Grant, Lane, Opens, Right};

/// The lane of synchronous operations.
const SYNC: Lane = Lane(0);
/// Names of atomics in error messages.
const CAS: &str = "compare-and-swap";
const FAA: &str = "fetch-and-add";

impl<N: Nic> Pool<N> {
    /// Reads `into.len()` bytes at `offset` of a chunk.
    pub async fn read(
        &self,
        grant: &impl Opens,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), Error> {
        let (inner, grant) = (&*self.inner, grant.current());
        let grant = grant.borrow();
        inner.check(grant, Right::Read, "read", offset, into.len())?;
        if !inner.is_one_sided {
            return match inner.by_rpc() {
                Some(_) => self.read_by_rpc(grant, offset, into).await,
                None => self.read_page(grant, offset, into).await,
            };
        }
        for (at, part) in parts_mut(offset, into) {
            inner.check_again(grant, at > offset, "read")?;
            let mut op = inner.read_part(grant, at, part.len())?;
            (&mut op).await?;
            take_out(&op, part);
        }
        Ok(())
    }

    /// [`Pool::read`], blocking.
    pub fn read_blocking(
        &self,
        grant: &impl Opens,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), Error> {
        let (inner, grant) = (&*self.inner, grant.current());
        let grant = grant.borrow();
        inner.check(grant, Right::Read, "read", offset, into.len())?;
        if !inner.is_one_sided {
            return match inner.by_rpc() {
                Some(_) => self.read_by_rpc_blocking(grant, offset, into),
                None => block_on(self.read_page(grant, offset, into)),
            };
        }
        for (at, part) in parts_mut(offset, into) {
            inner.check_again(grant, at > offset, "read")?;
            let mut op = inner.read_part(grant, at, part.len())?;
            op.finish()?;
            take_out(&op, part);
        }
        Ok(())
    }

    /// Writes `from` at `offset` of a chunk.
    pub async fn write(&self, grant: &impl Opens, offset: u64, from: &[u8]) -> Result<(), Error> {
        let (inner, grant) = (&*self.inner, grant.current());
        let grant = grant.borrow();
        inner.check(grant, Right::Write, "write", offset, from.len())?;
        if !inner.is_one_sided {
            return match inner.by_rpc() {
                Some(_) => self.write_by_rpc(grant, offset, from).await,
                None => self.write_page(grant, offset, from).await,
            };
        }
        for (at, part) in parts(offset, from) {
            inner.check_again(grant, at > offset, "write")?;
            inner.write_part(grant, at, part)?.await?;
        }
        Ok(())
    }

    /// [`Pool::write`], blocking.
    pub fn write_blocking(
        &self,
        grant: &impl Opens,
        offset: u64,
        from: &[u8],
    ) -> Result<(), Error> {
        let (inner, grant) = (&*self.inner, grant.current());
        let grant = grant.borrow();
        inner.check(grant, Right::Write, "write", offset, from.len())?;
        if !inner.is_one_sided {
            return match inner.by_rpc() {
                Some(_) => self.write_by_rpc_blocking(grant, offset, from),
                None => block_on(self.write_page(grant, offset, from)),
            };
        }
        for (at, part) in parts(offset, from) {
            inner.check_again(grant, at > offset, "write")?;
            inner.write_part(grant, at, part)?.wait()?;
        }
        Ok(())
    }

    /// Reads a page, in schemes with access by pages. Runs to completion even if dropped.
    #[cold]
    async fn read_page(&self, grant: &Grant, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let page_bytes = into.len();
        self.inner.check_whole_page("read", offset, page_bytes)?;
        let (inner, grant) = (self.inner.clone(), *grant);
        let read = async move {
            let mut page = vec![0; page_bytes];
            let Access::Paged(pages) = inner.scheme.access() else {
                unreachable!("access is by pages")
            };
            inner.data_request(pages.read_page(&grant, &mut page)).await?;
            inner.group(grant.group).counts.add_read(page_bytes);
            Ok::<_, Error>(page)
        };
        into.copy_from_slice(&Detached::new::<N::Cq>(read, drop).await?);
        Ok(())
    }

    /// Writes a page, in schemes with access by pages. Runs to completion even if dropped.
    #[cold]
    async fn write_page(&self, grant: &Grant, offset: u64, from: &[u8]) -> Result<(), Error> {
        self.inner.check_whole_page("write", offset, from.len())?;
        let (inner, grant, page) = (self.inner.clone(), *grant, from.to_vec());
        let write = async move {
            let Access::Paged(pages) = inner.scheme.access() else {
                unreachable!("access is by pages")
            };
            inner.data_request(pages.write_page(&grant, &page)).await?;
            inner.group(grant.group).counts.add_write(page.len());
            Ok::<_, Error>(())
        };
        Detached::new::<N::Cq>(write, drop).await
    }

    /// Stores `new` in the 8 bytes at `offset`, a multiple of 8, if they hold `expected`. Returns
    /// their previous value. The word is big-endian in memory.
    pub async fn compare_and_swap(
        &self,
        grant: &impl Opens,
        offset: u64,
        expected: u64,
        new: u64,
    ) -> Result<u64, Error> {
        let grant = grant.current();
        if self.inner.by_rpc().is_some() {
            let atomic = Atomic::CompareAndSwap { expected, new };
            return self.atomic_by_rpc(grant.borrow(), CAS, offset, atomic).await;
        }
        self.inner.swap_word(grant.borrow(), offset, expected, new).await
    }

    /// [`Pool::compare_and_swap`], blocking.
    pub fn compare_and_swap_blocking(
        &self,
        grant: &impl Opens,
        offset: u64,
        expected: u64,
        new: u64,
    ) -> Result<u64, Error> {
        let grant = grant.current();
        if self.inner.by_rpc().is_some() {
            let atomic = Atomic::CompareAndSwap { expected, new };
            return self.atomic_by_rpc_blocking(grant.borrow(), CAS, offset, atomic);
        }
        let mut op = self.inner.post_compare_and_swap(grant.borrow(), offset, expected, new)?;
        op.finish()?;
        Ok(old_word(&op))
    }

    /// Adds `add` to the 8 bytes at `offset`, a multiple of 8, with wrap-around. Returns their
    /// previous value. The word is big-endian in memory.
    pub async fn fetch_and_add(
        &self,
        grant: &impl Opens,
        offset: u64,
        add: u64,
    ) -> Result<u64, Error> {
        let grant = grant.current();
        if self.inner.by_rpc().is_some() {
            let atomic = Atomic::FetchAndAdd { add };
            return self.atomic_by_rpc(grant.borrow(), FAA, offset, atomic).await;
        }
        let mut op = self.inner.fetch_and_add(grant.borrow(), offset, add)?;
        (&mut op).await?;
        Ok(old_word(&op))
    }

    /// [`Pool::fetch_and_add`], blocking.
    pub fn fetch_and_add_blocking(
        &self,
        grant: &impl Opens,
        offset: u64,
        add: u64,
    ) -> Result<u64, Error> {
        let grant = grant.current();
        if self.inner.by_rpc().is_some() {
            let atomic = Atomic::FetchAndAdd { add };
            return self.atomic_by_rpc_blocking(grant.borrow(), FAA, offset, atomic);
        }
        let mut op = self.inner.fetch_and_add(grant.borrow(), offset, add)?;
        op.finish()?;
        Ok(old_word(&op))
    }

    /// Starts to read from a chunk into registered memory.
    pub fn read_into<'a>(
        &'a self,
        transfer: &Transfer<'_>,
        buffer: &'a Buffer<N>,
        lane: Lane,
    ) -> Result<Operation<'a, N>, Error> {
        let work = self.inner.read_work(transfer, buffer, lane)?;
        Operation::post(&self.inner, transfer.grant, lane, work, HeldMemory::Buffer(buffer))
    }

    /// Starts to write from registered memory to a chunk.
    pub fn write_from<'a>(
        &'a self,
        transfer: &Transfer<'_>,
        buffer: &'a Buffer<N>,
        lane: Lane,
    ) -> Result<Operation<'a, N>, Error> {
        let work = self.inner.write_work(transfer, buffer, lane)?;
        Operation::post(&self.inner, transfer.grant, lane, work, HeldMemory::Buffer(buffer))
    }
}

impl<N: Nic> Inner<N> {
    /// Checks that the grant belongs to this connection and an existing group, has the right
    /// `needs`, contains `len` bytes at `offset`, and has not expired.
    #[inline]
    pub(super) fn check(
        &self,
        grant: &Grant,
        needs: Right,
        op: &'static str,
        offset: u64,
        len: usize,
    ) -> Result<(), Error> {
        self.check_connection(grant, op)?;
        if needs > grant.right {
            return Err(Error::NotPermitted { op });
        }
        let len = len as u64;
        if offset > grant.len || len > grant.len - offset {
            return Err(Error::OutOfRange { op, offset, len, grant_len: grant.len });
        }
        self.check_group(grant.group)?;
        self.check_lease(grant.until, op)
    }

    /// Fails if access is by pages or by requests, because grants then have no keys for one-sided
    /// access.
    #[inline]
    pub(super) fn check_one_sided(&self, op: &'static str) -> Result<(), Error> {
        match self.is_one_sided {
            true => Ok(()),
            false => Err(self.not_one_sided(op)),
        }
    }

    #[cold]
    fn not_one_sided(&self, op: &'static str) -> Error {
        let instead = match self.by_rpc() {
            Some(_) => "use `read`, `write`, `read_batch`, `write_batch` or `run`",
            None => "read and write whole pages with `read` and `write`",
        };
        Error::Setting {
            setting: "scheme",
            value: self.welcome.offer.scheme.clone(),
            why: format!("it has no one-sided {op}; {instead}"),
        }
    }

    fn check_whole_page(&self, op: &'static str, offset: u64, len: usize) -> Result<(), Error> {
        let page = self.page_bytes.unwrap_or_default();
        if (offset, len) == (0, page) {
            return Ok(());
        }
        Err(Error::Setting {
            setting: "offset",
            value: offset.to_string(),
            why: format!(
                "{len} bytes requested: this scheme supports only a {op} of {page} bytes at \
                 offset 0"
            ),
        })
    }

    /// Checks a transfer. Returns its bytes of the buffer.
    #[inline]
    pub(super) fn check_transfer(
        &self,
        t: &Transfer<'_>,
        buffer: &Buffer<N>,
        needs: Right,
        op: &'static str,
    ) -> Result<Sge, Error> {
        self.check(t.grant, needs, op, t.offset, t.len as usize)?;
        buffer.part(t, op, self.connection)
    }

    #[inline]
    pub(super) fn read_work(
        &self,
        t: &Transfer<'_>,
        buffer: &Buffer<N>,
        lane: Lane,
    ) -> Result<Work<'static>, Error> {
        let to = self.check_transfer(t, buffer, Right::Read, "read")?;
        self.check_one_sided("read")?;
        Ok(Work::Read { from: remote(t.grant, t.offset, lane), to })
    }

    #[inline]
    pub(super) fn write_work(
        &self,
        t: &Transfer<'_>,
        buffer: &Buffer<N>,
        lane: Lane,
    ) -> Result<Work<'static>, Error> {
        let from = self.check_transfer(t, buffer, Right::Write, "write")?;
        self.check_one_sided("write")?;
        Ok(Work::Write { to: remote(t.grant, t.offset, lane), from })
    }

    /// Checks the lease before a later part of an access, because the lease may have ended while
    /// the parts before it were read or written. Before the first part, it was just checked, and
    /// a second look at the clock would take as long as a twentieth of a READ of 64 bytes.
    #[inline]
    fn check_again(&self, grant: &Grant, is_later: bool, op: &'static str) -> Result<(), Error> {
        if is_later { self.check_lease(grant.until, op) } else { Ok(()) }
    }

    /// Starts to read a part.
    fn read_part(&self, grant: &Grant, at: u64, len: usize) -> Result<Operation<'_, N>, Error> {
        let place = self.bounce.take(len)?;
        let work = Work::Read { from: remote(grant, at, SYNC), to: place.sge(0, len) };
        Operation::post(self, grant, SYNC, work, HeldMemory::Place(place))
    }

    /// Starts to write a part.
    fn write_part<'a>(
        &'a self,
        grant: &Grant,
        at: u64,
        data: &'a [u8],
    ) -> Result<Operation<'a, N>, Error> {
        let to = remote(grant, at, SYNC);
        if self.is_inline(data.len()) {
            let work = Work::WriteInline { to, data };
            return Operation::post(self, grant, SYNC, work, HeldMemory::Nothing);
        }
        let place = self.bounce.take(data.len())?;
        place.write(0, data);
        let work = Work::Write { to, from: place.sge(0, data.len()) };
        Operation::post(self, grant, SYNC, work, HeldMemory::Place(place))
    }

    /// The CAS of the word at `offset` of a chunk. Returns its previous value.
    pub(super) async fn swap_word(
        &self,
        grant: &Grant,
        offset: u64,
        expected: u64,
        new: u64,
    ) -> Result<u64, Error> {
        let mut op = self.post_compare_and_swap(grant, offset, expected, new)?;
        (&mut op).await?;
        Ok(old_word(&op))
    }

    fn post_compare_and_swap(
        &self,
        grant: &Grant,
        offset: u64,
        compare: u64,
        swap: u64,
    ) -> Result<Operation<'_, N>, Error> {
        let at = self.word(grant, CAS, offset, SYNC)?;
        let place = self.bounce.take(8)?;
        let work = Work::CompareSwap { at, compare, swap, old: place.sge(0, 8) };
        Operation::post(self, grant, SYNC, work, HeldMemory::Place(place))
    }

    fn fetch_and_add(
        &self,
        grant: &Grant,
        offset: u64,
        add: u64,
    ) -> Result<Operation<'_, N>, Error> {
        let at = self.word(grant, FAA, offset, SYNC)?;
        let place = self.bounce.take(8)?;
        let work = Work::FetchAdd { at, add, old: place.sge(0, 8) };
        Operation::post(self, grant, SYNC, work, HeldMemory::Place(place))
    }

    /// True if a slice of this length is copied into the request.
    #[inline]
    pub(super) fn is_inline(&self, len: usize) -> bool {
        len <= self.max_inline.min(INLINE_MAX)
    }

    /// Remote address of a word, checked.
    pub(super) fn word(
        &self,
        grant: &Grant,
        op: &'static str,
        offset: u64,
        lane: Lane,
    ) -> Result<Remote, Error> {
        self.check_word(grant, op, offset)?;
        self.check_one_sided(op)?;
        Ok(remote(grant, offset, lane))
    }

    /// Checks an access to a word.
    pub(super) fn check_word(
        &self,
        grant: &Grant,
        op: &'static str,
        offset: u64,
    ) -> Result<(), Error> {
        self.check(grant, Right::Write, op, offset, 8)?;
        if !offset.is_multiple_of(8) {
            return Err(Error::Setting {
                setting: "offset",
                value: offset.to_string(),
                why: format!("{op} needs an offset that is a multiple of 8"),
            });
        }
        Ok(())
    }
}

/// Maximum length of a slice that is copied into the request. Above it, a copy through registered
/// memory costs less than the additional blocks of the send queue.
const INLINE_MAX: usize = 128;

pub(super) fn remote(grant: &Grant, offset: u64, lane: Lane) -> Remote {
    Remote { addr: grant.addr + offset, rkey: grant.key(lane) }
}

fn take_out<N: Nic>(op: &Operation<'_, N>, part: &mut [u8]) {
    if let HeldMemory::Place(place) = &op.hold {
        place.read(0, part);
    }
}

fn old_word<N: Nic>(op: &Operation<'_, N>) -> u64 {
    match &op.hold {
        HeldMemory::Place(place) => place.word(0),
        _ => unreachable!("an atomic has a buffer for the old value"),
    }
}

/// Pieces of a slice that each fit a bounce buffer, with their offsets in the chunk.
fn parts(offset: u64, all: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    all.chunks(BOUNCE_MAX).scan(offset, |at, part| {
        let here = *at;
        *at += part.len() as u64;
        Some((here, part))
    })
}

fn parts_mut(offset: u64, all: &mut [u8]) -> impl Iterator<Item = (u64, &mut [u8])> {
    all.chunks_mut(BOUNCE_MAX).scan(offset, |at, part| {
        let here = *at;
        *at += part.len() as u64;
        Some((here, part))
    })
}

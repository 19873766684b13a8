//! Lanes that a compute node lends to another process, the borrower: the borrower posts READs and
//! WRITEs on them, with the keys of the owner.
//!
//! ```text
//! owner (Pool)                                  borrower (no Pool, no control connection)
//! connect_lendable: show ── 2 memfds ─────────> BorrowedMemory::map
//! lend_lanes ── state, eventfd ───────────────> BorrowedLanes::adopt
//! lent_transfer ── LaneTransfer ──────────────> post, poll, wait
//! take_back  <── the borrower has ended ──────
//! ```
//!
//! All QPs of all lanes but the first are lent together, with the CQ that only they complete to.
//! The borrower uses the active QP of each lane; spare QPs are lent because they complete to that
//! CQ. For the memory node and the NIC nothing changes: QPs, keys and windows are the owner's.

mod borrowed;
mod event;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard, RwLockWriteGuard};
use verbs::completion::Completer;
use verbs::{Key, MemoryRegion, Nic, Sge};

pub use borrowed::{BorrowedLanes, Finished};

use super::control::ControlPlane;
use super::path::{Path, State};
use super::{Buffer, Inner, Pool, Transfer};
use crate::Error;
use crate::nic::{LendingNic, LentQueues};
use scheme::{Lane, Right};

/// The QPs of all lanes but the first, if they can be lent.
pub(super) struct Lendable<N: Nic> {
    completer: Arc<Completer<N::Cq>>,
    is_lent: Mutex<bool>,
}

impl<N: Nic> Lendable<N> {
    pub fn new(completer: Arc<Completer<N::Cq>>) -> Self {
        Self { completer, is_lent: Mutex::new(false) }
    }
}

/// State and descriptor of lent lanes, for a borrower that has mapped the memory of the queues.
#[derive(Debug)]
pub struct LentLanes {
    /// Positions and sizes, for [`BorrowedLanes::adopt`]: about 50 bytes for each QP.
    pub state: Vec<u8>,
    /// The descriptor that wakes the NIC.
    pub wake: OwnedFd,
}

/// Direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From a chunk to the buffer.
    Read,
    /// From the buffer to a chunk.
    Write,
}

/// A transfer on a lent lane, as numbers that the owner can pass on to the borrower.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaneTransfer {
    /// Index of the lent QP.
    pub qp: u16,
    /// Address at the memory node.
    pub address: u64,
    /// Key of the grant for the lane.
    pub rkey: u32,
    /// Offset in the buffer.
    pub offset: u64,
    /// Bytes to transfer.
    pub bytes: u32,
}

/// Place of the buffer in work requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Local {
    lkey: Key,
    base: u64,
    bytes: u64,
}

impl Local {
    /// Bytes of the encoding.
    const BYTES: usize = 20;

    fn encode(&self) -> [u8; Self::BYTES] {
        let mut all = [0; Self::BYTES];
        all[..4].copy_from_slice(&self.lkey.0.to_le_bytes());
        all[4..12].copy_from_slice(&self.base.to_le_bytes());
        all[12..].copy_from_slice(&self.bytes.to_le_bytes());
        all
    }

    fn decode(all: &[u8; Self::BYTES]) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(all[at..at + 8].try_into().expect("8 bytes"));
        let lkey = Key(u32::from_le_bytes(all[..4].try_into().expect("4 bytes")));
        let local = Self { lkey, base: word(4), bytes: word(12) };
        local.base.checked_add(local.bytes).map(|_| local)
    }

    /// The bytes at `offset`; `None` if they extend beyond the end.
    fn part(&self, offset: u64, bytes: u32) -> Option<Sge> {
        let fits = offset <= self.bytes && u64::from(bytes) <= self.bytes - offset;
        fits.then(|| Sge { addr: self.base + offset, len: bytes, lkey: self.lkey })
    }
}

impl<N: LendingNic> Pool<N> {
    /// Lends all lanes but the first to the process that has mapped their queues: transfers are
    /// between chunks and `buffer`. Until [`Pool::take_back`], this process can transfer nothing on
    /// these lanes.
    ///
    /// No transfer should be in flight on these lanes; one that is ends with an error. The end of
    /// this process or of its pool ends the loan at the NIC.
    ///
    /// # Errors
    /// The lanes cannot be lent, or are lent.
    pub fn lend_lanes(&self, buffer: &Buffer<N>) -> Result<LentLanes, Error> {
        let inner = &*self.inner;
        let lendable = inner.lendable()?;
        let mut is_lent = lendable.is_lent.lock();
        if *is_lent {
            return Err(refused("they are lent already; take them back first"));
        }
        let mut paths = inner.lock_lent_paths();
        let qps = lent_qps(&paths);
        let cq = lendable.completer.cq();
        let LentQueues { state: queues, wake } = inner.nic.lend(cq, &qps)?;
        *is_lent = true;
        // The memory node may have executed transfers in flight that end as flushed here.
        paths.iter_mut().for_each(|path| path.state.advance(true));
        if let Err(error) = paths.iter_mut().try_for_each(|path| path.reconnect(&*inner.control)) {
            // No borrower has the state yet. If this fails too, the NIC is gone.
            *is_lent = inner.nic.take_back(cq, &qps).is_err();
            return Err(error);
        }
        let region = buffer.region();
        let bytes = buffer.len() as u64;
        let local = Local { lkey: region.key(), base: region.iova(), bytes };
        let state = [&local.encode()[..], &queues].concat();
        Ok(LentLanes { state, wake })
    }

    /// Takes the lent lanes back, for this process to use again. When this returns, no transfer of
    /// the borrower is in flight. Those that the borrower has not reported as finished may have
    /// been executed, in part, or not at all. Grants and their keys stay valid.
    ///
    /// Only after the borrower has ended (its process is known to be dead, not only silent), or has
    /// dropped its [`BorrowedLanes`]. Otherwise the NIC would also execute what the borrower posts
    /// later.
    ///
    /// # Errors
    /// The lanes are not lent, or the NIC or the memory node is gone.
    pub fn take_back(&self) -> Result<(), Error> {
        let inner = &*self.inner;
        let lendable = inner.lendable()?;
        let mut is_lent = lendable.is_lent.lock();
        if !*is_lent {
            return Err(refused("they are not lent"));
        }
        let mut paths = inner.lock_lent_paths();
        let qps = lent_qps(&paths);
        inner.nic.take_back(lendable.completer.cq(), &qps)?;
        *is_lent = false;
        paths.iter_mut().for_each(|path| path.state.advance(false));
        paths.iter_mut().try_for_each(|path| path.reconnect(&*inner.control))
    }

    /// True while the lanes are lent.
    pub fn is_lent(&self) -> bool {
        self.inner.lendable.as_ref().is_some_and(|lendable| *lendable.is_lent.lock())
    }

    /// Checks a transfer on a lane that can be lent, and returns it as numbers for the borrower.
    /// The grant must permit writing, because the borrower chooses the direction. The borrower does
    /// not check leases: the NIC refuses what it posts after their end.
    pub fn lent_transfer(&self, t: &Transfer<'_>, lane: Lane) -> Result<LaneTransfer, Error> {
        let inner = &*self.inner;
        inner.check(t.grant, Right::Write, "transfer", t.offset, t.len as usize)?;
        inner.check_one_sided("transfer")?;
        Ok(LaneTransfer {
            qp: inner.lent_index(t.grant.group.0, t.grant.function, lane)?,
            address: t.grant.addr + t.offset,
            rkey: t.grant.key(lane).0,
            offset: t.buffer_offset as u64,
            bytes: t.len,
        })
    }
}

impl<N: Nic> Inner<N> {
    fn lendable(&self) -> Result<&Lendable<N>, Error> {
        if self.shared {
            return Err(refused("the scheme sends its requests over access QPs"));
        }
        self.lendable.as_ref().ok_or_else(|| {
            refused("the pool was not connected for lending, or the memory node has one lane")
        })
    }

    /// Locks the virtual QPs that can be lent, by group, function and lane: no operation is posted
    /// on them, and no broken QP is re-established.
    fn lock_lent_paths(&self) -> Vec<LockedPath<'_, N>> {
        let all_but_first = |lane: &[Path<N>]| lane.len().min(1);
        let paths = self.groups.iter().flat_map(move |group| {
            let functions = group.paths.chunks(group.lanes() as usize);
            functions.flat_map(move |lanes| &lanes[all_but_first(lanes)..])
        });
        paths.map(LockedPath::lock).collect()
    }

    /// Position, in [`lent_qps`], of the active QP for a lane of a function.
    fn lent_index(&self, group: u16, function: u8, lane: Lane) -> Result<u16, Error> {
        let group = group as usize;
        let lanes = self.groups[group].lanes() as usize;
        let functions = self.groups[group].paths.len() / lanes;
        let (function, lane) = (function as usize % functions, lane.0 as usize % lanes);
        if lane == 0 {
            return Err(refused("the first lane is never lent"));
        }
        Ok(((group * functions + function) * (lanes - 1) + lane - 1) as u16)
    }
}

/// A virtual QP that is about to be lent or taken back.
struct LockedPath<'a, N: Nic> {
    path: &'a Path<N>,
    state: RwLockWriteGuard<'a, State>,
    _restoring: MutexGuard<'a, ()>,
}

impl<'a, N: Nic> LockedPath<'a, N> {
    fn lock(path: &'a Path<N>) -> Self {
        let restoring = path.restoring().lock();
        Self { path, state: path.state().write(), _restoring: restoring }
    }

    fn reconnect(&mut self, control: &dyn ControlPlane) -> Result<(), Error> {
        self.path.reconnect(&mut self.state, control)
    }
}

/// All QPs of these virtual QPs: first the active QP of each, which the borrower uses. The CQ is
/// lent only together with the spare QPs that complete to it.
fn lent_qps<N: Nic>(paths: &[LockedPath<'_, N>]) -> Vec<N::Qp> {
    let active = paths.iter().flat_map(|locked| locked.path.active_first(&locked.state).take(1));
    let spares = paths.iter().flat_map(|locked| locked.path.active_first(&locked.state).skip(1));
    active.chain(spares).map(|access_qp| access_qp.qp().clone()).collect()
}

fn refused(why: &str) -> Error {
    Error::Setting { setting: "lanes", value: "lent to another process".into(), why: why.into() }
}

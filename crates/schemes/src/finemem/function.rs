//! The memory node's resources in one function of its NIC. A function has a limited number of
//! windows. A pool that needs more uses several functions; each has the memory registered, and has
//! the windows of its part of the blocks (FineMem §4.3).
//!
//! ```text
//! function 0   PD, MR over all memory ◄── windows of blocks 0, 1, ...     access QPs of clients
//!              PD, metadata, management QPs
//! function 1   PD, MR over all memory ◄── windows of blocks share, ...    access QPs of clients
//! ```
//!
//! A key is looked up in the function of the QP that presents it, so each client has access QPs to
//! every function.

use scheme::{Error, NodeSettings, QPS_MAX};
use verbs::{Access, CqAttr, DeviceInfo, DmaMemory, Nic, QpAttr, QpChange, QueuePair, Receive};

use super::header::User;
use super::layout::Shape;
use super::release::Release;

/// Maximum number of windows that are rebound with one doorbell.
pub(super) const BATCH: usize = 64;
/// Building blocks of a UMR that binds a window.
pub(super) const BIND_BLOCKS: u32 = 3;

/// One function, with the windows of its blocks.
pub(super) struct Function<N: Nic> {
    pub nic: N,
    pub pd: N::Pd,
    /// The MR to which the windows of blocks are bound.
    pub memory: N::Mr,
    /// The MR that contains the words of the windows' guards.
    pub metadata: N::Mr,
    /// The QP to which binds are posted.
    pub binder: N::Qp,
    pub binds: N::Cq,
}

impl<N: Nic> Function<N> {
    /// Opens all `count` functions; the first one is `nic` itself.
    pub fn open_all(
        nic: &N,
        count: u32,
        (memory, metadata): (&DmaMemory, &DmaMemory),
    ) -> Result<Vec<Self>, Error> {
        let open = |index| match index {
            0 => Ok(nic.clone()),
            _ => nic.open_function(),
        };
        (0..count).map(|index| Self::new(open(index)?, (memory, metadata))).collect()
    }

    fn new(nic: N, (memory, metadata): (&DmaMemory, &DmaMemory)) -> Result<Self, Error> {
        let pd = nic.alloc_pd()?;
        let memory = nic.reg_mr(&pd, memory, Access::LOCAL_ALL)?;
        // In a PD that contains no QP.
        let metadata = nic.reg_mr(&nic.alloc_pd()?, metadata, Access::LOCAL_ALL)?;
        let binds = nic.create_cq(CqAttr { entries: 2 * BATCH as u32, ignore_overrun: false })?;
        let attr = QpAttr {
            send_cq: &binds,
            recv_cq: &binds,
            send_blocks: (BATCH as u32 * BIND_BLOCKS).next_power_of_two(),
            receive: Receive::None,
            access: Access::NONE,
        };
        let binder = nic.create_qp(&pd, attr)?;
        binder.connect(binder.qpn())?;
        Ok(Self { nic, pd, memory, metadata, binder, binds })
    }

    /// Creates a QP, to be connected, that serves a client's accesses to this function's windows.
    /// Guards compare `user`.
    pub fn create_access_qp(&self, user: Option<User>) -> Result<N::Qp, Error> {
        let attr = QpAttr {
            // The QP neither sends nor receives, so nothing completes in this CQ.
            send_cq: &self.binds,
            recv_cq: &self.binds,
            send_blocks: 0,
            receive: Receive::None,
            access: Access::REMOTE_ALL,
        };
        let qp = self.nic.create_qp(&self.pd, attr)?;
        if let Some(user) = user {
            qp.modify(QpChange::Tag { tag: user.raw() as u64 })?;
        }
        Ok(qp)
    }
}

/// Number of functions that the windows of all blocks need. If the NIC has too few, the error says
/// what to do.
pub(super) fn needed<N: Nic>(nic: &N, shape: Shape, settings: &NodeSettings) -> Result<u32, Error> {
    let device = nic.query_device()?;
    let each = Release::of(settings.scheme).windows();
    let functions_max = device.functions.clamp(1, (QPS_MAX / settings.lanes()).max(1));
    let share = left_for_blocks(&device, settings.clients_max) / each;
    if share > 0 && shape.entries().div_ceil(share) <= functions_max {
        return Ok(shape.entries().div_ceil(share));
    }
    Err(Error::Setting {
        setting: "chunk_bytes",
        value: shape.chunk_bytes.to_string(),
        why: format!(
            "{} chunks need {} memory windows, but this NIC has {functions_max} functions of {} \
             windows each, of which {} are left for blocks: {} in total; use larger chunks (twice \
             the size: half the windows), donate less memory, or serve with several memory nodes, \
             each on its own NIC",
            shape.chunks,
            shape.entries() as u64 * each as u64,
            device.windows.min(device.keys),
            share * each,
            (share * each) as u64 * functions_max as u64,
        ),
    })
}

/// Windows of a function that are left for blocks. Each client has one window over the metadata,
/// and regions also need keys.
fn left_for_blocks(device: &DeviceInfo, clients: u32) -> u32 {
    let keys = device.keys.saturating_sub(OTHER_KEYS);
    device.windows.saturating_sub(clients).min(keys)
}

/// Keys that a memory node needs besides those of blocks.
const OTHER_KEYS: u32 = 1 << 10;

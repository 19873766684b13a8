//! What the memory node has of one function of its NIC. A function has so many windows and no more; a pool that needs more
//! takes several, each of which has the memory registered and windows over its part of the blocks (FineMem §4.3).
//!
//! ```text
//! function 0   PD, MR over all memory ◄── windows of blocks 0, 1, ...     access QPs of all compute nodes
//!              PD, metadata, management QPs
//! function 1   PD, MR over all memory ◄── windows of blocks share, ...    access QPs of all compute nodes
//! ```
//!
//! A key is looked up in the function that the QP is of: each compute node has access QPs to every function.

use fabric::{
    Access, CqAttr, DeviceInfo, DmaMemory, Nic, PeerAddress, QpAttr, QpChange, QueuePair, Receive,
};

use super::header::User;
use super::keys::{BATCH, BIND_BLOCKS};
use super::layout::Shape;
use super::release::Release;
use crate::Error;
use crate::scheme::QPS_MAX;
use crate::settings::Settings;

/// A function with windows.
pub(super) struct Function<N: Nic> {
    pub nic: N,
    pub pd: N::Pd,
    /// Windows of blocks lie in it.
    pub memory: N::Mr,
    /// Guards of windows lie in it.
    pub metadata: N::Mr,
    /// Where binds are posted.
    pub binder: N::Qp,
    pub binds: N::Cq,
}

impl<N: Nic> Function<N> {
    /// All that a pool needs; the first is `nic` itself.
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
        // A PD that no QP is in.
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

    /// A QP that answers a compute node's accesses to this function's windows; `user` is what guards ask for.
    pub fn answer(&self, peer: PeerAddress, user: Option<User>) -> Result<N::Qp, Error> {
        let attr = QpAttr {
            // It sends nothing and receives nothing, so that nothing completes there.
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
        qp.connect(peer)?;
        Ok(qp)
    }
}

/// How many functions the windows of all blocks need; an error that says what to do if the NIC has not as many.
pub(super) fn needed<N: Nic>(nic: &N, shape: Shape, settings: &Settings) -> Result<u32, Error> {
    let device = nic.query_device()?;
    let each = Release::of(settings.scheme).windows();
    let most = device.functions.clamp(1, (QPS_MAX / settings.lanes()).max(1));
    let share = left_for_blocks(&device, settings.clients_max) / each;
    if share > 0 && shape.entries().div_ceil(share) <= most {
        return Ok(shape.entries().div_ceil(share));
    }
    Err(Error::Setting {
        setting: "chunk_bytes",
        value: shape.chunk_bytes.to_string(),
        why: format!(
            "{} chunks need {} memory windows, and this NIC has {most} functions of {} each, of which {} are left for \
             blocks: {} in all; take larger chunks (twice as large: half as many windows), donate less, or serve with \
             several memory nodes, each on a NIC of its own",
            shape.chunks,
            shape.entries() as u64 * each as u64,
            device.windows.min(device.keys),
            share * each,
            (share * each) as u64 * most as u64,
        ),
    })
}

/// Windows of a function that are left for blocks: each compute node has one over the metadata, and regions take keys.
fn left_for_blocks(device: &DeviceInfo, clients: u32) -> u32 {
    let keys = device.keys.saturating_sub(OTHER_KEYS);
    device.windows.saturating_sub(clients).min(keys)
}

/// Keys that a memory node has beside those of blocks.
const OTHER_KEYS: u32 = 1 << 10;

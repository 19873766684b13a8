//! Control verbs that change and describe objects.

use super::Engine;
use super::core::{Core, RDMA_BYTES_MAX};
use crate::engine::qp::Peer;
use crate::engine::queue::{CQ_ENTRIES_MAX, RECV_ENTRIES_WIDE_MAX, SEND_BLOCKS_MAX};
use crate::error::{Error, Object};
use crate::spec::{QpDescription, RegionChange};
use verbs::direct::{KeyInfo, Progress};
use verbs::wqe::MAX_SEGMENTS;
use verbs::{
    Access, AsyncEvent, Cqn, DeviceInfo, DmaMemory, FunctionId, Key, KeyIndex, PeerAddress,
    QpChange, QpInfo, QpState, Qpn, SrqInfo, Srqn,
};

impl Engine {
    // --- the function --------------------------------------------------------------------------

    /// Returns the limits of a function.
    pub fn query_device(&self, f: FunctionId) -> Result<DeviceInfo, Error> {
        let core = &self.core;
        let own = core
            .owners
            .functions
            .get(&f)
            .ok_or(Error::Unknown(Object::Function(f)))?
            .limits
            .clone();
        let nic = &core.limits;
        Ok(DeviceInfo {
            pds: own.pds.min(nic.pds),
            qps: own.qps.min(nic.qps),
            cqs: own.cqs.min(nic.cqs),
            srqs: own.srqs.min(nic.recvs),
            keys: own.keys.min(nic.keys),
            windows: own.windows.min(nic.windows).min(nic.keys),
            functions: own.functions.min(nic.owner_functions.saturating_sub(1)) + 1,
            registered_bytes: own.registered_bytes,
            ring_bytes: own.ring_bytes,
            send_blocks: SEND_BLOCKS_MAX,
            recv_entries: RECV_ENTRIES_WIDE_MAX,
            cq_entries: CQ_ENTRIES_MAX,
            sges: MAX_SEGMENTS as u32 - 2,
            rdma_bytes: RDMA_BYTES_MAX,
            send_bytes: nic.send_bytes_max,
        })
    }

    // --- keys ----------------------------------------------------------------------------------

    /// Changes a region (IBTA vol. 1, chapter 11, "reregister memory region") and returns its new
    /// key. The old key is invalid from now on. Rejected while windows are bound to the region, and
    /// if the region has an engine. As with [`Engine::reg_mr`], local read is always granted.
    pub fn rereg_mr(&mut self, f: FunctionId, key: Key, to: RegionChange) -> Result<Key, Error> {
        if let Some(pd) = to.pd {
            self.core.owners.pd(f, pd)?;
        }
        if let Some((memory, iova)) = &to.memory {
            check_region(memory, *iova)?;
        }
        let namespace = self.core.owners.function(f)?.namespace;
        let (old_pd, old_len) = self.core.keys[namespace].changeable_region(f, key)?;
        let new_len = to.memory.as_ref().map_or(old_len, |(m, _)| m.len() as u64);
        let function = self.core.owners.function(f)?;
        let bytes = (function.used.registered_bytes - old_len).saturating_add(new_len);
        if bytes > function.limits.registered_bytes {
            let limit = function.limits.registered_bytes;
            return Err(Error::Limit { what: "registered bytes of the function", limit });
        }
        function.used.registered_bytes = bytes;
        let new_pd = to.pd.unwrap_or(old_pd);
        let access = to.access.map(|a| a | Access::LOCAL_READ);
        let key = self.core.keys[namespace].reregister(key, RegionChange { access, ..to });
        self.core.owners.pd_mut(old_pd).users -= 1;
        self.core.owners.pd_mut(new_pd).users += 1;
        Ok(key)
    }

    /// Describes a key.
    pub fn query_key(&self, f: FunctionId, index: KeyIndex) -> Result<KeyInfo, Error> {
        let function = self.core.owners.functions.get(&f);
        let namespace = function.ok_or(Error::Unknown(Object::Function(f)))?.namespace;
        self.core.keys[namespace].describe(f, index)
    }

    // --- completion queues ---------------------------------------------------------------------

    /// Running number of the CQ's next completion, 24 bits.
    pub fn cq_count(&self, f: FunctionId, cqn: Cqn) -> Result<u32, Error> {
        Ok(self.core.queues.cq(f, cqn)?.count)
    }

    // --- shared receive queues -----------------------------------------------------------------

    /// Arms the limit of an SRQ for one event: [`AsyncEvent::SrqLimit`] is raised when a message
    /// leaves the SRQ with fewer receive WQEs than `limit`, or finds no receive WQE. 0 disarms the
    /// limit (IBTA vol. 1, chapter 11, "modify shared receive queue").
    pub fn modify_srq(&mut self, f: FunctionId, srqn: Srqn, limit: u32) -> Result<(), Error> {
        let entries = self.core.queues.srq(f, srqn)?.entries();
        if limit > entries {
            return Err(Error::Argument {
                what: "the limit of an SRQ",
                value: limit as u64,
                must: "at most the number of its entries",
            });
        }
        self.core.queues.recvs.get_mut(srqn.raw()).expect("looked up above").srq_limit = limit;
        Ok(())
    }

    /// Describes an SRQ.
    pub fn query_srq(&self, f: FunctionId, srqn: Srqn) -> Result<SrqInfo, Error> {
        let srq = self.core.queues.srq(f, srqn)?;
        Ok(SrqInfo {
            entries: srq.entries(),
            stride: srq.stride(),
            // The owner may post a larger index than the ring allows.
            posted: srq.credits().min(srq.entries()),
            limit: srq.srq_limit,
        })
    }

    // --- queue pairs ---------------------------------------------------------------------------

    /// Changes the state of a QP.
    pub fn modify_qp(&mut self, f: FunctionId, qpn: Qpn, change: QpChange) -> Result<(), Error> {
        self.core.queues.qp(f, qpn)?.next_state(change)?;
        match change {
            QpChange::Error => self.core.enter_error(qpn, None),
            QpChange::Reset => self.core.reset_qp(qpn),
            QpChange::Init => self.core.queues.qp_mut(qpn).state = QpState::Init,
            QpChange::ReadyToReceive { peer: PeerAddress::Remote(peer) } => {
                self.core.connect(f, qpn, peer)?;
            }
            QpChange::ReadyToReceive { peer: PeerAddress::Local(peer) } => {
                let qp = self.core.queues.qp_mut(qpn);
                qp.peer = Peer::Local(peer);
                qp.state = QpState::ReadyToReceive;
            }
            QpChange::ReadyToSend => {
                self.core.queues.qp_mut(qpn).state = QpState::ReadyToSend;
                self.core.queues.schedule(qpn);
            }
            QpChange::Access { access } => self.core.queues.qp_mut(qpn).access = access,
            QpChange::Tag { tag } => self.core.queues.qp_mut(qpn).tag = tag,
        }
        Ok(())
    }

    /// Describes a QP.
    pub fn query_qp(&self, f: FunctionId, qpn: Qpn) -> Result<QpDescription, Error> {
        let qp = self.core.queues.qp(f, qpn)?;
        let recv = qp.recv.and_then(|n| self.core.queues.recvs.get(n));
        Ok(QpDescription {
            info: QpInfo {
                state: qp.state,
                peer: match qp.peer {
                    Peer::None => Qpn::NONE,
                    Peer::Local(qpn) | Peer::Remote(qpn) => qpn,
                },
                access: qp.access,
                send_blocks: qp.send.as_ref().map_or(0, |s| s.blocks()),
                recv_entries: recv.filter(|_| !qp.recv_shared).map_or(0, |r| r.entries()),
            },
            progress: Progress {
                send_consumer: qp.send.as_ref().map_or(0, |s| s.consumer),
                send_limit: qp.send.as_ref().map_or(0, |s| s.limit),
                recv_consumer: recv.map_or(0, |r| r.consumer),
                recv_limit: recv.map_or(0, |r| r.limit()),
                executed: qp.executed,
            },
        })
    }
}

impl Core {
    /// Raises the event of an SRQ's limit if the limit is armed and fewer receive WQEs are left.
    #[cold]
    pub fn check_srq_limit(&mut self, n: u32) {
        let recv = self.queues.recvs.get_mut(n).expect("a receive queue in use exists");
        if recv.srq_limit == 0 || recv.credits() >= recv.srq_limit {
            return;
        }
        recv.srq_limit = 0;
        self.events.raise(recv.function, AsyncEvent::SrqLimit { srqn: Srqn::new(n) });
    }
}

/// Checks that `memory` can be a region whose first byte has address `iova`.
pub(super) fn check_region(memory: &DmaMemory, iova: u64) -> Result<(), Error> {
    let len = memory.len() as u64;
    if len == 0 || iova.checked_add(len).is_none() {
        return Err(Error::Argument {
            what: "the length of a region",
            value: len,
            must: "more than 0, and its last address below 2^64",
        });
    }
    if iova % 8 != memory.addr() % 8 {
        return Err(Error::Argument {
            what: "the I/O virtual address of a region",
            value: iova,
            must: "equal to its memory's address modulo 8, so that words are aligned in both",
        });
    }
    Ok(())
}

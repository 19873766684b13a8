//! Control verbs that create and destroy objects. `attributes.rs` has the verbs that change and
//! describe them.
//!
//! Every verb takes the calling function and accesses only objects of that function. A rejected
//! verb changes nothing.

use super::Engine;
use super::attributes::check_region;
use super::core::Core;
use super::owners::{Function, Pd, check_limit, table_error};
use super::qp_list::{InList, Links};
use crate::engine::qp::{Peer, Qp};
use crate::engine::queue::{CompletionQueue, RecvQueue, SendQueue};
use crate::error::{Error, Object};
use crate::key_namespaces::{KeyNamespaces, Namespace};
use crate::limits::FunctionLimits;
use crate::spec::{CqSpec, EngineRegion, GuardSpec, QpSpec, Recv, RecvSpec};
use std::collections::HashSet;
use verbs::{Access, Cqn, DmaMemory, FunctionId, Key, MwKind, Pdn, QpState, Qpn, Srqn};

impl Engine {
    // --- functions -----------------------------------------------------------------------------

    /// Adds a virtual function.
    pub fn add_function(&mut self, limits: FunctionLimits) -> Result<FunctionId, Error> {
        let core = &mut self.core;
        // `functions` also contains the physical function, which does not count.
        if core.owners.functions.len() > core.limits.functions as usize {
            let limit = core.limits.functions as u64;
            return Err(Error::Limit { what: "virtual functions", limit });
        }
        let id = FunctionId(core.owners.next_function);
        core.owners.next_function += 1;
        let function = Function::new(limits, core.queues.scheduler.add(), KeyNamespaces::FIRST);
        core.owners.functions.insert(id, function);
        Ok(id)
    }

    /// Opens a further function for `f`, with its own key table and only the NIC's limits. For an
    /// owner that needs more windows than one function has (FineMem §4.3).
    pub fn open_function(&mut self, f: FunctionId) -> Result<FunctionId, Error> {
        let nic_limit = self.core.limits.owner_functions.saturating_sub(1);
        let opener = self.core.owners.function(f)?;
        let limit = opener.limits.functions.min(nic_limit);
        check_limit("further functions of one owner", opener.used.functions, limit)?;
        let id = self.add_function(FunctionLimits { functions: 0, ..FunctionLimits::NONE })?;
        self.core.owners.function(f)?.used.functions += 1;
        let namespace = self.core.keys.add();
        let function = self.core.owners.function(id)?;
        (function.namespace, function.opener) = (namespace, Some(f));
        Ok(id)
    }

    /// Removes a virtual function and all its objects: first the keys, which end all access, then
    /// the queues, then the PDs. A QP of another function that was connected to one of its QPs goes
    /// to Error at its next request. An unknown function is ignored; the physical function cannot
    /// be removed.
    pub fn remove_function(&mut self, f: FunctionId) {
        if f == FunctionId::PHYSICAL {
            return;
        }
        let Some(function) = self.core.owners.functions.remove(&f) else { return };
        let core = &mut self.core;
        core.keys[function.namespace].remove_function(f, function.keys.into_iter());
        if function.namespace != KeyNamespaces::FIRST {
            core.keys.remove(function.namespace);
        }
        if let Some(opener) = function.opener.and_then(|f| core.owners.functions.get_mut(&f)) {
            opener.used.functions -= 1;
        }
        // Sorted, so that the order is the same in every run.
        let sorted = |numbers: HashSet<u32>| {
            let mut numbers = Vec::from_iter(numbers);
            numbers.sort_unstable();
            numbers
        };
        for n in sorted(function.qps) {
            core.remove_qp(Qpn::new(n));
        }
        for n in sorted(function.recvs) {
            core.queues.recvs.remove(n);
        }
        for n in sorted(function.cqs) {
            core.queues.cqs.remove(n);
        }
        for n in sorted(function.pds) {
            core.owners.pds.remove(n);
        }
        core.queues.scheduler.remove(function.sched_index);
    }

    // --- protection domains --------------------------------------------------------------------

    /// Creates a PD.
    pub fn alloc_pd(&mut self, f: FunctionId) -> Result<Pdn, Error> {
        let core = &mut self.core;
        let function =
            core.owners.functions.get_mut(&f).ok_or(Error::Unknown(Object::Function(f)))?;
        check_limit("PDs of the function", function.used.pds, function.limits.pds)?;
        let made = core.owners.pds.insert(|_| true, |_| Pd { function: f, users: 0 });
        let n = made.map_err(table_error("PDs of the NIC", core.owners.pds.capacity()))?;
        function.used.pds += 1;
        function.pds.insert(n);
        Ok(Pdn::new(n))
    }

    /// Destroys a PD that no object uses.
    pub fn dealloc_pd(&mut self, f: FunctionId, pd: Pdn) -> Result<(), Error> {
        let users = self.core.owners.pd(f, pd)?.users;
        reject_if_used(Object::Pd(pd), users, "keys and queues")?;
        self.core.owners.pds.remove(pd.raw());
        let function = self.core.owners.function(f)?;
        function.used.pds -= 1;
        function.pds.remove(&pd.raw());
        Ok(())
    }

    // --- keys ----------------------------------------------------------------------------------

    /// Registers all of `mem`. `iova` is the address of its first byte for the function's WQEs and
    /// its peers. Local read is always granted. In contrast to IBTA vol. 1, §10.6, remote write and
    /// atomics do not require local write: a region can be writable for peers only.
    ///
    /// The NIC keeps `mem` mapped until the region is destroyed.
    pub fn reg_mr(
        &mut self,
        f: FunctionId,
        pd: Pdn,
        mem: DmaMemory,
        iova: u64,
        access: Access,
    ) -> Result<Key, Error> {
        let (namespace, bytes) = self.room_for_region(f, pd, &mem, iova)?;
        let access = access | Access::LOCAL_READ;
        let key = self.core.keys[namespace].register(f, pd, mem, iova, access)?;
        self.core.owners.function(f)?.used.registered_bytes = bytes;
        self.core.owners.key_made(f, pd, key);
        Ok(key)
    }

    /// Registers memory behind an engine, which is dropped with the region or on an error. The
    /// first byte has address 0. Peers reach the region by READ and WRITE only. The region cannot
    /// be changed, and no window can be bound to it. Otherwise as [`Engine::reg_mr`].
    pub fn reg_engine_mr(&mut self, f: FunctionId, region: EngineRegion) -> Result<Key, Error> {
        let EngineRegion { pd, memory, access, engine } = region;
        let (namespace, bytes) = self.room_for_region(f, pd, &memory, 0)?;
        let (keys, access) = (&mut self.core.keys[namespace], access | Access::LOCAL_READ);
        let key = keys.register_with_engine(f, pd, memory, access, engine)?;
        self.core.owners.function(f)?.used.registered_bytes = bytes;
        self.core.owners.key_made(f, pd, key);
        Ok(key)
    }

    /// Checks that `f` may register `mem`. Returns its key namespace, and its registered bytes
    /// including `mem`.
    fn room_for_region(
        &mut self,
        f: FunctionId,
        pd: Pdn,
        mem: &DmaMemory,
        iova: u64,
    ) -> Result<(Namespace, u64), Error> {
        self.core.owners.pd(f, pd)?;
        check_region(mem, iova)?;
        let function = self.core.owners.function(f)?;
        let bytes = function.used.registered_bytes.saturating_add(mem.len() as u64);
        if bytes > function.limits.registered_bytes {
            let limit = function.limits.registered_bytes;
            return Err(Error::Limit { what: "registered bytes of the function", limit });
        }
        check_limit("keys of the function", function.used.keys, function.limits.keys)?;
        Ok((function.namespace, bytes))
    }

    /// Destroys a region. Rejected while windows are bound to it.
    pub fn dereg_mr(&mut self, f: FunctionId, key: Key) -> Result<(), Error> {
        let namespace = self.core.owners.function(f)?.namespace;
        let (pd, len) = self.core.keys[namespace].deregister(f, key)?;
        self.core.owners.function(f)?.used.registered_bytes -= len;
        self.core.owners.key_ended(f, pd, key);
        Ok(())
    }

    /// Creates a free memory window. The returned key has the current tag; binding changes the tag.
    pub fn alloc_mw(&mut self, f: FunctionId, pd: Pdn, kind: MwKind) -> Result<Key, Error> {
        let namespace = self.core.owners.namespace_for_window(f, pd, self.core.limits.windows)?;
        let key = self.core.keys[namespace].allocate_window(f, pd, kind)?;
        self.core.owners.window_made(f, pd, key);
        Ok(key)
    }

    /// Creates a free type-1 window that admits only QPs whose tag matches a guard word: see
    /// [`GuardSpec`]. The word's region cannot be destroyed or changed before the window is
    /// destroyed.
    pub fn alloc_guarded_mw(
        &mut self,
        f: FunctionId,
        pd: Pdn,
        guard: &GuardSpec,
    ) -> Result<Key, Error> {
        let namespace = self.core.owners.namespace_for_window(f, pd, self.core.limits.windows)?;
        let key = self.core.keys[namespace].allocate_guarded(f, pd, guard)?;
        self.core.owners.window_made(f, pd, key);
        Ok(key)
    }

    /// Destroys a window, bound or free. The tag of `key` is ignored, because every bind changes
    /// it.
    pub fn dealloc_mw(&mut self, f: FunctionId, key: Key) -> Result<(), Error> {
        let namespace = self.core.owners.function(f)?.namespace;
        let pd = self.core.keys[namespace].deallocate_window(f, key)?;
        self.core.owners.key_ended(f, pd, key);
        self.core.owners.function(f)?.used.windows -= 1;
        Ok(())
    }

    // --- completion queues ---------------------------------------------------------------------

    /// Creates a CQ. Its owner has filled the ring with invalid entries ([`verbs::cqe::clear`]):
    /// the NIC does not access the ring before the first completion, so the cost does not depend on
    /// its size.
    pub fn create_cq(&mut self, f: FunctionId, spec: CqSpec) -> Result<Cqn, Error> {
        let core = &mut self.core;
        let function =
            core.owners.functions.get_mut(&f).ok_or(Error::Unknown(Object::Function(f)))?;
        check_limit("CQs of the function", function.used.cqs, function.limits.cqs)?;
        let cq = CompletionQueue::new(f, function.sched_index, spec)?;
        let bytes = function.room_for_rings(cq.ring_bytes())?;
        let made = core.queues.cqs.insert(|_| true, |_| cq);
        let n = made.map_err(table_error("CQs of the NIC", core.queues.cqs.capacity()))?;
        function.used.cqs += 1;
        function.used.ring_bytes = bytes;
        function.cqs.insert(n);
        Ok(Cqn::new(n))
    }

    /// Destroys a CQ to which no QP completes. QPs that WAIT for it fail.
    pub fn destroy_cq(&mut self, f: FunctionId, cqn: Cqn) -> Result<(), Error> {
        let users = self.core.queues.cq(f, cqn)?.users;
        reject_if_used(Object::Cq(cqn), users, "send or receive queues")?;
        self.core.queues.wake_waiters(cqn);
        let cq = self.core.queues.cqs.remove(cqn.raw()).expect("looked up above");
        let function = self.core.owners.function(f)?;
        function.used.cqs -= 1;
        function.used.ring_bytes -= cq.ring_bytes();
        function.cqs.remove(&cqn.raw());
        Ok(())
    }

    // --- shared receive queues -----------------------------------------------------------------

    /// Creates an SRQ. The completions of its WQEs go to the receive CQ of the QP that used them.
    pub fn create_srq(&mut self, f: FunctionId, pd: Pdn, spec: RecvSpec) -> Result<Srqn, Error> {
        self.core.owners.pd(f, pd)?;
        let function = self.core.owners.function(f)?;
        check_limit("SRQs of the function", function.used.srqs, function.limits.srqs)?;
        let queue = RecvQueue::new(f, pd, spec, false, true)?;
        let bytes = function.room_for_rings(queue.ring_bytes())?;
        let n = self.core.queues.insert_recv(queue)?;
        let function = self.core.owners.function(f)?;
        function.used.srqs += 1;
        function.used.ring_bytes = bytes;
        function.recvs.insert(n);
        self.core.owners.pd_mut(pd).users += 1;
        Ok(Srqn::new(n))
    }

    /// Destroys an SRQ that no QP uses.
    pub fn destroy_srq(&mut self, f: FunctionId, srqn: Srqn) -> Result<(), Error> {
        let srq = self.core.queues.srq(f, srqn)?;
        let pd = srq.pd;
        reject_if_used(Object::Srq(srqn), srq.users, "QPs")?;
        let srq = self.core.queues.recvs.remove(srqn.raw()).expect("looked up above");
        let function = self.core.owners.function(f)?;
        function.used.srqs -= 1;
        function.used.ring_bytes -= srq.ring_bytes();
        function.recvs.remove(&srqn.raw());
        self.core.owners.pd_mut(pd).users -= 1;
        Ok(())
    }

    // --- queue pairs ---------------------------------------------------------------------------

    /// Creates a QP in Reset. Its number has not been used recently, and no window is bound to it.
    pub fn create_qp(&mut self, f: FunctionId, spec: QpSpec) -> Result<Qpn, Error> {
        self.core.owners.pd(f, spec.pd)?;
        self.core.queues.cq(f, spec.send_cq)?;
        self.core.queues.cq(f, spec.recv_cq)?;
        if spec.privileged && f != FunctionId::PHYSICAL {
            return Err(Error::NotPermitted { what: "a privileged QP", caller: f });
        }
        let function = self.core.owners.function(f)?;
        check_limit("QPs of the function", function.used.qps, function.limits.qps)?;
        let (sched_index, namespace) = (function.sched_index, function.namespace);
        let send = spec.send.map(SendQueue::new).transpose()?;
        let send_bytes = send.as_ref().map_or(0, SendQueue::ring_bytes);
        let (recv, recv_shared, bytes) = match spec.recv {
            Recv::None => (None, false, function.room_for_rings(send_bytes)?),
            Recv::Shared(srqn) => {
                let bytes = function.room_for_rings(send_bytes)?;
                self.core.queues.srq(f, srqn)?;
                (Some(srqn.raw()), true, bytes)
            }
            Recv::Own { spec: recv, managed } => {
                let queue = RecvQueue::new(f, spec.pd, recv, managed, false)?;
                let bytes = function.room_for_rings(send_bytes + queue.ring_bytes())?;
                (Some(self.core.queues.insert_recv(queue)?), false, bytes)
            }
        };
        let core = &mut self.core;
        let keys = &core.keys;
        let made = core.queues.qps.insert(
            |number| !keys.may_have_window(Qpn::new(number)),
            |number| Qp {
                qpn: Qpn::new(number),
                function: f,
                pd: spec.pd,
                namespace,
                privileged: spec.privileged,
                access: spec.access,
                tag: 0,
                state: QpState::Reset,
                peer: Peer::None,
                send,
                recv,
                recv_shared,
                send_cq: spec.send_cq,
                recv_cq: spec.recv_cq,
                executed: 0,
                sched_index,
                deficit: 0,
                in_list: InList::None,
                links: Links::NONE,
                flushing: false,
                reported: false,
                last_wqe_reported: false,
                partial: None,
                remote: None,
                taken_wqe: None,
            },
        );
        let number = match made {
            Ok(number) => number,
            Err(error) => {
                if let (Some(n), false) = (recv, recv_shared) {
                    core.queues.recvs.remove(n);
                }
                return Err(table_error("QPs of the NIC", core.queues.qps.capacity())(error));
            }
        };
        if let (Some(n), true) = (recv, recv_shared) {
            core.queues.recvs.get_mut(n).expect("looked up above").users += 1;
        }
        core.queues.cq_mut(spec.send_cq).users += 1;
        core.queues.cq_mut(spec.recv_cq).users += 1;
        core.owners.pd_mut(spec.pd).users += 1;
        let function = core.owners.function(f)?;
        function.used.qps += 1;
        function.used.ring_bytes = bytes;
        function.qps.insert(number);
        Ok(Qpn::new(number))
    }

    /// Destroys a QP. Outstanding work produces no completions. The peer goes to Error at its next
    /// request. Windows bound to the QP stay bound to its number, which no QP has.
    pub fn destroy_qp(&mut self, f: FunctionId, qpn: Qpn) -> Result<(), Error> {
        self.core.queues.qp(f, qpn)?;
        let bytes = self.core.remove_qp(qpn);
        let function = self.core.owners.function(f)?;
        function.used.qps -= 1;
        function.used.ring_bytes -= bytes;
        function.qps.remove(&qpn.raw());
        Ok(())
    }

    /// Lets the managed send queue of `qpn` execute its WQEs up to building-block index `limit`.
    /// Has the effect of SEND_EN, but is called by the CPU at set-up.
    pub fn enable_send(&mut self, f: FunctionId, qpn: Qpn, limit: u16) -> Result<(), Error> {
        self.core.queues.qp(f, qpn)?;
        match &mut self.core.queues.qp_mut(qpn).send {
            Some(send) if send.managed => send.limit = limit,
            _ => return Err(Error::NotManaged { qpn, queue: "send" }),
        }
        self.core.queues.schedule(qpn);
        Ok(())
    }

    /// Lets the managed receive queue of `qpn` use its WQEs up to index `limit`. Has the effect of
    /// RECV_EN, but is called by the CPU at set-up.
    pub fn enable_recv(&mut self, f: FunctionId, qpn: Qpn, limit: u16) -> Result<(), Error> {
        self.core.queues.qp(f, qpn)?;
        if !self.core.queues.enable_receive(qpn, limit as u32) {
            return Err(Error::NotManaged { qpn, queue: "receive" });
        }
        Ok(())
    }
}

impl Core {
    /// Destroys a QP and all references to it. Returns the bytes of its rings.
    fn remove_qp(&mut self, qpn: Qpn) -> u64 {
        self.queues.leave(qpn);
        self.disconnect(qpn);
        // A peer that waits for a receive WQE of this QP is woken and fails.
        let peer = self.queues.qp_mut(qpn).peer;
        self.queues.wake_peer(qpn);
        let qp = self.queues.qps.remove(qpn.raw()).expect("the QP was looked up above");
        // Disconnects the peer, which must not communicate with a later QP of the same number.
        if let Peer::Local(peer) = peer
            && let Some(peer) = self.queues.qps.get_mut(peer.raw())
            && peer.peer == Peer::Local(qpn)
        {
            peer.peer = Peer::None;
        }
        self.queues.cq_mut(qp.send_cq).users -= 1;
        self.queues.cq_mut(qp.recv_cq).users -= 1;
        self.owners.pd_mut(qp.pd).users -= 1;
        let sends = qp.send.as_ref().map_or(0, SendQueue::ring_bytes);
        let Some(n) = qp.recv else { return sends };
        if qp.recv_shared {
            self.queues.recvs.get_mut(n).expect("an SRQ in use exists").users -= 1;
            return sends;
        }
        sends + self.queues.recvs.remove(n).expect("a QP's own receive queue exists").ring_bytes()
    }

    pub(super) fn reset_qp(&mut self, qpn: Qpn) {
        self.queues.leave(qpn);
        self.queues.wake_peer(qpn);
        self.disconnect(qpn);
        let qp = self.queues.qp_mut(qpn);
        qp.drop_partial();
        qp.taken_wqe = None;
        qp.state = QpState::Reset;
        qp.peer = Peer::None;
        if let Some(send) = &mut qp.send {
            send.reset();
        }
        let (Some(n), shared) = (qp.recv, qp.recv_shared) else { return };
        if !shared {
            self.queues.recvs.get_mut(n).expect("a QP's own receive queue exists").reset();
        }
    }
}

fn reject_if_used(object: Object, users: u32, by: &'static str) -> Result<(), Error> {
    if users > 0 {
        return Err(Error::InUse { object, users, by });
    }
    Ok(())
}

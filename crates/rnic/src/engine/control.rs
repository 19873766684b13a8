//! Control verbs: objects are made and destroyed. `attributes.rs` changes and describes them.
//!
//! Every verb names the calling function and touches only objects of that function. A refused verb
//! changes nothing.

use super::attributes::check_region;
use super::lists::{Links, Place};
use super::{Core, Engine, Function, Pd};
use crate::error::{Error, Object};
use crate::ids::{Access, Cqn, FunctionId, Key, Pdn, Qpn, Srqn};
use crate::memory::DmaMemory;
use crate::qp::{Peer, Qp};
use crate::queue::{CompletionQueue, RecvQueue, SendQueue};
use crate::spaces::{KeySpaces, Space};
use crate::verbs::{CqSpec, FunctionLimits, GuardSpec, MwKind, QpSpec, QpState, Recv, RecvSpec};
use std::collections::HashSet;

impl Engine {
    // --- functions -----------------------------------------------------------------------------

    /// Adds a virtual function.
    pub fn add_function(&mut self, limits: FunctionLimits) -> Result<FunctionId, Error> {
        let core = &mut self.core;
        // The physical function is one of the map.
        if core.functions.len() > core.limits.functions as usize {
            let limit = core.limits.functions as u64;
            return Err(Error::Limit { what: "virtual functions", limit });
        }
        let id = FunctionId(core.next_function);
        core.next_function += 1;
        let function = Function::new(limits, core.shares.add(), KeySpaces::FIRST);
        core.functions.insert(id, function);
        Ok(id)
    }

    /// Opens a further function for `f`, with a key table of its own and no limits but the NIC's: what a NIC's owner
    /// does who needs more windows than a function has (FineMem §4.3).
    pub fn open_function(&mut self, f: FunctionId) -> Result<FunctionId, Error> {
        let most = self.core.limits.owner_functions.saturating_sub(1);
        let opener = self.core.function(f)?;
        let limit = opener.limits.functions.min(most);
        admit("further functions of one owner", opener.used.functions, limit)?;
        let id = self.add_function(FunctionLimits { functions: 0, ..FunctionLimits::NONE })?;
        self.core.function(f)?.used.functions += 1;
        let space = self.core.keys.add();
        let function = self.core.function(id)?;
        (function.space, function.opener) = (space, Some(f));
        Ok(id)
    }

    /// Removes a virtual function with all that it owns: its keys are dead first, then its queues go,
    /// then its PDs. QPs of others that were connected to its QPs go to Error when they next talk to
    /// them. An unknown function is ignored; the physical one stays.
    pub fn remove_function(&mut self, f: FunctionId) {
        if f == FunctionId::PHYSICAL {
            return;
        }
        let Some(function) = self.core.functions.remove(&f) else { return };
        let core = &mut self.core;
        core.keys[function.space].remove_function(f, function.keys.into_iter());
        if function.space != KeySpaces::FIRST {
            core.keys.remove(function.space);
        }
        if let Some(opener) = function.opener.and_then(|f| core.functions.get_mut(&f)) {
            opener.used.functions -= 1;
        }
        // In an order that is the same in every run.
        let sorted = |numbers: HashSet<u32>| {
            let mut numbers = Vec::from_iter(numbers);
            numbers.sort_unstable();
            numbers
        };
        for n in sorted(function.qps) {
            core.remove_qp(Qpn::new(n));
        }
        for n in sorted(function.recvs) {
            core.recvs.remove(n);
        }
        for n in sorted(function.cqs) {
            core.cqs.remove(n);
        }
        for n in sorted(function.pds) {
            core.pds.remove(n);
        }
        core.shares.remove(function.share);
    }

    // --- protection domains --------------------------------------------------------------------

    /// Makes a PD.
    pub fn alloc_pd(&mut self, f: FunctionId) -> Result<Pdn, Error> {
        let core = &mut self.core;
        let function = core.functions.get_mut(&f).ok_or(Error::Unknown(Object::Function(f)))?;
        admit("PDs of the function", function.used.pds, function.limits.pds)?;
        let made = core.pds.insert(|_| true, |_| Pd { function: f, users: 0 });
        let n = made.ok_or(full("PDs of the NIC", core.pds.capacity()))?;
        function.used.pds += 1;
        function.pds.insert(n);
        Ok(Pdn::new(n))
    }

    /// Ends a PD that nothing uses.
    pub fn dealloc_pd(&mut self, f: FunctionId, pd: Pdn) -> Result<(), Error> {
        let users = self.core.pd(f, pd)?.users;
        refuse_used(Object::Pd(pd), users, "keys and queues")?;
        self.core.pds.remove(pd.raw());
        let function = self.core.function(f)?;
        function.used.pds -= 1;
        function.pds.remove(&pd.raw());
        Ok(())
    }

    // --- keys ----------------------------------------------------------------------------------

    /// Registers all of `mem`; `iova` is the address of its first byte as its owner names it. Local
    /// read is always granted. Remote write and atomics do not need local write here, as they do in
    /// IBTA vol. 1, §10.6: a region can be writable for peers alone.
    ///
    /// The NIC keeps `mem` mapped until the region ends.
    pub fn reg_mr(
        &mut self,
        f: FunctionId,
        pd: Pdn,
        mem: DmaMemory,
        iova: u64,
        access: Access,
    ) -> Result<Key, Error> {
        self.core.pd(f, pd)?;
        check_region(&mem, iova)?;
        let len = mem.len() as u64;
        let function = self.core.function(f)?;
        let bytes = function.used.registered_bytes.saturating_add(len);
        if bytes > function.limits.registered_bytes {
            let limit = function.limits.registered_bytes;
            return Err(Error::Limit { what: "registered bytes of the function", limit });
        }
        admit("keys of the function", function.used.keys, function.limits.keys)?;
        let space = function.space;
        let access = access | Access::LOCAL_READ;
        let key = self.core.keys[space].register(f, pd, mem, iova, access)?;
        self.core.function(f)?.used.registered_bytes = bytes;
        self.core.key_made(f, pd, key);
        Ok(key)
    }

    /// Ends a region. Refused while windows are bound to it.
    pub fn dereg_mr(&mut self, f: FunctionId, key: Key) -> Result<(), Error> {
        let space = self.core.function(f)?.space;
        let (pd, len) = self.core.keys[space].deregister(f, key)?;
        self.core.function(f)?.used.registered_bytes -= len;
        self.core.key_ended(f, pd, key);
        Ok(())
    }

    /// Makes a memory window, free. The key's tag is the current one; binding changes it.
    pub fn alloc_mw(&mut self, f: FunctionId, pd: Pdn, kind: MwKind) -> Result<Key, Error> {
        let space = self.core.room_for_window(f, pd)?;
        let key = self.core.keys[space].allocate_window(f, pd, kind)?;
        self.core.window_made(f, pd, key);
        Ok(key)
    }

    /// Makes a type-1 window, free, that is used only through QPs whose tag fits a word of memory: see
    /// [`GuardSpec`]. The word's region cannot end or change before the window does.
    pub fn alloc_guarded_mw(
        &mut self,
        f: FunctionId,
        pd: Pdn,
        guard: &GuardSpec,
    ) -> Result<Key, Error> {
        let space = self.core.room_for_window(f, pd)?;
        let key = self.core.keys[space].allocate_guarded(f, pd, guard)?;
        self.core.window_made(f, pd, key);
        Ok(key)
    }

    /// Ends a window, bound or free. Only the index of `key` counts: its tag has changed with every
    /// bind.
    pub fn dealloc_mw(&mut self, f: FunctionId, key: Key) -> Result<(), Error> {
        let space = self.core.function(f)?.space;
        let pd = self.core.keys[space].deallocate_window(f, key)?;
        self.core.key_ended(f, pd, key);
        self.core.function(f)?.used.windows -= 1;
        Ok(())
    }

    // --- completion queues ---------------------------------------------------------------------

    /// Makes a CQ. Its owner has filled the ring with invalid entries ([`crate::cqe::clear`]): the NIC does
    /// not touch it before the first completion, however large it is.
    pub fn create_cq(&mut self, f: FunctionId, spec: CqSpec) -> Result<Cqn, Error> {
        let core = &mut self.core;
        let function = core.functions.get_mut(&f).ok_or(Error::Unknown(Object::Function(f)))?;
        admit("CQs of the function", function.used.cqs, function.limits.cqs)?;
        let cq = CompletionQueue::new(f, function.share, spec)?;
        let bytes = function.room_for_rings(cq.ring_bytes())?;
        let made = core.cqs.insert(|_| true, |_| cq);
        let n = made.ok_or(full("CQs of the NIC", core.cqs.capacity()))?;
        function.used.cqs += 1;
        function.used.ring_bytes = bytes;
        function.cqs.insert(n);
        Ok(Cqn::new(n))
    }

    /// Ends a CQ that no QP completes to. QPs that WAIT for it fail.
    pub fn destroy_cq(&mut self, f: FunctionId, cqn: Cqn) -> Result<(), Error> {
        let users = self.core.cq(f, cqn)?.users;
        refuse_used(Object::Cq(cqn), users, "send or receive queues")?;
        self.core.wake_waiters(cqn);
        let cq = self.core.cqs.remove(cqn.raw()).expect("just seen");
        let function = self.core.function(f)?;
        function.used.cqs -= 1;
        function.used.ring_bytes -= cq.ring_bytes();
        function.cqs.remove(&cqn.raw());
        Ok(())
    }

    // --- shared receive queues -----------------------------------------------------------------

    /// Makes an SRQ. Completions of its WQEs go to the receive CQ of the QP that used them.
    pub fn create_srq(&mut self, f: FunctionId, pd: Pdn, spec: RecvSpec) -> Result<Srqn, Error> {
        self.core.pd(f, pd)?;
        let function = self.core.function(f)?;
        admit("SRQs of the function", function.used.srqs, function.limits.srqs)?;
        let queue = RecvQueue::new(f, pd, spec, false, true)?;
        let bytes = function.room_for_rings(queue.ring_bytes())?;
        let n = self.core.insert_recv(queue)?;
        let function = self.core.function(f)?;
        function.used.srqs += 1;
        function.used.ring_bytes = bytes;
        function.recvs.insert(n);
        self.core.pd_mut(pd).users += 1;
        Ok(Srqn::new(n))
    }

    /// Ends an SRQ that no QP uses.
    pub fn destroy_srq(&mut self, f: FunctionId, srqn: Srqn) -> Result<(), Error> {
        let srq = self.core.srq(f, srqn)?;
        let pd = srq.pd;
        refuse_used(Object::Srq(srqn), srq.users, "QPs")?;
        let srq = self.core.recvs.remove(srqn.raw()).expect("just seen");
        let function = self.core.function(f)?;
        function.used.srqs -= 1;
        function.used.ring_bytes -= srq.ring_bytes();
        function.recvs.remove(&srqn.raw());
        self.core.pd_mut(pd).users -= 1;
        Ok(())
    }

    // --- queue pairs ---------------------------------------------------------------------------

    /// Makes a QP, in Reset. Its number has not been in use for long, and no window is bound to it.
    pub fn create_qp(&mut self, f: FunctionId, spec: QpSpec) -> Result<Qpn, Error> {
        self.core.pd(f, spec.pd)?;
        self.core.cq(f, spec.send_cq)?;
        self.core.cq(f, spec.recv_cq)?;
        if spec.privileged && f != FunctionId::PHYSICAL {
            return Err(Error::NotPermitted { what: "a privileged QP", caller: f });
        }
        let function = self.core.function(f)?;
        admit("QPs of the function", function.used.qps, function.limits.qps)?;
        let (share, space) = (function.share, function.space);
        let send = spec.send.map(SendQueue::new).transpose()?;
        let send_bytes = send.as_ref().map_or(0, SendQueue::ring_bytes);
        let (recv, recv_shared, bytes) = match spec.recv {
            Recv::None => (None, false, function.room_for_rings(send_bytes)?),
            Recv::Shared(srqn) => {
                let bytes = function.room_for_rings(send_bytes)?;
                self.core.srq(f, srqn)?;
                (Some(srqn.raw()), true, bytes)
            }
            Recv::Own { spec: recv, managed } => {
                let queue = RecvQueue::new(f, spec.pd, recv, managed, false)?;
                let bytes = function.room_for_rings(send_bytes + queue.ring_bytes())?;
                (Some(self.core.insert_recv(queue)?), false, bytes)
            }
        };
        let core = &mut self.core;
        let keys = &core.keys;
        let made = core.qps.insert(
            |number| !keys.may_name(Qpn::new(number)),
            |number| Qp {
                qpn: Qpn::new(number),
                function: f,
                pd: spec.pd,
                space,
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
                share,
                left: 0,
                place: Place::Nowhere,
                links: Links::NONE,
                flushing: false,
                reported: false,
                last_reported: false,
                long: None,
                remote: None,
                taken: None,
            },
        );
        let Some(number) = made else {
            if let (Some(n), false) = (recv, recv_shared) {
                core.recvs.remove(n);
            }
            return Err(full("QPs of the NIC", core.qps.capacity()));
        };
        if let (Some(n), true) = (recv, recv_shared) {
            core.recvs.get_mut(n).expect("just seen").users += 1;
        }
        core.cq_mut(spec.send_cq).users += 1;
        core.cq_mut(spec.recv_cq).users += 1;
        core.pd_mut(spec.pd).users += 1;
        let function = core.function(f)?;
        function.used.qps += 1;
        function.used.ring_bytes = bytes;
        function.qps.insert(number);
        Ok(Qpn::new(number))
    }

    /// Ends a QP. What was outstanding gives no completions. Its peer goes to Error when it next
    /// talks to it. Windows that are bound to it stay bound, to a number that nobody has.
    pub fn destroy_qp(&mut self, f: FunctionId, qpn: Qpn) -> Result<(), Error> {
        self.core.qp(f, qpn)?;
        let bytes = self.core.remove_qp(qpn);
        let function = self.core.function(f)?;
        function.used.qps -= 1;
        function.used.ring_bytes -= bytes;
        function.qps.remove(&qpn.raw());
        Ok(())
    }

    /// Does from the CPU, at set-up, what SEND_EN does: the managed send queue of `qpn` may execute
    /// its WQEs up to building-block index `limit`.
    pub fn enable_send(&mut self, f: FunctionId, qpn: Qpn, limit: u16) -> Result<(), Error> {
        self.core.qp(f, qpn)?;
        match &mut self.core.qp_mut(qpn).send {
            Some(send) if send.managed => send.limit = limit,
            _ => return Err(Error::NotManaged { qpn, queue: "send" }),
        }
        self.core.schedule(qpn);
        Ok(())
    }

    /// Does from the CPU, at set-up, what RECV_EN does: the managed receive queue of `qpn` may use
    /// its WQEs up to index `limit`.
    pub fn enable_recv(&mut self, f: FunctionId, qpn: Qpn, limit: u16) -> Result<(), Error> {
        self.core.qp(f, qpn)?;
        if !self.core.enable_receive(qpn, limit as u32) {
            return Err(Error::NotManaged { qpn, queue: "receive" });
        }
        Ok(())
    }
}

impl Function {
    /// Bytes of its rings with `more`, if it may have them.
    pub(super) fn room_for_rings(&self, more: u64) -> Result<u64, Error> {
        let limit = self.limits.ring_bytes;
        let bytes = self.used.ring_bytes.saturating_add(more);
        if bytes > limit {
            return Err(Error::Limit { what: "bytes of rings of the function", limit });
        }
        Ok(bytes)
    }
}

impl Core {
    pub(super) fn function(&mut self, f: FunctionId) -> Result<&mut Function, Error> {
        self.functions.get_mut(&f).ok_or(Error::Unknown(Object::Function(f)))
    }

    pub(super) fn pd(&self, f: FunctionId, pd: Pdn) -> Result<&Pd, Error> {
        owned(self.pds.get(pd.raw()), |p| p.function, f, Object::Pd(pd))
    }

    pub(super) fn pd_mut(&mut self, pd: Pdn) -> &mut Pd {
        self.pds.get_mut(pd.raw()).expect("a PD in use lives")
    }

    pub(super) fn cq(&self, f: FunctionId, cqn: Cqn) -> Result<&CompletionQueue, Error> {
        owned(self.cqs.get(cqn.raw()), |c| c.function, f, Object::Cq(cqn))
    }

    pub(super) fn cq_mut(&mut self, cqn: Cqn) -> &mut CompletionQueue {
        self.cqs.get_mut(cqn.raw()).expect("a CQ in use lives")
    }

    pub(super) fn srq(&self, f: FunctionId, srqn: Srqn) -> Result<&RecvQueue, Error> {
        let shared = self.recvs.get(srqn.raw()).filter(|r| r.shared);
        owned(shared, |r| r.function, f, Object::Srq(srqn))
    }

    pub(super) fn qp(&self, f: FunctionId, qpn: Qpn) -> Result<&Qp, Error> {
        owned(self.qps.get(qpn.raw()), |q| q.function, f, Object::Qp(qpn))
    }

    pub(super) fn qp_mut(&mut self, qpn: Qpn) -> &mut Qp {
        self.qps.get_mut(qpn.raw()).expect("the QP was just seen")
    }

    fn insert_recv(&mut self, queue: RecvQueue) -> Result<u32, Error> {
        let made = self.recvs.insert(|_| true, |_| queue);
        made.ok_or(full("receive queues of the NIC", self.recvs.capacity()))
    }

    /// The space where a function may have one more window.
    fn room_for_window(&mut self, f: FunctionId, pd: Pdn) -> Result<Space, Error> {
        self.pd(f, pd)?;
        let most = self.limits.windows;
        let Function { limits, used, space, .. } = self.function(f)?;
        admit("keys of the function", used.keys, limits.keys)?;
        admit("windows of the function", used.windows, limits.windows.min(most))?;
        Ok(*space)
    }

    fn window_made(&mut self, f: FunctionId, pd: Pdn, key: Key) {
        self.key_made(f, pd, key);
        self.functions.get_mut(&f).expect("the caller lives").used.windows += 1;
    }

    pub(super) fn key_made(&mut self, f: FunctionId, pd: Pdn, key: Key) {
        self.pd_mut(pd).users += 1;
        let function = self.functions.get_mut(&f).expect("the caller lives");
        function.used.keys += 1;
        function.keys.insert(key.index());
    }

    fn key_ended(&mut self, f: FunctionId, pd: Pdn, key: Key) {
        self.pd_mut(pd).users -= 1;
        let function = self.functions.get_mut(&f).expect("the caller lives");
        function.used.keys -= 1;
        function.keys.remove(&key.index());
    }

    /// Takes a QP out of everything that knows it. Gives the bytes of its rings.
    fn remove_qp(&mut self, qpn: Qpn) -> u64 {
        self.leave(qpn);
        self.disconnect(qpn);
        // Who waits for a receive of this QP finds nobody at the other end.
        let peer = self.qp_mut(qpn).peer;
        self.wake_peer(qpn);
        let qp = self.qps.remove(qpn.raw()).expect("the QP was just seen");
        // Nobody who comes to have this number is taken for the QP that had it.
        if let Peer::Local(peer) = peer
            && let Some(peer) = self.qps.get_mut(peer.raw())
            && peer.peer == Peer::Local(qpn)
        {
            peer.peer = Peer::None;
        }
        self.cq_mut(qp.send_cq).users -= 1;
        self.cq_mut(qp.recv_cq).users -= 1;
        self.pd_mut(qp.pd).users -= 1;
        let sends = qp.send.as_ref().map_or(0, SendQueue::ring_bytes);
        let Some(n) = qp.recv else { return sends };
        if qp.recv_shared {
            self.recvs.get_mut(n).expect("an SRQ in use lives").users -= 1;
            return sends;
        }
        sends + self.recvs.remove(n).expect("a QP's own receive queue lives").ring_bytes()
    }

    pub(super) fn reset_qp(&mut self, qpn: Qpn) {
        self.leave(qpn);
        self.wake_peer(qpn);
        self.disconnect(qpn);
        let qp = self.qp_mut(qpn);
        qp.abandon();
        qp.taken = None;
        qp.state = QpState::Reset;
        qp.peer = Peer::None;
        if let Some(send) = &mut qp.send {
            send.reset();
        }
        let (Some(n), shared) = (qp.recv, qp.recv_shared) else { return };
        if !shared {
            self.recvs.get_mut(n).expect("a QP's own receive queue lives").reset();
        }
    }
}

fn owned<T>(
    found: Option<&T>,
    function: impl Fn(&T) -> FunctionId,
    caller: FunctionId,
    object: Object,
) -> Result<&T, Error> {
    let found = found.ok_or(Error::Unknown(object))?;
    if function(found) != caller {
        return Err(Error::Foreign { object, caller });
    }
    Ok(found)
}

fn admit(what: &'static str, used: u32, limit: u32) -> Result<(), Error> {
    if used >= limit {
        return Err(Error::Limit { what, limit: limit as u64 });
    }
    Ok(())
}

fn full(what: &'static str, limit: u32) -> Error {
    Error::Limit { what, limit: limit as u64 }
}

fn refuse_used(object: Object, users: u32, by: &'static str) -> Result<(), Error> {
    if users > 0 {
        return Err(Error::InUse { object, users, by });
    }
    Ok(())
}

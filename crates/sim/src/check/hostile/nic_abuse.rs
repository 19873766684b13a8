//! Misuse of the NIC: binding windows, and waiting for and enabling queues, in ways reserved to
//! their owners.

use verbs::direct::{DirectNic, DirectQp, Managed};
use verbs::wqe::{Builder, Umr};
use verbs::{
    Access, CompletionKind, CompletionQueue, CqAttr, Cqn, Key, MemoryRegion, MemoryWindow, Nic, Op,
    QpAttr, QpState, Qpn, QueuePair, Receive, Remote, Status,
};

use scheme::Grant;
use schemes::tdmem::Region;

use super::{Hostile, SCRATCH, Side, to};
use crate::check::invariant::Invariant;

/// Range below the client's own numbers from which a foreign number is chosen.
const NEAR: u64 = 48;

impl Hostile {
    /// Binds windows of the client in ways reserved to the NIC's owner.
    pub(super) fn windows(&mut self) {
        let Ok(window) = self.nic.alloc_mw(&self.pd) else { return };
        let own = self.access[0][0].qp.qpn();
        let others = Qpn::new(self.terms.groups[0][0]);
        let bind = |qpn: Qpn| {
            let key = window.key();
            let (mr, start) = (self.memory.key(), self.memory.remote(0).addr);
            Umr::bind(key, key.tag().wrapping_add(1), qpn, Access::REMOTE_READ, mr, start, 64)
        };
        let (foreign, proper) = (bind(others), bind(own));
        let bound = Key::new(window.key().index(), window.key().tag().wrapping_add(1));
        if self.access(0, 0, Op::Window(&foreign)) {
            self.cx.with_oracle(|o| {
                o.wrong(Invariant::Privilege, "a client's window is bound to another client's QP")
            });
        }
        if self.access(0, 0, Op::Window(&proper))
            && self.access(0, 0, Op::Window(&Umr::unbind(bound, false)))
        {
            self.cx.with_oracle(|o| {
                o.wrong(Invariant::Privilege, "a client unbinds without the QP check")
            });
        }
    }

    /// Performs an operation that the NIC must refuse, or whose effects must stay within the
    /// client.
    pub(super) fn abuse_nic(&mut self) {
        match self.nic_random.as_mut().expect("adversarial NIC operations are enabled").below(8) {
            // The service's queues belong to the client's function too.
            0..=3 if self.service.is_some() => self.use_old_key_of_own_chunk(),
            0 | 1 => self.control(Control::Wait),
            2 | 3 => self.control(Control::Enable),
            4 => self.overwrite_itself(),
            5 | 6 if self.cx.case.has_engine() => self.round_on_engine(),
            5 | 6 if self.cx.case.has_leases() => self.round_on_leases(),
            5 | 6 if self.cx.case.is_paged() => self.read_while_it_is_freed(),
            5 | 6 => self.use_old_key_of_own_chunk(),
            _ => self.access_one_byte_beyond(),
        }
    }

    /// Returns the number of requests to send immediately before leaving.
    pub(super) fn final_request_count(&mut self) -> u64 {
        if self.nic_random.is_some() && self.service.is_none() { self.below(12) } else { 0 }
    }

    /// Sends a well-formed request.
    pub(super) fn send_any_request(&mut self) {
        if self.cx.case.has_engine() {
            if let Ok(region) = Region::of(&self.terms) {
                self.post_any_command(&region);
            }
            return;
        }
        if self.cx.case.has_leases() {
            return self.post_any_ask();
        }
        let number = self.below(9) as u32;
        let which = self.below(self.kinds() as u64) as usize;
        let data = match (self.cx.case.is_paged(), self.below(2)) {
            (true, _) => self.any_request(which, number),
            (false, 0) if which == self.free_side() => {
                let target = self.memory.remote(which * 128);
                self.free_request(number, target)
            }
            (false, _) if which == 0 => {
                self.cx.with_oracle(|o| o.requests_chunk(self.cx.client));
                let target = self.memory.remote(0);
                self.allocate_request(&[], target)
            }
            _ => return,
        };
        self.send(which, &data);
    }

    fn below(&mut self, below: u64) -> u64 {
        self.nic_random.as_mut().expect("adversarial NIC operations are enabled").below(below)
    }

    /// Creates a managed queue, whose WQEs the client writes itself.
    fn managed(&self) -> Option<Side> {
        let cq = self.nic.create_cq(CqAttr { entries: 16, ignore_overrun: false }).ok()?;
        let attr = QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: 16,
            receive: Receive::None,
            access: Access::REMOTE_READ,
        };
        let managed = Managed { send: true, ..Managed::default() };
        let qp = self.nic.create_managed_qp(&self.pd, attr, managed).ok()?;
        qp.connect(qp.qpn()).ok()?;
        Some(Side { qp, cq })
    }

    /// Posts a WAIT for a foreign CQ or a SEND_EN for a foreign queue, which must fail.
    fn control(&mut self, what: Control) {
        let Some(side) = self.managed() else { return };
        let sides = || self.management.iter().chain(self.access.iter().flatten());
        let mut b = Builder::new(side.qp.qpn(), 0);
        let named = match what {
            Control::Wait => {
                let own: Vec<u32> = sides().map(|s| s.cq.cqn().raw()).collect();
                let own_number = side.cq.cqn().raw();
                let Some(cqn) = self.near(own_number, &own) else { return };
                b.wait(Cqn::new(cqn), 0).signaled();
                format!("waits for CQ {cqn}")
            }
            Control::Enable => {
                let own: Vec<u32> = sides().map(|s| s.qp.qpn().raw()).collect();
                let own_number = side.qp.qpn().raw();
                let Some(qpn) = self.near(own_number, &own) else { return };
                b.send_enable(Qpn::new(qpn), 1).signaled();
                format!("enables QP {qpn}")
            }
        };
        side.qp.send_ring().memory.write(0, b.bytes());
        if side.qp.enable_send(b.blocks() as u16).is_err() {
            return;
        }
        let is_refused = || match self.next(&side.cq, CompletionKind::Send) {
            Some(status) => status != Status::Success,
            None => matches!(side.qp.state(), Ok(QpState::Error)),
        };
        // A pause of the client may take up the time of the first wait (seed 57401 of patronus-mr).
        if !is_refused() && !is_refused() {
            let name = self.cx.with_oracle(|o| o.name(self.cx.client).to_owned());
            let why = format!("{name} {named}, which is not its own");
            self.cx.with_oracle(|o| o.wrong(Invariant::Privilege, why));
        }
    }

    /// Returns a number below `own_number` that is not in `own`.
    fn near(&mut self, own_number: u32, own: &[u32]) -> Option<u32> {
        let number = own_number.checked_sub(1 + self.below(NEAR) as u32)?;
        (!own.contains(&number)).then_some(number)
    }

    /// Executes a WQE that overwrites itself with a WQE that would not complete. It must complete
    /// as fetched.
    fn overwrite_itself(&mut self) {
        let Some(side) = self.managed() else { return };
        let ring = side.qp.send_ring().memory;
        let Ok(ring) = self.nic.reg_mr(&self.pd, &ring, Access::LOCAL_WRITE) else { return };
        let rights = Access::LOCAL_WRITE | Access::REMOTE_READ;
        let Ok(memory) = self.nic.alloc_dma(64) else { return };
        let Ok(source) = self.nic.reg_mr(&self.pd, &memory, rights) else { return };
        let mut other = Builder::new(side.qp.qpn(), 0);
        other.nop();
        source.memory().write(0, other.bytes());
        let mut b = Builder::new(side.qp.qpn(), 0);
        let from = Remote { addr: source.remote(0).addr, rkey: source.key() };
        b.rdma_read(from, &[ring.sge(0, other.bytes().len() as u32)]).signaled();
        ring.memory().write(0, b.bytes());
        if side.qp.enable_send(b.blocks() as u16).is_err() {
            return;
        }
        let ends = || self.next(&side.cq, CompletionKind::Send).is_some();
        if !ends() && !ends() && side.cq.poll(&mut [verbs::Completion::EMPTY]) == 0 {
            let name = self.cx.with_oracle(|o| o.name(self.cx.client).to_owned());
            let why = format!(
                "{name} overwrites its own WQE during execution, and the WQE does not complete"
            );
            self.cx.with_oracle(|o| o.wrong(Invariant::Answers, why));
        }
    }

    /// Uses an old key of a chunk that the client has been granted again under a new key.
    fn use_old_key_of_own_chunk(&mut self) {
        while self.held.len() < 2 {
            let before = self.held.len();
            self.allocate(&[]);
            if self.out || self.held.len() == before {
                return;
            }
        }
        self.free_own();
        self.allocate(&[]);
        let (held, lane) = (self.held.clone(), self.below(self.cx.lanes as u64) as usize);
        let again =
            |old: &&Grant| held.iter().any(|g| g.entry == old.entry && g.keys() != old.keys());
        let Some(old) = self.had.iter().rev().find(again).copied() else { return };
        let data = [0xbb; 8];
        let op = Op::WriteInline { to: to(&old, lane, 0), data: &data };
        self.access(0, self.qp_index(&old, lane), op);
    }

    /// Reads 8 bytes of which the last or the first lies outside the client's chunk.
    fn access_one_byte_beyond(&mut self) {
        let Some(grant) = self.held.last().copied() else { return };
        let lane = self.below(self.cx.lanes as u64) as usize;
        let at = match self.below(2) {
            0 => grant.addr + grant.len - 7,
            _ => grant.addr - 1,
        };
        let from = Remote { addr: at, rkey: grant.keys()[lane] };
        let to = [self.memory.sge(SCRATCH, 8)];
        self.access(0, self.qp_index(&grant, lane), Op::Read { from, to: &to });
    }
}

/// A WQE that controls queues.
enum Control {
    Wait,
    Enable,
}

//! A queue pair for the tests of the ports, created with verbs that every port supports.

use super::control::{QpVerb, ReceiveRing, ReceiveVerb, Reply, SendRing, Verb};
use verbs::cqe::CqReader;
use verbs::wqe::Builder;
use verbs::{Access, Cqn, DmaMemory, QpChange, Qpn};

/// A QP that is connected to itself, with a CQ and a receive ring for four empty receives.
pub struct TestQueue {
    pub qpn: Qpn,
    pub cqn: Cqn,
    /// The slot of its doorbell, where the port has one.
    pub slot: Option<u32>,
    pub ring: DmaMemory,
    pub cq: CqReader,
    /// The receive ring's record.
    pub received: DmaMemory,
    /// The index up to which the send ring is filled.
    pub index: u16,
}

impl TestQueue {
    /// Creates the queue pair; `execute` executes the verbs.
    pub fn new(execute: impl FnMut(Verb<DmaMemory>) -> Reply) -> Self {
        Self::with_management(false, execute)
    }

    /// Creates the queue pair with a managed or an unmanaged send queue. WQEs of a managed send
    /// queue are executed once another queue enables them.
    pub fn with_management(
        managed: bool,
        mut execute: impl FnMut(Verb<DmaMemory>) -> Reply,
    ) -> Self {
        let Reply::Pd(pd) = execute(Verb::AllocPd) else { panic!("no PD") };
        let memory = DmaMemory::anonymous(12288).unwrap();
        let part = |at, len| memory.slice(at, len).unwrap();
        let (ring, cq, record, received) =
            (part(0, 4096), part(4096, 4096), part(8192, 8), part(8200, 8));
        let receives = part(8256, 64);
        for entry in 0..4 {
            receives.write(entry * 16 + 4, &[0, 0, 1, 0]);
        }
        verbs::cqe::clear(&cq, 64);
        let verb = Verb::CreateCq {
            ring: cq.clone(),
            entries: 64,
            record: record.clone(),
            ignore_overrun: false,
        };
        let Reply::Cq(cqn) = execute(verb) else { panic!("no CQ") };
        let receives =
            ReceiveRing { ring: receives, entries: 4, stride: 16, record: received.clone() };
        let verb = Verb::CreateQp(QpVerb {
            pd,
            send: Some(SendRing { ring: ring.clone(), blocks: 64, managed }),
            receive: ReceiveVerb::Own { ring: receives, managed: false },
            send_cq: cqn,
            recv_cq: cqn,
            access: Access::NONE,
            privileged: false,
        });
        let Reply::Qp { qpn, doorbell: slot } = execute(verb) else { panic!("no QP") };
        let cq = CqReader::new(cq, 64, record, 0);
        let q = Self { qpn, cqn, slot, ring, cq, received, index: 0 };
        q.connect(execute);
        q
    }

    /// Moves the queue pair from Reset to RTS, with itself as the peer.
    pub fn connect(&self, mut execute: impl FnMut(Verb<DmaMemory>) -> Reply) {
        let qpn = self.qpn;
        for change in
            [QpChange::Init, QpChange::ReadyToReceive { peer: qpn.into() }, QpChange::ReadyToSend]
        {
            execute(Verb::ModifyQp { qpn, change });
        }
    }

    /// Writes a signaled WQE of one building block.
    pub fn put(&mut self, fill: impl FnOnce(&mut Builder)) {
        let mut wqe = Builder::new(self.qpn, self.index);
        fill(&mut wqe);
        wqe.signaled();
        self.ring.write(self.index as usize % 64 * 64, wqe.bytes());
        self.index = self.index.wrapping_add(1);
    }

    /// Writes a NOP.
    pub fn nop(&mut self) {
        self.put(|wqe| _ = wqe.nop());
    }

    /// Writes an empty SEND.
    pub fn send(&mut self) {
        self.put(|wqe| _ = wqe.send_inline(&[]));
    }

    /// Polls the CQ; returns whether there was a completion.
    pub fn is_done(&mut self) -> bool {
        self.cq.poll().is_some()
    }
}

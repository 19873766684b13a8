//! A queue pair whose rings the attacker writes directly.
//!
//! ```text
//! memory of a QP: CQ ring | send ring | receive ring | records: CQ +0, receive +64
//! ```

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rnic::port::control::{QpVerb, ReceiveRing, ReceiveVerb, Reply, SendRing, Verb};
use verbs::cqe::{CQE, CqReader, Cqe, OWNER, offset, opcode};
use verbs::wqe::{Builder, WQEBB};
use verbs::{Access, Cqn, DmaMemory, Pdn, PeerAddress, QpChange, Qpn};

use crate::nic::{Nic, part};

/// Interval between two polls while a completion is outstanding for long.
pub const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Bytes of a receive WQE: one SGE.
pub const STRIDE: usize = 16;

/// Parameters of a queue pair.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Building blocks of the send ring.
    pub blocks: u32,
    /// Number of receive WQEs; 0 for no receive queue.
    pub receives: u32,
    /// Entries of the CQ.
    pub completions: u32,
    pub managed: bool,
    pub ignore_overrun: bool,
    pub access: Access,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            blocks: 64,
            receives: 0,
            completions: 256,
            managed: false,
            ignore_overrun: false,
            access: Access::REMOTE_ALL,
        }
    }
}

impl Shape {
    /// A managed ring of `blocks` building blocks that repeats itself; its CQ is never polled.
    pub fn endless(blocks: u32) -> Self {
        Self { blocks, completions: 16, managed: true, ignore_overrun: true, ..Self::default() }
    }
}

/// A queue pair with a CQ of its own.
pub struct Qp {
    pub qpn: Qpn,
    pub cqn: Cqn,
    pub memory: DmaMemory,
    pub shape: Shape,
    /// Index of the next building block.
    pub next: u16,
    pub doorbell: Option<u32>,
    generation: u16,
    received: u32,
    cq: CqReader,
}

impl Qp {
    /// Creates a QP in state Reset.
    pub fn new(nic: &Nic, pd: Pdn, shape: Shape) -> Result<Self> {
        Self::create(nic, pd, shape, None)
    }

    /// As [`Qp::new`], with the CQ's record in memory that the NIC has already mapped.
    pub fn with_record(nic: &Nic, pd: Pdn, shape: Shape, record: DmaMemory) -> Result<Self> {
        Self::create(nic, pd, shape, Some(record))
    }

    fn create(nic: &Nic, pd: Pdn, shape: Shape, record: Option<DmaMemory>) -> Result<Self> {
        let cq_bytes = shape.completions as usize * CQE;
        let (send, receive) = (cq_bytes, cq_bytes + shape.blocks as usize * WQEBB);
        let records = (receive + shape.receives as usize * STRIDE).next_multiple_of(64);
        let memory = nic.memory(records + 128)?;
        let record = record.unwrap_or_else(|| part(&memory, records, 8));
        // Marks all entries as invalid; the NIC leaves this to the owner of the ring.
        for entry in 0..shape.completions as usize {
            memory.write(entry * CQE + offset::OP_OWN, &[opcode::INVALID << 4 | OWNER]);
        }
        let cqn = match nic.verb(Verb::CreateCq {
            ring: part(&memory, 0, cq_bytes),
            entries: shape.completions,
            record: record.clone(),
            ignore_overrun: shape.ignore_overrun,
        })? {
            Reply::Cq(cqn) => cqn,
            other => bail!("{other:?}"),
        };
        let ring = SendRing {
            ring: part(&memory, send, shape.blocks as usize * WQEBB),
            blocks: shape.blocks,
            managed: shape.managed,
        };
        let own = ReceiveRing {
            ring: part(&memory, receive, shape.receives as usize * STRIDE),
            entries: shape.receives,
            stride: STRIDE as u32,
            record: part(&memory, records + 64, 8),
        };
        let verb = Verb::CreateQp(QpVerb {
            pd,
            send: Some(ring),
            receive: match shape.receives {
                0 => ReceiveVerb::None,
                _ => ReceiveVerb::Own { ring: own, managed: false },
            },
            send_cq: cqn,
            recv_cq: cqn,
            access: shape.access,
            privileged: false,
        });
        let Reply::Qp { qpn, doorbell } = nic.verb(verb)? else { bail!("no QP") };
        let cq = CqReader::new(part(&memory, 0, cq_bytes), shape.completions, record, 0);
        Ok(Self { qpn, cqn, memory, shape, next: 0, doorbell, generation: 1, received: 0, cq })
    }

    /// Offset of the send ring.
    pub fn send_at(&self) -> usize {
        self.shape.completions as usize * CQE
    }

    /// Offset of the receive ring.
    pub fn receive_at(&self) -> usize {
        self.send_at() + self.shape.blocks as usize * WQEBB
    }

    /// Offset of the CQ's record; the receive record follows at +64.
    pub fn records_at(&self) -> usize {
        (self.receive_at() + self.shape.receives as usize * STRIDE).next_multiple_of(64)
    }

    /// Connects the QP: Init, RTR, RTS.
    pub fn connect(&self, nic: &Nic, peer: impl Into<PeerAddress>) -> Result<()> {
        let ready_to_receive = QpChange::ReadyToReceive { peer: peer.into() };
        for change in [QpChange::Init, ready_to_receive, QpChange::ReadyToSend] {
            nic.verb(Verb::ModifyQp { qpn: self.qpn, change })?;
        }
        Ok(())
    }

    /// Moves the QP to Reset and discards all posted work.
    pub fn reset(&mut self, nic: &Nic) -> Result<()> {
        nic.verb(Verb::ModifyQp { qpn: self.qpn, change: QpChange::Reset })?;
        self.next = 0;
        self.received = 0;
        self.memory.store_be32(self.records_at() + 64, 0);
        self.generation = self.generation.wrapping_add(1);
        Ok(())
    }

    /// Writes one WQE into the ring without writing the doorbell.
    pub fn put(&mut self, build: impl FnOnce(&mut Builder)) {
        let mut wqe = Builder::new(self.qpn, self.next);
        build(&mut wqe);
        self.put_bytes(wqe.bytes());
    }

    /// Writes arbitrary bytes, whole building blocks, into the ring.
    pub fn put_bytes(&mut self, bytes: &[u8]) {
        for block in bytes.chunks(WQEBB) {
            let at = self.next as usize % self.shape.blocks as usize;
            self.memory.write(self.send_at() + at * WQEBB, block);
            self.next = self.next.wrapping_add(1);
        }
    }

    /// Writes the doorbell for all WQEs in the ring.
    pub fn write_doorbell(&mut self, nic: &Nic) {
        let value = (self.generation as u32) << 16 | self.next as u32;
        nic.write_doorbell(self.doorbell.expect("a send queue that is not managed"), value);
    }

    /// Posts one WQE.
    pub fn post(&mut self, nic: &Nic, build: impl FnOnce(&mut Builder)) {
        self.put(build);
        self.write_doorbell(nic);
    }

    /// Posts `count` receives of no bytes.
    pub fn post_receives(&mut self, nic: &Nic, count: u32) {
        self.received = self.received.wrapping_add(count);
        let at = self.records_at() + 64;
        self.memory.store_be32(at, self.received & 0xffff);
        nic.wake_if_asleep();
    }

    /// Polls for the next completion.
    pub fn poll(&mut self) -> Option<Cqe> {
        self.cq.poll()
    }

    /// Waits for the next completion; `None` after the timeout.
    pub fn wait(&mut self, timeout: Duration) -> Option<Cqe> {
        let deadline = Instant::now() + timeout;
        let mut spins = 0u32;
        loop {
            if let Some(cqe) = self.poll() {
                return Some(cqe);
            }
            if Instant::now() >= deadline {
                return None;
            }
            spins += 1;
            if spins < 100 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }
}

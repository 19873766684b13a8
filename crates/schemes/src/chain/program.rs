//! Writes a chain into a ring so that the chain re-arms itself.
//!
//! A chain is R instances of the same WQEs, R a power of two. NOPs pad it to the size of the ring,
//! and a SEND_EN of the ring on itself ends it and starts the next lap. Each WAIT, SEND_EN and
//! RECV_EN carries an index that must advance by R requests before the next lap reaches it. A
//! masked FAA on the `{index, number}` pair at +24 advances it; the FAA's boundary is the bit at
//! which the index wraps.
//!
//! ```text
//! | instance 0 | instance 1 | ... | instance R-1 | FAA on the last WQE's index | NOPs | SEND_EN |
//! ```
//!
//! Position p of a lap serves request n0 + p and every R-th request after it. The receive WQE that
//! scatters that request's arguments is in slot (n0 + p) mod R of the receive ring, and the reply
//! is in the same slot of the reply ring. Therefore a broken chain can be rewritten for the next
//! requests without touching the connection to the client.

use scheme::index::Slot;
use verbs::direct::Ring;
use verbs::wqe::{Builder, WQEBB, offset};
use verbs::{Key, Qpn, Remote, Sge};

/// The bit width at which an index wraps around.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wrap {
    /// 16 bits: building-block indices, receive indices of queues up to 2^15 entries.
    Bits16,
    /// 24 bits: a CQ's count.
    Bits24,
    /// 32 bits: receive indices of larger queues.
    Bits32,
}

impl Wrap {
    /// Boundary for a masked FAA on a word whose upper half is the index.
    pub fn boundary(self) -> u64 {
        match self {
            Wrap::Bits16 => 1 << 47,
            Wrap::Bits24 => 1 << 55,
            Wrap::Bits32 => 0,
        }
    }
}

/// A ring that is being written, with the keys that reach its memory.
pub struct Program {
    ring: Ring,
    qpn: Qpn,
    next: u32,
    /// Building blocks of the earlier laps.
    laps: u64,
}

impl Program {
    /// Starts at the beginning of `ring`, the send ring of `qpn`.
    pub fn new(ring: Ring, qpn: Qpn) -> Self {
        Self::resume(ring, qpn, 0)
    }

    /// Continues at building block `index`, counted over all laps of the ring.
    pub fn resume(ring: Ring, qpn: Qpn, index: u64) -> Self {
        assert_eq!(ring.stride as usize, WQEBB);
        let next = (index % u64::from(ring.entries)) as u32;
        Self { ring, qpn, next, laps: index - u64::from(next) }
    }

    /// Building-block index of the next WQE to be written.
    pub fn next(&self) -> u32 {
        self.next
    }

    /// Address of the field at `field` of the WQE at building block `block`.
    pub fn field(&self, block: u32, field: usize) -> u64 {
        let at = block as usize * WQEBB + field;
        assert!(at < self.ring.memory.len(), "a chain refers beyond its ring");
        self.ring.memory.addr() + at as u64
    }

    /// Writes one WQE and returns its building-block index.
    pub fn push(&mut self, build: impl FnOnce(&mut Builder)) -> u32 {
        let at = self.next;
        let mut b = Builder::new(self.qpn, (self.laps + u64::from(at)) as u16);
        build(&mut b);
        assert!(at + b.blocks() <= self.ring.entries, "a chain does not fit its ring");
        self.ring.memory.write(at as usize * WQEBB, b.bytes());
        self.next += b.blocks();
        at
    }

    /// Writes one WQE at the block at which earlier WQEs patch it.
    pub fn push_at(&mut self, expected: u32, build: impl FnOnce(&mut Builder)) {
        let at = self.push(build);
        assert_eq!(at, expected, "a chain's WQE is not where others patch it");
    }

    /// Starts the instance that first serves position `p`. Writes the WAIT for its request and the
    /// FAA that advances the index of the RECV_EN after its reply; the RECV_EN of the previous lap
    /// has run by then. Returns the block of the WAIT.
    pub fn open(&mut self, w: &Wiring, p: u32) -> u32 {
        let wait = self.push(|b| {
            b.wait(w.recv_cq, (w.count + p) & 0xff_ffff);
        });
        let credit = w.credit_pair(w.slot(p));
        self.push(|b| bump(b, credit, w.front_rkey, w.credits, Wrap::Bits16, w.dump));
        wait
    }

    /// Ends the instance: the SEND_EN of the reply, and the FAAs that advance the indices of the
    /// WAIT and of this SEND_EN.
    pub fn finish(&mut self, w: &Wiring, p: u32, wait: u32) {
        let enable = self.push(|b| {
            let limit = w.reply_blocks * (w.first.wrapping_add(p + 1));
            b.send_enable(w.front, limit & 0xffff);
        });
        self.bump(w, wait, w.credits, Wrap::Bits24);
        self.bump(w, enable, w.reply_blocks * w.credits, Wrap::Bits16);
    }

    /// Writes the FAA that advances the index of the WAIT, SEND_EN or RECV_EN at `block`.
    pub fn bump(&mut self, w: &Wiring, block: u32, by: u32, wrap: Wrap) {
        let pair = self.field(block, PAIR);
        self.push(|b| bump(b, pair, w.worker_rkey, by, wrap, w.dump));
    }

    /// Fills the ring up to building block `end` with NOPs.
    pub fn fill(&mut self, end: u32) {
        while self.next < end {
            let fill = (end - self.next).min(15);
            self.push(|b| {
                b.nop_filling(fill);
            });
        }
    }

    /// Ends the lap: the FAA that advances the index of the last WQE, NOPs, and the SEND_EN of the
    /// ring on itself.
    fn close(mut self, w: &Wiring) {
        let last = self.ring.entries - 1;
        let (pair, lap) = (self.field(last, PAIR), self.ring.entries);
        self.push(|b| bump(b, pair, w.worker_rkey, lap, Wrap::Bits16, w.dump));
        self.fill(last);
        let (qpn, two_laps) = (self.qpn, 2 * self.ring.entries);
        self.push_at(last, |b| {
            b.send_enable(qpn, two_laps);
        });
    }
}

/// Writes the chain of one request kind: `instance` writes the WQEs of each position.
pub fn write_chain(w: &Wiring, mut instance: impl FnMut(&mut Program, u32)) {
    let mut program = Program::new(w.worker_ring.clone(), w.worker);
    for p in 0..w.credits {
        instance(&mut program, p);
    }
    program.close(w);
}

/// Writes a masked FAA that advances the index of the WQE whose `{index, number}` pair is at
/// `pair`.
fn bump(b: &mut Builder, pair: u64, rkey: Key, by: u32, wrap: Wrap, dump: Sge) {
    b.masked_fetch_add(Remote { addr: pair, rkey }, (by as u64) << 32, wrap.boundary(), dump);
}

/// A scatter list under construction.
#[derive(Default)]
pub struct Scatter(Vec<Sge>);

impl Scatter {
    /// Scatters the next `len` bytes to `addr`; adds no element if `len` is 0.
    pub fn to(&mut self, len: usize, lkey: Key, addr: u64) -> &mut Self {
        if len > 0 {
            self.0.push(Sge { addr, len: len as u32, lkey });
        }
        self
    }

    /// Scatters the next bytes to `sge`.
    pub fn sge(&mut self, sge: Sge) -> &mut Self {
        self.to(sge.len as usize, sge.lkey, sge.addr)
    }

    /// Discards the next `len` bytes.
    pub fn skip(&mut self, len: usize, dump: Sge) -> &mut Self {
        assert!(len <= super::layout::DUMP_BYTES);
        self.to(len, dump.lkey, dump.addr)
    }

    /// The list.
    pub fn list(&self) -> &[Sge] {
        &self.0
    }

    /// Building blocks of a READ with this list.
    pub fn read_blocks(&self) -> u32 {
        (2 + self.0.len() as u32).div_ceil(4)
    }
}

/// Offset of the `{index, number}` pair of a WAIT, SEND_EN or RECV_EN.
pub const PAIR: usize = offset::ENABLE_INDEX;

/// The memory node's queues of one request kind of one client, in the form that the chain writers
/// need: rings, numbers and keys.
pub struct Wiring {
    /// The worker's send ring.
    pub worker_ring: Ring,
    /// The worker's QP number.
    pub worker: Qpn,
    /// Key of the worker ring, for scattering into it.
    pub worker_lkey: Key,
    /// Key of the worker ring, for atomics through the loopback peer.
    pub worker_rkey: Key,
    /// The send ring of the front QP, which faces the client: replies.
    pub front_ring: Ring,
    /// The receive ring of the front QP: arguments.
    pub front_recv: Ring,
    /// The front QP's number.
    pub front: Qpn,
    /// Key of the front ring, for scattering into it.
    pub front_lkey: Key,
    /// Key of the front ring, for atomics through the loopback peer.
    pub front_rkey: Key,
    /// The CQ that counts received requests.
    pub recv_cq: verbs::Cqn,
    /// Staging memory: 64 bytes per slot, then the 8 bytes of `owner_id`.
    pub staging: Sge,
    /// Destination of unused results.
    pub dump: Sge,
    /// Number of instances, a power of two.
    pub credits: u32,
    /// Building blocks of a reply in the front ring, a power of two.
    pub reply_blocks: u32,
    /// Index, among these blocks, of the RECV_EN that returns the credit.
    pub credit_block: u32,
    /// Number of the next request: its receive WQE is in slot `first` mod credits.
    pub first: u32,
    /// Value that the receive CQ will have counted before that request.
    pub count: u32,
}

/// Bytes of a staging slot.
pub const STAGING_BYTES: u32 = 64;
/// Building blocks of one reply and its RECV_EN in the front ring.
pub const REPLY_BLOCKS: u32 = 2;

/// Offset of a slot's part of the staging memory.
pub const fn staging_offset(slot: Slot) -> usize {
    slot.offset(STAGING_BYTES as usize)
}

impl Wiring {
    /// Bytes of staging memory for `credits` slots.
    pub const fn staging_bytes(credits: u32) -> usize {
        (credits * STAGING_BYTES) as usize + 8
    }

    /// Slot of the first request that position `p` serves.
    pub fn slot(&self, p: u32) -> Slot {
        Slot::of_request(self.first + p, self.credits)
    }

    /// Address of the field at `field` of the worker's WQE at building block `block`.
    pub fn at(&self, block: u32, field: usize) -> u64 {
        self.worker_ring.memory.addr() + (block as usize * WQEBB + field) as u64
    }

    /// The same address as the destination of a scatter of `len` bytes.
    pub fn to(&self, len: u32, block: u32, field: usize) -> Sge {
        Sge { addr: self.at(block, field), len, lkey: self.worker_lkey }
    }

    /// `len` bytes at `offset` of the staging memory of `slot`.
    pub fn staging(&self, slot: Slot, offset: u32, len: u32) -> Sge {
        assert!(offset + len <= STAGING_BYTES);
        Sge {
            addr: self.staging.addr + staging_offset(slot) as u64 + u64::from(offset),
            len,
            ..self.staging
        }
    }

    /// The constant `owner_id`.
    pub fn owner_id(&self) -> Sge {
        let addr = self.staging.addr + (self.credits * STAGING_BYTES) as u64;
        Sge { addr, len: 8, ..self.staging }
    }

    /// Building-block index of the reply in `slot`, in the front ring.
    fn reply_block(&self, slot: Slot) -> u32 {
        slot.raw() * self.reply_blocks
    }

    /// Address of the field at `field` of the reply in `slot`.
    pub fn reply_field(&self, slot: Slot, field: usize) -> u64 {
        let at = self.reply_block(slot) as usize * WQEBB + field;
        self.front_ring.memory.addr() + at as u64
    }

    /// Address of the `{index, number}` pair of the RECV_EN behind the reply in `slot`.
    pub fn credit_pair(&self, slot: Slot) -> u64 {
        self.reply_field(slot, self.credit_block as usize * WQEBB + PAIR)
    }

    /// Writes the reply of `slot` and the RECV_EN that returns its credit. The reply is a WRITE
    /// with immediate of `from` to an address that the request patches in. `first_use` is the
    /// number of the first request that uses the slot; the chain advances the RECV_EN's index by
    /// `credits` before.
    ///
    /// The address that the last request has patched in is kept: its reply may not have been sent
    /// yet, or may have to be retransmitted because the network has lost it.
    pub fn write_reply(&self, slot: Slot, first_use: u32, from: Sge) {
        self.write_answer(slot, from);
        self.write_credit(slot, first_use, false);
    }

    /// Writes the reply of `slot` alone, as [`Wiring::write_reply`] does.
    pub fn write_answer(&self, slot: Slot, from: Sge) {
        let to = self.reply_target(slot);
        self.write_front(slot, 0, |b| {
            b.rdma_write_imm(to, &[from], super::REPLY_IMM);
        });
    }

    /// Destination of the reply in `slot`; null before the first request.
    fn reply_target(&self, slot: Slot) -> Remote {
        let at = self.reply_block(slot) as usize * WQEBB + offset::REMOTE_ADDR;
        let (mut addr, mut rkey) = ([0; 8], [0; 4]);
        self.front_ring.memory.read(at, &mut addr);
        self.front_ring.memory.read(at + addr.len(), &mut rkey);
        Remote { addr: u64::from_be_bytes(addr), rkey: Key(u32::from_be_bytes(rkey)) }
    }

    /// Writes the RECV_EN of `slot`, which the request with number `first_use` is the first to
    /// execute. If `signaled`, it completes when the reply has ended.
    pub fn write_credit(&self, slot: Slot, first_use: u32, signaled: bool) {
        self.write_front(slot, self.credit_block, |b| {
            b.receive_enable(self.front, first_use.wrapping_add(1) & 0xffff);
            if signaled {
                b.signaled();
            }
        });
    }

    /// Writes the WQE at block `at` of the reply in `slot`.
    pub fn write_front(&self, slot: Slot, at: u32, build: impl FnOnce(&mut Builder)) {
        let block = self.reply_block(slot) + at;
        let mut b = Builder::new(self.front, block as u16);
        build(&mut b);
        assert!(at + b.blocks() <= self.reply_blocks, "a WQE reaches into another answer");
        self.front_ring.memory.write(block as usize * WQEBB, b.bytes());
    }

    /// Writes the receive WQE of `slot`.
    pub fn write_receive(&self, slot: Slot, scatter: &Scatter) {
        let stride = self.front_recv.stride as usize;
        let mut wqe = vec![0u8; stride];
        for (sge, at) in scatter.list().iter().zip(wqe.chunks_exact_mut(16)) {
            at.copy_from_slice(&sge.to_bytes());
        }
        assert!(scatter.list().len() * 16 <= stride, "a receive WQE has too many elements");
        self.front_recv.memory.write(slot.offset(stride), &wqe);
    }
}

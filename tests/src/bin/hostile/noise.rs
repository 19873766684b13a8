//! Random contents in all shared memory.
//!
//! Send rings, receive rings, records, CQ rings, doorbells and the words of the doorbell page are
//! repeatedly filled with random bytes while the NIC reads them. Besides pure noise there are
//! almost valid WQEs, which pass more of the NIC's checks. Broken QPs are reset and reused. The QPs
//! are the attacker's own and those that are connected to the memory node.

use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Context, Result};
use pool::protocol::Request;
use rnic::port::control::Verb;
use serde_json::{Value, json};
use verbs::wqe::{Builder, Remote, Sge, Umr, UmrFlags, WQEBB};
use verbs::{Access, Cqn, Key, MwKind, QpState, Qpn};

use crate::compute::Compute;
use crate::queue::{Qp, Shape};
use units::Random;

use crate::Arguments;
use rnic::port::shm::raw::DOORBELLS;

struct Noise {
    random: Random,
    /// Keys to use: the attacker's, the victims', and invalid ones.
    keys: Vec<u32>,
    addrs: Vec<u64>,
    qpns: Vec<u32>,
    cqns: Vec<u32>,
}

/// Fills all shared memory with noise for the time `--ms`.
pub fn rings(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    let managed = Shape { managed: true, receives: 64, ..Shape::default() };
    let plain = Shape { receives: 64, ..Shape::default() };
    let shapes = [plain, plain, managed, managed, Shape { ignore_overrun: true, ..plain }];
    let mut own =
        shapes.map(|s| Qp::new(&me.nic, me.pd, s)).into_iter().collect::<Result<Vec<_>>>()?;
    // Peers of the five QPs: a connected pair, and three loopback QPs.
    let peers = [1, 0, 2, 3, 4];
    for (i, peer) in peers.into_iter().enumerate() {
        own[i].connect(&me.nic, own[peer].qpn)?;
    }
    let window = me.nic.windows(me.pd, MwKind::Type2, 8)?;
    a.ready()?;
    let chunk = me.allocate().context("allocating a chunk")?;
    let (local, lkey) = (me.local.addr(), me.lkey.0);
    let mut noise = Noise {
        random: Random::new(a.seed),
        keys: vec![lkey, lkey, lkey, me.alloc.rkey.0, 0, 0x100, u32::MAX],
        addrs: vec![local, local + 4096, chunk.addr, 0, u64::MAX],
        qpns: own.iter().map(|q| q.qpn.raw()).chain(me.lanes()).collect(),
        cqns: own.iter().map(|q| q.cqn.raw()).chain([0, 1, 2, 3]).collect(),
    };
    noise.keys.extend(chunk.keys.iter().chain(a.of.iter().flat_map(|c| &c.keys)));
    noise.keys.extend(window.iter().map(|k| k.0));
    noise.addrs.extend(a.of.iter().map(|c| c.addr));
    let deadline = Instant::now() + a.time;
    let (mut rounds, mut resets) = (0u64, 0u64);
    while Instant::now() < deadline {
        rounds += 1;
        for qp in own.iter_mut().chain(&mut me.access).chain([&mut me.alloc.qp, &mut me.free.qp]) {
            noise.fill(qp);
        }
        noise.page(&me);
        if rounds % 8 == 0 {
            resets += noise.revive(&mut me, &mut own, &peers)?;
        }
    }
    Ok(json!({ "seed": a.seed, "rounds": rounds, "resets": resets }))
}

impl Noise {
    fn pick<T: Copy>(random: &mut Random, from: &[T]) -> T {
        from[random.below(from.len() as u64) as usize]
    }

    /// New contents for all of a QP's memory.
    fn fill(&mut self, qp: &mut Qp) {
        let memory = &qp.memory;
        let blocks = qp.shape.blocks as usize;
        for _ in 0..4 {
            let at = qp.send_at() + self.random.below(blocks as u64) as usize * WQEBB;
            match self.random.below(4) {
                0 => {
                    let mut block = [0; WQEBB];
                    block.fill_with(|| self.random.bits() as u8);
                    memory.write(at, &block);
                }
                _ => {
                    let bytes = self.almost(qp);
                    let room = qp.send_at() + blocks * WQEBB - at;
                    memory.write(at, &bytes[..bytes.len().min(room)]);
                }
            }
        }
        let receives = qp.shape.receives as usize;
        if receives > 0 {
            let at = qp.receive_at() + self.random.below(receives as u64) as usize * 16;
            let sge = self.sge().to_bytes();
            memory.write(at, &sge);
            let producer = self.random.bits() as u32;
            memory.store_be32(qp.records_at() + 64, producer);
        }
        // Random consumer index of the CQ; the NIC overwrites the CQ's ring.
        memory.store_be32(qp.records_at(), self.random.bits() as u32);
        let word = self.random.below((qp.send_at() / 8) as u64) as usize * 8;
        memory.store_be64(word, self.random.bits());
    }

    /// An almost valid WQE.
    fn almost(&mut self, qp: &Qp) -> Vec<u8> {
        let index = self.random.bits() as u16;
        let mut b = Builder::new(qp.qpn, index);
        let (to, local) = (self.remote(), self.sge());
        let (key, qpn) = (self.key(), Qpn::new(Self::pick(&mut self.random, &self.qpns)));
        let cqn = Cqn::new(Self::pick(&mut self.random, &self.cqns));
        let limit = self.random.below(1 << 17) as u32;
        let r = self.random.bits();
        match self.random.below(14) {
            0 => b.rdma_write(to, &[local]),
            1 => b.rdma_read(to, &[local, self.sge()]),
            2 => b.send(&[local]),
            3 => b.send_inline(&r.to_be_bytes()),
            4 => b.fetch_add(to, r, local),
            5 => b.masked_fetch_add(to, r, r.rotate_left(9), local),
            6 => b.compare_swap(to, r, !r, local),
            7 => b.wait(cqn, limit),
            8 => b.send_enable(qpn, limit),
            9 => b.receive_enable(qpn, limit),
            10 => b.local_invalidate(key),
            11 => b.rdma_write_imm(to, &[local], r as u32),
            12 => b.umr(&Umr {
                flags: UmrFlags(r as u8),
                ..Umr::bind(key, r as u8, qpn, Access(r as u8), self.key(), to.addr, local.len)
            }),
            _ => b.umr(&Umr::unbind(key, r & 1 == 0)),
        };
        b.flags(r as u8);
        let mut bytes = b.bytes().to_vec();
        // Sometimes with a wrong byte.
        if self.random.below(3) == 0 {
            let at = self.random.below(bytes.len() as u64) as usize;
            bytes[at] = self.random.bits() as u8;
        }
        bytes
    }

    fn key(&mut self) -> Key {
        let key = Self::pick(&mut self.random, &self.keys);
        let flip = if self.random.below(4) == 0 { self.random.bits() as u32 & 0xff } else { 0 };
        Key(key ^ flip)
    }

    fn addr(&mut self) -> u64 {
        let base = Self::pick(&mut self.random, &self.addrs);
        base.wrapping_add(self.random.below(1 << 13)).wrapping_sub(1 << 12)
    }

    fn remote(&mut self) -> Remote {
        Remote { addr: self.addr(), rkey: self.key() }
    }

    fn sge(&mut self) -> Sge {
        let len = match self.random.below(8) {
            0 => self.random.bits() as u32,
            1 => 256 << 10,
            _ => self.random.below(5000) as u32,
        };
        Sge { addr: self.addr(), len, lkey: self.key() }
    }

    /// Writes random values to doorbells and other words of the doorbell page, and to the eventfd.
    fn page(&mut self, me: &Compute) {
        let words = DOORBELLS as u64 / 4 + me.nic.doorbells as u64;
        for _ in 0..32 {
            let at = match self.random.below(4) {
                0 => self.random.below(words) as usize * 4,
                _ => DOORBELLS + self.random.below(16) as usize * 4,
            };
            let value = self.random.bits() as u32;
            me.nic.page.word32(at).store(value, Ordering::Relaxed);
        }
        if self.random.below(4) == 0 {
            me.nic.wake();
        }
    }

    /// Resets and reconnects broken QPs; returns their number.
    fn revive(&mut self, me: &mut Compute, own: &mut [Qp], peers: &[usize]) -> Result<u64> {
        let mut resets = 0;
        let numbers: Vec<Qpn> = own.iter().map(|q| q.qpn).collect();
        for (i, qp) in own.iter_mut().enumerate() {
            if me.nic.query(qp.qpn)?.info.state != QpState::ReadyToSend {
                qp.reset(&me.nic)?;
                qp.connect(&me.nic, numbers[peers[i]])?;
                resets += 1;
            }
            if qp.shape.managed {
                let limit = self.random.bits() as u16;
                me.nic.verb(Verb::EnableSend { qpn: qp.qpn, limit })?;
            }
        }
        for lane in 0..me.access.len() {
            if me.nic.query(me.access[lane].qpn)?.info.state != QpState::ReadyToSend {
                me.access[lane].reset(&me.nic)?;
                let salt = me.draw_start()?;
                me.control.ask(Request::ResetAccess { group: 0, lane: lane as u8, salt })?;
                me.access[lane].connect(&me.nic, me.peer(me.terms.groups[0][lane]))?;
                resets += 1;
            }
        }
        let broken =
            |qpn| -> Result<bool> { Ok(me.nic.query(qpn)?.info.state != QpState::ReadyToSend) };
        if broken(me.alloc.qp.qpn)? || broken(me.free.qp.qpn)? {
            for m in [&mut me.alloc, &mut me.free] {
                m.qp.reset(&me.nic)?;
            }
            let salt = me.draw_start()?;
            me.control.ask(Request::ResetManagement { salt })?;
            for (m, peer) in [&me.alloc, &me.free].into_iter().zip(&me.terms.management) {
                m.qp.connect(&me.nic, me.peer(*peer))?;
            }
            resets += 1;
        }
        Ok(resets)
    }
}

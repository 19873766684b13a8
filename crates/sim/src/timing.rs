//! Timing model of a NIC: the resources for which a work request waits.
//!
//! ```text
//!  compute node                                              memory node
//!  post ─ doorbell ─> unit ─ payload over PCIe ─> link ────> receive ─ context ─ chains' share
//!                                                               │
//!                             <──────────────────── link <── memory over PCIe, atomics unit
//!  completion <─ PCIe <─
//! ```
//!
//! A work request of a managed queue also occupies its unit during the fetch over PCIe (RedN §5.1).
//! A work request on the NIC's own memory, such as a WQE of a chain, needs no link.
//!
//! Not modelled: reordering within a QP, congestion control, the memory node's DRAM.

use crate::params::Params;
use crate::resource::{Pipe, Servers};
use crate::time::Time;
use rnic::engine::{Next, NextKind};
use verbs::Qpn;

/// Bytes of a packet besides its payload: of a request without data or an acknowledgement.
const HEADER: u64 = 64;
/// Number of pipelines that receive packets.
const RECEIVERS: usize = 4;
/// Atomics on words whose addresses are equal modulo this number are treated as atomics on one
/// word, because NICs lock words in this way (from memory: Kalia et al., ATC'16, §3).
const LOCKED: u64 = 4096;

/// Timing state of one node's NIC.
pub(crate) struct NicTiming {
    units: Servers,
    receivers: Servers,
    atomics: Servers,
    /// Times at which the locks of words become free, by address modulo [`LOCKED`].
    locks: Vec<Time>,
    out: Pipe,
    into: Pipe,
    reads: Pipe,
    writes: Pipe,
    /// The QP whose context is cached, by slot.
    contexts: Vec<u32>,
    /// Number of queues that carry chains and are connected to another node.
    pub chain_qps: u32,
}

/// Completion times of a request that has arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Service {
    /// When the receiving side counts a completion, if it does.
    pub received: Time,
    /// When the requester's NIC counts a completion.
    pub completed: Time,
}

impl NicTiming {
    pub fn new(p: &Params) -> Self {
        Self {
            units: Servers::new(p.nic.units),
            receivers: Servers::new(RECEIVERS),
            atomics: Servers::new(1),
            locks: vec![Time::ZERO; (LOCKED / 8) as usize],
            out: Pipe::new(p.link.rate),
            into: Pipe::new(p.link.rate),
            reads: Pipe::new(p.pcie.rate),
            writes: Pipe::new(p.pcie.rate),
            contexts: vec![u32::MAX; p.nic.contexts.max(1)],
            chain_qps: 0,
        }
    }

    /// Returns the total working time of the units, and the bytes sent.
    pub fn used(&self) -> (Time, u64) {
        (self.units.busy(), self.out.bytes())
    }

    /// Issues a WQE to a unit at `from`; returns when the unit has processed it.
    pub fn issue(&mut self, p: &Params, next: &Next, from: Time) -> Time {
        let mut length = if next.managed { p.nic.managed_wqe } else { p.nic.wqe };
        if next.kind == NextKind::Window {
            length += p.nic.window;
        }
        self.units.serve(from, length)
    }

    /// Sends a request, issued at `issued`, to another node; returns when its last byte leaves.
    pub fn depart(&mut self, p: &Params, next: &Next, issued: Time) -> Time {
        let (bytes, inline) = payload(&next.kind);
        if bytes == 0 || inline {
            return self.out.enter(issued, HEADER + bytes);
        }
        let there = self.reads.enter(issued + p.pcie.read, bytes);
        self.out.follow(&self.reads, there, HEADER + bytes)
    }

    fn context(&mut self, p: &Params, qpn: Qpn) -> Time {
        let slots = self.contexts.len() as u32;
        let slot = &mut self.contexts[(qpn.raw() % slots) as usize];
        match std::mem::replace(slot, qpn.raw()) == qpn.raw() {
            true => Time::ZERO,
            false => p.nic.context_miss,
        }
    }

    /// Executes an atomic on the word at `addr`, from `at` on; returns when the unit has processed
    /// it.
    ///
    /// The word stays locked for longer. A later atomic on it waits without occupying the unit.
    fn atomic(&mut self, p: &Params, addr: u64, at: Time) -> Time {
        let taken_up = self.atomics.serve(at, p.nic.atomic);
        let lock = &mut self.locks[(addr % LOCKED / 8) as usize];
        let begin = taken_up.max(*lock);
        *lock = begin + p.nic.atomic_same;
        begin
    }

    /// Serves a request from another node that has arrived at `now` for `peer`; an atomic works on
    /// the word at `addr`. Returns when the request is executed, and when the answer leaves.
    pub fn respond(&mut self, p: &Params, next: &Next, addr: u64, now: Time) -> (Time, Time) {
        let (bytes, _) = payload(&next.kind);
        let whole = self.into.leave(now, HEADER + bytes);
        let mut at = self.receivers.serve(whole, p.nic.receive);
        at += self.context(p, next.peer);
        at += Time(p.nic.chain_slowdown.0 * self.chain_qps as u64);
        match next.kind {
            NextKind::Read { bytes } => {
                let there = self.reads.enter(at + p.pcie.read, bytes);
                (there, self.out.follow(&self.reads, there, HEADER + bytes))
            }
            NextKind::Atomic => {
                let done = self.atomic(p, addr, at) + p.pcie.read;
                (done, self.out.enter(done, HEADER))
            }
            _ => (self.writes.follow(&self.into, at, bytes), at),
        }
    }

    /// Receives an answer at `at`; returns when the requester counts the completion.
    pub fn answered(&mut self, next: &Next, at: Time) -> Time {
        match next.kind {
            NextKind::Read { bytes } => {
                let whole = self.into.leave(at, HEADER + bytes);
                self.writes.follow(&self.into, whole, bytes)
            }
            _ => at,
        }
    }

    /// Executes a request to a QP of the same NIC at `now`. If the queue is a managed one, its unit
    /// has already waited for the memory.
    pub fn loopback(&mut self, p: &Params, next: &Next, now: Time) -> Service {
        let mut done = match next.kind {
            NextKind::Atomic => self.atomics.serve(now, p.nic.atomic),
            NextKind::Read { bytes } => self.reads.enter(now, bytes),
            NextKind::Write { bytes, .. } | NextKind::Send { bytes, .. } => {
                self.writes.enter(now, bytes)
            }
            _ => now,
        };
        if !next.managed && matches!(next.kind, NextKind::Atomic | NextKind::Read { .. }) {
            done += p.pcie.read;
        }
        Service { received: done, completed: done }
    }
}

/// Returns the bytes that a request carries to its peer, and whether the WQE holds them.
fn payload(kind: &NextKind) -> (u64, bool) {
    match *kind {
        NextKind::Send { bytes, inline } | NextKind::Write { bytes, inline, .. } => (bytes, inline),
        NextKind::Atomic => (16, true),
        _ => (0, true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(kind: NextKind) -> Next {
        Next { kind, managed: false, signaled: true, peer: Qpn::new(9) }
    }

    /// Returns the time of one request on idle NICs, from the unit to the completion.
    fn alone(kind: NextKind, chain_qps: u32) -> Time {
        let p = Params::connectx5();
        let (mut mine, mut theirs) = (NicTiming::new(&p), NicTiming::new(&p));
        theirs.chain_qps = chain_qps;
        let next = next(kind);
        theirs.context(&p, next.peer);
        let issued = mine.issue(&p, &next, Time::ZERO);
        let there = mine.depart(&p, &next, issued) + p.link.latency;
        let (_, answer) = theirs.respond(&p, &next, 0, there);
        mine.answered(&next, answer + p.link.latency)
    }

    #[test]
    fn read_latency_grows_by_the_bottleneck_transfer_time() {
        let small = alone(NextKind::Read { bytes: 64 }, 0);
        let page = alone(NextKind::Read { bytes: 4096 }, 0);
        let more = page.since(small).as_ns();
        let link = ((4096.0_f64 - 64.0) / 12.2).floor();
        assert!((more as f64) >= link && (more as f64) < 2.2 * link, "{more} ns more");
    }

    #[test]
    fn queues_with_chains_slow_plain_accesses() {
        let kind = NextKind::Read { bytes: 4096 };
        let (without, with) = (alone(kind, 0), alone(kind, 96));
        assert!(with > without);
        assert_eq!(with.since(without), Time(Params::connectx5().nic.chain_slowdown.0 * 96));
    }

    #[test]
    fn atomics_serialize_on_one_word_only() {
        let p = Params::connectx6();
        let mut nic = NicTiming::new(&p);
        let same = [0; 8].map(|_| nic.atomic(&p, 0x1000, Time::ZERO));
        assert_eq!(same[7].since(same[0]), Time(p.nic.atomic_same.0 * 7));
        let mut nic = NicTiming::new(&p);
        let others = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| nic.atomic(&p, 0x1000 + 8 * i, Time::ZERO));
        assert_eq!(others[7].since(others[0]), Time(p.nic.atomic.0 * 7));
        let alike = nic.atomic(&p, 0x3000, Time::ZERO);
        assert!(alike.since(others[0]) >= p.nic.atomic_same, "the addresses share a lock");
    }

    #[test]
    fn evicted_qp_context_is_fetched_again() {
        let p = Params::connectx5();
        let mut nic = NicTiming::new(&p);
        let mine = Qpn::new(3);
        let same_slot = Qpn::new(3 + p.nic.contexts as u32);
        assert_eq!(nic.context(&p, mine), p.nic.context_miss);
        assert_eq!(nic.context(&p, mine), Time::ZERO);
        assert_eq!(nic.context(&p, same_slot), p.nic.context_miss);
        assert_eq!(nic.context(&p, mine), p.nic.context_miss);
    }
}

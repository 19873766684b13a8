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
//! Each resource serves requests in the order of the calls. So the calls are made by events, at the
//! moment at which the request is there: `qp_schedule.rs` has those of requests, `replies.rs` those
//! of answers.
//!
//! A work request of a managed queue also occupies its unit during the fetch over PCIe (RedN §5.1).
//! A work request on the NIC's own memory, such as a WQE of a chain, needs no link.
//!
//! Not modelled: reordering within a QP, congestion control, the memory node's DRAM.

use crate::params::Params;
use crate::resource::{Pipe, Servers};
use crate::time::Time;
use crate::waits::Waits;
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
    lock_waits: Waits,
    out: Pipe,
    into: Pipe,
    reads: Pipe,
    writes: Pipe,
    /// The QP whose context is cached, by slot.
    contexts: Vec<u32>,
    /// Number of queues that carry chains and are connected to another node.
    pub chain_qps: u32,
}

impl NicTiming {
    pub fn new(p: &Params) -> Self {
        Self {
            units: Servers::new(p.nic.units),
            receivers: Servers::new(RECEIVERS),
            atomics: Servers::new(1),
            locks: vec![Time::ZERO; (LOCKED / 8) as usize],
            lock_waits: Waits::default(),
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
        (self.units.waits().busy(), self.out.bytes())
    }

    /// Returns the waits at each resource.
    pub fn waits(&self) -> [(&'static str, &Waits); 8] {
        [
            ("units", self.units.waits()),
            ("link out", self.out.waits()),
            ("link in", self.into.waits()),
            ("receivers", self.receivers.waits()),
            ("atomics unit", self.atomics.waits()),
            ("locks of words", &self.lock_waits),
            ("PCIe reads", self.reads.waits()),
            ("PCIe writes", self.writes.waits()),
        ]
    }

    /// Issues a WQE to a unit at `now`; returns when the unit has processed it.
    pub fn issue(&mut self, p: &Params, next: &Next, now: Time) -> Time {
        let mut length = if next.managed { p.nic.managed_wqe } else { p.nic.wqe };
        if next.kind == NextKind::Window {
            length += p.nic.window;
        }
        self.units.serve(now, length)
    }

    /// Transfers `bytes` from memory, of which the first could come at `now`; returns when the
    /// first and the last one come.
    pub fn fetch(&mut self, now: Time, bytes: u64) -> (Time, Time) {
        self.reads.pass(now, now, bytes)
    }

    /// Sends a packet with a payload of `bytes`, the first byte at `now`, when the last byte of the
    /// payload comes at `last`; returns when the first and the last byte leave.
    pub fn send(&mut self, now: Time, last: Time, bytes: u64) -> (Time, Time) {
        self.out.pass(now, last, HEADER + bytes)
    }

    /// Takes a packet with a payload of `bytes` from the switch, of which the first byte is there
    /// at `now` and the last one at `last`; returns when the last byte has arrived.
    ///
    /// A link that were entered at the last byte would stand idle while a long packet comes in, as
    /// soon as a short one of another node ends before it.
    pub fn land(&mut self, now: Time, last: Time, bytes: u64) -> Time {
        self.into.pass(now, last, HEADER + bytes).1
    }

    fn context(&mut self, p: &Params, qpn: Qpn) -> Time {
        let slots = self.contexts.len() as u32;
        let slot = &mut self.contexts[(qpn.raw() % slots) as usize];
        match std::mem::replace(slot, qpn.raw()) == qpn.raw() {
            true => Time::ZERO,
            false => p.nic.context_miss,
        }
    }

    /// Executes an atomic on the word at `addr` that arrives at the unit at `now`; returns when the
    /// unit has processed it.
    ///
    /// The word stays locked for longer. A later atomic on it waits without occupying the unit.
    pub fn atomic(&mut self, p: &Params, addr: u64, now: Time) -> Time {
        let taken_up = self.atomics.serve(now, p.nic.atomic);
        let lock = &mut self.locks[(addr % LOCKED / 8) as usize];
        let begin = taken_up.max(*lock);
        *lock = begin + p.nic.atomic_same;
        self.lock_waits.add(begin.since(taken_up), p.nic.atomic_same);
        begin
    }

    /// Receives a request of another node that has arrived at `now`; returns when the request is
    /// executed or, if it needs data or the atomics unit, turns to that.
    pub fn receive(&mut self, p: &Params, next: &Next, now: Time) -> Time {
        let at = self.receivers.serve(now, p.nic.receive);
        at + self.context(p, next.peer) + Time(p.nic.chain_slowdown.0 * self.chain_qps as u64)
    }

    /// Writes the payload of a received request to memory from `at` on; returns the end.
    pub fn store(&mut self, next: &Next, at: Time) -> Time {
        let (bytes, _) = payload(&next.kind);
        self.writes.follow(&self.into, at, bytes)
    }

    /// Receives an answer, of which the first byte is there at `now` and the last one at `last`;
    /// returns when the requester counts the completion.
    pub fn answered(&mut self, kind: &NextKind, now: Time, last: Time) -> Time {
        match *kind {
            NextKind::Read { bytes } => {
                let whole = self.land(now, last, bytes);
                self.writes.follow(&self.into, whole, bytes)
            }
            _ => last,
        }
    }

    /// Executes a request to a QP of the same NIC at `now`; returns the end. If the queue is a
    /// managed one, its unit has already waited for the memory.
    /// An atomic is for the word at `addr`.
    pub fn loopback(&mut self, p: &Params, next: &Next, addr: u64, now: Time) -> Time {
        let done = match next.kind {
            NextKind::Atomic => self.atomic(p, addr, now),
            NextKind::Read { bytes } => self.reads.pass(now, now, bytes).1,
            NextKind::Write { bytes, .. } | NextKind::Send { bytes, .. } => {
                self.writes.pass(now, now, bytes).1
            }
            _ => now,
        };
        match next.kind {
            NextKind::Atomic | NextKind::Read { .. } if !next.managed => done + p.pcie.read,
            _ => done,
        }
    }
}

/// Returns the bytes that a request carries to its peer, and whether the WQE holds them.
pub(crate) fn payload(kind: &NextKind) -> (u64, bool) {
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
        let peer = Qpn::new(9);
        Next { kind, managed: false, signaled: true, peer, at: 0, after: 1 }
    }

    /// Returns the time of a READ on idle NICs, from the unit to the completion.
    fn read_alone(bytes: u64, chain_qps: u32) -> Time {
        let p = Params::connectx5();
        let (mut mine, mut theirs) = (NicTiming::new(&p), NicTiming::new(&p));
        theirs.chain_qps = chain_qps;
        let next = next(NextKind::Read { bytes });
        theirs.context(&p, next.peer);
        let issued = mine.issue(&p, &next, Time::ZERO);
        let (first, last) = mine.send(issued, issued, 0);
        let (first, last) = (first + p.link.latency, last + p.link.latency);
        let whole = theirs.land(first, last, 0);
        let at = theirs.receive(&p, &next, whole);
        let (first, last) = theirs.fetch(at + p.pcie.read, bytes);
        let (first, last) = theirs.send(first, last, bytes);
        let (first, last) = (first + p.link.latency, last + p.link.latency);
        mine.answered(&next.kind, first, last)
    }

    #[test]
    fn read_latency_grows_by_the_bottleneck_transfer_time() {
        let more = read_alone(4096, 0).since(read_alone(64, 0)).as_ns();
        let link = ((4096.0_f64 - 64.0) / 12.2).floor();
        assert!((more as f64) >= link && (more as f64) < 2.2 * link, "{more} ns more");
    }

    #[test]
    fn queues_with_chains_slow_plain_accesses() {
        let (without, with) = (read_alone(4096, 0), read_alone(4096, 96));
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

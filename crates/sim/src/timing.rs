//! The timing model of a NIC: what a work request waits for on its way.
//!
//! ```text
//!  compute node                                              memory node
//!  post ─ doorbell ─> unit ─ payload over PCIe ─> link ────> receive ─ context ─ chains' share
//!                                                               │
//!                             <──────────────────── link <── memory over PCIe, atomics unit
//!  completion <─ PCIe <─
//! ```
//!
//! A work request of a managed queue holds its unit for the fetch over PCIe too (RedN §5.1); one that
//! works on the NIC's own memory, as the WQEs of a chain do, needs no link.
//!
//! Not there: reordering within a QP, congestion control, the memory node's DRAM.

use crate::params::Params;
use crate::resource::{Pipe, Servers};
use crate::time::Time;
use rnic::engine::{Next, NextKind};
use rnic::ids::Qpn;

/// Bytes of a packet besides its payload: a request without data, an acknowledgement.
const HEADER: u64 = 64;
/// Pipelines that take packets in.
const RECEIVERS: usize = 4;
/// Atomics on words whose addresses are alike below this are taken for atomics on one word: so NICs lock
/// them (from memory: Kalia et al., ATC'16, §3).
const LOCKED: u64 = 4096;

/// One node's NIC.
pub(crate) struct NicTiming {
    units: Servers,
    receivers: Servers,
    atomics: Servers,
    /// When the lock of a word is free again, by what its address is alike in.
    locks: Vec<Time>,
    out: Pipe,
    into: Pipe,
    reads: Pipe,
    writes: Pipe,
    /// Context of the QP that was used last, by slot.
    contexts: Vec<u32>,
    /// Queues that carry chains and are connected to another node.
    pub chain_qps: u32,
}

/// How a request that has arrived is served.
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

    /// Time that all units worked, and bytes that left.
    pub fn used(&self) -> (Time, u64) {
        (self.units.busy(), self.out.bytes())
    }

    /// A unit takes a WQE up at `from`: when it is done with it.
    pub fn issue(&mut self, p: &Params, next: &Next, from: Time) -> Time {
        let mut length = if next.managed { p.nic.managed_wqe } else { p.nic.wqe };
        if next.kind == NextKind::Window {
            length += p.nic.window;
        }
        self.units.serve(from, length)
    }

    /// The request leaves at `issued` for another node: when its last byte does.
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

    /// An atomic on the word at `addr`, from `at` on: when the unit is done with it. The word is locked for
    /// longer, and whoever comes for it meanwhile waits without holding the unit.
    fn atomic(&mut self, p: &Params, addr: u64, at: Time) -> Time {
        let taken_up = self.atomics.serve(at, p.nic.atomic);
        let lock = &mut self.locks[(addr % LOCKED / 8) as usize];
        let begin = taken_up.max(*lock);
        *lock = begin + p.nic.atomic_same;
        begin
    }

    /// A request from another node has arrived at `now`, for `peer`; an atomic is one on the word at `addr`. When
    /// what it asked for is done, and when the answer leaves.
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

    /// The answer arrives back at `at`: when the requester counts the completion.
    pub fn answered(&mut self, next: &Next, at: Time) -> Time {
        match next.kind {
            NextKind::Read { bytes } => {
                let whole = self.into.leave(at, HEADER + bytes);
                self.writes.follow(&self.into, whole, bytes)
            }
            _ => at,
        }
    }

    /// A request to a QP of the same NIC is executed at `now`. The unit that holds it has waited for the
    /// memory, if its queue is a managed one.
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

/// Bytes that a request carries to its peer, and whether the WQE holds them.
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

    /// One request with nothing else in the way, from the unit to the completion.
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
    fn larger_reads_take_longer_by_what_the_slowest_part_needs() {
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
    fn atomics_on_one_word_wait_for_each_other_and_those_on_others_do_not() {
        let p = Params::connectx6();
        let mut nic = NicTiming::new(&p);
        let same = [0; 8].map(|_| nic.atomic(&p, 0x1000, Time::ZERO));
        assert_eq!(same[7].since(same[0]), Time(p.nic.atomic_same.0 * 7));
        let mut nic = NicTiming::new(&p);
        let others = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| nic.atomic(&p, 0x1000 + 8 * i, Time::ZERO));
        assert_eq!(others[7].since(others[0]), Time(p.nic.atomic.0 * 7));
        let alike = nic.atomic(&p, 0x3000, Time::ZERO);
        assert!(alike.since(others[0]) >= p.nic.atomic_same, "they share a lock");
    }

    #[test]
    fn a_context_that_others_have_pushed_out_is_fetched() {
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

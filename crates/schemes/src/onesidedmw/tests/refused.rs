//! Invalid requests: each is answered with an error or ends at its sender, the chain continues,
//! nothing is leaked, and no other client is affected.

use std::time::Duration;

use verbs::direct::DirectQp;
use verbs::wqe::WQEBB;
use verbs::wqe::offset::REMOTE_ADDR;

use super::super::program::REPLY_BLOCKS;
use super::*;

struct Bed {
    nic: SoftNic,
    node: Node<SoftNic>,
    /// The misbehaving client.
    a: Raw,
    b: Raw,
    victim: Chunk,
}

impl Bed {
    fn new() -> Self {
        Self::with(settings(16, 3, 4))
    }

    fn with(settings: NodeSettings) -> Self {
        let nic = SoftNic::inline();
        let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
        let a = Raw::join(&nic, &mut node, 1, &settings);
        let b = Raw::join(&nic, &mut node, 2, &settings);
        let victim = b.allocate().unwrap();
        let at = Remote { addr: victim.addr, rkey: victim.keys[0] };
        assert_eq!(b.access(0, at, Some(b"mine"), 0), Status::Success);
        Self { nic, node, a, b, victim }
    }

    fn turn(&mut self) {
        while self.node.poll().unwrap() {}
        self.a.drain();
    }

    /// Checks that both clients still work, that the victim has its data, and that all chunks are
    /// free in the end.
    fn check(mut self) {
        self.turn();
        for raw in [&self.a, &self.b] {
            for _ in 0..10 {
                let c = raw.allocate().unwrap();
                let at = Remote { addr: c.addr, rkey: c.keys[1] };
                assert_eq!(raw.access(1, at, Some(b"work"), 0), Status::Success);
                assert_eq!(raw.free(c.entry), status::FREED);
            }
        }
        let at = Remote { addr: self.victim.addr, rkey: self.victim.keys[0] };
        assert_eq!(self.b.access(0, at, None, 4), Status::Success);
        assert_eq!(self.b.read_back(4), b"mine");
        self.node.audit().unwrap();
        assert_eq!(self.node.memory().owned(2), 1);
        retire(&mut self.node, self.a.id);
        assert_eq!(self.node.status().unwrap().free, 15);
        self.node.audit().unwrap();
        drop(self.nic);
    }

    fn reset_access(&mut self, lane: usize) {
        let peer = self.node.reset_access(self.a.id, GroupId(0), Lane(lane as u8)).unwrap();
        self.a.access[lane].connect(Qpn::new(peer)).unwrap();
    }
}

#[test]
fn concurrent_double_free_frees_once() {
    // The same chunk is freed two to four times, in each order with another chunk.
    for order in [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]] {
        let mut bed = Bed::new();
        let mine: Vec<Chunk> = (0..2).map(|_| bed.a.allocate().unwrap()).collect();
        let mut asked: Vec<usize> = order.to_vec();
        let mut freed = [0, 0];
        while !asked.is_empty() {
            for (slot, &which) in asked.iter().enumerate() {
                bed.a.ask_free(mine[which].entry, slot);
            }
            bed.turn();
            let mut again = Vec::new();
            for (slot, &which) in asked.iter().enumerate() {
                match bed.a.free_status(slot) {
                    status::FREED => freed[which] += 1,
                    status::REFUSED => assert_eq!(freed[which], 1, "refused and not freed"),
                    status::AGAIN => again.push(which),
                    other => panic!("status {other}"),
                }
            }
            asked = again;
        }
        assert_eq!(freed, [1, order.contains(&1) as i32]);
        bed.check();
    }
}

#[test]
fn free_beyond_the_table_is_refused() {
    for entry in [16, 17, 255, 256, 0x8000, 0xff_fffe, 0xff_ffff].map(EntryId::new) {
        let mut bed = Bed::new();
        for _ in 0..9 {
            bed.a.ask_free(entry, 0);
            bed.turn();
            assert_eq!(bed.a.free_status(0), status::REFUSED, "entry {entry}");
        }
        bed.check();
    }
}

/// A NIC may retransmit a sent reply, and reads it from the queue again. Therefore a reply keeps
/// its target when the chain is rewritten.
#[test]
fn replies_keep_their_targets_across_a_repair() {
    let mut bed = Bed::new();
    let targets = |bed: &Bed| -> Vec<[u8; 12]> {
        let ring = bed.node.clients[&bed.a.id].free.front.send_ring().memory;
        let at = |slot: u32| (slot * REPLY_BLOCKS) as usize * WQEBB + REMOTE_ADDR;
        (0..4)
            .map(|slot| {
                let mut target = [0; 12];
                ring.read(at(slot), &mut target);
                target
            })
            .collect()
    };
    for slot in 0..3 {
        let chunk = bed.a.allocate().unwrap();
        bed.a.ask_free(chunk.entry, slot);
        bed.turn();
        assert_eq!(bed.a.free_status(slot), status::FREED);
    }
    let before = targets(&bed);
    bed.a.ask_free(EntryId::new(99), 3);
    bed.turn();
    assert_eq!(bed.a.free_status(3), status::REFUSED);
    assert_eq!(targets(&bed)[..3], before[..3]);
    assert!(before[..3].iter().all(|target| *target != [0; 12]));
    bed.check();
}

/// Repairs are rate-limited because each takes CPU: a client with many refused frees waits, and no
/// other client does.
#[test]
fn refused_frees_are_rate_limited() {
    let mut bed = Bed::with(NodeSettings { paced: true, ..settings(16, 3, 4) });
    let full = bed.node.clients[&bed.a.id].repairs;
    for _ in 0..16 {
        bed.a.ask_free(EntryId::new(99), 0);
        bed.turn();
        assert_eq!(
            bed.a.free_status(0),
            status::REFUSED,
            "refusals within the burst are answered at once"
        );
    }
    // Enough repairs to exhaust the token bucket for a minute.
    bed.node.clients.get_mut(&bed.a.id).unwrap().repairs.take(6_000, bed.nic.now());
    for _ in 0..3 {
        bed.a.ask_free(EntryId::new(99), 0);
        bed.a.ask_free(EntryId::new(98), 1);
        bed.turn();
        assert_eq!(bed.a.free_status(0), status::PENDING);
        let look = bed.node.next_poll().unwrap();
        assert!(look > Duration::from_secs(30) && look <= Duration::from_secs(60), "{look:?}");
        let c = bed.b.allocate().unwrap();
        assert_eq!(bed.b.free(c.entry), status::FREED);
        // The client does not need to wait for the answer.
        bed.a.reset_management(&mut bed.node);
        assert_eq!(bed.a.allocate().map(|c| bed.a.free(c.entry)), Ok(status::FREED));
    }
    bed.a.ask_free(EntryId::new(99), 0);
    bed.a.ask_free(EntryId::new(98), 1);
    bed.turn();
    bed.node.clients.get_mut(&bed.a.id).unwrap().repairs = full;
    bed.turn();
    assert_eq!(bed.a.free_status(0), status::REFUSED, "answered after the rate limit");
    assert_eq!(bed.a.free_status(1), status::AGAIN);
    assert_eq!(bed.node.next_poll(), None);
    bed.check();
}

/// Windows are bound to any QPs that the request names: a client that names wrong QPs harms only
/// itself.
#[test]
fn wrong_access_qps_harm_only_their_sender() {
    let numbers = |bed: &Bed| {
        let mut all = vec![0, 1, 0x7f_ffff, 0xff_ffff];
        all.extend(bed.node.worker_qpns(bed.a.id).unwrap().map(Qpn::raw));
        all.extend(bed.node.worker_qpns(bed.b.id).unwrap().map(Qpn::raw));
        all.extend([&bed.a, &bed.b].iter().flat_map(|r| {
            let own = [&r.alloc, &r.free, &r.access[0], &r.access[1]].map(|q| q.qpn().raw());
            own.into_iter().chain(r.peers.iter().map(|q| q.raw()))
        }));
        // Every QP of the memory node, including the loopback peers.
        all.extend(1..64);
        all
    };
    for qpn in numbers(&Bed::new()) {
        let mut bed = Bed::new();
        let foreign = bed.b.peers.contains(&Qpn::new(qpn));
        let own = bed.a.peers.contains(&Qpn::new(qpn));
        let arguments: Vec<u8> = [qpn, bed.a.peers[1].raw()]
            .iter()
            .flat_map(|q| q.to_be_bytes()[1..].to_vec())
            .collect();
        let alloc = &bed.a.alloc;
        bed.a.send(alloc, &arguments, 0);
        bed.turn();
        let chunk = bed.a.chunk(0).unwrap();
        let at = |lane: usize| Remote { addr: chunk.addr, rkey: chunk.keys[lane] };
        assert_eq!(bed.a.access(1, at(1), Some(b"fine"), 0), Status::Success);
        let first =
            if qpn == bed.a.peers[0].raw() { Status::Success } else { Status::RemoteAccess };
        assert_eq!(bed.a.access(0, at(0), None, 4), first, "QP {qpn:#x}, own {own}");
        if first != Status::Success {
            bed.reset_access(0);
        }
        // If the request named a QP of the victim, the window is bound to it: the owner gives its
        // chunk away.
        let lane = bed.b.peers.iter().position(|p| p.raw() == qpn).unwrap_or(0);
        let seen = if foreign { Status::Success } else { Status::RemoteAccess };
        assert_eq!(bed.b.access(lane, at(0), None, 4), seen, "QP {qpn:#x}");
        if !foreign {
            let peer = bed.node.reset_access(bed.b.id, GroupId(0), Lane(0)).unwrap();
            bed.b.access[0].connect(Qpn::new(peer)).unwrap();
        }
        assert_eq!(bed.b.free(chunk.entry), status::PENDING, "only the CPU answers it");
        bed.turn();
        assert_eq!(bed.b.free_status(0), status::REFUSED);
        bed.b.drain();
        assert_eq!(bed.a.free(chunk.entry), status::FREED);
        bed.check();
    }
}

#[test]
fn unwritable_reply_target_breaks_only_its_sender() {
    for (addr, rkey) in [(0, 0), (0xeeee_eeee_eeee_eeee, 0xeeee_eeee), (8, 0x0000_0101)] {
        for free in [false, true] {
            for behind in 0..3 {
                let mut bed = Bed::new();
                let mine: Vec<Chunk> = (0..4).map(|_| bed.a.allocate().unwrap()).collect();
                let (qp, arguments) = match free {
                    true => (&bed.a.free, entry_index(mine[0].entry).to_vec()),
                    false => {
                        let peers = bed.a.peers.iter();
                        (
                            &bed.a.alloc,
                            peers.flat_map(|q| q.raw().to_be_bytes()[1..].to_vec()).collect(),
                        )
                    }
                };
                let mut data = arguments;
                data.extend(u64::to_be_bytes(addr));
                data.extend(u32::to_be_bytes(rkey));
                qp.post_recv(&ReceiveRequest { id: 1, to: &[] }).unwrap();
                let op = Op::SendInline { data: &data };
                qp.post_send(&[WorkRequest { id: 2, op, signaled: true }]).unwrap();
                assert_eq!(qp.state().unwrap(), QpState::Error);
                let broken = |qp: &Qp| {
                    let request = WorkRequest { id: 3, op: Op::Nop, signaled: true };
                    qp.post_send(&[request]).is_ok() && {
                        let all = bed.a.drain();
                        all.iter().any(|c| c.id == 3 && c.status == Status::Flushed)
                    }
                };
                for _ in 0..behind {
                    assert!(broken(qp), "a broken QP does not report its state");
                }
                bed.turn();
                // Nothing is leaked: the chunk was freed, or the reset reclaims it.
                bed.a.reset_management(&mut bed.node);
                bed.turn();
                assert_eq!(bed.node.memory().owned(1), 4 - free as u64);
                for c in &mine[free as usize..] {
                    assert_eq!(bed.a.free(c.entry), status::FREED);
                }
                bed.check();
            }
        }
    }
}

/// Messages of the wrong length either use the slot's previous arguments or break their QP. In both
/// cases only the sender's own chunks are affected.
#[test]
fn wrong_length_messages_affect_only_their_sender() {
    for free in [false, true] {
        for len in [0, 1, 2, 3, 5, 11, 14, 16, 17, 19, 64, 200] {
            let mut bed = Bed::new();
            let mine: Vec<Chunk> = (0..2).map(|_| bed.a.allocate().unwrap()).collect();
            for _ in 0..6 {
                let qp = if free { &bed.a.free } else { &bed.a.alloc };
                let data = vec![0xa5; len];
                qp.post_recv(&ReceiveRequest { id: 1, to: &[] }).unwrap();
                let op = Op::SendInline { data: &data };
                let _ = qp.post_send(&[WorkRequest { id: 2, op, signaled: true }]);
                bed.turn();
                let whole = |qp: &Qp| qp.state().unwrap() == QpState::ReadyToSend;
                if !whole(&bed.a.alloc) || !whole(&bed.a.free) {
                    bed.a.reset_management(&mut bed.node);
                    bed.turn();
                }
            }
            // The client cannot name grants whose replies it never received; it may lose its own
            // chunks, no others.
            bed.a.reset_management(&mut bed.node);
            bed.turn();
            let owned = bed.node.memory().owned(1);
            assert!(owned <= 2 + 6, "{owned} of {} with {len} bytes", mine.len());
            bed.check();
        }
    }
}

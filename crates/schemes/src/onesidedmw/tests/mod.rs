//! Tests of the chains on the NIC, with clients that use raw verbs.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use rnic::nic::SoftNic;
use scheme::index::EntryId;
use scheme::{ClientId, ConnectRequest, GroupId, Lane, NodeScheme, NodeSettings, Scheme, bulletin};
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, Key, MemoryRegion, Nic, Op, QpAttr, QpChange,
    QpState, Qpn, QueuePair, Receive, ReceiveAttr, ReceiveRequest, Remote, Status, WorkRequest,
};

use super::layout::entry_index;
use super::layout::{reply, status};
use super::{Node, Options};

mod again;
mod crash;
mod limits;
mod published;
mod refused;

type Qp = <SoftNic as Nic>::Qp;
type Cq = <SoftNic as Nic>::Cq;
type Mr = <SoftNic as Nic>::Mr;

/// A client that uses none of the client code.
struct Raw {
    id: ClientId,
    cq: Cq,
    alloc: Qp,
    free: Qp,
    access: Vec<Qp>,
    /// Memory node's side of the access QPs: windows are bound to these.
    peers: Vec<Qpn>,
    memory: Mr,
}

#[derive(Clone, Debug)]
struct Chunk {
    addr: u64,
    entry: EntryId,
    keys: Vec<Key>,
}

fn settings(chunks: u64, group_size: u32, credits: u32) -> NodeSettings {
    let settings = NodeSettings::new(super::ONESIDEDMW, chunks, 4096);
    NodeSettings { group_size, credits, clients_max: 4, ..settings }
}

impl Raw {
    fn join(nic: &SoftNic, node: &mut Node<SoftNic>, id: u32, settings: &NodeSettings) -> Self {
        let pd = nic.alloc_pd().unwrap();
        let cq = nic.create_cq(CqAttr { entries: 1024, ignore_overrun: false }).unwrap();
        let qp = || {
            let receive = Receive::Own(ReceiveAttr { entries: 64, max_sges: 1 });
            let attr = QpAttr {
                send_cq: &cq,
                recv_cq: &cq,
                send_blocks: 256,
                receive,
                access: Access::REMOTE_WRITE,
            };
            nic.create_qp(&pd, attr).unwrap()
        };
        let (alloc, free) = (qp(), qp());
        let access: Vec<Qp> = (0..settings.lanes()).map(|_| qp()).collect();
        let memory = nic.alloc_dma(64 << 10).unwrap();
        let rights = Access::LOCAL_ALL | Access::REMOTE_WRITE;
        let memory = nic.reg_mr(&pd, &memory, rights).unwrap();
        // Without separation the client allocates over its first access QP.
        let alloc =
            if Options::of(settings).unwrap().separation { alloc } else { access[0].clone() };
        let management = match Options::of(settings).unwrap().separation {
            true => vec![alloc.qpn().raw(), free.qpn().raw()],
            false => vec![free.qpn().raw()],
        };
        let request = ConnectRequest {
            management,
            groups: vec![access.iter().map(|q| q.qpn().raw()).collect()],
            bulletin_addr: memory.memory().addr() + 32768,
            bulletin_rkey: memory.key().0,
            ..ConnectRequest::default()
        };
        let admitted = node.admit(ClientId(id), &request).unwrap();
        if Options::of(settings).unwrap().separation {
            alloc.connect(Qpn::new(admitted.management[0])).unwrap();
        }
        free.connect(Qpn::new(*admitted.management.last().unwrap())).unwrap();
        for (qp, &peer) in access.iter().zip(&admitted.groups[0]) {
            qp.connect(Qpn::new(peer)).unwrap();
        }
        let peers = admitted.groups[0].iter().map(|&q| Qpn::new(q)).collect();
        Self { id: ClientId(id), cq, alloc, free, access, peers, memory }
    }

    /// Re-establishes the management QPs, as the client code does.
    fn reset_management(&self, node: &mut Node<SoftNic>) {
        for qp in [&self.alloc, &self.free] {
            qp.modify(QpChange::Reset).unwrap();
        }
        let peers = loop {
            match node.reset_management(self.id).unwrap() {
                Some(peers) => break peers,
                None => drop(node.poll().unwrap()),
            }
        };
        self.alloc.connect(Qpn::new(peers[0])).unwrap();
        self.free.connect(Qpn::new(peers[1])).unwrap();
        self.drain();
    }

    fn send(&self, qp: &Qp, arguments: &[u8], slot: usize) {
        let target = self.memory.remote(slot * 64);
        self.memory.memory().zero(slot * 64, 64);
        let mut data = arguments.to_vec();
        data.extend(target.addr.to_be_bytes());
        data.extend(target.rkey.0.to_be_bytes());
        qp.post_recv(&ReceiveRequest { id: 1000 + slot as u64, to: &[] }).unwrap();
        let op = Op::SendInline { data: &data };
        qp.post_send(&[WorkRequest { id: slot as u64, op, signaled: true }]).unwrap();
    }

    fn ask_chunk(&self, slot: usize) {
        let mut arguments = Vec::new();
        for qpn in &self.peers {
            arguments.extend(&qpn.raw().to_be_bytes()[1..]);
        }
        self.send(&self.alloc, &arguments, slot);
    }

    /// Asks for a chunk, with a place for the reply that the NIC cannot write.
    fn ask_chunk_without_reply(&self) {
        let mut data = Vec::new();
        for qpn in &self.peers {
            data.extend(&qpn.raw().to_be_bytes()[1..]);
        }
        data.extend([0xee; 12]);
        self.alloc.post_recv(&ReceiveRequest { id: 1, to: &[] }).unwrap();
        let op = Op::SendInline { data: &data };
        self.alloc.post_send(&[WorkRequest { id: 2, op, signaled: true }]).unwrap();
        self.drain();
        assert_eq!(self.alloc.state().unwrap(), QpState::Error);
    }

    fn ask_free(&self, entry: EntryId, slot: usize) {
        self.send(&self.free, &entry_index(entry), slot);
    }

    fn drain(&self) -> Vec<Completion> {
        let mut all = Vec::new();
        let mut some = [Completion::EMPTY; 16];
        loop {
            match self.cq.poll(&mut some) {
                0 => return all,
                n => all.extend(&some[..n]),
            }
        }
    }

    fn reply(&self, slot: usize) -> [u8; reply::BYTES] {
        let mut bytes = [0; reply::BYTES];
        self.memory.memory().read(slot * 64, &mut bytes);
        bytes
    }

    fn chunk(&self, slot: usize) -> Result<Chunk, u8> {
        let b = self.reply(slot);
        if b[reply::STATUS] != status::GRANTED {
            return Err(b[reply::STATUS]);
        }
        let keys = (1..=self.access.len())
            .map(|j| {
                let index = &b[reply::KEYS + 3 * j..][..3];
                let tag = b[reply::TAGS + 8 * (j / 4) + 4 + j % 4];
                Key(u32::from_be_bytes([index[0], index[1], index[2], tag]))
            })
            .collect();
        Ok(Chunk {
            addr: u64::from_be_bytes(b[..8].try_into().unwrap()),
            entry: EntryId::new(u32::from_be_bytes([0, b[8], b[9], b[10]])),
            keys,
        })
    }

    fn allocate(&self) -> Result<Chunk, u8> {
        self.ask_chunk(0);
        self.drain();
        self.chunk(0)
    }

    fn free_status(&self, slot: usize) -> u8 {
        self.reply(slot)[reply::FREE_STATUS + 3]
    }

    fn free(&self, entry: EntryId) -> u8 {
        self.ask_free(entry, 0);
        self.drain();
        self.free_status(0)
    }

    /// Executes one access through lane `lane`; returns its completion status.
    fn access(&self, lane: usize, at: Remote, write: Option<&[u8]>, read: usize) -> Status {
        let to = [self.memory.sge(40000, read as u32)];
        let op = match write {
            Some(data) => Op::WriteInline { to: at, data },
            None => Op::Read { from: at, to: &to },
        };
        self.access[lane].post_send(&[WorkRequest { id: 7, op, signaled: true }]).unwrap();
        self.drain().iter().find(|c| c.id == 7).expect("a completion").status
    }

    fn read_back(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.memory().read(40000, &mut bytes);
        bytes
    }
}

/// Retires a client, and runs the CPU until the client is retired.
fn retire(node: &mut Node<SoftNic>, client: ClientId) {
    node.retire(client).unwrap();
    while !node.is_retired(client) {
        node.poll().unwrap();
    }
}

#[test]
fn chunks_of_every_group_size_are_granted_used_and_freed() {
    for (group, separation) in (2..=6).flat_map(|group| [(group, true), (group, false)]) {
        let nic = SoftNic::inline();
        let settings =
            NodeSettings { groups_max: 2, ..settings(8, group, 4) }.with("separation", separation);
        let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
        let a = Raw::join(&nic, &mut node, 1, &settings);
        let mut held = Vec::new();
        for _ in 0..8 {
            held.push(a.allocate().unwrap());
        }
        assert_eq!(held.iter().map(|c| c.entry).collect::<HashSet<_>>().len(), 8);
        assert_eq!(a.allocate().unwrap_err(), status::EMPTY);
        for c in &held {
            for (lane, &rkey) in c.keys.iter().enumerate() {
                let at = Remote { addr: c.addr + 8, rkey };
                assert_eq!(a.access(lane, at, Some(b"granary!"), 0), Status::Success);
                assert_eq!(a.access(lane, at, None, 8), Status::Success);
                assert_eq!(a.read_back(8), b"granary!");
            }
        }
        node.audit().unwrap();
        for c in &held {
            assert_eq!(a.free(c.entry), status::FREED);
        }
        assert!(!node.poll().unwrap(), "the CPU had something to do");
        node.audit().unwrap();
        let s = node.status().unwrap();
        assert_eq!((s.allocations_nic, s.frees_nic, s.free), (8, 8, 8));
        assert_eq!((s.allocations_cpu, s.frees_cpu), (0, 0));
    }
}

/// Without separation each access QP carries a chain, which binds windows for its whole group.
#[test]
fn without_separation_every_access_qp_allocates() {
    let nic = SoftNic::inline();
    let settings = NodeSettings { groups_max: 1, ..settings(12, 4, 4) }.with("separation", false);
    let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
    let mut a = Raw::join(&nic, &mut node, 1, &settings);
    for round in 0..40 {
        for qp in a.access.clone() {
            a.alloc = qp;
            let chunk = a.allocate().unwrap();
            for (lane, &rkey) in chunk.keys.iter().enumerate() {
                let at = Remote { addr: chunk.addr, rkey };
                assert_eq!(a.access(lane, at, Some(b"granary!"), 0), Status::Success);
            }
            if round > 0 {
                assert_eq!(a.free(chunk.entry), status::FREED);
            }
        }
        node.audit().unwrap();
    }
    // The client departs with three grants, and with allocations in flight on all access QPs.
    for (slot, qp) in a.access.clone().into_iter().enumerate() {
        a.alloc = qp;
        a.ask_chunk(slot);
    }
    assert_eq!(node.status().unwrap().free, 6);
    retire(&mut node, a.id);
    node.audit().unwrap();
    assert_eq!(node.status().unwrap().free, 12);
}

#[test]
fn many_laps_with_many_in_flight_keep_the_pool_whole() {
    [true, false].into_iter().for_each(many_laps);
}

fn many_laps(separation: bool) {
    let nic = SoftNic::inline();
    let settings =
        NodeSettings { groups_max: 1, ..settings(7, 3, 8) }.with("separation", separation);
    let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
    let clients: Vec<Raw> = (1..=3).map(|id| Raw::join(&nic, &mut node, id, &settings)).collect();
    let mut held: Vec<Vec<Chunk>> = vec![Vec::new(); 3];
    let mut owner: HashMap<EntryId, usize> = HashMap::new();
    let (mut granted, mut empty) = (0, 0);
    let mut random = 0x2545_f491_4f6c_dd1du64;
    // Enough rounds for the 16-bit building-block indices to wrap many times.
    for _ in 0..40_000 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let (id, burst) = ((random % 3) as usize, (random >> 8) as usize % 8 + 1);
        let c = &clients[id];
        if random >> 20 & 1 == 0 {
            (0..burst).for_each(|slot| c.ask_chunk(slot));
            c.drain();
            for slot in 0..burst {
                match c.chunk(slot) {
                    Ok(chunk) => {
                        assert_eq!(owner.insert(chunk.entry, id), None, "allocated twice");
                        held[id].push(chunk);
                        granted += 1;
                    }
                    Err(why) => {
                        assert_eq!(why, status::EMPTY);
                        empty += 1;
                    }
                }
            }
        } else {
            let burst = burst.min(held[id].len());
            let back: Vec<Chunk> = held[id].drain(..burst).collect();
            for (slot, chunk) in back.iter().enumerate() {
                owner.remove(&chunk.entry);
                c.ask_free(chunk.entry, slot);
            }
            c.drain();
            for slot in 0..burst {
                assert_eq!(c.free_status(slot), status::FREED);
            }
        }
    }
    assert!(granted > 20_000 && empty > 20_000, "{granted} granted, {empty} empty");
    node.audit().unwrap();
    assert!(!node.poll().unwrap(), "the CPU had something to do");
}

#[test]
fn next_owner_reads_zeros_and_old_keys_are_invalid() {
    let nic = SoftNic::inline();
    let settings = settings(1, 3, 4);
    let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
    let a = Raw::join(&nic, &mut node, 1, &settings);
    let b = Raw::join(&nic, &mut node, 2, &settings);
    let old = a.allocate().unwrap();
    let at = Remote { addr: old.addr, rkey: old.keys[0] };
    assert_eq!(a.access(0, at, Some(&[0xaa; 64]), 0), Status::Success);
    assert_eq!(a.free(old.entry), status::FREED);
    assert_eq!(a.access(0, at, None, 64), Status::RemoteAccess);
    let new = b.allocate().unwrap();
    assert_eq!((new.addr, new.entry), (old.addr, old.entry));
    assert_ne!(new.keys, old.keys);
    let at = Remote { addr: new.addr, rkey: new.keys[0] };
    assert_eq!(b.access(0, at, None, 4096), Status::Success);
    assert!(b.read_back(4096).iter().all(|&x| x == 0));
    // The right key from another client, and from another lane of the same client.
    assert_eq!(a.access(1, at, None, 8), Status::RemoteAccess);
    assert_eq!(b.access(1, at, None, 8), Status::RemoteAccess);
    // The broken lane is re-established; its windows are still bound.
    let peer = node.reset_access(ClientId(2), GroupId(0), Lane(1)).unwrap();
    b.access[1].connect(Qpn::new(peer)).unwrap();
    let at = Remote { addr: new.addr, rkey: new.keys[1] };
    assert_eq!(b.access(1, at, None, 8), Status::Success);
    let beyond = Remote { addr: new.addr + 4089, ..at };
    assert_eq!(b.access(1, beyond, None, 8), Status::RemoteAccess);
}

#[test]
fn foreign_free_is_refused_and_affects_no_other_client() {
    let nic = SoftNic::inline();
    for in_flight in 0..8 {
        let settings = settings(16, 3, 8);
        let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
        let a = Raw::join(&nic, &mut node, 1, &settings);
        let b = Raw::join(&nic, &mut node, 2, &settings);
        let victim = a.allocate().unwrap();
        let mine: Vec<Chunk> = (0..8).map(|_| b.allocate().unwrap()).collect();
        // Invalid frees: foreign, double, the null entry, beyond the table; each after `in_flight`
        // valid ones.
        let freed = mine[7].entry;
        assert_eq!(b.free(freed), status::FREED);
        let [null, beyond] = [16, 0xff_ffff].map(EntryId::new);
        for (round, bad) in [victim.entry, freed, null, beyond].into_iter().enumerate() {
            let good: Vec<Chunk> = (0..in_flight)
                .map(|i| if round == 0 { mine[i].clone() } else { b.allocate().unwrap() })
                .collect();
            let slot_of_bad = in_flight / 2;
            let mut slot = 0;
            for (i, chunk) in good.iter().enumerate() {
                if i == slot_of_bad {
                    b.ask_free(bad, slot);
                    slot += 1;
                }
                b.ask_free(chunk.entry, slot);
                slot += 1;
            }
            if in_flight == 0 {
                b.ask_free(bad, slot);
            }
            b.drain();
            assert!(node.poll().unwrap(), "the CPU was not notified");
            b.drain();
            let mut again = Vec::new();
            for slot in 0..=in_flight {
                let i = if slot > slot_of_bad { slot - 1 } else { slot };
                match b.free_status(slot) {
                    status::REFUSED => assert_eq!(slot, slot_of_bad),
                    status::FREED => assert!(slot < slot_of_bad),
                    status::AGAIN => again.push(good[i].entry),
                    other => panic!("slot {slot}: status {other}"),
                }
            }
            for entry in again {
                assert_eq!(b.free(entry), status::FREED);
            }
            let at = Remote { addr: victim.addr, rkey: victim.keys[0] };
            assert_eq!(a.access(0, at, None, 8), Status::Success);
            node.audit().unwrap();
        }
        assert_eq!(node.status().unwrap().refused, 4);
        // The client can continue for many laps.
        for _ in 0..200 {
            let c = b.allocate().unwrap();
            assert_eq!(b.free(c.entry), status::FREED);
        }
        node.audit().unwrap();
    }
}

#[test]
fn chunks_of_a_departed_client_are_reclaimed() {
    let nic = SoftNic::inline();
    let settings = settings(64, 3, 4);
    let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
    let a = Raw::join(&nic, &mut node, 1, &settings);
    let b = Raw::join(&nic, &mut node, 2, &settings);
    let kept = a.allocate().unwrap();
    let lost: Vec<Chunk> = (0..63).map(|_| b.allocate().unwrap()).collect();
    assert_eq!(a.allocate().unwrap_err(), status::EMPTY);
    let at = Remote { addr: lost[5].addr, rkey: lost[5].keys[0] };
    assert_eq!(b.access(0, at, Some(b"secret"), 0), Status::Success);
    retire(&mut node, b.id);
    node.audit().unwrap();
    let s = node.status().unwrap();
    assert_eq!((s.frees_cpu, s.allocations_nic), (63, 64));
    assert_eq!(b.access(0, at, None, 8), Status::RetryExceeded);
    for _ in 0..63 {
        let c = a.allocate().unwrap();
        assert_ne!(c.entry, kept.entry);
        assert_eq!(
            a.access(0, Remote { addr: c.addr, rkey: c.keys[0] }, None, 4096),
            Status::Success
        );
        assert!(a.read_back(4096).iter().all(|&x| x == 0));
    }
    node.audit().unwrap();
}

#[test]
fn empty_and_available_again_are_broadcast() {
    let nic = SoftNic::inline();
    let settings = settings(1, 3, 4);
    let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
    let a = Raw::join(&nic, &mut node, 1, &settings);
    let b = Raw::join(&nic, &mut node, 2, &settings);
    assert!(!node.client_waits(a.id).unwrap(), "memory is available");
    let c = a.allocate().unwrap();
    assert_eq!(b.allocate().unwrap_err(), status::EMPTY);
    assert!(node.client_waits(b.id).unwrap());
    assert!(node.is_watching());
    let state = |r: &Raw| r.memory.memory().load_be32(32768);
    assert_eq!((state(&a), state(&b)), (1, 1));
    assert!(!node.poll().unwrap());
    assert_eq!(a.free(c.entry), status::FREED);
    assert!(node.poll().unwrap());
    assert_eq!((state(&a), state(&b)), (0, 0));
    assert!(!node.is_watching());
    b.allocate().unwrap();
}

#[test]
fn unwritable_reply_breaks_only_its_sender() {
    let nic = SoftNic::inline();
    let settings = settings(8, 3, 4);
    let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
    let a = Raw::join(&nic, &mut node, 1, &settings);
    let b = Raw::join(&nic, &mut node, 2, &settings);
    a.ask_chunk_without_reply();
    let open = |node: &Node<SoftNic>| [&a, &b].map(|raw| node.management_is_open(raw.id).unwrap());
    assert_eq!(open(&node), [false, true]);
    // Only the request whose reply was lost completes: flushed receives are not requests.
    assert_eq!(node.status().unwrap().free, 7);
    b.allocate().unwrap();
    a.reset_management(&mut node);
    a.drain();
    assert_eq!(open(&node), [true, true]);
    for _ in 0..50 {
        let c = a.allocate().unwrap();
        assert_eq!(a.free(c.entry), status::FREED);
    }
    // The undelivered grant was reclaimed.
    assert_eq!(node.status().unwrap().free, 7);
    retire(&mut node, a.id);
    retire(&mut node, b.id);
    node.audit().unwrap();
    assert_eq!(node.status().unwrap().free, 8);
}

/// The client's QPs may not be connected yet: a WRITE would break the memory node's side.
#[test]
fn idle_client_gets_no_empty_broadcast() {
    let nic = SoftNic::inline();
    let settings = settings(2, 3, 4);
    let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
    let a = Raw::join(&nic, &mut node, 1, &settings);
    let b = Raw::join(&nic, &mut node, 2, &settings);
    while a.allocate().is_ok() {}
    assert!(node.client_waits(a.id).unwrap());
    let told = |raw: &Raw| raw.memory.memory().load_be64(32768) >> 32;
    assert_eq!([told(&a), told(&b)], [bulletin::EMPTY as u64, bulletin::AVAILABLE as u64]);
}

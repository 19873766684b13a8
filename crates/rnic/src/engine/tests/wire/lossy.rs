//! Mixed operations in both directions over a lossy network, compared with a model.
//!
//! Every operation of a QP is executed exactly once and in order, so the model knows the result of
//! each atomic, the next message, and the contents of memory at the end.

use super::*;
use std::collections::VecDeque;
use verbs::wqe::Sge;
use verbs::{PathMtu, cqe};

const SLOT: usize = 8 << 10;
const SLOTS: usize = 8;
/// Maximum number of operations in flight, and number of posted receives.
const DEPTH: usize = 16;
/// Layout of an end's memory: a read-only part, then the slots that are written, then the words.
const WRITTEN: usize = SLOT;
const COUNTER: usize = WRITTEN + SLOTS * SLOT;
const WORD: usize = COUNTER + 8;
const TARGET: usize = WORD + 8;

fn fixed(i: usize) -> u8 {
    (i * 31 + i / 256) as u8
}

fn salted(len: usize, salt: u64) -> Vec<u8> {
    let salt = salt as usize & 0xffff;
    (0..len).map(|i| (i * 13 + salt * 101 + (i >> 8)) as u8).collect()
}

/// Expected effect of an operation when it completes.
#[derive(Clone, Debug)]
enum Op {
    Write,
    /// READ of the read-only part, or of a slot that no operation in flight writes.
    Read {
        want: Vec<u8>,
        slot: Option<usize>,
    },
    /// CAS or FAA: the expected old value.
    Atomic {
        old: u64,
    },
    Send,
}

/// The next expected message.
#[derive(Clone, Debug)]
enum Arriving {
    Send { len: usize, salt: u64, imm: Option<u32> },
    WriteImm { len: usize, imm: u32 },
}

/// One end: its QP, its operations in flight, and its expectations of the other end.
struct End {
    qp: TestQp,
    /// Buffers of operations in flight, then buffers of receives.
    buffers: Mr,
    target: Mr,
    under_way: VecDeque<(usize, Op)>,
    arriving: VecDeque<Arriving>,
    /// Model of the other end's slots, as written by this end.
    slots: Vec<Vec<u8>>,
    reading: [u32; SLOTS],
    counter: u64,
    word: u64,
    posted: u64,
    completed: u64,
}

impl End {
    fn buffer(&self, at: usize, len: usize) -> Sge {
        self.buffers.sge(at % DEPTH * SLOT, len)
    }

    fn receive(&self, at: usize) -> usize {
        (DEPTH + at % DEPTH) * SLOT
    }
}

pub struct Run {
    pub net: Net,
    ends: [End; 2],
    mtu: usize,
}

impl Run {
    pub fn new(seed: u64, faults: Faults, link: &Link) -> Self {
        let mut net = Net::new(seed);
        let qps = net.pair(link);
        let mut end = 0;
        let ends = qps.map(|qp| {
            let bed = &mut net.beds[end];
            end += 1;
            let buffers = bed.mr(PF, qp.pd, 2 * DEPTH * SLOT, ALL);
            let target = bed.mr(PF, qp.pd, TARGET, ALL);
            let fixed: Vec<u8> = (0..SLOT).map(fixed).collect();
            target.mem.write(0, &fixed);
            End {
                qp,
                buffers,
                target,
                under_way: VecDeque::new(),
                arriving: VecDeque::new(),
                slots: vec![vec![0; SLOT]; SLOTS],
                reading: [0; SLOTS],
                counter: 0,
                word: 0,
                posted: 0,
                completed: 0,
            }
        });
        net.faults = faults;
        Self { net, ends, mtu: link.mtu.bytes() as usize }
    }

    fn len(&mut self) -> usize {
        let r = &mut self.net;
        match r.below(8) {
            0 => 0,
            1 | 2 => r.below(64) as usize,
            3 => self.mtu.saturating_sub(1) + r.below(3) as usize,
            4 | 5 => r.below(1024) as usize,
            _ => r.below(SLOT as u64 - 8) as usize,
        }
        .min(SLOT)
    }

    fn post(&mut self, end: usize) {
        let len = self.len();
        let kind = self.net.below(12);
        let salt = self.net.random.bits();
        let slot = self.net.below(SLOTS as u64) as usize;
        let [first, second] = &mut self.ends;
        let (me, far) = if end == 0 { (first, second) } else { (second, first) };
        let at = me.qp.producer as usize;
        let from = (salt % 8) as usize;
        let buffer = me.buffer(at, len);
        let result = me.buffer(at, 8);
        let target = |offset: usize| far.target.remote(offset);
        let data = salted(len, salt);
        let place = WRITTEN + slot * SLOT + from.min(SLOT - len);
        let writes = matches!(kind, 0..=3) && me.reading[slot] == 0;
        let bed = &mut self.net.beds[end];
        let put = |me: &End, data: &[u8]| me.buffers.mem.write(at % DEPTH * SLOT, data);
        let zero = |me: &End| me.buffers.mem.zero(at % DEPTH * SLOT, SLOT);
        let op = match kind {
            0..=2 if writes => {
                put(me, &data);
                me.slots[slot][from.min(SLOT - len)..][..len].copy_from_slice(&data);
                bed.post(&mut me.qp, |w| _ = w.rdma_write(target(place), &[buffer]).signaled());
                Op::Write
            }
            3 if writes => {
                put(me, &data);
                me.slots[slot][from.min(SLOT - len)..][..len].copy_from_slice(&data);
                let imm = salt as u32;
                far.arriving.push_back(Arriving::WriteImm { len, imm });
                bed.post(&mut me.qp, |w| {
                    w.rdma_write_imm(target(place), &[buffer], imm).signaled();
                });
                Op::Write
            }
            4 | 5 => {
                zero(me);
                let from = from.min(SLOT - len);
                let want = (from..from + len).map(fixed).collect();
                bed.post(&mut me.qp, |w| _ = w.rdma_read(target(from), &[buffer]).signaled());
                Op::Read { want, slot: None }
            }
            6 => {
                zero(me);
                me.reading[slot] += 1;
                let offset = WRITTEN + slot * SLOT;
                bed.post(&mut me.qp, |w| _ = w.rdma_read(target(offset), &[buffer]).signaled());
                Op::Read { want: me.slots[slot][..len].to_vec(), slot: Some(slot) }
            }
            7 => {
                let old = std::mem::replace(&mut me.word, salt);
                bed.post(&mut me.qp, |w| {
                    w.compare_swap(target(WORD), old, salt, result).signaled();
                });
                Op::Atomic { old }
            }
            8 | 9 => {
                let old = me.counter;
                me.counter += 1 + salt % 5;
                bed.post(&mut me.qp, |w| {
                    w.fetch_add(target(COUNTER), 1 + salt % 5, result).signaled();
                });
                Op::Atomic { old }
            }
            _ => {
                put(me, &data);
                let imm = (kind == 10).then_some(salt as u32);
                far.arriving.push_back(Arriving::Send { len, salt, imm });
                bed.post(&mut me.qp, |w| {
                    match imm {
                        Some(imm) => w.send_imm(&[buffer], imm),
                        None => w.send(&[buffer]),
                    };
                    w.signaled();
                });
                Op::Send
            }
        };
        me.under_way.push_back((at, op));
        me.posted += 1;
    }

    /// Checks the completions of an end.
    fn look(&mut self, end: usize) {
        let me = &mut self.ends[end];
        while let Some(cqe) = me.qp.send_cq.reader.poll() {
            let (at, op) = me.under_way.pop_front().expect("a posted operation completes");
            assert_eq!((cqe.error, cqe.wqe_counter), (None, at as u16), "{op:?}");
            let got = |len: usize| me.buffers.bytes(at % DEPTH * SLOT, len);
            match op {
                Op::Write | Op::Send => {}
                Op::Read { want, slot } => {
                    assert!(got(want.len()) == want, "READ {at} of {} bytes", want.len());
                    if let Some(slot) = slot {
                        me.reading[slot] -= 1;
                    }
                }
                Op::Atomic { old } => {
                    let found = u64::from_be_bytes(got(8).try_into().unwrap());
                    assert_eq!(found, old, "atomic {at} was not executed exactly once");
                }
            }
            me.completed += 1;
        }
        while let Some(cqe) = me.qp.recv_cq.reader.poll() {
            assert_eq!(cqe.error, None);
            let want = me.arriving.pop_front().expect("a message was sent");
            match want {
                Arriving::Send { len, salt, imm } => {
                    let opcode = match imm {
                        Some(_) => cqe::opcode::RESP_SEND_IMM,
                        None => cqe::opcode::RESP_SEND,
                    };
                    assert_eq!((cqe.opcode, cqe.byte_count), (opcode, len as u32));
                    assert!(imm.is_none_or(|imm| imm == cqe.imm));
                    let got = me.buffers.bytes(me.receive(cqe.wqe_counter as usize), len);
                    assert!(got == salted(len, salt), "message of {len} bytes");
                }
                Arriving::WriteImm { len, imm } => {
                    let seen = (cqe.opcode, cqe.byte_count, cqe.imm);
                    assert_eq!(seen, (cqe::opcode::RESP_WR_IMM, len as u32, imm));
                }
            }
        }
    }

    /// Posts receives; sometimes late.
    fn post_receives(&mut self, end: usize) {
        if self.net.below(3) == 0 {
            return;
        }
        let me = &mut self.ends[end];
        let some = 1 + self.net.below(4) as u32;
        let bed = &mut self.net.beds[end];
        let used = bed.e.query_qp(PF, me.qp.qpn).unwrap().progress.recv_consumer;
        for _ in 0..some {
            if me.qp.recv_producer.wrapping_sub(used) & 0xffff >= DEPTH as u32 {
                return;
            }
            let at = me.receive(me.qp.recv_producer as usize);
            let list = [me.buffers.sge(at, 100), me.buffers.sge(at + 100, SLOT - 100)];
            bed.post_recv(&mut me.qp, &list);
        }
    }

    pub fn go(&mut self, ops: u64) {
        let mut idle = 0;
        while self.ends.iter().any(|e| e.completed < ops) {
            for end in 0..2 {
                self.post_receives(end);
                let burst = 1 + self.net.below(DEPTH as u64);
                for _ in 0..burst {
                    let me = &self.ends[end];
                    if me.posted < ops && me.under_way.len() < DEPTH {
                        self.post(end);
                    }
                }
                self.net.turn(end);
            }
            idle = if self.net.pass() { 0 } else { idle + 1 };
            assert!(idle < 1000, "no progress: {:?}", self.ends.each_ref().map(|e| &e.under_way));
            (0..2).for_each(|end| self.look(end));
        }
        for (me, far) in [(0, 1), (1, 0)] {
            let (me, far) = (&self.ends[me], &self.ends[far]);
            for (slot, want) in me.slots.iter().enumerate() {
                assert!(far.target.bytes(WRITTEN + slot * SLOT, SLOT) == *want, "slot {slot}");
            }
            assert_eq!(far.target.mem.load_be64(COUNTER), me.counter);
            assert_eq!(far.target.mem.load_be64(WORD), me.word);
            assert!(far.arriving.is_empty());
        }
    }
}

/// Runs `ops` operations in each direction.
fn mixed(seed: u64, ops: u64, faults: Faults, link: Link) -> Run {
    println!("seed {seed}, {faults:?}, {link:?}");
    let mut run = Run::new(seed, faults, &link);
    run.go(ops);
    let stats = [0, 1].map(|end| run.net.beds[end].e.wire_stats().clone());
    println!("{} ms, spoilt {}, {stats:?}", run.net.now / 1_000_000, run.net.spoilt());
    run
}

/// Number of operations of a test: `few`, or `long` if GRANARY_TEST_FULL is set.
fn operations(few: u64, long: u64) -> u64 {
    if std::env::var_os("GRANARY_TEST_FULL").is_some() { long } else { few }
}

const LOSSES: [u32; 3] = [10, 100, 1000];

#[test]
#[cfg_attr(miri, ignore = "thousands of operations")]
fn mixed_operations_survive_loss() {
    for (seed, loss) in LOSSES.into_iter().enumerate() {
        let faults = Faults { loss, ..Faults::default() };
        let run = mixed(100 + seed as u64, operations(2000, 1_000_000), faults, Link::default());
        let stats = run.net.beds[0].e.wire_stats();
        assert!(stats.repeated > 0 && stats.naks_in > 0, "no packet was lost: {stats:?}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "thousands of operations")]
fn mixed_operations_survive_all_faults_at_once() {
    for (seed, loss) in LOSSES.into_iter().enumerate() {
        let faults = Faults { loss, duplicates: 500, delays: 500, spoilt: loss };
        let mtu = PathMtu::ALL[seed];
        let link = Link { mtu, rd_atomic: 1 + seed as u8 * 3, ..Link::default() };
        let run = mixed(200 + seed as u64, operations(1500, 100_000), faults, link);
        let stats = run.net.beds[1].e.wire_stats();
        assert!(stats.duplicates > 0 && stats.ahead > 0 && run.net.spoilt() > 0);
    }
}

#[test]
#[cfg_attr(miri, ignore = "thousands of operations")]
fn authenticated_operations_survive_all_faults_at_once() {
    for (seed, loss) in LOSSES.into_iter().enumerate() {
        let faults = Faults { loss, duplicates: 500, delays: 500, spoilt: loss };
        let mtu = PathMtu::ALL[4 - seed];
        let run = mixed(600 + seed as u64, 1500, faults, Link { mtu, ..Link::authenticated() });
        let stats = run.net.beds[1].e.wire_stats();
        assert!(stats.duplicates > 0 && stats.ahead > 0 && run.net.spoilt() > 0, "{stats:?}");
        assert_eq!(stats.bad_icrc, 0, "no packet has an ICRC");
    }
}

/// The secret determines the initial PSNs; packets have an ICRC.
#[test]
#[cfg_attr(miri, ignore = "thousands of operations")]
fn operations_with_a_secret_and_without_tags_survive_loss() {
    let link = Link { secret: Some(([3; 32], false)), ..Link::default() };
    let run = mixed(700, 500, Faults { loss: 100, spoilt: 100, ..Faults::default() }, link);
    let stats = run.net.beds[1].e.wire_stats();
    assert!(stats.bad_icrc > 0 && stats.forged == 0, "{stats:?}");
}

#[test]
#[cfg_attr(miri, ignore = "thousands of operations")]
fn mixed_operations_on_a_good_network_repeat_nothing() {
    for (seed, mtu) in [(300, PathMtu::Mtu256), (301, PathMtu::Mtu4096)] {
        let link = Link { mtu, ..Link::default() };
        let run = mixed(seed, operations(2000, 100_000), Faults::default(), link);
        for bed in &run.net.beds {
            let stats = bed.e.wire_stats();
            // A request that found no receive WQE is retransmitted, with all packets behind it.
            assert_eq!((stats.timeouts, stats.stray), (0, 0), "{stats:?}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "thousands of operations")]
fn sequence_numbers_wrap_around() {
    // With 1 KiB packets a run uses a few tens of thousands of PSNs, so it starts shortly before
    // the wrap-around.
    for (seed, back) in [(400, 1), (401, 1000), (402, 5000)] {
        let faults = Faults { loss: 100, duplicates: 200, delays: 200, spoilt: 0 };
        let psn = [0x100_0000 - back, 0x100_0000 - back / 2 - 1];
        mixed(
            seed,
            operations(1500, 100_000),
            faults,
            Link { psn, mtu: PathMtu::Mtu256, ..Link::default() },
        );
    }
}

//! Attacks by load on the NIC and on the memory node's CPU. They measure the effect on the victims'
//! latency, and leave work in flight when a process stops or dies.
//!
//! Most loads take no CPU time of the attacker. An *endless* ring is a managed send queue that
//! advances its own SEND_EN with a FAA and enables itself, so that the NIC has work as long as the
//! attacker's process lives.
//!
//! ```text
//! | work | work | ... | FAA: the index of SEND_EN += blocks | SEND_EN of this queue |   (repeats)
//! ```

use std::io::BufRead;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rnic::port::control::{MWS_MAX, Reply, Verb};
use rnic::port::shm::raw;
use serde_json::{Value, json};
use verbs::wqe::{Builder, Remote, Sge, Umr, UmrFlags, WQEBB};
use verbs::{Access, DmaMemory, Key, MwKind, QpChange};

use crate::Arguments;
use crate::compute::{Answer, Compute, LONG, SLOT, qpn_bytes, remote};
use crate::nic::part;
use crate::queue::{POLL_INTERVAL, Qp, Shape};

/// QPs of a flood.
const QPS: usize = 64;
/// Building blocks of an endless ring.
const BLOCKS: u32 = 64;

/// Leaves requests of every kind in flight and prints a report. Continues after a line on standard
/// input, unless it is killed.
pub fn in_flight(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    let chunk = me.allocate()?;
    let lanes = qpn_bytes(&me.lanes());
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(me.allocate()?);
    }
    for i in 0..12 {
        me.alloc.send(&me.nic, &lanes, i * SLOT);
    }
    for (i, chunk) in held.iter().enumerate() {
        me.free.send(&me.nic, &chunk.entry.to_be_bytes()[1..], i * SLOT);
    }
    let from = me.sge(0, chunk.len as u32);
    for (lane, qp) in me.access.iter_mut().enumerate() {
        let to = remote(chunk.addr, chunk.keys[lane]);
        for i in 0..60 {
            qp.put(|b| {
                b.rdma_write(to, &[from]);
                if i == 59 {
                    b.signaled();
                }
            });
        }
        qp.write_doorbell(&me.nic);
    }
    a.report(&json!({ "in_flight": 12 + held.len() + 120 }))?;
    // Every request must complete normally, even if the process was stopped in between.
    for _ in 0..12 {
        ensure!(matches!(me.alloc.answer(0, LONG), Answer::Reply(_)), "an allocation");
    }
    for _ in 0..held.len() {
        ensure!(matches!(me.free.answer(0, LONG), Answer::Reply(_)), "a free");
    }
    for qp in &mut me.access {
        let cqe = qp.wait(LONG).context("the WRITEs did not complete")?;
        ensure!(cqe.error.is_none(), "{cqe:?}");
    }
    me.release(&chunk)?;
    let own = me.allocate()?;
    me.release(&own)?;
    Ok(json!({}))
}

/// Runs one kind of load, switched on and off by lines on standard input. `--seed` is the kind's
/// index in [`KINDS`].
pub fn switched(a: &Arguments) -> Result<Value> {
    let (name, make) = KINDS.get(a.seed as usize).context("unknown kind of load")?;
    let mut me = Compute::join(a)?;
    let mut load = make(&mut me)?;
    println!("ready");
    let (sender, commands) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    loop {
        match commands.recv() {
            Ok(command) if command == "on" => {
                println!("{}", json!({ "on": name }));
                load.on(&mut me, &commands)?;
                println!("{}", json!({ "off": name }));
            }
            Ok(command) if command == "go" => {}
            Ok(command) => bail!("unexpected command {command:?}"),
            Err(_) => return Ok(json!({})),
        }
    }
}

/// A load on the NIC or on the memory node's CPU.
trait Load {
    /// Runs the load until the command `off`, then stops it.
    fn on(&mut self, me: &mut Compute, commands: &Receiver<String>) -> Result<()>;
}

type Make = fn(&mut Compute) -> Result<Box<dyn Load>>;

/// The kinds of load. The tests refer to them by index, and know which take CPU time.
const KINDS: [(&str, Make); 16] = [
    ("an idle neighbour", |_| Ok(Box::new(Idle))),
    ("an honest neighbour that takes a CPU", |me| Ok(Box::new(Honest::new(me)?))),
    ("64 endless rings of NOPs", |me| endless(me, 1, Work::Nop)),
    ("64 endless rings of 8-byte WRITEs", |me| endless(me, 1, Work::Write(8))),
    ("64 endless rings of 1 MiB WRITEs", |me| endless(me, 1, Work::Write(1 << 20))),
    ("64 endless rings of FAAs", |me| endless(me, 1, Work::Faa)),
    ("64 endless rings of binds and unbinds", |me| endless(me, 1, Work::Bind)),
    ("512 endless rings of 4 KiB READs", |me| endless(me, 8, Work::Read(4096))),
    ("500 QPs that wait on one busy CQ", |me| Ok(Box::new(Waiters::new(me)?))),
    ("1,000 idle QPs with doorbells", |me| Ok(Box::new(Idlers::new(me)?))),
    ("allocations and frees, 16 in flight", |_| Ok(Box::new(Allocations))),
    ("frees that are refused", |_| Ok(Box::new(Refused))),
    ("accesses that are refused, and resets", |_| Ok(Box::new(Errors))),
    ("control verbs: windows, regions, CQs", |me| Ok(Box::new(Verbs::new(me)?))),
    ("doorbells, wake-ups and hints that say anything", |me| Ok(Box::new(Doorbells::new(me)?))),
    ("an honest neighbour that naps", |me| Ok(Box::new(Napper(Honest::new(me)?)))),
];

/// True after the command `off`.
fn is_off(commands: &Receiver<String>) -> Result<bool> {
    match commands.try_recv() {
        Ok(command) if command == "off" => Ok(true),
        Ok(command) => bail!("unexpected command {command:?}"),
        Err(TryRecvError::Empty) => Ok(false),
        Err(TryRecvError::Disconnected) => bail!("standard input was closed"),
    }
}

/// Sleeps until the command `off`.
fn sleep_until_off(commands: &Receiver<String>) -> Result<()> {
    match commands.recv() {
        Ok(command) if command == "off" => Ok(()),
        other => bail!("unexpected command {other:?}"),
    }
}

struct Idle;

impl Load for Idle {
    fn on(&mut self, _: &mut Compute, commands: &Receiver<String>) -> Result<()> {
        sleep_until_off(commands)
    }
}

/// A normal client: reads from its own chunk, one READ at a time, and spins for the completion.
struct Honest {
    at: Remote,
}

impl Honest {
    fn new(me: &mut Compute) -> Result<Self> {
        let chunk = me.allocate()?;
        Ok(Self { at: remote(chunk.addr, chunk.keys[0]) })
    }
}

impl Load for Honest {
    fn on(&mut self, me: &mut Compute, commands: &Receiver<String>) -> Result<()> {
        let to = me.sge(0, 64);
        while !is_off(commands)? {
            for _ in 0..64 {
                me.access[0].post(&me.nic, |b| _ = b.rdma_read(self.at, &[to]).signaled());
                while me.access[0].poll().is_none() {
                    std::hint::spin_loop();
                }
            }
        }
        Ok(())
    }
}

/// A normal client that reads from its own chunk and sleeps [`POLL_INTERVAL`] between two READs.
struct Napper(Honest);

impl Load for Napper {
    fn on(&mut self, me: &mut Compute, commands: &Receiver<String>) -> Result<()> {
        while !is_off(commands)? {
            ensure!(me.read(0, self.0.at, 64)? == 0, "a READ of its own chunk");
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

/// Builds one WQE.
type Wqe = Box<dyn Fn(&mut Builder)>;

/// Work of an endless ring.
#[derive(Clone, Copy)]
enum Work {
    Nop,
    Write(u32),
    Read(u32),
    Faa,
    Bind,
}

struct Endless {
    rings: Vec<Qp>,
}

fn endless(me: &mut Compute, times: usize, work: Work) -> Result<Box<dyn Load>> {
    // Memory for the data and for the results of atomics.
    let memory = me.nic.memory(2 << 20)?;
    let key = me.nic.register(me.pd, &memory, Access::LOCAL_ALL | Access::REMOTE_ALL)?;
    let rings = (0..QPS * times)
        .map(|_| {
            let mut qp = endless_qp(me)?;
            write_ring(me, &mut qp, &memory, key, work)?;
            Ok(qp)
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(Box::new(Endless { rings }))
}

fn endless_qp(me: &Compute) -> Result<Qp> {
    Qp::new(&me.nic, me.pd, Shape::endless(BLOCKS))
}

/// Fills a ring with work, followed by the FAA and the SEND_EN that repeat it.
fn write_ring(me: &Compute, qp: &mut Qp, memory: &DmaMemory, key: Key, work: Work) -> Result<()> {
    let ring = me.nic.register(me.pd, &qp.memory, Access::LOCAL_ALL | Access::REMOTE_ALL)?;
    let window = match work {
        Work::Bind => Some(me.nic.windows(me.pd, MwKind::Type2, 1)?[0]),
        _ => None,
    };
    let half = memory.addr() + (1 << 20);
    let near = memory.addr();
    let local = move |len| Sge { addr: near, len, lkey: key };
    let far = Remote { addr: half, rkey: key };
    let qpn = qp.qpn;
    let close = BLOCKS as u16 - 2;
    while qp.next < close {
        let room = (close - qp.next) as u32;
        let mut wqes: Vec<Wqe> = Vec::new();
        match work {
            Work::Nop => wqes.push(Box::new(|b| _ = b.nop())),
            Work::Write(len) => wqes.push(Box::new(move |b| _ = b.rdma_write(far, &[local(len)]))),
            Work::Read(len) => wqes.push(Box::new(move |b| _ = b.rdma_read(far, &[local(len)]))),
            Work::Faa => wqes.push(Box::new(move |b| _ = b.fetch_add(far, 1, local(8)))),
            Work::Bind => {
                let key_of = window.expect("allocated above");
                // Without CHECK_FREE, because the ring may have been stopped with the window bound.
                let bind = Umr {
                    flags: UmrFlags::INLINE | UmrFlags::TRANSLATION_OFFSET,
                    ..Umr::bind(key_of, key_of.tag(), qpn, Access::REMOTE_ALL, key, half, 4096)
                };
                wqes.push(Box::new(move |b| _ = b.umr(&bind)));
                wqes.push(Box::new(move |b| _ = b.umr(&Umr::unbind(key_of, true))));
            }
        }
        let blocks: u32 = wqes
            .iter()
            .map(|w| {
                let mut b = Builder::new(qpn, 0);
                w(&mut b);
                b.blocks()
            })
            .sum();
        if blocks > room {
            qp.put(|b| _ = b.nop());
            continue;
        }
        for wqe in wqes {
            qp.put(|b| wqe(b));
        }
    }
    // The index is the first half of the word at +24 of the last WQE.
    let last = qp.memory.addr() + (qp.send_at() + (BLOCKS as usize - 1) * WQEBB) as u64;
    let index = Remote { addr: last + 24, rkey: ring };
    qp.put(|b| _ = b.fetch_add(index, (BLOCKS as u64) << 32, local(8)));
    qp.put(|b| _ = b.send_enable(qpn, BLOCKS));
    Ok(())
}

impl Load for Endless {
    fn on(&mut self, me: &mut Compute, commands: &Receiver<String>) -> Result<()> {
        for qp in &self.rings {
            let last = qp.send_at() + (BLOCKS as usize - 1) * WQEBB;
            qp.memory.store_be32(last + 24, BLOCKS);
            qp.connect(&me.nic, qp.qpn)?;
        }
        for qp in &self.rings {
            me.nic.verb(Verb::EnableSend { qpn: qp.qpn, limit: BLOCKS as u16 })?;
        }
        sleep_until_off(commands)?;
        for qp in &self.rings {
            me.nic.expect_state(qp.qpn, verbs::QpState::ReadyToSend)?;
            me.nic.verb(Verb::ModifyQp { qpn: qp.qpn, change: QpChange::Reset })?;
        }
        Ok(())
    }
}

/// Many QPs with a WAIT far ahead on one busy CQ, which receives a completion for every WQE.
struct Waiters {
    busy: Qp,
    waiting: Vec<Qp>,
}

impl Waiters {
    fn new(me: &mut Compute) -> Result<Self> {
        let memory = me.nic.memory(2 << 20)?;
        let key = me.nic.register(me.pd, &memory, Access::LOCAL_ALL | Access::REMOTE_ALL)?;
        let mut busy = endless_qp(me)?;
        write_ring(me, &mut busy, &memory, key, Work::Nop)?;
        // Makes every NOP signaled.
        for block in 0..BLOCKS as usize - 2 {
            let at = busy.send_at() + block * WQEBB + 11;
            busy.memory.write(at, &[verbs::wqe::CE_SIGNALED]);
        }
        let waiting = (0..500)
            .map(|_| {
                let mut qp = endless_qp(me)?;
                let cqn = busy.cqn;
                qp.put(|b| _ = b.wait(cqn, 0x7f_ffff));
                Ok(qp)
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self { busy, waiting })
    }
}

impl Load for Waiters {
    fn on(&mut self, me: &mut Compute, commands: &Receiver<String>) -> Result<()> {
        // The largest possible distance of a WAIT: 8 million completions.
        let Reply::Count(count) = me.nic.verb(Verb::CqCount { cqn: self.busy.cqn })? else {
            bail!("no count")
        };
        let ahead = count.wrapping_add(0x7f_ffff) & 0xff_ffff;
        for qp in &self.waiting {
            qp.memory.store_be32(qp.send_at() + 24, ahead);
            qp.connect(&me.nic, qp.qpn)?;
            me.nic.verb(Verb::EnableSend { qpn: qp.qpn, limit: 1 })?;
        }
        let last = self.busy.send_at() + (BLOCKS as usize - 1) * WQEBB;
        self.busy.memory.store_be32(last + 24, BLOCKS);
        self.busy.connect(&me.nic, self.busy.qpn)?;
        me.nic.verb(Verb::EnableSend { qpn: self.busy.qpn, limit: BLOCKS as u16 })?;
        sleep_until_off(commands)?;
        for qp in self.waiting.iter().chain([&self.busy]) {
            me.nic.verb(Verb::ModifyQp { qpn: qp.qpn, change: QpChange::Reset })?;
        }
        Ok(())
    }
}

/// Idle QPs, whose doorbells the NIC must poll.
struct Idlers {
    _qps: Vec<Qp>,
}

impl Idlers {
    fn new(me: &mut Compute) -> Result<Self> {
        let shape = Shape { blocks: 16, completions: 16, ..Shape::default() };
        let mut qps = Vec::new();
        while qps.len() < 1000 {
            match Qp::new(&me.nic, me.pd, shape) {
                Ok(qp) => qps.push(qp),
                Err(e) if e.to_string().contains("limit") => break,
                Err(e) => return Err(e),
            }
        }
        Ok(Self { _qps: qps })
    }
}

impl Load for Idlers {
    fn on(&mut self, _: &mut Compute, commands: &Receiver<String>) -> Result<()> {
        sleep_until_off(commands)
    }
}

/// Allocates and frees as fast as the credits allow, and waits for the replies between batches.
struct Allocations;

impl Load for Allocations {
    fn on(&mut self, me: &mut Compute, commands: &Receiver<String>) -> Result<()> {
        let lanes = qpn_bytes(&me.lanes());
        while !is_off(commands)? {
            for i in 0..16 {
                me.alloc.send(&me.nic, &lanes, i * SLOT);
            }
            let mut got = Vec::new();
            for i in 0..16 {
                match me.alloc.answer(i * SLOT, LONG) {
                    Answer::Reply(bytes) => {
                        got.extend(crate::compute::chunk(&bytes, me.terms.chunk_bytes, 2)?);
                    }
                    other => bail!("an allocation ended with {other:?}"),
                }
            }
            for (i, chunk) in got.iter().enumerate() {
                me.free.send(&me.nic, &chunk.entry.to_be_bytes()[1..], i * SLOT);
            }
            for i in 0..got.len() {
                ensure!(matches!(me.free.answer(i * SLOT, LONG), Answer::Reply(_)), "a free");
            }
        }
        Ok(())
    }
}

/// Sends invalid frees. Each stops the free chain, and the memory node's CPU must repair it.
struct Refused;

impl Load for Refused {
    fn on(&mut self, me: &mut Compute, commands: &Receiver<String>) -> Result<()> {
        while !is_off(commands)? {
            for _ in 0..8 {
                me.free_entry(0x00ff_ffff)?;
            }
        }
        Ok(())
    }
}

/// Sends refused accesses. Each breaks a QP, and the memory node's CPU must re-establish it.
struct Errors;

impl Load for Errors {
    fn on(&mut self, me: &mut Compute, commands: &Receiver<String>) -> Result<()> {
        while !is_off(commands)? {
            for lane in 0..2 {
                me.read(lane, remote(0, 0x100), 8)?;
            }
        }
        Ok(())
    }
}

/// Executes control verbs that take long.
struct Verbs {
    memory: DmaMemory,
}

impl Verbs {
    fn new(me: &mut Compute) -> Result<Self> {
        Ok(Self { memory: me.nic.memory(8 << 20)? })
    }
}

impl Load for Verbs {
    fn on(&mut self, me: &mut Compute, commands: &Receiver<String>) -> Result<()> {
        let entries = 64 << 10;
        let (ring, record) = (part(&self.memory, 0, 4 << 20), part(&self.memory, 4 << 20, 8));
        while !is_off(commands)? {
            let verb = Verb::CreateCq {
                ring: ring.clone(),
                entries,
                record: record.clone(),
                ignore_overrun: true,
            };
            // At a limit the verb is refused every time.
            if let Ok(Reply::Cq(cqn)) = me.nic.verb(verb) {
                me.nic.verb(Verb::DestroyCq { cqn })?;
            }
            let kind = MwKind::Type2;
            if let Ok(Reply::Keys(keys)) =
                me.nic.verb(Verb::AllocMws { pd: me.pd, kind, count: MWS_MAX })
            {
                for key in keys {
                    me.nic.verb(Verb::DeallocMw { key })?;
                }
            }
            let key = me.nic.register(me.pd, &self.memory, Access::REMOTE_ALL)?;
            me.nic.verb(Verb::DeregMr { key })?;
        }
        Ok(())
    }
}

/// Writes to every word of the doorbell page and wakes the NIC.
struct Doorbells {
    qps: Vec<Qp>,
}

impl Doorbells {
    fn new(me: &mut Compute) -> Result<Self> {
        let shape = Shape { blocks: 16, completions: 16, ..Shape::default() };
        let qps = (0..256).map(|_| Qp::new(&me.nic, me.pd, shape)).collect::<Result<Vec<_>>>()?;
        Ok(Self { qps })
    }
}

impl Load for Doorbells {
    fn on(&mut self, me: &mut Compute, commands: &Receiver<String>) -> Result<()> {
        let mut value = 0u32;
        let slots: Vec<usize> =
            self.qps.iter().filter_map(|q| q.doorbell).map(|d| d as usize).collect();
        while !is_off(commands)? {
            for slot in &slots {
                value = value.wrapping_add(0x0001_0007);
                me.nic.page.word32(raw::DOORBELLS + slot * 4).store(value, Ordering::Release);
            }
            // Claims falsely that a caller waits for the NIC on the NIC's own CPU.
            let cpu = me.nic.page.word32(raw::WHERE).load(Ordering::Relaxed);
            me.nic.page.word32(raw::WAITER).store(cpu, Ordering::Relaxed);
            me.nic.wake();
        }
        // Waits until the NIC is idle.
        std::thread::sleep(Duration::from_millis(1));
        Ok(())
    }
}

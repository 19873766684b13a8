//! Messages between two programs: SEND, with both of them waiting for completions, and READ beside it.
//!
//! ```text
//!  one in flight                                 more in flight
//!  initiator ──SEND──> responder                 initiator ══SEND, SEND, …══> responder
//!            <──SEND──                                     each completion: another one
//! ```
//!
//! What other messaging libraries' benchmarks measure as well, so that theirs can stand beside it:
//!
//! - One in flight, latency is half of a round trip. Either side goes on when it has the other one's message;
//!   completions of its own it takes as they come, and lets [`OWN_OUTSTANDING`] be outstanding. What fits into a WQE is posted inline.
//! - With more in flight rate and bandwidth are those of the initiator's completions. They say that the message is in
//!   the receiver's memory.
//! - All messages have one buffer at either end, and receives are posted before anything is sent.
//! - READ is one-sided: the responder's program sleeps. Latency is from the post to the completion. With more in flight a list
//!   of them has one completion, as is usual where rates are measured.
//! - Who waits polls, and offers its CPU to the NIC; after [`Backoff`]'s time it sleeps.
//!
//! | metric | of |
//! | --- | --- |
//! | `send_latency_us`, `read_latency_us` | one in flight |
//! | `send_rate_per_s`, `read_rate_per_s` | operations over the run's time |
//! | `send_bandwidth_gb_per_s`, `read_bandwidth_gb_per_s` | their bytes over the run's time |

use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use fabric::soft::{SoftCq, SoftMr, SoftNic, SoftPd, SoftQp};
use fabric::{
    Access, Backoff, Completion, CompletionKind, CompletionQueue, CqAttr, Data, Key, MemoryRegion,
    Nic, Op, PairSecret, PathMtu, PeerAddress, QpAttr, QpChange, Qpn, QueuePair, Receive,
    ReceiveAttr, ReceiveRequest, Remote, RemotePeer, SecretSide as End, Sge, Status, WorkRequest,
};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::access::{Meter, Outcome};
use crate::record::{Record, Setting, Statistic};
use crate::table::{Pivot, Table};

/// Name of the experiment.
pub const EXPERIMENT: &str = "pingpong";

/// Sizes in bytes that are measured by default.
pub const SIZES: [usize; 3] = [64, 4 << 10, 1 << 20];

/// Operations in flight that are measured by default: one, and as many as `ucx_perftest` has.
pub const IN_FLIGHT: [usize; 2] = [1, 32];

/// Receives that are posted beyond those of the messages in flight: a message that is acknowledged has
/// freed its place, and the receiver may not have seen that yet.
const RECEIVES_AHEAD: usize = 128;
/// Messages of a side that may be unacknowledged when it answers.
const OWN_OUTSTANDING: u32 = 8;
/// Work requests that are posted with one doorbell at most.
const LIST: usize = 16;
/// The longest message that is posted inline.
const INLINE_MAX: usize = 64;
/// Immediate data of the message that ends a measurement.
const END: u32 = 0x656e_6421;
/// A peer that is silent for so long is gone.
const SILENCE: Duration = Duration::from_secs(10);

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// Two-sided.
    Send,
    /// One-sided.
    Read,
}

impl Operation {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Send, Self::Read];

    /// How its metrics begin.
    pub fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Read => "read",
        }
    }
}

/// One measurement.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Task {
    /// What is done.
    pub operation: Operation,
    /// Bytes of each message, above zero.
    pub size: usize,
    /// Operations outstanding at a time, above zero.
    pub in_flight: usize,
    /// For how long, once it is warm.
    pub duration: Duration,
    /// Packets between NICs have tags, as between a memory node and its compute nodes.
    pub authenticated: bool,
}

impl Task {
    /// The setting of its records.
    pub fn setting(&self, nic: &str) -> Setting {
        Setting::new().nic(nic).size(self.size as u64).in_flight(self.in_flight as u64)
    }

    /// The records of what came out.
    pub fn records(&self, outcome: &Outcome, nic: &str) -> Vec<Record> {
        outcome.records_of(EXPERIMENT, self.operation.name(), self.size, &self.setting(nic))
    }
}

/// What a side must know of the other one.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Place {
    /// Where its NIC is reached; none: it is on the same one.
    address: Option<SocketAddr>,
    qpn: u32,
    memory: u64,
    rkey: u32,
}

/// A program's NIC.
pub struct Station {
    nic: SoftNic,
    pd: SoftPd,
    /// Where it is reached from other NICs.
    address: Option<SocketAddr>,
}

impl Station {
    /// A NIC of its own, with a UDP socket on the loopback interface.
    ///
    /// # Errors
    /// As the NIC's.
    pub fn roce() -> Result<Self, Error> {
        let system = |source| Error::System { what: "open a UDP socket", source };
        let socket = UdpSocket::bind("127.0.0.1:0").map_err(system)?;
        let address = socket.local_addr().map_err(system)?;
        let nic = SoftNic::over(socket)?;
        Ok(Self { pd: nic.alloc_pd()?, nic, address: Some(address) })
    }

    /// The NIC of another process, which serves the socket at `path`.
    ///
    /// # Errors
    /// As the NIC's.
    pub fn shm(path: &Path) -> Result<Self, Error> {
        Self::on(SoftNic::attach(path)?)
    }

    /// A NIC that the other program is on as well.
    ///
    /// # Errors
    /// As the NIC's.
    pub fn on(nic: SoftNic) -> Result<Self, Error> {
        Ok(Self { pd: nic.alloc_pd()?, nic, address: None })
    }

    /// A QP for one measurement, not connected yet.
    ///
    /// # Errors
    /// As the NIC's.
    pub fn side(&self, task: &Task) -> Result<Side, Error> {
        let receives = task.in_flight + RECEIVES_AHEAD;
        let entries = (2 * receives) as u32;
        let cq = self.nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        let attr = QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: (4 * task.in_flight).next_power_of_two().max(64) as u32,
            receive: Receive::Own(ReceiveAttr { entries: receives as u32, max_sges: 1 }),
            access: Access::REMOTE_ALL,
        };
        let qp = self.nic.create_qp(&self.pd, attr)?;
        let memory = self.nic.alloc_dma(2 * task.size)?;
        memory.write(0, &vec![0x5a; 2 * task.size]);
        let mr = self.nic.reg_mr(&self.pd, &memory, Access::LOCAL_ALL | Access::REMOTE_ALL)?;
        let nowhere = Remote { addr: 0, rkey: Key(0) };
        // To another NIC a SEND may be as long as a WRITE.
        let local_max = self.nic.query_device()?.send_bytes as usize;
        let sends_max = if self.address.is_some() { usize::MAX } else { local_max };
        Ok(Side { task: *task, address: self.address, cq, qp, mr, there: nowhere, sends_max })
    }
}

/// What the sides of a measurement know. It guards nothing but costs what one that does costs.
fn secret(asks: bool) -> PairSecret {
    let side = if asks { End::Asking } else { End::Asked };
    PairSecret { bytes: [0x5e; 32], side, authenticated: true }
}

/// One side of a measurement.
pub struct Side {
    task: Task,
    address: Option<SocketAddr>,
    cq: SoftCq,
    qp: SoftQp,
    /// What is sent and read from, then what is received and read into.
    mr: SoftMr,
    there: Remote,
    /// The longest SEND. What is longer goes as a WRITE with immediate, which is as two-sided.
    sends_max: usize,
}

impl Side {
    /// What the other side must know.
    pub fn place(&self) -> Place {
        let memory = self.mr.remote(0);
        let (qpn, rkey) = (self.qp.qpn().raw(), memory.rkey.0);
        Place { address: self.address, qpn, memory: memory.addr, rkey }
    }

    /// Connects to the other side, and posts receives. When both have, either may begin.
    ///
    /// # Errors
    /// As the NIC's.
    pub fn connect(&mut self, to: &Place) -> Result<(), Error> {
        let qpn = Qpn::new(to.qpn);
        let peer = match (self.address, to.address) {
            (Some(here), Some(there)) => PeerAddress::Remote(RemotePeer {
                // The loopback interface takes 64 KiB.
                mtu: PathMtu::Mtu4096,
                fixed_port: true,
                secret: self.task.authenticated.then(|| secret(here < there)),
                ..RemotePeer::new(there, here.ip(), qpn)
            }),
            _ => PeerAddress::Local(qpn),
        };
        self.qp.modify(QpChange::Init)?;
        self.qp.modify(QpChange::ReadyToReceive { peer })?;
        self.qp.modify(QpChange::ReadyToSend)?;
        self.there = Remote { addr: to.memory, rkey: Key(to.rkey) };
        (0..self.task.in_flight + RECEIVES_AHEAD).try_for_each(|_| self.receive())
    }

    /// The initiator's part.
    ///
    /// # Errors
    /// [`Error::Verb`] if an operation fails, [`Error::System`] if the peer is silent, or as the NIC's.
    pub fn measure(&self) -> Result<Outcome, Error> {
        match (self.task.operation, self.task.in_flight) {
            (Operation::Send, 1) => self.ping(),
            _ => self.stream(),
        }
    }

    /// The responder's part, until the initiator has ended.
    ///
    /// # Errors
    /// As [`Side::measure`].
    pub fn answer(&self) -> Result<(), Error> {
        match (self.task.operation, self.task.in_flight) {
            (Operation::Send, 1) => self.pong(),
            (Operation::Send, _) => self.sink(),
            (Operation::Read, _) => Ok(()),
        }
    }

    fn ping(&self) -> Result<Outcome, Error> {
        let mut turns = Turns::default();
        let mut meter = Meter::start(self.task.duration);
        let mut since = meter.started();
        for trip in 1.. {
            self.send(None)?;
            turns.outstanding += 1;
            turns.wait(self)?;
            match meter.completed_each(since, 2 * trip, 2) {
                Some(now) => since = now,
                None => break,
            }
        }
        self.send(Some(END))?;
        turns.outstanding += 1;
        turns.drain(self)?;
        Ok(meter.outcome())
    }

    fn pong(&self) -> Result<(), Error> {
        let mut turns = Turns::default();
        while turns.wait(self)? {
            self.send(None)?;
            turns.outstanding += 1;
        }
        Ok(())
    }

    fn stream(&self) -> Result<Outcome, Error> {
        let mut meter = Meter::start(self.task.duration);
        let (mut posted, mut done) = (0, 0);
        let (mut followed, mut since) = (0, meter.started());
        let mut batch = [Completion::EMPTY; LIST];
        let depth = self.task.in_flight as u64;
        let mut over = false;
        while !over || done < posted {
            while !over && posted < done + depth {
                let count = (done + depth - posted).min(LIST as u64);
                posted += count;
                self.post(count as usize, posted)?;
            }
            let count = self.next(&mut batch)?;
            done = match self.task.operation {
                Operation::Send => done + count as u64,
                Operation::Read => batch[count - 1].id,
            };
            if !over && done > followed {
                match meter.completed(since, done) {
                    Some(now) => (followed, since) = (posted, now),
                    None => over = true,
                }
            }
        }
        if self.task.operation == Operation::Send {
            self.send(Some(END))?;
            self.next(&mut batch[..1])?;
        }
        Ok(meter.outcome())
    }

    fn sink(&self) -> Result<(), Error> {
        let mut batch = [Completion::EMPTY; LIST];
        loop {
            let count = self.next(&mut batch)?;
            if batch[..count].iter().any(|c| c.imm == Some(END)) {
                return Ok(());
            }
            (0..count).try_for_each(|_| self.receive())?;
        }
    }

    fn ours(&self) -> Sge {
        self.mr.sge(0, self.task.size as u32)
    }

    fn theirs(&self) -> Sge {
        self.mr.sge(self.task.size, self.task.size as u32)
    }

    fn receive(&self) -> Result<(), Error> {
        Ok(self.qp.post_recv(&ReceiveRequest { id: 0, to: &[self.theirs()] })?)
    }

    /// Posts one message; the last one has immediate data.
    fn send(&self, imm: Option<u32>) -> Result<(), Error> {
        let (from, mut inline) = ([self.ours()], [0; INLINE_MAX]);
        let op = match imm {
            None if self.task.size <= INLINE_MAX => {
                let data = &mut inline[..self.task.size];
                self.mr.memory().read(0, data);
                Op::SendInline { data }
            }
            None => self.message(&from),
            Some(imm) => Op::SendImm { data: Data::Inline(&[]), imm },
        };
        Ok(self.qp.post_send(&[WorkRequest { id: 0, op, signaled: true }])?)
    }

    fn message<'a>(&self, from: &'a [Sge]) -> Op<'a> {
        if self.task.size > self.sends_max {
            let to = Remote { addr: self.there.addr + self.task.size as u64, ..self.there };
            return Op::WriteImm { to, data: Data::Gather(from), imm: 0 };
        }
        Op::Send { from }
    }

    /// Posts `count` operations with one doorbell, so that `posted` are. READs complete by lists: queues are executed in
    /// order, and the last one's completion, which has that number, is that of all.
    fn post(&self, count: usize, posted: u64) -> Result<(), Error> {
        let (from, to) = ([self.ours()], [self.theirs()]);
        let (op, signaled) = match self.task.operation {
            Operation::Send => (self.message(&from), true),
            Operation::Read => (Op::Read { from: self.there, to: &to }, false),
        };
        let mut list = [WorkRequest { id: 0, op, signaled }; LIST];
        list[count - 1] = WorkRequest { id: posted, op, signaled: true };
        Ok(self.qp.post_send(&list[..count])?)
    }

    /// Waits for completions; there are some, and all of them are of what succeeded.
    fn next(&self, out: &mut [Completion]) -> Result<usize, Error> {
        let mut backoff = Backoff::on::<SoftCq>();
        let mut count = self.cq.poll(out);
        while count == 0 {
            if self.cq.offer_cpu() {
                count = self.cq.poll(out);
            }
            if count == 0 && !backoff.snooze() && !self.cq.wait(SILENCE)? {
                let source = std::io::ErrorKind::TimedOut.into();
                return Err(Error::System { what: "hear from the other side", source });
            }
            if count == 0 {
                count = self.cq.poll(out);
            }
        }
        match out[..count].iter().find(|c| c.status != Status::Success) {
            None => Ok(count),
            Some(c) => Err(Error::Verb { what: "move a message", status: c.status }),
        }
    }
}

/// Whose turn it is: a side sends when it has received, and not too much of its own is outstanding.
#[derive(Default)]
struct Turns {
    outstanding: u32,
    received: bool,
    ended: bool,
}

impl Turns {
    /// Waits for the other side's message; false if it has ended.
    fn wait(&mut self, side: &Side) -> Result<bool, Error> {
        while !(self.ended || self.received && self.outstanding < OWN_OUTSTANDING) {
            self.take(side)?;
        }
        self.received = false;
        Ok(!self.ended)
    }

    /// Waits until nothing is outstanding.
    fn drain(&mut self, side: &Side) -> Result<(), Error> {
        while self.outstanding > 0 {
            self.take(side)?;
        }
        Ok(())
    }

    fn take(&mut self, side: &Side) -> Result<(), Error> {
        let mut batch = [Completion::EMPTY; 4];
        let count = side.next(&mut batch)?;
        for completion in &batch[..count] {
            match completion.kind {
                CompletionKind::Send => self.outstanding -= 1,
                CompletionKind::Receive => {
                    (self.received, self.ended) = (true, completion.imm == Some(END));
                    side.receive()?;
                }
            }
        }
        Ok(())
    }
}

/// The tables of a run.
pub fn tables(records: &[Record]) -> Vec<(String, Table)> {
    Operation::ALL
        .iter()
        .map(|operation| {
            let of = |what: &str| format!("{}_{what}", operation.name());
            let pivot = Pivot::rows(["nic", "size", "in_flight"])
                .column(&of("latency_us"), Statistic::P50)
                .column(&of("latency_us"), Statistic::P99)
                .column(&of("rate_per_s"), Statistic::Mean)
                .column(&of("bandwidth_gb_per_s"), Statistic::Mean);
            (operation.name().to_uppercase(), pivot.table(records))
        })
        .filter(|(_, table)| !table.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stations: [Station; 2], task: Task) -> Outcome {
        let [mut initiator, mut responder] = stations.each_ref().map(|s| s.side(&task).unwrap());
        initiator.connect(&responder.place()).unwrap();
        responder.connect(&initiator.place()).unwrap();
        std::thread::scope(|scope| {
            let answering = scope.spawn(|| responder.answer());
            let outcome = initiator.measure();
            answering.join().expect("no panic").unwrap();
            outcome.unwrap()
        })
    }

    #[test]
    fn every_operation_and_depth_over_udp() {
        for operation in Operation::ALL {
            for (size, in_flight) in [(64, 1), (64, 32), (5000, 1), (200_000, 4)] {
                let duration = Duration::from_millis(10);
                let task = Task { operation, size, in_flight, duration, authenticated: true };
                let stations = [Station::roce().unwrap(), Station::roce().unwrap()];
                let outcome = run(stations, task);
                assert!(outcome.operations > 0 && outcome.latencies.count() > 0, "{task:?}");
                let records = task.records(&outcome, "roce");
                assert!(records.iter().any(|r| r.metric.starts_with(operation.name())));
            }
        }
    }

    #[test]
    fn latency_is_half_of_a_round_trip() {
        let duration = Duration::from_millis(20);
        let task = Task {
            operation: Operation::Send,
            size: 64,
            in_flight: 1,
            duration,
            authenticated: true,
        };
        let outcome = run([Station::roce().unwrap(), Station::roce().unwrap()], task);
        let each_us = outcome.elapsed.as_secs_f64() * 1e6 / outcome.operations as f64;
        let off = outcome.latencies.mean_us() / each_us;
        assert!((0.9..1.1).contains(&off), "mean latency over time per message is {off}");
    }
}

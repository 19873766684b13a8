//! Thousands of operations of all kinds, up to sixteen in flight, checked against a model.
//!
//! The responder's first megabyte is divided into sixteen slots, one per operation of a round, so
//! that concurrent operations do not touch the same bytes. SENDs consume receives in the order of
//! their posting.

use anyhow::{Context, Result, ensure};
use granary_tests::guest::{hash, pattern};
use units::Random;
use verbs::{Completion, CompletionKind, Data, MemoryRegion, Op, QueuePair, Sge, WorkRequest};

use crate::bench::{Bench, How, LOCAL, Link, SUCCESS};

/// Operations in flight in a round.
const ROUND: usize = 16;
/// Bytes of an operation's slot.
const SLOT: usize = 64 << 10;
/// Interval, in rounds, of comparisons of all of the responder's memory.
const COMPARE: usize = 64;

/// An operation on its slot.
#[derive(Clone, Copy, Debug)]
struct Step {
    kind: Kind,
    /// Offset in the responder's memory.
    at: usize,
    len: usize,
    seed: u64,
    imm: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Send,
    Write,
    Read,
    CompareSwap { compare: u64 },
    FetchAdd,
}

/// Generates operations and computes the expected contents of the responder's memory.
struct Model {
    random: Random,
    memory: Vec<u8>,
    /// True if atomics work on big-endian words.
    big_endian: bool,
    /// Minimum length of a READ or WRITE.
    min_len: usize,
    /// Maximum length of a READ.
    read_max: usize,
}

impl Model {
    fn new(seed: u64, big_endian: bool) -> Self {
        let memory = pattern(0, ROUND * SLOT);
        Self { random: Random::new(seed), memory, big_endian, min_len: 0, read_max: SLOT }
    }

    fn word(&self, at: usize) -> u64 {
        let bytes = self.memory[at..at + 8].try_into().expect("eight bytes");
        if self.big_endian { u64::from_be_bytes(bytes) } else { u64::from_le_bytes(bytes) }
    }

    /// Generates the next operation of a slot.
    fn step(&mut self, slot: usize) -> Step {
        let random = &mut self.random;
        let kind = random.below(5);
        let seed = 1 + random.below(1 << 32);
        let longest = [0, 256, 256, 4096, 4096, 4096, 16_000, 40_000][random.below(8) as usize];
        let len = random.below(longest + 1) as usize;
        let len = match kind {
            0 => len,
            2 => len.clamp(self.min_len, self.read_max),
            _ => len.max(self.min_len),
        };
        let at = slot * SLOT + random.below((SLOT - len) as u64) as usize;
        let imm = (random.below(4) == 0).then_some(seed as u32);
        let step = Step { kind: Kind::Send, at, len, seed, imm };
        let word = Step { at: (slot * SLOT + random.below(8) as usize * 8), len: 8, ..step };
        match kind {
            0 => step,
            1 => Step { kind: Kind::Write, ..step },
            2 => Step { kind: Kind::Read, imm: None, ..step },
            3 => {
                let equal = random.below(2) == 0;
                let is = self.word(word.at);
                let compare = if equal { is } else { is.wrapping_add(1) };
                Step { kind: Kind::CompareSwap { compare }, imm: None, ..word }
            }
            _ => Step { kind: Kind::FetchAdd, imm: None, ..word },
        }
    }

    /// Applies an operation to the model; returns the expected result of a READ or an atomic.
    fn apply(&mut self, step: &Step) -> Found {
        let range = step.at..step.at + step.len;
        match step.kind {
            Kind::Send => Found::Nothing,
            Kind::Write => {
                self.memory[range].copy_from_slice(&pattern(step.seed, step.len));
                Found::Nothing
            }
            Kind::Read => Found::Bytes(self.memory[range].to_vec()),
            Kind::CompareSwap { .. } | Kind::FetchAdd => {
                let old = self.word(step.at);
                let new = match step.kind {
                    Kind::CompareSwap { compare } if compare != old => old,
                    Kind::CompareSwap { .. } => step.seed,
                    _ => old.wrapping_add(step.seed),
                };
                let new = if self.big_endian { new.to_be_bytes() } else { new.to_le_bytes() };
                self.memory[range].copy_from_slice(&new);
                Found::Word(old)
            }
        }
    }
}

/// Result of an operation.
enum Found {
    Nothing,
    Bytes(Vec<u8>),
    Word(u64),
}

/// True if the operation consumes a receive.
fn takes_receive(step: &Step) -> bool {
    step.kind == Kind::Send || step.imm.is_some()
}

/// Offset of a slot's local buffer: source or result at the requester, received data at the
/// responder.
fn local(slot: usize) -> usize {
    LOCAL + slot * SLOT
}

/// The kernel is the requester. Its READs have at most `read_max` bytes.
pub fn kernel_asks(
    bench: &mut Bench,
    how: How,
    count: usize,
    (seed, read_max): (u64, usize),
) -> Result<()> {
    let link = bench.link(how)?;
    let mut model = Model::new(seed, true);
    model.read_max = read_max;
    link.mr.memory().write(0, &model.memory);
    for round in 0..count.div_ceil(ROUND) {
        let steps: Vec<Step> = (0..ROUND).map(|slot| model.step(slot)).collect();
        let found: Vec<Found> = steps.iter().map(|step| model.apply(step)).collect();
        let said = || format!("seed {seed}, round {round}");
        kernel_round(bench, &link, &steps, &found).with_context(said)?;
        if round % COMPARE == 0 || round + 1 == count.div_ceil(ROUND) {
            ensure!(link.bytes(0, ROUND * SLOT) == model.memory, "{}: memory differs", said());
        }
    }
    bench.unlink(link)
}

fn kernel_round(bench: &mut Bench, link: &Link, steps: &[Step], found: &[Found]) -> Result<()> {
    let mut answers = 0;
    for (i, step) in steps.iter().enumerate() {
        if takes_receive(step) {
            link.receive(i as u64, &[link.mr.sge(local(i), SLOT as u32)])?;
        }
        let (qp, len, here) = (link.slot, step.len, link.here(step.at));
        let imm = step.imm.map_or(String::new(), |imm| format!(" imm {imm}"));
        let place = local(i);
        let order = match step.kind {
            Kind::Send => format!("send {qp} {i} {place} {len}{imm}"),
            Kind::Write => format!("write {qp} {i} {place} {len} {here}{imm}"),
            Kind::Read => format!("read {qp} {i} {place} {len} {here}"),
            Kind::CompareSwap { compare } => {
                format!("cas {qp} {i} {place} {here} {compare} {}", step.seed)
            }
            Kind::FetchAdd => format!("faa {qp} {i} {place} {here} {}", step.seed),
        };
        if matches!(step.kind, Kind::Send | Kind::Write) {
            bench.guest.send(&format!("fill {place} {len} {}", step.seed))?;
            answers += 1;
        }
        bench.guest.send(&order)?;
        answers += 1;
    }
    for _ in steps {
        bench.guest.send(&format!("wait {}", link.slot))?;
    }
    for (i, found) in found.iter().enumerate() {
        match found {
            Found::Nothing => {}
            Found::Bytes(b) => bench.guest.send(&format!("hash {} {}", local(i), b.len()))?,
            Found::Word(_) => bench.guest.send(&format!("get {}", local(i)))?,
        }
    }
    for _ in 0..answers {
        bench.guest.receive()?;
    }
    for (i, step) in steps.iter().enumerate() {
        let wc = bench.receive_completion()?;
        ensure!(wc.status == SUCCESS && wc.id == i as u64, "{step:?}: {wc:?}");
    }
    for (step, found) in steps.iter().zip(found) {
        let should = match found {
            Found::Nothing => continue,
            Found::Bytes(bytes) => hash(bytes),
            Found::Word(word) => *word,
        };
        let is: u64 = bench.guest.receive()?[0].parse()?;
        ensure!(is == should, "{step:?} found something else");
    }
    for (i, step) in steps.iter().enumerate().filter(|(_, step)| takes_receive(step)) {
        let c = link.next()?.ok()?;
        ensure!(
            c.id == i as u64 && c.imm == step.imm && c.bytes as usize == step.len,
            "{step:?}: {c:?}"
        );
        if step.kind == Kind::Send {
            link.check(local(i), step.len, step.seed).with_context(|| format!("{step:?}"))?;
        }
    }
    Ok(())
}

/// The kernel is the responder.
pub fn kernel_answers(bench: &mut Bench, how: How, count: usize, seed: u64) -> Result<()> {
    let link = bench.link(how)?;
    let mut model = Model::new(seed, false);
    // No empty READs and WRITEs: rxe does not answer a retransmitted READ of zero bytes, and after
    // a READ or WRITE of zero bytes it refuses retransmitted READs.
    model.min_len = 1;
    bench.fill(0, ROUND * SLOT, 0)?;
    for round in 0..count.div_ceil(ROUND) {
        let steps: Vec<Step> = (0..ROUND).map(|slot| model.step(slot)).collect();
        let found: Vec<Found> = steps.iter().map(|step| model.apply(step)).collect();
        let said = || format!("seed {seed}, round {round}");
        our_round(bench, &link, &steps, &found).with_context(said)?;
        if round % COMPARE == 0 || round + 1 == count.div_ceil(ROUND) {
            let is = bench.guest.number(&format!("hash 0 {}", ROUND * SLOT))?;
            ensure!(is == hash(&model.memory), "{}: memory differs", said());
        }
    }
    bench.unlink(link)
}

fn our_round(bench: &mut Bench, link: &Link, steps: &[Step], found: &[Found]) -> Result<()> {
    let receives = || steps.iter().enumerate().filter(|(_, step)| takes_receive(step));
    for (i, _) in receives() {
        bench.guest.send(&format!("recv {} {i} {} {SLOT}", link.slot, local(i)))?;
    }
    for _ in receives() {
        bench.guest.receive()?;
    }
    let gathers: Vec<[Sge; 1]> = steps
        .iter()
        .enumerate()
        .map(|(i, step)| [link.mr.sge(local(i), step.len as u32)])
        .collect();
    let work = steps.iter().zip(&gathers).enumerate().map(|(i, (step, gather))| {
        let (at, old) = (link.there(step.at), gather[0]);
        if matches!(step.kind, Kind::Send | Kind::Write) {
            link.fill(local(i), step.len, step.seed);
        }
        let data = Data::Gather(gather);
        let op = match (step.kind, step.imm) {
            (Kind::Send, None) => Op::Send { from: gather },
            (Kind::Send, Some(imm)) => Op::SendImm { data, imm },
            (Kind::Write, None) => Op::Write { to: at, from: gather },
            (Kind::Write, Some(imm)) => Op::WriteImm { to: at, data, imm },
            (Kind::Read, _) => Op::Read { from: at, to: gather },
            (Kind::CompareSwap { compare }, _) => {
                Op::CompareSwap { at, compare, swap: step.seed, old }
            }
            (Kind::FetchAdd, _) => Op::FetchAdd { at, add: step.seed, old },
        };
        WorkRequest { id: i as u64, op, signaled: true }
    });
    link.qp.post_send(&work.collect::<Vec<_>>())?;
    for (i, (step, found)) in steps.iter().zip(found).enumerate() {
        let c: Completion = link.next()?;
        ensure!(c.ok().is_ok() && c.id == i as u64, "{step:?}: {c:?}");
        ensure!(c.kind == CompletionKind::Send, "{c:?}");
        match found {
            Found::Nothing => {}
            Found::Bytes(should) => {
                ensure!(link.bytes(local(i), step.len) == *should, "{step:?} found something else");
            }
            Found::Word(should) => {
                ensure!(link.word(local(i)) == *should, "{step:?} found something else");
            }
        }
    }
    for (i, step) in receives() {
        bench.guest.send(&format!("wait {}", link.slot))?;
        if step.kind == Kind::Send {
            bench.guest.send(&format!("check {} {} {}", local(i), step.len, step.seed))?;
        }
    }
    for (i, step) in receives() {
        let wc = bench.receive_completion()?;
        let right = wc.id == i as u64 && wc.imm == step.imm && wc.bytes as usize == step.len;
        ensure!(wc.status == SUCCESS && right, "{step:?}: {wc:?}");
        if step.kind == Kind::Send {
            bench.guest.receive().with_context(|| format!("{step:?}"))?;
        }
    }
    Ok(())
}

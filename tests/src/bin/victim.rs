//! A compute node that works normally during attacks: it allocates, writes, reads back, executes
//! CAS and FAA, and frees. It checks every byte and records the latency of every operation.
//!
//! The program prints `ready`, then one line with the chunks that it holds until its end. Commands
//! on standard input: `go` starts the work; `mark` prints the counts and latencies since the last
//! `mark` (one JSON object); `stop` checks all data, frees all chunks and prints a last report. Any
//! fault ends the program with an error.

use std::io::BufRead;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bench_report::histogram::Latencies;
use pool::{Address, Error, Grant, Options, Pool};
use serde_json::{Value, json};
use units::Random;

/// Bytes at the start of a chunk for FAA and CAS: two words.
const WORDS: usize = 16;
/// The longest single write or read.
const PIECE: usize = 4096;

struct Arguments {
    node: Address,
    /// Chunks that the program holds until its end.
    hold: usize,
    /// Pause between two rounds.
    pause: Duration,
    /// True if other compute nodes may hold all other chunks, so that allocations may fail.
    may_be_empty: bool,
    /// Rounds between two allocations.
    allocate_every: u64,
    seed: u64,
}

/// A held chunk and its expected contents.
struct HeldChunk {
    grant: Grant,
    mirror: Vec<u8>,
    counter: u64,
    word: u64,
}

#[derive(Default)]
struct Window {
    rounds: u64,
    allocated: u64,
    empty: u64,
    read: Latencies,
    write: Latencies,
    atomic: Latencies,
    allocate: Latencies,
    free: Latencies,
}

fn main() -> Result<()> {
    let a = arguments()?;
    let options = Options { groups: Some(1), ..Options::default() };
    let pool = a.node.connect(options).context("connecting")?;
    let random = Random::new(a.seed);
    let mut victim = Victim { a, pool, held: Vec::new(), random, window: Window::default() };
    for _ in 0..victim.a.hold {
        let grant = victim.pool.allocate_blocking().context("allocating a chunk to hold")?;
        let mirror = vec![0; grant.len as usize];
        victim.held.push(HeldChunk { grant, mirror, counter: 0, word: 0 });
    }
    for i in 0..victim.held.len() {
        victim.fill(i)?;
    }
    println!("ready");
    println!("{}", Value::Array(victim.held.iter().map(|h| describe(&h.grant)).collect()));

    let (sender, commands) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    victim.run(&commands)?;
    println!("{}", victim.finish()?);
    // Stays connected until standard input is closed.
    while commands.recv().is_ok() {}
    Ok(())
}

fn describe(grant: &Grant) -> Value {
    let keys: Vec<u32> = grant.keys().iter().map(|k| k.0).collect();
    json!({ "entry": grant.entry.raw(), "addr": grant.addr, "len": grant.len, "keys": keys })
}

struct Victim {
    a: Arguments,
    pool: Pool,
    held: Vec<HeldChunk>,
    random: Random,
    window: Window,
}

impl Victim {
    fn run(&mut self, commands: &Receiver<String>) -> Result<()> {
        let first = commands.recv()?;
        ensure!(first == "go", "the command {first:?} came before \"go\"");
        loop {
            match commands.try_recv() {
                Ok(command) if command == "mark" => println!("{}", self.report()),
                Ok(command) if command == "stop" => return Ok(()),
                Ok(command) => bail!("unknown command {command:?}"),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => bail!("standard input was closed"),
            }
            self.round().with_context(|| format!("in round {}", self.window.rounds))?;
            self.window.rounds += 1;
            if !self.a.pause.is_zero() {
                std::thread::sleep(self.a.pause);
            }
        }
    }

    fn round(&mut self) -> Result<()> {
        if !self.held.is_empty() {
            let i = self.random.bits() as usize % self.held.len();
            self.rewrite(i)?;
            self.reread(i)?;
            self.count(i)?;
        }
        if self.window.rounds.is_multiple_of(self.a.allocate_every) {
            self.check_new_chunk()?;
        }
        Ok(())
    }

    /// Offset and length of a random piece of a chunk after its words; sometimes at the chunk's
    /// end.
    fn piece(&mut self, len: usize) -> (usize, usize) {
        let random = self.random.bits() as usize;
        let bytes = 1 + random % PIECE.min(len - WORDS);
        let room = len - WORDS - bytes;
        let at = if random & 1 << 40 != 0 { room } else { (random >> 16) % (room + 1) };
        (WORDS + at, bytes)
    }

    fn fill(&mut self, i: usize) -> Result<()> {
        let seed = self.random.bits();
        let held = &mut self.held[i];
        let first = seed as usize;
        for (at, byte) in held.mirror.iter_mut().enumerate().skip(WORDS) {
            *byte = (first + at * 31) as u8;
        }
        self.pool.write_blocking(&held.grant, WORDS as u64, &held.mirror[WORDS..])?;
        Ok(())
    }

    fn rewrite(&mut self, i: usize) -> Result<()> {
        let (at, bytes) = self.piece(self.held[i].mirror.len());
        let seed = self.random.bits() as usize;
        let held = &mut self.held[i];
        for (n, byte) in held.mirror[at..at + bytes].iter_mut().enumerate() {
            *byte = (seed + n * 7) as u8;
        }
        let start = Instant::now();
        let result = self.pool.write_blocking(&held.grant, at as u64, &held.mirror[at..at + bytes]);
        self.window.write.record(start.elapsed());
        result.context("writing to a held chunk")
    }

    fn reread(&mut self, i: usize) -> Result<()> {
        let (at, bytes) = self.piece(self.held[i].mirror.len());
        let held = &self.held[i];
        let mut out = vec![0; bytes];
        let start = Instant::now();
        let result = self.pool.read_blocking(&held.grant, at as u64, &mut out);
        self.window.read.record(start.elapsed());
        result.context("reading a held chunk")?;
        let entry = held.grant.entry;
        ensure!(out == held.mirror[at..at + bytes], "chunk {entry} changed at {at}, {bytes} bytes");
        Ok(())
    }

    fn count(&mut self, i: usize) -> Result<()> {
        let new = self.random.bits();
        let held = &mut self.held[i];
        let entry = held.grant.entry;
        let start = Instant::now();
        let before = self.pool.fetch_and_add_blocking(&held.grant, 0, 1).context("FAA")?;
        self.window.atomic.record(start.elapsed());
        ensure!(before == held.counter, "chunk {entry} counts {before}, not {}", held.counter);
        held.counter += 1;
        let before =
            self.pool.compare_and_swap_blocking(&held.grant, 8, held.word, new).context("CAS")?;
        ensure!(before == held.word, "chunk {entry} has {before:#x}, not {:#x}", held.word);
        held.word = new;
        Ok(())
    }

    /// Allocates a chunk, checks that it is all zeros, uses it and frees it.
    fn check_new_chunk(&mut self) -> Result<()> {
        let start = Instant::now();
        let grant = match self.pool.allocate_blocking() {
            Ok(grant) => grant,
            Err(Error::OutOfMemory { .. }) if self.a.may_be_empty => {
                self.window.empty += 1;
                return Ok(());
            }
            Err(e) => return Err(e).context("allocating"),
        };
        self.window.allocate.record(start.elapsed());
        self.window.allocated += 1;
        let entry = grant.entry;
        let mut out = vec![1; grant.len as usize];
        self.pool.read_blocking(&grant, 0, &mut out).context("reading a new chunk")?;
        if let Some(at) = out.iter().position(|b| *b != 0) {
            bail!("new chunk {entry} is not zero at {at}");
        }
        let mark = self.random.bits().to_le_bytes();
        let last = grant.len - mark.len() as u64;
        for at in [0, last] {
            self.pool.write_blocking(&grant, at, &mark).context("writing to a new chunk")?;
        }
        for at in [0, last] {
            let mut out = [0; 8];
            self.pool.read_blocking(&grant, at, &mut out).context("reading a new chunk")?;
            ensure!(out == mark, "new chunk {entry} was changed at {at}");
        }
        let start = Instant::now();
        self.pool.free_blocking(grant).context("freeing")?;
        self.window.free.record(start.elapsed());
        Ok(())
    }

    fn finish(&mut self) -> Result<Value> {
        for held in std::mem::take(&mut self.held) {
            let entry = held.grant.entry;
            let mut out = vec![0; held.mirror.len()];
            self.pool.read_blocking(&held.grant, 0, &mut out).context("the final read")?;
            ensure!(out[..8] == held.counter.to_be_bytes(), "chunk {entry}: its counter changed");
            ensure!(out[8..WORDS] == held.word.to_be_bytes(), "chunk {entry}: its word changed");
            ensure!(out[WORDS..] == held.mirror[WORDS..], "chunk {entry}: its contents changed");
            self.pool.free_blocking(held.grant).context("freeing a held chunk")?;
        }
        Ok(self.report())
    }

    fn report(&mut self) -> Value {
        let w = std::mem::take(&mut self.window);
        json!({
            "rounds": w.rounds,
            "allocated": w.allocated,
            "empty": w.empty,
            "read": w.read,
            "write": w.write,
            "atomic": w.atomic,
            "allocate": w.allocate,
            "free": w.free,
        })
    }
}

fn arguments() -> Result<Arguments> {
    let mut a = Arguments {
        node: Address::Shm(PathBuf::new()),
        hold: 4,
        pause: Duration::ZERO,
        may_be_empty: false,
        allocate_every: 4,
        seed: 1,
    };
    let mut words = std::env::args().skip(1);
    while let Some(name) = words.next() {
        let mut value = || words.next().with_context(|| format!("{name} needs a value"));
        match name.as_str() {
            "--socket" => a.node = Address::Shm(value()?.into()),
            "--pool" => a.node = value()?.parse().map_err(anyhow::Error::msg)?,
            "--hold" => a.hold = value()?.parse()?,
            "--pause-us" => a.pause = Duration::from_micros(value()?.parse()?),
            "--may-be-empty" => a.may_be_empty = true,
            "--allocate-every" => a.allocate_every = value()?.parse()?,
            "--seed" => a.seed = value()?.parse()?,
            other => bail!("unknown option {other}"),
        }
    }
    Ok(a)
}

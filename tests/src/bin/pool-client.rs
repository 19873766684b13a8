//! A compute node for whole-system tests: allocates, checks, writes, reads back, checks and frees.
//!
//! The program connects, prints `ready` and waits for a line on standard input. Then it runs,
//! prints its counters as one JSON object, and waits for the end of standard input before it
//! disconnects, so that a test can stop parts of the memory node while clients run.

use std::io::BufRead;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use pool::{Error, Grant, GroupId, Options, Pool};
use units::Random;
use verbs::DmaMemory;

/// Bytes at the start and the end of a chunk that are checked and written.
const PROBE_BYTES: usize = 64;

struct Arguments {
    socket: PathBuf,
    /// File with the owner of each chunk, a 4-byte word per chunk; shared by all clients of a test.
    ledger: PathBuf,
    id: u32,
    rounds: u64,
    threads: u32,
    /// Limit of the chunks that each thread holds.
    hold: usize,
}

#[derive(Default)]
struct Done {
    rounds: AtomicU64,
    empty: AtomicU64,
    stop: AtomicBool,
}

fn main() -> Result<()> {
    let a = arguments()?;
    let options = Options { groups: Some(a.threads as u16), ..Options::default() };
    let pool = Pool::connect(&a.socket, options).context("connecting")?;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&a.ledger)?;
    let ledger = DmaMemory::map_shared(&file, 0, file.metadata()?.len() as usize)?;
    println!("ready");
    let mut lines = std::io::stdin().lock().lines();
    lines.next().transpose()?;

    let done = Done::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..a.threads)
            .map(|t| {
                let (a, pool, ledger, done) = (&a, &pool, &ledger, &done);
                scope.spawn(move || {
                    let result = churn(a, pool, ledger, done, t);
                    done.stop.fetch_or(result.is_err(), Ordering::Relaxed);
                    result
                })
            })
            .collect();
        threads.into_iter().try_for_each(|t| t.join().expect("a client thread panicked"))
    })?;
    let stats = pool.stats();
    println!(
        "{}",
        serde_json::json!({
            "rounds": done.rounds.load(Ordering::Relaxed),
            "empty": done.empty.load(Ordering::Relaxed),
            "allocations": stats.allocations,
            "frees": stats.frees,
        })
    );
    while lines.next().transpose()?.is_some() {}
    Ok(())
}

/// Runs the rounds of one thread.
fn churn(a: &Arguments, pool: &Pool, ledger: &DmaMemory, done: &Done, thread: u32) -> Result<()> {
    let mut held: Vec<(Grant, u64)> = Vec::new();
    let me = a.id << 8 | (thread + 1);
    let mut random = Random::new(me.into());
    let mut rounds = 0;
    while rounds < a.rounds && !done.stop.load(Ordering::Relaxed) {
        let random = random.bits();
        if held.len() < a.hold && random & 3 != 0 {
            match pool.allocate_in_blocking(GroupId(thread as u16)) {
                Ok(grant) => {
                    take(pool, ledger, me, &grant, random)?;
                    held.push((grant, random));
                    continue;
                }
                Err(Error::OutOfMemory { .. }) => {
                    done.empty.fetch_add(1, Ordering::Relaxed);
                    if held.is_empty() {
                        pool.wait_for_memory_blocking(Duration::from_millis(20))?;
                        continue;
                    }
                }
                Err(other) => return Err(other).context("allocating"),
            }
        }
        if !held.is_empty() {
            let (grant, mark) = held.swap_remove(random as usize % held.len());
            give(pool, ledger, me, grant, mark)?;
            rounds += 1;
        }
    }
    for (grant, mark) in held {
        give(pool, ledger, me, grant, mark)?;
    }
    done.rounds.fetch_add(rounds, Ordering::Relaxed);
    Ok(())
}

fn owner<'a>(ledger: &'a DmaMemory, grant: &Grant) -> &'a AtomicU32 {
    ledger.word32(grant.entry.as_usize() * 4)
}

fn take(pool: &Pool, ledger: &DmaMemory, me: u32, grant: &Grant, mark: u64) -> Result<()> {
    let before = owner(ledger, grant).swap(me, Ordering::SeqCst);
    ensure!(before == 0, "chunk {} was granted to {me:#x}, but {before:#x} holds it", grant.entry);
    let ends = [0, grant.len - PROBE_BYTES as u64];
    for at in ends {
        let mut probe = [0xffu8; PROBE_BYTES];
        pool.read_blocking(grant, at, &mut probe).context("the first read")?;
        ensure!(probe == [0; PROBE_BYTES], "chunk {} shows old contents at {at}", grant.entry);
    }
    for at in ends {
        pool.write_blocking(grant, at, &pattern(me, mark)).context("writing")?;
    }
    Ok(())
}

fn give(pool: &Pool, ledger: &DmaMemory, me: u32, grant: Grant, mark: u64) -> Result<()> {
    for at in [0, grant.len - PROBE_BYTES as u64] {
        let mut probe = [0u8; PROBE_BYTES];
        pool.read_blocking(&grant, at, &mut probe).context("reading back")?;
        ensure!(probe == pattern(me, mark), "another client changed chunk {}", grant.entry);
    }
    let before = owner(ledger, &grant).swap(0, Ordering::SeqCst);
    ensure!(before == me, "chunk {} of {me:#x} was granted to {before:#x}", grant.entry);
    pool.free_blocking(grant).context("freeing")
}

fn pattern(me: u32, mark: u64) -> [u8; PROBE_BYTES] {
    let mut p = [0; PROBE_BYTES];
    for (i, word) in p.chunks_exact_mut(8).enumerate() {
        let value = mark.rotate_left(i as u32) ^ (me as u64) << 40 | 1;
        word.copy_from_slice(&value.to_le_bytes());
    }
    p
}

fn arguments() -> Result<Arguments> {
    let mut a = Arguments {
        socket: PathBuf::new(),
        ledger: PathBuf::new(),
        id: 1,
        rounds: 1000,
        threads: 1,
        hold: 4,
    };
    let mut words = std::env::args().skip(1);
    while let Some(name) = words.next() {
        let value = words.next().with_context(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--socket" => a.socket = value.into(),
            "--ledger" => a.ledger = value.into(),
            "--id" => a.id = value.parse()?,
            "--rounds" => a.rounds = value.parse()?,
            "--threads" => a.threads = value.parse()?,
            "--hold" => a.hold = value.parse()?,
            other => bail!("unknown option {other}"),
        }
    }
    Ok(a)
}

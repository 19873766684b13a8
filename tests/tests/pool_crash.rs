//! Clients are repeatedly killed at random times under load. Each time all of their chunks are
//! reclaimed, and the surviving clients lose nothing. The tests cover scheme onesidedmw, in which
//! the memory node's NIC allocates, and scheme finemem, in which the compute nodes allocate.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use granary_tests::node::{MemoryNode, full};
use pool::{Error, Grant, GroupId, Options, Pool};

const VICTIM: &str = env!("CARGO_BIN_EXE_pool-victim");
const CHUNKS: u64 = 192;
/// Number of surviving clients.
const LIVING: u64 = 2;
/// Number of clients that are killed at about the same time.
const TOGETHER: u64 = 2;
/// Longest life of a victim in microseconds, including a few milliseconds for connecting.
const LIFE_US: u64 = 24_000;
/// Time limit for the reclamation of a killed client.
const TIMEOUT: Duration = Duration::from_secs(30);

fn victim(node: &MemoryNode, what: &str, number: u64) -> Result<Child> {
    Ok(Command::new(VICTIM)
        .arg(&node.socket)
        .args([what, &number.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?)
}

/// A surviving client: it keeps some chunks until the end, and allocates and frees other chunks.
struct Living {
    pool: Pool,
    kept: Vec<Grant>,
    /// Number of chunks held in addition to `kept`.
    working: AtomicU64,
    rounds: AtomicU64,
}

impl Living {
    fn connect(node: &MemoryNode) -> Result<Self> {
        let options = Options { groups: Some(1), ..Options::default() };
        let pool = Pool::connect(&node.socket, options)?;
        let kept: Vec<Grant> =
            (0..8).map(|_| pool.allocate_in_blocking(GroupId(0))).collect::<Result<_, _>>()?;
        for grant in &kept {
            pool.write_blocking(grant, 0, &pattern(grant))?;
        }
        Ok(Self { pool, kept, working: AtomicU64::new(0), rounds: AtomicU64::new(0) })
    }

    fn holds(&self) -> u64 {
        self.kept.len() as u64 + self.working.load(Ordering::SeqCst)
    }

    fn check_kept(&self) -> Result<()> {
        for grant in &self.kept {
            let mut text = [0; 4096];
            self.pool.read_blocking(grant, 0, &mut text)?;
            ensure!(text == pattern(grant), "chunk {} was changed", grant.entry);
        }
        Ok(())
    }

    /// Works until `stop` is set; pauses while another thread holds `gate` for writing.
    fn work(&self, gate: &RwLock<()>, stop: &AtomicBool) -> Result<()> {
        let mut held: Vec<Grant> = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let _pass = gate.read().expect("no thread panics while it holds the gate");
            match self.pool.allocate_in_blocking(GroupId(0)) {
                Ok(grant) => {
                    let mut text = [1; 4096];
                    self.pool.read_blocking(&grant, 0, &mut text)?;
                    ensure!(text == [0; 4096], "chunk {} shows old contents", grant.entry);
                    self.pool.write_blocking(&grant, 0, &pattern(&grant))?;
                    held.push(grant);
                }
                Err(Error::OutOfMemory { .. }) => {}
                Err(e) => return Err(e).context("allocating"),
            }
            if held.len() > 16
                || !held.is_empty() && self.rounds.load(Ordering::Relaxed).is_multiple_of(3)
            {
                let grant = held.swap_remove(0);
                let mut text = [0; 4096];
                self.pool.read_blocking(&grant, 0, &mut text)?;
                ensure!(text == pattern(&grant), "another client changed chunk {}", grant.entry);
                self.pool.free_blocking(grant).context("freeing")?;
            }
            self.rounds.fetch_add(1, Ordering::Relaxed);
            self.working.store(held.len() as u64, Ordering::SeqCst);
        }
        held.into_iter().try_for_each(|grant| Ok(self.pool.free_blocking(grant)?))
    }
}

fn pattern(grant: &Grant) -> [u8; 4096] {
    let mut text = [0; 4096];
    for (i, byte) in text.iter_mut().enumerate() {
        *byte = (grant.entry.as_usize() * 31 + i) as u8 | 1;
    }
    text
}

/// Waits until all killed clients are reclaimed, the audit succeeds, and every chunk is free or
/// held by a surviving client. Returns the elapsed time.
fn check_all_chunks_free(living: &[Living], held: u64) -> Result<Duration> {
    let start = Instant::now();
    loop {
        let asking = &living[0].pool;
        let status = asking.node_status()?.node;
        let alone = (status.clients, status.leaving) == (LIVING, 0);
        let audit = asking.audit();
        if alone && audit.is_ok() && status.free + held == CHUNKS {
            return Ok(start.elapsed());
        }
        ensure!(
            start.elapsed() < TIMEOUT,
            "chunks are missing: the survivors hold {held}, {status:?}, audit {audit:?}"
        );
        thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn clients_killed_at_random_moments_are_reclaimed() -> Result<()> {
    kill_at_random_moments("onesidedmw")
}

#[test]
fn finemem_clients_killed_at_random_moments_are_reclaimed() -> Result<()> {
    kill_at_random_moments("finemem")
}

fn kill_at_random_moments(scheme: &str) -> Result<()> {
    let kills = if full() { 2500 } else { 60 };
    let seed = match std::env::var("GRANARY_TEST_SEED") {
        Ok(seed) => seed.parse()?,
        Err(_) => std::time::UNIX_EPOCH.elapsed()?.as_nanos() as u64 | 1,
    };
    println!("{scheme}: seed {seed} (GRANARY_TEST_SEED)");
    let memory = (CHUNKS * 4096).to_string();
    let arguments = ["--memory", &memory, "--chunk", "4KiB", "--scheme", scheme];
    let node = MemoryNode::start(&format!("kill-{scheme}"), &arguments)?;
    let living: Vec<Living> = (0..LIVING).map(|_| Living::connect(&node)).collect::<Result<_>>()?;
    let (gate, stop) = (RwLock::new(()), AtomicBool::new(false));
    let start = Instant::now();
    let slowest = thread::scope(|scope| {
        let workers: Vec<_> = living
            .iter()
            .map(|l| {
                let (gate, stop) = (&gate, &stop);
                scope.spawn(move || l.work(gate, stop))
            })
            .collect();
        let result = kill(&node, &living, &gate, (seed, kills));
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.join().expect("a worker panicked")?;
        }
        result
    })?;
    let took = start.elapsed();
    println!(
        "{scheme}: {kills} clients killed in {:.1} s; the slowest reclamation took {:.1} ms; the \
         survivors did {:?} rounds",
        took.as_secs_f64(),
        slowest.as_secs_f64() * 1e3,
        living.iter().map(|l| l.rounds.load(Ordering::Relaxed)).collect::<Vec<_>>(),
    );
    check_all_chunks_free(&living, living.iter().map(|l| l.kept.len() as u64).sum())?;
    living.iter().try_for_each(Living::check_kept)
}

fn kill(
    node: &MemoryNode,
    living: &[Living],
    gate: &RwLock<()>,
    (seed, kills): (u64, u64),
) -> Result<Duration> {
    let mut random = units::Random::new(seed);
    let mut slowest = Duration::ZERO;
    for _ in 0..kills / TOGETHER {
        let mut victims = Vec::new();
        for _ in 0..TOGETHER {
            let life = Duration::from_micros(random.below(LIFE_US));
            victims.push((Instant::now() + life, victim(node, "churn", random.bits())?));
        }
        victims.sort_by_key(|(until, _)| *until);
        for (until, mut victim) in victims {
            thread::sleep(until.saturating_duration_since(Instant::now()));
            let ended = victim.try_wait()?;
            ensure!(ended.is_none(), "a victim ended by itself: {ended:?}; see its error above");
            victim.kill()?;
            victim.wait()?;
        }
        let _paused = gate.write().expect("no thread panics while it holds the gate");
        let held = living.iter().map(Living::holds).sum();
        slowest = slowest.max(check_all_chunks_free(living, held)?);
        living.iter().try_for_each(Living::check_kept)?;
    }
    Ok(slowest)
}

/// Prints the time to reclaim the chunks of one client, and the effect on another client's latency,
/// without a limit.
#[test]
fn reclaim_of_many_chunks_is_timed() -> Result<()> {
    let sizes: &[(u64, &str, u64)] = match full() {
        true => &[(100_000, "4KiB", 4096), (1024, "1MiB", 1 << 20), (8, "64MiB", 64 << 20)],
        false => &[(2000, "4KiB", 4096)],
    };
    for &(chunks, name, bytes) in sizes {
        let memory = ((chunks + 64) * bytes).to_string();
        let node = MemoryNode::start("reclaim", &["--memory", &memory, "--chunk", name])?;
        let mut victim = victim(&node, "hold", chunks)?;
        let mut line = String::new();
        BufReader::new(victim.stdout.take().expect("piped")).read_line(&mut line)?;
        ensure!(line == "holding\n", "the victim did not get its chunks");
        let options = Options { groups: Some(1), ..Options::default() };
        let (pool, asking) =
            (Pool::connect(&node.socket, options.clone())?, Pool::connect(&node.socket, options)?);
        let idle = latencies(&pool, |started| started.elapsed() < Duration::from_millis(300))?;
        let killed = Instant::now();
        victim.kill()?;
        victim.wait()?;
        let done = AtomicBool::new(false);
        let (during, took) = thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                let result = wait_for_free(&asking, chunks + 63).map(|()| killed.elapsed());
                done.store(true, Ordering::Release);
                result
            });
            let during = latencies(&pool, |_| !done.load(Ordering::Acquire))?;
            anyhow::Ok((during, watcher.join().expect("the watcher panicked")?))
        })?;
        println!(
            "{chunks} chunks of {name} reclaimed in {:.1} ms, {:.2} us each, {:.2} GB/s; another \
             client's allocation before: p50 {:.1} us, p99 {:.1} us; meanwhile: p50 {:.1} us, p99 \
             {:.1} us (p99 x{:.1})",
            took.as_secs_f64() * 1e3,
            took.as_secs_f64() * 1e6 / chunks as f64,
            (chunks * bytes) as f64 / took.as_secs_f64() / 1e9,
            at(&idle, 50),
            at(&idle, 99),
            at(&during, 50),
            at(&during, 99),
            at(&during, 99) / at(&idle, 99),
        );
        asking.audit()?;
        assert_eq!(asking.node_status()?.node.free, chunks + 64);
    }
    Ok(())
}

fn wait_for_free(pool: &Pool, free: u64) -> Result<()> {
    let start = Instant::now();
    loop {
        let node = pool.node_status()?.node;
        if node.free >= free && node.leaving == 0 && node.clients == 2 {
            return Ok(());
        }
        ensure!(start.elapsed() < TIMEOUT, "the chunks are not reclaimed: {node:?}");
        thread::sleep(Duration::from_micros(500));
    }
}

/// Latencies of allocations in microseconds, sorted; each chunk is freed again.
fn latencies(pool: &Pool, on: impl Fn(Instant) -> bool) -> Result<Vec<f64>> {
    let started = Instant::now();
    let mut latencies = Vec::new();
    while on(started) || latencies.len() < 100 {
        let start = Instant::now();
        let grant = pool.allocate_in_blocking(GroupId(0))?;
        latencies.push(start.elapsed().as_secs_f64() * 1e6);
        pool.free_blocking(grant)?;
    }
    latencies.sort_by(f64::total_cmp);
    Ok(latencies)
}

fn at(sorted: &[f64], percent: usize) -> f64 {
    sorted[(sorted.len() * percent / 100).min(sorted.len() - 1)]
}

//! Holders of exclusive permissions that are killed, stopped and continued at random moments. The
//! next waiter gets the object, and finds the record in it as one holder has left it.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use granary_tests::hosts::{Hosts, Impairment, V4};
use granary_tests::node::{MemoryNode, full};
use granary_tests::pager::Scratch;
use granary_tests::record::{BYTES, Contents, DOMAIN, Record, to_text, write_token};
use granary_tests::scene::{Process, check_all_chunks_free};
use pool::{Error, LeaseTerms, Object, Options, Others, Permission, Pool};
use rustix::process::Signal;
use serde_json::Value;
use units::Random;

const HOLDER: &str = env!("CARGO_BIN_EXE_lease-holder");
const SERVE: [&str; 8] =
    ["--scheme", "patronus", "--memory", "1MiB", "--chunk", "64KiB", "--lease-max-us", "10000000"];
/// A lease that does not end during a check, within the longest lease.
const LONG: Duration = Duration::from_secs(10);
/// Time in which the memory node must have ended a lease and granted the object to a waiter, on a
/// machine that does other work at the same time.
const MARGIN: Duration = Duration::from_secs(5);

/// A memory node with a record, and the compute nodes that change it.
struct Bed {
    /// A compute node of the test's own, on the memory node's host.
    pool: Pool,
    object: Object,
    lease: Duration,
    /// Holders started so far.
    started: u64,
    node: MemoryNode,
    /// Set if the holders are on another host.
    hosts: Option<Hosts>,
    _scratch: Scratch,
}

impl Bed {
    /// Holders on the memory node's host.
    fn here(name: &str) -> Result<Self> {
        let node = MemoryNode::start(name, &SERVE)?;
        Self::with(node, None, Scratch::new(&format!("{name}-token")), Duration::from_millis(20))
    }

    /// Holders on another host, behind a link that loses packets. `None` if this user may not
    /// create hosts.
    fn between(name: &str, seed: u64) -> Result<Option<Self>> {
        let impairment = Impairment { lost: 10, duplicated: 10, delayed: 10, seed };
        let Some(hosts) = Hosts::with(impairment)? else { return Ok(None) };
        let scratch = Scratch::new(&format!("{name}-token"));
        let token = scratch.0.join("domain");
        write_token(&token, DOMAIN)?;
        let domain = ["--domain-token", token.to_str().context("a path in UTF-8")?];
        let node = MemoryNode::start_on(&hosts, name, V4[0], &[&SERVE[..], &domain].concat())?;
        Self::with(node, Some(hosts), scratch, Duration::from_millis(200)).map(Some)
    }

    fn with(
        node: MemoryNode,
        hosts: Option<Hosts>,
        scratch: Scratch,
        lease: Duration,
    ) -> Result<Self> {
        let pool = Pool::connect(&node.socket, options())?;
        let object = new_record(&pool)?;
        Ok(Self { pool, object, lease, started: 0, node, hosts, _scratch: scratch })
    }

    /// Starts a holder, which then works.
    fn start(&mut self, mode: &str, more: &[&str]) -> Result<Process> {
        self.started += 1;
        let (name, lease) = (to_text(&self.object), self.lease.as_micros().to_string());
        let number = self.started.to_string();
        let own = [mode, "--object", &name, "--lease-us", &lease, "--holder", &number];
        let (command, node) = match &self.hosts {
            None => {
                let socket = self.node.socket.to_str().context("a path in UTF-8")?;
                (Command::new(HOLDER), ["--socket", socket].map(str::to_owned))
            }
            Some(hosts) => {
                let pool = self.node.pool_at(V4[0]);
                (hosts.command(1, HOLDER), ["--pool".to_owned(), pool])
            }
        };
        let node = node.each_ref().map(String::as_str);
        let mut holder = Process::start_with(command, &[&own[..], &node, more].concat())?;
        let ready = holder.line()?;
        ensure!(ready == "ready\n", "a holder printed {ready}");
        holder.send_line("go")?;
        Ok(holder)
    }

    /// Starts a holder and waits until it holds the object.
    fn start_holding(&mut self, mode: &str, more: &[&str]) -> Result<Process> {
        let mut holder = self.start(mode, more)?;
        let line = holder.line()?;
        ensure!(line == "holding\n", "a holder printed {line}");
        Ok(holder)
    }

    fn acquire(&self, lease: Duration) -> Result<Permission> {
        self.pool.acquire_blocking(&self.object, &LeaseTerms::exclusive(lease)).context("acquiring")
    }

    /// Acquires the object, whose holder does nothing any more.
    fn take_over(&self) -> Result<Permission> {
        let start = Instant::now();
        let permission = self.acquire(LONG)?;
        let waited = start.elapsed();
        ensure!(waited < self.lease + MARGIN, "the next holder has waited for {waited:?}");
        Ok(permission)
    }

    /// Waits until `leases` leases have passed, and holds the object then.
    fn outlast(&self, leases: u32) -> Result<Permission> {
        // Each permission conflicts with the one before, whose lease must end.
        for _ in 0..leases {
            self.acquire(self.lease)?;
        }
        self.take_over()
    }

    /// Ends the test: the record is complete, and nothing is left after its end.
    fn end(self) -> Result<Contents> {
        let permission = self.take_over()?;
        let record = Record::new(&self.pool, &permission);
        record.repair()?;
        let contents = record.check()?;
        self.pool.free_object_blocking(&self.object)?;
        self.pool.audit()?;
        let Self { pool, node, .. } = self;
        drop(pool);
        check_all_chunks_free(&node)?;
        Ok(contents)
    }
}

fn options() -> Options {
    Options { groups: Some(1), domain: Some(DOMAIN), ..Options::default() }
}

/// Allocates an object with a record.
fn new_record(pool: &Pool) -> Result<Object> {
    let terms = LeaseTerms::exclusive(LONG);
    let (object, permission) = pool.allocate_object_blocking(BYTES, Others::Write, &terms)?;
    Record::new(pool, &permission).create()?;
    pool.revoke_blocking(&permission)?;
    Ok(object)
}

fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("no number {name} in {report}"))
}

/// Holders that live until the end of the test, and the sums of their reports.
struct Living {
    holders: Vec<Process>,
    updates: u64,
    repairs: u64,
    expired: u64,
    longest_wait_us: u64,
}

impl Living {
    fn start(bed: &mut Bed, count: usize) -> Result<Self> {
        let holders = (0..count).map(|_| bed.start("count", &[])).collect::<Result<_>>()?;
        Ok(Self { holders, updates: 0, repairs: 0, expired: 0, longest_wait_us: 0 })
    }

    fn add(&mut self, report: &Value) {
        self.updates += number(report, "updates");
        self.repairs += number(report, "repairs");
        self.expired += number(report, "expired");
        self.longest_wait_us = self.longest_wait_us.max(number(report, "longest_wait_us"));
    }

    /// Waits until each has made `updates` more updates.
    fn work(&mut self, updates: u64) -> Result<()> {
        self.holders.iter_mut().try_for_each(|h| h.send_line(&format!("work {updates}")))?;
        for at in 0..self.holders.len() {
            let report = self.holders[at].report()?;
            self.add(&report);
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<()> {
        for mut holder in std::mem::take(&mut self.holders) {
            holder.send_line("stop")?;
            let report = holder.report()?;
            self.add(&report);
            holder.end()?;
        }
        Ok(())
    }
}

fn seed(name: &str) -> Result<Random> {
    let seed = match std::env::var("GRANARY_TEST_SEED") {
        Ok(seed) => seed.parse()?,
        Err(_) => std::time::UNIX_EPOCH.elapsed()?.as_nanos() as u64 | 1,
    };
    println!("{name}: seed {seed} (GRANARY_TEST_SEED)");
    Ok(Random::new(seed))
}

/// Waits for a random time of up to two leases.
fn pause(random: &mut Random, lease: Duration) {
    thread::sleep(Duration::from_micros(random.below(2 * lease.as_micros() as u64)));
}

#[test]
fn killed_holders_lose_the_object_to_the_next() -> Result<()> {
    kill_holders(Bed::here("lease-kill")?, "shm", if full() { 2500 } else { 16 })
}

#[test]
fn killed_holders_over_an_impaired_link_lose_the_object_to_the_next() -> Result<()> {
    let Some(bed) = Bed::between("lease-kill-far", 91)? else { return Ok(()) };
    kill_holders(bed, "roce", if full() { 500 } else { 4 })
}

/// Kills two holders in each round: one in the middle of an update, one at a random moment.
fn kill_holders(mut bed: Bed, name: &str, rounds: u64) -> Result<()> {
    let mut random = seed(name)?;
    let mut living = Living::start(&mut bed, 2)?;
    let start = Instant::now();
    for round in 0..rounds {
        bed.start_holding("hang", &[])?.kill()?;
        living.work(1).with_context(|| format!("round {round}"))?;
        // The record was half-way between two updates, and a living holder has repaired it.
        ensure!(living.repairs > round, "{} repairs after {round} rounds", living.repairs);
        let victim = bed.start("count", &[])?;
        pause(&mut random, bed.lease);
        victim.kill()?;
        living.work(2).with_context(|| format!("round {round}"))?;
    }
    living.stop()?;
    let contents = bed.end()?;
    println!(
        "{name}: {} holders killed in {:.1} s; the others made {} of {} updates, {} repairs, lost \
         {} leases, and waited at most {:.1} ms",
        2 * rounds,
        start.elapsed().as_secs_f64(),
        living.updates,
        contents.counter,
        living.repairs,
        living.expired,
        living.longest_wait_us as f64 / 1e3,
    );
    ensure!(contents.counter >= living.updates, "updates are lost: {contents:?}");
    Ok(())
}

#[test]
fn stopped_holder_writes_nothing_after_its_lease() -> Result<()> {
    stop_holder(Bed::here("lease-stop")?)
}

#[test]
fn stopped_holder_over_an_impaired_link_writes_nothing_after_its_lease() -> Result<()> {
    let Some(bed) = Bed::between("lease-stop-far", 92)? else { return Ok(()) };
    stop_holder(bed)
}

/// Stops a holder in the middle of an update. When it goes on, the object has had other holders.
fn stop_holder(mut bed: Bed) -> Result<()> {
    for round in 0..if full() { 100 } else { 2 } {
        let mut stopped = bed.start_holding("hang", &[])?;
        stopped.signal(Signal::STOP)?;
        let permission = bed.outlast(2)?;
        let record = Record::new(&bed.pool, &permission);
        ensure!(record.repair()?, "round {round}: the holder was not in the middle of an update");
        let before = record.update(0, || Ok(()))?;
        stopped.signal(Signal::CONT)?;
        stopped.send_line("go on")?;
        let report = stopped.report()?;
        ensure!(report["ended"] == "expired", "round {round}: {report}");
        ensure!(number(&report, "left_us") == 0, "round {round}: {report}");
        ensure!(record.check()? == before, "round {round}: the record has changed");
        stopped.end()?;
        bed.pool.revoke_blocking(&permission)?;
    }
    bed.end().map(drop)
}

#[test]
fn writes_of_a_stopped_holder_are_refused_after_its_lease() -> Result<()> {
    stop_flood(Bed::here("lease-flood")?, "shm").map(drop)
}

/// The NIC of a compute node on another host stops with its process, with WRITEs posted to it.
#[test]
fn late_writes_over_an_impaired_link_are_refused_by_the_nic() -> Result<()> {
    let Some(bed) = Bed::between("lease-flood-far", 93)? else { return Ok(()) };
    let refused = stop_flood(bed, "roce")?;
    ensure!(refused > 0, "no WRITE was in flight when its lease ended");
    Ok(())
}

/// Stops a holder for ten leases with 100 WRITEs posted. Returns the number of WRITEs that were
/// refused after they had been posted.
fn stop_flood(mut bed: Bed, name: &str) -> Result<u64> {
    let mut random = seed(name)?;
    let mut sum = 0;
    for round in 0..if full() { 100 } else { 2 } {
        let mut stopped = bed.start_holding("flood", &[])?;
        thread::sleep(Duration::from_micros(random.below(bed.lease.as_micros() as u64 / 4)));
        stopped.signal(Signal::STOP)?;
        let permission = bed.outlast(10)?;
        let record = Record::new(&bed.pool, &permission);
        ensure!(record.repair()?, "round {round}: the holder was not in the middle of an update");
        let before = record.update(0, || Ok(()))?;
        stopped.signal(Signal::CONT)?;
        let report = stopped.report()?;
        ensure!(report["ended"] == "expired", "round {round}: {report}");
        ensure!(record.check()? == before, "round {round}: the record has changed");
        println!("{name}: stopped with 100 WRITEs posted: {report}");
        sum += number(&report, "refused");
        stopped.end()?;
        bed.pool.revoke_blocking(&permission)?;
    }
    bed.end()?;
    Ok(sum)
}

#[test]
fn holders_stopped_at_random_moments_never_tear_the_record() -> Result<()> {
    stop_at_random(Bed::here("lease-pause")?, "shm", if full() { 2000 } else { 15 })
}

#[test]
fn holders_stopped_over_an_impaired_link_never_tear_the_record() -> Result<()> {
    let Some(bed) = Bed::between("lease-pause-far", 94)? else { return Ok(()) };
    stop_at_random(bed, "roce", if full() { 1000 } else { 4 })
}

fn stop_at_random(mut bed: Bed, name: &str, rounds: u64) -> Result<()> {
    let mut random = seed(name)?;
    let mut living = Living::start(&mut bed, 1)?;
    let mut stopped = Living::start(&mut bed, 1)?;
    let start = Instant::now();
    for _ in 0..rounds {
        pause(&mut random, bed.lease);
        stopped.holders[0].signal(Signal::STOP)?;
        living.work(2)?;
        pause(&mut random, bed.lease);
        stopped.holders[0].signal(Signal::CONT)?;
        living.work(1)?;
        stopped.work(1)?;
    }
    living.stop()?;
    stopped.stop()?;
    let contents = bed.end()?;
    println!(
        "{name}: stopped {rounds} times in {:.1} s: {} of its leases ended in an update; the other \
         one repaired {} records, and waited at most {:.1} ms",
        start.elapsed().as_secs_f64(),
        stopped.expired,
        living.repairs,
        living.longest_wait_us as f64 / 1e3,
    );
    // No process was killed, so that every update is in a report.
    let updates = living.updates + stopped.updates;
    let unsure = living.expired + stopped.expired;
    ensure!(
        (updates..=updates + unsure).contains(&contents.counter),
        "{updates} updates, {unsure} unsure, but {contents:?}"
    );
    Ok(())
}

/// Two holders wait for each other's object. Their leases end the deadlock.
#[test]
fn deadlock_of_two_holders_ends_by_their_leases() -> Result<()> {
    let mut bed = Bed::here("lease-cross")?;
    bed.lease = Duration::from_millis(200);
    let (first, second) = (bed.object, new_record(&bed.pool)?);
    for _ in 0..if full() { 50 } else { 2 } {
        let mut holders = Vec::new();
        for (own, other) in [(first, second), (second, first)] {
            bed.object = own;
            holders.push(bed.start_holding("cross", &["--second", &to_text(&other)])?);
        }
        let start = Instant::now();
        holders.iter_mut().try_for_each(|holder| holder.send_line("go on"))?;
        let reports = holders.iter_mut().map(Process::report).collect::<Result<Vec<_>>>()?;
        let took = start.elapsed();
        ensure!(took < 2 * bed.lease + MARGIN, "the deadlock has lasted {took:?}: {reports:?}");
        // The one whose lease ended first made room for the other.
        ensure!(reports.iter().any(|r| number(r, "first_left_us") == 0), "{reports:?}");
        holders.into_iter().try_for_each(Process::end)?;
    }
    bed.object = first;
    bed.pool.free_object_blocking(&second)?;
    bed.end().map(drop)
}

/// All operations on a permission.
fn uses(pool: &Pool, permission: &Permission) -> Vec<Result<(), Error>> {
    vec![
        pool.read_blocking(permission, 0, &mut [0; 8]),
        pool.write_blocking(permission, 0, &[7; 4096]),
        pool.fetch_and_add_blocking(permission, 0, 1).map(drop),
        pool.extend_blocking(permission, LONG).map(drop),
        pool.renew_blocking(permission).map(drop),
        pool.revoke_blocking(permission),
    ]
}

#[test]
fn permissions_from_before_a_restart_are_refused() -> Result<()> {
    let mut node = MemoryNode::start("lease-restart", &SERVE)?;
    for round in 0..2 {
        let pool = Pool::connect(&node.socket, options())?;
        let object = new_record(&pool)?;
        // Shorter than the longest lease, so that it can be extended.
        let terms = LeaseTerms::exclusive(LONG / 2);
        let permission = pool.acquire_blocking(&object, &terms)?;
        thread::scope(|scope| -> Result<()> {
            // Waits for the permission to end when the memory node dies.
            let waiter = Pool::connect(&node.socket, options())?;
            let waiting = scope.spawn(move || waiter.acquire_blocking(&object, &terms));
            let deadline = Instant::now() + MARGIN;
            while pool.node_status()?.node.lease.is_none_or(|lease| lease.waiting == 0) {
                ensure!(Instant::now() < deadline, "the request does not wait");
                thread::yield_now();
            }
            node.kill()?;
            let ended = waiting.join().expect("the waiter does not panic");
            ensure!(matches!(ended, Err(Error::Gone { .. })), "round {round}: {ended:?}");
            Ok(())
        })?;
        for result in uses(&pool, &permission) {
            ensure!(matches!(result, Err(Error::Gone { .. })), "round {round}: {result:?}");
        }
        node.restart(&SERVE)?;
        let again = pool.reconnect()?;
        let new = new_record(&again)?;
        for result in uses(&again, &permission) {
            ensure!(matches!(result, Err(Error::Stale { .. })), "round {round}: {result:?}");
        }
        let terms = LeaseTerms::shared_read(LONG);
        for refused in
            [again.acquire_blocking(&object, &terms).map(drop), again.free_object_blocking(&object)]
        {
            ensure!(
                matches!(refused, Err(Error::NoSuchObject { .. })),
                "round {round}: {refused:?}"
            );
        }
        let permission = again.acquire_blocking(&new, &terms)?;
        ensure!(Record::new(&again, &permission).check()?.counter == 0, "round {round}");
        again.free_object_blocking(&new)?;
        drop((pool, again));
        check_all_chunks_free(&node)?;
    }
    Ok(())
}

//! Hostile compute nodes against scheme patronus: lifetime words, keys, requests, resources. Each
//! attacker is a separate process. Two victims allocate and free at the same time, and a third one
//! changes a record under exclusive permissions.

use anyhow::{Context, Result, ensure};
use bench_report::histogram::Latencies;
use granary_tests::node::full;
use granary_tests::record::{BYTES, DOMAIN, Record, to_text};
use granary_tests::scene::{Process, Programs, Scene};
use pool::{LeaseTerms, Object, Options, Others, Pool};
use serde_json::Value;
use std::time::Duration;

const PROGRAMS: Programs =
    Programs { hostile: env!("CARGO_BIN_EXE_hostile"), victim: env!("CARGO_BIN_EXE_victim") };
const HOLDER: &str = env!("CARGO_BIN_EXE_lease-holder");

/// 64 chunks of 4 KiB.
const SERVE: [&str; 6] = ["--scheme", "patronus", "--memory", "256KiB", "--chunk", "4KiB"];
/// Leases of up to 100 s, which do not end during an attack.
const LASTING: [&str; 2] = ["--lease-max-us", "100000000"];
const CALM: [&str; 5] = ["--pause-us", "100", "--seed", "11", "--may-be-empty"];
const SECOND: [&str; 5] = ["--pause-us", "150", "--seed", "12", "--may-be-empty"];
const LONG: Duration = Duration::from_secs(100);

/// A memory node with victims.
struct Bed {
    scene: Scene,
    /// The allocator of the record.
    pool: Pool,
    record: Object,
    holder: Process,
}

impl Bed {
    fn start(name: &str, serve: &[&str]) -> Result<Self> {
        let serve = [&SERVE[..], serve].concat();
        let scene = Scene::start(name, PROGRAMS, &serve, &[&CALM, &SECOND])?;
        let options = Options { groups: Some(1), domain: Some(DOMAIN), ..Options::default() };
        let pool = Pool::connect(&scene.node.socket, options)?;
        let terms = LeaseTerms::exclusive(LONG);
        let (record, permission) = pool.allocate_object_blocking(BYTES, Others::Write, &terms)?;
        Record::new(&pool, &permission).create()?;
        pool.revoke_blocking(&permission)?;
        let socket = scene.node.socket.to_str().context("a path in UTF-8")?;
        let name = to_text(&record);
        let arguments = ["count", "--socket", socket, "--object", &name, "--lease-us", "100000"];
        let mut holder = Process::start(HOLDER, &arguments)?;
        holder.line()?;
        holder.send_line("go")?;
        Ok(Self { scene, pool, record, holder })
    }

    /// Runs an attack to its end.
    fn attack(&self, attack: &str, more: &[&str]) -> Result<Value> {
        let (of, object) = (self.scene.held[0].to_string(), to_text(&self.record));
        let report =
            self.scene.attack(attack, &[&["--of", &of, "--object", &object], more].concat())?;
        println!("{attack}: {report}");
        Ok(report)
    }

    /// The victims have worked, and their data is unharmed; afterwards all memory is free.
    fn end(mut self) -> Result<()> {
        self.scene.victims_worked()?;
        self.holder.send_line("work 3")?;
        self.holder.report()?;
        self.holder.send_line("stop")?;
        let report = self.holder.report()?;
        ensure!(number(&report, "repairs") <= number(&report, "expired"), "{report}");
        self.holder.end()?;
        let permission = self.pool.acquire_blocking(&self.record, &LeaseTerms::exclusive(LONG))?;
        Record::new(&self.pool, &permission).check()?;
        self.pool.free_object_blocking(&self.record)?;
        drop(self.pool);
        self.scene.end().map(drop)
    }
}

fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("no number {name} in {report}"))
}

/// Runs an attack beside the victims.
fn attack(name: &str, serve: &[&str], more: &[&str]) -> Result<Value> {
    let bed = Bed::start(name, serve)?;
    let report = bed.attack(name, more)?;
    bed.end()?;
    Ok(report)
}

#[test]
fn lifetime_words_of_others_are_out_of_reach() -> Result<()> {
    let report = attack("lease-words", &LASTING, &[])?;
    ensure!(number(&report, "refused") >= 500, "{report}");
    Ok(())
}

#[test]
fn endless_extension_ends_at_the_longest_lease() -> Result<()> {
    let report = attack("lease-hog", &["--lease-max-us", "1000000"], &[])?;
    let waits: Vec<u64> = serde_json::from_value(report["waits_us"].clone())?;
    // One second, and what a busy machine takes.
    ensure!(waits.len() == 5 && waits.iter().all(|wait| *wait < 6_000_000), "{report}");
    Ok(())
}

#[test]
fn all_tags_of_foreign_keys_are_refused() -> Result<()> {
    let report = attack("lease-keys", &LASTING, &[])?;
    ensure!(number(&report, "tried") >= 1400, "{report}");
    Ok(())
}

#[test]
fn permission_opens_its_range_and_its_right_only() -> Result<()> {
    attack("lease-rights", &LASTING, &[]).map(drop)
}

#[test]
fn requests_for_foreign_objects_are_refused() -> Result<()> {
    let report = attack("lease-requests", &LASTING, &[])?;
    ensure!(number(&report, "refused") >= 100, "{report}");
    Ok(())
}

#[test]
fn malformed_requests_change_nothing() -> Result<()> {
    let count = if full() { "20000" } else { "500" };
    let report = attack("lease-malformed", &LASTING, &["--count", count])?;
    ensure!(number(&report, "refused") >= 500, "{report}");
    Ok(())
}

#[test]
fn permissions_objects_and_waits_are_limited() -> Result<()> {
    let serve = [&LASTING[..], &["--permissions", "1000"]].concat();
    let report = attack("lease-limits", &serve, &["--count", "10000"])?;
    ensure!(number(&report, "held") == 1000, "{report}");
    ensure!(number(&report, "too_many") == 10_001 - 1000, "{report}");
    Ok(())
}

#[test]
fn unread_replies_take_nothing() -> Result<()> {
    attack("lease-deaf", &LASTING, &["--count", if full() { "500" } else { "10" }]).map(drop)
}

/// Prints the victims' latencies before and during the attack, without a limit.
#[test]
fn broken_qps_delay_no_other_compute_node() -> Result<()> {
    let mut bed = Bed::start("lease-breaks", &LASTING)?;
    let before = bed.scene.mark()?;
    let time = if full() { "20000" } else { "300" };
    let report = bed.attack("lease-breaks", &["--ms", time])?;
    ensure!(number(&report, "broken") >= 4, "{report}");
    let during = bed.scene.mark()?;
    for operation in ["read", "write", "atomic", "allocate", "free"] {
        let p99 = |reports: &[Value]| -> Result<f64> {
            let latencies: Latencies = serde_json::from_value(reports[0][operation].clone())?;
            Ok(latencies.quantile_us(0.99))
        };
        println!("{operation}: p99 {:.1} us before, {:.1} us during", p99(&before)?, p99(&during)?);
    }
    bed.end()
}

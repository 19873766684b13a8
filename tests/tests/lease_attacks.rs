//! Hostile compute nodes against schemes patronus, patronus-2 and patronus-mr: lifetime words,
//! keys, requests, resources. Each attacker is a separate process. Two victims allocate and free at
//! the same time, and a third one changes a record under exclusive permissions.
//!
//! Short runs attack all schemes with keys and requests, and patronus also in other ways; full runs
//! attack all schemes in all ways. Attackers on another host reach the memory node over a link that
//! loses, duplicates and reorders packets. Such an attacker can use its NIC but cannot change it,
//! like a tenant. Its test needs network namespaces, and is skipped if this user may not create
//! any.

use anyhow::{Context, Result, ensure};
use bench_report::histogram::Latencies;
use granary_tests::hosts::{Hosts, Impairment};
use granary_tests::node::full;
use granary_tests::pager::Scratch;
use granary_tests::record::{BYTES, DOMAIN, Record, to_text, write_token};
use granary_tests::scene::{Process, Programs, Scene};
use pool::{DomainToken, LeaseTerms, Object, Options, Others, Pool};
use serde_json::Value;
use std::time::{Duration, Instant};

const PROGRAMS: Programs =
    Programs { hostile: env!("CARGO_BIN_EXE_hostile"), victim: env!("CARGO_BIN_EXE_victim") };
const HOLDER: &str = env!("CARGO_BIN_EXE_lease-holder");

/// The attacked schemes: one for each door that is safe (type-1 windows, type-2 windows, regions).
const SCHEMES: [&str; 3] = ["patronus", "patronus-2", "patronus-mr"];
/// 64 chunks of 4 KiB.
const SERVE: [&str; 4] = ["--memory", "256KiB", "--chunk", "4KiB"];
/// Leases of up to 100 s, which do not end during an attack.
const LASTING: [&str; 2] = ["--lease-max-us", "100000000"];
const CALM: [&str; 5] = ["--pause-us", "100", "--seed", "11", "--may-be-empty"];
const SECOND: [&str; 5] = ["--pause-us", "150", "--seed", "12", "--may-be-empty"];
const LONG: Duration = Duration::from_secs(100);
/// Domains of the memory node that attackers on another host can join: that of the victims, and
/// those of the hostile program's strangers.
const DOMAINS: [DomainToken; 3] = [DOMAIN, DomainToken([0; 32]), DomainToken([0xff; 32])];

/// The first `short` schemes in short runs, and all in full ones.
fn schemes(short: usize) -> &'static [&'static str] {
    if full() { &SCHEMES } else { &SCHEMES[..short] }
}

/// A memory node with victims.
struct Bed {
    scene: Scene,
    /// The allocator of the record.
    pool: Pool,
    record: Object,
    holder: Process,
    _scratch: Option<Scratch>,
}

impl Bed {
    /// Victims and attackers on the memory node's host.
    fn here(name: &str, scheme: &str, serve: &[&str]) -> Result<Self> {
        let serve = [&["--scheme", scheme], &SERVE[..], serve].concat();
        let name = format!("{name}-{scheme}");
        Self::with(Scene::start(&name, PROGRAMS, &serve, &[&CALM, &SECOND])?, None)
    }

    /// Victims and attackers on another host. `None` if this user may not create hosts.
    fn between(scheme: &str) -> Result<Option<Self>> {
        let impairment = Impairment { lost: 5, duplicated: 5, delayed: 5, seed: 0x1ea5e };
        let Some(hosts) = Hosts::with(impairment)? else { return Ok(None) };
        let name = format!("lease-far-{scheme}");
        let scratch = Scratch::new(&format!("{name}-tokens"));
        let mut serve: Vec<String> =
            ["--scheme", scheme].iter().chain(&SERVE).chain(&LASTING).map(|&s| s.into()).collect();
        for (number, token) in DOMAINS.into_iter().enumerate() {
            let path = scratch.0.join(number.to_string());
            write_token(&path, token)?;
            serve.extend(["--domain-token".into(), path.to_str().context("UTF-8")?.into()]);
        }
        let serve: Vec<&str> = serve.iter().map(String::as_str).collect();
        let scene = Scene::start_between(hosts, &name, PROGRAMS, &serve, &[&CALM, &SECOND])?;
        Self::with(scene, Some(scratch)).map(Some)
    }

    fn with(scene: Scene, scratch: Option<Scratch>) -> Result<Self> {
        let options = Options { groups: Some(1), domain: Some(DOMAIN), ..Options::default() };
        let pool = Pool::connect(&scene.node.socket, options)?;
        let terms = LeaseTerms::exclusive(LONG);
        let (record, permission) = pool.allocate_object_blocking(BYTES, Others::Write, &terms)?;
        Record::new(&pool, &permission).create()?;
        pool.revoke_blocking(&permission)?;
        let arguments = ["--object", &to_text(&record), "--lease-us", "100000"];
        let mut holder = scene.process(HOLDER, Some("count"), &arguments)?;
        holder.line()?;
        holder.send_line("go")?;
        Ok(Self { scene, pool, record, holder, _scratch: scratch })
    }

    /// Runs an attack to its end.
    fn attack(&self, attack: &str, more: &[&str]) -> Result<Value> {
        let (of, object) = (self.scene.held[0].to_string(), to_text(&self.record));
        let start = Instant::now();
        let report =
            self.scene.attack(attack, &[&["--of", &of, "--object", &object], more].concat())?;
        println!("{attack}: {report} in {:.1} s", start.elapsed().as_secs_f64());
        Ok(report)
    }

    /// The victims have worked, and their data is unharmed; afterwards all memory is free.
    fn end(mut self) -> Result<()> {
        self.scene.victims_worked()?;
        self.holder.send_line("work 3")?;
        let worked = self.holder.report()?;
        self.holder.send_line("stop")?;
        let stopped = self.holder.report()?;
        // The repair of a record may be in a later report than the lease that ended before it.
        let sum = |name| number(&worked, name) + number(&stopped, name);
        ensure!(sum("repairs") <= sum("expired"), "{worked} {stopped}");
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

/// Runs an attack beside the victims, in each of the schemes, and checks its reports.
fn attack(
    schemes: &[&str],
    name: &str,
    serve: &[&str],
    more: &[&str],
    check: impl Fn(&Value) -> bool,
) -> Result<()> {
    for scheme in schemes {
        println!("{scheme}:");
        let bed = Bed::here(name, scheme, serve)?;
        let report = bed.attack(name, more).with_context(|| format!("against {scheme}"))?;
        bed.end().with_context(|| format!("after {name} against {scheme}"))?;
        ensure!(check(&report), "{name} against {scheme}: {report}");
    }
    Ok(())
}

/// True if the report has at least `least` as number `name`.
fn at_least(name: &'static str, least: u64) -> impl Fn(&Value) -> bool {
    move |report| number(report, name) >= least
}

/// The attacks on keys, words, rights and requests, from another host.
#[test]
fn attacks_from_another_host_are_refused() -> Result<()> {
    let (chunks, count) = if full() { ("4", "2000") } else { ("1", "50") };
    for scheme in schemes(1) {
        let Some(bed) = Bed::between(scheme)? else { return Ok(()) };
        println!("{scheme}, from another host:");
        for (attack, more, counted, least) in [
            ("lease-keys", &["--count", chunks][..], "tried", 700),
            ("lease-words", &[], "refused", 500),
            ("lease-rights", &[], "refused", 13),
            ("lease-requests", &[], "refused", 100),
            ("lease-malformed", &["--count", count], "refused", 50),
        ] {
            let report = bed.attack(attack, more).with_context(|| format!("against {scheme}"))?;
            ensure!(number(&report, counted) >= least, "{attack} against {scheme}: {report}");
        }
        bed.end().with_context(|| format!("after attacks on {scheme}"))?;
    }
    Ok(())
}

#[test]
fn lifetime_words_of_others_are_out_of_reach() -> Result<()> {
    attack(schemes(1), "lease-words", &LASTING, &[], at_least("refused", 500))
}

#[test]
fn endless_extension_ends_at_the_longest_lease() -> Result<()> {
    let serve = ["--lease-max-us", "1000000"];
    attack(schemes(1), "lease-hog", &serve, &[], |report| {
        let waits: Vec<u64> =
            serde_json::from_value(report["waits_us"].clone()).unwrap_or_default();
        // One second, and what a busy machine takes.
        waits.len() == 5 && waits.iter().all(|wait| *wait < 6_000_000)
    })
}

/// Tries all tags of the keys of `chunks` chunks of a victim. Each attempt breaks a QP. Its
/// re-establishment takes milliseconds, because a process has a limited rate of requests.
fn attack_keys(scheme: &str, chunks: u64) -> Result<()> {
    let count = chunks.to_string();
    let tried = at_least("tried", (chunks + 1) * 256 + 192);
    attack(&[scheme], "lease-keys", &LASTING, &["--count", &count], tried)
}

#[test]
fn all_tags_of_foreign_keys_are_refused() -> Result<()> {
    attack_keys("patronus", 4)
}

#[test]
fn all_tags_of_foreign_type_2_windows_are_refused() -> Result<()> {
    attack_keys("patronus-2", if full() { 4 } else { 1 })
}

#[test]
fn all_tags_of_foreign_regions_are_refused() -> Result<()> {
    attack_keys("patronus-mr", if full() { 4 } else { 1 })
}

#[test]
fn permission_opens_its_range_and_its_right_only() -> Result<()> {
    attack(schemes(3), "lease-rights", &LASTING, &[], at_least("refused", 13))
}

#[test]
fn requests_for_foreign_objects_are_refused() -> Result<()> {
    attack(schemes(3), "lease-requests", &LASTING, &[], at_least("refused", 100))
}

#[test]
fn malformed_requests_change_nothing() -> Result<()> {
    let count = if full() { "20000" } else { "500" };
    let more = ["--count", count];
    attack(schemes(1), "lease-malformed", &LASTING, &more, at_least("refused", 500))
}

#[test]
fn permissions_objects_and_waits_are_limited() -> Result<()> {
    let serve = [&LASTING[..], &["--permissions", "1000"]].concat();
    attack(schemes(1), "lease-limits", &serve, &["--count", "10000"], |report| {
        (number(report, "held"), number(report, "too_many")) == (1000, 10_001 - 1000)
    })
}

#[test]
fn unread_replies_take_nothing() -> Result<()> {
    let more = ["--count", if full() { "500" } else { "10" }];
    attack(schemes(1), "lease-deaf", &LASTING, &more, |_| true)
}

/// Prints the victims' latencies before and during the attack, without a limit.
#[test]
fn broken_qps_delay_no_other_compute_node() -> Result<()> {
    for scheme in schemes(2) {
        let mut bed = Bed::here("lease-breaks", scheme, &LASTING)?;
        let before = bed.scene.mark()?;
        let time = if full() { "20000" } else { "300" };
        println!("{scheme}:");
        let report = bed
            .attack("lease-breaks", &["--ms", time])
            .with_context(|| format!("against {scheme}"))?;
        ensure!(number(&report, "broken") >= 4, "{report}");
        let during = bed.scene.mark()?;
        for operation in ["read", "write", "atomic", "allocate", "free"] {
            let p99 = |reports: &[Value]| -> Result<f64> {
                let latencies: Latencies = serde_json::from_value(reports[0][operation].clone())?;
                Ok(latencies.quantile_us(0.99))
            };
            let (before, during) = (p99(&before)?, p99(&during)?);
            println!("{operation}: p99 {before:.1} us before, {during:.1} us during");
        }
        bed.end().with_context(|| format!("after lease-breaks against {scheme}"))?;
    }
    Ok(())
}

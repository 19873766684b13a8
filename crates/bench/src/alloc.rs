//! Allocation and free: latency at the client, and CPU time at the memory node.
//!
//! Each client allocates a chunk and frees it in a loop, one request at a time. The same loop runs
//! against every scheme:
//!
//! | metric | definition |
//! | --- | --- |
//! | `alloc_latency_us`, `free_latency_us` | from the call to its return, at the client |
//! | `alloc_rate_per_s` | allocations, each with its free, of all clients per second |
//! | `alloc_nic_cpu_us` | CPU time of the memory node's NIC thread per allocation with its free |
//! | `alloc_control_cpu_us` | CPU time of the memory node's CPU per allocation with its free |
//!
//! Scheme odrp allocates a page at its first write, so here an allocation includes a write of 4 KiB
//! (the paper's "AllocWrite").
//!
//! [`SizeSupport`] tells how a scheme serves an allocation size: a scheme with several sizes
//! allocates a block of the size, other schemes use chunks of the size, and some sizes are not
//! supported.
//!
//! On the inline NIC the clients' own threads run the NIC, so no separate NIC time is reported.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pool::{ControlMode, Grant, Pool, Scheme, Settings, schemes};
use scheme::info::AccessKind;
use schemes::odrp::PAGE_BYTES;
use serde::{Deserialize, Serialize};
use verbs::Nic;

use crate::Error;
use bench_report::claims::Claims;
use bench_report::histogram::Latencies;
use bench_report::plot::{Axis, Lines, Panels};
use bench_report::record::{Record, Setting, Statistic, Unit, series};
use bench_report::table::{Cell, Pivot, Table};
use units::Size;
use units::number::engineering;

/// Name of the experiment.
pub const EXPERIMENT: &str = "alloc";

/// Clients that are measured by default.
pub const CLIENTS: [u32; 4] = [1, 2, 4, 8];

/// Time for which an allocation retries while the pool is out of memory.
const OUT_OF_MEMORY_TIMEOUT: Duration = Duration::from_secs(5);

/// Allocations with their frees before the measurement.
const WARM_UP_ROUNDS: u32 = 64;

/// A measured variant: a scheme and, for RPC schemes, the wait mode of its control thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    /// The scheme.
    pub scheme: Scheme,
    /// How the memory node's control thread waits for requests.
    pub control: ControlMode,
}

impl Contender {
    /// The variants that are compared by default; onesidedmw comes first.
    pub const DEFAULT: [Self; 3] = [
        Self { scheme: schemes::ONESIDEDMW, control: ControlMode::Event },
        Self { scheme: schemes::RPC_MW_2, control: ControlMode::Event },
        Self { scheme: schemes::RPC_MW_2, control: ControlMode::Polling },
    ];

    /// The variants of some schemes: one per wait mode for RPC schemes, a single one otherwise.
    pub fn of(schemes: &[Scheme]) -> Vec<Self> {
        Self::with(schemes, ControlMode::ALL)
    }

    /// As [`Contender::of`], with these wait modes only.
    pub fn with(schemes: &[Scheme], controls: &[ControlMode]) -> Vec<Self> {
        let variants = |scheme: &Scheme| {
            let modes = match scheme.needs_cpu() {
                true => controls,
                false => &[ControlMode::Event],
            };
            modes
                .iter()
                .map(|control| Self { scheme: *scheme, control: *control })
                .collect::<Vec<_>>()
        };
        schemes.iter().flat_map(variants).collect()
    }

    /// `settings` for a memory node of the variant.
    pub fn settings(&self, settings: Settings) -> Settings {
        let settings = Settings { scheme: self.scheme, ..settings };
        match self.scheme.needs_cpu() {
            true => settings.with("control", self.control),
            false => settings,
        }
    }

    /// Name of the variant: the scheme and, for RPC schemes, the wait mode.
    pub fn name(&self) -> String {
        match self.scheme.needs_cpu() {
            true => format!("{} {}", self.scheme, self.control),
            false => self.scheme.to_string(),
        }
    }

    /// The setting of the variant's records; the wait mode is part of it for RPC schemes only.
    pub fn setting(&self, nic: &str, clients: u32, chunk_bytes: u64) -> Setting {
        let setting = Setting::new().scheme(self.scheme.name).nic(nic);
        let setting = match self.scheme.needs_cpu() {
            false => setting,
            true => setting.control(self.control.name()),
        };
        setting.clients(clients.into()).size(chunk_bytes).in_flight(1)
    }
}

/// Whether a scheme can serve allocations of a size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SizeSupport {
    /// A memory node with these settings serves the size.
    Supported(Box<Settings>),
    /// The scheme does not support the size, for this reason.
    Unsupported(String),
}

impl SizeSupport {
    /// Adapts `settings` to allocations of `bytes`. A scheme with a single allocation size gets
    /// chunks of `bytes`.
    pub fn of(settings: Settings, bytes: u64) -> Self {
        let chunk_bytes = match settings.scheme.chunk_bytes {
            Some(only) => only,
            None if settings.scheme.has_sizes() => settings.chunk_bytes.min(bytes),
            None => bytes,
        };
        let settings = Settings { chunk_bytes, ..settings };
        let largest = settings.largest_bytes();
        match settings.validate() {
            Err(pool::Error::Setting { setting, value, why }) => {
                Self::Unsupported(format!("{setting} {value}: {why}"))
            }
            Err(e) => Self::Unsupported(e.to_string()),
            Ok(()) if settings.scheme.access == AccessKind::Pages && bytes != chunk_bytes => {
                Self::Unsupported(format!("pages of {} only", Size(chunk_bytes)))
            }
            Ok(()) if largest < bytes => {
                Self::Unsupported(format!("the largest block is {}", Size(largest)))
            }
            Ok(()) => Self::Supported(Box::new(settings)),
        }
    }
}

/// Measurements of one client, or of all clients together.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Latencies of the allocations.
    pub allocate: Latencies,
    /// Latencies of the frees.
    pub free: Latencies,
    /// Duration of the measurement.
    pub elapsed: Duration,
}

impl Outcome {
    /// Adds the measurements of a concurrent client.
    pub fn join(&mut self, other: &Self) {
        self.allocate.merge(&other.allocate);
        self.free.merge(&other.free);
        self.elapsed = self.elapsed.max(other.elapsed);
    }
}

/// Sum of all rounds of one measurement.
#[derive(Clone, Debug, Default)]
pub struct Total {
    latencies: Outcome,
    nic_cpu: Option<Duration>,
    control_cpu: Duration,
}

impl Total {
    /// Adds a round: the clients' joined measurements, and the CPU times of the memory node's NIC
    /// thread (`None` on the inline NIC) and of its control threads during the round.
    pub fn add(&mut self, round: &Outcome, nic_cpu: Option<Duration>, control_cpu: Duration) {
        self.latencies.allocate.merge(&round.allocate);
        self.latencies.free.merge(&round.free);
        self.latencies.elapsed += round.elapsed;
        self.nic_cpu = nic_cpu.map(|cpu| self.nic_cpu.unwrap_or_default() + cpu);
        self.control_cpu += control_cpu;
    }

    /// The records of a measurement.
    pub fn records(&self, setting: &Setting) -> Vec<Record> {
        let record = |metric: &str, unit| Record::of(EXPERIMENT, setting, metric, unit);
        let Outcome { allocate, free, elapsed } = &self.latencies;
        let mut records = allocate.records(&record("alloc_latency_us", Unit::Us));
        records.extend(free.records(&record("free_latency_us", Unit::Us)));
        let allocations = allocate.count() as f64;
        if allocations == 0.0 {
            return records;
        }
        let rate = allocations / elapsed.as_secs_f64();
        records.push(record("alloc_rate_per_s", Unit::PerSecond).mean(rate));
        let each_us = |time: Duration| time.as_secs_f64() * 1e6 / allocations;
        let nic = self.nic_cpu.map(|cpu| record("alloc_nic_cpu_us", Unit::Us).mean(each_us(cpu)));
        records.extend(nic);
        records.push(record("alloc_control_cpu_us", Unit::Us).mean(each_us(self.control_cpu)));
        records.into_iter().map(with_claim).collect()
    }
}

/// Adds the paper's number to a record if the paper states one: mean latencies at 1 and 24 threads.
fn with_claim(record: Record) -> Record {
    if record.metric != "alloc_latency_us" || record.statistic != Statistic::Mean {
        return record;
    }
    let scheme = record.setting.get("scheme").map(ToString::to_string);
    let id = match (scheme.as_deref(), record.setting.number("clients")) {
        (Some("onesidedmw"), Some(1.0)) => "osmw.alloc.latency.1",
        (Some("onesidedmw"), Some(24.0)) => "osmw.alloc.latency.24",
        (Some("rpc-mw-2"), Some(24.0)) => "rpcmw.alloc.latency.24",
        _ => return record,
    };
    match Claims::builtin().get(id) {
        Some(claim) => record.against(claim),
        None => record,
    }
}

/// Allocates and frees a few times, so that one-time costs are not measured.
///
/// # Errors
/// As the pool's operations.
pub fn warm_up<N: Nic>(pool: &Pool<N>) -> Result<(), pool::Error> {
    (0..WARM_UP_ROUNDS).try_for_each(|_| pool.free_blocking(allocate(pool, None)?))
}

/// Allocates `bytes`, or a chunk if `None`. In scheme odrp also writes the page, which allocates
/// it.
fn allocate<N: Nic>(pool: &Pool<N>, bytes: Option<u64>) -> Result<Grant, pool::Error> {
    let until = Instant::now() + OUT_OF_MEMORY_TIMEOUT;
    let grant = loop {
        let grant = match bytes {
            Some(bytes) => pool.allocate_bytes_blocking(bytes),
            None => pool.allocate_blocking(),
        };
        match grant {
            // All free chunks may be in quarantine; the allocation waits until it ends.
            Err(pool::Error::OutOfMemory { .. }) if Instant::now() < until => {
                std::thread::yield_now();
            }
            grant => break grant?,
        }
    };
    if pool.scheme().access == AccessKind::Pages {
        pool.write_blocking(&grant, 0, &[1; PAGE_BYTES])?;
    }
    Ok(grant)
}

/// Loop of one client: allocates and frees `bytes`, or a chunk if `None`, for `duration`.
///
/// # Errors
/// As the pool's operations.
pub fn client<N: Nic>(
    pool: &Pool<N>,
    duration: Duration,
    bytes: Option<u64>,
) -> Result<Outcome, pool::Error> {
    let mut outcome = Outcome::default();
    let begin = Instant::now();
    let mut before = begin;
    while before < begin + duration {
        let grant = allocate(pool, bytes)?;
        let allocated = Instant::now();
        pool.free_blocking(grant)?;
        let freed = Instant::now();
        outcome.allocate.record(allocated - before);
        outcome.free.record(freed - allocated);
        before = freed;
    }
    outcome.elapsed = before - begin;
    Ok(outcome)
}

/// The tables of a run, with ratios to scheme rpc-mw-2 in both wait modes.
pub fn tables(records: &[Record]) -> Vec<(String, Table)> {
    let rpc = |control: ControlMode| {
        Setting::new().scheme(schemes::RPC_MW_2.name).control(control.name())
    };
    let latency = |metric: &str| {
        let mut pivot = Pivot::rows(["clients", "scheme", "control", "nic", "size"]);
        for statistic in [Statistic::Mean, Statistic::P50, Statistic::P99, Statistic::Max] {
            pivot = pivot.column(metric, statistic);
        }
        for control in ControlMode::ALL {
            pivot = pivot.ratio(metric, Statistic::P50, &rpc(*control));
        }
        pivot.table(records)
    };
    let mut rate = Pivot::rows(["clients", "scheme", "control", "nic", "size"])
        .column("alloc_rate_per_s", Statistic::Mean)
        .column("alloc_nic_cpu_us", Statistic::Mean)
        .column("alloc_control_cpu_us", Statistic::Mean);
    for control in ControlMode::ALL {
        rate = rate.ratio("alloc_rate_per_s", Statistic::Mean, &rpc(*control));
    }
    vec![
        ("Allocation (ratios of medians)".to_owned(), latency("alloc_latency_us")),
        ("Free (ratios of medians)".to_owned(), latency("free_latency_us")),
        (
            "Allocate/free pairs: rate, and CPU time per pair (ratios of rates)".to_owned(),
            rate.table(records),
        ),
    ]
}

/// The table of a run over sizes and clients: a row per size and scheme. `unsupported` holds the
/// combinations that a scheme does not serve, with the reason.
pub fn comparison(records: &[Record], unsupported: &[(u64, Contender, String)]) -> Table {
    let distinct = |key: &str| {
        let mut values: Vec<u64> =
            records.iter().filter_map(|r| r.setting.number(key)).map(|n| n as u64).collect();
        values.sort_unstable();
        values.dedup();
        values
    };
    let (clients, mut sizes) = (distinct("clients"), distinct("size"));
    sizes.extend(unsupported.iter().map(|(bytes, ..)| *bytes));
    sizes.sort_unstable();
    sizes.dedup();
    let columns = [
        ("alloc_latency_us", Statistic::P50, "alloc us\np50"),
        ("alloc_latency_us", Statistic::P99, "alloc us\np99"),
        ("free_latency_us", Statistic::P50, "free us\np50"),
        ("alloc_rate_per_s", Statistic::Mean, "pairs\nper s"),
    ];
    let mut head = vec!["size".to_owned(), "scheme".to_owned()];
    for n in &clients {
        head.extend(columns.iter().map(|(.., label)| format!("{n} cl.\n{label}")));
    }
    head.push("not supported".into());
    let mut table = Table::new(head);
    let mut schemes: Vec<String> = Vec::new();
    let unsupported_names = unsupported.iter().map(|(_, contender, _)| contender.name());
    records.iter().map(name_of).chain(unsupported_names).for_each(|name| {
        if !schemes.contains(&name) {
            schemes.push(name);
        }
    });
    for size in sizes {
        for scheme in &schemes {
            let value = |n: u64, metric: &str, statistic: Statistic| {
                let found = records.iter().find(|r| {
                    r.metric == metric
                        && r.statistic == statistic
                        && name_of(r) == *scheme
                        && r.setting.number("size") == Some(size as f64)
                        && r.setting.number("clients") == Some(n as f64)
                });
                found.map_or(Cell::None, |r| Cell::Number(engineering(r.value)))
            };
            let mut row = vec![Cell::size(size), Cell::text(scheme)];
            for n in &clients {
                row.extend(columns.iter().map(|(metric, which, _)| value(*n, metric, *which)));
            }
            let matches = |bytes: u64, c: &Contender| bytes == size && c.name() == *scheme;
            let why = unsupported.iter().find(|(bytes, c, _)| matches(*bytes, c));
            row.push(why.map_or(Cell::None, |(.., why)| Cell::text(why)));
            table.row(row);
        }
    }
    table
}

/// Name of the variant of a record, as [`Contender::name`].
fn name_of(record: &Record) -> String {
    let text = |key| record.setting.get(key).map(ToString::to_string);
    let (scheme, control) = (text("scheme").unwrap_or_default(), text("control"));
    control.map_or(scheme.clone(), |control| format!("{scheme} {control}"))
}

/// Writes the picture of a run over sizes and clients: median, P99 and rate, over sizes with the
/// fewest clients, and over clients with the smallest size.
///
/// # Errors
/// As [`Lines::write`].
pub fn comparison_picture(
    records: &[Record],
    subtitle: &str,
    directory: &Path,
) -> Result<Vec<PathBuf>, Error> {
    let least = |key: &str| {
        records.iter().filter_map(|r| r.setting.number(key)).min_by(f64::total_cmp).unwrap_or(0.0)
    };
    let (clients, size) = (least("clients"), least("size"));
    let mut controls: Vec<_> = records.iter().filter_map(|r| r.setting.get("control")).collect();
    controls.dedup();
    let named: &[&str] = if controls.len() > 1 { &["scheme", "control"] } else { &["scheme"] };
    let mut panels = Panels::new(&format!("Allocation: {subtitle}"), 2);
    for (metric, statistic, what, label) in [
        ("alloc_latency_us", Statistic::P50, "median", "latency (us)"),
        ("alloc_latency_us", Statistic::P99, "P99", "latency (us)"),
        ("alloc_rate_per_s", Statistic::Mean, "rate, each with its free", "per second"),
    ] {
        for (x, fixed, at, axis, title) in [
            (
                "size",
                "clients",
                clients,
                Axis::bytes("size"),
                format!("{what}, {clients} client{}", if clients == 1.0 { "" } else { "s" }),
            ),
            (
                "clients",
                "size",
                size,
                Axis::linear("clients"),
                format!("{what}, {}", Size(size as u64)),
            ),
        ] {
            let shown: Vec<Record> =
                records.iter().filter(|r| r.setting.number(fixed) == Some(at)).cloned().collect();
            let series = series(&shown, metric, statistic, x, named, |_| true);
            let mut lines = Lines::new(&title, axis, Axis::log(label));
            for (name, points) in series {
                lines = match name.starts_with(schemes::ONESIDEDMW.name)
                    || name.starts_with(schemes::FINEMEM.name)
                {
                    true => lines.line(&name, points),
                    false => lines.baseline(&name, points),
                };
            }
            panels = panels.panel(lines);
        }
    }
    Ok(panels.write(directory, &format!("{EXPERIMENT}-schemes"))?.into())
}

/// Writes the pictures of a run over the number of clients: median latency and rate.
///
/// # Errors
/// As [`Lines::write`].
pub fn pictures(records: &[Record], directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    for (metric, statistic, title, label, name) in [
        (
            "alloc_latency_us",
            Statistic::P50,
            "Allocation of a chunk",
            "median latency (us)",
            "latency",
        ),
        (
            "alloc_rate_per_s",
            Statistic::Mean,
            "Allocations, each with its free",
            "allocations per second",
            "rate",
        ),
    ] {
        let mut lines = Lines::new(title, Axis::linear("clients"), Axis::log(label));
        let named = ["scheme", "control", "nic"];
        let series = series(records, metric, statistic, "clients", &named, |_| true);
        if series.is_empty() {
            continue;
        }
        for (scheme, points) in series {
            lines = if scheme.starts_with(schemes::ONESIDEDMW.name) {
                lines.line(&scheme, points)
            } else {
                lines.baseline(&scheme, points)
            };
        }
        files.extend(lines.write(directory, &format!("{EXPERIMENT}-{name}"))?);
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_runs_against_every_contender() {
        for contender in Contender::of(schemes::ALL) {
            let scheme = contender.scheme;
            let small =
                Settings { donate_bytes: 64 << 10, chunk_bytes: 4096, ..Settings::default() };
            let pool = Pool::embedded(contender.settings(small)).unwrap();
            warm_up(&pool).unwrap();
            let bytes = if scheme.has_sizes() { Some(4 * 4096) } else { None };
            let outcome = client(&pool, Duration::from_millis(10), bytes).unwrap();
            assert!(outcome.allocate.count() > 0, "{contender:?}");
            assert_eq!(outcome.allocate.count(), outcome.free.count());
            assert!(outcome.elapsed >= Duration::from_millis(10));
            // In schemes with a quarantine, the last chunks become free a moment later.
            let end = Instant::now() + Duration::from_secs(20);
            loop {
                let status = pool.node_status().unwrap().node;
                if status.free == 16 {
                    break;
                }
                assert!(Instant::now() < end, "{contender:?}: {status:?}");
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn default_contenders_are_two_schemes() {
        let two = [schemes::ONESIDEDMW, schemes::RPC_MW_2];
        assert_eq!(Contender::of(&two), Contender::DEFAULT);
    }

    #[test]
    fn size_support_has_chunk_size_or_reason() {
        let chunk_bytes = |scheme, bytes| {
            let settings = Settings { scheme, donate_bytes: 64 << 20, ..Settings::default() };
            match SizeSupport::of(Settings { chunk_bytes: 4096, ..settings }, bytes) {
                SizeSupport::Supported(settings) => Ok(settings.chunk_bytes),
                SizeSupport::Unsupported(why) => Err(why),
            }
        };
        assert_eq!(chunk_bytes(schemes::FINEMEM, 65536), Ok(4096));
        assert_eq!(chunk_bytes(schemes::FINEMEM, 1024), Ok(1024));
        assert_eq!(chunk_bytes(schemes::ONESIDEDMW, 65536), Ok(65536));
        assert_eq!(chunk_bytes(schemes::ODRP, 4096), Ok(4096));
        let why = chunk_bytes(schemes::ODRP, 65536).unwrap_err();
        assert!(why.contains("4KiB"), "{why}");
        let why = chunk_bytes(schemes::PREMMAP_RPC, 128 << 20).unwrap_err();
        assert!(why.contains("largest block"), "{why}");
        let why = chunk_bytes(schemes::ONESIDEDMW, 128 << 20).unwrap_err();
        assert!(why.contains("donate_bytes"), "{why}");
        assert!(chunk_bytes(schemes::RPC_MW_2, 5000).unwrap_err().contains("power of two"));
    }

    #[test]
    fn comparison_has_a_row_per_size_and_scheme() {
        let unsupported = vec![(65536, Contender::DEFAULT[0], "why not".to_owned())];
        let table = comparison(&run(), &unsupported).to_string();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 4 + 2 * 3, "{table}");
        assert!(lines.iter().any(|l| l.contains("4KiB") && l.contains("rpc-mw-2 event")));
        assert!(lines.iter().any(|l| l.contains("onesidedmw") && l.ends_with("why not")));
        let directory = tempfile::tempdir().unwrap();
        let files = comparison_picture(&run(), "shm", directory.path()).unwrap();
        assert_eq!(files.len(), 2);
    }

    fn run() -> Vec<Record> {
        let mut records = Vec::new();
        for clients in [1, 8] {
            for (contender, us) in Contender::DEFAULT.iter().zip([4, 50, 8]) {
                let mut total = Total::default();
                for _ in 0..2 {
                    let mut round = Outcome::default();
                    for _ in 0..clients {
                        let mut one = Outcome::default();
                        one.allocate.record(Duration::from_micros(us));
                        one.free.record(Duration::from_micros(2 * us));
                        one.elapsed = Duration::from_micros(3 * us);
                        round.join(&one);
                    }
                    let nic = Some(Duration::from_micros(clients * 2));
                    total.add(&round, nic, Duration::from_micros(clients * 7));
                }
                records.extend(total.records(&contender.setting("shm", clients as u32, 4096)));
            }
        }
        records
    }

    #[test]
    fn records_sum_rounds_and_clients() {
        let records = run();
        let value = |metric: &str, clients: f64| {
            let found = records.iter().find(|r| {
                r.metric == metric
                    && r.statistic == Statistic::Mean
                    && r.setting.number("clients") == Some(clients)
            });
            found.unwrap().value
        };
        assert!((value("alloc_rate_per_s", 8.0) - 8.0 / 12e-6).abs() < 1.0);
        assert!((value("alloc_nic_cpu_us", 8.0) - 2.0).abs() < 1e-9);
        assert!((value("alloc_control_cpu_us", 1.0) - 7.0).abs() < 1e-9);
        let claimed: Vec<_> = records.iter().filter_map(|r| r.claim.as_deref()).collect();
        assert_eq!(claimed, ["osmw.alloc.latency.1"]);
    }

    #[test]
    fn tables_have_ratios_to_both_control_modes() {
        let tables = tables(&run());
        let (_, latency) = &tables[0];
        let text = latency.to_string();
        let row = text.lines().find(|line| line.contains("onesidedmw")).unwrap();
        let words: Vec<&str> = row.split_whitespace().collect();
        assert!(words.ends_with(&["0.0800", "0.500"]), "{text}");
        let (_, rate) = &tables[2];
        assert!(rate.to_string().contains("alloc_control_cpu_us"), "{rate}");
    }

    #[test]
    fn pictures_show_every_contender_over_clients() {
        let directory = tempfile::tempdir().unwrap();
        assert!(pictures(&[], directory.path()).unwrap().is_empty());
        let files = pictures(&run(), directory.path()).unwrap();
        assert_eq!(files.len(), 4);
        let svg = std::fs::read_to_string(&files[0]).unwrap();
        for text in ["onesidedmw, shm", "rpc-mw-2, event, shm", "rpc-mw-2, polling, shm"] {
            assert!(svg.contains(text), "{text} is missing");
        }
    }
}

//! Memory nodes as separate processes: a private node for one command, and the status of any node.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use metrics::Samples;
use pool::protocol::{Dropped, Status, Trouble};
use pool::{Address, ControlMode, ControlPlane, Remote, RemoteAddress, Scheme, Settings, schemes};
use scheme::{BudgetStatus, LeaseStatus, Use};
use schemes::rpc;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tempfile::NamedTempFile;
use units::Size;
use units::number::thousands;

use crate::child::ChildProcess;
use crate::log::LogLevel;
use crate::options::{NicName, PoolAddress};

/// Start-up message of `granary serve --json`; `event` is `ready`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    pub event: String,
    /// The node's address for `--pool` on this host.
    pub pool: String,
    /// The node's address for `--pool` on other hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<String>,
    /// URL of the node's metrics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<String>,
    pub pid: u32,
    pub donated_bytes: u64,
    pub chunk_bytes: u64,
    pub chunks: u64,
    pub scheme: String,
    pub control: ControlMode,
    pub group_size: u32,
    pub credits: u32,
}

impl Ready {
    /// The message of a memory node with these settings in this process.
    pub fn new(settings: &Settings, pool: &PoolAddress, remote: Option<SocketAddr>) -> Self {
        Self {
            event: "ready".into(),
            pool: pool.to_string(),
            remote: remote.map(|address| RemoteAddress::from(address).to_string()),
            metrics: None,
            pid: std::process::id(),
            donated_bytes: settings.chunks() * settings.chunk_bytes,
            chunk_bytes: settings.chunk_bytes,
            chunks: settings.chunks(),
            scheme: settings.scheme.name.into(),
            control: settings.options.parse::<rpc::Options>().unwrap_or_default().control,
            group_size: settings.group_size,
            credits: settings.credits,
        }
    }
}

/// A private memory node: `granary serve` as a child process of this command. The node ends when
/// this value is dropped, or when this process ends for any reason.
pub struct NodeProcess {
    _child: ChildProcess,
    id: u32,
    path: PathBuf,
    remote: Option<Address>,
    /// File with the token that clients over TCP must present.
    _token: Option<NamedTempFile>,
}

impl NodeProcess {
    /// Starts `granary serve` and waits until it is ready.
    pub fn start(settings: &Settings) -> anyhow::Result<Self> {
        Self::start_logging(settings, None)
    }

    /// As [`NodeProcess::start`], with a level of the node's log.
    pub fn start_logging(settings: &Settings, log: Option<LogLevel>) -> anyhow::Result<Self> {
        Self::spawn(settings, None, log).context("start a memory node")
    }

    /// As [`NodeProcess::start`], for clients over `nic`. With roce the node listens on the
    /// loopback interface.
    pub fn start_on(settings: &Settings, nic: NicName) -> anyhow::Result<Self> {
        let token = || -> anyhow::Result<NamedTempFile> {
            let mut random = [0; 32];
            File::open("/dev/urandom")?.read_exact(&mut random)?;
            let mut file = NamedTempFile::new()?;
            random.iter().try_for_each(|byte| write!(file, "{byte:02x}"))?;
            Ok(file)
        };
        let token = (nic == NicName::Roce).then(token).transpose().context("write a token file")?;
        Self::spawn(settings, token, None).context("start a memory node")
    }

    fn spawn(
        settings: &Settings,
        token: Option<NamedTempFile>,
        log: Option<LogLevel>,
    ) -> anyhow::Result<Self> {
        let granary = std::env::current_exe().context("find the path of this program")?;
        let mut command = Command::new(granary);
        // Overcommit, because the node's memory takes the place of this command's own memory; no
        // other user depends on it.
        command.args(["serve", "--json", "--private", "--overcommit"]).args(arguments(settings));
        if let Some(level) = log {
            command.args(["--log", level.name()]);
        }
        if let Some(token) = &token {
            command.args(["--listen", "127.0.0.1:0", "--token-file"]).arg(token.path());
        }
        let mut child = ChildProcess::spawn_server(&mut command)?;
        let ready: Ready = child.read_line()?;
        let parse = |text: &str| text.parse::<Address>().map_err(anyhow::Error::msg);
        let Address::Shm(path) = parse(&ready.pool)? else {
            bail!("expected a node with a local socket, but its address is {}", ready.pool);
        };
        let remote = match ready.remote.as_deref().map(parse).transpose()? {
            Some(Address::Roce(remote)) => {
                let token = token.as_ref().map(|file| file.path().to_owned());
                Some(Address::Roce(Remote { token, ..remote }))
            }
            other => other,
        };
        Ok(Self { _child: child, id: ready.pid, path, remote, _token: token })
    }

    /// Id of the node's process.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Path of the node's Unix socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Address for clients: RoCE if the node was started for it, otherwise the socket.
    pub fn address(&self) -> Address {
        self.remote.clone().unwrap_or_else(|| Address::Shm(self.path.clone()))
    }

    /// State and counters of the node.
    pub fn status(&self) -> anyhow::Result<Status> {
        status(&Address::Shm(self.path.clone()))
    }
}

/// Settings as arguments of `granary serve`.
fn arguments(settings: &Settings) -> Vec<String> {
    // Never fewer clients than the default: clients of an earlier round may still be disconnecting.
    let (clients, usual) = (settings.clients_max, Settings::default().clients_max);
    [
        ("--memory", settings.donate_bytes.to_string()),
        ("--chunk", settings.chunk_bytes.to_string()),
        ("--group-size", settings.group_size.to_string()),
        ("--credits", settings.credits.to_string()),
        ("--scheme", settings.scheme.to_string()),
        ("--keep-resident", settings.keep_resident_bytes.to_string()),
    ]
    .into_iter()
    .flat_map(|(name, value)| [name.to_owned(), value])
    .chain(settings.options.iter().filter_map(|(name, value)| match value {
        // Budgets limit clients of several users; a private memory node has one user.
        Value::Bool(true) | Value::Object(_) => None,
        Value::Bool(false) => Some(format!("--no-{}", option_name(name))),
        Value::String(text) => Some(format!("--{}={text}", option_name(name))),
        value => Some(format!("--{}={value}", option_name(name))),
    }))
    .chain(settings.nic_windows.map(|windows| format!("--nic-windows={windows}")))
    .chain((clients > usual).then(|| format!("--clients={clients}")))
    .chain(settings.shares_chunks.then(|| "--share-chunks".to_owned()))
    .collect()
}

/// Name of the option of `granary serve` for a setting, without dashes in front.
pub fn option_name(setting: &str) -> String {
    match setting {
        "clients_max" => "clients".to_owned(),
        "tiers" => "tier".to_owned(),
        "permissions_max" => "permissions".to_owned(),
        "clock_drift_ppm_max" => "clock-drift-ppm".to_owned(),
        "delay" | "contiguity" | "handover" => format!("no-{setting}"),
        setting => setting.replace('_', "-"),
    }
}

/// Prints a warning on standard error if a scheme is unsafe.
pub fn warn_if_unsafe(scheme: Scheme) {
    if let Some(why) = scheme.unsafe_because {
        eprintln!("granary: warning: scheme {scheme} is unsafe, use it for comparison only: {why}");
    }
}

/// Queries the state and the counters of a memory node.
pub fn status(node: &Address) -> anyhow::Result<Status> {
    Ok(node.ask()?.status()?)
}

/// [`status`] with a time limit for each of the node's answers.
pub fn status_within(node: &Address, limit: Duration) -> anyhow::Result<Status> {
    Ok(node.ask_within(limit)?.status()?)
}

/// CPU time that a memory node used between two status queries.
pub struct CpuTimes {
    /// Time of the NIC thread, which stands in for the hardware.
    pub nic: Duration,
    /// Time of the memory node's CPU.
    pub control: Duration,
}

impl CpuTimes {
    /// The difference between an earlier status and a later one.
    pub fn between(before: &Status, after: &Status) -> Self {
        let since = |before: u64, after: u64| Duration::from_nanos(after.saturating_sub(before));
        Self {
            nic: since(before.nic_cpu_ns, after.nic_cpu_ns),
            control: since(before.control_cpu_ns, after.control_cpu_ns),
        }
    }
}

/// The status of a memory node as JSON: its fields, and all metrics by their full names.
#[derive(Serialize)]
pub struct StatusReport {
    #[serde(flatten)]
    status: Status,
    metrics: Samples,
}

impl StatusReport {
    /// The report of a status.
    pub fn new(status: Status) -> Self {
        let metrics = status.samples();
        // These are among the metrics.
        Self { status: Status { nic_counters: BTreeMap::new(), ..status }, metrics }
    }
}

/// Formats the status of a memory node as lines of text: a summary, and all metrics that are not
/// zero.
pub fn describe(status: &Status) -> String {
    let Status { node, .. } = status;
    let seconds = |ns: u64| Duration::from_nanos(ns).as_secs_f64();
    let held = node.chunks.saturating_sub(node.free);
    let mut lines = vec![
        ("scheme", scheme(status)),
        ("up", format!("{:.1} s", status.uptime_ms as f64 / 1e3)),
        (
            "memory",
            format!(
                "{} in {} chunks of {}: {} free, {} held",
                Size(status.donated_bytes),
                thousands(node.chunks),
                Size(node.chunk_bytes),
                thousands(node.free),
                thousands(held),
            ),
        ),
        (
            "resident",
            format!(
                "{} in the memory node's process; held chunks {}, free chunks at most {}",
                Size(status.resident_bytes).rounded(),
                Size(status.held_bytes).rounded(),
                Size(status.kept_bytes).rounded(),
            ),
        ),
        ("clients", clients(node)),
        ("allocations", by(node.allocations_nic, node.allocations_cpu)),
        ("frees", by(node.frees_nic, node.frees_cpu)),
        ("refused", thousands(node.refused)),
        (
            "NIC thread",
            format!(
                "{:.3} s of CPU time, {} work-queue elements, {} sleeps (stands in for hardware)",
                seconds(status.nic_cpu_ns),
                thousands(status.nic_wqes),
                thousands(status.nic_wakeups),
            ),
        ),
        ("", format!("scheduling: {}", nic_scheduling(status))),
        (
            "control CPU",
            format!(
                "{:.3} s of CPU time, {} wake-ups",
                seconds(status.control_cpu_ns),
                thousands(status.control_wakeups),
            ),
        ),
    ];
    if let Some(trouble) = trouble(&status.trouble) {
        lines.push(("trouble", trouble));
    }
    if let Some(dropped) = dropped(&status.dropped) {
        lines.push(("dropped", dropped));
    }
    if let Some(budget) = &node.budget {
        lines.push(("budgets", budgets(budget)));
        lines.extend(budget.most.iter().map(|client| ("", usage(client))));
    }
    if let Some(lease) = &node.lease {
        let [objects, permissions, windows] = leases(lease);
        lines.extend([("objects", objects), ("permissions", permissions), ("windows", windows)]);
    }
    let line = |(name, value): &(&str, String)| format!("{name:<12} {value}");
    let metrics = status.samples().lines().join("\n");
    let summary = lines.iter().map(line).collect::<Vec<_>>().join("\n");
    format!("{summary}\n\n{metrics}")
}

/// Dropped packets from other hosts by reason; `None` without any.
fn dropped(packets: &Dropped) -> Option<String> {
    let reasons = [
        (packets.unknown_qp, "for unknown queue pairs"),
        (packets.strangers, "from an address other than the peer's"),
        (packets.forged, "with a wrong authentication tag"),
        (packets.outdated, "replayed"),
        (packets.guessed, "after too many wrong tags"),
        (packets.spoilt, "malformed"),
    ];
    let reasons = reasons.into_iter().filter(|(count, _)| *count > 0);
    let reasons = reasons.map(|(count, why)| format!("{} {why}", thousands(count)));
    let reasons = reasons.collect::<Vec<_>>();
    (!reasons.is_empty()).then(|| format!("packets: {}", reasons.join(", ")))
}

/// Scheduling of the NIC thread.
pub fn nic_scheduling(status: &Status) -> &str {
    match status.nic_scheduling.as_str() {
        "" => "ordinary",
        scheduling => scheduling,
    }
}

fn scheme(status: &Status) -> String {
    let Status { node, nic, .. } = status;
    let functions = match node.functions {
        0 | 1 => String::new(),
        n => format!(", windows in {n} of its functions"),
    };
    format!("{}{} on NIC {nic}{functions}", node.scheme, unsafety(&node.scheme))
}

fn unsafety(scheme: &str) -> &'static str {
    match schemes::find(scheme) {
        Ok(scheme) if scheme.unsafe_because.is_some() => " (unsafe)",
        _ => "",
    }
}

fn clients(node: &pool::NodeStatus) -> String {
    let leaving = match node.leaving {
        0 => String::new(),
        n => format!(", and {} departed whose chunks are being reclaimed", thousands(n)),
    };
    format!("{}{leaving}", thousands(node.clients))
}

/// Failures that the memory node has counted; `None` without any.
fn trouble(trouble: &Trouble) -> Option<String> {
    let Trouble { connections, accepts, unretired, last } = trouble;
    let part =
        |count: &u64, text: &str| (*count > 0).then(|| format!("{} {text}", thousands(*count)));
    let parts = [
        part(connections, "connections closed after a failed system call"),
        part(accepts, "failed attempts to accept a connection (retried)"),
        part(unretired, "departed clients whose chunks cannot be reclaimed yet"),
    ];
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    let last = last.as_ref().map_or(String::new(), |why| format!("; last failure: {why}"));
    (!parts.is_empty()).then(|| format!("{}{last}", parts.join(", ")))
}

fn budgets(budget: &BudgetStatus) -> String {
    let limit = |limit: Option<u64>, unit: &str| {
        limit.map_or(format!("unlimited {unit}"), |n| format!("{} {unit}", thousands(n)))
    };
    format!(
        "{}, {} per client, checked every {} ms; {} suspensions so far, {} suspended now",
        limit(budget.requests_per_s, "requests/s"),
        limit(budget.chunks, "chunks"),
        budget.interval_ms,
        thousands(budget.ended),
        thousands(budget.suspended),
    )
}

fn usage(client: &Use) -> String {
    format!(
        "client {}: {} requests/s, peak {} chunks{}",
        client.client,
        thousands(client.requests_per_s),
        thousands(client.chunks),
        if client.suspended { ", over budget: management connection closed" } else { "" },
    )
}

/// Objects, permissions and windows of a scheme with leases.
fn leases(lease: &LeaseStatus) -> [String; 3] {
    let count = |count: u64, one: &str, many: &str| {
        format!("{} {}", thousands(count), if count == 1 { one } else { many })
    };
    let objects = format!(
        "{} with {}, in {}",
        count(lease.objects, "object", "objects"),
        Size(lease.object_bytes).rounded(),
        count(lease.domains, "domain", "domains"),
    );
    let permissions = format!(
        "{} now, {}; so far {} granted, {} found extended, {} renewed, {} revoked, {} expired, {} \
         marked as not extendable, {}",
        thousands(lease.permissions),
        count(lease.waiting, "request waits", "requests wait"),
        thousands(lease.grants),
        thousands(lease.extensions),
        thousands(lease.renewals),
        thousands(lease.revocations),
        thousands(lease.expiries),
        thousands(lease.notices),
        count(lease.busy, "request in vain", "requests in vain"),
    );
    let polls = match lease.heartbeats {
        0 => String::new(),
        _ => format!(
            "; {}, {}",
            count(lease.heartbeats, "heartbeat", "heartbeats"),
            count(lease.dead_qps, "client without an answer", "clients without an answer"),
        ),
    };
    let windows = format!(
        "{}; {}, {}, {}; {}, {}{polls}",
        count(lease.windows, "window", "windows"),
        count(lease.binds, "bind", "binds"),
        count(lease.unbinds, "unbind", "unbinds"),
        count(lease.handovers, "handover", "handovers"),
        count(lease.spares, "spare QP", "spare QPs"),
        count(lease.qp_resets, "QP re-established", "QPs re-established"),
    );
    [objects, permissions, windows]
}

fn by(nic: u64, cpu: u64) -> String {
    format!("{} by the NIC, {} by the memory node's CPU", thousands(nic), thousands(cpu))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn described_status_has_cpu_times_budgets_and_trouble() {
        let mut status = Status { nic: "shm".into(), donated_bytes: 1 << 30, ..Status::default() };
        status.node.scheme = "onesidedmw".into();
        status.node.chunks = 1024;
        status.node.free = 1000;
        status.node.chunk_bytes = 1 << 20;
        (status.held_bytes, status.kept_bytes) = (24 << 20, 64 << 20);
        status.resident_bytes = 100 << 20;
        status.node.allocations_nic = 12_345;
        status.nic_cpu_ns = 1_500_000_000;
        status.node.leaving = 2;
        status.node.budget = Some(BudgetStatus {
            chunks: Some(512),
            interval_ms: 50,
            ended: 3,
            suspended: 1,
            most: vec![Use { client: 7, chunks: 513, suspended: true, ..Use::default() }],
            ..BudgetStatus::default()
        });
        status.node.functions = 3;
        status.nic_scheduling = "SCHED_RR".into();
        assert!(!describe(&status).contains("trouble"));
        status.trouble = Trouble {
            accepts: 2,
            last: Some("accepting a connection: Too many open files".into()),
            ..Trouble::default()
        };
        let text = describe(&status);
        for part in [
            "clients      0, and 2 departed",
            "unlimited requests/s, 512 chunks per client, checked every 50 ms; \
             3 suspensions so far, 1 suspended now",
            "client 7: 0 requests/s, peak 513 chunks, over budget",
            "onesidedmw on NIC shm, windows in 3 of its functions",
            "1GiB in 1,024 chunks of 1MiB: 1,000 free, 24 held",
            "resident     100MiB in the memory node's process; held chunks 24MiB, \
             free chunks at most 64MiB",
            "12,345 by the NIC, 0 by the memory node's CPU",
            "NIC thread   1.500 s",
            "             scheduling: SCHED_RR",
            "trouble      2 failed attempts to accept a connection (retried); last failure: \
             accepting a connection: Too many open files",
            "control CPU  0.000 s",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn described_status_has_leases_only_in_a_scheme_with_leases() {
        let mut status = Status::default();
        assert!(!describe(&status).contains("permissions"));
        status.node.lease = Some(LeaseStatus {
            objects: 1,
            object_bytes: 3 << 20,
            permissions: 4,
            waiting: 5,
            domains: 6,
            grants: 7_000,
            extensions: 8,
            extensions_rpc: 0,
            renewals: 9,
            revocations: 10,
            expiries: 11,
            notices: 12,
            busy: 1,
            binds: 14,
            unbinds: 15,
            handovers: 16,
            windows: 17,
            spares: 18,
            qp_resets: 19,
            heartbeats: 20,
            dead_qps: 1,
        });
        let text = describe(&status);
        for part in [
            "objects      1 object with 3MiB, in 6 domains",
            "permissions  4 now, 5 requests wait; so far 7,000 granted, 8 found extended, \
             9 renewed, 10 revoked, 11 expired, 12 marked as not extendable, 1 request in vain",
            "windows      17 windows; 14 binds, 15 unbinds, 16 handovers; 18 spare QPs, \
             19 QPs re-established; 20 heartbeats, 1 client without an answer",
            "granary_lease_expiries_total 11",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        let json = serde_json::to_value(StatusReport::new(status)).unwrap();
        assert_eq!(json["lease"]["handovers"], 16);
        assert_eq!(json["metrics"]["granary_lease_handovers_total"], 16);
    }

    #[test]
    fn settings_of_a_scheme_become_options_of_serve() {
        let settings = Settings { scheme: schemes::PATRONUS, ..Settings::default() }
            .with("lease_max_us", 900)
            .with("clock_drift_ppm_max", 9)
            .with("control", ControlMode::Polling);
        let arguments = arguments(&settings);
        for argument in ["--lease-max-us=900", "--clock-drift-ppm=9", "--control=polling"] {
            assert!(arguments.iter().any(|a| a == argument), "{argument}: {arguments:?}");
        }
    }

    #[test]
    fn cpu_times_are_differences_of_two_statuses() {
        let at =
            |nic_cpu_ns, control_cpu_ns| Status { nic_cpu_ns, control_cpu_ns, ..Status::default() };
        let times = CpuTimes::between(&at(10, 5), &at(30, 6));
        assert_eq!((times.nic.as_nanos(), times.control.as_nanos()), (20, 1));
    }
}

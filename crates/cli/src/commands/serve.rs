//! `granary serve`: runs a memory node.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use metrics::server::Server;
use pool::remote::domain;
use pool::schemes::tdmem::{Tier, TierSizes};
use pool::{
    Address, Budget, ControlMode, Endpoint, Listen, Scheme, Service, Settings, Token, schemes,
};
use serde::Serialize;
use serde_json::json;
use units::Size;
use units::number::thousands;

use crate::UsageError;
use crate::file_descriptors;
use crate::lease_options::LeaseOptions;
use crate::log::{Log, LogLevel};
use crate::memory::{DonationCheck, HostMemory};
use crate::metrics_page::MetricsPage;
use crate::node::{self, Ready};
use crate::options::{Donation, Output, PoolAddress};
use crate::signals::Signals;

/// Longest path of a Unix socket in bytes, without the terminating zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Interval between checks whether the control thread has failed.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Run a memory node
///
/// Donates memory, divided into chunks, to the processes that attach to its socket. Prints its
/// address and settings when it is ready. The software NIC runs in a thread of its own; in scheme
/// onesidedmw the control thread takes no part in allocations, accesses and frees. Stops on SIGINT
/// or SIGTERM and then prints its counters.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Serve {
    #[command(flatten)]
    donation: Donation,

    /// Unix socket at which clients attach [default: granary.sock in $XDG_RUNTIME_DIR or /tmp]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Serve other hosts too, over RoCEv2: TCP and UDP at this address [default port: 4791]
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = listen_address)]
    listen: Option<SocketAddr>,

    /// File with the token that clients on other hosts must present; only its owner may have read
    /// permission
    #[arg(long, value_name = "FILE", requires = "listen")]
    token_file: Option<PathBuf>,

    /// File with the token of a domain that clients on other hosts can join, 32 bytes or 64
    /// hexadecimal digits; only its owner may have read permission. May be given several times
    #[arg(long, value_name = "FILE", requires = "listen")]
    domain_token: Vec<PathBuf>,

    /// Serve every host and local user that can reach the --listen address, without a token
    #[arg(long, requires = "listen", conflicts_with = "token_file")]
    open_to_all: bool,

    /// Send packets between hosts without authentication tags, which cost CPU time. Then any sender
    /// that uses a compute node's address and port and guesses a 24-bit number is accepted as that
    /// compute node
    #[arg(long, requires = "listen")]
    no_packet_authentication: bool,

    /// Serve at a new socket that only this user can reach, for the command that started this one
    #[arg(long, hide = true, conflicts_with = "socket")]
    private: bool,

    /// Pass the memory of the chunks to processes of this user, which then move pages without the
    /// NIC
    #[arg(long, hide = true, requires = "private")]
    share_chunks: bool,

    /// Allocation scheme: onesidedmw (the NIC allocates), finemem (the compute node allocates with
    /// one-sided operations), tdmem (the NIC allocates pages at random places, and looks the owner
    /// up at each access), or patronus (clients share objects by permissions with leases, which the
    /// memory node's CPU grants). For comparison: patronus-2, patronus-mr (patronus with type-2
    /// windows and with regions); odrp (the NIC allocates pages at their first access); rpc-mw-2,
    /// fine-mr, static-mr, ondemand-rpc (the memory node's CPU allocates on request); rpc-data (the
    /// memory node's CPU also executes each read, write and atomic operation); and, unsafe,
    /// onesidedmw-paper (its chain as published), finemem-paper, patronus-paper (finemem and
    /// patronus as published), premmap-onesided (the compute node allocates from an array),
    /// rpc-mw-1, premmap-rpc, shared-region, unprotected (one key to all memory for every compute
    /// node). See docs/user/choosing.md
    #[arg(long, default_value_t = schemes::ONESIDEDMW, value_parser = schemes::find)]
    scheme: Scheme,

    /// How the control thread waits for requests in RPC schemes and in scheme patronus: event or
    /// polling
    #[arg(long, default_value_t)]
    control: ControlMode,

    /// Control threads that serve requests in RPC schemes and in scheme patronus
    #[arg(long, value_name = "CORES", default_value_t = 1)]
    cores: u32,

    /// Disable separate management QPs in scheme onesidedmw: each access QP also carries the chain
    /// that allocates for it. For comparison
    #[arg(long)]
    no_separation: bool,

    /// Disable contention control. Schemes finemem and finemem-paper: retry a failed CAS in place
    /// and start every search at the same section. Scheme premmap-onesided: CAS every entry of the
    /// array, even one read as taken. For comparison
    #[arg(long)]
    no_contention_control: bool,

    /// Size of a memory tier in scheme tdmem: fast=SIZE or dram=SIZE. Pages are stored in tier fast
    /// while it has room. The sizes add up to --memory; a tier dram without a size has the rest. In
    /// software both tiers are main memory
    #[arg(long = "tier", value_name = "TIER=SIZE", value_parser = tier)]
    tiers: Vec<(Tier, Size)>,

    #[command(flatten)]
    leases: LeaseOptions,

    /// Memory windows per group: one for the owner of the grant, and one for each lane
    #[arg(long, value_name = "WINDOWS", default_value_t = Settings::default().group_size)]
    group_size: u32,

    /// Limit of memory windows per NIC function, if lower than the NIC's 16.7 million. In scheme
    /// finemem the memory node uses as many functions as it needs
    #[arg(long, value_name = "WINDOWS")]
    nic_windows: Option<u32>,

    /// Memory at the start of the donated memory that stays resident when its chunks are free, so
    /// that their next use is fast. Memory of other chunks returns to the system when they are
    /// freed
    #[arg(
        long,
        value_name = "SIZE",
        default_value_t = Size(Settings::default().keep_resident_bytes),
    )]
    keep_resident: Size,

    /// Requests of one kind that a client may have in flight: a power of two
    #[arg(long, value_name = "REQUESTS", default_value_t = Settings::default().credits)]
    credits: u32,

    /// Limit of allocations and frees per second and client; a client over the limit is suspended
    /// for a while
    #[arg(long, value_name = "REQUESTS")]
    budget_requests_per_s: Option<u64>,

    /// Limit of chunks held per client; a client over the limit is suspended for a while
    #[arg(long, value_name = "CHUNKS")]
    budget_chunks: Option<u64>,

    /// Milliseconds between checks of the clients' budgets
    #[arg(long, value_name = "MS", default_value_t = Budget::default().interval.as_millis() as u64)]
    budget_interval_ms: u64,

    /// Limit of connected clients; each process of a paged program is one client
    #[arg(long, value_name = "CLIENTS", default_value_t = Settings::default().clients_max)]
    clients: u32,

    /// Start even if --memory exceeds the memory of this machine or control group
    #[arg(long)]
    overcommit: bool,

    /// Milliseconds after which a silent connection that has not completed its handshake is closed
    #[arg(
        long,
        value_name = "MS",
        default_value_t = Settings::default().silence.as_millis() as u64,
    )]
    silence_ms: u64,

    /// Seconds for which a client on another host may be unreachable, 4 to 86400. Then the client
    /// counts as dead, and its memory is cleared and freed. The client gives this memory node up
    /// after the same time
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = Settings::CLIENT_TIMEOUT.as_secs(),
    )]
    client_timeout: u64,

    #[command(flatten)]
    metrics: MetricsPage,

    #[command(flatten)]
    log: Log,

    #[command(flatten)]
    output: Output,
}

const EXAMPLES: &str = "\
Examples:
  granary serve --memory 4GiB
  granary serve --memory 256MiB --chunk 4KiB --socket /run/granary.sock
  granary run --pool shm:/run/granary.sock --local 64MiB -- python3 train.py
  granary serve --memory 64GiB --listen 10.0.0.2 --token-file /etc/granary.token
  granary serve --budget-chunks 512 --budget-requests-per-s 100000
  granary serve --memory 4GiB --metrics 9464 --log info
  granary serve --scheme rpc-mw-2 --control polling --json
  granary serve --scheme patronus --chunk 64KiB --lease-max-us 10000 --spares 2";

/// Final JSON line: the memory node's counters.
#[derive(Serialize)]
struct Stopped {
    event: &'static str,
    #[serde(flatten)]
    status: node::StatusReport,
}

impl Serve {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        // The command that starts a private memory node passes its own level.
        self.log.start(if self.private { LogLevel::Error } else { LogLevel::Warn });
        let settings = self.settings()?;
        self.check_memory()?;
        let endpoint = self.endpoint()?;
        let mut report = self.output.report();
        if !self.private {
            node::warn_if_unsafe(settings.scheme);
        }
        // Block the signals before the service starts threads, so that no thread receives one.
        let signals = Signals::to_stop().context("wait for signals")?;
        let listen = self.listen()?;
        file_descriptors::raise_limit_for(settings.clients_max);
        let service = Service::start_with(&settings, &endpoint, listen.as_ref())?;
        let status = service.status_source();
        let metrics = self.metrics.start(move || Ok(status()?.samples()))?;
        let pool = PoolAddress::Node(Address::Shm(service.path().to_owned()));
        let metrics_url = metrics.as_ref().map(Server::url);
        let ready =
            Ready { metrics: metrics_url, ..Ready::new(&settings, &pool, service.address()) };
        report.print(match self.output.json {
            true => serde_json::to_string(&ready)?,
            false => describe_ready(&ready),
        })?;

        while !signals.wait(CHECK_INTERVAL).context("wait for signals")? {
            if let Some(why) = service.failure() {
                bail!("serve at {}: {why}; restart granary serve", service.path().display());
            }
        }
        drop(metrics);
        let status = service.status()?;
        service.stop();
        report.print(match self.output.json {
            true => {
                let status = node::StatusReport::new(status);
                serde_json::to_string(&Stopped { event: "stopped", status })?
            }
            false => format!("\nstopped\n{}", node::describe(&status)),
        })?;
        Ok(ExitCode::SUCCESS)
    }

    fn settings(&self) -> anyhow::Result<Settings> {
        self.donation.check(self.scheme, "serve")?;
        let mut settings = Settings {
            group_size: self.group_size,
            credits: self.credits,
            clients_max: self.clients,
            // A private memory node has a single user: the command that started it.
            client_quotas: !self.private,
            nic_windows: self.nic_windows,
            keep_resident_bytes: self.keep_resident.bytes(),
            silence: Duration::from_millis(self.silence_ms),
            client_timeout: Duration::from_secs(self.client_timeout),
            urgent_nic: true,
            shares_chunks: self.share_chunks,
            ..self.donation.settings(self.scheme)
        };
        let budget = Budget {
            requests_per_s: self.budget_requests_per_s,
            chunks: self.budget_chunks,
            interval: Duration::from_millis(self.budget_interval_ms),
            ..Budget::default()
        };
        let polling = self.control != ControlMode::default() && self.scheme.needs_cpu();
        for (name, is_set, value) in [
            ("control", polling, json!(self.control)),
            ("cores", self.cores != 1, json!(self.cores)),
            ("separation", self.no_separation, json!(false)),
            ("contention_control", self.no_contention_control, json!(false)),
            ("budget", budget.is_set(), json!(budget)),
            ("tiers", !self.tiers.is_empty(), json!(self.tier_sizes()?)),
        ] {
            if is_set {
                settings = settings.with(name, value);
            }
        }
        for (name, value) in self.leases.settings() {
            settings = settings.with(name, value);
        }
        settings.validate().map_err(|error| match error {
            pool::Error::Setting { setting, value, why } => {
                UsageError(format!("{}: {why}", option_of(setting, &value)), "serve").into()
            }
            error => anyhow::Error::from(error),
        })?;
        Ok(settings)
    }

    /// The sizes of the memory tiers.
    fn tier_sizes(&self) -> Result<TierSizes, UsageError> {
        let mut sizes = BTreeMap::new();
        for (tier, size) in &self.tiers {
            if sizes.insert(*tier, size.bytes()).is_some() {
                let text = format!("--tier {tier}: given twice; give one size for each tier");
                return Err(UsageError(text, "serve"));
            }
        }
        let fast = sizes.get(&Tier::Fast).copied().unwrap_or(0);
        Ok(TierSizes { fast, dram: sizes.get(&Tier::Dram).copied() })
    }

    /// Compares the donated memory with the memory of this machine or control group.
    fn check_memory(&self) -> anyhow::Result<()> {
        match HostMemory::read().check_donation(self.donation.memory.bytes()) {
            DonationCheck::Fits => {}
            DonationCheck::Tight { .. } if self.private => {}
            DonationCheck::TooLarge { .. } if self.overcommit => {}
            DonationCheck::Tight { warning } => eprintln!("granary: warning: {warning}"),
            DonationCheck::TooLarge { why } => return Err(UsageError(why, "serve").into()),
        }
        Ok(())
    }

    /// Address and access rules for other hosts, if they are served.
    fn listen(&self) -> anyhow::Result<Option<Listen>> {
        let Some(address) = self.listen else { return Ok(None) };
        let token = self.token_file.as_deref().map(Token::read).transpose()?;
        let domains = self.domain_token.iter().map(|file| domain::read(file));
        let domains = domains.collect::<Result<_, _>>()?;
        let listen = Listen {
            address,
            token,
            open_to_all: self.open_to_all,
            authenticated: !self.no_packet_authentication,
            domains,
        };
        match listen.check() {
            Err(pool::Error::Setting { value, .. }) => {
                let text = format!(
                    "--listen {value}: without a token every host and local user that can reach \
                     this address could allocate memory; add --token-file FILE or --open-to-all"
                );
                Err(UsageError(text, "serve").into())
            }
            other => Ok(other.map(|()| Some(listen))?),
        }
    }

    /// The Unix socket of the service. The runtime directory is preferred, because it belongs to
    /// this user.
    fn endpoint(&self) -> Result<Endpoint, UsageError> {
        if self.private {
            return Ok(Endpoint::Fresh);
        }
        let directory = || std::env::var_os("XDG_RUNTIME_DIR").map_or("/tmp".into(), PathBuf::from);
        let socket = self.socket.clone().unwrap_or_else(|| directory().join("granary.sock"));
        if socket.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            let text = format!(
                "--socket {}: a socket's path has at most {SOCKET_PATH_BYTES_MAX} bytes; choose a \
                 shorter one",
                socket.display()
            );
            return Err(UsageError(text, "serve"));
        }
        Ok(Endpoint::At(socket))
    }
}

/// The command-line option that gives a setting this value.
fn option_of(setting: &str, value: &str) -> String {
    let option = node::option_name(setting);
    match value {
        value if value.starts_with('{') => format!("--{option}"),
        "false" => format!("--no-{option}"),
        _ => format!("--{option} {value}"),
    }
}

/// Parses the size of a tier of the memory node.
fn tier(text: &str) -> Result<(Tier, Size), String> {
    let named = text.split_once('=').and_then(|(name, size)| {
        let tier = Tier::DONOR.into_iter().find(|tier| tier.name() == name)?;
        Some((tier, size))
    });
    let (tier, size) = named.ok_or("expected fast=SIZE or dram=SIZE, e.g. fast=1GiB")?;
    Ok((tier, size.parse::<Size>().map_err(|error| error.to_string())?))
}

/// Parses an IP address with or without a port.
fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    match (text.parse(), bare.parse::<IpAddr>()) {
        (Ok(address), _) => Ok(address),
        (_, Ok(ip)) => Ok(SocketAddr::new(ip, pool::remote::address::PORT)),
        _ => Err("expected an IP address of this host and optionally a port: 10.0.0.2:4791, \
                 [fd00::2]:4791"
            .into()),
    }
}

/// The start-up message without `--json`.
fn describe_ready(ready: &Ready) -> String {
    let Ready { pool, scheme, control, group_size, credits, .. } = ready;
    let remote = ready.remote.as_ref().map_or(String::new(), |r| format!("\nremote    {r}"));
    let metrics = ready.metrics.as_ref().map_or(String::new(), |url| format!("\nmetrics   {url}"));
    let waits = if schemes::find(scheme).is_ok_and(|scheme| scheme.needs_cpu()) {
        format!(", control {control}")
    } else {
        String::new()
    };
    format!(
        "serving {} in {} chunks of {}\n\
         pool      {pool}{remote}{metrics}\n\
         scheme    {scheme}{waits}, groups of {group_size} windows, {credits} credits\n\
         to use    granary run --pool {pool} --local 256MiB -- PROGRAM\n\
         to watch  granary status --pool {pool}\n\
         to stop   Ctrl-C, or kill {}",
        Size(ready.donated_bytes),
        thousands(ready.chunks),
        Size(ready.chunk_bytes),
        ready.pid,
    )
}

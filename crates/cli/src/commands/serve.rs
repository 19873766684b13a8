//! `granary serve`: a memory node.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use bench::size::Size;
use bench::table::thousands;
use pool::{
    Address, Budget, ControlMode, Endpoint, Listen, SchemeKind, Service, Settings, Token, protocol,
};
use serde::Serialize;

use crate::UsageError;
use crate::descriptors;
use crate::memory::{HostMemory, Verdict};
use crate::node::{self, Ready};
use crate::options::{Donation, Output, PoolAddress};
use crate::signals::Signals;

/// Bytes of the path in a Unix socket's address, without the final zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// How often the control thread is looked after, in case that it ended by itself.
const LOOK: Duration = Duration::from_secs(1);

/// Serve memory: be a memory node
///
/// Donates memory, cut into chunks, to every process that attaches to its socket, and says
/// what it serves once it does. Its software NIC runs in a thread of its own; in scheme
/// onesidedmw the control thread takes no part in allocations, accesses and frees. Ends on
/// SIGINT or SIGTERM, and then says what it did.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Serve {
    #[command(flatten)]
    donation: Donation,

    /// Socket at which clients attach [default: granary.sock in $XDG_RUNTIME_DIR or /tmp]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Serve other hosts too, over RoCEv2: TCP and UDP at this address [default port: 4791]
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = listen_address)]
    listen: Option<SocketAddr>,

    /// File with the token that other hosts must have; only its owner may read it
    #[arg(long, value_name = "FILE", requires = "listen")]
    token_file: Option<PathBuf>,

    /// Serve every host and local user that reaches the address of --listen, without a token
    #[arg(long, requires = "listen", conflicts_with = "token_file")]
    open_to_all: bool,

    /// Let packets between hosts go without tags, which cost CPU time. The NIC then takes a sender
    /// for a compute node that has its address and port and guesses a number of 24 bits
    #[arg(long, requires = "listen")]
    no_packet_authentication: bool,

    /// Serve at a new socket that only this user reaches, for the command that started this
    #[arg(long, hide = true, conflicts_with = "socket")]
    private: bool,

    /// Who allocates: onesidedmw (the NIC); finemem (the compute node); or one to be compared with: finemem-paper
    /// (as published), premmap-onesided (the compute node, on an array), rpc-mw-1, premmap-rpc (these four are
    /// unsafe), rpc-mw-2, fine-mr, static-mr, ondemand-rpc (the CPU on request); or the NIC page by page, at every
    /// access: odrp. See docs/choosing.md
    #[arg(long, default_value_t)]
    scheme: SchemeKind,

    /// How the control thread waits for requests, in the schemes by RPC: event or polling
    #[arg(long, default_value_t)]
    control: ControlMode,

    /// Control threads that answer requests, in the schemes by RPC
    #[arg(long, value_name = "CORES", default_value_t = Settings::default().cores)]
    cores: u32,

    /// Without QPs of their own for allocation, in scheme onesidedmw: each access QP carries the chain
    /// that allocates for it. To be compared with
    #[arg(long)]
    no_separation: bool,

    /// Without contention control, in schemes finemem and finemem-paper: whose CAS fails tries again where he is, and
    /// begins where others do. In scheme premmap-onesided: what is seen to be taken is CASed all the same. To be
    /// compared with
    #[arg(long)]
    no_contention_control: bool,

    /// Memory windows of a group: one for the grant's owner, and one for each lane
    #[arg(long, value_name = "WINDOWS", default_value_t = Settings::default().group_size)]
    group_size: u32,

    /// Memory windows that each function of the NIC has, to have fewer than its 16.7 million; in scheme finemem the
    /// memory node takes as many functions as it needs
    #[arg(long, value_name = "WINDOWS")]
    nic_windows: Option<u32>,

    /// Memory that free chunks keep resident at most, for the next use of it to be fast: that at
    /// the start of the donated memory. All else goes back to the system when a chunk is freed
    #[arg(long, value_name = "SIZE", default_value_t = Size(Settings::default().keep_resident_bytes))]
    keep_resident: Size,

    /// Requests of one kind that a client may have in flight: a power of two
    #[arg(long, value_name = "REQUESTS", default_value_t = Settings::default().credits)]
    credits: u32,

    /// Allocations and frees a second that a client may make; over it, it may make none for a while
    #[arg(long, value_name = "REQUESTS")]
    budget_requests_per_s: Option<u64>,

    /// Chunks that a client may hold; over it, it may allocate and free nothing for a while
    #[arg(long, value_name = "CHUNKS")]
    budget_chunks: Option<u64>,

    /// Milliseconds between two looks at what clients use, where there is a budget
    #[arg(long, value_name = "MS", default_value_t = Budget::default().interval.as_millis() as u64)]
    budget_interval_ms: u64,

    /// Clients that may be connected at a time; each process of a paged program is one
    #[arg(long, value_name = "CLIENTS", default_value_t = Settings::default().clients_max)]
    clients: u32,

    /// Start although --memory is more than this machine, or this control group, has
    #[arg(long)]
    overcommit: bool,

    /// Milliseconds that a connection may be silent before it has attached or is a client
    #[arg(long, value_name = "MS", default_value_t = Settings::default().silence.as_millis() as u64)]
    silence_ms: u64,

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
  granary serve --scheme rpc-mw-2 --control polling --json";

/// What it says at its end.
#[derive(Serialize)]
struct Stopped<'a> {
    event: &'static str,
    #[serde(flatten)]
    status: &'a protocol::Status,
}

impl Serve {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let settings = self.settings()?;
        self.check_memory()?;
        let endpoint = self.endpoint()?;
        let mut report = self.output.report();
        if !self.private {
            node::warn_of(settings.scheme);
        }
        // Before the service has threads, so that none of them takes a signal.
        let signals = Signals::to_stop().context("wait for signals")?;
        let listen = self.listen()?;
        descriptors::provide_for(settings.clients_max);
        let service = Service::start_with(&settings, &endpoint, listen.as_ref())?;
        let pool = PoolAddress::Node(Address::Shm(service.path().to_owned()));
        let ready = Ready::new(&settings, &pool, service.address());
        report.print(match self.output.json {
            true => serde_json::to_string(&ready)?,
            false => introduce(&ready),
        })?;

        while !signals.wait(LOOK).context("wait for signals")? {
            if let Some(why) = service.failure() {
                bail!("serve at {}: {why}; start it again", service.path().display());
            }
        }
        let status = service.status()?;
        service.stop();
        report.print(match self.output.json {
            true => serde_json::to_string(&Stopped { event: "stopped", status: &status })?,
            false => format!("\nstopped\n{}", node::describe(&status)),
        })?;
        Ok(ExitCode::SUCCESS)
    }

    fn settings(&self) -> anyhow::Result<Settings> {
        self.donation.check("serve")?;
        let settings = Settings {
            group_size: self.group_size,
            credits: self.credits,
            clients_max: self.clients,
            // The command that started a private one has it for itself.
            shares_places: !self.private,
            scheme: self.scheme,
            control: self.control,
            cores: self.cores,
            separation: !self.no_separation,
            contention_control: !self.no_contention_control,
            nic_windows: self.nic_windows,
            keep_resident_bytes: self.keep_resident.bytes(),
            silence: Duration::from_millis(self.silence_ms),
            budget: Budget {
                requests_per_s: self.budget_requests_per_s,
                chunks: self.budget_chunks,
                interval: Duration::from_millis(self.budget_interval_ms),
                ..Budget::default()
            },
            ..self.donation.settings()
        };
        settings.validate().map_err(|error| match error {
            pool::Error::Setting { setting, value, why } => {
                UsageError(format!("{}: {why}", option_of(setting, &value)), "serve").into()
            }
            error => anyhow::Error::from(error),
        })?;
        Ok(settings)
    }

    /// Compares the memory that is donated with what there is.
    fn check_memory(&self) -> anyhow::Result<()> {
        let donated = self.donation.memory.bytes();
        let there = HostMemory::read();
        match there.judge(donated) {
            Verdict::Fits => {}
            Verdict::Crowded { .. } if self.private => {}
            Verdict::TooLarge { .. } if self.overcommit => {}
            Verdict::Crowded { warning } => eprintln!("granary: warning: {warning}"),
            Verdict::TooLarge { why } => return Err(UsageError(why, "serve").into()),
        }
        Ok(())
    }

    /// How other hosts reach it.
    fn listen(&self) -> anyhow::Result<Option<Listen>> {
        let Some(address) = self.listen else { return Ok(None) };
        let token = self.token_file.as_deref().map(Token::read).transpose()?;
        let listen = Listen {
            address,
            token,
            open_to_all: self.open_to_all,
            authenticated: !self.no_packet_authentication,
        };
        match listen.check() {
            Err(pool::Error::Setting { value, .. }) => {
                let text = format!(
                    "--listen {value}: without a token every host and local user that reaches \
                     this address could take memory; give --token-file FILE, or say --open-to-all"
                );
                Err(UsageError(text, "serve").into())
            }
            other => Ok(other.map(|()| Some(listen))?),
        }
    }

    /// Where it listens; the runtime directory belongs to this user, and is preferred.
    fn endpoint(&self) -> Result<Endpoint, UsageError> {
        if self.private {
            return Ok(Endpoint::Fresh);
        }
        let directory = || std::env::var_os("XDG_RUNTIME_DIR").map_or("/tmp".into(), PathBuf::from);
        let socket = self.socket.clone().unwrap_or_else(|| directory().join("granary.sock"));
        if socket.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            let text = format!(
                "--socket {}: longer than the {SOCKET_PATH_BYTES_MAX} bytes of a socket's path",
                socket.display()
            );
            return Err(UsageError(text, "serve"));
        }
        Ok(Endpoint::At(socket))
    }
}

/// What was given on the command line for a setting to have this value.
fn option_of(setting: &str, value: &str) -> String {
    let option = match setting {
        "clients_max" => "clients".to_owned(),
        setting => setting.replace('_', "-"),
    };
    match value {
        "false" => format!("--no-{option}"),
        _ => format!("--{option} {value}"),
    }
}

/// An IP address, with a port or without.
fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    match (text.parse(), bare.parse::<IpAddr>()) {
        (Ok(address), _) => Ok(address),
        (_, Ok(ip)) => Ok(SocketAddr::new(ip, pool::remote::address::PORT)),
        _ => {
            Err("write an IP address of this host, and a port: 10.0.0.2:4791, [fd00::2]:4791"
                .into())
        }
    }
}

/// What it serves, for people.
fn introduce(ready: &Ready) -> String {
    let Ready { pool, scheme, control, group_size, credits, .. } = ready;
    let remote = ready.remote.as_ref().map_or(String::new(), |r| format!("\nremote    {r}"));
    let waits = if scheme.needs_cpu() { format!(", control {control}") } else { String::new() };
    format!(
        "serving {} in {} chunks of {}\n\
         pool      {pool}{remote}\n\
         scheme    {scheme}{waits}, groups of {group_size} windows, {credits} credits\n\
         use it    granary run --pool {pool} --local 256MiB -- PROGRAM\n\
         watch it  granary status --pool {pool}\n\
         stop it   Ctrl-C, or kill {}",
        Size(ready.donated_bytes),
        thousands(ready.chunks),
        Size(ready.chunk_bytes),
        ready.pid,
    )
}

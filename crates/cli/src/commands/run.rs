//! `granary run`: runs an unmodified program with most of its memory in a pool.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use pager::config::{Config, Hide, Paths, SealChoice};
use pager::execs::WithoutPool;
use pager::run::RunDirectory;
use pager::runs::Bound;
use pager::stats::{Counter, Summary};
use pager::sys::PAGE_BYTES;
use pool::protocol::Status;
use pool::schemes::tdmem::Tier;
use pool::{Address, Scheme, Settings, schemes};
use scheme::info::AccessKind;
use units::Size;

use crate::UsageError;
use crate::assist::AssistProcess;
use crate::bound::{BoundKeeper, LocalOptions};
use crate::log::{Log, LogLevel};
use crate::memory::HostMemory;
use crate::metrics_page::MetricsPage;
use crate::nic::NicProcess;
use crate::node::{self, NodeProcess};
use crate::options::{Donation, PoolAddress, TokenFile};
use crate::summary::RunSummary;

/// Run a program with part of its memory in a pool
///
/// Starts an unmodified, dynamically linked program. All processes of the program together keep at
/// most --local bytes of anonymous memory resident on this machine. The rest is paged to a memory
/// node, in chunks that are allocated on demand. By default the memory node is private and ends
/// with this command. The output is the program's own. The exit status is the program's, or 128
/// plus the signal number if a signal ended the program.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Run {
    #[command(flatten)]
    local: LocalOptions,

    /// Use running memory nodes: shm:PATH or roce://HOST[:PORT], separated by commas [default: a
    /// private memory node]
    #[arg(long, value_name = "POOL", conflicts_with_all = ["memory", "chunk", "scheme"])]
    pool: Option<PoolAddress>,

    /// Allocation scheme of the private memory node, as in granary serve
    #[arg(
        long,
        value_name = "SCHEME",
        default_value_t = schemes::ONESIDEDMW,
        value_parser = schemes::find
    )]
    scheme: Scheme,

    /// How pages reach the private memory node: direct (the process that needs a page copies it) or
    /// nic (READ and WRITE of the software NIC, as to other memory nodes). Direct is faster, most
    /// of all while other programs use all cores
    #[arg(long, value_enum, default_value_t, conflicts_with = "pool")]
    private_node: PrivateNode,

    #[command(flatten)]
    token: TokenFile,

    #[command(flatten)]
    donation: Donation,

    /// Division of the work of page faults. two: the page of a fault first, all other work on an
    /// asynchronous path, with prefetch for each thread. fastswap: aligned clusters of 8 pages, and
    /// only the page of the fault is waited for. linux: the whole cluster is waited for, and faults
    /// evict pages. Only two is meant for use; the others are for comparisons [default: two, or
    /// GRANARY_PATHS]
    #[arg(long, value_name = "linux|fastswap|two")]
    paths: Option<Paths>,

    /// Process in the role of a SmartNIC: off, or process. The process reads pages ahead and writes
    /// pages back for all processes of the program; a page that a thread waits for stays in the
    /// program's process. Needs --paths two. On a machine with one or two cores the assist competes
    /// with the program for them
    #[arg(long, value_enum, default_value_t)]
    assist: Assist,

    /// Encrypt and authenticate each page before it leaves the process, so that a memory node can
    /// neither read nor change it: aes-256-gcm, aes-128-gcm or off. --seal alone means aes-256-gcm.
    /// A page that a memory node changed ends the program with status 119. The overflow file is
    /// always encrypted [default: off, or GRANARY_SEAL]
    #[arg(
        long,
        value_name = "CIPHER",
        num_args = 0..=1,
        default_missing_value = "aes-256-gcm"
    )]
    seal: Option<SealChoice>,

    /// Pattern of accesses to hide from a memory node. writes: each page goes to a random free
    /// place whenever it is written. reads: each place is also read at most once, so that a page
    /// that is read is written again later. Both move pages one by one, which is slower. The times
    /// of the transfers are not hidden [default: off, or GRANARY_HIDE]
    #[arg(long, value_name = "off|writes|reads")]
    hide: Option<Hide>,

    /// Tier of each process's own memory in scheme tdmem: local=SIZE. Pages go there while it has
    /// room, and then to the memory node. This memory is in addition to --local, for each process
    /// of the program, and several memory nodes share it evenly [default: none]
    #[arg(long, value_name = "local=SIZE", value_parser = own_tier)]
    tier: Option<Size>,

    /// Run programs whose memory cannot be paged (static ones, Go without cgo), and programs whose
    /// seccomp filter may stop the pager, with a message instead of an error
    #[arg(long)]
    allow_unpaged: bool,

    /// Return sparsely used chunks to the pool at any time, and not only when 90 % of it are
    /// allocated: their pages move to other chunks, so that the chunks held are at most 1.1 times
    /// the pages in them. Takes at most 5 % of a core while the program faults, else at most half a
    /// core, and costs one READ and one WRITE for each moved page
    #[arg(long)]
    trim: bool,

    /// Print paging statistics to standard error when the program ends
    #[arg(long)]
    stats: bool,

    /// Write paging statistics to a file, as one JSON object, when the program ends
    #[arg(long, value_name = "FILE")]
    stats_json: Option<PathBuf>,

    /// Record the page faults to FILE for granary bench policy; FILE.PID if several processes
    /// fault. Nothing is read ahead meanwhile, so the program is slower. A fault takes 16 bytes
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    #[command(flatten)]
    metrics: MetricsPage,

    #[command(flatten)]
    log: Log,

    /// Program to run, and its arguments
    #[arg(required = true, last = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// Where the asynchronous path of page faults moves pages.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Assist {
    /// In the program's processes
    #[default]
    Off,
    /// In one more process, for all processes of the program
    Process,
}

/// How pages reach the private memory node.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PrivateNode {
    /// The process that needs a page copies it
    #[default]
    Direct,
    /// By READ and WRITE of the software NIC
    Nic,
}

impl PrivateNode {
    /// The choice for a private memory node with `scheme`.
    fn with(self, scheme: Scheme) -> Self {
        // In other schemes a grant has no address of memory.
        if scheme.access == AccessKind::OneSided { self } else { Self::Nic }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Nic => "nic",
        }
    }
}

/// Processes of the program that can use the private memory node at a time. Further processes wait
/// until others end.
const PROCESSES: u32 = 512;

const EXAMPLES: &str = "\
Examples:
  granary run --local 256MiB -- sort -S 1G big.txt -o sorted.txt
  granary run --local 64MiB --memory 8GiB --stats -- python3 train.py
  granary run --local 256MiB..4GiB -- make -j8
  granary run --local-each 64MiB -- make -j4
  granary run --local 256MiB --assist process --stats -- python3 train.py
  granary run --local 64MiB --scheme finemem -- gcc -O2 -c big.c
  granary run --local 64MiB --scheme tdmem --tier local=64MiB -- python3 train.py
  granary run --local 64MiB --pool shm:/run/granary.sock -- sqlite3 big.db .dump
  granary run --local 64MiB --pool roce://memory-1 --seal -- python3 train.py
  granary run --local 64MiB --pool shm:/run/a.sock,shm:/run/b.sock -- sort big.txt
  granary run --local 64MiB --pool roce://memory-1 --token-file ~/granary.token -- make -j4";

impl Run {
    pub fn run(mut self) -> anyhow::Result<ExitCode> {
        self.donation.check(self.scheme, "run")?;
        self.local = self.local.or_default(HostMemory::read())?;
        let follow = self.local.follow()?;
        let log = self.log.start(LogLevel::Error);
        let (program, arguments) = self.program.split_first().expect("clap requires a program");
        let private_node = self.pool.is_none().then(|| self.private_node.with(self.scheme));
        let is_direct = private_node == Some(PrivateNode::Direct);
        let private = match &self.pool {
            Some(_) => None,
            None => {
                let settings = Settings {
                    clients_max: PROCESSES,
                    shares_chunks: is_direct,
                    ..self.donation.settings(self.scheme)
                };
                node::warn_if_unsafe(settings.scheme);
                Some(NodeProcess::start_logging(&settings, Some(log))?)
            }
        };
        let token = self.token.token_file.as_deref();
        let pool = match (&private, self.pool.clone()) {
            (_, Some(pool)) => pool.with_token(token, "run")?,
            (Some(node), None) => PoolAddress::Node(node.address()),
            (None, None) => unreachable!("without --pool there is a private node"),
        };
        // This query also fails before the program starts if no memory node answers.
        let before = pool_status(&pool)?;
        self.check_tier(&pool, &before)?;
        // One NIC process for each remote memory node. All processes of the program share it, so
        // it must outlive each of them.
        let mut nics = Vec::new();
        let pool_address = match nodes(&pool) {
            [] => pool.to_string(),
            nodes => {
                let mut addresses = Vec::new();
                for node in nodes {
                    addresses.push(match node {
                        Address::Roce(remote) => {
                            nics.push(NicProcess::start(remote, log)?);
                            nics.last().expect("pushed above").address().clone()
                        }
                        other => other.clone(),
                    });
                }
                Address::write_list(&addresses)
            }
        };
        let local = self.local.size();
        let mut config = Config { is_direct, ..Config::new(local.bytes(), pool_address) };
        config.ends_daemons = private.is_some();
        config.allow_unpaged = self.allow_unpaged;
        config.trim = self.trim;
        config.tier_bytes = self.tier.map_or(0, |size| size.bytes());
        config.read_choices(|name| std::env::var(name).ok())?;
        config.paths = self.paths.unwrap_or(config.paths);
        config.seal = self.seal.map_or(config.seal, |SealChoice(cipher)| cipher);
        config.hide = self.hide.unwrap_or(config.hide);
        // Absolute, because a process of the program may change its working directory first.
        config.trace = self.trace.as_ref().map(std::path::absolute).transpose()?;
        config.shares_bound = self.local.is_shared();
        config.check()?;
        config.has_assist = self.assist == Assist::Process;
        self.check_assist(&config, &pool)?;
        let directory = RunDirectory::create()?;
        let assist = match config.has_assist {
            true => Some(AssistProcess::start(directory.path())?),
            false => None,
        };
        let ledger = match config.shares_bound {
            true => Some(directory.create_ledger(local.bytes())),
            false => None,
        };
        let keeper = ledger.map(|ledger| BoundKeeper::start(ledger, follow));
        let (counters, node) = (directory.memory(), private.as_ref().map(NodeProcess::address));
        let metrics = self.metrics.start(move || {
            let mut samples = Summary::read(counters).samples();
            if let Some(node) = &node {
                samples.extend(node::status(node)?.samples());
            }
            Ok(samples)
        })?;
        let ended = pager::run::run_in(&directory, &config, program, arguments)?;
        drop((metrics, keeper));
        if self.trace.is_some() && ended.traces.is_empty() {
            eprintln!("granary: no trace was recorded: no process faulted on paged memory");
        }
        if let Some(unpaged) = ended.summary.largest_unpaged()
            && is_much_unpaged(unpaged.bytes(), local.bytes())
        {
            eprintln!(
                "granary: {unpaged}; this memory is in addition to {}. See \
                 docs/user/running-programs.md, \"Memory that is not paged\"",
                self.local.describe()
            );
        }
        let lines = [without_room(&ended.summary, local), without_pool(&ended.without_pool)];
        for line in lines.into_iter().flatten() {
            eprintln!("granary: {line}");
        }
        if self.stats || self.stats_json.is_some() {
            // If a memory node has ended meanwhile, its CPU times stay at the earlier values.
            let after = pool_status(&pool).unwrap_or_else(|_| before.clone());
            let summary = RunSummary {
                private_node: private_node.map(|chosen| chosen.name().to_owned()),
                sealed_by: config.seal.map(|cipher| cipher.to_string()),
                processes_without_pool: ended.without_pool.processes,
                ..RunSummary::new(local, &ended.summary, &before, &after)
            }
            .with_bound(ledger.as_ref().map(Bound::of))
            .with_assist(assist.as_ref());
            self.print(&ended.summary, &summary)?;
        }
        Ok(ExitCode::from(u8::try_from(ended.code()).unwrap_or(u8::MAX)))
    }

    /// Refuses an assist that would have nothing to do.
    fn check_assist(&self, config: &Config, pool: &PoolAddress) -> Result<(), UsageError> {
        let why = match pool {
            _ if !config.has_assist => return Ok(()),
            _ if config.paths != Paths::Two => {
                format!(
                    "--paths {} has no work for an assist; use --paths two",
                    config.paths.name()
                )
            }
            PoolAddress::Store(_) => "pages of a local store are not moved by an assist; use a \
                                      memory node"
                .into(),
            _ if self.pool.is_none() && self.scheme.access != AccessKind::OneSided => format!(
                "scheme {} moves pages by requests of the program's process; use another scheme",
                self.scheme.name
            ),
            _ => return Ok(()),
        };
        Err(UsageError(format!("--assist process: {why}"), "run"))
    }

    /// Refuses a tier of the process's own memory that would not be used.
    fn check_tier(&self, pool: &PoolAddress, status: &Status) -> Result<(), UsageError> {
        let Some(size) = self.tier else { return Ok(()) };
        let page = PAGE_BYTES as u64 * nodes(pool).len().max(1) as u64;
        let why = match pool {
            PoolAddress::Store(_) => "a local store has no tiers; use a memory node with scheme \
                                      tdmem"
                .into(),
            _ if status.node.scheme != schemes::TDMEM.name => format!(
                "the memory node has scheme {}, and only scheme tdmem has tiers; {}",
                status.node.scheme,
                match self.pool {
                    None => "add --scheme tdmem",
                    Some(_) => "start it with granary serve --scheme tdmem, or leave --tier out",
                }
            ),
            _ if !size.bytes().is_multiple_of(page) || size.bytes() == 0 => {
                format!("the size must be a multiple of {page} bytes, a page for each memory node")
            }
            _ if self.assist == Assist::Process => {
                "pages of scheme tdmem are not moved by an assist; leave --assist out".into()
            }
            _ => return Ok(()),
        };
        Err(UsageError(format!("--tier local={size}: {why}"), "run"))
    }

    fn print(&self, paged: &Summary, summary: &RunSummary) -> anyhow::Result<()> {
        if self.stats {
            eprintln!("{paged}\n{summary}");
        }
        if let Some(path) = &self.stats_json {
            write(path, summary).with_context(|| format!("write {}", path.display()))?;
        }
        Ok(())
    }
}

/// The line about mappings for which the pager had no room.
fn without_room(summary: &Summary, local: Size) -> Option<String> {
    let (count, bytes) =
        (summary.get(Counter::MappingsUnpaged), summary.get(Counter::MappingsUnpagedBytes));
    is_much_unpaged(bytes, local.bytes()).then(|| {
        format!(
            "{count} mapping(s) of {} in total are not paged: there was no room for more mappings \
             at addresses of the program's choice. See docs/user/running-programs.md, \"Memory \
             that is not paged\"",
            Size(bytes).rounded()
        )
    })
}

/// The line about processes that ran without the pool.
fn without_pool(found: &WithoutPool) -> Option<String> {
    const NAMED: usize = 3;
    let processes = match found.processes {
        0 => return None,
        1 => "1 process".to_owned(),
        count => format!("{count} processes"),
    };
    let mut programs: Vec<String> = found
        .programs
        .iter()
        .take(NAMED)
        .map(|(path, reason)| {
            format!("{} ({})", path.display(), pager::run::why_without_pool(path, *reason))
        })
        .collect();
    if found.programs.len() > NAMED {
        programs.push("...".into());
    }
    let named = if programs.is_empty() { "" } else { ": " };
    Some(format!(
        "{processes} ran without the pool{named}{}. See docs/user/running-programs.md, \"Processes \
         that are not paged\"",
        programs.join(", ")
    ))
}

/// Parses the size of the tier of a process's own memory.
fn own_tier(text: &str) -> Result<Size, String> {
    match text.split_once('=') {
        Some((name, size)) if name == Tier::Local.name() => {
            size.parse::<Size>().map_err(|error| error.to_string())
        }
        Some((name, _)) if Tier::DONOR.iter().any(|tier| tier.name() == name) => Err(format!(
            "{name} is a tier of the memory node: give it to granary serve --tier {text}"
        )),
        _ => Err("expected local=SIZE, e.g. local=64MiB".into()),
    }
}

/// True if the command reports unpaged memory even without --stats: more than a tenth of the limit
/// `--local`, and more than [`ORDINARY_BYTES`].
fn is_much_unpaged(unpaged_bytes: u64, local_bytes: u64) -> bool {
    unpaged_bytes > (local_bytes / 10).max(ORDINARY_BYTES)
}

/// Unpaged memory in bytes that stacks and library data take in nearly every program.
const ORDINARY_BYTES: u64 = 4 << 20;

/// The memory nodes of a pool; empty for a file or memory store.
fn nodes(pool: &PoolAddress) -> &[Address] {
    match pool {
        PoolAddress::Node(address) => std::slice::from_ref(address),
        PoolAddress::Nodes(nodes) => nodes,
        PoolAddress::Store(_) => &[],
    }
}

/// Status of the pool: the last node's, with CPU times and sleeps summed over all nodes; the
/// default for file and memory stores.
fn pool_status(pool: &PoolAddress) -> anyhow::Result<Status> {
    let mut status = Status::default();
    for address in nodes(pool) {
        let (nic, control) = (status.nic_cpu_ns, status.control_cpu_ns);
        let wakeups = status.nic_wakeups;
        status = node::status(address)?;
        status.nic_wakeups += wakeups;
        status.nic_cpu_ns += nic;
        status.control_cpu_ns += control;
    }
    Ok(status)
}

fn write(path: &Path, summary: &RunSummary) -> anyhow::Result<()> {
    let mut line = serde_json::to_vec(summary)?;
    line.push(b'\n');
    Ok(units::files::write(path, &line)?)
}

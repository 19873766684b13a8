//! `granary run`: an unmodified program with most of its memory in a pool.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use bench::size::Size;
use pager::config::Config;
use pool::protocol::Status;
use pool::{Address, SchemeKind, Settings};

use crate::nic::NicProcess;
use crate::node::{self, NodeProcess};
use crate::options::{Donation, PoolAddress, TokenFile};
use crate::summary::RunSummary;

/// Run a program with the rest of its anonymous memory in a pool
///
/// Starts an unmodified, dynamically linked program. Each of its processes keeps at most
/// --local bytes of anonymous memory here; the rest is paged to chunks that are allocated on
/// demand from a memory node: a private one by default, which ends with this command. The
/// program's output and exit status are its own; 128 and a signal's number if that ended it.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Run {
    /// Anonymous memory that each process keeps here
    #[arg(long, value_name = "SIZE")]
    local: Size,

    /// Use a running memory node: shm:PATH or roce://HOST[:PORT], or several with commas between them [default: a
    /// private one]
    #[arg(long, value_name = "POOL", conflicts_with_all = ["memory", "chunk", "scheme"])]
    pool: Option<PoolAddress>,

    /// Allocation scheme of the private memory node, as of granary serve
    #[arg(long, value_name = "SCHEME", default_value_t = SchemeKind::OneSidedMw)]
    scheme: SchemeKind,

    #[command(flatten)]
    token: TokenFile,

    #[command(flatten)]
    donation: Donation,

    /// At the end, print what was paged, to standard error
    #[arg(long)]
    stats: bool,

    /// At the end, write what was paged to a file, as one JSON object
    #[arg(long, value_name = "FILE")]
    stats_json: Option<PathBuf>,

    /// The program and its arguments
    #[arg(required = true, last = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// Processes of a program that a private memory node has places for. More wait until others end.
const PROCESSES: u32 = 512;

const EXAMPLES: &str = "\
Examples:
  granary run --local 256MiB -- sort -S 1G big.txt -o sorted.txt
  granary run --local 64MiB --memory 8GiB --stats -- python3 train.py
  granary run --local 64MiB --scheme finemem -- gcc -O2 -c big.c
  granary run --local 64MiB --pool shm:/run/granary.sock -- sqlite3 big.db .dump
  granary run --local 64MiB --pool shm:/run/a.sock,shm:/run/b.sock -- sort big.txt
  granary run --local 64MiB --pool roce://memory-1 --token-file ~/granary.token -- make -j4";

impl Run {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.donation.check("run")?;
        let (program, arguments) = self.program.split_first().expect("clap asks for a program");
        let private = match &self.pool {
            Some(_) => None,
            None => {
                let settings = Settings {
                    scheme: self.scheme,
                    clients_max: PROCESSES,
                    ..self.donation.settings()
                };
                node::warn_of(settings.scheme);
                Some(NodeProcess::start(&settings)?)
            }
        };
        let token = self.token.token_file.as_deref();
        let pool = match (&private, self.pool.clone()) {
            (_, Some(pool)) => pool.with_token(token, "run")?,
            (Some(node), None) => PoolAddress::Node(node.address()),
            (None, None) => unreachable!("without a pool there is a private node"),
        };
        // Also finds out whether a memory node is there, before the program starts.
        let before = state(&pool)?;
        // A NIC for all processes of the program, which outlives each of them; one for each memory node.
        let mut nics = Vec::new();
        let named = match nodes(&pool) {
            [] => pool.to_string(),
            nodes => {
                let mut addresses = Vec::new();
                for node in nodes {
                    addresses.push(match node {
                        Address::Roce(remote) => {
                            nics.push(NicProcess::start(remote)?);
                            nics.last().expect("just made").address().clone()
                        }
                        other => other.clone(),
                    });
                }
                Address::write_list(&addresses)
            }
        };
        let config = Config::new(self.local.bytes(), named);
        let ended = pager::run::run(&config, program, arguments)?;
        if let Some(unpaged) = ended.summary.largest_unpaged()
            && is_worth_a_word(unpaged.bytes(), self.local.bytes())
        {
            eprintln!(
                "granary: {unpaged}; it comes on top of --local {}. docs/pager.md, \"What is not paged\", \
                 says what to do",
                self.local
            );
        }
        if self.stats || self.stats_json.is_some() {
            // A memory node that went away meanwhile has nothing to tell.
            let after = state(&pool).unwrap_or_else(|_| before.clone());
            let summary = RunSummary::new(self.local, &ended.summary, &before, &after);
            self.print(&ended.summary, &summary)?;
        }
        Ok(ExitCode::from(u8::try_from(ended.code()).unwrap_or(u8::MAX)))
    }

    fn print(&self, paged: &pager::stats::Summary, summary: &RunSummary) -> anyhow::Result<()> {
        if self.stats {
            eprintln!("{paged}\n{summary}");
        }
        if let Some(path) = &self.stats_json {
            write(path, summary).with_context(|| format!("write {}", path.display()))?;
        }
        Ok(())
    }
}

/// True if so much memory that is not paged is to be said without --stats: more than a tenth of the
/// bound, and more than stacks and the data of libraries take in nearly every program.
fn is_worth_a_word(unpaged_bytes: u64, local_bytes: u64) -> bool {
    unpaged_bytes > (local_bytes / 10).max(ORDINARY_BYTES)
}

/// What stacks and the data of libraries take in nearly every program.
const ORDINARY_BYTES: u64 = 4 << 20;

/// The memory nodes of a pool; of a store none.
fn nodes(pool: &PoolAddress) -> &[Address] {
    match pool {
        PoolAddress::Node(address) => std::slice::from_ref(address),
        PoolAddress::Nodes(all) => all,
        PoolAddress::Store(_) => &[],
    }
}

/// The memory node's state, of several with their times together; of what is none, one in which nothing has
/// happened.
fn state(pool: &PoolAddress) -> anyhow::Result<Status> {
    let mut all = Status::default();
    for address in nodes(pool) {
        let (nic, control) = (all.nic_cpu_ns, all.control_cpu_ns);
        all = node::status(address)?;
        all.nic_cpu_ns += nic;
        all.control_cpu_ns += control;
    }
    Ok(all)
}

fn write(path: &Path, summary: &RunSummary) -> anyhow::Result<()> {
    let mut line = serde_json::to_vec(summary)?;
    line.push(b'\n');
    Ok(fs::write(path, line)?)
}

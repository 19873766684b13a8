//! `granary kv`: a key-value store in the pool, behind the Redis protocol.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use kv_server::config::{Config, Ignored};
use kv_server::data::{Data, Reopened};
use kv_server::{Running, Setup};
use pool::{EmbeddedNode, Options, Pool, schemes};
use serde::Serialize;
use units::Size;

use crate::UsageError;
use crate::file_descriptors;
use crate::log::{Log, LogLevel};
use crate::metrics_page::MetricsPage;
use crate::options::{DomainFile, Donation, Output, PoolAddress, TokenFile};
use crate::signals::Signals;

/// Size of a chunk of the embedded memory node, in bytes.
const CHUNK_BYTES: u64 = 64 << 10;
/// Building blocks of a send queue: waves of many commands are posted with one doorbell.
const SEND_BLOCKS: u32 = 4096;
/// QP groups, and so threads, that a store can use.
const GROUPS_MAX: u16 = 64;

/// Serve a key-value store over the Redis protocol
///
/// Keys, values and the index are in a memory pool: in an embedded memory node, or with --pool in
/// a memory node that granary serve runs. Clients of Redis work unchanged with strings, expiry,
/// transactions, publish and subscribe, users, and TLS. Options have the names of redis.conf; a
/// redis.conf itself may be given as FILE. Prints its addresses, and what survives which failure,
/// when it is ready. Stops on SIGINT, SIGTERM or SHUTDOWN.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Kv {
    /// A redis.conf. Lines that have no effect here are named on standard error
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,

    /// TCP port; 0 is none [default: 6379]
    #[arg(long, value_name = "PORT")]
    port: Option<String>,

    /// Addresses to listen at, separated by spaces [default: 127.0.0.1 -::1]
    #[arg(long, value_name = "ADDRESSES")]
    bind: Option<String>,

    /// Unix socket to listen at too
    #[arg(long, value_name = "PATH")]
    unixsocket: Option<String>,

    /// TCP port for TLS, with tls-cert-file and tls-key-file [default: 0, none]
    #[arg(long, value_name = "PORT")]
    tls_port: Option<String>,

    /// Limit of the memory in use, for example 1gb; 0 is no limit [default: 0]
    #[arg(long, value_name = "BYTES")]
    maxmemory: Option<String>,

    /// What happens at the limit or in a full pool: noeviction, or allkeys-lru, allkeys-lfu,
    /// allkeys-random, volatile-lru, volatile-lfu, volatile-random, volatile-ttl [default:
    /// noeviction]
    #[arg(long, value_name = "POLICY")]
    maxmemory_policy: Option<String>,

    /// Directory of the database file [default: the working directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<String>,

    /// Load a database file without its keys of other types than string, and count them. The next
    /// save replaces the file without these keys
    #[arg(long)]
    rdb_skip_unknown: bool,

    /// Another parameter of redis.conf, for example --set "slowlog-max-len 1000"
    #[arg(long = "set", value_name = "NAME VALUE")]
    set: Vec<String>,

    /// Threads that serve connections [default: 1]
    #[arg(long, value_name = "THREADS")]
    threads: Option<u16>,

    /// Memory node: shm:PATH or roce://HOST[:PORT] [default: one in this process]. May be given
    /// several times: the first memory node has the index, and values are on all of them
    #[arg(long, value_name = "POOL", conflicts_with_all = ["memory", "chunk"])]
    pool: Vec<PoolAddress>,

    /// Seconds without an answer of a memory node after which commands fail, 1 to 3600. The server
    /// goes on with its data when the memory node answers again [default: 5]
    #[arg(long, value_name = "SECONDS")]
    pool_timeout: Option<u64>,

    /// What happens when a memory node has ended, and the data with it: reopen begins again as a
    /// restart would, with the file or empty, once a memory node serves there again; exit ends the
    /// server with an error [default: reopen]
    #[arg(long, value_name = "reopen|exit")]
    pool_lost: Option<String>,

    #[command(flatten)]
    token: TokenFile,

    #[command(flatten)]
    domain: DomainFile,

    /// Memory of the embedded memory node
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    memory: Size,

    /// Size of a chunk of the embedded memory node: a power of two
    #[arg(long, value_name = "SIZE", default_value_t = Size(CHUNK_BYTES))]
    chunk: Size,

    /// Memory of this process for values that were read: a repeated read of such a value sends
    /// nothing to the pool; 0 is none [default: 0]
    #[arg(long, value_name = "SIZE", conflicts_with = "no_index_cache")]
    cache: Option<Size>,

    /// Limit of this process's copy of the index, 16 bytes a slot. Commands read the rest of the
    /// index in the pool [default: no limit]
    #[arg(long, value_name = "SIZE")]
    index_cache: Option<Size>,

    /// Keep no copy of the index in this process. Each command then reads the index in the pool.
    /// For comparison
    #[arg(long, conflicts_with = "index_cache")]
    no_index_cache: bool,

    #[command(flatten)]
    metrics: MetricsPage,

    #[command(flatten)]
    log: Log,

    #[command(flatten)]
    output: Output,
}

const EXAMPLES: &str = "\
Examples:
  granary kv
  granary kv --port 7000 --memory 8GiB --maxmemory 7gb --maxmemory-policy allkeys-lfu
  granary kv --pool shm:/run/granary.sock --threads 2
  granary kv --pool roce://first --pool roce://second --token-file token
  granary kv /etc/redis/redis.conf --metrics 9466
  redis-cli -p 6379 set greeting hello";

/// First JSON line: the server is ready.
#[derive(Serialize)]
struct Ready<'a> {
    event: &'static str,
    addresses: &'a [String],
    pool: String,
    scheme: String,
    chunk_bytes: u64,
    threads: u16,
    survival: String,
    metrics: Option<String>,
}

/// Last JSON line.
#[derive(Serialize)]
struct Stopped {
    event: &'static str,
}

impl Kv {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.log.start(LogLevel::Warn);
        let setup = self.setup()?;
        let threads = setup.config.number("io-threads") as u16;
        fit_clients(&setup.config)?;
        // Block the signals before threads start, so that no thread receives one.
        let signals = Signals::to_stop().context("wait for signals")?;
        let pools = self.open_pools(threads, setup.config.number("pool-timeout"))?;
        let groups = pools.first().map_or(1, Pool::groups).clamp(1, GROUPS_MAX);
        let settings = kv::Settings {
            mirror: !self.no_index_cache,
            index_cache: self.index_cache.map_or(u64::MAX, |size| size.0),
            stripe_bits: groups.ilog2() as u8,
            ..kv::Settings::default()
        };
        let heap = heap::Settings::default();
        let data = Data::create_over(pools, heap, settings.clone())?;
        let (scheme, chunk_bytes) = (data.pool().scheme().to_string(), data.pool().chunk_bytes());
        let data = Arc::new(Reopened::new(data, heap, settings));
        let survival = self.survival(&setup.config);
        let running = setup.start(data.clone())?;
        let (server, store) = (running.server().clone(), data.clone());
        let metrics =
            self.metrics.start(move || Ok(kv_server::metrics::samples(&server, &*store)))?;
        let ready = Ready {
            event: "ready",
            addresses: running.addresses(),
            pool: self.pool_name(),
            scheme,
            chunk_bytes,
            threads,
            survival,
            metrics: metrics.as_ref().map(|page| page.url()),
        };
        let mut report = self.output.report();
        report.print(match self.output.json {
            true => serde_json::to_string(&ready)?,
            false => describe(&ready),
        })?;
        wait(running, signals)?;
        drop(metrics);
        report.print(match self.output.json {
            true => serde_json::to_string(&Stopped { event: "stopped" })?,
            false => "stopped".to_owned(),
        })?;
        Ok(ExitCode::SUCCESS)
    }

    /// The configuration: the file, then the options.
    fn setup(&self) -> anyhow::Result<Setup> {
        let config = Config::default();
        let mut ignored = Ignored::default();
        if let Some(file) = &self.file {
            let name = file.display().to_string();
            let directives =
                redis_formats::conf::read(&name, &mut |name| units::files::read(name.as_ref()))?;
            ignored = config.load(&directives)?;
        }
        for line in &ignored.unknown {
            eprintln!("granary: warning: {line}: unknown parameter; remove the line");
        }
        for line in &ignored.unused {
            eprintln!("granary: warning: {line}: the parameter has no effect here");
        }
        let options = [
            ("port", self.port.clone()),
            ("bind", self.bind.clone()),
            ("unixsocket", self.unixsocket.clone()),
            ("tls-port", self.tls_port.clone()),
            ("maxmemory", self.maxmemory.clone()),
            ("maxmemory-policy", self.maxmemory_policy.clone()),
            ("pool-timeout", self.pool_timeout.map(|seconds| seconds.to_string())),
            ("pool-lost", self.pool_lost.clone()),
            ("dir", self.dir.clone()),
            ("cache", self.cache.map(|size| size.0.to_string())),
            ("rdb-skip-unknown", self.rdb_skip_unknown.then(|| "yes".to_owned())),
            ("io-threads", self.threads.map(|threads| threads.to_string())),
        ];
        for (name, value) in
            options.iter().filter_map(|(name, value)| Some((name, value.as_ref()?)))
        {
            set(&config, name, &[value.as_bytes()])?;
        }
        for line in &self.set {
            let words = redis_formats::words::split(line.as_bytes())
                .map_err(|_| usage(format!("--set {line:?}: unbalanced quotes")))?;
            let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
            let Some((name, values)) = words.split_first() else {
                return Err(usage(format!("--set {line:?}: a name and a value are needed")).into());
            };
            set(&config, &String::from_utf8_lossy(name), values)?;
        }
        let file = self.file.as_ref().map(|file| file.display().to_string()).unwrap_or_default();
        if self.no_index_cache && !config.is("cache", "0") {
            let text = "--no-index-cache: the parameter cache needs the copy of the index; remove \
                        one of them";
            return Err(usage(text.to_owned()).into());
        }
        Ok(Setup { config, ignored, file })
    }

    fn open_pools(&self, threads: u16, timeout_s: u64) -> anyhow::Result<Vec<Pool>> {
        let groups = Some(threads.next_power_of_two().min(GROUPS_MAX));
        let domain = self.domain.token()?;
        let options = Options {
            groups,
            send_blocks: SEND_BLOCKS,
            answer_timeout: Duration::from_secs(timeout_s),
            defers_repair: true,
            domain,
            ..Options::default()
        };
        if !self.pool.is_empty() {
            let connect = |pool: &PoolAddress| {
                let pool = pool.clone().with_token(self.token.token_file.as_deref(), "kv")?;
                Ok(pool.node("kv")?.connect(options.clone())?)
            };
            return self.pool.iter().map(connect).collect();
        }
        let donation = Donation { memory: self.memory, chunk: Some(self.chunk) };
        donation.check(schemes::ONESIDEDMW, "kv")?;
        let node = EmbeddedNode::start(&donation.settings(schemes::ONESIDEDMW))?;
        Ok(vec![Pool::embedded_in(&Arc::new(node), options)?])
    }

    fn pool_name(&self) -> String {
        if self.pool.is_empty() {
            return format!("embedded, {}", self.memory);
        }
        let names: Vec<_> = self.pool.iter().map(ToString::to_string).collect();
        names.join(", ")
    }

    /// What survives which failure, on one line.
    fn survival(&self, config: &Config) -> String {
        let file = format!("{}/{}", config.get("dir"), config.get("dbfilename"));
        let saves = match config.get("save").as_str() {
            "" => format!("SAVE, BGSAVE and SHUTDOWN SAVE write {file}"),
            points => format!("{file} is written by SAVE, BGSAVE and after {points}"),
        };
        let nodes = match self.pool.len() {
            0 | 1 => "",
            _ => "; a memory node other than the first that ends takes its values along",
        };
        format!(
            "the data lives as long as this process{nodes}; a restart loads the file if there is \
             one; {saves}"
        )
    }
}

/// Lowers `maxclients` if the process may not open as many descriptors.
fn fit_clients(config: &Config) -> anyhow::Result<()> {
    let wanted = config.number("maxclients");
    let Some(limit) = file_descriptors::raise_limit() else { return Ok(()) };
    let most = kv_server::connections_within(limit);
    if wanted > most {
        eprintln!(
            "granary: warning: this process may open {limit} file descriptors, so maxclients is \
             {most} instead of {wanted}: raise the limit (ulimit -n) or set maxclients"
        );
        set(config, "maxclients", &[most.to_string().as_bytes()])?;
    }
    Ok(())
}

fn usage(text: String) -> UsageError {
    UsageError(text, "kv")
}

fn set(config: &Config, name: &str, values: &[&[u8]]) -> anyhow::Result<()> {
    match config.set_at_start(name, values) {
        Ok(true) => Ok(()),
        Ok(false) => Err(usage(format!("{name}: unknown parameter of redis.conf")).into()),
        Err(kv_server::Error::Parameter { name, why }) => {
            Err(usage(format!("{name}: {why}")).into())
        }
        Err(error) => Err(error.into()),
    }
}

fn describe(ready: &Ready<'_>) -> String {
    let mut text = format!(
        "{:<12} {}\n{:<12} {}, scheme {}, chunks of {}\n{:<12} {}\n{:<12} {}",
        "serving",
        ready.addresses.join(", "),
        "pool",
        ready.pool,
        ready.scheme,
        Size(ready.chunk_bytes),
        "threads",
        ready.threads,
        "survival",
        ready.survival
    );
    if let Some(url) = &ready.metrics {
        text += &format!("\n{:<12} {url}", "metrics");
    }
    text
}

/// Waits for the end of the server: by SHUTDOWN, or by a signal.
fn wait(running: Running, signals: Signals) -> anyhow::Result<()> {
    let stop = running.stop();
    // The thread ends with the process. After SHUTDOWN no signal comes, so nothing waits for the
    // thread.
    std::thread::Builder::new()
        .name("granary-signals".into())
        .spawn(move || {
            // The server goes on if its save fails, and a later signal asks again.
            while let Ok(is_asked) = signals.wait(SIGNAL_WAIT) {
                if is_asked {
                    stop.stop();
                }
            }
        })
        .context("start a thread that waits for signals")?;
    Ok(running.wait()?)
}

/// Longest wait for a signal; then the wait begins again.
const SIGNAL_WAIT: std::time::Duration = std::time::Duration::from_secs(3600);

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        kv: Kv,
    }

    fn parse(words: &[&str]) -> Kv {
        Line::try_parse_from([&["kv"], words].concat()).map(|line| line.kv).unwrap()
    }

    #[test]
    fn options_come_after_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "port 7000\nmaxmemory 5mb\nfoo bar\nsave 60 1\n").unwrap();
        let path = file.path().to_str().unwrap();
        let setup = parse(&[path, "--port", "7001", "--set", "slowlog-max-len 7"]).setup().unwrap();
        assert_eq!(setup.config.get("port"), "7001");
        assert_eq!(setup.config.get("maxmemory"), "5242880");
        assert_eq!(setup.config.get("slowlog-max-len"), "7");
        assert_eq!(setup.ignored.unknown.len(), 1);
        let survival = parse(&[]).survival(&setup.config);
        assert!(
            survival.contains("dump.rdb is written by SAVE, BGSAVE and after 60 1"),
            "{survival}"
        );
    }

    #[test]
    fn cache_is_a_parameter_and_needs_the_copy_of_the_index() {
        let setup = parse(&["--cache", "64MiB"]).setup().unwrap();
        assert_eq!(setup.config.get("cache"), "67108864");
        let setup = parse(&["--set", "cache 1mb"]).setup().unwrap();
        assert_eq!(setup.config.get("cache"), "1048576");
        let error = parse(&["--set", "cache 1mb", "--no-index-cache"]).setup().unwrap_err();
        assert!(error.is::<UsageError>(), "{error}");
        assert!(Line::try_parse_from(["kv", "--cache", "1MiB", "--no-index-cache"]).is_err());
    }

    #[test]
    fn impossible_parameters_are_wrong_command_lines() {
        for words in
            [["--set", "nope 1"], ["--set", "timeout x"], ["--set", ""], ["--maxmemory", "much"]]
        {
            let error = parse(&words).setup().unwrap_err();
            assert!(error.is::<UsageError>(), "{error}");
        }
    }
}

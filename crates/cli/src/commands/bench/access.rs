//! `granary bench access`: latency, rate and bandwidth of READ and WRITE.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::bail;
use bench::access::{self, Direction, Outcome, Spec};
use bench::{handoff, pool_access};
use bench_report::record::{BASELINE_NIC, BASELINE_SCHEME};
use pool::{Address, EmbeddedNode, Pool};
use units::Size;

use super::BenchOutput;
use crate::UsageError;
use crate::node::NodeProcess;
use crate::options::{NicName, PoolAddress, TokenFile};

/// Measure READ and WRITE over sizes and queue depths
///
/// Measures latency with one operation in flight, and rate and bandwidth with many. The operations
/// access one chunk of the pool that this client has allocated. The same run measures a baseline,
/// scheme "bare": a hand-off between two threads that consists of a doorbell, a memcpy and a
/// completion, without protection checks or queues. No software NIC can be faster.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Access {
    /// NICs to measure, separated by commas
    #[arg(long, value_name = "NICS", value_enum, value_delimiter = ',',
          default_values_t = [NicName::Inline, NicName::Shm])]
    nic: Vec<NicName>,

    /// Measure running memory nodes instead, one after the other: shm:PATH or roce://HOST[:PORT],
    /// separated by commas; their chunks must be 8MiB or larger
    #[arg(long, value_name = "POOL", conflicts_with = "nic")]
    pool: Option<PoolAddress>,

    #[command(flatten)]
    token: TokenFile,

    /// Bytes moved by one operation: one measurement per size, separated by commas
    #[arg(long, value_name = "SIZES", value_delimiter = ',',
          default_values_t = access::SIZES.map(|bytes| Size(bytes as u64)))]
    sizes: Vec<Size>,

    /// Operations in flight: one measurement per depth, separated by commas
    #[arg(long, value_name = "DEPTHS", value_delimiter = ',',
          default_values_t = access::IN_FLIGHT.map(|depth| depth as u32))]
    in_flight: Vec<u32>,

    #[command(flatten)]
    output: BenchOutput,
}

const EXAMPLES: &str = "\
Examples:
  granary bench access
  granary bench access --sizes 8,4KiB,1MiB --in-flight 1,16,64 --seconds 1
  granary bench access --nic shm,roce --seconds 0.3 --rounds 5
  granary bench access --pool roce://memory-1 --token-file ~/granary.token
  granary bench access --pool roce://memory-1,roce://memory-2
  granary bench access --json --out pictures > access.jsonl";

/// Name of the command in usage errors.
const COMMAND: &str = "bench access";
/// Bytes of memory that one measurement cycles through, unless one operation is larger. Larger
/// than a core's private caches and smaller than the shared last-level cache.
const REGION_BYTES: usize = 8 << 20;
/// Largest accepted operation in bytes.
const SIZE_BYTES_MAX: u64 = 1 << 30;
/// Largest accepted queue depth.
const IN_FLIGHT_MAX: u32 = 4096;

/// One of the data paths that a run compares: the bare hand-off, or a pool on some NIC.
struct DataPath {
    nic: String,
    scheme: &'static str,
    /// None: the bare hand-off.
    pool: Option<Pool>,
    /// Private memory node of the pool, if it is a separate process.
    _node: Option<NodeProcess>,
}

impl DataPath {
    fn handoff() -> Self {
        Self { nic: BASELINE_NIC.into(), scheme: BASELINE_SCHEME, pool: None, _node: None }
    }

    /// Starts a private pool on a NIC that is large enough for all of these measurements.
    fn pool(nic: NicName, specs: &[Spec]) -> anyhow::Result<Self> {
        let settings = pool_access::settings(largest(specs, |spec| spec.region));
        let options = pool_access::options(largest(specs, |spec| spec.in_flight));
        let (pool, node) = match nic {
            NicName::Inline => {
                let embedded = Arc::new(EmbeddedNode::start(&settings)?);
                (Pool::embedded_in(&embedded, options)?, None)
            }
            NicName::Shm | NicName::Roce => {
                let node = NodeProcess::start_on(&settings, nic)?;
                (node.address().connect(options)?, Some(node))
            }
        };
        let scheme = settings.scheme.name;
        Ok(Self { nic: nic.name().into(), scheme, pool: Some(pool), _node: node })
    }

    /// Connects to running memory nodes. If there are several, records name each node's address.
    fn running(pool: &PoolAddress, specs: &[Spec]) -> anyhow::Result<Vec<Self>> {
        let nodes = pool.nodes(COMMAND)?;
        let with_address = nodes.len() > 1;
        nodes.into_iter().map(|node| Self::running_node(node, with_address, specs)).collect()
    }

    fn running_node(node: &Address, with_address: bool, specs: &[Spec]) -> anyhow::Result<Self> {
        let pool = node.connect(pool_access::options(largest(specs, |spec| spec.in_flight)))?;
        let region = Size(largest(specs, |spec| spec.region) as u64);
        if pool.chunk_bytes() < region.bytes() {
            let chunk = Size(pool.chunk_bytes());
            bail!(
                "measure {node}: its chunks are {chunk} and the measurement needs {region}; start \
                 the node with --chunk {region}"
            );
        }
        let (port, scheme) = (pool.nic().function().port_name(), pool.scheme().name);
        let nic = if with_address { format!("{port} ({node})") } else { port.into() };
        Ok(Self { nic, scheme, pool: Some(pool), _node: None })
    }

    fn measure(&self, spec: &Spec) -> anyhow::Result<Outcome> {
        match &self.pool {
            None => Ok(handoff::measure(spec)?),
            Some(pool) => Ok(pool_access::measure(pool, spec)?),
        }
    }
}

/// The largest value of one field over all measurements.
fn largest(specs: &[Spec], field: fn(&Spec) -> usize) -> usize {
    specs.iter().map(field).max().unwrap_or(1)
}

impl Access {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let specs = self.specs()?;
        let mut report = self.output.begin()?;
        let mut paths = vec![DataPath::handoff()];
        match &self.pool {
            None => {
                for nic in &self.nic {
                    paths.push(DataPath::pool(*nic, &specs)?);
                }
            }
            Some(pool) => {
                let token = self.token.token_file.as_deref();
                paths.extend(DataPath::running(&pool.clone().with_token(token, COMMAND)?, &specs)?);
            }
        }
        let rounds = self.output.rounds();
        let steps = specs.len() as u64 * u64::from(rounds);
        let bar = self.output.progress().bar("access", steps);
        for spec in specs {
            let (direction, size) = (spec.direction.name(), Size(spec.size as u64));
            bar.say(&format!("{direction} {size}, {} in flight", spec.in_flight));
            let mut outcomes = vec![Outcome::default(); paths.len()];
            for _ in 0..rounds {
                for (path, outcome) in paths.iter().zip(&mut outcomes) {
                    outcome.merge(&path.measure(&spec)?);
                }
                bar.step();
            }
            for (path, outcome) in paths.iter().zip(&outcomes) {
                report.extend(outcome.records(&spec, &spec.setting(path.scheme, &path.nic)))?;
            }
        }
        drop(bar);
        let tables = access::tables(report.records());
        self.output.conclude(&mut report, tables, |report, directory| {
            access::pictures(report.records(), directory)
        })
    }

    /// All measurements, in the order of the options.
    fn specs(&self) -> Result<Vec<Spec>, UsageError> {
        let usage = |text| UsageError(text, COMMAND);
        let mut specs = Vec::new();
        for direction in Direction::ALL {
            for &in_flight in &self.in_flight {
                if in_flight == 0 || in_flight > IN_FLIGHT_MAX {
                    let text = format!("--in-flight {in_flight}: must be 1 to {IN_FLIGHT_MAX}");
                    return Err(usage(text));
                }
                for &size in &self.sizes {
                    if size.bytes() == 0 || size.bytes() > SIZE_BYTES_MAX {
                        let text = format!("--sizes {size}: must be 1 to {}", Size(SIZE_BYTES_MAX));
                        return Err(usage(text));
                    }
                    let bytes = size.bytes() as usize;
                    let mut spec = Spec {
                        direction,
                        size: bytes,
                        in_flight: in_flight as usize,
                        region: 0,
                        duration: self.output.round_duration(),
                    };
                    spec.region = REGION_BYTES.max(spec.stride());
                    specs.push(spec);
                }
            }
        }
        Ok(specs)
    }
}

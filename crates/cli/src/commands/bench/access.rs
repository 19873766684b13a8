//! `granary bench access`: what READ and WRITE cost.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::bail;
use bench::access::{self, Direction, Outcome, Spec};
use bench::size::Size;
use bench::{bare, pool_access};
use pool::{Address, Embedded, Pool};

use super::{Rounds, begin, conclude};
use crate::UsageError;
use crate::node::NodeProcess;
use crate::options::{NicName, Output, Pictures, PoolAddress, TokenFile};

/// Measure READ and WRITE over sizes and depths
///
/// Latency with one operation in flight, rate and bandwidth with many, on a chunk of the pool
/// that belongs to this client; beside them, in the same run, the bare
/// hand-off between two threads (scheme bare): a doorbell, a memcpy and a completion with
/// nothing around them, which is what bounds a software NIC.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Access {
    /// NICs
    #[arg(long, value_name = "NICS", value_enum, value_delimiter = ',',
          default_values_t = [NicName::Inline, NicName::Shm])]
    nic: Vec<NicName>,

    /// Use running memory nodes instead, each by itself: shm:PATH or roce://HOST[:PORT], several with commas between
    /// them; their chunks must have 8MiB or more
    #[arg(long, value_name = "POOL", conflicts_with = "nic")]
    pool: Option<PoolAddress>,

    #[command(flatten)]
    token: TokenFile,

    /// Sizes of one operation
    #[arg(long, value_name = "SIZES", value_delimiter = ',',
          default_values_t = access::SIZES.map(|bytes| Size(bytes as u64)))]
    sizes: Vec<Size>,

    /// Operations in flight
    #[arg(long, value_name = "DEPTHS", value_delimiter = ',',
          default_values_t = access::IN_FLIGHT.map(|depth| depth as u32))]
    in_flight: Vec<u32>,

    #[command(flatten)]
    rounds: Rounds,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    pictures: Pictures,
}

const EXAMPLES: &str = "\
Examples:
  granary bench access
  granary bench access --sizes 8,4KiB,1MiB --in-flight 1,16,64 --seconds 1
  granary bench access --nic shm,roce --seconds 0.3 --rounds 5
  granary bench access --pool roce://memory-1 --token-file ~/granary.token
  granary bench access --pool roce://memory-1,roce://memory-2
  granary bench access --json --out pictures > access.jsonl";

/// What usage errors name.
const COMMAND: &str = "bench access";
/// Bytes that the operations of one measurement go round over, if they are no larger: more
/// than a core's own caches, less than the last one that all share.
const REGION_BYTES: usize = 8 << 20;
/// The largest operation that makes sense here.
const SIZE_BYTES_MAX: u64 = 1 << 30;
/// The deepest queue that makes sense here.
const IN_FLIGHT_MAX: u32 = 4096;

/// A way of moving bytes: no pool, or one on some NIC.
struct Way {
    nic: String,
    scheme: &'static str,
    pool: Option<Pool>,
    /// The memory node behind it, if it is a process of its own.
    _node: Option<NodeProcess>,
}

impl Way {
    fn bare() -> Self {
        Self { nic: bare::NIC.into(), scheme: bare::SCHEME, pool: None, _node: None }
    }

    /// A pool on a NIC, for all of these measurements.
    fn pool(nic: NicName, specs: &[Spec]) -> anyhow::Result<Self> {
        let most = |of: fn(&Spec) -> usize| specs.iter().map(of).max().unwrap_or(1);
        let settings = pool_access::settings(most(|spec| spec.region));
        let options = pool_access::options(most(|spec| spec.in_flight));
        let (pool, node) = match nic {
            NicName::Inline => {
                let embedded = Arc::new(Embedded::start(&settings)?);
                (Pool::embedded_in(&embedded, options)?, None)
            }
            NicName::Shm | NicName::Roce => {
                let node = NodeProcess::start_on(&settings, nic)?;
                (node.address().connect(options)?, Some(node))
            }
        };
        let scheme = settings.scheme.name();
        Ok(Self { nic: nic.name().into(), scheme, pool: Some(pool), _node: node })
    }

    /// Memory nodes that are there already. Of several each is named by its address too.
    fn given(pool: &PoolAddress, specs: &[Spec]) -> anyhow::Result<Vec<Self>> {
        let nodes = pool.nodes(COMMAND)?;
        let name = nodes.len() > 1;
        nodes.into_iter().map(|node| Self::at(node, name, specs)).collect()
    }

    fn at(node: &Address, is_named: bool, specs: &[Spec]) -> anyhow::Result<Self> {
        let most = |of: fn(&Spec) -> usize| specs.iter().map(of).max().unwrap_or(1);
        let options = pool_access::options(most(|spec| spec.in_flight));
        let it = node.connect(options)?;
        let region = Size(most(|spec| spec.region) as u64);
        if it.chunk_bytes() < region.bytes() {
            let chunk = Size(it.chunk_bytes());
            bail!(
                "{node}: its chunks have {chunk}, and this takes {region}; serve with --chunk {region}"
            );
        }
        let (port, scheme) = (it.nic().function().port_name(), it.welcome().scheme.name());
        let nic = if is_named { format!("{port} ({node})") } else { port.into() };
        Ok(Self { nic, scheme, pool: Some(it), _node: None })
    }

    fn measure(&self, spec: &Spec) -> anyhow::Result<Outcome> {
        match &self.pool {
            None => Ok(bare::measure(spec)?),
            Some(pool) => Ok(pool_access::measure(pool, spec)?),
        }
    }
}

impl Access {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let specs = self.specs()?;
        let mut report = begin(&self.output)?;
        let mut ways = vec![Way::bare()];
        match &self.pool {
            None => {
                for nic in &self.nic {
                    ways.push(Way::pool(*nic, &specs)?);
                }
            }
            Some(pool) => {
                let token = self.token.token_file.as_deref();
                ways.extend(Way::given(&pool.clone().with_token(token, COMMAND)?, &specs)?);
            }
        }
        let rounds = self.rounds.rounds;
        let steps = specs.len() as u64 * u64::from(rounds);
        let bar = self.output.progress().bar("access", steps);
        for spec in specs {
            let (direction, size) = (spec.direction.name(), Size(spec.size as u64));
            bar.say(&format!("{direction} {size}, {} in flight", spec.in_flight));
            let mut outcomes = vec![Outcome::default(); ways.len()];
            for _ in 0..rounds {
                for (way, outcome) in ways.iter().zip(&mut outcomes) {
                    outcome.merge(&way.measure(&spec)?);
                }
                bar.step();
            }
            for (way, outcome) in ways.iter().zip(&outcomes) {
                report.extend(outcome.records(&spec, &spec.setting(way.scheme, &way.nic)))?;
            }
        }
        drop(bar);
        let tables = access::tables(report.records());
        let pictures = self.pictures.directory(&self.output);
        conclude(&mut report, tables, pictures.as_deref(), |report, directory| {
            access::pictures(report.records(), directory)
        })
    }

    /// The measurements, in the order of the options.
    fn specs(&self) -> Result<Vec<Spec>, UsageError> {
        let usage = |text| UsageError(text, COMMAND);
        let mut specs = Vec::new();
        for direction in Direction::ALL {
            for &in_flight in &self.in_flight {
                if in_flight == 0 || in_flight > IN_FLIGHT_MAX {
                    let text = format!("--in-flight {in_flight}: take 1 to {IN_FLIGHT_MAX}");
                    return Err(usage(text));
                }
                for &size in &self.sizes {
                    if size.bytes() == 0 || size.bytes() > SIZE_BYTES_MAX {
                        let text = format!("--sizes {size}: take 1 to {}", Size(SIZE_BYTES_MAX));
                        return Err(usage(text));
                    }
                    let bytes = size.bytes() as usize;
                    let mut spec = Spec {
                        direction,
                        size: bytes,
                        in_flight: in_flight as usize,
                        region: 0,
                        duration: self.rounds.each(),
                    };
                    spec.region = REGION_BYTES.max(spec.stride());
                    specs.push(spec);
                }
            }
        }
        Ok(specs)
    }
}

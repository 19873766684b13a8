//! Key-value stores over the schemes (OneSidedMW §6.1).
//!
//! | file | content |
//! | --- | --- |
//! | `sizes.rs` | figure 6: throughput, P99, memory given back and CPU over the size of a chunk |
//! | `scale.rs` | figure 7: throughput, P99 and CPU over the number of threads |
//! | `work.rs` | the loop of a thread |
//! | `show.rs` | the pictures |

pub mod scale;
mod show;
pub mod sizes;
mod work;

use pool::{Scheme, schemes};

use super::Run;
use super::load::{Load, Work};
use super::results::Results;
use crate::kv::workload::Workload;
use bench_report::record::{Setting, Statistic, Unit};
pub use work::{Cpu, StoreWork, run};

/// CPU time of the paper's compute nodes for a request, beside its verbs. The paper does not state
/// the times. That of an insert is fitted to `rpcmw2.kv.insert.2k`, that of a read to
/// `rpcmw2.kv.mixed.2k`.
pub const CPU: Cpu = Cpu { insert_ns: 20_900, read_ns: 11_400, spread_percent: 10 };

/// Chunk of Static-MR (§6.1).
pub const STATIC_BYTES: u64 = 16 << 20;
/// Bytes of a block by default: header, key and value.
pub const BLOCK_BYTES: u64 = 1 << 10;

/// A compared scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    /// Name in tables and pictures.
    pub name: &'static str,
    scheme: Scheme,
    /// Cores of the memory node's CPU.
    cores: u32,
}

const STATIC_MR: Contender = of("static-mr", schemes::STATIC_MR);
const ONESIDEDMW: Contender = of("onesidedmw", schemes::ONESIDEDMW);
/// Simulated only, because it is unsafe.
const ONESIDEDMW_PAPER: Contender = of("onesidedmw-paper", schemes::ONESIDEDMW_PAPER);
const RPC_MW_1: Contender = of("rpc-mw-1", schemes::RPC_MW_1);
const RPC_MW_2: Contender = of("rpc-mw-2", schemes::RPC_MW_2);

const fn of(name: &'static str, scheme: Scheme) -> Contender {
    Contender { name, scheme, cores: 1 }
}

impl Contender {
    /// True if the scheme's chain, or the one that re-arms itself, is that of OneSidedMW.
    fn is_onesidedmw(&self) -> bool {
        [ONESIDEDMW, ONESIDEDMW_PAPER].contains(self)
    }

    /// True if the contender can run on this machine: it is safe, and needs one core.
    fn runs_here(&self) -> bool {
        *self != ONESIDEDMW_PAPER && self.cores == 1
    }
}

/// A measured point.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    contender: Contender,
    workload: Workload,
    block_bytes: u64,
    chunk_bytes: u64,
    compute_nodes: u16,
    threads: u32,
    /// Operations of each thread.
    operations: u32,
    deletes: bool,
}

impl Point {
    fn load(&self, run: &Run<'_>) -> Load {
        let cpu = if run.testbed.simulated() { CPU } else { Cpu::default() };
        let work = StoreWork {
            workload: self.workload,
            block_bytes: self.block_bytes,
            cpu,
            deletes: self.deletes,
        };
        Load {
            chunk_bytes: self.chunk_bytes,
            cores: self.contender.cores,
            compute_nodes: self.compute_nodes,
            threads: self.threads,
            ..Load::new(self.contender.scheme, Work::Store(work), self.operations)
        }
    }

    fn setting(&self, run: &Run<'_>) -> Setting {
        run.setting(self.contender.name)
            .with("workload", self.workload.name())
            .with("threads", u64::from(self.threads))
            .with("block", self.block_bytes)
            .with("chunk", self.chunk_bytes)
    }

    /// Measures the point, and adds its records without claims. Returns throughput and the rest.
    fn measure(
        &self,
        run: &Run<'_>,
        results: &mut Results,
        what: &str,
    ) -> Result<Measured, crate::Error> {
        let outcome = run.load(what, &self.load(run))?;
        let measured = Measured {
            rate_per_s: outcome.rate_per_s,
            p99_us: outcome.store.p99_us(),
            node_cpu_share: outcome.store.node_cpu_share,
            returned_ratio: outcome.store.returned_ratio(),
        };
        let setting = self.setting(run);
        let rate = results.record(&setting, "rate_per_s", Unit::PerSecond);
        results.add(format!("{what}: operations"), rate.mean(measured.rate_per_s));
        let p99 = results.record(&setting, "latency_us", Unit::Us);
        let p99 = p99.value(Statistic::P99, measured.p99_us);
        results.add(format!("{what}: latency, p99"), p99);
        let cpu = results.record(&setting, "node_cpu_ratio", Unit::Ratio);
        results.add(format!("{what}: memory node's CPU, cores"), cpu.mean(measured.node_cpu_share));
        Ok(measured)
    }
}

/// Numbers of a point.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Measured {
    rate_per_s: f64,
    p99_us: f64,
    node_cpu_share: f64,
    returned_ratio: f64,
}

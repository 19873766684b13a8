//! Permissions with leases (scheme `patronus`): rates and times beside baselines of the same run.
//!
//! | metric | definition |
//! | --- | --- |
//! | `time_us` | time of one unit of a [`Measure`]: the median of the rounds |
//! | `rate_per_s` | units per second, the inverse |
//! | `window_operations` | binds, unbinds and handovers of the memory node for each permission |
//! | `expiry_lateness_us` | time from the request of a lease to the next holder's grant, minus the lease |
//! | `killed_holder_us` | time from the SIGKILL of a holder to the next holder's grant |
//! | `asleep_wakeups` | wake-ups of the memory node's control threads while no lease exists |
//! | `permission_bytes` | bytes of the memory node's tables for a permission, without its object |
//! | the names of [`Ratio`] with `_ratio` | a measure over another one: the median of the rounds |
//!
//! | file | content |
//! | --- | --- |
//! | `loops` | the loops of [`Measure`] |
//! | `waits` | waits of a second compute node for the end of a lease |
//! | `ratios` | ratios, their targets, and the tables |
//!
//! All loops run in one thread. In each round the measures of one memory node run by turns of a few
//! milliseconds, so that other load on the machine affects both sides of a ratio. On the inline NIC
//! the thread also runs the NIC.

mod loops;
mod ratios;
#[cfg(test)]
mod tests;
mod waits;

pub use loops::{Subject, WindowOperations, permissions, warm_up};
pub use ratios::{Bound, Ratio, Results, tables};
pub use waits::{Next, expiries, hold, shared_object, wakeups};

use std::time::Duration;

use pool::schemes::patronus::Extension;
use pool::{ControlMode, DomainToken, Options, Settings, schemes};

use bench_report::record::Setting;

/// Name of the experiment.
pub const EXPERIMENT: &str = "lease";

/// Bytes of an object, of a permission and of a READ.
pub const BYTES: u64 = 64;

/// Permissions of the loops with several in flight.
pub const IN_FLIGHT: usize = 16;

/// Lease of permissions that expire, as in the paper's experiments (Patronus §7).
pub const SHORT: Duration = Duration::from_micros(100);

/// Lease of a permission whose holder is killed.
pub const KILLED: Duration = Duration::from_millis(20);

/// Largest lateness that the design allows on an idle machine.
pub const LATENESS: Duration = Duration::from_millis(2);

/// Token of the domain of all compute nodes. The memory nodes of a benchmark are private.
const DOMAIN: DomainToken = DomainToken([0x1e; 32]);

/// A NIC, and how the memory node's CPU waits for requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Name of the NIC: `inline`, `shm`.
    pub nic: &'static str,
    /// Wait mode.
    pub control: ControlMode,
}

impl Place {
    /// Name in tables.
    pub fn name(&self) -> String {
        format!("{} {}", self.nic, self.control)
    }
}

/// The memory node of a measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// Scheme `patronus` with this number of spare QPs for each lane.
    Patronus {
        /// 0 to 3.
        spares: u32,
    },
    /// Scheme `rpc-mw-2`: the baseline of acquisitions.
    RpcMw2,
    /// Scheme `rpc-data`: the baseline of acquisitions with their READs.
    RpcData,
}

impl NodeKind {
    /// The memory nodes of a round, in order.
    pub const ALL: [Self; 4] =
        [Self::Patronus { spares: 1 }, Self::RpcMw2, Self::RpcData, Self::Patronus { spares: 0 }];

    /// Settings of the memory node.
    pub fn settings(self, control: ControlMode) -> Settings {
        let settings = Settings { donate_bytes: 16 << 20, credits: 64, ..Settings::default() };
        match self {
            Self::Patronus { spares } => {
                Settings { scheme: schemes::PATRONUS, chunk_bytes: 4096, ..settings }
                    .with("spares", spares)
                    // An hour, so that a measured lease can be extended all the time.
                    .with("lease_max_us", 3_600_000_000_u64)
                    // Permissions that expire are more than those in flight.
                    .with("permissions_max", 1 << 16)
            }
            // The smallest chunk, because a free clears it.
            Self::RpcMw2 => Settings {
                scheme: schemes::RPC_MW_2,
                chunk_bytes: Settings::CHUNK_BYTES_MIN,
                ..settings
            },
            Self::RpcData => Settings { scheme: schemes::RPC_DATA, chunk_bytes: 4096, ..settings },
        }
        .with("control", control)
    }
}

/// Options of a compute node of a benchmark that extends leases in this way.
pub fn options(extension: Extension) -> Options {
    let mut options = Options { groups: Some(1), domain: Some(DOMAIN), ..Options::default() };
    options.scheme.set("extend", extension);
    options
}

/// A loop, and the unit of which it measures the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// An acquisition and a revoke, one at a time.
    Pair,
    /// The same, [`IN_FLIGHT`] at a time. The time is that of a pair, not its latency.
    Pairs,
    /// An acquisition of which the lease ends by itself, [`IN_FLIGHT`] requests at a time.
    Expiring,
    /// An extension by CAS.
    ExtendByCas,
    /// An extension by RPC.
    ExtendByRpc,
    /// An acquisition, eight extensions by CAS, and a revoke.
    Extended,
    /// Nine acquisitions, each with its revoke.
    Reacquired,
    /// A READ under a permission, which looks at the clock.
    ReadPermission,
    /// A READ under a grant of the same scheme.
    ReadGrant,
    /// An acquisition and three READs. The lease ends by itself.
    ThreeReads,
    /// Three READs that the memory node's CPU executes (scheme `rpc-data`).
    ThreeReadsByRpc,
    /// A READ that the memory node's NIC refuses, and the next one that succeeds. The lane has a
    /// spare QP.
    RefusedWithSpare,
    /// The same without a spare QP: the access QP is re-established.
    RefusedWithout,
    /// An allocation and a free of scheme `rpc-mw-2`, one at a time.
    AllocatePair,
    /// The same, [`IN_FLIGHT`] at a time.
    AllocatePairs,
}

impl Measure {
    /// All measures, in the order of the tables.
    pub const ALL: [Self; 15] = [
        Self::Pair,
        Self::AllocatePair,
        Self::Pairs,
        Self::AllocatePairs,
        Self::Expiring,
        Self::ExtendByCas,
        Self::ExtendByRpc,
        Self::Extended,
        Self::Reacquired,
        Self::ReadPermission,
        Self::ReadGrant,
        Self::ThreeReads,
        Self::ThreeReadsByRpc,
        Self::RefusedWithSpare,
        Self::RefusedWithout,
    ];

    /// The memory node.
    pub fn node(self) -> NodeKind {
        match self {
            Self::AllocatePair | Self::AllocatePairs => NodeKind::RpcMw2,
            Self::ThreeReadsByRpc => NodeKind::RpcData,
            Self::RefusedWithout => NodeKind::Patronus { spares: 0 },
            _ => NodeKind::Patronus { spares: 1 },
        }
    }

    /// How the compute node extends leases.
    pub fn extension(self) -> Extension {
        match self {
            Self::ExtendByRpc => Extension::Rpc,
            _ => Extension::Cas,
        }
    }

    /// Name of the unit, in records and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pair | Self::Pairs => "acquire, revoke",
            Self::Expiring => "acquire, expire",
            Self::ExtendByCas => "extend by CAS",
            Self::ExtendByRpc => "extend by RPC",
            Self::Extended => "acquire, 8 extensions, revoke",
            Self::Reacquired => "9 times acquire, revoke",
            Self::ReadPermission => "READ under a permission",
            Self::ReadGrant => "READ under a grant",
            Self::ThreeReads => "acquire, 3 READs, expire",
            Self::ThreeReadsByRpc => "3 READs by RPC",
            Self::RefusedWithSpare | Self::RefusedWithout => "refused READ, READ",
            Self::AllocatePair | Self::AllocatePairs => "allocate, free",
        }
    }

    /// Units in flight.
    pub fn in_flight(self) -> usize {
        match self {
            Self::Pairs | Self::Expiring | Self::AllocatePairs => IN_FLIGHT,
            _ => 1,
        }
    }

    /// The setting of its records.
    pub fn setting(self, place: Place) -> Setting {
        let scheme = self.node().settings(place.control).scheme;
        let setting = Setting::new().scheme(scheme.name).nic(place.nic);
        let setting = setting.control(place.control.name()).with("operation", self.name());
        let setting = setting.in_flight(self.in_flight() as u64).size(BYTES);
        match self {
            Self::RefusedWithSpare => setting.with("spares", 1),
            Self::RefusedWithout => setting.with("spares", 0),
            _ => setting,
        }
    }
}

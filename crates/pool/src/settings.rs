//! What a memory node is told when it starts.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rnic::verbs::Limits;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::budget::Budget;
use crate::finemem::layout::Shape;
use crate::odrp::PAGE_BYTES;
use crate::scheme::MAX_GROUP;

/// Settings of a memory node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bytes that it donates; rounded down to whole chunks.
    pub donate_bytes: u64,
    /// Bytes of a chunk: a power of two, 512 B to 1 GiB.
    pub chunk_bytes: u64,
    /// Windows of a group, the guard included: one more than a compute node has lanes
    /// (OneSidedMW §4.1).
    pub group_size: u32,
    /// Requests of one kind that a compute node may have in flight: a power of two.
    pub credits: u32,
    /// QP groups that a compute node may have.
    pub groups_max: u32,
    /// Compute nodes that may be connected.
    pub clients_max: u32,
    /// One process, user or host leaves some of these places to others: `docs/operating.md` has the
    /// rule. A service sees to that.
    pub shares_places: bool,
    /// How chunks are allocated.
    pub scheme: SchemeKind,
    /// How the CPU learns of requests, where the scheme needs it.
    pub control: ControlMode,
    /// Cores that the CPU answers requests with, in the schemes by RPC; no more than there are compute
    /// nodes.
    pub cores: u32,
    /// How long a connection may say nothing before it has said what it is for: before it has attached
    /// to the NIC, or is admitted as a compute node. Then it is ended, and its place is free.
    pub silence: Duration,
    /// In scheme `onesidedmw`: allocation has QPs of its own (OneSidedMW §4.2). Without it, to be compared
    /// with, each access QP carries the chain that allocates for it.
    pub separation: bool,
    /// In the schemes with a tree: whose CASes fail searches elsewhere, and marks what is contended (FineMem §4.1). Without
    /// it, to be compared with, he tries again where he is, and begins where many others do. In scheme `premmap-onesided`:
    /// only what was seen to be free is CASed.
    pub contention_control: bool,
    /// What each compute node may use, in scheme `onesidedmw`.
    pub budget: Budget,
    /// Requests that a compute node's own fault lets fail are answered at a bounded pace, in scheme
    /// `onesidedmw`: each of them takes CPU, of which others may have need. A service always does so.
    pub paced: bool,
    /// Memory windows that each function of the memory node's own NIC has, where they are to be fewer than it could have
    /// (16.7 million).
    pub nic_windows: Option<u32>,
    /// Bytes of donated memory that keep their RAM while they are free; rounded down to whole
    /// chunks. RAM beyond goes back to the system when a chunk is released, if the NIC is in the
    /// memory node's process.
    pub keep_resident_bytes: u64,
}

impl Default for Settings {
    /// 256 MiB in chunks of 1 MiB, two lanes.
    fn default() -> Self {
        Self {
            donate_bytes: 256 << 20,
            chunk_bytes: 1 << 20,
            group_size: 3,
            credits: 16,
            groups_max: 64,
            clients_max: 256,
            shares_places: true,
            scheme: SchemeKind::default(),
            control: ControlMode::default(),
            cores: 1,
            separation: true,
            contention_control: true,
            silence: Duration::from_secs(10),
            budget: Budget::default(),
            paced: false,
            nic_windows: None,
            keep_resident_bytes: 64 << 20,
        }
    }
}

/// Management QPs of a compute node in any scheme, with room for more.
const MANAGEMENT_QPS_MAX: u32 = 16;

impl Settings {
    /// Smallest chunk.
    pub const CHUNK_BYTES_MIN: u64 = 512;
    /// Largest chunk.
    pub const CHUNK_BYTES_MAX: u64 = 1 << 30;
    /// Most requests of one kind in flight.
    pub const CREDITS_MAX: u32 = 128;
    /// Most QP groups of a compute node.
    pub const GROUPS_MAX: u32 = 256;
    /// Most compute nodes.
    pub const CLIENTS_MAX: u32 = 4096;
    /// Most cores.
    pub const CORES_MAX: u32 = 4096;
    /// Most chunks: what 24 bits of index name, less one entry that schemes keep.
    pub const CHUNKS_MAX: u64 = (1 << 24) - 1;
    /// Most chunks where compute nodes allocate by themselves: the metadata is opened by one window, of up to 2 GiB.
    pub const CHUNKS_MAX_BY_CAS: u64 = 1 << 26;

    /// Chunks that the donated bytes make.
    pub fn chunks(&self) -> u64 {
        self.donate_bytes / self.chunk_bytes.max(1)
    }

    /// The most bytes that one allocation can have: those of the largest block where there are several sizes.
    pub fn largest_bytes(&self) -> u64 {
        let shape = Shape { chunks: self.chunks() as u32, chunk_bytes: self.chunk_bytes };
        shape.block_bytes(if self.scheme.has_sizes() { shape.order_max() } else { 0 })
    }

    /// Access QPs of a group: its windows without the guard.
    pub fn lanes(&self) -> u32 {
        self.group_size.saturating_sub(1)
    }

    /// Bytes at the start of the chunks whose RAM is kept while they are free. All bytes, where
    /// chunks are smaller than a page, so that to release a chunk gives no page back, and in a
    /// scheme that does not clear chunks.
    pub fn kept_bytes(&self) -> usize {
        let chunk = self.chunk_bytes.max(1);
        let all = self.chunks() * chunk;
        let gives_back = chunk as usize >= rustix::param::page_size() && self.scheme.releases();
        let kept = if gives_back { self.keep_resident_bytes.min(all) / chunk * chunk } else { all };
        kept as usize
    }

    /// The limits of a NIC that is made for such a memory node.
    pub fn nic_limits(&self) -> Limits {
        let usual = Limits::default();
        Limits { windows: self.nic_windows.unwrap_or(usual.windows), ..usual }
    }

    /// QPs that a compute node needs at most: its access QPs for so many functions of the NIC, and those that manage.
    pub(crate) fn client_qps(&self, functions: u32) -> u32 {
        self.groups_max * self.lanes() * functions + MANAGEMENT_QPS_MAX
    }

    /// Checks every setting; the error names the one that cannot be.
    pub fn validate(&self) -> Result<(), Error> {
        let chunk = self.chunk_bytes;
        let chunks_max = match self.scheme.is_by_cas() {
            true => Self::CHUNKS_MAX_BY_CAS,
            false => Self::CHUNKS_MAX,
        };
        require(
            chunk.is_power_of_two()
                && (Self::CHUNK_BYTES_MIN..=Self::CHUNK_BYTES_MAX).contains(&chunk),
            "chunk_bytes",
            chunk,
            "a chunk is a power of two from 512 B to 1 GiB",
        )?;
        require(
            self.donate_bytes >= chunk,
            "donate_bytes",
            self.donate_bytes,
            format!("at least one chunk of {chunk} bytes must fit"),
        )?;
        require(
            self.chunks() <= chunks_max,
            "donate_bytes",
            self.donate_bytes,
            format!(
                "that makes {} chunks of {chunk} bytes, and a table has at most {}; take larger chunks",
                self.chunks(),
                chunks_max
            ),
        )?;
        require(
            self.scheme != SchemeKind::Odrp || chunk == PAGE_BYTES as u64,
            "chunk_bytes",
            chunk,
            format!("scheme odrp has pages of {PAGE_BYTES} bytes"),
        )?;
        require(
            (2..=MAX_GROUP as u32).contains(&self.group_size),
            "group_size",
            self.group_size,
            format!("a group has 2 to {MAX_GROUP} windows, the guard included"),
        )?;
        require(
            self.credits.is_power_of_two() && self.credits <= Self::CREDITS_MAX,
            "credits",
            self.credits,
            format!("credits are a power of two up to {}", Self::CREDITS_MAX),
        )?;
        require(
            (1..=Self::GROUPS_MAX).contains(&self.groups_max),
            "groups_max",
            self.groups_max,
            format!("a compute node has 1 to {} QP groups", Self::GROUPS_MAX),
        )?;
        require(
            (1..=Self::CLIENTS_MAX).contains(&self.clients_max),
            "clients_max",
            self.clients_max,
            format!("a memory node serves 1 to {} compute nodes", Self::CLIENTS_MAX),
        )?;
        require(
            (1..=Self::CORES_MAX).contains(&self.cores),
            "cores",
            self.cores,
            format!("the CPU answers with 1 to {} cores", Self::CORES_MAX),
        )?;
        require(
            self.cores == 1 || self.scheme.is_by_rpc(),
            "cores",
            self.cores,
            format!("in scheme {} the CPU answers no requests", self.scheme),
        )?;
        require(
            (Duration::from_millis(1)..=Duration::from_secs(3600)).contains(&self.silence),
            "silence_ms",
            self.silence.as_millis(),
            "a connection may be silent for 1 ms to one hour",
        )?;
        require(
            self.separation || self.scheme == SchemeKind::OneSidedMw && !self.budget.is_set(),
            "separation",
            self.separation,
            "only scheme onesidedmw, without budgets, can do without separate management QPs",
        )?;
        require(
            self.contention_control || self.scheme.is_by_cas(),
            "contention_control",
            self.contention_control,
            "only schemes finemem, finemem-paper and premmap-onesided have contention control to do without",
        )?;
        require(
            self.nic_windows != Some(0),
            "nic_windows",
            0,
            "a function of a NIC has at least one memory window",
        )?;
        self.validate_budget()
    }

    fn validate_budget(&self) -> Result<(), Error> {
        let budget = &self.budget;
        if !budget.is_set() {
            return Ok(());
        }
        require(
            self.scheme == SchemeKind::OneSidedMw,
            "scheme",
            self.scheme,
            "budgets are read from the NIC's counters, which scheme onesidedmw does; \
             serve without --budget options",
        )?;
        for (name, limit) in
            [("budget_requests_per_s", budget.requests_per_s), ("budget_chunks", budget.chunks)]
        {
            require(limit != Some(0), name, 0, "a budget is at least 1")?;
        }
        require(
            (Duration::from_millis(1)..=Duration::from_secs(60)).contains(&budget.interval),
            "budget_interval_ms",
            budget.interval.as_millis(),
            "the counters are looked at every 1 ms to 60 s",
        )
    }
}

fn require(
    holds: bool,
    setting: &'static str,
    value: impl ToString,
    why: impl ToString,
) -> Result<(), Error> {
    if holds {
        return Ok(());
    }
    Err(Error::Setting { setting, value: value.to_string(), why: why.to_string() })
}

/// An allocation scheme, by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SchemeKind {
    /// Chains of work requests that the memory node's NIC executes (OneSidedMW).
    #[default]
    #[serde(rename = "onesidedmw")]
    OneSidedMw,
    /// RPC to the memory node's CPU, which binds type-2 windows (OneSidedMW §2.2.2).
    #[serde(rename = "rpc-mw-2")]
    RpcMw2,
    /// The same with type-1 windows, where a free and an allocation are one rebind (OneSidedMW
    /// §2.2.2). Unsafe: a key is 8 bits of tag away from everybody (§2.3).
    #[serde(rename = "rpc-mw-1")]
    RpcMw1,
    /// RPC to the memory node's CPU, which registers a memory region for each allocation
    /// (OneSidedMW §6).
    #[serde(rename = "fine-mr")]
    FineMr,
    /// RPC to the memory node's CPU, which hands out coarse regions that were registered ahead
    /// (OneSidedMW §2.2.1).
    #[serde(rename = "static-mr")]
    StaticMr,
    /// Pages of 4 KiB behind a table for each compute node, looked up by a chain of work requests at
    /// every access (OneSidedMW §2.2.3).
    #[serde(rename = "odrp")]
    Odrp,
    /// The compute node allocates by itself, with CAS on an array of one word for each chunk: `finemem` without its
    /// tree (CXL-SHM's free array, FineMem §6.1).
    #[serde(rename = "premmap-onesided")]
    PremmapOneSided,
    /// RPC to the memory node's CPU, which hands out blocks of several sizes whose windows are bound ahead
    /// (FineMem §6.1). Windows are of type 1: compute nodes trust each other not to guess keys.
    #[serde(rename = "premmap-rpc")]
    PremmapRpc,
    /// RPC to the memory node's CPU, which registers a memory region for each allocation of any size
    /// (FineMem §6.1): `fine-mr` with several sizes.
    #[serde(rename = "ondemand-rpc")]
    OnDemandRpc,
    /// The compute node allocates by itself, with READ and CAS on a bitmap tree in the memory node; a freed block
    /// is set aside until its key is dead and it is cleared (FineMem). Windows are of type 1; on a NIC that has no
    /// guarded ones compute nodes trust each other not to guess keys.
    #[serde(rename = "finemem")]
    FineMem,
    /// `finemem` as published (FineMem §4.3), to be compared with: a freed block is free at once, under a backup key.
    /// Unsafe: see [`SchemeKind::unsafe_because`].
    #[serde(rename = "finemem-paper")]
    FineMemPaper,
}

impl SchemeKind {
    /// Every scheme.
    pub const ALL: &[SchemeKind] = &[
        SchemeKind::OneSidedMw,
        SchemeKind::RpcMw2,
        SchemeKind::RpcMw1,
        SchemeKind::FineMr,
        SchemeKind::StaticMr,
        SchemeKind::Odrp,
        SchemeKind::FineMem,
        SchemeKind::FineMemPaper,
        SchemeKind::PremmapOneSided,
        SchemeKind::PremmapRpc,
        SchemeKind::OnDemandRpc,
    ];

    /// Its name in reports and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            SchemeKind::OneSidedMw => "onesidedmw",
            SchemeKind::RpcMw2 => "rpc-mw-2",
            SchemeKind::RpcMw1 => "rpc-mw-1",
            SchemeKind::FineMr => "fine-mr",
            SchemeKind::StaticMr => "static-mr",
            SchemeKind::Odrp => "odrp",
            SchemeKind::FineMem => "finemem",
            SchemeKind::FineMemPaper => "finemem-paper",
            SchemeKind::PremmapOneSided => "premmap-onesided",
            SchemeKind::PremmapRpc => "premmap-rpc",
            SchemeKind::OnDemandRpc => "ondemand-rpc",
        }
    }

    /// Why a scheme is only there to be compared with; `None` for one that is safe to use. It is never chosen but by
    /// its name, and who starts it is told.
    pub const fn unsafe_because(self) -> Option<&'static str> {
        match self {
            SchemeKind::FineMemPaper => Some(
                "a freed block is somebody else's while its last owner's key still opens it, and is not cleared; \
                 keys are 8 bits to be guessed",
            ),
            SchemeKind::RpcMw1 | SchemeKind::PremmapOneSided | SchemeKind::PremmapRpc => {
                Some("keys are 8 bits to be guessed")
            }
            _ => None,
        }
    }

    /// True if every allocation is an RPC to the memory node's CPU.
    pub const fn is_by_rpc(self) -> bool {
        match self {
            SchemeKind::OneSidedMw
            | SchemeKind::Odrp
            | SchemeKind::FineMem
            | SchemeKind::FineMemPaper
            | SchemeKind::PremmapOneSided => false,
            SchemeKind::RpcMw2
            | SchemeKind::RpcMw1
            | SchemeKind::FineMr
            | SchemeKind::StaticMr
            | SchemeKind::PremmapRpc
            | SchemeKind::OnDemandRpc => true,
        }
    }

    /// True if every allocation is the compute node's own work on the memory node's metadata, with which it is
    /// trusted.
    pub const fn is_by_cas(self) -> bool {
        matches!(self, SchemeKind::FineMem | SchemeKind::FineMemPaper | SchemeKind::PremmapOneSided)
    }

    /// True if there are blocks of several sizes: powers of two of chunks.
    pub const fn has_sizes(self) -> bool {
        self.is_by_cas() || matches!(self, SchemeKind::PremmapRpc | SchemeKind::OnDemandRpc)
    }

    /// True if memory is opened by windows of type 1, whose keys are a guess of 8 bits away from every access QP
    /// (OneSidedMW §2.3): in `finemem` only on NICs that have no guarded windows.
    pub const fn has_type1_windows(self) -> bool {
        self.is_by_cas() || matches!(self, SchemeKind::RpcMw1 | SchemeKind::PremmapRpc)
    }

    /// True if its windows are guarded, on a NIC that can: a key opens what it names to one compute node only.
    pub const fn is_guarded(self) -> bool {
        matches!(self, SchemeKind::FineMem)
    }

    /// True if a chunk is out of its last owner's reach, and cleared, before anybody has it again.
    pub const fn releases(self) -> bool {
        !matches!(self, SchemeKind::FineMemPaper)
    }

    /// True if a free returns before the chunk is released: it is set aside until it can be.
    pub const fn releases_late(self) -> bool {
        self.is_by_cas() || matches!(self, SchemeKind::RpcMw1)
    }
}

/// How the memory node's CPU learns of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ControlMode {
    /// It sleeps between requests.
    #[default]
    Event,
    /// It polls, with a core of its own. (It yields where there is only one.)
    Polling,
}

impl ControlMode {
    /// Every mode.
    pub const ALL: &[ControlMode] = &[ControlMode::Event, ControlMode::Polling];

    /// Its name in reports and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            ControlMode::Event => "event",
            ControlMode::Polling => "polling",
        }
    }
}

macro_rules! named {
    ($kind:ty, $setting:literal) => {
        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }

        impl FromStr for $kind {
            type Err = Error;
            fn from_str(s: &str) -> Result<Self, Error> {
                Self::ALL.iter().copied().find(|k| k.name() == s).ok_or_else(|| {
                    let names: Vec<_> = Self::ALL.iter().map(|k| k.name()).collect();
                    Error::Setting {
                        setting: $setting,
                        value: s.to_string(),
                        why: format!("it is one of {}", names.join(", ")),
                    }
                })
            }
        }
    };
}

named!(SchemeKind, "scheme");
named!(ControlMode, "control");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid() {
        Settings::default().validate().unwrap();
    }

    #[test]
    fn errors_name_the_setting() {
        let budget =
            |requests_per_s, interval| Budget { requests_per_s, interval, ..Budget::default() };
        let fine = Duration::from_millis(50);
        let cases: [(&str, Settings); 17] = [
            (
                "budget_requests_per_s",
                Settings { budget: budget(Some(0), fine), ..Settings::default() },
            ),
            (
                "budget_interval_ms",
                Settings { budget: budget(Some(1), Duration::ZERO), ..Settings::default() },
            ),
            (
                "scheme",
                Settings {
                    budget: budget(Some(1), fine),
                    scheme: SchemeKind::RpcMw2,
                    ..Settings::default()
                },
            ),
            (
                "separation",
                Settings { separation: false, scheme: SchemeKind::RpcMw2, ..Settings::default() },
            ),
            ("contention_control", Settings { contention_control: false, ..Settings::default() }),
            (
                "contention_control",
                Settings {
                    contention_control: false,
                    scheme: SchemeKind::PremmapRpc,
                    ..Settings::default()
                },
            ),
            ("cores", Settings { cores: 0, ..Settings::default() }),
            ("cores", Settings { cores: 2, ..Settings::default() }),
            ("silence_ms", Settings { silence: Duration::ZERO, ..Settings::default() }),
            ("chunk_bytes", Settings { chunk_bytes: 256, ..Settings::default() }),
            ("chunk_bytes", Settings { chunk_bytes: 3 << 20, ..Settings::default() }),
            ("donate_bytes", Settings { donate_bytes: 1000, ..Settings::default() }),
            (
                "donate_bytes",
                Settings { donate_bytes: 1 << 40, chunk_bytes: 512, ..Settings::default() },
            ),
            ("group_size", Settings { group_size: 1, ..Settings::default() }),
            ("credits", Settings { credits: 12, ..Settings::default() }),
            ("groups_max", Settings { groups_max: 0, ..Settings::default() }),
            ("clients_max", Settings { clients_max: 1 << 20, ..Settings::default() }),
        ];
        for (name, settings) in cases {
            match settings.validate() {
                Err(Error::Setting { setting, .. }) => assert_eq!(setting, name),
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    #[test]
    fn names_are_read_back() {
        for k in SchemeKind::ALL {
            assert_eq!(k.name().parse::<SchemeKind>().unwrap(), *k);
            assert_eq!(serde_json::to_string(k).unwrap(), format!("\"{}\"", k.name()));
        }
        for m in ControlMode::ALL {
            assert_eq!(m.to_string().parse::<ControlMode>().unwrap(), *m);
        }
        let e = "rpc".parse::<SchemeKind>().unwrap_err().to_string();
        assert!(e.contains("rpc-mw-2"), "{e}");
    }
}

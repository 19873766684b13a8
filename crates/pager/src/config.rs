//! Environment variables by which `granary run` configures the preload library.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `GRANARY_LOCAL` | bytes of paged memory that may be resident, frames and shelf included |
//! | `GRANARY_BOUND` | `run`: all processes of the run share the bound ([`crate::ledger`]); else each has its own |
//! | `GRANARY_POOL` | backing memory: memory node addresses ([`pool::Address`]) or a store ([`crate::store`]) |
//! | `GRANARY_ANSWER_S` | seconds after which a memory node that does not answer ends the process (default 30) |
//! | `GRANARY_ASSIST` | `process`: an assist moves the page lists of prefetch and write-back ([`crate::assist`]); absent: none |
//! | `GRANARY_DESCRIPTORS` | sockets of memory nodes, and the userfaultfd device, that a process which has changed its user hands to the program that it executes (`node_sockets`); not set by `granary run` |
//! | `GRANARY_DIRECT` | `1`: the memory node is private and passes on its chunk memory (`direct_transport`) |
//! | `GRANARY_RUN_DIR` | directory of the assist's socket |
//! | `GRANARY_RUN_MEMORY` | descriptor of ledger and counters; absent: counters are private |
//! | `GRANARY_REGION` | bytes of address space to reserve (default 1 TiB) |
//! | `GRANARY_TRACE` | path of a fault trace, to which `.PID` is added; absent: none ([`crate::trace`]) |
//! | `GRANARY_OVERFLOW_DIR` | directory of the overflow file (default `$TMPDIR`, then /var/tmp) |
//! | `GRANARY_ALLOW_UNPAGED` | `1`: programs that cannot be paged, or could stop the pager, run anyway |
//! | `GRANARY_PAGES` | `auto`, `move` or `copy`: see [`Pages`] |
//! | `GRANARY_PATHS` | `two`, `fastswap` or `linux`: see [`Paths`] |
//! | `GRANARY_HIDE` | `off`, `writes` or `reads`: see [`Hide`] |
//! | `GRANARY_SEAL` | `off`, `aes-256-gcm` or `aes-128-gcm`: encryption of the pages in the pool (`crates/seal`) |
//! | `GRANARY_POLICY` | the pages that are evicted first (default `contest`): see [`crate::policy`] |
//! | `GRANARY_TIER` | bytes of the process's own tier, with scheme `tdmem` (default 0) |
//! | `GRANARY_TRIM` | `1`: sparse chunks are compacted at any time, and not only in a full pool |
//! | `GRANARY_UNPAGED` | `1`: the process and those that it starts are not paged; not set by `granary run` |
//! | `GRANARY_FAULT_TIMES` | file that tells `granary run` how frequent faults are (`awake`) |
//!
//! `granary run` reads `GRANARY_PAGES`, `GRANARY_PATHS`, `GRANARY_POLICY`, `GRANARY_SEAL` and
//! `GRANARY_HIDE` from its own environment ([`Config::read_choices`]).
//!
//! Programs that a paged program starts inherit these variables and `LD_PRELOAD`, or get them from
//! the preload library if they are given an environment without them. So they are paged too.

use std::path::PathBuf;

pub use seal::Cipher;

use crate::policy::{Name, UnknownPolicy};
use crate::{Error, node_sockets};

/// Smallest accepted bound, in bytes. The frames take a part of the bound
/// ([`crate::pages::Sizes`]). The rest must hold all pages that one system call over many buffers
/// needs at once; otherwise the call makes no progress.
pub const LOCAL_BYTES_MIN: u64 = 4 << 20;

const ANSWER: &str = "GRANARY_ANSWER_S";
/// Default of [`Config::answer_s`].
const ANSWER_S: u32 = 30;
const ASSIST: &str = "GRANARY_ASSIST";
const BOUND: &str = "GRANARY_BOUND";
const DIRECT: &str = "GRANARY_DIRECT";
const FAULT_TIMES: &str = "GRANARY_FAULT_TIMES";
const HIDE: &str = "GRANARY_HIDE";
const PAGES: &str = "GRANARY_PAGES";
const PINNED: &str = "GRANARY_PINNED_S";
/// Default of [`Config::pinned_s`].
const PINNED_S: u32 = 10;
const PATHS: &str = "GRANARY_PATHS";
const POLICY: &str = "GRANARY_POLICY";
const RUN_MEMORY: &str = "GRANARY_RUN_MEMORY";
const SEAL: &str = "GRANARY_SEAL";
const TIER: &str = "GRANARY_TIER";
const TRIM: &str = "GRANARY_TRIM";
const WAIT: &str = "GRANARY_WAIT_S";
/// Default of [`Config::wait_s`].
pub(crate) const WAIT_S: u32 = 5;

/// Exit status of a program whose pages are lost because the pool is gone.
pub const EXIT_POOL_GONE: i32 = 117;
/// Exit status of a program that the pager ended for another reason.
pub const EXIT_PAGER: i32 = 118;
/// Exit status of a program of which a sealed page was altered.
pub const EXIT_TAMPERED: i32 = 119;

/// The way in which pages get into and out of the program's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// By moving where the kernel can move pages, else by copying.
    #[default]
    Auto,
    /// By moving. The pager refuses to start where the kernel cannot move pages.
    Move,
    /// By copying.
    Copy,
}

impl Pages {
    const NAMES: [(&str, Self); 3] =
        [("auto", Self::Auto), ("move", Self::Move), ("copy", Self::Copy)];

    fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(own, _)| *own == name).map(|(_, pages)| *pages)
    }

    fn name(self) -> &'static str {
        let found = Self::NAMES.iter().find(|(_, pages)| *pages == self);
        found.expect("each value has a name").0
    }
}

/// The division of a fault's work between the fault and later work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Paths {
    /// A synchronous path for the page of the fault. All other work is on an asynchronous path,
    /// with prefetch for each thread (SAMS).
    #[default]
    Two,
    /// The page of the fault is waited for. Its neighbours in an aligned cluster of 8 pages are
    /// read without waiting, and each is mapped by a fault of its own (Fastswap).
    Fastswap,
    /// The whole cluster is waited for. A fault that finds too little memory takes pages out, and
    /// waits until they are written (Linux, without a thread that reclaims).
    Linux,
}

impl Paths {
    /// All values.
    pub const ALL: [Self; 3] = [Self::Linux, Self::Fastswap, Self::Two];

    /// The name in `GRANARY_PATHS`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Two => "two",
            Self::Fastswap => "fastswap",
            Self::Linux => "linux",
        }
    }
}

/// The error of an unknown name of [`Paths`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected linux, fastswap or two")]
pub struct UnknownPaths;

impl std::str::FromStr for Paths {
    type Err = UnknownPaths;

    fn from_str(name: &str) -> Result<Self, UnknownPaths> {
        Self::ALL.into_iter().find(|paths| paths.name() == name).ok_or(UnknownPaths)
    }
}

/// A choice of the encryption of pages, by the name of a cipher or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealChoice(pub Option<Cipher>);

/// The error of an unknown name of [`SealChoice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected off, aes-256-gcm or aes-128-gcm")]
pub struct UnknownSeal;

impl std::str::FromStr for SealChoice {
    type Err = UnknownSeal;

    fn from_str(name: &str) -> Result<Self, UnknownSeal> {
        match name {
            "off" => Ok(Self(None)),
            name => name.parse().map(|cipher| Self(Some(cipher))).map_err(|_| UnknownSeal),
        }
    }
}

/// The pattern of accesses that is hidden from a memory node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hide {
    /// None. Pages that are evicted together lie together, which is fastest.
    #[default]
    Off,
    /// That of stores: each store goes to a random free slot (TDMEM §4.5).
    Writes,
    /// That of stores, and repeated loads of a page: each slot is also read at most once.
    Reads,
}

impl Hide {
    /// All values.
    pub const ALL: [Self; 3] = [Self::Off, Self::Writes, Self::Reads];

    /// The name in `GRANARY_HIDE`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Writes => "writes",
            Self::Reads => "reads",
        }
    }
}

/// The error of an unknown name of [`Hide`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected off, writes or reads")]
pub struct UnknownHide;

impl std::str::FromStr for Hide {
    type Err = UnknownHide;

    fn from_str(name: &str) -> Result<Self, UnknownHide> {
        Self::ALL.into_iter().find(|hide| hide.name() == name).ok_or(UnknownHide)
    }
}

/// Settings of a paged process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Bytes that may be resident, frames and shelf included.
    pub local_bytes: u64,
    /// All processes of the run share the bound, by the ledger in the run's memory.
    pub shares_bound: bool,
    /// Backing memory, in the form of `GRANARY_POOL`.
    pub pool: String,
    /// The memory node belongs to this program alone, and passes on its chunk memory.
    pub is_direct: bool,
    /// For `granary run`: processes that outlive the program are ended, because their memory node
    /// ends with the command. Not passed to processes.
    pub ends_daemons: bool,
    /// An assist that listens in the run's directory moves page lists.
    pub has_assist: bool,
    /// Directory of the assist's socket.
    pub run_directory: Option<PathBuf>,
    /// Descriptor of the memory with the ledger and the counters ([`crate::run_memory`]).
    pub run_memory: Option<PathBuf>,
    /// Descriptors that the process was handed by one that has changed its user (`node_sockets`).
    pub handed: Option<String>,
    /// Path of the fault trace, without `.PID`. A traced process reads no page ahead.
    pub trace: Option<PathBuf>,
    /// Bytes of address space to reserve.
    pub region_bytes: usize,
    /// Directory of the overflow file.
    pub overflow_directory: PathBuf,
    /// Programs that cannot be paged, or could stop the pager, run anyway.
    pub allow_unpaged: bool,
    /// The way in which pages get into and out of the program's memory.
    pub pages: Pages,
    /// The division of a fault's work.
    pub paths: Paths,
    /// Sparse chunks are compacted at any time, and not only in a pool that is nearly full.
    pub trim: bool,
    /// File in which the process records when its last fault was.
    pub fault_times: Option<PathBuf>,
    /// Which resident pages are evicted first.
    pub policy: Name,
    /// The cipher that encrypts the pages in the pool; `None`: they are plain.
    pub seal: Option<Cipher>,
    /// The pattern of accesses that is hidden from the pool.
    pub hide: Hide,
    /// Bytes of the process's own tier, which holds pages before a memory node with scheme `tdmem`
    /// does. This memory is in addition to `local_bytes`.
    pub tier_bytes: u64,
    /// Seconds for which pinned pages may keep the process beyond its bound.
    pub pinned_s: u32,
    /// Seconds after which a memory node that does not answer ends the process, 1 to 3600.
    pub answer_s: u32,
    /// Seconds for which a process waits for the pager's own threads.
    pub wait_s: u32,
}

impl Config {
    /// Creates settings with defaults for all optional fields.
    pub fn new(local_bytes: u64, pool: impl Into<String>) -> Self {
        Self {
            local_bytes,
            shares_bound: false,
            pool: pool.into(),
            is_direct: false,
            ends_daemons: false,
            has_assist: false,
            run_directory: None,
            run_memory: None,
            handed: None,
            trace: None,
            region_bytes: 1 << 40,
            overflow_directory: default_overflow_directory(),
            allow_unpaged: false,
            pages: Pages::Auto,
            paths: Paths::Two,
            trim: false,
            fault_times: None,
            policy: Name::default(),
            seal: None,
            hide: Hide::Off,
            tier_bytes: 0,
            pinned_s: PINNED_S,
            answer_s: ANSWER_S,
            wait_s: WAIT_S,
        }
    }

    /// Reads the environment through `get`. Returns `None` if `GRANARY_LOCAL` is not set: the
    /// process is not paged.
    pub fn from_environment(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, Error> {
        let Some(local) = get("GRANARY_LOCAL") else { return Ok(None) };
        let size = |name: &'static str, value: &str| {
            parse_size(value).ok_or_else(|| Error::Setting {
                name,
                value: value.into(),
                why: "expected a size such as 512MiB".into(),
            })
        };
        let pool = get("GRANARY_POOL").ok_or_else(|| Error::Setting {
            name: "GRANARY_POOL",
            value: String::new(),
            why: "it must be set because GRANARY_LOCAL is set".into(),
        })?;
        let mut config = Self::new(size("GRANARY_LOCAL", &local)?, pool);
        config.shares_bound = get(BOUND).as_deref() == Some("run");
        config.is_direct = get(DIRECT).as_deref() == Some("1");
        config.has_assist = get(ASSIST).as_deref() == Some("process");
        config.run_directory = get("GRANARY_RUN_DIR").map(PathBuf::from);
        config.run_memory = get(RUN_MEMORY).map(PathBuf::from);
        config.handed = get(node_sockets::VARIABLE);
        config.fault_times = get(FAULT_TIMES).map(PathBuf::from);
        config.trace = get("GRANARY_TRACE").map(PathBuf::from);
        if let Some(region) = get("GRANARY_REGION") {
            config.region_bytes = size("GRANARY_REGION", &region)? as usize;
        }
        if let Some(tier) = get(TIER) {
            config.tier_bytes = size(TIER, &tier)?;
        }
        if let Some(directory) = get("GRANARY_OVERFLOW_DIR") {
            config.overflow_directory = directory.into();
        }
        config.trim = get(TRIM).as_deref() == Some("1");
        config.allow_unpaged = get("GRANARY_ALLOW_UNPAGED").is_some_and(|value| value == "1");
        config.read_choices(get)?;
        config.check()?;
        Ok(Some(config))
    }

    /// Reads the choices of methods that `granary run` takes from its environment too.
    ///
    /// # Errors
    /// [`Error::Setting`] for an unknown name.
    pub fn read_choices(&mut self, get: impl Fn(&str) -> Option<String>) -> Result<(), Error> {
        if let Some(value) = get(PAGES) {
            self.pages = Pages::from_name(&value).ok_or_else(|| Error::Setting {
                name: PAGES,
                value,
                why: "expected auto, move or copy".into(),
            })?;
        }
        if let Some(value) = get(PATHS) {
            self.paths = value.parse().map_err(|error: UnknownPaths| Error::Setting {
                name: PATHS,
                value,
                why: error.to_string(),
            })?;
        }
        if let Some(value) = get(POLICY) {
            self.policy = value.parse().map_err(|error: UnknownPolicy| Error::Setting {
                name: POLICY,
                value,
                why: error.to_string(),
            })?;
        }
        if let Some(value) = get(SEAL) {
            let SealChoice(cipher) = value.parse().map_err(|error: UnknownSeal| {
                Error::Setting { name: SEAL, value, why: error.to_string() }
            })?;
            self.seal = cipher;
        }
        if let Some(value) = get(HIDE) {
            self.hide = value.parse().map_err(|error: UnknownHide| Error::Setting {
                name: HIDE,
                value,
                why: error.to_string(),
            })?;
        }
        let times =
            [(ANSWER, &mut self.answer_s), (PINNED, &mut self.pinned_s), (WAIT, &mut self.wait_s)];
        for (name, setting) in times {
            if let Some(value) = get(name) {
                let why = "expected a number of seconds".into();
                *setting = value.parse().map_err(|_| Error::Setting { name, value, why })?;
            }
        }
        Ok(())
    }

    /// Returns the environment that [`Config::from_environment`] reads.
    pub fn to_environment(&self) -> Vec<(&'static str, std::ffi::OsString)> {
        let mut variables = vec![
            ("GRANARY_LOCAL", self.local_bytes.to_string().into()),
            (BOUND, if self.shares_bound { "run" } else { "process" }.into()),
            ("GRANARY_POOL", self.pool.clone().into()),
            (DIRECT, if self.is_direct { "1" } else { "0" }.into()),
            ("GRANARY_REGION", self.region_bytes.to_string().into()),
            ("GRANARY_OVERFLOW_DIR", self.overflow_directory.clone().into()),
            (PAGES, self.pages.name().into()),
            (PATHS, self.paths.name().into()),
            (POLICY, self.policy.text().into()),
            (HIDE, self.hide.name().into()),
            (TIER, self.tier_bytes.to_string().into()),
            (ANSWER, self.answer_s.to_string().into()),
            (PINNED, self.pinned_s.to_string().into()),
            (WAIT, self.wait_s.to_string().into()),
            (SEAL, self.seal.map_or_else(|| "off".into(), |cipher| cipher.to_string()).into()),
        ];
        if let Some(directory) = &self.run_directory {
            variables.push(("GRANARY_RUN_DIR", directory.clone().into()));
        }
        if let Some(memory) = &self.run_memory {
            variables.push((RUN_MEMORY, memory.clone().into()));
        }
        if let Some(handed) = &self.handed {
            variables.push((node_sockets::VARIABLE, handed.clone().into()));
        }
        if let Some(file) = &self.fault_times {
            variables.push((FAULT_TIMES, file.clone().into()));
        }
        if self.has_assist {
            variables.push((ASSIST, "process".into()));
        }
        if self.allow_unpaged {
            variables.push(("GRANARY_ALLOW_UNPAGED", "1".into()));
        }
        if self.trim {
            variables.push((TRIM, "1".into()));
        }
        if let Some(trace) = &self.trace {
            variables.push(("GRANARY_TRACE", trace.clone().into()));
        }
        variables
    }

    /// Checks the bound.
    ///
    /// # Errors
    /// [`Error::LocalTooSmall`] below [`LOCAL_BYTES_MIN`].
    pub fn check(&self) -> Result<(), Error> {
        if self.local_bytes < LOCAL_BYTES_MIN {
            return Err(Error::LocalTooSmall { bytes: self.local_bytes });
        }
        Ok(())
    }
}

fn default_overflow_directory() -> PathBuf {
    std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

/// Parses a size such as `4096`, `64KiB`, `512MiB` or `2GiB` into bytes. `K`, `M`, `G` and `T`
/// without `iB` mean the same units.
pub fn parse_size(text: &str) -> Option<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let shift = match unit.trim() {
        "" | "B" => 0,
        "K" | "k" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        "T" | "TiB" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed() {
        assert_eq!(parse_size("512MiB"), Some(512 << 20));
        assert_eq!(parse_size("2G"), Some(2 << 30));
        assert_eq!(parse_size("4096"), Some(4096));
        assert_eq!(parse_size("12XB"), None);
        assert_eq!(parse_size("MiB"), None);
        assert_eq!(parse_size("99999999999T"), None);
    }

    #[test]
    fn environment_round_trips_all_settings() {
        let mut config = Config::new(64 << 20, "memory:1GiB");
        config.is_direct = true;
        config.has_assist = true;
        config.shares_bound = true;
        config.run_directory = Some("/run/x".into());
        config.run_memory = Some("/proc/1/fd/1000".into());
        config.handed = Some("0:1001,device:1002".into());
        config.trace = Some("/traces/x".into());
        config.overflow_directory = "/somewhere".into();
        config.allow_unpaged = true;
        config.pages = Pages::Copy;
        config.paths = Paths::Fastswap;
        config.trim = true;
        config.fault_times = Some("/proc/1/fd/9".into());
        config.policy = Name::Random;
        config.seal = Some(Cipher::Aes128Gcm);
        config.hide = Hide::Reads;
        config.tier_bytes = 5 << 20;
        config.pinned_s = 7;
        config.answer_s = 9;
        config.wait_s = 8;
        let variables = config.to_environment();
        let get = |name: &str| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| value.to_string_lossy().into_owned())
        };
        assert_eq!(Config::from_environment(get).unwrap(), Some(config));
        assert_eq!(Config::from_environment(|_| None).unwrap(), None);
    }

    #[test]
    fn unknown_choices_are_refused_with_the_known_ones() {
        let refused = |name: &str, value: &str| {
            let get = |asked: &str| match asked {
                "GRANARY_LOCAL" => Some("64MiB".to_string()),
                "GRANARY_POOL" => Some("memory:1GiB".to_string()),
                _ => (asked == name).then(|| value.to_string()),
            };
            Config::from_environment(get).unwrap_err().to_string()
        };
        let pages = refused("GRANARY_PAGES", "swap");
        assert_eq!(pages, "GRANARY_PAGES=swap: expected auto, move or copy");
        let paths = refused("GRANARY_PATHS", "three");
        assert_eq!(paths, "GRANARY_PATHS=three: expected linux, fastswap or two");
        let seal = refused("GRANARY_SEAL", "on");
        assert_eq!(seal, "GRANARY_SEAL=on: expected off, aes-256-gcm or aes-128-gcm");
        assert_eq!(
            refused("GRANARY_HIDE", "all"),
            "GRANARY_HIDE=all: expected off, writes or reads"
        );
        assert_eq!(
            refused("GRANARY_POLICY", "lru"),
            "GRANARY_POLICY=lru: expected fifo, segmented, random, bip, stream, s3fifo, duel or \
             contest"
        );
    }

    #[test]
    fn too_small_bound_is_refused_with_the_minimum() {
        let error = Config::new(1 << 20, "memory:1GiB").check().unwrap_err();
        assert!(error.to_string().contains("4 MiB"), "{error}");
    }
}

//! Command-line options that several commands share.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use bench_report::progress::Progress;
use bench_report::report::Report;
use pool::remote::domain;
use pool::{Address, DomainToken, Remote, Scheme, Settings};
use units::Size;

use crate::UsageError;

/// Size of a chunk in schemes with several sizes, in bytes.
const CHUNK_BYTES_DEFAULT: u64 = 1 << 20;
/// Allowed chunk sizes in bytes.
const CHUNK_BYTES: std::ops::RangeInclusive<u64> = 512..=1 << 30;

/// Output format of a command.
#[derive(clap::Args, Clone, Debug)]
pub struct Output {
    /// Print one JSON object per line instead of text
    #[arg(long)]
    pub json: bool,
}

impl Output {
    /// A report on standard output in this format.
    pub fn report(&self) -> Report {
        Report::new(self.json)
    }

    /// Progress bars; none with `--json`.
    pub fn progress(&self) -> Progress {
        Progress::new(self.json)
    }
}

/// Directory of pictures.
#[derive(clap::Args, Clone, Debug)]
pub struct Pictures {
    /// Directory for pictures, SVG and PNG [default: out; no pictures with --json]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

impl Pictures {
    /// The directory; `None` if no pictures are drawn.
    pub fn directory(&self, output: &Output) -> Option<PathBuf> {
        self.out.clone().or_else(|| (!output.json).then(|| PathBuf::from("out")))
    }
}

/// The NIC of a benchmark.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicName {
    /// Software NIC that the client's own thread runs
    Inline,
    /// Software NIC in the memory node's process, with queues in shared memory
    Shm,
    /// Two software NICs, one per process, that exchange RoCEv2 packets over the loopback interface
    Roce,
}

impl NicName {
    /// Name of the NIC in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inline => "inline",
            Self::Shm => "shm",
            Self::Roce => "roce",
        }
    }
}

/// Value of the option `--pool`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolAddress {
    /// A memory node on this machine or another.
    Node(Address),
    /// Several memory nodes, separated by commas.
    Nodes(Vec<Address>),
    /// A store without a pool, to tell a fault of the pool from one of the pager: `memory:SIZE` or
    /// `file:DIRECTORY`.
    Store(String),
}

impl PoolAddress {
    /// The memory node's address, for a command that needs exactly one.
    pub fn node(&self, command: &'static str) -> Result<&Address, UsageError> {
        match self {
            Self::Node(address) => Ok(address),
            Self::Nodes(_) => {
                let text = format!("--pool {self}: this command needs a single memory node");
                Err(UsageError(text, command))
            }
            Self::Store(_) => {
                let text = format!("--pool {self}: this command needs a memory node, not a store");
                Err(UsageError(text, command))
            }
        }
    }

    /// The memory nodes' addresses, for a command that uses each node separately.
    pub fn nodes(&self, command: &'static str) -> Result<Vec<&Address>, UsageError> {
        match self {
            Self::Nodes(nodes) => Ok(nodes.iter().collect()),
            other => other.node(command).map(|address| vec![address]),
        }
    }

    /// This address with the token in `file`, if there is one. Only remote nodes take a token.
    pub fn with_token(
        self,
        file: Option<&Path>,
        command: &'static str,
    ) -> Result<Self, UsageError> {
        match (self, file) {
            (address, None) => Ok(address),
            (Self::Node(Address::Roce(remote)), Some(file)) => {
                let token = Some(file.to_owned());
                Ok(Self::Node(Address::Roce(Remote { token, ..remote })))
            }
            (Self::Nodes(nodes), Some(file)) => {
                let add_token = |node| match node {
                    Address::Roce(remote) => {
                        Address::Roce(Remote { token: Some(file.to_owned()), ..remote })
                    }
                    other => other,
                };
                Ok(Self::Nodes(nodes.into_iter().map(add_token).collect()))
            }
            (other, Some(_)) => {
                let text = format!("--token-file: --pool {other} needs no token; leave it out");
                Err(UsageError(text, command))
            }
        }
    }
}

impl fmt::Display for PoolAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(address) => address.fmt(f),
            Self::Nodes(nodes) => f.write_str(&Address::write_list(nodes)),
            Self::Store(store) => f.write_str(store),
        }
    }
}

impl FromStr for PoolAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("memory" | "file", rest)) if !rest.is_empty() => Ok(Self::Store(text.into())),
            _ => Address::list(text).map(|mut nodes| match nodes.len() {
                1 => Self::Node(nodes.remove(0)),
                _ => Self::Nodes(nodes),
            }),
        }
    }
}

/// Token for a memory node on another host.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct TokenFile {
    /// File with the token for the memory node of --pool roce://HOST; only its owner may have read
    /// permission
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}

/// Domain whose members share objects, in schemes with leases.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct DomainFile {
    /// File with the token of the domain to join, 32 bytes or 64 hexadecimal digits; only its owner
    /// may have read permission. A memory node on another host must have it too
    #[arg(long, value_name = "FILE", requires = "pool")]
    domain_token: Option<PathBuf>,
}

impl DomainFile {
    /// Reads the token, if a file is given.
    pub fn token(&self) -> Result<Option<DomainToken>, pool::Error> {
        self.domain_token.as_deref().map(domain::read).transpose()
    }
}

/// Memory that a memory node donates.
#[derive(clap::Args, Clone, Debug)]
pub struct Donation {
    /// Memory that the memory node donates
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub memory: Size,

    /// Size of a chunk: a power of two from 512 bytes to 1GiB [default: 1MiB; in schemes odrp and
    /// tdmem 4KiB, their only size]
    #[arg(long, value_name = "SIZE")]
    pub chunk: Option<Size>,
}

impl Donation {
    /// Settings of a memory node with this donation and a scheme.
    pub fn settings(&self, scheme: Scheme) -> Settings {
        let (donate_bytes, chunk_bytes) = (self.memory.bytes(), self.chunk(scheme).bytes());
        Settings { donate_bytes, chunk_bytes, scheme, ..Settings::default() }
    }

    fn chunk(&self, scheme: Scheme) -> Size {
        self.chunk.unwrap_or(Size(scheme.chunk_bytes.unwrap_or(CHUNK_BYTES_DEFAULT)))
    }

    /// Checks the two sizes against each other.
    ///
    /// # Errors
    /// [`UsageError`] if the chunk size is not allowed, or if the memory is not a whole number of
    /// chunks.
    pub fn check(&self, scheme: Scheme, command: &'static str) -> Result<(), UsageError> {
        let size = self.chunk(scheme);
        let (memory, chunk) = (self.memory.bytes(), size.bytes());
        if !chunk.is_power_of_two() || !CHUNK_BYTES.contains(&chunk) {
            let text = format!("--chunk {size}: must be a power of two from 512 to 1GiB");
            return Err(UsageError(text, command));
        }
        if memory < chunk || !memory.is_multiple_of(chunk) {
            let text = format!(
                "--memory {}: not a multiple of the chunk size {size}; use e.g. {}",
                self.memory,
                Size(memory.div_ceil(chunk).max(1).saturating_mul(chunk)),
            );
            return Err(UsageError(text, command));
        }
        Ok(())
    }
}

/// Parses a duration in seconds, above zero and below one day.
///
/// # Errors
/// A description of the accepted values.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected seconds, e.g. 0.5".to_owned())?;
    if seconds > 0.0 && seconds < 86_400.0 {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("must be more than 0 and less than 86400 seconds".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pool::schemes;

    #[test]
    fn pool_addresses_parse_print_and_take_tokens() {
        let shm = PoolAddress::Node(Address::Shm("/run/g.sock".into()));
        assert_eq!("shm:/run/g.sock".parse(), Ok(shm.clone()));
        let file = Path::new("/etc/token");
        assert!(shm.with_token(Some(file), "run").is_err());
        let roce: PoolAddress = "roce://host".parse().unwrap();
        let roce = roce.with_token(Some(file), "run").unwrap();
        assert_eq!(roce.to_string(), "roce://host:4791;token=/etc/token");
        let store: PoolAddress = "memory:1GiB".parse().unwrap();
        assert_eq!(store.to_string(), "memory:1GiB");
        assert!(store.node("status").is_err());
        let several: PoolAddress = "shm:/a,roce://host".parse().unwrap();
        assert!(several.node("status").is_err());
        let several = several.with_token(Some(file), "run").unwrap();
        assert_eq!(several.to_string(), "shm:/a,roce://host:4791;token=/etc/token");
        for wrong in ["", "shm", "shm:", "/run/g.sock", "memory:"] {
            let error = wrong.parse::<PoolAddress>().unwrap_err();
            assert!(error.contains("shm:PATH"), "{error}");
        }
    }

    #[test]
    fn donation_is_checked_against_the_chunk_size() {
        let check = |memory: &str, chunk: &str| {
            Donation { memory: memory.parse().unwrap(), chunk: chunk.parse().ok() }
                .check(schemes::ONESIDEDMW, "serve")
                .map_err(|error| error.to_string())
        };
        assert_eq!(check("1GiB", "512"), Ok(()));
        let default = Donation { memory: "8KiB".parse().unwrap(), chunk: None };
        assert_eq!(default.settings(schemes::ODRP).chunk_bytes, 4096);
        assert!(default.check(schemes::ODRP, "run").is_ok());
        assert!(default.check(schemes::ONESIDEDMW, "run").is_err(), "1 MiB does not fit");
        assert_eq!(check("1GiB", "1GiB"), Ok(()));
        for (memory, chunk, why) in [
            ("1GiB", "256", "must be a power of two"),
            ("1GiB", "3MiB", "must be a power of two"),
            ("4GiB", "2GiB", "must be a power of two"),
            ("1MB", "1MiB", "use e.g. 1MiB"),
            ("1000000000", "1MiB", "use e.g. 954MiB"),
            ("0", "4KiB", "use e.g. 4KiB"),
        ] {
            let error = check(memory, chunk).unwrap_err();
            assert!(error.contains(why) && error.contains("granary serve --help"), "{error}");
        }
    }

    #[test]
    fn seconds_parse_within_bounds() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["", "abc", "0", "-1", "NaN", "inf", "1e9"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}

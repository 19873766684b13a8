//! Options that several commands share.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use bench::progress::Progress;
use bench::report::Report;
use bench::size::Size;
use pool::{Address, Remote, Settings};

use crate::UsageError;

/// Smallest and largest chunk of a pool in bytes.
const CHUNK_BYTES: std::ops::RangeInclusive<u64> = 512..=1 << 30;

/// How results are printed.
#[derive(clap::Args, Clone, Debug)]
pub struct Output {
    /// Print for machines: one JSON object a line
    #[arg(long)]
    pub json: bool,
}

impl Output {
    /// Where results go.
    pub fn report(&self) -> Report {
        Report::new(self.json)
    }

    /// Whether bars are drawn.
    pub fn progress(&self) -> Progress {
        Progress::new(self.json)
    }
}

/// Where pictures go.
#[derive(clap::Args, Clone, Debug)]
pub struct Pictures {
    /// Directory for pictures (SVG and PNG) [default: out, and none with --json]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

impl Pictures {
    /// The directory, if pictures are wanted.
    pub fn directory(&self, output: &Output) -> Option<PathBuf> {
        self.out.clone().or_else(|| (!output.json).then(|| PathBuf::from("out")))
    }
}

/// The NIC of a benchmark.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicName {
    /// Software NIC run by the client's own thread
    Inline,
    /// Software NIC in the memory node's process, queues in shared memory
    Shm,
    /// A software NIC in either process, RoCEv2 between them over the loopback interface
    Roce,
}

impl NicName {
    /// Its name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inline => "inline",
            Self::Shm => "shm",
            Self::Roce => "roce",
        }
    }
}

/// Which pool a command uses, as `--pool` writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolAddress {
    /// A `granary serve`, on this machine or another.
    Node(Address),
    /// Several, with commas between them.
    Nodes(Vec<Address>),
    /// No pool, for diagnosis: is it the pool or the pager? `memory:SIZE` or `file:DIRECTORY`.
    Store(String),
}

impl PoolAddress {
    /// The memory node's socket, for a command that needs one.
    pub fn node(&self, command: &'static str) -> Result<&Address, UsageError> {
        match self {
            Self::Node(address) => Ok(address),
            Self::Nodes(_) => {
                Err(UsageError(format!("--pool {self}: name one memory node"), command))
            }
            Self::Store(_) => {
                Err(UsageError(format!("--pool {self}: that is no memory node"), command))
            }
        }
    }

    /// The memory nodes' addresses, for a command that takes each by itself.
    pub fn nodes(&self, command: &'static str) -> Result<Vec<&Address>, UsageError> {
        match self {
            Self::Nodes(all) => Ok(all.iter().collect()),
            one => one.node(command).map(|address| vec![address]),
        }
    }

    /// The same, with the token that is in `file`, if one is named.
    pub fn with_token(
        self,
        file: Option<&Path>,
        command: &'static str,
    ) -> Result<Self, UsageError> {
        match (self, file) {
            (it, None) => Ok(it),
            (Self::Node(Address::Roce(remote)), Some(file)) => {
                let token = Some(file.to_owned());
                Ok(Self::Node(Address::Roce(Remote { token, ..remote })))
            }
            (Self::Nodes(nodes), Some(file)) => {
                let with = |node| match node {
                    Address::Roce(remote) => {
                        Address::Roce(Remote { token: Some(file.to_owned()), ..remote })
                    }
                    other => other,
                };
                Ok(Self::Nodes(nodes.into_iter().map(with).collect()))
            }
            (other, Some(_)) => {
                let text = format!("--token-file: --pool {other} asks for no token");
                Err(UsageError(text, command))
            }
        }
    }
}

impl fmt::Display for PoolAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(address) => address.fmt(f),
            Self::Nodes(all) => f.write_str(&Address::write_list(all)),
            Self::Store(store) => f.write_str(store),
        }
    }
}

impl FromStr for PoolAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("memory" | "file", rest)) if !rest.is_empty() => Ok(Self::Store(text.into())),
            _ => Address::list(text).map(|mut all| match all.len() {
                1 => Self::Node(all.remove(0)),
                _ => Self::Nodes(all),
            }),
        }
    }
}

/// What a memory node on another host asks for.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct TokenFile {
    /// File with the token that the memory node of --pool roce://HOST asks for; only its owner may read it
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}

/// What a memory node donates.
#[derive(clap::Args, Clone, Debug)]
pub struct Donation {
    /// Memory that the memory node donates
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub memory: Size,

    /// Size of a chunk: a power of two, 512 bytes to 1GiB
    #[arg(long, value_name = "SIZE", default_value = "1MiB")]
    pub chunk: Size,
}

impl Donation {
    /// Settings of a memory node that donates it.
    pub fn settings(&self) -> Settings {
        let (donate_bytes, chunk_bytes) = (self.memory.bytes(), self.chunk.bytes());
        Settings { donate_bytes, chunk_bytes, ..Settings::default() }
    }

    /// Checks what one option alone cannot say, for a command.
    ///
    /// # Errors
    /// [`UsageError`] if the chunk size is none, or the memory is not a number of chunks.
    pub fn check(&self, command: &'static str) -> Result<(), UsageError> {
        let (memory, chunk) = (self.memory.bytes(), self.chunk.bytes());
        if !chunk.is_power_of_two() || !CHUNK_BYTES.contains(&chunk) {
            let text = format!("--chunk {}: a chunk is a power of two, 512 to 1GiB", self.chunk);
            return Err(UsageError(text, command));
        }
        if memory < chunk || !memory.is_multiple_of(chunk) {
            let text = format!(
                "--memory {}: no whole number of chunks of {}; take e.g. {}",
                self.memory,
                self.chunk,
                Size(memory.div_ceil(chunk).max(1).saturating_mul(chunk)),
            );
            return Err(UsageError(text, command));
        }
        Ok(())
    }
}

/// A duration in seconds, above zero and below a day.
///
/// # Errors
/// What is wrong with the text.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "write seconds, e.g. 0.5".to_owned())?;
    if seconds > 0.0 && seconds < 86_400.0 {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("take more than 0 and less than 86400 seconds".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools() {
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
    fn donations() {
        let check = |memory: &str, chunk: &str| {
            Donation { memory: memory.parse().unwrap(), chunk: chunk.parse().unwrap() }
                .check("serve")
                .map_err(|error| error.to_string())
        };
        assert_eq!(check("1GiB", "512"), Ok(()));
        assert_eq!(check("1GiB", "1GiB"), Ok(()));
        for (memory, chunk, why) in [
            ("1GiB", "256", "a chunk is a power of two"),
            ("1GiB", "3MiB", "a chunk is a power of two"),
            ("4GiB", "2GiB", "a chunk is a power of two"),
            ("1MB", "1MiB", "take e.g. 1MiB"),
            ("1000000000", "1MiB", "take e.g. 954MiB"),
            ("0", "4KiB", "take e.g. 4KiB"),
        ] {
            let error = check(memory, chunk).unwrap_err();
            assert!(error.contains(why) && error.contains("granary serve --help"), "{error}");
        }
    }

    #[test]
    fn durations() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["", "abc", "0", "-1", "NaN", "inf", "1e9"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}

//! Options that several commands share.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use bench::progress::Progress;
use bench::report::Report;
use bench::size::Size;
use pool::Settings;

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
}

impl NicName {
    /// Its name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inline => "inline",
            Self::Shm => "shm",
        }
    }
}

/// Which pool a command uses, as `--pool` writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolAddress {
    /// A `granary serve` on this machine, by its socket.
    Shm(PathBuf),
    /// No pool, for diagnosis: is it the pool or the pager? `memory:SIZE` or `file:DIRECTORY`.
    Store(String),
}

impl PoolAddress {
    /// The memory node's socket, for a command that needs one.
    pub fn socket(&self, command: &'static str) -> Result<&Path, UsageError> {
        match self {
            Self::Shm(path) => Ok(path),
            Self::Store(_) => {
                Err(UsageError(format!("--pool {self}: that is no memory node"), command))
            }
        }
    }
}

impl fmt::Display for PoolAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shm(path) => write!(f, "shm:{}", path.display()),
            Self::Store(store) => f.write_str(store),
        }
    }
}

impl FromStr for PoolAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = "this version knows shm:PATH, PATH being the socket that granary serve prints";
        match text.split_once(':') {
            Some((_, "")) => Err(format!("nothing behind the colon of {text:?}: {known}")),
            Some(("shm", path)) => Ok(Self::Shm(path.into())),
            Some(("memory" | "file", _)) => Ok(Self::Store(text.into())),
            _ => Err(format!("no such kind of pool: {known}")),
        }
    }
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
        assert_eq!("shm:/run/g.sock".parse(), Ok(PoolAddress::Shm("/run/g.sock".into())));
        let store: PoolAddress = "memory:1GiB".parse().unwrap();
        assert_eq!(store.to_string(), "memory:1GiB");
        assert!(store.socket("status").is_err());
        for wrong in ["", "shm", "shm:", "/run/g.sock", "roce://host"] {
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

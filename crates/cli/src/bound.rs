//! The bound of `granary run`: its options, and the thread that adjusts it while the run lives.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use pager::ledger::{Ledger, Owner};
use units::{PAGE_BYTES, Size};

use crate::memory::HostMemory;
use crate::pressure::{self, Source};

/// Value of `--local`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalBound {
    /// Smallest bound.
    pub min: Size,
    /// Greatest bound, with which the run starts.
    pub max: Size,
}

impl LocalBound {
    fn is_range(&self) -> bool {
        self.min < self.max
    }
}

impl FromStr for LocalBound {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let size = |part: &str| part.parse::<Size>().map_err(|error| error.to_string());
        let Some((min, max)) = text.split_once("..") else {
            let size = size(text)?;
            return Ok(Self { min: size, max: size });
        };
        let (min, max) = (size(min)?, size(max)?);
        match min < max {
            true => Ok(Self { min, max }),
            false => Err(format!("the first size must be the smaller one, e.g. {max}..{min}")),
        }
    }
}

/// Options for the memory that stays on this machine.
#[derive(clap::Args, Clone, Debug)]
pub struct LocalOptions {
    /// Anonymous memory that all processes of the run together may keep resident on this machine;
    /// MIN..MAX: between these sizes, less while memory is short (see granary local) [default: a
    /// quarter of the memory that this machine or control group has available]
    #[arg(long, value_name = "SIZE|MIN..MAX", conflicts_with = "local_each")]
    local: Option<LocalBound>,

    /// Anonymous memory that each process may keep resident on this machine, instead of --local
    #[arg(long, value_name = "SIZE")]
    local_each: Option<Size>,

    /// File with memory pressure that --local MIN..MAX follows, in the format of
    /// /proc/pressure/memory [default: memory.pressure of the control group, or of the machine]
    #[arg(long, value_name = "FILE", requires = "local")]
    pressure: Option<PathBuf>,
}

impl LocalOptions {
    /// Sets the default bound where the command line has none, and prints it to standard error.
    ///
    /// # Errors
    /// The command line has no bound, and the kernel does not report the available memory.
    pub fn or_default(mut self, memory: HostMemory) -> anyhow::Result<Self> {
        if self.local.is_none() && self.local_each.is_none() {
            let size = default_bound(memory).context(
                "choose the memory that stays on this machine: /proc/meminfo is not readable; set \
                 it with --local SIZE, e.g. --local 256MiB",
            )?;
            eprintln!(
                "granary run: --local {size}, a quarter of the available memory; set another bound \
                 with --local SIZE"
            );
            self.local = Some(LocalBound { min: size, max: size });
        }
        Ok(self)
    }

    /// Returns the greatest bound: of the run, or of each process.
    pub fn size(&self) -> Size {
        let max = self.local.map(|local| local.max);
        max.or(self.local_each).expect("or_default sets one of both options")
    }

    /// Returns true if the processes share the bound.
    pub fn is_shared(&self) -> bool {
        self.local.is_some()
    }

    /// Returns the option's name and value, for messages.
    pub fn describe(&self) -> String {
        match self.local {
            Some(local) if local.is_range() => format!("--local {}..{}", local.min, local.max),
            Some(local) => format!("--local {}", local.max),
            None => format!("--local-each {}", self.size()),
        }
    }

    /// Checks the range, and that the pressure can be read. Returns `None` without a range.
    ///
    /// # Errors
    /// The kernel does not measure memory pressure.
    pub fn follow(&self) -> anyhow::Result<Option<Follow>> {
        let Some(local) = self.local.filter(LocalBound::is_range) else { return Ok(None) };
        if local.min.bytes() < pager::config::LOCAL_BYTES_MIN {
            anyhow::bail!("--local {}..{}: use at least 4 MiB", local.min, local.max);
        }
        let source = Source::new(self.pressure.clone());
        source.read().with_context(|| {
            format!(
                "read memory pressure from {}, which --local {}..{} follows; use a kernel with \
                 pressure stall information (CONFIG_PSI, psi=1), or name a file with \
                 --pressure, or give --local one size",
                source.path().display(),
                local.min,
                local.max
            )
        })?;
        Ok(Some(Follow { source, range: (local.min.bytes(), local.max.bytes()) }))
    }
}

/// Returns a quarter of the available memory, in whole MiB.
fn default_bound(memory: HostMemory) -> Option<Size> {
    let quarter = memory.available? / 4;
    Some(Size((quarter >> 20 << 20).max(pager::config::LOCAL_BYTES_MIN)))
}

/// A range, and the pressure that moves the bound in it.
#[derive(Debug)]
pub struct Follow {
    source: Source,
    range: (u64, u64),
}

/// Time between two looks at the bound.
const INTERVAL: Duration = Duration::from_secs(1);

/// The thread that keeps the bound: the thread takes back the leases of ended processes, and
/// follows memory pressure. Ends when the value is dropped.
pub struct BoundKeeper {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl BoundKeeper {
    /// Starts the thread.
    pub fn start(ledger: Ledger, follow: Option<Follow>) -> Self {
        let (end, ended) = channel();
        let thread = std::thread::spawn(move || keep(&ledger, follow.as_ref(), &ended));
        Self { end: Some(end), thread: Some(thread) }
    }
}

impl Drop for BoundKeeper {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn keep(ledger: &Ledger, follow: Option<&Follow>, ended: &Receiver<()>) {
    let mut last = Instant::now();
    while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let seconds = last.elapsed().as_secs_f64();
        last = Instant::now();
        // A failed audit is tried again after the next interval.
        ledger.audit(Owner::is_alive);
        if let Some(follow) = follow {
            follow.step(ledger, seconds);
        }
    }
}

impl Follow {
    fn step(&self, ledger: &Ledger, seconds: f64) {
        // An error leaves the bound as it is: a file of a control group that was removed, for
        // example.
        let (Ok(pressure), Some(pages)) = (self.source.read(), ledger.total_pages()) else {
            return;
        };
        let now = u64::from(pages) * PAGE_BYTES as u64;
        let bytes = pressure::next(now, self.range, pressure, seconds);
        set_total(ledger, bytes);
    }
}

/// Sets the bound of a run in bytes, and wakes its processes if it shrinks.
pub fn set_total(ledger: &Ledger, bytes: u64) {
    let pages = (bytes / PAGE_BYTES as u64).min(u64::from(u32::MAX)) as u32;
    if ledger.total_pages() != Some(pages) {
        ledger.set_total(pages);
        ledger.wake_all();
    }
}

#[cfg(test)]
mod tests {
    use pager::run_memory::OwnedRunMemory;

    use super::*;

    #[test]
    fn bounds_parse_as_a_size_or_a_range() {
        let mib = |mib: u64| Size(mib << 20);
        assert_eq!("64MiB".parse(), Ok(LocalBound { min: mib(64), max: mib(64) }));
        assert_eq!("16MiB..1GiB".parse(), Ok(LocalBound { min: mib(16), max: mib(1024) }));
        for wrong in ["", "..", "64MiB..", "..64MiB", "64MiB..16MiB", "64MiB..64MiB", "x..64MiB"] {
            assert!(wrong.parse::<LocalBound>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn default_bound_is_a_quarter_of_the_available_memory() {
        let with = |available| HostMemory { total: None, available };
        assert_eq!(default_bound(with(Some((1 << 30) + 5))), Some(Size(256 << 20)));
        let least = Size(pager::config::LOCAL_BYTES_MIN);
        assert_eq!(default_bound(with(Some(1 << 20))), Some(least));
        assert_eq!(default_bound(with(None)), None);
    }

    #[test]
    fn a_step_writes_the_total_that_the_pressure_demands() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pressure");
        let memory = OwnedRunMemory::create("granary-run-test").unwrap();
        let ledger = Ledger::create(memory.memory(), 25_600);
        let follow =
            Follow { source: Source::new(Some(file.clone())), range: (64 << 20, 100 << 20) };
        follow.step(&ledger, 1.0);
        assert_eq!(ledger.total_pages(), Some(25_600), "without a file the bound stays");
        std::fs::write(&file, "some avg10=50.00 avg60=0.00 avg300=0.00 total=0\n").unwrap();
        follow.step(&ledger, 1.0);
        assert_eq!(ledger.total_pages(), Some(24_320));
        follow.step(&ledger, 100.0);
        assert_eq!(ledger.total_pages(), Some(16_384));
        std::fs::write(&file, "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n").unwrap();
        follow.step(&ledger, 1.0);
        assert_eq!(ledger.total_pages(), Some(16_711));
    }
}

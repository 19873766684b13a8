//! The runs of `granary run` on this machine, and their bounds, for other processes.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::ledger::{Ledger, Owner, UNIT_PAGES};
use crate::run_directory::DIRECTORY_PREFIX;
use crate::run_memory::RunMemory;
use crate::sys::PAGE_BYTES;

/// A run of `granary run`.
#[derive(Debug)]
pub struct Run {
    /// The run's directory.
    pub directory: PathBuf,
    /// Process id of `granary run`.
    pub pid: u32,
    /// The program and its arguments; empty if the kernel does not show them.
    pub program: String,
    /// The ledger of the run; the error if the processes have bounds of their own.
    pub ledger: io::Result<Ledger>,
}

/// The bound of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The bound, in bytes; `None` if the ledger is damaged.
    pub total_bytes: Option<u64>,
    /// Memory that the living processes have leased, in bytes.
    pub given_bytes: u64,
    /// Peak of the leased memory, in bytes.
    pub given_peak_bytes: u64,
    /// Paged processes that live.
    pub processes: u64,
}

impl Bound {
    /// Reads the bound of a run. Units of ended processes that are not taken back yet are not
    /// given.
    pub fn of(ledger: &Ledger) -> Self {
        let bytes = |units: u32| u64::from(units) * u64::from(UNIT_PAGES) * PAGE_BYTES as u64;
        let mut bound = Self {
            total_bytes: ledger.total_pages().map(|pages| u64::from(pages) * PAGE_BYTES as u64),
            given_bytes: 0,
            given_peak_bytes: bytes(ledger.peak()),
            processes: 0,
        };
        for member in ledger.members().filter(|member| member.owner.is_alive()) {
            bound.given_bytes += bytes(member.units);
            bound.processes += 1;
        }
        bound
    }
}

impl Run {
    /// Opens a run by its directory. Only root opens runs of other users; what they wrote is not
    /// trusted.
    ///
    /// # Errors
    /// The directory is not that of a run, the run has ended, or it belongs to another user.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let error = |why: &str| io::Error::new(io::ErrorKind::NotFound, why.to_owned());
        let name = directory.file_name().unwrap_or_default().to_string_lossy();
        let pid = name.strip_prefix(DIRECTORY_PREFIX).and_then(|rest| rest.split('-').next());
        let pid: u32 = pid.and_then(|pid| pid.parse().ok()).ok_or_else(|| {
            error("the name of a run's directory begins with granary-run- and a process id")
        })?;
        // A directory that was left behind may have the id of a thread of the kernel's, which has
        // no command line.
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        // Not followed: another user can make a link of this name.
        let found = std::fs::symlink_metadata(directory).map_err(|_| error("the run has ended"))?;
        if !found.is_dir() || !Owner::new(pid, 0).is_alive() || line.is_empty() {
            return Err(error("the run has ended"));
        }
        // SAFETY: reads the process's credentials.
        let own = unsafe { libc::geteuid() };
        let process = std::fs::metadata(format!("/proc/{pid}"))?.uid();
        if (own != 0 && found.uid() != own) || found.uid() != process {
            return Err(error("the directory belongs to another user"));
        }
        let ledger = RunMemory::of_run(pid, &format!("{name} ")).and_then(Ledger::open);
        let directory = directory.to_owned();
        Ok(Self { pid, program: program_of(&line), ledger, directory })
    }

    /// Returns the runs whose directories lie in the directory of temporary files, by process id.
    ///
    /// # Errors
    /// The directory of temporary files cannot be read.
    pub fn all() -> io::Result<Vec<Self>> {
        let entries = std::fs::read_dir(std::env::temp_dir())?;
        let mut runs: Vec<Self> =
            entries.flatten().filter_map(|entry| Self::open(&entry.path()).ok()).collect();
        runs.sort_by_key(|run| run.pid);
        Ok(runs)
    }

    /// Finds a run by its directory or by the process id of `granary run`.
    ///
    /// # Errors
    /// There is no such run.
    pub fn find(name: &str) -> io::Result<Self> {
        let Ok(pid) = name.parse::<u32>() else { return Self::open(Path::new(name)) };
        let found = Self::all()?.into_iter().find(|run| run.pid == pid);
        found.ok_or_else(|| {
            let directory = std::env::temp_dir();
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("no directory of its run is in {}", directory.display()),
            )
        })
    }
}

/// Returns the program with its arguments in a command line of `granary run`: what follows `--`.
fn program_of(line: &[u8]) -> String {
    let words = line.split(|&byte| byte == 0).map(String::from_utf8_lossy);
    let program: Vec<_> = words.skip_while(|word| word != "--").skip(1).collect();
    program.join(" ").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::RunDirectory;

    #[test]
    fn a_live_run_is_found_by_its_directory_and_its_process() {
        let directory = RunDirectory::create().unwrap();
        let path = directory.path().to_owned();
        assert!(Run::open(&path).unwrap().ledger.is_err(), "it has no ledger yet");
        let ledger = directory.create_ledger(64 << 20);
        let run = Run::find(path.to_str().unwrap()).unwrap();
        assert_eq!(run.pid, std::process::id());
        let bound = Bound::of(run.ledger.as_ref().unwrap());
        let expected = Bound {
            total_bytes: Some(64 << 20),
            given_bytes: 0,
            given_peak_bytes: 0,
            processes: 0,
        };
        assert_eq!(bound, expected);
        run.ledger.unwrap().set_total(9);
        assert_eq!(ledger.total_pages(), Some(9), "both map the same file");
        let by_pid = Run::find(&std::process::id().to_string()).unwrap();
        assert_eq!(by_pid.pid, std::process::id());
        drop(directory);
        assert!(Run::open(&path).unwrap_err().to_string().contains("has ended"));
        // Linux has no process with an id above 2^22.
        assert!(Run::find("/tmp").is_err() && Run::find("4194305").is_err());
    }
}

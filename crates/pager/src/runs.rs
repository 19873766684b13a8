//! The runs of `granary run` on this machine, and their bounds, for other processes.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
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
    /// The first 4088 bytes of the program and its arguments; empty if the kernel does not show the
    /// memory of the run.
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
    /// Nothing here waits for another process, nor reads more than the run's memory has. The
    /// command line in `/proc` is not read: it lies in pages of the process itself, so neither the
    /// time of such a read nor its length is bounded here.
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
        let ended = |_| error("the run has ended");
        // Not followed: another user can make a link of this name.
        let found = std::fs::symlink_metadata(directory).map_err(ended)?;
        // A descriptor of the process's directory does not lead to a later process of its id.
        let process = open_process(pid).map_err(|why| match why.kind() {
            io::ErrorKind::NotFound => ended(why),
            _ => why,
        })?;
        if !found.is_dir() || !Owner::new(pid, 0).is_alive() {
            return Err(error("the run has ended"));
        }
        // SAFETY: reads the process's credentials.
        let own = unsafe { libc::geteuid() };
        if (own != 0 && found.uid() != own) || found.uid() != process.metadata()?.uid() {
            return Err(error("the directory belongs to another user"));
        }
        let path = format!("/proc/self/fd/{}", process.as_raw_fd());
        let memory = match RunMemory::of_run(Path::new(&path), &format!("{name} ")) {
            // A directory that was left behind has the id of another process.
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Err(ended(why)),
            memory => memory,
        };
        let program = memory.as_ref().map(RunMemory::program).unwrap_or_default();
        let ledger = memory.and_then(Ledger::open);
        Ok(Self { pid, program, ledger, directory: directory.to_owned() })
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

/// Opens the directory of a process in `/proc`.
fn open_process(pid: u32) -> io::Result<File> {
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;
    OpenOptions::new().read(true).custom_flags(flags).open(format!("/proc/{pid}"))
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
        directory.memory().set_program("ls -l");
        let run = Run::find(path.to_str().unwrap()).unwrap();
        assert_eq!((run.pid, run.program.as_str()), (std::process::id(), "ls -l"));
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
        // A directory that was left behind, whose id this process has now.
        std::fs::create_dir(&path).unwrap();
        assert!(Run::open(&path).unwrap_err().to_string().contains("has ended"));
        std::fs::remove_dir(&path).unwrap();
        // Linux has no process with an id above 2^22.
        assert!(Run::find("/tmp").is_err() && Run::find("4194305").is_err());
    }
}

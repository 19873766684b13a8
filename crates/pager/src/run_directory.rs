//! The directory of a run, by which other commands of its user find the run.
//!
//! The directory has mode 0700 and holds the assist's socket only; what processes with changed
//! users need is in [`crate::run_memory`]. `granary run` holds a lock (flock(2)) on it. A directory
//! without a lock belongs to a command that was killed, and the next command of its user removes
//! it.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::Error;
use crate::ledger::Ledger;
use crate::run_memory::{OwnedRunMemory, RunMemory};
use crate::sys;

/// First part of the name of a run's directory; the id of the process of `granary run` follows.
pub(crate) const DIRECTORY_PREFIX: &str = "granary-run-";

/// A temporary directory for a run, and the run's memory. The directory is removed when the value
/// is dropped.
#[derive(Debug)]
pub struct RunDirectory {
    path: PathBuf,
    memory: OwnedRunMemory,
    /// Holds the lock.
    _lock: File,
}

impl RunDirectory {
    /// Creates the directory and the memory of a run, after it has removed the directories of this
    /// user's commands that were killed.
    ///
    /// # Errors
    /// The directory of temporary files is not writable, or memory has run out.
    pub fn create() -> Result<Self, Error> {
        let parent = std::env::temp_dir();
        remove_ended(&parent);
        let failed = |source| Error::System {
            what: format!("make a directory in {}", parent.display()),
            source,
        };
        for attempt in 0..1000 {
            let name = format!("{DIRECTORY_PREFIX}{}-{attempt}", std::process::id());
            let path = parent.join(&name);
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(failed(error)),
            }
            // Another command may have found the directory before it was locked.
            if let Some(lock) = lock(&path) {
                let memory = OwnedRunMemory::create(&name);
                let memory = memory.inspect_err(|_| drop(std::fs::remove_dir(&path)));
                let memory = memory.map_err(|source| Error::System {
                    what: "make the memory that the processes of a run share".into(),
                    source,
                })?;
                return Ok(Self { path, memory, _lock: lock });
            }
        }
        Err(failed(io::ErrorKind::AlreadyExists.into()))
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the memory that the processes of the run share.
    pub fn memory(&self) -> RunMemory {
        self.memory.memory()
    }

    pub(crate) fn memory_path(&self) -> PathBuf {
        self.memory.path()
    }

    /// Returns the ids of the processes that have counters.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let mut ids: Vec<u32> = self.memory().processes().map(|(id, _)| id).collect();
        ids.sort_unstable();
        ids
    }

    /// Creates the ledger by which the processes of the run share a bound.
    pub fn create_ledger(&self, local_bytes: u64) -> Ledger {
        let pages = (local_bytes / sys::PAGE_BYTES as u64).min(u64::from(u32::MAX)) as u32;
        Ledger::create(self.memory(), pages)
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        // An error is ignored: a directory that is left behind only takes a little disk space.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Locks a directory of this user. `None` if a living command has locked it, if it was removed, or
/// if it is no directory of this user.
fn lock(path: &Path) -> Option<File> {
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let directory = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    // SAFETY: reads the process's credentials.
    let own = unsafe { libc::geteuid() };
    if directory.metadata().ok()?.uid() != own {
        return None;
    }
    // SAFETY: a plain system call.
    let locked = unsafe { libc::flock(directory.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0;
    // Before it was locked, the directory may have been removed, and another one made there.
    let inode = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let is_there =
        std::fs::symlink_metadata(path).ok().map(inode) == Some(inode(directory.metadata().ok()?));
    (locked && is_there).then_some(directory)
}

/// Removes the directories of this user's commands that were killed.
fn remove_ended(parent: &Path) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_run = name.as_encoded_bytes().starts_with(DIRECTORY_PREFIX.as_bytes());
        if is_run && let Some(_lock) = lock(&entry.path()) {
            // A directory that cannot be removed stays behind.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn only_unlocked_directories_of_runs_are_removed() {
        let parent = std::env::temp_dir().join(format!("granary-ended-{}", std::process::id()));
        let [dead, live, other] =
            ["granary-run-1-0", "granary-run-1-1", "other"].map(|name| parent.join(name));
        for directory in [&dead, &live, &other] {
            std::fs::create_dir_all(directory).unwrap();
            std::fs::write(directory.join("file"), "").unwrap();
        }
        symlink(&other, parent.join("granary-run-1-2")).unwrap();
        let held = lock(&live).unwrap();
        remove_ended(&parent);
        assert!(!dead.exists() && live.exists() && other.join("file").exists());
        drop(held);
        remove_ended(&parent);
        assert!(!live.exists() && other.join("file").exists());
        std::fs::remove_dir_all(&parent).unwrap();
    }

    #[test]
    fn directory_is_private_and_locked() {
        let directory = RunDirectory::create().unwrap();
        let mode = std::fs::metadata(directory.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o700);
        assert!(lock(directory.path()).is_none());
        drop(RunDirectory::create().unwrap());
        assert!(directory.path().is_dir(), "another run leaves it alone");
    }
}

//! Search for the processes of a run that no pager serves, and that no call of exec has noted
//! ([`crate::execs`]).
//!
//! A program that makes its system calls itself (Go without cgo), or that has no preload library
//! (musl, sanitizers), starts programs of which the run learns nothing. The reaper sees them in
//! `/proc`: a process below the reaper, without the preload library in its memory at two looks.
//! A process that ends between two looks is not found, and so is none that lives for less than a
//! second.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::execs::{Execs, Reason};
use crate::run::LIBRARY;
use crate::run_memory::RunMemory;

/// Shortest interval between two looks.
const PAUSE: Duration = Duration::from_secs(1);
/// Looks take at most this part of the time.
const SHARE: u32 = 50;

/// A process, by its id and its start time.
pub(crate) type Key = (i32, u64);

/// The search.
pub(crate) struct Strangers {
    memory: RunMemory,
    /// Processes with the library, and those that are noted.
    known: BTreeSet<Key>,
    /// Processes that had no library at the last look.
    suspects: BTreeSet<Key>,
}

impl Strangers {
    /// A search among the processes of the run with this memory.
    pub fn of(memory: RunMemory) -> Self {
        Self { memory, known: BTreeSet::new(), suspects: BTreeSet::new() }
    }

    /// Looks at the processes that `list` returns, and notes those that no pager serves. Returns
    /// the time until the next look.
    pub fn look(&mut self, list: impl FnOnce() -> Vec<Key>) -> Duration {
        let start = Instant::now();
        let all: BTreeSet<Key> = list().into_iter().collect();
        self.known.retain(|key| all.contains(key));
        let mut suspects = BTreeSet::new();
        let unknown: Vec<Key> = all.difference(&self.known).copied().collect();
        for key in unknown {
            let process = Path::new("/proc").join(key.0.to_string());
            match has_library(&process) {
                Some(false) if !self.suspects.contains(&key) => {
                    suspects.insert(key);
                    continue;
                }
                Some(false) => self.note(key.0 as u32, &process),
                // Another user's process, or one that is ending, says nothing.
                Some(true) | None => {}
            }
            self.known.insert(key);
        }
        self.suspects = suspects;
        PAUSE.max(start.elapsed() * SHARE)
    }

    fn note(&self, id: u32, process: &Path) {
        let execs = Execs::of(self.memory);
        let Ok(program) = std::fs::read_link(process.join("exe")) else { return };
        if !execs.is_noted(id) {
            execs.note(id, [program.as_os_str().as_encoded_bytes(), b""], Reason::NotLoaded);
        }
    }
}

/// Returns whether a process has the preload library. `None` if its memory cannot be read, or if
/// it has none.
fn has_library(process: &Path) -> Option<bool> {
    let maps = std::fs::read(process.join("maps")).ok().filter(|maps| !maps.is_empty())?;
    Some(maps.windows(LIBRARY.len()).any(|part| part == LIBRARY.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_memory::OwnedRunMemory;

    #[test]
    fn process_without_the_library_is_noted_at_the_second_look() {
        let run = OwnedRunMemory::create("granary-run-test").unwrap();
        let execs = Execs::of(run.memory());
        let mut strangers = Strangers::of(run.memory());
        let own = (std::process::id() as i32, 7);
        let mut look = |keys: &[Key]| {
            assert!(strangers.look(|| keys.to_vec()) >= PAUSE);
            execs.without_pool().processes
        };
        assert_eq!([look(&[own]), look(&[own]), look(&[own])], [0, 1, 1]);
        let program = execs.without_pool().programs[0].clone();
        assert_eq!(program, (std::env::current_exe().unwrap(), Reason::NotLoaded));
        // A process that was seen once, or that has no memory to read.
        let later = (own.0, 8);
        execs.withdraw(own.0 as u32);
        assert_eq!([look(&[later]), look(&[]), look(&[later])], [0, 0, 0]);
        assert_eq!([look(&[(1 << 23, 1)]), look(&[(1 << 23, 1)])], [0, 0]);
        // A process that its exec has noted.
        execs.note(own.0 as u32, [b"/bin/", b"other"], Reason::Asked);
        assert_eq!([look(&[(own.0, 9)]), look(&[(own.0, 9)])], [1, 1]);
        assert_eq!(execs.without_pool().programs, [("/bin/other".into(), Reason::Asked)]);
    }
}

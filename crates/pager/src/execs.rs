//! Notes of the processes of a run that call exec, to find those that then run without the pool.
//!
//! A process notes itself, and the program, before it calls exec. The preload library withdraws the
//! note in the new program once the program is paged. So the notes that are left at the end name
//! the processes that the pager does not serve, for whatever reason: the dynamic linker loads no
//! library into a static program, and none by `LD_PRELOAD` into a set-user-ID program. The reaper
//! notes processes that no exec has noted (`strangers`).
//!
//! ```text
//!  u64[0]             ended processes without the pool whose place was used again
//!  u64[1..]           places: process id (low half), `Reason` (high half); 0: free
//!  32 * u64 of each   path of the program, 0 at the end
//! ```
//!
//! A child of `vfork` notes itself too. So the code here does not allocate, and takes no lock.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::run_memory::RunMemory;

/// Processes without the pool at a time.
const PLACES: usize = 1024;
const PATH_WORDS: usize = 32;
const RETIRED: usize = 0;
const FIRST_PLACE: usize = 1;
const FIRST_PATH: usize = FIRST_PLACE + PLACES;
pub(crate) const WORDS: usize = FIRST_PATH + PLACES * PATH_WORDS;

/// Why a process runs without the pool, as far as the process knew the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Reason {
    /// The preload library was not loaded.
    NotLoaded = 0,
    /// The environment has `GRANARY_UNPAGED=1`.
    Asked = 1,
    /// A seccomp filter of the process refuses the pager's system calls.
    Filter = 2,
    /// A tool runs the program, and `--allow-unpaged` was given.
    Tool = 3,
}

impl Reason {
    fn from_number(number: u32) -> Self {
        [Self::Asked, Self::Filter, Self::Tool]
            .into_iter()
            .find(|reason| *reason as u32 == number)
            .unwrap_or(Self::NotLoaded)
    }
}

/// The processes of a run without the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WithoutPool {
    /// Number of the processes.
    pub processes: u64,
    /// Their programs, each once, as far as they are known.
    pub programs: Vec<(PathBuf, Reason)>,
}

/// The notes of a run.
#[derive(Clone, Copy, Debug)]
pub struct Execs {
    words: &'static [AtomicU64],
}

impl Execs {
    /// Returns the notes in the memory of a run.
    pub fn of(memory: RunMemory) -> Self {
        Self { words: memory.execs() }
    }

    fn place(&self, index: usize) -> &'static AtomicU64 {
        &self.words[FIRST_PLACE + index]
    }

    fn path(&self, index: usize) -> &'static [AtomicU64] {
        &self.words[FIRST_PATH + index * PATH_WORDS..][..PATH_WORDS]
    }

    fn place_of(&self, process: u32) -> Option<&'static AtomicU64> {
        let is_its = |place: &&AtomicU64| place.load(Ordering::Acquire) as u32 == process;
        self.words[FIRST_PLACE..FIRST_PATH].iter().find(is_its)
    }

    /// Notes that a process executes the program with this path, which is in parts.
    pub fn note(&self, process: u32, path: [&[u8]; 2], reason: Reason) {
        let note = u64::from(reason as u32) << 32 | u64::from(process);
        // An earlier process with this id has ended without the pool.
        self.retire(|other| other == process, 1);
        let free = || {
            (0..PLACES).find(|&index| {
                let exchange = (Ordering::AcqRel, Ordering::Acquire);
                self.place(index).compare_exchange(0, note, exchange.0, exchange.1).is_ok()
            })
        };
        let index = free().or_else(|| {
            self.retire(has_ended, PLACES);
            free()
        });
        // With a place for each of 1024 living processes, the further ones are not counted.
        let Some(index) = index else { return };
        let mut bytes = path.iter().flat_map(|part| part.iter()).copied();
        for word in self.path(index) {
            let text = std::array::from_fn(|_| bytes.next().unwrap_or(0));
            word.store(u64::from_le_bytes(text), Ordering::Relaxed);
        }
    }

    /// Frees the places of at most `limit` processes that have ended without the pool.
    fn retire(&self, ended: impl Fn(u32) -> bool, limit: usize) {
        let places = self.words[FIRST_PLACE..FIRST_PATH].iter();
        let mut retired = 0;
        for place in places {
            let note = place.load(Ordering::Acquire);
            if retired < limit && note != 0 && ended(note as u32) {
                let freed = place.compare_exchange(note, 0, Ordering::AcqRel, Ordering::Acquire);
                self.words[RETIRED].fetch_add(freed.is_ok().into(), Ordering::Relaxed);
                retired += 1;
            }
        }
    }

    /// Withdraws the note of a process, whose call failed or whose program is paged.
    pub fn withdraw(&self, process: u32) {
        if let Some(place) = self.place_of(process) {
            place.store(0, Ordering::Release);
        }
    }

    /// Returns true if a process has a note.
    pub(crate) fn is_noted(&self, process: u32) -> bool {
        self.place_of(process).is_some()
    }

    /// Sets the reason in the note of a process.
    pub fn explain(&self, process: u32, reason: Reason) {
        if let Some(place) = self.place_of(process) {
            place.store(u64::from(reason as u32) << 32 | u64::from(process), Ordering::Release);
        }
    }

    /// Returns the processes that run without the pool, or have.
    pub fn without_pool(&self) -> WithoutPool {
        let mut found = WithoutPool {
            processes: self.words[RETIRED].load(Ordering::Relaxed),
            programs: vec![],
        };
        for index in 0..PLACES {
            let note = self.place(index).load(Ordering::Acquire);
            if note == 0 {
                continue;
            }
            found.processes = found.processes.saturating_add(1);
            let words = self.path(index).iter().map(|word| word.load(Ordering::Relaxed));
            let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            let path = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
            let program =
                (OsStr::from_bytes(path).into(), Reason::from_number((note >> 32) as u32));
            if !found.programs.contains(&program) {
                found.programs.push(program);
            }
        }
        found
    }
}

fn has_ended(process: u32) -> bool {
    let arguments = [process as usize, 0, 0, 0, 0, 0];
    // SAFETY: signal 0 only asks whether the process exists.
    let asked = unsafe { crate::sys::system_call(libc::SYS_kill, arguments) };
    asked == Err(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_memory::OwnedRunMemory;

    #[test]
    fn notes_that_are_not_withdrawn_are_counted() {
        let run = OwnedRunMemory::create("granary-run-test").unwrap();
        let execs = Execs::of(run.memory());
        let note = |process, path: &str| {
            execs.note(process, [b"/bin/", path.as_bytes()], Reason::NotLoaded);
        };
        assert_eq!(execs.without_pool(), WithoutPool::default());
        note(1, "paged");
        execs.withdraw(1);
        note(2, "static");
        note(3, "static");
        note(4, &"long".repeat(100));
        execs.explain(4, Reason::Filter);
        let found = execs.without_pool();
        assert_eq!(found.processes, 3);
        assert_eq!(found.programs[0], ("/bin/static".into(), Reason::NotLoaded));
        let (path, reason) = &found.programs[1];
        assert_eq!((path.as_os_str().len(), *reason), (PATH_WORDS * 8, Reason::Filter));
        // The id of an ended process is used again.
        note(2, "paged");
        execs.withdraw(2);
        assert_eq!(execs.without_pool().processes, 3);
    }

    #[test]
    fn places_of_ended_processes_are_used_again() {
        let run = OwnedRunMemory::create("granary-run-test").unwrap();
        let execs = Execs::of(run.memory());
        // Ids above the greatest one of the kernel.
        for process in 0..PLACES as u32 + 10 {
            execs.note(process + (1 << 23), [b"/bin/", b"static"], Reason::NotLoaded);
        }
        let found = execs.without_pool();
        assert_eq!(found.processes, PLACES as u64 + 10);
        assert_eq!(found.programs.len(), 1);
        // Each place belongs to a living process.
        let own = std::process::id();
        for index in 0..PLACES {
            execs.place(index).store(own.into(), Ordering::Release);
        }
        let before = execs.without_pool().processes;
        execs.note(own + 1, [b"", b"other"], Reason::NotLoaded);
        assert_eq!(execs.without_pool().processes, before);
    }
}

//! The memory that the processes of a run share: the ledger, and the counters of each process.
//!
//! `granary run` makes a memfd, whose size is sealed, and passes it to its program as an open
//! descriptor. The program's processes inherit the descriptor, also after they have changed their
//! user, and the preload library hides it from them ([`crate::descriptor`]). A process of the same
//! user that has lost the descriptor opens `/proc/PID/fd/N` of `granary run`. No name in the file
//! system leads to the memory, so no other user can open, cut or replace it.
//!
//! ```text
//!  ledger                  crate::ledger
//!  u64[0]  number of slots that were ever used
//!  u64[1]  slot at which the next search for an ended process begins
//!  u64[2]  number of ended processes whose counters slot 0 has
//!  u64[3]  of them, id of the process with the most unpaged memory
//!  u64[8..]                owner of each slot
//!  page    length of the program's text, and the text
//!  slots, two pages each   counters (crate::stats); slot 0: sums of ended processes
//!  notes                   crate::execs
//! ```
//!
//! A process claims a slot by compare-and-swap. When all slots were used, it takes the slot of an
//! ended process, and adds that process's counters to slot 0.
//!
//! # Trust
//! The processes of the run may write anything. Only atomics access the memory, the length is
//! sealed, and no value is an index before it is checked.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::descriptor;
use crate::execs;
use crate::ledger::{self, Owner};
use crate::sys::{self, PAGE_BYTES};

/// First part of the file's name as the kernel shows it.
const LINK: &str = "/memfd:granary-run-";
/// Slots for counters: one for ended processes, and one for each living process.
pub(crate) const SLOTS: usize = 4096;
/// Bytes of a slot.
const SLOT_BYTES: usize = 2 * PAGE_BYTES;
const SLOT_WORDS: usize = SLOT_BYTES / 8;
/// Words of the ledger's part.
const LEDGER_WORDS: usize = (ledger::WORDS * 8).next_multiple_of(PAGE_BYTES) / 8;
const USED: usize = LEDGER_WORDS;
const CURSOR: usize = USED + 1;
const ENDED: usize = USED + 2;
const LARGEST: usize = USED + 3;
const OWNERS: usize = USED + 8;
const PROGRAM: usize = ((OWNERS + SLOTS) * 8).next_multiple_of(PAGE_BYTES) / 8;
/// Maximum bytes of the program's text.
const PROGRAM_BYTES: usize = PAGE_BYTES - 8;
const FIRST_SLOT: usize = PROGRAM + PAGE_BYTES / 8;
const EXECS: usize = FIRST_SLOT + SLOTS * SLOT_WORDS;
const BYTES: usize = ((EXECS + execs::WORDS) * 8).next_multiple_of(PAGE_BYTES);
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// The memory of the run that this process belongs to.
static MAPPED: OnceLock<RunMemory> = OnceLock::new();

/// The mapped memory of a run. The mapping is never unmapped.
#[derive(Clone, Copy, Debug)]
pub struct RunMemory {
    words: &'static [AtomicU64],
}

/// The `granary run` of this process's run.
static COMMAND: OnceLock<Option<Command>> = OnceLock::new();

/// A `granary run`, and the namespace in which its id is valid.
#[derive(Debug, PartialEq, Eq)]
struct Command {
    process: Owner,
    namespace: PathBuf,
}

impl Command {
    /// The command whose `/proc/PID/fd/N` a path is.
    fn of(path: &Path) -> Option<Self> {
        let pid = path.strip_prefix("/proc").ok()?.components().next()?;
        let pid = pid.as_os_str().to_str()?.parse().ok()?;
        Some(Self { process: Owner::of(pid).ok()?, namespace: Self::own_namespace()? })
    }

    fn own_namespace() -> Option<PathBuf> {
        std::fs::read_link("/proc/self/ns/pid").ok()
    }

    /// Returns true if the command has ended for sure.
    fn has_ended(&self) -> bool {
        Self::own_namespace().as_ref() == Some(&self.namespace) && self.process.is_ending()
    }
}

/// Returns the process id of this process's `granary run` if it has ended.
pub(crate) fn ended_command() -> Option<u32> {
    let command = COMMAND.get()?.as_ref()?;
    command.has_ended().then(|| command.process.pid())
}

/// The memory of a run in its `granary run`, which keeps the descriptor.
#[derive(Debug)]
pub struct OwnedRunMemory {
    memory: RunMemory,
    file: OwnedFd,
}

impl OwnedRunMemory {
    /// Creates the memory of a run, named as the run's directory. Programs that this process
    /// starts inherit its descriptor.
    ///
    /// # Errors
    /// Memory or descriptors have run out.
    pub fn create(name: &str) -> io::Result<Self> {
        let name = std::ffi::CString::new(name)?;
        // SAFETY: the name is a C string; this function owns the returned descriptors. The last
        // calls change the new file only.
        let file = unsafe {
            let made =
                libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            if made < 0 {
                return Err(io::Error::last_os_error());
            }
            let made = OwnedFd::from_raw_fd(made);
            // Above the descriptors that programs use, and not close-on-exec.
            let file = libc::fcntl(made.as_raw_fd(), libc::F_DUPFD, descriptor::lowest());
            if file < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(file)
        };
        // SAFETY: changes the new file only.
        let done = unsafe {
            // A program may later run as any user, and opens the file by /proc then.
            libc::fchmod(file.as_raw_fd(), 0o600) == 0
                && libc::ftruncate(file.as_raw_fd(), BYTES as i64) == 0
                && libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) == 0
        };
        if !done {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { memory: RunMemory::map(file.as_raw_fd())?, file })
    }

    /// Returns the mapped memory.
    pub fn memory(&self) -> RunMemory {
        self.memory
    }

    /// Returns the path of the descriptor, for the environment of the program.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
    }
}

impl RunMemory {
    /// Maps the memory of the run that this process belongs to, once: by the inherited descriptor,
    /// whose number `path` ends with, or else by `path`. Forked children inherit the mapping.
    ///
    /// # Errors
    /// The descriptor was closed, and `path` belongs to another user or to a run that has ended.
    pub fn of_this_process(path: &Path) -> io::Result<Self> {
        if let Some(memory) = MAPPED.get() {
            return Ok(*memory);
        }
        let name = path.file_name().and_then(|name| name.to_str());
        let inherited: Option<RawFd> = name.and_then(|name| name.parse().ok());
        let memory = match inherited.filter(|&fd| check(fd).is_ok()) {
            Some(fd) => {
                let memory = Self::map(fd)?;
                descriptor::note_inherited(fd);
                memory
            }
            None => Self::open(path)?,
        };
        let _ = COMMAND.set(Command::of(path));
        Ok(*MAPPED.get_or_init(|| memory))
    }

    /// Returns the memory that [`RunMemory::of_this_process`] has mapped.
    pub fn current() -> Option<Self> {
        MAPPED.get().copied()
    }

    /// Maps the memory of a run by `/proc/PID/fd/N`.
    ///
    /// # Errors
    /// The path leads to another file, or to a process of another user.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = open_memfd(path, LINK)?;
        check(file.as_raw_fd())?;
        Self::map(file.as_raw_fd())
    }

    /// Finds and maps the memory of the run whose `granary run` has this directory in `/proc`. The
    /// memory's name begins with `name`: a run within a run has inherited the memory of the outer
    /// one.
    ///
    /// # Errors
    /// The process belongs to another user, or has no such memory ([`io::ErrorKind::NotFound`]).
    pub fn of_run(process: &Path, name: &str) -> io::Result<Self> {
        let link = format!("/memfd:{name}");
        for entry in std::fs::read_dir(process.join("fd"))?.flatten() {
            let path = entry.path();
            if has_name(&path, &link) {
                return Self::open(&path);
            }
        }
        Err(io::Error::new(io::ErrorKind::NotFound, "the process has no memory of a run"))
    }

    fn map(fd: RawFd) -> io::Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: no MAP_FIXED, so no existing mapping is touched.
        let base = unsafe { sys::mmap(0, BYTES, prot, libc::MAP_SHARED, fd, 0)? };
        // SAFETY: the seals keep the length; the mapping is never unmapped, and only atomics access
        // it.
        let words = unsafe { std::slice::from_raw_parts(base as *const AtomicU64, BYTES / 8) };
        Ok(Self { words })
    }

    /// Sets the text of the program, cut to its maximum. Only `granary run` calls this.
    pub(crate) fn set_program(&self, text: &str) {
        let text = &text.as_bytes()[..text.len().min(PROGRAM_BYTES)];
        let words = self.words[PROGRAM + 1..FIRST_SLOT].iter();
        for (word, bytes) in words.zip(text.chunks(8)) {
            let mut value = [0; 8];
            value[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(value), Ordering::Relaxed);
        }
        self.words[PROGRAM].store(text.len() as u64, Ordering::Release);
    }

    /// Returns the text of the program, without control characters: a terminal may show it.
    pub fn program(&self) -> String {
        let length = self.words[PROGRAM].load(Ordering::Acquire);
        let length = usize::try_from(length).unwrap_or(usize::MAX).min(PROGRAM_BYTES);
        let words = self.words[PROGRAM + 1..FIRST_SLOT].iter();
        let bytes: Vec<u8> = words
            .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes())
            .take(length)
            .collect();
        let shown = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
        String::from_utf8_lossy(&bytes).chars().map(shown).collect()
    }

    /// Returns the ledger's part.
    pub(crate) fn ledger(&self) -> &'static [AtomicU64] {
        &self.words[..ledger::WORDS]
    }

    /// Returns the notes of processes that call exec.
    pub(crate) fn execs(&self) -> &'static [AtomicU64] {
        &self.words[EXECS..][..execs::WORDS]
    }

    /// Returns the words of a slot.
    pub(crate) fn slot(&self, index: usize) -> &'static [AtomicU64] {
        &self.words[FIRST_SLOT + index * SLOT_WORDS..][..SLOT_WORDS]
    }

    fn used(&self) -> usize {
        (self.words[USED].load(Ordering::Acquire) as usize).min(SLOTS - 1)
    }

    fn owner(&self, index: usize) -> &AtomicU64 {
        &self.words[OWNERS + index]
    }

    /// Number of ended processes whose counters are in slot 0, and the one with the most unpaged
    /// memory.
    pub(crate) fn ended(&self) -> (&AtomicU64, &AtomicU64) {
        (&self.words[ENDED], &self.words[LARGEST])
    }

    /// Returns the slots of processes, with the ids of the processes.
    pub(crate) fn processes(&self) -> impl Iterator<Item = (u32, &'static [AtomicU64])> + '_ {
        (1..=self.used()).filter_map(|index| {
            let owner = Owner::from_word(self.owner(index).load(Ordering::Acquire))?;
            Some((owner.pid(), self.slot(index)))
        })
    }

    /// Claims a slot: the one that the process had before it called exec, or a new one, or that of
    /// an ended process, whose words are first passed to `retire`. `None` if each slot belongs to a
    /// living process.
    pub(crate) fn claim(
        &self,
        owner: Owner,
        is_alive: impl Fn(Owner) -> bool,
        retire: impl Fn(u32, &[AtomicU64]),
    ) -> Option<&'static [AtomicU64]> {
        let used = self.used();
        let index = (1..=used)
            .find(|&index| self.owner(index).load(Ordering::Acquire) == owner.word())
            .or_else(|| (used + 1..SLOTS).find(|&index| self.replace(index, 0, owner.word())))
            .or_else(|| self.claim_of_ended(owner, is_alive, retire))?;
        self.words[USED].fetch_max(index as u64, Ordering::AcqRel);
        let slot = self.slot(index);
        slot.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        Some(slot)
    }

    fn claim_of_ended(
        &self,
        owner: Owner,
        is_alive: impl Fn(Owner) -> bool,
        retire: impl Fn(u32, &[AtomicU64]),
    ) -> Option<usize> {
        (1..SLOTS).find_map(|_| {
            let turn = self.words[CURSOR].fetch_add(1, Ordering::Relaxed);
            let index = (turn % (SLOTS as u64 - 1)) as usize + 1;
            let word = self.owner(index).load(Ordering::Acquire);
            let before = Owner::from_word(word);
            if before.is_some_and(&is_alive) || !self.replace(index, word, owner.word()) {
                return None;
            }
            if let Some(before) = before {
                retire(before.pid(), self.slot(index));
            }
            Some(index)
        })
    }

    fn replace(&self, index: usize, before: u64, after: u64) -> bool {
        let word = self.owner(index);
        word.compare_exchange(before, after, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// Opens a memfd of another process by `/proc/PID/fd/N`, whose name begins with `link` as the
/// kernel shows it.
pub(crate) fn open_memfd(path: &Path, link: &str) -> io::Result<File> {
    // The file is looked at before it is opened: opening a FIFO or a device has effects.
    let found = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path)?;
    let found_path = format!("/proc/self/fd/{}", found.as_raw_fd());
    if !has_name(&found_path, link) {
        return Err(other());
    }
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true);
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(found_path)
}

fn has_name(path: impl AsRef<Path>, start: &str) -> bool {
    std::fs::read_link(path)
        .is_ok_and(|link| link.as_os_str().as_encoded_bytes().starts_with(start.as_bytes()))
}

fn other() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it is not the memory of a run of this version")
}

/// Checks that a descriptor leads to a sealed memfd of the right length.
fn check(fd: RawFd) -> io::Result<()> {
    // SAFETY: a query, which fails on a number that is not open.
    let seals = unsafe { libc::fcntl(fd, libc::F_GET_SEALS) };
    if seals < 0 || seals & SEALS != SEALS {
        return Err(other());
    }
    // SAFETY: open, as the query has shown; the value does not close it.
    let file = std::mem::ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    // Memory of huge pages can be short at an access; its length is a multiple of theirs.
    if file.metadata()?.size() == BYTES as u64 { Ok(()) } else { Err(other()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(pid: usize) -> Owner {
        Owner::new(pid as u32, 7)
    }

    #[test]
    fn memory_is_sealed_and_other_files_are_refused() {
        let run = OwnedRunMemory::create("granary-run-test").unwrap();
        let file = OpenOptions::new().write(true).open(run.path()).unwrap();
        assert!(file.set_len(0).is_err() && file.set_len(1 << 30).is_err());
        let again = RunMemory::open(&run.path()).unwrap();
        again.words[USED].store(3, Ordering::Release);
        assert_eq!(run.memory().used(), 3, "both map the same memory");
        for path in ["/dev/null", "/dev/zero", "/proc/self/exe", "/no/such/file"] {
            assert!(RunMemory::open(Path::new(path)).is_err(), "{path}");
        }
    }

    #[test]
    fn text_of_the_program_is_cut_and_has_no_control_characters() {
        let run = OwnedRunMemory::create("granary-run-test").unwrap();
        let memory = run.memory();
        assert_eq!(memory.program(), "");
        memory.set_program("sort -S 1G \x1b[2J\n");
        assert_eq!(memory.program(), "sort -S 1G \u{fffd}[2J\u{fffd}");
        memory.set_program(&"ä".repeat(PROGRAM_BYTES));
        assert_eq!(memory.program(), "ä".repeat(PROGRAM_BYTES / 2));
        memory.set_program("ls");
        assert_eq!(memory.program(), "ls");
        // A value of a hostile process.
        memory.words[PROGRAM].store(u64::MAX, Ordering::Release);
        assert!(memory.program().len() <= 3 * PROGRAM_BYTES);
    }

    #[test]
    fn slots_of_ended_processes_are_used_again() {
        let run = OwnedRunMemory::create("granary-run-test").unwrap();
        let memory = run.memory();
        let retired = std::cell::RefCell::new(Vec::new());
        let claim = |pid, alive: bool| {
            let slot = memory.claim(owner(pid), |_| alive, |pid, _| retired.borrow_mut().push(pid));
            slot.map(|slot| slot.as_ptr())
        };
        let first = claim(1, true).unwrap();
        for pid in 2..SLOTS {
            assert!(claim(pid, true).is_some_and(|slot| slot != first));
        }
        assert_eq!(claim(1, true), Some(first), "after exec the process has the same slot");
        assert_eq!(claim(SLOTS, true), None, "each slot belongs to a living process");
        assert!(claim(SLOTS, false).is_some());
        assert_eq!(retired.borrow().len(), 1);
        // Values of a hostile process.
        for damaged in [u64::MAX, 1 << 63, 0] {
            memory.words[USED].store(damaged, Ordering::Release);
            memory.words[CURSOR].store(damaged, Ordering::Release);
            assert!(memory.processes().count() < SLOTS);
            assert!(claim(9999, false).is_some());
        }
    }
}

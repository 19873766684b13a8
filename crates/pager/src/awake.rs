//! A thread that keeps the second core of a machine with two cores from going idle while faults are
//! frequent.
//!
//! The handler serves a fault on the core of the faulting thread, and still runs there when it
//! wakes the thread. The kernel therefore starts the thread on the other core if that core is idle.
//! The thread then waits until that core has left its sleep state, which takes 20 to 40 us in a
//! virtual machine, and the next fault begins on the core that the handler is not on. Therefore
//! this thread polls there, at the lowest priority. A NIC thread polls there too, but sleeps
//! between requests: the programs of `granary quickstart`, which page by the NIC, took 20 and 71 s
//! without this thread, and 13 and 29 s with it.
//!
//! The thread belongs to `granary run` and not to the paged process. A thread of the paged process
//! would use the process's page tables on the other core, and each page that the handler moves
//! would interrupt that core to keep its TLB consistent. Sorting 12 MB with 16 MiB local takes
//! 2.6 s with such a thread, 1.1 s with this one, and 0.9 s on a single core.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::sys::{self, PAGE_BYTES};

/// Time without a fault after which the thread sleeps. Also the greatest interval between two
/// faults that wakes it. Longer than the computation between two phases of many faults: with
/// 0.2 ms, the sort above takes 2.8 s.
const AWAKE_NS: u64 = 5_000_000;
/// Polls between two looks at the handler's core.
const POLLS: u32 = 64;
const NAME: &str = "granary-awake";

/// Times of faults, shared by the processes of a run. A process may write any value: the thread
/// then only polls or sleeps at the wrong time.
#[repr(C)]
struct Times {
    /// Time of the last fault.
    last_fault_ns: AtomicU64,
    /// Futex: 1 while the thread sleeps.
    sleeps: AtomicU32,
    /// Core of the handler that has moved last, plus 1.
    handler_core: AtomicU32,
}

/// The shared page of [`Times`].
#[derive(Debug)]
pub(crate) struct FaultTimes {
    page: NonNull<Times>,
}

// SAFETY: the page consists of atomics.
unsafe impl Send for FaultTimes {}
// SAFETY: as above.
unsafe impl Sync for FaultTimes {}

impl FaultTimes {
    /// Maps the page of a run. Fails if `path` is not such a page: the program may be in another
    /// namespace, where the path names another file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = crate::run_memory::open_memfd(path, &format!("/memfd:{NAME}"))?;
        // SAFETY: a query.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 || file.metadata()?.len() < PAGE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Self::map(file.as_raw_fd())
    }

    fn map(fd: i32) -> io::Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: no MAP_FIXED, so no existing mapping is touched. Seals keep the file's length.
        let base = unsafe { sys::mmap(0, PAGE_BYTES, prot, libc::MAP_SHARED, fd, 0)? };
        let page = NonNull::new(base as *mut Times).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { page })
    }

    fn times(&self) -> &Times {
        // SAFETY: a page that stays mapped as long as the process lives. All fields are atomics.
        unsafe { self.page.as_ref() }
    }

    /// Records a fault, and wakes the thread if faults are frequent.
    pub fn note_fault(&self, now_ns: u64) {
        let times = self.times();
        let last = times.last_fault_ns.load(Ordering::Relaxed);
        times.last_fault_ns.store(now_ns, Ordering::Relaxed);
        if times.sleeps.load(Ordering::Relaxed) == 1 && now_ns.wrapping_sub(last) < AWAKE_NS {
            times.sleeps.store(0, Ordering::Release);
            sys::futex_wake_shared(&times.sleeps);
        }
    }

    /// Records the core of a handler that has moved: the thread polls on another core.
    pub fn note_core(&self, core: usize) {
        self.times().handler_core.store(core as u32 + 1, Ordering::Relaxed);
    }

    /// True if the last fault is so recent that the next one may follow at once.
    fn is_busy(&self) -> bool {
        let last = self.times().last_fault_ns.load(Ordering::Relaxed);
        sys::now_ns().checked_sub(last).is_some_and(|since| since < AWAKE_NS)
    }
}

const PAGE: u64 = PAGE_BYTES as u64;

/// The thread, in the process of `granary run`. It ends with the process.
#[derive(Debug)]
pub(crate) struct AwakeThread {
    file: OwnedFd,
}

impl AwakeThread {
    /// Starts the thread if this machine has two cores.
    pub fn start() -> io::Result<Option<Self>> {
        if units::cpus::cores() != 2 {
            return Ok(None);
        }
        let file = create_page()?;
        let times = FaultTimes::map(file.as_raw_fd())?;
        std::thread::Builder::new().name(NAME.into()).spawn(move || run(&times))?;
        Ok(Some(Self { file }))
    }

    /// Returns the path by which processes of the run open the page.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
    }
}

fn create_page() -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a new descriptor, owned from here on.
    let file = unsafe {
        let fd = libc::memfd_create(c"granary-awake".as_ptr(), flags);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: changes the new file only.
    let done = unsafe {
        libc::ftruncate(file.as_raw_fd(), PAGE as i64) == 0
            && libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) == 0
    };
    if done { Ok(file) } else { Err(io::Error::last_os_error()) }
}

/// Polls while faults are frequent, and sleeps otherwise. Never returns.
fn run(times: &FaultTimes) {
    units::scheduling::last_in_line();
    let sleeps = &times.times().sleeps;
    let mut bound = 0;
    loop {
        while times.is_busy() {
            let core = times.times().handler_core.load(Ordering::Relaxed);
            if core != bound {
                bound = core;
                keep_away_from(core);
            }
            (0..POLLS).for_each(|_| std::hint::spin_loop());
        }
        sleeps.store(1, Ordering::Release);
        while sleeps.load(Ordering::Acquire) == 1 {
            sys::futex_wait_shared(sleeps, 1, None);
        }
    }
}

/// Binds the calling thread to the cores of the process except `core` - 1. An error is ignored:
/// faults are only slower then.
fn keep_away_from(core: u32) {
    let Some(core) = core.checked_sub(1).filter(|core| *core < libc::CPU_SETSIZE as u32) else {
        return;
    };
    // SAFETY: a zero set is valid; the calls read and write the set only.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(libc::getpid(), size_of_val(&set), &mut set) == 0 {
            libc::CPU_CLR(core as usize, &mut set);
            libc::sched_setaffinity(0, size_of_val(&set), &set);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_faults_wake_the_thread_and_rare_ones_do_not() {
        let file = create_page().unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let times = FaultTimes::open(Path::new(&path)).unwrap();
        let sleeps = &times.times().sleeps;
        sleeps.store(1, Ordering::Release);
        let now = sys::now_ns();
        times.note_fault(now - AWAKE_NS);
        times.note_fault(now);
        assert_eq!(sleeps.load(Ordering::Acquire), 1, "the interval is too long");
        times.note_fault(now + AWAKE_NS - 1);
        assert_eq!(sleeps.load(Ordering::Acquire), 0);
        times.note_fault(now + 1_000_000_000_000);
        assert!(!times.is_busy(), "a time in the future must not keep the thread polling");
    }

    #[test]
    fn other_files_are_refused() {
        for path in ["/dev/null", "/proc/self/exe", "/no/such/file"] {
            assert!(FaultTimes::open(Path::new(path)).is_err(), "{path}");
        }
    }
}

//! Scheduling of a thread for which other threads wait: a NIC thread, or a handler of page faults.
//!
//! Such a thread runs for microseconds at a time. Beside CPU-bound threads an ordinary thread may
//! wait for a turn of several milliseconds each time. The thread therefore asks for these, in this
//! order:
//!
//! | | effect | needs |
//! | --- | --- | --- |
//! | `SCHED_RR` at the lowest priority | runs before all ordinary threads | root, CAP_SYS_NICE or `RLIMIT_RTPRIO` |
//! | a time slice of 0.1 ms | the scheduler (EEVDF) prefers it when it wakes | Linux 6.12 |
//! | nice -10 | nine times the share of an ordinary thread | root, CAP_SYS_NICE or `RLIMIT_NICE` |
//!
//! A real-time thread must not starve the machine: it sleeps when it has nothing to do, and steps
//! down to an ordinary thread when it has run for long ([`Scheduling::step_down`]).

use std::fmt;
use std::io;

use rustix::process::{Resource, getrlimit};

/// Policies of the kernel (`sched(7)`).
const SCHED_OTHER: u32 = 0;
const SCHED_RR: u32 = 2;
/// Lowest real-time priority.
const RR_PRIORITY: u32 = 1;
/// Children of the thread are ordinary.
const RESET_ON_FORK: u64 = 1;
/// Time slice in ns: the shortest that the kernel accepts.
const SLICE_NS: u64 = 100_000;
const NICE: i32 = -10;
const NICE_MAX: i32 = 19;

/// The scheduling class that a thread has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Class {
    /// As the process was started.
    #[default]
    Ordinary,
    /// Ordinary, with a lower nice value.
    Nice,
    /// Ordinary, with a short time slice; perhaps with a lower nice value, too.
    ShortSlice,
    /// `SCHED_RR`.
    RealTime,
}

/// Scheduling of one thread. Belongs to that thread: all methods change the calling thread.
#[derive(Clone, Debug, Default)]
pub struct Scheduling {
    granted: Granted,
    stepped_down: bool,
}

/// The scheduling that the system granted to a thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Granted {
    /// The class.
    pub class: Class,
    /// The reason why the class is not a better one.
    pub refused: Option<String>,
}

impl fmt::Display for Granted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.class {
            Class::Ordinary => "ordinary",
            Class::Nice => "nice -10",
            Class::ShortSlice => "time slice of 0.1 ms",
            Class::RealTime => "SCHED_RR",
        })?;
        self.refused.as_ref().map_or(Ok(()), |why| write!(f, " ({why})"))
    }
}

impl Scheduling {
    /// Asks for the best class that the system grants to the calling thread.
    ///
    /// A thread that was started with another policy than `SCHED_OTHER`, or with a raised nice
    /// value, keeps it: that is the wish of whoever started the process.
    pub fn ask() -> Self {
        let Ok(now) = get() else {
            return Self::of(Class::Ordinary, Some("the system does not say the policy".into()));
        };
        if now.policy != SCHED_OTHER || now.nice > 0 {
            let why = "started with a policy or nice value of its own, which it keeps";
            return Self::of(Class::Ordinary, Some(why.into()));
        }
        match real_time() {
            Ok(()) => Self::of(Class::RealTime, None),
            Err(why) => Self::of(ordinary_class(), Some(why)),
        }
    }

    fn of(class: Class, refused: Option<String>) -> Self {
        Self { granted: Granted { class, refused }, stepped_down: false }
    }

    /// Returns the class that the system granted.
    pub fn granted(&self) -> &Granted {
        &self.granted
    }

    /// True if ordinary threads do not run on this core while the calling thread runs.
    pub fn is_real_time(&self) -> bool {
        self.granted.class == Class::RealTime && !self.stepped_down
    }

    /// Makes a real-time thread ordinary, because it has run for long.
    #[cold]
    pub fn step_down(&mut self) {
        if self.is_real_time() {
            self.stepped_down = true;
            ordinary_class();
        }
    }

    /// Makes a thread that has stepped down real-time again.
    #[inline]
    pub fn step_up(&mut self) {
        if self.stepped_down {
            self.stepped_down = real_time().is_err();
        }
    }
}

/// Makes the calling thread the last in line for a core, with the highest nice value.
///
/// The slices are as short as the kernel allows (Linux 6.12), because the kernel lets a thread with
/// a short slice run sooner. On a busy machine the thread needs a turn even in order to end, and
/// the end of its process waits for it.
pub fn last_in_line() {
    let wanted = |runtime| Attributes { runtime, nice: NICE_MAX, ..Attributes::default() };
    // Kernels that know no slices may refuse one.
    if set(wanted(SLICE_NS)).is_err() {
        // The thread is then an ordinary one.
        let _ = set(wanted(0));
    }
}

/// Makes the calling thread real-time.
fn real_time() -> Result<(), String> {
    // The kernel ends a process with a real-time thread that runs longer than this limit.
    if getrlimit(Resource::Rttime).current.is_some() {
        return Err("no SCHED_RR, because RLIMIT_RTTIME is set".into());
    }
    let attributes = Attributes {
        policy: SCHED_RR,
        priority: RR_PRIORITY,
        flags: RESET_ON_FORK,
        ..Attributes::default()
    };
    set(attributes).map_err(|error| match error.raw_os_error() {
        Some(EPERM) => "SCHED_RR is not permitted: allow it with ulimit -r 1".into(),
        _ => format!("SCHED_RR is refused: {error}"),
    })
}

const EPERM: i32 = rustix::io::Errno::PERM.raw_os_error();

/// Makes the calling thread ordinary, with a short slice and a low nice value where the system
/// allows them.
fn ordinary_class() -> Class {
    // Kernels before 6.12 accept and ignore the slice.
    let slice = |nice| {
        let wanted = Attributes { runtime: SLICE_NS, nice, ..Attributes::default() };
        set(wanted).is_ok()
    };
    let is_nice = slice(NICE);
    if !is_nice && !slice(0) {
        return Class::Ordinary;
    }
    match get() {
        Ok(now) if now.policy == SCHED_OTHER && now.runtime == SLICE_NS => Class::ShortSlice,
        _ if is_nice => Class::Nice,
        _ => Class::Ordinary,
    }
}

/// `struct sched_attr` of the kernel, in its first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const ATTRIBUTES_BYTES: u32 = size_of::<Attributes>() as u32;

fn set(attributes: Attributes) -> io::Result<()> {
    let attributes = Attributes { size: ATTRIBUTES_BYTES, ..attributes };
    // SAFETY: the kernel reads `size` bytes of a live structure; changes the calling thread only.
    let done = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn get() -> io::Result<Attributes> {
    let mut attributes = Attributes::default();
    // SAFETY: the kernel writes at most the given number of bytes, the size of the structure.
    let done = unsafe {
        let at = &raw mut attributes;
        libc::syscall(libc::SYS_sched_getattr, 0, at, ATTRIBUTES_BYTES, 0)
    };
    if done == 0 { Ok(attributes) } else { Err(io::Error::last_os_error()) }
}

/// Tells whether threads wait for a CPU of this machine.
///
/// Reads the number of runnable threads from `/proc/loadavg`, which takes about 0.5 us. The number
/// is that of the whole machine, so a wait for one CPU while another one is idle is not seen.
pub struct RunQueue {
    file: Option<std::fs::File>,
    cpus: u64,
}

impl RunQueue {
    /// Opens the file; without it the answer is always `None`.
    pub fn open() -> Self {
        let file = std::fs::File::open("/proc/loadavg").ok();
        // SAFETY: takes no pointer.
        let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
        Self { file, cpus: cpus.max(1) as u64 }
    }

    /// Whether more threads are runnable than there are CPUs; `None` if the system does not say.
    pub fn is_long(&self) -> Option<bool> {
        use std::os::unix::fs::FileExt;
        let mut line = [0; 64];
        let length = self.file.as_ref()?.read_at(&mut line, 0).ok()?;
        Some(runnable(&line[..length])? > self.cpus)
    }
}

/// The number of runnable threads in a line of `/proc/loadavg`: `0.20 0.18 0.12 1/80 11206`.
fn runnable(line: &[u8]) -> Option<u64> {
    let line = std::str::from_utf8(line).ok()?;
    line.split(' ').nth(3)?.split('/').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `f` in a thread of its own, because it changes the thread's scheduling.
    fn in_thread<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
        std::thread::spawn(f).join().unwrap()
    }

    #[test]
    fn granted_class_is_the_thread_policy() {
        in_thread(|| {
            let scheduling = Scheduling::ask();
            let now = get().unwrap();
            assert_eq!(now.policy == SCHED_RR, scheduling.is_real_time(), "{scheduling:?}");
            assert_eq!(scheduling.granted().refused.is_none(), scheduling.is_real_time());
            if scheduling.granted().class == Class::ShortSlice {
                assert_eq!(now.runtime, SLICE_NS);
            }
        });
    }

    #[test]
    fn real_time_thread_steps_down_and_up() {
        in_thread(|| {
            let mut scheduling = Scheduling::ask();
            let first = get().unwrap().policy;
            let was_real_time = scheduling.is_real_time();
            scheduling.step_down();
            assert!(!scheduling.is_real_time());
            assert_eq!(get().unwrap().policy, SCHED_OTHER);
            scheduling.step_up();
            assert_eq!(scheduling.is_real_time(), was_real_time);
            assert_eq!(get().unwrap().policy, first);
        });
    }

    #[test]
    fn thread_with_a_raised_nice_value_keeps_it() {
        in_thread(|| {
            set(Attributes { nice: 5, ..Attributes::default() }).unwrap();
            let scheduling = Scheduling::ask();
            assert_eq!(scheduling.granted().class, Class::Ordinary);
            let now = get().unwrap();
            assert_eq!((now.policy, now.nice), (SCHED_OTHER, 5));
            assert!(scheduling.granted().to_string().contains("keeps"), "{scheduling:?}");
        });
    }

    #[test]
    fn runnable_threads_are_read_from_loadavg() {
        assert_eq!(runnable(b"0.20 0.18 0.12 3/80 11206\n"), Some(3));
        assert_eq!(runnable(b"0.20 0.18"), None);
        assert_eq!(runnable(b"\xff"), None);
        assert!(RunQueue::open().is_long().is_some(), "/proc is mounted");
        let none = RunQueue { file: None, cpus: 1 };
        assert_eq!(none.is_long(), None);
        let busy = RunQueue { cpus: 0, ..RunQueue::open() };
        assert_eq!(busy.is_long(), Some(true), "at least this thread runs");
    }
}

//! The reaper of a run: a process between `granary run` and the program, which leaves no process of
//! the run behind.
//!
//! ```text
//!   granary run ── granary-reaper ── program ── its processes, granary-keeper
//! ```
//!
//! The reaper is the "child subreaper" (prctl(2)) of all processes that the program starts, however
//! they detach themselves, so it finds each of them below itself in `/proc`. It ends them
//!
//! - when `granary run` ends before the program, by whatever signal;
//! - when the program has ended, if the memory node ends with the command.
//!
//! Processes are first stopped, all of them, and then killed, so that none reports the end of
//! another one as a fault. The kernel kills the program if the reaper is killed.
//!
//! The reaper passes signals of the command on, and ends as the program did. It is in a session of
//! its own, so that a signal to the group of the command leaves it alive. In another group of the
//! same session, it would be the only process that keeps the group of a command without a terminal
//! from being orphaned. At the end of the program, the kernel would then send SIGHUP to the whole
//! group, if any process of it is stopped (POSIX, `_exit`).

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use crate::strangers::{Key, Strangers};
use crate::sys;

/// Limits of the reaper's waits, from `GRANARY_WAIT_S`.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Time that processes have to end by themselves after the program, if they must end with it.
    grace: Duration,
    /// Time that they have then to answer SIGTERM.
    term: Duration,
    /// Time that killed processes have to end. A process in an uninterruptible system call takes
    /// longer.
    kill: Duration,
}

impl Limits {
    fn of(wait_s: u32) -> Self {
        let kill = Duration::from_secs(wait_s.into());
        Self { grace: kill * 2 / 5, term: kill / 5, kill }
    }
}

/// Interval at which the processes of the run are looked for while they end.
const LOOK: Duration = Duration::from_millis(20);

const NAME: &std::ffi::CStr = c"granary-reaper";
const KEEPER: &str = "granary-keeper";

/// Signals that the command ignores, because the terminal sends them to the program too.
const IGNORED: [i32; 2] = [libc::SIGINT, libc::SIGQUIT];
/// Signals that the command passes on.
const PASSED: [i32; 4] = [libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2];

type Dispositions = Vec<(i32, libc::sighandler_t)>;

/// Starts `command` under a reaper and waits for it, forwarding signals. The program answers the
/// signals of a terminal or supervisor: the terminal sends its own signals to the program directly;
/// SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded. With `ends_daemons`, processes that the
/// program leaves behind are ended. `wait_s` limits the reaper's waits. The reaper looks for
/// `strangers` among the processes.
pub(crate) fn run_to_end(
    command: &mut Command,
    ends_daemons: bool,
    wait_s: u32,
    mut strangers: Option<Strangers>,
) -> io::Result<ExitStatus> {
    static REAPER: AtomicI32 = AtomicI32::new(0);
    extern "C" fn pass_on(signal: i32) {
        let reaper = REAPER.load(Ordering::Acquire);
        if reaper > 0 {
            // SAFETY: async-signal-safe; the reaper is not waited for while REAPER names it.
            unsafe { libc::kill(reaper, signal) };
        }
    }
    let program = command.get_program().to_string_lossy().into_owned();
    // SAFETY: a plain system call.
    let parent = unsafe { libc::getpid() };
    let (mut before, arguments) = (Dispositions::new(), argument_bytes());
    // SAFETY: the handler is async-signal-safe. The previous dispositions are restored below and in
    // the child.
    unsafe {
        for signal in IGNORED {
            before.push((signal, libc::signal(signal, libc::SIG_IGN)));
        }
        for signal in PASSED {
            let handler = pass_on as extern "C" fn(i32) as libc::sighandler_t;
            before.push((signal, libc::signal(signal, handler)));
        }
        let restored = before.clone();
        command.pre_exec(move || match split(&restored)? {
            Some(id) => {
                let (program, limits) = (program.clone(), Limits::of(wait_s));
                Reaper { parent, id, program, ends_daemons, limits }
                    .run(arguments, strangers.take())
            }
            None => Ok(()),
        });
    }
    let result = command.spawn().and_then(|mut child| {
        REAPER.store(child.id() as i32, Ordering::Release);
        // Waits without reaping first, so that no signal goes to a process id that has been reused.
        while wait_for(libc::P_PID, child.id(), libc::WEXITED | libc::WNOWAIT)
            .is_err_and(|error| error.kind() == io::ErrorKind::Interrupted)
        {}
        REAPER.store(0, Ordering::Release);
        child.wait()
    });
    for (signal, handler) in before {
        // SAFETY: restores the previous disposition.
        unsafe { libc::signal(signal, handler) };
    }
    result
}

/// In the child of the command: makes the program's process. Returns the program's process id in
/// the reaper, and `None` in the program.
fn split(restored: &Dispositions) -> io::Result<Option<i32>> {
    // SAFETY: plain system calls of this process, which has one thread; the sets are live values.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &all, &mut before);
        // Otherwise the kernel would reap the children of a command that ignores SIGCHLD.
        let child_signal = libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        let reaper = libc::getpid();
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1);
        match libc::fork() {
            -1 => return Err(io::Error::last_os_error()),
            0 => {}
            id => return Ok(Some(id)),
        }
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if libc::getppid() != reaper {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        libc::signal(libc::SIGCHLD, child_signal);
        for &(signal, handler) in restored {
            libc::signal(signal, handler);
        }
        libc::sigprocmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        Ok(None)
    }
}

/// The reaper's process. All its signals are blocked: it takes them synchronously.
struct Reaper {
    /// Process id of the command.
    parent: i32,
    /// Process id of the program, which stays a zombie until the reaper ends.
    id: i32,
    program: String,
    /// Ends the processes that the program leaves behind.
    ends_daemons: bool,
    limits: Limits,
}

impl Reaper {
    /// Runs the reaper until the program has ended. Does not return.
    fn run(&self, arguments: (usize, usize), mut strangers: Option<Strangers>) -> ! {
        // SAFETY: plain system calls of this process, which has one thread. Without the descriptors
        // above 2, the command learns that the program has been started.
        unsafe {
            libc::setsid();
            libc::prctl(libc::PR_SET_NAME, NAME.as_ptr());
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGCHLD);
            libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
            let nothing = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            for standard in 0..2 {
                libc::dup2(nothing, standard);
            }
            rename(arguments);
        }
        let mut next_look = Instant::now();
        while !self.has_ended() {
            self.end_without_parent();
            let pause = strangers.as_mut().map(|strangers| {
                if Instant::now() >= next_look {
                    next_look = Instant::now() + strangers.look(|| self.others());
                }
                next_look.saturating_duration_since(Instant::now())
            });
            if let Some(signal) = self.wait_for_signal(pause) {
                // SAFETY: the program is not reaped yet, so the id is its own.
                unsafe { libc::kill(self.id, signal) };
            }
        }
        if self.ends_daemons {
            self.end_daemons();
        }
        self.end_stopped_keepers();
        end_as(self.id)
    }

    /// Reaps orphans that have ended. Returns true if the program has ended.
    fn has_ended(&self) -> bool {
        loop {
            // The program first: it must stay a zombie, and the kernel may report it again and
            // again in place of others.
            let state = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            if wait_for(libc::P_PID, self.id as u32, state).is_ok_and(|ended| ended != 0) {
                return true;
            }
            match wait_for(libc::P_ALL, 0, state) {
                Ok(0) | Err(_) => return false,
                Ok(id) if id == self.id => return true,
                // SAFETY: an orphan, whose status is not used.
                Ok(id) => unsafe { libc::waitpid(id, std::ptr::null_mut(), 0) },
            };
        }
    }

    /// Waits for a signal: one that the command passes on is returned. `None` after the timeout, at
    /// the end of a child or of the command, and for other signals.
    fn wait_for_signal(&self, timeout: Option<Duration>) -> Option<i32> {
        let time = timeout.map(|time| libc::timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: time.subsec_nanos().into(),
        });
        let time = time.as_ref().map_or(std::ptr::null(), |time| time as *const libc::timespec);
        // SAFETY: zeros are a value of both types; all pointers are to live values or null.
        let (signal, sender) = unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut all);
            let mut info: libc::siginfo_t = std::mem::zeroed();
            (libc::sigtimedwait(&all, &mut info, time), info.si_pid())
        };
        (PASSED.contains(&signal) && sender == self.parent).then_some(signal)
    }

    /// Ends all processes of the run if the command has ended.
    fn end_without_parent(&self) {
        // SAFETY: a plain system call.
        if unsafe { libc::getppid() } == self.parent {
            return;
        }
        let count = self.kill_all();
        sys::say(&format!(
            "granary run (process {}) has ended before {}, so {count} processes of the run were \
             killed",
            self.parent, self.program
        ));
        // SAFETY: ends this process only.
        unsafe { libc::_exit(128 + libc::SIGKILL) }
    }

    /// Ends the processes that have outlived the program, after some time for those that end by
    /// themselves.
    fn end_daemons(&self) {
        if self.wait_for_daemons(self.limits.grace) {
            return;
        }
        let daemons = self.daemons();
        let named = |process: &Process| format!("{} ({})", process.name, process.id);
        let names: Vec<_> = daemons.iter().take(5).map(named).collect();
        let more = if daemons.len() > names.len() { ", ..." } else { "" };
        sys::say(&format!(
            "{} processes of the run have outlived {} by {:?}, and are ended now, because their \
             memory node ends with the command: {}{more}; run daemons with --pool",
            daemons.len(),
            self.program,
            self.limits.grace,
            names.join(", "),
        ));
        for process in &daemons {
            // SAFETY: a process of the run. A reaped one has left its id to another process only if
            // all process ids were given out within the last milliseconds.
            unsafe { libc::kill(process.id, libc::SIGTERM) };
        }
        if !self.wait_for_daemons(self.limits.term) {
            self.kill_all();
        }
    }

    /// Ends keepers that are stopped, if no other process of the run lives that would do so. The
    /// other keepers end by themselves.
    fn end_stopped_keepers(&self) {
        let mut left = descendants(&processes());
        left.retain(|process| process.lives);
        if left.iter().all(|process| process.name == KEEPER) {
            for keeper in left.iter().filter(|keeper| keeper.is_stopped) {
                // SAFETY: a process of the run.
                unsafe { libc::kill(keeper.id, libc::SIGKILL) };
            }
        }
    }

    /// Waits until no process of the run is left. False after `time`, or if the command passes a
    /// signal on.
    fn wait_for_daemons(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        while !self.daemons().is_empty() {
            self.end_without_parent();
            if Instant::now() >= until || self.wait_for_signal(Some(LOOK)).is_some() {
                return false;
            }
        }
        true
    }

    /// Processes of the run that live. A keeper ends when no process needs it.
    fn daemons(&self) -> Vec<Process> {
        let mut found = descendants(&processes());
        found.retain(|process| process.lives && process.name != KEEPER);
        found
    }

    /// Processes of the run that live, but for the program, which the command has checked.
    fn others(&self) -> Vec<Key> {
        let mut found = descendants(&processes());
        found.retain(|process| process.lives && process.id != self.id);
        found.iter().map(|process| (process.id, process.start)).collect()
    }

    /// Kills all processes of the run, and waits until they have ended. Returns their number.
    fn kill_all(&self) -> usize {
        let until = Instant::now() + self.limits.kill;
        let mut killed = std::collections::BTreeSet::new();
        loop {
            let mut left = self.all_stopped();
            left.retain(|process| process.lives);
            if left.is_empty() {
                return killed.len();
            }
            for process in &left {
                // SAFETY: a process of the run.
                unsafe { libc::kill(process.id, libc::SIGKILL) };
                killed.insert(process.id);
            }
            if Instant::now() >= until {
                let ids: Vec<_> = left.iter().map(|process| process.id.to_string()).collect();
                sys::say(&format!(
                    "processes of the run did not end within {:?} of SIGKILL, or belong to another \
                     user: {}; see their state in /proc/PID/status, or set GRANARY_WAIT_S to more \
                     seconds",
                    self.limits.kill,
                    ids.join(", ")
                ));
                return killed.len();
            }
            self.wait_for_signal(Some(LOOK));
            self.has_ended();
        }
    }

    /// Stops all processes of the run, also those that are started meanwhile, and returns them.
    fn all_stopped(&self) -> Vec<Process> {
        let mut count = usize::MAX;
        // Each round stops the processes that were started since the last one. A process that is
        // stopped starts no further one.
        for _ in 0..100 {
            let found = descendants(&processes());
            if found.len() == count {
                return found;
            }
            count = found.len();
            for process in &found {
                // SAFETY: a process of the run.
                unsafe { libc::kill(process.id, libc::SIGSTOP) };
            }
        }
        descendants(&processes())
    }
}

/// A process, as of `/proc/PID/stat`.
#[derive(Clone, Debug)]
struct Process {
    id: i32,
    parent: i32,
    name: String,
    /// Not a zombie.
    lives: bool,
    /// By a signal or a debugger.
    is_stopped: bool,
    /// Start time, in ticks of the clock; 0 if it is not known.
    start: u64,
}

impl Process {
    /// Reads fields of the text of `/proc/PID/stat`: id, name, state, parent, start time.
    fn parse(stat: &str) -> Option<Self> {
        let (id, rest) = stat.split_once(" (")?;
        // The name may contain any character, and the fields after the name have no parenthesis.
        let (name, rest) = rest.rsplit_once(") ")?;
        let mut fields = rest.split(' ');
        let state = fields.next()?;
        let (lives, is_stopped) = (!matches!(state, "Z" | "X"), matches!(state, "T" | "t"));
        let parent = fields.next()?.parse().ok()?;
        // Field 22 of proc_pid_stat(5); the next one is field 5.
        let start = fields.nth(17).and_then(|start| start.parse().ok()).unwrap_or(0);
        Some(Self { id: id.parse().ok()?, parent, name: name.into(), lives, is_stopped, start })
    }
}

/// All processes that `/proc` shows.
fn processes() -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let stats = entries.filter_map(|entry| {
        entry.file_name().to_str()?.parse::<u32>().ok()?;
        std::fs::read(entry.path().join("stat")).ok()
    });
    stats.filter_map(|stat| Process::parse(&String::from_utf8_lossy(&stat))).collect()
}

/// The processes below this one.
fn descendants(all: &[Process]) -> Vec<Process> {
    let mut found: Vec<Process> = Vec::new();
    let mut above = vec![std::process::id() as i32];
    while let Some(parent) = above.pop() {
        for process in all.iter().filter(|process| process.parent == parent) {
            above.push(process.id);
            found.push(process.clone());
        }
    }
    found
}

/// `waitid(2)`. Returns the process id; 0 if none has the state, with `WNOHANG`.
fn wait_for(kind: libc::idtype_t, id: u32, options: i32) -> io::Result<i32> {
    // SAFETY: a zero siginfo is valid for the write.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        match libc::waitid(kind, id, &mut info, options) {
            0 => Ok(info.si_pid()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Reaps the program and ends this process as the program has ended.
fn end_as(program: i32) -> ! {
    let mut status = 0;
    // SAFETY: plain system calls of this process; the pointers are to live values.
    unsafe {
        while libc::waitpid(program, &mut status, 0) == -1
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
        if libc::WIFSIGNALED(status) {
            let signal = libc::WTERMSIG(status);
            // The program has written the core file.
            libc::prctl(libc::PR_SET_DUMPABLE, 0);
            libc::signal(signal, libc::SIG_DFL);
            libc::kill(libc::getpid(), signal);
            let mut all: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::sigprocmask(libc::SIG_UNBLOCK, &all, std::ptr::null_mut());
            libc::_exit(128 + signal);
        }
        libc::_exit(libc::WEXITSTATUS(status))
    }
}

/// Returns the addresses of this process's arguments; an empty range if `/proc` does not name them.
fn argument_bytes() -> (usize, usize) {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Fields 48 and 49 of proc_pid_stat(5). The text after the name starts with field 3.
    let mut fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields).split(' ').skip(45);
    let mut next = || fields.next()?.parse().ok();
    next().zip(next()).unwrap_or((0, 0))
}

/// Replaces the arguments, so that `ps` and `pkill -f` tell the reaper from the command.
///
/// # Safety
/// The range has the arguments of this process, or is empty, and no other thread runs.
unsafe fn rename((start, end): (usize, usize)) {
    let name = NAME.to_bytes();
    if end <= start + name.len() {
        return;
    }
    // SAFETY: by the caller.
    unsafe {
        std::ptr::write_bytes(start as *mut u8, 0, end - start);
        std::ptr::copy_nonoverlapping(name.as_ptr(), start as *mut u8, name.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_parsed_whatever_their_name_is() {
        let process = Process::parse("17 (a) Z 1 (b)) S 4 17 17 0 -1").unwrap();
        assert_eq!((process.id, process.parent, process.lives), (17, 4, true));
        assert_eq!(process.name, "a) Z 1 (b)");
        assert_eq!(process.start, 0);
        let all = (4..53).map(|field| field.to_string()).collect::<Vec<_>>().join(" ");
        assert_eq!(Process::parse(&format!("17 (a) S {all}")).unwrap().start, 22);
        assert!(!Process::parse("18 (sh) Z 4 1 1").unwrap().lives);
        assert!(Process::parse("18 sh").is_none());
    }

    #[test]
    fn status_of_the_program_is_passed_on() {
        let status = |script: &str| {
            let mut command = Command::new("sh");
            run_to_end(command.args(["-c", script]), true, 5, None).unwrap().into_raw()
        };
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(libc::WEXITSTATUS(status("exit 7")), 7);
        assert_eq!(libc::WTERMSIG(status("kill -9 $$")), libc::SIGKILL);
        assert_eq!(libc::WTERMSIG(status("kill -SEGV $$")), libc::SIGSEGV);
        let missing = run_to_end(&mut Command::new("/no/such/program"), true, 5, None).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}

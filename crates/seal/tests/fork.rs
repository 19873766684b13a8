//! Forked children: none uses a key of its parent, whenever the fork was.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};

use seal::{Cipher, Error, Sealer, Tampered};

type KeyStream = [u8; 32];

fn key_stream(sealer: &Sealer) -> Result<KeyStream, Error> {
    let mut sealed = [0; 32];
    sealer.seal(0, &[0; 32], &mut sealed)?;
    Ok(sealed)
}

/// Forks. The child runs `child` and ends with its result; returns the child's id.
fn fork(child: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child uses its own memory only, and ends without destructors or exit handlers.
    match unsafe { libc::fork() } {
        // SAFETY: as above.
        0 => unsafe { libc::_exit(child()) },
        pid => {
            assert!(pid > 0, "{}", std::io::Error::last_os_error());
            pid
        }
    }
}

/// Waits for a child, and returns its exit status, or -1 after a signal.
fn status(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: a child of this process.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -1 }
}

/// Exit status of a child: the first condition that does not hold, from 1 on, or 0.
fn first_failure(conditions: &[bool]) -> i32 {
    conditions.iter().position(|condition| !condition).map_or(0, |at| at as i32 + 1)
}

#[test]
fn child_opens_but_does_not_seal_until_it_wipes() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    let mut stored = [0; 64];
    let seal = sealer.seal(9, &[5; 64], &mut stored).unwrap();
    let pid = fork(|| {
        let mut sealed = [7; 64];
        let mut plain = [0; 64];
        let refused = matches!(sealer.seal(9, &[6; 64], &mut sealed), Err(Error::Forked));
        let rekey_refused = matches!(sealer.rekey(), Err(Error::Forked));
        let opens = sealer.open(9, &seal, &stored, &mut plain).is_ok() && plain == [5; 64];
        // SAFETY: the only thread of this process.
        unsafe { sealer.wipe_in_child() };
        let wiped = sealer.open(9, &seal, &stored, &mut plain) == Err(Tampered);
        let zeros = plain == [0; 64];
        first_failure(&[refused, sealed == [7; 64], rekey_refused, opens, wiped, zeros])
    });
    assert_eq!(status(pid), 0);
    let mut plain = [0; 64];
    sealer.open(9, &seal, &stored, &mut plain).unwrap();
    assert!(key_stream(&sealer).is_ok(), "the parent goes on");
}

#[test]
fn grandchild_of_a_childs_own_sealer_does_not_seal() {
    let pid = fork(|| {
        let sealer = Sealer::new(Cipher::default()).unwrap();
        let own = key_stream(&sealer).is_ok();
        let grandchild = fork(|| match key_stream(&sealer) {
            Err(Error::Forked) => 0,
            _ => 1,
        });
        first_failure(&[own, status(grandchild) == 0, key_stream(&sealer).is_ok()])
    });
    assert_eq!(status(pid), 0);
}

/// The parent seals with two threads while it forks. Each child makes a sealer of its own and sends
/// its key streams to the parent.
#[test]
fn parent_and_children_have_distinct_key_streams() {
    const CHILDREN: usize = 20;
    const STORES: usize = 100;
    let sealer = Sealer::new(Cipher::default()).unwrap();
    let done = AtomicBool::new(false);
    let mut streams: Vec<KeyStream> = std::thread::scope(|scope| {
        let stores = || {
            let mut streams = Vec::new();
            while !done.load(Ordering::Relaxed) {
                streams.push(key_stream(&sealer).unwrap());
            }
            streams
        };
        let threads = [scope.spawn(stores), scope.spawn(stores)];
        let mut all = Vec::new();
        let mut statuses = Vec::new();
        for _ in 0..CHILDREN {
            let (streams, status) = streams_of_a_child(&sealer, STORES);
            all.extend(streams);
            statuses.push(status);
            sealer.rekey().unwrap();
        }
        // A failure before this line would leave the threads running.
        done.store(true, Ordering::Relaxed);
        assert_eq!(statuses, [0; CHILDREN]);
        assert_eq!(all.len(), CHILDREN * STORES);
        threads.into_iter().for_each(|thread| all.extend(thread.join().unwrap()));
        all
    });
    let stores = streams.len();
    streams.sort_unstable();
    streams.dedup();
    assert_eq!(streams.len(), stores);
}

/// Returns the key streams that a child has sent, and its exit status.
fn streams_of_a_child(sealer: &Sealer, stores: usize) -> (Vec<KeyStream>, i32) {
    let mut ends = [0; 2];
    // SAFETY: the array has two elements.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    // SAFETY: the descriptors were just made.
    let [mut read, write] = ends.map(|end| unsafe { File::from_raw_fd(end) });
    let pid = fork(|| {
        if !matches!(key_stream(sealer), Err(Error::Forked)) {
            return 1;
        }
        let Ok(own) = Sealer::new(Cipher::default()) else { return 2 };
        for _ in 0..stores {
            let Ok(stream) = key_stream(&own) else { return 3 };
            // SAFETY: an open descriptor, and a buffer of this length.
            let sent = unsafe { libc::write(write.as_raw_fd(), stream.as_ptr().cast(), 32) };
            if sent != 32 {
                return 4;
            }
        }
        0
    });
    drop(write);
    let mut bytes = Vec::new();
    read.read_to_end(&mut bytes).unwrap();
    (bytes.as_chunks().0.to_vec(), status(pid))
}

static IS_CHILD: AtomicBool = AtomicBool::new(false);
/// Last bytes of the output of the store that is interrupted.
static TAIL: AtomicPtr<[u8; 16]> = AtomicPtr::new(null_mut());
static FORKS: AtomicU32 = AtomicU32::new(0);
static SEALED: AtomicU32 = AtomicU32::new(0);
static REFUSED: AtomicU32 = AtomicU32::new(0);

/// Forks by the system call, because the C library's function may not run in a signal handler. The
/// child returns from the handler into the interrupted call.
extern "C" fn fork_in_handler(_: i32) {
    // SAFETY: like fork(2). The child uses memory of its own only.
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
    if pid == 0 {
        IS_CHILD.store(true, Ordering::Relaxed);
        // SAFETY: points into the output, which outlives the signals.
        if unsafe { TAIL.load(Ordering::Relaxed).read_volatile() } != [0; 16] {
            // The ciphertext is complete, and equal to the parent's. No further store is made.
            // SAFETY: ends the child.
            unsafe { libc::_exit(2) }
        }
        return;
    }
    let mut status = 0;
    // SAFETY: a child of this process.
    while unsafe { libc::waitpid(pid, &mut status, 0) } != pid {}
    match libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)) {
        Some(2) => {}
        Some(0) => _ = REFUSED.fetch_add(1, Ordering::Relaxed),
        _ => _ = SEALED.fetch_add(1, Ordering::Relaxed),
    }
    FORKS.fetch_add(1, Ordering::Relaxed);
}

fn is_done() -> bool {
    REFUSED.load(Ordering::Relaxed) + SEALED.load(Ordering::Relaxed) >= 100
}

/// Stores until [`is_done`]. A signal handler may turn this thread into the thread of a child,
/// which must get no ciphertext.
fn store_while_interrupted(sealer: &Sealer, thread: &AtomicI32) {
    // A long store, so that most signals arrive within it. The loop allocates nothing.
    let plain = vec![1; 1 << 20];
    let mut sealed = vec![0; 1 << 20];
    TAIL.store(sealed.last_chunk_mut().unwrap(), Ordering::Relaxed);
    // SAFETY: no arguments.
    thread.store(unsafe { libc::gettid() }, Ordering::Release);
    while !is_done() {
        let result = sealer.seal(0, &plain, &mut sealed);
        if IS_CHILD.load(Ordering::Relaxed) {
            let refused = matches!(result, Err(Error::Forked));
            let is_zero = sealed.iter().all(|&byte| byte == 0);
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!refused || !is_zero)) }
        }
        sealer.forget(&result.unwrap_or_default());
        sealed.fill(0);
    }
}

/// A signal handler forks in the middle of a store: the child returns into the store, and must not
/// deliver a ciphertext under a nonce that the parent uses.
#[test]
fn child_of_a_fork_within_a_store_delivers_nothing() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    // SAFETY: installs a handler that makes system calls and accesses atomics only.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = fork_in_handler as extern "C" fn(i32) as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, null_mut()), 0);
    }
    let thread = AtomicI32::new(0);
    std::thread::scope(|scope| {
        let storing = scope.spawn(|| store_while_interrupted(&sealer, &thread));
        let mut sent = 0;
        while !storing.is_finished() {
            let id = thread.load(Ordering::Acquire);
            if id == 0 || is_done() || FORKS.load(Ordering::Relaxed) < sent {
                std::thread::yield_now();
                continue;
            }
            // SAFETY: a signal to a thread of this process; an ended thread gives an error.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), id, libc::SIGUSR1) };
            sent += 1;
        }
    });
    assert_eq!(SEALED.load(Ordering::Relaxed), 0);
}

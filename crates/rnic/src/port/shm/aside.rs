//! Closing what came from a peer, without waiting for it.
//!
//! Whoever closes the last descriptor of a file runs the file's end, and a peer can choose files whose
//! end takes as long as it likes: a TCP socket that lingers over unsent data (`SO_LINGER`), a file of
//! a file system that the peer serves (FUSE). The peer sends it, closes its own copy, and the thread that
//! serves everybody closes the last one. The same happens where a connection ends in whose queue such
//! a message waits. So these are closed by threads that have nothing else to do. They end when they
//! are idle; files that do not end can hold all [`THREADS_MAX`] of them, and then descriptors pile up
//! until no connection is accepted any more, but nobody who is served waits.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::net::{Shutdown, sockopt};

/// The most threads that close at a time.
const THREADS_MAX: usize = 8;
/// A thread that had nothing to close for this long ends.
const IDLE: Duration = Duration::from_secs(1);
/// Memory up to this size is given back at once: the thread would cost more.
const SMALL: i64 = 64 << 20;

struct Closers {
    queue: VecDeque<OwnedFd>,
    threads: usize,
    idle: usize,
}

static CLOSERS: Mutex<Closers> =
    Mutex::new(Closers { queue: VecDeque::new(), threads: 0, idle: 0 });
static WORK: Condvar = Condvar::new();

/// Closes a descriptor that a peer has sent, without waiting for it.
pub fn close_aside(fd: OwnedFd) {
    // Only memory has seals; asking anything else for them does not touch it.
    if rustix::fs::fcntl_get_seals(&fd).is_ok()
        && rustix::fs::fstat(&fd).is_ok_and(|stat| stat.st_size <= SMALL)
    {
        return;
    }
    let mut closers = CLOSERS.lock();
    closers.queue.push_back(fd);
    if closers.queue.len() > closers.idle && closers.threads < THREADS_MAX {
        let spawned = std::thread::Builder::new().name("granary-closer".to_string()).spawn(work);
        // Without a thread it stays open until the next one comes.
        closers.threads += spawned.is_ok() as usize;
    }
    WORK.notify_one();
}

fn work() {
    let mut closers = CLOSERS.lock();
    loop {
        if let Some(fd) = closers.queue.pop_front() {
            drop(closers);
            // A socket that does not linger ends at once. Its owner may undo this.
            let _ = sockopt::set_socket_linger(&fd, None);
            drop(fd);
            closers = CLOSERS.lock();
            continue;
        }
        closers.idle += 1;
        let timed_out = WORK.wait_for(&mut closers, IDLE).timed_out();
        closers.idle -= 1;
        if timed_out && closers.queue.is_empty() {
            closers.threads -= 1;
            return;
        }
    }
}

/// A connection with a peer that is not trusted. Dropping it ends it at once, and closes it aside.
pub struct PeerSocket(Option<OwnedFd>);

impl From<OwnedFd> for PeerSocket {
    fn from(fd: OwnedFd) -> Self {
        Self(Some(fd))
    }
}

impl AsFd for PeerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("set until dropped").as_fd()
    }
}

impl Drop for PeerSocket {
    fn drop(&mut self) {
        let Some(fd) = self.0.take() else { return };
        // The peer may have ended it already.
        let _ = rustix::net::shutdown(&fd, Shutdown::Both);
        close_aside(fd);
    }
}

//! Deferred closing of descriptors that came from a peer, on separate threads.
//!
//! The close of a file's last descriptor runs the file's release operation. A peer can choose files
//! whose release takes arbitrarily long: a TCP socket that lingers over unsent data (`SO_LINGER`),
//! or a file of a file system that the peer serves (FUSE). The peer sends such a descriptor and
//! closes its own copy; the event loop that serves all clients then closes the last one. The same
//! happens when a connection is closed whose receive queue holds a message with such a descriptor.
//!
//! So separate closer threads close these descriptors. An idle closer thread ends. Files whose
//! release never returns can occupy all [`THREADS_MAX`] closer threads; then descriptors accumulate
//! until no further connection is accepted, but the event loop never blocks.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::net::{Shutdown, sockopt};

/// Maximum closer threads.
const THREADS_MAX: usize = 8;
/// Idle time after which a closer thread ends.
const IDLE: Duration = Duration::from_secs(1);
/// Memory files up to this size are closed at once: freeing them costs less than a closer thread.
const SMALL: i64 = 64 << 20;

static CLOSERS: Closers = Closers::new();

/// The closer threads and their queue of descriptors.
struct Closers {
    state: Mutex<State>,
    work: Condvar,
}

struct State {
    queue: VecDeque<OwnedFd>,
    threads: usize,
    /// Closer threads that wait for a descriptor.
    idle: usize,
}

/// Closes a descriptor that a peer has sent, without waiting for the end of the close.
pub fn close_deferred(fd: OwnedFd) {
    // Only memory files have seals. Other files fail this query without any access to the file.
    if rustix::fs::fcntl_get_seals(&fd).is_ok()
        && rustix::fs::fstat(&fd).is_ok_and(|stat| stat.st_size <= SMALL)
    {
        return;
    }
    CLOSERS.add(fd);
}

impl Closers {
    const fn new() -> Self {
        let state = State { queue: VecDeque::new(), threads: 0, idle: 0 };
        Self { state: Mutex::new(state), work: Condvar::new() }
    }

    /// Queues the descriptor for a closer thread. Returns the handle of the thread if a new one was
    /// started.
    fn add(&'static self, fd: OwnedFd) -> Option<JoinHandle<()>> {
        let mut state = self.state.lock();
        state.queue.push_back(fd);
        let mut started = None;
        if state.queue.len() > state.idle && state.threads < THREADS_MAX {
            let thread = std::thread::Builder::new().name("granary-closer".to_string());
            // If no thread can be started, the descriptor stays open until the next call.
            started = thread.spawn(|| self.work()).ok();
            state.threads += started.is_some() as usize;
        }
        self.work.notify_one();
        started
    }

    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(fd) = state.queue.pop_front() {
                drop(state);
                // A socket without SO_LINGER closes at once. The peer may set the option again.
                let _ = sockopt::set_socket_linger(&fd, None);
                drop(fd);
                state = self.state.lock();
                continue;
            }
            state.idle += 1;
            let timed_out = self.work.wait_for(&mut state, IDLE).timed_out();
            state.idle -= 1;
            if timed_out && state.queue.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

/// A connection to an untrusted peer. Dropping it shuts the connection down and defers the close.
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
        // Fails if the peer has already closed the connection.
        let _ = rustix::net::shutdown(&fd, Shutdown::Both);
        close_deferred(fd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_closer_thread_ends_and_makes_room() {
        let closers: &'static Closers = Box::leak(Box::new(Closers::new()));
        let pipe = || rustix::pipe::pipe().unwrap();
        let (reader, writer) = pipe();
        closers.state.lock().threads = THREADS_MAX;
        assert!(closers.add(writer).is_none(), "the maximum of threads runs");
        for _ in 0..2 {
            closers.state.lock().threads = THREADS_MAX - 1;
            let (_other, writer) = pipe();
            closers.add(writer).expect("one more thread may start").join().unwrap();
            let state = closers.state.lock();
            assert_eq!((state.queue.len(), state.threads, state.idle), (0, THREADS_MAX - 1, 0));
        }
        let mut end = [0; 1];
        assert_eq!(
            rustix::io::read(&reader, &mut end),
            Ok(0),
            "the queued descriptor is closed, too"
        );
    }
}

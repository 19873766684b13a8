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
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::net::{Shutdown, sockopt};

/// The most threads that close at a time.
const THREADS_MAX: usize = 8;
/// A thread that had nothing to close for this long ends.
const IDLE: Duration = Duration::from_secs(1);
/// Memory up to this size is given back at once: the thread would cost more.
const SMALL: i64 = 64 << 20;

static CLOSERS: Closers = Closers::new();

/// The threads that close, and what they have to close.
struct Closers {
    state: Mutex<State>,
    work: Condvar,
}

struct State {
    queue: VecDeque<OwnedFd>,
    threads: usize,
    /// Of the threads, those that wait for a descriptor.
    idle: usize,
}

/// Closes a descriptor that a peer has sent, without waiting for it.
pub fn close_aside(fd: OwnedFd) {
    // Only memory has seals; asking anything else for them does not touch it.
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

    /// Has a thread close the descriptor; returns the thread if it is a new one.
    fn add(&'static self, fd: OwnedFd) -> Option<JoinHandle<()>> {
        let mut state = self.state.lock();
        state.queue.push_back(fd);
        let mut started = None;
        if state.queue.len() > state.idle && state.threads < THREADS_MAX {
            let thread = std::thread::Builder::new().name("granary-closer".to_string());
            // Without a thread the descriptor stays open until the next one comes.
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
                // A socket that does not linger ends at once. Its owner may undo this.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_has_nothing_to_close_ends_and_makes_room_for_another() {
        let closers: &'static Closers = Box::leak(Box::new(Closers::new()));
        let pipe = || rustix::pipe::pipe().unwrap();
        let (reader, writer) = pipe();
        closers.state.lock().threads = THREADS_MAX;
        assert!(closers.add(writer).is_none(), "there are as many as there may be");
        for _ in 0..2 {
            closers.state.lock().threads = THREADS_MAX - 1;
            let (_other, writer) = pipe();
            closers.add(writer).expect("there is room for one").join().unwrap();
            let state = closers.state.lock();
            assert_eq!((state.queue.len(), state.threads, state.idle), (0, THREADS_MAX - 1, 0));
        }
        let mut end = [0; 1];
        assert_eq!(rustix::io::read(&reader, &mut end), Ok(0), "what had waited is closed, too");
    }
}

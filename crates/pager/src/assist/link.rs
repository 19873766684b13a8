//! The host's end of a session: the connection to the assist, and its set-up.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use verbs::DmaMemory;

use super::protocol::{Message, VERSION};
use super::ring::{self, Producer};
use super::socket;
use crate::sys;

/// Name of the assist's socket in the directory of a run.
const SOCKET: &str = "assist.sock";
/// Time limit for an answer during the set-up. An assist that takes longer is ended.
const PATIENCE_MS: i32 = 2_000;

/// Returns the path of the assist's socket in the directory of a run.
pub fn socket_path(run_directory: &Path) -> PathBuf {
    run_directory.join(SOCKET)
}

/// A connection to the assist.
pub struct Link {
    socket: OwnedFd,
    /// The assist's process.
    process: OwnedFd,
}

impl Link {
    /// Connects to the assist of a run.
    ///
    /// # Errors
    /// No assist listens, or its process is out of reach: then it could not be ended if it hangs.
    pub fn connect(run_directory: &Path) -> io::Result<Self> {
        let socket =
            pool::socket::connect(&socket_path(run_directory)).map_err(io::Error::other)?;
        Self::over(socket)
    }

    /// An end of `socket`, whose other end `process` holds.
    #[cfg(test)]
    pub(super) fn with_process(socket: OwnedFd, process: OwnedFd) -> Self {
        Self { socket, process }
    }

    /// Begins a session over a connected socket.
    ///
    /// # Errors
    /// As [`Link::connect`].
    pub fn over(socket: OwnedFd) -> io::Result<Self> {
        let process = socket::peer_process(socket.as_fd())?;
        let link = Self { socket, process };
        link.send(&Message::Hello { version: VERSION }, &[])?;
        Ok(link)
    }

    /// Shares the frames of a memory node, before a NIC's process seals them. Waits until the
    /// assist has mapped them.
    ///
    /// # Errors
    /// The assist refuses the memory, hangs, or has ended.
    pub fn share_frames(&self, file: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
        self.send(&Message::Frames { bytes: bytes as u64 }, &[file])?;
        self.await_ready()
    }

    /// Shares the memory of a memory node's queues, before the NIC's process seals it. Waits until
    /// the assist has mapped it.
    ///
    /// # Errors
    /// As [`Link::share_frames`].
    pub fn share_queues(&self, node: u16, files: [BorrowedFd<'_>; 2]) -> io::Result<()> {
        self.send(&Message::Queues { node: node.into() }, &files)?;
        self.await_ready()
    }

    /// Sends one part of the set-up.
    ///
    /// # Errors
    /// The assist has ended.
    pub fn send(&self, message: &Message, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        socket::send(self.socket.as_fd(), message, descriptors)
    }

    /// Makes the ring, which completes the set-up.
    ///
    /// # Errors
    /// Memory is short, or the assist refuses the session, hangs, or has ended.
    pub fn share_ring(&self) -> io::Result<Producer> {
        let file = socket::sealed_memory(ring::BYTES.next_multiple_of(sys::PAGE_BYTES))?;
        let memory = DmaMemory::map_shared(&file, 0, ring::BYTES)?;
        // A forked child takes no part in the session of its parent.
        // SAFETY: changes only whether a fork copies the mapping.
        unsafe { sys::madvise(memory.as_ptr() as usize, memory.len(), libc::MADV_DONTFORK)? };
        let producer = Producer::new(memory);
        self.send(&Message::Ring, &[file.as_fd()])?;
        self.await_ready()?;
        Ok(producer)
    }

    fn await_ready(&self) -> io::Result<()> {
        let mut polled = [socket::polled(self.socket.as_fd(), libc::POLLIN)];
        if socket::poll(&mut polled, PATIENCE_MS) == 0 {
            // Otherwise each process that starts would wait for an assist that hangs.
            self.kill();
            return Err(io::ErrorKind::TimedOut.into());
        }
        match socket::receive(self.socket.as_fd())? {
            Some((Message::Ready, _)) => Ok(()),
            Some((Message::Refused(why), _)) => Err(io::Error::other(why)),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Asks the assist to look for requests.
    pub fn wake(&self) {
        socket::wake(self.socket.as_fd());
    }

    /// Ends the assist, which is stopped or hangs. [`Link::wait_for_end`] tells when it has ended.
    pub fn kill(&self) {
        // Without the right to end the assist, the caller goes on waiting: a transfer that may
        // still happen must not be repeated.
        let _ = socket::kill(self.process.as_fd());
    }

    /// Waits until the assist has ended the session or has ended itself, in any way. Returns its
    /// reason if it gave one. The assist accesses no memory of the session any more: the kernel
    /// closes the descriptors of a process after the process's memory is gone.
    pub fn wait_for_end(&self) -> Option<String> {
        let mut reason = None;
        loop {
            let mut polled = [socket::polled(self.socket.as_fd(), libc::POLLIN)];
            if socket::poll(&mut polled, -1) == 0 {
                continue;
            }
            match socket::receive(self.socket.as_fd()) {
                Ok(Some((Message::Refused(why), _))) => reason = Some(why),
                Ok(Some(_)) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(None) | Err(_) => return reason,
            }
        }
    }

    /// Ends the session, and returns when the assist accesses no memory of the session any more.
    pub fn end(&self) {
        socket::end_sending(self.socket.as_fd());
        let mut polled = [socket::polled(self.socket.as_fd(), libc::POLLRDHUP)];
        if socket::poll(&mut polled, PATIENCE_MS) == 0 {
            self.kill();
        }
        self.wait_for_end();
    }

    /// Returns the descriptors of the session.
    pub fn descriptors(&self) -> [RawFd; 2] {
        [self.socket.as_raw_fd(), self.process.as_raw_fd()]
    }
}

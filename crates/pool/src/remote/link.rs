//! A compute node's end of a control connection, over a Unix socket or TCP. Preserves message
//! boundaries.
//!
//! Several threads may send. Only one thread at a time receives.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::address::RemoteAddress;
use super::frames::{Inbox, Read, frame};
use super::listener::set_keepalive;
use crate::{Error, Settings, socket};

/// Timeout of a TCP connection attempt.
const CONNECT: Duration = Duration::from_secs(5);
/// Time limit for the peer to accept a message that the socket buffer cannot hold.
const ROOM: Duration = Duration::from_secs(30);

/// The compute node's end of a control connection.
pub enum Link {
    /// To a memory node on this host: `SOCK_SEQPACKET`, which preserves message boundaries.
    Local(OwnedFd, PathBuf),
    /// To a memory node on another host.
    Remote(RemoteLink),
}

/// A TCP connection.
pub struct RemoteLink {
    stream: TcpStream,
    sending: Mutex<()>,
    inbox: Mutex<Inbox>,
    /// Address of the memory node.
    pub peer: SocketAddr,
    /// Local address of the connection.
    pub local: IpAddr,
}

/// The error after the peer has closed the connection.
pub const CLOSED: &str = "its process has closed the connection";

impl Link {
    /// Connects to the memory node that serves the socket at `path`. The connection, and each
    /// message for which there is no room, has the time limit `limit`.
    pub fn local(path: &Path, limit: Duration) -> Result<Self, Error> {
        Ok(Self::Local(socket::connect_within(path, limit)?, path.to_owned()))
    }

    /// Connects to a memory node on another host: to the first of its addresses that accepts.
    pub fn remote(to: &RemoteAddress) -> Result<Self, Error> {
        let mut last = None;
        for peer in to.resolve()? {
            match RemoteLink::connect(peer) {
                Ok(link) => return Ok(Self::Remote(link)),
                Err(e) => last = Some(e),
            }
        }
        let source = last.expect("a name that is resolved has an address");
        let hint = match source.kind() {
            std::io::ErrorKind::ConnectionRefused => {
                "; no process serves this address; start one with `granary serve --listen`"
            }
            _ => "; check the address, the network and its firewalls",
        };
        let attempt = format!("connecting to the memory node at {to}");
        Err(Error::Unreachable { attempt, why: format!("{source}{hint}") })
    }

    /// Sends a message.
    pub fn send(&self, message: &[u8]) -> Result<(), Errno> {
        match self {
            Link::Local(fd, _) => socket::send(fd, message, &[]),
            Link::Remote(link) => link.send(message),
        }
    }

    /// Receives available data; `None` if the message is incomplete. An error means that no further
    /// message can arrive.
    pub fn receive(&self) -> Result<Option<Vec<u8>>, String> {
        match self {
            Link::Local(fd, _) => match socket::receive(fd) {
                Ok(None) => Err(CLOSED.into()),
                Ok(Some(packet)) => Ok(Some(packet.bytes)),
                Err(e) => Err(format!("reading the memory node's answer: {e}")),
            },
            Link::Remote(link) => match link.inbox.lock().read(&link.stream) {
                Ok(Read::Message(bytes)) => Ok(Some(bytes)),
                Ok(Read::Part) | Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(None),
                Ok(Read::End) => Err(CLOSED.into()),
                Ok(Read::Invalid(len)) => Err(format!(
                    "invalid message length {len}: the peer is not a memory node, or has another \
                     version"
                )),
                Err(e) => Err(format!("reading the memory node's answer: {e}")),
            },
        }
    }

    /// Waits until data has arrived; false after `timeout`.
    pub fn wait_readable(&self, timeout: Duration) -> Result<bool, Errno> {
        match poll_for(self.as_fd(), PollFlags::IN, timeout) {
            Err(Errno::INTR) => Ok(false),
            result => result,
        }
    }

    /// Ends the connection if the memory node is unreachable for `time`. Of no effect on this host.
    pub fn keep_for(&self, time: Duration) -> Result<(), Errno> {
        match self {
            Link::Local(..) => Ok(()),
            Link::Remote(link) => set_keepalive(&link.stream, time),
        }
    }

    /// True if the peer is known to have closed the connection.
    pub fn is_closed(&self) -> bool {
        matches!(poll_for(self.as_fd(), PollFlags::RDHUP, Duration::ZERO), Ok(true))
    }

    /// The TCP connection, if the memory node is on another host.
    pub fn as_remote(&self) -> Option<&RemoteLink> {
        match self {
            Link::Local(..) => None,
            Link::Remote(link) => Some(link),
        }
    }

    /// Name of the memory node, for errors.
    pub fn name(&self) -> String {
        match self {
            Link::Local(_, path) => format!("the memory node at {}", path.display()),
            Link::Remote(link) => format!("the memory node at {}", link.peer),
        }
    }

    /// The connection's file descriptor.
    pub fn descriptor(&self) -> i32 {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Link::Local(fd, _) => fd.as_fd(),
            Link::Remote(link) => link.stream.as_fd(),
        }
    }
}

impl RemoteLink {
    fn connect(peer: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect_timeout(&peer, CONNECT)?;
        stream.set_nonblocking(true)?;
        set_keepalive(&stream, Settings::CLIENT_TIMEOUT)?;
        let local = stream.local_addr()?.ip();
        Ok(Self { stream, sending: Mutex::default(), inbox: Mutex::default(), peer, local })
    }

    fn send(&self, message: &[u8]) -> Result<(), Errno> {
        let _alone = self.sending.lock();
        let bytes = frame(message);
        let mut left = &bytes[..];
        while !left.is_empty() {
            match rustix::net::send(&self.stream, left, SendFlags::NOSIGNAL) {
                Ok(sent) => left = &left[sent..],
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => match poll_for(self.stream.as_fd(), PollFlags::OUT, ROOM)
                {
                    Ok(true) | Err(Errno::INTR) => {}
                    Ok(false) => return Err(Errno::TIMEDOUT),
                    Err(e) => return Err(e),
                },
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

fn poll_for(fd: BorrowedFd<'_>, flags: PollFlags, timeout: Duration) -> Result<bool, Errno> {
    let mut fds = [PollFd::from_borrowed_fd(fd, flags)];
    let timeout = Timespec {
        tv_sec: timeout.as_secs().min(1 << 32) as i64,
        tv_nsec: timeout.subsec_nanos() as i64,
    };
    poll(&mut fds, Some(&timeout)).map(|n| n > 0)
}

#[cfg(test)]
mod tests {
    use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

    use super::*;

    #[test]
    fn refused_connection_suggests_granary_serve() {
        // Bound but not listening, so that no other process can use the port meanwhile.
        let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
        let bound = net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        net::bind(&bound, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = SocketAddr::try_from(net::getsockname(&bound).unwrap()).unwrap();
        let why = Link::remote(&address.into()).err().expect("nothing listens").to_string();
        assert!(why.contains("granary serve --listen"), "{why}");
    }

    #[test]
    fn link_descriptor_is_the_socket() {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (here, _there) = net::socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let number = here.as_raw_fd();
        assert_eq!(Link::Local(here, PathBuf::new()).descriptor(), number);
    }
}

//! One connection to the control socket: what has been said on it, and what is still to be sent.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rnic::port::shm::socket::{self, Packet, PeerSocket};
use rnic::port::shm::{Peer, Session, peer};
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::paces::Asker;
use super::rooms::{Holder, User};
use crate::Error;
use crate::protocol::{self, Numbered, Reply};
use crate::remote::ConnectionSecret;
use crate::remote::frames::{Inbox, Read, frame};
use crate::remote::route::RoceEnd;
use crate::remote::token::Nonces;
use crate::scheme::ClientId;

/// Number of a connection, for as long as the service runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnectionId(pub u64);

/// A connection.
pub struct Connection {
    socket: Socket,
    /// Who is at the other end.
    pub asker: Asker,
    /// Replies that the peer was too slow to take.
    outbox: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    /// What it may still ask without regard to its process's pace: what setting up takes.
    pub credit: u32,
    /// What it is for.
    pub role: Role,
    /// When it was accepted.
    pub accepted: Instant,
    /// When it connected or asked last.
    pub heard: Instant,
    /// When it is looked at because it has not settled.
    pub expected: Option<Instant>,
}

enum Socket {
    /// A process of this host: messages are packets, descriptors may come with them.
    Local(PeerSocket),
    /// Another host: messages are frames in a stream.
    Remote {
        stream: OwnedFd,
        inbox: Inbox,
        /// Bytes of the first reply in the outbox that the stream has taken.
        taken: usize,
        ends: Ends,
    },
}

/// Where the NICs at the ends of a connection between hosts are.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    /// The address here that the other host has connected to.
    pub local: IpAddr,
    /// The other host's.
    pub remote: IpAddr,
    /// What the NIC here is reached by.
    pub here: RoceEnd,
}

/// What a connection is for.
pub enum Role {
    /// It has not said so yet.
    Unknown,
    /// It has not said so yet, but greeted: another host.
    Greeted(Nonces),
    /// An attached function of the NIC.
    Nic(Box<Session>),
    /// A compute node's control connection.
    Pool(PoolSession),
}

/// A compute node's control connection.
#[derive(Default)]
pub struct PoolSession {
    /// The compute node, once it is admitted.
    pub client: Option<ClientId>,
    /// On another host: where what its QPs begin with comes from.
    pub secret: Option<ConnectionSecret>,
    /// The connection of the NIC session that owns its QPs.
    pub nic: Option<ConnectionId>,
    /// Its requests that wait until there is memory.
    pub awaiting: Vec<Await>,
    /// Its requests that wait until its chains are at rest, or its chunks are back.
    pub deferred: Vec<Deferred>,
}

/// A request that is answered when the memory node has come so far.
pub struct Deferred {
    /// The request's number.
    pub id: u64,
    /// What it asked.
    pub what: What,
}

/// What is answered later.
#[derive(Clone, Copy)]
pub enum What {
    /// The management QPs are to be re-established.
    ResetManagement(ClientId),
    /// This compute node has left.
    Goodbye(ClientId),
}

/// A request that waits until there is memory.
pub struct Await {
    /// The request's number.
    pub id: u64,
    /// When it is told that there is none.
    pub deadline: Instant,
}

/// What was read from a connection.
pub enum Input {
    /// A message with its descriptors.
    Message(Packet),
    /// A part of one.
    Part,
    /// A message that is longer than allowed.
    TooLong,
    /// Nothing now.
    Nothing,
    /// The peer has closed, or the connection broke.
    End,
}

impl Connection {
    /// A connection of a process of this host, just accepted.
    pub fn local(fd: OwnedFd, credit: u32) -> Self {
        let asker = Asker::Process(Peer::of(&fd));
        Self::new(Socket::Local(fd.into()), asker, credit)
    }

    /// A connection of another host, just accepted, to a memory node whose RoCEv2 has UDP port `port`.
    pub fn remote(stream: OwnedFd, port: u16, credit: u32) -> Result<Self, Errno> {
        let local = ip_of(rustix::net::getsockname(&stream)?)?;
        let remote = ip_of(rustix::net::getpeername(&stream)?.ok_or(Errno::NOTCONN)?)?;
        let here = RoceEnd::of(&stream, port)?;
        let ends = Ends { local, remote, here };
        let socket = Socket::Remote { stream, inbox: Inbox::default(), taken: 0, ends };
        Ok(Self::new(socket, Asker::Host(remote), credit))
    }

    fn new(socket: Socket, asker: Asker, credit: u32) -> Self {
        let (outbox, accepted) = (VecDeque::new(), Instant::now());
        let (role, heard, expected) = (Role::Unknown, accepted, None);
        Self { socket, asker, outbox, credit, role, accepted, heard, expected }
    }

    /// Where the NICs are, of a connection between hosts.
    pub fn ends(&self) -> Option<Ends> {
        match &self.socket {
            Socket::Local(_) => None,
            Socket::Remote { ends, .. } => Some(*ends),
        }
    }

    /// The process and user, or the host, that a place is taken by.
    pub fn holder(&self) -> Holder {
        let user = match &self.socket {
            Socket::Local(fd) => User::Local(peer::user(fd)),
            Socket::Remote { ends, .. } => User::Host(ends.remote),
        };
        Holder { asker: self.asker, user }
    }

    /// True if messages are parts of a stream: after what is none nobody knows where the next one begins.
    pub fn is_stream(&self) -> bool {
        matches!(self.socket, Socket::Remote { .. })
    }

    /// Reads one message, or a part of one.
    pub fn read(&mut self) -> Input {
        match &mut self.socket {
            Socket::Local(fd) => match socket::receive(&*fd) {
                Ok(Some(packet)) => Input::Message(packet),
                Ok(None) => Input::End,
                Err(Errno::WOULDBLOCK) => Input::Nothing,
                Err(Errno::MSGSIZE) => Input::TooLong,
                Err(_) => Input::End,
            },
            Socket::Remote { stream, inbox, .. } => match inbox.read(&*stream) {
                Ok(Read::Message(bytes)) => {
                    Input::Message(Packet { bytes, descriptors: Vec::new() })
                }
                Ok(Read::Part) => Input::Part,
                Ok(Read::Wrong(_)) => Input::TooLong,
                Err(Errno::WOULDBLOCK | Errno::INTR) => Input::Nothing,
                Ok(Read::End) | Err(_) => Input::End,
            },
        }
    }

    /// Sends a message, now or when the peer takes it. False if the connection is broken.
    pub fn send(&mut self, bytes: Vec<u8>, fds: Vec<OwnedFd>) -> bool {
        let bytes = match self.socket {
            Socket::Local(_) => bytes,
            Socket::Remote { .. } => frame(&bytes),
        };
        self.outbox.push_back((bytes, fds));
        self.flush()
    }

    /// Sends a reply of the pool.
    pub fn reply(&mut self, id: u64, body: Reply) -> bool {
        match protocol::encode("answering a request", &Numbered { id, body }) {
            Ok(bytes) => self.send(bytes, Vec::new()),
            Err(e) => self.refuse(id, &e),
        }
    }

    /// Tells why a request is refused.
    pub fn refuse(&mut self, id: u64, error: &Error) -> bool {
        let body = match error {
            Error::Refused { why, .. } => Reply::Error { why: why.clone() },
            Error::Full { why, .. } => Reply::Full { why: why.clone() },
            Error::OverBudget { why, retry_after, .. } => Reply::OverBudget {
                why: why.clone(),
                retry_after_ms: retry_after.as_millis() as u64,
            },
            other => Reply::Error { why: other.to_string() },
        };
        match protocol::encode("refusing a request", &Numbered { id, body }) {
            Ok(bytes) => self.send(bytes, Vec::new()),
            Err(_) => false,
        }
    }

    /// Sends what waits. False if the connection is broken.
    pub fn flush(&mut self) -> bool {
        while let Some((bytes, fds)) = self.outbox.front() {
            let sent = match &mut self.socket {
                Socket::Local(fd) => {
                    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
                    socket::send(&*fd, bytes, &fds)
                }
                Socket::Remote { stream, taken, .. } => send_rest(stream, bytes, taken),
            };
            match sent {
                Ok(()) => drop(self.outbox.pop_front()),
                Err(Errno::WOULDBLOCK) => return true,
                Err(_) => return false,
            }
        }
        true
    }

    /// True if it has not said yet what it is for.
    pub fn is_new(&self) -> bool {
        matches!(self.role, Role::Unknown | Role::Greeted(_))
    }

    /// True if it may be silent: it is attached to the NIC, is a compute node, or waits for an answer.
    pub fn is_settled(&self) -> bool {
        match &self.role {
            Role::Unknown | Role::Greeted(_) => false,
            Role::Nic(session) => session.is_open(),
            Role::Pool(session) => session.client.is_some() || !session.deferred.is_empty(),
        }
    }

    /// True if the peer must take replies before it is listened to again.
    pub fn is_clogged(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// The pool session, if it is one.
    pub fn pool(&mut self) -> Option<&mut PoolSession> {
        match &mut self.role {
            Role::Pool(session) => Some(session),
            _ => None,
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Local(fd) => fd.as_fd(),
            Socket::Remote { stream, .. } => stream.as_fd(),
        }
    }
}

/// Sends what the stream has not taken yet of `bytes`.
fn send_rest(stream: &OwnedFd, bytes: &[u8], taken: &mut usize) -> Result<(), Errno> {
    while *taken < bytes.len() {
        match rustix::net::send(stream, &bytes[*taken..], SendFlags::NOSIGNAL) {
            Ok(sent) => *taken += sent,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    *taken = 0;
    Ok(())
}

/// An IPv4 address that came over an IPv6 socket is an IPv4 address: that is what packets go to.
fn ip_of(address: rustix::net::SocketAddrAny) -> Result<IpAddr, Errno> {
    let address = SocketAddr::try_from(address)?;
    Ok(address.ip().to_canonical())
}

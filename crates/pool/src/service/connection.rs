//! A connection to the control socket: its role, its input, and its unsent replies.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::SendFlags;

use super::client_limits::PeerIdentity;
use super::connection_limits::{ConnectionId, Holder, User};
use crate::Error;
use crate::nic::{ChunkFile, NicSession};
use crate::protocol::{self, ChunkPart, Numbered, Reply};
use crate::remote::ConnectionSecret;
use crate::remote::frames::{Inbox, Read, frame};
use crate::remote::route::{RoceEnd, roce_end};
use crate::remote::token::Nonces;
use crate::socket::{self, Packet, Peer, PeerSocket};
use scheme::ClientId;

/// A connection to the control socket or from another host.
pub struct Connection {
    socket: Socket,
    /// The process or host at the other end.
    pub identity: PeerIdentity,
    /// Replies that the peer has not read yet.
    outbox: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    /// Requests that do not count against the process's rate limit, for connection set-up.
    pub credit: u32,
    /// Purpose of the connection.
    pub role: Role,
    /// Time at which the connection was accepted.
    pub accepted: Instant,
    /// Time of the last request, or of the connect.
    pub last_request: Instant,
    /// Deadline by which the connection must settle, if one is set.
    pub deadline: Option<Instant>,
}

enum Socket {
    /// From a process of this host: one packet per message, possibly with file descriptors.
    Local(PeerSocket),
    /// From another host: framed messages in a byte stream.
    Remote {
        stream: OwnedFd,
        inbox: Inbox,
        /// Bytes of the first reply in the outbox that are sent.
        taken: usize,
        ends: Ends,
    },
}

/// Addresses of the NICs at the two ends of a connection between hosts.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    /// Local address to which the other host has connected.
    pub local: IpAddr,
    /// Address of the other host.
    pub remote: IpAddr,
    /// Port and MTU of the local NIC.
    pub here: RoceEnd,
}

/// Purpose of a connection.
pub enum Role {
    /// No opening was received yet.
    Unknown,
    /// From another host: the greeting was received, the opening was not.
    Greeted(Nonces),
    /// A process that is attached to the NIC.
    Nic(Box<dyn NicSession>),
    /// A compute node's control connection.
    Pool(PoolSession),
}

/// State of a compute node's control connection.
#[derive(Default)]
pub struct PoolSession {
    /// The compute node, after admission.
    pub client: Option<ClientId>,
    /// Secret from which the initial state of its QPs is derived. Only from another host.
    pub secret: Option<ConnectionSecret>,
    /// Nonces of the greeting. Only from another host.
    pub nonces: Option<Nonces>,
    /// Connection of the NIC session that owns its QPs.
    pub nic: Option<ConnectionId>,
    /// Pending requests for free memory.
    pub awaiting: Vec<MemoryWait>,
    /// Pending requests that wait until the compute node's chains are idle or its chunks are
    /// reclaimed.
    pub deferred: Vec<Deferred>,
}

/// A request whose answer depends on work of the memory node in progress.
pub struct Deferred {
    /// Number of the request.
    pub id: u64,
    /// The pending operation.
    pub what: DeferredOp,
}

/// Operation of a deferred request.
#[derive(Clone, Copy)]
pub enum DeferredOp {
    /// Re-establish the management QPs.
    ResetManagement(ClientId),
    /// Leave; answered when the compute node is retired.
    Goodbye(ClientId),
}

/// A request that is answered when a chunk is free.
pub struct MemoryWait {
    /// Number of the request.
    pub id: u64,
    /// Time at which the answer is "no memory".
    pub deadline: Instant,
}

/// Result of reading from a connection.
pub enum Input {
    /// A message with its file descriptors.
    Message(Packet),
    /// A part of a message.
    Part,
    /// A message that exceeds the maximum length.
    TooLong,
    /// No data is available.
    Nothing,
    /// The peer has closed the connection, or it broke.
    End,
}

impl Connection {
    /// An accepted connection from a process of this host.
    pub fn local(fd: OwnedFd, credit: u32) -> Self {
        let identity = PeerIdentity::Process(Peer::of(&fd));
        Self::new(Socket::Local(fd.into()), identity, credit)
    }

    /// An accepted connection from another host; `port` is the UDP port of the memory node's
    /// RoCEv2.
    pub fn remote(stream: OwnedFd, port: u16, credit: u32) -> Result<Self, Errno> {
        let local = ip_of(rustix::net::getsockname(&stream)?)?;
        let remote = ip_of(rustix::net::getpeername(&stream)?.ok_or(Errno::NOTCONN)?)?;
        let here = roce_end(&stream, port)?;
        let ends = Ends { local, remote, here };
        let socket = Socket::Remote { stream, inbox: Inbox::default(), taken: 0, ends };
        Ok(Self::new(socket, PeerIdentity::Host(remote), credit))
    }

    fn new(socket: Socket, identity: PeerIdentity, credit: u32) -> Self {
        let (outbox, accepted) = (VecDeque::new(), Instant::now());
        let (role, last_request, deadline) = (Role::Unknown, accepted, None);
        Self { socket, identity, outbox, credit, role, accepted, last_request, deadline }
    }

    /// Addresses of the NICs of a connection between hosts.
    pub fn ends(&self) -> Option<Ends> {
        match &self.socket {
            Socket::Local(_) => None,
            Socket::Remote { ends, .. } => Some(*ends),
        }
    }

    /// The process and user, or the host, to which client slots of this connection are attributed.
    pub fn holder(&self) -> Holder {
        let user = match &self.socket {
            Socket::Local(fd) => User::Local(socket::user(fd)),
            Socket::Remote { ends, .. } => User::Host(ends.remote),
        };
        Holder { identity: self.identity, user }
    }

    /// True if messages are framed in a stream. After an invalid frame the start of the next is
    /// unknown.
    pub fn is_stream(&self) -> bool {
        matches!(self.socket, Socket::Remote { .. })
    }

    /// Reads one message or a part of one.
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
                Ok(Read::Invalid(_)) => Input::TooLong,
                Err(Errno::WOULDBLOCK | Errno::INTR) => Input::Nothing,
                Ok(Read::End) | Err(_) => Input::End,
            },
        }
    }

    /// Queues a message and sends as much as the peer accepts. False if the connection is broken.
    pub fn send(&mut self, bytes: Vec<u8>, fds: Vec<OwnedFd>) -> bool {
        let bytes = match self.socket {
            Socket::Local(_) => bytes,
            Socket::Remote { .. } => frame(&bytes),
        };
        self.outbox.push_back((bytes, fds));
        self.flush()
    }

    /// The user of a process of this host, if the kernel reports it.
    pub fn local_user(&self) -> Option<u32> {
        match &self.socket {
            Socket::Local(fd) => socket::user(fd),
            Socket::Remote { .. } => None,
        }
    }

    /// Sends the chunk memory: its parts, and their files.
    pub fn send_chunks(&mut self, files: &[ChunkFile]) -> Result<(), Error> {
        let part = |file: &ChunkFile| ChunkPart { address: file.address, bytes: file.bytes };
        let attempt = "passing on the chunk memory";
        let copies = files.iter().map(|file| file.file.try_clone()).collect::<Result<_, _>>();
        let copies = copies.map_err(|source| Error::System { attempt: attempt.into(), source })?;
        let body = Reply::Chunks { parts: files.iter().map(part).collect() };
        let bytes = protocol::encode(attempt, &Numbered { id: 0, body })?;
        // If the process does not receive it, its connection ends without an answer.
        self.send(bytes, copies);
        Ok(())
    }

    /// Sends a reply of the pool protocol.
    pub fn reply(&mut self, id: u64, body: Reply) -> bool {
        match protocol::encode("answering a request", &Numbered { id, body }) {
            Ok(bytes) => self.send(bytes, Vec::new()),
            Err(e) => self.refuse(id, &e),
        }
    }

    /// Sends the reason for refusing a request.
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

    /// Sends queued messages. False if the connection is broken.
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

    /// True if no opening was received yet.
    pub fn is_new(&self) -> bool {
        matches!(self.role, Role::Unknown | Role::Greeted(_))
    }

    /// True if the connection has no deadline: it is attached to the NIC, belongs to a compute
    /// node, or has a deferred request.
    pub fn is_settled(&self) -> bool {
        match &self.role {
            Role::Unknown | Role::Greeted(_) => false,
            Role::Nic(session) => session.is_open(),
            Role::Pool(session) => session.client.is_some() || !session.deferred.is_empty(),
        }
    }

    /// True if the peer must read replies before its next request is read.
    pub fn has_unsent(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// The pool session, if the connection has that role.
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

/// Sends the rest of `bytes`, of which the stream has accepted `taken`.
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

/// Converts an IPv4 address in IPv6 form to IPv4, the form in which packets are sent.
fn ip_of(address: rustix::net::SocketAddrAny) -> Result<IpAddr, Errno> {
    let address = SocketAddr::try_from(address)?;
    Ok(address.ip().to_canonical())
}

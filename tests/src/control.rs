//! A control connection to a memory node that can send arbitrary messages.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use pool::protocol::{NodeHello, Numbered, Opening, Reply, Request};
use pool::remote::link::Link;
use pool::remote::token::{Greeting, Nonce, Nonces, Side, VERSION};
use pool::remote::{ConnectionSecret, RoceEnd, Route, Start, domain, roce_end};
use pool::{DomainToken, Remote};
use rnic::port::shm::socket::{Packet, receive, send};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use scheme::Offer;

/// Time limit of a reply.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A control connection.
pub struct Control {
    connection: Connection,
    /// The memory node's offer; `None` before the opening.
    offer: Option<Offer>,
}

enum Connection {
    /// To the memory node's Unix socket on this host.
    Local(OwnedFd),
    /// To a memory node on another host.
    Remote(Link),
}

/// Route and secrets of RoCEv2 connections to a memory node on another host.
#[derive(Clone, Copy)]
pub struct RemoteRoute {
    /// Route to the memory node's NIC.
    pub route: Route,
    /// The NIC on this host.
    pub local: RoceEnd,
    secret: ConnectionSecret,
    nonces: Nonces,
}

impl RemoteRoute {
    /// Draws a salt, which is sent to the memory node, and the QPs' start values that follow from
    /// the salt.
    pub fn draw(&self) -> Result<(Nonce, Start)> {
        let salt = Nonce::random()?;
        Ok((salt, self.secret.start(Side::Client, &salt)))
    }

    /// Proof on this connection that the compute node has the token of a domain.
    pub fn domain_proof(&self, token: &DomainToken) -> String {
        domain::proof(token, &self.nonces)
    }
}

impl Control {
    /// Connects without sending a message.
    pub fn connect(path: &Path) -> Result<Self> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?).context("connecting")?;
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, Some(TIMEOUT))?;
        Ok(Self { connection: Connection::Local(fd), offer: None })
    }

    /// Connects to the pool service, as a compute node does.
    pub fn pool(path: &Path) -> Result<Self> {
        let mut control = Self::connect(path)?;
        control.open(&Opening::pool())?;
        Ok(control)
    }

    /// Sends the opening and returns the memory node's first message.
    fn open(&mut self, opening: &Opening) -> Result<NodeHello> {
        self.send(&serde_json::to_vec(opening)?, &[])?;
        match self.receive()? {
            Some(Numbered { body: Reply::Welcome(welcome), .. }) => {
                self.offer = Some(welcome.offer.clone());
                Ok(welcome)
            }
            other => bail!("no welcome: {other:?}"),
        }
    }

    /// The memory node's offer to compute nodes.
    pub fn offer(&self) -> Result<&Offer> {
        self.offer.as_ref().context("the connection has no opening")
    }

    /// Connects to the pool service of another host. Also returns the route from the NIC that
    /// `remote` names.
    pub fn remote(remote: &Remote) -> Result<(Self, RemoteRoute)> {
        let port = remote.nic.as_ref().context("the address names no local NIC")?.port;
        let link = Connection::Remote(Link::remote(&remote.to)?);
        let mut control = Self { connection: link, offer: None };
        let client = Nonce::random()?;
        let greeting = Greeting { granary: VERSION, nonce: client, token: remote.token.is_some() };
        control.send(&serde_json::to_vec(&greeting)?, &[])?;
        let answer = control.message()?.context("no greeting")?;
        let answer: Greeting = serde_json::from_slice(&answer).context("reading a greeting")?;
        let nonces = Nonces { server: answer.nonce, client };
        let token = remote.token()?;
        let proof = token.as_ref().map(|token| token.proof(Side::Client, &nonces));
        let welcome = control.open(&Opening { proof, ..Opening::pool() })?;
        let Connection::Remote(link) = &control.connection else {
            unreachable!("connected remotely")
        };
        let tcp = link.as_remote().context("a connection to another host")?;
        let local = roce_end(link, port)?;
        let peer = welcome.roce.context("the memory node names no RoCEv2 port")?;
        let route = Route::between(tcp.local, local, tcp.peer.ip(), peer);
        let secret = ConnectionSecret::new(token.as_ref(), &nonces, welcome.authenticated);
        Ok((control, RemoteRoute { route, local, secret, nonces }))
    }

    /// Sends a packet. Descriptors are sent on the same host only.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        match &self.connection {
            Connection::Local(fd) => Ok(send(fd, bytes, descriptors)?),
            Connection::Remote(link) => Ok(link.send(bytes)?),
        }
    }

    /// The next packet of a local connection; `None` at the end of the connection.
    pub fn packet(&self) -> Result<Option<Packet>> {
        let Connection::Local(fd) = &self.connection else {
            bail!("there are no packets between hosts")
        };
        receive(fd).context("waiting for a reply")
    }

    /// The bytes of the next message; `None` at the end of the connection.
    fn message(&self) -> Result<Option<Vec<u8>>> {
        let Connection::Remote(link) = &self.connection else {
            return Ok(self.packet()?.map(|packet| packet.bytes));
        };
        loop {
            ensure!(link.wait_readable(TIMEOUT)?, "no reply for {TIMEOUT:?}");
            match link.receive() {
                Ok(Some(bytes)) => return Ok(Some(bytes)),
                Ok(None) => {}
                Err(_) => return Ok(None),
            }
        }
    }

    /// The next reply of the pool; `None` at the end of the connection.
    pub fn receive(&self) -> Result<Option<Numbered<Reply>>> {
        let Some(bytes) = self.message()? else { return Ok(None) };
        Ok(Some(serde_json::from_slice(&bytes).context("reading a reply")?))
    }

    /// Sends a request to the pool and returns the reply, which may be an error.
    pub fn ask(&self, request: Request) -> Result<Reply> {
        self.send(&serde_json::to_vec(&Numbered { id: 7, body: request })?, &[])?;
        Ok(self.receive()?.context("the connection was closed")?.body)
    }

    /// Sends a request that the pool must refuse; returns the reason.
    pub fn refusal(&self, request: Request) -> Result<String> {
        match self.ask(request)? {
            Reply::Error { why } => Ok(why),
            other => bail!("not refused: {other:?}"),
        }
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.connection {
            Connection::Local(fd) => fd.as_fd(),
            Connection::Remote(link) => link.as_fd(),
        }
    }
}

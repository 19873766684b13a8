//! A control connection to a memory node that says whatever it is told to say.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use pool::Remote;
use pool::protocol::{Numbered, Opening, Reply, Request};
use pool::remote::link::Link;
use pool::remote::token::{Greeting, Nonce, Nonces, Side, VERSION};
use pool::remote::{ConnectionSecret, RoceEnd, Route, Start};
use rnic::port::shm::socket::{Packet, receive, send};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// A control connection.
pub struct Control(Connection);

enum Connection {
    /// To the memory node's socket.
    Here(OwnedFd),
    /// To its host.
    There(Link),
}

/// The way to the NIC of a memory node on another host.
#[derive(Clone, Copy)]
pub struct Way {
    /// To there.
    pub route: Route,
    /// From here.
    pub here: RoceEnd,
    secret: ConnectionSecret,
}

impl Way {
    /// Draws a salt, and what QPs begin with for which it is told to the memory node.
    pub fn draw(&self) -> Result<(Nonce, Start)> {
        let salt = Nonce::random()?;
        Ok((salt, self.secret.start(Side::Client, &salt)))
    }
}

impl Control {
    /// Connects, and says nothing.
    pub fn connect(path: &Path) -> Result<Self> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?).context("connecting")?;
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, Some(PATIENCE))?;
        Ok(Self(Connection::Here(fd)))
    }

    /// Connects to the pool, as a compute node would.
    pub fn pool(path: &Path) -> Result<Self> {
        let control = Self::connect(path)?;
        control.say(&serde_json::to_vec(&Opening::pool())?, &[])?;
        match control.hear()? {
            Some(Numbered { body: Reply::Welcome(_), .. }) => Ok(control),
            other => bail!("no welcome: {other:?}"),
        }
    }

    /// The same on another host, with the NIC that `remote` names; and the way between the NICs.
    pub fn remote(remote: &Remote) -> Result<(Self, Way)> {
        let port = remote.nic.as_ref().context("which NIC?")?.port;
        let control = Self(Connection::There(Link::remote(&remote.to)?));
        let client = Nonce::random()?;
        let greeting = Greeting { granary: VERSION, nonce: client, token: remote.token.is_some() };
        control.say(&serde_json::to_vec(&greeting)?, &[])?;
        let answer = control.message()?.context("no greeting")?;
        let answer: Greeting = serde_json::from_slice(&answer).context("reading a greeting")?;
        let nonces = Nonces { server: answer.nonce, client };
        let token = remote.token()?;
        let proof = token.as_ref().map(|token| token.proof(Side::Client, &nonces));
        let opening = Opening { proof, ..Opening::pool() };
        control.say(&serde_json::to_vec(&opening)?, &[])?;
        let welcome = match control.hear()? {
            Some(Numbered { body: Reply::Welcome(welcome), .. }) => welcome,
            other => bail!("no welcome: {other:?}"),
        };
        let Connection::There(link) = &control.0 else { unreachable!("just connected so") };
        let tcp = link.as_remote().context("a connection to another host")?;
        let here = RoceEnd::of(link, port)?;
        let there = welcome.roce.context("it names no RoCEv2 port")?;
        let route = Route::between(tcp.local, here, tcp.peer.ip(), there);
        let secret = ConnectionSecret::new(token.as_ref(), &nonces, welcome.authenticated);
        Ok((control, Way { route, here, secret }))
    }

    /// Sends a packet. Descriptors do not go to another host.
    pub fn say(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        match &self.0 {
            Connection::Here(fd) => Ok(send(fd, bytes, descriptors)?),
            Connection::There(link) => Ok(link.send(bytes)?),
        }
    }

    /// The next packet on this host; nothing at the end of the connection.
    pub fn packet(&self) -> Result<Option<Packet>> {
        let Connection::Here(fd) = &self.0 else { bail!("there are no packets between hosts") };
        receive(fd).context("waiting for an answer")
    }

    /// The bytes of the next message; nothing at the end of the connection.
    fn message(&self) -> Result<Option<Vec<u8>>> {
        let Connection::There(link) = &self.0 else {
            return Ok(self.packet()?.map(|packet| packet.bytes));
        };
        loop {
            ensure!(link.wait_readable(PATIENCE)?, "no answer for {PATIENCE:?}");
            match link.receive() {
                Ok(Some(bytes)) => return Ok(Some(bytes)),
                Ok(None) => {}
                Err(_) => return Ok(None),
            }
        }
    }

    /// The next reply of the pool; nothing at the end of the connection.
    pub fn hear(&self) -> Result<Option<Numbered<Reply>>> {
        let Some(bytes) = self.message()? else { return Ok(None) };
        Ok(Some(serde_json::from_slice(&bytes).context("reading a reply")?))
    }

    /// Asks the pool; its reply, which may be an error.
    pub fn ask(&self, request: Request) -> Result<Reply> {
        self.say(&serde_json::to_vec(&Numbered { id: 7, body: request })?, &[])?;
        Ok(self.hear()?.context("the connection was closed")?.body)
    }

    /// Asks the pool for what it refuses; why it does.
    pub fn refusal(&self, request: Request) -> Result<String> {
        match self.ask(request)? {
            Reply::Error { why } => Ok(why),
            other => bail!("not refused: {other:?}"),
        }
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Connection::Here(fd) => fd.as_fd(),
            Connection::There(link) => link.as_fd(),
        }
    }
}

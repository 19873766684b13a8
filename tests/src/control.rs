//! A control connection to a memory node that says whatever it is told to say.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use pool::protocol::{Numbered, Opening, Reply, Request};
use rnic::port::shm::socket::{Packet, receive, send};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// A connection to the memory node's socket.
pub struct Control(OwnedFd);

impl Control {
    /// Connects, and says nothing.
    pub fn connect(path: &Path) -> Result<Self> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?).context("connecting")?;
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, Some(PATIENCE))?;
        Ok(Self(fd))
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

    /// Sends a packet.
    pub fn say(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        Ok(send(&self.0, bytes, descriptors)?)
    }

    /// The next packet; nothing at the end of the connection.
    pub fn packet(&self) -> Result<Option<Packet>> {
        receive(&self.0).context("waiting for an answer")
    }

    /// The next reply of the pool; nothing at the end of the connection.
    pub fn hear(&self) -> Result<Option<Numbered<Reply>>> {
        let Some(packet) = self.packet()? else { return Ok(None) };
        Ok(Some(serde_json::from_slice(&packet.bytes).context("reading a reply")?))
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
        self.0.as_fd()
    }
}

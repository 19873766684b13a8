//! Where a memory node listens for other hosts.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SocketFlags, sockopt};

use super::token::Token;
use crate::Error;

/// How a memory node is reached from other hosts.
#[derive(Clone, Debug)]
pub struct Listen {
    /// TCP address of the control connection; the UDP port of RoCEv2 has the same number.
    pub address: SocketAddr,
    /// What compute nodes must have.
    pub token: Option<Token>,
    /// Without a token, whoever reaches the address may take memory. Beyond loopback that must be said.
    pub open_to_all: bool,
}

impl Listen {
    /// Listens at `address`, to whoever has `token`.
    pub fn new(address: SocketAddr, token: Option<Token>) -> Self {
        Self { address, token, open_to_all: false }
    }

    /// Refuses to be open to all unless that is said.
    pub fn check(&self) -> Result<(), Error> {
        if self.token.is_some() || self.open_to_all || is_loopback(self.address.ip()) {
            return Ok(());
        }
        Err(Error::Setting {
            setting: "listen",
            value: self.address.to_string(),
            why: "it is reached from other hosts, and no token is set, so that whoever reaches it may take \
                  memory; set a token, listen on a loopback address, or say that it shall be open to all"
                .into(),
        })
    }
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Numbers that are tried until one is free for TCP and UDP.
const TRIES: u32 = 64;

/// The listening TCP socket.
pub struct RemoteListener {
    socket: TcpListener,
    address: SocketAddr,
    /// What compute nodes must have.
    pub token: Option<Token>,
}

impl RemoteListener {
    /// Listens; gives the socket of the UDP port with the same number as well, for the NIC. With port 0 it is any
    /// number that both have free.
    ///
    /// # Errors
    /// The address is in use or not this host's; it is reached from other hosts and there is no token.
    pub fn bind(listen: &Listen) -> Result<(Self, UdpSocket), Error> {
        listen.check()?;
        let system = |what: &str, source| {
            let attempt = format!("listening at {} ({what})", listen.address);
            Error::System { attempt, source }
        };
        let mut tries = if listen.address.port() == 0 { TRIES } else { 1 };
        loop {
            tries -= 1;
            let socket = TcpListener::bind(listen.address).map_err(|e| system("TCP", e))?;
            socket.set_nonblocking(true).map_err(|e| system("TCP", e))?;
            let address = socket.local_addr().map_err(|e| system("TCP", e))?;
            match UdpSocket::bind(address) {
                Ok(wire) => {
                    return Ok((Self { socket, address, token: listen.token.clone() }, wire));
                }
                Err(e) if e.kind() == ErrorKind::AddrInUse && tries > 0 => {}
                Err(e) => return Err(system("UDP, for RoCEv2", e)),
            }
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next connection, which does not block; `None` if there is none now.
    pub fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.socket, flags) {
            Ok(fd) => {
                mind_the_peer(&fd)?;
                Ok(Some(fd))
            }
            Err(Errno::WOULDBLOCK | Errno::CONNABORTED | Errno::INTR | Errno::PROTO) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl AsFd for RemoteListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// After this long without a sign of life the peer is asked for one...
const IDLE: Duration = Duration::from_secs(3);
/// ... so often, at this interval...
const PROBES: u32 = 4;
const INTERVAL: Duration = Duration::from_secs(1);
/// ... and so long what was sent may go unacknowledged. Then the peer's host is gone.
const GONE: Duration = Duration::from_secs(7);

/// Has the kernel end a connection whose other host is gone, and send small messages at once.
pub fn mind_the_peer(stream: impl AsFd) -> Result<(), Errno> {
    let stream = stream.as_fd();
    sockopt::set_tcp_nodelay(stream, true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, IDLE)?;
    sockopt::set_tcp_keepintvl(stream, INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    sockopt::set_tcp_user_timeout(stream, GONE.as_millis() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_loopback_a_token_is_needed_or_a_word() {
        let bind = |address: &str, token: Option<Token>, open_to_all| {
            let address = address.parse().unwrap();
            RemoteListener::bind(&Listen { address, token, open_to_all }).map(drop)
        };
        let token = || Some(Token::new("0123456789abcdef").unwrap());
        for address in ["0.0.0.0:0", "[::]:0"] {
            let e = bind(address, None, false).unwrap_err().to_string();
            assert!(e.contains("no token is set"), "{e}");
            bind(address, token(), false).unwrap();
            bind(address, None, true).unwrap();
        }
        for address in ["127.0.0.1:0", "[::1]:0"] {
            bind(address, None, false).unwrap();
        }
    }

    #[test]
    fn an_address_in_use_is_named() {
        let first = Listen::new("127.0.0.1:0".parse().unwrap(), None);
        let first = RemoteListener::bind(&first).unwrap().0;
        let e = RemoteListener::bind(&Listen::new(first.address(), None)).err().unwrap();
        assert!(e.to_string().contains(&first.address().to_string()), "{e}");
        assert!(first.accept().unwrap().is_none());
        let _client = std::net::TcpStream::connect(first.address()).unwrap();
        let mut fds = [rustix::event::PollFd::new(&first, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, None).unwrap();
        assert!(first.accept().unwrap().is_some());
    }
}

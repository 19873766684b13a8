//! Listening for compute nodes on other hosts.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SocketFlags, sockopt};

use super::token::Token;
use crate::{Error, Settings};
use scheme::DomainToken;

/// Settings for connections from other hosts.
#[derive(Clone, Debug)]
pub struct Listen {
    /// TCP address of the control connection. RoCEv2 uses the UDP port with the same number.
    pub address: SocketAddr,
    /// Token that compute nodes must prove.
    pub token: Option<Token>,
    /// Allows connections without a token: every host and every local user that reaches the address
    /// can then allocate memory. Required even for a loopback address, because all users of this
    /// host reach it.
    pub open_to_all: bool,
    /// Packets carry authentication tags. Without tags packets cost less, but are identified only
    /// by address and PSN.
    pub authenticated: bool,
    /// Tokens of the domains that compute nodes on other hosts can join.
    pub domains: Vec<DomainToken>,
}

impl Listen {
    /// Listens at `address`, for compute nodes that prove `token`.
    pub fn new(address: SocketAddr, token: Token) -> Self {
        Self { token: Some(token), open_to_all: false, ..Self::to_all(address) }
    }

    /// Listens at `address` without a token.
    pub fn to_all(address: SocketAddr) -> Self {
        let domains = Vec::new();
        Self { address, token: None, open_to_all: true, authenticated: true, domains }
    }

    /// Requires a token or `open_to_all`.
    pub fn check(&self) -> Result<(), Error> {
        if self.token.is_some() || self.open_to_all {
            return Ok(());
        }
        Err(Error::Setting {
            setting: "listen",
            value: self.address.to_string(),
            why: "no token is set, so every host and local user that reaches this address \
                  could allocate memory; set a token, or allow access without one"
                .into(),
        })
    }
}

/// Attempts to find a port number that is free for TCP and UDP.
const TRIES: u32 = 64;

/// The listening TCP socket.
pub struct RemoteListener {
    socket: TcpListener,
    address: SocketAddr,
    /// Token that compute nodes must prove.
    pub token: Option<Token>,
    /// Packets carry authentication tags.
    pub authenticated: bool,
    /// Tokens of the domains that compute nodes can join.
    pub domains: Vec<DomainToken>,
    /// Time for which a compute node may be unreachable.
    client_timeout: Duration,
}

impl RemoteListener {
    /// Listens on TCP. Also returns a socket of the UDP port with the same number, for the NIC.
    /// Port 0 selects a number that is free for both.
    ///
    /// # Errors
    /// The address is in use or is not an address of this host; or neither a token nor
    /// `open_to_all` is set.
    pub fn bind(listen: &Listen) -> Result<(Self, UdpSocket), Error> {
        Self::bind_with(listen, UdpSocket::bind)
    }

    /// [`RemoteListener::bind`] with `udp` to create the UDP socket.
    fn bind_with(
        listen: &Listen,
        mut udp: impl FnMut(SocketAddr) -> std::io::Result<UdpSocket>,
    ) -> Result<(Self, UdpSocket), Error> {
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
            match udp(address) {
                Ok(wire) => {
                    let Listen { token, authenticated, domains, .. } = listen.clone();
                    let client_timeout = Settings::CLIENT_TIMEOUT;
                    let listener =
                        Self { socket, address, token, authenticated, domains, client_timeout };
                    return Ok((listener, wire));
                }
                Err(e) if e.kind() == ErrorKind::AddrInUse && tries > 0 => {}
                Err(e) => return Err(system("UDP, for RoCEv2", e)),
            }
        }
    }

    /// The same listener for compute nodes that may be unreachable for `time`.
    pub fn with_client_timeout(self, time: Duration) -> Self {
        Self { client_timeout: time, ..self }
    }

    /// Local address of the listener.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts the next connection, in non-blocking mode; `None` if none is pending or the
    /// connection has broken already.
    ///
    /// # Errors
    /// No descriptor or memory is available: the connection stays in the queue.
    pub fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.socket, flags) {
            // A connection whose options cannot be set has broken.
            Ok(fd) => Ok(set_keepalive(&fd, self.client_timeout).is_ok().then_some(fd)),
            Err(e) if is_connection_error(e) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// True for errors of `accept` that concern only the accepted connection (`accept(2)`) or mean that
/// none is pending.
fn is_connection_error(e: Errno) -> bool {
    use Errno as E;
    matches!(
        e,
        E::WOULDBLOCK
            | E::INTR
            | E::CONNABORTED
            | E::PROTO
            | E::PERM
            | E::NETDOWN
            | E::NOPROTOOPT
            | E::HOSTDOWN
            | E::NONET
            | E::HOSTUNREACH
            | E::OPNOTSUPP
            | E::NETUNREACH
            | E::TIMEDOUT
    )
}

impl AsFd for RemoteListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Idle time of a connection until the first keep-alive probe.
const IDLE: Duration = Duration::from_secs(3);
const INTERVAL: Duration = Duration::from_secs(1);

/// Makes the kernel end a connection to a host that is unreachable for `gone`, at least 4 s, and
/// send small messages without delay.
///
/// A connection ends after `IDLE` and then one unanswered keep-alive probe per `INTERVAL`: 9
/// with the default of 12 s. On a network that loses one packet in ten in both directions, a probe
/// or its answer is lost with probability 0.19. With 4 probes (7 s) one idle period in 800 ended a
/// living connection; with 9 it is one in three million.
pub fn set_keepalive(stream: impl AsFd, gone: Duration) -> Result<(), Errno> {
    let probes = (gone.saturating_sub(IDLE).as_secs() / INTERVAL.as_secs()).clamp(1, 127) as u32;
    // The kernel counts at most 127 probes, so a long time has longer intervals.
    let interval = (gone.saturating_sub(IDLE) / probes).max(INTERVAL);
    let stream = stream.as_fd();
    sockopt::set_tcp_nodelay(stream, true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, IDLE)?;
    sockopt::set_tcp_keepintvl(stream, interval)?;
    sockopt::set_tcp_keepcnt(stream, probes)?;
    sockopt::set_tcp_user_timeout(stream, gone.as_millis() as u32)
}

#[cfg(test)]
mod tests {
    use rustix::net::{self, AddressFamily, SocketType};

    use super::*;

    #[test]
    fn every_address_needs_a_token_or_open_to_all() {
        let bind = |address: &str, token: Option<Token>, open_to_all| {
            let address = address.parse().unwrap();
            let listen = Listen { token, open_to_all, ..Listen::to_all(address) };
            RemoteListener::bind(&listen).map(drop)
        };
        let token = || Some(Token::new("0123456789abcdef").unwrap());
        for address in ["0.0.0.0:0", "[::]:0", "127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            let e = bind(address, None, false).unwrap_err().to_string();
            assert!(e.contains("no token is set"), "{e}");
            bind(address, token(), false).unwrap();
            bind(address, None, true).unwrap();
        }
    }

    #[test]
    fn bind_error_names_the_address_in_use() {
        let first = Listen::to_all("127.0.0.1:0".parse().unwrap());
        let first = RemoteListener::bind(&first).unwrap().0;
        let e = RemoteListener::bind(&Listen::to_all(first.address())).err().unwrap();
        assert!(e.to_string().contains(&first.address().to_string()), "{e}");
        assert!(first.accept().unwrap().is_none());
        let _client = std::net::TcpStream::connect(first.address()).unwrap();
        let mut fds = [rustix::event::PollFd::new(&first, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, None).unwrap();
        assert!(first.accept().unwrap().is_some());
    }

    #[test]
    fn port_zero_retries_until_tcp_and_udp_are_free() {
        let fixed = RemoteListener::bind(&Listen::to_all("127.0.0.1:0".parse().unwrap()));
        let fixed = fixed.unwrap().0.address();
        for (port, tries) in [(0, TRIES), (fixed.port(), 1)] {
            let listen = Listen::to_all(SocketAddr::new(fixed.ip(), port));
            for taken in [0, tries - 1, tries] {
                let mut asked = 0;
                let bound = RemoteListener::bind_with(&listen, |address| {
                    asked += 1;
                    assert!(asked <= tries, "{asked} attempts");
                    match asked > taken {
                        true => UdpSocket::bind(address),
                        false => Err(ErrorKind::AddrInUse.into()),
                    }
                });
                assert_eq!(asked, tries.min(taken + 1), "port {port}");
                match bound {
                    Ok((listener, wire)) => {
                        assert!(taken < tries);
                        assert_eq!(wire.local_addr().unwrap(), listener.address());
                    }
                    Err(e) => assert!(taken == tries && e.to_string().contains("UDP"), "{e}"),
                }
            }
        }
        let listen = Listen::to_all(SocketAddr::new(fixed.ip(), 0));
        let mut asked = 0;
        let bound = RemoteListener::bind_with(&listen, |_| {
            asked += 1;
            assert_eq!(asked, 1, "another number does not help");
            Err(ErrorKind::PermissionDenied.into())
        });
        assert!(bound.err().unwrap().to_string().contains("permission denied"));
    }

    #[test]
    fn accept_distinguishes_connection_and_listener_errors() {
        for of_connection in [Errno::WOULDBLOCK, Errno::INTR, Errno::CONNABORTED, Errno::TIMEDOUT] {
            assert!(is_connection_error(of_connection), "{of_connection}");
        }
        for of_listener in [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::INVAL] {
            assert!(!is_connection_error(of_listener), "{of_listener}");
        }
        // A socket that does not listen: `accept` fails with an error of the listener.
        let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
        let not_listening = net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        let address = "127.0.0.1:0".parse().unwrap();
        let not_listening = RemoteListener {
            socket: not_listening.into(),
            address,
            token: None,
            authenticated: true,
            domains: Vec::new(),
            client_timeout: Settings::CLIENT_TIMEOUT,
        };
        assert_eq!(not_listening.accept().err(), Some(Errno::INVAL));
    }

    #[test]
    fn accepted_connection_has_nonblock_cloexec_and_keepalive() {
        let listen = Listen::to_all("127.0.0.1:0".parse().unwrap());
        let listener = RemoteListener::bind(&listen).unwrap().0;
        let _client = std::net::TcpStream::connect(listener.address()).unwrap();
        let mut fds = [rustix::event::PollFd::new(&listener, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, None).unwrap();
        let stream = listener.accept().unwrap().expect("a connection");
        let inherited = rustix::io::fcntl_getfd(&stream).unwrap();
        assert!(inherited.contains(rustix::io::FdFlags::CLOEXEC));
        let status = rustix::fs::fcntl_getfl(&stream).unwrap();
        assert!(status.contains(rustix::fs::OFlags::NONBLOCK));
        assert!(sockopt::tcp_nodelay(&stream).unwrap());
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), IDLE);
        assert_eq!(sockopt::tcp_keepintvl(&stream).unwrap(), INTERVAL);
        assert_eq!(sockopt::tcp_keepcnt(&stream).unwrap(), 9);
        let gone = sockopt::tcp_user_timeout(&stream).unwrap();
        assert_eq!(Duration::from_millis(gone.into()), crate::Settings::default().client_timeout);
    }
}

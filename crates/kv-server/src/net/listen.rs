//! Sockets that listen, and the sockets that they accept.

use std::fs;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, getpeername,
    getsockname, listen, socket_with,
};
use rustls::ServerConfig;

use super::tls;
use crate::config::Config;
use crate::error::Error;

const FLAGS: SocketFlags = SocketFlags::NONBLOCK.union(SocketFlags::CLOEXEC);

/// A socket that listens.
#[derive(Debug)]
pub(crate) struct Listener {
    pub fd: OwnedFd,
    /// Address, or path of a Unix socket.
    pub address: String,
    path: Option<PathBuf>,
    tls: Option<Arc<ServerConfig>>,
}

/// A socket that was accepted.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub fd: Arc<OwnedFd>,
    pub peer: String,
    pub local: String,
    pub is_unix: bool,
    /// The peer is on this host.
    pub is_local: bool,
    pub tls: Option<Arc<ServerConfig>>,
}

impl Listener {
    fn tcp(address: SocketAddr, backlog: i32) -> io::Result<Self> {
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let fd = socket_with(family, SocketType::STREAM, FLAGS, None)?;
        sockopt::set_socket_reuseaddr(&fd, true)?;
        if address.is_ipv6() {
            sockopt::set_ipv6_v6only(&fd, true)?;
        }
        bind(&fd, &address)?;
        listen(&fd, backlog)?;
        let address = SocketAddr::try_from(getsockname(&fd)?)?;
        Ok(Self { fd, address: address.to_string(), path: None, tls: None })
    }

    fn unix(path: &Path, mode: u32, backlog: i32) -> io::Result<Self> {
        // The socket of a server that has ended.
        if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
            fs::remove_file(path)?;
        }
        let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
        bind(&fd, &SocketAddrUnix::new(path)?)?;
        if mode > 0 {
            fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        }
        listen(&fd, backlog)?;
        let address = path.display().to_string();
        Ok(Self { fd, address, path: Some(path.to_owned()), tls: None })
    }

    /// Accepts the next connection.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is none.
    pub fn accept(&self, keepalive_s: u32) -> io::Result<Accepted> {
        let fd = Arc::new(accept_with(&self.fd, FLAGS)?);
        if self.path.is_some() {
            let (peer, local) = (format!("{}:0", self.address), format!("{}:0", self.address));
            return Ok(Accepted { fd, peer, local, is_unix: true, is_local: true, tls: None });
        }
        // A peer that has gone already is found at the first read.
        let peer = getpeername(&fd)?.ok_or(io::ErrorKind::NotConnected)?;
        let (peer, local) = (SocketAddr::try_from(peer)?, SocketAddr::try_from(getsockname(&fd)?)?);
        sockopt::set_tcp_nodelay(&fd, true)?;
        if keepalive_s > 0 {
            let second = Duration::from_secs(1);
            sockopt::set_socket_keepalive(&fd, true)?;
            sockopt::set_tcp_keepidle(&fd, second * keepalive_s)?;
            sockopt::set_tcp_keepintvl(&fd, (second * (keepalive_s / 3)).max(second))?;
            sockopt::set_tcp_keepcnt(&fd, 3)?;
        }
        Ok(Accepted {
            fd,
            peer: peer.to_string(),
            local: local.to_string(),
            is_unix: false,
            is_local: peer.ip().to_canonical().is_loopback(),
            tls: self.tls.clone(),
        })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // Another server may have replaced the socket; then that one stays unreachable until
            // its restart, as with Redis.
            let _ = fs::remove_file(path);
        }
    }
}

/// Opens all sockets of the configuration.
pub(crate) fn open(config: &Config) -> Result<Vec<Listener>, Error> {
    let backlog = i32::try_from(config.number("tcp-backlog")).unwrap_or(511);
    let mut all = Vec::new();
    let (plain, secure) = (config.number("port") as u16, config.number("tls-port") as u16);
    if plain > 0 {
        open_port(config, plain, backlog, None, &mut all)?;
    }
    if secure > 0 {
        open_port(config, secure, backlog, Some(tls::load(config)?), &mut all)?;
    }
    let path = config.get("unixsocket");
    if !path.is_empty() {
        let mode = u32::from_str_radix(&config.get("unixsocketperm"), 8).unwrap_or(0);
        let socket = Listener::unix(Path::new(&path), mode, backlog);
        all.push(socket.map_err(|cause| Error::Listen { address: path, cause })?);
    }
    if all.is_empty() { Err(Error::NoAddress) } else { Ok(all) }
}

fn open_port(
    config: &Config,
    port: u16,
    backlog: i32,
    tls: Option<Arc<ServerConfig>>,
    all: &mut Vec<Listener>,
) -> Result<(), Error> {
    let before = all.len();
    let mut refused = None;
    for word in config.get("bind").split_ascii_whitespace() {
        let (host, is_optional) = match word.strip_prefix('-') {
            Some(host) => (host, true),
            None => (word, false),
        };
        let host = match host {
            "*" => "0.0.0.0",
            "::*" => "::",
            host => host,
        };
        let error = |cause| Error::Listen { address: format!("{host} port {port}"), cause };
        let addresses = (host, port).to_socket_addrs().map_err(error);
        let opened = addresses.and_then(|mut addresses| {
            let address = addresses.next().ok_or_else(|| error(io::ErrorKind::NotFound.into()))?;
            Listener::tcp(address, backlog).map_err(error)
        });
        match opened {
            Ok(mut listener) => {
                listener.tls.clone_from(&tls);
                all.push(listener);
            }
            Err(error) if is_optional => refused = Some(error),
            Err(error) => return Err(error),
        }
    }
    match refused {
        Some(error) if all.len() == before => Err(error),
        _ => Ok(()),
    }
}

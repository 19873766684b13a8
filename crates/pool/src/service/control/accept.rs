//! Accepting connections: connection limits, and lack of descriptors or memory.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::{Control, LISTENER, REMOTE_LISTENER, system};
use crate::Error;
use crate::service::client_limits::PeerIdentity;
use crate::service::connection::Connection;
use crate::service::connection_limits::ConnectionId;
use crate::service::connection_limits::{self, UnprovedDecision};
use crate::socket::Peer;

/// Delay of the next attempt after a connection could not be accepted.
const AGAIN: Duration = Duration::from_millis(100);

impl Control<'_> {
    pub(super) fn accept(&mut self) -> Result<(), Error> {
        match self.listener.accept() {
            Ok(None) => Ok(()),
            Ok(Some(fd)) => {
                let identity = PeerIdentity::Process(Peer::of(&fd));
                if self.has_room_for(identity) {
                    let credit = self.credit(identity);
                    self.add(Connection::local(fd, credit));
                } else {
                    self.refuse_connection(identity, "the limit of connections is reached");
                }
                Ok(())
            }
            Err(e) => self.stop_accepting(e),
        }
    }

    pub(super) fn accept_remote(&mut self) -> Result<(), Error> {
        let Some(listener) = &self.remote else { return Ok(()) };
        match listener.accept() {
            Ok(None) => Ok(()),
            Ok(Some(stream)) => {
                let port = listener.address().port();
                self.admit_remote(stream, port);
                Ok(())
            }
            Err(e) => self.stop_accepting(e),
        }
    }

    /// Adds a TCP connection if the limit of unproved connections allows it.
    fn admit_remote(&mut self, stream: OwnedFd, port: u16) {
        // An error means that the connection has ended already.
        let Ok(mut connection) = Connection::remote(stream, port, 0) else { return };
        let PeerIdentity::Host(address) = connection.identity else { return };
        match connection_limits::admit_unproved(address, Instant::now(), self.unproved()) {
            UnprovedDecision::Kept => {}
            UnprovedDecision::InPlaceOf(old) => self.close(old),
            UnprovedDecision::Refused => {
                let why = "the limit of connections without proof of the token is reached";
                self.refuse_connection(connection.identity, why);
                return;
            }
        }
        connection.credit = self.credit(connection.identity);
        self.add(connection);
    }

    fn refuse_connection(&mut self, identity: PeerIdentity, why: &str) {
        self.refusals.connection(identity, why, self.started.elapsed());
    }

    /// TCP connections that have not proved the token.
    fn unproved(&self) -> impl Iterator<Item = (ConnectionId, IpAddr, Instant)> {
        self.connections.iter().filter_map(|(id, c)| match c.identity {
            PeerIdentity::Host(address) if c.is_new() => Some((*id, address, c.accepted)),
            _ => None,
        })
    }

    /// True if one more connection of `identity` is allowed.
    pub(super) fn has_room_for(&self, identity: PeerIdentity) -> bool {
        let let_in = self.connections.values().filter(|c| !(c.is_stream() && c.is_new()));
        let clients_max = self.shared.node.settings().clients_max as usize;
        connection_limits::has_room_for(clients_max, identity, let_in.map(|c| c.identity))
    }

    fn credit(&mut self, identity: PeerIdentity) -> u32 {
        let now = self.started.elapsed();
        self.limits.forget(now);
        self.limits.open(identity, now)
    }

    /// Adds a connection. If epoll cannot watch it, only this connection is closed.
    pub(super) fn add(&mut self, connection: Connection) {
        let id = ConnectionId(self.next);
        self.next += 1;
        if let Err(e) = self.epoll.add(&connection, id.0) {
            {
                let mut trouble = self.shared.trouble.lock();
                trouble.connections += 1;
                trouble.last = Some(format!("watching a new connection: {e}"));
            }
            self.refusals.connection(connection.identity, &e.to_string(), self.started.elapsed());
            return;
        }
        tracing::debug!(connection = id.0, peer = %connection.identity, "connection accepted");
        self.connections.insert(id, connection);
        self.update_deadline(id);
    }

    /// Stops accepting connections for lack of descriptors or memory. Pending connections stay in
    /// the listeners' queues until `AGAIN` has passed or a connection is closed.
    fn stop_accepting(&mut self, why: Errno) -> Result<(), Error> {
        {
            let mut trouble = self.shared.trouble.lock();
            trouble.accepts += 1;
            trouble.last = Some(format!("accepting a connection: {why}"));
        }
        self.refusals.accept_failed(&why.to_string(), self.started.elapsed());
        self.accept_again = Some(Instant::now() + AGAIN);
        self.watch_listeners(EventFlags::empty())
    }

    /// Accepts connections again if the delay has passed.
    pub(super) fn accept_again(&mut self) -> Result<(), Error> {
        if self.accept_again.is_some_and(|at| at <= Instant::now()) {
            self.accept_again = None;
            self.watch_listeners(EventFlags::IN)?;
        }
        Ok(())
    }

    /// # Errors
    /// Fatal: the kernel refuses the change only if a listener is not in the epoll set, and then no
    /// further connection would be accepted. A change allocates no memory.
    fn watch_listeners(&mut self, flags: EventFlags) -> Result<(), Error> {
        self.epoll.change(&self.listener, LISTENER, flags).map_err(system)?;
        match &self.remote {
            Some(remote) => self.epoll.change(remote, REMOTE_LISTENER, flags).map_err(system),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "accept_tests.rs"]
mod tests;

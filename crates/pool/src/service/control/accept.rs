//! Accepting connections: who finds room, and what happens where descriptors or memory run out.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rnic::port::shm::Peer;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::{Control, LISTENER, REMOTE_LISTENER, system};
use crate::Error;
use crate::service::connection::{Connection, ConnectionId};
use crate::service::paces::Asker;
use crate::service::rooms::{self, Unproved};

/// After no connection could be accepted, the next attempt comes so much later.
const AGAIN: Duration = Duration::from_millis(100);

impl Control<'_> {
    pub(super) fn accept(&mut self) -> Result<(), Error> {
        match self.listener.accept() {
            Ok(None) => Ok(()),
            Ok(Some(fd)) => {
                let asker = Asker::Process(Peer::of(&fd));
                if self.has_room_for(asker) {
                    let credit = self.credit(asker);
                    self.add(Connection::local(fd, credit));
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

    /// Takes in a TCP connection, if the room for those that have not proved the token has a place.
    fn admit_remote(&mut self, stream: OwnedFd, port: u16) {
        // An error here is that it has ended again.
        let Ok(mut connection) = Connection::remote(stream, port, 0) else { return };
        let Asker::Host(address) = connection.asker else { return };
        match rooms::admit_unproved(address, Instant::now(), self.unproved()) {
            Unproved::Kept => {}
            Unproved::InPlaceOf(old) => self.close(old),
            Unproved::Refused => return,
        }
        connection.credit = self.credit(connection.asker);
        self.add(connection);
    }

    /// TCP connections that have not proved the token.
    fn unproved(&self) -> impl Iterator<Item = (ConnectionId, IpAddr, Instant)> {
        self.connections.iter().filter_map(|(id, c)| match c.asker {
            Asker::Host(address) if c.is_new() => Some((*id, address, c.accepted)),
            _ => None,
        })
    }

    /// Whether one more connection of `asker` may be let in.
    pub(super) fn has_room_for(&self, asker: Asker) -> bool {
        let let_in = self.connections.values().filter(|c| !(c.is_stream() && c.is_new()));
        let clients_max = self.shared.node.settings().clients_max as usize;
        rooms::has_room_for(clients_max, asker, let_in.map(|c| c.asker))
    }

    fn credit(&mut self, asker: Asker) -> u32 {
        let now = self.started.elapsed();
        self.paces.forget(now);
        self.paces.open(asker, now)
    }

    /// Serves a connection. One that cannot be watched is ended, and nothing else.
    pub(super) fn add(&mut self, connection: Connection) {
        let id = ConnectionId(self.next);
        self.next += 1;
        if let Err(e) = self.watch.add(&connection, id.0) {
            let mut trouble = self.shared.trouble.lock();
            trouble.connections += 1;
            trouble.last = Some(format!("watching a new connection: {e}"));
            return;
        }
        self.connections.insert(id, connection);
        self.mind_silence(id);
    }

    /// No connection can be accepted now: there is no descriptor or no memory left. Those that wait
    /// do so in the listeners' queues, and are accepted a little later or when a connection has
    /// ended.
    fn stop_accepting(&mut self, why: Errno) -> Result<(), Error> {
        {
            let mut trouble = self.shared.trouble.lock();
            trouble.accepts += 1;
            trouble.last = Some(format!("accepting a connection: {why}"));
        }
        self.accept_again = Some(Instant::now() + AGAIN);
        self.watch_listeners(EventFlags::empty())
    }

    /// Accepts connections again, if it is time to.
    pub(super) fn accept_again(&mut self) -> Result<(), Error> {
        if self.accept_again.is_some_and(|at| at <= Instant::now()) {
            self.accept_again = None;
            self.watch_listeners(EventFlags::IN)?;
        }
        Ok(())
    }

    /// # Errors
    /// Fatal: the kernel refuses it only if a listener is not in the epoll set, so that no
    /// connection would ever be accepted again. A change allocates nothing.
    fn watch_listeners(&mut self, flags: EventFlags) -> Result<(), Error> {
        self.watch.change(&self.listener, LISTENER, flags).map_err(system)?;
        match &self.remote {
            Some(remote) => self.watch.change(remote, REMOTE_LISTENER, flags).map_err(system),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "accept_tests.rs"]
mod tests;

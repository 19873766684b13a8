//! The control thread: an event loop over the listening sockets, the connections and an eventfd.

mod accept;
mod deferred;
mod epoll;
mod requests;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

pub(super) use self::epoll::Epoll;
use super::Shared;
use super::client_limits::ClientLimits;
use super::connection::{Connection, Input, Role};
use super::connection_limits::ClientSlots;
use super::connection_limits::ConnectionId;
use super::refusals::RefusalLog;
use crate::Error;
use crate::protocol::{self, Numbered, Request};
use crate::remote::RemoteListener;
use crate::socket::{Listener, Packet, close_deferred};
use scheme::ClientId;

const LISTENER: u64 = 0;
const WAKE: u64 = 1;
const REMOTE_LISTENER: u64 = 2;
const FIRST_CONNECTION: u64 = 3;

/// Maximum number of pending requests for memory per connection.
const AWAITS_MAX: usize = 16;

/// The sockets of the control thread, already in the epoll set, so that errors occur before the
/// thread starts.
pub(super) struct ControlSockets {
    epoll: Epoll,
    listener: Listener,
    remote: Option<RemoteListener>,
}

impl ControlSockets {
    /// Adds the listeners and the wake-up eventfd to the epoll set.
    pub fn new(
        epoll: Epoll,
        wake: &OwnedFd,
        listener: Listener,
        remote: Option<RemoteListener>,
    ) -> Result<Self, Error> {
        epoll.add(&listener, LISTENER).map_err(system)?;
        epoll.add(wake, WAKE).map_err(system)?;
        if let Some(remote) = &remote {
            epoll.add(remote, REMOTE_LISTENER).map_err(system)?;
        }
        Ok(Self { epoll, listener, remote })
    }
}

/// Runs the control thread until `stop` is set.
pub(super) fn run(shared: &Shared, sockets: ControlSockets) -> Result<(), Error> {
    let mut control = Control::new(shared, sockets);
    let result = control.serve();
    control.close_all();
    result
}

struct Control<'a> {
    shared: &'a Shared,
    listener: Listener,
    /// Listener for other hosts.
    remote: Option<RemoteListener>,
    epoll: Epoll,
    connections: BTreeMap<ConnectionId, Connection>,
    /// Connections that have not settled, ordered by deadline.
    silent: BTreeSet<(Instant, ConnectionId)>,
    next: u64,
    slots: ClientSlots,
    started: Instant,
    limits: ClientLimits,
    refusals: RefusalLog,
    /// Connections that are not read because their process has no tokens.
    paused: Vec<ConnectionId>,
    /// Time at which the listeners are watched again, after a lack of descriptors or memory.
    accept_again: Option<Instant>,
}

impl<'a> Control<'a> {
    fn new(shared: &'a Shared, sockets: ControlSockets) -> Self {
        let ControlSockets { epoll, listener, remote } = sockets;
        let settings = shared.node.settings();
        Self {
            shared,
            listener,
            remote,
            epoll,
            connections: BTreeMap::new(),
            silent: BTreeSet::new(),
            next: FIRST_CONNECTION,
            slots: ClientSlots::new(settings.clients_max as usize, settings.client_quotas),
            started: Instant::now(),
            limits: ClientLimits::new(shared.node.client_qps()),
            refusals: RefusalLog::new(),
            paused: Vec::new(),
            accept_again: None,
        }
    }

    /// Runs the event loop.
    ///
    /// # Errors
    /// Only errors that make service impossible: in the epoll instance or in a listener. A system
    /// call that fails for one connection closes that connection.
    fn serve(&mut self) -> Result<(), Error> {
        let mut events = Vec::with_capacity(64);
        while !self.shared.stop.load(Ordering::Acquire) {
            self.shared.gate.pass();
            events.clear();
            let timeout = self.next_deadline();
            self.epoll.wait(&mut events, timeout.as_ref()).map_err(system)?;
            self.shared.wakeups.fetch_add(1, Ordering::Relaxed);
            for event in events.drain(..) {
                match event.data.u64() {
                    LISTENER => self.accept()?,
                    REMOTE_LISTENER => self.accept_remote()?,
                    WAKE => {
                        let _ = rustix::io::read(&self.shared.wake.eventfd, &mut [0; 8]);
                    }
                    id => self.serve_connection(ConnectionId(id), event.flags),
                }
            }
            self.answer_awaits();
            self.answer_deferred();
            self.close_idle();
            self.resume_paused();
            self.accept_again()?;
        }
        Ok(())
    }

    /// Sets or clears the deadline of a connection, depending on whether it has settled.
    fn update_deadline(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        match (connection.is_settled(), connection.deadline) {
            (true, Some(until)) => {
                self.silent.remove(&(until, id));
                connection.deadline = None;
            }
            (false, None) => {
                let until = connection.last_request + self.shared.node.settings().silence;
                self.silent.insert((until, id));
                connection.deadline = Some(until);
            }
            _ => {}
        }
    }

    /// Closes the connections that have not settled by their deadline.
    fn close_idle(&mut self) {
        let silence = self.shared.node.settings().silence;
        while let Some(&(until, id)) = self.silent.first()
            && until <= Instant::now()
        {
            self.silent.pop_first();
            if self.connections.get(&id).is_some_and(|c| !c.is_settled() && !c.has_unsent()) {
                // The peer may have sent data in time, while this thread was busy or paused.
                self.serve_connection(id, EventFlags::IN);
            }
            let last_verb = self.connections.get(&id).and_then(|c| self.last_verb(c));
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.deadline = None;
            connection.last_request =
                connection.last_request.max(last_verb.unwrap_or(connection.last_request));
            match connection.is_settled() || connection.last_request + silence > Instant::now() {
                true => self.update_deadline(id),
                false => {
                    let peer = connection.identity;
                    tracing::info!(connection = id.0, %peer, "connection is idle: closing it");
                    self.close(id);
                }
            }
        }
    }

    /// Time of the last verb of the process of a compute node that is not admitted yet, over its
    /// connections to the NIC.
    fn last_verb(&self, of: &Connection) -> Option<Instant> {
        let Role::Pool(_) = of.role else { return None };
        let verbs = |c: &&Connection| c.identity == of.identity && matches!(c.role, Role::Nic(_));
        self.connections.values().filter(verbs).map(|c| c.last_request).max()
    }

    /// Reads one message and answers it. Because epoll is level-triggered, further messages are
    /// reported in the next round, after those of other connections.
    fn serve_connection(&mut self, id: ConnectionId, flags: EventFlags) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let mut alive = true;
        if flags.contains(EventFlags::OUT) {
            alive = connection.flush();
        }
        let hung_up = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        if alive && !connection.has_unsent() {
            alive = match connection.read() {
                Input::Message(packet) => self.handle(id, packet),
                Input::Part => {
                    // Each read is charged, so that a peer that sends single bytes pays for each.
                    self.charge(id, 1);
                    true
                }
                Input::TooLong => {
                    let why = format!("a message has at most {} bytes", protocol::MAX_BYTES);
                    let goes_on = !connection.is_new() && !connection.is_stream();
                    let error = protocol_error(why);
                    self.refusals.request(id, connection, &error, self.started.elapsed());
                    connection.refuse(0, &error) && goes_on
                }
                Input::Nothing => !hung_up,
                Input::End => false,
            };
        } else if hung_up {
            alive = false;
        }
        match alive {
            true => self.update_interest(id),
            false => self.close(id),
        }
    }

    /// Sets the epoll flags of a connection: readable, or writable while replies are queued. A
    /// connection without tokens is not watched until tokens are available; epoll still reports its
    /// end.
    fn update_interest(&mut self, id: ConnectionId) {
        self.update_deadline(id);
        let Some(connection) = self.connections.get(&id) else { return };
        let wait = self.limits.wait(connection.identity, connection.credit, self.started.elapsed());
        let flags = match wait {
            _ if connection.has_unsent() => EventFlags::OUT,
            None => EventFlags::IN,
            Some(_) => {
                if !self.paused.contains(&id) {
                    self.paused.push(id);
                }
                EventFlags::empty()
            }
        };
        if self.epoll.change(connection, id.0, flags).is_err() {
            self.close(id);
        }
    }

    /// Watches paused connections again for which tokens are available.
    fn resume_paused(&mut self) {
        for id in std::mem::take(&mut self.paused) {
            // Pauses the connection again if no token is available.
            self.update_interest(id);
        }
    }

    /// Charges `cost` to a connection and its process.
    fn charge(&mut self, id: ConnectionId, cost: u32) {
        if let Some(c) = self.connections.get_mut(&id) {
            self.limits.asked(c.identity, &mut c.credit, cost, self.started.elapsed());
        }
    }

    /// Handles a message. False if the connection must be closed.
    fn handle(&mut self, id: ConnectionId, packet: Packet) -> bool {
        let Packet { bytes, mut descriptors } = packet;
        self.charge(id, 1);
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        if !matches!(connection.role, Role::Nic(_)) {
            // This message has no use for file descriptors.
            descriptors.drain(..).for_each(close_deferred);
        }
        let is_remote = connection.ends().is_some();
        match &mut connection.role {
            Role::Unknown if is_remote => self.greet(id, &bytes),
            Role::Unknown | Role::Greeted(_) => self.open(id, &bytes),
            Role::Nic(session) => {
                let (reply, fds) = session.handle(&bytes, descriptors);
                if session.is_open() {
                    connection.last_request = Instant::now();
                }
                connection.send(reply, fds)
            }
            Role::Pool(_) => {
                connection.last_request = Instant::now();
                match protocol::decode::<Numbered<Request>>("reading a request", &bytes) {
                    Ok(request) => self.request(id, request.id, request.body),
                    Err(e) => {
                        self.refusals.request(id, connection, &e, self.started.elapsed());
                        connection.refuse(protocol::id_of(&bytes), &e)
                    }
                }
            }
        }
    }

    fn next_deadline(&mut self) -> Option<Timespec> {
        let paused = self.next_unpause();
        let silent = self.silent.first().map(|(until, _)| *until);
        let awaiting = self.next_await();
        let deadlines = silent.into_iter().chain(awaiting).chain(paused).chain(self.accept_again);
        let next = deadlines.min()?;
        let left = next.saturating_duration_since(Instant::now());
        // Rounded up, so that the deadline has passed when the thread wakes.
        let left = left + Duration::from_micros(100);
        Some(Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos() as i64 })
    }

    fn next_unpause(&self) -> Option<Instant> {
        let now = self.started.elapsed();
        let paused = self.paused.iter().filter_map(|id| self.connections.get(id));
        let wait = |c: &Connection| self.limits.wait(c.identity, c.credit, now).unwrap_or_default();
        paused.map(|c| self.started + now + wait(c)).min()
    }

    /// Retires the compute node of a connection, if there is one: revokes its keys; later polls of
    /// the memory node reclaim its chunks.
    fn leave(&mut self, id: ConnectionId, cause: &'static str) -> Option<ClientId> {
        let connection = self.connections.get_mut(&id)?;
        let peer = connection.identity;
        let session = connection.pool()?;
        let waiting = session.awaiting.len() + session.deferred.len();
        session.awaiting.clear();
        session.deferred.clear();
        session.nic = None;
        self.shared.wake.awaiting.fetch_sub(waiting, Ordering::SeqCst);
        let client = session.client.take()?;
        tracing::info!(client = client.0, %peer, cause, "client departed");
        self.shared.node.retire(client);
        Some(client)
    }

    /// Ends a connection that stays in the table until its client is retired. A client that reads
    /// its chunks itself must not take cleared memory for its own.
    fn hang_up(&self, id: ConnectionId) {
        if let Some(connection) = self.connections.get(&id) {
            // The peer may have ended the connection already.
            let _ = rustix::net::shutdown(connection, rustix::net::Shutdown::Both);
        }
    }

    /// Closes a connection, and the connections that depend on it.
    fn close(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let linked = match &mut connection.role {
            Role::Unknown | Role::Greeted(_) => Vec::new(),
            // Compute nodes lose their QPs with this session, so they are retired first.
            Role::Nic(_) => {
                let on_it: Vec<_> = self
                    .connections
                    .iter_mut()
                    .filter_map(|(other, c)| {
                        c.pool().is_some_and(|p| p.nic == Some(id)).then_some(*other)
                    })
                    .collect();
                for other in &on_it {
                    self.hang_up(*other);
                    self.leave(*other, "its NIC session ended");
                }
                on_it
            }
            // No goodbye was received (it would have cleared `nic`), so the NIC session is closed,
            // too.
            Role::Pool(session) => {
                let nic = session.nic;
                self.hang_up(id);
                self.leave(id, "its connection ended");
                let others = self.connections.iter_mut().any(|(other, c)| {
                    *other != id && nic.is_some() && c.pool().is_some_and(|p| p.nic == nic)
                });
                if others { Vec::new() } else { nic.into_iter().collect() }
            }
        };
        for id in linked.into_iter().chain([id]) {
            if let Some(connection) = self.connections.remove(&id) {
                let peer = connection.identity;
                tracing::debug!(connection = id.0, %peer, "connection closed");
                self.epoll.remove(&connection);
                if let Some(until) = connection.deadline {
                    self.silent.remove(&(until, id));
                }
            }
        }
        if let Some(at) = &mut self.accept_again {
            // Closing a connection frees a descriptor.
            *at = Instant::now();
        }
    }

    fn close_all(&mut self) {
        while let Some((&id, _)) = self.connections.first_key_value() {
            self.close(id);
        }
    }
}

fn refused(why: &str) -> Error {
    Error::Refused { attempt: "a request of a compute node".into(), why: why.into() }
}

fn protocol_error(why: String) -> Error {
    Error::Refused { attempt: "reading a message".into(), why }
}

fn system(e: Errno) -> Error {
    Error::System { attempt: "serving the control socket".into(), source: e.into() }
}

#[cfg(test)]
mod charge_tests;
#[cfg(test)]
mod silence_tests;

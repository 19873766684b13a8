//! The control thread: one loop over the listening socket, the connections and an eventfd.

mod accept;
mod later;
mod requests;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rnic::port::shm::socket::{Packet, close_aside};
use rustix::event::Timespec;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

pub(super) use self::watch::Watch;
use super::Shared;
use super::connection::{Connection, ConnectionId, Input, Role};
use super::paces::Paces;
use super::rooms::Places;
use crate::Error;
use crate::protocol::{self, Numbered, Request};
use crate::remote::RemoteListener;
use crate::scheme::ClientId;
use crate::socket::Listener;

const LISTENER: u64 = 0;
const WAKE: u64 = 1;
const REMOTE_LISTENER: u64 = 2;
const FIRST_CONNECTION: u64 = 3;

/// Requests for memory that a connection may have waiting.
const AWAITS_MAX: usize = 16;

/// What the control thread listens to, watched already: what can fail at the start fails before the
/// thread runs.
pub(super) struct Ears {
    watch: Watch,
    listener: Listener,
    remote: Option<RemoteListener>,
}

impl Ears {
    /// Watches the listeners, and the eventfd that wakes the thread.
    pub fn new(
        watch: Watch,
        wake: &OwnedFd,
        listener: Listener,
        remote: Option<RemoteListener>,
    ) -> Result<Self, Error> {
        watch.add(&listener, LISTENER).map_err(system)?;
        watch.add(wake, WAKE).map_err(system)?;
        if let Some(remote) = &remote {
            watch.add(remote, REMOTE_LISTENER).map_err(system)?;
        }
        Ok(Self { watch, listener, remote })
    }
}

/// Serves until told to stop.
pub(super) fn run(shared: &Shared, ears: Ears) -> Result<(), Error> {
    let mut control = Control::new(shared, ears);
    let result = control.serve();
    control.close_all();
    result
}

struct Control<'a> {
    shared: &'a Shared,
    listener: Listener,
    /// For other hosts.
    remote: Option<RemoteListener>,
    watch: Watch,
    connections: BTreeMap<ConnectionId, Connection>,
    /// Those that have not settled, and until when they may say nothing.
    silent: BTreeSet<(Instant, ConnectionId)>,
    next: u64,
    places: Places,
    started: Instant,
    paces: Paces,
    /// Connections that are not read from until their process has earned it.
    paused: Vec<ConnectionId>,
    /// When the listeners are watched again: no connection could be accepted, for want of
    /// descriptors or memory.
    accept_again: Option<Instant>,
}

impl<'a> Control<'a> {
    fn new(shared: &'a Shared, ears: Ears) -> Self {
        let Ears { watch, listener, remote } = ears;
        let settings = shared.node.settings();
        Self {
            shared,
            listener,
            remote,
            watch,
            connections: BTreeMap::new(),
            silent: BTreeSet::new(),
            next: FIRST_CONNECTION,
            places: Places::new(settings.clients_max as usize, settings.shares_places),
            started: Instant::now(),
            paces: Paces::new(shared.node.client_qps()),
            paused: Vec::new(),
            accept_again: None,
        }
    }

    /// # Errors
    /// Only what leaves nothing to serve with: the epoll instance itself, or a listener in
    /// it, is wrong. A system call that fails for one connection ends that connection.
    fn serve(&mut self) -> Result<(), Error> {
        let mut events = Vec::with_capacity(64);
        while !self.shared.stop.load(Ordering::Acquire) {
            self.shared.gate.pass();
            events.clear();
            let timeout = self.next_deadline();
            self.watch.wait(&mut events, timeout.as_ref()).map_err(system)?;
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
            self.end_silent();
            self.unpause();
            self.accept_again()?;
        }
        Ok(())
    }

    /// A connection that has not settled has some time for it.
    fn mind_silence(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        match (connection.is_settled(), connection.expected) {
            (true, Some(until)) => {
                self.silent.remove(&(until, id));
                connection.expected = None;
            }
            (false, None) => {
                let until = connection.heard + self.shared.node.settings().silence;
                self.silent.insert((until, id));
                connection.expected = Some(until);
            }
            _ => {}
        }
    }

    /// Ends the connections that have taken up a place for too long without saying what for.
    fn end_silent(&mut self) {
        let silence = self.shared.node.settings().silence;
        while let Some(&(until, id)) = self.silent.first()
            && until <= Instant::now()
        {
            self.silent.pop_first();
            if self.connections.get(&id).is_some_and(|c| !c.is_settled() && !c.is_clogged()) {
                // It may have spoken in time: this thread had other things to do, or was held.
                self.serve_connection(id, EventFlags::IN);
            }
            let last_verb = self.connections.get(&id).and_then(|c| self.last_verb(c));
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.expected = None;
            connection.heard = connection.heard.max(last_verb.unwrap_or(connection.heard));
            match connection.is_settled() || connection.heard + silence > Instant::now() {
                true => self.mind_silence(id),
                false => self.close(id),
            }
        }
    }

    /// When the process of a compute node that is not admitted yet last made something of its QPs, over its
    /// connections to the NIC.
    fn last_verb(&self, of: &Connection) -> Option<Instant> {
        let Role::Pool(_) = of.role else { return None };
        let verbs = |c: &&Connection| c.asker == of.asker && matches!(c.role, Role::Nic(_));
        self.connections.values().filter(verbs).map(|c| c.heard).max()
    }

    /// Reads one message and answers it. Level-triggered: what else is there comes round again,
    /// after everybody else.
    fn serve_connection(&mut self, id: ConnectionId, flags: EventFlags) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let mut alive = true;
        if flags.contains(EventFlags::OUT) {
            alive = connection.flush();
        }
        let hung_up = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        if alive && !connection.is_clogged() {
            alive = match connection.read() {
                Input::Message(packet) => self.handle(id, packet),
                Input::Part => {
                    // Who sends byte by byte pays for each.
                    self.charge(id, 1);
                    true
                }
                Input::TooLong => {
                    let why = format!("a message has at most {} bytes", protocol::MAX_BYTES);
                    let goes_on = !connection.is_new() && !connection.is_stream();
                    connection.refuse(0, &protocol_error(why)) && goes_on
                }
                Input::Nothing => !hung_up,
                Input::End => false,
            };
        } else if hung_up {
            alive = false;
        }
        match alive {
            true => self.listen_to(id),
            false => self.close(id),
        }
    }

    /// Watches a connection for what it is ready for: requests, or room for replies. One whose
    /// process has asked for too much is heard of again when it ends, or it is time to.
    fn listen_to(&mut self, id: ConnectionId) {
        self.mind_silence(id);
        let Some(connection) = self.connections.get(&id) else { return };
        let wait = self.paces.wait(connection.asker, connection.credit, self.started.elapsed());
        let flags = match wait {
            _ if connection.is_clogged() => EventFlags::OUT,
            None => EventFlags::IN,
            Some(_) => {
                if !self.paused.contains(&id) {
                    self.paused.push(id);
                }
                EventFlags::empty()
            }
        };
        if self.watch.change(connection, id.0, flags).is_err() {
            self.close(id);
        }
    }

    /// Listens again to connections for which it is time to.
    fn unpause(&mut self) {
        for id in std::mem::take(&mut self.paused) {
            // If it is not time yet, this puts it back.
            self.listen_to(id);
        }
    }

    /// Takes what a request costs from what its connection and process have.
    fn charge(&mut self, id: ConnectionId, cost: u32) {
        if let Some(c) = self.connections.get_mut(&id) {
            self.paces.asked(c.asker, &mut c.credit, cost, self.started.elapsed());
        }
    }

    /// False if the connection is to be closed.
    fn handle(&mut self, id: ConnectionId, packet: Packet) -> bool {
        let Packet { bytes, mut descriptors } = packet;
        self.charge(id, 1);
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        if !matches!(connection.role, Role::Nic(_)) {
            // Nobody asked for them.
            descriptors.drain(..).for_each(close_aside);
        }
        let is_remote = connection.ends().is_some();
        match &mut connection.role {
            Role::Unknown if is_remote => self.greet(id, &bytes),
            Role::Unknown | Role::Greeted(_) => self.open(id, &bytes),
            Role::Nic(session) => {
                let (reply, fds) = session.handle(&bytes, descriptors);
                if session.is_open() {
                    connection.heard = Instant::now();
                }
                connection.send(reply, fds)
            }
            Role::Pool(_) => {
                connection.heard = Instant::now();
                match protocol::decode::<Numbered<Request>>("reading a request", &bytes) {
                    Ok(request) => self.request(id, request.id, request.body),
                    Err(e) => connection.refuse(protocol::id_of(&bytes), &e),
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
        let wait = |c: &Connection| self.paces.wait(c.asker, c.credit, now).unwrap_or_default();
        paused.map(|c| self.started + now + wait(c)).min()
    }

    /// The compute node of a connection leaves, if there is one: its keys die, and its chunks come
    /// back in the memory node's next turns.
    fn leave(&mut self, id: ConnectionId) -> Option<ClientId> {
        let session = self.connections.get_mut(&id).and_then(Connection::pool)?;
        let waiting = session.awaiting.len() + session.deferred.len();
        session.awaiting.clear();
        session.deferred.clear();
        session.nic = None;
        self.shared.wake.awaiting.fetch_sub(waiting, Ordering::SeqCst);
        let client = session.client.take()?;
        self.shared.node.retire(client);
        Some(client)
    }

    /// Ends a connection and what hangs on it.
    fn close(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let linked = match &mut connection.role {
            Role::Unknown | Role::Greeted(_) => Vec::new(),
            // Its compute nodes lose their QPs: they are retired before that.
            Role::Nic(_) => {
                let on_it: Vec<_> = self
                    .connections
                    .iter_mut()
                    .filter_map(|(other, c)| {
                        c.pool().is_some_and(|p| p.nic == Some(id)).then_some(*other)
                    })
                    .collect();
                for other in &on_it {
                    self.leave(*other);
                }
                on_it
            }
            // It did not say goodbye (then there would be no link): its NIC session ends with it.
            Role::Pool(session) => {
                let nic = session.nic;
                self.leave(id);
                let others = self.connections.iter_mut().any(|(other, c)| {
                    *other != id && nic.is_some() && c.pool().is_some_and(|p| p.nic == nic)
                });
                if others { Vec::new() } else { nic.into_iter().collect() }
            }
        };
        for id in linked.into_iter().chain([id]) {
            if let Some(connection) = self.connections.remove(&id) {
                self.watch.remove(&connection);
                if let Some(until) = connection.expected {
                    self.silent.remove(&(until, id));
                }
            }
        }
        if let Some(at) = &mut self.accept_again {
            // There is a descriptor again.
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

//! The control thread: one loop over the listening socket, the connections and an eventfd.

mod later;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rnic::port::shm::socket::{Packet, close_aside};
use rnic::port::shm::{Session, SessionLimits};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

use super::Shared;
use super::connection::{Connection, ConnectionId, Input, PoolSession, Role, What, process_of};
use super::paces::{Paces, cost};
use crate::Error;
use crate::protocol::{self, Numbered, Opening, Reply, Request, VERSION};
use crate::scheme::{Admission, Admitted, ClientId, GroupId, Lane};
use crate::socket::Listener;

const LISTENER: u64 = 0;
const WAKE: u64 = 1;
const FIRST_CONNECTION: u64 = 2;

/// Connections beyond two for each compute node, for those who only ask.
const ASKING: usize = 32;
/// Connections beyond these, for processes that have few.
const RESERVED: usize = 16;
/// What "few" is: a pool and a NIC connection, and as many that only ask.
const FEW: usize = 4;

/// Requests for memory that a connection may have waiting.
const AWAITS_MAX: usize = 16;
/// Pieces of memory that a compute node may share besides those of its queues.
const BUFFERS: usize = 256;

/// Serves until told to stop.
pub(super) fn run(shared: &Shared, listener: Listener) -> Result<(), Error> {
    let mut control = Control::new(shared, listener)?;
    let result = control.serve();
    control.close_all();
    result
}

struct Control<'a> {
    shared: &'a Shared,
    listener: Listener,
    epoll: OwnedFd,
    connections: BTreeMap<ConnectionId, Connection>,
    /// Those that have not settled, and until when they may say nothing.
    silent: BTreeSet<(Instant, ConnectionId)>,
    next: u64,
    limit: usize,
    started: Instant,
    paces: Paces,
    /// Connections that are not read from until their process has earned it.
    paused: Vec<ConnectionId>,
    /// The listener is not watched: there is no room for more connections, or no descriptor.
    full: bool,
}

impl<'a> Control<'a> {
    fn new(shared: &'a Shared, listener: Listener) -> Result<Self, Error> {
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(system)?;
        let data = EventData::new_u64;
        epoll::add(&epoll, &listener, data(LISTENER), EventFlags::IN).map_err(system)?;
        epoll::add(&epoll, &shared.wake, data(WAKE), EventFlags::IN).map_err(system)?;
        Ok(Self {
            shared,
            listener,
            epoll,
            connections: BTreeMap::new(),
            silent: BTreeSet::new(),
            next: FIRST_CONNECTION,
            // A pool and a NIC connection for each compute node, and some that only ask.
            limit: shared.node.settings().clients_max as usize * 2 + ASKING + RESERVED,
            started: Instant::now(),
            paces: Paces::new(shared.node.settings().client_qps()),
            paused: Vec::new(),
            full: false,
        })
    }

    fn serve(&mut self) -> Result<(), Error> {
        let mut events = Vec::with_capacity(64);
        while !self.shared.stop.load(Ordering::Acquire) {
            self.shared.gate.pass();
            events.clear();
            let timeout = self.next_deadline();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                timeout.as_ref(),
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(system(e)),
            }
            self.shared.wakeups.fetch_add(1, Ordering::Relaxed);
            for event in events.drain(..) {
                match event.data.u64() {
                    LISTENER => self.accept()?,
                    WAKE => {
                        let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
                    }
                    id => self.serve_connection(ConnectionId(id), event.flags),
                }
            }
            self.answer_awaits();
            self.answer_deferred();
            self.end_silent();
            self.unpause();
        }
        Ok(())
    }

    fn accept(&mut self) -> Result<(), Error> {
        match self.listener.accept() {
            Ok(None) => {}
            Ok(Some(fd)) if !self.has_room_for(&fd) => drop(fd), // closed again
            Ok(Some(fd)) => {
                let id = self.next;
                self.next += 1;
                epoll::add(&self.epoll, &fd, EventData::new_u64(id), EventFlags::IN)
                    .map_err(system)?;
                let now = self.started.elapsed();
                self.paces.forget(now);
                let credit = self.paces.open(process_of(&fd), now);
                self.connections.insert(ConnectionId(id), Connection::new(fd, credit));
                self.mind_silence(ConnectionId(id));
            }
            // No descriptor or no memory left: connections wait until one of ours ends.
            Err(_) => self.watch_listener(false)?,
        }
        Ok(())
    }

    /// The last connections are for processes that have few: one that takes all that it can get locks
    /// nobody else out.
    fn has_room_for(&self, fd: &OwnedFd) -> bool {
        let count = self.connections.len();
        if count + RESERVED < self.limit {
            return true;
        }
        let process = process_of(fd);
        let held = self.connections.values().filter(|c| c.process == process).count();
        count < self.limit && held < FEW
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
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.expected = None;
            match connection.is_settled() || connection.heard + silence > Instant::now() {
                true => self.mind_silence(id),
                false => self.close(id),
            }
        }
    }

    fn watch_listener(&mut self, on: bool) -> Result<(), Error> {
        self.full = !on;
        let flags = if on { EventFlags::IN } else { EventFlags::empty() };
        epoll::modify(&self.epoll, &self.listener, EventData::new_u64(LISTENER), flags)
            .map_err(system)
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
                Input::TooLong => {
                    let why = format!("a message has at most {} bytes", protocol::MAX_BYTES);
                    connection.refuse(0, &protocol_error(why)) && !connection.is_new()
                }
                Input::Nothing => !hung_up,
                Input::End => false,
            };
        } else if hung_up {
            alive = false;
        }
        match alive {
            true => self.watch(id),
            false => self.close(id),
        }
    }

    /// Watches a connection for what it is ready for: requests, or room for replies. One whose
    /// process has asked for too much is heard of again when it ends, or it is time to.
    fn watch(&mut self, id: ConnectionId) {
        self.mind_silence(id);
        let Some(connection) = self.connections.get(&id) else { return };
        let wait = self.paces.wait(connection.process, connection.credit, self.started.elapsed());
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
        if epoll::modify(&self.epoll, connection, EventData::new_u64(id.0), flags).is_err() {
            self.close(id);
        }
    }

    /// Listens again to connections for which it is time to.
    fn unpause(&mut self) {
        for id in std::mem::take(&mut self.paused) {
            // If it is not time yet, this puts it back.
            self.watch(id);
        }
    }

    /// Takes what a request costs from what its connection and process have.
    fn charge(&mut self, id: ConnectionId, cost: u32) {
        if let Some(c) = self.connections.get_mut(&id) {
            self.paces.asked(c.process, &mut c.credit, cost, self.started.elapsed());
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
        match &mut connection.role {
            Role::Unknown => self.open(id, &bytes),
            Role::Nic(session) => {
                let (reply, fds) = session.handle(&bytes, descriptors);
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

    /// What one attached process may have: never less than the settings promise a compute node.
    fn session_limits(&self) -> SessionLimits {
        let mut limits = SessionLimits::default();
        let settings = self.shared.node.settings();
        let qps = settings.client_qps();
        limits.function.qps = limits.function.qps.max(qps);
        // A ring for each QP and one for each group's CQ; buffers besides.
        let pieces = (qps + settings.groups_max) as usize + BUFFERS;
        limits.memories = limits.memories.max(pieces);
        limits
    }

    fn open(&mut self, id: ConnectionId, bytes: &[u8]) -> bool {
        let limits = self.session_limits();
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        let opening = match protocol::decode::<Opening>("reading an opening", bytes) {
            Ok(opening) => opening,
            Err(e) => {
                connection.refuse(0, &e);
                return false;
            }
        };
        let why = match opening.service.as_str() {
            "nic" => {
                let session = Session::new(&self.shared.host, limits);
                connection.role = Role::Nic(Box::new(session));
                return true;
            }
            "pool" if opening.version == VERSION => {
                connection.role = Role::Pool(PoolSession::default());
                return connection.reply(0, Reply::Welcome(self.shared.node.welcome()));
            }
            "pool" => format!(
                "version {} of the pool's protocol is not spoken here, {VERSION} is; use the same \
                 release on both sides",
                opening.version
            ),
            other => format!("there is no service `{other}`; there are `nic` and `pool`"),
        };
        connection.refuse(0, &protocol_error(why));
        false
    }

    fn request(&mut self, from: ConnectionId, id: u64, request: Request) -> bool {
        self.charge(from, cost(&request).saturating_sub(1));
        let Some(connection) = self.connections.get_mut(&from) else { return false };
        let client = connection.pool().and_then(|p| p.client);
        let node = &self.shared.node;
        let admitted = || client.ok_or_else(|| refused("it is not admitted"));
        let reply = match request {
            Request::Admit(admission) => self.admit(from, &admission).map(Reply::Admitted),
            Request::AwaitMemory { timeout_ms } => match self.start_await(from, id, timeout_ms) {
                Ok(()) => return true,
                Err(e) => Err(e),
            },
            Request::Status => self.shared.status().map(|s| Reply::Status(Box::new(s))),
            Request::ResetManagement => match admitted().and_then(|c| self.reset(from, id, c)) {
                Ok(None) => return true,
                Ok(Some(reply)) => Ok(reply),
                Err(e) => Err(e),
            },
            Request::ResetAccess { group, lane } => admitted()
                .and_then(|c| node.reset_access(c, GroupId(group), Lane(lane)))
                .map(|peer| Reply::Access { peer }),
            Request::Audit => node.audit().map(|()| Reply::Done),
            Request::Goodbye => match self.leave(from) {
                Ok(None) => Ok(Reply::Done),
                Ok(Some(client)) => {
                    self.defer(from, id, What::Goodbye(client));
                    return true;
                }
                Err(e) => Err(e),
            },
        };
        let Some(connection) = self.connections.get_mut(&from) else { return false };
        match reply {
            Ok(reply) => connection.reply(id, reply),
            Err(e) => connection.refuse(id, &e),
        }
    }

    /// Re-establishes a compute node's management QPs, now or later.
    fn reset(
        &mut self,
        from: ConnectionId,
        id: u64,
        client: ClientId,
    ) -> Result<Option<Reply>, Error> {
        let deferred = self.connections.get_mut(&from).and_then(Connection::pool);
        if deferred.is_some_and(|p| p.deferred.len() >= AWAITS_MAX) {
            return Err(refused(&format!("{AWAITS_MAX} such requests wait already")));
        }
        let peers = self.shared.node.reset_management(client)?;
        if peers.is_none() {
            self.defer(from, id, What::ResetManagement(client));
        }
        Ok(peers.map(|peers| Reply::Management { peers }))
    }

    fn admit(&mut self, from: ConnectionId, request: &Admission) -> Result<Admitted, Error> {
        // Not another process's: its NIC session would end with this connection.
        let process = self.connections.get(&from).and_then(|c| c.process);
        let nic = self
            .connections
            .iter_mut()
            .filter(|(_, c)| c.process == process)
            .find_map(|(id, c)| c.owns_all(request).then_some(*id))
            .ok_or_else(|| {
                refused("the QPs that it names are not those of this process, attached to the NIC")
            })?;
        let session = self.connections.get_mut(&from).and_then(Connection::pool);
        let session = session.ok_or_else(|| refused("the connection has ended"))?;
        if session.client.is_some() {
            return Err(refused("this connection has admitted a compute node already"));
        }
        let admitted = self.shared.node.admit(request)?;
        session.client = Some(ClientId(admitted.client));
        session.nic = Some(nic);
        Ok(admitted)
    }

    fn next_deadline(&mut self) -> Option<Timespec> {
        let paused = self.next_unpause();
        let silent = self.silent.first().map(|(until, _)| *until);
        let awaiting = self.next_await();
        let next = silent.into_iter().chain(awaiting).chain(paused).min()?;
        let left = next.saturating_duration_since(Instant::now());
        // Rounded up, so that the deadline has passed when the thread wakes.
        let left = left + Duration::from_micros(100);
        Some(Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos() as i64 })
    }

    fn next_unpause(&self) -> Option<Instant> {
        let now = self.started.elapsed();
        let paused = self.paused.iter().filter_map(|id| self.connections.get(id));
        let wait = |c: &Connection| self.paces.wait(c.process, c.credit, now).unwrap_or_default();
        paused.map(|c| self.started + now + wait(c)).min()
    }

    /// The compute node of a connection leaves, if there is one: its keys die, and its chunks come
    /// back in the memory node's next turns.
    fn leave(&mut self, id: ConnectionId) -> Result<Option<ClientId>, Error> {
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(None) };
        let Some(session) = connection.pool() else { return Ok(None) };
        let waiting = session.awaiting.len() + session.deferred.len();
        session.awaiting.clear();
        session.deferred.clear();
        session.nic = None;
        self.shared.awaiting.fetch_sub(waiting, Ordering::SeqCst);
        let client = session.client.take();
        client.map_or(Ok(()), |client| self.shared.node.retire(client)).map(|()| client)
    }

    /// Ends a connection and what hangs on it.
    fn close(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let linked = match &mut connection.role {
            Role::Unknown => Vec::new(),
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
                    self.retire(*other);
                }
                on_it
            }
            // It did not say goodbye (then there would be no link): its NIC session ends with it.
            Role::Pool(session) => {
                let nic = session.nic;
                self.retire(id);
                let others = self.connections.iter_mut().any(|(other, c)| {
                    *other != id && nic.is_some() && c.pool().is_some_and(|p| p.nic == nic)
                });
                if others { Vec::new() } else { nic.into_iter().collect() }
            }
        };
        for id in linked.into_iter().chain([id]) {
            if let Some(connection) = self.connections.remove(&id) {
                let _ = epoll::delete(&self.epoll, &connection);
                if let Some(until) = connection.expected {
                    self.silent.remove(&(until, id));
                }
            }
        }
        if self.full {
            // If this fails, the next connection that ends tries again.
            let _ = self.watch_listener(true);
        }
    }

    fn retire(&mut self, id: ConnectionId) {
        if let Err(e) = self.leave(id) {
            // The chunks of that compute node stay its own; the pool goes on without them.
            *self.shared.failure.lock() = Some(format!("retiring a compute node: {e}"));
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

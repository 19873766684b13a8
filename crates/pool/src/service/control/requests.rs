//! What connections say: greetings, openings, and the requests of compute nodes.

use fabric::Qpn;
use rnic::port::shm::{Session, SessionLimits};

use super::{AWAITS_MAX, Control, protocol_error, refused};
use crate::Error;
use crate::protocol::{self, Opening, Reply, Request, VERSION, Welcome};
use crate::remote::token::{self, Greeting, Nonce, Nonces, Side};
use crate::remote::{ConnectionSecret, Route, Start};
use crate::scheme::{Admission, Admitted, ClientId, GroupId, Lane, Part};
use crate::service::connection::{Connection, ConnectionId, Ends, PoolSession, Role, What};
use crate::service::nic_gone;
use crate::service::paces::cost;
use crate::service::rooms::Holder;

/// Pieces of memory that a compute node may share besides those of its queues.
const BUFFERS: usize = 256;

impl Control<'_> {
    /// What one attached process may have: never less than the settings promise a compute node.
    fn session_limits(&self) -> SessionLimits {
        let mut limits = SessionLimits::default();
        let settings = self.shared.node.settings();
        let qps = self.shared.node.client_qps();
        limits.function.qps = limits.function.qps.max(qps);
        // A ring for each QP and one for each group's CQ; buffers besides.
        let pieces = (qps + settings.groups_max) as usize + BUFFERS;
        limits.memories = limits.memories.max(pieces);
        limits
    }

    /// Answers the greeting of another host.
    pub(super) fn greet(&mut self, id: ConnectionId, bytes: &[u8]) -> bool {
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        let token = self.remote.as_ref().is_some_and(|remote| remote.token.is_some());
        let greeted = protocol::decode::<Greeting>("reading a greeting", bytes).and_then(|theirs| {
            if theirs.granary != token::VERSION {
                let why = format!(
                    "version {} of the greeting is not spoken here, {} is; use the same release on both sides",
                    theirs.granary,
                    token::VERSION
                );
                return Err(protocol_error(why));
            }
            let server = Nonce::random()?;
            let ours = Greeting { granary: token::VERSION, nonce: server, token };
            let answer = protocol::encode("greeting another host", &ours)?;
            Ok((Nonces { server, client: theirs.nonce }, answer))
        });
        match greeted {
            Ok((nonces, answer)) => {
                connection.role = Role::Greeted(nonces);
                connection.send(answer, Vec::new())
            }
            Err(e) => {
                connection.refuse(0, &e);
                false
            }
        }
    }

    pub(super) fn open(&mut self, id: ConnectionId, bytes: &[u8]) -> bool {
        let limits = self.session_limits();
        let full = self.place_for(id).err();
        let token = self.remote.as_ref().and_then(|remote| remote.token.as_ref());
        let has_room = self.connections.get(&id).is_some_and(|c| self.has_room_for(c.asker));
        let authenticated = self.remote.as_ref().is_some_and(|remote| remote.authenticated);
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        let opening = match protocol::decode::<Opening>("reading an opening", bytes) {
            Ok(opening) => opening,
            Err(e) => {
                connection.refuse(0, &e);
                return false;
            }
        };
        let ends = connection.ends();
        let nonces = match connection.role {
            Role::Greeted(nonces) => Some(nonces),
            _ => None,
        };
        let proof = opening.proof.as_deref().unwrap_or_default();
        let is_let_in = match (nonces, token) {
            (Some(nonces), Some(token)) => token.is_proved(Side::Client, &nonces, proof),
            _ => true,
        };
        let is_full = ends.is_some() && !has_room;
        let why = match opening.service.as_str() {
            _ if !is_let_in => {
                "the token is wrong, or missing: give the file that the memory node has".into()
            }
            // With the proof a connection leaves the small room of those without one.
            _ if is_full => {
                let why = "it has as many connections as it takes".into();
                connection.refuse(0, &Error::Full { attempt: "opening a connection".into(), why });
                return false;
            }
            "nic" if ends.is_none() => {
                let session = Session::new(&self.shared.host, limits);
                connection.role = Role::Nic(Box::new(session));
                return true;
            }
            "nic" => "a NIC is attached to on its own host only".into(),
            "pool" if opening.version == VERSION => {
                let secret = nonces.map(|n| ConnectionSecret::new(token, &n, authenticated));
                connection.role = Role::Pool(PoolSession { secret, ..PoolSession::default() });
                let server = Side::server(authenticated);
                let proof = nonces.and_then(|nonces| Some(token?.proof(server, &nonces)));
                let roce = ends.map(|ends| ends.here);
                let authenticated = authenticated && roce.is_some();
                let node = self.shared.node.welcome();
                let welcome = Welcome { full, roce, proof, authenticated, ..node };
                return connection.reply(0, Reply::Welcome(welcome));
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

    pub(super) fn request(&mut self, from: ConnectionId, id: u64, request: Request) -> bool {
        self.charge(from, cost(&request).saturating_sub(1));
        let Some(connection) = self.connections.get_mut(&from) else { return false };
        let session = connection.pool();
        let (client, secret) = session.map_or((None, None), |p| (p.client, p.secret));
        let node = &self.shared.node;
        // QPs that are about to be connected anew begin with what comes from the salt.
        let renew = |c, part, salt| match start_of(secret, salt)? {
            Some(start) => node.renew(c, part, start),
            None => Ok(()),
        };
        let admitted = || client.ok_or_else(|| refused("it is not admitted"));
        let reply = match request {
            Request::Admit(admission) => self.admit(from, &admission).map(Reply::Admitted),
            Request::AwaitMemory { timeout_ms } => match self.start_await(from, id, timeout_ms) {
                Ok(()) => return true,
                Err(e) => Err(e),
            },
            Request::Status => self.shared.status().map(|s| Reply::Status(Box::new(s))),
            Request::ResetManagement { salt } => {
                let begin = |c| renew(c, Part::Management, salt).map(|()| c);
                match admitted().and_then(begin).and_then(|c| self.reset(from, id, c)) {
                    Ok(None) => return true,
                    Ok(Some(reply)) => Ok(reply),
                    Err(e) => Err(e),
                }
            }
            Request::ManagementState => admitted()
                .and_then(|c| node.management_is_open(c))
                .map(|open| Reply::ManagementState { open }),
            Request::ResetAccess { group, lane, salt } => {
                let (group, lane) = (GroupId(group), Lane(lane));
                admitted()
                    .and_then(|c| renew(c, Part::Access(group, lane), salt).map(|()| c))
                    .and_then(|c| node.reset_access(c, group, lane))
                    .map(|peer| Reply::Access { peer })
            }
            Request::Audit => node.audit().map(|()| Reply::Done),
            Request::Goodbye => match self.leave(from) {
                None => Ok(Reply::Done),
                Some(client) => {
                    self.defer(from, id, What::Goodbye(client));
                    return true;
                }
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
        let full = |why| Error::Full { attempt: "admitting a compute node".into(), why };
        let holder = self.place_for(from).map_err(full)?;
        let connection = self.connections.get(&from);
        let connection = connection.ok_or_else(|| refused("the connection has ended"))?;
        let (nic, route) = match connection.ends() {
            None => (Some(self.nic_of(request)?), None),
            Some(ends) => (None, Some(route_of(&ends, request)?)),
        };
        let session = self.connections.get_mut(&from).and_then(Connection::pool);
        let session = session.ok_or_else(|| refused("the connection has ended"))?;
        let start = start_of(session.secret, request.salt)?.unwrap_or_default();
        if session.client.is_some() {
            return Err(refused("this connection has admitted a compute node already"));
        }
        let admitted = self.shared.node.admit(&Admission { route, start, ..request.clone() })?;
        self.places.take(ClientId(admitted.client), holder);
        session.client = Some(ClientId(admitted.client));
        session.nic = nic;
        Ok(admitted)
    }

    /// The holder that a compute node of a connection is, if there is a place for one more of it.
    fn place_for(&mut self, id: ConnectionId) -> Result<Holder, String> {
        let connection = self.connections.get(&id).ok_or("the connection has ended")?;
        let (holder, node) = (connection.holder(), &self.shared.node);
        self.places.forget(|client| node.is_retired(client));
        self.places.check(holder).map(|()| holder)
    }

    /// The NIC session that owns all QPs that are named: the one whose secret the compute node has, since
    /// another's would end with this connection.
    fn nic_of(&self, request: &Admission) -> Result<ConnectionId, Error> {
        let secret = request.session.ok_or_else(|| {
            refused(
                "it does not prove which NIC session its QPs are of; use the same release on both sides",
            )
        })?;
        let of_secret = |c: &Connection| match &c.role {
            Role::Nic(session) => session.secret() == Some(secret),
            _ => false,
        };
        let found = self.connections.iter().find(|(_, connection)| of_secret(connection));
        let named = request.management.iter().chain(request.groups.iter().flatten());
        let qpns: Option<Vec<Qpn>> =
            named.map(|qpn| (*qpn <= Qpn::MAX).then(|| Qpn::new(*qpn))).collect();
        if let (Some((id, Connection { role: Role::Nic(session), .. })), Some(qpns)) = (found, qpns)
            && session.owns_all(&qpns).map_err(nic_gone)?
        {
            return Ok(*id);
        }
        Err(refused("the QPs that it names are not those of its own session with the NIC"))
    }
}

/// How the QPs of a compute node on another host are reached.
fn route_of(ends: &Ends, request: &Admission) -> Result<Route, Error> {
    let there =
        request.roce.ok_or_else(|| refused("it does not say what its NIC is reached by"))?;
    if there.port == 0 {
        return Err(refused("its NIC is reached by UDP port 0, which is none"));
    }
    Ok(Route::between(ends.local, ends.here, ends.remote, there))
}

/// What QPs of another host begin with, which has drawn `salt` for them; nothing on this host.
fn start_of(secret: Option<ConnectionSecret>, salt: Option<Nonce>) -> Result<Option<Start>, Error> {
    let Some(secret) = secret else { return Ok(None) };
    let salt = salt.ok_or_else(|| refused("it names no salt for what its QPs begin with"))?;
    Ok(Some(secret.start(Side::Server, &salt)))
}

//! What connections say: greetings, openings, and the requests of compute nodes.

use fabric::Psn;
use rnic::port::shm::{Session, SessionLimits};

use super::{AWAITS_MAX, Control, protocol_error, refused};
use crate::Error;
use crate::protocol::{self, Opening, Reply, Request, VERSION, Welcome};
use crate::remote::route::Route;
use crate::remote::token::{self, Greeting, Nonce, Nonces, Side};
use crate::scheme::{Admission, Admitted, ClientId, GroupId, Lane};
use crate::service::connection::{Connection, ConnectionId, Ends, PoolSession, Role, What};
use crate::service::paces::{Asker, cost};

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
        let token = self.remote.as_ref().and_then(|remote| remote.token.as_ref());
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
        let why = match opening.service.as_str() {
            _ if !is_let_in => {
                "the token is wrong, or missing: give the file that the memory node has".into()
            }
            "nic" if ends.is_none() => {
                let session = Session::new(&self.shared.host, limits);
                connection.role = Role::Nic(Box::new(session));
                return true;
            }
            "nic" => "a NIC is attached to on its own host only".into(),
            "pool" if opening.version == VERSION => {
                connection.role = Role::Pool(PoolSession::default());
                let proof = nonces.and_then(|nonces| Some(token?.proof(Side::Server, &nonces)));
                let roce = ends.map(|ends| ends.here);
                let welcome = Welcome { roce, proof, ..self.shared.node.welcome() };
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
            Request::ResetManagement { psn } => {
                let begin = |c| psn_of(psn).and_then(|psn| node.set_psn(c, psn)).map(|()| c);
                match admitted().and_then(begin).and_then(|c| self.reset(from, id, c)) {
                    Ok(None) => return true,
                    Ok(Some(reply)) => Ok(reply),
                    Err(e) => Err(e),
                }
            }
            Request::ManagementState => admitted()
                .and_then(|c| node.management_is_open(c))
                .map(|open| Reply::ManagementState { open }),
            Request::ResetAccess { group, lane, psn } => admitted()
                .and_then(|c| psn_of(psn).and_then(|psn| node.set_psn(c, psn)).map(|()| c))
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
        let connection = self.connections.get(&from);
        let connection = connection.ok_or_else(|| refused("the connection has ended"))?;
        let (nic, route) = match connection.ends() {
            None => (Some(self.nic_of(connection.asker, request)?), None),
            Some(ends) => (None, Some(route_of(&ends, request)?)),
        };
        let session = self.connections.get_mut(&from).and_then(Connection::pool);
        let session = session.ok_or_else(|| refused("the connection has ended"))?;
        if session.client.is_some() {
            return Err(refused("this connection has admitted a compute node already"));
        }
        let admitted = self.shared.node.admit(&Admission { route, ..request.clone() })?;
        session.client = Some(ClientId(admitted.client));
        session.nic = nic;
        Ok(admitted)
    }

    /// The NIC session that owns all QPs that are named, of the same process: another's would end with this
    /// connection.
    fn nic_of(&mut self, asker: Asker, request: &Admission) -> Result<ConnectionId, Error> {
        self.connections
            .iter_mut()
            .filter(|(_, c)| c.asker == asker)
            .find_map(|(id, c)| c.owns_all(request).then_some(*id))
            .ok_or_else(|| {
                refused("the QPs that it names are not those of this process, attached to the NIC")
            })
    }
}

/// How the QPs of a compute node on another host are reached.
fn route_of(ends: &Ends, request: &Admission) -> Result<Route, Error> {
    psn_of(request.psn)?;
    let there =
        request.roce.ok_or_else(|| refused("it does not say what its NIC is reached by"))?;
    if there.port == 0 {
        return Err(refused("its NIC is reached by UDP port 0, which is none"));
    }
    Ok(Route::between(ends.local, ends.here, ends.remote, there))
}

fn psn_of(psn: u32) -> Result<Psn, Error> {
    match psn {
        0..=Psn::MAX => Ok(Psn::new(psn)),
        _ => Err(refused(&format!("{psn:#x} is no PSN"))),
    }
}

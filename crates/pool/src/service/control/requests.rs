//! Handling of greetings, openings, and requests of compute nodes.

use verbs::Qpn;

use super::{AWAITS_MAX, Control, protocol_error, refused};
use crate::Error;
use crate::nic::SessionNeeds;
use crate::protocol::{self, Admission, NodeHello, Opening, Reply, Request, VERSION};
use crate::remote::token::{self, Greeting, Nonce, Nonces, Side};
use crate::remote::{ConnectionSecret, Route, Start, domain};
use crate::service::client_limits::cost;
use crate::service::connection::{Connection, DeferredOp, Ends, PoolSession, Role};
use crate::service::connection_limits::ConnectionId;
use crate::service::connection_limits::Holder;
use scheme::{ClientId, ConnectReply, ConnectRequest, DomainToken, GroupId, Lane, QpSet};

/// Pieces of shared memory of a compute node in addition to those of its queues.
const BUFFERS: usize = 256;

impl Control<'_> {
    /// Needs of one attached process: what the settings promise to a compute node.
    fn session_needs(&self) -> SessionNeeds {
        let qps = self.shared.node.client_qps();
        // A ring per QP and one per group's CQ, plus buffers.
        let memories = (qps + self.shared.node.settings().groups_max) as usize + BUFFERS;
        SessionNeeds { qps, memories, remote_peers: 0 }
    }

    /// Answers the greeting of another host.
    pub(super) fn greet(&mut self, id: ConnectionId, bytes: &[u8]) -> bool {
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        let token = self.remote.as_ref().is_some_and(|remote| remote.token.is_some());
        let greeted = protocol::decode::<Greeting>("reading a greeting", bytes).and_then(|theirs| {
            if theirs.granary != token::VERSION {
                let why = format!(
                    "greeting version {} is not supported, only {}; use the same release on both \
                     sides",
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
                self.refusals.request(id, connection, &e, self.started.elapsed());
                connection.refuse(0, &e);
                false
            }
        }
    }

    pub(super) fn open(&mut self, id: ConnectionId, bytes: &[u8]) -> bool {
        let needs = self.session_needs();
        let full = self.slot_holder(id).err();
        let token = self.remote.as_ref().and_then(|remote| remote.token.as_ref());
        let has_room = self.connections.get(&id).is_some_and(|c| self.has_room_for(c.identity));
        let authenticated = self.remote.as_ref().is_some_and(|remote| remote.authenticated);
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        let opening = match protocol::decode::<Opening>("reading an opening", bytes) {
            Ok(opening) => opening,
            Err(e) => {
                self.refusals.request(id, connection, &e, self.started.elapsed());
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
                "the token is wrong, or missing: give the memory node's token file".into()
            }
            // With the proof, the connection counts against the limit of proved connections
            // instead.
            _ if is_full => {
                let why = "it has reached its limit of connections".into();
                let error = Error::Full { attempt: "opening a connection".into(), why };
                self.refusals.request(id, connection, &error, self.started.elapsed());
                connection.refuse(0, &error);
                return false;
            }
            "nic" if ends.is_none() => {
                connection.role = Role::Nic(self.shared.host.session(&needs));
                let peer = connection.identity;
                tracing::debug!(connection = id.0, %peer, "NIC session opened");
                return true;
            }
            "nic" => "only processes of its own host can attach to the NIC".into(),
            "chunks" => match self.shared.shared_chunks(connection.local_user()) {
                Ok(files) => match connection.send_chunks(&files) {
                    // The connection has no further use.
                    Ok(()) => return false,
                    Err(e) => e.to_string(),
                },
                Err(why) => why.into(),
            },
            "pool" if opening.version == VERSION => {
                let secret = nonces.map(|n| ConnectionSecret::new(token, &n, authenticated));
                connection.role =
                    Role::Pool(PoolSession { secret, nonces, ..PoolSession::default() });
                let server = Side::server(authenticated);
                let proof = nonces.and_then(|nonces| Some(token?.proof(server, &nonces)));
                let roce = ends.map(|ends| ends.here);
                let authenticated = authenticated && roce.is_some();
                let node = self.shared.node.welcome();
                let timeout = self.shared.node.settings().client_timeout.as_millis() as u64;
                let client_timeout_ms = roce.is_some().then_some(timeout);
                let welcome =
                    NodeHello { full, roce, proof, authenticated, client_timeout_ms, ..node };
                return connection.reply(0, Reply::Welcome(welcome));
            }
            "pool" => format!(
                "version {} of the pool's protocol is not supported, only {VERSION}; use the same \
                 release on both sides",
                opening.version
            ),
            other => format!("there is no service `{other}`; use `nic` or `pool`"),
        };
        let error = protocol_error(why);
        self.refusals.request(id, connection, &error, self.started.elapsed());
        connection.refuse(0, &error);
        false
    }

    pub(super) fn request(&mut self, from: ConnectionId, id: u64, request: Request) -> bool {
        self.charge(from, cost(&request).saturating_sub(1));
        let Some(connection) = self.connections.get_mut(&from) else { return false };
        let session = connection.pool();
        let (client, secret) = session.map_or((None, None), |p| (p.client, p.secret));
        let node = &self.shared.node;
        // The initial state of QPs that are about to be re-established is derived from the salt.
        let renew = |c, part, salt| match start_of(secret, salt)? {
            Some(start) => node.set_start(c, part, start),
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
                let begin = |c| renew(c, QpSet::Management, salt).map(|()| c);
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
                    .and_then(|c| renew(c, QpSet::Access(group, lane), salt).map(|()| c))
                    .and_then(|c| node.reset_access(c, group, lane))
                    .map(|peer| Reply::Access { peer })
            }
            Request::Audit => node.audit().map(|()| Reply::Done),
            Request::Goodbye => match self.leave(from, "goodbye") {
                None => Ok(Reply::Done),
                Some(client) => {
                    self.defer(from, id, DeferredOp::Goodbye(client));
                    return true;
                }
            },
        };
        let Some(connection) = self.connections.get_mut(&from) else { return false };
        match reply {
            Ok(reply) => connection.reply(id, reply),
            Err(e) => {
                self.refusals.request(from, connection, &e, self.started.elapsed());
                connection.refuse(id, &e)
            }
        }
    }

    /// Re-establishes a compute node's management QPs, now or as a deferred request.
    fn reset(
        &mut self,
        from: ConnectionId,
        id: u64,
        client: ClientId,
    ) -> Result<Option<Reply>, Error> {
        let deferred = self.connections.get_mut(&from).and_then(Connection::pool);
        if deferred.is_some_and(|p| p.deferred.len() >= AWAITS_MAX) {
            return Err(refused(&format!("{AWAITS_MAX} such requests are pending already")));
        }
        let peers = self.shared.node.reset_management(client)?;
        if peers.is_none() {
            self.defer(from, id, DeferredOp::ResetManagement(client));
        }
        Ok(peers.map(|peers| Reply::Management { peers }))
    }

    fn admit(&mut self, from: ConnectionId, admission: &Admission) -> Result<ConnectReply, Error> {
        let request = &admission.connect;
        let full = |why| Error::Full { attempt: "admitting a compute node".into(), why };
        let holder = self.slot_holder(from).map_err(full)?;
        let connection = self.connections.get(&from);
        let connection = connection.ok_or_else(|| refused("the connection has ended"))?;
        let (nic, route) = match connection.ends() {
            None => (Some(self.nic_of(admission)?), None),
            Some(ends) => (None, Some(route_of(&ends, admission)?)),
        };
        let session = self.connections.get_mut(&from).and_then(Connection::pool);
        let session = session.ok_or_else(|| refused("the connection has ended"))?;
        let start = start_of(session.secret, admission.salt)?.unwrap_or_default();
        if session.client.is_some() {
            return Err(refused("a compute node is admitted on this connection already"));
        }
        let tokens = self.remote.as_ref().map_or(&[][..], |remote| &remote.domains);
        let domain = domain_of(admission, session.nonces, tokens)?;
        let request = ConnectRequest { route, start, domain, ..request.clone() };
        let admitted = self.shared.node.admit(&request)?;
        self.slots.take(ClientId(admitted.client), holder);
        session.client = Some(ClientId(admitted.client));
        session.nic = nic;
        let (client, groups) = (admitted.client, request.groups.len());
        let in_domain = domain.is_some();
        tracing::info!(client, peer = %holder.identity, groups, in_domain, "client admitted");
        Ok(admitted)
    }

    /// The holder to which a connection's compute node is attributed, if it may take one more slot.
    fn slot_holder(&mut self, id: ConnectionId) -> Result<Holder, String> {
        let connection = self.connections.get(&id).ok_or("the connection has ended")?;
        let (holder, node) = (connection.holder(), &self.shared.node);
        self.slots.forget(|client| node.is_retired(client));
        self.slots.check(holder).map(|()| holder)
    }

    /// The NIC session that owns all listed QPs. It is identified by its secret, because otherwise
    /// a compute node could name the session of another process, which would end with this
    /// connection.
    fn nic_of(&self, admission: &Admission) -> Result<ConnectionId, Error> {
        let request = &admission.connect;
        let secret = admission.session.ok_or_else(|| {
            refused(
                "it does not name the NIC session of its QPs; use the same release on both sides",
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
            && session.owns_all(&qpns)?
        {
            return Ok(*id);
        }
        Err(refused("the listed QPs do not belong to its own NIC session"))
    }
}

/// Token of the compute node's domain, if it names one. `nonces`: of a connection from another
/// host, on which the token itself is never accepted.
fn domain_of(
    admission: &Admission,
    nonces: Option<Nonces>,
    tokens: &[DomainToken],
) -> Result<Option<DomainToken>, Error> {
    match (nonces, admission.domain, &admission.domain_proof) {
        (_, None, None) => Ok(None),
        (None, Some(token), None) => Ok(Some(token)),
        (Some(nonces), None, Some(proof)) => match domain::proved(tokens, &nonces, proof) {
            Some(token) => Ok(Some(token)),
            None => Err(refused(
                "its domain token is not one of the memory node's: start the memory node with \
                 this token (granary serve --domain-token)",
            )),
        },
        (None, ..) => Err(refused("it proves its domain token, which is for other hosts")),
        (Some(_), ..) => Err(refused("it sends its domain token, which other hosts must prove")),
    }
}

/// Network path to the QPs of a compute node on another host.
fn route_of(ends: &Ends, admission: &Admission) -> Result<Route, Error> {
    let there =
        admission.roce.ok_or_else(|| refused("it does not announce the port of its NIC"))?;
    if there.port == 0 {
        return Err(refused("it announces UDP port 0 for its NIC"));
    }
    Ok(Route::between(ends.local, ends.here, ends.remote, there))
}

/// Initial state of QPs of another host, derived from `salt`; `None` for a compute node on this
/// host.
fn start_of(secret: Option<ConnectionSecret>, salt: Option<Nonce>) -> Result<Option<Start>, Error> {
    let Some(secret) = secret else { return Ok(None) };
    let salt = salt.ok_or_else(|| refused("it gives no salt for its QPs"))?;
    Ok(Some(secret.start(Side::Server, &salt)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domain_is_named_on_this_host_and_proved_from_another() {
        let nonces =
            || Nonces { server: Nonce::random().unwrap(), client: Nonce::random().unwrap() };
        let (here, there) = (nonces(), nonces());
        let (token, other) = (DomainToken([1; 32]), DomainToken([2; 32]));
        let named = |domain| Admission { domain, ..Admission::default() };
        let proving = |token, nonces| Admission {
            domain_proof: Some(domain::proof(&token, &nonces)),
            ..Admission::default()
        };
        let tokens = [other, token];
        let joins = |admission: &Admission, nonces| {
            domain_of(admission, nonces, &tokens).map_err(|e| e.to_string())
        };
        assert_eq!(joins(&named(None), None), Ok(None));
        assert_eq!(joins(&named(None), Some(here)), Ok(None));
        // A token that the memory node was not given names a domain on this host.
        let local = DomainToken([3; 32]);
        assert_eq!(joins(&named(Some(local)), None), Ok(Some(local)));
        assert_eq!(joins(&proving(token, here), Some(here)), Ok(Some(token)));
        assert_eq!(joins(&proving(other, here), Some(here)), Ok(Some(other)));

        let refused = |admission: &Admission, nonces, why: &str| {
            let error = joins(admission, nonces).expect_err("it has joined");
            assert!(error.contains(why), "{error}");
        };
        refused(&proving(local, here), Some(here), "is not one of the memory node's");
        refused(&proving(token, there), Some(here), "is not one of the memory node's");
        refused(&named(Some(token)), Some(here), "other hosts must prove");
        refused(&proving(token, here), None, "for other hosts");
        let both = Admission { domain: Some(token), ..proving(token, here) };
        refused(&both, Some(here), "other hosts must prove");
        refused(&both, None, "for other hosts");
        let none = domain_of(&proving(token, here), Some(here), &[]);
        assert!(matches!(none, Err(Error::Refused { .. })), "{none:?}");
    }
}

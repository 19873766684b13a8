//! A compute node's connection to the control thread of its memory node.

use std::collections::HashMap;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use verbs::{PeerAddress, Qpn, SessionSecret};

use super::ANSWER_TIMEOUT;
use crate::Error;
use crate::protocol::{
    self, Admission, NodeHello, Numbered, Opening, Reply, Request, Status, VERSION,
};
use crate::remote::link::{CLOSED, Link};
use crate::remote::route::{RoceEnd, Route, Start};
use crate::remote::token::{self, Greeting, Nonce, Nonces, Side};
use crate::remote::{ConnectionSecret, RemoteAddress, Token, domain};
use scheme::{ConnectReply, ConnectRequest, GroupId, Lane};

/// The control plane of a memory node, as a compute node uses it.
pub trait ControlPlane: Send + Sync {
    /// The memory node's first reply.
    fn welcome(&self) -> &NodeHello;
    /// Requests admission; called once. [`Error::NotAdmitted`] if the connection was closed before.
    fn admit(&self, admission: &ConnectRequest) -> Result<ConnectReply, Error>;
    /// Address of a QP of the memory node that its reply to the admission lists.
    fn peer(&self, qpn: u32) -> PeerAddress {
        Qpn::new(qpn).into()
    }
    /// Blocks until a chunk is free (true) or `timeout` has passed (false).
    fn await_memory(&self, timeout: Duration) -> Result<bool, Error>;
    /// See [`scheme::NodeScheme::reset_management`].
    fn reset_management(&self) -> Result<Vec<PeerAddress>, Error>;
    /// True if the memory node still answers requests on the management QPs
    /// ([`scheme::NodeScheme::management_is_open`]). Never blocks: the first call sends the
    /// question, and calls return `None` until the answer has arrived; the call after that sends a
    /// new question. A memory node that can always notify the compute node needs no question.
    fn management_is_open(&self) -> Option<bool> {
        Some(true)
    }
    /// See [`scheme::NodeScheme::reset_access`].
    fn reset_access(&self, group: GroupId, lane: Lane) -> Result<PeerAddress, Error>;
    /// The state of the memory node.
    fn status(&self) -> Result<Status, Error>;
    /// Makes the memory node check that every chunk is exactly once free or owned.
    fn audit(&self) -> Result<(), Error>;
    /// Leaves: the memory node revokes all keys and reclaims the chunks.
    fn goodbye(&self) -> Result<(), Error>;
    /// An error if the memory node is known to be gone.
    fn check_alive(&self) -> Result<(), Error>;
    /// File descriptors that the connection needs.
    fn descriptors(&self) -> Vec<i32>;
    /// Name of the memory node, for errors.
    fn name(&self) -> String {
        "the memory node".to_owned()
    }
    /// Time limit for an answer that the memory node does not defer.
    fn answer_timeout(&self) -> Duration {
        ANSWER_TIMEOUT
    }
    /// Sets the time limit.
    fn set_answer_timeout(&self, _limit: Duration) {}
}

/// Maximum number of connection attempts until one is admitted.
const CONNECTIONS: u32 = 40;
/// Pause after the first attempt. It doubles each time, up to [`PAUSE_MAX`]: 11.2 s in total.
const PAUSE: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(320);

/// Reconnects while the memory node closes the connection before it admits this compute node.
///
/// No memory is lost, because none was allocated yet. Two causes are temporary: this process was
/// stopped or not scheduled for longer than the memory node's time limit, or the memory node had
/// reached its limit of connections.
pub(crate) fn until_admitted<T>(connect: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    connect_again(connect, std::thread::sleep)
}

fn connect_again<T>(
    mut connect: impl FnMut() -> Result<T, Error>,
    mut pause: impl FnMut(Duration),
) -> Result<T, Error> {
    let mut next = PAUSE;
    for _ in 1..CONNECTIONS {
        match connect() {
            Err(Error::NotAdmitted { .. }) => {}
            other => return other,
        }
        pause(next);
        next = PAUSE_MAX.min(next * 2);
    }
    connect()
}

/// The control plane over a Unix socket, or over TCP to another host. Several threads may send
/// requests concurrently: one of them receives the replies for all.
pub struct SocketControl {
    link: Link,
    welcome: NodeHello,
    /// Time limit for an answer that the memory node does not defer, in milliseconds.
    patience_ms: AtomicU64,
    /// Path to the memory node's NIC, if it is on another host and this process has a NIC.
    remote_nic: Option<RemoteNic>,
    /// Secret of the NIC session that owns the QPs, if the memory node is on this host.
    session: Option<SessionSecret>,
    /// Initial state of the QPs that were listed in the admission.
    start: OnceLock<Start>,
    state: Mutex<State>,
    changed: Condvar,
}

/// Path to the NIC of a memory node on another host.
struct RemoteNic {
    route: Route,
    /// Port and MTU of the local NIC.
    here: RoceEnd,
    nonces: Nonces,
    secret: ConnectionSecret,
}

#[derive(Default)]
struct State {
    last: u64,
    reading: bool,
    replies: HashMap<u64, Reply>,
    /// Number of the unanswered request for the state of the management QPs.
    asked: Option<u64>,
    /// The reason why no reply can arrive any more.
    gone: Option<String>,
}

const GREETING: &str = "greeting the memory node";

impl SocketControl {
    /// Connects to the memory node that serves the socket at `path`.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        Self::connect_within(path, ANSWER_TIMEOUT)
    }

    /// [`SocketControl::connect`] with a time limit for each answer of the memory node.
    pub fn connect_within(path: &Path, patience: Duration) -> Result<Self, Error> {
        let link = Link::local(path, patience)?;
        let opened = open(&link, &Opening::pool(), patience);
        let welcome = opened.map_err(|error| greeting_at(path.display(), error))?;
        Ok(Self::new(link, welcome, None, patience))
    }

    /// The same connection for a compute node whose QPs belong to the NIC session with this secret.
    pub fn with_session(self, session: Option<SessionSecret>) -> Self {
        Self { session, ..self }
    }

    /// Connects to a memory node on another host. `here` returns the port and MTU of this process's
    /// NIC for the local address of the connection, or `None` if only control requests are to be
    /// sent.
    pub fn connect_remote(
        to: &RemoteAddress,
        token: Option<&Token>,
        patience: Duration,
        here: impl FnOnce(&Link, &NodeHello) -> Result<Option<RoceEnd>, Error>,
    ) -> Result<Self, Error> {
        let link = Link::remote(to)?;
        let nonces = greet(&link, token, patience).map_err(|error| greeting_at(to, error))?;
        let proof = token.map(|token| token.proof(Side::Client, &nonces));
        let welcome = open(&link, &Opening { proof, ..Opening::pool() }, patience)?;
        link.keep_for(welcome.client_timeout()).map_err(|e| gone(GREETING, e.to_string()))?;
        let refused = |why: &str| {
            Err(Error::Refused { attempt: format!("connecting to {to}"), why: why.into() })
        };
        let proof = welcome.proof.as_deref().unwrap_or_default();
        let server = Side::server(welcome.authenticated);
        if token.is_some_and(|token| !token.is_proved(server, &nonces, proof)) {
            return refused(
                "it has not proved that it has the token: this address belongs to another memory \
                 node",
            );
        }
        let Some(there) = welcome.roce else {
            return refused("it announces no RoCEv2 port");
        };
        let here = here(&link, &welcome)?;
        let remote = link.as_remote().expect("just connected so");
        let remote_nic = here.map(|here| RemoteNic {
            route: Route::between(remote.local, here, remote.peer.ip(), there),
            here,
            nonces,
            secret: ConnectionSecret::new(token, &nonces, welcome.authenticated),
        });
        Ok(Self::new(link, welcome, remote_nic, patience))
    }

    fn new(
        link: Link,
        welcome: NodeHello,
        remote_nic: Option<RemoteNic>,
        patience: Duration,
    ) -> Self {
        let patience_ms = AtomicU64::new(patience.as_millis() as u64);
        let (state, changed) = (Mutex::default(), Condvar::new());
        let (session, start) = (None, OnceLock::new());
        Self { link, welcome, patience_ms, remote_nic, session, start, state, changed }
    }

    /// Address of the QP `qpn` with the initial state `start`.
    fn peer_from(&self, qpn: u32, start: Start) -> PeerAddress {
        let qpn = Qpn::new(qpn);
        self.remote_nic.as_ref().map_or(qpn.into(), |remote_nic| remote_nic.route.peer(qpn, start))
    }

    /// Draws a salt for QPs to be re-established, and derives their initial state. `None` if the
    /// memory node is on this host.
    fn draw(&self) -> Result<(Option<Nonce>, Start), Error> {
        let Some(remote_nic) = &self.remote_nic else { return Ok((None, Start::default())) };
        let salt = Nonce::random()?;
        Ok((Some(salt), remote_nic.secret.start(Side::Client, &salt)))
    }

    /// Sends a request and waits for its reply.
    fn ask(&self, attempt: &str, request: Request, patience: Duration) -> Result<Reply, Error> {
        let deadline = Instant::now() + patience;
        let id = self.state.lock().number(attempt)?;
        self.send(attempt, id, request)?;
        match self.reply(attempt, id, deadline)? {
            Reply::Error { why } => Err(Error::Refused { attempt: attempt.into(), why }),
            Reply::Full { why } => Err(Error::Full { attempt: attempt.into(), why }),
            Reply::OverBudget { why, retry_after_ms } => Err(Error::OverBudget {
                attempt: attempt.into(),
                why,
                retry_after: Duration::from_millis(retry_after_ms),
            }),
            reply => Ok(reply),
        }
    }

    fn send(&self, attempt: &str, id: u64, body: Request) -> Result<(), Error> {
        let bytes = protocol::encode(attempt, &Numbered { id, body })?;
        self.link.send(&bytes).map_err(|e| match e {
            Errno::AGAIN | Errno::TIMEDOUT => silent(attempt, &self.link, self.answer_timeout()),
            e => gone(attempt, e.to_string()),
        })
    }

    fn reply(&self, attempt: &str, id: u64, deadline: Instant) -> Result<Reply, Error> {
        let mut state = self.state.lock();
        loop {
            if let Some(reply) = state.replies.remove(&id) {
                return Ok(reply);
            }
            state.check(attempt)?;
            let now = Instant::now();
            if now >= deadline {
                return Err(silent(attempt, &self.link, self.answer_timeout()));
            }
            if state.reading {
                self.changed.wait_until(&mut state, deadline);
                continue;
            }
            state.reading = true;
            drop(state);
            let got = match self.link.wait_readable(deadline - now) {
                Ok(true) => read(&self.link).transpose(),
                Ok(false) => None,
                Err(e) => Some(Err(e.to_string())),
            };
            state = self.state.lock();
            state.reading = false;
            state.store_reply(got);
            self.changed.notify_all();
        }
    }

    fn poll_management_state(&self) -> Result<Option<bool>, Error> {
        let attempt = "asking for the state of the management QPs";
        let mut state = self.state.lock();
        let Some(id) = state.asked else {
            let id = state.number(attempt)?;
            state.asked = Some(id);
            drop(state);
            // The socket has room: at most one such message of a few bytes is in flight.
            self.send(attempt, id, Request::ManagementState)?;
            return Ok(None);
        };
        if !state.reading && self.link.wait_readable(Duration::ZERO).unwrap_or(true) {
            state.store_reply(read(&self.link).transpose());
            self.changed.notify_all();
        }
        match state.replies.remove(&id) {
            Some(reply) => {
                state.asked = None;
                Ok(Some(!matches!(reply, Reply::ManagementState { open: false })))
            }
            None => state.check(attempt).map(|()| None),
        }
    }
}

impl State {
    fn check(&self, attempt: &str) -> Result<(), Error> {
        match &self.gone {
            None => Ok(()),
            Some(why) => Err(gone(attempt, why.clone())),
        }
    }

    /// Allocates a request number.
    fn number(&mut self, attempt: &str) -> Result<u64, Error> {
        self.check(attempt)?;
        self.last += 1;
        Ok(self.last)
    }

    /// Stores a received reply. The reply to an abandoned request is kept but never used.
    fn store_reply(&mut self, got: Option<Result<Numbered<Reply>, String>>) {
        match got {
            None => {}
            Some(Ok(reply)) => drop(self.replies.insert(reply.id, reply.body)),
            Some(Err(why)) => self.gone = Some(why),
        }
    }
}

impl ControlPlane for SocketControl {
    fn welcome(&self) -> &NodeHello {
        &self.welcome
    }

    fn admit(&self, admission: &ConnectRequest) -> Result<ConnectReply, Error> {
        let attempt = "being admitted";
        let (salt, start) = self.draw()?;
        let (session, roce) =
            (self.session, self.remote_nic.as_ref().map(|remote_nic| remote_nic.here));
        let proof = |token| self.remote_nic.as_ref().map(|nic| domain::proof(token, &nic.nonces));
        let domain_proof = admission.domain.as_ref().and_then(proof);
        // The token itself never leaves this host.
        let domain = admission.domain.filter(|_| self.link.as_remote().is_none());
        let connect = admission.clone();
        let admission = Admission { connect, session, roce, salt, domain, domain_proof };
        let _ = self.start.set(start);
        match self.ask(attempt, Request::Admit(Box::new(admission)), self.answer_timeout()) {
            Ok(Reply::Admitted(admitted)) => Ok(admitted),
            Ok(other) => Err(unexpected(attempt, other)),
            Err(Error::Gone { why, .. }) if self.link.is_closed() => {
                Err(Error::NotAdmitted { why })
            }
            Err(error) => Err(error),
        }
    }

    fn await_memory(&self, timeout: Duration) -> Result<bool, Error> {
        let attempt = "waiting for memory";
        let timeout_ms = timeout.as_micros().div_ceil(1000).min(u64::MAX as u128) as u64;
        let request = Request::AwaitMemory { timeout_ms };
        match self.ask(attempt, request, timeout.saturating_add(self.answer_timeout()))? {
            Reply::Memory { available } => Ok(available),
            other => Err(unexpected(attempt, other)),
        }
    }

    fn peer(&self, qpn: u32) -> PeerAddress {
        self.peer_from(qpn, self.start.get().copied().unwrap_or_default())
    }

    fn reset_management(&self) -> Result<Vec<PeerAddress>, Error> {
        let attempt = "re-establishing the management QPs";
        let (salt, start) = self.draw()?;
        match self.ask(attempt, Request::ResetManagement { salt }, self.answer_timeout())? {
            Reply::Management { peers } => {
                Ok(peers.into_iter().map(|qpn| self.peer_from(qpn, start)).collect())
            }
            other => Err(unexpected(attempt, other)),
        }
    }

    fn management_is_open(&self) -> Option<bool> {
        // If the question cannot be sent, the memory node does not answer other requests either.
        self.poll_management_state().unwrap_or(Some(false))
    }

    fn reset_access(&self, group: GroupId, lane: Lane) -> Result<PeerAddress, Error> {
        let attempt = "re-establishing an access QP";
        let (salt, start) = self.draw()?;
        let request = Request::ResetAccess { group: group.0, lane: lane.0, salt };
        match self.ask(attempt, request, self.answer_timeout())? {
            Reply::Access { peer } => Ok(self.peer_from(peer, start)),
            other => Err(unexpected(attempt, other)),
        }
    }

    fn status(&self) -> Result<Status, Error> {
        let attempt = "asking for the memory node's state";
        match self.ask(attempt, Request::Status, self.answer_timeout())? {
            Reply::Status(status) => Ok(*status),
            other => Err(unexpected(attempt, other)),
        }
    }

    fn audit(&self) -> Result<(), Error> {
        self.ask("auditing the pool", Request::Audit, self.answer_timeout()).map(drop)
    }

    fn goodbye(&self) -> Result<(), Error> {
        self.ask("leaving", Request::Goodbye, self.answer_timeout()).map(drop)
    }

    fn check_alive(&self) -> Result<(), Error> {
        match self.link.is_closed() {
            false => Ok(()),
            true => Err(gone("looking for the memory node", CLOSED.into())),
        }
    }

    fn descriptors(&self) -> Vec<i32> {
        vec![self.link.descriptor()]
    }

    fn name(&self) -> String {
        self.link.name()
    }

    fn answer_timeout(&self) -> Duration {
        Duration::from_millis(self.patience_ms.load(Ordering::Relaxed))
    }

    fn set_answer_timeout(&self, limit: Duration) {
        self.patience_ms.store(limit.as_millis() as u64, Ordering::Relaxed);
    }
}

/// Exchanges greetings with a memory node on another host.
fn greet(link: &Link, token: Option<&Token>, patience: Duration) -> Result<Nonces, Error> {
    let client = Nonce::random()?;
    let greeting = Greeting { granary: token::VERSION, nonce: client, token: token.is_some() };
    let answer = converse(link, &protocol::encode(GREETING, &greeting)?, patience)?;
    let answer: Greeting = match protocol::decode(GREETING, &answer) {
        Ok(answer) => answer,
        Err(e) => match protocol::decode::<Numbered<Reply>>(GREETING, &answer) {
            Ok(reply) => return Err(unexpected(GREETING, reply.body)),
            Err(_) => return Err(e),
        },
    };
    let why = match (answer.granary, answer.token, token.is_some()) {
        (token::VERSION, true, true) | (token::VERSION, false, false) => {
            return Ok(Nonces { server: answer.nonce, client });
        }
        (token::VERSION, true, false) => "it asks for a token: give the token file".into(),
        (token::VERSION, false, true) => {
            "it asks for no token, but a token was given: this address belongs to another memory \
             node, or it was started without one"
                .into()
        }
        (version, ..) => {
            let ours = token::VERSION;
            format!("it uses version {version} of the greeting, this program version {ours}")
        }
    };
    Err(Error::Refused { attempt: GREETING.into(), why })
}

/// Opens the connection to the pool. Returns the memory node's first reply.
fn open(link: &Link, opening: &Opening, patience: Duration) -> Result<NodeHello, Error> {
    let answer = converse(link, &protocol::encode(GREETING, opening)?, patience)?;
    match protocol::decode::<Numbered<Reply>>(GREETING, &answer)?.body {
        Reply::Welcome(welcome) if welcome.version == VERSION => Ok(welcome),
        Reply::Welcome(welcome) => Err(Error::Refused {
            attempt: GREETING.into(),
            why: format!(
                "it uses protocol version {}, this program version {VERSION}; use the same \
                 release on both sides",
                welcome.version
            ),
        }),
        other => Err(unexpected(GREETING, other)),
    }
}

/// Sends a message and waits for the answer, while no other thread uses the connection.
fn converse(link: &Link, message: &[u8], patience: Duration) -> Result<Vec<u8>, Error> {
    exchange(link, message, patience).map_err(|error| match error {
        // A memory node at its limit of connections closes a new one at once. If the memory node
        // has exited instead, the next connection attempt reports it.
        Error::Unreachable { why, .. } if link.is_closed() => Error::NotAdmitted { why },
        error => error,
    })
}

fn exchange(link: &Link, message: &[u8], patience: Duration) -> Result<Vec<u8>, Error> {
    link.send(message).map_err(|e| match e {
        Errno::AGAIN | Errno::TIMEDOUT => silent(GREETING, link, patience),
        e => unheard(e.to_string()),
    })?;
    let deadline = Instant::now() + patience;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(silent(GREETING, link, patience));
        }
        let come = link.wait_readable(left).map_err(|e| unheard(e.to_string()))?;
        if come && let Some(bytes) = link.receive().map_err(unheard)? {
            return Ok(bytes);
        }
    }
}

/// The error of a greeting that was not answered. Nothing is stored at the memory node yet.
fn unheard(why: String) -> Error {
    Error::Unreachable { attempt: GREETING.into(), why }
}

/// Names the address of a memory node that did not answer the greeting.
fn greeting_at(address: impl std::fmt::Display, error: Error) -> Error {
    match error {
        Error::Unreachable { why, .. } => {
            Error::Unreachable { attempt: format!("{GREETING} at {address}"), why }
        }
        error => error,
    }
}

fn read(link: &Link) -> Result<Option<Numbered<Reply>>, String> {
    let decode = |bytes: Vec<u8>| protocol::decode("reading a reply", &bytes);
    link.receive()?.map(decode).transpose().map_err(|e| e.to_string())
}

fn gone(attempt: &str, why: String) -> Error {
    Error::Gone { attempt: attempt.into(), why }
}

fn silent(attempt: &str, link: &Link, patience: Duration) -> Error {
    let (name, waited) = (link.name(), patience.as_secs_f64());
    Error::Unanswered {
        attempt: attempt.into(),
        why: format!(
            "{name} has not answered for {waited} s: its process is stopped, or the network is \
             cut; continue the process, and try again"
        ),
    }
}

fn unexpected(attempt: &str, reply: Reply) -> Error {
    match reply {
        Reply::Error { why } => Error::Refused { attempt: attempt.into(), why },
        Reply::Full { why } => Error::Full { attempt: attempt.into(), why },
        other => {
            Error::Protocol { attempt: attempt.into(), why: format!("unexpected reply {other:?}") }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connect_retries_only_not_admitted_and_is_bounded() {
        let tried = |results: Vec<Result<u32, Error>>| {
            let (mut results, mut count) = (results.into_iter(), 0);
            let mut paused = Duration::ZERO;
            let connect = || {
                count += 1;
                results.next().expect("no more than were asked for")
            };
            let result = connect_again(connect, |time| paused += time);
            assert!(paused < Duration::from_secs(12), "{paused:?}");
            (result, count)
        };
        let held = || Err(Error::NotAdmitted { why: CLOSED.into() });
        let late = || {
            let (attempt, why) = ("being admitted".to_owned(), "it is stopped".to_owned());
            Err(Error::Unanswered { attempt, why })
        };
        assert!(matches!(tried(vec![Ok(7)]), (Ok(7), 1)));
        assert!(matches!(tried(vec![held(), held(), Ok(7)]), (Ok(7), 3)));
        assert!(matches!(tried(vec![held(), late()]), (Err(Error::Unanswered { .. }), 2)));
        let all = (0..CONNECTIONS).map(|_| held()).collect();
        assert!(matches!(tried(all), (Err(Error::NotAdmitted { .. }), CONNECTIONS)));
    }
}

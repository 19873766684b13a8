//! A compute node's way to its memory node's control thread.

use std::collections::HashMap;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use fabric::soft::SoftNic;
use fabric::{PeerAddress, Qpn};
use parking_lot::{Condvar, Mutex};
use rnic::port::shm::Secret;

use crate::Error;
use crate::protocol::{self, Numbered, Opening, Reply, Request, Status, VERSION, Welcome};
use crate::remote::link::{CLOSED, Link};
use crate::remote::route::{RoceEnd, Route, Start};
use crate::remote::token::{self, Greeting, Nonce, Nonces, Side};
use crate::remote::{ConnectionSecret, RemoteAddress, Token};
use crate::scheme::{Admission, Admitted, GroupId, Lane};

/// The control plane as a compute node sees it.
pub trait ControlPlane: Send + Sync {
    /// What the memory node said first.
    fn welcome(&self) -> &Welcome;
    /// Is admitted, once. [`Error::NotAdmitted`] if the connection has been ended before that.
    fn admit(&self, admission: &Admission) -> Result<Admitted, Error>;
    /// The memory node's QP that was named when this compute node was admitted, as it is reached from here.
    fn peer(&self, qpn: u32) -> PeerAddress {
        Qpn::new(qpn).into()
    }
    /// Returns when there are free chunks (true) or the time is over (false).
    fn await_memory(&self, timeout: Duration) -> Result<bool, Error>;
    /// See [`crate::scheme::NodeScheme::reset_management`].
    fn reset_management(&self) -> Result<Vec<PeerAddress>, Error>;
    /// Whether the memory node still answers what is asked over the management QPs
    /// ([`crate::scheme::NodeScheme::management_is_open`]). Never waits: the first call asks, and says
    /// `None` as later ones do until the answer is there; then the next call asks anew. Where the memory node
    /// can always tell a compute node that it does not, nothing need be asked.
    fn management_is_open(&self) -> Option<bool> {
        Some(true)
    }
    /// See [`crate::scheme::NodeScheme::reset_access`].
    fn reset_access(&self, group: GroupId, lane: Lane) -> Result<PeerAddress, Error>;
    /// The memory node's state.
    fn status(&self) -> Result<Status, Error>;
    /// Has the memory node check its books.
    fn audit(&self) -> Result<(), Error>;
    /// Leaves: keys die, chunks go back.
    fn goodbye(&self) -> Result<(), Error>;
    /// An error if the memory node is known to be gone.
    fn check_alive(&self) -> Result<(), Error>;
    /// Descriptors that the connection needs.
    fn descriptors(&self) -> Vec<i32>;
}

/// How long a memory node may take to answer a request that it does not hold back.
const PATIENCE: Duration = Duration::from_secs(30);

/// Connections that are made, one after the other, until one of them is admitted.
const CONNECTIONS: u32 = 40;
/// The pause after the first of them. It doubles each time, up to [`PAUSE_MAX`]: 11.2 s in all.
const PAUSE: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(320);

/// Connects anew while the memory node ends the connection before it admits this compute node.
///
/// The compute node held nothing yet. Two reasons pass: this process was stopped, or waited for a
/// CPU, for longer than the memory node waits; and for a while the memory node had as many
/// connections as it takes.
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

/// The control plane over a connection: a Unix socket, or TCP to another host. Several threads may ask at
/// the same time: one of them reads for all.
pub struct SocketControl {
    link: Link,
    welcome: Welcome,
    /// On another host, and with a NIC of this process: the way there.
    way: Option<Way>,
    /// On this host: the secret of the NIC session that owns the QPs.
    session: Option<Secret>,
    /// What the QPs begin with that were named at the admission.
    start: OnceLock<Start>,
    state: Mutex<State>,
    changed: Condvar,
}

/// The way to the NIC of a memory node on another host.
struct Way {
    route: Route,
    /// What this end's NIC is reached by.
    here: RoceEnd,
    secret: ConnectionSecret,
}

#[derive(Default)]
struct State {
    last: u64,
    reading: bool,
    replies: HashMap<u64, Reply>,
    /// The question after the management's state that is not answered yet.
    asked: Option<u64>,
    /// Why no reply will come any more.
    gone: Option<String>,
}

const GREETING: &str = "greeting the memory node";

impl SocketControl {
    /// Connects to the memory node that serves `path`.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let link = Link::local(path)?;
        let welcome = open(&link, &Opening::pool())?;
        Ok(Self::new(link, welcome, None))
    }

    /// The same connection for a compute node whose QPs are of `nic`.
    pub fn with_nic(self, nic: &SoftNic) -> Self {
        Self { session: nic.secret(), ..self }
    }

    /// Connects to a memory node on another host. `here` is what a NIC of this process is reached by, at the
    /// address that leads there; none, if the memory node is only asked something.
    pub fn connect_remote(
        to: &RemoteAddress,
        token: Option<&Token>,
        here: impl FnOnce(&Link, &Welcome) -> Result<Option<RoceEnd>, Error>,
    ) -> Result<Self, Error> {
        let link = Link::remote(to)?;
        let nonces = greet(&link, token)?;
        let proof = token.map(|token| token.proof(Side::Client, &nonces));
        let welcome = open(&link, &Opening { proof, ..Opening::pool() })?;
        let refused = |why: &str| {
            Err(Error::Refused { attempt: format!("connecting to {to}"), why: why.into() })
        };
        let proof = welcome.proof.as_deref().unwrap_or_default();
        let server = Side::server(welcome.authenticated);
        if token.is_some_and(|token| !token.is_proved(server, &nonces, proof)) {
            return refused(
                "it has not proved that it has the token: another memory node answers there",
            );
        }
        let Some(there) = welcome.roce else {
            return refused("it names no RoCEv2 port");
        };
        let here = here(&link, &welcome)?;
        let remote = link.as_remote().expect("just connected so");
        let way = here.map(|here| Way {
            route: Route::between(remote.local, here, remote.peer.ip(), there),
            here,
            secret: ConnectionSecret::new(token, &nonces, welcome.authenticated),
        });
        Ok(Self::new(link, welcome, way))
    }

    fn new(link: Link, welcome: Welcome, way: Option<Way>) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        let (session, start) = (None, OnceLock::new());
        Self { link, welcome, way, session, start, state, changed }
    }

    /// The QP `qpn`, with what both ends begin with.
    fn peer_from(&self, qpn: u32, start: Start) -> PeerAddress {
        let qpn = Qpn::new(qpn);
        self.way.as_ref().map_or(qpn.into(), |way| way.route.peer(qpn, start))
    }

    /// Draws a salt for QPs that are connected anew, and what they begin with; nothing on this
    /// host.
    fn draw(&self) -> Result<(Option<Nonce>, Start), Error> {
        let Some(way) = &self.way else { return Ok((None, Start::default())) };
        let salt = Nonce::random()?;
        Ok((Some(salt), way.secret.start(Side::Client, &salt)))
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
        self.link.send(&bytes).map_err(|e| gone(attempt, e.to_string()))
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
                return Err(gone(attempt, "no answer in time".into()));
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
            state.take_in(got);
            self.changed.notify_all();
        }
    }

    fn look_at_management(&self) -> Result<Option<bool>, Error> {
        let attempt = "asking for the state of the management QPs";
        let mut state = self.state.lock();
        let Some(id) = state.asked else {
            let id = state.number(attempt)?;
            state.asked = Some(id);
            drop(state);
            // A few bytes, and never more than these: there is room for them.
            self.send(attempt, id, Request::ManagementState)?;
            return Ok(None);
        };
        if !state.reading && self.link.wait_readable(Duration::ZERO).unwrap_or(true) {
            state.take_in(read(&self.link).transpose());
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

    /// A number for a request.
    fn number(&mut self, attempt: &str) -> Result<u64, Error> {
        self.check(attempt)?;
        self.last += 1;
        Ok(self.last)
    }

    /// Takes in what was read. A number that nobody waits for is of a request that was given up.
    fn take_in(&mut self, got: Option<Result<Numbered<Reply>, String>>) {
        match got {
            None => {}
            Some(Ok(reply)) => drop(self.replies.insert(reply.id, reply.body)),
            Some(Err(why)) => self.gone = Some(why),
        }
    }
}

impl ControlPlane for SocketControl {
    fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    fn admit(&self, admission: &Admission) -> Result<Admitted, Error> {
        let attempt = "being admitted";
        let (salt, start) = self.draw()?;
        let (session, roce) = (self.session, self.way.as_ref().map(|way| way.here));
        let admission = Admission { session, roce, salt, ..admission.clone() };
        let _ = self.start.set(start);
        match self.ask(attempt, Request::Admit(admission), PATIENCE) {
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
        match self.ask(attempt, request, timeout.saturating_add(PATIENCE))? {
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
        match self.ask(attempt, Request::ResetManagement { salt }, PATIENCE)? {
            Reply::Management { peers } => {
                Ok(peers.into_iter().map(|qpn| self.peer_from(qpn, start)).collect())
            }
            other => Err(unexpected(attempt, other)),
        }
    }

    fn management_is_open(&self) -> Option<bool> {
        // One that cannot be asked any more answers nothing else either.
        self.look_at_management().unwrap_or(Some(false))
    }

    fn reset_access(&self, group: GroupId, lane: Lane) -> Result<PeerAddress, Error> {
        let attempt = "re-establishing an access QP";
        let (salt, start) = self.draw()?;
        let request = Request::ResetAccess { group: group.0, lane: lane.0, salt };
        match self.ask(attempt, request, PATIENCE)? {
            Reply::Access { peer } => Ok(self.peer_from(peer, start)),
            other => Err(unexpected(attempt, other)),
        }
    }

    fn status(&self) -> Result<Status, Error> {
        let attempt = "asking for the memory node's state";
        match self.ask(attempt, Request::Status, PATIENCE)? {
            Reply::Status(status) => Ok(*status),
            other => Err(unexpected(attempt, other)),
        }
    }

    fn audit(&self) -> Result<(), Error> {
        self.ask("auditing the pool", Request::Audit, PATIENCE).map(drop)
    }

    fn goodbye(&self) -> Result<(), Error> {
        self.ask("leaving", Request::Goodbye, PATIENCE).map(drop)
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
}

/// Exchanges greetings with a memory node on another host.
fn greet(link: &Link, token: Option<&Token>) -> Result<Nonces, Error> {
    let client = Nonce::random()?;
    let greeting = Greeting { granary: token::VERSION, nonce: client, token: token.is_some() };
    let answer = converse(link, &protocol::encode(GREETING, &greeting)?)?;
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
        (token::VERSION, true, false) => "it asks for a token: give the file that has it".into(),
        (token::VERSION, false, true) => {
            "it asks for no token, and a token was given: another memory node answers there, or it was \
             started without"
                .into()
        }
        (version, ..) => {
            format!("it greets in version {version}, this program in {}", token::VERSION)
        }
    };
    Err(Error::Refused { attempt: GREETING.into(), why })
}

/// Opens the connection to the pool; what the memory node says of itself.
fn open(link: &Link, opening: &Opening) -> Result<Welcome, Error> {
    let answer = converse(link, &protocol::encode(GREETING, opening)?)?;
    match protocol::decode::<Numbered<Reply>>(GREETING, &answer)?.body {
        Reply::Welcome(welcome) if welcome.version == VERSION => Ok(welcome),
        Reply::Welcome(welcome) => Err(Error::Refused {
            attempt: GREETING.into(),
            why: format!("it speaks version {}, this program {VERSION}", welcome.version),
        }),
        other => Err(unexpected(GREETING, other)),
    }
}

/// Says something and waits for the answer, while no other thread uses the connection.
fn converse(link: &Link, message: &[u8]) -> Result<Vec<u8>, Error> {
    exchange(link, message).map_err(|error| match error {
        // A memory node that has no room for a connection ends it at once. One that is gone is
        // found out by the next attempt to connect.
        Error::Gone { why, .. } if link.is_closed() => Error::NotAdmitted { why },
        error => error,
    })
}

fn exchange(link: &Link, message: &[u8]) -> Result<Vec<u8>, Error> {
    link.send(message).map_err(|e| gone(GREETING, e.to_string()))?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(gone(GREETING, format!("no answer for {PATIENCE:?}")));
        }
        let come = link.wait_readable(left).map_err(|e| gone(GREETING, e.to_string()))?;
        if come && let Some(bytes) = link.receive().map_err(|why| gone(GREETING, why))? {
            return Ok(bytes);
        }
    }
}

fn read(link: &Link) -> Result<Option<Numbered<Reply>>, String> {
    let decode = |bytes: Vec<u8>| protocol::decode("reading a reply", &bytes);
    link.receive()?.map(decode).transpose().map_err(|e| e.to_string())
}

fn gone(attempt: &str, why: String) -> Error {
    Error::Gone { attempt: attempt.into(), why }
}

fn unexpected(attempt: &str, reply: Reply) -> Error {
    match reply {
        Reply::Error { why } => Error::Refused { attempt: attempt.into(), why },
        Reply::Full { why } => Error::Full { attempt: attempt.into(), why },
        other => Error::Protocol {
            attempt: attempt.into(),
            why: format!("an answer that is not one to it: {other:?}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_was_not_admitted_connects_again_and_not_for_ever() {
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
        let late = || Err(gone("being admitted", "no answer in time".into()));
        assert!(matches!(tried(vec![Ok(7)]), (Ok(7), 1)));
        assert!(matches!(tried(vec![held(), held(), Ok(7)]), (Ok(7), 3)));
        assert!(matches!(tried(vec![held(), late()]), (Err(Error::Gone { .. }), 2)));
        let all = (0..CONNECTIONS).map(|_| held()).collect();
        assert!(matches!(tried(all), (Err(Error::NotAdmitted { .. }), CONNECTIONS)));
    }
}

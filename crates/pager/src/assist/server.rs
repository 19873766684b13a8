//! The assist process: one thread that serves the sessions of a run.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use pool::Endpoint;
use pool::socket::Listener;
use verbs::Backoff;

use super::protocol::Message;
use super::session::{Session, SetUp, Step};
use super::socket;

/// Rounds with work between two looks at the sockets.
const ROUNDS: u32 = 64;
/// Maximum number of sessions.
const SESSIONS_MAX: usize = 1024;

/// A connection of a host.
struct Peer {
    /// Declared before `socket`: the end of the socket tells the host that the assist accesses the
    /// host's memory no more.
    state: State,
    socket: OwnedFd,
}

enum State {
    SetsUp(SetUp),
    Serves(Box<Session>),
}

/// Listens for the hosts of a run, and serves them.
pub struct Server {
    listener: Listener,
    peers: Vec<Peer>,
    /// Number of peers above which no connection is accepted.
    peers_max: usize,
}

impl Server {
    /// Listens at `path`. It serves processes of this process's user only.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn listen(path: &Path) -> Result<Self, pool::Error> {
        let listener = Listener::bind(&Endpoint::At(path.to_owned()))?;
        Ok(Self { listener, peers: Vec::new(), peers_max: SESSIONS_MAX })
    }

    /// Serves the hosts. Never returns.
    pub fn serve(&mut self) -> ! {
        let (mut backoff, mut rounds) = (Backoff::new(), 0);
        loop {
            if self.work() {
                backoff = Backoff::new();
                rounds += 1;
                if rounds == ROUNDS {
                    rounds = 0;
                    self.look(0);
                }
            } else if !backoff.snooze() {
                if self.may_sleep() {
                    self.look(-1);
                }
                self.peers.iter().for_each(Peer::announce_awake);
                backoff = Backoff::new();
            }
        }
    }

    /// Gives each session a turn. Returns true if one of them had work.
    fn work(&mut self) -> bool {
        let mut worked = false;
        self.peers.retain_mut(|peer| match peer.work() {
            Ok(any) => {
                worked |= any;
                true
            }
            Err(why) => peer.refuse(why),
        });
        worked
    }

    /// Announces that the assist is about to sleep. Returns false if there is work to do first.
    fn may_sleep(&mut self) -> bool {
        let mut may = true;
        self.peers.retain_mut(|peer| match peer.may_sleep() {
            Ok(one) => {
                may &= one;
                true
            }
            Err(why) => peer.refuse(why),
        });
        may
    }

    /// Reads the sockets, and waits for an event if `timeout_ms` is -1.
    fn look(&mut self, timeout_ms: i32) {
        let mut polled: Vec<_> = self
            .peers
            .iter()
            .map(|peer| socket::polled(peer.socket.as_fd(), libc::POLLIN))
            .collect();
        let accepts = if self.peers.len() < self.peers_max { libc::POLLIN } else { 0 };
        polled.push(socket::polled(self.listener.as_fd(), accepts));
        let mut add = |event: BorrowedFd<'_>| polled.push(socket::polled(event, libc::POLLIN));
        self.peers.iter().for_each(|peer| peer.events(&mut add));
        if socket::poll(&mut polled, timeout_ms) == 0 {
            return;
        }
        let mut events = polled.iter().map(|entry| entry.revents != 0);
        self.peers.retain_mut(|peer| match events.next() {
            Some(true) => peer.read(),
            _ => true,
        });
        if events.next() == Some(true) {
            self.accept();
        }
    }

    fn accept(&mut self) {
        match self.listener.accept() {
            Ok(Some(socket)) if pool::socket::user(&socket) == Some(own_user()) => {
                self.peers.push(Peer { state: State::SetsUp(SetUp::default()), socket });
            }
            Ok(_) => {}
            // Descriptors have run out. The connection stays in the queue until a host has ended.
            Err(_) => self.peers_max = self.peers.len(),
        }
    }
}

fn own_user() -> u32 {
    // SAFETY: reads the process's credentials.
    unsafe { libc::geteuid() }
}

impl Peer {
    fn work(&mut self) -> Result<bool, String> {
        match &mut self.state {
            State::Serves(session) => session.work(),
            State::SetsUp(_) => Ok(false),
        }
    }

    fn may_sleep(&mut self) -> Result<bool, String> {
        match &mut self.state {
            State::Serves(session) => session.may_sleep(),
            State::SetsUp(_) => Ok(true),
        }
    }

    fn events(&self, visit: &mut dyn FnMut(BorrowedFd<'_>)) {
        if let State::Serves(session) = &self.state {
            session.events(visit);
        }
    }

    fn announce_awake(&self) {
        if let State::Serves(session) = &self.state {
            session.announce_awake();
        }
    }

    /// Reads what has arrived. Returns false if the session has ended.
    fn read(&mut self) -> bool {
        if matches!(self.state, State::Serves(_)) {
            return match socket::drain_wakes(self.socket.as_fd()) {
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    self.refuse("unexpected packet".into())
                }
                done => done.is_ok(),
            };
        }
        let packet = match socket::receive(self.socket.as_fd()) {
            Ok(Some(packet)) => packet,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
            Ok(None) | Err(_) => return false,
        };
        match self.take(packet) {
            Ok(()) => true,
            Err(why) => self.refuse(why),
        }
    }

    fn take(&mut self, (message, descriptors): (Message, Vec<OwnedFd>)) -> Result<(), String> {
        let State::SetsUp(set_up) = &mut self.state else { return Ok(()) };
        match set_up.take(message, descriptors)? {
            Step::Next(None) => Ok(()),
            Step::Next(Some(answer)) => self.send(&answer),
            Step::Complete(session) => {
                self.state = State::Serves(session);
                self.send(&Message::Ready)
            }
        }
    }

    fn send(&self, message: &Message) -> Result<(), String> {
        let sent = socket::send(self.socket.as_fd(), message, &[]);
        sent.map_err(|error| format!("cannot answer: {error}"))
    }

    /// Tells the host why its session ends. Returns false: the session has ended.
    fn refuse(&self, why: String) -> bool {
        // A host that reads no packets sees the end of the socket.
        let _ = self.send(&Message::Refused(why));
        false
    }
}

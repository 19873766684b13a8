//! The assist process: one thread that serves the sessions of a run.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use pool::Endpoint;
use pool::socket::Listener;
use verbs::Backoff;

use super::protocol::Message;
use super::session::{Session, SetUp, Step};
use super::socket;
use crate::priority::HandlerPriority;
use crate::sys;

/// Rounds with work between two looks at the sockets.
const ROUNDS: u32 = 64;
/// Maximum number of sessions.
const SESSIONS_MAX: usize = 1024;

/// Default time limit of a set-up.
pub const SET_UP: Duration = Duration::from_secs(10);
/// Time between two lines about set-ups that have reached the limit.
const LINE_NS: u64 = 1_000_000_000;

/// A connection of a host.
struct Peer {
    /// Declared before `socket`: the end of the socket tells the host that the assist accesses the
    /// host's memory no more.
    state: State,
    socket: OwnedFd,
}

enum State {
    /// A set-up, and the time at which it must be complete.
    SetsUp(SetUp, u64),
    Serves(Box<Session>),
}

/// Listens for the hosts of a run, and serves them.
pub struct Server {
    listener: Listener,
    peers: Vec<Peer>,
    /// Is closed to accept a connection when descriptors have run out.
    spare: Option<OwnedFd>,
    /// Time limit of a set-up.
    set_up: Duration,
    late: Late,
}

/// Set-ups that have reached the time limit.
#[derive(Default)]
struct Late {
    /// Number of them of which no line tells yet.
    untold: u32,
    /// Time from which a line is written again.
    next_line_ns: u64,
}

impl Late {
    /// Writes a line at most once a second: a hostile program can open connections without end.
    fn tell(&mut self, peer: Peer, limit: Duration, now: u64) {
        self.untold += 1;
        if now < self.next_line_ns {
            return;
        }
        let process = match pool::socket::Peer::of(&peer.socket) {
            pool::socket::Peer::Process(id) => format!("process {id}"),
            _ => "a process of another PID namespace".into(),
        };
        sys::say(&format!(
            "the assist has ended {} session(s) whose set-up was not complete within {limit:?} \
             (--set-up-ms of granary assist), the last one of {process}, which goes on without the \
             assist",
            self.untold
        ));
        *self = Self { untold: 0, next_line_ns: now + LINE_NS };
    }
}

impl Server {
    /// Listens at `path`. It serves processes of this process's user only, and ends a session whose
    /// set-up is not complete after `set_up`.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn listen(path: &Path, set_up: Duration) -> Result<Self, pool::Error> {
        let listener = Listener::bind(&Endpoint::At(path.to_owned()))?;
        Ok(Self { listener, peers: Vec::new(), spare: spare(), set_up, late: Late::default() })
    }

    /// Serves the hosts, scheduled as the handlers of faults are. Never returns.
    pub fn serve(&mut self) -> ! {
        let mut priority = HandlerPriority::ask();
        loop {
            let start = sys::now_ns();
            let is_idle = self.work_for_a_while();
            priority.served(start, sys::now_ns());
            match is_idle {
                true => self.sleep(),
                false => self.look(0),
            }
        }
    }

    /// Works until no session has had work for some microseconds (true), or until [`ROUNDS`] rounds
    /// had work (false).
    fn work_for_a_while(&mut self) -> bool {
        let (mut backoff, mut rounds) = (Backoff::new(), 0);
        while rounds < ROUNDS {
            if self.work() {
                (backoff, rounds) = (Backoff::new(), rounds + 1);
            } else if !backoff.snooze() {
                return true;
            }
        }
        false
    }

    /// Sleeps until a host sends a packet, a transfer ends, or a set-up reaches its time limit,
    /// unless there is work already.
    fn sleep(&mut self) {
        if self.may_sleep() {
            self.look(self.time_left_ms());
        }
        self.peers.iter().for_each(Peer::announce_awake);
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

    /// Returns the time until the next limit of a set-up; -1 without one.
    fn time_left_ms(&self) -> i32 {
        let Some(next) = self.peers.iter().filter_map(Peer::deadline).min() else { return -1 };
        let ms = next.saturating_sub(sys::now_ns()).div_ceil(1_000_000);
        i32::try_from(ms).unwrap_or(i32::MAX)
    }

    /// Ends the sessions whose set-up has reached its time limit.
    fn end_late(&mut self) {
        if self.peers.iter().all(|peer| peer.deadline().is_none()) {
            return;
        }
        let now = sys::now_ns();
        let is_late = |peer: &mut Peer| peer.deadline().is_some_and(|deadline| deadline <= now);
        for peer in self.peers.extract_if(.., is_late) {
            peer.refuse(format!("its set-up was not complete within {:?}", self.set_up));
            self.late.tell(peer, self.set_up, now);
        }
    }

    /// Reads the sockets, after a wait for an event of at most `timeout_ms`; -1 is no limit.
    fn look(&mut self, timeout_ms: i32) {
        self.read_sockets(timeout_ms);
        self.end_late();
    }

    fn read_sockets(&mut self, timeout_ms: i32) {
        let mut polled: Vec<_> = self
            .peers
            .iter()
            .map(|peer| socket::polled(peer.socket.as_fd(), libc::POLLIN))
            .collect();
        polled.push(socket::polled(self.listener.as_fd(), libc::POLLIN));
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

    /// Accepts a connection. One that is not to be served is closed at once, so that its host goes
    /// on without the assist and does not wait.
    fn accept(&mut self) {
        match self.listener.accept() {
            Ok(Some(socket)) if self.peers.len() < SESSIONS_MAX && is_own_user(&socket) => {
                let limit = u64::try_from(self.set_up.as_nanos()).unwrap_or(u64::MAX);
                let deadline = sys::now_ns().saturating_add(limit);
                self.peers.push(Peer { state: State::SetsUp(SetUp::default(), deadline), socket });
            }
            Ok(_) => {}
            // Descriptors have run out.
            Err(_) => {
                self.spare = None;
                drop(self.listener.accept());
                self.spare = spare();
            }
        }
    }
}

/// Opens a descriptor of no use; `None` if descriptors have run out.
fn spare() -> Option<OwnedFd> {
    std::fs::File::open("/dev/null").map(OwnedFd::from).ok()
}

fn is_own_user(socket: &OwnedFd) -> bool {
    pool::socket::user(socket) == Some(own_user())
}

fn own_user() -> u32 {
    // SAFETY: reads the process's credentials.
    unsafe { libc::geteuid() }
}

impl Peer {
    fn work(&mut self) -> Result<bool, String> {
        match &mut self.state {
            State::Serves(session) => session.work(),
            State::SetsUp(..) => Ok(false),
        }
    }

    fn may_sleep(&mut self) -> Result<bool, String> {
        match &mut self.state {
            State::Serves(session) => session.may_sleep(),
            State::SetsUp(..) => Ok(true),
        }
    }

    /// Time at which the set-up must be complete; `None` if it is.
    fn deadline(&self) -> Option<u64> {
        match self.state {
            State::SetsUp(_, deadline) => Some(deadline),
            State::Serves(_) => None,
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
        let State::SetsUp(set_up, _) = &mut self.state else { return Ok(()) };
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

/// An assist as a thread of a test.
#[cfg(test)]
pub(crate) mod testing {
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread::JoinHandle;

    use super::*;
    use crate::assist::link::socket_path;

    const RUNS: u32 = 0;
    const ENDS: u32 = 1;

    /// The thread, and the directory in which it listens.
    pub(crate) struct TestAssist {
        pub directory: PathBuf,
        state: Arc<AtomicU32>,
        thread: Option<JoinHandle<()>>,
    }

    impl TestAssist {
        pub fn start(name: &str) -> Self {
            let name = format!("granary-assist-{name}-{}", std::process::id());
            let directory = std::env::temp_dir().join(name);
            std::fs::create_dir_all(&directory).unwrap();
            let mut server = Server::listen(&socket_path(&directory), SET_UP).unwrap();
            let state = Arc::new(AtomicU32::new(RUNS));
            let seen = state.clone();
            let thread = std::thread::spawn(move || {
                while seen.load(Ordering::Acquire) == RUNS {
                    server.work();
                    // Not without a limit, because no packet wakes the thread at its end.
                    if server.may_sleep() {
                        server.look(1);
                    }
                    server.peers.iter().for_each(Peer::announce_awake);
                }
            });
            Self { directory, state, thread: Some(thread) }
        }

        /// Ends the assist as the end of its process would.
        pub fn end(&mut self) {
            self.state.store(ENDS, Ordering::Release);
            self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
        }
    }

    impl Drop for TestAssist {
        fn drop(&mut self) {
            self.end();
            let _ = std::fs::remove_dir_all(&self.directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use verbs::DmaMemory;

    use super::testing::TestAssist;
    use super::*;
    use crate::assist::link::{Link, socket_path};
    use crate::assist::protocol::VERSION;
    use crate::assist::ring;

    /// Sends packets as a hostile host. Returns the assist's reason for the end of the session.
    fn refused(assist: &TestAssist, packets: &[(Message, usize)]) -> String {
        let socket = pool::socket::connect(&socket_path(&assist.directory)).unwrap();
        // Memory of a kind and size that nothing accepts.
        let file = socket::sealed_memory(4096).unwrap();
        for (message, descriptors) in packets {
            let files = vec![file.as_fd(); *descriptors];
            // The assist may have closed the socket before.
            let _ = socket::send(socket.as_fd(), message, &files);
        }
        loop {
            match socket::receive(socket.as_fd()) {
                Ok(Some((Message::Refused(why), _))) => return why,
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return "the end".into(),
            }
        }
    }

    #[test]
    fn hostile_hosts_are_refused_and_others_go_on() {
        let assist = TestAssist::start("hostile");
        let honest = Link::connect(&assist.directory).unwrap();
        let hello = || (Message::Hello { version: VERSION }, 0);
        let cases: [(&[(Message, usize)], &str); 9] = [
            (&[(Message::Ring, 1)], "unexpected packet"),
            (&[(Message::Hello { version: 9 }, 0)], "version 9 of the process"),
            (&[hello(), (Message::Ring, 0)], "the end"),
            (&[hello(), (Message::Wake, 0)], "unexpected packet"),
            (&[hello(), (Message::Ring, 1)], "4096 bytes of"),
            (&[hello(), (Message::Frames { bytes: 1 << 50 }, 1)], "4096 bytes of"),
            (&[hello(), (Message::Queues { node: 1 << 40 }, 2)], "unexpected packet"),
            (
                &[hello(), (Message::Lent { node: 0, bytes: 1, state: vec![1; 99] }, 1)],
                "without their memory",
            ),
            (&[hello(), (Message::Refused("no".into()), 0)], "unexpected packet"),
        ];
        for (packets, why) in cases {
            let answer = refused(&assist, packets);
            assert!(answer.contains(why), "{packets:?}: {answer}");
        }
        let file = socket::sealed_memory(4096).unwrap();
        honest.share_frames(file.as_fd(), 4096).unwrap();
    }

    #[test]
    fn session_ends_when_the_ring_violates_its_layout() {
        let assist = TestAssist::start("violation");
        let link = Link::connect(&assist.directory).unwrap();
        let file = socket::sealed_memory(4096).unwrap();
        link.share_frames(file.as_fd(), 4096).unwrap();
        let chunks = Message::Chunks { address: 0, bytes: 4096 };
        link.send(&chunks, &[file.as_fd()]).unwrap();
        let (control, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        link.send(&Message::Control, &[control.as_fd()]).unwrap();
        let bytes = ring::BYTES.next_multiple_of(4096);
        let ring = socket::sealed_memory(bytes).unwrap();
        let memory = DmaMemory::map_shared(&ring, 0, bytes).unwrap();
        drop(ring::Producer::new(memory.clone()));
        link.send(&Message::Ring, &[ring.as_fd()]).unwrap();
        // The producer's index.
        memory.word32(64).store(1000, std::sync::atomic::Ordering::Release);
        link.wake();
        let why = link.wait_for_end();
        assert!(why.as_deref().is_some_and(|why| why.contains("1000 requests")), "{why:?}");
        // The pages of a session that has ended are not mapped any more.
        let own = format!("/proc/self/fd/{}", ring.as_raw_fd());
        let inode = |path: &str| std::fs::metadata(path).unwrap();
        use std::os::unix::fs::MetadataExt;
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let number = format!(" {} ", inode(&own).ino());
        assert_eq!(maps.lines().filter(|line| line.contains(&number)).count(), 1, "the test's own");
    }
}

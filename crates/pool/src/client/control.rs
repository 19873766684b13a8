//! A compute node's way to its memory node's control thread.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rnic::port::shm::socket as packets;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::protocol::{self, Numbered, Opening, Reply, Request, Status, VERSION, Welcome};
use crate::scheme::{Admission, Admitted, GroupId, Lane};
use crate::{Error, socket};

/// The control plane as a compute node sees it.
pub trait ControlPlane: Send + Sync {
    /// What the memory node said first.
    fn welcome(&self) -> &Welcome;
    /// Is admitted, once.
    fn admit(&self, admission: &Admission) -> Result<Admitted, Error>;
    /// Returns when there are free chunks (true) or the time is over (false).
    fn await_memory(&self, timeout: Duration) -> Result<bool, Error>;
    /// See [`crate::scheme::NodeScheme::reset_management`].
    fn reset_management(&self) -> Result<Vec<u32>, Error>;
    /// See [`crate::scheme::NodeScheme::reset_access`].
    fn reset_access(&self, group: GroupId, lane: Lane) -> Result<u32, Error>;
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

/// The control plane over a Unix socket. Several threads may ask at the same time: one of them
/// reads for all.
pub struct SocketControl {
    fd: OwnedFd,
    welcome: Welcome,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    last: u64,
    reading: bool,
    replies: HashMap<u64, Reply>,
    /// Why no reply will come any more.
    gone: Option<String>,
}

impl SocketControl {
    /// Connects to the memory node that serves `path`.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let attempt = "greeting the memory node";
        let fd = socket::connect(path)?;
        let opening = protocol::encode(attempt, &Opening::pool())?;
        packets::send(&fd, &opening, &[]).map_err(|e| gone(attempt, e.to_string()))?;
        if !wait_readable(&fd, PATIENCE).map_err(|e| gone(attempt, e.to_string()))? {
            return Err(gone(attempt, format!("no answer for {PATIENCE:?}")));
        }
        match read(&fd).map_err(|why| gone(attempt, why))?.body {
            Reply::Welcome(welcome) if welcome.version == VERSION => {
                let state = Mutex::new(State::default());
                Ok(Self { fd, welcome, state, changed: Condvar::new() })
            }
            Reply::Welcome(welcome) => Err(Error::Refused {
                attempt: attempt.into(),
                why: format!("it speaks version {}, this program {VERSION}", welcome.version),
            }),
            other => Err(unexpected(attempt, other)),
        }
    }

    /// Sends a request and waits for its reply.
    fn ask(&self, attempt: &str, request: Request, patience: Duration) -> Result<Reply, Error> {
        let deadline = Instant::now() + patience;
        let id = {
            let mut state = self.state.lock();
            if let Some(why) = &state.gone {
                return Err(gone(attempt, why.clone()));
            }
            state.last += 1;
            state.last
        };
        let bytes = protocol::encode(attempt, &Numbered { id, body: request })?;
        // Packets are sent whole, so that several threads may send.
        packets::send(&self.fd, &bytes, &[]).map_err(|e| gone(attempt, e.to_string()))?;
        match self.reply(attempt, id, deadline)? {
            Reply::Error { why } => Err(Error::Refused { attempt: attempt.into(), why }),
            Reply::OverBudget { why, retry_after_ms } => Err(Error::OverBudget {
                attempt: attempt.into(),
                why,
                retry_after: Duration::from_millis(retry_after_ms),
            }),
            reply => Ok(reply),
        }
    }

    fn reply(&self, attempt: &str, id: u64, deadline: Instant) -> Result<Reply, Error> {
        let mut state = self.state.lock();
        loop {
            if let Some(reply) = state.replies.remove(&id) {
                return Ok(reply);
            }
            if let Some(why) = &state.gone {
                return Err(gone(attempt, why.clone()));
            }
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
            let got = match wait_readable(&self.fd, deadline - now) {
                Ok(true) => Some(read(&self.fd)),
                Ok(false) => None,
                Err(e) => Some(Err(e.to_string())),
            };
            state = self.state.lock();
            state.reading = false;
            match got {
                None => {}
                // A number that nobody waits for is of a request that was given up.
                Some(Ok(reply)) => drop(state.replies.insert(reply.id, reply.body)),
                Some(Err(why)) => state.gone = Some(why),
            }
            self.changed.notify_all();
        }
    }
}

impl ControlPlane for SocketControl {
    fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    fn admit(&self, admission: &Admission) -> Result<Admitted, Error> {
        let attempt = "being admitted";
        match self.ask(attempt, Request::Admit(admission.clone()), PATIENCE)? {
            Reply::Admitted(admitted) => Ok(admitted),
            other => Err(unexpected(attempt, other)),
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

    fn reset_management(&self) -> Result<Vec<u32>, Error> {
        let attempt = "re-establishing the management QPs";
        match self.ask(attempt, Request::ResetManagement, PATIENCE)? {
            Reply::Management { peers } => Ok(peers),
            other => Err(unexpected(attempt, other)),
        }
    }

    fn reset_access(&self, group: GroupId, lane: Lane) -> Result<u32, Error> {
        let attempt = "re-establishing an access QP";
        let request = Request::ResetAccess { group: group.0, lane: lane.0 };
        match self.ask(attempt, request, PATIENCE)? {
            Reply::Access { peer } => Ok(peer),
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
        let mut fds = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut fds, Some(&now)) {
            Ok(0) | Err(_) => Ok(()),
            Ok(_) => Err(gone("looking for the memory node", CLOSED.into())),
        }
    }

    fn descriptors(&self) -> Vec<i32> {
        use std::os::fd::AsRawFd;
        vec![self.fd.as_raw_fd()]
    }
}

const CLOSED: &str = "its process has closed the connection";

fn wait_readable(fd: &OwnedFd, timeout: Duration) -> Result<bool, Errno> {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    let timeout = Timespec {
        tv_sec: timeout.as_secs().min(1 << 32) as i64,
        tv_nsec: timeout.subsec_nanos() as i64,
    };
    match poll(&mut fds, Some(&timeout)) {
        Ok(n) => Ok(n > 0),
        Err(Errno::INTR) => Ok(false),
        Err(e) => Err(e),
    }
}

fn read(fd: &OwnedFd) -> Result<Numbered<Reply>, String> {
    match packets::receive(fd) {
        Ok(None) => Err(CLOSED.into()),
        Ok(Some(p)) => protocol::decode("reading a reply", &p.bytes).map_err(|e| e.to_string()),
        Err(e) => Err(format!("reading its answer: {e}")),
    }
}

fn gone(attempt: &str, why: String) -> Error {
    Error::Gone { attempt: attempt.into(), why }
}

fn unexpected(attempt: &str, reply: Reply) -> Error {
    match reply {
        Reply::Error { why } => Error::Refused { attempt: attempt.into(), why },
        other => Error::Protocol {
            attempt: attempt.into(),
            why: format!("an answer that is not one to it: {other:?}"),
        },
    }
}

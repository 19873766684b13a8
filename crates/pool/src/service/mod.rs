//! The memory node as a service of a process: other processes attach to its NIC and to its pool
//! over one Unix socket.
//!
//! ```text
//!            granary-control                 granary-turn              granary-nic
//!            ┌───────────────────────┐       ┌──────────────┐          ┌──────────┐
//!  listen ──►│ epoll                 │ lock  │ sleeps on a  │ verbs    │ engine   │
//!  nic    ──►│  NIC sessions         ├──────►│ CQ; answers  ├─────────►│ doorbells│
//!  pool   ──►│  pool sessions        │       │ RPCs, repairs│          │          │
//!  eventfd──►│  (stop, memory again) │       └──────────────┘          └──────────┘
//!            └───────────────────────┘
//!            the memory node's CPU: both threads                       the hardware
//! ```
//!
//! - Sockets do not block; a peer that does not read its replies is not read from either.
//! - A compute node is known by its pool connection and by the NIC session that owns the QPs that
//!   it named. When either closes, first its keys die and its chunks come back, then its NIC
//!   session ends.
//! - A process that asks for very much is read from at a pace (`paces.rs`); nothing is refused for that.
//! - The control thread sleeps unless somebody connects, asks or leaves.

mod connection;
mod control;
mod nic;
mod paces;
mod rooms;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fabric::soft::SoftNic;
use parking_lot::Mutex;
use rnic::port::shm::Host;
use rustix::event::EventfdFlags;

use self::control::{Ears, Watch};
pub use self::nic::NicService;
use crate::cpu::ThreadClock;
use crate::node::{Gate, MemoryNode, Turner};
use crate::protocol::{Dropped, Status, Trouble};
use crate::remote::{Listen, RemoteListener};
use crate::socket::{Endpoint, Listener};
use crate::{AnyNode, Error, Settings};

/// A running memory node; it stops when dropped.
pub struct Service {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
    address: Option<SocketAddr>,
}

/// What the control thread shares with its owner.
pub(crate) struct Shared {
    stop: AtomicBool,
    gate: Gate,
    clock: ThreadClock,
    wakeups: AtomicU64,
    wake: Arc<Wake>,
    failure: Mutex<Option<String>>,
    /// What went wrong without ending the memory node.
    trouble: Mutex<Trouble>,
    host: Host,
    node: MemoryNode<AnyNode<SoftNic>>,
    turner: Turner,
    /// See [`Watch::fail`].
    #[cfg(test)]
    adds_to_fail: Arc<std::sync::atomic::AtomicU32>,
}

/// Wakes the control thread, also from the thread `granary-turn`, which owns nothing else of the
/// service: a thread that owned all of [`Shared`] could be the one to end it, and would join itself.
pub(crate) struct Wake {
    /// The control thread's epoll instance has it.
    eventfd: OwnedFd,
    /// Requests that wait until there is memory.
    awaiting: AtomicUsize,
}

impl Wake {
    fn wake(&self) {
        // It does not block; if its counter is full, the thread is woken already.
        let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
    }
}

impl Service {
    /// Starts a memory node that listens at `endpoint`, for processes of this host.
    pub fn start(settings: &Settings, endpoint: &Endpoint) -> Result<Self, Error> {
        Self::start_with(settings, endpoint, None)
    }

    /// Starts a memory node that listens at `endpoint`, and for other hosts at `listen`.
    pub fn start_with(
        settings: &Settings,
        endpoint: &Endpoint,
        listen: Option<&Listen>,
    ) -> Result<Self, Error> {
        settings.validate()?;
        let listener = Listener::bind(endpoint)?;
        let path = listener.path().to_path_buf();
        let (remote, wire) = listen.map(RemoteListener::bind).transpose()?.unzip();
        let address = remote.as_ref().map(RemoteListener::address);
        let (nic, host) = match wire {
            None => SoftNic::host_with(settings.nic_limits())?,
            Some(wire) => SoftNic::host_over_with(wire, settings.nic_limits())?,
        };
        let settings = Settings { paced: true, ..settings.clone() };
        let node = MemoryNode::new(AnyNode::new(&nic, &settings)?, settings);
        let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::System { attempt: "making an eventfd".into(), source: e.into() })?;
        let wake = Arc::new(Wake { eventfd, awaiting: AtomicUsize::new(0) });
        let watch = Watch::new().map_err(|e| Error::System {
            attempt: "making the memory node's epoll instance".into(),
            source: e.into(),
        })?;
        #[cfg(test)]
        let adds_to_fail = watch.fail.clone();
        let ears = Ears::new(watch, &wake.eventfd, listener, remote)?;
        let turner = Turner::start(&node)?;
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            gate: Gate::default(),
            clock: ThreadClock::default(),
            wakeups: AtomicU64::new(0),
            wake: wake.clone(),
            failure: Mutex::new(None),
            trouble: Mutex::default(),
            host,
            node: node.clone(),
            turner,
            #[cfg(test)]
            adds_to_fail,
        });
        node.on_turn(move || {
            if wake.awaiting.load(Ordering::SeqCst) > 0 {
                wake.wake();
            }
        });
        let thread = thread::Builder::new()
            .name("granary-control".into())
            .spawn({
                let shared = shared.clone();
                move || {
                    shared.clock.adopt();
                    if let Err(e) = control::run(&shared, ears) {
                        *shared.failure.lock() = Some(e.to_string());
                    }
                    shared.clock.retire();
                    shared.gate.leave();
                }
            })
            .map_err(|source| Error::System {
                attempt: "starting the memory node's control thread".into(),
                source,
            })?;
        Ok(Self { shared, thread: Some(thread), path, address })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where it listens for other hosts, if it does.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// The memory node itself.
    pub fn node(&self) -> &MemoryNode<AnyNode<SoftNic>> {
        &self.shared.node
    }

    /// Its state, as a compute node can ask for it too.
    pub fn status(&self) -> Result<Status, Error> {
        self.shared.status()
    }

    /// CPU time of the control threads: the memory node's CPU.
    pub fn control_cpu(&self) -> Duration {
        self.shared.clock.read() + self.shared.turner.cpu_time()
    }

    /// Why a control thread ended by itself, if one did.
    pub fn failure(&self) -> Option<String> {
        self.shared.failure.lock().clone().or_else(|| self.shared.turner.failure())
    }

    /// Stops the control threads, and returns when they stand still: nothing is left of the memory
    /// node's CPU until [`Service::resume`]. The NIC goes on.
    pub fn pause(&self) {
        self.shared.gate.close();
        self.shared.wake.wake();
        self.shared.gate.wait_closed();
        self.shared.turner.pause();
    }

    /// Lets the control threads go on.
    pub fn resume(&self) {
        self.shared.turner.resume();
        self.shared.gate.open();
    }

    /// Ends all connections and stops. The socket file is removed.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.gate.open();
        self.shared.wake.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was reported on stderr; there is nothing to add.
            let _ = thread.join();
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn status(&self) -> Result<Status, Error> {
        let nic = self.host.stats().map_err(nic_gone)?;
        let control = self.clock.read() + self.turner.cpu_time();
        let wakeups = self.wakeups.load(Ordering::Relaxed) + self.turner.wakeups();
        let (unretired, why) = self.node.unretired();
        let trouble = self.trouble.lock().clone();
        let trouble = Trouble { unretired, last: why.or(trouble.last.clone()), ..trouble };
        Ok(Status {
            trouble,
            uptime_ms: self.node.uptime().as_millis() as u64,
            control_cpu_ns: control.as_nanos() as u64,
            control_wakeups: wakeups,
            nic_cpu_ns: nic.cpu.as_nanos() as u64,
            nic_wakeups: nic.sleeps,
            nic_wqes: nic.engine.wqes_total(),
            nic: if self.host.is_wired() { "shm and roce" } else { "shm" }.into(),
            dropped: Dropped {
                unknown_qp: nic.wire.unknown_qp,
                strangers: nic.wire.strangers,
                forged: nic.wire.forged,
                outdated: nic.wire.outdated,
                guessed: nic.wire.shut_out,
                spoilt: nic.wire.bad_icrc + nic.wire.malformed.iter().sum::<u64>(),
            },
            ..Status::of(self.node.settings(), self.node.status()?)
        })
    }
}

fn nic_gone(e: rnic::port::Error) -> Error {
    Error::Gone { attempt: "asking the NIC for its state".into(), why: e.to_string() }
}

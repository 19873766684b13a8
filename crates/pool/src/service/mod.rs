//! The memory node as a service: other processes attach to its NIC and to its pool over one Unix
//! socket.
//!
//! ```text
//!            granary-control                 granary-turn              granary-nic
//!            ┌───────────────────────┐       ┌──────────────┐          ┌──────────┐
//!  listen ──►│ epoll                 │ lock  │ sleeps on a  │ verbs    │ engine   │
//!  nic    ──►│  NIC sessions         ├──────►│ CQ; answers  ├─────────►│ doorbells│
//!  pool   ──►│  pool sessions        │       │ RPCs, repairs│          │          │
//!  eventfd──►│  (stop, memory free)  │       └──────────────┘          └──────────┘
//!            └───────────────────────┘
//!            the memory node's CPU: both threads                       the hardware
//! ```
//!
//! - Sockets are non-blocking. The service does not read requests of a peer that does not read
//!   replies.
//! - A compute node is identified by its pool connection and by the NIC session that owns its QPs.
//!   When either closes, the service first revokes its keys and reclaims its chunks, then ends its
//!   NIC session.
//! - Requests of each process are rate-limited (`client_limits.rs`) by delaying reads; no request
//!   is refused for that reason.
//! - The control thread sleeps unless a process connects, sends a request or leaves.

mod client_limits;
mod connection;
mod connection_limits;
mod control;
mod nic;
mod refusals;
#[cfg(test)]
mod tests;

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use verbs::Nic;

use self::control::{ControlSockets, Epoll};
pub use self::nic::NicService;
use crate::cpu::ThreadClock;
use crate::nic::{ChunkFile, NicHost};
use crate::node::{MemoryNode, NodeThreads, PauseGate};
use crate::protocol::{Status, Trouble};
use crate::remote::{Listen, RemoteListener};
use crate::socket::{DESCRIPTORS_MAX, Endpoint, Listener};
use crate::{Error, Settings};
use scheme::registry::NodeRegistry;
use units::scheduling::Class;

/// A running memory node; dropping it stops it.
pub struct Service {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
    address: Option<SocketAddr>,
}

/// State shared by the control thread and the [`Service`].
pub(crate) struct Shared {
    stop: AtomicBool,
    gate: PauseGate,
    clock: ThreadClock,
    wakeups: AtomicU64,
    wake: Arc<Wake>,
    failure: Mutex<Option<String>>,
    /// Errors that did not stop the memory node.
    trouble: Mutex<Trouble>,
    host: Arc<dyn NicHost>,
    node: MemoryNode,
    node_threads: NodeThreads,
    /// See [`Epoll::fail`].
    #[cfg(test)]
    adds_to_fail: Arc<std::sync::atomic::AtomicU32>,
}

/// Wakes the control thread, also from the thread `granary-turn`, which owns nothing else of the
/// service. If that thread owned [`Shared`], it could drop the last reference and join itself.
pub(crate) struct Wake {
    /// Registered with the control thread's epoll instance.
    eventfd: OwnedFd,
    /// Number of requests that wait for the memory node.
    awaiting: AtomicUsize,
}

impl Wake {
    fn wake(&self) {
        // Never blocks. If the counter is full, the thread is awake already.
        let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
    }
}

impl Service {
    /// Starts a memory node that listens at `endpoint` for processes of this host, and at `listen`
    /// for other hosts.
    ///
    /// `open` opens its NIC, which uses the UDP socket if there is one. It has
    /// the schemes in `nodes`.
    pub fn start_on<N: Nic>(
        settings: &Settings,
        endpoint: &Endpoint,
        listen: Option<&Listen>,
        open: impl FnOnce(Option<UdpSocket>) -> Result<(N, Arc<dyn NicHost>), Error>,
        nodes: &NodeRegistry<N>,
    ) -> Result<Self, Error> {
        settings.validate()?;
        let listener = Listener::bind(endpoint)?;
        let path = listener.path().to_path_buf();
        let (remote, wire) = listen.map(RemoteListener::bind).transpose()?.unzip();
        let remote = remote.map(|remote| remote.with_client_timeout(settings.client_timeout));
        let address = remote.as_ref().map(RemoteListener::address);
        let (nic, host) = open(wire)?;
        let settings = Settings { paced: true, ..settings.clone() };
        let node = MemoryNode::new(nodes.node(&nic, &settings.node()?)?, settings);
        let budget = node.status()?.budget.unwrap_or_default();
        tracing::info!(
            socket = %path.display(),
            address = address.map(tracing::field::display),
            scheme = %node.settings().scheme,
            chunks = node.settings().chunks(),
            budget_requests_per_s = budget.requests_per_s,
            budget_chunks = budget.chunks,
            "memory node starts"
        );
        let eventfd =
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(
                |e| Error::System { attempt: "creating an eventfd".into(), source: e.into() },
            )?;
        let wake = Arc::new(Wake { eventfd, awaiting: AtomicUsize::new(0) });
        let epoll = Epoll::new().map_err(|e| Error::System {
            attempt: "creating the memory node's epoll instance".into(),
            source: e.into(),
        })?;
        #[cfg(test)]
        let adds_to_fail = epoll.fail.clone();
        let sockets = ControlSockets::new(epoll, &wake.eventfd, listener, remote)?;
        let node_threads = NodeThreads::start(&node)?;
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            gate: PauseGate::default(),
            clock: ThreadClock::default(),
            wakeups: AtomicU64::new(0),
            wake: wake.clone(),
            failure: Mutex::new(None),
            trouble: Mutex::default(),
            host,
            node: node.clone(),
            node_threads,
            #[cfg(test)]
            adds_to_fail,
        });
        node.on_poll(move || {
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
                    if let Err(e) = control::run(&shared, sockets) {
                        tracing::error!(why = e.to_string(), "control thread ended");
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

    /// Path of the control socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Address for other hosts, if enabled.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// The memory node.
    pub fn node(&self) -> &MemoryNode {
        &self.shared.node
    }

    /// The memory node's state, as compute nodes can also query it.
    pub fn status(&self) -> Result<Status, Error> {
        self.shared.status()
    }

    /// A source of [`Service::status`] for another thread. It keeps the state of the service alive:
    /// drop it before the service.
    pub fn status_source(&self) -> impl Fn() -> Result<Status, Error> + Send + use<> {
        let shared = self.shared.clone();
        move || shared.status()
    }

    /// CPU time of the control threads, which is the memory node's CPU time.
    pub fn control_cpu(&self) -> Duration {
        self.shared.clock.read() + self.shared.node_threads.cpu_time()
    }

    /// The error that ended a control thread, if any.
    pub fn failure(&self) -> Option<String> {
        self.shared.failure.lock().clone().or_else(|| self.shared.node_threads.failure())
    }

    /// Pauses the control threads and returns when they are paused. The memory node uses no CPU
    /// until [`Service::resume`]; the NIC continues.
    pub fn pause(&self) {
        self.shared.gate.close();
        self.shared.wake.wake();
        self.shared.gate.wait_closed();
        self.shared.node_threads.pause();
    }

    /// Resumes the control threads.
    pub fn resume(&self) {
        self.shared.node_threads.resume();
        self.shared.gate.open();
    }

    /// Closes all connections and stops. Removes the socket file.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.gate.open();
        self.shared.wake.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of that thread is reported on stderr already.
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
        let nic = self.host.report()?;
        let control = self.clock.read() + self.node_threads.cpu_time();
        let wakeups = self.wakeups.load(Ordering::Relaxed) + self.node_threads.wakeups();
        let (unretired, why) = self.node.unretired();
        let trouble = self.trouble.lock().clone();
        let trouble = Trouble { unretired, last: why.or(trouble.last.clone()), ..trouble };
        let status = Status::of(self.node.settings(), self.node.status()?);
        let in_files: u64 = self.host.chunk_files().iter().map(|file| held_bytes(&file.file)).sum();
        Ok(Status {
            trouble,
            nic_counters: nic.counters,
            uptime_ms: self.node.uptime().as_millis() as u64,
            control_cpu_ns: control.as_nanos() as u64,
            control_wakeups: wakeups,
            nic_cpu_ns: nic.cpu.as_nanos() as u64,
            nic_ordinary: nic
                .scheduling
                .as_ref()
                .is_none_or(|granted| granted.class != Class::RealTime)
                .into(),
            nic_scheduling: nic.scheduling.map(|granted| granted.to_string()).unwrap_or_default(),
            nic_wakeups: nic.sleeps,
            nic_wqes: nic.wqes,
            nic: self.host.name().into(),
            dropped: nic.dropped,
            resident_bytes: status.resident_bytes + in_files,
            ..status
        })
    }

    /// The chunk memory as files, for a process of the user `user`.
    ///
    /// With the files the process reaches the chunks of all clients. So a process of another user
    /// (a program's child that has changed its user) gets none, and uses the NIC.
    ///
    /// # Errors
    /// The reason why the process gets no file.
    fn shared_chunks(&self, user: Option<u32>) -> Result<Vec<ChunkFile>, &'static str> {
        if user != Some(rustix::process::geteuid().as_raw()) {
            return Err("only processes of its own user get the chunk memory");
        }
        let files = self.host.chunk_files();
        match files.len() {
            1..=DESCRIPTORS_MAX => Ok(files),
            _ => Err("it does not pass on its chunk memory"),
        }
    }
}

/// Bytes of RAM that a file in memory holds; 0 if the system does not report it.
fn held_bytes(file: &OwnedFd) -> u64 {
    const BLOCK: u64 = 512;
    rustix::fs::fstat(file).map_or(0, |stat| stat.st_blocks as u64 * BLOCK)
}

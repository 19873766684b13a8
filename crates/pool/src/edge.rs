//! The choice of the NIC. This module alone names the software NIC; all other modules of this crate
//! work with any NIC that offers the verbs.
//!
//! | use | NIC |
//! | --- | --- |
//! | memory node in this process | `inline`: run by the threads that call it |
//! | memory node that serves other processes | `shm`, or `shm` and `roce`: run by a thread |
//! | client of `shm:PATH` | attached to the memory node's NIC |
//! | client of `roce://HOST` | attached to a NIC of this host, or a thread of this process |
//!
//! The functions here are those without a parameter for the NIC. Each of them calls a function with
//! such a parameter.

use std::net::{IpAddr, UdpSocket};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use metrics::{Metric, Samples};
use rnic::limits::Limits;
use rnic::nic::lend::{Lent, lendable_bytes};
use rnic::nic::{SoftCq, SoftNic, SoftQp};
use rnic::port::shm::{Host, LendableMemory, Session, SessionLimits, ThinFile, map_shared};
use verbs::direct::DirectQp;
use verbs::{DmaMemory, Error as VerbsError, Qpn, SessionSecret};

use crate::nic::{
    ChunkFile, LendingNic, LentQueues, LocalFunction, NicHost, NicOpener, NicReport, NicSession,
    QueueSizes, RemoteFunction, SessionNeeds,
};
use crate::protocol::Dropped;
use crate::remote::Listen;
use crate::{
    Address, Buffer, EmbeddedNode, Endpoint, Error, LocalNic, MultiPool, NicService, Options,
    Placement, Pool, Remote, Service, Settings,
};
use scheme::registry::{ClientRegistry, NodeRegistry};
use units::scheduling::Granted;

pub use rnic::port::shm::BorrowedMemory;

/// The NIC of a pool whose user does not choose one.
pub type DefaultNic = SoftNic;

/// The declarations of the counters of a memory node's NIC.
pub(crate) const NIC_METRICS: [&[Metric]; 3] = rnic::metrics::METRICS;

/// Limits of the NIC of a memory node with these settings.
fn limits(settings: &Settings) -> Limits {
    let usual = Limits::default();
    Limits { windows: settings.nic_windows.unwrap_or(usual.windows), ..usual }
}

/// Opens the software NIC.
#[derive(Clone, Copy, Debug, Default)]
pub struct SoftOpener;

impl NicOpener for SoftOpener {
    type Nic = SoftNic;

    fn open_local(&self, path: &Path) -> Result<LocalFunction<SoftNic>, VerbsError> {
        let nic = SoftNic::attach(path)?;
        Ok(LocalFunction { session: nic.secret(), nic })
    }

    fn open_remote(
        &self,
        local: IpAddr,
        shared: Option<&LocalNic>,
    ) -> Result<RemoteFunction<SoftNic>, Error> {
        if let Some(shared) = shared {
            let nic = SoftNic::attach(&shared.socket)?;
            return Ok(RemoteFunction { nic, port: shared.port });
        }
        let system =
            |source| Error::System { attempt: format!("opening a NIC at {local}"), source };
        let socket = UdpSocket::bind((local, 0)).map_err(system)?;
        let port = socket.local_addr().map_err(system)?.port();
        Ok(RemoteFunction { nic: SoftNic::over(socket)?, port })
    }
}

/// Shows the borrower the memory of the queues that a client lends. The borrower maps the two
/// memfds with [`BorrowedMemory::map`] in this order. Returns true when the borrower has done so.
pub type ShowQueues = dyn Fn([BorrowedFd<'_>; 2]) -> bool + Send + Sync;

/// Opens the software NIC with queues that can be lent. If the borrower does not map them, they
/// cannot be lent, and work as usual.
#[derive(Clone)]
pub struct LendingOpener {
    show: Arc<ShowQueues>,
    /// Bytes of the queues.
    bytes: usize,
}

impl LendingOpener {
    fn attach(&self, path: &Path) -> Result<SoftNic, VerbsError> {
        if self.bytes > 0
            && let Ok(lendable) = LendableMemory::new(self.bytes)
            && (self.show)(lendable.descriptors())
        {
            return SoftNic::attach_lendable(path, lendable);
        }
        SoftNic::attach(path)
    }
}

impl NicOpener for LendingOpener {
    type Nic = SoftNic;

    fn lending(&self, queues: &QueueSizes) -> Self {
        Self { bytes: lendable_bytes(&queues.cqs, &queues.send_queues), show: self.show.clone() }
    }

    fn open_local(&self, path: &Path) -> Result<LocalFunction<SoftNic>, VerbsError> {
        let nic = self.attach(path)?;
        Ok(LocalFunction { session: nic.secret(), nic })
    }

    fn open_remote(
        &self,
        local: IpAddr,
        shared: Option<&LocalNic>,
    ) -> Result<RemoteFunction<SoftNic>, Error> {
        match shared {
            Some(shared) => {
                Ok(RemoteFunction { nic: self.attach(&shared.socket)?, port: shared.port })
            }
            // The threads of this process run that NIC: a borrower would gain nothing.
            None => SoftOpener.open_remote(local, None),
        }
    }
}

impl LendingNic for SoftNic {
    type Borrowed = BorrowedMemory;

    fn lend(&self, cq: &SoftCq, qps: &[SoftQp]) -> Result<LentQueues, VerbsError> {
        let Lent { state, wake } = self.lend(cq, qps)?;
        Ok(LentQueues { state, wake })
    }

    fn take_back(&self, cq: &SoftCq, qps: &[SoftQp]) -> Result<(), VerbsError> {
        self.take_back(cq, qps)
    }

    fn adopt(
        memory: &BorrowedMemory,
        lent: LentQueues,
    ) -> Result<(SoftCq, Vec<SoftQp>), VerbsError> {
        SoftNic::adopt(memory, lent.wake, &lent.state)
    }

    fn send_blocks(qp: &SoftQp) -> u32 {
        qp.send_ring().entries
    }
}

impl NicHost for Host {
    fn session(&self, needs: &SessionNeeds) -> Box<dyn NicSession> {
        let mut limits = SessionLimits::default();
        limits.function.qps = limits.function.qps.max(needs.qps);
        limits.function.remote_peers = limits.function.remote_peers.max(needs.remote_peers);
        limits.memories = limits.memories.max(needs.memories);
        Box::new(Session::new(self, limits))
    }

    fn name(&self) -> &str {
        if self.has_roce() { "shm and roce" } else { "shm" }
    }

    fn report(&self) -> Result<NicReport, Error> {
        let stats = self.stats().map_err(gone)?;
        let mut samples = Samples::default();
        rnic::metrics::sample(&stats, &mut samples);
        let wire = &stats.wire;
        Ok(NicReport {
            cpu: stats.cpu,
            scheduling: stats.scheduling.clone(),
            sleeps: stats.sleeps,
            wqes: stats.engine.wqes_total(),
            dropped: Dropped {
                unknown_qp: wire.unknown_qp,
                strangers: wire.strangers,
                forged: wire.forged,
                outdated: wire.outdated,
                guessed: wire.shut_out,
                spoilt: wire.bad_icrc + wire.malformed.iter().sum::<u64>(),
            },
            counters: samples.numbers(),
        })
    }

    fn chunk_files(&self) -> Vec<ChunkFile> {
        let file = |ThinFile { address, bytes, file }| ChunkFile { address, bytes, file };
        self.thin_files().into_iter().map(file).collect()
    }
}

impl NicSession for Session {
    fn handle(&mut self, request: &[u8], descriptors: Vec<OwnedFd>) -> (Vec<u8>, Vec<OwnedFd>) {
        self.handle(request, descriptors)
    }

    fn is_open(&self) -> bool {
        self.is_open()
    }

    fn secret(&self) -> Option<SessionSecret> {
        self.secret()
    }

    fn owns_all(&self, qpns: &[Qpn]) -> Result<bool, Error> {
        self.owns_all(qpns).map_err(gone)
    }
}

fn gone(e: rnic::port::Error) -> Error {
    Error::Gone { attempt: "querying the NIC's state".into(), why: e.to_string() }
}

impl EmbeddedNode {
    /// Starts the memory node. Its NIC runs on the callers' threads: no socket and no NIC thread.
    pub fn start(settings: &Settings) -> Result<Self, Error> {
        Self::start_with(settings, &schemes::nodes(), schemes::clients())
    }

    /// Starts the memory node with one of the schemes in `nodes`. Its compute nodes have the
    /// schemes in `clients`.
    pub fn start_with(
        settings: &Settings,
        nodes: &NodeRegistry<SoftNic>,
        clients: ClientRegistry<SoftNic>,
    ) -> Result<Self, Error> {
        Self::start_on(SoftNic::inline_with(limits(settings)), settings, nodes, clients)
    }
}

impl Service {
    /// Starts a memory node that listens at `endpoint` for processes of this host.
    pub fn start(settings: &Settings, endpoint: &Endpoint) -> Result<Self, Error> {
        Self::start_with(settings, endpoint, None)
    }

    /// Starts a memory node that listens at `endpoint`, and at `listen` for other hosts.
    pub fn start_with(
        settings: &Settings,
        endpoint: &Endpoint,
        listen: Option<&Listen>,
    ) -> Result<Self, Error> {
        let open = |wire| -> Result<(SoftNic, Arc<dyn NicHost>), Error> {
            let (nic, host) = match wire {
                None => SoftNic::host_with(limits(settings))?,
                Some(wire) => SoftNic::host_over_with(wire, limits(settings))?,
            };
            if settings.shares_chunks {
                host.make_thin_files();
            }
            if settings.urgent_nic {
                host.prioritize().map_err(gone)?;
            }
            Ok((nic, Arc::new(host)))
        };
        Self::start_on(settings, endpoint, listen, open, &schemes::nodes())
    }
}

impl NicService {
    /// Starts a NIC that sends and receives packets at the local address of `wire`.
    pub fn start(wire: UdpSocket) -> Result<Self, Error> {
        let (_, host) = SoftNic::host_over(wire)?;
        Self::serve(Arc::new(host))
    }

    /// Like [`NicService::start`], and asks the system to run the NIC thread before CPU-bound
    /// threads. Returns what it grants.
    pub fn start_urgent(wire: UdpSocket) -> Result<(Self, Granted), Error> {
        let (_, host) = SoftNic::host_over(wire)?;
        let granted = host.prioritize().map_err(gone)?;
        Ok((Self::serve(Arc::new(host))?, granted))
    }

    /// Starts a NIC that this process uses ([`SoftNic::host_own`]) and other processes can attach
    /// to.
    pub fn start_own() -> Result<(DefaultNic, Self), Error> {
        let (nic, host) = SoftNic::host_own()?;
        Ok((nic, Self::serve(Arc::new(host))?))
    }
}

impl Pool {
    /// Starts a memory node inside this process and connects one compute node to it, without a
    /// socket or another process.
    pub fn embedded(settings: Settings) -> Result<Self, Error> {
        Self::embedded_in(&Arc::new(EmbeddedNode::start(&settings)?), Options::default())
    }

    /// Connects to the memory node that serves the socket at `path`.
    pub fn connect(path: impl AsRef<Path>, options: Options) -> Result<Self, Error> {
        Address::Shm(path.as_ref().to_path_buf()).connect(options)
    }

    /// Connects to a memory node on another host, over RoCEv2: with the NIC of this host that `to`
    /// names, or with a NIC of this process, which runs on a thread of it.
    pub fn connect_remote(to: &Remote, options: Options) -> Result<Self, Error> {
        Address::Roce(to.clone()).connect(options)
    }
}

impl Address {
    /// Connects to the memory node, with the NIC that the address selects.
    pub fn connect(&self, options: Options) -> Result<Pool, Error> {
        match self {
            Self::Shm(_) | Self::Roce(_) => Pool::connect_with(SoftOpener, self, options),
        }
    }

    /// Like [`Address::connect`], with queues that can be lent to another process, the borrower,
    /// by [`Pool::lend_lanes`]. Also at each [`Pool::reconnect`], `show` is called first.
    pub fn connect_lendable(
        &self,
        options: Options,
        show: impl Fn([BorrowedFd<'_>; 2]) -> bool + Send + Sync + 'static,
    ) -> Result<Pool, Error> {
        let opener = LendingOpener { show: Arc::new(show), bytes: 0 };
        Pool::connect_with(opener, self, Options { is_lendable: true, ..options })
    }
}

impl Pool {
    /// Registers memory like [`Pool::buffer`]. `show` is called with its memfd before the NIC's
    /// process seals it: only until then can another process map it ([`map_frames`]). `show` is not
    /// called if this process does not attach to the NIC of another process.
    pub fn buffer_shown(
        &self,
        bytes: usize,
        show: &mut dyn FnMut(BorrowedFd<'_>),
    ) -> Result<Buffer<SoftNic>, Error> {
        self.buffer_over(self.nic().alloc_shown(bytes, show)?)
    }
}

/// Maps the memory of another process that [`Pool::buffer_shown`] has shown: the whole memfd, at
/// most `most` bytes.
pub fn map_frames(file: &OwnedFd, most: u64) -> Result<DmaMemory, Error> {
    let why = |e: rnic::port::Error| VerbsError::Refused { verb: "map_frames", why: e.to_string() };
    Ok(map_shared(file, most).map_err(why)?)
}

impl MultiPool {
    /// Connects to the memory nodes at `addresses`.
    ///
    /// # Errors
    /// The error of the first memory node to which the connection fails.
    pub fn connect(
        addresses: &[Address],
        options: Options,
        placement: Placement,
    ) -> Result<Self, Error> {
        let pools =
            addresses.iter().map(|a| a.connect(options.clone())).collect::<Result<Vec<_>, _>>()?;
        Self::over(pools, placement)
    }
}

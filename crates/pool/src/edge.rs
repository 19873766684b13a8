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
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use metrics::{Metric, Samples};
use rnic::limits::Limits;
use rnic::nic::SoftNic;
use rnic::port::shm::{Host, Session, SessionLimits, ThinFile};
use verbs::{Error as VerbsError, Qpn, SessionSecret};

use crate::nic::{
    ChunkFile, LocalFunction, NicHost, NicOpener, NicReport, NicSession, RemoteFunction,
    SessionNeeds,
};
use crate::protocol::Dropped;
use crate::remote::Listen;
use crate::{
    Address, EmbeddedNode, Endpoint, Error, LocalNic, MultiPool, NicService, Options, Placement,
    Pool, Remote, Service, Settings,
};
use scheme::registry::{ClientRegistry, NodeRegistry};
use units::scheduling::Granted;

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

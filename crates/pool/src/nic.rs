//! Parts of a NIC besides the verbs: how a client opens it, and how its owner serves it to other
//! processes.
//!
//! All of this is control path. [`crate::edge`] implements these traits for the software NIC. A
//! further NIC implements [`verbs::Nic`] and these traits.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use units::scheduling::Granted;
use verbs::{Error as VerbsError, Nic, Qpn, SessionSecret};

use crate::protocol::Dropped;
use crate::socket::close_deferred;
use crate::{Error, LocalNic};

/// Opens NICs for the clients of memory nodes.
pub trait NicOpener: Clone + Send + Sync + 'static {
    /// Type of the NICs.
    type Nic: Nic;

    /// The opener of NICs whose first queues, which have these sizes, can be lent to another
    /// process. Without such NICs: this opener.
    fn lending(&self, _queues: &QueueSizes) -> Self {
        self.clone()
    }

    /// Opens a NIC whose QPs can be connected to QPs of the memory node that serves the socket at
    /// `path`.
    fn open_local(&self, path: &Path) -> Result<LocalFunction<Self::Nic>, VerbsError>;

    /// Opens a NIC that exchanges RoCEv2 packets with other hosts: the NIC of this host that
    /// `shared` names, or else a NIC of this process at the address `local`.
    fn open_remote(
        &self,
        local: IpAddr,
        shared: Option<&LocalNic>,
    ) -> Result<RemoteFunction<Self::Nic>, Error>;
}

/// Sizes of the queues that a client creates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueSizes {
    /// Entries of each CQ.
    pub cqs: Vec<u32>,
    /// Building blocks of each send queue.
    pub send_queues: Vec<u32>,
}

/// A NIC whose queues can be lent to another process.
pub trait LendingNic: Nic {
    /// The memory of the queues, which the other process has mapped before the NIC was opened.
    type Borrowed;

    /// Lends `cq` and `qps`, which are all QPs that complete to it. Resets the QPs; the caller
    /// connects them again.
    fn lend(&self, cq: &Self::Cq, qps: &[Self::Qp]) -> Result<LentQueues, VerbsError>;

    /// Takes lent queues back after their borrower has ended. Resets the QPs, so that no transfer
    /// of the borrower is in flight afterwards; the caller connects them again.
    fn take_back(&self, cq: &Self::Cq, qps: &[Self::Qp]) -> Result<(), VerbsError>;

    /// In the borrower: adopts the queues. They have no control verbs.
    fn adopt(
        memory: &Self::Borrowed,
        lent: LentQueues,
    ) -> Result<(Self::Cq, Vec<Self::Qp>), VerbsError>;

    /// Building blocks of the send queue of a QP; a READ or WRITE of one piece takes one.
    fn send_blocks(qp: &Self::Qp) -> u32;
}

/// Queues that are lent, for [`LendingNic::adopt`].
#[derive(Debug)]
pub struct LentQueues {
    /// Positions and sizes of the queues.
    pub state: Vec<u8>,
    /// The descriptor that wakes the NIC.
    pub wake: OwnedFd,
}

/// A function of a NIC that reaches a memory node on this host.
pub struct LocalFunction<N> {
    /// The function.
    pub nic: N,
    /// Secret of its session, if the memory node's process runs the NIC. With it the client proves
    /// that it owns its QPs.
    pub session: Option<SessionSecret>,
}

/// A function of a NIC that reaches other hosts.
pub struct RemoteFunction<N> {
    /// The function.
    pub nic: N,
    /// UDP port of its RoCEv2 traffic.
    pub port: u16,
}

/// A NIC as its owner serves it to other processes.
pub trait NicHost: Send + Sync {
    /// Opens a session for a process that asks for the service `nic`: a [`NoSession`] if processes
    /// do not attach to this NIC.
    fn session(&self, needs: &SessionNeeds) -> Box<dyn NicSession>;

    /// Name of the NIC in the memory node's status.
    fn name(&self) -> &str;

    /// The present counters of the NIC.
    fn report(&self) -> Result<NicReport, Error>;

    /// The memory of chunks as files, if the NIC's owner has chosen that.
    fn chunk_files(&self) -> Vec<ChunkFile> {
        Vec::new()
    }
}

/// Memory of chunks that is a file.
#[derive(Clone, Debug)]
pub struct ChunkFile {
    /// Address of its first byte, as grants name it.
    pub address: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// The file.
    pub file: Arc<OwnedFd>,
}

/// One attached process. Dropping the session revokes the keys of the process, and ends its queues.
pub trait NicSession {
    /// Executes a request, which came with `descriptors`. Returns the response with its
    /// descriptors. The NIC defines the form of both, except for the response
    /// `{"error": TEXT}`.
    fn handle(&mut self, request: &[u8], descriptors: Vec<OwnedFd>) -> (Vec<u8>, Vec<OwnedFd>);

    /// True if the process has a function of the NIC.
    fn is_open(&self) -> bool;

    /// The session's secret, if the session is open. Only its process has received the secret.
    fn secret(&self) -> Option<SessionSecret>;

    /// True if all these QPs belong to the session's process.
    fn owns_all(&self, qpns: &[Qpn]) -> Result<bool, Error>;
}

/// Minimum resources that a session must allow its process. Zero: the NIC's default is enough.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SessionNeeds {
    /// QPs.
    pub qps: u32,
    /// QPs with a peer on another host.
    pub remote_peers: u32,
    /// Pieces of memory that the process and the NIC share at a time.
    pub memories: usize,
}

/// Counters of a NIC.
#[derive(Clone, Debug, Default)]
pub struct NicReport {
    /// CPU time of the threads that play the hardware. Zero for hardware.
    pub cpu: Duration,
    /// Scheduling of these threads, if a better one was asked for.
    pub scheduling: Option<Granted>,
    /// Number of times that these threads went to sleep.
    pub sleeps: u64,
    /// WQEs executed without error.
    pub wqes: u64,
    /// Packets that the NIC dropped.
    pub dropped: Dropped,
    /// All counters by name ([`metrics::Samples::numbers`]).
    pub counters: BTreeMap<String, u64>,
}

/// Session of a NIC to which no process attaches, because each process opens it itself. Answers
/// every request with an error.
pub struct NoSession {
    why: String,
}

impl NoSession {
    /// A session of the NIC `name`.
    pub fn new(name: &str) -> Self {
        let why = format!(
            "each process opens the NIC {name} itself: connect to the network address of the \
             memory node, or start the memory node on a NIC to which processes attach"
        );
        Self { why }
    }
}

impl NicSession for NoSession {
    fn handle(&mut self, _request: &[u8], descriptors: Vec<OwnedFd>) -> (Vec<u8>, Vec<OwnedFd>) {
        descriptors.into_iter().for_each(close_deferred);
        (serde_json::json!({ "error": self.why }).to_string().into_bytes(), Vec::new())
    }

    fn is_open(&self) -> bool {
        false
    }

    fn secret(&self) -> Option<SessionSecret> {
        None
    }

    fn owns_all(&self, _qpns: &[Qpn]) -> Result<bool, Error> {
        Ok(false)
    }
}

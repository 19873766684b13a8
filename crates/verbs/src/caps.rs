//! Capabilities and limits of a NIC.

use serde::{Deserialize, Serialize};

/// Capabilities of a NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Name in reports: `inline`, `shm`, ...
    pub name: &'static str,
    /// The NIC executes WAIT, SEND_EN and RECV_EN: chains work.
    pub chains: bool,
    /// The NIC has type-2B windows that a UMR can bind to another QP.
    pub windows: bool,
    /// The NIC has type-1 windows.
    pub type1_windows: bool,
    /// The words that atomics work on are big-endian in memory.
    pub big_endian_atomics: bool,
    /// Atomics are atomic also with respect to the host's CPUs (`IBV_ATOMIC_GLOB`).
    pub global_atomics: bool,
    /// Maximum scatter-gather entries of a work request.
    pub max_sges: u32,
    /// Maximum bytes of inline data.
    pub max_inline: u32,
    /// Maximum entries of a send or receive queue.
    pub max_queue: u32,
    /// Optional features of this NIC.
    pub features: &'static [Feature],
}

impl Caps {
    /// Returns whether the NIC has `feature`.
    pub fn has(&self, feature: Feature) -> bool {
        self.features.contains(&feature)
    }
}

/// An optional feature of a NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Feature {
    /// Type-1 windows.
    Type1Windows,
    /// Type-2 windows, each bound to one queue pair (2B).
    Type2Windows,
    /// Type-1 windows that only QPs admitted by a word of memory can use
    /// ([`Guards`](crate::Guards)). Software NICs only.
    GuardedWindows,
    /// Regions behind an engine ([`RegionEngine`](crate::RegionEngine)). Software NICs only.
    RegionEngines,
    /// Regions can be changed ([`Nic::rereg_mr`](crate::Nic::rereg_mr)).
    Rereg,
    /// Regions and windows whose first byte has address 0.
    ZeroBased,
    /// The NIC reports asynchronous events to the function.
    AsyncEvents,
    /// An SRQ's limit can be armed.
    SrqLimit,
    /// [`CompletionQueue::wait_solicited`](crate::CompletionQueue::wait_solicited) distinguishes
    /// solicited completions from unsolicited ones.
    SolicitedEvents,
    /// Masked CAS and FAA.
    MaskedAtomics,
    /// The access rights of a QP can be changed while it is connected.
    ModifyAccess,
    /// A CQ that overruns stops taking completions and reports the overrun, unless
    /// [`CqAttr::ignore_overrun`](crate::CqAttr::ignore_overrun) is set.
    CqOverrun,
    /// Registering a region that peers may write fails unless local writes are allowed too.
    RemoteNeedsLocalWrite,
}

/// Capacity of a function (`ibv_device_attr`): the lower of the function's own limits and the
/// NIC's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Protection domains.
    pub pds: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Shared receive queues.
    pub srqs: u32,
    /// Memory regions and windows together.
    pub keys: u32,
    /// Memory windows.
    #[serde(default)]
    pub windows: u32,
    /// Number of functions that the owner of this function may use, including this one. Each
    /// function has its own keys and limits like these.
    #[serde(default)]
    pub functions: u32,
    /// Bytes in memory regions.
    pub registered_bytes: u64,
    /// Bytes of rings.
    pub ring_bytes: u64,
    /// Building blocks of a send ring.
    pub send_blocks: u32,
    /// Receive WQEs of a queue that is not managed.
    pub recv_entries: u32,
    /// Entries of a CQ.
    pub cq_entries: u32,
    /// SGEs of a READ or WRITE.
    pub sges: u32,
    /// Bytes of a READ or WRITE.
    pub rdma_bytes: u64,
    /// Bytes of a SEND.
    pub send_bytes: u32,
}

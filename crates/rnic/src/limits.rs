//! Limits of the NIC and of its functions.

use rustix::io::Errno;

/// Capacity and scheduling parameters of the NIC. Fixed when the NIC is created.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Maximum number of virtual functions.
    pub functions: u32,
    /// Maximum number of protection domains, over all functions.
    pub pds: u32,
    /// Maximum number of queue pairs, over all functions.
    pub qps: u32,
    /// Maximum number of completion queues, over all functions.
    pub cqs: u32,
    /// Maximum number of receive queues, over all functions: shared ones and the QPs' own.
    pub recvs: u32,
    /// Maximum number of memory regions and windows in one key table, at most 2^24 - 1. The
    /// physical function and the clients' functions share one table; each function that the owner
    /// opens has a table of its own with the same limit.
    pub keys: u32,
    /// Maximum number of memory windows of each function.
    pub windows: u32,
    /// Maximum number of functions that the NIC's owner may use, including the physical function
    /// (FineMem §4.3: 128 on a ConnectX-6).
    pub owner_functions: u32,
    /// Maximum length in bytes of a SEND to a QP of this NIC. Such a SEND is one indivisible step,
    /// so this limit bounds the time for which one client can block the others. A SEND to another
    /// NIC is one step per packet and may be as long as a WRITE.
    pub send_bytes_max: u32,
    /// Slice length in bytes: a longer READ or WRITE is executed in several slices.
    pub slice_bytes: u32,
    /// Slice length while several functions are active. Shorter than `slice_bytes`, because every
    /// function waits for the end of the slice in progress.
    pub shared_slice_bytes: u32,
    /// Scheduling quantum of a QP while other QPs of its function are ready, in bytes moved.
    /// Fetching a WQE counts as 64 bytes plus 64 bytes per segment; a completion counts as 64
    /// bytes.
    pub qp_turn: u32,
    /// Scheduling quantum of a function while other functions are ready, in the same unit. One
    /// `poll` lasts one such quantum, or eight if one function alone has been active for a while.
    pub function_turn: u32,
    /// While the physical function has work, one in this many quanta is the physical function's,
    /// regardless of the number of other functions: the physical function serves all of them. At
    /// least 1.
    pub physical_every: u32,
    /// Scheduling quantum of the physical function. Longer than the quantum of the other functions,
    /// because a chain that clears a chunk serves one client and must not wait for a quantum of a
    /// flooding function after every few KiB.
    pub physical_turn: u32,
    /// Also check the index and QPN in the control segments of managed rings' WQEs. Recycled rings
    /// do not work with this check; the option exists to show the dependence.
    pub strict: bool,
    /// Limits of connections to other NICs. `None`: the NIC accepts no such connection.
    pub wire: Option<WireLimits>,
    /// Source of random numbers, which makes QP numbers unpredictable. `None`: QP numbers are
    /// assigned in order, for reproducible simulations.
    pub random: Option<fn() -> Result<u32, Errno>>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            functions: 4096,
            pds: 16 << 10,
            qps: 64 << 10,
            cqs: 64 << 10,
            recvs: 64 << 10,
            keys: (1 << 24) - 1,
            windows: (1 << 24) - 1,
            owner_functions: 128,
            send_bytes_max: 64 << 10,
            slice_bytes: 32 << 10,
            shared_slice_bytes: 8 << 10,
            qp_turn: 1 << 10,
            function_turn: 2 << 10,
            physical_every: 2,
            physical_turn: 16 << 10,
            strict: false,
            wire: None,
            random: None,
        }
    }
}

/// Limits of connections to other NICs.
#[derive(Clone, Debug)]
pub struct WireLimits {
    /// Capacity in bytes of the outbox, which holds packets until the port sends them.
    pub outbox_bytes: usize,
    /// Maximum number of bytes in flight per connection and direction. Packets that overflow the
    /// receiving host's socket buffers are lost and retransmitted.
    pub window_bytes: u32,
    /// Maximum number of WQEs of a QP that are fetched and not yet acknowledged.
    pub requests: u32,
    /// Maximum number of building blocks of these WQEs together; at least 16, the longest WQE.
    pub blocks: u32,
}

impl Default for WireLimits {
    fn default() -> Self {
        Self { outbox_bytes: 1 << 20, window_bytes: 256 << 10, requests: 128, blocks: 256 }
    }
}

/// Limits of one function.
#[derive(Clone, Debug)]
pub struct FunctionLimits {
    /// Protection domains.
    pub pds: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Shared receive queues.
    pub srqs: u32,
    /// Memory regions and windows.
    pub keys: u32,
    /// Memory windows.
    pub windows: u32,
    /// Functions that this function may open besides itself ([`crate::Engine::open_function`]).
    pub functions: u32,
    /// Bytes of its memory regions; a byte that lies in two regions counts twice.
    pub registered_bytes: u64,
    /// Bytes of its send, receive and completion rings, which bound the work that can be
    /// outstanding.
    pub ring_bytes: u64,
    /// QPs that are connected to QPs of other NICs. The WQE copies that such a connection keeps
    /// count as `ring_bytes`.
    pub remote_peers: u32,
}

impl Default for FunctionLimits {
    fn default() -> Self {
        Self {
            pds: 64,
            qps: 1024,
            cqs: 1024,
            srqs: 64,
            // Keys are limited, because all keys of a function are destroyed in one step when the
            // function is removed.
            keys: 8 << 10,
            windows: 8 << 10,
            // Only the NIC's owner opens further functions.
            functions: 0,
            registered_bytes: 1 << 46,
            ring_bytes: 1 << 30,
            // The owner decides which clients may send packets to other hosts.
            remote_peers: 0,
        }
    }
}

impl FunctionLimits {
    /// Only the NIC's own limits apply.
    pub const NONE: FunctionLimits = FunctionLimits {
        pds: u32::MAX,
        qps: u32::MAX,
        cqs: u32::MAX,
        srqs: u32::MAX,
        keys: u32::MAX,
        windows: u32::MAX,
        functions: u32::MAX,
        registered_bytes: u64::MAX,
        ring_bytes: u64::MAX,
        remote_peers: u32::MAX,
    };
}

//! Work requests, posted to queue pairs (IBTA vol. 1, chapter 11, work request verbs).

use crate::{Access, Key, MwKind, Remote, Sge};

/// Work for a send queue.
#[derive(Clone, Copy, Debug)]
pub struct WorkRequest<'a> {
    /// Caller's identifier; returned in the completion.
    pub id: u64,
    /// The operation.
    pub op: Op<'a>,
    /// Request a completion. A request that fails completes even if this is false.
    pub signaled: bool,
}

/// The operation of a work request.
#[derive(Clone, Copy, Debug)]
pub enum Op<'a> {
    /// No operation.
    Nop,
    /// SEND of gathered memory.
    Send {
        /// Local memory.
        from: &'a [Sge],
    },
    /// SEND of inline data.
    SendInline {
        /// At most [`Caps::max_inline`](crate::Caps::max_inline) bytes.
        data: &'a [u8],
    },
    /// RDMA READ.
    Read {
        /// Remote memory.
        from: Remote,
        /// Local memory.
        to: &'a [Sge],
    },
    /// RDMA WRITE.
    Write {
        /// Remote memory.
        to: Remote,
        /// Local memory.
        from: &'a [Sge],
    },
    /// RDMA WRITE of inline data.
    WriteInline {
        /// Remote memory.
        to: Remote,
        /// At most [`Caps::max_inline`](crate::Caps::max_inline) bytes.
        data: &'a [u8],
    },
    /// CAS of 8 bytes.
    CompareSwap {
        /// The word.
        at: Remote,
        /// Compared with the word.
        compare: u64,
        /// Replaces the word if it equals `compare`.
        swap: u64,
        /// Receives the old value, 8 bytes in the NIC's byte order of atomics.
        old: Sge,
    },
    /// FAA of 8 bytes.
    FetchAdd {
        /// The word.
        at: Remote,
        /// The addend.
        add: u64,
        /// Receives the old value, 8 bytes in the NIC's byte order of atomics.
        old: Sge,
    },
    /// FAA on a word that is divided into fields, without carry between them. Each field ends at a
    /// set bit of `boundary`.
    MaskedFetchAdd {
        /// The word.
        at: Remote,
        /// The addends.
        add: u64,
        /// Mask of the most significant bit of each field.
        boundary: u64,
        /// Receives the old value, 8 bytes in the NIC's byte order of atomics.
        old: Sge,
    },
    /// CAS of the masked bits of a word.
    MaskedCompareSwap {
        /// The word.
        at: Remote,
        /// Compared with the word.
        compare: u64,
        /// The bits that are compared.
        compare_mask: u64,
        /// New value of the bits in `swap_mask`.
        swap: u64,
        /// The bits that are replaced.
        swap_mask: u64,
        /// Receives the old value, 8 bytes in the NIC's byte order of atomics.
        old: Sge,
    },
    /// SEND with immediate data.
    SendImm {
        /// The message.
        data: Data<'a>,
        /// Immediate data.
        imm: u32,
    },
    /// SEND that invalidates a type-2 window at the peer (`IBV_WR_SEND_WITH_INV`).
    SendInvalidate {
        /// The message.
        data: Data<'a>,
        /// The window's key. The window must be bound to the peer QP.
        key: Key,
    },
    /// RDMA WRITE with immediate data. It consumes a receive of the peer but does not write to that
    /// receive's memory.
    WriteImm {
        /// Remote memory.
        to: Remote,
        /// The data to write.
        data: Data<'a>,
        /// Immediate data.
        imm: u32,
    },
    /// Binds a window, or unbinds one of type 1 (`IBV_WR_BIND_MW`, `ibv_bind_mw`).
    Bind(&'a Bind),
    /// Binds or unbinds a memory window with the NIC's own UMR, also to other QPs. Needs
    /// [`Caps::windows`](crate::Caps::windows).
    Window(&'a crate::wqe::Umr),
    /// Invalidates a window of this QP (`IBV_WR_LOCAL_INV`).
    LocalInvalidate {
        /// The window's key.
        key: Key,
    },
    /// Another operation, with flags.
    With {
        /// The flags.
        flags: SendFlags,
        /// The operation.
        op: &'a Op<'a>,
    },
}

/// Payload of an operation.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// Gathered memory.
    Gather(&'a [Sge]),
    /// Inline data of at most [`Caps::max_inline`](crate::Caps::max_inline) bytes
    /// (`IBV_SEND_INLINE`).
    Inline(&'a [u8]),
}

/// Flags of a work request (`ibv_send_flags`) beside [`WorkRequest::signaled`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SendFlags {
    /// Start only when the preceding READs and atomics in the queue have completed
    /// (`IBV_SEND_FENCE`; IBTA vol. 1, chapter 10, ordering). Between its own QPs the software NIC
    /// always orders so.
    pub fence: bool,
    /// The receiver's completion wakes threads in
    /// [`wait_solicited`](crate::CompletionQueue::wait_solicited) (`IBV_SEND_SOLICITED`).
    pub solicited: bool,
}

/// A bind of a memory window (`ibv_mw_bind_info`).
///
/// A type-2 window must be unbound; the bind gives it to the QP that the bind is posted to. A
/// type-1 window may be bound already; a bind of 0 bytes unbinds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bind {
    /// The current key of the window.
    pub key: Key,
    /// The type of the window.
    pub kind: MwKind,
    /// The tag of the new key ([`Bind::new_key`]).
    pub tag: u8,
    /// The key of the underlying region.
    pub region: Key,
    /// First address in the region.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Operations that peers may do through the window.
    pub access: Access,
    /// Peers address the first byte as 0, not as `addr` (`IBV_ACCESS_ZERO_BASED`).
    pub zero_based: bool,
}

impl Bind {
    /// Returns the window's key after the bind.
    pub fn new_key(&self) -> Key {
        Key::new(self.key.index(), self.tag)
    }

    /// Returns the peer's address of the window's first byte.
    pub fn remote(&self) -> Remote {
        Remote { addr: if self.zero_based { 0 } else { self.addr }, rkey: self.new_key() }
    }
}

/// Work for a receive queue.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRequest<'a> {
    /// Caller's identifier; returned in the completion.
    pub id: u64,
    /// Memory that receives the message.
    pub to: &'a [Sge],
}

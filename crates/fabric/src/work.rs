//! Work requests: what is posted to a queue pair (IBTA vol. 1, chapter 11, work request verbs).

use rnic::verbs::MwKind;

use crate::{Access, Key, Remote, Sge};

/// Work for a send queue.
#[derive(Clone, Copy, Debug)]
pub struct WorkRequest<'a> {
    /// Comes back with the completion.
    pub id: u64,
    /// What to do.
    pub op: Op<'a>,
    /// Ask for a completion. One that fails completes in any case.
    pub signaled: bool,
}

/// What a work request does.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Op<'a> {
    /// Nothing.
    Nop,
    /// SEND of what the list gathers.
    Send {
        /// Local memory.
        from: &'a [Sge],
    },
    /// SEND of the bytes themselves.
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
    /// RDMA WRITE of the bytes themselves.
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
        /// Replaces it if equal.
        swap: u64,
        /// Where the old value goes, 8 bytes in the NIC's byte order of atomics.
        old: Sge,
    },
    /// FAA of 8 bytes.
    FetchAdd {
        /// The word.
        at: Remote,
        /// The addend.
        add: u64,
        /// Where the old value goes, 8 bytes in the NIC's byte order of atomics.
        old: Sge,
    },
    /// FAA on a word that is a row of fields, each ending at a set bit of `boundary`: they are added
    /// without carry between them.
    MaskedFetchAdd {
        /// The word.
        at: Remote,
        /// The addends.
        add: u64,
        /// The last bit of each field.
        boundary: u64,
        /// Where the old value goes, 8 bytes in the NIC's byte order of atomics.
        old: Sge,
    },
    /// CAS under masks.
    MaskedCompareSwap {
        /// The word.
        at: Remote,
        /// Compared with the word.
        compare: u64,
        /// The bits that are compared.
        compare_mask: u64,
        /// Put into the bits of `swap_mask`.
        swap: u64,
        /// The bits that are replaced.
        swap_mask: u64,
        /// Where the old value goes, 8 bytes in the NIC's byte order of atomics.
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
        /// The window's key: it must be bound to the peer.
        key: Key,
    },
    /// RDMA WRITE with immediate data: takes a receive of the peer, too, whose memory it leaves alone.
    WriteImm {
        /// Remote memory.
        to: Remote,
        /// What is written.
        data: Data<'a>,
        /// Immediate data.
        imm: u32,
    },
    /// Binds a window, or unbinds one of type 1 (`IBV_WR_BIND_MW`, `ibv_bind_mw`).
    Bind(&'a Bind),
    /// Binds or unbinds a memory window, also to other QPs: what the NIC itself understands. For NICs with
    /// [`Caps::windows`](crate::Caps::windows).
    Window(&'a rnic::wqe::Umr),
    /// Invalidates a window of this QP (`IBV_WR_LOCAL_INV`).
    LocalInvalidate {
        /// The window's key.
        key: Key,
    },
    /// Another one, with flags.
    With {
        /// The flags.
        flags: SendFlags,
        /// The other one.
        op: &'a Op<'a>,
    },
}

/// What a request carries.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// What the list gathers.
    Gather(&'a [Sge]),
    /// The bytes themselves, at most [`Caps::max_inline`](crate::Caps::max_inline) (`IBV_SEND_INLINE`).
    Inline(&'a [u8]),
}

/// Flags of a work request (`ibv_send_flags`) beside [`WorkRequest::signaled`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SendFlags {
    /// Begins when the READs and atomics before it in the queue have ended (`IBV_SEND_FENCE`;
    /// IBTA vol. 1, chapter 10, ordering). The software NIC orders so in any case where both ends are its own.
    pub fence: bool,
    /// The receiver's completion wakes who waits for solicited ones (`IBV_SEND_SOLICITED`).
    pub solicited: bool,
}

/// A bind of a memory window (`ibv_mw_bind_info`).
///
/// A type-2 window must be free, and is bound to the QP that the bind is posted to. A type-1 window may be
/// bound; a bind of no bytes unbinds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bind {
    /// The window's key as it is now.
    pub key: Key,
    /// Its type.
    pub kind: MwKind,
    /// The tag of its new key ([`Bind::new_key`]).
    pub tag: u8,
    /// The key of the region under it.
    pub region: Key,
    /// First address in the region.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// What peers may do through it.
    pub access: Access,
    /// Its first byte has address 0 for peers, not `addr` (`IBV_ACCESS_ZERO_BASED`).
    pub zero_based: bool,
}

impl Bind {
    /// The window's key after the bind.
    pub fn new_key(&self) -> Key {
        Key::new(self.key.index(), self.tag)
    }

    /// The window's first byte as peers address it.
    pub fn remote(&self) -> Remote {
        Remote { addr: if self.zero_based { 0 } else { self.addr }, rkey: self.new_key() }
    }
}

/// Work for a receive queue.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRequest<'a> {
    /// Comes back with the completion.
    pub id: u64,
    /// Where the message goes.
    pub to: &'a [Sge],
}

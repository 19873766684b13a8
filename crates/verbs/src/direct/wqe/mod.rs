//! Encoding and decoding of work-queue elements in the ConnectX (mlx5) layout.
//!
//! A WQE is a sequence of 16-byte big-endian segments in 64-byte building blocks (WQEBBs). The
//! first segment is the control segment; the opcode determines the segments that follow.
//!
//! ```text
//! control (16 B)          remote address (16 B)    data, or SGE (16 B)
//! +0  opmod               +0  address      (8)     +0  byte count (4)
//! +1  WQE index    (2)    +8  rkey         (4)     +4  lkey       (4)
//! +3  opcode              +12 reserved     (4)     +8  address    (8)
//! +4  QPN          (3)
//! +7  ds: 16-byte units   atomic (16 B)            masked compare-and-swap (32 B)
//! +8  signature           +0  swap or add  (8)     +0  swap  (8)   +16 swap mask    (8)
//! +9  stream       (2)    +8  compare, or a        +8  compare (8) +24 compare mask (8)
//! +11 fence, CE, SE           field boundary (8)
//! +12 immediate or key    wait/enable (16 B): +8 index (4)  +12 QPN or CQN (4)
//!
//! NOP          control
//! SEND         control | SGE...
//! WRITE, READ  control | remote address | SGE...
//! CS, FA       control | remote address | atomic | SGE of 8 bytes
//! masked CS    control | remote address | masked compare-and-swap | SGE of 8 bytes
//! masked FA    control | remote address | atomic | SGE of 8 bytes
//! LOCAL_INV    control, key at +12
//! WAIT, SEND_EN, RECV_EN   control | wait/enable
//! UMR          see [`umr`]
//! ```
//!
//! A test compiles C against `infiniband/mlx5dv.h` and compares the sizes, offsets and opcodes that
//! the header defines. WAIT, SEND_EN, RECV_EN and their segment are not in the header; they follow
//! the vendor's older, published user-space drivers. The hardware's behaviour with recycled RC send
//! rings is not documented, so compatibility is claimed for layouts only.

mod build;
mod parse;
pub mod umr;

pub use build::Builder;
pub use parse::{DecodeError, Sges, Wqe, decode};
pub use umr::{Umr, UmrFlags};

use crate::{Key, Qpn};

/// Bytes of a WQE building block.
pub const WQEBB: usize = 64;
/// Bytes of a segment: the unit of `ds`.
pub const SEGMENT: usize = 16;
/// Maximum number of segments: `ds` has 6 bits.
pub const MAX_SEGMENTS: usize = 63;
/// Maximum length of a WQE in bytes.
pub const MAX_BYTES: usize = 1024;
/// Flag in an SGE's byte count: the data follows in the WQE (IBTA: inline data).
pub const INLINE: u32 = 0x8000_0000;

/// An lkey that names no key. An SGE of length 0 with this lkey ends a receive WQE's list.
pub const INVALID_LKEY: Key = Key(0x100);

/// Opcodes of a send queue's WQEs.
pub mod opcode {
    /// No operation.
    pub const NOP: u8 = 0x00;
    /// SEND with invalidate.
    pub const SEND_INVAL: u8 = 0x01;
    /// RDMA WRITE.
    pub const RDMA_WRITE: u8 = 0x08;
    /// RDMA WRITE with immediate.
    pub const RDMA_WRITE_IMM: u8 = 0x09;
    /// SEND.
    pub const SEND: u8 = 0x0a;
    /// SEND with immediate.
    pub const SEND_IMM: u8 = 0x0b;
    /// Waits until a CQ has counted completion number `index` (not in `mlx5dv.h`).
    pub const WAIT: u8 = 0x0f;
    /// RDMA READ.
    pub const RDMA_READ: u8 = 0x10;
    /// Compare and swap of 8 bytes.
    pub const ATOMIC_CS: u8 = 0x11;
    /// Fetch and add of 8 bytes.
    pub const ATOMIC_FA: u8 = 0x12;
    /// Masked compare and swap.
    pub const ATOMIC_MASKED_CS: u8 = 0x14;
    /// Masked fetch and add.
    pub const ATOMIC_MASKED_FA: u8 = 0x15;
    /// Raises the limit of a managed receive queue to an index (not in `mlx5dv.h`).
    pub const RECV_EN: u8 = 0x16;
    /// Raises the limit of a managed send queue to an index (not in `mlx5dv.h`).
    pub const SEND_EN: u8 = 0x17;
    /// Invalidates a key that is bound to this QP.
    pub const LOCAL_INVAL: u8 = 0x1b;
    /// User-mode memory registration: binds and unbinds windows.
    pub const UMR: u8 = 0x25;
}

/// Byte offsets, from the start of the WQE, of fields that chains patch.
pub mod offset {
    /// Opcode (1 byte).
    pub const OPCODE: usize = 3;
    /// QPN of the control segment (3 bytes).
    pub const QPN: usize = 4;
    /// Index of the key that a UMR changes (3 bytes).
    pub const UMR_KEY_INDEX: usize = 12;
    /// The tag that the key of a UMR must currently have (1 byte).
    pub const UMR_KEY_TAG: usize = 15;
    /// Remote address (8 bytes) of WRITE, READ and atomics.
    pub const REMOTE_ADDR: usize = 16;
    /// Remote key (4 bytes), right after the address.
    pub const REMOTE_KEY: usize = 24;
    /// First SGE of a SEND.
    pub const SEND_SGE: usize = 16;
    /// First SGE of a WRITE or READ.
    pub const RDMA_SGE: usize = 32;
    /// The addend of an FA, or the swap value of a CS (8 bytes).
    pub const ATOMIC_ADD: usize = 32;
    /// The field boundaries of a masked FA, or the compare value of a CS (8 bytes).
    pub const ATOMIC_COMPARE: usize = 40;
    /// The index of WAIT, SEND_EN and RECV_EN (4 bytes).
    pub const ENABLE_INDEX: usize = 24;
    /// The QPN or CQN of WAIT, SEND_EN and RECV_EN (4 bytes).
    pub const ENABLE_NUMBER: usize = 28;
}

/// `fm_ce_se`: write a completion (CE = 2).
pub const CE_SIGNALED: u8 = 2 << 2;
/// `fm_ce_se`: raise an event at the peer (solicited event).
pub const SE_SOLICITED: u8 = 1 << 1;
/// `fm_ce_se`: wait for this QP's earlier READs and atomics (fence).
pub const FM_FENCE: u8 = 4 << 5;

/// The fence bits of `fm_ce_se`.
pub const FENCE_MASK: u8 = 7 << 5;

/// The control segment's fields.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Control {
    /// Operation modifier.
    pub opmod: u8,
    /// Index of the WQE in its queue, in building blocks, modulo 2^16.
    pub index: u16,
    /// Operation code, one of [`opcode`].
    pub opcode: u8,
    /// The QP whose queue contains the WQE.
    pub qpn: Qpn,
    /// Length in 16-byte segments.
    pub ds: u8,
    /// Fence, completion and solicited-event bits.
    pub fm_ce_se: u8,
    /// Immediate data, or the key that a UMR or LOCAL_INV changes.
    pub imm: u32,
}

impl Control {
    /// True if the WQE asks for a completion when it succeeds.
    #[inline]
    pub fn signaled(&self) -> bool {
        self.fm_ce_se & 0x0c == CE_SIGNALED
    }

    /// Number of building blocks of the WQE; at least 1.
    #[inline]
    pub fn blocks(&self) -> u32 {
        (self.ds as u32).div_ceil(4).max(1)
    }
}

/// A scatter-gather element: a range of local memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sge {
    /// I/O virtual address of the first byte.
    pub addr: u64,
    /// Length in bytes; at most 2^31 - 1.
    pub len: u32,
    /// Local key.
    pub lkey: Key,
}

/// Remote address and key of a one-sided operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Remote {
    /// I/O virtual address at the peer.
    pub addr: u64,
    /// Remote key.
    pub rkey: Key,
}

#[cfg(test)]
mod tests;

//! Decoding of the bytes that a client wrote into a WQE.
//!
//! The bytes are untrusted. No input causes a panic; lengths are checked against `ds`.

use super::{Control, INLINE, Remote, SEGMENT, Sge, Umr, opcode};
use crate::{Cqn, Key, Qpn};

/// Reason why bytes are not a valid WQE.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    /// `ds` is 0 or smaller than the opcode needs.
    #[error("a WQE of opcode {opcode:#x} with {ds} segments is too short")]
    TooShort {
        /// The opcode.
        opcode: u8,
        /// The value of `ds`.
        ds: u8,
    },
    /// This NIC does not execute the opcode.
    #[error("this NIC does not execute opcode {opcode:#x}")]
    Opcode {
        /// The opcode.
        opcode: u8,
    },
    /// Inline data extends beyond the WQE, or the operation does not allow it.
    #[error("inline data extends beyond its WQE, or its operation does not allow inline data")]
    Inline,
}

/// A decoded WQE. Scatter-gather lists borrow from the encoded bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wqe<'a> {
    /// No operation.
    Nop,
    /// SEND.
    Send {
        /// The data to send.
        from: Sges<'a>,
        /// Immediate data.
        imm: Option<u32>,
        /// The peer's key to invalidate.
        invalidate: Option<Key>,
    },
    /// RDMA WRITE.
    Write {
        /// The target.
        to: Remote,
        /// The data to write.
        from: Sges<'a>,
        /// Immediate data.
        imm: Option<u32>,
    },
    /// RDMA READ.
    Read {
        /// The source.
        from: Remote,
        /// The buffers for the data.
        to: Sges<'a>,
    },
    /// CAS: plain (both masks all ones) or masked.
    CompareSwap {
        /// The word.
        at: Remote,
        /// The value to compare with the word.
        compare: u64,
        /// The bits to compare.
        compare_mask: u64,
        /// The new value.
        swap: u64,
        /// The bits to replace.
        swap_mask: u64,
        /// The buffer for the old value.
        old: Sge,
    },
    /// FAA: plain (boundary 0) or masked.
    FetchAdd {
        /// The word.
        at: Remote,
        /// The addend.
        add: u64,
        /// The last bit of each field.
        boundary: u64,
        /// The buffer for the old value.
        old: Sge,
    },
    /// Bind or unbind of a window.
    Umr(Umr),
    /// LOCAL_INV.
    LocalInvalidate {
        /// The key.
        key: Key,
    },
    /// WAIT.
    Wait {
        /// The CQ.
        cqn: Cqn,
        /// The completion's running number, 24 bits.
        index: u32,
    },
    /// SEND_EN.
    SendEnable {
        /// The managed QP.
        qpn: Qpn,
        /// The new limit: a building-block index.
        index: u32,
    },
    /// RECV_EN.
    ReceiveEnable {
        /// The managed QP.
        qpn: Qpn,
        /// The new limit: an index of receive WQEs.
        index: u32,
    },
}

/// A scatter-gather list in encoded form, or inline data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sges<'a> {
    /// Segments of 16 bytes each; segments of length 0 are skipped.
    List(&'a [u8]),
    /// Inline data.
    Inline(&'a [u8]),
}

impl<'a> Sges<'a> {
    /// Iterates over the non-empty elements in order. Inline data has no elements.
    #[inline]
    pub fn iter(self) -> impl Iterator<Item = Sge> + 'a {
        let list = match self {
            Sges::List(b) => b,
            Sges::Inline(_) => &[],
        };
        list.as_chunks::<SEGMENT>().0.iter().map(Sge::from_bytes).filter(|s| s.len != 0)
    }

    /// Total length in bytes.
    #[inline]
    pub fn total_len(self) -> u64 {
        match self {
            Sges::List(_) => self.iter().map(|s| s.len as u64).sum(),
            Sges::Inline(data) => data.len() as u64,
        }
    }
}

impl Sge {
    /// Decodes an SGE.
    #[inline]
    pub fn from_bytes(b: &[u8; SEGMENT]) -> Self {
        Sge { len: be32(b, 0), lkey: Key(be32(b, 4)), addr: be64(b, 8) }
    }
}

impl Control {
    /// Decodes the control segment.
    #[inline]
    pub fn from_bytes(b: &[u8; SEGMENT]) -> Self {
        let (head, qpn_ds) = (be32(b, 0), be32(b, 4));
        Control {
            opmod: (head >> 24) as u8,
            index: (head >> 8) as u16,
            opcode: head as u8,
            qpn: Qpn::new(qpn_ds >> 8),
            ds: qpn_ds as u8 & 0x3f,
            fm_ce_se: b[11],
            imm: be32(b, 12),
        }
    }
}

/// Decodes the WQE at the start of `bytes`, which contain at least the segments that `ctrl`
/// announces. Always inlined: returning the WQE through memory costs as much as a NOP.
#[inline(always)]
pub fn decode<'a>(ctrl: &Control, bytes: &'a [u8]) -> Result<Wqe<'a>, DecodeError> {
    let ds = ctrl.ds as usize;
    let short = DecodeError::TooShort { opcode: ctrl.opcode, ds: ctrl.ds };
    let bytes = bytes.get(..ds * SEGMENT).ok_or(short)?;
    let need = |segments: usize| if ds < segments { Err(short) } else { Ok(()) };
    let remote = || Remote { addr: be64(bytes, 16), rkey: Key(be32(bytes, 24)) };
    let sge = |segment: usize| {
        let b: &[u8; SEGMENT] = bytes[segment * SEGMENT..][..SEGMENT].try_into().expect("16 bytes");
        Sge::from_bytes(b)
    };
    need(1)?;
    Ok(match ctrl.opcode {
        opcode::NOP => Wqe::Nop,
        opcode::SEND => Wqe::Send { from: gather(&bytes[16..])?, imm: None, invalidate: None },
        opcode::SEND_IMM => {
            Wqe::Send { from: gather(&bytes[16..])?, imm: Some(ctrl.imm), invalidate: None }
        }
        opcode::SEND_INVAL => {
            Wqe::Send { from: gather(&bytes[16..])?, imm: None, invalidate: Some(Key(ctrl.imm)) }
        }
        opcode::RDMA_WRITE => {
            need(2)?;
            Wqe::Write { to: remote(), from: gather(&bytes[32..])?, imm: None }
        }
        opcode::RDMA_WRITE_IMM => {
            need(2)?;
            Wqe::Write { to: remote(), from: gather(&bytes[32..])?, imm: Some(ctrl.imm) }
        }
        opcode::RDMA_READ => {
            need(2)?;
            Wqe::Read { from: remote(), to: Sges::List(&bytes[32..]) }
        }
        opcode::ATOMIC_CS => {
            need(4)?;
            Wqe::CompareSwap {
                at: remote(),
                swap: be64(bytes, 32),
                compare: be64(bytes, 40),
                swap_mask: u64::MAX,
                compare_mask: u64::MAX,
                old: sge(3),
            }
        }
        opcode::ATOMIC_MASKED_CS => {
            need(5)?;
            Wqe::CompareSwap {
                at: remote(),
                swap: be64(bytes, 32),
                compare: be64(bytes, 40),
                swap_mask: be64(bytes, 48),
                compare_mask: be64(bytes, 56),
                old: sge(4),
            }
        }
        opcode::ATOMIC_FA => {
            need(4)?;
            Wqe::FetchAdd { at: remote(), add: be64(bytes, 32), boundary: 0, old: sge(3) }
        }
        opcode::ATOMIC_MASKED_FA => {
            need(4)?;
            Wqe::FetchAdd {
                at: remote(),
                add: be64(bytes, 32),
                boundary: be64(bytes, 40),
                old: sge(3),
            }
        }
        opcode::UMR => Wqe::Umr(Umr::parse(bytes).ok_or(short)?),
        opcode::LOCAL_INVAL => Wqe::LocalInvalidate { key: Key(ctrl.imm) },
        opcode::WAIT => {
            need(2)?;
            Wqe::Wait { cqn: Cqn::new(be32(bytes, 28)), index: be32(bytes, 24) }
        }
        opcode::SEND_EN => {
            need(2)?;
            Wqe::SendEnable { qpn: Qpn::new(be32(bytes, 28)), index: be32(bytes, 24) }
        }
        opcode::RECV_EN => {
            need(2)?;
            Wqe::ReceiveEnable { qpn: Qpn::new(be32(bytes, 28)), index: be32(bytes, 24) }
        }
        opcode => return Err(DecodeError::Opcode { opcode }),
    })
}

/// Decodes a gather list, or the inline data in its place.
#[inline]
fn gather(segments: &[u8]) -> Result<Sges<'_>, DecodeError> {
    if segments.len() < 4 || be32(segments, 0) & INLINE == 0 {
        return Ok(Sges::List(segments));
    }
    let len = (be32(segments, 0) & !INLINE) as usize;
    segments[4..].get(..len).map(Sges::Inline).ok_or(DecodeError::Inline)
}

#[inline]
fn be32(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(b[at..at + 4].try_into().expect("4 bytes"))
}

#[inline]
fn be64(b: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(b[at..at + 8].try_into().expect("8 bytes"))
}

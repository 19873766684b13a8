//! Completion-queue entries in the ConnectX layout (`mlx5_cqe64`, `mlx5_err_cqe`).
//!
//! ```text
//! +0   reserved (32)
//! +32  SRQN (low 24 bits of 4)                   +36  immediate data or invalidated key (4)
//! +40  reserved (4)                              +44  byte count (4)
//! +48  timestamp, ns (8)        error: +54 vendor error (1)   +55 syndrome (1)
//! +56  opcode of the send WQE (1), QPN (3)       +60  index of the WQE (2)
//! +62  signature (1)                             +63  CQE opcode (4 bits) | ... | owner (bit 0)
//! ```
//!
//! The owner bit flips at each lap of the ring: completion number `n` of a ring with `e` entries
//! carries `(n / e) & 1`. Initially every entry has the CQE opcode INVALID. The last 8 bytes, which
//! contain opcode and owner, are stored last, with release ordering. A reader that sees the new
//! owner bit therefore sees the whole entry, and the data moved before it.

use crate::{DmaMemory, Qpn, Srqn};
use std::sync::atomic::{Ordering, fence};

/// Bytes of a CQE.
pub const CQE: usize = 64;

/// CQE opcodes.
pub mod opcode {
    /// A send-queue WQE completed.
    pub const REQ: u8 = 0;
    /// A peer's WRITE with immediate arrived.
    pub const RESP_WR_IMM: u8 = 1;
    /// A peer's SEND arrived.
    pub const RESP_SEND: u8 = 2;
    /// A peer's SEND with immediate arrived.
    pub const RESP_SEND_IMM: u8 = 3;
    /// A peer's SEND with invalidate arrived.
    pub const RESP_SEND_INV: u8 = 4;
    /// A send-queue WQE failed or was flushed.
    pub const REQ_ERR: u8 = 13;
    /// A receive WQE failed or was flushed.
    pub const RESP_ERR: u8 = 14;
    /// The entry was never written.
    pub const INVALID: u8 = 15;
}

/// Offsets of fields.
pub mod offset {
    /// SRQN.
    pub const SRQN: usize = 32;
    /// Immediate data, or the key that was invalidated.
    pub const IMM: usize = 36;
    /// Byte count.
    pub const BYTE_COUNT: usize = 44;
    /// Timestamp.
    pub const TIMESTAMP: usize = 48;
    /// Vendor error, in an error CQE.
    pub const VENDOR_ERROR: usize = 54;
    /// Syndrome, in an error CQE.
    pub const SYNDROME: usize = 55;
    /// Opcode of the send WQE, and QPN.
    pub const OPCODE_QPN: usize = 56;
    /// Index of the WQE.
    pub const WQE_COUNTER: usize = 60;
    /// CQE opcode and owner.
    pub const OP_OWN: usize = 63;
}

/// The owner bit of the byte at [`offset::OP_OWN`].
pub const OWNER: u8 = 1;
/// The solicited-event bit of the byte at [`offset::OP_OWN`].
pub const SOLICITED: u8 = 2;

/// Cause of a WQE's failure: the syndrome of an error CQE (IBTA vol. 1, §11.6.2).
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Syndrome {
    /// The message is longer than the NIC or the receive WQE allows.
    #[error("local length error")]
    LocalLength = 0x01,
    /// The WQE cannot be executed: unknown opcode, bad field, an object of another function.
    #[error("local QP operation error")]
    LocalQpOperation = 0x02,
    /// An lkey does not allow the access.
    #[error("local protection error")]
    LocalProtection = 0x04,
    /// The QP was in Error; the WQE was not executed.
    #[error("flushed")]
    Flushed = 0x05,
    /// A window could not be bound, unbound or invalidated.
    #[error("memory window bind error")]
    MwBind = 0x06,
    /// The peer refused the request as malformed.
    #[error("remote invalid request")]
    RemoteInvalidRequest = 0x12,
    /// The peer's protection check refused the access.
    #[error("remote access error")]
    RemoteAccess = 0x13,
    /// The peer failed to execute the request.
    #[error("remote operation error")]
    RemoteOperation = 0x14,
    /// The peer does not respond.
    #[error("transport retry counter exceeded")]
    RetryExceeded = 0x15,
    /// The peer had no receive WQE for all RNR retries.
    #[error("RNR retry counter exceeded")]
    RnrRetryExceeded = 0x16,
}

impl Syndrome {
    /// All syndromes that this NIC reports.
    pub const ALL: [Syndrome; 10] = [
        Syndrome::LocalLength,
        Syndrome::LocalQpOperation,
        Syndrome::LocalProtection,
        Syndrome::Flushed,
        Syndrome::MwBind,
        Syndrome::RemoteInvalidRequest,
        Syndrome::RemoteAccess,
        Syndrome::RemoteOperation,
        Syndrome::RetryExceeded,
        Syndrome::RnrRetryExceeded,
    ];

    /// The syndrome with this value.
    pub fn from_value(value: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|s| *s as u8 == value)
    }
}

/// Fills a CQ's ring with invalid entries. The owner does this before it creates the CQ.
pub fn clear(ring: &DmaMemory, entries: u32) {
    let mut entry = [0; CQE];
    entry[offset::OP_OWN] = opcode::INVALID << 4 | OWNER;
    for i in 0..entries as usize {
        ring.write(i * CQE, &entry);
    }
}

/// A completion, decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cqe {
    /// CQE opcode, see [`opcode`].
    pub opcode: u8,
    /// The QP whose WQE completed.
    pub qpn: Qpn,
    /// Opcode of the send WQE; 0 for receives.
    pub wqe_opcode: u8,
    /// Index of the WQE: in a send ring of its first building block, in a receive ring of the
    /// receive WQE.
    pub wqe_counter: u16,
    /// Number of bytes moved.
    pub byte_count: u32,
    /// Immediate data, or the key that was invalidated.
    pub imm: u32,
    /// The shared receive queue; 0 if none.
    pub srqn: Srqn,
    /// The peer requested an event.
    pub solicited: bool,
    /// NIC time in ns; 0 in an error CQE.
    pub timestamp_ns: u64,
    /// The error, in an error CQE.
    pub error: Option<CqeError>,
}

/// The error part of an error CQE.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CqeError {
    /// The syndrome's value, see [`Syndrome::from_value`].
    pub syndrome: u8,
    /// The NIC's own code with more detail; 0 if the peer rejected the request.
    pub vendor: u8,
}

impl Default for Cqe {
    fn default() -> Self {
        Cqe {
            opcode: opcode::REQ,
            qpn: Qpn::new(0),
            wqe_opcode: 0,
            wqe_counter: 0,
            byte_count: 0,
            imm: 0,
            srqn: Srqn::new(0),
            solicited: false,
            timestamp_ns: 0,
            error: None,
        }
    }
}

impl Cqe {
    /// Returns the upper half of the entry as four 8-byte words, in memory order. The lower half is
    /// reserved. The last word makes the entry valid, so the NIC stores it last.
    #[inline]
    pub fn words(&self, owner: u8) -> [u64; 4] {
        let time = match self.error {
            None => self.timestamp_ns,
            Some(e) => (e.vendor as u64) << 8 | e.syndrome as u64,
        };
        let op_own =
            self.opcode << 4 | if self.solicited { SOLICITED } else { 0 } | (owner & OWNER);
        [
            (self.srqn.raw() as u64) << 32 | self.imm as u64,
            self.byte_count as u64,
            time,
            (self.wqe_opcode as u64) << 56
                | (self.qpn.raw() as u64) << 32
                | (self.wqe_counter as u64) << 16
                | op_own as u64,
        ]
    }

    /// Encodes the entry.
    pub fn to_bytes(&self, owner: u8) -> [u8; CQE] {
        let mut out = [0; CQE];
        for (i, w) in self.words(owner).into_iter().enumerate() {
            out[32 + 8 * i..][..8].copy_from_slice(&w.to_be_bytes());
        }
        out
    }

    /// Decodes an entry, regardless of its owner bit.
    pub fn from_bytes(b: &[u8; CQE]) -> Self {
        let be32 = |at: usize| u32::from_be_bytes(b[at..at + 4].try_into().expect("4 bytes"));
        let op_own = b[offset::OP_OWN];
        let opcode = op_own >> 4;
        let failed = opcode == opcode::REQ_ERR || opcode == opcode::RESP_ERR;
        let time: [u8; 8] =
            b[offset::TIMESTAMP..offset::TIMESTAMP + 8].try_into().expect("8 bytes");
        Cqe {
            opcode,
            qpn: Qpn::new(be32(offset::OPCODE_QPN)),
            wqe_opcode: b[offset::OPCODE_QPN],
            wqe_counter: (be32(offset::WQE_COUNTER) >> 16) as u16,
            byte_count: be32(offset::BYTE_COUNT),
            imm: be32(offset::IMM),
            srqn: Srqn::new(be32(offset::SRQN)),
            solicited: op_own & SOLICITED != 0,
            timestamp_ns: if failed { 0 } else { u64::from_be_bytes(time) },
            error: failed.then(|| CqeError {
                syndrome: b[offset::SYNDROME],
                vendor: b[offset::VENDOR_ERROR],
            }),
        }
    }
}

/// The consumer's side of a CQ in memory: polls the ring and advances the record's index.
///
/// ```text
/// record: +0 consumer's running index (big-endian, 24 bits)    +4 armed (host-endian)
/// ```
#[derive(Debug)]
pub struct CqReader {
    ring: DmaMemory,
    record: DmaMemory,
    entries: u32,
    next: u32,
}

impl CqReader {
    /// Creates a reader of the CQ over `ring`, starting at completion number `first`.
    pub fn new(ring: DmaMemory, entries: u32, record: DmaMemory, first: u32) -> Self {
        assert!(entries.is_power_of_two() && ring.len() >= entries as usize * CQE);
        assert!(record.len() >= 8);
        Self { ring, record, entries, next: first & 0xff_ffff }
    }

    /// Returns the next completion, if it was written. The data that it reports is visible then.
    #[inline]
    pub fn poll(&mut self) -> Option<Cqe> {
        let at = (self.next & (self.entries - 1)) as usize * CQE;
        let last = self.ring.word64(at + 56).load(Ordering::Acquire);
        let op_own = u64::from_be(last) as u8;
        let lap = (self.next / self.entries) as u8;
        if op_own >> 4 == opcode::INVALID || (op_own ^ lap) & OWNER != 0 {
            return None;
        }
        let mut bytes = [0; CQE];
        self.ring.read(at, &mut bytes);
        self.next = (self.next + 1) & 0xff_ffff;
        self.record.store_be32(0, self.next);
        Some(Cqe::from_bytes(&bytes))
    }

    /// Requests an event for the next completion. The caller must poll once more after this call,
    /// because completions written before it raise no event.
    pub fn arm(&self) {
        self.record.word32(4).store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Running number of the next completion (24 bits).
    pub fn next_number(&self) -> u32 {
        self.next
    }
}

//! Completions: how posted work ended (IBTA vol. 1, chapter 11, completion return status).

use crate::{Key, Qpn};

/// How a piece of work ended (`ibv_wc_status`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Status {
    /// It was done.
    #[error("success")]
    Success,
    /// A message did not fit where it should go.
    #[error("local length error")]
    LocalLength,
    /// The work request is malformed or not allowed on this QP.
    #[error("local QP operation error")]
    LocalOperation,
    /// A local key does not allow it.
    #[error("local protection error")]
    LocalProtection,
    /// The QP went into the error state before this was done.
    #[error("flushed: the QP is in the error state")]
    Flushed,
    /// A window could not be bound, unbound or invalidated.
    #[error("memory window bind error")]
    Bind,
    /// The peer does not understand the request.
    #[error("remote invalid request")]
    RemoteInvalidRequest,
    /// The remote key does not allow it: dead, another QP's, or out of its range.
    #[error("remote access error")]
    RemoteAccess,
    /// The peer failed while it executed the request.
    #[error("remote operational error")]
    RemoteOperation,
    /// The peer does not answer.
    #[error("the peer does not answer (retry limit exceeded)")]
    RetryExceeded,
    /// The peer posted no receive in time.
    #[error("the peer has no receive posted (RNR retry limit exceeded)")]
    RnrRetryExceeded,
    /// A syndrome that has no name here.
    #[error("completion error with syndrome {0:#x}")]
    Other(u8),
}

impl Status {
    /// The status that a CQE's syndrome stands for (the values are those of `mlx5_err_cqe`; 0 is
    /// success).
    pub fn from_syndrome(syndrome: u8) -> Self {
        match syndrome {
            0x00 => Status::Success,
            0x01 => Status::LocalLength,
            0x02 => Status::LocalOperation,
            0x04 => Status::LocalProtection,
            0x05 => Status::Flushed,
            0x06 => Status::Bind,
            0x12 => Status::RemoteInvalidRequest,
            0x13 => Status::RemoteAccess,
            0x14 => Status::RemoteOperation,
            0x15 => Status::RetryExceeded,
            0x16 => Status::RnrRetryExceeded,
            other => Status::Other(other),
        }
    }

    /// The syndrome that stands for this status.
    pub fn syndrome(self) -> u8 {
        match self {
            Status::Success => 0x00,
            Status::LocalLength => 0x01,
            Status::LocalOperation => 0x02,
            Status::LocalProtection => 0x04,
            Status::Flushed => 0x05,
            Status::Bind => 0x06,
            Status::RemoteInvalidRequest => 0x12,
            Status::RemoteAccess => 0x13,
            Status::RemoteOperation => 0x14,
            Status::RetryExceeded => 0x15,
            Status::RnrRetryExceeded => 0x16,
            Status::Other(syndrome) => syndrome,
        }
    }
}

/// What kind of work a completion is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompletionKind {
    /// Work of a send queue.
    Send,
    /// A received message.
    Receive,
}

/// What a completion is of (`ibv_wc_opcode`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum WcOpcode {
    /// SEND, with or without immediate data or invalidation.
    Send,
    /// RDMA WRITE, with or without immediate data.
    Write,
    /// RDMA READ.
    Read,
    /// CAS, masked or not.
    CompareSwap,
    /// FAA, masked or not.
    FetchAdd,
    /// Bind or unbind of a window.
    Bind,
    /// LOCAL_INV.
    LocalInvalidate,
    /// NOP, or an operation of chains.
    Other,
    /// A SEND was received.
    Receive,
    /// A WRITE with immediate data was received.
    ReceiveWrite,
    /// Not known: the work was flushed before the NIC had it.
    Unknown,
}

impl WcOpcode {
    /// All of them, in the order of their numbers.
    pub const ALL: [WcOpcode; 11] = [
        WcOpcode::Send,
        WcOpcode::Write,
        WcOpcode::Read,
        WcOpcode::CompareSwap,
        WcOpcode::FetchAdd,
        WcOpcode::Bind,
        WcOpcode::LocalInvalidate,
        WcOpcode::Other,
        WcOpcode::Receive,
        WcOpcode::ReceiveWrite,
        WcOpcode::Unknown,
    ];

    /// Of a send queue's WQE with this opcode.
    pub fn of_wqe(opcode: u8) -> Self {
        use rnic::wqe::opcode as wqe;
        match opcode {
            wqe::SEND | wqe::SEND_IMM | wqe::SEND_INVAL => WcOpcode::Send,
            wqe::RDMA_WRITE | wqe::RDMA_WRITE_IMM => WcOpcode::Write,
            wqe::RDMA_READ => WcOpcode::Read,
            wqe::ATOMIC_CS | wqe::ATOMIC_MASKED_CS => WcOpcode::CompareSwap,
            wqe::ATOMIC_FA | wqe::ATOMIC_MASKED_FA => WcOpcode::FetchAdd,
            wqe::UMR => WcOpcode::Bind,
            wqe::LOCAL_INVAL => WcOpcode::LocalInvalidate,
            _ => WcOpcode::Other,
        }
    }
}

/// A completion (`ibv_wc`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The work request's id.
    pub id: u64,
    /// The QP it was posted to.
    pub qpn: Qpn,
    /// How it ended.
    pub status: Status,
    /// Of which queue.
    pub kind: CompletionKind,
    /// Of what. Of work that failed it is what the NIC took it for.
    pub opcode: WcOpcode,
    /// Bytes received, or moved by work of a send queue.
    pub bytes: u32,
    /// Immediate data received.
    pub imm: Option<u32>,
    /// The key that the peer's SEND has invalidated here (`IBV_WC_WITH_INV`).
    pub invalidated: Option<Key>,
    /// Of work that failed: more about why, in the NIC's own numbers.
    pub vendor_error: u8,
}

impl Completion {
    /// The completion of work that was done; otherwise how it ended.
    pub fn ok(self) -> Result<Completion, Status> {
        match self.status {
            Status::Success => Ok(self),
            status => Err(status),
        }
    }

    /// What an array for [`CompletionQueue::poll`] starts with.
    pub const EMPTY: Completion = Completion {
        id: 0,
        qpn: Qpn::NONE,
        status: Status::Success,
        kind: CompletionKind::Send,
        opcode: WcOpcode::Unknown,
        bytes: 0,
        imm: None,
        invalidated: None,
        vendor_error: 0,
    };

    /// The completion of work that the NIC has forgotten.
    pub(crate) fn flushed(id: u64, qpn: Qpn, kind: CompletionKind) -> Self {
        Completion { id, qpn, status: Status::Flushed, kind, ..Self::EMPTY }
    }
}

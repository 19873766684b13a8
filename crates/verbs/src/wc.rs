//! Completions of posted work (IBTA vol. 1, chapter 11, completion return status).

use crate::{Key, Qpn};

/// Completion status of a work request (`ibv_wc_status`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Status {
    /// The work was done.
    #[error("success")]
    Success,
    /// A message did not fit into the receiving buffer.
    #[error("local length error")]
    LocalLength,
    /// The work request is malformed or not allowed on this QP.
    #[error("local QP operation error")]
    LocalOperation,
    /// A local key does not allow the access.
    #[error("local protection error")]
    LocalProtection,
    /// The QP went into the error state before the work was done.
    #[error("flushed: the QP is in the error state")]
    Flushed,
    /// A window could not be bound, unbound or invalidated.
    #[error("memory window bind error")]
    Bind,
    /// The peer does not understand the request.
    #[error("remote invalid request")]
    RemoteInvalidRequest,
    /// The remote key does not allow the access: it is dead, bound to another QP, or the range is
    /// exceeded.
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
    /// A syndrome without a name here.
    #[error("completion error with syndrome {0:#x}")]
    Other(u8),
}

impl Status {
    /// Returns the status of a CQE's syndrome. The values are those of `mlx5_err_cqe`; 0 is
    /// success.
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

    /// Returns the syndrome of this status.
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

/// The queue kind of a completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompletionKind {
    /// Work of a send queue.
    Send,
    /// A received message.
    Receive,
}

/// The completed operation (`ibv_wc_opcode`).
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
    /// NOP or a chain operation.
    Other,
    /// A SEND was received.
    Receive,
    /// A WRITE with immediate data was received.
    ReceiveWrite,
    /// Unknown, because the work was flushed before the NIC fetched it.
    Unknown,
}

impl WcOpcode {
    /// All opcodes in numeric order.
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

    /// Returns the completion opcode of a send WQE with this opcode.
    pub fn of_wqe(opcode: u8) -> Self {
        use crate::wqe::opcode as wqe;
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
    /// The QP that the request was posted to.
    pub qpn: Qpn,
    /// The completion status.
    pub status: Status,
    /// The kind of queue.
    pub kind: CompletionKind,
    /// The operation. For failed work, the operation as the NIC decoded it.
    pub opcode: WcOpcode,
    /// Bytes received, or bytes moved by work of a send queue.
    pub bytes: u32,
    /// Immediate data received.
    pub imm: Option<u32>,
    /// The key that the peer's SEND invalidated (`IBV_WC_WITH_INV`).
    pub invalidated: Option<Key>,
    /// For failed work, the NIC's own error code with more detail.
    pub vendor_error: u8,
}

impl Completion {
    /// Returns the completion of successful work, or the error status.
    pub fn ok(self) -> Result<Completion, Status> {
        match self.status {
            Status::Success => Ok(self),
            status => Err(status),
        }
    }

    /// Initial value for the entries of an array passed to
    /// [`CompletionQueue::poll`](crate::CompletionQueue::poll).
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

    /// Returns the completion of work that the NIC dropped at a reset.
    pub fn flushed(id: u64, qpn: Qpn, kind: CompletionKind) -> Self {
        Completion { id, qpn, status: Status::Flushed, kind, ..Self::EMPTY }
    }
}

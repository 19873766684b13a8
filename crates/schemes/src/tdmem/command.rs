//! Commands and their answers. Numbers are big-endian.
//!
//! ```text
//! command (64 B)                          answer (64 B)
//! +0   operation            (1)           +0   sequence number of the command (8)
//! +1   tier                 (1)           +8   status                         (1)
//! +2   target_tier          (1)           +9   tier                           (1)
//! +3   zero                 (1)           +16  remote_addr                    (8)
//! +4   src_mid              (2)           others: zero
//! +6   dst_mid              (2)
//! +8   sequence number      (8)
//! +16  remote_addr          (8)
//! +24  poll_dma_addr        (8)
//! +32  page_dma_addr        (8)
//! others: zero
//! ```
//!
//! The fields are those of TDMEM's table 3, at offsets of our own, because the paper has none.
//! Differences: the operation, which is the number of a queue there; the sequence number; and
//! machine numbers of 16 bits. `src_mid` must be the owner whose QP carries the command. `dst_mid`
//! is not examined, because a QP leads to one memory node. `poll_dma_addr` and `page_dma_addr` are
//! buffers of the requester, which its own NIC knows: they are not examined either.
//!
//! `remote_addr` is the address of a page in the region, or 0 for none:
//!
//! | operation | `remote_addr` in the command | in the answer |
//! | --- | --- | --- |
//! | STORE | the page that the new page replaces, or 0 | the new page |
//! | INVALIDATE PAGE | the page | the page |
//! | INVALIDATE AREA | the first page to examine, or 0 for the first of all | the first page of the next slice, or 0 after the last one |
//!
//! The answer stays until the next command of the slot. A compute node whose QP was re-established
//! reads the answer again: the command was executed if the sequence number is that of the command.

use super::Tier;
use super::layout::Owner;

/// Bytes of a command.
pub const COMMAND_BYTES: usize = 64;
/// Bytes of an answer.
pub const ANSWER_BYTES: usize = 64;

/// Operation of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Operation {
    /// Store the content of the data window in a new page.
    Store = 1,
    /// Clear and free a page.
    InvalidatePage = 2,
    /// Clear and free pages of the owner.
    InvalidateArea = 3,
}

/// Result of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Status {
    /// The command was executed.
    Done = 1,
    /// No page is free. Nothing was changed.
    Full = 2,
    /// The page is not the requester's. Nothing was changed.
    NotYours = 3,
    /// The command is invalid. Nothing was changed.
    Invalid = 4,
}

/// A command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Command {
    /// The operation.
    pub operation: Operation,
    /// Tier of the page at `remote_addr`.
    pub tier: u8,
    /// STORE: the tier to store in, if it has a free page.
    pub target_tier: u8,
    /// Number of the requester.
    pub src_mid: Owner,
    /// Sequence number.
    pub sequence: u64,
    /// See the table of this module.
    pub remote_addr: u64,
}

/// An answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    /// Sequence number of the command.
    pub sequence: u64,
    /// The result.
    pub status: Status,
    /// Tier of the page at `remote_addr`.
    pub tier: u8,
    /// See the table of this module.
    pub remote_addr: u64,
}

impl Command {
    /// Encodes the command.
    pub fn to_bytes(&self) -> [u8; COMMAND_BYTES] {
        let mut out = [0; COMMAND_BYTES];
        out[0] = self.operation as u8;
        out[1] = self.tier;
        out[2] = self.target_tier;
        out[4..6].copy_from_slice(&self.src_mid.to_be_bytes());
        out[8..16].copy_from_slice(&self.sequence.to_be_bytes());
        out[16..24].copy_from_slice(&self.remote_addr.to_be_bytes());
        out
    }

    /// Decodes a command; `None` if its operation is unknown.
    pub fn parse(bytes: &[u8; COMMAND_BYTES]) -> Option<Self> {
        let operations = [Operation::Store, Operation::InvalidatePage, Operation::InvalidateArea];
        let operation = operations.into_iter().find(|operation| *operation as u8 == bytes[0])?;
        Some(Self {
            operation,
            tier: bytes[1],
            target_tier: bytes[2],
            src_mid: u16::from_be_bytes([bytes[4], bytes[5]]),
            sequence: sequence(bytes),
            remote_addr: be64(bytes, 16),
        })
    }
}

/// Sequence number of a command, also of an invalid one.
pub fn sequence(command: &[u8; COMMAND_BYTES]) -> u64 {
    be64(command, 8)
}

impl Answer {
    /// An answer without a page.
    pub fn bare(sequence: u64, status: Status) -> Self {
        Self { sequence, status, tier: 0, remote_addr: 0 }
    }

    /// An answer that names a page.
    pub fn with_page(sequence: u64, tier: Tier, remote_addr: u64) -> Self {
        Self { sequence, status: Status::Done, tier: tier as u8, remote_addr }
    }

    /// Encodes the answer.
    pub fn to_bytes(&self) -> [u8; ANSWER_BYTES] {
        let mut out = [0; ANSWER_BYTES];
        out[..8].copy_from_slice(&self.sequence.to_be_bytes());
        out[8] = self.status as u8;
        out[9] = self.tier;
        out[16..24].copy_from_slice(&self.remote_addr.to_be_bytes());
        out
    }

    /// Decodes an answer; `None` if its status is unknown, as in a slot that never had a command.
    pub fn parse(bytes: &[u8; ANSWER_BYTES]) -> Option<Self> {
        let all = [Status::Done, Status::Full, Status::NotYours, Status::Invalid];
        let status = all.into_iter().find(|status| *status as u8 == bytes[8])?;
        Some(Self {
            sequence: be64(bytes, 0),
            status,
            tier: bytes[9],
            remote_addr: be64(bytes, 16),
        })
    }
}

fn be64(bytes: &[u8; 64], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_answers_are_read_back() {
        for operation in [Operation::Store, Operation::InvalidatePage, Operation::InvalidateArea] {
            let command = Command {
                operation,
                tier: 1,
                target_tier: 2,
                src_mid: 0x1234,
                sequence: u64::MAX - 1,
                remote_addr: 0x1122_3344_5566_7788,
            };
            assert_eq!(Command::parse(&command.to_bytes()), Some(command));
            assert_eq!(sequence(&command.to_bytes()), command.sequence);
        }
        assert_eq!(Command::parse(&[0; COMMAND_BYTES]), None);
        for status in [Status::Done, Status::Full, Status::NotYours, Status::Invalid] {
            let answer = Answer { sequence: 7, status, tier: 2, remote_addr: 8192 };
            assert_eq!(Answer::parse(&answer.to_bytes()), Some(answer));
        }
        assert_eq!(Answer::parse(&[0; ANSWER_BYTES]), None, "a slot without a command");
    }
}

//! Packets between a paged process (the host) and the assist, over a socket that keeps packet
//! boundaries.
//!
//! ```text
//!   host                                   assist
//!     HELLO version                   -->    refuses other versions and other users
//!   pages of a private memory node, moved by system calls:
//!     FRAMES bytes, memfd             -->    maps the memory
//!                                     <--  READY
//!     CHUNKS address bytes, memfd     -->    chunk memory
//!     CONTROL, socket                 -->    keeps the control connection open
//!   pages of other memory nodes, moved by lent queues, for each memory node:
//!     QUEUES node, 2 memfds           -->    maps the memory of the queues; the last packet counts
//!                                     <--  READY
//!     LENT node bytes state, eventfd  -->    adopts the queues
//!   both:
//!     RING, memfd                     -->    serves the ring from now on
//!                                     <--  READY
//!     WAKE                            -->    looks for requests
//!                                     <--  REFUSED reason, at any time: it closes the socket
//! ```
//!
//! The host waits for READY before it passes the same memory to its NIC. The NIC's process seals
//! the memory, and no new writable mapping is possible afterwards.

/// A packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The first packet of a host.
    Hello {
        /// [`VERSION`] of the host.
        version: u64,
    },
    /// The frames, with a memfd.
    Frames {
        /// Length of the memory.
        bytes: u64,
    },
    /// A part of the chunk memory, with a memfd.
    Chunks {
        /// Address of the first byte in grants.
        address: u64,
        /// Length of the memory.
        bytes: u64,
    },
    /// The control connection, with its socket.
    Control,
    /// The memory of queues that are lent later, with two memfds ([`pool::BorrowedMemory`]).
    Queues {
        /// Index of the memory node.
        node: u64,
    },
    /// Lent queues, with the descriptor that wakes the NIC ([`pool::LentLanes`]).
    Lent {
        /// Index of the memory node.
        node: u64,
        /// Length of the frames.
        bytes: u64,
        /// Positions and sizes of the queues.
        state: Vec<u8>,
    },
    /// The ring, with a memfd.
    Ring,
    /// There may be requests in the ring.
    Wake,
    /// Answer of the assist: the last part was accepted.
    Ready,
    /// The assist ends the session.
    Refused(String),
}

/// Version of the protocol and of the ring.
pub const VERSION: u64 = 1;
/// Maximum length of a reason. A longer one is cut.
const REASON_MAX: usize = 512;

const HEAD: usize = 24;

impl Message {
    /// Returns the number of descriptors that come with the packet.
    pub fn descriptors(&self) -> usize {
        match self {
            Self::Frames { .. } | Self::Chunks { .. } | Self::Control => 1,
            Self::Lent { .. } | Self::Ring => 1,
            Self::Queues { .. } => 2,
            Self::Hello { .. } | Self::Wake | Self::Ready | Self::Refused(_) => 0,
        }
    }

    /// Returns the bytes of the packet.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, first, second, rest): (u64, u64, u64, &[u8]) = match self {
            Self::Hello { version } => (0, *version, 0, &[]),
            Self::Frames { bytes } => (1, *bytes, 0, &[]),
            Self::Chunks { address, bytes } => (2, *address, *bytes, &[]),
            Self::Control => (3, 0, 0, &[]),
            Self::Queues { node } => (4, *node, 0, &[]),
            Self::Lent { node, bytes, state } => (5, *node, *bytes, state),
            Self::Ring => (6, 0, 0, &[]),
            Self::Wake => (7, 0, 0, &[]),
            Self::Ready => (8, 0, 0, &[]),
            Self::Refused(why) => (9, 0, 0, &why.as_bytes()[..why.len().min(REASON_MAX)]),
        };
        let mut bytes = Vec::with_capacity(HEAD + rest.len());
        for word in [kind, first, second] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(rest);
        bytes
    }

    /// Reads a packet. `None` if it is none of this protocol.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_at_checked(HEAD)?;
        let word = |at: usize| head[at * 8..].first_chunk().map(|word| u64::from_le_bytes(*word));
        let (kind, first, second) = (word(0)?, word(1)?, word(2)?);
        let message = match kind {
            0 => Self::Hello { version: first },
            1 => Self::Frames { bytes: first },
            2 => Self::Chunks { address: first, bytes: second },
            3 => Self::Control,
            4 => Self::Queues { node: first },
            5 => {
                return Some(Self::Lent { node: first, bytes: second, state: rest.to_vec() });
            }
            6 => Self::Ring,
            7 => Self::Wake,
            8 => Self::Ready,
            9 => return Some(Self::Refused(String::from_utf8_lossy(rest).into_owned())),
            _ => return None,
        };
        rest.is_empty().then_some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn packets_round_trip() {
        let text = "ä".repeat(REASON_MAX);
        for message in [
            Message::Hello { version: VERSION },
            Message::Frames { bytes: 1 << 40 },
            Message::Chunks { address: u64::MAX, bytes: 7 },
            Message::Control,
            Message::Queues { node: 3 },
            Message::Lent { node: 1, bytes: 2, state: vec![7; 100] },
            Message::Ring,
            Message::Wake,
            Message::Ready,
            Message::Refused("no".into()),
        ] {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
        let long = Message::Refused(text.clone()).encode();
        assert!(long.len() <= HEAD + REASON_MAX);
        let Some(Message::Refused(cut)) = Message::decode(&long) else { panic!("not refused") };
        assert!(text.starts_with(cut.trim_end_matches(char::REPLACEMENT_CHARACTER)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_packet_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(message) = Message::decode(&bytes) {
                let known = !matches!(message, Message::Refused(_) | Message::Lent { .. });
                prop_assert!(!known || message.encode() == bytes[..HEAD]);
            }
        }
    }
}

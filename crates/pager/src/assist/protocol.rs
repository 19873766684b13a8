//! Packets between a paged process (the host) and the assist, over a socket that keeps packet
//! boundaries.
//!
//! ```text
//!   host                                   assist
//!     HELLO version                   -->    refuses other versions and other users
//!     FRAMES bytes, memfd             -->    maps the memory; one packet for each memory node
//!                                     <--  READY
//!     CHUNKS address bytes, memfd     -->    chunk memory of a private memory node
//!     CONTROL, socket                 -->    keeps the control connection open
//!     RING, memfd                     -->    serves the ring from now on
//!                                     <--  READY
//!     WAKE                            -->    looks for requests
//!                                     <--  REFUSED reason, at any time, before it closes the socket
//! ```
//!
//! The host waits for READY after FRAMES before it registers the frames with its NIC. The NIC's
//! process seals the memory, and no new writable mapping is possible afterwards.

/// A packet. At most one descriptor comes with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The first packet of a host.
    Hello {
        /// [`VERSION`] of the host.
        version: u64,
    },
    /// The frames of a memory node, with a memfd.
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
/// Maximum length of a packet.
pub const BYTES_MAX: usize = 512;

const HEAD: usize = 24;

impl Message {
    /// Returns true if a descriptor comes with the packet.
    pub fn has_descriptor(&self) -> bool {
        matches!(self, Self::Frames { .. } | Self::Chunks { .. } | Self::Control | Self::Ring)
    }

    /// Returns the bytes of the packet.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, first, second, text) = match self {
            Self::Hello { version } => (0, *version, 0, ""),
            Self::Frames { bytes } => (1, *bytes, 0, ""),
            Self::Chunks { address, bytes } => (2, *address, *bytes, ""),
            Self::Control => (3, 0, 0, ""),
            Self::Ring => (4, 0, 0, ""),
            Self::Wake => (5, 0, 0, ""),
            Self::Ready => (6, 0, 0, ""),
            Self::Refused(why) => (7, 0, 0, &why[..why.floor_char_boundary(BYTES_MAX - HEAD)]),
        };
        let mut bytes = Vec::with_capacity(HEAD + text.len());
        for word in [kind, first, second] {
            bytes.extend_from_slice(&u64::to_le_bytes(word));
        }
        bytes.extend_from_slice(text.as_bytes());
        bytes
    }

    /// Reads a packet. `None` if it is none of this protocol.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, text) = bytes.split_at_checked(HEAD)?;
        let word = |at: usize| head[at * 8..].first_chunk().map(|word| u64::from_le_bytes(*word));
        let (kind, first, second) = (word(0)?, word(1)?, word(2)?);
        let message = match kind {
            0 => Self::Hello { version: first },
            1 => Self::Frames { bytes: first },
            2 => Self::Chunks { address: first, bytes: second },
            3 => Self::Control,
            4 => Self::Ring,
            5 => Self::Wake,
            6 => Self::Ready,
            7 => return Some(Self::Refused(String::from_utf8_lossy(text).into_owned())),
            _ => return None,
        };
        text.is_empty().then_some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn packets_round_trip() {
        let text = "ä".repeat(BYTES_MAX);
        for message in [
            Message::Hello { version: VERSION },
            Message::Frames { bytes: 1 << 40 },
            Message::Chunks { address: u64::MAX, bytes: 7 },
            Message::Control,
            Message::Ring,
            Message::Wake,
            Message::Ready,
            Message::Refused("no".into()),
        ] {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
        let long = Message::Refused(text.clone()).encode();
        assert!(long.len() <= BYTES_MAX);
        let Some(Message::Refused(cut)) = Message::decode(&long) else { panic!("not refused") };
        assert!(text.starts_with(&cut));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_packet_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(message) = Message::decode(&bytes) {
                let known = !matches!(message, Message::Refused(_));
                prop_assert!(!known || message.encode() == bytes[..HEAD]);
            }
        }
    }
}

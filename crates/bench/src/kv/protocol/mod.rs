//! The requests and replies of servers of key-value stores. Replies are bytes of a foreign process:
//! any bytes are a reply, an incomplete reply or an error.

mod memcached;
mod resp;

use super::workload::Kind;

/// A protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// RESP, the protocol of Redis: `GET`, `SET`, `DEL`.
    Resp,
    /// The text protocol of memcached: `get`, `set`, `delete`.
    Memcached,
}

/// A reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The server has done what the request asks for.
    Done,
    /// The value has this number of bytes.
    Value(usize),
    /// The key is not there.
    Missing,
    /// The server refuses the request, with its message.
    Refused(String),
}

/// Bytes that are no reply of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(String);

/// Longest line of a reply in bytes.
const LINE_BYTES_MAX: usize = 64 << 10;
/// Longest value of a reply in bytes: the limit of Redis.
const VALUE_BYTES_MAX: usize = 512 << 20;
/// Bytes of a server's message that errors show.
const SHOWN_BYTES: usize = 200;

impl Protocol {
    /// Name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Resp => "resp",
            Self::Memcached => "memcached",
        }
    }

    /// Appends a request. `kind` is not [`Kind::Modify`], which is a read and an update.
    pub fn request(self, kind: Kind, key: &[u8], value: &[u8], out: &mut Vec<u8>) {
        match self {
            Self::Resp => resp::request(kind, key, value, out),
            Self::Memcached => memcached::request(kind, key, value, out),
        }
    }

    /// Parses the first reply in `bytes`, and returns its length. `None`: the reply is incomplete.
    ///
    /// # Errors
    /// [`Malformed`] for bytes that no server of this protocol sends.
    pub fn reply(self, bytes: &[u8]) -> Result<Option<(usize, Reply)>, Malformed> {
        match self {
            Self::Resp => resp::reply(bytes),
            Self::Memcached => memcached::reply(bytes),
        }
    }
}

/// The first line of `bytes` without its end. `None`: the line is incomplete.
fn line(bytes: &[u8]) -> Result<Option<&[u8]>, Malformed> {
    match bytes.iter().take(LINE_BYTES_MAX).position(|byte| *byte == b'\n') {
        Some(at) => match bytes[..at].split_last() {
            Some((b'\r', line)) => Ok(Some(line)),
            _ => Err(Malformed("a line does not end with CR LF".into())),
        },
        None if bytes.len() >= LINE_BYTES_MAX => Err(Malformed("a line has no end".into())),
        None => Ok(None),
    }
}

/// A value of `length` bytes and its CR LF, at `from`. Returns the end. `None`: incomplete.
fn value_end(bytes: &[u8], from: usize, length: usize) -> Result<Option<usize>, Malformed> {
    let end = from + length;
    match bytes.get(end..end + 2) {
        None => Ok(None),
        Some(b"\r\n") => Ok(Some(end + 2)),
        Some(_) => Err(Malformed("a value does not end with CR LF".into())),
    }
}

/// The length of a value.
fn length(digits: &[u8]) -> Result<usize, Malformed> {
    let number = std::str::from_utf8(digits).ok().and_then(|text| text.parse::<usize>().ok());
    number
        .filter(|bytes| *bytes <= VALUE_BYTES_MAX)
        .ok_or_else(|| Malformed(format!("{:?} is no length of a value", shown(digits))))
}

/// The begin of foreign bytes as text.
fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(SHOWN_BYTES)]).into_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PROTOCOLS: [Protocol; 2] = [Protocol::Resp, Protocol::Memcached];

    proptest! {
        #[test]
        fn any_bytes_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for protocol in PROTOCOLS {
                if let Ok(Some((length, _))) = protocol.reply(&bytes) {
                    prop_assert!((1..=bytes.len()).contains(&length));
                }
            }
        }

        /// A reply that arrives in parts is the same reply, and bytes behind it do not matter.
        #[test]
        fn replies_are_parsed_when_they_are_complete(
            value in prop::collection::vec(any::<u8>(), 0..100),
            behind in prop::collection::vec(any::<u8>(), 0..10),
        ) {
            let n = value.len();
            let framed = |head: String, tail: &[u8]| {
                [head.as_bytes(), &value, b"\r\n", tail].concat()
            };
            for (protocol, reply) in [
                (Protocol::Resp, framed(format!("${n}\r\n"), b"")),
                (Protocol::Memcached, framed(format!("VALUE k 0 {n}\r\n"), b"END\r\n")),
            ] {
                for part in 0..reply.len() {
                    prop_assert_eq!(protocol.reply(&reply[..part]), Ok(None));
                }
                let whole = [&reply[..], &behind].concat();
                prop_assert_eq!(
                    protocol.reply(&whole),
                    Ok(Some((reply.len(), Reply::Value(n))))
                );
            }
        }
    }

    #[test]
    fn endless_lines_and_impossible_lengths_are_errors() {
        let endless = vec![b'x'; LINE_BYTES_MAX];
        for protocol in PROTOCOLS {
            assert!(protocol.reply(&endless).is_err(), "{protocol:?}");
            assert_eq!(protocol.reply(&endless[1..]), Ok(None), "{protocol:?}");
        }
        let huge = u64::MAX.to_string();
        assert!(Protocol::Resp.reply(format!("${huge}\r\n").as_bytes()).is_err());
        assert!(Protocol::Memcached.reply(format!("VALUE k 0 {huge}\r\n").as_bytes()).is_err());
    }
}

//! Framing of messages in a byte stream.
//!
//! ```text
//! +0 length of the message (be32), 1 to MAX_BYTES    +4 the message: one JSON object
//! ```
//!
//! A read never goes beyond the current message, so that a level-triggered poll reports the next
//! one.

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::protocol::MAX_BYTES;

/// Size of the length field in bytes.
const HEADER: usize = 4;

/// The received part of the current message.
#[derive(Default)]
pub struct Inbox {
    bytes: Vec<u8>,
}

/// Result of a read.
#[derive(Debug, PartialEq, Eq)]
pub enum Read {
    /// A complete message.
    Message(Vec<u8>),
    /// A part of a message.
    Part,
    /// The peer has ended the stream.
    End,
    /// Invalid length: 0, or more than [`MAX_BYTES`]. Because the start of the next message is
    /// unknown, nothing more is read.
    Invalid(usize),
}

impl Inbox {
    /// Reads once from `stream`, at most the missing part of the current message.
    ///
    /// # Errors
    /// Those of the system call; `WOULDBLOCK` if no data is available.
    pub fn read(&mut self, stream: impl AsFd) -> Result<Read, Errno> {
        if let Some(wrong) = self.invalid_length() {
            return Ok(Read::Invalid(wrong));
        }
        let have = self.bytes.len();
        let want = if have < HEADER { HEADER } else { HEADER + self.announced() };
        self.bytes.resize(want, 0);
        let got = rustix::net::recv(stream, &mut self.bytes[have..], RecvFlags::empty());
        let got = match got {
            Ok((got, _)) => got,
            Err(e) => {
                self.bytes.truncate(have);
                return Err(e);
            }
        };
        self.bytes.truncate(have + got);
        Ok(match self.invalid_length() {
            _ if got == 0 => Read::End,
            Some(wrong) => Read::Invalid(wrong),
            None if self.bytes.len() < HEADER => Read::Part,
            None if self.bytes.len() < HEADER + self.announced() => Read::Part,
            None => {
                let message = self.bytes.split_off(HEADER);
                self.bytes.clear();
                Read::Message(message)
            }
        })
    }

    /// The announced length, if the header is complete and the length is invalid.
    fn invalid_length(&self) -> Option<usize> {
        let there = self.bytes.len() >= HEADER;
        there.then(|| self.announced()).filter(|len| *len == 0 || *len > MAX_BYTES)
    }

    /// The length in the header, which must be complete.
    fn announced(&self) -> usize {
        let header = self.bytes.first_chunk::<HEADER>().expect("the header is there");
        u32::from_be_bytes(*header) as usize
    }
}

/// A message with its length field.
pub fn frame(message: &[u8]) -> Vec<u8> {
    debug_assert!((1..=MAX_BYTES).contains(&message.len()));
    let mut bytes = Vec::with_capacity(HEADER + message.len());
    bytes.extend_from_slice(&(message.len() as u32).to_be_bytes());
    bytes.extend_from_slice(message);
    bytes
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn read_all(inbox: &mut Inbox, from: &UnixStream) -> Vec<Read> {
        from.set_nonblocking(true).unwrap();
        let mut all = Vec::new();
        loop {
            match inbox.read(from) {
                Ok(Read::Part) => {}
                Ok(read) => {
                    let over = !matches!(read, Read::Message(_));
                    all.push(read);
                    if over {
                        return all;
                    }
                }
                Err(e) => {
                    assert_eq!(e, Errno::WOULDBLOCK);
                    return all;
                }
            }
        }
    }

    #[test]
    fn invalid_length_is_reported_before_data_is_buffered() {
        for length in [0, MAX_BYTES as u32 + 1, u32::MAX] {
            let (mut a, b) = UnixStream::pair().unwrap();
            a.write_all(&length.to_be_bytes()).unwrap();
            let mut inbox = Inbox::default();
            assert_eq!(read_all(&mut inbox, &b), [Read::Invalid(length as usize)]);
            // The rest of the stream is not read either, however often the test tries.
            a.write_all(&[0x5a; 100]).unwrap();
            assert_eq!(read_all(&mut inbox, &b), [Read::Invalid(length as usize)]);
            assert!(inbox.bytes.capacity() < 64);
        }
    }

    #[test]
    fn message_length_is_one_to_max_bytes() {
        for len in [1, MAX_BYTES] {
            let message = vec![0x5a; len];
            let (mut a, b) = UnixStream::pair().unwrap();
            let whole = frame(&message);
            let writer = std::thread::spawn(move || a.write_all(&whole).map(|()| a));
            let mut inbox = Inbox::default();
            let got = loop {
                match inbox.read(&b) {
                    Ok(Read::Part) | Err(Errno::INTR) => {}
                    other => break other,
                }
            };
            assert_eq!(got, Ok(Read::Message(message)), "{len} bytes");
            drop(writer.join().unwrap());
            assert_eq!(inbox.read(&b), Ok(Read::End));
        }
    }

    #[test]
    fn end_of_stream_within_a_message_is_an_end() {
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(&frame(b"{}")[..5]).unwrap();
        a.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read_all(&mut Inbox::default(), &b), [Read::End]);
    }

    proptest! {
        #[test]
        fn messages_arrive_in_any_fragmentation(
            messages in vec(vec(any::<u8>(), 1..300), 0..6),
            cuts in vec(1usize..64, 1..20),
        ) {
            let (mut a, b) = UnixStream::pair().unwrap();
            let bytes: Vec<u8> = messages.iter().flat_map(|m| frame(m)).collect();
            let (mut inbox, mut got, mut at) = (Inbox::default(), Vec::new(), 0);
            let mut cuts = cuts.iter().cycle();
            while at < bytes.len() {
                let n = (*cuts.next().unwrap()).min(bytes.len() - at);
                a.write_all(&bytes[at..at + n]).unwrap();
                at += n;
                got.extend(read_all(&mut inbox, &b));
            }
            let sent: Vec<Read> = messages.into_iter().map(Read::Message).collect();
            prop_assert_eq!(got, sent);
        }
    }
}

//! A socket of a connection, with or without TLS. No call waits.

use std::io::{self, BufRead, ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::buffer::spare_capacity;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustls::{ServerConfig, ServerConnection};

use super::tls::Socket;

/// Bytes that TLS holds back if the socket takes none.
const TLS_BUFFER_BYTES: usize = 64 << 10;

/// Bytes that a read sets to zero before the socket fills them.
const ZEROED_BYTES: usize = 64 << 10;

/// Result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    /// Bytes read; 0 at the end of the stream.
    pub count: usize,
    /// The socket has no more bytes now.
    pub is_drained: bool,
}

/// A socket.
#[derive(Debug)]
pub(crate) struct Stream {
    fd: Arc<OwnedFd>,
    tls: Option<Box<ServerConnection>>,
}

impl Stream {
    /// # Errors
    ///
    /// The settings of TLS do not fit.
    pub fn new(fd: Arc<OwnedFd>, tls: Option<Arc<ServerConfig>>) -> Result<Self, rustls::Error> {
        let tls = match tls {
            None => None,
            Some(config) => {
                let mut connection = ServerConnection::new(config)?;
                connection.set_buffer_limit(Some(TLS_BUFFER_BYTES));
                Some(Box::new(connection))
            }
        };
        Ok(Self { fd, tls })
    }

    /// Appends at most `most` bytes to `into`.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if no bytes are there.
    pub fn read(&mut self, into: &mut Vec<u8>, most: usize) -> io::Result<Taken> {
        let Some(tls) = &mut self.tls else {
            into.reserve(most);
            // The capacity may be larger than `most`.
            let count = match into.capacity() - into.len() == most {
                true => recv(&self.fd, spare_capacity(into), RecvFlags::empty())?.0,
                false => {
                    let most = most.min(ZEROED_BYTES);
                    let begin = into.len();
                    into.resize(begin + most, 0);
                    let result = recv(&self.fd, &mut into[begin..], RecvFlags::empty());
                    let count = result.as_ref().map_or(0, |(count, _)| *count);
                    into.truncate(begin + count);
                    result?.0
                }
            };
            return Ok(Taken { count, is_drained: count < most });
        };
        loop {
            let mut reader = tls.reader();
            match reader.fill_buf() {
                // One piece for each call, so that no byte is written twice.
                Ok(piece) => {
                    let count = piece.len().min(most);
                    into.extend_from_slice(&piece[..count]);
                    reader.consume(count);
                    return Ok(Taken { count, is_drained: false });
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // The peer has closed the socket without the message that ends TLS.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    return Ok(Taken { count: 0, is_drained: true });
                }
                Err(error) => return Err(error),
            }
            tls.read_tls(&mut Socket(self.fd.as_fd()))?;
            let processed = tls.process_new_packets();
            // A handshake, or an alert.
            let sent = push(tls, &self.fd);
            processed.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
            match sent {
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
        }
    }

    /// Sends the begin of `from`. Returns the number of bytes.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if the socket takes no bytes now.
    pub fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else {
            return Ok(send(&self.fd, from, SendFlags::NOSIGNAL)?);
        };
        let count = tls.writer().write(from)?;
        match push(tls, &self.fd) {
            Err(error) if error.kind() == ErrorKind::WouldBlock && count > 0 => Ok(count),
            result => result.map(|()| count),
        }
    }

    /// Returns whether bytes of TLS wait for the socket.
    pub fn holds_bytes(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Announces the end of the stream to the peer.
    pub fn close(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.send_close_notify();
            // The peer learns of the end by the socket too.
            let _ = push(tls, &self.fd);
        }
    }
}

/// Sends what TLS holds back.
fn push(tls: &mut ServerConnection, fd: &OwnedFd) -> io::Result<()> {
    while tls.wants_write() {
        tls.write_tls(&mut Socket(fd.as_fd()))?;
    }
    Ok(())
}

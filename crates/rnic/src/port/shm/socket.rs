//! Sends and receives packets with descriptors over a Unix socket of type `SOCK_SEQPACKET`.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

pub use super::deferred_close::{PeerSocket, close_deferred};
use super::protocol::{DESCRIPTORS_MAX, MESSAGE_MAX};

/// Maximum descriptors of a packet in Linux (`SCM_MAX_FD`). The receive buffer has room for all of
/// them, because the kernel closes any excess descriptors within `recvmsg`, and a hostile sender
/// can make that take arbitrarily long.
const SENT_MAX: usize = 253;

/// A packet.
pub struct Packet {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// The descriptors that came with it, closed on exec.
    pub descriptors: Vec<OwnedFd>,
}

/// Sends a packet with at most [`DESCRIPTORS_MAX`] descriptors. Does not raise SIGPIPE.
pub fn send(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    loop {
        match sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            Ok(sent) if sent == bytes.len() => return Ok(()),
            Ok(_) => return Err(Errno::MSGSIZE),
            Err(e) => return Err(e),
        }
    }
}

/// Receives a packet, or `None` if the peer has closed the connection.
///
/// A packet of more than [`MESSAGE_MAX`] bytes fails with `EMSGSIZE`, and its descriptors are
/// closed. Any other packet is returned with all its descriptors, which the caller must close by
/// [`close_deferred`] if it does not use them.
pub fn receive(socket: impl AsFd) -> Result<Option<Packet>, Errno> {
    let mut bytes = vec![0; MESSAGE_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SENT_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        match recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    let descriptors: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    // The protocol has no empty messages: an empty read is the end of the connection.
    let too_long = received.flags.contains(ReturnFlags::TRUNC);
    if too_long || received.bytes == 0 {
        descriptors.into_iter().for_each(close_deferred);
        return if too_long { Err(Errno::MSGSIZE) } else { Ok(None) };
    }
    bytes.truncate(received.bytes);
    Ok(Some(Packet { bytes, descriptors }))
}

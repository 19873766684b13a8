//! Packets with descriptors over a Unix socket of type `SOCK_SEQPACKET`.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

pub use super::aside::{PeerSocket, close_aside};
use super::wire::{DESCRIPTORS_MAX, MESSAGE_MAX};

/// The most descriptors that Linux lets a packet have (`SCM_MAX_FD`). There is room for all of them:
/// those without room the kernel closes here and now, and that can take as long as their sender likes.
const SENT_MAX: usize = 253;

/// A packet.
pub struct Packet {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// The descriptors that came with it, closed on exec.
    pub descriptors: Vec<OwnedFd>,
}

/// Sends a packet, with at most [`DESCRIPTORS_MAX`] descriptors. Does not raise SIGPIPE.
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

/// Receives a packet; `None` when the peer has closed. A packet of more than [`MESSAGE_MAX`] bytes is
/// refused with `EMSGSIZE`, and its descriptors are closed. All descriptors of another are handed out,
/// for the caller to refuse: to be closed by [`close_aside`].
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
    // No message of ours is empty: that is the end.
    let too_long = received.flags.contains(ReturnFlags::TRUNC);
    if too_long || received.bytes == 0 {
        descriptors.into_iter().for_each(close_aside);
        return if too_long { Err(Errno::MSGSIZE) } else { Ok(None) };
    }
    bytes.truncate(received.bytes);
    Ok(Some(Packet { bytes, descriptors }))
}

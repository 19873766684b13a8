//! Packets with descriptors over a Unix socket of type `SOCK_SEQPACKET`.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::wire::{DESCRIPTORS_MAX, MESSAGE_MAX};

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
/// refused with `EMSGSIZE`; descriptors beyond [`DESCRIPTORS_MAX`] are closed by the kernel.
pub fn receive(socket: impl AsFd) -> Result<Option<Packet>, Errno> {
    let mut bytes = vec![0; MESSAGE_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
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
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(Errno::MSGSIZE);
    }
    // No message of ours is empty: this is the end.
    if received.bytes == 0 {
        return Ok(None);
    }
    bytes.truncate(received.bytes);
    Ok(Some(Packet { bytes, descriptors }))
}

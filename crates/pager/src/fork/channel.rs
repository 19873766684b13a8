//! What a forked child and the keeper of its parent's pages say to each other.
//!
//! Two sockets join them, so that an answer is never taken for a call:
//!
//! ```text
//!   child                                        keeper
//!     calls  -- FORKS, DROPPED, GROW, TAKE, READ -->      each is answered: DONE, pages, blocks
//!     bell   <-- FAULTS (once, a descriptor), GROW, ORPHANED --
//! ```
//!
//! Where the kernel does not report forks, the child has the descriptor, and FAULTS goes the other way: first of all
//! calls, and not answered.
//!
//! A socket that hangs up says that the other side is gone, however it ended.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use crate::sys::PAGE_BYTES;

/// A message, with at most [`FDS`] descriptors. `start..end` are pages, where the kind has some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Message {
    pub kind: u32,
    pub start: u32,
    pub end: u32,
}

/// Answer to a call. To TAKE: `end` blocks follow.
pub(super) const DONE: u32 = 0;
/// Child: I am about to fork; with the keeper's ends of the new child's sockets.
pub(super) const FORKS: u32 = 1;
/// Child: these pages are zeros to me from now on.
pub(super) const DROPPED: u32 = 2;
/// Child: I must page for myself. Keeper: you must.
pub(super) const GROW: u32 = 3;
/// Child: I serve my faults from now on; tell me which of my pages you have.
pub(super) const TAKE: u32 = 4;
/// Child: these pages, as they were at the fork. Answered by their content, without a message.
pub(super) const READ: u32 = 5;
/// The descriptor of your faults, or of mine.
pub(super) const FAULTS: u32 = 6;
/// Keeper: your parent has ended; what is not read from here soon keeps it from being freed.
pub(super) const ORPHANED: u32 = 7;

/// Descriptors of a message.
pub(super) const FDS: usize = 2;
/// Pages that are read with one message.
pub(super) const PAGES_AT_ONCE: usize = 16;

impl Message {
    pub fn of(kind: u32) -> Self {
        Self { kind, start: 0, end: 0 }
    }

    pub fn pages(kind: u32, range: std::ops::Range<u32>) -> Self {
        Self { kind, start: range.start, end: range.end }
    }
}

/// 512 pages of which the keeper has some, by the bits.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Block {
    pub index: u64,
    pub bits: [u64; 8],
}

/// Pages of a [`Block`].
pub(super) const BLOCK_PAGES: u32 = 512;
/// Blocks that are sent at a time.
const BLOCKS_AT_ONCE: usize = 512;

fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        let result = call();
        if result >= 0 {
            return Ok(result as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// A pair of sockets that keep messages apart.
pub(super) fn pair() -> io::Result<[OwnedFd; 2]> {
    let mut pair = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: `pair` is valid for the write; the descriptors are ours.
    unsafe {
        if libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(pair.map(|fd| OwnedFd::from_raw_fd(fd)))
    }
}

/// A buffer for the descriptors of a message as a control message.
#[repr(C, align(8))]
struct Control([u8; 24]);

/// Sends a message.
pub(super) fn send(channel: RawFd, mut message: Message, fds: &[RawFd]) -> io::Result<()> {
    assert!(fds.len() <= FDS);
    let bytes = size_of_val(fds) as u32;
    let mut part =
        libc::iovec { iov_base: (&raw mut message).cast(), iov_len: size_of::<Message>() };
    let mut control = Control([0; 24]);
    // SAFETY: a zero header is valid; the control buffer holds `FDS` descriptors.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &mut part;
        header.msg_iovlen = 1;
        if !fds.is_empty() {
            header.msg_control = (&raw mut control).cast();
            header.msg_controllen = libc::CMSG_SPACE(bytes) as usize;
            let attached = libc::CMSG_FIRSTHDR(&header);
            (*attached).cmsg_level = libc::SOL_SOCKET;
            (*attached).cmsg_type = libc::SCM_RIGHTS;
            (*attached).cmsg_len = libc::CMSG_LEN(bytes) as usize;
            let data = libc::CMSG_DATA(attached).cast::<i32>();
            for (at, fd) in fds.iter().enumerate() {
                data.add(at).write_unaligned(*fd);
            }
        }
        retry(|| libc::sendmsg(channel, &header, libc::MSG_NOSIGNAL)).map(drop)
    }
}

/// Waits for a message. An end of file is an error.
pub(super) fn receive(channel: RawFd) -> io::Result<(Message, [Option<OwnedFd>; FDS])> {
    let mut message = Message::of(DONE);
    let mut part =
        libc::iovec { iov_base: (&raw mut message).cast(), iov_len: size_of::<Message>() };
    let mut control = Control([0; 24]);
    let mut fds = [None, None];
    // SAFETY: a zero header is valid; any bytes are a valid message; descriptors that arrive are
    // ours, as many as the control message's length says.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &mut part;
        header.msg_iovlen = 1;
        header.msg_control = (&raw mut control).cast();
        header.msg_controllen = size_of::<Control>();
        let got = retry(|| libc::recvmsg(channel, &mut header, libc::MSG_CMSG_CLOEXEC))?;
        let attached = libc::CMSG_FIRSTHDR(&header);
        if !attached.is_null() && (*attached).cmsg_type == libc::SCM_RIGHTS {
            let bytes = (*attached).cmsg_len - libc::CMSG_LEN(0) as usize;
            let data = libc::CMSG_DATA(attached).cast::<i32>();
            for (at, fd) in fds.iter_mut().enumerate().take(bytes / 4) {
                *fd = Some(OwnedFd::from_raw_fd(data.add(at).read_unaligned()));
            }
        }
        if got != size_of::<Message>() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok((message, fds))
}

/// Says something and waits for the answer.
pub(super) fn call(channel: RawFd, message: Message, fds: &[RawFd]) -> io::Result<Message> {
    send(channel, message, fds)?;
    receive(channel).map(|(answer, _)| answer)
}

/// Sends plain bytes as one packet.
///
/// # Safety
/// `data` is readable for `len` bytes.
unsafe fn send_bytes(channel: RawFd, data: *const u8, len: usize) -> io::Result<()> {
    // SAFETY: by the caller.
    retry(|| unsafe { libc::send(channel, data.cast(), len, libc::MSG_NOSIGNAL) }).map(drop)
}

/// Receives one packet of exactly `len` plain bytes.
///
/// # Safety
/// `data` is writable for `len` bytes, and any bytes are a valid value there.
unsafe fn receive_bytes(channel: RawFd, data: *mut u8, len: usize) -> io::Result<()> {
    // SAFETY: by the caller.
    let got = retry(|| unsafe { libc::recv(channel, data.cast(), len, 0) })?;
    if got == len { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Sends `pages` frames, at most [`PAGES_AT_ONCE`].
///
/// # Safety
/// They are readable, and nobody writes them during the call.
pub(super) unsafe fn send_pages(channel: RawFd, from: *const u8, pages: usize) -> io::Result<()> {
    // SAFETY: by the caller.
    unsafe { send_bytes(channel, from, pages * PAGE_BYTES) }
}

/// Receives `pages` frames, at most [`PAGES_AT_ONCE`].
///
/// # Safety
/// They are writable, and nobody else's during the call.
pub(super) unsafe fn receive_pages(channel: RawFd, to: *mut u8, pages: usize) -> io::Result<()> {
    // SAFETY: by the caller.
    unsafe { receive_bytes(channel, to, pages * PAGE_BYTES) }
}

/// Answers TAKE.
pub(super) fn send_blocks(channel: RawFd, blocks: &[Block]) -> io::Result<()> {
    send(channel, Message::pages(DONE, 0..blocks.len() as u32), &[])?;
    for part in blocks.chunks(BLOCKS_AT_ONCE) {
        // SAFETY: plain words.
        unsafe { send_bytes(channel, part.as_ptr().cast(), size_of_val(part))? };
    }
    Ok(())
}

/// Says TAKE, with the keeper's end of the calls of the child's own keeper, and receives the answer.
pub(super) fn take(channel: RawFd, kin: RawFd) -> io::Result<Vec<Block>> {
    let answer = call(channel, Message::of(TAKE), &[kin])?;
    let mut blocks = vec![Block::default(); answer.end as usize];
    for part in blocks.chunks_mut(BLOCKS_AT_ONCE) {
        // SAFETY: plain words, for which any bytes are values.
        unsafe { receive_bytes(channel, part.as_mut_ptr().cast(), size_of_val(part))? };
    }
    Ok(blocks)
}

/// Waits at most `timeout_ms` for a message, or for the other end to close. True if one is there.
pub(super) fn is_ready(channel: RawFd, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd { fd: channel, events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid entry.
    unsafe { libc::poll(&mut poll, 1, timeout_ms) > 0 }
}

/// Waits at most `timeout_ms` for the other end to close. Data is not waited for.
pub(super) fn has_hung_up(channel: RawFd, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd { fd: channel, events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one valid entry.
    unsafe { libc::poll(&mut poll, 1, timeout_ms) };
    poll.revents & (libc::POLLHUP | libc::POLLRDHUP | libc::POLLERR | libc::POLLNVAL) != 0
}

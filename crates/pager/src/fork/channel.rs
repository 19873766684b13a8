//! Messages between a forked child and the page server of its parent.
//!
//! Two sockets join them, so that an answer is never taken for a notice:
//!
//! ```text
//!   child                                              page server
//!     calls    -- FORKS, DROPPED, PROMOTE, TAKE, READ -->   each is answered: DONE, pages, blocks
//!              -- LIGHT -->
//!     notices  <-- FAULTS (once, a descriptor), PROMOTE, ORPHANED --
//! ```
//!
//! The child sends LIGHT once it can be promoted. Where the kernel does not report forks, the child
//! makes the descriptor of its faults and sends FAULTS, as its first call. The page server answers
//! neither.
//!
//! A closed socket means that the peer has ended, in any way.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use super::keeper;
use crate::sys::PAGE_BYTES;

/// A message, with at most [`FDS`] descriptors. `start..end` are pages, for kinds that name pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Message {
    pub kind: u32,
    pub start: u32,
    pub end: u32,
}

/// Answer to a call. After TAKE, `end` blocks follow.
pub(super) const DONE: u32 = 0;
/// Child: a fork follows. Carries the page server's ends of the new child's sockets.
pub(super) const FORKS: u32 = 1;
/// Child: these pages read as zeros from now on.
pub(super) const DROPPED: u32 = 2;
/// Child: a pager of its own is needed. Page server: the child must get a pager of its own.
pub(super) const PROMOTE: u32 = 3;
/// Child: the child serves its faults from now on. The answer names the pages that the page server
/// has.
pub(super) const TAKE: u32 = 4;
/// Child: reads these pages as they were at the fork. The answer is their content, without a
/// message.
pub(super) const READ: u32 = 5;
/// Carries the descriptor of the child's faults, in either direction.
pub(super) const FAULTS: u32 = 6;
/// Page server: the parent has ended. The child must read all its pages soon, because until then
/// their memory cannot be freed.
pub(super) const ORPHANED: u32 = 7;
/// Child: the thread that promotes the child waits for notices from now on.
pub(super) const LIGHT: u32 = 8;

/// Maximum number of descriptors of a message.
pub(super) const FDS: usize = 2;
/// Maximum number of pages that one READ names.
pub(super) const PAGES_AT_ONCE: usize = 16;

impl Message {
    pub fn of(kind: u32) -> Self {
        Self { kind, start: 0, end: 0 }
    }

    pub fn pages(kind: u32, range: std::ops::Range<u32>) -> Self {
        Self { kind, start: range.start, end: range.end }
    }
}

/// 512 pages; a set bit marks a page that the page server has.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Block {
    pub index: u64,
    pub bits: [u64; 8],
}

/// Pages of a [`Block`].
pub(super) const BLOCK_PAGES: u32 = 512;
/// Blocks per packet.
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

/// Creates a pair of sockets that preserve message boundaries.
pub(super) fn pair() -> io::Result<[OwnedFd; 2]> {
    let mut pair = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: `pair` is valid for the write; this function owns the descriptors.
    unsafe {
        if libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(pair.map(|fd| OwnedFd::from_raw_fd(fd)))
    }
}

/// Buffer for a control message that carries descriptors.
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

/// Waits for a message.
///
/// # Errors
/// Errors of the socket, and `UnexpectedEof` if the peer has closed it.
pub(super) fn receive(channel: RawFd) -> io::Result<(Message, [Option<OwnedFd>; FDS])> {
    let mut message = Message::of(DONE);
    let mut part =
        libc::iovec { iov_base: (&raw mut message).cast(), iov_len: size_of::<Message>() };
    let mut control = Control([0; 24]);
    let mut fds = [None, None];
    // SAFETY: a zero header is valid; any bytes are a valid message. This function owns the
    // descriptors that arrive; the control message's length gives their number.
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

/// Sends a message to the page server and waits for the answer.
pub(super) fn call(channel: RawFd, message: Message, fds: &[RawFd]) -> io::Result<Message> {
    send(channel, message, fds)?;
    keeper::wait_for_answer(channel);
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
/// The frames are readable, and no thread writes them during the call.
pub(super) unsafe fn send_pages(channel: RawFd, from: *const u8, pages: usize) -> io::Result<()> {
    // SAFETY: by the caller.
    unsafe { send_bytes(channel, from, pages * PAGE_BYTES) }
}

/// Receives `pages` frames, at most [`PAGES_AT_ONCE`].
///
/// # Safety
/// The frames are writable, and no other thread uses them during the call.
pub(super) unsafe fn receive_pages(channel: RawFd, to: *mut u8, pages: usize) -> io::Result<()> {
    // SAFETY: by the caller.
    unsafe { receive_bytes(channel, to, pages * PAGE_BYTES) }
}

/// Sends the answer to TAKE.
pub(super) fn send_blocks(channel: RawFd, blocks: &[Block]) -> io::Result<()> {
    send(channel, Message::pages(DONE, 0..blocks.len() as u32), &[])?;
    for part in blocks.chunks(BLOCKS_AT_ONCE) {
        // SAFETY: plain words.
        unsafe { send_bytes(channel, part.as_ptr().cast(), size_of_val(part))? };
    }
    Ok(())
}

/// Sends TAKE and receives the answer. `server_calls` is the socket through which the child's own
/// page server will read.
pub(super) fn take(channel: RawFd, server_calls: RawFd) -> io::Result<Vec<Block>> {
    let answer = call(channel, Message::of(TAKE), &[server_calls])?;
    let mut blocks = vec![Block::default(); answer.end as usize];
    for part in blocks.chunks_mut(BLOCKS_AT_ONCE) {
        keeper::wait_for_answer(channel);
        // SAFETY: plain words, for which any bytes are values.
        unsafe { receive_bytes(channel, part.as_mut_ptr().cast(), size_of_val(part))? };
    }
    Ok(blocks)
}

/// Waits at most `timeout_ms` for a message, or for the peer to close. Returns true if either
/// happened.
pub(super) fn is_ready(channel: RawFd, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd { fd: channel, events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid entry.
    unsafe { libc::poll(&mut poll, 1, timeout_ms) > 0 }
}

/// Waits at most `timeout_ms` for the peer to close, ignoring data. Returns true if it has closed.
pub(super) fn has_hung_up(channel: RawFd, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd { fd: channel, events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one valid entry.
    unsafe { libc::poll(&mut poll, 1, timeout_ms) };
    poll.revents & (libc::POLLHUP | libc::POLLRDHUP | libc::POLLERR | libc::POLLNVAL) != 0
}

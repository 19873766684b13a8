//! System calls on the sockets and process descriptors of a session.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::protocol::Message;

/// Level `SOL_SOCKET`: a pidfd of the peer (Linux 6.5).
const SO_PEERPIDFD: i32 = 77;

/// Sends a packet. Waits for room unless the socket is in non-blocking mode.
pub fn send(
    socket: BorrowedFd<'_>,
    message: &Message,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = message.encode();
    if bytes.len() > pool::socket::MESSAGE_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    pool::socket::send(socket, &bytes, descriptors).map_err(Into::into)
}

/// Receives a packet with its descriptors. `None` if the peer has closed the connection, or the
/// packet is none of the protocol.
pub fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
    let received = match pool::socket::receive(socket) {
        // The peer has closed its end with packets that it had not read. The kernel reports this
        // once, before the last packets of the peer.
        Err(error) if error.raw_os_error() == libc::ECONNRESET => pool::socket::receive(socket),
        other => other,
    };
    let Some(packet) = received? else { return Ok(None) };
    let message = Message::decode(&packet.bytes);
    let has_all = |message: &Message| message.descriptors() == packet.descriptors.len();
    Ok(message.filter(has_all).map(|message| (message, packet.descriptors)))
}

/// Ends the sending direction of a socket: the peer sees the end of the connection.
pub fn end_sending(socket: BorrowedFd<'_>) {
    // SAFETY: a plain system call.
    unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_WR) };
}

/// Asks the peer to look for requests. A packet that finds no room is superfluous, because the
/// peer has others to read.
pub fn wake(socket: BorrowedFd<'_>) {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    let bytes = Message::Wake.encode();
    // SAFETY: the bytes outlive the call.
    unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
}

/// Packets that [`drain_wakes`] reads at a time. A host that sends without end must not keep the
/// assist from other hosts.
const WAKES_MAX: usize = 64;

/// Reads at most [`WAKES_MAX`] packets that ask to look for requests. Never waits.
///
/// # Errors
/// The peer has closed the socket (`UnexpectedEof`), or has sent another packet (`InvalidData`).
pub fn drain_wakes(socket: BorrowedFd<'_>) -> io::Result<()> {
    let mut packet = [0u8; 32];
    for _ in 0..WAKES_MAX {
        // SAFETY: `packet` is valid for the write. The kernel discards descriptors.
        let received = unsafe {
            let flags = libc::MSG_DONTWAIT;
            libc::recv(socket.as_raw_fd(), packet.as_mut_ptr().cast(), packet.len(), flags)
        };
        match usize::try_from(received) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) if Message::decode(&packet[..bytes]) == Some(Message::Wake) => {}
            Ok(_) => return Err(io::ErrorKind::InvalidData.into()),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
    Ok(())
}

/// Returns true if the peer of a socket has closed it. Never waits.
pub fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    const ENDED: i16 = libc::POLLHUP | libc::POLLERR | libc::POLLRDHUP | libc::POLLNVAL;
    let mut polled = [polled(socket, libc::POLLRDHUP)];
    poll(&mut polled, 0) > 0 && polled[0].revents & ENDED != 0
}

/// An entry for [`poll`].
pub fn polled(fd: BorrowedFd<'_>, events: i16) -> libc::pollfd {
    libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 }
}

/// Waits for events, at most `timeout_ms`; -1 waits without a limit. Returns the number of entries
/// with events, 0 also after a signal.
pub fn poll(entries: &mut [libc::pollfd], timeout_ms: i32) -> usize {
    // SAFETY: the entries are valid for the call.
    let ready = unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as u64, timeout_ms) };
    usize::try_from(ready).unwrap_or_else(|_| {
        entries.iter_mut().for_each(|entry| entry.revents = 0);
        0
    })
}

/// Opens a descriptor of the process that listens at the other end of a socket.
///
/// # Errors
/// The process is in another PID namespace, or has ended.
pub fn peer_process(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    if let Ok(pidfd) = option(socket, SO_PEERPIDFD, -1)
        && pidfd >= 0
    {
        // SAFETY: the kernel has just made this descriptor for this call.
        return Ok(unsafe { OwnedFd::from_raw_fd(pidfd) });
    }
    let peer = option(socket, libc::SO_PEERCRED, [0i32; 3])?[0];
    if peer <= 0 {
        return Err(io::ErrorKind::NotFound.into());
    }
    // SAFETY: a plain system call; this function owns the returned descriptor.
    let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, peer, 0) as i32 };
    if opened < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just created.
    let opened = unsafe { OwnedFd::from_raw_fd(opened) };
    // The number belongs to the peer if the peer still lives, because it has not been used again.
    match has_hung_up(socket) {
        false => Ok(opened),
        true => Err(io::ErrorKind::NotConnected.into()),
    }
}

/// Plain data: any bytes are a valid value.
trait Plain: Copy {}
impl Plain for i32 {}
impl Plain for [i32; 3] {}

fn option<T: Plain>(socket: BorrowedFd<'_>, name: i32, mut value: T) -> io::Result<T> {
    let mut len = size_of::<T>() as libc::socklen_t;
    let at = (&raw mut value).cast();
    // SAFETY: `at` has room for `len` bytes, and any bytes are a `T`.
    let done =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, at, &mut len) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(value)
}

/// Ends a process.
///
/// # Errors
/// The process belongs to another user. A process that has ended already is no error.
pub fn kill(process: BorrowedFd<'_>) -> io::Result<()> {
    let none = std::ptr::null_mut::<libc::siginfo_t>();
    let fd = process.as_raw_fd();
    // SAFETY: no signal information is passed.
    let done = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, libc::SIGKILL, none, 0) };
    match done {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            error => Err(error),
        },
    }
}

/// Creates a memfd of `bytes` bytes, whose size is sealed.
pub fn sealed_memory(bytes: usize) -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string; this function owns the returned descriptor.
    let file = unsafe {
        match libc::memfd_create(c"granary-assist".as_ptr(), flags) {
            -1 => return Err(io::Error::last_os_error()),
            file => OwnedFd::from_raw_fd(file),
        }
    };
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    // SAFETY: plain system calls on a descriptor of this function.
    let done = unsafe {
        libc::ftruncate(file.as_raw_fd(), bytes as i64) == 0
            && libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) == 0
    };
    if done { Ok(file) } else { Err(io::Error::last_os_error()) }
}

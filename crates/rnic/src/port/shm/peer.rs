//! Identity of the process at the other end of a Unix socket.

use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// `getsockopt` level `SOL_SOCKET`: a pidfd of the peer (Linux 6.5).
const SO_PEERPIDFD: i32 = 77;
/// `f_type` of the file system of pidfds (Linux 6.9), in which each process has its own inode
/// number.
const PID_FS_MAGIC: u64 = 0x5049_4446;

/// Identity of a process that has connected over a Unix socket, as reported by the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Peer {
    /// Its process id in the PID namespace of this process.
    Process(i32),
    /// The inode number of its pidfd, for a process without a process id in this PID namespace.
    Outside(u64),
    /// Its user id, if the kernel reports nothing more specific. Stands for all processes of that
    /// user outside this PID namespace.
    User(u32),
}

impl Peer {
    /// The peer of a connected Unix socket at the time of the connection.
    pub fn of(socket: impl AsFd) -> Self {
        let unknown = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let peer = option(&socket, libc::SO_PEERCRED, unknown).unwrap_or(unknown);
        match peer.pid {
            // The kernel reports 0 for a peer outside this PID namespace.
            0 => inode(socket).map_or(Self::User(peer.uid), Self::Outside),
            pid => Self::Process(pid),
        }
    }
}

/// The user id of the peer of a connected Unix socket, or `None` if the kernel does not report it.
pub fn user(socket: impl AsFd) -> Option<u32> {
    let unknown = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    option(socket, libc::SO_PEERCRED, unknown).map(|peer| peer.uid)
}

/// The inode number of the peer's pidfd, on kernels where it is unique for each process.
fn inode(socket: impl AsFd) -> Option<u64> {
    let fd = option(&socket, SO_PEERPIDFD, -1).filter(|fd: &i32| *fd >= 0)?;
    // SAFETY: the kernel has just opened this descriptor for this call, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let kind = rustix::fs::fstatfs(&fd).ok()?.f_type;
    (kind as u64 == PID_FS_MAGIC).then_some(rustix::fs::fstat(&fd).ok()?.st_ino)
}

/// Plain data: any bytes are a valid value.
trait Plain: Copy {}
impl Plain for i32 {}
impl Plain for libc::ucred {}

/// Reads a socket option. Not by `rustix`, whose type for peer credentials cannot represent a peer
/// without a process id.
fn option<T: Plain>(socket: impl AsFd, name: i32, mut value: T) -> Option<T> {
    let mut len = size_of::<T>() as libc::socklen_t;
    let (fd, at) = (socket.as_fd().as_raw_fd(), (&raw mut value).cast());
    // SAFETY: `at` has room for `len` bytes, and any bytes are a `T`, which is `Plain`.
    let done = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, at, &mut len) };
    (done == 0 && len as usize == size_of::<T>()).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn peer_is_identified_by_its_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        assert_eq!(Peer::of(&a), Peer::Process(std::process::id() as i32));
        assert_eq!(user(&a), Some(rustix::process::getuid().as_raw()));
        assert_eq!(user(std::fs::File::open("/dev/null").unwrap()), None);
        assert_eq!(Peer::of(std::fs::File::open("/dev/null").unwrap()), Peer::User(u32::MAX));
    }

    #[test]
    fn pidfd_inode_names_its_process() {
        let (a, b) = UnixStream::pair().unwrap();
        // Both ends belong to this process.
        assert_eq!(inode(&a), inode(&b));
    }

    /// Both ends belong to this process, so both peers have the inode of its own pidfd.
    #[test]
    fn peer_inode_is_the_inode_of_its_pidfd() {
        let (a, b) = UnixStream::pair().unwrap();
        let of_peer = option(&a, SO_PEERPIDFD, -1).is_some_and(|fd: i32| {
            // SAFETY: the kernel has just opened this descriptor for this call.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
            true
        });
        let (own, flags) = (rustix::process::getpid(), rustix::process::PidfdFlags::empty());
        let fd = rustix::process::pidfd_open(own, flags).unwrap();
        let on_pidfs = rustix::fs::fstatfs(&fd).unwrap().f_type as u64 == PID_FS_MAGIC;
        let expected = (of_peer && on_pidfs).then(|| rustix::fs::fstat(&fd).unwrap().st_ino);
        assert_eq!((inode(&a), inode(&b)), (expected, expected));
        assert_eq!(inode(std::fs::File::open("/dev/null").unwrap()), None);
    }
}

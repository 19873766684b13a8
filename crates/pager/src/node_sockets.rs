//! Access to the sockets of memory nodes, and to userfaultfd, for a forked child that has changed
//! its user.
//!
//! A server that root starts drops root's rights in its workers (nginx, Apache, php-fpm). Such a
//! worker needs a connection of its own once it needs memory of its own. It may no longer have
//! permission to enter the directory of the private memory node's socket, and after chroot(2) the
//! path does not exist. So a pager opens the sockets with `O_PATH` at the start, and forked
//! children inherit the descriptors.
//!
//! Where the kernel does not report forks, such a worker also needs the userfaultfd device, which
//! it may no longer open. There a pager of root keeps the device open too. A pager of any other
//! user does not: its children open the device by their own rights, which may have been withdrawn.

use std::ffi::{CString, OsStr};
use std::fs::OpenOptions;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use pool::Address;

use crate::{descriptor, uffd};

/// Descriptors of the sockets of memory nodes and NICs, and of the userfaultfd device, in the
/// program's descriptor table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sockets(Vec<(PathBuf, RawFd)>);

impl Sockets {
    /// Opens the sockets that `pool` names, and the device if forked children open userfaultfds
    /// (`children_open`) and the process is root's. A path that cannot be opened is left out,
    /// because the later attempt to use it reports the error.
    pub fn open(pool: &str, children_open: bool) -> Self {
        let mut sockets = Vec::new();
        for mut address in Address::list(pool).unwrap_or_default() {
            let Some(path) = socket_of(&mut address) else { continue };
            let opened = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&*path);
            if let Ok(opened) = opened.and_then(|file| descriptor::move_high(file.as_raw_fd())) {
                // The descriptor stays open until the process ends.
                sockets.push((path.clone(), ManuallyDrop::new(opened).as_raw_fd()));
            }
        }
        // SAFETY: a plain system call.
        if children_open && unsafe { libc::geteuid() } == 0 {
            let device = Path::new(OsStr::from_bytes(uffd::DEVICE_PATH.to_bytes()));
            let opened = OpenOptions::new().read(true).write(true).open(device);
            if let Ok(opened) = opened.and_then(|file| descriptor::move_high(file.as_raw_fd())) {
                let kept = ManuallyDrop::new(opened).as_raw_fd();
                uffd::keep_device(kept);
                sockets.push((device.to_path_buf(), kept));
            }
        }
        Self(sockets)
    }

    /// Returns the descriptors.
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.0.iter().map(|&(_, fd)| fd).collect()
    }

    /// Rewrites the list of memory nodes so that the calling thread can connect to each. A path
    /// that the thread's user may not use is replaced by the descriptor's path in `/proc`.
    ///
    /// The thread's descriptor table must contain the sockets.
    pub fn reachable_list(&self, pool: &str) -> String {
        let Ok(mut addresses) = Address::list(pool) else { return pool.to_owned() };
        for path in addresses.iter_mut().filter_map(socket_of) {
            let opened = self.0.iter().find(|(name, _)| name == path);
            if let Some((_, fd)) = opened.filter(|_| !may_connect(path)) {
                *path = format!("/proc/thread-self/fd/{fd}").into();
            }
        }
        Address::write_list(&addresses)
    }
}

/// Returns true if the effective user of the calling thread may connect to the socket at `path`.
fn may_connect(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: a C string.
    unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::W_OK, libc::AT_EACCESS) == 0 }
}

/// Returns the path of the local socket through which `address` is reached, if there is one.
fn socket_of(address: &mut Address) -> Option<&mut PathBuf> {
    match address {
        Address::Shm(path) => Some(path),
        Address::Roce(remote) => remote.nic.as_mut().map(|nic| &mut nic.socket),
    }
}

//! The way to the sockets of memory nodes for a forked child that has changed its user since.
//!
//! Servers that root starts give up root's rights in their workers (nginx, Apache, php-fpm). Such a
//! worker, once it needs memory of its own, may no longer enter the directory of the private memory
//! node's socket, and in another root directory there is none. So a pager holds the sockets by
//! descriptor (`O_PATH`), which its forked children have, too.

use std::ffi::CString;
use std::fs::OpenOptions;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use pool::Address;

use crate::descriptor;

/// The sockets of memory nodes, and of NICs, in the program's descriptor table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sockets(Vec<(PathBuf, RawFd)>);

impl Sockets {
    /// Opens the sockets that `pool` names. A socket that cannot be opened is left out: the error of
    /// connecting to it says why.
    pub fn of(pool: &str) -> Self {
        let mut all = Vec::new();
        for mut address in Address::list(pool).unwrap_or_default() {
            let Some(path) = socket_of(&mut address) else { continue };
            let held = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&*path);
            if let Ok(held) = held.and_then(|file| descriptor::move_high(file.as_raw_fd())) {
                // It stays open as long as the process.
                all.push((path.clone(), ManuallyDrop::new(held).as_raw_fd()));
            }
        }
        Self(all)
    }

    /// The descriptors.
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.0.iter().map(|&(_, fd)| fd).collect()
    }

    /// Rewrites the list of memory nodes so that the calling thread can connect to each.
    ///
    /// The thread's descriptor table must have the sockets.
    pub fn within_reach(&self, pool: &str) -> String {
        let Ok(mut addresses) = Address::list(pool) else { return pool.to_owned() };
        for path in addresses.iter_mut().filter_map(socket_of) {
            let held = self.0.iter().find(|(name, _)| name == path);
            if let Some((_, fd)) = held.filter(|_| !may_connect(path)) {
                *path = format!("/proc/thread-self/fd/{fd}").into();
            }
        }
        Address::write_list(&addresses)
    }
}

/// True if the calling thread's user may connect to the socket at `path`.
fn may_connect(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: a C string.
    unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::W_OK, libc::AT_EACCESS) == 0 }
}

/// The socket of this host by which a memory node is reached.
fn socket_of(address: &mut Address) -> Option<&mut PathBuf> {
    match address {
        Address::Shm(path) => Some(path),
        Address::Roce(remote) => remote.nic.as_mut().map(|nic| &mut nic.socket),
    }
}

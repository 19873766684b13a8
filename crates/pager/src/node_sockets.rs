//! Access to the sockets of memory nodes, and to userfaultfd, for processes that have changed their
//! user.
//!
//! A server that root starts drops root's rights in its workers (nginx, Apache, php-fpm). Such a
//! worker needs a connection of its own once it needs memory of its own. It may no longer have
//! permission to enter the directory of the private memory node's socket, and after chroot(2) the
//! path does not exist. So a pager opens the sockets with `O_PATH` at the start, and forked
//! children inherit the descriptors.
//!
//! Such a worker also needs the userfaultfd device, which it may no longer open. So a pager of root
//! keeps the device open too. A pager of any other user does not: its children open the device by
//! their own rights, which may have been withdrawn.
//!
//! A process that has changed its user, and then calls exec (`setpriv`, `su`), hands these
//! descriptors on to the new program: they stay open over the call, and [`VARIABLE`] names them.
//! The new program uses a descriptor only where its user may not use the path, and only if the
//! descriptor is of the right type. All descriptors are close-on-exec at other times.

use std::ffi::{CStr, CString, OsStr};
use std::fs::OpenOptions;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use pool::Address;

use crate::{Error, descriptor, uffd};

/// Variable that names the descriptors that a process was handed: `INDEX:FD` for the socket of each
/// address in the list of memory nodes, and `device:FD`, separated by commas.
pub const VARIABLE: &str = "GRANARY_DESCRIPTORS";
/// Key of the userfaultfd device.
const DEVICE: &str = "device";
/// Major number of the kernel's miscellaneous devices, of which userfaultfd is one.
const MISC_MAJOR: u32 = 10;

/// A socket of a memory node or NIC.
#[derive(Clone, Debug)]
struct Socket {
    /// Place of the address in the list of memory nodes.
    index: usize,
    path: CString,
    fd: RawFd,
}

/// Descriptors of the sockets of memory nodes and NICs, and of the userfaultfd device, in the
/// program's descriptor table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sockets {
    sockets: Vec<Socket>,
    device: Option<RawFd>,
    /// Some of the descriptors were handed to this process.
    was_handed: bool,
    /// Effective user that opened them.
    user: u32,
    /// The variable that names the descriptors.
    entry: CString,
}

impl Sockets {
    /// Opens the sockets that `pool` names, and the device if the process is root's. Where the
    /// process may not open them, those that it was `handed` take their place. A path that cannot
    /// be opened is left out, because the later attempt to use it reports the error.
    pub fn open(pool: &str, handed: Option<&str>) -> Self {
        // SAFETY: a plain system call.
        let user = unsafe { libc::geteuid() };
        let mut opened = Self { user, ..Self::default() };
        for (index, mut address) in Address::list(pool).unwrap_or_default().into_iter().enumerate()
        {
            let Some(path) = socket_of(&mut address) else { continue };
            let Ok(name) = CString::new(path.as_os_str().as_bytes()) else { continue };
            let by_path = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&*path);
            let own = by_path.and_then(|file| descriptor::move_high(file.as_raw_fd()));
            let fd = opened.take(own, handed_of(handed, &index.to_string()), check_socket);
            opened.sockets.extend(fd.map(|fd| Socket { index, path: name, fd }));
        }
        let device = Path::new(OsStr::from_bytes(uffd::DEVICE_PATH.to_bytes()));
        let own = match user {
            0 => OpenOptions::new().read(true).write(true).open(device),
            _ => Err(std::io::ErrorKind::PermissionDenied.into()),
        };
        let own = own.and_then(|file| descriptor::move_high(file.as_raw_fd()));
        opened.device = opened.take(own, handed_of(handed, DEVICE), check_device);
        opened.device.into_iter().for_each(uffd::keep_device);
        let mut parts: Vec<String> =
            opened.sockets.iter().map(|socket| format!("{}:{}", socket.index, socket.fd)).collect();
        parts.extend(opened.device.map(|fd| format!("{DEVICE}:{fd}")));
        opened.entry = CString::new(format!("{VARIABLE}={}", parts.join(","))).unwrap_or_default();
        opened
    }

    /// Returns the descriptor that this process has opened itself, or else the one that it was
    /// handed. The descriptor stays open until the process ends.
    fn take(
        &mut self,
        own: std::io::Result<OwnedFd>,
        handed: Option<RawFd>,
        check: fn(RawFd) -> Result<(), &'static str>,
    ) -> Option<RawFd> {
        let handed = handed.filter(|&fd| check(fd).is_ok());
        match own {
            Ok(own) => {
                handed.into_iter().for_each(descriptor::close);
                Some(ManuallyDrop::new(own).as_raw_fd())
            }
            Err(_) => {
                let fd = handed.filter(|&fd| descriptor::adopt(fd))?;
                self.was_handed = true;
                Some(fd)
            }
        }
    }

    /// Returns the descriptors.
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.all().collect()
    }

    fn all(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.sockets.iter().map(|socket| socket.fd).chain(self.device)
    }

    /// Rewrites the list of memory nodes so that the calling thread can connect to each. A path
    /// that the thread's user may not use is replaced by the descriptor's path in `/proc`.
    ///
    /// The thread's descriptor table must contain the sockets.
    pub fn reachable_list(&self, pool: &str) -> String {
        let fd_of = |index| self.sockets.iter().find(|socket| socket.index == index);
        let replaced = replace_unreachable(pool, |index| Ok(fd_of(index).map(|socket| socket.fd)));
        replaced.unwrap_or_else(|_| pool.to_owned())
    }

    /// Returns the descriptors that a program needs which the calling thread executes, because the
    /// thread's user may not open them. `None` if the program needs none. Does not allocate.
    pub fn to_hand_on(&self) -> Option<HandedOn<'_>> {
        // SAFETY: a plain system call.
        let is_changed = || unsafe { libc::geteuid() } != self.user;
        let is_out_of_reach = || self.sockets.iter().any(|socket| !may_connect(&socket.path));
        let is_needed = self.was_handed || is_changed() || is_out_of_reach();
        (is_needed && self.all().next().is_some()).then_some(HandedOn(self))
    }
}

/// Descriptors that a program needs which the calling thread executes.
#[derive(Clone, Copy, Debug)]
pub struct HandedOn<'a>(&'a Sockets);

impl<'a> HandedOn<'a> {
    /// The entry of the program's environment that names them.
    pub fn entry(self) -> &'a CStr {
        &self.0.entry
    }

    /// The descriptors.
    pub fn descriptors(self) -> impl Iterator<Item = RawFd> + 'a {
        self.0.all()
    }
}

/// Rewrites the list of memory nodes for a program that was `handed` descriptors: as
/// [`Sockets::reachable_list`].
///
/// # Errors
/// [`Error::Setting`] if a descriptor takes the place of a path, and is not a socket's.
pub(crate) fn reachable_list(pool: &str, handed: &str) -> Result<String, Error> {
    replace_unreachable(pool, |index| {
        let Some(fd) = handed_of(Some(handed), &index.to_string()) else { return Ok(None) };
        match check_socket(fd) {
            Ok(()) => Ok(Some(fd)),
            Err(why) => Err(Error::Setting {
                name: VARIABLE,
                value: handed.into(),
                why: format!(
                    "descriptor {fd} {why}; it leads to the memory node, whose socket this \
                     process's user may not use by its path, and must stay open in a program that \
                     changes its user and then starts another one"
                ),
            }),
        }
    })
}

fn replace_unreachable(
    pool: &str,
    fd_of: impl Fn(usize) -> Result<Option<RawFd>, Error>,
) -> Result<String, Error> {
    let Ok(mut addresses) = Address::list(pool) else { return Ok(pool.to_owned()) };
    for (index, address) in addresses.iter_mut().enumerate() {
        let Some(path) = socket_of(address) else { continue };
        let name = CString::new(path.as_os_str().as_bytes());
        if name.is_ok_and(|name| !may_connect(&name))
            && let Some(fd) = fd_of(index)?
        {
            *path = format!("/proc/thread-self/fd/{fd}").into();
        }
    }
    Ok(Address::write_list(&addresses))
}

/// Returns the descriptor with a key in a value of [`VARIABLE`].
fn handed_of(handed: Option<&str>, key: &str) -> Option<RawFd> {
    let mut parts = handed?.split(',').filter_map(|part| part.split_once(':'));
    let fd: RawFd = parts.find(|(name, _)| *name == key)?.1.parse().ok()?;
    // The standard descriptors are the program's.
    (fd > 2).then_some(fd)
}

/// Returns the flags and the state of a descriptor.
fn state_of(fd: RawFd) -> Result<(i32, libc::stat), &'static str> {
    // SAFETY: queries, which fail on a number that is not open; all zeros is a value of `stat`.
    unsafe {
        let mut found: libc::stat = std::mem::zeroed();
        match libc::fcntl(fd, libc::F_GETFL) {
            flags if flags >= 0 && libc::fstat(fd, &mut found) == 0 => Ok((flags, found)),
            _ => Err("is not open any more"),
        }
    }
}

/// Checks that a descriptor is one of a socket's path.
fn check_socket(fd: RawFd) -> Result<(), &'static str> {
    let (flags, found) = state_of(fd)?;
    let is_socket = found.st_mode & libc::S_IFMT == libc::S_IFSOCK;
    if is_socket && flags & libc::O_PATH != 0 {
        Ok(())
    } else {
        Err("is not that of a socket's path")
    }
}

/// Checks that a descriptor is one of the userfaultfd device.
fn check_device(fd: RawFd) -> Result<(), &'static str> {
    let (flags, found) = state_of(fd)?;
    let is_device = found.st_mode & libc::S_IFMT == libc::S_IFCHR
        && libc::major(found.st_rdev) == MISC_MAJOR
        && flags & libc::O_ACCMODE == libc::O_RDWR;
    let link = std::fs::read_link(format!("/proc/thread-self/fd/{fd}"));
    let is_named = link.is_ok_and(|link| link.file_name() == Some(OsStr::new("userfaultfd")));
    if is_device && is_named { Ok(()) } else { Err("is not that of the userfaultfd device") }
}

/// Returns true if the effective user of the calling thread may connect to the socket at `path`.
fn may_connect(path: &CStr) -> bool {
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

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_descriptors_of_the_right_type_take_the_place_of_a_path() {
        let directory = std::env::temp_dir().join(format!("granary-handed-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("pool.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let by_path = |path: &Path| {
            OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path).unwrap()
        };
        let socket = by_path(&path);
        let [null, directory_fd] = [File::open("/dev/null").unwrap(), by_path(&directory)];
        let closed = 900_000;
        let gone = directory.join("gone.sock");
        let pool = format!("shm:{}", gone.display());
        let list = |fd: RawFd| reachable_list(&pool, &format!("device:5,0:{fd}"));
        let fd = socket.as_raw_fd();
        assert_eq!(list(fd).unwrap(), format!("shm:/proc/thread-self/fd/{fd}"));
        for (fd, why) in [
            (listener.as_raw_fd(), "not that of a socket's path"),
            (null.as_raw_fd(), "not that of a socket's path"),
            (directory_fd.as_raw_fd(), "not that of a socket's path"),
            (closed, "not open"),
        ] {
            let error = list(fd).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(VARIABLE), "{error}");
        }
        // A path that the user may use needs no descriptor.
        let reachable = format!("shm:{}", path.display());
        assert_eq!(reachable_list(&reachable, "0:900000").unwrap(), reachable);
        assert!(Sockets::open(&pool, Some("0:900000")).sockets.is_empty());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn standard_descriptors_and_other_texts_name_nothing() {
        assert_eq!(handed_of(Some("0:7,1:8,device:9"), "1"), Some(8));
        assert_eq!(handed_of(Some("0:7,1:8,device:9"), DEVICE), Some(9));
        for text in ["", "0", "0:", "0:x", "0:-1", "0:2", "7", "0:99999999999999"] {
            assert_eq!(handed_of(Some(text), "0"), None, "{text}");
        }
        assert_eq!(handed_of(None, "0"), None);
        let null = File::open("/dev/null").unwrap();
        assert!(check_device(null.as_raw_fd()).is_err());
    }
}

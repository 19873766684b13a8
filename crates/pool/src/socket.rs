//! The control socket: listening, connecting, and the packets of this socket.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

pub use rnic::port::shm::Peer;
pub use rnic::port::shm::peer::user;
pub use rnic::port::shm::protocol::{DESCRIPTORS_MAX, MESSAGE_MAX};
pub use rnic::port::shm::socket::{Packet, PeerSocket, close_deferred, receive, send};

use crate::Error;

/// Path at which a memory node listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A socket at this path. A stale socket file is replaced; a served one is an error.
    At(PathBuf),
    /// A socket in a new directory that only this user can enter. The directory is removed at the
    /// end.
    Fresh,
}

/// A listening socket; its file is removed when dropped.
pub struct Listener {
    fd: OwnedFd,
    path: PathBuf,
    inode: (u64, u64),
    fresh: bool,
}

impl Listener {
    /// Listens at `endpoint`. The socket file has mode 0600. In a new directory, which only this
    /// user can enter, it has mode 0666, so that a process that reaches it by a descriptor and has
    /// changed its user ID since can still connect.
    pub fn bind(endpoint: &Endpoint) -> Result<Self, Error> {
        let (path, fresh) = match endpoint {
            Endpoint::At(path) => (path.clone(), false),
            Endpoint::Fresh => (fresh_directory()?.join("pool.sock"), true),
        };
        match Self::bind_at(&path, fresh) {
            Ok(listener) => Ok(listener),
            Err(e) => {
                if let (true, Some(dir)) = (fresh, path.parent()) {
                    let _ = fs::remove_dir_all(dir);
                }
                Err(e)
            }
        }
    }

    fn bind_at(path: &Path, fresh: bool) -> Result<Self, Error> {
        let attempt = || format!("listening at {}", path.display());
        refuse_served(path)?;
        // The socket has a temporary name until its mode is set, so that no process can connect
        // before that. The rename also replaces a stale socket atomically.
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}", std::process::id()));
        let draft = path.with_file_name(name);
        let _ = fs::remove_file(&draft);
        let addr = address(&draft)?;
        let fd = seqpacket()?;
        rustix::net::bind(&fd, &addr).map_err(|e| system(attempt(), e))?;
        let mode = if fresh { 0o666 } else { 0o600 };
        let ready = fs::set_permissions(&draft, fs::Permissions::from_mode(mode))
            .and_then(|()| rustix::net::listen(&fd, 64).map_err(Into::into))
            .and_then(|()| fs::rename(&draft, path))
            .and_then(|()| fs::symlink_metadata(path));
        match ready {
            Ok(meta) => {
                let inode = (meta.dev(), meta.ino());
                Ok(Self { fd, path: path.to_path_buf(), inode, fresh })
            }
            Err(source) => {
                let _ = fs::remove_file(&draft);
                Err(Error::System { attempt: attempt(), source })
            }
        }
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts the next connection, in non-blocking mode; `None` if none is pending.
    pub fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.fd, flags) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::WOULDBLOCK | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|meta| (meta.dev(), meta.ino()) == self.inode);
        if ours {
            let _ = fs::remove_file(&self.path);
        }
        if let (true, Some(dir)) = (self.fresh, self.path.parent()) {
            let _ = fs::remove_dir(dir);
        }
    }
}

/// Fails if a file at `path` must not be replaced.
fn refuse_served(path: &Path) -> Result<(), Error> {
    let refuse = |why: &str| {
        Err(Error::Refused {
            attempt: format!("listening at {}", path.display()),
            why: why.to_string(),
        })
    };
    match fs::symlink_metadata(path) {
        Err(_) => Ok(()),
        Ok(meta) if !meta.file_type().is_socket() => {
            refuse("the path exists and is not a socket; remove it or choose another path")
        }
        Ok(_) => match rustix::net::connect(&seqpacket()?, &address(path)?) {
            Ok(()) | Err(Errno::AGAIN) => refuse(
                "another process serves it already; stop that process or choose another path",
            ),
            Err(_) => Ok(()),
        },
    }
}

fn fresh_directory() -> Result<PathBuf, Error> {
    let base = std::env::var_os("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|p| p.is_dir())
        .unwrap_or_else(std::env::temp_dir);
    let mut last = None;
    for _ in 0..16 {
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.subsec_nanos());
        let dir = base.join(format!("granary-{}-{nanos:08x}", std::process::id()));
        match fs::DirBuilder::new().mode(0o700).create(&dir) {
            Ok(()) => return Ok(dir),
            Err(e) => last = Some(e),
        }
    }
    Err(Error::System {
        attempt: format!("creating a directory for the socket in {}", base.display()),
        source: last.unwrap_or_else(|| Errno::EXIST.into()),
    })
}

/// Time limit of a connection, and of a packet, to a process whose queue is full.
const ROOM: Duration = Duration::from_secs(30);

/// Connects to the socket at `path`, in blocking mode. A process that is stopped accepts neither
/// connections nor packets when its queue is full: connecting and sending then fail with EAGAIN
/// after 30 s.
pub fn connect(path: &Path) -> Result<OwnedFd, Error> {
    connect_within(path, ROOM)
}

/// Like [`connect`], with another time limit.
pub fn connect_within(path: &Path, limit: Duration) -> Result<OwnedFd, Error> {
    let attempt = format!("connecting to the memory node at {}", path.display());
    let addr = address(path)?;
    let flags = SocketFlags::CLOEXEC;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|e| system(attempt.clone(), e))?;
    sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, Some(limit))
        .map_err(|e| system(attempt.clone(), e))?;
    match rustix::net::connect(&fd, &addr) {
        Ok(()) => Ok(fd),
        Err(Errno::AGAIN) => Err(Error::Unanswered {
            attempt,
            why: format!(
                "it has not accepted the connection for {} s: its process is stopped; continue it, \
                 and try again",
                limit.as_secs_f64()
            ),
        }),
        Err(errno) => Err(Error::Unreachable { attempt, why: unreachable_because(path, errno) }),
    }
}

/// The reason why no connection to the socket at `path` was made, and the next step.
fn unreachable_because(path: &Path, errno: Errno) -> String {
    let is_socket = fs::metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    let (why, next) = match errno {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP => ("there is no such file", START),
        Errno::CONNREFUSED if is_socket => ("no process listens there (any more)", START),
        Errno::CONNREFUSED => ("the file is not a socket", START),
        Errno::PROTOTYPE => ("the socket is of another kind, not a memory node's", START),
        Errno::ACCESS | Errno::PERM => (
            "this user may not connect",
            "run the command as the user of the memory node, or start another one with `granary \
             serve --socket PATH`",
        ),
        _ => return format!("{errno}; {START}"),
    };
    format!("{why} ({errno}); {next}")
}

const START: &str = "give the path of a running memory node's socket, or start one with `granary \
                     serve --socket PATH`";

fn seqpacket() -> Result<OwnedFd, Error> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|e| system("creating a Unix socket".into(), e))
}

fn address(path: &Path) -> Result<SocketAddrUnix, Error> {
    SocketAddrUnix::new(path).map_err(|_| Error::Setting {
        setting: "path",
        value: path.display().to_string(),
        why: "a Unix socket path has at most 107 bytes and no zero byte".into(),
    })
}

fn system(attempt: String, errno: Errno) -> Error {
    Error::System { attempt, source: errno.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_socket_directory_is_private_and_removed_on_drop() {
        let listener = Listener::bind(&Endpoint::Fresh).unwrap();
        let path = listener.path().to_path_buf();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        let dir = path.parent().unwrap().to_path_buf();
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        drop(listener);
        assert!(!dir.exists());
    }

    #[test]
    fn stale_socket_is_replaced_and_served_one_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool.sock");
        let at = Endpoint::At(path.clone());
        let first = Listener::bind(&at).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let e = Listener::bind(&at).err().unwrap().to_string();
        assert!(e.contains("serves it already"), "{e}");
        // As if its process had been killed: the file remains and no process listens.
        let stale = fs::hard_link(&path, dir.path().join("kept"));
        stale.unwrap();
        drop(first);
        fs::rename(dir.path().join("kept"), &path).unwrap();
        let second = Listener::bind(&at).unwrap();
        let _client = connect(&path).unwrap();
        assert!(second.accept().unwrap().is_some());
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn file_that_is_not_a_socket_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes");
        fs::write(&path, "mine").unwrap();
        let e = Listener::bind(&Endpoint::At(path.clone())).err().unwrap().to_string();
        assert!(e.contains("not a socket"), "{e}");
        assert_eq!(fs::read(&path).unwrap(), b"mine");
        let long = dir.path().join("x".repeat(200));
        assert!(matches!(Listener::bind(&Endpoint::At(long)), Err(Error::Setting { .. })));
    }

    #[test]
    fn connect_error_names_the_path_the_cause_and_the_next_step() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("notes"), "mine").unwrap();
        drop(std::os::unix::net::UnixListener::bind(at("left")).unwrap());
        let _stream = std::os::unix::net::UnixListener::bind(at("stream")).unwrap();
        std::os::unix::fs::symlink(at("loop"), at("loop")).unwrap();
        for (name, cause) in [
            ("none", "no such file"),
            ("none/below", "no such file"),
            ("notes/below", "no such file"),
            ("loop", "no such file"),
            ("notes", "not a socket"),
            (".", "not a socket"),
            ("left", "no process listens there"),
            ("stream", "of another kind"),
        ] {
            let error = connect(&at(name)).err().unwrap();
            assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
            let text = error.to_string();
            let begin = format!("connecting to the memory node at {}: ", at(name).display());
            assert!(text.starts_with(&begin), "{text}");
            assert!(text.contains(cause) && text.contains("granary serve --socket"), "{text}");
            assert!(!text.contains("lost") && !text.contains("gone"), "{text}");
        }
        let refused = unreachable_because(&at("left"), Errno::ACCESS);
        assert!(refused.contains("user may not connect"), "{refused}");
    }
}

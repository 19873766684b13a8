//! Files that a user names, or that lie in a directory in which other users can create files.
//!
//! A FIFO blocks the process that opens it until another process opens the other end, a device may
//! do anything, and a link of another user leads to any file. So these functions open a name
//! without waiting, and compare the type of the file before they read or write.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

/// Neither waits for the other end of a FIFO, nor makes a terminal that of this process.
const AT_ONCE: OFlags = OFlags::NONBLOCK.union(OFlags::NOCTTY);

/// Opens a regular file for reading. Follows links.
///
/// # Errors
/// The file cannot be opened, or is a directory, a FIFO, a socket or a device.
pub fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let opened = options.read(true).custom_flags(AT_ONCE.bits() as i32).open(path);
    let file = opened.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::NXIO) => irregular("a socket or a device"),
        _ => error,
    })?;
    match kind(file.metadata()?.file_type()) {
        None => Ok(file),
        Some(kind) => Err(irregular(kind)),
    }
}

/// Reads a whole regular file.
///
/// # Errors
/// As [`open`], or the file cannot be read.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a whole regular file, which must be UTF-8.
///
/// # Errors
/// As [`read`], or the file is not UTF-8.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    open(path)?.read_to_string(&mut text)?;
    Ok(text)
}

/// Creates or empties a file for results. A device, and a FIFO that a process reads, are possible:
/// `/dev/stdout` is one.
///
/// # Errors
/// The file cannot be opened for writing, or is a FIFO that no process reads.
pub fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(true);
    let opened = options.custom_flags(AT_ONCE.bits() as i32).open(path);
    let file = opened.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::NXIO) => {
            io::Error::new(io::ErrorKind::InvalidInput, "a FIFO that no process reads, or a socket")
        }
        _ => error,
    })?;
    if !file.metadata()?.is_file() {
        let flags = rustix::fs::fcntl_getfl(&file)?;
        rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    }
    Ok(file)
}

/// Writes a whole file for results.
///
/// # Errors
/// As [`create`], or the bytes cannot be written.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    create(path)?.write_all(bytes)
}

/// Creates a file of a predictable name that replaces another one in the end. A file that was left
/// behind under this name is removed first, and a link is not followed.
///
/// # Errors
/// The name belongs to another user or to a directory, or the file cannot be created.
pub fn create_draft(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().write(true).create_new(true).open(path)
}

/// Opens a regular file for reading and writing, and with `create` one of this process's user.
/// Follows no link.
///
/// For a predictable name, which another user can create first in a shared directory. Without
/// `create` the owner may be another user, to which a process of a run has changed.
///
/// # Errors
/// The file cannot be opened, or is no such file.
pub fn open_own(path: &Path, create: bool) -> io::Result<File> {
    let foreign = || {
        let why = "not a regular file of this user: remove it, or name another file";
        io::Error::new(io::ErrorKind::PermissionDenied, why)
    };
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(create);
    let opened = options.custom_flags((AT_ONCE | OFlags::NOFOLLOW).bits() as i32).open(path);
    let file = opened.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::LOOP | Errno::NXIO | Errno::ISDIR) => foreign(),
        _ => error,
    })?;
    let found = file.metadata()?;
    let is_own = found.uid() == rustix::process::geteuid().as_raw();
    if found.is_file() && (is_own || !create) { Ok(file) } else { Err(foreign()) }
}

/// Returns the name of a type of file that is not regular.
fn kind(found: FileType) -> Option<&'static str> {
    match found {
        found if found.is_file() => None,
        found if found.is_dir() => Some("a directory"),
        found if found.is_fifo() => Some("a FIFO"),
        _ => Some("a socket or a device"),
    }
}

fn irregular(kind: &str) -> io::Error {
    let why = format!("{kind}, and not a regular file: name a regular file");
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use rustix::fs::{CWD, FileType as Type, Mode, mknodat};

    use super::*;

    /// A directory, removed at the end.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let name = format!("granary-files-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::create_dir(&path).unwrap();
            Self(path)
        }

        fn fifo(&self) -> PathBuf {
            let path = self.0.join("fifo");
            mknodat(CWD, &path, Type::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
            path
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn only_regular_files_are_read() {
        let scratch = Scratch::new("read");
        let (file, link) = (scratch.0.join("file"), scratch.0.join("link"));
        write(&file, b"text").unwrap();
        symlink(&file, &link).unwrap();
        assert_eq!(read(&file).unwrap(), b"text");
        assert_eq!(read_to_string(&link).unwrap(), "text");
        let socket = scratch.0.join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        for (path, kind) in [
            (scratch.0.clone(), "a directory"),
            (scratch.fifo(), "a FIFO"),
            (socket, "a socket"),
            ("/dev/zero".into(), "a device"),
        ] {
            let why = open(&path).unwrap_err().to_string();
            assert!(why.contains(kind) && why.contains("name a regular file"), "{why}");
        }
        assert_eq!(open(&scratch.0.join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn results_go_to_files_devices_and_read_fifos() {
        let scratch = Scratch::new("write");
        let fifo = scratch.fifo();
        let why = write(&fifo, b"text").unwrap_err().to_string();
        assert!(why.contains("no process reads"), "{why}");
        let reader = OpenOptions::new().read(true).custom_flags(AT_ONCE.bits() as i32).open(&fifo);
        let mut reader = reader.unwrap();
        let mut file = create(&fifo).unwrap();
        assert!(!rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
        file.write_all(b"text").unwrap();
        drop(file);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
        write(Path::new("/dev/null"), b"text").unwrap();
        assert!(create(&scratch.0).is_err(), "a directory");
    }

    #[test]
    fn drafts_replace_links_and_fifos() {
        let scratch = Scratch::new("draft");
        let (victim, link) = (scratch.0.join("victim"), scratch.0.join("link"));
        std::fs::write(&victim, "content").unwrap();
        symlink(&victim, &link).unwrap();
        for path in [link, scratch.fifo()] {
            create_draft(&path).unwrap().write_all(b"draft").unwrap();
            assert_eq!(read(&path).unwrap(), b"draft");
            create_draft(&path).unwrap();
            assert_eq!(read(&path).unwrap(), b"");
        }
        assert_eq!(read(&victim).unwrap(), b"content");
        assert!(create_draft(&scratch.0).is_err(), "a directory");
    }

    #[test]
    fn links_fifos_and_files_of_others_are_not_own() {
        let scratch = Scratch::new("own");
        let (victim, link) = (scratch.0.join("victim"), scratch.0.join("link"));
        std::fs::write(&victim, "content").unwrap();
        symlink(&victim, &link).unwrap();
        for path in [link, scratch.fifo(), scratch.0.clone()] {
            for create in [true, false] {
                let why = open_own(&path, create).unwrap_err().to_string();
                assert!(why.starts_with("not a regular file of this user: "), "{path:?}: {why}");
            }
        }
        open_own(&victim, true).unwrap();
        assert_eq!(read(&victim).unwrap(), b"content");
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&victim, Some(65_534), None).unwrap();
            let open_to_all = std::fs::Permissions::from_mode(0o666);
            std::fs::set_permissions(&victim, open_to_all).unwrap();
            assert!(open_own(&victim, true).is_err());
            open_own(&victim, false).unwrap();
        }
        let none = scratch.0.join("none");
        assert_eq!(open_own(&none, false).unwrap_err().kind(), io::ErrorKind::NotFound);
        open_own(&none, true).unwrap();
    }
}

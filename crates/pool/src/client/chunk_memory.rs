//! The chunks of a private memory node as files: reads and writes by the calling thread, without
//! the NIC.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::SealFlags;
use verbs::DmaMemory;

use super::control::until_admitted;
use crate::Error;
use crate::protocol::{self, ChunkPart, Numbered, Opening, Reply};
use crate::remote::link::CLOSED;
use crate::socket::{self, Packet, close_deferred};

/// Time limit for the memory node's answer.
const PATIENCE: Duration = Duration::from_secs(30);
const ATTEMPT: &str = "asking for the chunk memory";

/// The chunk memory of a private memory node, which belongs to one program only.
///
/// The memory node passes its chunk memory, a memfd, to processes of its own user. `pread` and
/// `pwrite` then move bytes in the calling thread, so no other thread must be scheduled. The memory
/// is not mapped: its pages do not count as resident memory of this process, and a stray pointer of
/// the program cannot reach them. Keys and leases are not checked, so the caller must use only
/// addresses of grants that it holds and whose leases have not ended.
pub struct ChunkMemory {
    parts: Vec<(ChunkPart, OwnedFd)>,
}

impl ChunkMemory {
    /// Asks the memory node that serves the socket at `path`. The inner error is the reason for
    /// which the memory node passes its chunk memory not on, or not to this process.
    ///
    /// # Errors
    /// The memory node does not answer.
    pub fn open(path: &Path) -> Result<Result<Self, String>, Error> {
        until_admitted(|| Self::ask(path))
    }

    fn ask(path: &Path) -> Result<Result<Self, String>, Error> {
        let gone = |why: String| Error::Gone { attempt: ATTEMPT.into(), why };
        let link = socket::connect(path)?;
        let timeout = rustix::net::sockopt::Timeout::Recv;
        rustix::net::sockopt::set_socket_timeout(&link, timeout, Some(PATIENCE))
            .map_err(|e| Error::System { attempt: ATTEMPT.into(), source: e.into() })?;
        socket::send(&link, &protocol::encode(ATTEMPT, &Opening::chunks())?, &[])
            .map_err(|e| gone(e.to_string()))?;
        let Packet { bytes, descriptors } = match socket::receive(&link) {
            // A memory node at its limit of connections closes a new one at once.
            Ok(None) => return Err(Error::NotAdmitted { why: CLOSED.into() }),
            Ok(Some(packet)) => packet,
            Err(e) => return Err(gone(e.to_string())),
        };
        match protocol::decode::<Numbered<Reply>>(ATTEMPT, &bytes)?.body {
            Reply::Chunks { parts } if parts.len() == descriptors.len() => {
                Ok(Ok(Self { parts: parts.into_iter().zip(descriptors).collect() }))
            }
            reply => {
                descriptors.into_iter().for_each(close_deferred);
                match reply {
                    Reply::Error { why } => Ok(Err(why)),
                    other => Err(Error::Protocol {
                        attempt: ATTEMPT.into(),
                        why: format!("unexpected reply {other:?}"),
                    }),
                }
            }
        }
    }

    /// The chunk memory behind [`ChunkMemory::parts`] of another process, which has passed the
    /// descriptors to this one.
    ///
    /// # Errors
    /// A descriptor is not a memfd whose size is sealed, or is shorter than its part.
    pub fn from_parts(parts: Vec<(ChunkPart, OwnedFd)>) -> Result<Self, Error> {
        parts.iter().try_for_each(|(part, file)| check_part(part, file))?;
        Ok(Self { parts })
    }

    /// The files of the chunk memory, and their places in it.
    pub fn parts(&self) -> impl Iterator<Item = (ChunkPart, BorrowedFd<'_>)> {
        self.parts.iter().map(|(part, file)| (*part, file.as_fd()))
    }

    /// The descriptors, for a thread that has its own descriptor table.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        self.parts.iter().map(|(_, file)| file.as_raw_fd())
    }

    /// True if the `bytes` bytes at `address` are chunk memory.
    pub fn contains(&self, address: u64, bytes: u64) -> bool {
        self.find(address, bytes).is_some()
    }

    /// Copies `bytes` bytes at `address` to `offset` of `into`.
    ///
    /// # Errors
    /// Errors of the system call, and `InvalidInput` for bytes outside of the chunk memory.
    ///
    /// # Panics
    /// If the bytes lie outside of `into`.
    pub fn read(
        &self,
        address: u64,
        into: &DmaMemory,
        offset: usize,
        bytes: usize,
    ) -> std::io::Result<()> {
        let target = into.at(offset, bytes).expect("the caller's range");
        // SAFETY: `at` has checked the range, and `into` keeps it mapped. No reference into it
        // exists; the kernel writes it.
        self.whole(address, bytes, |file, at, done, left| unsafe {
            libc::pread(file, target.add(done).cast(), left, at)
        })
    }

    /// Copies `bytes` bytes at `offset` of `from` to `address`.
    ///
    /// # Errors
    /// As [`ChunkMemory::read`]. The system refuses a write if memory is short, or beyond the
    /// calling process's `RLIMIT_FSIZE`.
    ///
    /// # Panics
    /// If the bytes lie outside of `from`.
    pub fn write(
        &self,
        address: u64,
        from: &DmaMemory,
        offset: usize,
        bytes: usize,
    ) -> std::io::Result<()> {
        let source = from.at(offset, bytes).expect("the caller's range");
        // SAFETY: as in `read`; the kernel reads the range.
        self.whole(address, bytes, |file, at, done, left| unsafe {
            libc::pwrite(file, source.add(done).cast(), left, at)
        })
    }

    fn find(&self, address: u64, bytes: u64) -> Option<(RawFd, u64)> {
        self.parts.iter().find_map(|(part, file)| {
            let offset = address.checked_sub(part.address)?;
            let fits = offset <= part.bytes && bytes <= part.bytes - offset;
            fits.then(|| (file.as_raw_fd(), offset))
        })
    }

    /// Repeats a system call until it has moved all bytes. `call` gets the file, the offset in it,
    /// and the numbers of bytes that are moved and left.
    fn whole(
        &self,
        address: u64,
        bytes: usize,
        call: impl Fn(RawFd, i64, usize, usize) -> isize,
    ) -> std::io::Result<()> {
        let (file, start) =
            self.find(address, bytes as u64).ok_or(std::io::ErrorKind::InvalidInput)?;
        let mut done = 0;
        while done < bytes {
            match call(file, (start + done as u64) as i64, done, bytes - done) {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                moved if moved > 0 => done += moved as usize,
                _ => {
                    let error = std::io::Error::last_os_error();
                    if error.kind() != std::io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Checks that a system call on the file cannot block, nor change the size of the file.
fn check_part(part: &ChunkPart, file: &OwnedFd) -> Result<(), Error> {
    let wrong = |why: String| Error::Protocol { attempt: "adopting chunk memory".into(), why };
    let fixed = SealFlags::SHRINK | SealFlags::GROW;
    match rustix::fs::fcntl_get_seals(file) {
        Ok(seals) if seals.contains(fixed) => {}
        _ => return Err(wrong("a descriptor is not a memfd of fixed size".into())),
    }
    let size = rustix::fs::fstat(file).map_err(|e| wrong(e.to_string()))?.st_size as u64;
    if part.bytes > size || part.address.checked_add(part.bytes).is_none() {
        let ChunkPart { address, bytes } = part;
        return Err(wrong(format!("{bytes} bytes at {address:#x} are a file of {size} bytes")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Endpoint, Options, Pool, Service, Settings, schemes};

    fn start(settings: Settings) -> Service {
        let settings = Settings { donate_bytes: 8 << 20, ..settings };
        Service::start(&settings, &Endpoint::Fresh).unwrap()
    }

    #[test]
    fn chunk_memory_and_nic_see_the_same_bytes() {
        for scheme in [schemes::ONESIDEDMW, schemes::FINEMEM, schemes::RPC_MW_2] {
            let keep_resident_bytes = 0;
            let settings = Settings::default();
            let service =
                start(Settings { shares_chunks: true, scheme, keep_resident_bytes, ..settings });
            let pool = Pool::connect(service.path(), Options::default()).unwrap();
            let memory = ChunkMemory::open(service.path()).unwrap().unwrap();
            let grant = pool.allocate_blocking().unwrap();
            let local = DmaMemory::anonymous(8192).unwrap();
            local.write(100, b"by pwrite");
            memory.write(grant.addr + 4096, &local, 100, 9).unwrap();
            let mut text = [0; 9];
            pool.read_blocking(&grant, 4096, &mut text).unwrap();
            assert_eq!(&text, b"by pwrite", "{scheme}");
            pool.write_blocking(&grant, 8000, b"by WRITE").unwrap();
            memory.read(grant.addr + 8000, &local, 4096, 8).unwrap();
            let mut text = [0; 8];
            local.read(4096, &mut text);
            assert_eq!(&text, b"by WRITE", "{scheme}");
            let resident = service.status().unwrap().resident_bytes;
            assert!(resident >= 8192, "{resident}");

            // The memory node clears a freed chunk in the file, too.
            pool.free_blocking(grant).unwrap();
            let again = std::iter::from_fn(|| pool.allocate_blocking().ok());
            let again = again.into_iter().find(|other| other.addr == grant.addr);
            memory.read(again.expect("one of all chunks").addr + 8000, &local, 0, 8).unwrap();
            let mut text = [1; 8];
            local.read(0, &mut text);
            assert_eq!(text, [0; 8], "{scheme}");
        }
    }

    #[test]
    fn access_outside_of_the_chunks_is_refused() {
        let service = start(Settings { shares_chunks: true, ..Settings::default() });
        let memory = ChunkMemory::open(service.path()).unwrap().unwrap();
        let (part, _) = &memory.parts[0];
        let local = DmaMemory::anonymous(4096).unwrap();
        let end = part.address + part.bytes;
        assert!(memory.contains(end - 4096, 4096) && !memory.contains(end - 4095, 4096));
        for at in [end - 4095, end, part.address - 1, 0, u64::MAX] {
            let error = memory.read(at, &local, 0, 4096).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
            assert!(memory.write(at, &local, 0, 4096).is_err());
        }
    }

    #[test]
    fn process_of_another_user_gets_no_chunk_memory() {
        use std::os::unix::fs::OpenOptionsExt;
        if !rustix::process::geteuid().is_root() {
            return; // Another user cannot be simulated.
        }
        let service = start(Settings { shares_chunks: true, ..Settings::default() });
        // A descriptor of the socket, which the process has had since before it changed its user.
        let mut how = std::fs::File::options();
        let socket = how.read(true).custom_flags(libc::O_PATH).open(service.path()).unwrap();
        let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
        let stranger = move || {
            // SAFETY: the raw system call changes this thread only.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
            assert_eq!(changed, 0);
            ChunkMemory::open(Path::new(&path))
        };
        let refused = std::thread::spawn(stranger).join().unwrap().unwrap().err().unwrap();
        assert!(refused.contains("its own user"), "{refused}");
        assert!(ChunkMemory::open(service.path()).unwrap().is_ok());
    }

    #[test]
    fn ordinary_memory_node_keeps_its_chunk_memory() {
        let service = start(Settings::default());
        let refused = ChunkMemory::open(service.path()).unwrap().err().unwrap();
        assert!(refused.contains("does not pass on"), "{refused}");
    }
}

//! Pages in a file: the overflow when the pool is full, and the transports `file:` and `memory:`.
//!
//! A [`FileStore`] reads and writes runs of frames at offsets of a descriptor. [`FileTransport`] makes
//! a transport of one, with chunks as consecutive stretches of the file; holes are punched where
//! chunks are freed. These transports are for diagnosis (is it the pool or the pager?), for
//! machines with a fast local disk, and for tests; `GRANARY_POOL` names them:
//!
//! - `file:DIRECTORY` — an unlinked file in that directory;
//! - `memory:SIZE` — a memfd of at most SIZE bytes (not mapped, so not resident memory of the program);
//!   `memory:SIZE,gone-after=N` fails for good after N transfers, as a lost memory node would.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::descriptor;
use crate::sys::{self, PAGE_BYTES};
use crate::transport::{
    ChunkHandle, Lane, PageIo, StagingMemory, Transport, TransportError, TransportStats,
};

/// A file of pages.
pub struct FileStore {
    file: File,
    staging: StagingMemory,
}

// SAFETY: the staging base is only used to address frames that the caller of `read` and `write`
// owns for the call.
unsafe impl Send for FileStore {}
// SAFETY: as above; the file is used with positioned reads and writes only.
unsafe impl Sync for FileStore {}

impl FileStore {
    /// An unlinked file in `directory`.
    pub fn unlinked(directory: &Path, staging: StagingMemory) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
            .mode(0o600)
            .open(directory)?;
        Ok(Self { file, staging })
    }

    /// An anonymous memory file.
    pub fn memory(staging: StagingMemory) -> io::Result<Self> {
        // SAFETY: the name is a C string; a descriptor that is returned is ours.
        let fd = unsafe { libc::memfd_create(c"granary-store".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just created.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(Self { file, staging })
    }

    /// Moves the descriptor out of the way of the program's, to a high number.
    pub fn move_descriptor(&mut self) -> io::Result<()> {
        let moved = descriptor::move_high(self.file.as_raw_fd())?;
        self.file = File::from(moved);
        Ok(())
    }

    /// The descriptor.
    pub fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }

    fn frames(&self, frame: u32, pages: u16) -> (*mut u8, usize) {
        assert!(frame + u32::from(pages) <= self.staging.frames);
        // SAFETY: in bounds of the staging memory.
        let start = unsafe { self.staging.base.add(frame as usize * PAGE_BYTES) };
        (start, usize::from(pages) * PAGE_BYTES)
    }

    /// Fills `pages` frames from `offset`. What was never written reads as zeros.
    pub fn read(&self, offset: u64, frame: u32, pages: u16) -> io::Result<()> {
        let (start, len) = self.frames(frame, pages);
        // SAFETY: the caller owns these frames; nobody else accesses them during the call.
        let buffer = unsafe { std::slice::from_raw_parts_mut(start, len) };
        let mut done = 0;
        while done < len {
            match self.file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => {
                    buffer[done..].fill(0);
                    break;
                }
                Ok(got) => done += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Stores `pages` frames at `offset`.
    pub fn write(&self, offset: u64, frame: u32, pages: u16) -> io::Result<()> {
        let (start, len) = self.frames(frame, pages);
        // SAFETY: the caller owns these frames; nobody writes them during the call.
        let buffer = unsafe { std::slice::from_raw_parts(start, len) };
        self.file.write_all_at(buffer, offset)
    }

    /// Gives the disk space of a stretch back.
    pub fn punch(&self, offset: u64, len: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a plain system call. Where the file system cannot, the space is used again later.
        unsafe { libc::fallocate(self.fd(), mode, offset as i64, len as i64) };
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        descriptor::forget(self.fd());
    }
}

/// A transport over a file.
pub struct FileTransport {
    store: FileStore,
    chunk_bytes: usize,
    capacity: u32,
    chunks: Mutex<Chunks>,
    allocations: AtomicU64,
    transfers_left: AtomicU64,
}

#[derive(Default)]
struct Chunks {
    free: Vec<u32>,
    next: u32,
}

impl FileTransport {
    /// Chunk size: 1 MiB.
    pub const CHUNK_BYTES: usize = 1 << 20;

    /// Opens what `spec` names: `file:DIRECTORY` or `memory:SIZE[,gone-after=N]`, with `frames`
    /// frames of staging.
    pub fn open(spec: &str, frames: u32) -> Result<Self, crate::Error> {
        let bad = |why: &str| crate::Error::Setting {
            name: "GRANARY_POOL",
            value: spec.into(),
            why: why.into(),
        };
        let base = sys::map_anonymous(frames as usize * PAGE_BYTES).map_err(|source| {
            crate::Error::System { what: "map the staging memory".into(), source }
        })?;
        let staging = StagingMemory { base: base as *mut u8, frames };
        let system =
            |source| crate::Error::System { what: format!("open the store {spec}"), source };
        let mut gone_after = u64::MAX;
        let (mut store, capacity) = if let Some(directory) = spec.strip_prefix("file:") {
            (FileStore::unlinked(Path::new(directory), staging).map_err(system)?, u32::MAX)
        } else if let Some(size) = spec.strip_prefix("memory:") {
            let (size, fault) = size.split_once(',').map_or((size, None), |(s, f)| (s, Some(f)));
            if let Some(fault) = fault {
                gone_after = fault
                    .strip_prefix("gone-after=")
                    .and_then(|count| count.parse().ok())
                    .ok_or_else(|| bad("after the comma only gone-after=N is known"))?;
            }
            let bytes = crate::config::parse_size(size).ok_or_else(|| bad("not a size"))?;
            let chunks = (bytes / Self::CHUNK_BYTES as u64).min(u64::from(u32::MAX)) as u32;
            (FileStore::memory(staging).map_err(system)?, chunks)
        } else {
            return Err(bad("expected file:DIRECTORY or memory:SIZE"));
        };
        store.move_descriptor().map_err(system)?;
        Ok(Self {
            store,
            chunk_bytes: Self::CHUNK_BYTES,
            capacity,
            chunks: Mutex::default(),
            allocations: AtomicU64::new(0),
            transfers_left: AtomicU64::new(gone_after),
        })
    }

    /// Makes every later transfer fail, as if the memory node had gone.
    pub fn disappear(&self) {
        self.transfers_left.store(0, Ordering::Release);
    }

    /// Chunks that are allocated now.
    pub fn chunks_held(&self) -> u32 {
        let chunks = self.chunks.lock().expect("no panic under the lock");
        chunks.next - chunks.free.len() as u32
    }

    fn transfer(
        &self,
        ios: &[PageIo],
        run: impl Fn(&FileStore, u64, u32, u16) -> io::Result<()>,
    ) -> Result<(), TransportError> {
        for io in ios {
            let left = self.transfers_left.load(Ordering::Acquire);
            if left == 0 {
                return Err(TransportError::Gone("the store was told to fail here".into()));
            }
            if left != u64::MAX {
                self.transfers_left.fetch_sub(1, Ordering::AcqRel);
            }
            let end = io.offset_bytes as usize + usize::from(io.pages) * PAGE_BYTES;
            assert!(end <= self.chunk_bytes, "{io:?} leaves its chunk");
            let offset = u64::from(io.chunk.0) * self.chunk_bytes as u64;
            run(&self.store, offset + u64::from(io.offset_bytes), io.frame, io.pages)
                .map_err(|error| TransportError::Gone(error.to_string()))?;
        }
        Ok(())
    }
}

impl Transport for FileTransport {
    fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    fn staging(&self) -> StagingMemory {
        self.store.staging
    }

    fn allocate_chunk(&self) -> Result<ChunkHandle, TransportError> {
        let mut chunks = self.chunks.lock().expect("no panic under the lock");
        let chunk = match chunks.free.pop() {
            Some(chunk) => chunk,
            None if chunks.next < self.capacity => {
                chunks.next += 1;
                chunks.next - 1
            }
            None => return Err(TransportError::Full),
        };
        self.allocations.fetch_add(1, Ordering::Relaxed);
        Ok(ChunkHandle(chunk))
    }

    fn free_chunk(&self, chunk: ChunkHandle) -> Result<(), TransportError> {
        self.store.punch(u64::from(chunk.0) * self.chunk_bytes as u64, self.chunk_bytes as u64);
        self.chunks.lock().expect("no panic under the lock").free.push(chunk.0);
        Ok(())
    }

    fn read(&self, _lane: Lane, ios: &[PageIo]) -> Result<(), TransportError> {
        self.transfer(ios, FileStore::read)
    }

    fn write(&self, _lane: Lane, ios: &[PageIo]) -> Result<(), TransportError> {
        self.transfer(ios, FileStore::write)
    }

    fn stats(&self) -> TransportStats {
        TransportStats::default()
    }

    fn descriptors(&self, keep: &mut Vec<i32>) {
        keep.push(self.store.fd());
    }
}

impl Drop for FileTransport {
    fn drop(&mut self) {
        // SAFETY: the staging memory is this transport's, and its user is gone.
        unsafe {
            let staging = self.store.staging;
            let _ = sys::munmap(staging.base as usize, staging.frames as usize * PAGE_BYTES);
        }
    }
}

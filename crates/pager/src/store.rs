//! Pages in a local file: the overflow file for a full pool, and the transports `file:` and
//! `memory:`.
//!
//! A [`FileStore`] reads and writes runs of frames at offsets of a file. Pages in a file on disk
//! are sealed (`seal`), so only this process can read them. [`FileTransport`] is a
//! transport over one file: chunks are consecutive stretches of the file, and freeing a chunk
//! punches a hole. These transports are for diagnosis (to tell problems of the pool from problems
//! of the pager), for machines with a fast local disk, and for tests. `GRANARY_POOL` names them:
//!
//! - `file:DIRECTORY`: an unlinked file in that directory, encrypted ([`Transport::must_seal`]);
//! - `memory:SIZE`: a memfd of at most SIZE bytes (not mapped, so not resident memory of the
//!   program). `memory:SIZE,gone-after=N` fails permanently after N transfers, like a lost memory
//!   node.

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
    ChunkHandle, Direction, FrameMemory, Lane, PageIo, Ticket, Transport, TransportError,
    TransportStats,
};

/// A file of pages.
pub struct FileStore {
    file: File,
    frames: FrameMemory,
}

// SAFETY: the frames' base is only used to address frames that the caller of `read` and `write`
// owns during the call.
unsafe impl Send for FileStore {}
// SAFETY: as above; the file is used with positioned reads and writes only.
unsafe impl Sync for FileStore {}

impl FileStore {
    /// Creates an unlinked file in `directory`. The file lies on a disk, so the caller encrypts the
    /// pages.
    pub fn unlinked(directory: &Path, memory: FrameMemory) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
            .mode(0o600)
            .open(directory)?;
        Ok(Self { file, frames: memory })
    }

    /// Creates an anonymous memory file.
    pub fn memory(memory: FrameMemory) -> io::Result<Self> {
        // SAFETY: the name is a C string; this function owns the returned descriptor.
        let fd = unsafe { libc::memfd_create(c"granary-store".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just created.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(Self { file, frames: memory })
    }

    /// Moves the descriptor to a high number, where the program does not use or close it.
    pub fn move_descriptor(&mut self) -> io::Result<()> {
        let moved = descriptor::move_high(self.file.as_raw_fd())?;
        self.file = File::from(moved);
        Ok(())
    }

    /// Returns the descriptor.
    pub fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }

    fn frames(&self, frame: u32, pages: u16) -> (*mut u8, usize) {
        assert!(frame + u32::from(pages) <= self.frames.frames);
        // SAFETY: in bounds of the frames.
        let start = unsafe { self.frames.base.add(frame as usize * PAGE_BYTES) };
        (start, usize::from(pages) * PAGE_BYTES)
    }

    /// Reads `pages` pages from `offset`, a multiple of a page, into frames. Pages that were never
    /// written read as zeros.
    ///
    /// # Errors
    /// Errors of the file.
    pub fn read(&self, offset: u64, frame: u32, pages: u16) -> io::Result<()> {
        let (start, len) = self.frames(frame, pages);
        // SAFETY: the caller owns these frames; no other thread accesses them during the call.
        let buffer = unsafe { std::slice::from_raw_parts_mut(start, len) };
        let mut done = 0;
        while done < buffer.len() {
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

    /// Writes `pages` frames at `offset`, a multiple of a page.
    pub fn write(&self, offset: u64, frame: u32, pages: u16) -> io::Result<()> {
        let (start, len) = self.frames(frame, pages);
        // SAFETY: the caller owns these frames; no other thread writes them during the call.
        let buffer = unsafe { std::slice::from_raw_parts(start, len) };
        self.file.write_all_at(buffer, offset)
    }

    /// Frees the disk space of a stretch.
    pub fn punch(&self, offset: u64, len: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a plain system call. Without support of the file system, the space stays
        // allocated until it is reused.
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
    is_on_disk: bool,
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

    /// Returns true if `spec` has the form of a store's name, valid or not.
    pub fn is_named_by(spec: &str) -> bool {
        spec.starts_with("file:") || spec.starts_with("memory:")
    }

    /// Opens the store that `spec` names (`file:DIRECTORY` or `memory:SIZE[,gone-after=N]`), with
    /// `frames` frames.
    pub fn open(spec: &str, frames: u32) -> Result<Self, crate::Error> {
        let bad = |why: &str| crate::Error::Setting {
            name: "GRANARY_POOL",
            value: spec.into(),
            why: why.into(),
        };
        let base = sys::map_anonymous(frames as usize * PAGE_BYTES)
            .map_err(|source| crate::Error::System { what: "map the frames".into(), source })?;
        let memory = FrameMemory { base: base as *mut u8, frames };
        let system =
            |source| crate::Error::System { what: format!("open the store {spec}"), source };
        let mut gone_after = u64::MAX;
        let (mut store, capacity) = if let Some(directory) = spec.strip_prefix("file:") {
            (FileStore::unlinked(Path::new(directory), memory).map_err(system)?, u32::MAX)
        } else if let Some(size) = spec.strip_prefix("memory:") {
            let (size, fault) = size.split_once(',').map_or((size, None), |(s, f)| (s, Some(f)));
            if let Some(fault) = fault {
                gone_after = fault
                    .strip_prefix("gone-after=")
                    .and_then(|count| count.parse().ok())
                    .ok_or_else(|| bad("only gone-after=N may follow the comma"))?;
            }
            let bytes = crate::config::parse_size(size)
                .ok_or_else(|| bad("expected a size such as 512MiB after memory:"))?;
            let chunks = (bytes / Self::CHUNK_BYTES as u64).min(u64::from(u32::MAX)) as u32;
            (FileStore::memory(memory).map_err(system)?, chunks)
        } else {
            return Err(bad("expected file:DIRECTORY or memory:SIZE"));
        };
        store.move_descriptor().map_err(system)?;
        Ok(Self {
            store,
            is_on_disk: spec.starts_with("file:"),
            chunk_bytes: Self::CHUNK_BYTES,
            capacity,
            chunks: Mutex::default(),
            allocations: AtomicU64::new(0),
            transfers_left: AtomicU64::new(gone_after),
        })
    }

    /// Makes every later transfer fail, like a lost memory node.
    pub fn disappear(&self) {
        self.transfers_left.store(0, Ordering::Release);
    }

    /// Returns the number of chunks that are allocated now.
    pub fn chunks_held(&self) -> u32 {
        let chunks = self.chunks.lock().expect("no thread panics while it holds this lock");
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
                return Err(TransportError::Gone(
                    "the store fails here, as gone-after=N says".into(),
                ));
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

    fn frames(&self) -> FrameMemory {
        self.store.frames
    }

    fn allocate_chunk(&self) -> Result<ChunkHandle, TransportError> {
        let mut chunks = self.chunks.lock().expect("no thread panics while it holds this lock");
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
        self.chunks.lock().expect("no thread panics while it holds this lock").free.push(chunk.0);
        Ok(())
    }

    /// Does the transfers at once.
    fn post(
        &self,
        _lane: Lane,
        direction: Direction,
        ios: &[PageIo],
    ) -> Result<Ticket, TransportError> {
        match direction {
            Direction::Read => self.transfer(ios, FileStore::read)?,
            Direction::Write => self.transfer(ios, FileStore::write)?,
        }
        Ok(Ticket::complete())
    }

    fn origin(&self, _: ChunkHandle) -> String {
        if self.is_on_disk { "the file of GRANARY_POOL" } else { "the memory of GRANARY_POOL" }
            .into()
    }

    fn must_seal(&self) -> bool {
        self.is_on_disk
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
        // SAFETY: this transport owns the frames, and its user is gone.
        unsafe {
            let memory = self.store.frames;
            let bytes = memory.frames as usize * PAGE_BYTES;
            let _ = sys::unmap_anonymous(memory.base as usize, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(frames: u32) -> FileStore {
        let base = sys::map_anonymous(frames as usize * PAGE_BYTES).unwrap() as *mut u8;
        FileStore::unlinked(&std::env::temp_dir(), FrameMemory { base, frames }).unwrap()
    }

    /// Sets the content of a frame.
    fn put(store: &FileStore, frame: u32, content: &[u8; PAGE_BYTES]) {
        let (start, len) = store.frames(frame, 1);
        // SAFETY: a frame of the store; no transfer is in flight.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), start, len) };
    }

    /// Returns the content of a frame.
    fn get(store: &FileStore, frame: u32) -> Vec<u8> {
        let (start, len) = store.frames(frame, 1);
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(start, len).to_vec() }
    }

    #[test]
    fn punched_pages_read_as_zeros() {
        let store = store(2);
        put(&store, 0, &[7; PAGE_BYTES]);
        for page in 0..3 {
            store.write(page * PAGE_BYTES as u64, 0, 1).unwrap();
        }
        store.punch(PAGE_BYTES as u64, PAGE_BYTES as u64);
        for (page, wanted) in [7, 0, 7].into_iter().enumerate() {
            store.read((page * PAGE_BYTES) as u64, 1, 1).unwrap();
            assert_eq!(get(&store, 1), [wanted; PAGE_BYTES], "page {page}");
        }
    }
}

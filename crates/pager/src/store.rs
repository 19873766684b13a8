//! Pages in a file: the overflow when the pool is full, and the transports `file:` and `memory:`.
//!
//! A [`FileStore`] reads and writes runs of frames at offsets of a descriptor. What it writes to a disk
//! is sealed ([`crate::seal`]): there, only this process can read it. [`FileTransport`] makes
//! a transport of one, with chunks as consecutive stretches of the file; holes are punched where
//! chunks are freed. These transports are for diagnosis (is it the pool or the pager?), for
//! machines with a fast local disk, and for tests; `GRANARY_POOL` names them:
//!
//! - `file:DIRECTORY` — an unlinked file in that directory, sealed;
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
use crate::seal::Sealer;
use crate::sys::{self, PAGE_BYTES};
use crate::transport::{
    ChunkHandle, Lane, PageIo, StagingMemory, Transport, TransportError, TransportStats,
};

/// A file of pages.
pub struct FileStore {
    file: File,
    staging: StagingMemory,
    /// Of a file on a disk.
    sealer: Option<Sealer>,
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
        Ok(Self { file, staging, sealer: Some(Sealer::new()?) })
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
        Ok(Self { file, staging, sealer: None })
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

    /// Fills `pages` frames from `offset`, a multiple of a page. What was never written reads as zeros.
    ///
    /// # Errors
    /// Those of the file, and `InvalidData` for what the file has and this process never stored there.
    pub fn read(&self, offset: u64, frame: u32, pages: u16) -> io::Result<()> {
        let (start, len) = self.frames(frame, pages);
        // SAFETY: the caller owns these frames; nobody else accesses them during the call.
        let buffer = unsafe { std::slice::from_raw_parts_mut(start, len) };
        let Some(sealer) = &self.sealer else { return self.read_bytes(buffer, offset) };
        let mut sealed = [0; PAGE_BYTES];
        for (page, plain) in (offset / PAGE_BYTES as u64..).zip(buffer.chunks_exact_mut(PAGE_BYTES))
        {
            self.read_bytes(&mut sealed, page * PAGE_BYTES as u64)?;
            sealer.open(page, &sealed, plain)?;
        }
        Ok(())
    }

    fn read_bytes(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
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

    /// Stores `pages` frames at `offset`, a multiple of a page.
    pub fn write(&self, offset: u64, frame: u32, pages: u16) -> io::Result<()> {
        let (start, len) = self.frames(frame, pages);
        // SAFETY: the caller owns these frames; nobody writes them during the call.
        let buffer = unsafe { std::slice::from_raw_parts(start, len) };
        let Some(sealer) = &self.sealer else { return self.file.write_all_at(buffer, offset) };
        let mut sealed = [0; PAGE_BYTES];
        for (page, plain) in (offset / PAGE_BYTES as u64..).zip(buffer.chunks_exact(PAGE_BYTES)) {
            sealer.seal(page, plain, &mut sealed);
            self.file.write_all_at(&sealed, page * PAGE_BYTES as u64)?;
        }
        Ok(())
    }

    /// Gives the disk space of a stretch back.
    pub fn punch(&self, offset: u64, len: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a plain system call. Where the file system cannot, the space is used again later.
        unsafe { libc::fallocate(self.fd(), mode, offset as i64, len as i64) };
        if let Some(sealer) = &self.sealer {
            sealer.forget(offset / PAGE_BYTES as u64..(offset + len) / PAGE_BYTES as u64);
        }
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

    /// True if `spec` names a store, be it a valid one or not.
    pub fn is_named_by(spec: &str) -> bool {
        spec.starts_with("file:") || spec.starts_with("memory:")
    }

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
            let bytes = staging.frames as usize * PAGE_BYTES;
            let _ = sys::unmap_anonymous(staging.base as usize, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(frames: u32) -> FileStore {
        let base = sys::map_anonymous(frames as usize * PAGE_BYTES).unwrap() as *mut u8;
        FileStore::unlinked(&std::env::temp_dir(), StagingMemory { base, frames }).unwrap()
    }

    /// Sets what a frame holds.
    fn put(store: &FileStore, frame: u32, content: &[u8; PAGE_BYTES]) {
        let (start, len) = store.frames(frame, 1);
        // SAFETY: a frame of the store's, and no transfer is under way.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), start, len) };
    }

    /// What a frame holds.
    fn get(store: &FileStore, frame: u32) -> Vec<u8> {
        let (start, len) = store.frames(frame, 1);
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(start, len).to_vec() }
    }

    #[test]
    fn nothing_that_is_stored_in_a_file_is_readable_there() {
        let store = store(4);
        const WORD: &[u8] = b"a secret of the program's";
        let mut content = [0; PAGE_BYTES];
        content[100..100 + WORD.len()].copy_from_slice(WORD);
        for number in 0..3 {
            content[0] = number as u8;
            put(&store, number, &content);
        }
        store.write(8 * PAGE_BYTES as u64, 0, 3).unwrap();
        store.write(2 * PAGE_BYTES as u64, 0, 1).unwrap();
        let mut file = vec![0; 11 * PAGE_BYTES];
        store.file.read_exact_at(&mut file, 0).unwrap();
        assert!(!file.windows(WORD.len()).any(|bytes| bytes == WORD));
        put(&store, 0, &[0; PAGE_BYTES]);
        store.read(8 * PAGE_BYTES as u64, 1, 3).unwrap();
        for number in 0..3 {
            content[0] = number as u8;
            assert_eq!(get(&store, number + 1), content);
        }
    }

    #[test]
    fn a_page_that_was_changed_in_the_file_is_an_error() {
        let store = store(2);
        put(&store, 0, &[7; PAGE_BYTES]);
        store.write(0, 0, 1).unwrap();
        store.write(PAGE_BYTES as u64, 0, 1).unwrap();
        let mut bytes = [0; PAGE_BYTES];
        store.file.read_exact_at(&mut bytes, 0).unwrap();
        store.file.write_all_at(&bytes, PAGE_BYTES as u64).unwrap();
        store.read(0, 1, 1).unwrap();
        assert_eq!(get(&store, 1), [7; PAGE_BYTES]);
        let error = store.read(PAGE_BYTES as u64, 1, 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
        assert!(error.to_string().contains("page 1 of the file"), "{error}");
    }

    #[test]
    fn what_is_punched_reads_as_zeros() {
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

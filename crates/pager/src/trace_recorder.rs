//! Recorder of a fault trace, in a paged process (format: [`crate::trace`]).
//!
//! Each process maps `$GRANARY_TRACE.PID`. The whole file is reserved and mapped once, as a sparse
//! file, and no descriptor stays open that the program could close. The kernel keeps what was
//! written to the mapping, however the process ends. Blocks are allocated before events are written
//! there, so a full disk ends the recording and not the process.
//!
//! A process that calls exec keeps its process id, so the new program's trace replaces the old one.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use units::files;

use crate::page_table::PageId;
use crate::sys;
use crate::trace::{EVENT_BYTES, Event, HEADER_BYTES, Header, TraceError};

/// The largest number of events in a file of 4 GiB.
const EVENTS_MAX: u64 = (1 << 28) - 4;
/// Bytes that are allocated at a time.
const BLOCK_BYTES: usize = 1 << 20;
const FILE_BYTES: usize = 1 << 32;
/// Words of the header: the number of events, and of those that are missing.
const EVENTS: usize = 2;
const DROPPED: usize = 3;

/// The trace of this process.
#[derive(Debug)]
pub(crate) struct Recorder {
    words: *const AtomicU64,
    next: AtomicU64,
    last_ns: AtomicU64,
    is_full: AtomicBool,
}

// SAFETY: the words are atomics in a mapping that is never unmapped.
unsafe impl Send for Recorder {}
// SAFETY: as above.
unsafe impl Sync for Recorder {}

impl Recorder {
    /// Creates the file `prefix.PID`, or empties it.
    pub fn create(prefix: &Path, pages: u32) -> io::Result<Self> {
        let file = files::open_own(&with_suffix(prefix, std::process::id()), true)?;
        file.set_len(0)?;
        let name = sys::program_name();
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let header = Header {
            events: 0,
            dropped: 0,
            region_pages: pages,
            one_zone_in: 1,
            program: String::from_utf8_lossy(name).into_owned(),
        };
        file.write_all_at(&header.encode(), 0)?;
        file.set_len(FILE_BYTES as u64)?;
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: no MAP_FIXED, so no existing mapping is touched.
        let base = unsafe { sys::mmap(0, FILE_BYTES, prot, flags, file.as_raw_fd(), 0)? };
        // A forked child records into a file of its own.
        // SAFETY: changes only whether a fork copies the mapping.
        let _ = unsafe { sys::madvise(base, FILE_BYTES, libc::MADV_DONTFORK) };
        let recorder = Self {
            words: base as *const AtomicU64,
            next: AtomicU64::new(0),
            last_ns: AtomicU64::new(sys::now_ns()),
            is_full: AtomicBool::new(false),
        };
        if !recorder.allocate(0) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(recorder)
    }

    /// Records a fault. Any thread may call this.
    pub fn record(&self, page: PageId, thread: u32, write: bool) {
        let now = sys::now_ns();
        let ns = now.saturating_sub(self.last_ns.swap(now, Ordering::Relaxed));
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        let offset = HEADER_BYTES + index as usize * EVENT_BYTES;
        if index >= EVENTS_MAX || (offset.is_multiple_of(BLOCK_BYTES) && !self.allocate(offset)) {
            self.is_full.store(true, Ordering::Relaxed);
        }
        if self.is_full.load(Ordering::Relaxed) {
            self.word(DROPPED).fetch_add(1, Ordering::Relaxed);
            return;
        }
        let ns = u32::try_from(ns).unwrap_or(u32::MAX);
        let words = Event { page: page.0, thread: thread.max(1), ns, write }.words();
        for (at, word) in words.into_iter().enumerate() {
            self.word(offset / 8 + at).store(word, Ordering::Relaxed);
        }
        self.word(EVENTS).fetch_max(index + 1, Ordering::Release);
    }

    /// Allocates the block at `offset`, and unmaps the one before, whose content the kernel keeps.
    /// Returns false if the disk is full.
    fn allocate(&self, offset: usize) -> bool {
        let block = self.words as usize + offset;
        // SAFETY: both blocks are in the mapping of a shared file, so no content is lost.
        let allocated = unsafe {
            if offset >= BLOCK_BYTES {
                let _ = sys::madvise(block - BLOCK_BYTES, BLOCK_BYTES, libc::MADV_DONTNEED);
            }
            sys::madvise(block, BLOCK_BYTES, libc::MADV_POPULATE_WRITE)
        };
        // EINVAL: a kernel before 5.14, which cannot allocate ahead.
        allocated.map_or_else(|error| error.raw_os_error() == Some(libc::EINVAL), |()| true)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < FILE_BYTES / 8);
        // SAFETY: in bounds of a mapping that lives as long as the process.
        unsafe { &*self.words.add(index) }
    }
}

/// Returns the path of a process's trace.
fn with_suffix(prefix: &Path, process: u32) -> PathBuf {
    let mut path = prefix.as_os_str().to_owned();
    path.push(format!(".{process}"));
    path.into()
}

/// Cuts the traces of `processes` to their events and removes empty ones. If one is left, it is
/// renamed to `prefix`. Returns the paths of the traces. The trace of a process that still runs
/// stays as it is.
pub(crate) fn finish(prefix: &Path, processes: &[u32]) -> Result<Vec<PathBuf>, TraceError> {
    let mut traces = Vec::new();
    for process in processes {
        let path = with_suffix(prefix, *process);
        let failed = |source| TraceError::Read { path: path.display().to_string(), source };
        let file = match files::open_own(&path, false) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error)),
        };
        // SAFETY: signal 0 only asks whether the process exists.
        let runs = unsafe { libc::kill(*process as i32, 0) } == 0;
        if !runs {
            let header = read_header(&file, &path)?;
            if header.events == 0 {
                fs::remove_file(&path).map_err(failed)?;
                continue;
            }
            let bytes = HEADER_BYTES as u64 + header.events * EVENT_BYTES as u64;
            file.set_len(bytes).map_err(failed)?;
        }
        traces.push(path);
    }
    if let [only] = traces.as_slice() {
        let failed = |source| TraceError::Read { path: only.display().to_string(), source };
        fs::rename(only, prefix).map_err(failed)?;
        return Ok(vec![prefix.to_owned()]);
    }
    Ok(traces)
}

fn read_header(file: &File, path: &Path) -> Result<Header, TraceError> {
    let mut head = [0; HEADER_BYTES];
    file.read_exact_at(&mut head, 0)
        .map_err(|source| TraceError::Read { path: path.display().to_string(), source })?;
    Header::decode(&head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Trace;

    #[test]
    fn events_survive_over_several_blocks() {
        let directory = std::env::temp_dir().join(format!("granary-trace-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let prefix = directory.join("trace");
        let recorder = Recorder::create(&prefix, 1000).unwrap();
        let events = 3 * BLOCK_BYTES / EVENT_BYTES;
        for at in 0..events {
            recorder.record(PageId(at as u32 % 1000), 7, at % 3 == 0);
        }
        let process = std::process::id();
        let trace = Trace::read(&with_suffix(&prefix, process)).unwrap();
        assert_eq!((trace.events.len(), trace.header.dropped), (events, 0));
        for (at, event) in trace.events.iter().enumerate() {
            assert_eq!((event.page, event.thread), (at as u32 % 1000, 7));
            assert_eq!(event.write, at % 3 == 0);
        }
        // The process still runs, so its file keeps the reserved room.
        assert_eq!(finish(&prefix, &[process]).unwrap(), vec![prefix.clone()]);
        assert_eq!(fs::metadata(&prefix).unwrap().len(), FILE_BYTES as u64);
        // No process has this id (it is above the kernel's maximum).
        let ended = 1 << 23;
        fs::rename(&prefix, with_suffix(&prefix, ended)).unwrap();
        assert_eq!(finish(&prefix, &[ended, ended + 1]).unwrap(), vec![prefix.clone()]);
        let bytes = fs::metadata(&prefix).unwrap().len();
        assert_eq!(bytes, (HEADER_BYTES + events * EVENT_BYTES) as u64);
        assert_eq!(Trace::read(&prefix).unwrap(), trace);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn links_and_fifos_in_place_of_a_trace_are_refused() {
        let directory = std::env::temp_dir().join(format!("granary-link-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let victim = directory.join("victim");
        fs::write(&victim, "content").unwrap();
        let prefix = directory.join("trace");
        let trace = with_suffix(&prefix, std::process::id());
        std::os::unix::fs::symlink(&victim, &trace).unwrap();
        let why = Recorder::create(&prefix, 10).unwrap_err().to_string();
        assert!(why.starts_with("not a regular file of this user: "), "{why}");
        assert_eq!(fs::read(&victim).unwrap(), b"content");
        fs::remove_file(&trace).unwrap();
        let name = std::ffi::CString::new(trace.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: the name is a C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        Recorder::create(&prefix, 10).unwrap_err();
        finish(&prefix, &[std::process::id()]).unwrap_err();
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn empty_traces_are_removed() {
        let directory = std::env::temp_dir().join(format!("granary-empty-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let prefix = directory.join("trace");
        Recorder::create(&prefix, 10).unwrap();
        let ended = 1 << 23;
        fs::rename(with_suffix(&prefix, std::process::id()), with_suffix(&prefix, ended)).unwrap();
        assert!(finish(&prefix, &[ended]).unwrap().is_empty());
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
        fs::remove_dir_all(&directory).unwrap();
    }
}

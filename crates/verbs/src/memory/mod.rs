//! Memory that the NIC reads and writes.
//!
//! Other processes share such memory and may change it at any moment. Rust code therefore never
//! holds a reference to it, only a base pointer, a length, and an owner that keeps the mapping
//! alive. Every access names an offset and is checked against the length.
//!
//! Words that control the NIC (doorbell records, queue indices, atomics) are accessed with atomic
//! loads and stores of their natural size; bulk data with raw copies.

mod mapping;

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use mapping::{Mapping, Thin};

/// A range of memory that is mapped in this process. Its owner keeps it mapped.
///
/// A clone shares the memory; it does not copy it.
#[derive(Clone)]
pub struct DmaMemory {
    base: *mut u8,
    len: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the owner, which every clone holds, keeps the memory mapped. All access is by raw copies
// and atomics, which any thread may execute.
unsafe impl Send for DmaMemory {}
// SAFETY: as above; no method returns a reference into the memory, except to atomics.
unsafe impl Sync for DmaMemory {}

impl fmt::Debug for DmaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DmaMemory({:p}, {} B)", self.base, self.len)
    }
}

impl DmaMemory {
    /// Wraps `len` bytes at `base`.
    ///
    /// # Safety
    /// The bytes must stay mapped, readable and writable for as long as `owner` lives, and all
    /// other code must access them only through raw pointers or atomics.
    pub unsafe fn from_raw(base: *mut u8, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { base, len, owner }
    }

    /// Allocates `len` zeroed private bytes, page-aligned in size and address.
    ///
    /// Fails with the system's error if the memory cannot be mapped.
    pub fn anonymous(len: usize) -> Result<Self, rustix::io::Errno> {
        let map = Mapping::anonymous(len)?;
        let (base, len) = (map.base, map.len);
        // SAFETY: the mapping is unmapped only when `map`, the owner, is dropped.
        Ok(unsafe { Self::from_raw(base, len, Arc::new(map)) })
    }

    /// Maps `len` bytes of `fd` from `offset` (a multiple of the page size), shared.
    ///
    /// The file must be at least `offset + len` bytes long and must not shrink (`F_SEAL_SHRINK`):
    /// an access to a page beyond the end of the file raises SIGBUS.
    pub fn map_shared(
        fd: impl std::os::fd::AsFd,
        offset: u64,
        len: usize,
    ) -> Result<Self, rustix::io::Errno> {
        let map = Mapping::shared(fd, offset, len)?;
        let (base, len) = (map.base, map.len);
        // SAFETY: the mapping is unmapped only when `map`, the owner, is dropped.
        Ok(unsafe { Self::from_raw(base, len, Arc::new(map)) })
    }

    /// Allocates `len` zeroed private bytes, thin-provisioned: a page occupies RAM from its first
    /// write until it is discarded. A whole page is discarded when [`Zeros`], or the NIC with
    /// [`DmaMemory::zeros`] as the source, writes zeros over it. The first `kept` bytes are never
    /// discarded. The caller uses the memory in units of `unit` bytes, at multiples of `unit`.
    ///
    /// Fails with the system's error if the memory cannot be mapped.
    pub fn thin(len: usize, unit: usize, kept: usize) -> Result<Self, rustix::io::Errno> {
        let thin = Thin::new(len, unit, kept)?;
        let (base, len) = (thin.base, thin.len);
        // SAFETY: the mapping is unmapped only when `thin`, the owner, is dropped.
        Ok(unsafe { Self::from_raw(base, len, Arc::new(thin)) })
    }

    /// Allocates like [`DmaMemory::thin`], as a memfd, which is returned too: a process that
    /// receives the descriptor can read and write the bytes at the same offsets, and cannot change
    /// the size.
    ///
    /// Fails with the system's error if the file cannot be created or mapped.
    pub fn thin_file(len: usize, kept: usize) -> Result<(Self, OwnedFd), rustix::io::Errno> {
        let (thin, file) = Thin::file(len, kept)?;
        let (base, len) = (thin.base, thin.len);
        // SAFETY: the mapping is unmapped only when `thin`, the owner, is dropped.
        Ok((unsafe { Self::from_raw(base, len, Arc::new(thin)) }, file))
    }

    /// Returns `len` bytes, rounded up to pages, that are always zero and occupy no RAM. The memory
    /// is read-only: a write to it ends the process with a signal.
    ///
    /// Fails with the system's error if the memory cannot be mapped.
    pub fn zeros(len: usize) -> Result<Self, rustix::io::Errno> {
        if len > mapping::ZEROS {
            return Self::anonymous(len);
        }
        let (base, len) = (mapping::zeros()?, mapping::page_multiple(len));
        // SAFETY: the process's zero mapping is never unmapped. It is read-only, so a write faults
        // and cannot race; callers register it for reading only.
        Ok(unsafe { Self::from_raw(base, len, Arc::new(())) })
    }

    /// Zeroes `len` bytes at `offset` by returning their pages to the kernel. Returns false and
    /// changes nothing unless the memory was created by [`DmaMemory::thin`] or
    /// [`DmaMemory::thin_file`] and the bytes are whole pages behind the kept part. Panics if the
    /// bytes lie outside the range.
    pub fn discard(&self, offset: usize, len: usize) -> bool {
        let at = self.checked(offset, len);
        self.owner.downcast_ref::<Thin>().is_some_and(|thin| thin.discard(at, len))
    }

    /// Returns whether other clones or slices keep the same mapping.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.owner) > 1
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the range has length 0.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte in this process. Valid while this range or a clone lives.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    /// Address of the first byte as a number: the natural I/O virtual address of the range.
    #[inline]
    pub fn addr(&self) -> u64 {
        self.base as u64
    }

    /// Returns the `len` bytes at `offset` as a range; `None` if they extend beyond the end.
    pub fn slice(&self, offset: usize, len: usize) -> Option<DmaMemory> {
        let base = self.at(offset, len)?;
        Some(DmaMemory { base, len, owner: self.owner.clone() })
    }

    /// Returns a pointer to the `len` bytes at `offset`; `None` if they extend beyond the end.
    #[inline]
    pub fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        if offset > self.len || len > self.len - offset {
            return None;
        }
        // SAFETY: offset <= self.len, so the result is within the range or one past its end.
        Some(unsafe { self.base.add(offset) })
    }

    #[inline]
    fn checked(&self, offset: usize, len: usize) -> *mut u8 {
        match self.at(offset, len) {
            Some(p) => p,
            None => panic!("{len} bytes at {offset} lie outside a span of {}", self.len),
        }
    }

    /// Copies bytes at `offset` into `out`. Panics if they lie outside the range.
    #[inline]
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let p = self.checked(offset, out.len());
        // SAFETY: `checked` bounds the source; `out` is an exclusive borrow, so they do not
        // overlap.
        unsafe { ptr::copy_nonoverlapping(p, out.as_mut_ptr(), out.len()) }
    }

    /// Copies `data` to `offset`. Panics if it would lie outside the range.
    #[inline]
    pub fn write(&self, offset: usize, data: &[u8]) {
        let p = self.checked(offset, data.len());
        // SAFETY: `checked` bounds the destination; no reference into the range exists.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), p, data.len()) }
    }

    /// Prefetches the cache line at `offset`. Panics outside the range.
    #[inline]
    pub fn prefetch(&self, offset: usize, to: PrefetchFor) {
        prefetch(self.checked(offset, 1), to);
    }

    /// Copies a WQE's building block like [`DmaMemory::write`], in 8-byte words. The block was just
    /// built in words, and loads of the same size can be forwarded from the pending stores.
    #[inline]
    pub fn write_block(&self, offset: usize, block: &[u8; 64]) {
        let p = self.checked(offset, block.len()).cast::<u64>();
        assert!(p.is_aligned(), "write_block at {offset} is not aligned");
        for (i, word) in block.as_chunks().0.iter().enumerate() {
            // SAFETY: as in `write`; aligned.
            unsafe { p.add(i).write_volatile(u64::from_ne_bytes(*word)) }
        }
    }

    /// Sets `len` bytes at `offset` to zero, with a [`Zeros`] of its own. Panics if they lie
    /// outside the range.
    pub fn zero(&self, offset: usize, len: usize) {
        Zeros::default().write(self, offset, len);
    }

    /// Returns the 32-bit word at `offset` (a multiple of 4) as an atomic. Panics outside the
    /// range.
    #[inline]
    pub fn word32(&self, offset: usize) -> &AtomicU32 {
        let p = self.checked(offset, 4);
        assert!((p as usize).is_multiple_of(4), "word32 at {offset} is not aligned");
        // SAFETY: in bounds and aligned; all other code accesses the word through atomics or raw
        // copies.
        unsafe { AtomicU32::from_ptr(p.cast()) }
    }

    /// Returns the 64-bit word at `offset` (a multiple of 8) as an atomic. Panics outside the
    /// range.
    #[inline]
    pub fn word64(&self, offset: usize) -> &AtomicU64 {
        let p = self.checked(offset, 8);
        assert!((p as usize).is_multiple_of(8), "word64 at {offset} is not aligned");
        // SAFETY: in bounds and aligned; all other code accesses the word through atomics or raw
        // copies.
        unsafe { AtomicU64::from_ptr(p.cast()) }
    }

    /// Loads the big-endian 32-bit word at `offset`, with acquire ordering.
    #[inline]
    pub fn load_be32(&self, offset: usize) -> u32 {
        u32::from_be(self.word32(offset).load(Ordering::Acquire))
    }

    /// Stores `value` big-endian at `offset`, with release ordering.
    #[inline]
    pub fn store_be32(&self, offset: usize, value: u32) {
        self.word32(offset).store(value.to_be(), Ordering::Release)
    }

    /// Loads the big-endian 64-bit word at `offset`, with acquire ordering.
    #[inline]
    pub fn load_be64(&self, offset: usize) -> u64 {
        u64::from_be(self.word64(offset).load(Ordering::Acquire))
    }

    /// Stores `value` big-endian at `offset`, with release ordering.
    #[inline]
    pub fn store_be64(&self, offset: usize, value: u64) {
        self.word64(offset).store(value.to_be(), Ordering::Release)
    }
}

/// Writer of zeros. Whole pages of thin memory are returned to the kernel instead. In other memory,
/// ranges of a page or more are written with non-temporal stores where the processor has them,
/// because cleared memory is not used soon.
///
/// Until this value is dropped, on the thread that wrote the zeros, the stores are not ordered with
/// other stores, and adjacent pages are collected to be returned with one system call. Do not
/// report memory as cleared before the drop. The fence of the drop costs as much as clearing one
/// page, so one `Zeros` should serve many writes.
#[derive(Debug, Default)]
pub struct Zeros {
    streamed: bool,
    /// Whole pages collected for the next system call.
    pages: Option<DmaMemory>,
    /// Not `Send`: the fence of the drop orders only the stores of its own processor.
    _thread: PhantomData<*const ()>,
}

impl Zeros {
    /// Sets `len` bytes at `offset` of `memory` to zero. Panics if they lie outside.
    pub fn write(&mut self, memory: &DmaMemory, offset: usize, len: usize) {
        let at = memory.checked(offset, len);
        let thin = if len < STREAMED { None } else { memory.owner.downcast_ref::<Thin>() };
        let kept = thin.map_or(len, |thin| thin.kept(at, len));
        self.store(at, kept);
        if kept < len {
            self.discard(DmaMemory {
                base: at.wrapping_add(kept),
                len: len - kept,
                ..memory.clone()
            });
        }
    }

    /// Adds a part of thin memory to the collected pages, or flushes them first if the part is not
    /// adjacent.
    fn discard(&mut self, part: DmaMemory) {
        match &mut self.pages {
            Some(pages)
                if pages.base.wrapping_add(pages.len) == part.base
                    && Arc::ptr_eq(&pages.owner, &part.owner) =>
            {
                pages.len += part.len;
            }
            _ => {
                self.flush();
                self.pages = Some(part);
            }
        }
    }

    /// Returns the collected pages to the kernel; overwrites them with zeros if the kernel refuses.
    fn flush(&mut self) {
        if let Some(pages) = self.pages.take()
            && !pages.discard(0, pages.len)
        {
            self.store(pages.base, pages.len);
        }
    }

    /// Writes zeros over `len` bytes at `at`, a range that the caller has checked.
    fn store(&mut self, at: *mut u8, len: usize) {
        // SAFETY: the caller has checked the range and holds its owner. The drop of this value
        // orders the stores.
        unsafe {
            if len < STREAMED {
                ptr::write_bytes(at, 0, len);
            } else {
                stream_zeros(at, len);
                self.streamed = true;
            }
        }
    }
}

impl Drop for Zeros {
    fn drop(&mut self) {
        self.flush();
        if self.streamed {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // SAFETY: every x86-64 processor has the instruction; it accesses no memory.
            unsafe {
                std::arch::x86_64::_mm_sfence()
            }
        }
    }
}

/// Minimum length in bytes for non-temporal stores: shorter zeros go through the caches.
const STREAMED: usize = 4096;

/// Sets `len` bytes at `to` to zero with non-temporal stores, which do not read a cache line before
/// writing it and leave no line in a cache. Only a fence orders them with later stores.
///
/// # Safety
/// The bytes may be written through raw pointers, and a fence follows before any other thread is
/// notified of them.
unsafe fn stream_zeros(to: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{__m128i, _mm_setzero_si128, _mm_stream_si128};
        const LINE: usize = 64;
        const EACH: usize = size_of::<__m128i>();
        let head = to.align_offset(LINE).min(len);
        let lines = (len - head) / LINE;
        let tail = len - head - lines * LINE;
        // SAFETY: head, lines and tail make up the `len` bytes, which the caller guarantees to be
        // writable. Each line has the alignment that the store needs, and is written whole.
        unsafe {
            if head > 0 {
                ptr::write_bytes(to, 0, head);
            }
            let zeros = _mm_setzero_si128();
            for line in 0..lines {
                let line = to.add(head + line * LINE);
                for at in (0..LINE).step_by(EACH) {
                    _mm_stream_si128(line.add(at).cast(), zeros);
                }
            }
            if tail > 0 {
                ptr::write_bytes(to.add(len - tail), 0, tail);
            }
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: the caller's guarantee.
    unsafe {
        ptr::write_bytes(to, 0, len)
    }
}

/// Intended use of a prefetched cache line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PrefetchFor {
    /// To be read soon.
    Read,
    /// To be written soon.
    Write,
}

/// Prefetches a cache line. If another core owns the line, the transfer takes longer than a whole
/// WQE. The call does not wait and changes no byte.
#[inline(always)]
pub fn prefetch(line: *const u8, to: PrefetchFor) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: prefetch hints neither read nor write nor fault, whatever the address.
        // `prefetchw` has no effect on processors without it. The compiler does not assume
        // `prefetchw`, so the intrinsic for writing would compile to the one for reading; the line
        // would arrive in the shared state, and the write would have to wait anyway.
        unsafe {
            match to {
                PrefetchFor::Read => _mm_prefetch::<_MM_HINT_T0>(line.cast()),
                PrefetchFor::Write => std::arch::asm!(
                    "prefetchw [{}]",
                    in(reg) line,
                    options(nostack, preserves_flags, readonly)
                ),
            }
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (line, to);
}

/// Returns whether the byte at `at` belongs to [`DmaMemory::zeros`]. If so, it and the rest of its
/// range are always zero.
#[inline]
pub fn is_in_zeros(at: *const u8) -> bool {
    mapping::is_in_zeros(at)
}

/// Bytes of a range whose pages are mapped: pages in RAM, and pages that were only read, for which
/// the kernel maps its shared zero page.
#[cfg(test)]
pub(crate) fn mapped(memory: &DmaMemory) -> usize {
    use std::os::unix::fs::FileExt;
    const PRESENT: u64 = 1 << 63;
    let page = rustix::param::page_size();
    let mut entries = vec![0; memory.len() / page * 8];
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    pagemap.read_exact_at(&mut entries, memory.addr() / page as u64 * 8).unwrap();
    let present = |entry: &&[u8; 8]| u64::from_ne_bytes(**entry) & PRESENT != 0;
    entries.as_chunks().0.iter().filter(present).count() * page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no /proc and no madvise")]
    fn zeroing_thin_memory_discards_pages_behind_the_kept_part() {
        let (page, pages) = (rustix::param::page_size(), 64);
        let (kept, len) = (3 * page, pages * page);
        let m = DmaMemory::thin(len, page, kept - 1).unwrap();
        m.write(0, &vec![0xa5; len]);
        assert!(mapped(&m) >= len);
        // A range that is not page-aligned discards nothing, not even the whole pages inside, but
        // is zeroed.
        m.zero(10 * page + 1, 2 * page);
        assert!(mapped(&m) >= len);
        // A range across the end of the kept part.
        m.zero(page, 4 * page);
        assert_eq!(mapped(&m), len - 2 * page);
        m.zero(0, len);
        assert_eq!(mapped(&m), kept);
        m.write(len - 1, &[7]);
        assert_eq!(mapped(&m), kept + page);
        m.zero(0, len);
        let mut bytes = vec![1; len];
        m.read(0, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memfd and no madvise")]
    fn thin_file_is_shared_sealed_and_freed_by_zeros() {
        use std::os::unix::fs::{FileExt, MetadataExt};
        let (page, len) = (rustix::param::page_size(), 64 * rustix::param::page_size());
        let (m, file) = DmaMemory::thin_file(len, 2 * page).unwrap();
        let file = std::fs::File::from(file);
        let held = || file.metadata().unwrap().blocks() as usize * 512;
        assert_eq!(held(), 0, "no page before the first write");
        file.write_all_at(b"from outside", 5 * page as u64).unwrap();
        let mut text = [0; 12];
        m.read(5 * page, &mut text);
        assert_eq!((&text, held()), (b"from outside", page));
        m.write(0, &vec![0xa5; len]);
        let mut last = [0; 1];
        file.read_exact_at(&mut last, len as u64 - 1).unwrap();
        assert_eq!((last, held()), ([0xa5], len));
        m.zero(0, len);
        assert_eq!(held(), 2 * page, "the kept pages");
        let mut bytes = vec![1; len];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        assert!(file.set_len(0).is_err() && file.set_len(2 * len as u64).is_err());
    }

    #[test]
    fn zero_mapping_is_zero_and_shared() {
        let (one, other) = (DmaMemory::zeros(100).unwrap(), DmaMemory::zeros(1 << 20).unwrap());
        assert_eq!((one.addr(), one.len(), other.len()), (other.addr(), 4096, 1 << 20));
        let mut bytes = [1; 100];
        other.read((1 << 20) - 100, &mut bytes);
        assert_eq!(bytes, [0; 100]);
        assert!(is_in_zeros(one.as_ptr()) && !is_in_zeros(bytes.as_ptr()));
    }

    #[test]
    fn zeroing_changes_only_its_range() {
        let all = 3 * STREAMED;
        for (at, len) in [
            (0, 0),
            (5, 1),
            (1, STREAMED - 1),
            (0, STREAMED),
            (1, STREAMED),
            (63, STREAMED + 1),
            (64, STREAMED + 63),
            (7, 2 * STREAMED + 9),
            (STREAMED, 2 * STREAMED),
        ] {
            let m = DmaMemory::anonymous(all).unwrap();
            m.write(0, &vec![0xa5; all]);
            m.zero(at, len);
            let mut bytes = vec![0; all];
            m.read(0, &mut bytes);
            let is_right = |(i, byte): (usize, &u8)| (*byte == 0) == (at..at + len).contains(&i);
            assert!(bytes.iter().enumerate().all(is_right), "{len} bytes at {at}");
        }
    }

    #[test]
    fn copies_and_words_are_bounds_checked() {
        let m = DmaMemory::anonymous(100).unwrap();
        assert_eq!(m.len() % 4096, 0);
        m.write(8, &0x0102_0304_0506_0708u64.to_be_bytes());
        assert_eq!(m.load_be64(8), 0x0102_0304_0506_0708);
        assert_eq!(m.load_be32(12), 0x0506_0708);
        m.store_be64(16, 7);
        let mut out = [0; 8];
        m.read(16, &mut out);
        assert_eq!(out, 7u64.to_be_bytes());
        assert!(m.at(m.len(), 1).is_none());
        assert!(m.at(usize::MAX, 2).is_none());
        assert!(m.slice(m.len(), 0).is_some());
    }

    #[test]
    fn slice_keeps_the_mapping() {
        let s = {
            let m = DmaMemory::anonymous(4096).unwrap();
            m.write(4000, b"kept");
            m.slice(4000, 4).unwrap()
        };
        let mut out = [0; 4];
        s.read(0, &mut out);
        assert_eq!(&out, b"kept");
    }

    #[test]
    #[should_panic(expected = "outside a span")]
    fn reading_beyond_the_end_panics() {
        let m = DmaMemory::anonymous(4096).unwrap();
        m.read(4090, &mut [0; 8]);
    }
}

//! Memory that the NIC moves bytes in and out of.
//!
//! Such memory is shared with other processes, which may change it at any moment: it is never
//! behind a reference, only behind a base pointer, a length and an owner that keeps the mapping
//! alive. Every access names an offset and is checked against the length.
//!
//! Words that steer the NIC (doorbell records, queue indices, atomics) go through atomic loads and
//! stores of their natural size; bulk data through raw copies.

mod mapping;

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use mapping::{Mapping, Thin};

/// A span of memory mapped in this process, kept mapped by its owner.
///
/// Cloning shares the span; it does not copy it.
#[derive(Clone)]
pub struct DmaMemory {
    base: *mut u8,
    len: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the span outlives every clone (`owner`), and all access is by raw copies and atomics,
// which any thread may do.
unsafe impl Send for DmaMemory {}
// SAFETY: as above; no method hands out a reference into the span.
unsafe impl Sync for DmaMemory {}

impl fmt::Debug for DmaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DmaMemory({:p}, {} B)", self.base, self.len)
    }
}

impl DmaMemory {
    /// Describes `len` bytes at `base`.
    ///
    /// # Safety
    /// The bytes must stay mapped, readable and writable for as long as `owner` lives, and must be
    /// used by others only through raw pointers or atomics.
    pub unsafe fn from_raw(base: *mut u8, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { base, len, owner }
    }

    /// `len` zeroed bytes of this process's own, page-aligned in size and address.
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
    /// The caller has made sure that the file is as long as that and cannot shrink
    /// (`F_SEAL_SHRINK`): access to a page beyond the end of the file raises SIGBUS.
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

    /// `len` zeroed bytes of this process's own, thin provisioned: a page takes RAM from its first
    /// write on, and gives it back when zeros are written over the whole of it by [`Zeros`], or by
    /// the NIC from [`DmaMemory::zeros`]. The first `kept` bytes keep their RAM. The memory is used
    /// in units of `unit` bytes, at multiples of that.
    ///
    /// Fails with the system's error if the memory cannot be mapped.
    pub fn thin(len: usize, unit: usize, kept: usize) -> Result<Self, rustix::io::Errno> {
        let thin = Thin::new(len, unit, kept)?;
        let (base, len) = (thin.base, thin.len);
        // SAFETY: the mapping is unmapped only when `thin`, the owner, is dropped.
        Ok(unsafe { Self::from_raw(base, len, Arc::new(thin)) })
    }

    /// `len` bytes, rounded up to pages, that are zero for good, and take no RAM. They must not be
    /// written: the system ends a process that does.
    ///
    /// Fails with the system's error if the memory cannot be mapped.
    pub fn zeros(len: usize) -> Result<Self, rustix::io::Errno> {
        if len > mapping::ZEROS {
            return Self::anonymous(len);
        }
        let (base, len) = (mapping::zeros()?, mapping::page_multiple(len));
        // SAFETY: the process's zeros are never unmapped. They cannot be written, so that a write
        // is a fault and no data race; who registers them does so for reading.
        Ok(unsafe { Self::from_raw(base, len, Arc::new(())) })
    }

    /// Gives the pages of `len` bytes at `offset` back to the system, so that these bytes are zero.
    /// False, with nothing changed, unless the span is of [`DmaMemory::thin`], and the bytes are
    /// whole pages beyond what is kept. Panics if they lie outside the span.
    pub(crate) fn discard(&self, offset: usize, len: usize) -> bool {
        let at = self.checked(offset, len);
        self.owner.downcast_ref::<Thin>().is_some_and(|thin| thin.discard(at, len))
    }

    /// Whether other spans keep the same mapping.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.owner) > 1
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a span of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte's address in this process. Valid while this span or a clone lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    /// The address in this process as a number: the natural I/O virtual address of the span.
    pub fn addr(&self) -> u64 {
        self.base as u64
    }

    /// The part of the span at `offset`, `len` bytes; `None` if it reaches beyond the end.
    pub fn slice(&self, offset: usize, len: usize) -> Option<DmaMemory> {
        let base = self.at(offset, len)?;
        Some(DmaMemory { base, len, owner: self.owner.clone() })
    }

    /// Pointer to `len` bytes at `offset`; `None` if they reach beyond the end.
    #[inline]
    pub fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        if offset > self.len || len > self.len - offset {
            return None;
        }
        // SAFETY: offset <= self.len, so the result is within the span or one past its end.
        Some(unsafe { self.base.add(offset) })
    }

    #[inline]
    fn checked(&self, offset: usize, len: usize) -> *mut u8 {
        match self.at(offset, len) {
            Some(p) => p,
            None => panic!("{len} bytes at {offset} lie outside a span of {}", self.len),
        }
    }

    /// Copies bytes at `offset` out into `out`. Panics if they lie outside the span.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let p = self.checked(offset, out.len());
        // SAFETY: `checked` bounds the source; `out` is exclusively ours, so they do not overlap.
        unsafe { ptr::copy_nonoverlapping(p, out.as_mut_ptr(), out.len()) }
    }

    /// Copies `data` in at `offset`. Panics if it would lie outside the span.
    pub fn write(&self, offset: usize, data: &[u8]) {
        let p = self.checked(offset, data.len());
        // SAFETY: `checked` bounds the destination; nobody holds a reference into the span.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), p, data.len()) }
    }

    /// Begins to bring the cache line at `offset` near. Panics outside the span.
    #[inline]
    pub fn prefetch(&self, offset: usize, to: For) {
        prefetch(self.checked(offset, 1), to);
    }

    /// [`DmaMemory::write`] of a WQE's building block, by words: it was made of words a moment ago.
    #[inline]
    pub fn write_block(&self, offset: usize, block: &[u8; 64]) {
        let p = self.checked(offset, block.len()).cast::<u64>();
        assert!(p.is_aligned(), "write_block at {offset} is not aligned");
        for (i, word) in block.as_chunks().0.iter().enumerate() {
            // SAFETY: as in `write`; aligned.
            unsafe { p.add(i).write_volatile(u64::from_ne_bytes(*word)) }
        }
    }

    /// Sets `len` bytes at `offset` to zero, with [`Zeros`] of their own. Panics if they lie outside the span.
    pub fn zero(&self, offset: usize, len: usize) {
        Zeros::default().write(self, offset, len);
    }

    /// The 32-bit word at `offset` (a multiple of 4) as an atomic. Panics outside the span.
    pub fn word32(&self, offset: usize) -> &AtomicU32 {
        let p = self.checked(offset, 4);
        assert!((p as usize).is_multiple_of(4), "word32 at {offset} is not aligned");
        // SAFETY: in bounds and aligned; others touch the word through atomics or raw copies only.
        unsafe { AtomicU32::from_ptr(p.cast()) }
    }

    /// The 64-bit word at `offset` (a multiple of 8) as an atomic. Panics outside the span.
    pub fn word64(&self, offset: usize) -> &AtomicU64 {
        let p = self.checked(offset, 8);
        assert!((p as usize).is_multiple_of(8), "word64 at {offset} is not aligned");
        // SAFETY: in bounds and aligned; others touch the word through atomics or raw copies only.
        unsafe { AtomicU64::from_ptr(p.cast()) }
    }

    /// Loads the big-endian 32-bit word at `offset`, with acquire ordering.
    pub fn load_be32(&self, offset: usize) -> u32 {
        u32::from_be(self.word32(offset).load(Ordering::Acquire))
    }

    /// Stores `value` big-endian at `offset`, with release ordering.
    pub fn store_be32(&self, offset: usize, value: u32) {
        self.word32(offset).store(value.to_be(), Ordering::Release)
    }

    /// Loads the big-endian 64-bit word at `offset`, with acquire ordering.
    pub fn load_be64(&self, offset: usize) -> u64 {
        u64::from_be(self.word64(offset).load(Ordering::Acquire))
    }

    /// Stores `value` big-endian at `offset`, with release ordering.
    pub fn store_be64(&self, offset: usize, value: u64) {
        self.word64(offset).store(value.to_be(), Ordering::Release)
    }
}

/// Zeros on their way into memory. Whole pages of thin memory go back to the system instead. Of
/// other memory a page or more goes past the caches where the processor can do that: cleared memory
/// is not used soon.
///
/// Nothing may be told that memory is clear before this is dropped, on the thread that wrote the
/// zeros. The stores are not ordered with others until then, and pages that lie side by side go
/// back with one call to the system. To wait for the stores costs as much as a page of them, so
/// that is done once for many.
#[derive(Debug, Default)]
pub struct Zeros {
    streamed: bool,
    /// Whole pages that go back to the system next.
    pages: Option<DmaMemory>,
    /// Stores are ordered by the processor that made them.
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

    /// Adds a part of thin memory to the pages that go back, which it may follow.
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

    /// Gives the collected pages back; what the system does not take is written over.
    fn flush(&mut self) {
        if let Some(pages) = self.pages.take()
            && !pages.discard(0, pages.len)
        {
            self.store(pages.base, pages.len);
        }
    }

    /// Writes zeros over `len` bytes at `at`, which lie in memory that the caller has checked.
    fn store(&mut self, at: *mut u8, len: usize) {
        // SAFETY: the caller has checked the range, and holds its owner. The stores are ordered
        // when this is dropped.
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
            // SAFETY: every processor of this architecture has the instruction; it touches no memory.
            unsafe {
                std::arch::x86_64::_mm_sfence()
            }
        }
    }
}

/// Bytes from which on zeros are not worth a place in the caches.
const STREAMED: usize = 4096;

/// Sets `len` bytes at `to` to zero with stores that read no line before they write it and leave none in a cache. They
/// are ordered with later stores by a fence only.
///
/// # Safety
/// They lie in memory that may be written through raw pointers, and a fence follows before anything tells others of
/// them.
unsafe fn stream_zeros(to: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{__m128i, _mm_setzero_si128, _mm_stream_si128};
        const LINE: usize = 64;
        const EACH: usize = size_of::<__m128i>();
        let head = to.align_offset(LINE).min(len);
        let lines = (len - head) / LINE;
        let tail = len - head - lines * LINE;
        // SAFETY: head, lines and tail make up the `len` bytes, which the caller vouches for; a line is aligned to what
        // the store needs, and is written whole.
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
    // SAFETY: as the caller says.
    unsafe {
        ptr::write_bytes(to, 0, len)
    }
}

/// What a cache line is brought near for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum For {
    /// To be read soon.
    Read,
    /// To be written soon.
    Write,
}

/// Begins to bring the cache line of `line` near. It may be another core's, which takes longer than a whole WQE
/// does; nothing is waited for here, and no byte changes.
#[inline(always)]
pub(crate) fn prefetch(line: *const u8, to: For) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: hints read and write nothing, and raise no fault, wherever they point. `prefetchw` does nothing
        // on processors that do not have it. The intrinsic for writing would become the one for reading here,
        // since the compiler does not count on it: then the line comes shared, and the write waits all the same.
        unsafe {
            match to {
                For::Read => _mm_prefetch::<_MM_HINT_T0>(line.cast()),
                For::Write => std::arch::asm!(
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

/// Whether the byte at `at` is of [`DmaMemory::zeros`]: it and what follows in its span are zero
/// for good.
#[inline]
pub(crate) fn is_in_zeros(at: *const u8) -> bool {
    mapping::is_in_zeros(at)
}

/// Bytes of the pages of a span that are mapped: those in RAM, and those that only were read, for
/// which the system shows its page of zeros.
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
    fn zeros_over_thin_memory_give_its_pages_back_but_for_what_is_kept() {
        let (page, pages) = (rustix::param::page_size(), 64);
        let (kept, len) = (3 * page, pages * page);
        let m = DmaMemory::thin(len, page, kept - 1).unwrap();
        m.write(0, &vec![0xa5; len]);
        assert!(mapped(&m) >= len);
        // Not whole pages: what is whole in between stays too, and all is zero.
        m.zero(10 * page + 1, 2 * page);
        assert!(mapped(&m) >= len);
        // Over the border of what is kept.
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
    fn the_zeros_of_a_process_are_zero_and_one() {
        let (one, other) = (DmaMemory::zeros(100).unwrap(), DmaMemory::zeros(1 << 20).unwrap());
        assert_eq!((one.addr(), one.len(), other.len()), (other.addr(), 4096, 1 << 20));
        let mut bytes = [1; 100];
        other.read((1 << 20) - 100, &mut bytes);
        assert_eq!(bytes, [0; 100]);
        assert!(is_in_zeros(one.as_ptr()) && !is_in_zeros(bytes.as_ptr()));
    }

    #[test]
    fn zeros_go_where_they_belong_and_nowhere_else() {
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
    fn copies_and_words_stay_in_bounds() {
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
    fn a_slice_keeps_the_mapping() {
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

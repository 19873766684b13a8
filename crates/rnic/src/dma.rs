//! The NIC's own access to memory that others share: the one place of the engine with raw pointers.
//!
//! A [`Span`] is a range of host memory that passed a check. It is made in two places: from a
//! [`DmaMemory`] that a queue keeps ([`Span::of`]) and from an entry of the key table after the
//! protection check. Invariants:
//!
//! - A span is used within the step of the engine that made it, or kept beside the `DmaMemory` that
//!   it was made of. No step unmaps memory; only control verbs do.
//! - Nobody holds a reference into such memory. Others may change it at any moment.
//!
//! Order: the last (up to 8) bytes of a copy are stored after all others, so that a reader who sees
//! them, with acquire ordering, sees the rest.

use crate::crc::Sum;
use crate::memory::{DmaMemory, For, is_in_zeros, prefetch};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence, fence};

/// A checked range of memory. See the module for what keeps it valid.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    ptr: *mut u8,
    len: u64,
}

// SAFETY: a span is a pointer to memory of the process, not of a thread; access is by raw copies
// and atomics.
unsafe impl Send for Span {}

impl Span {
    /// No bytes.
    pub const EMPTY: Span = Span { ptr: ptr::null_mut(), len: 0 };

    /// All of `memory`, which the caller keeps as long as the span.
    pub fn of(memory: &DmaMemory) -> Self {
        Self { ptr: memory.as_ptr(), len: memory.len() as u64 }
    }

    /// `bytes` as a source to copy from, within the step that holds them.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self { ptr: bytes.as_ptr().cast_mut(), len: bytes.len() as u64 }
    }

    /// `bytes` as a target to copy to, within the step that holds them.
    pub fn of_bytes_mut(bytes: &mut [u8]) -> Self {
        Self { ptr: bytes.as_mut_ptr(), len: bytes.len() as u64 }
    }

    /// Bytes.
    pub fn len(self) -> u64 {
        self.len
    }

    /// Where this span starts in `outer`, of which it is a part.
    pub fn offset_in(self, outer: Span) -> u64 {
        (self.ptr as u64).wrapping_sub(outer.ptr as u64)
    }

    /// Whether all bytes are zero for good: those of [`DmaMemory::zeros`].
    #[inline]
    pub fn is_zeros(self) -> bool {
        is_in_zeros(self.ptr)
    }

    /// `len` bytes at `offset`, which the caller has checked to lie inside.
    #[inline]
    pub fn part(self, offset: u64, len: u64) -> Span {
        debug_assert!(offset <= self.len && len <= self.len - offset);
        // A null pointer stands for no bytes; wrapping keeps that harmless.
        Span { ptr: self.ptr.wrapping_add(offset as usize), len }
    }

    /// Copies as many bytes as this span has from `from`, which has at least as many. They may
    /// overlap.
    #[inline]
    pub fn copy_from(self, from: Span) {
        assert!(self.len <= from.len);
        // SAFETY: both ranges passed their checks (module invariants), and are at least `self.len`
        // long.
        unsafe { move_bytes(self.ptr, from.ptr, self.len as usize) }
    }

    /// As [`Span::copy_from`], into memory that is ours alone, with the sum of what was copied. None, and nothing copied,
    /// where there is no sum of so many bytes, or not on this CPU.
    #[inline]
    pub fn copy_summed(self, from: Span) -> Option<Sum> {
        assert!(self.len <= from.len);
        // SAFETY: as in `copy_from`; what is ours alone does not overlap with what passed a check.
        unsafe { Sum::copying(self.ptr, from.ptr, self.len as usize) }
    }

    /// Stores `value` big-endian as 8 bytes.
    #[inline]
    pub fn put_be64(self, value: u64) {
        self.copy_from(Span::of_bytes(&value.to_be_bytes()));
    }

    /// Copies bytes from `offset` out into `out`. The source is read once.
    #[inline]
    pub fn fetch(self, offset: usize, out: &mut [u8]) {
        let len = out.len();
        assert!(offset as u64 + len as u64 <= self.len);
        // SAFETY: in bounds by the assertion; `out` is ours alone, so they do not overlap.
        unsafe { ptr::copy_nonoverlapping(self.ptr.add(offset), out.as_mut_ptr(), len) }
        // The bytes may change under us: what was copied must not be read from there again.
        compiler_fence(Ordering::SeqCst);
    }

    /// Copies the 64-byte block at `offset` out into `out`.
    #[inline]
    pub fn fetch_block(self, offset: usize, out: &mut [u8; 64]) {
        self.fetch(offset, out)
    }

    /// Begins to bring the cache line at `offset` near.
    #[inline(always)]
    pub fn prefetch(self, offset: u64, to: For) {
        debug_assert!(offset < self.len);
        prefetch(self.ptr.wrapping_add(offset as usize), to);
    }

    /// True for 8 bytes that are aligned.
    pub fn is_word(self) -> bool {
        self.len == 8 && self.ptr.cast::<u64>().is_aligned()
    }

    fn word64(&self, offset: u64) -> &AtomicU64 {
        assert!(offset + 8 <= self.len);
        let p = self.ptr.wrapping_add(offset as usize).cast::<u64>();
        assert!(p.is_aligned());
        // SAFETY: in bounds and aligned; the memory is valid by the module invariants, and others
        // use it through atomics or raw copies.
        unsafe { AtomicU64::from_ptr(p) }
    }

    fn word32(&self, offset: u64) -> &AtomicU32 {
        assert!(offset + 4 <= self.len);
        let p = self.ptr.wrapping_add(offset as usize).cast::<u32>();
        assert!(p.is_aligned());
        // SAFETY: as in `word64`.
        unsafe { AtomicU32::from_ptr(p) }
    }

    /// Stores a big-endian 8-byte word at `offset` (aligned).
    #[inline]
    pub fn store_be64(&self, offset: u64, value: u64, order: Ordering) {
        self.word64(offset).store(value.to_be(), order)
    }

    /// Loads the big-endian 8-byte word at `offset` (aligned).
    #[inline]
    pub fn load_be64(&self, offset: u64, order: Ordering) -> u64 {
        u64::from_be(self.word64(offset).load(order))
    }

    /// Stores what `change` makes of the big-endian 8-byte word at the start (aligned), if it makes
    /// anything of it; gives the old one. Atomic against the NIC, whose thread this is, and against the CPUs that
    /// change the word by atomics of their own.
    ///
    /// Who changes it without end from a CPU does not hold the NIC up: after [`UPDATES`] attempts it only stores.
    #[inline]
    pub fn update_be64(self, change: impl Fn(u64) -> Option<u64>) -> u64 {
        let word = self.word64(0);
        let mut found = word.load(Ordering::Acquire);
        for _ in 0..UPDATES {
            let old = u64::from_be(found);
            let Some(new) = change(old) else { return old };
            let (stored, failed) = (Ordering::AcqRel, Ordering::Acquire);
            match word.compare_exchange(found, new.to_be(), stored, failed) {
                Ok(_) => return old,
                Err(now) => found = now,
            }
        }
        let old = u64::from_be(found);
        if let Some(new) = change(old) {
            word.store(new.to_be(), Ordering::Release);
        }
        old
    }

    /// Loads the big-endian 4-byte word at `offset` (aligned).
    #[inline]
    pub fn load_be32(&self, offset: u64, order: Ordering) -> u32 {
        u32::from_be(self.word32(offset).load(order))
    }

    /// True if the host-endian flag at `offset` was set, for such an event; it is cleared then. The
    /// caller has put a full fence before this.
    #[inline]
    pub fn take_flag(&self, offset: u64, solicited: bool) -> bool {
        crate::port::handshake::disarm(self.word32(offset), solicited)
    }
}

/// Attempts of an atomic, each of which fails only if a CPU has changed the word since the one before.
const UPDATES: u32 = 1000;

/// Copies `len` bytes as memmove does, the last up to 8 of them last.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes.
#[inline]
unsafe fn move_bytes(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: all accesses lie within the `len` bytes of either range: the caller's promise. Words
    // are read and written unaligned, unless alignment was tested.
    unsafe {
        match len {
            0 => {}
            1 => *to = *from,
            2 => to.cast::<u16>().write_unaligned(from.cast::<u16>().read_unaligned()),
            3 => {
                let (a, b) = (from.cast::<u16>().read_unaligned(), *from.add(2));
                to.cast::<u16>().write_unaligned(a);
                *to.add(2) = b;
            }
            4..8 => {
                let last = len - 4;
                let a = from.cast::<u32>().read_unaligned();
                let b = from.add(last).cast::<u32>().read_unaligned();
                to.cast::<u32>().write_unaligned(a);
                to.add(last).cast::<u32>().write_unaligned(b);
            }
            8 => store_word(to, from.cast::<u64>().read_unaligned()),
            9..=16 => {
                let last = len - 8;
                let a = from.cast::<u64>().read_unaligned();
                let b = from.add(last).cast::<u64>().read_unaligned();
                to.cast::<u64>().write_unaligned(a);
                store_word(to.add(last), b);
            }
            _ => {
                let last = len - 8;
                let b = from.add(last).cast::<u64>().read_unaligned();
                ptr::copy(from, to, last);
                store_word(to.add(last), b);
            }
        }
    }
}

/// Stores 8 bytes after everything before; at once where they are aligned.
///
/// # Safety
/// `to` is writable for 8 bytes.
#[inline]
unsafe fn store_word(to: *mut u8, word: u64) {
    let p = to.cast::<u64>();
    if p.is_aligned() {
        // SAFETY: writable by the caller's promise, and aligned.
        unsafe { AtomicU64::from_ptr(p) }.store(word, Ordering::Release);
    } else {
        fence(Ordering::Release);
        // SAFETY: writable by the caller's promise.
        unsafe { p.write_unaligned(word) }
    }
}

/// Copies `len` bytes of the concatenation of `from` over those of `to`, starting `from_skip` and
/// `to_skip` bytes into them. Both are long enough. Empty spans are allowed.
pub(crate) fn copy_lists(
    to: &[Span],
    mut to_skip: u64,
    from: &[Span],
    mut from_skip: u64,
    mut len: u64,
) {
    let (mut targets, mut sources) = (to.iter().copied(), from.iter().copied());
    let (mut target, mut source) = (Span::EMPTY, Span::EMPTY);
    while len > 0 {
        while target.len <= to_skip {
            to_skip -= target.len;
            target = targets.next().expect("the target is as long as the caller says");
        }
        while source.len <= from_skip {
            from_skip -= source.len;
            source = sources.next().expect("the source is as long as the caller says");
        }
        let n = len.min(target.len - to_skip).min(source.len - from_skip);
        target.part(to_skip, n).copy_from(source.part(from_skip, n));
        to_skip += n;
        from_skip += n;
        len -= n;
    }
}

/// Copies as many bytes as `to` has, which is ours alone, from the concatenation of `from`, `skip` bytes into it; gives
/// their sum, if that is `summed` and they lie in one span and have one. The source is long enough.
#[inline]
pub(crate) fn copy_out(to: Span, from: &[Span], skip: u64, summed: bool) -> Option<Sum> {
    let mut before = skip;
    for span in if summed { from } else { &[] } {
        if before < span.len {
            if to.len <= span.len - before
                && let Some(sum) = to.copy_summed(span.part(before, to.len))
            {
                return Some(sum);
            }
            break;
        }
        before -= span.len;
    }
    copy_lists(&[to], 0, from, skip, to.len);
    None
}

/// A list of spans that is filled anew for each WQE and never allocates.
pub(crate) struct SpanList {
    spans: [Span; SpanList::MAX],
    count: usize,
    total: u64,
}

impl SpanList {
    /// As many as the segments of the longest WQE.
    pub const MAX: usize = crate::wqe::MAX_BYTES / crate::wqe::SEGMENT;

    pub fn new() -> Self {
        Self { spans: [Span::EMPTY; Self::MAX], count: 0, total: 0 }
    }

    #[inline]
    pub fn clear(&mut self) {
        self.count = 0;
        self.total = 0;
    }

    #[inline]
    pub fn push(&mut self, span: Span) {
        self.spans[self.count] = span;
        self.count += 1;
        self.total += span.len;
    }

    /// Bytes in all.
    #[inline]
    pub fn total(&self) -> u64 {
        self.total
    }

    #[inline]
    pub fn as_slice(&self) -> &[Span] {
        &self.spans[..self.count]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn atomics_lose_no_change_of_a_cpu_and_no_cpu_loses_one_of_theirs() {
        let changes = if cfg!(miri) { 100 } else { 200_000 };
        let word = AtomicU64::new(0);
        let all = AtomicU64::new(0);
        // A lost change shows as a bit that is set when it should not be, or as a sum that is too small.
        std::thread::scope(|scope| {
            let cpu = scope.spawn(|| {
                for _ in 0..changes {
                    let mut found = word.load(Ordering::Relaxed);
                    while let Err(now) = word.compare_exchange(
                        found,
                        (u64::from_be(found) + (1 << 32)).to_be(),
                        Ordering::AcqRel,
                        Ordering::Acquire,
                    ) {
                        found = now;
                    }
                }
            });
            while !cpu.is_finished() || all.load(Ordering::Relaxed) < changes {
                let span = Span { ptr: word.as_ptr().cast(), len: 8 };
                span.update_be64(|value| Some(value + 1));
                all.fetch_add(1, Ordering::Relaxed);
            }
        });
        let value = u64::from_be(word.into_inner());
        assert_eq!((value >> 32, value & 0xffff_ffff), (changes, all.into_inner()));
    }

    #[test]
    fn copies_of_every_small_length_and_overlap_are_memmoves() {
        for len in 0..80usize {
            for (from, to) in [(0usize, 100usize), (0, 3), (3, 0), (0, 9), (9, 0), (5, 5)] {
                let mut bytes: Vec<u8> = (0..200).map(|i| i as u8).collect();
                let mut want = bytes.clone();
                want.copy_within(from..from + len, to);
                let all = Span { ptr: bytes.as_mut_ptr(), len: 200 };
                let (len, from, to) = (len as u64, from as u64, to as u64);
                all.part(to, len).copy_from(all.part(from, len));
                assert_eq!(bytes, want, "{len} bytes from {from} to {to}");
            }
        }
    }

    #[test]
    fn what_is_copied_out_is_whole_with_a_sum_or_without() {
        let source: Vec<u8> = (0..3000u32).map(|i| (i * 7) as u8).collect();
        let from: Vec<Span> = [&source[..5], &source[5..5], &source[5..1000], &source[1000..]]
            .map(Span::of_bytes)
            .into();
        for (skip, len) in [
            (0, 0),
            (0, 256),
            (5, 256),
            (5, 257),
            (700, 256),
            (900, 256),
            (1000, 1024),
            (2900, 100),
        ] {
            let mut target = vec![0; len];
            let sum = copy_out(Span::of_bytes_mut(&mut target), &from, skip as u64, true);
            assert_eq!(target, source[skip..skip + len], "{len} bytes at {skip}");
            let one =
                [5..1000, 1000..3000].iter().any(|r| r.contains(&skip) && skip + len <= r.end);
            let has_sum = one && Sum::of(&target).is_some();
            assert_eq!(sum.is_some(), has_sum, "{len} bytes at {skip}");
            target.fill(0);
            let sum = copy_out(Span::of_bytes_mut(&mut target), &from, skip as u64, false);
            assert!(sum.is_none() && target == source[skip..skip + len], "{len} bytes at {skip}");
        }
    }

    #[test]
    fn lists_are_copied_across_their_seams() {
        let source: Vec<u8> = (1..=30).collect();
        let from: Vec<Span> = [&source[..1], &source[1..10], &source[10..10], &source[10..30]]
            .map(Span::of_bytes)
            .into();
        for (skip, at, len) in
            (0..10).flat_map(|s| (0..5).flat_map(move |a| (0..=19).map(move |l| (s, a, l))))
        {
            let mut target = [0u8; 24];
            let all = Span { ptr: target.as_mut_ptr(), len: 24 };
            let to = [all.part(0, 3), all.part(3, 0), all.part(3, 7), all.part(10, 14)];
            copy_lists(&to, at, &from, skip, len);
            let (skip, at, len) = (skip as usize, at as usize, len as usize);
            assert_eq!(target[at..at + len], source[skip..skip + len]);
            assert!(target[..at].iter().chain(&target[at + len..]).all(|&b| b == 0));
        }
    }
}

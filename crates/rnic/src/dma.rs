//! Access of the NIC to memory that other processes share: the only module of the engine with raw
//! pointers.
//!
//! A [`Span`] is a range of host memory that passed a check. Spans are created from a [`DmaMemory`]
//! that a queue keeps ([`Span::of`]), and from an entry of the key table after the protection
//! check. Invariants:
//!
//! - A span is used only within the step of the engine that created it, or is stored beside its
//!   `DmaMemory`. No step unmaps memory; only control verbs do.
//! - No reference into such memory exists. Other processes may change it at any moment.
//!
//! Order: the last (up to 8) bytes of a copy are stored after all other bytes. A reader that sees
//! the last bytes, with acquire ordering, therefore sees the rest.

use crate::crc::Sum;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence, fence};
use verbs::memory::{is_in_zeros, prefetch};
use verbs::{DmaMemory, PrefetchFor};

/// A checked range of memory. The module documentation states what keeps it valid.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    ptr: *mut u8,
    len: u64,
}

// SAFETY: a span points to memory of the process, not of a thread; access is by raw copies and
// atomics.
unsafe impl Send for Span {}

impl Span {
    /// The empty range.
    pub const EMPTY: Span = Span { ptr: ptr::null_mut(), len: 0 };

    /// The whole of `memory`, which the caller keeps for as long as the span.
    pub fn of(memory: &DmaMemory) -> Self {
        Self { ptr: memory.as_ptr(), len: memory.len() as u64 }
    }

    /// `bytes` as the source of a copy, within the step that borrows them.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self { ptr: bytes.as_ptr().cast_mut(), len: bytes.len() as u64 }
    }

    /// `bytes` as the target of a copy, within the step that borrows them.
    pub fn of_bytes_mut(bytes: &mut [u8]) -> Self {
        Self { ptr: bytes.as_mut_ptr(), len: bytes.len() as u64 }
    }

    /// Length in bytes.
    pub fn len(self) -> u64 {
        self.len
    }

    /// Offset of this span in `outer`, which contains it.
    pub fn offset_in(self, outer: Span) -> u64 {
        (self.ptr as u64).wrapping_sub(outer.ptr as u64)
    }

    /// Returns whether the bytes belong to [`DmaMemory::zeros`] and are therefore always zero.
    #[inline]
    pub fn is_zeros(self) -> bool {
        is_in_zeros(self.ptr)
    }

    /// The `len` bytes at `offset`. The caller has checked that they lie inside.
    #[inline]
    pub fn part(self, offset: u64, len: u64) -> Span {
        debug_assert!(offset <= self.len && len <= self.len - offset);
        // An empty span may have a null pointer, for which `wrapping_add` is defined.
        Span { ptr: self.ptr.wrapping_add(offset as usize), len }
    }

    /// Fills this span with the first bytes of `from`, which is at least as long. The two may
    /// overlap.
    #[inline]
    pub fn copy_from(self, from: Span) {
        assert!(self.len <= from.len);
        // SAFETY: both ranges passed their checks (module invariants) and are at least `self.len`
        // long.
        unsafe { move_bytes(self.ptr, from.ptr, self.len as usize) }
    }

    /// Copies like [`Span::copy_from`], into memory that only the NIC uses, and returns the CRC sum
    /// of the copied bytes. Returns `None`, and copies nothing, if this length has no sum or the
    /// CPU cannot compute sums.
    #[inline]
    pub fn copy_summed(self, from: Span) -> Option<Sum> {
        assert!(self.len <= from.len);
        // SAFETY: as in `copy_from`; memory that only the NIC uses does not overlap with a checked
        // range.
        unsafe { Sum::copying(self.ptr, from.ptr, self.len as usize) }
    }

    /// Stores `value` big-endian as 8 bytes.
    #[inline]
    pub fn put_be64(self, value: u64) {
        self.copy_from(Span::of_bytes(&value.to_be_bytes()));
    }

    /// Copies bytes from `offset` into `out`. Every source byte is read once.
    #[inline]
    pub fn fetch(self, offset: usize, out: &mut [u8]) {
        let len = out.len();
        assert!(offset as u64 + len as u64 <= self.len);
        // SAFETY: in bounds by the assertion; `out` is an exclusive borrow, so they do not overlap.
        unsafe { ptr::copy_nonoverlapping(self.ptr.add(offset), out.as_mut_ptr(), len) }
        // The source may change at any moment: the compiler must not read it again in place of
        // `out`.
        compiler_fence(Ordering::SeqCst);
    }

    /// Copies the 64-byte block at `offset` into `out`.
    #[inline]
    pub fn fetch_block(self, offset: usize, out: &mut [u8; 64]) {
        self.fetch(offset, out)
    }

    /// Prefetches the cache line at `offset`.
    #[inline(always)]
    pub fn prefetch(self, offset: u64, to: PrefetchFor) {
        debug_assert!(offset < self.len);
        prefetch(self.ptr.wrapping_add(offset as usize), to);
    }

    /// True if the span is 8 aligned bytes.
    pub fn is_word(self) -> bool {
        self.len == 8 && self.ptr.cast::<u64>().is_aligned()
    }

    fn word64(&self, offset: u64) -> &AtomicU64 {
        assert!(offset + 8 <= self.len);
        let p = self.ptr.wrapping_add(offset as usize).cast::<u64>();
        assert!(p.is_aligned());
        // SAFETY: in bounds and aligned; the memory is valid by the module invariants, and all
        // other code accesses it through atomics or raw copies.
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

    /// Atomically updates the big-endian 8-byte word at the start (aligned) and returns the old
    /// value. If `change` returns `None`, the word is not changed. The update is atomic with
    /// respect to the NIC, which has one thread, and to CPUs that change the word with atomic
    /// instructions.
    ///
    /// After [`UPDATES`] failed attempts the new value is stored without comparison. Otherwise a
    /// CPU that changes the word in an endless loop would block the NIC.
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

    /// Clears the host-endian flag at `offset` and returns true, if the flag was set for this kind
    /// of event (any completion, or only solicited ones). The caller has executed a full fence
    /// before this call.
    #[inline]
    pub fn take_flag(&self, offset: u64, solicited: bool) -> bool {
        crate::port::handshake::disarm(self.word32(offset), solicited)
    }
}

/// Maximum number of compare-and-swap attempts. An attempt fails only if a CPU has changed the word
/// since the previous attempt.
const UPDATES: u32 = 1000;

/// Copies `len` bytes like memmove; the last up to 8 bytes are stored last.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes.
#[inline]
unsafe fn move_bytes(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: all accesses lie within the `len` bytes of either range, which the caller guarantees.
    // Words are read and written unaligned unless alignment was tested.
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

/// Stores 8 bytes after all earlier stores; as one store if aligned.
///
/// # Safety
/// `to` is writable for 8 bytes.
#[inline]
unsafe fn store_word(to: *mut u8, word: u64) {
    let p = to.cast::<u64>();
    if p.is_aligned() {
        // SAFETY: writable by the caller's guarantee, and aligned.
        unsafe { AtomicU64::from_ptr(p) }.store(word, Ordering::Release);
    } else {
        fence(Ordering::Release);
        // SAFETY: writable by the caller's guarantee.
        unsafe { p.write_unaligned(word) }
    }
}

/// Copies `len` bytes between two lists of spans, starting `from_skip` bytes into the concatenation
/// of `from` and `to_skip` bytes into that of `to`. Both lists are long enough. Empty spans are
/// allowed.
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
            target = targets.next().expect("the target is at least `to_skip + len` long");
        }
        while source.len <= from_skip {
            from_skip -= source.len;
            source = sources.next().expect("the source is at least `from_skip + len` long");
        }
        let n = len.min(target.len - to_skip).min(source.len - from_skip);
        target.part(to_skip, n).copy_from(source.part(from_skip, n));
        to_skip += n;
        from_skip += n;
        len -= n;
    }
}

/// Fills `to`, which only the NIC uses, from the concatenation of `from`, starting at byte `skip`.
/// Returns the CRC sum if `summed` is set, the bytes lie in one span, and their length has a sum.
/// The source is long enough.
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

/// A list of spans that is refilled for each WQE and never allocates.
pub(crate) struct SpanList {
    spans: [Span; SpanList::MAX],
    count: usize,
    total: u64,
}

impl SpanList {
    /// Maximum number of spans: the segments of the longest WQE.
    pub const MAX: usize = verbs::wqe::MAX_BYTES / verbs::wqe::SEGMENT;

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

    /// Total length in bytes.
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
    fn atomics_of_the_nic_and_of_a_cpu_lose_no_update() {
        let changes = if cfg!(miri) { 100 } else { 200_000 };
        let word = AtomicU64::new(0);
        let all = AtomicU64::new(0);
        // A lost update shows as a wrong bit or as a sum that is too small.
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
    fn overlapping_copies_of_every_small_length_are_memmoves() {
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
    fn copy_out_copies_all_bytes_with_and_without_a_sum() {
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
    fn list_copies_cross_span_boundaries() {
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

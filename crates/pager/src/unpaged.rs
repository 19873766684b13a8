//! Measurement of the program's resident memory that the pager does not page, by kind.
//!
//! The pager pages memory from `malloc`, from private anonymous `mmap` calls through libc, and the
//! `.bss` of the program. A program may have gigabytes of other memory: a Go runtime maps its heap
//! by raw system calls, and shared memory is not private. [`UnpagedUsage`] reports
//! it. It is read from `/proc/self/smaps`, for which the kernel walks the page tables. So the
//! worker, while it waits, reads the cheap `/proc/self/statm` at intervals, and reads `smaps` only
//! when resident memory has changed by an eighth since the last measurement. The fault path takes
//! no part.
//!
//! The code here does not allocate, because the program's threads also run it, at exit.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::sys::{self, PAGE_BYTES};

/// Resident bytes outside of the region, by kind. The pager's own memory is excluded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnpagedUsage {
    /// Anonymous mappings: made by raw system calls, executable, locked or beyond the extents.
    pub mapped: u64,
    /// The heap of `brk`, which the preloaded `malloc` does not use.
    pub heap: u64,
    /// Modified pages of private file mappings, including `.data` and a small `.bss`.
    pub files: u64,
    /// Stacks.
    pub stacks: u64,
    /// Shared memory: `memfd`, `shm_open`, System V, `MAP_SHARED | MAP_ANONYMOUS`.
    pub shared: u64,
    /// Huge pages of hugetlbfs.
    pub huge: u64,
}

impl UnpagedUsage {
    /// Returns the sum of all kinds.
    pub fn bytes(&self) -> u64 {
        self.mapped + self.heap + self.files + self.stacks + self.shared + self.huge
    }

    /// Parses a file in the format of `/proc/self/smaps`. `is_own` returns true for the address
    /// range of a mapping that is the region's or the pager's.
    ///
    /// # Errors
    /// Errors of reading `smaps`.
    pub fn read(mut smaps: impl Read, is_own: impl Fn(&Range<usize>) -> bool) -> io::Result<Self> {
        let mut reader =
            Reader { is_own, usage: Self::default(), mapping: Mapping::default(), program: None };
        // Lines longer than the buffer have long paths; their beginning is sufficient.
        let mut buffer = [0u8; PAGE_BYTES];
        let (mut filled, mut skipping) = (0, false);
        loop {
            let got = match smaps.read(&mut buffer[filled..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            filled += got;
            let mut start = 0;
            while let Some(len) = buffer[start..filled].iter().position(|&byte| byte == b'\n') {
                if !std::mem::take(&mut skipping) {
                    reader.line(&buffer[start..start + len]);
                }
                start += len + 1;
            }
            if start == 0 && filled == buffer.len() {
                if !std::mem::replace(&mut skipping, true) {
                    reader.line(&buffer[..filled]);
                }
                start = filled;
            }
            buffer.copy_within(start..filled, 0);
            filled -= start;
            if got == 0 {
                reader.end_mapping();
                return Ok(reader.usage);
            }
        }
    }
}

/// Kind of a mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    /// The region, or memory of the pager.
    #[default]
    Own,
    Mapped,
    Heap,
    File,
    Stack,
    Shared,
}

/// A mapping, as far as its lines have been read.
#[derive(Default)]
struct Mapping {
    end: usize,
    kind: Kind,
    /// The mapping is of the program's own executable.
    is_program: bool,
    /// Anonymous and without access. Directly below a stack, such a mapping is its guard.
    is_guard: bool,
    rss: u64,
    anonymous: u64,
    huge: u64,
}

struct Reader<F> {
    is_own: F,
    usage: UnpagedUsage,
    mapping: Mapping,
    /// Inode of the first mapping's file: the lowest mappings are the program's executable.
    program: Option<u64>,
}

/// Names of memory without a file on disk, which may be mapped shared.
const SHARED_MEMORY: [&[u8]; 5] =
    [b"/memfd:", b"/dev/shm/", b"/dev/zero", b"/SYSV", b"[anon_shmem:"];
/// Assumed maximum size of a library's `.bss`. A larger anonymous mapping after a library is an
/// unrelated mapping.
const LIBRARY_BSS_MAX: usize = 1 << 20;

impl<F: Fn(&Range<usize>) -> bool> Reader<F> {
    fn line(&mut self, line: &[u8]) {
        match line.first() {
            // A field: `Name:   123 kB`. Names begin with a capital; addresses have small letters.
            Some(byte) if byte.is_ascii_uppercase() => self.field(line),
            Some(_) => self.header(line),
            None => {}
        }
    }

    fn field(&mut self, line: &[u8]) {
        let mapping = &mut self.mapping;
        let (name, value) = line.split_at(line.iter().position(|&b| b == b':').unwrap_or(0));
        let sum = match name {
            b"Rss" => &mut mapping.rss,
            b"Anonymous" => &mut mapping.anonymous,
            b"Shared_Hugetlb" | b"Private_Hugetlb" => &mut mapping.huge,
            _ => return,
        };
        *sum += 1024 * number(value);
    }

    /// Parses a header line: `start-end rwxp offset device inode   path`.
    fn header(&mut self, line: &[u8]) {
        self.end_mapping();
        let before = std::mem::take(&mut self.mapping);
        let mut words = line.split(|&byte| byte == b' ').filter(|word| !word.is_empty());
        let mut next = || words.next().unwrap_or_default();
        let (range, access, _offset, _device) = (addresses(next()), next(), next(), next());
        let (inode, path) = (number(next()), next());
        let program = *self.program.get_or_insert(inode);
        let follows = before.end == range.start;
        let anonymous = path.is_empty() || path.starts_with(b"[anon:");
        let mut is_program = !anonymous && inode == program;
        let kind = if (self.is_own)(&range) || path.starts_with(b"/memfd:granary-") {
            Kind::Own
        } else if access.ends_with(b"s") {
            let memory = SHARED_MEMORY.iter().any(|name| path.starts_with(name));
            // The kernel can write back and drop the pages of a file.
            if memory { Kind::Shared } else { Kind::File }
        } else if path == b"[heap]" {
            Kind::Heap
        } else if path == b"[stack]" || anonymous && follows && before.is_guard {
            Kind::Stack
        } else if !anonymous {
            Kind::File
        } else if follows
            && before.kind == Kind::File
            && (before.is_program || range.len() <= LIBRARY_BSS_MAX)
        {
            // `.bss` directly follows the mapping of its file.
            is_program = before.is_program;
            Kind::File
        } else {
            Kind::Mapped
        };
        let is_guard = anonymous && access.starts_with(b"---");
        self.mapping = Mapping { end: range.end, kind, is_program, is_guard, ..Mapping::default() };
    }

    fn end_mapping(&mut self) {
        let Mapping { kind, rss, anonymous, huge, .. } = self.mapping;
        match kind {
            Kind::Own => return,
            Kind::Mapped => self.usage.mapped += anonymous,
            Kind::Heap => self.usage.heap += anonymous,
            Kind::File => self.usage.files += anonymous,
            Kind::Stack => self.usage.stacks += anonymous,
            Kind::Shared => self.usage.shared += rss,
        }
        self.usage.huge += huge;
    }
}

/// Parses the decimal digits of a text as a number.
fn number(text: &[u8]) -> u64 {
    let digits = text.iter().filter(|byte| byte.is_ascii_digit());
    digits.fold(0u64, |sum, &digit| sum.wrapping_mul(10).wrapping_add(u64::from(digit - b'0')))
}

/// Parses `start-end` in hexadecimal.
fn addresses(text: &[u8]) -> Range<usize> {
    let hex = |digits: &[u8]| {
        let digit = |byte: &u8| (*byte as char).to_digit(16).unwrap_or(0) as usize;
        digits.iter().fold(0usize, |sum, byte| sum << 4 | digit(byte))
    };
    let dash = text.iter().position(|&byte| byte == b'-').unwrap_or(text.len());
    hex(&text[..dash])..hex(text.get(dash + 1..).unwrap_or_default())
}

/// Cheap sample of the process's resident pages, from `/proc/self/statm`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sample {
    /// Anonymous pages.
    anonymous: u64,
    /// Anonymous pages in excess of those counted as the region's.
    beside: u64,
    /// Pages of files and of shared memory.
    shared: u64,
}

impl Sample {
    /// Takes a sample. `of_region` is the number of the region's resident pages; it includes
    /// mappings of the zero page, which the kernel does not count as resident.
    fn take(of_region: u64) -> io::Result<Self> {
        let mut text = [0u8; 128];
        let got = sys::open_own(c"/proc/self/statm")?.read(&mut text)?;
        let mut numbers = text[..got].split(|&byte| byte == b' ').map(number).skip(1);
        let mut next = || numbers.next().unwrap_or(0);
        let (resident, shared) = (next(), next());
        let anonymous = resident.saturating_sub(shared);
        Ok(Self { anonymous, beside: anonymous.saturating_sub(of_region), shared })
    }

    /// Returns true if a number differs enough from `before` to justify reading `smaps`.
    fn differs_from(&self, before: &Self) -> bool {
        let differs = |now: u64, before: u64| now.abs_diff(before) > (before / 8).max(SMALL_PAGES);
        differs(self.anonymous, before.anonymous)
            || differs(self.beside, before.beside)
            || differs(self.shared, before.shared)
    }
}

/// Schedule of the measurements and result of the last sample. One thread at a time measures.
#[derive(Debug, Default)]
pub(crate) struct UnpagedMonitor {
    /// Id of the process whose thread is measuring; 0 if none is.
    ///
    /// A mutex would not work: a process that forks during a measurement passes the locked state to
    /// its child, in which no thread measures. The parent's id does not block the child.
    measuring: AtomicU32,
    /// Sample at the last measurement: anonymous, beside, shared.
    last_sample: [AtomicU64; 3],
    /// Earliest time of the next measurement, in ns.
    not_before: AtomicU64,
}

impl UnpagedMonitor {
    /// Acquires the right to measure. Returns `None` while another thread of this process has it.
    fn begin(&self) -> Option<MeasureGuard<'_>> {
        let own = std::process::id();
        let guard = |measuring| (measuring != own).then_some(own);
        let taken = self.measuring.fetch_update(Ordering::AcqRel, Ordering::Acquire, guard);
        taken.is_ok().then_some(MeasureGuard(self))
    }

    /// As [`UnpagedMonitor::begin`], but waits until the measuring thread has finished, which takes
    /// milliseconds.
    fn begin_waiting(&self) -> Option<MeasureGuard<'_>> {
        let end = sys::now_ns() + WAIT_NS;
        loop {
            let guard = self.begin();
            if guard.is_some() || sys::now_ns() >= end {
                return guard;
            }
            sys::futex_wait(&self.measuring, std::process::id(), Some(WAIT_NS / 1_000_000));
        }
    }
}

/// The right to measure, released when dropped.
struct MeasureGuard<'a>(&'a UnpagedMonitor);

impl MeasureGuard<'_> {
    fn last_sample(&self) -> Sample {
        let [anonymous, beside, shared] =
            self.0.last_sample.each_ref().map(|word| word.load(Ordering::Relaxed));
        Sample { anonymous, beside, shared }
    }

    fn set_last_sample(&self, Sample { anonymous, beside, shared }: Sample) {
        for (word, value) in self.0.last_sample.iter().zip([anonymous, beside, shared]) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

impl Drop for MeasureGuard<'_> {
    fn drop(&mut self) {
        self.0.measuring.store(0, Ordering::Release);
        sys::futex_wake(&self.0.measuring);
    }
}

/// Bounds of the interval between two samples, in ms. It doubles as long as nothing changes.
pub(crate) const SAMPLE_MS_MIN: u64 = 10;
pub(crate) const SAMPLE_MS_MAX: u64 = 1000;
/// Minimum pause after a measurement, as a multiple of the measurement's duration.
const PAUSE_FACTOR: u64 = 20;
/// Change that does not justify a measurement, in pages: 1 MiB.
const SMALL_PAGES: u64 = 256;
/// Longest time that the program's exit waits for a measurement in progress, in ns.
const WAIT_NS: u64 = 1_000_000_000;

impl UnpagedMonitor {
    /// Samples resident memory, and measures unpaged memory if the sample has changed.
    ///
    /// `resident` is the number of the region's resident pages; `is_own` tells whether a mapping is
    /// the region or the pager's own. Without `/proc` nothing is measured. The measurement at exit
    /// is the last one, and the only one that includes memory touched in the program's last
    /// milliseconds. So it waits for a measurement in progress.
    pub fn measure(
        &self,
        at_exit: bool,
        resident: u32,
        is_own: impl Fn(&Range<usize>) -> bool,
    ) -> Option<UnpagedUsage> {
        let guard = if at_exit { self.begin_waiting() } else { self.begin() }?;
        let now = Sample::take(u64::from(resident)).ok()?;
        let start = sys::now_ns();
        let due = if at_exit {
            now != guard.last_sample()
        } else {
            start >= self.not_before.load(Ordering::Relaxed)
                && now.differs_from(&guard.last_sample())
        };
        if !due {
            return None;
        }
        let smaps = sys::open_own(c"/proc/self/smaps").ok()?;
        let usage = UnpagedUsage::read(smaps, is_own).ok()?;
        guard.set_last_sample(now);
        let end = sys::now_ns();
        self.not_before.store(end + PAUSE_FACTOR * (end - start), Ordering::Relaxed);
        Some(usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(header: &str, fields: &str) -> String {
        let fields = fields.split(' ').filter(|field| !field.is_empty());
        let lines: String = fields.map(|f| f.replace('=', ":     ") + " kB\n").collect();
        format!("{header}\n{lines}VmFlags: rd wr mr mw\n")
    }

    fn usage(text: &str, own: Range<usize>) -> UnpagedUsage {
        UnpagedUsage::read(text.as_bytes(), |range| own.contains(&range.start)).unwrap()
    }

    #[test]
    fn each_mapping_is_counted_by_its_kind() {
        let text = [
            mapping("400000-401000 r-xp 00000000 fe:00 7      /bin/x", "Rss=4 Anonymous=0"),
            mapping("401000-402000 rw-p 00001000 fe:00 7      /bin/x", "Rss=4 Anonymous=4"),
            mapping("402000-9402000 rw-p 00000000 00:00 0 ", "Rss=90 Anonymous=80"),
            mapping("a000000-a100000 rw-p 00000000 00:00 0    [heap]", "Rss=9 Anonymous=8"),
            mapping("c000000000-c004000000 rw-p 00000000 00:00 0 ", "Rss=700 Anonymous=700"),
            mapping("7f0000000000-7f0000100000 rw-p 00000000 00:00 0 ", "Rss=50 Anonymous=50"),
            mapping(
                "7f0000200000-7f0000300000 rw-s 00000000 00:01 4 /memfd:granary-dma (deleted)",
                "Rss=9",
            ),
            mapping(
                "7f0000300000-7f0000400000 rw-s 00000000 00:01 4 /dev/zero (deleted)",
                "Rss=30",
            ),
            mapping("7f0000400000-7f0000500000 rw-s 00000000 fe:00 9 /tmp/file", "Rss=1000"),
            mapping(
                "7f0000600000-7f0000700000 rw-p 00000000 fe:00 8 /lib/l.so",
                "Rss=5 Anonymous=3",
            ),
            mapping("7f0000700000-7f0009000000 rw-p 00000000 00:00 0 ", "Anonymous=600"),
            mapping("7f0009000000-7f0009001000 ---p 00000000 00:00 0 ", "Rss=0"),
            mapping("7f0009001000-7f0009801000 rw-p 00000000 00:00 0 ", "Anonymous=20"),
            mapping(
                "7f000a000000-7f000a200000 rw-p 00000000 00:0f 3 /anon_hugepage (deleted)",
                "Rss=0 Private_Hugetlb=2048",
            ),
            mapping("7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0 [stack]", "Anonymous=12"),
        ]
        .concat();
        let kib = |count: u64| count * 1024;
        let wanted = UnpagedUsage {
            mapped: kib(700 + 600),
            heap: kib(8),
            files: kib(4 + 80 + 3),
            stacks: kib(20 + 12),
            shared: kib(30),
            huge: kib(2048),
        };
        let found = usage(&text, 0x7f00_0000_0000..0x7f00_0010_0000);
        assert_eq!(found, wanted);
        assert_eq!(found.bytes(), kib(1300 + 8 + 87 + 32 + 30 + 2048));
    }

    #[test]
    fn line_longer_than_the_buffer_hides_no_other_line() {
        let path = "/long".repeat(2000);
        let text = [
            mapping(&format!("1000-2000 rw-p 00000000 fe:00 7 {path}"), "Rss=4 Anonymous=4"),
            mapping("3000-4000 rw-p 00000000 00:00 0 ", "Rss=8 Anonymous=8"),
        ]
        .concat();
        let found = usage(&text, 0..0);
        assert_eq!((found.files, found.mapped), (4096, 8192));
    }

    #[test]
    fn exit_waits_for_a_measurement_but_a_forked_child_does_not() {
        let watch = std::sync::Arc::new(UnpagedMonitor::default());
        let guard = watch.begin().unwrap();
        assert!(watch.begin().is_none(), "one thread at a time");
        let exit = std::thread::spawn({
            let watch = watch.clone();
            move || watch.begin_waiting().is_some()
        });
        drop(guard);
        assert!(exit.join().unwrap());
        // State of a child that was forked during a measurement of its parent.
        watch.measuring.store(std::process::id() + 1, Ordering::Release);
        assert!(watch.begin().is_some());
        assert_eq!(watch.measuring.load(Ordering::Acquire), 0);
    }

    #[test]
    fn own_mappings_are_measured() {
        let bytes = 24 << 20;
        let page = sys::PAGE_BYTES;
        sys::forget_own_mappings();
        let mapped = sys::map_anonymous(bytes + 2 * page).unwrap();
        let base = mapped + page;
        // SAFETY: just mapped, and used only here. The kernel shows adjacent mappings of the same
        // access as one, which could begin in memory of another test.
        unsafe {
            sys::mprotect(mapped, page, libc::PROT_NONE).unwrap();
            sys::mprotect(base + bytes, page, libc::PROT_NONE).unwrap();
            std::ptr::write_bytes(base as *mut u8, 1, bytes);
        }
        // One text for all three, because other tests allocate meanwhile.
        let mut text = Vec::new();
        sys::open_own(c"/proc/self/smaps").unwrap().read_to_end(&mut text).unwrap();
        let all = UnpagedUsage::read(&text[..], |_| false).unwrap().bytes();
        let others = UnpagedUsage::read(&text[..], |range| range.contains(&base)).unwrap().bytes();
        assert!(all >= others + bytes as u64, "{all} {others}");
        let programs = UnpagedUsage::read(&text[..], sys::is_own_mapping).unwrap().bytes();
        assert!(programs <= others, "memory of the pager itself is excluded");
        // SAFETY: mapped above.
        unsafe { sys::unmap_anonymous(mapped, bytes + 2 * page).unwrap() };
    }

    #[test]
    fn changes_above_an_eighth_trigger_a_measurement() {
        let sample_unpaged = |anonymous, beside, shared| Sample { anonymous, beside, shared };
        let before = sample_unpaged(80_000, 8_000, 1_000);
        assert!(!before.differs_from(&before));
        assert!(!sample_unpaged(89_000, 8_900, 1_250).differs_from(&before));
        assert!(sample_unpaged(91_000, 8_000, 1_000).differs_from(&before));
        assert!(sample_unpaged(80_000, 9_100, 1_000).differs_from(&before));
        assert!(sample_unpaged(80_000, 8_000, 1_300).differs_from(&before));
        assert!(
            sample_unpaged(80_000, 6_900, 1_000).differs_from(&before),
            "a decrease triggers a measurement too"
        );
        assert!(!sample_unpaged(255, 200, 100).differs_from(&Sample::default()));
    }
}

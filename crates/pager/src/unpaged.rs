//! Memory of the program that the pager does not page: how much of it there is, by kind.
//!
//! The pager pages what comes from `malloc` and from private anonymous `mmap`s through libc. Beside it
//! a program may have gigabytes of its own: a Go runtime maps its heap by raw system calls, Fortran
//! programs have large `.bss`, shared memory is not private. A [`Look`] says so. It comes from
//! `/proc/self/smaps`, which takes the kernel a walk through the page tables; so a thread that waits
//! anyway reads the cheap `/proc/self/statm` from time to time, and looks closer when anonymous memory has
//! changed by an eighth since the last look. No fault takes part.
//!
//! No code here allocates: the program's threads run it too, at exit.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::pager::Pager;
use crate::sys::{self, PAGE_BYTES};

/// Resident bytes outside of the region, by kind. The pager's own memory is not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Anonymous mappings: made by raw system calls, at fixed addresses, executable or locked.
    pub mapped: u64,
    /// The heap of `brk`, which the preloaded `malloc` does not use.
    pub heap: u64,
    /// Written pages of private file mappings, `.data` and `.bss` among them.
    pub files: u64,
    /// Stacks.
    pub stacks: u64,
    /// Shared memory: `memfd`, `shm_open`, System V, `MAP_SHARED | MAP_ANONYMOUS`.
    pub shared: u64,
    /// Huge pages of hugetlbfs.
    pub huge: u64,
}

impl Look {
    /// All kinds together.
    pub fn bytes(&self) -> u64 {
        self.mapped + self.heap + self.files + self.stacks + self.shared + self.huge
    }

    /// Reads a file in the format of `/proc/self/smaps`. `is_own` says of a mapping's addresses
    /// whether the mapping is the region's or the pager's.
    ///
    /// # Errors
    /// Those of `smaps`.
    pub fn read(mut smaps: impl Read, is_own: impl Fn(&Range<usize>) -> bool) -> io::Result<Self> {
        let mut reader =
            Reader { is_own, look: Self::default(), mapping: Mapping::default(), program: None };
        // Lines longer than the buffer are those of long paths: their beginning says enough.
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
                return Ok(reader.look);
            }
        }
    }
}

/// What a mapping is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    /// The region, or the pager's.
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
    /// Of the program's own file.
    is_program: bool,
    /// No access, and no file: below a stack, this is its guard.
    is_guard: bool,
    rss: u64,
    anonymous: u64,
    huge: u64,
}

struct Reader<F> {
    is_own: F,
    look: Look,
    mapping: Mapping,
    /// Inode of the first mapping's file: the lowest mappings are the program's own.
    program: Option<u64>,
}

/// Names of memory that has no file on a disk, of which mappings may be shared.
const SHARED_MEMORY: [&[u8]; 5] =
    [b"/memfd:", b"/dev/shm/", b"/dev/zero", b"/SYSV", b"[anon_shmem:"];
/// `.bss` of a library is taken to be no larger. What is larger is a mapping that lies beside.
const LIBRARY_BSS_MAX: usize = 1 << 20;

impl<F: Fn(&Range<usize>) -> bool> Reader<F> {
    fn line(&mut self, line: &[u8]) {
        match line.first() {
            // A field: `Name:   123 kB`. Names begin with capitals, addresses are in small letters.
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

    /// `start-end rwxp offset device inode   path`
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
            // The kernel can write the pages of a file back and drop them.
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
            // `.bss` follows the file that it belongs to.
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
            Kind::Mapped => self.look.mapped += anonymous,
            Kind::Heap => self.look.heap += anonymous,
            Kind::File => self.look.files += anonymous,
            Kind::Stack => self.look.stacks += anonymous,
            Kind::Shared => self.look.shared += rss,
        }
        self.look.huge += huge;
    }
}

/// The decimal digits of a text, as a number.
fn number(text: &[u8]) -> u64 {
    let digits = text.iter().filter(|byte| byte.is_ascii_digit());
    digits.fold(0u64, |sum, &digit| sum.wrapping_mul(10).wrapping_add(u64::from(digit - b'0')))
}

/// `start-end`, hexadecimal.
fn addresses(text: &[u8]) -> Range<usize> {
    let hex = |digits: &[u8]| {
        let digit = |byte: &u8| (*byte as char).to_digit(16).unwrap_or(0) as usize;
        digits.iter().fold(0usize, |sum, byte| sum << 4 | digit(byte))
    };
    let dash = text.iter().position(|&byte| byte == b'-').unwrap_or(text.len());
    hex(&text[..dash])..hex(text.get(dash + 1..).unwrap_or_default())
}

/// Resident pages of the process, as `/proc/self/statm` has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Glance {
    /// Anonymous ones.
    anonymous: u64,
    /// Of these, as many as are not counted as the region's.
    beside: u64,
    /// Those of files and of shared memory.
    shared: u64,
}

impl Glance {
    /// `of_region` pages are in the region. The page of zeros, which is nobody's, is counted there too.
    fn take(of_region: u64) -> io::Result<Self> {
        let mut text = [0u8; 128];
        let got = sys::open_own(c"/proc/self/statm")?.read(&mut text)?;
        let mut numbers = text[..got].split(|&byte| byte == b' ').map(number).skip(1);
        let mut next = || numbers.next().unwrap_or(0);
        let (resident, shared) = (next(), next());
        let anonymous = resident.saturating_sub(shared);
        Ok(Self { anonymous, beside: anonymous.saturating_sub(of_region), shared })
    }

    /// True if a number differs from what it was by so much that a close look is worth its time.
    fn is_news(&self, then: &Self) -> bool {
        let differs = |now: u64, then: u64| now.abs_diff(then) > (then / 8).max(SMALL_PAGES);
        differs(self.anonymous, then.anonymous)
            || differs(self.beside, then.beside)
            || differs(self.shared, then.shared)
    }
}

/// When to look, and what was seen last. One thread at a time looks.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// Id of the process whose thread looks now; 0 while none does.
    ///
    /// Not a mutex: a process that forks during a look leaves its own id to the child, in which no
    /// thread looks.
    looker: AtomicU32,
    /// The glance at the last close look: anonymous, beside, shared.
    seen: [AtomicU64; 3],
    /// No close look before this time, in ns.
    not_before: AtomicU64,
}

impl Watch {
    /// Takes the turn to look. None while another thread of this process has the turn.
    fn begin(&self) -> Option<Turn<'_>> {
        let own = std::process::id();
        let turn = |looker| (looker != own).then_some(own);
        let taken = self.looker.fetch_update(Ordering::AcqRel, Ordering::Acquire, turn);
        taken.is_ok().then_some(Turn(self))
    }

    /// As [`Watch::begin`], once the thread that looks has finished, which takes milliseconds.
    fn begin_after_others(&self) -> Option<Turn<'_>> {
        let end = sys::now_ns() + WAIT_NS;
        loop {
            let turn = self.begin();
            if turn.is_some() || sys::now_ns() >= end {
                return turn;
            }
            sys::futex_wait(&self.looker, std::process::id(), Some(WAIT_NS / 1_000_000));
        }
    }
}

/// The turn to look, given back when dropped.
struct Turn<'a>(&'a Watch);

impl Turn<'_> {
    fn seen(&self) -> Glance {
        let [anonymous, beside, shared] =
            self.0.seen.each_ref().map(|word| word.load(Ordering::Relaxed));
        Glance { anonymous, beside, shared }
    }

    fn set_seen(&self, Glance { anonymous, beside, shared }: Glance) {
        for (word, value) in self.0.seen.iter().zip([anonymous, beside, shared]) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.looker.store(0, Ordering::Release);
        sys::futex_wake(&self.0.looker);
    }
}

/// Time between two glances: doubled as long as nothing changes.
pub(crate) const GLANCE_MS_MIN: u64 = 10;
pub(crate) const GLANCE_MS_MAX: u64 = 1000;
/// A close look pays for itself: so many times as long as one takes there is no other.
const LOOK_PAUSE: u64 = 20;
/// Growth that is not worth a close look: 1 MiB.
const SMALL_PAGES: u64 = 256;
/// The exit of the program waits at most so long for a look that is under way.
const WAIT_NS: u64 = 1_000_000_000;

impl Pager {
    /// Looks, cheaply at first, for memory of the program that is not paged. True if there was news.
    ///
    /// What cannot be seen (no /proc) is not counted. The look at exit is the last one, and the only one
    /// for what a program touches in its last milliseconds, so it waits for a look under way.
    pub(crate) fn look_for_unpaged(&self, at_exit: bool) -> bool {
        let turn = if at_exit { self.watch.begin_after_others() } else { self.watch.begin() };
        let Some(turn) = turn else { return false };
        let Ok(now) = Glance::take(u64::from(self.resident())) else { return false };
        let start = sys::now_ns();
        let due = if at_exit {
            now != turn.seen()
        } else {
            start >= self.watch.not_before.load(Ordering::Relaxed) && now.is_news(&turn.seen())
        };
        if !due {
            return false;
        }
        let is_own =
            |range: &Range<usize>| self.region.contains(range.start) || sys::is_own_mapping(range);
        let look = sys::open_own(c"/proc/self/smaps").and_then(|file| Look::read(file, is_own));
        let Ok(look) = look else { return false };
        turn.set_seen(now);
        let end = sys::now_ns();
        self.watch.not_before.store(end + LOOK_PAUSE * (end - start), Ordering::Relaxed);
        self.stats.unpaged(&look, !self.forks.is_light());
        true
    }
}

/// Has [`Pager::look_for_unpaged`] called when the program calls `exit`, once.
pub(crate) fn look_at_exit() {
    static DONE: AtomicBool = AtomicBool::new(false);
    extern "C" fn at_exit() {
        if let Some(pager) = crate::pager::current() {
            pager.look_for_unpaged(true);
        }
    }
    if !DONE.swap(true, Ordering::AcqRel) {
        // SAFETY: a function of this library, which is never unloaded.
        unsafe { libc::atexit(at_exit) };
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

    fn look(text: &str, own: Range<usize>) -> Look {
        Look::read(text.as_bytes(), |range| own.contains(&range.start)).unwrap()
    }

    #[test]
    fn every_kind_of_mapping_is_counted_as_what_it_is() {
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
        let wanted = Look {
            mapped: kib(700 + 600),
            heap: kib(8),
            files: kib(4 + 80 + 3),
            stacks: kib(20 + 12),
            shared: kib(30),
            huge: kib(2048),
        };
        let found = look(&text, 0x7f00_0000_0000..0x7f00_0010_0000);
        assert_eq!(found, wanted);
        assert_eq!(found.bytes(), kib(1300 + 8 + 87 + 32 + 30 + 2048));
    }

    #[test]
    fn a_line_that_is_longer_than_the_buffer_hides_no_other_line() {
        let path = "/long".repeat(2000);
        let text = [
            mapping(&format!("1000-2000 rw-p 00000000 fe:00 7 {path}"), "Rss=4 Anonymous=4"),
            mapping("3000-4000 rw-p 00000000 00:00 0 ", "Rss=8 Anonymous=8"),
        ]
        .concat();
        let found = look(&text, 0..0);
        assert_eq!((found.files, found.mapped), (4096, 8192));
    }

    #[test]
    fn the_exit_waits_for_a_look_under_way_and_a_forked_child_does_not() {
        let watch = std::sync::Arc::new(Watch::default());
        let turn = watch.begin().unwrap();
        assert!(watch.begin().is_none(), "one thread at a time");
        let exit = std::thread::spawn({
            let watch = watch.clone();
            move || watch.begin_after_others().is_some()
        });
        drop(turn);
        assert!(exit.join().unwrap());
        // As a child finds the word that was forked during a look of its parent's.
        watch.looker.store(std::process::id() + 1, Ordering::Release);
        assert!(watch.begin().is_some());
        assert_eq!(watch.looker.load(Ordering::Acquire), 0);
    }

    #[test]
    fn a_process_finds_what_it_maps() {
        let before = Look::read(sys::open_own(c"/proc/self/smaps").unwrap(), |_| false).unwrap();
        let bytes = 24 << 20;
        let base = sys::map_anonymous(bytes).unwrap();
        // SAFETY: just mapped, and ours.
        unsafe { std::ptr::write_bytes(base as *mut u8, 1, bytes) };
        let after = Look::read(sys::open_own(c"/proc/self/smaps").unwrap(), |_| false).unwrap();
        assert!(after.bytes() >= before.bytes() + bytes as u64, "{before:?} {after:?}");
        let own = Look::read(sys::open_own(c"/proc/self/smaps").unwrap(), sys::is_own_mapping);
        assert!(own.unwrap().bytes() < after.bytes(), "it is the pager's own");
        // SAFETY: mapped above.
        unsafe { sys::unmap_anonymous(base, bytes).unwrap() };
    }

    #[test]
    fn growth_by_an_eighth_is_news_and_noise_is_not() {
        let glance = |anonymous, beside, shared| Glance { anonymous, beside, shared };
        let then = glance(80_000, 8_000, 1_000);
        assert!(!then.is_news(&then));
        assert!(!glance(89_000, 8_900, 1_250).is_news(&then));
        assert!(glance(91_000, 8_000, 1_000).is_news(&then));
        assert!(glance(80_000, 9_100, 1_000).is_news(&then));
        assert!(glance(80_000, 8_000, 1_300).is_news(&then));
        assert!(glance(80_000, 6_900, 1_000).is_news(&then), "what was given back is news too");
        assert!(!glance(255, 200, 100).is_news(&Glance::default()));
    }
}

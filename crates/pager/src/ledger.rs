//! The ledger of a run: how many pages each process of the run may have.
//!
//! The processes of a run share one bound. It lies in the memory of the run
//! ([`crate::run_memory`]), which all of them map. A process *leases* pages in units of
//! [`UNIT_PAGES`], by compare-and-swap.
//!
//! ```text
//!  u64[0]  magic and version
//!  u64[1]  total: pages of the run, and their complement as a check
//!  u64[2]  given: leased units (low half), number of changes (high half)
//!  u64[3]  peak of the leased units
//!  u64[4]  number of slots that were ever used
//!  u64[8..]              slots, one for each process: owner, leased units, CHANGING
//!  u64[8 + slots..]      1 while the process wants more units than there are
//!  u64[8 + 2 * slots..]  futex of the process's worker, in the low half
//! ```
//!
//! # Ended processes
//! A process may be killed between any two instructions, so `given` may be wrong about it.
//! [`Ledger::audit`] counts again: `given` becomes the sum of the slots of living processes. While
//! a process changes both `given` and its slot, the slot says CHANGING, and an audit fails. Each
//! change of `given` has a number, so an audit does not overwrite a change that it has not seen.
//!
//! # Trust
//! Other processes write the ledger. Only atomics access it, and no value is an index or a length
//! before it is checked. A process keeps the number of its units itself. With a total that fails
//! its check, or exceeds the machine's memory, no process leases more.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::point;
use crate::run_memory::RunMemory;
use crate::sys::{self, PAGE_BYTES};

/// Pages of a unit: 1 MiB.
pub const UNIT_PAGES: u32 = 256;
/// Units that each process has, whatever the other processes have: 4 MiB.
pub const GUARANTEED_UNITS: u32 = 4;
/// Processes of a run at a time.
pub const SLOTS: usize = 1024;

const MAGIC: u64 = u64::from_le_bytes(*b"gr-ldgr\x01");
const TOTAL: usize = 1;
const GIVEN: usize = 2;
const PEAK: usize = 3;
const USED: usize = 4;
const HEADER: usize = 8;
pub(crate) const WORDS: usize = HEADER + 3 * SLOTS;

const PID_BITS: u32 = 22;
const START_BITS: u32 = 20;
const UNIT_BITS: u32 = 21;
/// Greatest number of units of one process.
const UNITS_MAX: u32 = (1 << UNIT_BITS) - 1;
const CHANGING: u64 = 1 << UNIT_BITS;

/// A process: its id, and the low bits of its start time, because ids are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    pid: u32,
    start: u32,
}

impl Owner {
    /// A process by its id and its start time in clock ticks.
    pub fn new(pid: u32, start: u64) -> Self {
        let mask = |bits: u32| (1u32 << bits) - 1;
        Self { pid: pid & mask(PID_BITS), start: start as u32 & mask(START_BITS) }
    }

    /// The calling process. Without `/proc` its start time is unknown, which is 0.
    pub fn current() -> Self {
        let pid = std::process::id();
        let start = Stat::read(pid).map_or(0, |stat| stat.start);
        Self::new(pid, start)
    }

    /// The process that has an id now.
    ///
    /// # Errors
    /// No process has the id, or it is hidden.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        Stat::read(pid).map(|stat| Self::new(pid, stat.start))
    }

    /// Encodes the process as a number that is not 0.
    pub(crate) fn word(self) -> u64 {
        u64::from(self.pid) << START_BITS | u64::from(self.start)
    }

    /// Decodes [`Owner::word`]. `None` if no process has the id.
    pub(crate) fn from_word(word: u64) -> Option<Self> {
        let (pid, start) = ((word >> START_BITS) as u32, word as u32 & ((1 << START_BITS) - 1));
        (pid != 0 && pid < 1 << PID_BITS).then_some(Self { pid, start })
    }

    /// Returns the process id.
    pub fn pid(self) -> u32 {
        self.pid
    }

    /// Returns true unless the process has ended for sure.
    pub fn is_alive(self) -> bool {
        // SAFETY: signal 0 only asks whether the process exists.
        let asked = unsafe { libc::kill(self.pid as i32, 0) };
        if asked != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH) {
            return false;
        }
        // Another user's process may be hidden; then it counts as alive.
        let Ok(stat) = Stat::read(self.pid) else { return true };
        (self.start == 0 || Self::new(self.pid, stat.start) == self) && !stat.is_over
    }

    /// Returns true if the process ends or has ended for sure, as of its first thread. The kernel
    /// tells the children of a thread about its end before all threads of the process have ended.
    pub(crate) fn is_ending(self) -> bool {
        match Stat::read(self.pid) {
            Ok(stat) => stat.is_dead || self.start != 0 && Self::new(self.pid, stat.start) != self,
            Err(error) => matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)),
        }
    }
}

/// The fields of proc_pid_stat(5) that tell a process from a later one with the same id.
struct Stat {
    start: u64,
    /// The first thread has ended.
    is_dead: bool,
    /// Only the exit status is left.
    is_over: bool,
}

impl Stat {
    fn read(pid: u32) -> io::Result<Self> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        Self::parse(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn parse(text: &str) -> Option<Self> {
        // The text after the name, which is in parentheses, starts with field 3.
        let mut fields = text.rsplit_once(") ")?.1.split(' ');
        let is_dead = matches!(fields.next()?, "Z" | "X");
        let threads: u32 = fields.nth(16)?.parse().ok()?;
        let start = fields.nth(1)?.parse().ok()?;
        // A zombie with further threads: only its first thread has ended.
        Some(Self { start, is_dead, is_over: is_dead && threads <= 1 })
    }
}

/// A slot's word, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    owner: Owner,
    units: u32,
    is_changing: bool,
}

impl Held {
    fn decode(word: u64) -> Option<Self> {
        let field = |shift: u32, bits: u32| (word >> shift) as u32 & ((1 << bits) - 1);
        let pid = field(UNIT_BITS + 1 + START_BITS, PID_BITS);
        let start = field(UNIT_BITS + 1, START_BITS);
        (pid != 0).then(|| Self {
            owner: Owner { pid, start },
            units: field(0, UNIT_BITS),
            is_changing: word & CHANGING != 0,
        })
    }

    fn encode(self) -> u64 {
        let owner = self.owner.word();
        let changing = if self.is_changing { CHANGING } else { 0 };
        owner << (UNIT_BITS + 1) | changing | u64::from(self.units.min(UNITS_MAX))
    }
}

/// The slot of a process was given to another process, or its word was overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost;

/// A process of the run, as the ledger has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The process.
    pub owner: Owner,
    /// Its leased units.
    pub units: u32,
    /// It wants more units than there are.
    pub wants: bool,
}

/// The state of the run by which a process decides whether it gives units back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Units of the run.
    pub total: u32,
    /// Leased units.
    pub given: u32,
    /// Units of this process.
    pub own: u32,
    /// Processes of the run.
    pub processes: u32,
    /// Units of the other process that has the fewest, of those that want more.
    pub neediest: Option<u32>,
}

/// Returns how many units a process gives back. `unused` of its units have no page, and `is_idle`
/// is true if the process had no fault for a while.
///
/// - Beyond the total, each process gives its share of the excess.
/// - A process that wants more, and has less than an equal share, gets units of those that have
///   more than that, and from all processes the units without a page.
/// - Idle processes give units step by step while another process wants more, and units without a
///   page in any case.
pub fn surplus(view: &View, unused: u32, is_idle: bool) -> u32 {
    let spare = view.own.saturating_sub(GUARANTEED_UNITS);
    let over = view.given.saturating_sub(view.total);
    if over > 0 {
        let guaranteed = view.processes.saturating_mul(GUARANTEED_UNITS);
        let all = view.given.saturating_sub(guaranteed).max(spare).max(1);
        let share = (u64::from(over) * u64::from(spare)).div_ceil(u64::from(all));
        return spare.min(share as u32);
    }
    let fair = view.total / view.processes.max(1);
    let given = match view.neediest {
        Some(other) if other < fair && view.own > fair => {
            let excess = view.own - fair;
            unused.max(excess / 4).max(excess.min(GUARANTEED_UNITS))
        }
        Some(_) if is_idle => unused.max(spare / 8).max(1),
        Some(_) => unused,
        None if is_idle => unused.saturating_sub(1),
        None => 0,
    };
    given.min(spare)
}

/// The ledger of a run.
#[derive(Clone, Copy, Debug)]
pub struct Ledger {
    words: &'static [AtomicU64],
}

impl Ledger {
    /// Creates the ledger of a run in the run's memory.
    pub fn create(memory: RunMemory, total_pages: u32) -> Self {
        let ledger = Self { words: memory.ledger() };
        ledger.set_total(total_pages);
        ledger.words[0].store(MAGIC, Ordering::Release);
        ledger
    }

    /// Returns the ledger of a run.
    ///
    /// # Errors
    /// The processes of the run do not share a bound, or are of another version.
    pub fn open(memory: RunMemory) -> io::Result<Self> {
        let ledger = Self { words: memory.ledger() };
        match ledger.words[0].load(Ordering::Acquire) {
            MAGIC => Ok(ledger),
            0 => Err(io::Error::new(io::ErrorKind::NotFound, "its processes share no bound")),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "it is of another version")),
        }
    }

    /// A ledger in private memory with `slots` slots.
    #[cfg(test)]
    pub(crate) fn in_memory(slots: usize, total_pages: u32) -> Self {
        let words = (0..HEADER + 3 * slots).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        let ledger = Self { words: Vec::leak(words) };
        ledger.set_total(total_pages);
        ledger
    }

    fn slots(&self) -> usize {
        (self.words.len() - HEADER) / 3
    }

    fn word(&self, index: usize) -> &'static AtomicU64 {
        point();
        &self.words[index]
    }

    fn slot(&self, index: usize) -> &'static AtomicU64 {
        self.word(HEADER + index)
    }

    fn wants(&self, index: usize) -> &'static AtomicU64 {
        self.word(HEADER + self.slots() + index)
    }

    /// Returns the number of slots that were ever used.
    fn used(&self) -> usize {
        (self.word(USED).load(Ordering::Acquire) as usize).min(self.slots())
    }

    /// Returns the pages of the run. `None` if the word is damaged.
    pub fn total_pages(&self) -> Option<u32> {
        let word = self.word(TOTAL).load(Ordering::Acquire);
        let (pages, check) = (word as u32, (word >> 32) as u32);
        (check == !pages).then_some(pages)
    }

    /// Returns the units of the run. `None` if the word is damaged, or names more than the
    /// machine's memory.
    pub fn total(&self) -> Option<u32> {
        let pages = self.total_pages()?;
        (u64::from(pages) <= memory_pages()).then_some(pages / UNIT_PAGES)
    }

    /// Sets the pages of the run.
    pub fn set_total(&self, pages: u32) {
        let word = u64::from(!pages) << 32 | u64::from(pages);
        self.word(TOTAL).store(word, Ordering::Release);
    }

    /// Returns the leased units.
    pub fn given(&self) -> u32 {
        self.word(GIVEN).load(Ordering::Acquire) as u32
    }

    /// Returns the peak of the leased units.
    pub fn peak(&self) -> u32 {
        self.word(PEAK).load(Ordering::Relaxed) as u32
    }

    /// Changes the leased units, or fails if another thread has changed them since `before` was
    /// read.
    fn change_given(&self, before: u64, units: u32) -> bool {
        let number = (before >> 32).wrapping_add(1) as u32;
        let after = u64::from(number) << 32 | u64::from(units);
        let word = self.word(GIVEN);
        word.compare_exchange(before, after, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Finds the slot of a process, or claims one for it. Returns its index and its units: those of
    /// the program that the process has run before, if it has called exec. `None` if each slot is
    /// in use.
    pub(crate) fn claim(&self, owner: Owner) -> Option<(usize, u32)> {
        for index in 0..self.used() {
            let word = self.slot(index).load(Ordering::Acquire);
            let Some(held) = Held::decode(word).filter(|held| held.owner == owner) else {
                continue;
            };
            let settled = Held { is_changing: false, ..held }.encode();
            if swap(self.slot(index), word, settled) {
                return Some((index, held.units));
            }
        }
        let new = Held { owner, units: 0, is_changing: false }.encode();
        let index = (0..self.slots()).find(|&index| {
            self.slot(index).load(Ordering::Acquire) == 0 && swap(self.slot(index), 0, new)
        })?;
        self.wants(index).store(0, Ordering::Release);
        self.word(USED).fetch_max(index as u64 + 1, Ordering::AcqRel);
        Some((index, 0))
    }

    /// Returns true if the slot says that its process has `own` units.
    pub(crate) fn has(&self, (index, owner): (usize, Owner), own: u32) -> bool {
        let held = Held { owner, units: own, is_changing: false };
        self.slot(index).load(Ordering::Acquire) == held.encode()
    }

    /// Leases at most `wanted` units, as far as the total allows, or exactly `wanted` beyond the
    /// total if `forced`. `own` is what the process has. Returns the number of units.
    pub(crate) fn take(
        &self,
        (index, owner): (usize, Owner),
        own: u32,
        wanted: u32,
        forced: bool,
    ) -> Result<u32, Lost> {
        let total = if forced { u32::MAX } else { self.total().unwrap_or(0) };
        let wanted = wanted.min(UNITS_MAX - own.min(UNITS_MAX));
        if wanted == 0 || self.given() >= total {
            return Ok(0);
        }
        let held = Held { owner, units: own, is_changing: false };
        let changing = Held { is_changing: true, ..held };
        self.advance(index, held, changing)?;
        let got = loop {
            let before = self.word(GIVEN).load(Ordering::Acquire);
            let given = before as u32;
            let got = wanted.min(total.saturating_sub(given));
            if got == 0 {
                break 0;
            }
            if self.change_given(before, given + got) {
                self.word(PEAK).fetch_max(u64::from(given + got), Ordering::Relaxed);
                break got;
            }
        };
        self.advance(index, changing, Held { units: own + got, ..held })?;
        Ok(got)
    }

    /// Gives units back. `own` is what the process has.
    pub(crate) fn release(
        &self,
        (index, owner): (usize, Owner),
        own: u32,
        units: u32,
    ) -> Result<(), Lost> {
        let held = Held { owner, units: own, is_changing: false };
        let less = Held { units: own.saturating_sub(units), ..held };
        let changing = Held { is_changing: true, ..less };
        self.advance(index, held, changing)?;
        loop {
            let before = self.word(GIVEN).load(Ordering::Acquire);
            if self.change_given(before, (before as u32).saturating_sub(units)) {
                break;
            }
        }
        self.advance(index, changing, less)
    }

    fn advance(&self, index: usize, from: Held, to: Held) -> Result<(), Lost> {
        if swap(self.slot(index), from.encode(), to.encode()) { Ok(()) } else { Err(Lost) }
    }

    /// Frees the slot of a process, which has no page any more.
    #[cfg(test)]
    pub(crate) fn leave(&self, slot: (usize, Owner), own: u32) -> Result<(), Lost> {
        self.release(slot, own, own)?;
        let (index, owner) = slot;
        let held = Held { owner, units: 0, is_changing: false };
        if swap(self.slot(index), held.encode(), 0) { Ok(()) } else { Err(Lost) }
    }

    /// Counts the leased units again and frees the slots of ended processes. Returns false if a
    /// process changed its lease meanwhile; then nothing has changed.
    pub fn audit(&self, is_alive: impl Fn(Owner) -> bool) -> bool {
        let before = self.word(GIVEN).load(Ordering::Acquire);
        let (mut sum, mut ended) = (0u32, Vec::new());
        for index in 0..self.used() {
            let word = self.slot(index).load(Ordering::Acquire);
            match Held::decode(word) {
                Some(held) if !is_alive(held.owner) => ended.push((index, word)),
                Some(held) if held.is_changing => return false,
                Some(held) => sum = sum.saturating_add(held.units),
                // No process has the id 0.
                None if word != 0 => ended.push((index, word)),
                None => {}
            }
        }
        if ended.is_empty() && before as u32 == sum {
            return true;
        }
        if !self.change_given(before, sum) {
            return false;
        }
        for (index, word) in ended {
            swap(self.slot(index), word, 0);
        }
        true
    }

    /// Notes whether the process of a slot wants more units.
    pub(crate) fn set_wants(&self, index: usize, wants: bool) {
        self.wants(index).store(u64::from(wants), Ordering::Release);
    }

    /// Returns the processes of the run with the index of their slots, ended ones included.
    fn indexed_members(&self) -> impl Iterator<Item = (usize, Member)> + '_ {
        (0..self.used()).filter_map(|index| {
            let Held { owner, units, .. } = Held::decode(self.slot(index).load(Ordering::Acquire))?;
            let wants = self.wants(index).load(Ordering::Acquire) == 1;
            Some((index, Member { owner, units, wants }))
        })
    }

    /// Returns the processes of the run, ended ones included.
    pub fn members(&self) -> impl Iterator<Item = Member> + '_ {
        self.indexed_members().map(|(_, member)| member)
    }

    /// Returns the view of the process of a slot, which has `own` units. `None` if the total is
    /// damaged.
    pub(crate) fn view(&self, slot: usize, own: u32) -> Option<View> {
        let mut view =
            View { total: self.total()?, given: self.given(), own, processes: 0, neediest: None };
        for (index, member) in self.indexed_members() {
            view.processes += 1;
            if index != slot && member.wants {
                let least = view.neediest.unwrap_or(u32::MAX);
                view.neediest = Some(least.min(member.units));
            }
        }
        Some(view)
    }

    /// Returns the futex of a slot's worker, which is woken through [`Ledger::wake`].
    pub(crate) fn event(&self, index: usize) -> &'static AtomicU32 {
        let word = &self.words[HEADER + 2 * self.slots() + index];
        // SAFETY: the first half of a word that is never unmapped and that only atomics access.
        unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) }
    }

    /// Wakes the worker of a slot.
    fn wake(&self, index: usize) {
        let event = self.event(index);
        event.fetch_add(1, Ordering::AcqRel);
        sys::futex_wake_shared(event);
    }

    /// Wakes the workers of all processes, because the total has changed or a process wants units.
    pub fn wake_all(&self) {
        self.indexed_members().for_each(|(index, _)| self.wake(index));
    }

    /// Wakes the workers of all processes but that of a slot.
    pub(crate) fn wake_all_but(&self, slot: usize) {
        self.indexed_members().filter(|(i, _)| *i != slot).for_each(|(i, _)| self.wake(i));
    }

    /// Wakes the workers of the processes that want units.
    pub(crate) fn wake_wanting(&self) {
        self.indexed_members().filter(|(_, m)| m.wants).for_each(|(index, _)| self.wake(index));
    }
}

fn swap(word: &AtomicU64, before: u64, after: u64) -> bool {
    word.compare_exchange(before, after, Ordering::AcqRel, Ordering::Acquire).is_ok()
}

/// Returns the pages of the machine's memory.
pub fn memory_pages() -> u64 {
    // SAFETY: reads a constant of the system.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    let bytes = u64::try_from(pages).unwrap_or(0).saturating_mul(PAGE_BYTES as u64);
    bytes / PAGE_BYTES as u64
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;

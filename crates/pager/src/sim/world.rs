//! One simulated process: the pager's logic, the threads that use it, and the checks of its state.
//! The logic runs over models of the kernel and of the transport.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::Ordering;

use seal::Cipher;

use super::fiber::{self, Schedule, pause, spawn, trace, wait_until};
use super::oracle::Oracle;
use super::program::{self, Program};
use super::random::Random;
use super::rival;
use super::threads;
use super::transport::{ModelTransport, Post};
use crate::backing::Backing;
use crate::config::{Hide, Paths};
use crate::fingerprint::Fingerprints;
use crate::fork::inheritance::Inheritance;
use crate::memory::Position;
use crate::memory::model::{Bytes, ModelMemory, Odds, WORDS};
use crate::page_table::{Entry, PageId, PageTable, State as PageState};
use crate::pages::compact::Pass;
use crate::pages::overrun::Allowance;
use crate::pages::{Hand, Pages, Sizes};
use crate::policy::counted::{Calls, Counted};
use crate::policy::{AnyPolicy, Name};
use crate::shelf::{Use, holds_page};
use crate::slots::{ChunkLocation, Key, Place, Sealing, SlotId, Source, Usage};
use crate::stats::Stats;
use crate::stream::Counters;
use crate::sys::PAGE_BYTES;

/// Parameters of a world.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Pages of the program.
    pub pages: u32,
    pub sizes: Sizes,
    pub programs: Vec<Program>,
    pub handlers: u32,
    /// The handler does the worker's work on pages.
    pub inline: bool,
    pub odds: Odds,
    /// Pages that are copied together, if pages are copied and not moved.
    pub copied_run: Option<u32>,
    pub chunk_pages: u32,
    /// Chunks of the pool.
    pub capacity: u32,
    /// Changes of the limit.
    pub resizes: u32,
    /// Units of the bound that the process shares with another one.
    pub shared_units: Option<u32>,
    /// Pages that devices pin, one after another.
    pub pins: u32,
    /// The process is a promoted child: some of its pages are in its parent's slots.
    pub inherits: bool,
    pub policy: Name,
    pub paths: Paths,
    /// Faults come with random advice about later accesses.
    pub advised: bool,
    /// Each fault maps one page, as with a trace.
    pub alone: bool,
    /// The worker compacts chunks.
    pub compacts: bool,
    /// Pages in the pool are encrypted.
    pub sealed: bool,
    /// The READ, by its number, that returns other bytes than were written.
    pub lie: Option<u64>,
    /// Threads wait for others and for the kernel for at most this many seconds, in vain: see
    /// `refuses_moves`.
    pub stuck_s: Option<u32>,
    /// With `stuck_s`, the kernel moves no page for mremap. Without, a thread keeps all resident
    /// pages where they are, for ever.
    pub refuses_moves: bool,
    pub hide: Hide,
    pub max_steps: u32,
}

/// State of a fork in progress.
#[derive(Default)]
pub(crate) struct Forking {
    /// The forking thread, whose faults are served beyond the limit.
    pub thread: Cell<Option<u32>>,
    /// The forking thread waits for the worker's part.
    pub is_asked: Cell<bool>,
    pub epoch: Cell<u32>,
    pub children_added: Cell<u32>,
    /// Memory that the child must see: mapped pages, and the possible contents of all pages.
    pub snapshot: RefCell<Option<threads::Copied>>,
}

/// A simulated process.
pub(crate) struct World {
    pub setup: Setup,
    pub pages: Pages<ModelMemory>,
    pub pool: ModelTransport,
    pub oracle: RefCell<Oracle>,
    pub random: RefCell<Random>,
    /// Source of words that no page has contained before.
    pub stamp: Cell<u64>,
    /// A thread of the program changes mappings.
    pub space: Cell<bool>,
    /// Threads that use each page now.
    pub users: RefCell<Vec<u32>>,
    /// Pages that no thread may use, because they are being moved.
    pub excluded: RefCell<Vec<bool>>,
    pub worker_wakes: Cell<u32>,
    /// Threads of the program that have not ended.
    pub running: Cell<u32>,
    /// Children that have not ended.
    pub children: Cell<u32>,
    /// A child reads pages: the frames for it are in use.
    pub child_frames: Cell<bool>,
    /// Handlers and workers that have not ended.
    pub servers: Cell<u32>,
    /// All other threads have ended, so the NIC's thread ends too.
    pub is_over: Cell<bool>,
    pub forking: Forking,
    /// Maximum permitted number of present pages.
    pub allowed: Cell<u32>,
    /// Faults of a forking thread that are being served.
    pub over_limit: Cell<u32>,
    /// The handlers' blank positions, once they have ended.
    pub blanks: Cell<u32>,
    /// A page was dropped by a raw system call, which the pager does not see.
    pub raw_drops: Cell<bool>,
}

impl World {
    fn new(setup: Setup, seed: u64) -> Rc<Self> {
        let Setup { pages, sizes, odds, .. } = setup;
        let random = |purpose| Random::new(seed, purpose);
        let pool =
            ModelTransport::new(sizes.frames(), setup.chunk_pages, setup.capacity, random(1));
        setup.lie.into_iter().for_each(|read| pool.lie_at(read, random(5)));
        let memory = ModelMemory::new(pages, sizes.positions, setup.copied_run, odds, random(2));
        let table = PageTable::new(pages as usize).expect("memory for a page table");
        let stats = Stats::private().expect("memory for counters");
        let inheritance = setup.inherits.then(|| Inheritance::served_by(|page| inherited(page).0));
        let backing = Backing::new(Box::new(pool.clone()), std::env::temp_dir(), inheritance);
        let prints = Fingerprints::new().expect("random numbers for the key");
        let policy = setup.policy.policy(sizes.limit, pages, random(4).bits());
        let policy = Counted::new(policy.expect("memory for the order of eviction"));
        let policy = AnyPolicy::Counted(Box::new(policy));
        let logic = Pages::new(table, memory, backing, stats, sizes, prints, policy)
            .with_paths(setup.paths);
        let key = Key::new(Cipher::default());
        let logic = logic.with_sealing(match setup.sealed {
            true => Sealing::All(key),
            false => Sealing::Overflow(key),
        });
        let mut places = random(6);
        logic.slots().hide(setup.hide, Box::new(move || places.bits()));
        let logic = match setup.shared_units {
            Some(units) => logic.with_lease(rival::lease(units), rival::RESERVED_PAGES),
            None => logic,
        };
        let logic = match setup.stuck_s {
            Some(wait_s) => {
                let allowance = Allowance { local_bytes: 0, time_ns: u64::MAX, wait_s };
                logic.with_allowance(allowance)
            }
            None => logic,
        };
        let world = Rc::new(Self {
            allowed: Cell::new(if setup.shared_units.is_some() { 0 } else { sizes.limit }),
            pages: logic,
            pool,
            oracle: RefCell::new(Oracle::new(pages)),
            random: RefCell::new(random(3)),
            stamp: Cell::new(0),
            space: Cell::new(false),
            users: RefCell::new(vec![0; pages as usize]),
            excluded: RefCell::new(vec![false; pages as usize]),
            worker_wakes: Cell::new(0),
            running: Cell::new(setup.programs.len() as u32),
            children: Cell::new(0),
            child_frames: Cell::new(false),
            servers: Cell::new(setup.handlers + 1),
            is_over: Cell::new(false),
            forking: Forking::default(),
            over_limit: Cell::new(0),
            blanks: Cell::new(0),
            raw_drops: Cell::new(false),
            setup,
        });
        world.pages.memory.watch(&world.pages.table);
        if world.setup.inherits {
            world.import_pages();
        }
        world
    }

    /// Enters the pages of a promoted child: resident ones, and those that its parent has.
    fn import_pages(&self) {
        let mut count = 0;
        for page in 0..self.setup.pages {
            let (id, content) = (PageId(page), Box::new(inherited(page)));
            match self.random.borrow_mut().below(4) {
                0 => continue,
                1 => {
                    self.pages.memory.start_with(id, content.clone());
                    self.pages.enter(id, Entry::resident(None));
                }
                _ => {
                    self.pages.enter(id, Entry::remote(SlotId::inherited(id).0));
                    count += 1;
                }
            }
            self.oracle.borrow_mut().starts_with(page, content);
        }
        self.pages.slots().inherit(count);
        self.allowed.set(self.allowed.get().max(self.pages.present()));
    }

    /// Returns true if the handler works on pages after each fault.
    pub(crate) fn handler_reclaims(&self) -> bool {
        self.setup.inline && self.setup.paths != Paths::Linux
    }

    /// Returns true if the worker works on pages.
    pub(crate) fn worker_reclaims(&self) -> bool {
        !self.setup.inline && self.setup.paths != Paths::Linux
    }

    /// Returns true if no transfer may be left when a fault has been served: the only handler has
    /// waited for all of them, and others are started neither by mremap, a fork, the end of a
    /// parent, a smaller bound of the process nor compaction.
    pub(crate) fn waits_for_transfers(&self) -> bool {
        let Setup { paths, handlers, programs, inherits, shared_units, compacts, .. } = &self.setup;
        let programs = programs.iter().any(|p| p.forks > 0 || p.moves > 0);
        let others = *handlers > 1 || *inherits || shared_units.is_some() || *compacts;
        *paths == Paths::Linux && !programs && !others
    }

    /// Locks the protections as the pager's threads do.
    pub(crate) fn lock_protection(&self) -> std::sync::MutexGuard<'_, ()> {
        loop {
            if let Some(guard) = self.pages.try_lock_protection() {
                return guard;
            }
            pause();
        }
    }

    /// Returns true if the program, its devices and its children have ended.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.get() == 0 && self.children.get() == 0
    }

    /// Checks the bound, and that the pager counts all memory. Both hold whenever no thread holds
    /// the lock of the state.
    fn check_step(&self) {
        let (present, limit) = {
            let state = self.pages.state();
            (state.present(), state.allowed())
        };
        let lease = self.pages.lease().map(|lease| rival::may_be_present(&self.pages, lease));
        // With a lease, what is leased at this moment; beyond it only pages of a forking thread.
        let allowed = self.allowed.get().max(lease.unwrap_or(0));
        match self.over_limit.get() + u32::from(self.pages.is_granted()) {
            0 => {
                assert!(present <= allowed, "{present} pages are present, allowed are {allowed}");
                self.allowed.set(match lease {
                    Some(leased) => {
                        if present > leased {
                            present
                        } else {
                            0
                        }
                    }
                    None => limit.max(allowed.min(present)),
                });
            }
            faults => {
                // Each attempt to serve such a fault may need one more page.
                let allowed = allowed + 4 * faults;
                assert!(present <= allowed, "{present} pages are present, allowed are {allowed}");
                self.allowed.set(self.allowed.get().max(present));
            }
        }
        let real = self.pages.memory.present();
        let slack = self.setup.copied_run.unwrap_or(0);
        assert!(real <= present + slack, "{real} pages have memory, {present} are counted");
    }

    /// Checks the state of all pages while no thread works on pages.
    fn check_quiet(&self) {
        let pages = &self.pages;
        pages.check_quiet(true);
        let state = pages.state();
        for position in (0..state.shelf.len()).map(Position) {
            let used = state.shelf.used(position);
            let is_filled = !matches!(used, Use::Empty | Use::Reserved { filled: false });
            let content = pages.memory.filled(position);
            assert_eq!(is_filled, content.is_some(), "{position:?}: {used:?}");
        }
        for page in (0..self.setup.pages).map(PageId) {
            let entry = pages.table.load(page);
            let mapped = pages.memory.mapped(page);
            let content = match entry.state() {
                PageState::Absent => Bytes::zeros(),
                PageState::Resident if mapped.is_none() && self.raw_drops.get() => Bytes::zeros(),
                PageState::Resident => mapped.clone().expect("a resident page is mapped"),
                PageState::Remote => {
                    self.slot_content(SlotId(entry.slot().expect("a remote page has a slot")))
                }
                PageState::Shelved => {
                    let position = Position(entry.position().expect("a position"));
                    let slot = state.shelf.record(position).slot;
                    let kept = pages.memory.filled(position).expect("checked above");
                    match state.shelf.used(position) {
                        Use::Fetching(..) => self.slot_content(slot.expect("a slot is read")),
                        Use::Clean => {
                            let stored = self.slot_content(slot.expect("a clean page has a slot"));
                            assert_eq!(stored, kept, "{page:?} and its slot");
                            kept
                        }
                        _ => kept,
                    }
                }
            };
            if entry.state() != PageState::Resident {
                assert!(mapped.is_none(), "{page:?} is mapped but {entry:?}");
            }
            self.oracle.borrow_mut().sees(page.0, &content);
        }
    }

    fn calls(&self) -> Calls {
        match &self.pages.state().policy {
            AnyPolicy::Counted(counted) => counted.calls,
            policy => unreachable!("{policy:?} is not counted"),
        }
    }

    /// Returns the content of a slot.
    fn slot_content(&self, slot: SlotId) -> Box<Bytes> {
        let (source, seal) = {
            let slots = self.pages.slots();
            (slots.source(slot), slots.seal(slot))
        };
        match source {
            Source::Word(word) => {
                let mut content = Bytes::zeros();
                content.0.fill(word);
                content
            }
            Source::Place(Place { location: ChunkLocation::Pool(chunk), offset_bytes }) => {
                let content = self.pool.content(chunk, offset_bytes);
                let stored = content.unwrap_or_else(|| panic!("{slot:?} was never written"));
                let Some(seal) = seal else { return stored };
                let mut plain = Bytes::zeros();
                let sealer = self.pages.sealing.sealer().expect("a sealed slot has a sealer");
                // SAFETY: two local pages.
                let opened = unsafe {
                    let (from, to) = (stored.0.as_ptr().cast(), plain.0.as_mut_ptr().cast());
                    sealer.open_raw(slot.0, &seal, from, to, PAGE_BYTES)
                };
                opened.unwrap_or_else(|_| panic!("{slot:?} does not open"));
                plain
            }
            Source::Inherited(page) => Box::new(inherited(page.0)),
            source => panic!("{slot:?} is in {source:?}"),
        }
    }

    /// Compacts the chunks until no chunk can be freed. With a shared bound there may be no blank
    /// position to read a page to, so that compaction ends early.
    fn compact_fully(&self, hand: &mut Hand) {
        let mut pass = Pass::default();
        let usage = || self.pages.slots().usage();
        // Random placement keeps some slots free, and the slot that is moved needs one more.
        let chunk = u64::from(self.setup.chunk_pages);
        let spare = |held: u64| match self.setup.hide {
            Hide::Off => 0,
            _ => held / 8 + chunk,
        };
        for _ in 0..20 {
            let Usage { live, held } = usage();
            if held - live < chunk + spare(held) {
                return;
            }
            while self.pages.compact(hand, &mut pass).more {}
        }
        let Usage { live, held } = usage();
        let may_end_early = self.setup.shared_units.is_some();
        assert!(
            may_end_early || held - live < chunk + spare(held),
            "{held} slots in chunks of {chunk} hold {live} pages"
        );
    }

    /// The last thread: waits until the others have ended, and checks that nothing is left.
    fn finish(self: &Rc<Self>) {
        wait_until("waits for the end of the program", || {
            self.is_idle() && self.servers.get() == 0
        });
        trace(|| "all threads have ended".into());
        let mut hand = Hand::default();
        self.pages.wait_flights(&mut hand);
        // As after the advice MADV_PAGEOUT.
        let advised = self.random.borrow_mut().below(self.setup.pages + 1);
        self.pages.take_out_range(&mut hand, 0..advised);
        // Some calls of `work` bring the present pages back to the limit.
        for _ in 0..100 {
            self.pages.work(&mut hand, 64);
            self.pages.wait_flights(&mut hand);
        }
        if self.setup.compacts {
            self.compact_fully(&mut hand);
        }
        assert!(self.pages.state().late_wakes.is_empty(), "all threads were woken");
        // The model cannot read the content of an overflow file.
        if self.pages.slots().held().1 == 0 {
            self.check_quiet();
        } else {
            self.pages.check_quiet(true);
        }
        {
            let protection = self.lock_protection();
            self.pages.drop_range(0..self.setup.pages);
            drop(protection);
        }
        self.pages.wait_flights(&mut hand);
        self.pages.free_emptied();
        self.pages.check_quiet(false);
        assert_eq!(self.pages.slots().held(), (0, 0), "chunks are left");
        assert_eq!(self.pages.slots().inherited(), 0, "inherited slots are left");
        assert_eq!(self.pool.chunks_held(), 0, "chunks of the pool are left");
        assert_eq!(self.pool.in_flight(), 0, "transfers are left");
        let state = self.pages.state();
        assert!(state.flights.is_idle(), "flights are left");
        assert_eq!(state.resident, 0, "resident pages are left");
        assert_eq!(state.streams.in_flight(), 0, "windows of the prefetcher are left");
        let left = (0..state.shelf.len()).map(Position).filter(|position| {
            let used = state.shelf.used(*position);
            holds_page(used) || matches!(used, Use::Reserved { .. })
        });
        assert_eq!(left.count() as u32, self.blanks.get(), "positions are left");
        assert_eq!(self.pages.memory.present(), state.shelf.filled(), "memory is left");
        let Counters { issued, used, wasted, .. } = state.streams.counters();
        assert!(used + wasted <= issued, "{used} used, {wasted} wasted, {issued} issued");
        drop(state);
        self.is_over.set(true);
    }
}

/// Returns the content of a page at the fork that made the simulated process.
fn inherited(page: u32) -> Bytes {
    let mut content = Bytes([0; WORDS]);
    content.0[page as usize % WORDS] = 1 << 62 | u64::from(page);
    content
}

/// Numbers of a run's steps and events, for the tests of the simulation itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    pub steps: u64,
    pub faults: u64,
    pub taken_out: u64,
    pub written: u64,
    pub read: u64,
    pub read_ahead: u64,
    /// Pages mapped back that had been taken out.
    pub restored: u64,
    /// Pages mapped that repeat a word.
    pub words: u64,
    /// Pages that compaction moved.
    pub compacted: u64,
    /// Calls of the policy.
    pub calls: Calls,
}

impl Summary {
    pub(crate) fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.faults += other.faults;
        self.taken_out += other.taken_out;
        self.written += other.written;
        self.read += other.read;
        self.read_ahead += other.read_ahead;
        self.restored += other.restored;
        self.words += other.words;
        self.compacted += other.compacted;
        self.calls.add(&other.calls);
    }
}

/// Runs a world until its program has ended.
///
/// # Errors
/// A message, as for [`fiber::run`].
pub(crate) fn run(
    setup: &Setup,
    seed: u64,
    schedule: &mut dyn Schedule,
) -> Result<Summary, String> {
    use crate::stats::Counter;
    let (world, steps) = run_to_end(setup, seed, schedule)?;
    let count = |counter: Counter| world.pages.stats.get(counter);
    Ok(Summary {
        steps: u64::from(steps),
        faults: count(Counter::Faults),
        taken_out: count(Counter::PagesEvicted),
        written: count(Counter::PagesOut),
        read: count(Counter::PagesIn),
        read_ahead: count(Counter::PagesReadAhead),
        restored: count(Counter::PagesRestored),
        words: count(Counter::PagesWordMapped),
        compacted: count(Counter::PagesCompacted),
        calls: world.calls(),
    })
}

/// Runs a world, and returns the transfers that were recorded.
///
/// # Errors
/// As [`run`].
pub(crate) fn watch(
    setup: &Setup,
    seed: u64,
    schedule: &mut dyn Schedule,
) -> Result<Vec<Post>, String> {
    run_to_end(setup, seed, schedule).map(|(world, _)| world.pool.take_seen())
}

fn run_to_end(
    setup: &Setup,
    seed: u64,
    schedule: &mut dyn Schedule,
) -> Result<(Rc<World>, u32), String> {
    let world = World::new(setup.clone(), seed);
    for index in 0..setup.handlers {
        let world = world.clone();
        spawn(format!("handler {index}"), move || threads::handler(&world));
    }
    {
        let world = world.clone();
        spawn("worker", move || threads::worker(&world));
    }
    {
        let world = world.clone();
        spawn("NIC", move || threads::nic(&world));
    }
    for (index, program) in setup.programs.iter().cloned().enumerate() {
        let world = world.clone();
        spawn(format!("program {index}"), move || {
            program::run(&world, index as u32, &program);
        });
    }
    if setup.resizes > 0 {
        let world = world.clone();
        world.running.set(world.running.get() + 1);
        spawn("resizer", move || threads::resizer(&world));
    }
    if setup.shared_units.is_some() {
        let world = world.clone();
        world.running.set(world.running.get() + 1);
        spawn("rival", move || rival::run(&world));
    }
    if setup.pins > 0 {
        let world = world.clone();
        world.running.set(world.running.get() + 1);
        spawn("device", move || threads::device(&world));
    }
    if setup.inherits {
        let world = world.clone();
        world.running.set(world.running.get() + 1);
        spawn("heir", move || threads::heir(&world));
    }
    world.pages.memory.refuses_moves.store(setup.refuses_moves, Ordering::Relaxed);
    if setup.stuck_s.is_some() && !setup.refuses_moves {
        let world = world.clone();
        spawn("holder", move || {
            let _protection = world.lock_protection();
            wait_until("keeps all pages", || false);
        });
    }
    {
        let world = world.clone();
        spawn("end", move || world.finish());
    }
    let pages: *const Pages<ModelMemory> = &world.pages;
    // SAFETY: the world outlives the run.
    let locked = move || unsafe { (*pages).is_locked() };
    let steps = fiber::run(schedule, locked, || world.check_step(), setup.max_steps);
    match steps {
        Ok(steps) => Ok((world, steps)),
        Err(error) => {
            // Fibers of the run still refer to the world.
            std::mem::forget(world);
            Err(error)
        }
    }
}

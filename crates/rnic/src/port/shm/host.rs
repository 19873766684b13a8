//! The host of a NIC: the process whose thread runs the engine.

use std::os::fd::OwnedFd;
use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::epoll;
use rustix::rand::{GetRandomFlags, getrandom};

use super::super::control::{Reply, Verb};
use super::super::core::Core;
use super::super::error::Error;
use super::super::events::EventWord;
use super::super::roce::Wire;
use super::super::waker::Waker;
use super::super::wakes::Environment;
use super::aside::close_aside;
use super::doorbell::{ASLEEP_RNR, MappedDoorbell, Page, doorbells_in, page_bytes};
use super::nic_thread::{NicThread, Shared, eventfd, watch};
use super::seat::Seat;
use crate::ids::FunctionId;
use crate::memory::DmaMemory;
use crate::verbs::{Caps, FunctionLimits, Limits, Stats, WireLimits};
use crate::wire::WireStats;

/// Doorbells of the physical function: queue pairs whose send queue is not managed.
const PHYSICAL_DOORBELLS: u32 = 16 << 10;
/// The most doorbells of a virtual function, whatever its limit of queue pairs.
const VIRTUAL_DOORBELLS: u32 = 16 << 10;
/// Doorbells of a function that another one has opened: it is there for its keys.
const OPENED_DOORBELLS: u32 = 1 << 10;

/// The most pieces of memory that attached processes may have shared: half the mappings that Linux allows
/// a process (`vm.max_map_count`). Beyond those no `mmap` of this process would succeed.
const PIECES_MAX: usize = 32 << 10;
/// Beyond that a quarter of the mappings is for who has few pieces yet: for newcomers, where others have
/// taken what they could.
const PIECES_RESERVED: usize = 16 << 10;
const FEW_PIECES: usize = 64;

/// A NIC in a thread of this process. The thread ends when the last clone, and the last function
/// and session of this process, is dropped.
#[derive(Clone)]
pub struct Host(pub(super) Arc<HostInner>);

pub(super) struct HostInner {
    /// Pieces of other processes' memory that are mapped here.
    pieces: Arc<AtomicUsize>,
    pub(super) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    seat: Arc<Seat>,
    physical: Arc<Page>,
    /// Started with the first session.
    waker: Mutex<Option<Waker>>,
    /// It talks to those of other hosts.
    wired: bool,
}

/// What the NIC has done.
#[derive(Clone, Debug)]
pub struct HostStats {
    /// CPU time of the NIC thread: the hardware's time, not the memory node's.
    pub cpu: Duration,
    /// Times that the thread went to sleep.
    pub sleeps: u64,
    /// The engine's counters.
    pub engine: Stats,
    /// Its counters of packets between hosts.
    pub wire: WireStats,
    /// Packets that the kernel did not take.
    pub unsent: u64,
}

/// With limits of the connections to other NICs: those that are there, or what suits the socket.
fn wired(limits: Limits, wire: &Wire) -> Limits {
    let suited = || WireLimits { window_bytes: wire.window_bytes(), ..WireLimits::default() };
    let random = Some(limits.random.unwrap_or(random_number));
    Limits { wire: Some(limits.wire.unwrap_or_else(suited)), random, ..limits }
}

/// A random number of the system's. Taken at the set-up of queue pairs only.
fn random_number() -> u32 {
    let mut bytes = [0; 4];
    // So few bytes come whole, at once; a system that has none has started nothing yet.
    while getrandom(&mut bytes[..], GetRandomFlags::empty()) != Ok(4) {}
    u32::from_ne_bytes(bytes)
}

impl Host {
    /// Starts the NIC thread.
    pub fn start(limits: Limits) -> Result<Self, Error> {
        Self::start_with(limits, None, false)
    }

    /// Starts the thread of a NIC that talks to those of other hosts too.
    pub fn start_over(limits: Limits, wire: Wire) -> Result<Self, Error> {
        Self::start_with(wired(limits, &wire), Some(wire), false)
    }

    /// A NIC that this process has first of all for itself: threads of it that wait for a completion run the NIC
    /// meanwhile, in place of its thread, so that [`Host::cpu_time`] is not all that it takes. Other
    /// processes may attach; when those threads have stopped waiting without going to sleep, the next doorbell of another
    /// process is heard up to 1 ms late.
    pub fn start_own(limits: Limits, wire: Option<Wire>) -> Result<Self, Error> {
        let limits = match &wire {
            Some(wire) => wired(limits, wire),
            None => limits,
        };
        Self::start_with(limits, wire, true)
    }

    fn start_with(limits: Limits, wire: Option<Wire>, callers: bool) -> Result<Self, Error> {
        let shared = Arc::new(Shared::new()?);
        let wired = wire.is_some();
        let mut nic = NicThread::new(limits, shared.clone(), wire)?;
        let memory = DmaMemory::anonymous(page_bytes(PHYSICAL_DOORBELLS))
            .map_err(Error::system("mapping the doorbell page"))?;
        let wake = eventfd()?;
        watch(&shared.epoll, &wake)?;
        nic.add_doorbells(FunctionId::PHYSICAL, memory.clone(), PHYSICAL_DOORBELLS);
        let seat = Arc::new(Seat::new(nic, shared.clone(), callers)?);
        let own = callers.then(|| seat.clone());
        let physical = Page { memory, slots: PHYSICAL_DOORBELLS, wake, seat: own };
        let (physical, of_thread) = (Arc::new(physical), seat.clone());
        let thread = std::thread::Builder::new()
            .name("granary-nic".to_string())
            .spawn(move || of_thread.run())
            .map_err(|source| Error::System { attempt: "starting the NIC thread", source })?;
        let (pieces, thread, waker) = (Arc::default(), Some(thread), Mutex::default());
        Ok(Self(Arc::new(HostInner { pieces, shared, thread, seat, physical, waker, wired })))
    }

    /// Whether its QPs can talk to those of other hosts.
    pub fn is_wired(&self) -> bool {
        self.0.wired
    }

    /// The physical function: the NIC owner's.
    pub fn physical(&self) -> LocalFunction {
        LocalFunction {
            host: self.clone(),
            id: FunctionId::PHYSICAL,
            page: self.0.physical.clone(),
            _removal: None,
        }
    }

    /// A new virtual function for this process, removed with the last clone of the handle.
    pub fn function(&self, limits: FunctionLimits) -> Result<LocalFunction, Error> {
        let doorbells = limits.qps.clamp(1, VIRTUAL_DOORBELLS);
        let memory = DmaMemory::anonymous(page_bytes(doorbells))
            .map_err(Error::system("mapping the doorbell page"))?;
        let make = move |core: &mut Core| core.engine.add_function(limits);
        let (removal, page) = self.add_function(make, memory, doorbells)?;
        Ok(self.local(removal, page))
    }

    fn local(&self, removal: Removal, page: Arc<Page>) -> LocalFunction {
        let (host, id) = (self.clone(), removal.id);
        LocalFunction { host, id, page, _removal: Some(Arc::new(removal)) }
    }

    /// A new virtual function for another process, whose doorbells lie in `memory`; gives how many
    /// there are, and a descriptor that wakes the NIC.
    pub(super) fn shared_function(
        &self,
        limits: FunctionLimits,
        memory: DmaMemory,
    ) -> Result<(Removal, u32, OwnedFd), Error> {
        self.start_waker()?;
        let doorbells = limits.qps.clamp(1, VIRTUAL_DOORBELLS).min(doorbells_in(memory.len()));
        let make = move |core: &mut Core| {
            let wakes = &mut core.wakes;
            core.engine.add_function(limits).inspect(|id| wakes.doubt(*id))
        };
        let (mut removal, page) = self.add_function(make, memory, doorbells)?;
        removal.is_shared = true;
        let wake = page
            .wake
            .try_clone()
            .map_err(|source| Error::System { attempt: "duplicating an eventfd", source })?;
        Ok((removal, doorbells, wake))
    }

    /// Room for one more piece of memory of a process that has shared `held`.
    pub(super) fn take_piece(&self, held: usize) -> Result<Piece, Error> {
        let piece = Piece(self.0.pieces.clone());
        let reserved = if held < FEW_PIECES { PIECES_RESERVED } else { 0 };
        if piece.0.fetch_add(1, Ordering::Relaxed) >= PIECES_MAX + reserved {
            let limit = PIECES_MAX as u64;
            let what = "pieces of shared memory of all attached processes";
            return Err(crate::error::Error::Limit { what, limit }.into());
        }
        Ok(piece)
    }

    fn add_function(
        &self,
        make: impl FnOnce(&mut Core) -> Result<FunctionId, crate::error::Error> + Send + 'static,
        memory: DmaMemory,
        doorbells: u32,
    ) -> Result<(Removal, Arc<Page>), Error> {
        let of_nic = memory.clone();
        let wake = eventfd()?;
        let watched = wake
            .try_clone()
            .map_err(|source| Error::System { attempt: "duplicating an eventfd", source })?;
        watch(&self.0.shared.epoll, &watched)?;
        let id = self.call(move |nic| {
            let id = make(&mut nic.core)?;
            nic.add_doorbells(id, of_nic, doorbells);
            Ok::<_, Error>(id)
        })??;
        let seat = self.0.seat.is_shared().then(|| self.0.seat.clone());
        let page = Page { memory, slots: doorbells, wake, seat };
        Ok((
            Removal { host: self.clone(), id, watched: Some(watched), is_shared: false },
            Arc::new(page),
        ))
    }

    /// Starts the waker thread if it does not run yet.
    fn start_waker(&self) -> Result<(), Error> {
        let mut waker = self.0.waker.lock();
        if waker.is_none() {
            let started = Waker::start(Environment::SYSTEM)?;
            let line = started.line();
            self.call(move |nic| nic.core.wakes.set_line(line))?;
            *waker = Some(started);
        }
        Ok(())
    }

    /// What the engine can do.
    pub fn caps(&self) -> Result<Caps, Error> {
        self.call(|nic| nic.core.engine.caps())
    }

    /// What the NIC has done so far.
    pub fn stats(&self) -> Result<HostStats, Error> {
        let cpu = self.cpu_time()?;
        let (engine, wire, unsent) = self.call(|nic| {
            let engine = &nic.core.engine;
            (engine.stats().clone(), engine.wire_stats().clone(), nic.unsent())
        })?;
        let sleeps = self.0.shared.sleeps.load(Ordering::Relaxed);
        Ok(HostStats { cpu, sleeps, engine, wire, unsent })
    }

    /// CPU time that the NIC thread and its waker thread have taken. Does not wake them.
    pub fn cpu_time(&self) -> Result<Duration, Error> {
        let nic = self.cpu_time_of(self.0.thread.as_ref().expect("set until dropped"))?;
        let waker = self.0.waker.lock();
        let waker = waker.as_ref().map(|waker| self.cpu_time_of(waker.thread())).transpose()?;
        Ok(nic + waker.unwrap_or_default())
    }

    fn cpu_time_of(&self, thread: &JoinHandle<()>) -> Result<Duration, Error> {
        let thread = thread.as_pthread_t();
        let mut clock = 0;
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the thread has not been joined, so its handle is valid even if it has ended.
        let error = unsafe { libc::pthread_getcpuclockid(thread, &mut clock) };
        if error != 0 {
            return Err(self.gone());
        }
        // SAFETY: `time` is a valid place for the result.
        if unsafe { libc::clock_gettime(clock, &mut time) } != 0 {
            return Err(self.gone());
        }
        Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }

    /// Lets the NIC thread do `job` between two looks at its doorbells.
    pub(super) fn call<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut NicThread) -> R + Send + 'static,
    ) -> Result<R, Error> {
        let (reply, result) = mpsc::sync_channel(1);
        let sent = self.0.shared.submit(Box::new(move |nic| {
            // The caller waits for it below.
            let _ = reply.send(job(nic));
        }));
        if !sent {
            return Err(self.gone());
        }
        result.recv().map_err(|_| self.gone())
    }

    fn check_alive(&self) -> Result<(), Error> {
        if self.0.shared.is_alive() { Ok(()) } else { Err(self.gone()) }
    }

    fn gone(&self) -> Error {
        Error::Gone { why: "its thread has ended".to_string() }
    }
}

impl Drop for HostInner {
    fn drop(&mut self) {
        self.shared.submit(Box::new(|nic| nic.stop = true));
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic of the thread has been reported where it happened.
            let _ = thread.join();
        }
    }
}

/// A piece of another process's memory, counted.
pub(super) struct Piece(Arc<AtomicUsize>);

impl Drop for Piece {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Removes a virtual function when it is dropped.
pub(super) struct Removal {
    pub host: Host,
    pub id: FunctionId,
    /// The eventfd by which the function wakes the NIC. Set until dropped.
    watched: Option<OwnedFd>,
    /// Another process has that eventfd, too.
    is_shared: bool,
}

impl Drop for Removal {
    fn drop(&mut self) {
        let (id, host) = (self.id, &self.host.0);
        // If the thread has ended, so has the function.
        let _ = self.host.call(move |nic| nic.remove_function(id));
        if let Some(waker) = &*host.waker.lock() {
            waker.forget(id);
        }
        if let Some(watched) = self.watched.take() {
            // The client may hold the eventfd open: closing this descriptor would not end the watch.
            let _ = epoll::delete(&host.shared.epoll, &watched);
            if self.is_shared {
                close_aside(watched);
            }
        }
    }
}

/// A function of the NIC's own process.
#[derive(Clone)]
pub struct LocalFunction {
    host: Host,
    id: FunctionId,
    page: Arc<Page>,
    _removal: Option<Arc<Removal>>,
}

impl LocalFunction {
    /// The host.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// A further function with keys of its own, for who has this one.
    pub fn open(&self) -> Result<LocalFunction, Error> {
        let memory = DmaMemory::anonymous(page_bytes(OPENED_DOORBELLS))
            .map_err(Error::system("mapping the doorbell page"))?;
        let id = self.id;
        let make = move |core: &mut Core| core.engine.open_function(id);
        let (removal, page) = self.host.add_function(make, memory, OPENED_DOORBELLS)?;
        Ok(self.host.local(removal, page))
    }

    /// Executes a control verb.
    pub fn execute(&self, verb: Verb<DmaMemory>) -> Result<Reply, Error> {
        let id = self.id;
        self.host.call(move |nic| nic.execute(id, verb))?
    }

    /// Yields the calling thread's CPU to the NIC if that runs there; false if it does not.
    #[inline]
    pub fn offer_cpu(&self) -> bool {
        self.page.offer_cpu()
    }

    /// A turn of the NIC, for who waits for it; true if there was anything to do.
    #[inline]
    pub fn wait_turn(&self) -> bool {
        self.page.seat.as_ref().is_some_and(|seat| seat.wait_turn())
    }

    /// A turn of the NIC for who would go to sleep; true if it should have another one.
    pub fn busy_turn(&self) -> bool {
        self.page.seat.as_ref().is_some_and(|seat| seat.busy_turn())
    }

    /// To be called by who goes to sleep until a completion comes.
    pub fn before_sleep(&self) {
        if let Some(seat) = &self.page.seat {
            seat.before_sleep();
        }
    }

    /// Whether the NIC thread runs.
    pub fn check_alive(&self) -> Result<(), Error> {
        self.host.check_alive()
    }

    /// The word that who waits for asynchronous events sleeps on.
    pub fn event_word(&self) -> EventWord {
        self.page.event_word()
    }

    /// The doorbell in `slot`.
    pub fn doorbell(&self, slot: u32) -> Result<MappedDoorbell, Error> {
        MappedDoorbell::new(self.page.clone(), slot).ok_or_else(|| Error::Protocol {
            what: format!("doorbell {slot} of {}", self.page.slots),
        })
    }

    /// To be called after a receive was posted.
    #[inline]
    pub fn receive_posted(&self) {
        self.page.wake_if_asleep(ASLEEP_RNR);
    }
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;

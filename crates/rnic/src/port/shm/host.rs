//! The host of a NIC: the process whose NIC thread runs the engine.

use std::os::fd::OwnedFd;
use std::os::unix::thread::JoinHandleExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::epoll;
use rustix::io::{Errno, retry_on_intr};
use rustix::rand::{GetRandomFlags, getrandom};

use super::super::control::{Reply, Verb};
use super::super::core::Core;
use super::super::error::Error;
use super::super::events::EventWord;
use super::super::roce::RoceSocket;
use super::super::sleeper::Environment;
use super::super::waker::Waker;
use super::deferred_close::close_deferred;
use super::doorbell::{DoorbellPage, MappedDoorbell};
use super::driver::EngineDriver;
use super::nic_thread::{NicThread, Shared, eventfd, watch};
use super::page::{ASLEEP_RNR, doorbells_in, page_bytes};
use crate::limits::{FunctionLimits, Limits, WireLimits};
use crate::spec::{EngineRegion, Stats};
use crate::wire::WireStats;
use units::scheduling::Granted;
use verbs::{DmaMemory, FunctionId, Key};

/// Doorbells of the physical function: one for each queue pair with an unmanaged send queue.
const PHYSICAL_DOORBELLS: u32 = 16 << 10;
/// Maximum doorbells of a virtual function, independent of its limit of queue pairs.
const VIRTUAL_DOORBELLS: u32 = 16 << 10;
/// Doorbells of a function that another function has opened. Such a function is used mainly for its
/// keys.
const OPENED_DOORBELLS: u32 = 1 << 10;

/// Maximum pieces of memory that all attached processes together may share: half the mappings that
/// Linux allows a process (`vm.max_map_count`). Beyond the kernel's limit every `mmap` of this
/// process fails.
const PIECES_MAX: usize = 32 << 10;
/// Further pieces, a quarter of the mappings, that are reserved for processes with fewer than
/// [`FEW_PIECES`]. So a new process can still attach when other processes have used up
/// [`PIECES_MAX`].
const PIECES_RESERVED: usize = 16 << 10;
const FEW_PIECES: usize = 64;

/// A NIC that a thread of this process runs. The thread ends when the last clone, function and
/// session in this process is dropped.
#[derive(Clone)]
pub struct Host(pub(super) Arc<HostInner>);

pub(super) struct HostInner {
    /// Number of pieces of other processes' memory that this process has mapped.
    pieces: Arc<AtomicUsize>,
    pub(super) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    driver: Arc<EngineDriver>,
    physical: Arc<DoorbellPage>,
    /// Started with the first session.
    waker: Mutex<Option<Waker>>,
    /// The NIC has a UDP socket for RoCEv2.
    has_roce: bool,
    /// Thin memory that was allocated as files; `None`: thin memory is private.
    thin_files: OnceLock<Mutex<Vec<ThinFile>>>,
    /// The scheduling that the NIC thread has been granted, if [`Host::prioritize`] was called.
    granted: OnceLock<Granted>,
}

/// Thin memory of the NIC's owner that is a file.
#[derive(Clone, Debug)]
pub struct ThinFile {
    /// Address of its first byte in this process.
    pub address: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// The file: the byte at offset 0 is the byte at `address`.
    pub file: Arc<OwnedFd>,
}

/// Counters of a NIC.
#[derive(Clone, Debug)]
pub struct HostStats {
    /// CPU time of the NIC thread and the waker thread. It counts as time of the hardware, not of
    /// the memory node.
    pub cpu: Duration,
    /// Number of times that the NIC thread went to sleep.
    pub sleeps: u64,
    /// Scheduling of the NIC thread; `None` if no better one was asked for.
    pub scheduling: Option<Granted>,
    /// The engine's counters.
    pub engine: Stats,
    /// The engine's counters of packets between hosts.
    pub wire: WireStats,
    /// Packets that the kernel did not accept for sending.
    pub unsent: u64,
}

/// Completes `limits` for a NIC with a socket: limits of connections and a random number generator.
fn complete_limits(limits: Limits, wire: &RoceSocket) -> Limits {
    let suited = || WireLimits { window_bytes: wire.window_bytes(), ..WireLimits::default() };
    let random = Some(limits.random.unwrap_or(random_number));
    Limits { wire: Some(limits.wire.unwrap_or_else(suited)), random, ..limits }
}

/// A random number from the system. Used only when queue pairs are set up.
fn random_number() -> Result<u32, Errno> {
    let mut bytes = [0; 4];
    // The kernel returns requests of up to 256 bytes whole.
    retry_on_intr(|| getrandom(&mut bytes[..], GetRandomFlags::empty()))?;
    Ok(u32::from_ne_bytes(bytes))
}

impl Host {
    /// Starts a NIC without a network.
    pub fn start(limits: Limits) -> Result<Self, Error> {
        Self::start_with(limits, None, false)
    }

    /// Starts a NIC that can also connect to NICs of other hosts, over `wire`.
    pub fn start_roce(limits: Limits, wire: RoceSocket) -> Result<Self, Error> {
        Self::start_with(complete_limits(limits, &wire), Some(wire), false)
    }

    /// Starts a NIC mainly for the use of this process: threads of this process that wait for a
    /// completion run the engine meanwhile (`driver.rs`).
    ///
    /// [`Host::cpu_time`] does not include the time that these threads spend in the engine. Other
    /// processes may attach. After callers have stopped polling without going to sleep, the next
    /// doorbell of another process is seen up to 1 ms late.
    pub fn start_own(limits: Limits, wire: Option<RoceSocket>) -> Result<Self, Error> {
        let limits = match &wire {
            Some(wire) => complete_limits(limits, wire),
            None => limits,
        };
        Self::start_with(limits, wire, true)
    }

    fn start_with(limits: Limits, wire: Option<RoceSocket>, callers: bool) -> Result<Self, Error> {
        let shared = Arc::new(Shared::new()?);
        let has_roce = wire.is_some();
        let mut nic = NicThread::new(limits, shared.clone(), wire)?;
        let memory = DmaMemory::anonymous(page_bytes(PHYSICAL_DOORBELLS))
            .map_err(Error::system("mapping the doorbell page"))?;
        let wake = eventfd()?;
        watch(&shared.epoll, &wake)?;
        nic.add_doorbells(FunctionId::PHYSICAL, memory.clone(), PHYSICAL_DOORBELLS);
        let driver = Arc::new(EngineDriver::new(nic, shared.clone(), callers)?);
        let own = callers.then(|| driver.clone());
        let physical = DoorbellPage { memory, slots: PHYSICAL_DOORBELLS, wake, driver: own };
        let (physical, for_thread) = (Arc::new(physical), driver.clone());
        let thread = std::thread::Builder::new()
            .name("granary-nic".to_string())
            .spawn(move || for_thread.run())
            .map_err(|source| Error::System { attempt: "starting the NIC thread", source })?;
        let (pieces, thread, waker) = (Arc::default(), Some(thread), Mutex::default());
        let thin_files = OnceLock::new();
        Ok(Self(Arc::new(HostInner {
            pieces,
            shared,
            thread,
            driver,
            physical,
            waker,
            has_roce,
            thin_files,
            granted: OnceLock::new(),
        })))
    }

    /// Asks the system to run the NIC thread and the waker thread before CPU-bound threads
    /// ([`units::scheduling`]), and returns what it grants to the NIC thread. For a process that
    /// serves other processes, because the scheduling of the whole machine is affected.
    ///
    /// # Errors
    /// The NIC thread has ended.
    pub fn prioritize(&self) -> Result<Granted, Error> {
        let granted = self.call(NicThread::prioritize)?;
        Ok(self.0.granted.get_or_init(|| granted).clone())
    }

    /// Makes thin memory of the NIC's owner a file from now on, which can be passed to another
    /// process ([`Host::thin_files`]). A process that has the file reads and writes the memory past
    /// the NIC and its keys.
    pub fn make_thin_files(&self) {
        self.0.thin_files.get_or_init(Mutex::default);
    }

    /// Thin memory that was allocated as files.
    pub fn thin_files(&self) -> Vec<ThinFile> {
        self.0.thin_files.get().map_or_else(Vec::new, |files| files.lock().clone())
    }

    fn alloc_thin(&self, bytes: usize, unit: usize, kept: usize) -> Result<DmaMemory, Error> {
        let system = Error::system("mapping memory");
        let Some(files) = self.0.thin_files.get() else {
            return DmaMemory::thin(bytes, unit, kept).map_err(system);
        };
        let (memory, file) = DmaMemory::thin_file(bytes, kept).map_err(system)?;
        let (address, bytes, file) = (memory.addr(), memory.len() as u64, Arc::new(file));
        files.lock().push(ThinFile { address, bytes, file });
        Ok(memory)
    }

    /// Whether QPs of this NIC can connect to QPs of other hosts.
    pub fn has_roce(&self) -> bool {
        self.0.has_roce
    }

    /// The physical function, which belongs to the NIC's owner.
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

    fn local(&self, removal: Removal, page: Arc<DoorbellPage>) -> LocalFunction {
        let (host, id) = (self.clone(), removal.id);
        LocalFunction { host, id, page, _removal: Some(Arc::new(removal)) }
    }

    /// Adds a virtual function for another process, with its doorbell page in `memory`. Returns the
    /// number of doorbells and a descriptor that wakes the NIC.
    pub(super) fn shared_function(
        &self,
        limits: FunctionLimits,
        memory: DmaMemory,
    ) -> Result<(Removal, u32, OwnedFd), Error> {
        self.start_waker()?;
        let doorbells = limits.qps.clamp(1, VIRTUAL_DOORBELLS).min(doorbells_in(memory.len()));
        let make = move |core: &mut Core| {
            let wakes = &mut core.wakes;
            core.engine.add_function(limits).inspect(|id| wakes.add_untrusted(*id))
        };
        let (mut removal, page) = self.add_function(make, memory, doorbells)?;
        removal.is_shared = true;
        let wake = page
            .wake
            .try_clone()
            .map_err(|source| Error::System { attempt: "duplicating an eventfd", source })?;
        Ok((removal, doorbells, wake))
    }

    /// Counts one more piece of memory of a process that already shares `held` pieces. Fails at the
    /// limit.
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
    ) -> Result<(Removal, Arc<DoorbellPage>), Error> {
        let for_nic = memory.clone();
        let wake = eventfd()?;
        let watched = wake
            .try_clone()
            .map_err(|source| Error::System { attempt: "duplicating an eventfd", source })?;
        watch(&self.0.shared.epoll, &watched)?;
        let id = self.call(move |nic| {
            let id = make(&mut nic.core)?;
            nic.add_doorbells(id, for_nic, doorbells);
            Ok::<_, Error>(id)
        })??;
        let driver = self.0.driver.is_shared().then(|| self.0.driver.clone());
        let page = DoorbellPage { memory, slots: doorbells, wake, driver };
        Ok((
            Removal { host: self.clone(), id, watched: Some(watched), is_shared: false },
            Arc::new(page),
        ))
    }

    /// Starts the waker thread unless it already runs.
    fn start_waker(&self) -> Result<(), Error> {
        let mut waker = self.0.waker.lock();
        if waker.is_none() {
            let started = Waker::start(Environment::SYSTEM, self.0.granted.get().is_some())?;
            let queue = started.queue();
            self.call(move |nic| nic.core.wakes.set_waker(queue))?;
            *waker = Some(started);
        }
        Ok(())
    }

    /// The present counters of the NIC.
    pub fn stats(&self) -> Result<HostStats, Error> {
        let cpu = self.cpu_time()?;
        let (engine, wire, unsent) = self.call(|nic| {
            let engine = &nic.core.engine;
            (engine.stats().clone(), engine.wire_stats().clone(), nic.unsent())
        })?;
        let sleeps = self.0.shared.sleeps.load(Ordering::Relaxed);
        let scheduling = self.0.granted.get().cloned();
        Ok(HostStats { cpu, sleeps, scheduling, engine, wire, unsent })
    }

    /// CPU time that the NIC thread and the waker thread have used. Does not wake them.
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

    /// Runs `job` on the NIC thread between two rounds, and waits for its result.
    pub(super) fn call<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut NicThread) -> R + Send + 'static,
    ) -> Result<R, Error> {
        let (reply, result) = mpsc::sync_channel(1);
        let sent = self.0.shared.submit(Box::new(move |nic| {
            // The caller waits below, so the channel is open.
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
            // A panic of the thread has already been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

/// Accounts for one mapped piece of another process's memory.
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
    /// Another process has a copy of the eventfd.
    is_shared: bool,
}

impl Drop for Removal {
    fn drop(&mut self) {
        let (id, host) = (self.id, &self.host.0);
        // The call fails only if the NIC thread has ended, and the function with it.
        let _ = self.host.call(move |nic| nic.remove_function(id));
        if let Some(waker) = &*host.waker.lock() {
            waker.forget(id);
        }
        if let Some(watched) = self.watched.take() {
            // The client may keep the eventfd open. Then closing this descriptor would not remove
            // the eventfd from the epoll instance.
            let _ = epoll::delete(&host.shared.epoll, &watched);
            if self.is_shared {
                close_deferred(watched);
            }
        }
    }
}

/// A function of the NIC's own process.
#[derive(Clone)]
pub struct LocalFunction {
    host: Host,
    id: FunctionId,
    page: Arc<DoorbellPage>,
    _removal: Option<Arc<Removal>>,
}

impl LocalFunction {
    /// The host.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Opens a further function, with a key namespace of its own, for the owner of this one.
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

    /// Registers a region with an engine, which the thread that runs the NIC calls.
    pub fn reg_engine_mr(&self, region: EngineRegion) -> Result<Key, Error> {
        let id = self.id;
        Ok(self.host.call(move |nic| nic.core.engine.reg_engine_mr(id, region))??)
    }

    /// Allocates [`DmaMemory::thin`] memory, as a file after [`Host::make_thin_files`].
    pub fn alloc_thin(&self, bytes: usize, unit: usize, kept: usize) -> Result<DmaMemory, Error> {
        self.host.alloc_thin(bytes, unit, kept)
    }

    /// Yields the calling thread's CPU to the NIC thread if the NIC thread runs on the same CPU;
    /// returns false otherwise.
    #[inline]
    pub fn offer_cpu(&self) -> bool {
        self.page.offer_cpu()
    }

    /// Runs a round of the engine for a caller that waits for a completion. Returns true if there
    /// was work.
    #[inline]
    pub fn poll_engine(&self) -> bool {
        self.page.driver.as_ref().is_some_and(|driver| driver.poll_engine())
    }

    /// Runs a round of the engine for a caller that is about to sleep. Returns true if the caller
    /// should poll again instead.
    pub fn poll_engine_before_sleep(&self) -> bool {
        self.page.driver.as_ref().is_some_and(|driver| driver.poll_engine_before_sleep())
    }

    /// Must be called by a thread before it sleeps until a completion.
    pub fn before_sleep(&self) {
        if let Some(driver) = &self.page.driver {
            driver.before_sleep();
        }
    }

    /// Returns an error if the NIC thread has ended.
    pub fn check_alive(&self) -> Result<(), Error> {
        self.host.check_alive()
    }

    /// The futex word on which threads wait for asynchronous events.
    pub fn event_word(&self) -> EventWord {
        self.page.event_word()
    }

    /// The doorbell in `slot`.
    pub fn doorbell(&self, slot: u32) -> Result<MappedDoorbell, Error> {
        MappedDoorbell::new(self.page.clone(), slot).ok_or_else(|| Error::Protocol {
            what: format!("doorbell {slot} does not exist: the page has {}", self.page.slots),
        })
    }

    /// Must be called after a receive was posted.
    #[inline]
    pub fn receive_posted(&self) {
        self.page.wake_if_asleep(ASLEEP_RNR);
    }
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;

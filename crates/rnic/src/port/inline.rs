//! The `inline` port: the thread that posts work runs the engine.
//!
//! A doorbell write takes the engine's lock and runs the engine until no QP is ready: there is no
//! NIC thread and no socket. A chain at a WAIT stays blocked, at no cost, until a later doorbell
//! write produces the completions that the WAIT needs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Instant;

use parking_lot::Mutex;

use super::control::{Reply, Verb};
use super::core::Core;
use super::error::Error;
use super::events::EventWord;
use crate::engine::Engine;
use crate::limits::{FunctionLimits, Limits};
use crate::spec::{EngineRegion, Stats};
use verbs::{DmaMemory, FunctionId, Key, Qpn};

/// WQEs that the engine executes between two deliveries of its events.
const BUDGET: usize = 256;

/// Allocates the given number of bytes for the NIC, zeroed and aligned to at least 64.
pub type Provider = Box<dyn Fn(usize) -> DmaMemory + Send + Sync>;

/// A NIC whose engine runs on the threads of its callers.
pub struct InlineNic {
    core: Mutex<Core>,
    started: Instant,
    /// Set in a stepped NIC, which runs only in [`InlineNic::step`]: the allocator of its memory.
    stepped: Option<Provider>,
    /// A SEND is blocked on a receive: a thread that posts a receive must run the engine.
    waits_for_receive: AtomicBool,
}

impl InlineNic {
    /// Makes a NIC.
    pub fn new(limits: Limits) -> Arc<Self> {
        Self::made(limits, None)
    }

    /// Makes a NIC that runs only in [`InlineNic::step`], one WQE for each call. For model
    /// checking: the caller, which provides the memory and calls `step`, controls every choice of
    /// the NIC.
    ///
    /// Verbs and doorbell writes do not run the engine, the clock stays at 0, and all memory that
    /// the NIC hands out comes from `memory`.
    pub fn stepped(limits: Limits, memory: Provider) -> Arc<Self> {
        Self::made(limits, Some(memory))
    }

    fn made(limits: Limits, stepped: Option<Provider>) -> Arc<Self> {
        Arc::new(Self {
            core: Mutex::new(Core::new(limits)),
            started: Instant::now(),
            stepped,
            waits_for_receive: AtomicBool::new(false),
        })
    }

    /// See [`Engine::ready_qps`](crate::Engine::ready_qps).
    pub fn ready_qps(&self) -> Vec<Qpn> {
        self.core.lock().engine.ready_qps()
    }

    /// See [`Engine::step`](crate::Engine::step).
    pub fn step(&self, qpn: Qpn) -> bool {
        let mut core = self.core.lock();
        let done = core.engine.step(qpn, 0);
        while core.deliver_events() {}
        done
    }

    /// Runs `f` on the engine of a [`InlineNic::stepped`] NIC, then wakes the threads that sleep on
    /// CQs with new completions. Panics on any other NIC.
    pub fn with_engine<T>(&self, f: impl FnOnce(&mut Engine) -> T) -> T {
        assert!(self.stepped.is_some(), "with_engine needs a stepped NIC (InlineNic::stepped)");
        let mut core = self.core.lock();
        let result = f(&mut core.engine);
        while core.deliver_events() {}
        result
    }

    /// The physical function.
    pub fn physical(self: &Arc<Self>) -> InlineFunction {
        InlineFunction { nic: self.clone(), id: FunctionId::PHYSICAL, _owned: None }
    }

    /// A new virtual function, removed with the last clone of the handle.
    pub fn function(self: &Arc<Self>, limits: FunctionLimits) -> Result<InlineFunction, Error> {
        let id = self.core.lock().engine.add_function(limits)?;
        Ok(self.owned(id))
    }

    fn owned(self: &Arc<Self>, id: FunctionId) -> InlineFunction {
        let owned = Arc::new(Removal { nic: self.clone(), id });
        InlineFunction { nic: self.clone(), id, _owned: Some(owned) }
    }

    /// The engine's counters.
    pub fn stats(&self) -> Stats {
        self.core.lock().engine.stats().clone()
    }

    fn run(&self, core: &mut Core) {
        if self.stepped.is_some() {
            return;
        }
        loop {
            let now = self.started.elapsed().as_nanos() as u64;
            while core.engine.poll(now, BUDGET) > 0 {
                core.deliver_events();
            }
            while core.deliver_events() {}
            let waits = core.engine.next_timeout().is_some();
            if self.waits_for_receive.swap(waits, Ordering::SeqCst) || !waits {
                return;
            }
            // A thread that posted a receive before it could see the flag did not run the engine.
            // So the engine runs once more after the flag was set.
            fence(Ordering::SeqCst);
        }
    }
}

/// A process's handle on an [`InlineNic`].
#[derive(Clone)]
pub struct InlineFunction {
    nic: Arc<InlineNic>,
    id: FunctionId,
    _owned: Option<Arc<Removal>>,
}

impl InlineFunction {
    /// The function's number at the NIC.
    pub fn id(&self) -> FunctionId {
        self.id
    }

    /// The NIC.
    pub fn nic(&self) -> &Arc<InlineNic> {
        &self.nic
    }

    /// Opens a further function, with a key namespace of its own, for the owner of this one.
    pub fn open(&self) -> Result<InlineFunction, Error> {
        let id = self.nic.core.lock().engine.open_function(self.id)?;
        Ok(self.nic.owned(id))
    }

    /// Executes a control verb.
    pub fn execute(&self, verb: Verb<DmaMemory>) -> Result<Reply, Error> {
        let mut core = self.nic.core.lock();
        let reply = core.execute(self.id, verb)?;
        // A verb may unblock or flush queues.
        self.nic.run(&mut core);
        Ok(reply)
    }

    /// Registers a region with an engine.
    pub fn reg_engine_mr(&self, region: EngineRegion) -> Result<Key, Error> {
        Ok(self.nic.core.lock().engine.reg_engine_mr(self.id, region)?)
    }

    /// Allocates `bytes` of zeroed memory, rounded up to pages (except for a stepped NIC).
    pub fn alloc_dma(&self, bytes: usize) -> Result<DmaMemory, Error> {
        match &self.nic.stepped {
            None => DmaMemory::anonymous(bytes).map_err(Error::system("mapping memory")),
            Some(provider) => Ok(provider(bytes)),
        }
    }

    /// Allocates as [`DmaMemory::thin`] does; a stepped NIC as [`InlineFunction::alloc_dma`].
    pub fn alloc_thin(&self, bytes: usize, unit: usize, kept: usize) -> Result<DmaMemory, Error> {
        match &self.nic.stepped {
            None => DmaMemory::thin(bytes, unit, kept).map_err(Error::system("mapping memory")),
            Some(provider) => Ok(provider(bytes)),
        }
    }

    /// Allocates as [`DmaMemory::zeros`] does; a stepped NIC as [`InlineFunction::alloc_dma`].
    pub fn alloc_zeros(&self, bytes: usize) -> Result<DmaMemory, Error> {
        match &self.nic.stepped {
            None => DmaMemory::zeros(bytes).map_err(Error::system("mapping memory")),
            Some(provider) => Ok(provider(bytes)),
        }
    }

    /// The futex word on which threads wait for asynchronous events. The first call allocates it.
    pub fn event_word(&self) -> Result<EventWord, Error> {
        let mut core = self.nic.core.lock();
        if let Some(word) = core.events.word(self.id) {
            return Ok(word);
        }
        let memory = DmaMemory::anonymous(4).map_err(Error::system("mapping memory"))?;
        let word = EventWord::new(memory);
        core.watch_events(self.id, word.clone());
        Ok(word)
    }

    /// Removes the function with all its objects at once, as a port does when a process dies. From
    /// then on all verbs on remaining handles fail.
    pub fn remove(&self) {
        let mut core = self.nic.core.lock();
        core.remove_function(self.id);
        self.nic.run(&mut core);
    }

    /// Writes the doorbell of `qpn` and runs the engine until no QP is ready.
    #[inline]
    pub fn write_doorbell(&self, qpn: Qpn, producer: u16) {
        let mut core = self.nic.core.lock();
        core.engine.doorbell(qpn, producer);
        self.nic.run(&mut core);
    }

    /// Must be called after a receive was posted.
    #[inline]
    pub fn receive_posted(&self) {
        fence(Ordering::SeqCst);
        if self.nic.waits_for_receive.load(Ordering::SeqCst) {
            self.run_engine();
        }
    }

    /// Runs the engine until no QP is ready.
    pub fn run_engine(&self) {
        let mut core = self.nic.core.lock();
        self.nic.run(&mut core);
    }
}

/// Removes a virtual function from its NIC.
struct Removal {
    nic: Arc<InlineNic>,
    id: FunctionId,
}

impl Drop for Removal {
    fn drop(&mut self) {
        let mut core = self.nic.core.lock();
        core.remove_function(self.id);
        self.nic.run(&mut core);
    }
}

//! The `inline` port: the posting thread is the NIC.
//!
//! A doorbell takes the engine's lock and runs it until nothing is ready: no thread, no socket. A
//! chain that WAITs stays blocked, at no cost, until somebody's doorbell completes what it waits
//! for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Instant;

use parking_lot::Mutex;

use super::control::{Reply, Verb};
use super::core::Core;
use super::error::Error;
use super::events::EventWord;
use crate::engine::Engine;
use crate::ids::{FunctionId, Qpn};
use crate::memory::DmaMemory;
use crate::verbs::{Caps, FunctionLimits, Limits, Stats};

/// WQEs that the engine executes between two looks at its events.
const BUDGET: usize = 256;

/// Gives memory for the NIC: so many bytes, zeroed, aligned to 64 at least.
pub type Provider = Box<dyn Fn(usize) -> DmaMemory + Send + Sync>;

/// A NIC that its callers run.
pub struct InlineNic {
    core: Mutex<Core>,
    started: Instant,
    /// Runs only when [`InlineNic::step`] is called, in memory from here.
    stepped: Option<Provider>,
    /// Some SEND waits for a receive: who posts one must run the engine.
    waits_for_receive: AtomicBool,
}

impl InlineNic {
    /// Makes a NIC.
    pub fn new(limits: Limits) -> Arc<Self> {
        Self::made(limits, None)
    }

    /// Makes a NIC that nobody runs but [`InlineNic::step`], WQE by WQE: verbs and doorbells leave the
    /// work where it is. Its clock stands at 0. All memory that it gives out comes from `memory`. For
    /// model checking: who holds that memory and calls `step` holds every choice the NIC has.
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

    /// Runs `f` on the engine of a [`InlineNic::stepped`] NIC, then wakes who sleeps on CQs that got
    /// completions.
    pub fn with_engine<T>(&self, f: impl FnOnce(&mut Engine) -> T) -> T {
        assert!(self.stepped.is_some(), "who rings runs this NIC");
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

    /// What the engine can do.
    pub fn caps(&self) -> Caps {
        self.core.lock().engine.caps()
    }

    /// What the engine has counted.
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
            // Whoever posted a receive before it could see the flag relies on this second look.
            fence(Ordering::SeqCst);
        }
    }
}

/// What a process uses of an [`InlineNic`].
#[derive(Clone)]
pub struct InlineFunction {
    nic: Arc<InlineNic>,
    id: FunctionId,
    _owned: Option<Arc<Removal>>,
}

impl InlineFunction {
    /// Its number at the NIC.
    pub fn id(&self) -> FunctionId {
        self.id
    }

    /// The NIC.
    pub fn nic(&self) -> &Arc<InlineNic> {
        &self.nic
    }

    /// A further function with keys of its own, for who has this one.
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

    /// `bytes` of zeroed memory, rounded up to pages (unless the NIC is a stepped one).
    pub fn alloc_dma(&self, bytes: usize) -> Result<DmaMemory, Error> {
        match &self.nic.stepped {
            None => DmaMemory::anonymous(bytes).map_err(Error::system("mapping memory")),
            Some(provider) => Ok(provider(bytes)),
        }
    }

    /// [`DmaMemory::thin`]; a stepped NIC's as [`InlineFunction::alloc_dma`].
    pub fn alloc_thin(&self, bytes: usize, unit: usize, kept: usize) -> Result<DmaMemory, Error> {
        match &self.nic.stepped {
            None => DmaMemory::thin(bytes, unit, kept).map_err(Error::system("mapping memory")),
            Some(provider) => Ok(provider(bytes)),
        }
    }

    /// [`DmaMemory::zeros`]; a stepped NIC's as [`InlineFunction::alloc_dma`].
    pub fn alloc_zeros(&self, bytes: usize) -> Result<DmaMemory, Error> {
        match &self.nic.stepped {
            None => DmaMemory::zeros(bytes).map_err(Error::system("mapping memory")),
            Some(provider) => Ok(provider(bytes)),
        }
    }

    /// The word that who waits for asynchronous events sleeps on. Made when it is first asked for.
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

    /// Removes the function with all that it has, at once, as a port does when a process dies. What
    /// is still held of it is refused from now on.
    pub fn remove(&self) {
        let mut core = self.nic.core.lock();
        core.remove_function(self.id);
        self.nic.run(&mut core);
    }

    /// Rings the doorbell of `qpn`, and is the NIC until nothing is ready.
    #[inline]
    pub fn ring(&self, qpn: Qpn, producer: u16) {
        let mut core = self.nic.core.lock();
        core.engine.ring(qpn, producer);
        self.nic.run(&mut core);
    }

    /// To be called after a receive was posted.
    #[inline]
    pub fn receive_posted(&self) {
        fence(Ordering::SeqCst);
        if self.nic.waits_for_receive.load(Ordering::SeqCst) {
            self.turn();
        }
    }

    /// Is the NIC until nothing is ready.
    pub fn turn(&self) {
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

//! Wake-ups of threads that sleep on a word in a client's memory, and the choice of the thread that
//! makes them.
//!
//! A wake-up is `FUTEX_WAKE`. The kernel walks all threads that sleep in the word's hash bucket,
//! including threads that sleep on other words. A client that parks threads in the bucket of its
//! CQ's record can make each wake-up of that CQ arbitrarily long: 4 us without parked threads, 116
//! us with 2,000 of them and 280 us with 5,000 (medians of CPU time, Linux 6.18 on two virtual
//! CPUs).
//!
//! ```text
//!                 wake-ups of a trusted function               FUTEX_WAKE
//!  NIC thread ──────────────────────────────────────────────────────────────> sleepers
//!      │          of an offloaded function                         ^
//!      └───────────────────────> waker thread (`waker.rs`) ────────┘
//! ```
//!
//! - The CPU time of a function's wake-ups decides which thread makes them; see [`Probation`]
//!   (`sleeper.rs`). The waker thread costs an honest client one thread switch for each wake-up,
//!   and the NIC thread nothing.
//! - A NIC without a waker thread makes all wake-ups itself and measures none, because all its
//!   clients are threads of its own process.
//! - Functions are served round robin, and a round of the NIC makes no further wake-up after
//!   [`ROUND_TIME`].

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::sleeper::{Environment, Probation, Sleeper};
use super::waker::WakerQueue;
use verbs::{DmaMemory, FunctionId};

/// Maximum wake-ups of one [`Wakes::run`]; further ones wait for the next call. Because system
/// calls are the most expensive work that a client can cause in the NIC thread.
const WAKES_PER_ROUND: usize = 4;
/// Time after which a run makes no further wake-up.
const ROUND_TIME: Duration = Duration::from_micros(20);
/// The NIC thread's pending wake-ups.
pub(super) struct Wakes {
    clients: HashMap<FunctionId, Client>,
    /// Functions with pending wake-ups, in round-robin order.
    run_queue: VecDeque<FunctionId>,
    /// The waker thread's list, if there is a waker thread.
    waker: Option<WakerQueue>,
    env: Environment,
}

struct Client {
    probation: Arc<Probation>,
    pending: VecDeque<Arc<Sleeper>>,
}

impl Client {
    fn new(is_trusted: bool) -> Self {
        Self { probation: Arc::new(Probation::new(is_trusted)), pending: VecDeque::new() }
    }
}

impl Wakes {
    /// Makes an empty queue for a NIC without a waker thread.
    pub fn new(env: Environment) -> Self {
        Self { clients: HashMap::new(), run_queue: VecDeque::new(), waker: None, env }
    }

    /// Sets the waker thread, which makes the wake-ups of offloaded functions from now on.
    pub fn set_waker(&mut self, waker: WakerQueue) {
        self.waker = Some(waker);
    }

    /// Adds a function of another process, which starts offloaded.
    pub fn add_untrusted(&mut self, function: FunctionId) {
        self.clients.insert(function, Client::new(false));
    }

    /// Registers `word` as a word on which threads of `function`'s client sleep.
    pub fn sleeper(&mut self, function: FunctionId, word: DmaMemory) -> Arc<Sleeper> {
        let client = self.clients.entry(function).or_insert_with(|| Client::new(true));
        let (queued, probation) = (AtomicBool::new(false), client.probation.clone());
        Arc::new(Sleeper { function, word, queued, probation })
    }

    /// Queues a wake-up of the threads that sleep on a word.
    pub fn queue(&mut self, sleeper: &Arc<Sleeper>) {
        // The wake-up that is already queued serves this completion, too.
        if sleeper.queued.swap(true, Ordering::AcqRel) {
            return;
        }
        let Some(client) = self.clients.get_mut(&sleeper.function) else { return };
        if client.pending.is_empty() {
            self.run_queue.push_back(sleeper.function);
        }
        client.pending.push_back(sleeper.clone());
    }

    /// Whether no wake-up is pending.
    pub fn is_empty(&self) -> bool {
        self.run_queue.is_empty()
    }

    /// Makes some of the pending wake-ups, or hands them to the waker thread.
    #[cold]
    pub fn run(&mut self) {
        let mut spent = Duration::ZERO;
        for _ in 0..WAKES_PER_ROUND {
            let Some(function) = self.run_queue.pop_front() else { return };
            let Some(client) = self.clients.get_mut(&function) else { continue };
            let Some(sleeper) = client.pending.pop_front() else { continue };
            match &self.waker {
                None => _ = sleeper.wake(&self.env, || 0),
                Some(waker) if client.probation.is_offloaded() => {
                    if !waker.try_push(&sleeper) {
                        // The waker thread holds the list's lock: retry in the next round.
                        client.pending.push_front(sleeper);
                        self.run_queue.push_front(function);
                        return;
                    }
                }
                Some(_) if client.probation.is_trusted() => {
                    let time = sleeper.wake(&self.env, self.env.wall);
                    client.probation.on_trusted_wake(time);
                    spent += time;
                }
                Some(_) => spent += sleeper.wake_measured(&self.env),
            }
            if !client.pending.is_empty() {
                self.run_queue.push_back(function);
            }
            if spent >= ROUND_TIME {
                return;
            }
        }
    }

    /// Removes a function and its pending wake-ups.
    pub fn remove(&mut self, function: FunctionId) {
        self.clients.remove(&function);
        self.run_queue.retain(|f| *f != function);
    }
}

#[cfg(test)]
#[path = "wakes_tests.rs"]
mod tests;

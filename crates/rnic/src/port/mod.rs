//! Ports: how a process reaches the engine.
//!
//! A [`Function`] is what a process uses of a NIC. Its data path is the same in all ports: WQEs are
//! written into a send ring in DMA memory, then the [`Doorbell`] rings; completions appear in a ring
//! in DMA memory. What differs is who runs the engine, and how a control verb gets to it.
//!
//! | port | engine run by | doorbell | control verbs |
//! | --- | --- | --- | --- |
//! | [`inline`] | the thread that rings | a lock | the same lock |
//! | [`shm`], local function | the NIC thread | a word in memory | a mailbox |
//! | [`roce`]: the same, with a UDP socket | the NIC thread | a word in memory | a mailbox |
//! | [`shm`], attached function | the NIC thread of another process | a word in shared memory | messages on a socket |

pub mod control;
mod core;
mod error;
mod events;
pub mod handshake;
pub mod inline;
pub mod roce;
pub mod shm;
#[cfg(test)]
mod test_queue;
mod waker;
mod wakes;

pub use self::core::{ARMED, wake};
pub use error::Error;
pub use events::EventWord;

use self::control::{Reply, Verb};
use self::inline::InlineFunction;
use self::shm::{Attached, LocalFunction, MappedDoorbell};
use crate::ids::Qpn;
use crate::memory::DmaMemory;

/// What a process uses of a NIC.
#[derive(Clone)]
pub enum Function {
    /// The caller's thread is the NIC.
    Inline(InlineFunction),
    /// The NIC is a thread of this process.
    Local(LocalFunction),
    /// The NIC is a thread of another process.
    Attached(Attached),
}

impl Function {
    /// Opens a further function of the NIC for its owner, with keys of its own, in the same port. It is removed with the
    /// last clone of the handle.
    pub fn open(&self) -> Result<Function, Error> {
        match self {
            Function::Inline(f) => f.open().map(Function::Inline),
            Function::Local(f) => f.open().map(Function::Local),
            Function::Attached(_) => {
                let why = "only the owner of a NIC opens further functions of it".to_string();
                Err(Error::Refused { why })
            }
        }
    }

    /// The port's name for reports.
    pub fn port_name(&self) -> &'static str {
        match self {
            Function::Inline(_) => "inline",
            Function::Local(f) if f.host().is_wired() => "roce",
            Function::Local(_) | Function::Attached(_) => "shm",
        }
    }

    /// Executes a control verb.
    pub fn execute(&self, verb: Verb<DmaMemory>) -> Result<Reply, Error> {
        match self {
            Function::Inline(f) => f.execute(verb),
            Function::Local(f) => f.execute(verb),
            Function::Attached(f) => f.execute(verb),
        }
    }

    /// `bytes` of zeroed memory, rounded up to pages, that the NIC can reach.
    pub fn alloc_dma(&self, bytes: usize) -> Result<DmaMemory, Error> {
        match self {
            Function::Inline(f) => f.alloc_dma(bytes),
            Function::Local(_) => {
                DmaMemory::anonymous(bytes).map_err(Error::system("mapping memory"))
            }
            Function::Attached(f) => f.alloc_dma(bytes),
        }
    }

    /// [`Function::alloc_dma`], as [`DmaMemory::thin`] where the NIC is in this process. Memory
    /// that is shared with a NIC in another process is that process's to give back, which it does
    /// not.
    pub fn alloc_thin(&self, bytes: usize, unit: usize, kept: usize) -> Result<DmaMemory, Error> {
        match self {
            Function::Inline(f) => f.alloc_thin(bytes, unit, kept),
            Function::Local(_) => {
                DmaMemory::thin(bytes, unit, kept).map_err(Error::system("mapping memory"))
            }
            Function::Attached(f) => f.alloc_dma(bytes),
        }
    }

    /// [`Function::alloc_dma`] for memory that stays zero: [`DmaMemory::zeros`] where the NIC is in
    /// this process.
    pub fn alloc_zeros(&self, bytes: usize) -> Result<DmaMemory, Error> {
        match self {
            Function::Inline(f) => f.alloc_zeros(bytes),
            Function::Local(_) => DmaMemory::zeros(bytes).map_err(Error::system("mapping memory")),
            Function::Attached(f) => f.alloc_dma(bytes),
        }
    }

    /// The word that who waits for asynchronous events sleeps on.
    pub fn event_word(&self) -> Result<EventWord, Error> {
        match self {
            Function::Inline(f) => f.event_word(),
            Function::Local(f) => Ok(f.event_word()),
            Function::Attached(f) => Ok(f.event_word()),
        }
    }

    /// Descriptors that the function needs as long as it is used.
    pub fn descriptors(&self) -> Vec<std::os::fd::RawFd> {
        match self {
            Function::Inline(_) | Function::Local(_) => Vec::new(),
            Function::Attached(f) => f.descriptors(),
        }
    }

    /// Whether the NIC is still there.
    pub fn check_alive(&self) -> Result<(), Error> {
        match self {
            Function::Inline(_) => Ok(()),
            Function::Local(f) => f.check_alive(),
            Function::Attached(f) => f.check_alive(),
        }
    }

    /// Yields the calling thread's CPU to the NIC if that runs there; false if it does not.
    #[inline]
    pub fn offer_cpu(&self) -> bool {
        match self {
            Function::Inline(_) => false,
            Function::Local(f) => f.offer_cpu(),
            Function::Attached(f) => f.offer_cpu(),
        }
    }

    /// Does the NIC's work if it is the caller's to do, or sees to it that its thread does. Called before a
    /// caller sleeps.
    pub fn turn(&self) {
        match self {
            Function::Inline(f) => f.turn(),
            Function::Local(f) => f.before_sleep(),
            Function::Attached(_) => {}
        }
    }

    /// Does a round of the NIC's work where who waits for it may do it; true if there was anything to do.
    #[inline]
    pub fn wait_turn(&self) -> bool {
        match self {
            Function::Local(f) => f.wait_turn(),
            Function::Inline(_) | Function::Attached(_) => false,
        }
    }

    /// The same for who would go to sleep otherwise: true as long as there is so much to do that it should not.
    pub fn busy_turn(&self) -> bool {
        match self {
            Function::Local(f) => f.busy_turn(),
            Function::Inline(_) | Function::Attached(_) => false,
        }
    }

    /// The doorbell of a new queue pair, with what [`Reply::Qp`] said of it.
    pub fn doorbell(&self, qpn: Qpn, slot: Option<u32>) -> Result<Doorbell, Error> {
        match (self, slot) {
            (Function::Inline(f), _) => Ok(Doorbell::Inline { function: f.clone(), qpn }),
            (_, None) => Ok(Doorbell::None),
            (Function::Local(f), Some(slot)) => f.doorbell(slot).map(Doorbell::Mapped),
            (Function::Attached(f), Some(slot)) => f.doorbell(slot).map(Doorbell::Mapped),
        }
    }

    /// To be called after the record of a receive queue has moved: a SEND may wait for it.
    #[inline]
    pub fn receive_posted(&self) {
        match self {
            Function::Inline(f) => f.receive_posted(),
            Function::Local(f) => f.receive_posted(),
            Function::Attached(f) => f.receive_posted(),
        }
    }
}

/// The doorbell of a send queue.
pub enum Doorbell {
    /// The caller is the NIC.
    Inline {
        /// The function.
        function: InlineFunction,
        /// The queue pair.
        qpn: Qpn,
    },
    /// A word that the NIC's thread looks at.
    Mapped(MappedDoorbell),
    /// None: a managed queue, or no send queue.
    None,
}

impl Doorbell {
    /// Tells the NIC that the ring is filled up to building-block index `producer`.
    ///
    /// One caller at a time, and with indices that only advance: callers hold the queue's lock.
    #[inline]
    pub fn ring(&mut self, producer: u16) {
        match self {
            Doorbell::Mapped(bell) => bell.ring(producer),
            Doorbell::Inline { function, qpn } => function.ring(*qpn, producer),
            Doorbell::None => {}
        }
    }

    /// To be called when the queue pair has been reset: its indices start at 0 again.
    pub fn reset(&mut self) {
        if let Doorbell::Mapped(bell) = self {
            bell.reset();
        }
    }
}

/// Whether this process has one CPU only, which who spins would take from whom it waits for.
///
/// The main thread's mask stands for the process's: single threads may be pinned.
pub fn has_one_cpu() -> bool {
    let main = rustix::process::getpid();
    rustix::thread::sched_getaffinity(Some(main)).is_ok_and(|set| set.count() == 1)
}

#[cfg(test)]
#[path = "function_tests.rs"]
mod tests;

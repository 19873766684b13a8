//! Ports: how a process reaches the engine.
//!
//! A [`Function`] is a process's handle on a NIC. Its data path is the same in all ports: the
//! process writes WQEs into a send ring in DMA memory and then writes the [`Doorbell`]; the NIC
//! writes completions into a ring in DMA memory. The ports differ in the thread that runs the
//! engine, and in how a control verb reaches the engine.
//!
//! | port | engine run by | doorbell | control verbs |
//! | --- | --- | --- | --- |
//! | [`inline`] | the thread that writes the doorbell | a lock | the same lock |
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
mod sleeper;
#[cfg(test)]
mod test_queue;
mod waker;
mod wakes;

pub use self::core::{ARMED, wake};
pub use error::Error;
pub use events::EventWord;

use self::control::{Reply, Verb};
use self::inline::InlineFunction;
use self::shm::{Attached, BorrowedFunction, LocalFunction, MappedDoorbell};
use crate::spec::EngineRegion;
use verbs::{DmaMemory, Key, Qpn};

/// A process's handle on a NIC.
#[derive(Clone)]
pub enum Function {
    /// The caller's thread is the NIC.
    Inline(InlineFunction),
    /// The NIC is a thread of this process.
    Local(LocalFunction),
    /// The NIC is a thread of another process.
    Attached(Attached),
    /// The NIC is a thread of another process, and so is the function: queues that it has lent.
    Borrowed(BorrowedFunction),
}

impl Function {
    /// Opens a further function of the NIC in the same port, with a key namespace of its own. Only
    /// the process that owns the NIC may open functions. The function is removed when the last
    /// clone of its handle is dropped.
    pub fn open(&self) -> Result<Function, Error> {
        match self {
            Function::Inline(f) => f.open().map(Function::Inline),
            Function::Local(f) => f.open().map(Function::Local),
            Function::Attached(_) | Function::Borrowed(_) => {
                let why = "only the process that owns the NIC can open functions".to_string();
                Err(Error::Refused { why })
            }
        }
    }

    /// The port's name in reports.
    pub fn port_name(&self) -> &'static str {
        match self {
            Function::Inline(_) => "inline",
            Function::Local(f) if f.host().has_roce() => "roce",
            Function::Local(_) | Function::Attached(_) | Function::Borrowed(_) => "shm",
        }
    }

    /// Executes a control verb.
    pub fn execute(&self, verb: Verb<DmaMemory>) -> Result<Reply, Error> {
        match self {
            Function::Inline(f) => f.execute(verb),
            Function::Local(f) => f.execute(verb),
            Function::Attached(f) => f.execute(verb),
            Function::Borrowed(f) => f.refuse(),
        }
    }

    /// Returns whether the NIC runs in this process and the function has control verbs.
    pub fn is_local(&self) -> bool {
        matches!(self, Function::Inline(_) | Function::Local(_))
    }

    /// Registers a region with an engine. Only a function of the NIC's own process can
    /// ([`Function::is_local`]), because the engine is code of that process.
    pub fn reg_engine_mr(&self, region: EngineRegion) -> Result<Key, Error> {
        match self {
            Function::Inline(f) => f.reg_engine_mr(region),
            Function::Local(f) => f.reg_engine_mr(region),
            Function::Attached(_) => {
                let why = "only the process that runs the NIC can register regions with engines";
                Err(Error::Refused { why: why.to_string() })
            }
            Function::Borrowed(f) => f.refuse(),
        }
    }

    /// Allocates `bytes` of zeroed memory, rounded up to pages, that the NIC can access.
    pub fn alloc_dma(&self, bytes: usize) -> Result<DmaMemory, Error> {
        match self {
            Function::Inline(f) => f.alloc_dma(bytes),
            Function::Local(_) => {
                DmaMemory::anonymous(bytes).map_err(Error::system("mapping memory"))
            }
            Function::Attached(f) => f.alloc_dma(bytes),
            Function::Borrowed(f) => f.refuse(),
        }
    }

    /// Allocates as [`Function::alloc_dma`] does, but as [`DmaMemory::thin`] where the NIC is in
    /// this process. Memory that is shared with a NIC in another process stays ordinary memory:
    /// only that process could return its pages to the system, and the NIC does not.
    pub fn alloc_thin(&self, bytes: usize, unit: usize, kept: usize) -> Result<DmaMemory, Error> {
        match self {
            Function::Inline(f) => f.alloc_thin(bytes, unit, kept),
            Function::Local(f) => f.alloc_thin(bytes, unit, kept),
            Function::Attached(f) => f.alloc_dma(bytes),
            Function::Borrowed(f) => f.refuse(),
        }
    }

    /// Allocates memory that stays zero: [`DmaMemory::zeros`] where the NIC is in this process,
    /// otherwise as [`Function::alloc_dma`] does.
    pub fn alloc_zeros(&self, bytes: usize) -> Result<DmaMemory, Error> {
        match self {
            Function::Inline(f) => f.alloc_zeros(bytes),
            Function::Local(_) => DmaMemory::zeros(bytes).map_err(Error::system("mapping memory")),
            Function::Attached(f) => f.alloc_dma(bytes),
            Function::Borrowed(f) => f.refuse(),
        }
    }

    /// The futex word on which threads wait for asynchronous events.
    pub fn event_word(&self) -> Result<EventWord, Error> {
        match self {
            Function::Inline(f) => f.event_word(),
            Function::Local(f) => Ok(f.event_word()),
            Function::Attached(f) => Ok(f.event_word()),
            Function::Borrowed(f) => Ok(f.event_word()),
        }
    }

    /// Descriptors that must stay open for as long as the function is used.
    pub fn descriptors(&self) -> Vec<std::os::fd::RawFd> {
        match self {
            Function::Inline(_) | Function::Local(_) => Vec::new(),
            Function::Attached(f) => f.descriptors(),
            Function::Borrowed(f) => f.descriptors(),
        }
    }

    /// Returns an error if the NIC's thread or process has ended.
    pub fn check_alive(&self) -> Result<(), Error> {
        match self {
            Function::Inline(_) => Ok(()),
            Function::Local(f) => f.check_alive(),
            Function::Attached(f) => f.check_alive(),
            Function::Borrowed(f) => f.check_alive(),
        }
    }

    /// Yields the calling thread's CPU to the NIC thread if the NIC thread runs on the same CPU;
    /// returns false otherwise.
    #[inline]
    pub fn offer_cpu(&self) -> bool {
        match self {
            Function::Inline(_) => false,
            Function::Local(f) => f.offer_cpu(),
            Function::Attached(f) => f.offer_cpu(),
            Function::Borrowed(f) => f.offer_cpu(),
        }
    }

    /// Runs the engine if the caller is responsible for that, or otherwise makes sure that the NIC
    /// thread runs it. Callers call this before they sleep.
    pub fn before_sleep(&self) {
        match self {
            Function::Inline(f) => f.run_engine(),
            Function::Local(f) => f.before_sleep(),
            Function::Attached(_) | Function::Borrowed(_) => {}
        }
    }

    /// Runs one round of the engine on the calling thread, where the port allows a waiting caller
    /// to do so. Returns true if there was work.
    #[inline]
    pub fn poll_engine(&self) -> bool {
        match self {
            Function::Local(f) => f.poll_engine(),
            Function::Inline(_) | Function::Attached(_) | Function::Borrowed(_) => false,
        }
    }

    /// Runs one round like [`Function::poll_engine`], for a caller that is about to sleep. Returns
    /// true while the load is so high that the caller should keep polling instead of sleeping.
    pub fn poll_engine_before_sleep(&self) -> bool {
        match self {
            Function::Local(f) => f.poll_engine_before_sleep(),
            Function::Inline(_) | Function::Attached(_) | Function::Borrowed(_) => false,
        }
    }

    /// The doorbell of a new queue pair; `slot` is the doorbell slot from [`Reply::Qp`].
    pub fn doorbell(&self, qpn: Qpn, slot: Option<u32>) -> Result<Doorbell, Error> {
        match (self, slot) {
            (Function::Inline(f), _) => Ok(Doorbell::Inline { function: f.clone(), qpn }),
            (_, None) => Ok(Doorbell::None),
            (Function::Local(f), Some(slot)) => f.doorbell(slot).map(Doorbell::Mapped),
            (Function::Attached(f), Some(slot)) => f.doorbell(slot).map(Doorbell::Mapped),
            (Function::Borrowed(f), Some(slot)) => f.doorbell(slot).map(Doorbell::Mapped),
        }
    }

    /// Must be called after the producer index in a receive queue's record has advanced, because a
    /// SEND may be blocked until a receive is posted.
    #[inline]
    pub fn receive_posted(&self) {
        match self {
            Function::Inline(f) => f.receive_posted(),
            Function::Local(f) => f.receive_posted(),
            Function::Attached(f) => f.receive_posted(),
            // Borrowed queues have no receives.
            Function::Borrowed(_) => {}
        }
    }
}

/// The doorbell of a send queue.
pub enum Doorbell {
    /// The caller runs the engine.
    Inline {
        /// The function.
        function: InlineFunction,
        /// The queue pair.
        qpn: Qpn,
    },
    /// A word in memory that the NIC thread polls.
    Mapped(MappedDoorbell),
    /// No doorbell: the send queue is managed, or there is none.
    None,
}

impl Doorbell {
    /// Tells the NIC that the send ring is filled up to building-block index `producer`.
    ///
    /// Callers hold the queue's lock: there is one caller at a time, and the index only advances.
    #[inline]
    pub fn write(&mut self, producer: u16) {
        match self {
            Doorbell::Mapped(doorbell) => doorbell.write(producer),
            Doorbell::Inline { function, qpn } => function.write_doorbell(*qpn, producer),
            Doorbell::None => {}
        }
    }

    /// Must be called after the queue pair was reset, because its indices then start at 0 again.
    pub fn reset(&mut self) {
        if let Doorbell::Mapped(doorbell) = self {
            doorbell.reset();
        }
    }
}

#[cfg(test)]
#[path = "function_tests.rs"]
mod tests;

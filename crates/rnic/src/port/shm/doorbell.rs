//! The client side of a doorbell page (`page.rs`): writes doorbells and wakes the NIC.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::events::EventWord;
use super::super::handshake::must_wake_nic;
use super::driver::EngineDriver;
use super::page::{ASLEEP, DOORBELLS, SLEEPING, WAITER, WHERE, event_word, this_cpu};
use verbs::DmaMemory;

/// A client's view of its function's doorbell page, with the eventfd that wakes the NIC.
pub(super) struct DoorbellPage {
    pub memory: DmaMemory,
    pub slots: u32,
    pub wake: OwnedFd,
    /// The driver of the engine, if threads of this process may run the engine.
    pub driver: Option<Arc<EngineDriver>>,
}

impl DoorbellPage {
    /// Wakes the NIC if it sleeps at level `from` or deeper. Called after a store that the NIC has
    /// to see.
    #[inline]
    pub fn wake_if_asleep(&self, from: u32) {
        if must_wake_nic(self.memory.word32(SLEEPING), from) {
            self.wake_nic();
        }
    }

    /// Called after a doorbell write: wakes the NIC if it sleeps, or runs the engine.
    #[inline]
    pub fn on_doorbell(&self) {
        match &self.driver {
            None => self.wake_if_asleep(ASLEEP),
            Some(driver) => {
                if !driver
                    .on_doorbell(|| self.memory.word32(SLEEPING).load(Ordering::Relaxed) >= ASLEEP)
                {
                    self.wake_nic();
                }
            }
        }
    }

    /// Yields the calling thread's CPU to the NIC thread if the NIC thread runs on the same CPU;
    /// returns false otherwise.
    #[inline]
    pub fn offer_cpu(&self) -> bool {
        let here = this_cpu();
        if self.memory.word32(WHERE).load(Ordering::Relaxed) != here {
            return false;
        }
        self.memory.word32(WAITER).store(here, Ordering::Relaxed);
        rustix::thread::sched_yield();
        true
    }

    /// The futex word on which threads wait for asynchronous events.
    pub fn event_word(&self) -> EventWord {
        event_word(&self.memory)
    }

    #[cold]
    fn wake_nic(&self) {
        // The write does not block. If the counter is full, a wake-up is already pending.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The doorbell of one send queue.
pub struct MappedDoorbell {
    page: Arc<DoorbellPage>,
    at: usize,
    generation: u16,
}

impl MappedDoorbell {
    /// The doorbell in `slot`, or `None` if the page has no such slot.
    pub(super) fn new(page: Arc<DoorbellPage>, slot: u32) -> Option<Self> {
        if slot >= page.slots {
            return None;
        }
        let at = DOORBELLS + slot as usize * 4;
        let last = page.memory.word32(at).load(Ordering::Relaxed);
        Some(Self { page, at, generation: ((last >> 16) as u16).wrapping_add(1) })
    }

    /// Stores the producer index and wakes the NIC if it sleeps.
    #[inline]
    pub fn write(&mut self, producer: u16) {
        let value = (self.generation as u32) << 16 | producer as u32;
        self.page.memory.word32(self.at).store(value, Ordering::Release);
        self.page.on_doorbell();
    }

    /// Starts a new generation, after a reset of the queue pair. Another process may have written
    /// the doorbell last, if the queue pair was lent.
    pub fn reset(&mut self) {
        let last = self.page.memory.word32(self.at).load(Ordering::Relaxed);
        self.generation = ((last >> 16) as u16).wrapping_add(1);
    }

    /// The doorbell's slot in the page.
    pub fn slot(&self) -> u32 {
        ((self.at - DOORBELLS) / 4) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::super::page::page_bytes;
    use super::*;

    #[test]
    fn doorbell_generations_differ() {
        let memory = DmaMemory::anonymous(page_bytes(2)).unwrap();
        let wake = super::super::nic_thread::eventfd().unwrap();
        let page = Arc::new(DoorbellPage { memory, slots: 2, wake, driver: None });
        let word = page.memory.word32(DOORBELLS + 4);
        word.store(0x0007_1234, Ordering::Relaxed);
        let mut doorbell = MappedDoorbell::new(page.clone(), 1).unwrap();
        doorbell.write(0x1235);
        assert_eq!(word.load(Ordering::Relaxed), 0x0008_1235);
        doorbell.reset();
        doorbell.write(0);
        assert_eq!(word.load(Ordering::Relaxed), 0x0009_0000);
        assert!(MappedDoorbell::new(page.clone(), 2).is_none());
        // A new owner of the slot writes the same index.
        let mut second = MappedDoorbell::new(page.clone(), 1).unwrap();
        second.write(0);
        assert_eq!(word.load(Ordering::Relaxed), 0x000a_0000);
        // The first owner takes the slot back, and also writes the same index.
        doorbell.reset();
        doorbell.write(0);
        assert_eq!(word.load(Ordering::Relaxed), 0x000b_0000);
    }
}

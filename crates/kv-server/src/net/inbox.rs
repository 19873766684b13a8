//! Jobs that other threads give to a thread.

use std::collections::VecDeque;
use std::task::Waker;

use parking_lot::Mutex;
use verbs::executor::EventFd;

use super::event_loop::Job;

/// The inbox of a thread, and the event that ends the thread's sleep.
#[derive(Debug)]
pub(crate) struct Inbox {
    jobs: Mutex<VecDeque<Job>>,
    event: EventFd,
    waker: Waker,
}

impl Inbox {
    pub fn new() -> Result<Self, verbs::Error> {
        let event = EventFd::new()?;
        let waker = event.waker();
        Ok(Self { jobs: Mutex::default(), event, waker })
    }

    /// The event: readable after a wake-up.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Adds a job.
    pub fn push(&self, job: Job) {
        self.jobs.lock().push_back(job);
        self.wake();
    }

    /// Takes the next job.
    pub fn pop(&self) -> Option<Job> {
        self.jobs.lock().pop_front()
    }

    /// Ends the sleep of the thread, or its next one.
    pub fn wake(&self) {
        self.waker.wake_by_ref();
    }
}

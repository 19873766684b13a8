//! The descriptors that the control thread waits for: an epoll instance.

use std::os::fd::{AsFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

/// The descriptors, each with a number that its events carry.
pub(in crate::service) struct Watch {
    epoll: OwnedFd,
    /// Additions that are to fail as if the user had no watches left (ENOSPC).
    #[cfg(test)]
    pub fail: std::sync::Arc<std::sync::atomic::AtomicU32>,
}

impl Watch {
    /// Watches nothing yet.
    pub fn new() -> Result<Self, Errno> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        Ok(Self {
            epoll,
            #[cfg(test)]
            fail: Default::default(),
        })
    }

    /// Watches a descriptor for something to read. Allocates, and counts against the user's
    /// `fs.epoll.max_user_watches`.
    pub fn add(&self, fd: impl AsFd, number: u64) -> Result<(), Errno> {
        #[cfg(test)]
        {
            use std::sync::atomic::Ordering::SeqCst;
            if self.fail.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1)).is_ok() {
                return Err(Errno::NOSPC);
            }
        }
        epoll::add(&self.epoll, fd, EventData::new_u64(number), EventFlags::IN)
    }

    /// Watches a descriptor for something else. Allocates nothing: fails only for one that is not
    /// watched.
    pub fn change(&self, fd: impl AsFd, number: u64, flags: EventFlags) -> Result<(), Errno> {
        epoll::modify(&self.epoll, fd, EventData::new_u64(number), flags)
    }

    /// Watches a descriptor no longer.
    pub fn remove(&self, fd: impl AsFd) {
        // One that is not watched, since adding it failed, need not be removed.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits until there are events, or until the timeout has passed.
    ///
    /// # Errors
    /// None that a busy system brings (`epoll_wait` allocates nothing): the descriptor or
    /// the buffer is wrong.
    pub fn wait(&self, events: &mut Vec<Event>, timeout: Option<&Timespec>) -> Result<(), Errno> {
        match epoll::wait(&self.epoll, spare_capacity(events), timeout) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(e),
        }
    }
}

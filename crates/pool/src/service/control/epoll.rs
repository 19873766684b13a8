//! The epoll instance of the control thread.

use std::os::fd::{AsFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

/// An epoll set. Each descriptor has a number that its events carry.
pub(in crate::service) struct Epoll {
    epoll: OwnedFd,
    /// Number of additions that must fail as if the user had no watches left (ENOSPC).
    #[cfg(test)]
    pub fail: std::sync::Arc<std::sync::atomic::AtomicU32>,
}

impl Epoll {
    /// An empty epoll set.
    pub fn new() -> Result<Self, Errno> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        Ok(Self {
            epoll,
            #[cfg(test)]
            fail: Default::default(),
        })
    }

    /// Adds a descriptor and watches it for readability. Allocates kernel memory, and counts
    /// against the user's `fs.epoll.max_user_watches`.
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

    /// Changes the watched events of a descriptor. Allocates nothing; fails only if the descriptor
    /// is not in the set.
    pub fn change(&self, fd: impl AsFd, number: u64, flags: EventFlags) -> Result<(), Errno> {
        epoll::modify(&self.epoll, fd, EventData::new_u64(number), flags)
    }

    /// Removes a descriptor.
    pub fn remove(&self, fd: impl AsFd) {
        // Fails if adding the descriptor failed, which needs no handling.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits until events arrive or the timeout has passed.
    ///
    /// # Errors
    /// Only for a wrong descriptor or buffer; lack of memory is no cause, because `epoll_wait`
    /// allocates none.
    pub fn wait(&self, events: &mut Vec<Event>, timeout: Option<&Timespec>) -> Result<(), Errno> {
        match epoll::wait(&self.epoll, spare_capacity(events), timeout) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(e),
        }
    }
}

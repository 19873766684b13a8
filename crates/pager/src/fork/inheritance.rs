//! Connection of a promoted child to the page server that has its inherited pages.

use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;

use super::channel::{self, Message};
use super::keeper;
use super::state::server_lost;
use crate::sys::PAGE_BYTES;

/// Connection of a promoted child to the page server of its parent.
pub(crate) struct Inheritance {
    calls: Mutex<OwnedFd>,
    /// Socket for the child's own page server. It must not use `calls`, because the child may be
    /// killed while it holds that lock.
    server_calls: Mutex<OwnedFd>,
}

impl Inheritance {
    /// Wraps the sockets for this pager and for its page server.
    pub fn new(calls: OwnedFd, server_calls: OwnedFd) -> Self {
        Self { calls: Mutex::new(calls), server_calls: Mutex::new(server_calls) }
    }

    /// Reads consecutive pages into consecutive frames.
    pub fn read(&self, pages: Range<u32>, first: *mut u8) {
        let calls = if is_page_server() { &self.server_calls } else { &self.calls };
        let calls = calls.lock().expect("no thread panics while it holds this lock");
        let mut at = pages.start;
        while at < pages.end {
            let part = at..pages.end.min(at + channel::PAGES_AT_ONCE as u32);
            // SAFETY: the caller's frames, as many as there are pages.
            let read = unsafe {
                let to = first.add((at - pages.start) as usize * PAGE_BYTES);
                let message = Message::pages(channel::READ, part.clone());
                channel::send(calls.as_raw_fd(), message, &[]).and_then(|()| {
                    keeper::wait_for_answer(calls.as_raw_fd());
                    channel::receive_pages(calls.as_raw_fd(), to, part.len())
                })
            };
            if read.is_err() {
                server_lost();
            }
            at = part.end;
        }
    }

    /// Tells the page server that no more pages are needed.
    pub fn release(&self) {
        let calls = self.calls.lock().expect("no thread panics while it holds this lock");
        // SAFETY: this pager's socket.
        unsafe { libc::shutdown(calls.as_raw_fd(), libc::SHUT_RDWR) };
    }
}

thread_local! {
    /// True in a page server. Also true in the thread that lends its storage, which only waits
    /// meanwhile.
    static IS_PAGE_SERVER: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Returns true in a page server.
fn is_page_server() -> bool {
    IS_PAGE_SERVER.get()
}

/// Marks the calling thread as one that lends its storage to page servers.
pub(super) fn set_page_server() {
    IS_PAGE_SERVER.set(true);
}

#[cfg(test)]
impl Inheritance {
    /// A connection to a thread that answers READ with `content`, until the connection is closed.
    pub(crate) fn served_by(content: fn(u32) -> [u64; PAGE_BYTES / 8]) -> Self {
        let [calls, answers] = channel::pair().expect("a pair of sockets");
        let [server_calls, _] = channel::pair().expect("a pair of sockets");
        std::thread::spawn(move || {
            while let Ok((Message { start, end, .. }, _)) = channel::receive(answers.as_raw_fd()) {
                let pages: Vec<_> = (start..end).map(content).collect();
                // SAFETY: as many pages as the message names.
                let sent = unsafe {
                    channel::send_pages(answers.as_raw_fd(), pages.as_ptr().cast(), pages.len())
                };
                sent.expect("the reader waits for the pages");
            }
        });
        Self::new(calls, server_calls)
    }
}

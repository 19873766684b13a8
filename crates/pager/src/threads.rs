//! Start of the pager's threads.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use crate::fork::unseen;
use crate::pager::Pager;
use crate::spawn::spawn;
use crate::sys;
use crate::{Error, descriptor};

impl Pager {
    /// Starts the pager's threads. They share a descriptor table of their own, block all signals,
    /// and live as long as the process.
    pub fn start(self: &Arc<Self>) -> Result<(), Error> {
        self.start_in(|| ())
    }

    /// As [`Pager::start`]; every thread calls `enter` first.
    pub fn start_in(self: &Arc<Self>, enter: fn()) -> Result<(), Error> {
        let pager = self.clone();
        let _ = self.enter.set(enter);
        let (ready, started) = std::sync::mpsc::channel();
        let system = |source| Error::System { what: "start the pager's threads".into(), source };
        unseen::mark().map_err(system)?;
        descriptor::note_program();
        let exit_socket = self.forks.open_exit_socket().map_err(system)?;
        let exit_socket_fd = exit_socket.as_raw_fd();
        let mut transports = Vec::new();
        self.pages.backing.descriptors(&mut transports);
        self.pages.memory.descriptors(&mut transports);
        let handler = move || {
            let mut keep = vec![pager.uffd.as_raw_fd(), exit_socket_fd];
            pager.pages.backing.descriptors(&mut keep);
            pager.pages.memory.descriptors(&mut keep);
            pager.enter();
            let result = descriptor::own_table(&keep)
                .and_then(|()| pager.start_worker())
                .and_then(|()| pager.start_followers())
                .and_then(|()| pager.start_watcher())
                .and_then(|()| pager.start_monitor());
            let failed = result.is_err();
            let _ = ready.send(result);
            drop(ready);
            if !failed {
                pager.handler();
            }
        };
        {
            let _blocked = sys::SignalsBlocked::new();
            spawn("granary-fault", handler).map_err(system)?;
        }
        started.recv().unwrap_or_else(|_| Err(std::io::ErrorKind::Other.into())).map_err(system)?;
        // The pager's threads have copies of these descriptors. Copies in the program's table could
        // be closed by the program, and forked children would keep the parent's connection open.
        transports.into_iter().for_each(descriptor::close);
        drop(exit_socket);
        Ok(())
    }

    /// Makes the threads of this pager call the same `enter` function as those of `other`.
    pub(crate) fn enter_as(&self, other: &Self) {
        if let Some(enter) = other.enter.get() {
            let _ = self.enter.set(*enter);
        }
    }

    /// Starts the worker thread, which shares the calling thread's descriptor table.
    pub(crate) fn start_worker(self: &Arc<Self>) -> std::io::Result<()> {
        let pager = self.clone();
        spawn("granary-worker", move || {
            pager.enter();
            pager.worker();
        })
    }

    /// Starts the thread that watches the assist, if there is one. The thread shares the calling
    /// thread's descriptor table.
    pub(crate) fn start_watcher(self: &Arc<Self>) -> std::io::Result<()> {
        if !self.pages.backing.is_watched() {
            return Ok(());
        }
        let pager = self.clone();
        spawn("granary-watcher", move || {
            pager.enter();
            pager.pages.backing.watch();
        })
    }

    /// Starts the thread that reports waits for the pool and thrashing ([`crate::monitor`]).
    pub(crate) fn start_monitor(self: &Arc<Self>) -> std::io::Result<()> {
        let pager = self.clone();
        spawn("granary-monitor", move || {
            pager.enter();
            pager.monitor();
        })
    }

    /// Calls the registered `enter` function. Every thread of the pager calls this first.
    pub(crate) fn enter(&self) {
        if let Some(enter) = self.enter.get() {
            enter();
        }
    }
}

//! The pager's threads: how they start, and how they are told from the program's.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::config::EXIT_PAGER;
use crate::pager::Pager;
use crate::sys;
use crate::{Error, descriptor};

impl Pager {
    /// Starts the threads. They share a descriptor table of their own, block all signals, and live
    /// as long as the process.
    pub fn start(self: &Arc<Self>) -> Result<(), Error> {
        self.start_in(|| ())
    }

    /// As [`Pager::start`]; every thread calls `enter` first.
    pub fn start_in(self: &Arc<Self>, enter: fn()) -> Result<(), Error> {
        let pager = self.clone();
        let _ = self.enter.set(enter);
        let (ready, started) = std::sync::mpsc::channel();
        let system = |source| Error::System { what: "start the pager's threads".into(), source };
        descriptor::note_program();
        let life = self.forks.open_life().map_err(system)?;
        let life_fd = life.as_raw_fd();
        let mut transports = Vec::new();
        self.transport.descriptors(&mut transports);
        let handler = move || {
            let mut keep = vec![pager.uffd.as_raw_fd(), life_fd];
            pager.transport.descriptors(&mut keep);
            pager.enter();
            let result = descriptor::own_table(&keep).and_then(|()| pager.start_evictor());
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
        // The pager's threads have these. In the program's table they would be in the program's way, and
        // its forked children would keep a connection open that is not theirs.
        transports.into_iter().for_each(descriptor::close);
        drop(life);
        Ok(())
    }

    /// The threads of this pager begin as those of `other` do.
    pub(crate) fn enter_as(&self, other: &Self) {
        if let Some(enter) = other.enter.get() {
            let _ = self.enter.set(*enter);
        }
    }

    /// The evictor, which shares the calling thread's descriptors.
    pub(crate) fn start_evictor(self: &Arc<Self>) -> std::io::Result<()> {
        let pager = self.clone();
        spawn("granary-evictor", move || {
            pager.enter();
            pager.evictor();
        })
    }

    /// Called first in every thread of the pager's.
    pub(crate) fn enter(&self) {
        if let Some(enter) = self.enter.get() {
            enter();
        }
    }

    /// The calling thread is one that touches the program's pages.
    pub(crate) fn note_thread(&self) {
        let id = sys::thread_id();
        let noted = self.threads.iter().any(|thread| {
            thread.compare_exchange(0, id, Ordering::AcqRel, Ordering::Acquire).is_ok()
        });
        assert!(noted, "there is one evictor and one handler");
    }

    /// True for a thread that has called [`Pager::note_thread`].
    pub(crate) fn is_own_thread(&self, id: u32) -> bool {
        self.threads.iter().any(|thread| thread.load(Ordering::Acquire) == id)
    }
}

/// Starts a thread of the pager's. A panic there ends the process: nobody would serve its faults.
///
/// Not with std's threads: before those run anything of ours they have libc allocate, and by then the thread
/// has not gone inside. It would take paged memory from the program's allocator and, in a process
/// that forks, wait for itself. So what `run` does first is to go inside.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let own_table = descriptor::has_own_table();
    let name = std::ffi::CString::new(name)?;
    let guarded = move || {
        // SAFETY: names the calling thread.
        unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
        if own_table {
            descriptor::shares_own_table();
        }
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
            sys::die(EXIT_PAGER, "a thread of the pager failed, so the process ends now");
        }
    };
    type Run = Box<dyn FnOnce() + Send>;
    extern "C" fn start(run: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: what is passed below, once.
        let run: Run = *unsafe { Box::from_raw(run.cast::<Run>()) };
        run();
        std::ptr::null_mut()
    }
    let run: *mut Run = Box::into_raw(Box::new(Box::new(guarded)));
    // SAFETY: the attributes are initialised before they are used; `run` is the new thread's, or ours again
    // if there is none.
    let error = unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        libc::pthread_attr_init(&mut attributes);
        libc::pthread_attr_setstacksize(&mut attributes, 256 << 10);
        libc::pthread_attr_setdetachstate(&mut attributes, libc::PTHREAD_CREATE_DETACHED);
        let mut thread = std::mem::zeroed();
        let error = libc::pthread_create(&mut thread, &attributes, start, run.cast());
        libc::pthread_attr_destroy(&mut attributes);
        if error != 0 {
            drop(Box::from_raw(run));
        }
        error
    };
    if error == 0 { Ok(()) } else { Err(std::io::Error::from_raw_os_error(error)) }
}

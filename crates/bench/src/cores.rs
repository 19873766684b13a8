//! Which core a thread runs on, for measurements in which that decides.

use std::io;

use rustix::thread::CpuSet;

use crate::Error;

/// Two different cores on which this thread may run; the same one twice if there is only one.
pub(crate) fn two() -> Result<[usize; 2], Error> {
    let allowed = rustix::thread::sched_getaffinity(None)
        .map_err(|errno| system("ask for this thread's cores")(errno.into()))?;
    let mut cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
    let first = cores.next().expect("a thread that runs may run somewhere");
    Ok([first, cores.next().unwrap_or(first)])
}

/// Moves the calling thread to one core.
pub(crate) fn pin(core: usize) -> Result<(), Error> {
    let mut cores = CpuSet::new();
    cores.set(core);
    rustix::thread::sched_setaffinity(None, &cores)
        .map_err(|errno| system("pin a thread to a core")(errno.into()))
}

/// The error of a system call.
pub(crate) fn system(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::System { what, source }
}

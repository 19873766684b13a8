//! Pinning of threads to cores.

use std::io;

use rustix::thread::CpuSet;

use crate::Error;

/// Two different cores that this thread may run on; the same core twice if there is only one.
pub(crate) fn two() -> Result<[usize; 2], Error> {
    let allowed = rustix::thread::sched_getaffinity(None)
        .map_err(|errno| system("query this thread's CPU affinity")(errno.into()))?;
    let mut cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
    let first = cores.next().expect("a running thread has at least one allowed core");
    Ok([first, cores.next().unwrap_or(first)])
}

/// Pins the calling thread to one core.
pub(crate) fn pin(core: usize) -> Result<(), Error> {
    let mut cores = CpuSet::new();
    cores.set(core);
    rustix::thread::sched_setaffinity(None, &cores)
        .map_err(|errno| system("pin a thread to a core")(errno.into()))
}

/// Maps the error of a system call; `what` is the attempt, as a verb phrase.
pub(crate) fn system(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::System { what, source }
}

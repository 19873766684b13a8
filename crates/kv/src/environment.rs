//! Time and randomness of a store.

/// The environment of a store. A simulator implements the trait with virtual time.
pub trait Environment {
    /// Milliseconds since 1970.
    fn now(&self) -> u64;

    /// Like [`Environment::now`], but may be some milliseconds late: for ages, not for expiry.
    fn coarse(&self) -> u64 {
        self.now()
    }

    /// A random number, for choices. The number need not be secret.
    fn random(&self) -> u64;

    /// A random number that a client cannot guess, for the secret of the hash.
    fn secret(&self) -> u64 {
        self.random()
    }
}

/// The clock of the system, and random numbers of the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct System;

impl Environment for System {
    fn now(&self) -> u64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(0, |since| since.as_millis() as u64)
    }

    fn coarse(&self) -> u64 {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        let ms = time.tv_sec.saturating_mul(1000).saturating_add(time.tv_nsec / 1_000_000);
        ms.max(0) as u64
    }

    fn random(&self) -> u64 {
        STATE.with(|state| {
            if state.get() == 0 {
                state.set(from_kernel().unwrap_or_else(|| self.now()) | 1);
            }
            state.set(state.get().wrapping_add(crate::memory::GOLDEN));
            crate::memory::mixed(state.get())
        })
    }

    fn secret(&self) -> u64 {
        from_kernel().unwrap_or_else(|| self.random())
    }
}

thread_local! {
    /// State of the numbers of this thread.
    static STATE: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// A number of the kernel. `None` in a kernel without getrandom.
fn from_kernel() -> Option<u64> {
    let mut bytes = [0; 8];
    let flags = rustix::rand::GetRandomFlags::empty();
    let read = rustix::rand::getrandom(&mut bytes[..], flags);
    matches!(read, Ok(8)).then(|| u64::from_ne_bytes(bytes))
}

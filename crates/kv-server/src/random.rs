//! Random numbers from the kernel.

use rustix::rand::{GetRandomFlags, getrandom};

/// Fills `bytes` with random numbers.
pub(crate) fn fill(bytes: &mut [u8]) {
    let mut filled = 0;
    while filled < bytes.len() {
        // Since its start the kernel always has random numbers; a signal may interrupt the call.
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty()).unwrap_or(0);
    }
}

/// `count` random bytes as hexadecimal digits.
pub(crate) fn hexadecimal(count: usize) -> String {
    let mut bytes = vec![0; count];
    fill(&mut bytes);
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

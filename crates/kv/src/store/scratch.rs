//! Buffers that operations use again.

use std::ops::{Deref, DerefMut};

use parking_lot::Mutex;

const KEPT: usize = 64;
const KEPT_BYTES: usize = 1 << 20;

/// The free buffers.
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    /// An empty buffer.
    pub fn take(&self) -> Scratch<'_> {
        let mut bytes = self.0.lock().pop().unwrap_or_default();
        bytes.clear();
        Scratch { buffers: self, bytes }
    }
}

/// A buffer; returned when the value is dropped.
#[derive(Debug)]
pub(crate) struct Scratch<'a> {
    buffers: &'a Buffers,
    bytes: Vec<u8>,
}

impl Deref for Scratch<'_> {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.bytes
    }
}

impl DerefMut for Scratch<'_> {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        let mut free = self.buffers.0.lock();
        if free.len() < KEPT && self.bytes.capacity() <= KEPT_BYTES {
            free.push(std::mem::take(&mut self.bytes));
        }
    }
}

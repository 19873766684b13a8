//! Numbers and byte strings from fuzz input.

/// A byte string that is consumed from the front. After its end all numbers are 0.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// Creates the input from `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Returns whether no byte is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes up to `n` bytes.
    pub fn take(&mut self, n: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        head
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let head = self.take(N);
        out[..head.len()].copy_from_slice(head);
        out
    }

    /// Takes one byte.
    pub fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Takes two bytes.
    pub fn short(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Takes a number that is usually small: one byte, or five bytes of which the first is 255.
    pub fn number(&mut self) -> u32 {
        match self.byte() {
            0xff => u32::from_le_bytes(self.array()),
            small => small.into(),
        }
    }
}

//! Numbers and pieces out of fuzzed bytes.

/// Bytes that are used up from the front. Where they have ended, everything is 0.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Up to `n` bytes.
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

    /// One byte.
    pub fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Two bytes.
    pub fn short(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// A number that is small most of the time: one byte, or five of which the first is 255.
    pub fn number(&mut self) -> u32 {
        match self.byte() {
            0xff => u32::from_le_bytes(self.array()),
            small => small.into(),
        }
    }
}

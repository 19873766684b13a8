//! Reads lengths and strings, counts the bytes and computes their checksum.

use std::io::{ErrorKind, Read};

use super::lzf;
use super::{Crc64, Limits, RdbError, encoding};
use crate::number::write_i64;

/// Bytes that are read at once. Because no length is trusted, memory grows by this step.
const STEP: usize = 64 << 10;

/// A length, or the encoding of a string in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Length {
    Plain(u64),
    Encoded(u8),
}

pub(super) struct Source<R> {
    input: R,
    offset: u64,
    crc: Crc64,
    limits: Limits,
    /// Compressed bytes, or bytes that are skipped.
    scratch: Vec<u8>,
}

impl<R: Read> Source<R> {
    pub fn new(input: R, limits: Limits) -> Self {
        Self { input, offset: 0, crc: Crc64::default(), limits, scratch: Vec::new() }
    }

    pub fn offset(&self) -> u64 {
        self.offset
    }

    pub fn crc(&self) -> u64 {
        self.crc.value()
    }

    pub fn damaged(&self, problem: &'static str) -> RdbError {
        RdbError::Damaged { offset: self.offset, problem }
    }

    pub fn fill(&mut self, out: &mut [u8]) -> Result<(), RdbError> {
        let offset = self.offset;
        self.input.read_exact(out).map_err(|cause| match cause.kind() {
            ErrorKind::UnexpectedEof => RdbError::Truncated { offset },
            _ => RdbError::Read { offset, cause },
        })?;
        self.crc.update(out);
        self.offset += out.len() as u64;
        Ok(())
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], RdbError> {
        let mut out = [0; N];
        self.fill(&mut out)?;
        Ok(out)
    }

    pub fn byte(&mut self) -> Result<u8, RdbError> {
        Ok(self.array::<1>()?[0])
    }

    /// Adds `len` bytes to `out`.
    fn append(&mut self, mut len: usize, out: &mut Vec<u8>) -> Result<(), RdbError> {
        while len > 0 {
            let (begin, part) = (out.len(), len.min(STEP));
            out.resize(begin + part, 0);
            self.fill(&mut out[begin..])?;
            len -= part;
        }
        Ok(())
    }

    pub fn skip(&mut self, mut len: u64) -> Result<(), RdbError> {
        let mut scratch = std::mem::take(&mut self.scratch);
        while len > 0 {
            let part = len.min(STEP as u64) as usize;
            scratch.resize(part.max(scratch.len()), 0);
            self.fill(&mut scratch[..part])?;
            len -= part as u64;
        }
        scratch.clear();
        self.scratch = scratch;
        Ok(())
    }

    fn coded_length(&mut self) -> Result<Length, RdbError> {
        let first = self.byte()?;
        Ok(match first >> 6 {
            0 => Length::Plain(first.into()),
            1 => Length::Plain(u64::from(first & 0x3f) << 8 | u64::from(self.byte()?)),
            2 => match first {
                encoding::BITS_32 => Length::Plain(u32::from_be_bytes(self.array()?).into()),
                encoding::BITS_64 => Length::Plain(u64::from_be_bytes(self.array()?)),
                _ => return Err(self.damaged("unknown encoding of a length")),
            },
            _ => Length::Encoded(first),
        })
    }

    /// Reads a length, or another number that is encoded as one.
    pub fn length(&mut self) -> Result<u64, RdbError> {
        match self.coded_length()? {
            Length::Plain(length) => Ok(length),
            Length::Encoded(_) => Err(self.damaged("an encoding of strings in place of a length")),
        }
    }

    fn bounded(&self, len: u64) -> Result<usize, RdbError> {
        let limit = self.limits.value;
        let bounded = usize::try_from(len).ok().filter(|&len| len <= limit);
        bounded.ok_or(RdbError::TooLong { offset: self.offset, len, limit })
    }

    /// Reads a string to `out`, which is cleared first.
    pub fn string(&mut self, out: &mut Vec<u8>) -> Result<(), RdbError> {
        out.clear();
        let integer: i64 = match self.coded_length()? {
            Length::Plain(len) => {
                let len = self.bounded(len)?;
                return self.append(len, out);
            }
            Length::Encoded(encoding::LZF) => return self.compressed(out),
            Length::Encoded(encoding::INT8) => i8::from_le_bytes(self.array()?).into(),
            Length::Encoded(encoding::INT16) => i16::from_le_bytes(self.array()?).into(),
            Length::Encoded(encoding::INT32) => i32::from_le_bytes(self.array()?).into(),
            Length::Encoded(_) => return Err(self.damaged("unknown encoding of a string")),
        };
        write_i64(integer, out);
        Ok(())
    }

    fn compressed(&mut self, out: &mut Vec<u8>) -> Result<(), RdbError> {
        let packed = self.length()?;
        let packed = self.bounded(packed)?;
        let len = self.length()?;
        let len = self.bounded(len)?;
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut result = self.append(packed, &mut scratch);
        if result.is_ok() && !lzf::decompress(&scratch, len, out) {
            result = Err(self.damaged("a compressed string cannot be decompressed"));
        }
        scratch.clear();
        scratch.shrink_to(STEP);
        self.scratch = scratch;
        result
    }

    pub fn skip_string(&mut self) -> Result<(), RdbError> {
        let len = match self.coded_length()? {
            Length::Plain(len) => len,
            Length::Encoded(encoding::INT8) => 1,
            Length::Encoded(encoding::INT16) => 2,
            Length::Encoded(encoding::INT32) => 4,
            Length::Encoded(encoding::LZF) => {
                let packed = self.length()?;
                self.length()?;
                packed
            }
            Length::Encoded(_) => return Err(self.damaged("unknown encoding of a string")),
        };
        self.skip(len)
    }
}

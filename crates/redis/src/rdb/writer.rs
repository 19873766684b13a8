//! Writes a database of version 10.

use std::io::Write;

use super::strings::{put_length, put_string};
use super::{Compressor, Crc64, Kind, Meta, RdbError, VERSION, opcode};

/// Options of a database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Compresses strings of more than 20 bytes (`rdbcompression`).
    pub compress: bool,
    /// Writes the checksum at the end (`rdbchecksum`).
    pub checksum: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { compress: true, checksum: true }
    }
}

/// Writes a database part by part.
///
/// The writer collects the small parts of an entry and hands over large ones as they are: a file
/// belongs into a `BufWriter`.
pub struct Writer<W> {
    out: W,
    options: Options,
    offset: u64,
    crc: Crc64,
    part: Vec<u8>,
    packed: Vec<u8>,
    compressor: Compressor,
    is_broken: bool,
}

impl<W: Write> Writer<W> {
    /// Writes the header.
    ///
    /// # Errors
    ///
    /// Errors of `out`.
    pub fn new(out: W, options: Options) -> Result<Self, RdbError> {
        let mut writer = Self {
            out,
            options,
            offset: 0,
            crc: Crc64::default(),
            part: Vec::new(),
            packed: Vec::new(),
            compressor: Compressor::default(),
            is_broken: false,
        };
        writer.part.extend(format!("REDIS{VERSION:04}").bytes());
        writer.flush_part()?;
        Ok(writer)
    }

    /// Number of bytes that were written.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), RdbError> {
        if std::mem::replace(&mut self.is_broken, true) {
            return Err(RdbError::Broken);
        }
        let offset = self.offset;
        self.out.write_all(bytes).map_err(|cause| RdbError::Write { offset, cause })?;
        if self.options.checksum {
            self.crc.update(bytes);
        }
        self.offset += bytes.len() as u64;
        self.is_broken = false;
        Ok(())
    }

    fn flush_part(&mut self) -> Result<(), RdbError> {
        let mut part = std::mem::take(&mut self.part);
        let result = self.write(&part);
        part.clear();
        part.shrink_to(1 << 20);
        self.part = part;
        result
    }

    fn string(&mut self, text: &[u8]) -> Result<(), RdbError> {
        let compressor = self.options.compress.then_some((&mut self.compressor, &mut self.packed));
        if put_string(text, compressor, &mut self.part) {
            self.flush_part()?;
            self.write(text)?;
        }
        Ok(())
    }

    /// Writes a fact about the file.
    ///
    /// # Errors
    ///
    /// Errors of the output, as for all methods.
    pub fn aux(&mut self, key: &[u8], value: &[u8]) -> Result<(), RdbError> {
        self.part.push(opcode::AUX);
        self.string(key)?;
        self.string(value)?;
        self.flush_part()
    }

    /// Begins the database `number`.
    ///
    /// # Errors
    ///
    /// Errors of the output.
    pub fn database(&mut self, number: u64) -> Result<(), RdbError> {
        self.part.push(opcode::DATABASE);
        put_length(number, &mut self.part);
        self.flush_part()
    }

    /// Writes the numbers of keys of the database, and of those with an expiry.
    ///
    /// # Errors
    ///
    /// Errors of the output.
    pub fn sizes(&mut self, keys: u64, volatile: u64) -> Result<(), RdbError> {
        self.part.push(opcode::SIZES);
        put_length(keys, &mut self.part);
        put_length(volatile, &mut self.part);
        self.flush_part()
    }

    /// Writes a key with a string.
    ///
    /// # Errors
    ///
    /// Errors of the output.
    pub fn entry(&mut self, key: &[u8], value: &[u8], meta: Meta) -> Result<(), RdbError> {
        if let Some(expires) = meta.expires_ms {
            self.part.push(opcode::EXPIRES_MS);
            self.part.extend(expires.to_le_bytes());
        }
        if let Some(idle) = meta.idle_seconds {
            self.part.push(opcode::IDLE);
            put_length(idle, &mut self.part);
        }
        if let Some(frequency) = meta.frequency {
            self.part.extend([opcode::FREQUENCY, frequency]);
        }
        self.part.push(Kind::String as u8);
        self.string(key)?;
        self.string(value)?;
        self.flush_part()
    }

    /// Writes the end and the checksum, flushes the output and returns it.
    ///
    /// # Errors
    ///
    /// Errors of the output.
    pub fn finish(mut self) -> Result<W, RdbError> {
        self.write(&[opcode::END])?;
        let crc = self.crc.value();
        self.write(&crc.to_le_bytes())?;
        let offset = self.offset;
        self.out.flush().map_err(|cause| RdbError::Write { offset, cause })?;
        Ok(self.out)
    }
}

//! Skips values: parses each encoding for its length.

use std::io::Read;

use super::source::Source;
use super::{Kind, RdbError};

/// Marks in the data of a module.
mod mark {
    pub const END: u64 = 0;
    pub const SIGNED: u64 = 1;
    pub const UNSIGNED: u64 = 2;
    pub const FLOAT: u64 = 3;
    pub const DOUBLE: u64 = 4;
    pub const STRING: u64 = 5;
}

/// Bytes of an id of a stream.
const ID_BYTES: u64 = 16;

impl<R: Read> Source<R> {
    /// Skips a value.
    pub fn skip_value(&mut self, kind: Kind) -> Result<(), RdbError> {
        match kind {
            Kind::String
            | Kind::HashZipmap
            | Kind::ListZiplist
            | Kind::SetIntset
            | Kind::SortedSetZiplist
            | Kind::HashZiplist
            | Kind::HashListpack
            | Kind::SortedSetListpack
            | Kind::SetListpack => self.skip_string(),
            Kind::List | Kind::Set | Kind::ListQuicklist => self.each(Self::skip_string),
            Kind::Hash => self.each(Self::skip_pair),
            Kind::SortedSet => self.each(|source| {
                source.skip_string()?;
                source.skip(8)
            }),
            Kind::SortedSetText => self.each(|source| {
                source.skip_string()?;
                source.skip_score_text()
            }),
            Kind::ListQuicklist2 => self.each(|source| {
                source.length()?;
                source.skip_string()
            }),
            Kind::Module => {
                self.length()?;
                self.skip_module_data()
            }
            // The earliest expiry of a field comes first.
            Kind::HashExpiring => {
                self.skip(8)?;
                self.each(|source| {
                    source.skip_lengths(1)?;
                    source.skip_pair()
                })
            }
            Kind::HashListpackExpiring => {
                self.skip(8)?;
                self.skip_string()
            }
            Kind::Stream1 => self.skip_stream(1),
            Kind::Stream2 => self.skip_stream(2),
            Kind::Stream3 => self.skip_stream(3),
        }
    }

    /// Skips as many parts as a length says. Because each part has bytes, the input's end bounds
    /// the loop.
    fn each(
        &mut self,
        mut part: impl FnMut(&mut Self) -> Result<(), RdbError>,
    ) -> Result<(), RdbError> {
        let count = self.length()?;
        (0..count).try_for_each(|_| part(self))
    }

    fn skip_pair(&mut self) -> Result<(), RdbError> {
        self.skip_string()?;
        self.skip_string()
    }

    fn skip_lengths(&mut self, count: usize) -> Result<(), RdbError> {
        (0..count).try_for_each(|_| self.length().map(drop))
    }

    /// Skips a score: a byte for a special value, or for the length of a text.
    fn skip_score_text(&mut self) -> Result<(), RdbError> {
        match self.byte()? {
            253..=255 => Ok(()),
            len => self.skip(len.into()),
        }
    }

    /// Skips the data of a module up to their end mark.
    pub fn skip_module_data(&mut self) -> Result<(), RdbError> {
        loop {
            match self.length()? {
                mark::END => return Ok(()),
                mark::SIGNED | mark::UNSIGNED => self.skip_lengths(1)?,
                mark::FLOAT => self.skip(4)?,
                mark::DOUBLE => self.skip(8)?,
                mark::STRING => self.skip_string()?,
                _ => return Err(self.damaged("unknown mark in the data of a module")),
            }
        }
    }

    /// Skips a stream: entries, counters, groups with their pending entries and consumers.
    fn skip_stream(&mut self, version: u8) -> Result<(), RdbError> {
        self.each(Self::skip_pair)?;
        // The length and the last id; then the first id, the largest deleted one, and a count.
        self.skip_lengths(if version >= 2 { 8 } else { 3 })?;
        self.each(|source| {
            source.skip_string()?;
            source.skip_lengths(if version >= 2 { 3 } else { 2 })?;
            source.each(|source| {
                source.skip(ID_BYTES + 8)?;
                source.skip_lengths(1)
            })?;
            source.each(|source| {
                source.skip_string()?;
                source.skip(if version >= 3 { 16 } else { 8 })?;
                source.each(|source| source.skip(ID_BYTES))
            })
        })
    }
}

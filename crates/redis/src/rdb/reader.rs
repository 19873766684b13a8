//! Reads a database.

use std::io::Read;

use super::source::Source;
use super::{Kind, Limits, Meta, RdbError, is_known_version, opcode};

/// A part of a database.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A fact about the file, such as the version of the server.
    Aux {
        /// Name.
        key: &'a [u8],
        /// Value.
        value: &'a [u8],
    },
    /// The following entries belong to this database.
    Database(u64),
    /// Numbers of keys of the database, as a hint.
    Sizes {
        /// Keys.
        keys: u64,
        /// Keys with an expiry.
        volatile: u64,
    },
    /// A key.
    Entry(Entry<'a>),
    /// A library of functions, which was skipped.
    Functions,
    /// Data of a module, which were skipped.
    ModuleAux {
        /// Name of the module's type.
        module: String,
    },
}

/// A key with its value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Entry<'a> {
    /// Key.
    pub key: &'a [u8],
    /// Value.
    pub value: Value<'a>,
    /// Expiry and access.
    pub meta: Meta,
}

/// A value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// A string.
    String(&'a [u8]),
    /// A value of another type, which was skipped.
    Skipped(Kind),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    Ended,
    Broken,
}

/// Reads a database part by part.
///
/// The reader asks its input for single bytes: a file belongs into a `BufReader`.
pub struct Reader<R> {
    source: Source<R>,
    version: u32,
    state: State,
    key: Vec<u8>,
    value: Vec<u8>,
}

/// The first version of Valkey.
const VALKEY: u32 = 80;

/// Capacity that the buffers keep after a long value.
const KEPT: usize = 1 << 20;

impl<R: Read> Reader<R> {
    /// Reads the header.
    ///
    /// # Errors
    ///
    /// [`RdbError::Magic`] and [`RdbError::Version`], and errors of `input`.
    pub fn new(input: R, limits: Limits) -> Result<Self, RdbError> {
        let mut source = Source::new(input, limits);
        let header: [u8; 9] = source.array()?;
        let digits = header.strip_prefix(b"REDIS").ok_or(RdbError::Magic)?;
        let digits = str::from_utf8(digits).map_err(|_| RdbError::Magic)?;
        let version: u32 = digits.parse().map_err(|_| RdbError::Magic)?;
        if !is_known_version(version) {
            return Err(RdbError::Version(version));
        }
        let (key, value) = (Vec::new(), Vec::new());
        Ok(Self { source, version, state: State::Open, key, value })
    }

    /// The version of the file.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Number of bytes that were read.
    pub fn offset(&self) -> u64 {
        self.source.offset()
    }

    /// Reads the next part, or returns `None` after the last one, with a checksum that is right.
    ///
    /// # Errors
    ///
    /// After an error the reader returns [`RdbError::Broken`] only.
    #[expect(clippy::should_implement_trait, reason = "an event borrows the reader")]
    pub fn next(&mut self) -> Result<Option<Event<'_>>, RdbError> {
        match self.state {
            State::Open => self.state = State::Broken,
            State::Ended => return Ok(None),
            State::Broken => return Err(RdbError::Broken),
        }
        self.key.shrink_to(KEPT);
        self.value.shrink_to(KEPT);
        let part = self.part()?;
        if part != Part::End {
            self.state = State::Open;
        }
        Ok(Some(match part {
            Part::End => {
                self.check()?;
                self.state = State::Ended;
                return Ok(None);
            }
            Part::Aux => Event::Aux { key: &self.key, value: &self.value },
            Part::Database(number) => Event::Database(number),
            Part::Sizes { keys, volatile } => Event::Sizes { keys, volatile },
            Part::Functions => Event::Functions,
            Part::ModuleAux(id) => Event::ModuleAux { module: module_name(id) },
            Part::Entry { kind, meta } => {
                let value = match kind {
                    Kind::String => Value::String(&self.value),
                    other => Value::Skipped(other),
                };
                Event::Entry(Entry { key: &self.key, value, meta })
            }
        }))
    }

    /// Reads up to the end of a part. The key and the value go to the buffers.
    fn part(&mut self) -> Result<Part, RdbError> {
        let mut meta = Meta::default();
        loop {
            let offset = self.source.offset();
            let number = self.source.byte()?;
            let part = match number {
                opcode::EXPIRES_SECONDS => {
                    let seconds = i32::from_le_bytes(self.source.array()?);
                    meta.expires_ms = Some(i64::from(seconds) * 1000);
                    continue;
                }
                opcode::EXPIRES_MS => {
                    meta.expires_ms = Some(i64::from_le_bytes(self.source.array()?));
                    continue;
                }
                opcode::IDLE => {
                    meta.idle_seconds = Some(self.source.length()?);
                    continue;
                }
                opcode::FREQUENCY => {
                    meta.frequency = Some(self.source.byte()?);
                    continue;
                }
                opcode::SLOT_INFO => {
                    for _ in 0..3 {
                        self.source.length()?;
                    }
                    continue;
                }
                opcode::DATABASE => Part::Database(self.source.length()?),
                opcode::SIZES => {
                    Part::Sizes { keys: self.source.length()?, volatile: self.source.length()? }
                }
                opcode::AUX => {
                    self.source.string(&mut self.key)?;
                    self.source.string(&mut self.value)?;
                    Part::Aux
                }
                opcode::FUNCTION2 => {
                    self.source.skip_string()?;
                    Part::Functions
                }
                opcode::MODULE_AUX => self.module_aux()?,
                opcode::END => Part::End,
                opcode::FUNCTION_BEFORE_RELEASE => {
                    return Err(RdbError::Unsupported { offset, what: "opcode", number });
                }
                _ => self.entry(number, offset, meta)?,
            };
            return Ok(part);
        }
    }

    fn module_aux(&mut self) -> Result<Part, RdbError> {
        let id = self.source.length()?;
        // A mark and the time at which the module wants the data.
        self.source.length()?;
        self.source.length()?;
        self.source.skip_module_data()?;
        Ok(Part::ModuleAux(id))
    }

    fn entry(&mut self, number: u8, offset: u64, meta: Meta) -> Result<Part, RdbError> {
        let unsupported = RdbError::Unsupported { offset, what: "the type", number };
        // Valkey has given the later numbers meanings of its own.
        let is_shared = self.version < VALKEY || number <= Kind::Stream3 as u8;
        let kind = Kind::from_number(number).filter(|_| is_shared).ok_or(unsupported)?;
        self.source.string(&mut self.key)?;
        match kind {
            Kind::String => self.source.string(&mut self.value)?,
            other => self.source.skip_value(other)?,
        }
        Ok(Part::Entry { kind, meta })
    }

    /// Compares the checksum. Version 5 is the first one that has a checksum; 0 stands for none.
    fn check(&mut self) -> Result<(), RdbError> {
        if self.version < 5 {
            return Ok(());
        }
        let found = self.source.crc();
        let expected = u64::from_le_bytes(self.source.array()?);
        match expected == 0 || expected == found {
            true => Ok(()),
            false => Err(RdbError::Checksum { found, expected }),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    Aux,
    Database(u64),
    Sizes { keys: u64, volatile: u64 },
    Entry { kind: Kind, meta: Meta },
    Functions,
    ModuleAux(u64),
    End,
}

/// Returns the name in the id of a module's type: nine characters of six bits, above ten bits of a
/// version.
fn module_name(id: u64) -> String {
    const CHARACTERS: &[u8; 64] =
        b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let character = |at: u32| char::from(CHARACTERS[(id >> (10 + 6 * at)) as usize & 63]);
    (0..9).rev().map(character).collect()
}

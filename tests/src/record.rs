//! A record in an object, which compute nodes change in turn under an exclusive permission.
//!
//! ```text
//! +0    sequence   even: the record is complete; odd: an update is under way
//! +64   body       the record
//! +3136 saved      the body before the update
//!
//! body: +0 sequence | +8 counter | +16 holder | +24 bytes that follow from sequence and holder
//! ```
//!
//! Each update and each repair advances the sequence, which the body repeats. So a WRITE of a
//! holder whose permission has ended leaves a record that [`Record::check`] refuses, however late
//! the WRITE is.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Result, ensure};
use pool::{Buffer, DefaultNic, DomainToken, Error, Lane, Object, Permission, Pool, Transfer};
use units::Random;

/// Token of the domain whose compute nodes change records.
pub const DOMAIN: DomainToken = DomainToken([0x5a; 32]);
/// Length of the object with a record.
pub const BYTES: u64 = SAVED + BODY as u64;

/// Length of a body: more than two packets between hosts.
const BODY: usize = 3072;
const SEQUENCE: u64 = 0;
const AT: u64 = 64;
const SAVED: u64 = AT + BODY as u64;
/// WRITEs that [`Record::flood`] has in flight.
const IN_FLIGHT: usize = 100;

/// A record, under a permission.
pub struct Record<'a> {
    pool: &'a Pool,
    permission: &'a Permission,
}

/// The contents of a complete record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Contents {
    /// Even number, which grows with each update and each repair.
    pub sequence: u64,
    /// Number of completed updates.
    pub counter: u64,
    /// The compute node that has made the last update.
    pub holder: u64,
}

/// End of a call of [`Record::flood`].
pub struct Flooded {
    /// WRITEs that were executed.
    pub executed: u64,
    /// WRITEs that had been posted when the first one failed, and that failed.
    pub refused: u64,
    /// The first error.
    pub error: Error,
}

/// Writes a domain's token to a file, which only this user may read. Memory nodes get it with
/// `--domain-token`.
pub fn write_token(path: &Path, token: DomainToken) -> Result<()> {
    std::fs::write(path, token.0)?;
    Ok(std::fs::set_permissions(path, Permissions::from_mode(0o600))?)
}

/// Text form of the name of an object.
pub fn to_text(object: &Object) -> String {
    object.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads [`to_text`].
pub fn from_text(text: &str) -> Result<Object> {
    let mut bytes = [0; Object::BYTES];
    ensure!(text.len() == 2 * bytes.len() && text.is_ascii(), "not the name of an object: {text}");
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16)?;
    }
    Object::from_bytes(&bytes).ok_or_else(|| anyhow::anyhow!("not the name of an object: {text}"))
}

impl Contents {
    fn body(self) -> [u8; BODY] {
        let mut body = [0; BODY];
        for (at, word) in [self.sequence, self.counter, self.holder].into_iter().enumerate() {
            body[8 * at..8 * at + 8].copy_from_slice(&word.to_be_bytes());
        }
        let mut random = Random::stream(self.sequence, self.holder as u32);
        for word in body[24..].chunks_exact_mut(8) {
            word.copy_from_slice(&random.bits().to_be_bytes());
        }
        body
    }

    /// The contents of a body with this sequence. An error if the body is not one that a single
    /// holder has written.
    fn of(body: &[u8; BODY], sequence: u64) -> Result<Self> {
        let word =
            |at: usize| u64::from_be_bytes(body[8 * at..8 * at + 8].try_into().expect("8 bytes"));
        let found = Self { sequence: word(0), counter: word(1), holder: word(2) };
        ensure!(found.sequence == sequence, "sequence {sequence}, but a body of {found:?}");
        let expected = found.body();
        if let Some(at) = body.iter().zip(&expected).position(|(a, b)| a != b) {
            anyhow::bail!("the body of {found:?} is torn at {at}");
        }
        Ok(found)
    }
}

impl<'a> Record<'a> {
    /// The record that a permission for the whole object opens.
    pub fn new(pool: &'a Pool, permission: &'a Permission) -> Self {
        Self { pool, permission }
    }

    /// Writes the first contents.
    pub fn create(&self) -> Result<(), Error> {
        let first = Contents { sequence: 0, counter: 0, holder: 0 };
        self.write(AT, &first.body())
    }

    fn read_body(&self, at: u64) -> Result<[u8; BODY], Error> {
        let mut body = [0; BODY];
        self.pool.read_blocking(self.permission, at, &mut body)?;
        Ok(body)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Error> {
        self.pool.write_blocking(self.permission, at, bytes)
    }

    /// The sequence. It is odd if the last holder has not completed its update.
    pub fn sequence(&self) -> Result<u64, Error> {
        let mut bytes = [0; 8];
        self.pool.read_blocking(self.permission, SEQUENCE, &mut bytes)?;
        Ok(u64::from_be_bytes(bytes))
    }

    /// The contents of a complete record. An error if a holder without a permission has written.
    pub fn check(&self) -> Result<Contents> {
        let sequence = self.sequence()?;
        ensure!(sequence % 2 == 0, "an update is under way: sequence {sequence}");
        Contents::of(&self.read_body(AT)?, sequence)
    }

    /// Completes what the last holder has left: restores the saved body if an update was under way.
    /// Returns true then.
    pub fn repair(&self) -> Result<bool> {
        let sequence = self.sequence()?;
        if sequence % 2 == 0 {
            return Ok(false);
        }
        let saved = Contents::of(&self.read_body(SAVED)?, sequence - 1)?;
        // The update before has the same counter. A holder that dies here is repaired in the same
        // way.
        let restored = Contents { sequence: sequence + 1, ..saved };
        self.write(AT, &restored.body())?;
        self.write(SEQUENCE, &restored.sequence.to_be_bytes())?;
        Ok(true)
    }

    /// Counts one up. `halfway` runs while the body has parts of two updates.
    pub fn update(&self, holder: u64, halfway: impl FnOnce() -> Result<()>) -> Result<Contents> {
        let old = self.begin()?;
        let new = Contents { sequence: old.sequence + 2, counter: old.counter + 1, holder };
        let body = new.body();
        self.write(AT, &body[..BODY / 2])?;
        halfway()?;
        self.write(AT + BODY as u64 / 2, &body[BODY / 2..])?;
        self.write(SEQUENCE, &new.sequence.to_be_bytes())?;
        Ok(new)
    }

    /// Begins an update: saves the body and makes the sequence odd.
    fn begin(&self) -> Result<Contents> {
        let old = self.check()?;
        self.write(SAVED, &old.body())?;
        self.write(SEQUENCE, &(old.sequence + 1).to_be_bytes())?;
        Ok(old)
    }

    /// Begins an update, and then has 100 WRITEs over the body in flight, until one fails. `begun`
    /// runs after the beginning.
    pub fn flood(&self, begun: impl FnOnce() -> Result<()>) -> Result<Flooded> {
        self.begin()?;
        begun()?;
        let buffer = self.pool.buffer(BODY)?;
        buffer.memory().write(0, &[0xee; BODY]);
        let mut flooded = (0, 0, None);
        while flooded.2.is_none() {
            self.flood_once(&buffer, &mut flooded)?;
        }
        let (executed, refused, error) = flooded;
        Ok(Flooded { executed, refused, error: error.expect("the loop ends with an error") })
    }

    fn flood_once(
        &self,
        buffer: &Buffer<DefaultNic>,
        (executed, refused, error): &mut (u64, u64, Option<Error>),
    ) -> Result<()> {
        let grant = self.permission.grant();
        let transfer = Transfer { grant: &grant, offset: AT, buffer_offset: 0, len: BODY as u32 };
        let mut posted = Vec::new();
        while posted.len() < IN_FLIGHT && error.is_none() {
            match self.pool.write_from(&transfer, buffer, Lane(0)) {
                Ok(operation) => posted.push(operation),
                Err(e) => *error = Some(e),
            }
        }
        for operation in posted {
            match operation.wait() {
                Ok(()) => *executed += 1,
                Err(e) => {
                    *refused += 1;
                    error.get_or_insert(e);
                }
            }
        }
        Ok(())
    }
}

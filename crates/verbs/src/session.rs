//! Secret of a session between a NIC and the process that uses it.

use std::fmt;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};

/// A session's secret: 128 random bits, 32 hexadecimal digits in messages.
///
/// A NIC that serves other processes gives each of them a session with a secret of its own. With
/// the secret a process proves, over another connection to the NIC's process, that it owns the
/// session.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct SessionSecret(u128);

impl SessionSecret {
    /// Draws a new secret.
    pub fn random() -> Result<Self, Errno> {
        let mut bytes = [0; 16];
        match getrandom(&mut bytes[..], GetRandomFlags::empty()) {
            Ok(16) => Ok(Self(u128::from_ne_bytes(bytes))),
            // The kernel returns requests of up to 256 bytes whole.
            Ok(_) | Err(Errno::INTR) => Self::random(),
            Err(e) => Err(e),
        }
    }
}

impl fmt::Debug for SessionSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionSecret(..)")
    }
}

impl From<SessionSecret> for String {
    fn from(secret: SessionSecret) -> Self {
        format!("{:032x}", secret.0)
    }
}

impl TryFrom<String> for SessionSecret {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let bits = u128::from_str_radix(&text, 16).ok().filter(|_| digits);
        bits.map(Self).ok_or("a session's secret has 32 hexadecimal digits")
    }
}

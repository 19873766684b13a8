//! The shared secret of a memory node and its compute nodes, and the proof by which each end shows
//! that it has the secret.
//!
//! ```text
//! compute node                                             memory node
//!   {"granary":1,"nonce":C}                    ->
//!                                              <-          {"granary":1,"nonce":S,"token":true}
//!   {"service":"pool","version":3,"proof":P}   ->          P = HMAC-SHA256(token, "client" S C)
//!                                              <-          {"reply":"welcome",..,"proof":Q}
//!                                                          Q = HMAC-SHA256(token, "server" S C)
//! ```
//!
//! A memory node whose packets carry no tags computes its proof with "plain server" instead of
//! "server". Otherwise a third party that modifies the welcome in transit could make both ends omit
//! tags.
//!
//! Each nonce has 32 random bytes, so that no proof can be replayed, and the token itself is never
//! sent. The compute node proves first: a client without the token obtains no data on which to test
//! tokens. An eavesdropper can test tokens offline on recorded proofs; therefore a token must be
//! random text, not a word.

use std::fmt;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::Error;

/// Version of the greeting message.
pub const VERSION: u32 = 1;
/// Minimum length of a token in bytes. Shorter tokens can be found by exhaustive search.
const TOKEN_MIN: usize = 16;
/// Maximum length of a token in bytes.
const TOKEN_MAX: usize = 1024;
/// Maximum size of a token file in bytes, including white space.
const FILE_MAX: usize = 2 * TOKEN_MAX;

/// A shared secret.
#[derive(Clone)]
pub struct Token(Vec<u8>);

impl Token {
    /// Creates a token from `text`, without the white space around it.
    ///
    /// # Errors
    /// The token is shorter than 16 bytes or longer than 1024.
    pub fn new(text: &str) -> Result<Self, Error> {
        Self::checked(text.trim().as_bytes(), || "the token".into())
    }

    /// Reads a token from a file that only its owner may read.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let attempt = || format!("reading the token in {}", path.display());
        Self::checked(read_private(path, attempt)?.trim_ascii(), attempt)
    }

    fn checked(text: &[u8], attempt: impl Fn() -> String) -> Result<Self, Error> {
        if !(TOKEN_MIN..=TOKEN_MAX).contains(&text.len()) {
            let why = format!(
                "it has {} bytes; a token has {TOKEN_MIN} to {TOKEN_MAX}; create a random one with \
                 head -c 32 /dev/urandom | base64",
                text.len()
            );
            return Err(Error::Refused { attempt: attempt(), why });
        }
        Ok(Self(text.to_vec()))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn mac(&self, side: Side, nonces: &Nonces) -> Hmac<Sha256> {
        nonce_mac(&self.0, side.name(), nonces)
    }

    /// The proof of `side` on the connection with these nonces.
    pub fn proof(&self, side: Side, nonces: &Nonces) -> String {
        hex(&self.mac(side, nonces).finalize().into_bytes())
    }

    /// True if `proof` is the proof of `side`. Constant time, independent of the position of a
    /// wrong digit.
    pub fn is_proved(&self, side: Side, nonces: &Nonces, proof: &str) -> bool {
        unhex(proof).is_some_and(|proof| self.mac(side, nonces).verify_slice(&proof).is_ok())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// The end of the connection that proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The compute node.
    Client,
    /// The memory node.
    Server,
    /// A memory node whose packets are not authenticated.
    PlainServer,
}

impl Side {
    fn name(self) -> &'static [u8] {
        match self {
            Side::Client => b"granary client 1",
            Side::Server => b"granary server 1",
            Side::PlainServer => b"granary plain server 1",
        }
    }

    /// The memory node's side, with or without authenticated packets.
    pub fn server(authenticated: bool) -> Self {
        if authenticated { Side::Server } else { Side::PlainServer }
    }
}

/// 32 random bytes, drawn for one connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Nonce([u8; 32]);

impl Nonce {
    /// Draws a new nonce.
    pub fn random() -> Result<Self, Error> {
        let mut bytes = [0; 32];
        match getrandom(&mut bytes[..], GetRandomFlags::empty()) {
            Ok(32) => Ok(Self(bytes)),
            // `getrandom` returns up to 256 bytes completely unless a signal interrupts it.
            Ok(_) | Err(rustix::io::Errno::INTR) => Self::random(),
            Err(e) => {
                Err(Error::System { attempt: "drawing random numbers".into(), source: e.into() })
            }
        }
    }
}

impl Nonce {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl From<Nonce> for String {
    fn from(nonce: Nonce) -> Self {
        hex(&nonce.0)
    }
}

impl TryFrom<String> for Nonce {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, &'static str> {
        let bytes = unhex(&text).and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or("a nonce is 64 hexadecimal digits")
    }
}

/// The nonces of both ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonces {
    /// Drawn by the memory node.
    pub server: Nonce,
    /// Drawn by the compute node.
    pub client: Nonce,
}

/// First message in either direction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// Must be [`VERSION`].
    pub granary: u32,
    /// Drawn by the sender.
    pub nonce: Nonce,
    /// True if the memory node requires a token.
    #[serde(default)]
    pub token: bool,
}

/// Reads a file that only its owner may read or write, of at most [`FILE_MAX`] bytes.
pub(super) fn read_private(path: &Path, attempt: impl Fn() -> String) -> Result<Vec<u8>, Error> {
    let system = |source| Error::System { attempt: attempt(), source };
    let refuse = |why: &str| Error::Refused { attempt: attempt(), why: why.into() };
    let mut file = units::files::open(path).map_err(system)?;
    let meta = file.metadata().map_err(system)?;
    if meta.mode() & 0o077 != 0 {
        return Err(refuse("users other than its owner may read or write it; run chmod 600 on it"));
    }
    let mut text = Vec::new();
    file.by_ref().take(FILE_MAX as u64 + 1).read_to_end(&mut text).map_err(system)?;
    if text.len() > FILE_MAX {
        return Err(refuse(&format!("it has more than {FILE_MAX} bytes")));
    }
    Ok(text)
}

/// The HMAC of `label` and the nonces of a connection.
pub(super) fn nonce_mac(key: &[u8], label: &[u8], nonces: &Nonces) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(label);
    mac.update(&nonces.server.0);
    mac.update(&nonces.client.0);
    mac
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Decodes up to 64 bytes.
pub(super) fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| (c as char).to_digit(16).map(|d| d as u8);
    let pairs = text.as_bytes().chunks(2);
    if text.len() > 128 {
        return None;
    }
    pairs.map(|p| Some(digit(*p.first()?)? << 4 | digit(*p.get(1)?)?)).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use proptest::prelude::*;

    fn nonces(server: u8, client: u8) -> Nonces {
        Nonces { server: Nonce([server; 32]), client: Nonce([client; 32]) }
    }

    #[test]
    fn proof_depends_on_token_side_and_connection() {
        let token = Token::new("correct horse battery").unwrap();
        let other = Token::new("correct horse buttery").unwrap();
        let proof = token.proof(Side::Client, &nonces(1, 2));
        assert!(token.is_proved(Side::Client, &nonces(1, 2), &proof));
        assert!(!token.is_proved(Side::Server, &nonces(1, 2), &proof));
        let plain = token.proof(Side::server(false), &nonces(1, 2));
        assert!(!token.is_proved(Side::server(true), &nonces(1, 2), &plain));
        assert!(!token.is_proved(Side::Client, &nonces(2, 1), &proof));
        assert!(!token.is_proved(Side::Client, &nonces(1, 3), &proof));
        assert!(!other.is_proved(Side::Client, &nonces(1, 2), &proof));
        assert!(!token.is_proved(Side::Client, &nonces(1, 2), &proof[..62]));
        assert!(!token.is_proved(Side::Client, &nonces(1, 2), ""));
    }

    #[test]
    fn proofs_are_hmac_sha256() {
        // RFC 4231, test case 2, with the same library calls.
        let mut mac = Hmac::<Sha256>::new_from_slice(b"Jefe").unwrap();
        mac.update(b"what do ya want for nothing?");
        assert_eq!(
            hex(&mac.finalize().into_bytes()),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
    }

    #[test]
    fn token_has_minimum_length_and_private_file() {
        assert!(Token::new("  0123456789abcde \n").is_err());
        assert!(Token::new(&"x".repeat(TOKEN_MAX + 1)).is_err());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        let mode = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            Token::read(&path).map_err(|e| e.to_string())
        };
        assert!(mode(0o640).unwrap_err().contains("chmod 600"));
        let token = mode(0o600).unwrap();
        let same = Token::new("0123456789abcdef").unwrap();
        assert_eq!(
            token.proof(Side::Server, &nonces(0, 0)),
            same.proof(Side::Server, &nonces(0, 0))
        );
        assert_eq!(format!("{token:?}"), "Token(..)");
        let why = Token::read(dir.path()).unwrap_err().to_string();
        assert!(why.contains("a directory, and not a regular file"), "{why}");
        let why = Token::read(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(why.contains("a device, and not a regular file"), "{why}");
        assert!(Token::read(&dir.path().join("none")).is_err());
    }

    #[test]
    fn nonces_differ_and_round_trip_as_text() {
        let a = Nonce::random().unwrap();
        assert_ne!(a, Nonce::random().unwrap());
        let text = serde_json::to_string(&a).unwrap();
        assert_eq!(serde_json::from_str::<Nonce>(&text).unwrap(), a);
        assert!(serde_json::from_str::<Nonce>("\"00\"").is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_not_a_proof(text in ".{0,140}") {
            let token = Token::new("0123456789abcdef").unwrap();
            prop_assert!(!token.is_proved(Side::Client, &nonces(1, 2), &text));
        }

        #[test]
        fn hexadecimal_text_is_read_back(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            prop_assert_eq!(unhex(&hex(&bytes)), Some(bytes));
        }
    }
}

#[cfg(test)]
#[path = "token_tests.rs"]
mod edges;

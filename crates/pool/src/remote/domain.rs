//! The token of a domain: its file, its text form, and its proof over a connection between hosts.
//!
//! The members of a domain share objects ([`Others`](scheme::Others)). A compute node names at most
//! one token when it is admitted:
//!
//! ```text
//! on this host    {"request":"admit",..,"domain":T}            T: the token, 64 hexadecimal digits
//! between hosts   {"request":"admit",..,"domain_proof":P}      P = HMAC-SHA256(token, "granary
//!                                                                  domain 1" S C)
//! ```
//!
//! Between hosts the token is never sent. The memory node has been given the tokens of its domains
//! and tests the proof with each of them. S and C are the nonces of the greeting, so that a proof
//! is valid on one connection only (`token.rs`).

use std::path::Path;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serializer};

use super::token::{Nonces, hex, nonce_mac, read_private, unhex};
use crate::Error;
use scheme::DomainToken;

/// First part of the proven message. No other proof begins with it.
const LABEL: &[u8] = b"granary domain 1";

/// Reads the token of a domain from a file that only its owner may read: 32 bytes, or 64
/// hexadecimal digits.
///
/// # Errors
/// The file cannot be read, others may read it, or it has another length.
pub fn read(path: &Path) -> Result<DomainToken, Error> {
    let attempt = || format!("reading the domain token in {}", path.display());
    let bytes = read_private(path, attempt)?;
    let token = match <[u8; 32]>::try_from(&bytes[..]) {
        Ok(raw) => Some(DomainToken(raw)),
        Err(_) => std::str::from_utf8(bytes.trim_ascii()).ok().and_then(from_hex),
    };
    token.ok_or_else(|| Error::Refused {
        attempt: attempt(),
        why: "a domain token is 32 bytes or 64 hexadecimal digits; create a random one with \
              head -c 32 /dev/urandom"
            .into(),
    })
}

fn from_hex(text: &str) -> Option<DomainToken> {
    unhex(text).and_then(|bytes| bytes.try_into().ok()).map(DomainToken)
}

/// The proof that the compute node on the connection with these nonces has the token.
pub fn proof(token: &DomainToken, nonces: &Nonces) -> String {
    use hmac::Mac;
    hex(&nonce_mac(&token.0, LABEL, nonces).finalize().into_bytes())
}

/// The token that `proof` proves on the connection with these nonces. Each comparison takes
/// constant time.
pub fn proved(tokens: &[DomainToken], nonces: &Nonces, proof: &str) -> Option<DomainToken> {
    use hmac::Mac;
    let proof = unhex(proof)?;
    let is_proved =
        |token: &&DomainToken| nonce_mac(&token.0, LABEL, nonces).verify_slice(&proof).is_ok();
    tokens.iter().find(is_proved).copied()
}

/// Serializes the token of an admission on one host.
pub fn serialize<S: Serializer>(token: &Option<DomainToken>, to: S) -> Result<S::Ok, S::Error> {
    match token {
        Some(token) => to.serialize_str(&hex(&token.0)),
        None => to.serialize_none(),
    }
}

/// Deserializes the token of an admission on one host.
pub fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Option<DomainToken>, D::Error> {
    let Some(text) = Option::<String>::deserialize(from)? else { return Ok(None) };
    let token = from_hex(&text);
    token.map(Some).ok_or_else(|| D::Error::custom("a domain token is 64 hexadecimal digits"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::remote::token::Nonce;

    fn nonces() -> Nonces {
        Nonces { server: Nonce::random().unwrap(), client: Nonce::random().unwrap() }
    }

    #[test]
    fn proof_is_of_one_token_and_one_connection() {
        let (first, second, other) =
            (DomainToken([1; 32]), DomainToken([2; 32]), DomainToken([3; 32]));
        let (here, there) = (nonces(), nonces());
        let tokens = [first, second];
        for token in tokens {
            let proof = proof(&token, &here);
            assert_eq!(proved(&tokens, &here, &proof), Some(token));
            assert_eq!(proved(&tokens, &there, &proof), None, "a replay");
            assert_eq!(proved(&[], &here, &proof), None);
            assert_eq!(proved(&tokens, &here, &proof[..62]), None);
            let swapped = Nonces { server: here.client, client: here.server };
            assert_eq!(proved(&tokens, &swapped, &proof), None);
        }
        assert_eq!(proved(&tokens, &here, &proof(&other, &here)), None);
        assert_eq!(proved(&tokens, &here, ""), None);
    }

    #[test]
    fn token_file_has_bytes_or_digits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let read_back = |content: &[u8], mode| {
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            read(&path).map_err(|e| e.to_string())
        };
        // White space at the end of raw bytes belongs to the token.
        let mut raw = [0xa5; 32];
        raw[31] = b'\n';
        assert_eq!(read_back(&raw, 0o600), Ok(DomainToken(raw)));
        let digits = format!("{}\n", "a5".repeat(32));
        assert_eq!(read_back(digits.as_bytes(), 0o600), Ok(DomainToken([0xa5; 32])));
        assert!(read_back(digits.as_bytes(), 0o640).unwrap_err().contains("chmod 600"));
        for wrong in [&b"short"[..], &[7; 33], "g5".repeat(32).as_bytes(), &[b'a'; 66]] {
            assert!(read_back(wrong, 0o600).unwrap_err().contains("64 hexadecimal digits"));
        }
    }
}

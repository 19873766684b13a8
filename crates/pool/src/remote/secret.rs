//! Secrets for the QPs of two hosts, derived from their control connection.
//!
//! ```text
//! secret of the connection   = HMAC-SHA256(token, "granary packets 1" S C)   S, C: the nonces
//! secret of QPs              = HMAC-SHA256(that, "granary QPs 1" salt)       salt: 32 random bytes
//! key, first PSN of each way = HMAC-SHA256(that, way, QP numbers)            see rnic::wire::mac
//! ```
//!
//! Without a token the first HMAC key is empty. A third party that reads the control connection can
//! then compute the secrets; a third party that cannot read it knows none of them. The compute node
//! draws a salt at admission and each time it re-establishes QPs.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use verbs::{PairSecret, SecretSide as End};

use super::route::Start;
use super::token::{Nonce, Nonces, Side, Token};

/// Secret of a control connection between hosts.
#[derive(Clone, Copy)]
pub struct ConnectionSecret {
    key: [u8; 32],
    authenticated: bool,
}

impl ConnectionSecret {
    /// The secret of the connection with these nonces. `authenticated`: packets of its QPs carry
    /// tags.
    pub fn new(token: Option<&Token>, nonces: &Nonces, authenticated: bool) -> Self {
        let token = token.map_or(&[][..], Token::bytes);
        let [server, client] = [&nonces.server, &nonces.client].map(Nonce::bytes);
        Self { key: mac(token, &[b"granary packets 1", server, client]), authenticated }
    }

    /// Initial state, at the end `side`, of the QPs for which `salt` was drawn.
    pub fn start(&self, side: Side, salt: &Nonce) -> Start {
        let side = match side {
            Side::Client => End::Asking,
            Side::Server | Side::PlainServer => End::Asked,
        };
        let bytes = mac(&self.key, &[b"granary QPs 1", salt.bytes()]);
        Start::Secret(PairSecret { bytes, side, authenticated: self.authenticated })
    }
}

fn mac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(start: Start) -> [u8; 32] {
        let Start::Secret(secret) = start else { panic!("no secret") };
        secret.bytes
    }

    #[test]
    fn secret_depends_on_token_connection_and_salt() {
        let nonce = || Nonce::random().unwrap();
        let (nonces, salt) = (Nonces { server: nonce(), client: nonce() }, nonce());
        let token = Token::new("correct horse battery").unwrap();
        let other = Token::new("correct horse buttery").unwrap();
        let of = |token: Option<&Token>, nonces: &Nonces, salt: &Nonce| {
            bytes(ConnectionSecret::new(token, nonces, true).start(Side::Client, salt))
        };
        let secret = of(Some(&token), &nonces, &salt);
        let server = ConnectionSecret::new(Some(&token), &nonces, true).start(Side::Server, &salt);
        assert_eq!(secret, bytes(server), "both ends derive the same");
        for differs in [
            of(Some(&other), &nonces, &salt),
            of(None, &nonces, &salt),
            of(Some(&token), &Nonces { client: nonce(), ..nonces }, &salt),
            of(Some(&token), &Nonces { server: nonce(), ..nonces }, &salt),
            of(Some(&token), &nonces, &nonce()),
        ] {
            assert_ne!(secret, differs);
        }
    }
}

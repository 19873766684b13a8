//! What the QPs of two hosts begin with: secrets that come from their control connection.
//!
//! ```text
//! secret of the connection   = HMAC-SHA256(token, "granary packets 1" S C)      S, C: the nonces
//! secret of QPs              = HMAC-SHA256(that, "granary QPs 1" salt)          salt: 32 random bytes
//! key, first PSN of each way = HMAC-SHA256(that, way, QP numbers)               see rnic::wire::mac
//! ```
//!
//! Without a token the first key is empty. Then a third party that reads the control connection can
//! work the secrets out; one that cannot read it knows none of them. The compute node draws a salt
//! when it is admitted, and each time that QPs are connected anew.

use fabric::{PairSecret, SecretSide as End};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::route::Start;
use super::token::{Nonce, Nonces, Side, Token};

/// The secret of a control connection between hosts.
#[derive(Clone, Copy)]
pub struct ConnectionSecret {
    key: [u8; 32],
    authenticated: bool,
}

impl ConnectionSecret {
    /// The secret of the connection with these nonces; whether the packets of its QPs have tags.
    pub fn new(token: Option<&Token>, nonces: &Nonces, authenticated: bool) -> Self {
        let token = token.map_or(&[][..], Token::bytes);
        let [server, client] = [&nonces.server, &nonces.client].map(Nonce::bytes);
        Self { key: mac(token, &[b"granary packets 1", server, client]), authenticated }
    }

    /// What QPs begin with at the end `side`, where `salt` was drawn for them.
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
        let Start::Secret(secret) = start else { panic!("a secret was asked for") };
        secret.bytes
    }

    #[test]
    fn a_secret_is_of_one_token_one_connection_and_one_salt() {
        let nonce = || Nonce::random().unwrap();
        let (nonces, salt) = (Nonces { server: nonce(), client: nonce() }, nonce());
        let token = Token::new("correct horse battery").unwrap();
        let other = Token::new("correct horse buttery").unwrap();
        let of = |token: Option<&Token>, nonces: &Nonces, salt: &Nonce| {
            bytes(ConnectionSecret::new(token, nonces, true).start(Side::Client, salt))
        };
        let secret = of(Some(&token), &nonces, &salt);
        let server = ConnectionSecret::new(Some(&token), &nonces, true).start(Side::Server, &salt);
        assert_eq!(secret, bytes(server), "both ends know it");
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

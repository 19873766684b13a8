//! Boundary cases of tokens: minimum and maximum length, white space in files, every digit of a
//! proof.

use std::os::unix::fs::PermissionsExt;

use super::*;

fn nonces() -> Nonces {
    Nonces { server: Nonce([1; 32]), client: Nonce([2; 32]) }
}

/// Expected values computed in Python: `hmac.new(token, side + server + client, "sha256")`.
#[test]
fn proof_is_hmac_of_side_and_nonces_in_order() {
    let token = Token::new("correct horse battery").unwrap();
    for (side, proof) in [(Side::Client, CLIENT), (Side::Server, SERVER)] {
        assert_eq!(token.proof(side, &nonces()), proof);
        assert!(token.is_proved(side, &nonces(), proof));
    }
}

const CLIENT: &str = "ea4bc2a9541eeb60cddcb68965a9b02fd38bd91e4a0952202665b91079d5fec2";
const SERVER: &str = "883ec53cbd818ed625e617bf5fd5810d6fbbf228f3fe4d96b067e35de56bba66";

#[test]
fn proof_with_one_wrong_digit_is_rejected() {
    let token = Token::new("correct horse battery").unwrap();
    for at in 0..CLIENT.len() {
        let mut proof = CLIENT.as_bytes().to_vec();
        proof[at] = if proof[at] == b'0' { b'1' } else { b'0' };
        let proof = String::from_utf8(proof).unwrap();
        assert!(!token.is_proved(Side::Client, &nonces(), &proof), "digit {at}");
    }
    for more in ["0", "00", &"0".repeat(64)] {
        assert!(!token.is_proved(Side::Client, &nonces(), &format!("{CLIENT}{more}")));
    }
}

#[test]
fn token_length_excludes_surrounding_white_space() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        Token::read(&path)
    };
    for (len, fits) in [(15, false), (16, true), (1024, true), (1025, false)] {
        let text = "x".repeat(len);
        assert_eq!(Token::new(&text).is_ok(), fits, "{len} bytes");
        assert_eq!(read(&text).is_ok(), fits, "{len} bytes");
    }
    // The file may have 2048 bytes, including white space.
    let text = "y".repeat(1024);
    let token = read(&format!("{}{text}\n", " ".repeat(1000))).unwrap();
    let same = Token::new(&text).unwrap();
    assert_eq!(token.proof(Side::Client, &nonces()), same.proof(Side::Client, &nonces()));
    assert!(read(&format!("{}{text}\n", " ".repeat(1023))).is_ok());
    // A longer file is refused, not truncated.
    assert!(read(&format!("{}{text}", " ".repeat(1025))).is_err());
}

#[test]
fn unhex_accepts_digit_pairs_up_to_64_bytes() {
    for len in [0, 1, 63, 64] {
        let bytes: Vec<u8> = (0..len).map(|n| (n * 37) as u8).collect();
        assert_eq!(unhex(&hex(&bytes)), Some(bytes));
    }
    assert_eq!(unhex(&"0".repeat(130)), None);
    for text in ["0", "0g", "g0", "000", " 0", "+1"] {
        assert_eq!(unhex(text), None, "{text:?}");
    }
    assert_eq!(unhex("Ff09"), Some(vec![0xff, 0x09]));
}

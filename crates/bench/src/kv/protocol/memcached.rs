//! memcached's text protocol, as far as replies to `get`, `set` and `delete` go.

use std::io::Write;

use super::{Malformed, Reply, length, line, shown, value_end};
use crate::kv::workload::Kind;

pub fn request(kind: Kind, key: &[u8], value: &[u8], out: &mut Vec<u8>) {
    let word: &[u8] = match kind {
        Kind::Read => b"get ",
        Kind::Delete => b"delete ",
        Kind::Insert | Kind::Update | Kind::Modify => b"set ",
    };
    out.extend_from_slice(word);
    out.extend_from_slice(key);
    if word == b"set " {
        // A Vec takes all bytes.
        let _ = write!(out, " 0 0 {}\r\n", value.len());
        out.extend_from_slice(value);
    }
    out.extend_from_slice(b"\r\n");
}

pub fn reply(bytes: &[u8]) -> Result<Option<(usize, Reply)>, Malformed> {
    let Some(head) = line(bytes)? else { return Ok(None) };
    let end = head.len() + 2;
    let reply = match head {
        b"STORED" | b"DELETED" => Reply::Done,
        b"END" | b"NOT_FOUND" => Reply::Missing,
        b"ERROR" | b"NOT_STORED" => Reply::Refused(shown(head)),
        _ if head.starts_with(b"SERVER_ERROR") || head.starts_with(b"CLIENT_ERROR") => {
            Reply::Refused(shown(head))
        }
        _ => return value(bytes, head),
    };
    Ok(Some((end, reply)))
}

/// `VALUE key flags length`, the value, `END`.
fn value(bytes: &[u8], head: &[u8]) -> Result<Option<(usize, Reply)>, Malformed> {
    let mut words = head.split(|byte| *byte == b' ');
    let (Some(b"VALUE"), Some(_), Some(_), Some(digits)) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(Malformed(format!("{:?} is no reply to get, set or delete", shown(head))));
    };
    let length = length(digits)?;
    let Some(end) = value_end(bytes, head.len() + 2, length)? else { return Ok(None) };
    match line(&bytes[end..])? {
        None => Ok(None),
        Some(b"END") => Ok(Some((end + 5, Reply::Value(length)))),
        Some(other) => Err(Malformed(format!("{:?} is no end of a value", shown(other)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_lines() {
        let mut out = Vec::new();
        request(Kind::Read, b"key", b"unused", &mut out);
        request(Kind::Insert, b"key", b"a\r\nb", &mut out);
        request(Kind::Delete, b"key", b"", &mut out);
        assert_eq!(out, b"get key\r\nset key 0 0 4\r\na\r\nb\r\ndelete key\r\n");
    }

    #[test]
    fn replies_are_told_apart() {
        for (bytes, expected) in [
            (&b"STORED\r\n"[..], Reply::Done),
            (b"DELETED\r\n", Reply::Done),
            (b"END\r\n", Reply::Missing),
            (b"NOT_FOUND\r\n", Reply::Missing),
            (b"VALUE k 0 3 77\r\nabc\r\nEND\r\n", Reply::Value(3)),
            (b"SERVER_ERROR full\r\n", Reply::Refused("SERVER_ERROR full".into())),
            (b"ERROR\r\n", Reply::Refused("ERROR".into())),
        ] {
            assert_eq!(reply(bytes), Ok(Some((bytes.len(), expected))));
        }
        for wrong in [&b"OK\r\n"[..], b"VALUE k 0\r\n", b"VALUE k 0 1\r\nab\r\n", b"STORED\n"] {
            assert!(reply(wrong).is_err(), "{wrong:?}");
        }
        assert!(reply(b"VALUE k 0 1\r\na\r\nVALUE j 0 1\r\n").is_err(), "one key was asked for");
    }
}

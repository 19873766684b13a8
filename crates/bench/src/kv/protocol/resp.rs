//! RESP2 and RESP3, as far as replies to `GET`, `SET` and `DEL` go.

use std::io::Write;

use super::{Malformed, Reply, length, line, shown, value_end};
use crate::kv::workload::Kind;

pub fn request(kind: Kind, key: &[u8], value: &[u8], out: &mut Vec<u8>) {
    let words: [&[u8]; 3] = match kind {
        Kind::Read => [b"GET", key, b""],
        Kind::Delete => [b"DEL", key, b""],
        Kind::Insert | Kind::Update | Kind::Modify => [b"SET", key, value],
    };
    let count = if words[0] == b"SET" { 3 } else { 2 };
    // A Vec takes all bytes.
    let _ = write!(out, "*{count}\r\n");
    for word in &words[..count] {
        let _ = write!(out, "${}\r\n", word.len());
        out.extend_from_slice(word);
        out.extend_from_slice(b"\r\n");
    }
}

pub fn reply(bytes: &[u8]) -> Result<Option<(usize, Reply)>, Malformed> {
    let Some(head) = line(bytes)? else { return Ok(None) };
    let end = head.len() + 2;
    let reply = match head {
        [b'+', ..] => Reply::Done,
        [b'-', why @ ..] => Reply::Refused(shown(why)),
        b":0" | b"$-1" | b"_" => Reply::Missing,
        [b':', ..] => Reply::Done,
        [b'$', digits @ ..] => {
            let length = length(digits)?;
            let end = value_end(bytes, end, length)?;
            return Ok(end.map(|end| (end, Reply::Value(length))));
        }
        _ => return Err(Malformed(format!("{:?} is no reply to GET, SET or DEL", shown(head)))),
    };
    Ok(Some((end, reply)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_arrays_of_bulk_strings() {
        let mut out = Vec::new();
        request(Kind::Read, b"key", b"unused", &mut out);
        request(Kind::Update, b"key", b"a\r\nb", &mut out);
        request(Kind::Delete, b"key", b"", &mut out);
        assert_eq!(
            out,
            b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$4\r\na\r\nb\r\n\
              *2\r\n$3\r\nDEL\r\n$3\r\nkey\r\n"
        );
    }

    #[test]
    fn replies_are_told_apart() {
        for (bytes, expected) in [
            (&b"+OK\r\n"[..], Reply::Done),
            (b":1\r\n", Reply::Done),
            (b":0\r\n", Reply::Missing),
            (b"$-1\r\n", Reply::Missing),
            (b"_\r\n", Reply::Missing),
            (b"$0\r\n\r\n", Reply::Value(0)),
            (b"-OOM full\r\n", Reply::Refused("OOM full".into())),
        ] {
            assert_eq!(reply(bytes), Ok(Some((bytes.len(), expected))));
        }
        for wrong in [&b"*1\r\n"[..], b"$x\r\n", b"$-2\r\n", b"$1\r\nab\r\n", b"\r\n", b"+OK\n"] {
            assert!(reply(wrong).is_err(), "{wrong:?}");
        }
    }
}

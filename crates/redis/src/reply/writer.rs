//! Writes replies to a buffer.

use crate::command::sanitize;
use crate::number::{I64_BYTES, format_i64, write_f64};

/// Version of the protocol, as HELLO selects it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// RESP2, with which each connection begins.
    #[default]
    Resp2,
    /// RESP3.
    Resp3,
}

impl Protocol {
    /// The number that HELLO has.
    pub const fn number(self) -> i64 {
        match self {
            Self::Resp2 => 2,
            Self::Resp3 => 3,
        }
    }
}

/// Appends replies to a buffer.
///
/// The caller writes as many replies behind [`array`](Self::array) as the array has elements.
#[derive(Debug)]
pub struct Writer<'a> {
    out: &'a mut Vec<u8>,
    protocol: Protocol,
}

impl<'a> Writer<'a> {
    /// Creates a writer that appends to `out`.
    pub fn new(out: &'a mut Vec<u8>, protocol: Protocol) -> Self {
        Self { out, protocol }
    }

    /// The version of the protocol.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    fn is_resp3(&self) -> bool {
        self.protocol == Protocol::Resp3
    }

    fn line(&mut self, kind: u8, text: &[u8]) {
        self.out.reserve(text.len() + 3);
        self.out.push(kind);
        self.out.extend_from_slice(text);
        self.out.extend_from_slice(b"\r\n");
    }

    fn number(&mut self, kind: u8, number: i64) {
        self.line(kind, format_i64(number, &mut [0; I64_BYTES]));
    }

    fn count(&mut self, kind: u8, count: usize) {
        self.number(kind, i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Writes `+OK`.
    pub fn ok(&mut self) {
        self.simple("OK");
    }

    /// Writes a simple string. Line ends within it become spaces.
    pub fn simple(&mut self, text: &str) {
        self.sanitized(b'+', text.as_bytes());
    }

    /// Writes a simple string of two parts.
    pub(crate) fn simple_parts(&mut self, first: &str, second: &str) {
        self.out.push(b'+');
        self.out.extend_from_slice(first.as_bytes());
        self.out.extend_from_slice(second.as_bytes());
        self.bulk_end();
    }

    /// Writes a part of the content of a bulk string.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// Writes an error, whose first word is its code (`ERR`). Line ends within it become spaces.
    pub fn error(&mut self, text: impl AsRef<[u8]>) {
        self.sanitized(b'-', text.as_ref());
    }

    /// Writes an error whose text `write` appends to the buffer.
    pub fn error_with(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.out.push(b'-');
        let begin = self.out.len();
        write(self.out);
        sanitize(&mut self.out[begin..]);
        self.out.extend_from_slice(b"\r\n");
    }

    fn sanitized(&mut self, kind: u8, text: &[u8]) {
        let begin = self.out.len() + 1;
        self.line(kind, text);
        sanitize(&mut self.out[begin..begin + text.len()]);
    }

    /// Writes an integer.
    pub fn integer(&mut self, value: i64) {
        self.number(b':', value);
    }

    /// Writes a bulk string.
    pub fn bulk(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        self.out.reserve(bytes.len() + 16);
        self.bulk_header(bytes.len());
        self.out.extend_from_slice(bytes);
        self.bulk_end();
    }

    /// Writes the header of a bulk string, whose `len` bytes the caller sends from another place.
    pub fn bulk_header(&mut self, len: usize) {
        self.count(b'$', len);
    }

    /// Writes the line end behind a bulk string.
    pub fn bulk_end(&mut self) {
        self.out.extend_from_slice(b"\r\n");
    }

    /// Writes a bulk string, or null.
    pub fn bulk_or_null(&mut self, bytes: Option<&[u8]>) {
        match bytes {
            Some(bytes) => self.bulk(bytes),
            None => self.null(),
        }
    }

    /// Writes an integer as a bulk string.
    pub fn bulk_integer(&mut self, value: i64) {
        self.bulk(format_i64(value, &mut [0; I64_BYTES]));
    }

    /// Writes null, the absence of a value.
    pub fn null(&mut self) {
        self.out.extend_from_slice(if self.is_resp3() { b"_\r\n" } else { b"$-1\r\n" });
    }

    /// Writes the absence of an array, such as that of an EXEC that failed.
    pub fn null_array(&mut self) {
        self.out.extend_from_slice(if self.is_resp3() { b"_\r\n" } else { b"*-1\r\n" });
    }

    /// Writes the header of an array of `count` elements.
    pub fn array(&mut self, count: usize) {
        self.count(b'*', count);
    }

    /// Writes the header of a map of `count` pairs: key, value, key, value.
    pub fn map(&mut self, count: usize) {
        match self.is_resp3() {
            true => self.count(b'%', count),
            false => self.count(b'*', count * 2),
        }
    }

    /// Writes the header of a set of `count` elements.
    pub fn set(&mut self, count: usize) {
        let kind = if self.is_resp3() { b'~' } else { b'*' };
        self.count(kind, count);
    }

    /// Writes the header of a message outside of the order of replies, with `count` elements.
    pub fn push(&mut self, count: usize) {
        let kind = if self.is_resp3() { b'>' } else { b'*' };
        self.count(kind, count);
    }

    /// Writes a floating-point number, with 17 significant digits.
    pub fn double(&mut self, value: f64) {
        if self.is_resp3() {
            self.out.push(b',');
            write_f64(value, self.out);
            return self.bulk_end();
        }
        // The header, which has the length, is written behind the text and changes places with it.
        let begin = self.out.len();
        write_f64(value, self.out);
        let len = self.out.len() - begin;
        self.bulk_header(len);
        self.out[begin..].rotate_left(len);
        self.bulk_end();
    }

    /// Writes a truth value.
    pub fn boolean(&mut self, value: bool) {
        match self.is_resp3() {
            true => self.line(b'#', if value { b"t" } else { b"f" }),
            false => self.integer(value.into()),
        }
    }

    /// Writes an integer of any size, given in decimal.
    pub fn big_number(&mut self, digits: &str) {
        match self.is_resp3() {
            true => self.sanitized(b'(', digits.as_bytes()),
            false => self.bulk(digits),
        }
    }

    /// Writes text of a format: `txt` or `mkd`.
    pub fn verbatim(&mut self, format: &[u8; 3], text: impl AsRef<[u8]>) {
        let text = text.as_ref();
        if !self.is_resp3() {
            return self.bulk(text);
        }
        self.count(b'=', text.len() + 4);
        self.out.extend_from_slice(format);
        self.out.push(b':');
        self.out.extend_from_slice(text);
        self.bulk_end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both(write: impl Fn(&mut Writer<'_>)) -> [String; 2] {
        [Protocol::Resp2, Protocol::Resp3].map(|protocol| {
            let mut out = Vec::new();
            write(&mut Writer::new(&mut out, protocol));
            String::from_utf8(out).unwrap()
        })
    }

    #[track_caller]
    fn assert_written(write: impl Fn(&mut Writer<'_>), resp2: &str, resp3: &str) {
        assert_eq!(both(write), [resp2, resp3]);
    }

    #[test]
    fn common_kinds_are_written_alike() {
        let alike = |write: fn(&mut Writer<'_>), text| assert_written(write, text, text);
        alike(|w| w.ok(), "+OK\r\n");
        alike(|w| w.simple("a\r\nb"), "+a  b\r\n");
        alike(|w| w.error("ERR x\ny"), "-ERR x y\r\n");
        alike(|w| w.error_with(|out| out.extend(b"ERR \r")), "-ERR  \r\n");
        alike(|w| w.integer(-7), ":-7\r\n");
        alike(|w| w.bulk("a\r\nb"), "$4\r\na\r\nb\r\n");
        alike(|w| w.bulk(""), "$0\r\n\r\n");
        alike(|w| w.bulk_integer(i64::MIN), "$20\r\n-9223372036854775808\r\n");
        alike(|w| w.array(3), "*3\r\n");
        alike(|w| w.bulk_or_null(Some(b"a")), "$1\r\na\r\n");
    }

    #[test]
    fn newer_kinds_have_a_form_in_resp2() {
        assert_written(|w| w.null(), "$-1\r\n", "_\r\n");
        assert_written(|w| w.bulk_or_null(None), "$-1\r\n", "_\r\n");
        assert_written(|w| w.null_array(), "*-1\r\n", "_\r\n");
        assert_written(|w| w.map(2), "*4\r\n", "%2\r\n");
        assert_written(|w| w.set(2), "*2\r\n", "~2\r\n");
        assert_written(|w| w.push(3), "*3\r\n", ">3\r\n");
        assert_written(|w| w.double(0.5), "$3\r\n0.5\r\n", ",0.5\r\n");
        assert_written(|w| w.double(f64::INFINITY), "$3\r\ninf\r\n", ",inf\r\n");
        assert_written(|w| w.boolean(true), ":1\r\n", "#t\r\n");
        assert_written(|w| w.boolean(false), ":0\r\n", "#f\r\n");
        assert_written(|w| w.big_number("12"), "$2\r\n12\r\n", "(12\r\n");
        assert_written(|w| w.verbatim(b"txt", "ab"), "$2\r\nab\r\n", "=6\r\ntxt:ab\r\n");
    }
}

//! Parses replies, incrementally and without copies.

#[cfg(test)]
mod tests;

use memchr::memchr;

use crate::number::{parse_f64, parse_i64};

/// Limits of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum bytes of a bulk string.
    pub bulk: usize,
    /// Maximum bytes of a line.
    pub line: usize,
    /// Maximum number of values in a reply, all levels together.
    pub values: usize,
    /// Maximum number of levels.
    pub depth: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bulk: 512 << 20, line: 64 << 10, values: 1 << 24, depth: 32 }
    }
}

/// A reply that breaks the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadReply {
    /// The first byte of a value is no kind.
    #[error(
        "parsing a reply: unknown kind {:?}; check that the server speaks RESP",
        char::from(*.0)
    )]
    Kind(u8),
    /// The content of a line does not fit its kind.
    #[error("parsing a reply: malformed line of kind {:?}; close the connection", char::from(*.0))]
    Line(u8),
    /// The reply exceeds a limit.
    #[error("parsing a reply: more {0} than the limit; raise the limit, or ask for less")]
    Limit(&'static str),
}

/// The kind of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Simple string.
    Simple,
    /// Error, simple or bulk.
    Error,
    /// Integer.
    Integer,
    /// Bulk string.
    Bulk,
    /// Null of any form.
    Null,
    /// Array.
    Array,
    /// Map; its children are key, value, key, value.
    Map,
    /// Set.
    Set,
    /// Message outside of the order of replies.
    Push,
    /// Floating-point number.
    Double,
    /// Truth value.
    Boolean,
    /// Integer of any size.
    BigNumber,
    /// Text with a format.
    Verbatim,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    kind: Kind,
    /// Start of the text.
    start: usize,
    /// Bytes of the text, or the number of children.
    len: usize,
    /// Values of this one and all below it, in all.
    size: usize,
}

/// The state of a connection's replies. Values are kept in a vector that is reused.
#[derive(Debug, Default)]
pub struct ReplyParser {
    /// The values of the reply: each one before its children.
    nodes: Vec<Node>,
    /// Aggregates whose children are missing: index of the node, number of children.
    open: Vec<(usize, usize)>,
    at: usize,
    searched: usize,
    /// A bulk string whose content is missing: its kind and its length.
    content: Option<(Kind, usize)>,
    is_done: bool,
}

impl ReplyParser {
    /// Parses the next reply from `buffer`, which begins at the end of the former reply.
    ///
    /// Returns the number of bytes of the reply, or `None` if bytes are missing. The next call then
    /// gets the same bytes and more.
    ///
    /// # Errors
    ///
    /// After an error the parser must not be used again.
    pub fn parse(&mut self, buffer: &[u8], limits: &Limits) -> Result<Option<usize>, BadReply> {
        if self.is_done {
            self.nodes.clear();
            (self.at, self.searched, self.is_done) = (0, 0, false);
        }
        while self.nodes.is_empty() || !self.open.is_empty() {
            let taken = match self.content {
                Some((kind, len)) => self.take_content(buffer, kind, len),
                None => self.take_line(buffer, limits)?,
            };
            if !taken {
                return Ok(None);
            }
            self.close();
        }
        self.is_done = true;
        Ok(Some(self.at))
    }

    /// Returns the reply that [`parse`](Self::parse) found.
    ///
    /// # Panics
    ///
    /// Panics if [`parse`](Self::parse) has not returned a reply.
    pub fn reply<'a>(&'a self, buffer: &'a [u8]) -> Reply<'a> {
        assert!(self.is_done, "the reply is complete");
        Reply { nodes: &self.nodes, buffer }
    }

    fn put(&mut self, kind: Kind, start: usize, len: usize) {
        self.nodes.push(Node { kind, start, len, size: 1 });
        if let Some((_, left)) = self.open.last_mut() {
            *left -= 1;
        }
    }

    /// Closes all aggregates that have all their children.
    fn close(&mut self) {
        while let Some(&(node, 0)) = self.open.last() {
            self.nodes[node].size = self.nodes.len() - node;
            self.open.pop();
        }
    }

    fn take_content(&mut self, buffer: &[u8], kind: Kind, len: usize) -> bool {
        if buffer.len() - self.at < len + 2 {
            return false;
        }
        self.content = None;
        let format = if kind == Kind::Verbatim { 4.min(len) } else { 0 };
        self.put(kind, self.at + format, len - format);
        self.at += len + 2;
        true
    }

    fn take_line(&mut self, buffer: &[u8], limits: &Limits) -> Result<bool, BadReply> {
        let rest = &buffer[self.at..];
        let window = &rest[..rest.len().min(limits.line + 1)];
        let Some(found) = memchr(b'\r', &window[self.searched..]) else {
            self.searched = window.len();
            return if rest.len() > limits.line {
                Err(BadReply::Limit("bytes in a line"))
            } else {
                Ok(false)
            };
        };
        let end = self.searched + found;
        if rest.len() < end + 2 {
            self.searched = end;
            return Ok(false);
        }
        let first = rest[0];
        if end == 0 || rest[end + 1] != b'\n' {
            return Err(BadReply::Line(first));
        }
        self.searched = 0;
        let start = self.at + 1;
        self.at += end + 2;
        if self.nodes.len() >= limits.values {
            return Err(BadReply::Limit("values"));
        }
        self.value(first, &buffer[start..start + end - 1], start, limits)?;
        Ok(true)
    }

    fn value(
        &mut self,
        first: u8,
        text: &[u8],
        start: usize,
        limits: &Limits,
    ) -> Result<(), BadReply> {
        let (kind, is_valid) = match first {
            b'+' => (Kind::Simple, true),
            b'-' => (Kind::Error, true),
            b':' => (Kind::Integer, parse_i64(text).is_some()),
            b',' => (Kind::Double, text == b"nan" || parse_f64(text).is_some()),
            b'#' => (Kind::Boolean, matches!(text, b"t" | b"f")),
            b'(' => (Kind::BigNumber, is_big_number(text)),
            b'_' => (Kind::Null, text.is_empty()),
            b'$' => return self.header(Kind::Bulk, first, text, limits),
            b'!' => return self.header(Kind::Error, first, text, limits),
            b'=' => return self.header(Kind::Verbatim, first, text, limits),
            b'*' => return self.aggregate(Kind::Array, first, text, limits),
            b'%' => return self.aggregate(Kind::Map, first, text, limits),
            b'~' => return self.aggregate(Kind::Set, first, text, limits),
            b'>' => return self.aggregate(Kind::Push, first, text, limits),
            other => return Err(BadReply::Kind(other)),
        };
        if !is_valid {
            return Err(BadReply::Line(first));
        }
        self.put(kind, start, text.len());
        Ok(())
    }

    /// Returns the count of a line, or `None` for -1, the null of RESP2.
    fn count(first: u8, text: &[u8]) -> Result<Option<usize>, BadReply> {
        match parse_i64(text) {
            Some(-1) if matches!(first, b'$' | b'*') => Ok(None),
            Some(count @ 0..) => Ok(Some(usize::try_from(count).unwrap_or(usize::MAX))),
            _ => Err(BadReply::Line(first)),
        }
    }

    fn header(
        &mut self,
        kind: Kind,
        first: u8,
        text: &[u8],
        limits: &Limits,
    ) -> Result<(), BadReply> {
        match Self::count(first, text)? {
            None => self.put(Kind::Null, 0, 0),
            Some(len) if len > limits.bulk => {
                return Err(BadReply::Limit("bytes in a bulk string"));
            }
            Some(len) => self.content = Some((kind, len)),
        }
        Ok(())
    }

    fn aggregate(
        &mut self,
        kind: Kind,
        first: u8,
        text: &[u8],
        limits: &Limits,
    ) -> Result<(), BadReply> {
        let Some(count) = Self::count(first, text)? else {
            self.put(Kind::Null, 0, 0);
            return Ok(());
        };
        let children = if kind == Kind::Map { count.saturating_mul(2) } else { count };
        if children > limits.values {
            return Err(BadReply::Limit("values"));
        }
        if self.open.len() >= limits.depth {
            return Err(BadReply::Limit("levels"));
        }
        self.put(kind, 0, children);
        self.open.push((self.nodes.len() - 1, children));
        Ok(())
    }
}

fn is_big_number(text: &[u8]) -> bool {
    let digits = text.strip_prefix(b"-").or(text.strip_prefix(b"+")).unwrap_or(text);
    !digits.is_empty() && digits.iter().all(u8::is_ascii_digit)
}

/// A reply, or a value within it.
#[derive(Clone, Copy)]
pub struct Reply<'a> {
    nodes: &'a [Node],
    buffer: &'a [u8],
}

impl<'a> Reply<'a> {
    /// The kind of the value.
    pub fn kind(&self) -> Kind {
        self.nodes[0].kind
    }

    /// Returns the text of a value that has some; otherwise nothing.
    pub fn text(&self) -> &'a [u8] {
        let node = self.nodes[0];
        match node.kind {
            Kind::Null | Kind::Array | Kind::Map | Kind::Set | Kind::Push => &[],
            _ => &self.buffer[node.start..node.start + node.len],
        }
    }

    /// Returns the value of an integer.
    pub fn integer(&self) -> Option<i64> {
        (self.kind() == Kind::Integer).then(|| parse_i64(self.text())).flatten()
    }

    /// Returns the value of a floating-point number, which may be NaN.
    pub fn double(&self) -> Option<f64> {
        (self.kind() == Kind::Double).then(|| parse_f64(self.text()).unwrap_or(f64::NAN))
    }

    /// Number of children.
    pub fn len(&self) -> usize {
        match self.kind() {
            Kind::Array | Kind::Map | Kind::Set | Kind::Push => self.nodes[0].len,
            _ => 0,
        }
    }

    /// Returns whether the value has no children.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Iterates over the children.
    pub fn children(&self) -> impl Iterator<Item = Reply<'a>> + use<'a> {
        let (mut rest, buffer) = (&self.nodes[1..], self.buffer);
        std::iter::from_fn(move || {
            let size = rest.first()?.size;
            let nodes;
            (nodes, rest) = rest.split_at(size);
            Some(Reply { nodes, buffer })
        })
    }
}

impl std::fmt::Debug for Reply<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind() {
            Kind::Null => f.write_str("null"),
            Kind::Array | Kind::Map | Kind::Set | Kind::Push => {
                f.debug_list().entries(self.children()).finish()
            }
            _ => write!(f, "{:?}", String::from_utf8_lossy(self.text())),
        }
    }
}

//! Parses requests: arrays of bulk strings, and inline commands.
//!
//! The parser works on the connection's buffer and keeps ranges of this buffer, so arguments are
//! not copied. A vector of ranges is reused: in steady state a command allocates nothing. Bytes
//! that were parsed are not read again when more bytes arrive.
//!
//! ```
//! use redis_formats::command::Arguments;
//! use redis_formats::request::{Limits, Parser};
//!
//! # fn main() -> Result<(), redis_formats::Error> {
//! let mut parser = Parser::default();
//! let mut buffer = b"*2\r\n$3\r\nGET\r\n$1\r\na\r\nPING\r\n".to_vec();
//! let mut begin = 0;
//! while let Some(used) = parser.parse(&mut buffer[begin..], &Limits::default(), true)? {
//!     let arguments = parser.arguments(&buffer[begin..]);
//!     println!("{:?}", arguments.at(0));
//!     begin += used;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! As in Redis, the two bytes behind a bulk string are skipped and not compared with a line end.

#[cfg(test)]
mod tests;

use std::ops::Range;

use memchr::memchr;

use crate::command::Arguments;
use crate::number::parse_i64;
use crate::reply::{Protocol, Writer};
use crate::words;

/// Limits of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of arguments.
    pub arguments: usize,
    /// Maximum bytes of an argument (`proto-max-bulk-len`).
    pub bulk: usize,
    /// Maximum bytes of a line: an inline command, or a count.
    pub line: usize,
    /// Maximum number of arguments before the connection has authenticated.
    pub unauthenticated_arguments: usize,
    /// Maximum bytes of an argument before the connection has authenticated.
    pub unauthenticated_bulk: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            arguments: 1 << 20,
            bulk: 512 << 20,
            line: 64 << 10,
            unauthenticated_arguments: 10,
            unauthenticated_bulk: 16 << 10,
        }
    }
}

/// A request that breaks the protocol. The connection must be closed after the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// An inline command is longer than [`Limits::line`].
    #[error("Protocol error: too big inline request")]
    InlineTooLong,
    /// An inline command has a quote without its end.
    #[error("Protocol error: unbalanced quotes in request")]
    UnbalancedQuotes,
    /// The line of a number of arguments is longer than [`Limits::line`].
    #[error("Protocol error: too big mbulk count string")]
    CountTooLong,
    /// The number of arguments is no number or too large.
    #[error("Protocol error: invalid multibulk length")]
    Count,
    /// The number of arguments is too large before authentication.
    #[error("Protocol error: unauthenticated multibulk length")]
    UnauthenticatedCount,
    /// The line of a length is longer than [`Limits::line`].
    #[error("Protocol error: too big bulk count string")]
    LengthTooLong,
    /// An argument does not begin with `$`.
    #[error("Protocol error: expected '$', got '{}'", char::from(*.0))]
    NoBulk(u8),
    /// The length of an argument is no number or too large.
    #[error("Protocol error: invalid bulk length")]
    Length,
    /// The length of an argument is too large before authentication.
    #[error("Protocol error: unauthenticated bulk length")]
    UnauthenticatedLength,
}

impl ProtocolError {
    /// Appends the text of the error reply to `out`, without the leading `-` and the line end.
    pub fn text(&self, out: &mut Vec<u8>) {
        let begin = out.len();
        out.extend(b"ERR ");
        match self {
            // The byte need not be text.
            Self::NoBulk(byte) => {
                out.extend([b"Protocol error: expected '$', got '", &[*byte][..], b"'"].concat())
            }
            other => out.extend(other.to_string().bytes()),
        }
        crate::command::sanitize(&mut out[begin..]);
    }
}

/// The only argument of a complete request `name ARGUMENT` at the begin of `input`, and the length
/// of the request. `None` for any other request, which the parser must look at.
///
/// A client that sends requests ahead of the replies often sends many of one kind.
pub fn single(input: &[u8], name: &[u8]) -> Option<(Range<usize>, usize)> {
    let (given, end) = bulk(input, input.starts_with(b"*2\r\n").then_some(4)?)?;
    if !input[given].eq_ignore_ascii_case(name) {
        return None;
    }
    bulk(input, end)
}

/// The content of the bulk string at `start`, and the offset behind its line end.
fn bulk(input: &[u8], start: usize) -> Option<(Range<usize>, usize)> {
    let digits = input.get(start..)?.strip_prefix(b"$")?;
    // Only the parser reads longer numbers.
    let count = memchr(b'\r', &digits[..digits.len().min(6)])?;
    let len = usize::try_from(parse_i64(&digits[..count])?).ok()?;
    let begin = start + 1 + count + 2;
    let end = begin + len + 2;
    (end <= input.len()).then_some((begin..begin + len, end))
}

/// Capacity of the vector of ranges that a larger request does not leave behind.
const SPANS_KEPT: usize = 4096;

/// Where an argument is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Span {
    /// Bytes of the buffer.
    Inside { start: usize, len: usize },
    /// The caller has the bytes.
    Diverted { len: usize },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// At the first byte of a request.
    #[default]
    Begin,
    /// At the header of an argument; `left` arguments are missing.
    Header { left: usize },
    /// At the content of an argument.
    Content { left: usize, len: usize },
    /// At the line end behind an argument that was diverted.
    End { left: usize },
    /// A request was returned.
    Done,
}

/// An argument that is not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending {
    /// Index of the argument.
    pub index: usize,
    /// Offset in the buffer at which the argument begins.
    pub start: usize,
    /// Bytes of the whole argument.
    pub len: usize,
}

/// The state of a connection's requests.
#[derive(Debug, Default)]
pub struct Parser {
    state: State,
    /// Offset of the first byte that is not parsed.
    at: usize,
    /// Bytes behind `at` that have no line end.
    searched: usize,
    spans: Vec<Span>,
}

impl Parser {
    /// Parses the next request from `buffer`, which begins at the end of the former request.
    ///
    /// Returns the number of bytes of the request. [`arguments`](Self::arguments) then returns the
    /// arguments; if there are none, the request is empty and has no reply. Returns `None` if bytes
    /// are missing: the next call gets the same bytes and more. Quoted words of an inline command
    /// are replaced by their content.
    ///
    /// # Errors
    ///
    /// After an error the parser must not be used again.
    pub fn parse(
        &mut self,
        buffer: &mut [u8],
        limits: &Limits,
        authenticated: bool,
    ) -> Result<Option<usize>, ProtocolError> {
        if self.state == State::Done {
            (self.state, self.at, self.searched) = (State::Begin, 0, 0);
            self.spans.clear();
            self.spans.shrink_to(SPANS_KEPT);
        }
        loop {
            let go_on = match self.state {
                State::Begin if buffer.is_empty() => false,
                State::Begin if buffer[0] != b'*' => self.inline(buffer, limits)?,
                State::Begin => self.count(buffer, limits, authenticated)?,
                State::Header { left: 0 } => {
                    self.state = State::Done;
                    true
                }
                State::Header { left } => self.header(buffer, limits, authenticated, left)?,
                State::Content { left, len } => self.content(buffer, left, len),
                State::End { left } => self.skip_end(buffer, left),
                State::Done => return Ok(Some(self.at)),
            };
            if !go_on {
                return Ok(None);
            }
        }
    }

    /// Returns the arguments of the request that [`parse`](Self::parse) returned.
    pub fn arguments<'a>(&'a self, buffer: &'a [u8]) -> RequestArguments<'a> {
        RequestArguments { buffer, spans: &self.spans }
    }

    /// Returns the argument whose content is incomplete, if the parser waits for one.
    pub fn pending(&self) -> Option<Pending> {
        match self.state {
            State::Content { len, .. } => {
                Some(Pending { index: self.spans.len(), start: self.at, len })
            }
            _ => None,
        }
    }

    /// Leaves the content of the pending argument to the caller.
    ///
    /// The caller removes the bytes from [`Pending::start`] on from its buffer, and reads the rest
    /// of the argument from the socket to another place. The bytes behind the argument go to the
    /// buffer again. Thus a large value is read without a copy. [`arguments`](Self::arguments) then
    /// has an empty argument in its place. Returns false without a pending argument.
    pub fn divert(&mut self) -> bool {
        let State::Content { left, len } = self.state else { return false };
        self.spans.push(Span::Diverted { len });
        self.state = State::End { left: left - 1 };
        true
    }

    /// Returns the offset of the line end's first byte, counted from `at`. `mark` is that byte.
    fn line(
        &mut self,
        buffer: &[u8],
        mark: u8,
        limits: &Limits,
        too_long: ProtocolError,
    ) -> Result<Option<usize>, ProtocolError> {
        let rest = &buffer[self.at..];
        let window = &rest[..rest.len().min(limits.line + 1)];
        if let Some(found) = memchr(mark, &window[self.searched..]) {
            return Ok(Some(self.searched + found));
        }
        self.searched = window.len();
        if rest.len() > limits.line { Err(too_long) } else { Ok(None) }
    }

    /// Takes the line of a number: its bytes are behind a first byte, and a line end of two bytes
    /// follows.
    fn number(
        &mut self,
        buffer: &[u8],
        limits: &Limits,
        too_long: ProtocolError,
    ) -> Result<Option<Option<i64>>, ProtocolError> {
        let Some(end) = self.line(buffer, b'\r', limits, too_long)? else { return Ok(None) };
        if buffer.len() < self.at + end + 2 {
            return Ok(None);
        }
        let number = buffer.get(self.at + 1..self.at + end).and_then(parse_i64);
        self.at += end + 2;
        self.searched = 0;
        Ok(Some(number))
    }

    fn count(
        &mut self,
        buffer: &[u8],
        limits: &Limits,
        authenticated: bool,
    ) -> Result<bool, ProtocolError> {
        let too_long = ProtocolError::CountTooLong;
        let Some(count) = self.number(buffer, limits, too_long)? else { return Ok(false) };
        let count = count.ok_or(ProtocolError::Count)?;
        // A negative count is an empty request.
        let count = usize::try_from(count.max(0)).map_err(|_| ProtocolError::Count)?;
        if count > limits.arguments {
            return Err(ProtocolError::Count);
        }
        if !authenticated && count > limits.unauthenticated_arguments {
            return Err(ProtocolError::UnauthenticatedCount);
        }
        self.state = State::Header { left: count };
        Ok(true)
    }

    fn header(
        &mut self,
        buffer: &[u8],
        limits: &Limits,
        authenticated: bool,
        left: usize,
    ) -> Result<bool, ProtocolError> {
        // The first byte is checked with the whole line, so that errors do not depend on how bytes
        // arrive.
        let (at, too_long) = (self.at, ProtocolError::LengthTooLong);
        let Some(len) = self.number(buffer, limits, too_long)? else { return Ok(false) };
        if buffer[at] != b'$' {
            return Err(ProtocolError::NoBulk(buffer[at]));
        }
        let len = len.and_then(|len| usize::try_from(len).ok()).ok_or(ProtocolError::Length)?;
        if len > limits.bulk {
            return Err(ProtocolError::Length);
        }
        if !authenticated && len > limits.unauthenticated_bulk {
            return Err(ProtocolError::UnauthenticatedLength);
        }
        self.state = State::Content { left, len };
        Ok(true)
    }

    fn content(&mut self, buffer: &[u8], left: usize, len: usize) -> bool {
        if buffer.len() - self.at < len + 2 {
            return false;
        }
        self.spans.push(Span::Inside { start: self.at, len });
        self.at += len + 2;
        self.state = State::Header { left: left - 1 };
        true
    }

    fn skip_end(&mut self, buffer: &[u8], left: usize) -> bool {
        if buffer.len() < self.at + 2 {
            return false;
        }
        self.at += 2;
        self.state = State::Header { left };
        true
    }

    fn inline(&mut self, buffer: &mut [u8], limits: &Limits) -> Result<bool, ProtocolError> {
        let too_long = ProtocolError::InlineTooLong;
        let Some(end) = self.line(buffer, b'\n', limits, too_long)? else { return Ok(false) };
        let spans = &mut self.spans;
        let word = |range: std::ops::Range<usize>| {
            spans.push(Span::Inside { start: range.start, len: range.len() });
        };
        let line = &mut buffer[..end];
        words::split_in_place(line, word).map_err(|_| ProtocolError::UnbalancedQuotes)?;
        self.at = end + 1;
        self.state = State::Done;
        Ok(true)
    }
}

/// Appends a request with `arguments` to `out`, as a client sends it.
pub fn encode<T: AsRef<[u8]>>(arguments: &[T], out: &mut Vec<u8>) {
    let mut writer = Writer::new(out, Protocol::Resp2);
    writer.array(arguments.len());
    arguments.iter().for_each(|argument| writer.bulk(argument));
}

/// The arguments of a request, as ranges of the connection's buffer.
#[derive(Clone, Copy, Debug)]
pub struct RequestArguments<'a> {
    buffer: &'a [u8],
    spans: &'a [Span],
}

impl<'a> RequestArguments<'a> {
    /// Returns the argument `index`; an argument that was diverted is empty.
    pub fn get(&self, index: usize) -> Option<&'a [u8]> {
        match *self.spans.get(index)? {
            Span::Inside { start, len } => Some(&self.buffer[start..start + len]),
            Span::Diverted { .. } => Some(&[]),
        }
    }

    /// Returns the length of the argument `index` if it was diverted.
    pub fn diverted(&self, index: usize) -> Option<usize> {
        match *self.spans.get(index)? {
            Span::Inside { .. } => None,
            Span::Diverted { len } => Some(len),
        }
    }

    /// Iterates over the arguments.
    pub fn iter(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let all = *self;
        (0..all.spans.len()).filter_map(move |index| all.get(index))
    }
}

impl Arguments for RequestArguments<'_> {
    fn len(&self) -> usize {
        self.spans.len()
    }

    fn at(&self, index: usize) -> &[u8] {
        self.get(index).expect("the index is below the number of arguments")
    }
}

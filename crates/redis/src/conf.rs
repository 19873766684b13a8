//! Lines of redis.conf, and sizes of memory.
//!
//! A line is a directive: a name and arguments, with quotes as in [`words`](crate::words). Empty
//! lines and lines that begin with `#` are skipped. `include FILE` inserts the directives of
//! another file. Because this crate opens no file, the caller passes a function that reads one.

use crate::words;

/// Maximum depth of included files.
const DEPTH_MAX: usize = 16;

/// A line of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directive {
    /// Name in lower case.
    pub name: String,
    /// Arguments.
    pub arguments: Vec<Vec<u8>>,
    /// Name of the file.
    pub file: String,
    /// Number of the line, from 1.
    pub line: usize,
}

/// An error of a configuration.
#[derive(Debug, thiserror::Error)]
#[error("reading the configuration {file}, line {line}: {cause}")]
pub struct ConfError {
    /// Name of the file.
    pub file: String,
    /// Number of the line, from 1; 0 for the file as a whole.
    pub line: usize,
    /// Cause, and the next step.
    pub cause: Cause,
}

/// Causes of a [`ConfError`].
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// Quotes are not balanced.
    #[error("unbalanced quotes; close each quote at the end of its word")]
    Quotes,
    /// The name of the directive is no text.
    #[error("the name of the directive is not UTF-8; correct the line")]
    Name,
    /// `include` without one file.
    #[error("include needs the name of one file; correct the line")]
    Include,
    /// Files include each other without end.
    #[error("more than 16 files include each other; remove the circle")]
    Depth,
    /// A file cannot be read.
    #[error("the file cannot be read: {0}; check its name and its rights")]
    Read(#[source] std::io::Error),
}

/// Reads the file `name` and all files that it includes. `load` returns the content of a file.
///
/// # Errors
///
/// The first line that is wrong.
pub fn read(
    name: &str,
    load: &mut dyn FnMut(&str) -> std::io::Result<Vec<u8>>,
) -> Result<Vec<Directive>, ConfError> {
    let mut directives = Vec::new();
    read_file(name, load, 0, &mut directives)?;
    Ok(directives)
}

fn read_file(
    file: &str,
    load: &mut dyn FnMut(&str) -> std::io::Result<Vec<u8>>,
    depth: usize,
    directives: &mut Vec<Directive>,
) -> Result<(), ConfError> {
    let error = |line, cause| ConfError { file: file.to_owned(), line, cause };
    let text = load(file).map_err(|cause| error(0, Cause::Read(cause)))?;
    for (index, text) in text.split(|&byte| byte == b'\n').enumerate() {
        let line = index + 1;
        let Some(directive) = parse_line(text, file, line)? else { continue };
        if directive.name != "include" {
            directives.push(directive);
            continue;
        }
        let [included] = &directive.arguments[..] else { return Err(error(line, Cause::Include)) };
        let included = str::from_utf8(included).map_err(|_| error(line, Cause::Include))?;
        if depth == DEPTH_MAX {
            return Err(error(line, Cause::Depth));
        }
        read_file(included, load, depth + 1, directives)?;
    }
    Ok(())
}

/// Parses a line. Returns `None` for an empty line and a comment.
///
/// # Errors
///
/// [`ConfError`] names `file` and `line`.
pub fn parse_line(text: &[u8], file: &str, line: usize) -> Result<Option<Directive>, ConfError> {
    let error = |cause| ConfError { file: file.to_owned(), line, cause };
    let text = text.trim_ascii();
    if text.is_empty() || text[0] == b'#' {
        return Ok(None);
    }
    let mut words = words::split(text).map_err(|_| error(Cause::Quotes))?;
    if words.is_empty() {
        return Ok(None);
    }
    let name = String::from_utf8(words.remove(0)).map_err(|_| error(Cause::Name))?;
    let name = name.to_ascii_lowercase();
    Ok(Some(Directive { name, arguments: words, file: file.to_owned(), line }))
}

/// Reads a size of memory: a number of bytes, with a unit in any case.
///
/// `k`, `m` and `g` are powers of 1000; `kb`, `mb` and `gb` are powers of 1024; `b` is a byte.
pub fn parse_memory(text: &[u8]) -> Option<u64> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (number, unit) = text.split_at(digits);
    let unit: u64 = match unit.to_ascii_lowercase().as_slice() {
        b"" | b"b" => 1,
        b"k" => 1000,
        b"kb" => 1 << 10,
        b"m" => 1_000_000,
        b"mb" => 1 << 20,
        b"g" => 1_000_000_000,
        b"gb" => 1 << 30,
        _ => return None,
    };
    str::from_utf8(number).ok()?.parse::<u64>().ok()?.checked_mul(unit)
}

/// Reads `yes` or `no`, in any case.
pub fn parse_yes_no(text: &[u8]) -> Option<bool> {
    match () {
        () if text.eq_ignore_ascii_case(b"yes") => Some(true),
        () if text.eq_ignore_ascii_case(b"no") => Some(false),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use super::*;

    fn read_from(files: &[(&str, &str)]) -> Result<Vec<Directive>, ConfError> {
        read(files[0].0, &mut |name| {
            let file = files.iter().find(|file| file.0 == name);
            file.map(|file| file.1.into()).ok_or_else(|| Error::from(ErrorKind::NotFound))
        })
    }

    #[test]
    fn directives_have_arguments() {
        let text =
            "# comment\n\n  PORT 6379\r\nsave \"\"\nuser a on >p \"~x y\"\n\tbind 127.0.0.1 ::1";
        let directives = read_from(&[("redis.conf", text)]).unwrap();
        let lines: Vec<_> = directives
            .iter()
            .map(|d| {
                let words: Vec<_> =
                    d.arguments.iter().map(|a| String::from_utf8_lossy(a)).collect();
                format!("{}:{} {}", d.line, d.name, words.join(","))
            })
            .collect();
        assert_eq!(
            lines,
            ["3:port 6379", "4:save ", "5:user a,on,>p,~x y", "6:bind 127.0.0.1,::1"]
        );
    }

    #[test]
    fn included_files_are_inserted() {
        let files = [("a", "port 1\ninclude b\nport 3"), ("b", "port 2")];
        let directives = read_from(&files).unwrap();
        let ports: Vec<_> =
            directives.iter().map(|d| (d.file.as_str(), &d.arguments[0][..])).collect();
        assert_eq!(ports, [("a", &b"1"[..]), ("b", b"2"), ("a", b"3")]);
    }

    #[test]
    fn wrong_lines_are_named() {
        for (text, line, part) in [
            ("port 1\nsave \"a", 2, "unbalanced"),
            ("include", 1, "one file"),
            ("include a", 1, "circle"),
            ("\ninclude nope", 0, "cannot be read"),
        ] {
            let error = read_from(&[("a", text)]).unwrap_err();
            assert_eq!(error.line, line, "{error}");
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("0", 0),
            ("100", 100),
            ("5b", 5),
            ("1k", 1000),
            ("1kb", 1024),
            ("2M", 2_000_000),
            ("64mb", 64 << 20),
            ("1G", 1_000_000_000),
            ("1Gb", 1 << 30),
        ] {
            assert_eq!(parse_memory(text.as_bytes()), Some(bytes), "{text}");
        }
        for text in ["", "k", "-1", "+1", "1.5gb", "1 gb", "1tb", "99999999999gb", "1e3"] {
            assert_eq!(parse_memory(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn switches_are_yes_or_no() {
        assert_eq!(parse_yes_no(b"YES"), Some(true));
        assert_eq!(parse_yes_no(b"no"), Some(false));
        assert_eq!(parse_yes_no(b"1"), None);
    }
}

//! Splits a line into words with quotes, as inline commands, redis.conf and ACL files have them.
//!
//! Blanks separate words. Within `"..."`, `\n \r \t \b \a \xHH` stand for bytes, and `\` makes any
//! other byte literal. Within `'...'` only `\'` is special. A closing quote ends its word. A zero
//! byte outside of quotes ends the line.

use std::ops::Range;

/// A quote has no end, or a closing quote is not the end of its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("splitting a line into words: unbalanced quotes; close each quote at the end of its word")]
pub struct Unbalanced;

/// Returns whether `byte` is a blank, as `isspace` of C has them.
fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t'..=b'\r')
}

/// Splits `line` and writes the content of each word over the line itself.
///
/// The ranges of the words are added to `words`. No word is longer than its quoted form, so words
/// do not overlap.
///
/// # Errors
///
/// [`Unbalanced`]; the content of `line` is then undefined.
pub fn split_in_place(
    line: &mut [u8],
    mut word: impl FnMut(Range<usize>),
) -> Result<(), Unbalanced> {
    let mut at = 0;
    loop {
        while at < line.len() && is_blank(line[at]) {
            at += 1;
        }
        if at == line.len() || line[at] == 0 {
            return Ok(());
        }
        let start = at;
        let len = take_word(line, &mut at)?;
        word(start..start + len);
    }
}

/// Moves the content of the word at `at` to the word's start. Returns the length of the content.
fn take_word(line: &mut [u8], at: &mut usize) -> Result<usize, Unbalanced> {
    let start = *at;
    let mut end = start;
    while let Some(&byte) = line.get(*at) {
        *at += 1;
        match byte {
            b' ' | b'\n' | b'\r' | b'\t' => break,
            0 => {
                *at -= 1;
                break;
            }
            b'"' | b'\'' => {
                take_quoted(line, at, &mut end, byte)?;
                break;
            }
            _ => {
                line[end] = byte;
                end += 1;
            }
        }
    }
    Ok(end - start)
}

/// Moves the content of a quoted part to `end`.
fn take_quoted(
    line: &mut [u8],
    at: &mut usize,
    end: &mut usize,
    quote: u8,
) -> Result<(), Unbalanced> {
    loop {
        let (byte, used) = match line[*at..] {
            [] => return Err(Unbalanced),
            [closing, ..] if closing == quote => {
                *at += 1;
                let next = line.get(*at).copied();
                return next
                    .is_none_or(|byte| is_blank(byte) || byte == 0)
                    .then_some(())
                    .ok_or(Unbalanced);
            }
            [b'\\', b'\'', ..] if quote == b'\'' => (b'\'', 2),
            [b'\\', b'x', high, low, ..]
                if quote == b'"' && high.is_ascii_hexdigit() && low.is_ascii_hexdigit() =>
            {
                (hex(high) << 4 | hex(low), 4)
            }
            [b'\\', escaped, ..] if quote == b'"' => (unescape(escaped), 2),
            [byte, ..] => (byte, 1),
        };
        line[*end] = byte;
        *end += 1;
        *at += used;
    }
}

fn hex(digit: u8) -> u8 {
    char::from(digit).to_digit(16).unwrap_or_default() as u8
}

fn unescape(byte: u8) -> u8 {
    match byte {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 8,
        b'a' => 7,
        other => other,
    }
}

/// Splits `line` into words of their own.
///
/// # Errors
///
/// [`Unbalanced`].
pub fn split(line: &[u8]) -> Result<Vec<Vec<u8>>, Unbalanced> {
    let mut line = line.to_vec();
    let mut ranges = Vec::new();
    split_in_place(&mut line, |range| ranges.push(range))?;
    Ok(ranges.into_iter().map(|range| line[range].to_vec()).collect())
}

/// Appends `word` in double quotes to `out`, so that [`split`] returns `word`.
pub fn quote(word: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    for &byte in word {
        match byte {
            b'"' | b'\\' => out.extend([b'\\', byte]),
            b'\n' => out.extend(b"\\n"),
            b'\r' => out.extend(b"\\r"),
            b'\t' => out.extend(b"\\t"),
            8 => out.extend(b"\\b"),
            7 => out.extend(b"\\a"),
            b' '..=b'~' => out.push(byte),
            _ => {
                let digit = |value: u8| b"0123456789abcdef"[usize::from(value)];
                out.extend([b'\\', b'x', digit(byte >> 4), digit(byte & 15)]);
            }
        }
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::num::u8::ANY;

    use super::*;

    fn words(line: &str) -> Vec<String> {
        let words = split(line.as_bytes()).unwrap();
        words.into_iter().map(|word| String::from_utf8(word).unwrap()).collect()
    }

    #[test]
    fn line_is_split_at_blanks() {
        assert_eq!(words("  set a\tb \r"), ["set", "a", "b"]);
        assert_eq!(words(""), [""; 0]);
        assert_eq!(words("ping\0abc"), ["ping"]);
        assert_eq!(words("\0abc"), [""; 0]);
        assert_eq!(words("\x0ba\x0bb"), ["a\x0bb"]);
    }

    #[test]
    fn quotes_keep_blanks_and_escapes() {
        assert_eq!(words(r#"a "x y" 'p q'"#), ["a", "x y", "p q"]);
        assert_eq!(words(r#""\x41\n\q\"" '\'\n'"#), ["A\nq\"", "'\\n"]);
        assert_eq!(words(r#"pre"fix" """#), ["prefix", ""]);
        assert_eq!(words(r#""\x4" "\xzz""#), ["x4", "xzz"]);
        assert_eq!(split(b"\"\\xff\"").unwrap(), [vec![0xff]]);
    }

    #[test]
    fn unbalanced_quotes_are_refused() {
        for line in ["\"abc", "'abc", "\"abc\"d", "'a'b", "\"abc\\\"", "\"abc\\"] {
            assert_eq!(split(line.as_bytes()), Err(Unbalanced), "{line:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn quoted_words_are_split_again(words in vec(vec(ANY, 0..20), 0..5)) {
            let mut line = Vec::new();
            for word in &words {
                quote(word, &mut line);
                line.push(b' ');
            }
            assert_eq!(split(&line).unwrap(), words);
        }
    }
}

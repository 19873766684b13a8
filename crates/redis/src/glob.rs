//! Patterns of KEYS, SCAN, PSUBSCRIBE, CONFIG GET and ACL rules.
//!
//! `*` matches any bytes, `?` one byte, `[a-z]` and `[^a-z]` a byte by class, and `\` makes the
//! next byte literal. A pattern and a text take time of at most the product of their lengths:
//! because a later `*` makes all choices of an earlier one irrelevant, the matcher returns to the
//! latest `*` only.
//!
//! In one case the result is not that of Redis: `*` matches the empty text here. Redis has
//! exceptions for the pattern `*` in KEYS, SCAN and ACL rules instead, and none in PSUBSCRIBE.

/// Returns whether `pattern` matches all of `text`.
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    Matcher { pattern, fold: false }.run(text)
}

/// Returns whether `pattern` matches all of `text`, without regard to the case of ASCII letters.
pub fn matches_in_any_case(pattern: &[u8], text: &[u8]) -> bool {
    Matcher { pattern, fold: true }.run(text)
}

struct Matcher<'a> {
    pattern: &'a [u8],
    fold: bool,
}

impl Matcher<'_> {
    fn run(&self, text: &[u8]) -> bool {
        let (mut at, mut pos) = (0, 0);
        // Where to go on if a comparison fails: behind the latest `*`, and the text it ends at.
        let mut retry = None;
        loop {
            if self.pattern.get(at) == Some(&b'*') {
                at += 1;
                if at == self.pattern.len() {
                    return true;
                }
                retry = Some((at, pos));
                continue;
            }
            if pos == text.len() {
                return at == self.pattern.len();
            }
            if at < self.pattern.len()
                && let Some(next) = self.one(at, text[pos])
            {
                (at, pos) = (next, pos + 1);
                continue;
            }
            let Some((behind, end)) = retry else { return false };
            (at, pos) = (behind, end + 1);
            retry = Some((at, pos));
        }
    }

    fn fold(&self, byte: u8) -> u8 {
        if self.fold { byte.to_ascii_lowercase() } else { byte }
    }

    /// Matches one byte with the part of the pattern at `at`. Returns where the next part begins.
    fn one(&self, at: usize, byte: u8) -> Option<usize> {
        let rest = &self.pattern[at..];
        match *rest {
            [b'?', ..] => Some(at + 1),
            [b'[', ..] => self.class(at + 1, byte),
            [b'\\', literal, ..] => (self.fold(literal) == self.fold(byte)).then_some(at + 2),
            [literal, ..] => (self.fold(literal) == self.fold(byte)).then_some(at + 1),
            [] => None,
        }
    }

    /// Matches a byte with the class whose content begins at `at`. The end of the pattern ends a
    /// class too.
    fn class(&self, mut at: usize, byte: u8) -> Option<usize> {
        let byte = self.fold(byte);
        let negated = self.pattern.get(at) == Some(&b'^');
        at += usize::from(negated);
        let mut is_in = false;
        loop {
            match self.pattern[at..] {
                [] => break,
                [b']', ..] => {
                    at += 1;
                    break;
                }
                [b'\\', literal, ..] => {
                    is_in |= self.fold(literal) == byte;
                    at += 2;
                }
                [first, b'-', last, ..] => {
                    let (low, high) = (self.fold(first.min(last)), self.fold(first.max(last)));
                    is_in |= (low..=high).contains(&byte);
                    at += 3;
                }
                [literal, ..] => {
                    is_in |= self.fold(literal) == byte;
                    at += 1;
                }
            }
        }
        (is_in != negated).then_some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matched(pattern: &str, text: &str) -> bool {
        matches(pattern.as_bytes(), text.as_bytes())
    }

    #[test]
    fn wildcards_match() {
        for (pattern, text) in [
            ("", ""),
            ("*", ""),
            ("**", ""),
            ("*", "abc"),
            ("a*c", "abbbc"),
            ("a*b*c", "a1b2bc"),
            ("*ab", "aaab"),
            ("?", "x"),
            ("h?llo", "hello"),
            ("h[ae]llo", "hallo"),
            ("h[^e]llo", "hallo"),
            ("h[a-b]llo", "hbllo"),
            ("h[b-a]llo", "hallo"),
            (r"h\*llo", "h*llo"),
            (r"[\]]", "]"),
            (r"[\^a]", "^"),
            ("[a-", "-"),
            ("[abc", "c"),
            ("[^", "x"),
            ("\\", "\\"),
            ("[]-a]", "-a]x".get(3..).unwrap_or("")),
        ] {
            assert_eq!(matched(pattern, text), pattern != "[]-a]", "{pattern:?} {text:?}");
        }
    }

    #[test]
    fn other_texts_do_not_match() {
        for (pattern, text) in [
            ("", "a"),
            ("?", ""),
            ("a", "A"),
            ("a*c", "abbb"),
            ("h[^e]llo", "hello"),
            ("h[ae]llo", "hillo"),
            ("[", "["),
            ("[]", "x"),
            ("abc", "ab"),
            ("ab", "abc"),
            (r"h\?llo", "hello"),
        ] {
            assert!(!matched(pattern, text), "{pattern:?} {text:?}");
        }
    }

    #[test]
    fn case_is_ignored_on_demand() {
        assert!(matches_in_any_case(b"MaxMem*", b"maxmemory"));
        assert!(matches_in_any_case(b"[A-C]x", b"bX"));
        assert!(!matches(b"[A-C]x", b"bx"));
    }

    #[test]
    fn many_stars_take_bounded_time() {
        let pattern = "a*".repeat(2000) + "b";
        assert!(!matched(&pattern, &"a".repeat(20_000)));
    }

    /// A matcher that tries every split, for short inputs.
    fn slow(pattern: &[u8], text: &[u8]) -> bool {
        let one = Matcher { pattern, fold: false };
        match pattern.first() {
            None => text.is_empty(),
            Some(b'*') => (0..=text.len()).any(|skip| slow(&pattern[1..], &text[skip..])),
            Some(_) => {
                let next = text.first().and_then(|&byte| one.one(0, byte));
                next.is_some_and(|next| slow(&pattern[next..], &text[1..]))
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn matcher_equals_the_exhaustive_one(
            pattern in r"[ab*?\[\]^\-\\]{0,10}",
            text in "[ab-]{0,10}",
        ) {
            let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
            assert_eq!(matches(pattern, text), slow(pattern, text));
        }
    }
}

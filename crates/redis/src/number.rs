//! Integers and floating-point numbers as Redis reads and prints them.
//!
//! | number | read | printed |
//! | --- | --- | --- |
//! | `i64` | digits with an optional `-`: no blank, no `+`, no leading zero | decimal |
//! | `f64` | as C's `strtod` without hexadecimal digits, no blank, no NaN, no overflow | `%.17g` |
//! | [`Extended`] | the same, rounded to 64 bits of mantissa | `%.17Lf` without trailing zeros |
//!
//! INCRBYFLOAT computes with [`Extended`], because Redis computes with the `long double` of x86-64.
//! An `f64` would make `10.5 + 0.1` print as `10.59999999999999964`.

mod extended;

use std::io::Write;

pub use extended::Extended;

/// A text that is no number of the wanted kind, or a result out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NumberError {
    /// The text is no `i64`.
    #[error("ERR value is not an integer or out of range")]
    Integer,
    /// The text is no floating-point number.
    #[error("ERR value is not a valid float")]
    Float,
    /// The sum is infinite.
    #[error("ERR increment would produce NaN or Infinity")]
    Sum,
}

/// Reads an integer. Only the text that printing the integer gives is read.
pub fn parse_i64(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    match digits {
        [b'0'] if !negative => return Some(0),
        [b'1'..=b'9', ..] if digits.len() <= 19 => {}
        _ => return None,
    }
    let mut value: u64 = 0;
    for &digit in digits {
        if !digit.is_ascii_digit() {
            return None;
        }
        // 19 digits are below 2^64.
        value = value * 10 + u64::from(digit - b'0');
    }
    match negative {
        true => 0_i64.checked_sub_unsigned(value),
        false => i64::try_from(value).ok(),
    }
}

/// Maximum bytes of a printed `i64`.
pub const I64_BYTES: usize = 20;

/// Prints `value` to the end of `space`, and returns the text.
pub fn format_i64(value: i64, space: &mut [u8; I64_BYTES]) -> &[u8] {
    let (mut rest, mut at) = (value.unsigned_abs(), I64_BYTES);
    loop {
        at -= 1;
        space[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    if value < 0 {
        at -= 1;
        space[at] = b'-';
    }
    &space[at..]
}

/// Appends `value` in decimal to `out`.
pub fn write_i64(value: i64, out: &mut Vec<u8>) {
    out.extend_from_slice(format_i64(value, &mut [0; I64_BYTES]));
}

/// Reads a floating-point number. Infinities have the names `inf` and `infinity`.
pub fn parse_f64(text: &[u8]) -> Option<f64> {
    let value: f64 = std::str::from_utf8(text).ok()?.parse().ok()?;
    let names_infinity = text.iter().any(|byte| byte.eq_ignore_ascii_case(&b'n'));
    let is_zero = value == 0.0 && has_nonzero_digit(text);
    let overflows = value.is_infinite() && !names_infinity;
    (!value.is_nan() && !overflows && !is_zero).then_some(value)
}

fn has_nonzero_digit(text: &[u8]) -> bool {
    let mantissa = text.iter().take_while(|byte| !byte.eq_ignore_ascii_case(&b'e'));
    mantissa.into_iter().any(|byte| (b'1'..=b'9').contains(byte))
}

/// Appends `value` to `out` as `%.17g` of C prints it.
pub fn write_f64(value: f64, out: &mut Vec<u8>) {
    if !value.is_finite() {
        let text = if value.is_nan() {
            "nan"
        } else if value > 0.0 {
            "inf"
        } else {
            "-inf"
        };
        return out.extend(text.bytes());
    }
    // One digit before the point and 16 behind it, correctly rounded: the longest is
    // `-1.2345678901234567e-308`.
    let mut space = [0; 32];
    let mut rest = &mut space[..];
    write!(rest, "{value:.16e}").expect("the space suffices");
    let used = 32 - rest.len();
    let text = &space[..used];
    let at = text.iter().position(|&byte| byte == b'e').expect("the form has an exponent");
    let exponent = parse_i64(&text[at + 1..]).expect("the exponent is a number");
    let (sign, digits) = text[..at].split_at(usize::from(text[0] == b'-'));
    out.extend(sign);
    let mut all = [0; 17];
    all[0] = digits[0];
    all[1..].copy_from_slice(&digits[2..]);
    let kept = all.iter().rposition(|&digit| digit != b'0').map_or(1, |last| last + 1);
    write_digits(&all[..kept], exponent, out);
}

/// Appends digits whose first one has the weight 10^`exponent`, with a point where `%g` has it.
fn write_digits(digits: &[u8], exponent: i64, out: &mut Vec<u8>) {
    match exponent {
        0..=16 => {
            let whole = exponent as usize + 1;
            out.extend(digits.iter().take(whole));
            out.extend(std::iter::repeat_n(b'0', whole.saturating_sub(digits.len())));
            if let Some(fraction @ [_, ..]) = digits.get(whole..) {
                out.push(b'.');
                out.extend(fraction);
            }
        }
        -4..0 => {
            out.extend(b"0.");
            out.extend(std::iter::repeat_n(b'0', exponent.unsigned_abs() as usize - 1));
            out.extend(digits);
        }
        _ => {
            out.push(digits[0]);
            if digits.len() > 1 {
                out.push(b'.');
                out.extend(&digits[1..]);
            }
            out.extend([b'e', if exponent < 0 { b'-' } else { b'+' }]);
            if exponent.unsigned_abs() < 10 {
                out.push(b'0');
            }
            write_i64(exponent.abs(), out);
        }
    }
}

/// Appends the sum of two numbers to `out`, as INCRBYFLOAT prints it.
///
/// # Errors
///
/// [`NumberError::Float`] if a text is no number, [`NumberError::Sum`] if the sum is infinite.
pub fn add_floats(old: &[u8], increment: &[u8], out: &mut Vec<u8>) -> Result<(), NumberError> {
    let parse = |text| Extended::parse(text).ok_or(NumberError::Float);
    let sum = parse(old)?.plus(parse(increment)?).ok_or(NumberError::Sum)?;
    sum.write(out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_canonical_integers_are_read() {
        for value in [0, 1, -1, 10, i64::MAX, i64::MIN, 1_000_000_007, -99] {
            assert_eq!(parse_i64(value.to_string().as_bytes()), Some(value));
            let mut out = Vec::new();
            write_i64(value, &mut out);
            assert_eq!(out, value.to_string().into_bytes());
        }
        for text in [
            "",
            "-",
            "-0",
            "00",
            "01",
            "+1",
            " 1",
            "1 ",
            "1a",
            "0x1",
            "1.0",
            "9223372036854775808",
            "-9223372036854775809",
            "99999999999999999999",
            "1\0",
        ] {
            assert_eq!(parse_i64(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn floats_are_read_as_by_strtod() {
        for (text, value) in [
            ("1", 1.0),
            ("-1.5", -1.5),
            ("+1", 1.0),
            ("1e5", 1e5),
            (".5", 0.5),
            ("1.", 1.0),
            ("inf", f64::INFINITY),
            ("-Infinity", f64::NEG_INFINITY),
            ("0e999", 0.0),
        ] {
            assert_eq!(parse_f64(text.as_bytes()), Some(value), "{text}");
        }
        for text in ["", " 1", "1 ", "nan", "1e999", "1e-999", "1a", "--1", "0x1"] {
            assert_eq!(parse_f64(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn floats_are_printed_as_by_printf() {
        for (value, text) in [
            (0.0, "0"),
            (-0.0, "-0"),
            (1.0, "1"),
            (0.1, "0.10000000000000001"),
            (100.0, "100"),
            (1.5e300, "1.5000000000000001e+300"),
            (1e16, "10000000000000000"),
            (1e17, "1e+17"),
            (1e-4, "0.0001"),
            (1e-5, "1.0000000000000001e-05"),
            (-2.5, "-2.5"),
            (123456789.125, "123456789.125"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
            (f64::NAN, "nan"),
            (5e-324, "4.9406564584124654e-324"),
            (3.0e-10, "3e-10"),
        ] {
            let mut out = Vec::new();
            write_f64(value, &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), text);
        }
    }

    #[test]
    fn sums_of_floats_are_those_of_a_long_double() {
        for (old, increment, sum) in [
            ("10.50", "0.1", "10.6"),
            ("5.0e3", "2.0e2", "5200"),
            ("0.1", "0.2", "0.3"),
            ("1.5", "1.5", "3"),
            ("17179869184", "1.5", "17179869185.5"),
            ("3", "-3", "0"),
            ("0.02439024390243902", "-0.024390243902439025", "0"),
            ("1e18", "0.1", "1000000000000000000.125"),
            ("-1", "0.75", "-0.25"),
        ] {
            let mut out = Vec::new();
            add_floats(old.as_bytes(), increment.as_bytes(), &mut out).unwrap();
            assert_eq!(String::from_utf8(out).unwrap(), sum, "{old} + {increment}");
        }
        let add = |a: &str, b: &str| add_floats(a.as_bytes(), b.as_bytes(), &mut Vec::new());
        assert_eq!(add("x", "1"), Err(NumberError::Float));
        assert_eq!(add("1", "nan"), Err(NumberError::Float));
        assert_eq!(add("1", "inf"), Err(NumberError::Sum));
        assert_eq!(add("1.1e4932", "1.1e4932"), Err(NumberError::Sum));
    }

    proptest::proptest! {
        #[test]
        fn printed_floats_are_read_again(bits in proptest::num::u64::ANY) {
            let value = f64::from_bits(bits);
            let mut out = Vec::new();
            write_f64(value, &mut out);
            if !value.is_nan() {
                assert_eq!(parse_f64(&out).map(f64::to_bits), Some(bits));
            }
        }
    }
}

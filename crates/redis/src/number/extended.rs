//! Floating-point numbers with a mantissa of 64 bits, as the `long double` of x86-64.
//!
//! Parsing and printing are exact up to the one rounding that each has. Numbers below the normal
//! range keep 64 bits here, where the processor keeps fewer; all of them print as 0.

use super::has_nonzero_digit;

/// A number `±mantissa × 2^exponent`, or an infinity.
///
/// The highest bit of the mantissa is set, except in zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extended {
    negative: bool,
    mantissa: u64,
    exponent: i32,
}

/// Exponent of infinities.
const INFINITE: i32 = i32::MAX;
/// Largest exponent of a finite number.
const EXPONENT_MAX: i32 = 16_383 - 63;
/// Exponent of the least number that the processor tells from zero.
const LEAST: i32 = -16_445;
/// Maximum bytes of a text, as in Redis.
const TEXT_MAX: usize = 5 * 1024 - 1;
/// Digits of a text that count. The rest decides ties only.
const DIGITS: usize = 800;
/// Maximum distance of the decimal point that can matter for a text of `TEXT_MAX` bytes.
const SCALE_MAX: i64 = 6_000;

impl Extended {
    /// Reads a number: decimal, or `inf` and `infinity`. Overflow and underflow to zero are errors.
    pub fn parse(text: &[u8]) -> Option<Self> {
        if text.len() > TEXT_MAX {
            return None;
        }
        let (negative, rest) = match text {
            [b'-', rest @ ..] => (true, rest),
            [b'+', rest @ ..] => (false, rest),
            rest => (false, rest),
        };
        if rest.eq_ignore_ascii_case(b"inf") || rest.eq_ignore_ascii_case(b"infinity") {
            return Some(Self { negative, mantissa: 1 << 63, exponent: INFINITE });
        }
        let decimal = Decimal::parse(rest)?;
        if !has_nonzero_digit(rest) {
            return Some(Self { negative, mantissa: 0, exponent: 0 });
        }
        let value = decimal.round(negative)?;
        let top = value.exponent + 64;
        (value.exponent <= EXPONENT_MAX && top > LEAST).then_some(value)
    }

    /// Adds two numbers. Returns `None` if the sum is infinite or no number.
    pub fn plus(self, other: Self) -> Option<Self> {
        if self.exponent == INFINITE || other.exponent == INFINITE {
            return None;
        }
        if self.mantissa == 0 || other.mantissa == 0 {
            return Some(if other.mantissa == 0 { self } else { other });
        }
        let larger = (self.exponent, self.mantissa) >= (other.exponent, other.mantissa);
        let (big, small) = if larger { (self, other) } else { (other, self) };
        // 62 bits below the mantissa, and one above it for the carry.
        const GUARD: u32 = 62;
        let wide = |value: Self| u128::from(value.mantissa) << GUARD;
        let distance = (big.exponent - small.exponent).unsigned_abs();
        let moved = wide(small).checked_shr(distance).unwrap_or(0);
        let lost = moved.checked_shl(distance).filter(|_| distance < 128) != Some(wide(small));
        let sum = match big.negative == small.negative {
            true => wide(big) + moved,
            false => wide(big) - moved - u128::from(lost),
        };
        let exponent = big.exponent - GUARD as i32;
        if sum == 0 {
            return Some(Self { negative: false, mantissa: 0, exponent: 0 });
        }
        let sum = Self::rounded(big.negative, sum, exponent, lost);
        (sum.exponent <= EXPONENT_MAX).then_some(sum)
    }

    /// Rounds `value × 2^exponent` to the nearest number, ties to even. `more` means that the exact
    /// value is above `value`, by less than one.
    fn rounded(negative: bool, value: u128, exponent: i32, more: bool) -> Self {
        let zeros = value.leading_zeros();
        let value = value << zeros;
        let exponent = exponent - zeros as i32 + 64;
        let (mantissa, rest) = ((value >> 64) as u64, value as u64);
        const HALF: u64 = 1 << 63;
        let up = rest > HALF || rest == HALF && (more || mantissa & 1 == 1);
        match mantissa.checked_add(up.into()) {
            Some(mantissa) => Self { negative, mantissa, exponent },
            None => Self { negative, mantissa: HALF, exponent: exponent + 1 },
        }
    }

    /// Appends the number to `out`: up to 17 digits behind the point, no trailing zeros, and no
    /// sign of a zero.
    pub fn write(self, out: &mut Vec<u8>) {
        if self.exponent == INFINITE {
            return out.extend(if self.negative { &b"-inf"[..] } else { b"inf" });
        }
        const SCALE: u128 = 100_000_000_000_000_000;
        let (whole, fraction) = match self.exponent {
            exponent @ 0.. => (Big::new(self.mantissa).shifted(exponent as usize), 0),
            exponent => {
                let scaled = half_even(u128::from(self.mantissa) * SCALE, exponent.unsigned_abs());
                (Big::wide(scaled / SCALE), (scaled % SCALE) as u64)
            }
        };
        if self.negative && !(whole.is_zero() && fraction == 0) {
            out.push(b'-');
        }
        whole.write(out);
        if fraction != 0 {
            let digits = format!(".{fraction:017}");
            out.extend(digits.trim_end_matches('0').bytes());
        }
    }
}

/// Divides by 2^`shift`, and rounds ties to even.
fn half_even(value: u128, shift: u32) -> u128 {
    if shift > 127 {
        return 0;
    }
    let (quotient, rest, half) = (value >> shift, value & ((1 << shift) - 1), 1 << (shift - 1));
    quotient + u128::from(rest > half || rest == half && quotient & 1 == 1)
}

/// Scales for which the powers of five fit: 5^27 times a mantissa has at most 127 bits, and a
/// dividend of 127 bits over 5^25 has more than 66 bits.
const SMALL_FACTOR: i64 = 27;
const SMALL_DIVISOR: i64 = -25;

/// A decimal number: an integer times a power of ten.
struct Decimal {
    digits: Big,
    scale: i64,
}

impl Decimal {
    /// Reads digits with an optional point and an optional exponent.
    fn parse(text: &[u8]) -> Option<Self> {
        let end = text.iter().position(|byte| byte.eq_ignore_ascii_case(&b'e'));
        let (mantissa, exponent) = text.split_at(end.unwrap_or(text.len()));
        let mut scale = if exponent.is_empty() { 0 } else { parse_exponent(&exponent[1..])? };
        let (mut digits, mut kept, mut seen, mut point) = (Big::new(0), 0, false, false);
        let mut more = false;
        for &byte in mantissa {
            match byte {
                b'.' if !point => point = true,
                b'0'..=b'9' => {
                    seen = true;
                    scale -= i64::from(point);
                    if kept < DIGITS {
                        digits.multiply_add(10, u64::from(byte - b'0'));
                        kept += usize::from(!digits.is_zero());
                    } else {
                        scale += 1;
                        more |= byte != b'0';
                    }
                }
                _ => return None,
            }
        }
        if more {
            // One digit stands for all that do not count, so that they still break a tie.
            digits.multiply_add(10, 1);
            scale -= 1;
        }
        seen.then_some(Self { digits, scale })
    }

    /// Returns the nearest number, or `None` far out of range.
    fn round(self, negative: bool) -> Option<Extended> {
        if self.digits.bits() <= 64 && (SMALL_DIVISOR..=SMALL_FACTOR).contains(&self.scale) {
            return Some(self.round_small(negative));
        }
        (self.scale.abs() <= SCALE_MAX).then(|| self.round_large(negative))
    }

    /// Computes with integers of the machine, which suffice for usual numbers.
    fn round_small(self, negative: bool) -> Extended {
        let digits = u128::from(self.digits.limbs[0]);
        let power = 5_u128.pow(self.scale.unsigned_abs() as u32);
        let scale = self.scale as i32;
        if scale >= 0 {
            return Extended::rounded(negative, digits * power, scale, false);
        }
        let shift = digits.leading_zeros() - 1;
        let dividend = digits << shift;
        let (quotient, rest) = (dividend / power, dividend % power);
        Extended::rounded(negative, quotient, scale - shift as i32, rest != 0)
    }

    fn round_large(mut self, negative: bool) -> Extended {
        // 10^n is 5^n × 2^n, so that only powers of five need large integers.
        let mut power = Big::new(1);
        let base = if self.scale < 0 { &mut power } else { &mut self.digits };
        (0..self.scale.unsigned_abs()).for_each(|_| base.multiply_add(5, 0));
        let scale = self.scale as i32;
        // The quotient gets 66 or 67 bits: those of the mantissa, and at least two more.
        let shift = (power.bits() + 66).saturating_sub(self.digits.bits());
        let mut rest = self.digits.shifted(shift);
        let surplus = rest.bits().saturating_sub(power.bits() + 66);
        let mut quotient = 0_u128;
        for bit in (0..=66 + 1).rev() {
            let part = power.shifted(surplus + bit);
            quotient <<= 1;
            if rest.subtract(&part) {
                quotient |= 1;
            }
        }
        let exponent = scale - shift as i32 + surplus as i32;
        // The quotient has bits below its last one, so a rest cannot be mistaken for a tie.
        let value = quotient << 1 | u128::from(!rest.is_zero());
        Extended::rounded(negative, value, exponent - 1, false)
    }
}

/// Reads the exponent of a decimal number. Exponents out of any range stay out of range.
fn parse_exponent(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] => (false, digits),
        digits => (false, digits),
    };
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let far = 10 * SCALE_MAX;
    let value = digits.iter().fold(0, |value, digit| far.min(value * 10 + i64::from(digit - b'0')));
    Some(if negative { -value } else { value })
}

/// Limbs of an integer. The largest one is 800 digits times 5^6000, or a quotient's dividend.
const LIMBS: usize = 320;

/// An integer without sign.
#[derive(Clone)]
struct Big {
    limbs: [u64; LIMBS],
    /// Limbs in use; the last one is not zero.
    len: usize,
}

impl Big {
    fn new(value: u64) -> Self {
        Self::wide(value.into())
    }

    fn wide(value: u128) -> Self {
        let mut limbs = [0; LIMBS];
        (limbs[0], limbs[1]) = (value as u64, (value >> 64) as u64);
        let mut big = Self { limbs, len: 2 };
        big.trim();
        big
    }

    fn trim(&mut self) {
        while self.len > 0 && self.limbs[self.len - 1] == 0 {
            self.len -= 1;
        }
    }

    fn is_zero(&self) -> bool {
        self.len == 0
    }

    fn bits(&self) -> usize {
        match self.len {
            0 => 0,
            len => len * 64 - self.limbs[len - 1].leading_zeros() as usize,
        }
    }

    fn multiply_add(&mut self, factor: u64, add: u64) {
        let mut carry = u128::from(add);
        for limb in &mut self.limbs[..self.len] {
            carry += u128::from(*limb) * u128::from(factor);
            *limb = carry as u64;
            carry >>= 64;
        }
        if carry != 0 {
            self.limbs[self.len] = carry as u64;
            self.len += 1;
        }
    }

    fn shifted(&self, shift: usize) -> Self {
        let (whole, part) = (shift / 64, shift % 64);
        let mut limbs = [0; LIMBS];
        for at in 0..self.len {
            limbs[at + whole] |= self.limbs[at] << part;
            if part != 0 && self.limbs[at] >> (64 - part) != 0 {
                limbs[at + whole + 1] |= self.limbs[at] >> (64 - part);
            }
        }
        let mut big = Self { limbs, len: (self.len + whole + 1).min(LIMBS) };
        big.trim();
        big
    }

    /// Subtracts `other` if the result is not negative. Returns whether it did.
    fn subtract(&mut self, other: &Self) -> bool {
        let digits = |big: &Self| big.len;
        let order = digits(self).cmp(&digits(other)).then_with(|| {
            self.limbs[..self.len].iter().rev().cmp(other.limbs[..other.len].iter().rev())
        });
        if order.is_lt() {
            return false;
        }
        let mut borrow = false;
        for at in 0..self.len {
            let (value, first) = self.limbs[at].overflowing_sub(other.limbs[at]);
            let (value, second) = value.overflowing_sub(borrow.into());
            self.limbs[at] = value;
            borrow = first || second;
        }
        self.trim();
        true
    }

    /// Divides by `divisor` and returns the rest.
    fn divide(&mut self, divisor: u64) -> u64 {
        let mut rest = 0_u128;
        for limb in self.limbs[..self.len].iter_mut().rev() {
            rest = rest << 64 | u128::from(*limb);
            *limb = (rest / u128::from(divisor)) as u64;
            rest %= u128::from(divisor);
        }
        self.trim();
        rest as u64
    }

    /// Appends the integer in decimal to `out`.
    fn write(mut self, out: &mut Vec<u8>) {
        let begin = out.len();
        loop {
            let mut part = self.divide(10_u64.pow(18));
            for _ in 0..18 {
                if self.is_zero() && part == 0 && out.len() > begin {
                    break;
                }
                out.push(b'0' + (part % 10) as u8);
                part /= 10;
            }
            if self.is_zero() {
                break;
            }
        }
        out[begin..].reverse();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(text: &str) -> Option<String> {
        let mut out = Vec::new();
        Extended::parse(text.as_bytes())?.write(&mut out);
        Some(String::from_utf8(out).unwrap())
    }

    #[test]
    fn numbers_are_printed_as_they_were_read() {
        for text in [
            "0",
            "1",
            "-1",
            "0.1",
            "10.6",
            "123456.5",
            "-0.00000000000000001",
            "18446744073709551615",
            "0.33333333333333333",
            "99999999999999999",
            "1000000000000000000",
        ] {
            assert_eq!(printed(text).as_deref(), Some(text));
        }
    }

    #[test]
    fn numbers_are_rounded_to_64_bits() {
        for (text, expected) in [
            ("18446744073709551617", "18446744073709551616"),
            ("18446744073709551619", "18446744073709551620"),
            ("36893488147419103229", "36893488147419103228"),
            ("3.0e3", "3000"),
            ("1e-1", "0.1"),
            ("1e-30", "0"),
            ("-1e-30", "0"),
            ("5.", "5"),
            (".5", "0.5"),
            ("100.333333333333333333", "100.33333333333333334"),
            ("-238.9", "-238.89999999999999999"),
            ("1e40", "9999999999999999999783686092270256259072"),
        ] {
            assert_eq!(printed(text).as_deref(), Some(expected), "{text}");
        }
        assert_eq!(printed("1e4932").unwrap().len(), 4933);
        assert_eq!(printed(&("0.".to_owned() + &"0".repeat(5000) + "1")), None);
        assert_eq!(printed(&("1".repeat(4900))).unwrap().len(), 4900);
    }

    #[test]
    fn digits_behind_many_zeros_break_a_tie() {
        let tie = "9223372036854775808.5".to_owned() + &"0".repeat(900);
        assert_eq!(printed(&tie).unwrap(), "9223372036854775808");
        assert_eq!(printed(&(tie + "1")).unwrap(), "9223372036854775809");
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "-",
            ".",
            "e5",
            "1e",
            "1e+",
            "1.2.3",
            "nan",
            "0x10",
            " 1",
            "1 ",
            "1e5000",
            "1e-5000",
            "1e99999999999999999999",
            "infinit",
            "--1",
        ] {
            assert_eq!(printed(text), None, "{text}");
        }
    }

    #[test]
    fn halves_are_exact_for_whole_numbers() {
        let value = Extended::parse(b"4.5").unwrap();
        assert_eq!((value.mantissa, value.exponent), (9 << 60, -61));
    }

    #[test]
    fn sum_rounds_once() {
        let parse = |text: &str| Extended::parse(text.as_bytes()).unwrap();
        let sum = parse("9223372036854775808").plus(parse("0.5")).unwrap();
        assert_eq!(sum, parse("9223372036854775808"));
        let sum = parse("9223372036854775808").plus(parse("0.50000001")).unwrap();
        assert_eq!(sum, parse("9223372036854775809"));
        let sum = parse("9223372036854775808").plus(parse("-1e-40")).unwrap();
        assert_eq!(sum, parse("9223372036854775808"));
        let number = |mantissa, exponent| Extended { negative: false, mantissa, exponent };
        // A bit below the guard bits breaks a tie, upwards and downwards.
        let half_and_more = number((1 << 63) + 1, -64);
        let sum = number(1 << 63, 0).plus(half_and_more).unwrap();
        assert_eq!(sum, number((1 << 63) + 1, 0));
        let minus = Extended { negative: true, ..half_and_more };
        let sum = number((1 << 63) + 1, 0).plus(minus).unwrap();
        assert_eq!(sum, number(1 << 63, 0));
        assert_eq!(parse("1").plus(parse("-1")).unwrap(), parse("0"));
    }

    proptest::proptest! {
        #[test]
        fn small_and_large_integers_round_alike(
            digits in 1..=u64::MAX,
            scale in SMALL_DIVISOR..=SMALL_FACTOR,
        ) {
            let decimal = || Decimal { digits: Big::new(digits), scale };
            assert_eq!(decimal().round_small(false), decimal().round_large(false));
        }

        /// Below 4, 64 bits of mantissa are exact to more than 17 digits.
        #[test]
        fn sums_of_cents_are_exact(a in -199_i64..200, b in -199_i64..200) {
            let text = |value: i64| {
                let sign = if value < 0 { "-" } else { "" };
                format!("{sign}{}.{:02}", value.abs() / 100, value.abs() % 100)
            };
            let parse = |value| Extended::parse(text(value).as_bytes()).unwrap();
            let mut out = Vec::new();
            parse(a).plus(parse(b)).unwrap().write(&mut out);
            let exact = text(a + b);
            let exact = exact.trim_end_matches('0').trim_end_matches('.');
            assert_eq!(String::from_utf8(out).unwrap(), if exact.is_empty() { "0" } else { exact });
        }
    }
}

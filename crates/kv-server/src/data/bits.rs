//! Commands on the bits of strings: SETBIT, GETBIT, BITCOUNT, BITPOS, BITOP.

use redis_formats::number::parse_i64;

use super::call::{Call, Cells, Done, NOT_INTEGER, Output, Refusal, SYNTAX, refuse};

const BAD_OFFSET: &str = "ERR bit offset is not an integer or out of range";

/// Reads the index of a bit. `#N` is the field number N, if `bits` is the width of the fields.
pub(super) fn offset(call: &Call<'_>, at: usize, bits: Option<u32>) -> Result<u64, Refusal> {
    let text = call.args.get(at);
    let (text, unit) = match (text, bits) {
        ([b'#', number @ ..], Some(bits)) => (number, i64::from(bits)),
        _ => (text, 1),
    };
    let index = parse_i64(text).and_then(|number| number.checked_mul(unit));
    let index = index.and_then(|index| u64::try_from(index).ok());
    match index {
        Some(index) if index >> 3 < call.bulk_max as u64 => Ok(index),
        _ => refuse(BAD_OFFSET),
    }
}

pub(super) fn setbit(call: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let offset = offset(call, 2, None)?;
    let bit = match parse_i64(call.args.get(3)) {
        Some(bit @ 0..=1) => bit as u8,
        _ => return refuse("ERR bit is not an integer or out of range"),
    };
    let cell = cells.key(0);
    let old = cell.value().unwrap_or_default();
    let (byte, mask) = ((offset >> 3) as usize, 0x80 >> (offset & 7));
    let before = old.get(byte).copied().unwrap_or(0) & mask != 0;
    if before != (bit == 1) || byte >= old.len() {
        let mut value = call.grow(old, old.len().max(byte + 1))?;
        value[byte] = if bit == 1 { value[byte] | mask } else { value[byte] & !mask };
        cell.replace(value);
        out.event(b'$', "setbit", 0);
    }
    out.boolean(before);
    Ok(())
}

pub(super) fn getbit(call: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let offset = offset(call, 2, None)?;
    let value = cells.at(0).value();
    out.note_read(0, value.is_some());
    let byte = value.and_then(|value| value.get((offset >> 3) as usize)).copied().unwrap_or(0);
    out.boolean(byte & 0x80 >> (offset & 7) != 0);
    Ok(())
}

/// Number of bits that are set.
fn count(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let words: u64 =
        words.iter().map(|word| u64::from(u64::from_ne_bytes(*word).count_ones())).sum();
    words + rest.iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>()
}

/// A run of bits: the first one, and the one behind the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    start: u64,
    end: u64,
}

impl Run {
    fn all(value: &[u8]) -> Self {
        Self { start: 0, end: value.len() as u64 * 8 }
    }

    /// The run from `start` to `end`, which are indices of bytes or bits. `None`: empty.
    fn of(start: i64, end: i64, in_bits: bool, value: &[u8]) -> Option<Self> {
        let unit = if in_bits { 1 } else { 8 };
        let total = (value.len() * 8 / unit) as i64;
        let absolute = |index: i64| if index < 0 { (total + index).max(0) } else { index };
        let (start, end) = (absolute(start), absolute(end).min(total - 1));
        let unit = unit as u64;
        (start <= end).then(|| Self { start: start as u64 * unit, end: (end as u64 + 1) * unit })
    }

    /// Bytes that the run has a part of.
    fn bytes(self) -> std::ops::Range<usize> {
        (self.start / 8) as usize..self.end.div_ceil(8) as usize
    }
}

/// Reads `BIT` or `BYTE`. Returns whether indices are those of bits.
fn unit(call: &Call<'_>, at: usize) -> Result<bool, Refusal> {
    match () {
        () if at >= call.args.count() || call.args.is(at, "byte") => Ok(false),
        () if call.args.is(at, "bit") => Ok(true),
        () => refuse(SYNTAX),
    }
}

pub(super) fn bitcount(
    call: &Call<'_>,
    cells: &mut Cells<'_, '_, '_>,
    out: &mut Output<'_>,
) -> Done {
    let value = cells.at(0).value();
    out.note_read(0, value.is_some());
    let Some(value) = value else {
        out.integer(0);
        return Ok(());
    };
    let run = match call.args.count() {
        2 => Some(Run::all(value)),
        4 | 5 => {
            let (start, end) = (call.integer(2)?, call.integer(3)?);
            let in_bits = unit(call, 4)?;
            let is_reversed = start < 0 && end < 0 && start > end;
            Run::of(start, end, in_bits, value).filter(|_| !is_reversed)
        }
        _ => return refuse(SYNTAX),
    };
    let Some(run) = run.filter(|run| run.start < run.end) else {
        out.integer(0);
        return Ok(());
    };
    let bytes = &value[run.bytes()];
    let before = bytes[0] & !(0xff >> (run.start & 7));
    let behind = match run.end & 7 {
        0 => 0,
        bits => bytes[bytes.len() - 1] & (0xff >> bits),
    };
    out.integer((count(bytes) - u64::from(before.count_ones() + behind.count_ones())) as i64);
    Ok(())
}

/// The first bit of `run` that is `bit`.
fn find(value: &[u8], run: Run, bit: bool) -> Option<u64> {
    let is = |at: u64| (value[(at / 8) as usize] & 0x80 >> (at & 7) != 0) == bit;
    let head = run.start.next_multiple_of(8).min(run.end);
    if let Some(at) = (run.start..head).find(|at| is(*at)) {
        return Some(at);
    }
    let whole = &value[(head / 8) as usize..((run.end / 8).max(head / 8)) as usize];
    let (words, _) = whole.as_chunks::<8>();
    let empty = if bit { 0 } else { u64::MAX };
    let skipped = words.iter().take_while(|word| u64::from_ne_bytes(**word) == empty).count();
    let empty = if bit { 0 } else { 0xff };
    let bytes = whole[skipped * 8..].iter().take_while(|byte| **byte == empty).count();
    let from = head + (skipped * 8 + bytes) as u64 * 8;
    (from..run.end.min(from + 16)).find(|at| is(*at))
}

pub(super) fn bitpos(call: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let bit = match call.integer(2)? {
        bit @ 0..=1 => bit == 1,
        _ => return refuse("ERR The bit argument must be 1 or 0."),
    };
    let value = cells.at(0).value();
    out.note_read(0, value.is_some());
    let Some(value) = value else {
        out.integer(if bit { -1 } else { 0 });
        return Ok(());
    };
    let arguments = call.args.count();
    let (mut run, mut has_end) = (Some(Run::all(value)), false);
    if arguments > 3 {
        let start = call.integer(3)?;
        let in_bits = unit(call, 5)?;
        if arguments > 6 {
            return refuse(SYNTAX);
        }
        has_end = arguments > 4;
        let end = if has_end { call.integer(4)? } else { i64::MAX };
        run = Run::of(start, end, in_bits, value);
    }
    let Some(run) = run.filter(|run| run.start < run.end) else {
        out.integer(-1);
        return Ok(());
    };
    match find(value, run, bit) {
        Some(at) => out.integer(at as i64),
        // Behind a string without an end there are zeros.
        None if !bit && !has_end => out.integer(value.len() as i64 * 8),
        None => out.integer(-1),
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    And,
    Or,
    Xor,
    Not,
}

impl Operator {
    fn parse(call: &Call<'_>) -> Result<Self, Refusal> {
        match () {
            () if call.args.is(1, "and") => Ok(Self::And),
            () if call.args.is(1, "or") => Ok(Self::Or),
            () if call.args.is(1, "xor") => Ok(Self::Xor),
            () if call.args.is(1, "not") => Ok(Self::Not),
            () => refuse(SYNTAX),
        }
    }

    fn word(self, left: u64, right: u64) -> u64 {
        match self {
            Self::And => left & right,
            Self::Or => left | right,
            Self::Xor => left ^ right,
            Self::Not => !left,
        }
    }

    /// Combines `into` with `with`, which is as if zeros followed.
    fn apply(self, into: &mut [u8], with: &[u8]) {
        let (common, rest) = into.split_at_mut(with.len());
        let (words, tail) = common.as_chunks_mut::<8>();
        let (others, other_tail) = with.as_chunks::<8>();
        for (word, other) in words.iter_mut().zip(others) {
            let new = self.word(u64::from_ne_bytes(*word), u64::from_ne_bytes(*other));
            *word = new.to_ne_bytes();
        }
        for (byte, other) in tail.iter_mut().zip(other_tail) {
            *byte = self.word(u64::from(*byte), u64::from(*other)) as u8;
        }
        if self == Self::And {
            rest.fill(0);
        }
    }
}

pub(super) fn bitop(call: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let operator = Operator::parse(call)?;
    if operator == Operator::Not && cells.len() != 2 {
        return refuse("ERR BITOP NOT must be called with a single source key.");
    }
    (1..cells.len()).for_each(|key| out.note_read(key, cells.at(key).exists()));
    let source = |key: usize| cells.at(key).value().unwrap_or_default();
    let longest = (1..cells.len()).map(|key| source(key).len()).max().unwrap_or(0);
    let mut value = call.grow(source(1), longest)?;
    if operator == Operator::Not {
        let (words, tail) = value.as_chunks_mut::<8>();
        words.iter_mut().for_each(|word| *word = (!u64::from_ne_bytes(*word)).to_ne_bytes());
        tail.iter_mut().for_each(|byte| *byte = !*byte);
    } else {
        (2..cells.len()).for_each(|key| operator.apply(&mut value, source(key)));
    }
    if longest > 0 {
        cells.key(0).put(value, 0);
        out.event(b'$', "set", 0);
    } else if cells.key(0).delete() {
        out.event(b'g', "del", 0);
    }
    out.integer(longest as i64);
    Ok(())
}

/// The error of a text that is no integer.
pub(super) fn integer(text: &[u8]) -> Result<i64, Refusal> {
    parse_i64(text).ok_or(Refusal::Borrowed(NOT_INTEGER))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bit(value: &[u8], at: u64) -> bool {
        value[(at / 8) as usize] & 0x80 >> (at & 7) != 0
    }

    #[test]
    fn first_bit_is_found_in_any_run() {
        let mut values = vec![vec![0; 40], vec![0xff; 40]];
        for at in [0, 7, 63, 64, 65, 150, 319] {
            let (mut zeros, mut ones) = (vec![0; 40], vec![0xff; 40]);
            zeros[at / 8] |= 0x80 >> (at & 7);
            ones[at / 8] &= !(0x80 >> (at & 7));
            values.extend([zeros, ones]);
        }
        for value in values {
            for start in 0..320 {
                for end in [start, start + 1, start + 70, 319, 320].map(|end: u64| end.min(320)) {
                    for wanted in [false, true] {
                        let expected = (start..end).find(|at| bit(&value, *at) == wanted);
                        let found = find(&value, Run { start, end: end.max(start) }, wanted);
                        assert_eq!(found, expected, "{start} {end} {wanted}");
                    }
                }
            }
        }
    }

    #[test]
    fn bits_are_counted_by_words_and_bytes() {
        for len in 0..40 {
            let value: Vec<u8> = (0..len).map(|at| (at * 37 + 11) as u8).collect();
            let expected = (0..len as u64 * 8).filter(|at| bit(&value, *at)).count();
            assert_eq!(count(&value), expected as u64);
        }
    }

    #[test]
    fn operators_extend_shorter_strings_with_zeros() {
        let left: Vec<u8> = (0..21).map(|at| at * 11 + 3).collect();
        let right: Vec<u8> = (0..10).map(|at| at * 7 + 5).collect();
        for operator in [Operator::And, Operator::Or, Operator::Xor] {
            let mut value = left.clone();
            operator.apply(&mut value, &right);
            for at in 0..21 {
                let other = right.get(at).copied().unwrap_or(0);
                let expected = operator.word(left[at].into(), other.into()) as u8;
                assert_eq!(value[at], expected, "{operator:?} {at}");
            }
        }
    }
}

//! BITFIELD and BITFIELD_RO: integers of 1 to 64 bits within a string.

use redis_formats::command::Id;
use redis_formats::number::parse_i64;

use super::bits::{integer, offset};
use super::call::{Call, Cells, Done, Output, Refusal, SYNTAX, refuse};

/// The type of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    is_signed: bool,
    bits: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Overflow {
    #[default]
    Wrap,
    Saturate,
    Fail,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Get,
    Set(i64),
    Add(i64),
}

/// An operation on a field.
#[derive(Clone, Copy, Debug)]
struct Operation {
    kind: Kind,
    offset: u64,
    action: Action,
    overflow: Overflow,
}

impl Kind {
    fn parse(text: &[u8]) -> Result<Self, Refusal> {
        let (is_signed, number) = match text {
            [b'i', number @ ..] => (true, number),
            [b'u', number @ ..] => (false, number),
            _ => (true, &b""[..]),
        };
        let most = if is_signed { 64 } else { 63 };
        match parse_i64(number) {
            Some(bits) if (1..=most).contains(&bits) => Ok(Self { is_signed, bits: bits as u32 }),
            _ => refuse(
                "ERR Invalid bitfield type. Use something like i16 u8. Note that u64 is not \
                 supported but i64 is.",
            ),
        }
    }

    fn least(self) -> i128 {
        if self.is_signed { -(1 << (self.bits - 1)) } else { 0 }
    }

    fn most(self) -> i128 {
        (1 << (self.bits - u32::from(self.is_signed))) - 1
    }

    /// The number that the lowest bits of `value` are.
    fn wrap(self, value: i128) -> i128 {
        let low = value & ((1 << self.bits) - 1);
        if low > self.most() { low - (1 << self.bits) } else { low }
    }

    /// Brings a number into the range of the type. `None`: the number does not fit, and must.
    fn fit(self, value: i128, overflow: Overflow) -> Option<i128> {
        if (self.least()..=self.most()).contains(&value) {
            return Some(value);
        }
        match overflow {
            Overflow::Wrap => Some(self.wrap(value)),
            Overflow::Saturate if value > 0 => Some(self.most()),
            Overflow::Saturate => Some(self.least()),
            Overflow::Fail => None,
        }
    }
}

/// Reads a field. Bits behind the string are zeros.
fn read(value: &[u8], kind: Kind, offset: u64) -> i128 {
    let first = (offset / 8) as usize;
    let mut bytes = [0; 16];
    let part = value.get(first..).unwrap_or_default();
    let len = part.len().min(9);
    bytes[..len].copy_from_slice(&part[..len]);
    let shift = 128 - (offset & 7) as u32 - kind.bits;
    kind.wrap((u128::from_be_bytes(bytes) >> shift) as i128)
}

/// Writes a field, for which the string is long enough.
fn write(value: &mut [u8], kind: Kind, offset: u64, new: i128) {
    let first = (offset / 8) as usize;
    let len = (value.len() - first).min(9);
    let mut bytes = [0; 16];
    bytes[..len].copy_from_slice(&value[first..first + len]);
    let shift = 128 - (offset & 7) as u32 - kind.bits;
    let mask = ((1_u128 << kind.bits) - 1) << shift;
    let word = u128::from_be_bytes(bytes) & !mask | (new as u128) << shift & mask;
    value[first..first + len].copy_from_slice(&word.to_be_bytes()[..len]);
}

fn parse_overflow(call: &Call<'_>, at: usize) -> Result<Overflow, Refusal> {
    match () {
        () if call.args.is(at, "wrap") => Ok(Overflow::Wrap),
        () if call.args.is(at, "sat") => Ok(Overflow::Saturate),
        () if call.args.is(at, "fail") => Ok(Overflow::Fail),
        () => refuse("ERR Invalid OVERFLOW type specified"),
    }
}

fn parse(call: &Call<'_>) -> Result<Vec<Operation>, Refusal> {
    let mut operations = Vec::new();
    let mut overflow = Overflow::default();
    let mut at = 2;
    while at < call.args.count() {
        let rest = call.args.count() - at - 1;
        let is = |word, least| call.args.is(at, word) && rest >= least;
        if is("overflow", 1) {
            overflow = parse_overflow(call, at + 1)?;
            at += 2;
            continue;
        }
        let (is_get, is_set) = (is("get", 2), is("set", 3));
        if !is_get && !is_set && !is("incrby", 3) {
            return refuse(SYNTAX);
        }
        let kind = Kind::parse(call.args.get(at + 1))?;
        let offset = offset(call, at + 2, Some(kind.bits))?;
        let number = if is_get { 0 } else { integer(call.args.get(at + 3))? };
        let action = match (is_get, is_set) {
            (true, _) => Action::Get,
            (_, true) => Action::Set(number),
            _ => Action::Add(number),
        };
        operations.push(Operation { kind, offset, action, overflow });
        at += if is_get { 3 } else { 4 };
    }
    Ok(operations)
}

impl Operation {
    /// Reads the field, and changes it. `None`: the new number does not fit.
    fn execute(self, value: &mut [u8], is_changed: &mut bool) -> Option<i64> {
        let old = read(value, self.kind, self.offset);
        let (new, is_old_replied) = match self.action {
            Action::Get => return Some(old as i64),
            Action::Set(new) if self.kind.is_signed => (i128::from(new), true),
            // A negative number is a large one.
            Action::Set(new) => (i128::from(new as u64), true),
            Action::Add(more) => (old + i128::from(more), false),
        };
        let new = self.kind.fit(new, self.overflow)?;
        *is_changed |= new != old;
        write(value, self.kind, self.offset, new);
        Some(if is_old_replied { old } else { new } as i64)
    }
}

pub(super) fn bitfield(
    call: &Call<'_>,
    cells: &mut Cells<'_, '_, '_>,
    out: &mut Output<'_>,
) -> Done {
    let operations = parse(call)?;
    let writes = operations.iter().filter(|operation| operation.action != Action::Get);
    let end = writes.map(|operation| operation.offset + u64::from(operation.kind.bits)).max();
    if call.command.id == Id::BitfieldRo && end.is_some() {
        return refuse("ERR BITFIELD_RO only supports the GET subcommand");
    }
    let cell = cells.key(0);
    let old = cell.value().unwrap_or_default();
    let Some(end) = end else {
        out.note_read(0, cell.exists());
        out.reply().array(operations.len());
        let numbers = operations.iter().map(|own| read(old, own.kind, own.offset) as i64);
        numbers.for_each(|number| out.integer(number));
        return Ok(());
    };
    let needed = (end.div_ceil(8) as usize).max(old.len());
    let mut is_changed = needed > old.len();
    let mut value = call.grow(old, needed)?;
    out.reply().array(operations.len());
    for operation in operations {
        match operation.execute(&mut value, &mut is_changed) {
            Some(number) => out.integer(number),
            None => out.null(),
        }
    }
    if is_changed {
        cell.replace(value);
        out.event(b'$', "setbit", 0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_is_read_as_written_at_any_offset() {
        for is_signed in [false, true] {
            for bits in 1..=if is_signed { 64 } else { 63 } {
                let kind = Kind { is_signed, bits };
                for offset in 0..24 {
                    for new in [kind.least(), kind.most(), kind.most() / 3] {
                        let mut value = vec![0xa5; 12];
                        let before = value.clone();
                        write(&mut value, kind, offset, new);
                        assert_eq!(read(&value, kind, offset), new, "{kind:?} at {offset}");
                        let old = read(&before, kind, offset);
                        write(&mut value, kind, offset, old);
                        assert_eq!(value, before, "{kind:?} at {offset}");
                    }
                }
            }
        }
    }

    #[test]
    fn overflow_wraps_saturates_or_fails() {
        let kind = Kind { is_signed: true, bits: 8 };
        assert_eq!(kind.fit(128, Overflow::Wrap), Some(-128));
        assert_eq!(kind.fit(-129, Overflow::Wrap), Some(127));
        assert_eq!(kind.fit(1000, Overflow::Saturate), Some(127));
        assert_eq!(kind.fit(-1000, Overflow::Saturate), Some(-128));
        assert_eq!(kind.fit(128, Overflow::Fail), None);
        assert_eq!(kind.fit(-128, Overflow::Fail), Some(-128));
        let kind = Kind { is_signed: false, bits: 63 };
        assert_eq!(kind.fit(-1, Overflow::Wrap), Some((1 << 63) - 1));
        assert_eq!(kind.fit(-1, Overflow::Saturate), Some(0));
    }
}

//! Finds the keys among the arguments of a command.

use super::bits::key::{ACCESS, NOT_KEY, OW, RO, RW, UPDATE, VARIABLE_FLAGS};
use super::{Arguments, Command, Id, KeySpec};

/// A key among the arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Index of the argument.
    pub index: usize,
    /// Bits of [`bits::key`](super::bits::key).
    pub uses: u16,
}

/// The arguments have no key where the command must have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("finding the keys of a command: too few arguments; check the arity first")]
pub struct BadKeys;

/// Finds the keys of `command` among `arguments`. The iterator does not allocate.
pub fn keys<'a, A: Arguments + ?Sized>(
    command: &'static Command,
    arguments: &'a A,
) -> impl Iterator<Item = Result<Key, BadKeys>> + use<'a, A> {
    let count = arguments.len();
    let specs = command.keys.iter().filter(|spec| spec.uses & NOT_KEY == 0);
    specs.flat_map(move |spec| {
        let uses = uses(command, spec, arguments);
        let run = run(spec, count);
        let missing = run.is_none().then_some(Err(BadKeys));
        let (first, last) = run.unwrap_or((1, 0));
        let found = (first..=last).step_by(spec.step.max(1).into());
        missing.into_iter().chain(found.map(move |index| Ok(Key { index, uses })))
    })
}

/// Returns the indices of the first and the last key.
fn run(spec: &KeySpec, count: usize) -> Option<(usize, usize)> {
    let first = usize::from(spec.first);
    let last = match spec.last {
        last @ 0.. => first + last as usize,
        last => count.checked_sub(last.unsigned_abs().into())?,
    };
    (first < count && last < count && first <= last).then_some((first, last))
}

/// Returns the uses of the keys, which depend on the options of SET and BITFIELD.
fn uses<A: Arguments + ?Sized>(command: &Command, spec: &KeySpec, arguments: &A) -> u16 {
    if spec.uses & VARIABLE_FLAGS == 0 {
        return spec.uses;
    }
    match command.id {
        Id::Set if set_reads(arguments) => RW | ACCESS | UPDATE,
        Id::Set => OW | UPDATE,
        Id::Bitfield if bitfield_writes(arguments) => RW | ACCESS | UPDATE,
        Id::Bitfield => RO | ACCESS,
        _ => spec.uses,
    }
}

fn set_reads<A: Arguments + ?Sized>(arguments: &A) -> bool {
    (3..arguments.len()).any(|index| arguments.at(index).eq_ignore_ascii_case(b"get"))
}

/// Returns whether BITFIELD may write: every operation but GET and OVERFLOW counts, unknown ones
/// too.
fn bitfield_writes<A: Arguments + ?Sized>(arguments: &A) -> bool {
    let mut index = 2;
    while index < arguments.len() {
        let word = arguments.at(index);
        index += match () {
            () if word.eq_ignore_ascii_case(b"get") => 3,
            () if word.eq_ignore_ascii_case(b"overflow") => 2,
            () => return true,
        };
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::lookup;

    fn found(line: &str) -> Result<Vec<(String, u16)>, BadKeys> {
        let words: Vec<_> = line.split(' ').collect();
        let command = lookup(&words[..]).unwrap();
        let name = |key: Key| (words[key.index].to_owned(), key.uses & !(ACCESS | UPDATE));
        keys(command, &words[..]).map(|key| key.map(name)).collect()
    }

    fn names(line: &str) -> String {
        let found = found(line).unwrap();
        found.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn keys_follow_the_positions_of_the_table() {
        assert_eq!(names("get a"), "a");
        assert_eq!(names("mget a b c"), "a b c");
        assert_eq!(names("mset a 1 b 2"), "a b");
        assert_eq!(names("bitop and to a b"), "to a b");
        assert_eq!(names("rename a b"), "a b");
        assert_eq!(names("object encoding a"), "a");
        assert_eq!(names("memory usage a"), "a");
        assert_eq!(names("ping"), "");
        assert_eq!(names("ssubscribe a b"), "");
    }

    #[test]
    fn uses_depend_on_options() {
        assert_eq!(found("set a get").unwrap()[0].1, OW);
        assert_eq!(found("set a b ex 3 GET").unwrap()[0].1, RW);
        assert_eq!(found("bitfield a get u8 0").unwrap()[0].1, RO);
        assert_eq!(found("bitfield a get u8 0 incrby u8 0 1").unwrap()[0].1, RW);
    }

    #[test]
    fn missing_keys_are_an_error() {
        let command = crate::command::by_name(b"bitop").unwrap();
        let arguments: [&[u8]; 2] = [b"bitop", b"and"];
        assert_eq!(keys(command, &arguments[..]).next(), Some(Err(BadKeys)));
    }
}

//! The table of all commands.

mod keys;
mod server;
mod session;
mod strings;

use super::bits::{category, flag};
use super::{Command, Group, Id, KeySpec};

/// All commands, in parts.
pub(super) const PARTS: [&[Command]; 4] =
    [strings::STRINGS, keys::KEYS, session::SESSION, server::SERVER];

/// Starts a row of the table.
const fn command(
    id: Id,
    name: &'static str,
    arity: i8,
    since: &'static str,
    summary: &'static str,
) -> Command {
    Command {
        id,
        name,
        arity,
        since,
        summary,
        group: Group::Generic,
        flags: 0,
        categories: 0,
        positions: (0, 0, 0),
        keys: &[],
        tips: &[],
        subcommands: &[],
    }
}

/// Describes keys: the index of the first one, the last one, the step between two, their use.
///
/// `last` counts from the first key; a negative number counts from the end of the arguments.
const fn spec(first: u8, last: i8, step: u8, uses: u16) -> KeySpec {
    KeySpec { first, last, step, uses, note: "" }
}

impl KeySpec {
    const fn noted(self, note: &'static str) -> Self {
        Self { note, ..self }
    }
}

impl Command {
    const fn flags(self, flags: u32) -> Self {
        Self { flags, ..self }
    }

    /// Sets the group and the categories besides those that the flags imply. Follows `flags`.
    const fn in_group(self, group: Group, categories: u32) -> Self {
        Self { group, categories: categories | implied(self.flags), ..self }
    }

    const fn keys(self, first: i8, last: i8, step: i8, keys: &'static [KeySpec]) -> Self {
        Self { positions: (first, last, step), keys, ..self }
    }

    const fn tips(self, tips: &'static [&'static str]) -> Self {
        Self { tips, ..self }
    }

    const fn subcommands(self, subcommands: &'static [Self]) -> Self {
        Self { subcommands, ..self }
    }
}

/// Returns the categories that `flags` imply.
const fn implied(flags: u32) -> u32 {
    let mut categories = if flags & flag::FAST != 0 { category::FAST } else { category::SLOW };
    if flags & flag::WRITE != 0 {
        categories |= category::WRITE;
    }
    if flags & flag::READONLY != 0 {
        categories |= category::READ;
    }
    if flags & flag::ADMIN != 0 {
        categories |= category::ADMIN | category::DANGEROUS;
    }
    if flags & flag::PUBSUB != 0 {
        categories |= category::PUBSUB;
    }
    categories
}

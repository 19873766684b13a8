//! Lookups by name and by number, through tables that the compiler computes.

use super::table::PARTS;
use super::{Command, Id};

/// Slots of the hash table: a power of two, at least twice the number of commands.
const SLOTS: usize = 256;
const FREE: (u8, u8) = (u8::MAX, 0);

/// Open addressing with linear probing: part of the table and index in the part.
static BY_NAME: [(u8, u8); SLOTS] = hash_table();
static BY_ID: [(&Command, Option<&Command>); Id::COUNT] = id_table();

/// FNV-1a over the name in lower case.
const fn hash(name: &[u8]) -> usize {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut at = 0;
    while at < name.len() {
        hash = (hash ^ name[at].to_ascii_lowercase() as u64).wrapping_mul(0x0100_0000_01b3);
        at += 1;
    }
    (hash ^ hash >> 32) as usize % SLOTS
}

const fn hash_table() -> [(u8, u8); SLOTS] {
    let mut slots = [FREE; SLOTS];
    let mut part = 0;
    while part < PARTS.len() {
        let mut row = 0;
        while row < PARTS[part].len() {
            let mut slot = hash(PARTS[part][row].name.as_bytes());
            while slots[slot].0 != FREE.0 {
                slot = (slot + 1) % SLOTS;
            }
            slots[slot] = (part as u8, row as u8);
            row += 1;
        }
        part += 1;
    }
    slots
}

const fn id_table() -> [(&'static Command, Option<&'static Command>); Id::COUNT] {
    let mut table = [(&PARTS[0][0], None); Id::COUNT];
    let mut part = 0;
    while part < PARTS.len() {
        let mut row = 0;
        while row < PARTS[part].len() {
            let command = &PARTS[part][row];
            table[command.id as usize] = (command, None);
            let mut sub = 0;
            while sub < command.subcommands.len() {
                let own = &command.subcommands[sub];
                table[own.id as usize] = (own, Some(command));
                sub += 1;
            }
            row += 1;
        }
        part += 1;
    }
    table
}

/// Returns the command `name`, in any case. Subcommands have no such name.
pub fn by_name(name: &[u8]) -> Option<&'static Command> {
    let mut slot = hash(name);
    loop {
        let (part, row) = BY_NAME[slot];
        let command = PARTS.get(part as usize)?.get(row as usize)?;
        if name.eq_ignore_ascii_case(command.name.as_bytes()) {
            return Some(command);
        }
        slot = (slot + 1) % SLOTS;
    }
}

/// Returns the command `id`, and its container if `id` is a subcommand.
pub fn by_id(id: Id) -> (&'static Command, Option<&'static Command>) {
    BY_ID[id as usize]
}

/// Returns the command of a name such as `get` or `config|get`, in any case.
pub fn find(name: &[u8]) -> Option<&'static Command> {
    match name.iter().position(|&byte| byte == b'|') {
        None => by_name(name),
        Some(at) => by_name(&name[..at])?.subcommand(&name[at + 1..]),
    }
}

/// Iterates over all commands, without subcommands.
pub fn all() -> impl Iterator<Item = &'static Command> {
    PARTS.into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_is_found_by_name_in_any_case() {
        for command in all() {
            let id = Some(command.id);
            assert_eq!(by_name(command.name.as_bytes()).map(|c| c.id), id);
            assert_eq!(by_name(command.name.to_uppercase().as_bytes()).map(|c| c.id), id);
            for sub in command.subcommands {
                let name = format!("{}|{}", command.name.to_uppercase(), sub.name);
                assert_eq!(find(name.as_bytes()).map(|c| c.id), Some(sub.id));
            }
        }
    }

    #[test]
    fn unknown_names_are_not_found() {
        for name in ["", "ge", "gett", "get ", "get|", "config|", "config|nope", "|get", "g\0t"] {
            assert!(find(name.as_bytes()).is_none(), "{name:?}");
        }
        assert!(by_name(&[b'x'; 100_000]).is_none());
    }

    #[test]
    fn each_number_has_one_command() {
        let mut seen = std::collections::BTreeSet::new();
        for command in all() {
            assert!(seen.insert(command.id));
            assert!(command.subcommands.iter().all(|sub| seen.insert(sub.id)));
        }
        assert_eq!(seen.len(), Id::COUNT);
        assert!(seen.iter().all(|&id| by_id(id).0.id == id));
        assert!(all().count() * 2 <= SLOTS);
    }
}

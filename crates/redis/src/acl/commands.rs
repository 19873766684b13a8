//! Rights to commands: a bit for each command, and the rules that made the bits.

use crate::command::bits::category;
use crate::command::{Arguments, Command, Id, all, by_id};

const WORDS: usize = Id::COUNT.div_ceil(64);

/// The object of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Object {
    /// A category, by its bit.
    Category(u32),
    /// A command with its subcommands, or a subcommand.
    Command(Id),
    /// A command, if its first argument is this one.
    First(Id, Vec<u8>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    allow: bool,
    object: Object,
}

/// Rights of a user to commands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Commands {
    bits: [u64; WORDS],
    /// Whether the rules begin with all commands, those of later versions among them.
    all: bool,
    /// Rules behind `+@all` or `-@all`.
    rules: Vec<Rule>,
}

impl Commands {
    /// Allows or forbids every command.
    pub fn set_all(&mut self, allow: bool) {
        let bits = if allow { u64::MAX } else { 0 };
        *self = Self { bits: [bits; WORDS], all: allow, rules: Vec::new() };
    }

    pub fn allows_all(&self) -> bool {
        self.all && self.rules.is_empty()
    }

    fn has(&self, id: Id) -> bool {
        self.bits[id as usize / 64] >> (id as usize % 64) & 1 == 1
    }

    fn set(&mut self, id: Id, allow: bool) {
        let (word, bit) = (&mut self.bits[id as usize / 64], 1 << (id as usize % 64));
        *word = if allow { *word | bit } else { *word & !bit };
    }

    /// Adds a rule behind the others, and removes rules that have no effect any more.
    pub fn add(&mut self, allow: bool, object: Object) {
        let mut rules = std::mem::take(&mut self.rules);
        rules.retain(|rule| !is_replaced(&rule.object, &object));
        rules.push(Rule { allow, object });
        self.set_all(self.all);
        for rule in rules {
            let before = self.bits;
            self.apply(rule.allow, &rule.object);
            // A rule for a category is kept without an effect too, because the category may have
            // more commands in a later version.
            let is_needed = match rule.object {
                Object::Category(_) => true,
                Object::Command(_) => self.bits != before,
                Object::First(id, _) => !self.has(id),
            };
            if is_needed {
                self.rules.push(rule);
            }
        }
    }

    fn apply(&mut self, allow: bool, object: &Object) {
        match *object {
            Object::Category(category) => self.set_category(allow, category),
            Object::Command(id) => self.set_command(allow, id),
            Object::First(..) => {}
        }
    }

    fn set_category(&mut self, allow: bool, category: u32) {
        for command in all() {
            for one in std::iter::once(command).chain(command.subcommands) {
                if one.categories & category != 0 {
                    self.set(one.id, allow);
                }
            }
        }
    }

    fn set_command(&mut self, allow: bool, id: Id) {
        self.set(id, allow);
        by_id(id).0.subcommands.iter().for_each(|sub| self.set(sub.id, allow));
    }

    /// Tests a command, which may be a subcommand.
    pub fn allow<A: Arguments + ?Sized>(&self, command: &Command, arguments: &A) -> bool {
        self.has(command.id)
            || arguments.len() > 1 && self.allows_first(command.id, arguments.at(1))
    }

    fn allows_first(&self, id: Id, argument: &[u8]) -> bool {
        self.rules.iter().any(|rule| match &rule.object {
            Object::First(own, first) => *own == id && argument.eq_ignore_ascii_case(first),
            _ => false,
        })
    }

    /// Appends the rules to `out`, with a space between two.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend(if self.all { b"+@all" } else { b"-@all" });
        for rule in &self.rules {
            out.extend(if rule.allow { b" +" } else { b" -" });
            match &rule.object {
                Object::Category(bit) => {
                    out.push(b'@');
                    category::names(*bit).for_each(|name| out.extend(name.bytes()));
                }
                Object::Command(id) => write_name(*id, out),
                Object::First(id, first) => {
                    write_name(*id, out);
                    out.push(b'|');
                    out.extend(first);
                }
            }
        }
    }
}

fn write_name(id: Id, out: &mut Vec<u8>) {
    let (command, container) = by_id(id);
    if let Some(container) = container {
        out.extend(container.name.bytes());
        out.push(b'|');
    }
    out.extend(command.name.bytes());
}

/// Returns whether a rule for `new` makes an earlier rule for `old` irrelevant.
fn is_replaced(old: &Object, new: &Object) -> bool {
    let (Object::Command(new), Object::Command(own) | Object::First(own, _)) = (new, old) else {
        return resets_first(old, new) || old == new;
    };
    new == own || by_id(*new).0.subcommands.iter().any(|sub| sub.id == *own)
}

/// A rule for a category drops the first arguments of its commands.
fn resets_first(old: &Object, new: &Object) -> bool {
    match (old, new) {
        (Object::First(id, _), Object::Category(category)) => {
            by_id(*id).0.categories & category != 0
        }
        _ => false,
    }
}

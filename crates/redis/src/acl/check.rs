//! Tests whether a user may execute a command.

use super::User;
use super::user::Patterns;
use crate::command::bits::flag;
use crate::command::{Arguments, Command, Id, by_id, keys};
use crate::glob;

/// Cause for refusing a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The user has no right to the command.
    Command,
    /// The user has no right to the key at this index of the arguments.
    Key(usize),
    /// The user has no right to the channel at this index of the arguments.
    Channel(usize),
}

impl User {
    /// Tests whether the user may execute `command` with `arguments`.
    ///
    /// `command` is what [`lookup`](crate::command::lookup) returns for the arguments. The test
    /// does not allocate.
    ///
    /// # Errors
    ///
    /// The first cause for refusing the command.
    pub fn check<A: Arguments + ?Sized>(
        &self,
        command: &'static Command,
        arguments: &A,
    ) -> Result<(), Denied> {
        if !command.has(flag::NO_AUTH) && !self.commands.allow(command, arguments) {
            return Err(Denied::Command);
        }
        if !self.keys.all {
            // Without its keys the command is refused later.
            let mut found = keys(command, arguments).flatten();
            let denied = found.find(|key| !self.keys.cover(arguments.at(key.index)));
            if let Some(key) = denied {
                return Err(Denied::Key(key.index));
            }
        }
        if !self.channels.all {
            let mut channels = channels(command.id, arguments.len());
            let denied =
                channels.find(|&index| !self.covers_channel(command.id, arguments.at(index)));
            if let Some(index) = denied {
                return Err(Denied::Channel(index));
            }
        }
        Ok(())
    }

    fn covers_channel(&self, id: Id, channel: &[u8]) -> bool {
        match id {
            Id::Psubscribe => self.may_receive_all(channel),
            _ => self.may_receive(channel),
        }
    }

    /// Returns whether the user may receive the messages of a channel.
    pub fn may_receive(&self, channel: &[u8]) -> bool {
        self.channels.cover(channel)
    }

    /// Returns whether the user may receive the messages of all channels that `pattern` matches.
    ///
    /// The pattern must be a pattern of the user as it stands. Otherwise the pattern could match
    /// channels that the user has no right to.
    pub fn may_receive_all(&self, pattern: &[u8]) -> bool {
        self.channels.all || self.channels.list.iter().any(|own| own == pattern)
    }
}

impl Patterns {
    fn cover(&self, name: &[u8]) -> bool {
        self.all || self.list.iter().any(|pattern| glob::matches(pattern, name))
    }
}

/// Returns the indices of the channels among the arguments.
fn channels(id: Id, count: usize) -> std::ops::Range<usize> {
    match id {
        Id::Publish | Id::Spublish => 1..count.min(2),
        Id::Subscribe | Id::Psubscribe | Id::Ssubscribe => 1..count,
        _ => 0..0,
    }
}

impl Denied {
    /// Appends the text of the error reply to `out`, without the leading `-` and the line end.
    pub fn text(&self, command: &Command, out: &mut Vec<u8>) {
        out.extend(b"NOPERM this user has no permissions to ");
        match self {
            Self::Command => {
                out.extend(b"run the '");
                write_name(command, out);
                out.extend(b"' command");
            }
            Self::Key(_) => out.extend(b"access one of the keys used as arguments"),
            Self::Channel(_) => out.extend(b"access one of the channels used as arguments"),
        }
    }

    /// Appends the text of the error reply to a queued command whose right was lost before EXEC.
    pub fn text_in_exec(&self, out: &mut Vec<u8>) {
        out.extend(
            b"NOPERM ACLs rules changed between the moment the transaction was accumulated and \
              the EXEC call. This command is no longer allowed for the following reason: no \
              permission to ",
        );
        out.extend(match self {
            Self::Command => &b"execute the command or subcommand"[..],
            Self::Key(_) => b"touch the specified keys",
            Self::Channel(_) => b"access one of the channels used as arguments to the command",
        });
    }

    /// Appends the reply of ACL DRYRUN to `out`.
    pub fn dry_run_text<A: Arguments + ?Sized>(
        &self,
        command: &Command,
        arguments: &A,
        out: &mut Vec<u8>,
    ) {
        out.extend(b"This user has no permissions to ");
        let (index, kind) = match *self {
            Self::Command => {
                out.extend(b"run the '");
                write_name(command, out);
                return out.extend(b"' command");
            }
            Self::Key(index) => (index, "key"),
            Self::Channel(index) => (index, "channel"),
        };
        out.extend(b"access the '");
        out.extend(arguments.at(index));
        out.extend(b"' ");
        out.extend(kind.bytes());
    }
}

fn write_name(command: &Command, out: &mut Vec<u8>) {
    if let (_, Some(container)) = by_id(command.id) {
        out.extend(container.name.bytes());
        out.push(b'|');
    }
    out.extend(command.name.bytes());
}

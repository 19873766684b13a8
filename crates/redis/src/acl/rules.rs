//! Applies rules to a user.

use super::commands::Object;
use super::user::Patterns;
use super::{PasswordHash, User};
use crate::command::bits::category;
use crate::command::by_name;

/// A rule that cannot be applied. The text is that of ACL SETUSER, without its code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Error in ACL SETUSER modifier '{rule}': {cause}")]
pub struct RuleError {
    /// The rule; a password is left out.
    pub rule: String,
    /// Cause.
    pub cause: Cause,
}

/// Causes of a [`RuleError`], in the words of Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// The rule is none.
    #[error("Syntax error")]
    Syntax,
    /// No command or category has the name.
    #[error("Unknown command or category name in ACL")]
    Unknown,
    /// A key pattern follows the right to all keys.
    #[error(
        "Adding a pattern after the * pattern (or the 'allkeys' flag) is not valid and does not \
         have any effect. Try 'resetkeys' to start with an empty list of patterns"
    )]
    AfterAllKeys,
    /// A channel pattern follows the right to all channels.
    #[error(
        "Adding a pattern after the * pattern (or the 'allchannels' flag) is not valid and does \
         not have any effect. Try 'resetchannels' to start with an empty list of channels"
    )]
    AfterAllChannels,
    /// The password to remove is none of the user.
    #[error("The password you are trying to remove from the user does not exist")]
    NoPassword,
    /// The hash of a password is malformed.
    #[error(
        "The password hash must be exactly 64 characters and contain only lowercase hexadecimal \
         characters"
    )]
    Hash,
    /// A subcommand has a further argument.
    #[error("Allowing first-arg of a subcommand is not supported")]
    SubcommandArgument,
    /// The rule belongs to version 2 of ACLs.
    #[error(
        "Selectors and key permissions (version 2 of ACLs) are not supported; use ~pattern for \
         reading and writing"
    )]
    Version2,
}

impl User {
    /// Applies a rule.
    ///
    /// # Errors
    ///
    /// The user is then unchanged.
    pub fn apply(&mut self, rule: impl AsRef<[u8]>) -> Result<(), RuleError> {
        let rule = rule.as_ref();
        self.try_apply(rule).map_err(|cause| RuleError { rule: shown(rule), cause })
    }

    /// Applies all rules, or none.
    ///
    /// # Errors
    ///
    /// The error of the first rule that cannot be applied; the user is then unchanged.
    pub fn apply_all<R: AsRef<[u8]>>(
        &mut self,
        rules: impl IntoIterator<Item = R>,
    ) -> Result<(), RuleError> {
        let mut changed = self.clone();
        rules.into_iter().try_for_each(|rule| changed.apply(rule))?;
        *self = changed;
        Ok(())
    }

    fn try_apply(&mut self, rule: &[u8]) -> Result<(), Cause> {
        match rule {
            [b'>', password @ ..] => self.add_password(PasswordHash::of(password)),
            [b'<', password @ ..] => self.remove_password(PasswordHash::of(password))?,
            [b'#', hash @ ..] => self.add_password(PasswordHash::parse(hash).ok_or(Cause::Hash)?),
            [b'!', hash @ ..] => {
                self.remove_password(PasswordHash::parse(hash).ok_or(Cause::Hash)?)?;
            }
            [b'~', pattern @ ..] => add_pattern(&mut self.keys, pattern, Cause::AfterAllKeys)?,
            [b'&', pattern @ ..] => {
                add_pattern(&mut self.channels, pattern, Cause::AfterAllChannels)?;
            }
            [b'+', command @ ..] => self.change_command(true, command)?,
            [b'-', command @ ..] => self.change_command(false, command)?,
            [b'%' | b'(', ..] => return Err(Cause::Version2),
            word => self.apply_word(&word.to_ascii_lowercase())?,
        }
        Ok(())
    }

    fn apply_word(&mut self, word: &[u8]) -> Result<(), Cause> {
        match word {
            b"on" => self.is_on = true,
            b"off" => self.is_on = false,
            b"nopass" => {
                self.needs_no_password = true;
                self.passwords.clear();
            }
            b"resetpass" => {
                self.needs_no_password = false;
                self.passwords.clear();
            }
            b"sanitize-payload" => self.sanitizes = Some(true),
            b"skip-sanitize-payload" => self.sanitizes = Some(false),
            b"allkeys" => self.keys.set_all(true),
            b"resetkeys" => self.keys.set_all(false),
            b"allchannels" => self.channels.set_all(true),
            b"resetchannels" => self.channels.set_all(false),
            b"allcommands" => self.commands.set_all(true),
            b"nocommands" => self.commands.set_all(false),
            // There are no selectors to clear.
            b"clearselectors" => {}
            b"reset" => {
                let name = std::mem::take(&mut self.name);
                *self = Self { name, sanitizes: Some(true), ..Self::new(b"") };
            }
            _ => return Err(Cause::Syntax),
        }
        Ok(())
    }

    fn add_password(&mut self, hash: PasswordHash) {
        if !self.passwords.contains(&hash) {
            self.passwords.push(hash);
        }
        self.needs_no_password = false;
    }

    fn remove_password(&mut self, hash: PasswordHash) -> Result<(), Cause> {
        let at = self.passwords.iter().position(|own| *own == hash).ok_or(Cause::NoPassword)?;
        self.passwords.remove(at);
        Ok(())
    }

    /// Changes the right to a category, a command, a subcommand, or a first argument.
    fn change_command(&mut self, allow: bool, name: &[u8]) -> Result<(), Cause> {
        if let [b'@', name @ ..] = name {
            if name.eq_ignore_ascii_case(b"all") {
                self.commands.set_all(allow);
            } else {
                let category = category::parse(name).ok_or(Cause::Unknown)?;
                self.commands.add(allow, Object::Category(category));
            }
            return Ok(());
        }
        let mut parts = name.splitn(2, |&byte| byte == b'|');
        let command = parts.next().and_then(by_name).ok_or(Cause::Unknown)?;
        let object = match parts.next() {
            None => Object::Command(command.id),
            Some([]) => return Err(Cause::Syntax),
            Some(sub) if !command.subcommands.is_empty() => {
                let sub = match sub.iter().position(|&byte| byte == b'|') {
                    Some(at) if command.subcommand(&sub[..at]).is_some() => {
                        return Err(Cause::SubcommandArgument);
                    }
                    _ => command.subcommand(sub).ok_or(Cause::Unknown)?,
                };
                Object::Command(sub.id)
            }
            Some(_) if !allow => return Err(Cause::Unknown),
            Some(first) if is_malformed(first) => return Err(Cause::Syntax),
            Some(first) => Object::First(command.id, first.to_ascii_lowercase()),
        };
        self.commands.add(allow, object);
        Ok(())
    }
}

fn add_pattern(patterns: &mut Patterns, pattern: &[u8], after_all: Cause) -> Result<(), Cause> {
    match pattern {
        b"*" => patterns.set_all(true),
        _ if patterns.all => return Err(after_all),
        _ if is_malformed(pattern) => return Err(Cause::Syntax),
        _ if patterns.list.iter().any(|own| own == pattern) => {}
        _ => patterns.list.push(pattern.to_vec()),
    }
    Ok(())
}

/// Returns whether a line of an ACL file could not have the text as a part of a word.
pub(super) fn is_malformed(text: &[u8]) -> bool {
    text.iter().any(|&byte| byte == 0 || matches!(byte, b' ' | b'\t'..=b'\r'))
}

/// Returns the rule for an error text, without a password.
fn shown(rule: &[u8]) -> String {
    match rule {
        [mark @ (b'>' | b'<'), ..] => format!("{}(password)", char::from(*mark)),
        rule => String::from_utf8_lossy(rule).into_owned(),
    }
}

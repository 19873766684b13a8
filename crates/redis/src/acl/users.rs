//! All users, and files of users.

use std::collections::BTreeMap;

use super::rules::is_malformed;
use super::{Cause, RuleError, User};

/// An error in a line of an ACL file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// The line does not begin with `user` and a name.
    #[error("reading the users, line {0}: the line must begin with user and a name; correct it")]
    Line(usize),
    /// Two lines have the same name.
    #[error("reading the users, line {0}: the user {1:?} has an earlier line; remove one of both")]
    Twice(usize, String),
    /// A rule cannot be applied.
    #[error("reading the users, line {line}: the rule {:?}: {}; correct it", rule.rule, rule.cause)]
    Rule {
        /// Number of the line, from 1.
        line: usize,
        /// Error of the rule.
        #[source]
        rule: RuleError,
    },
}

/// The users of a server. The user `default` always exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Users {
    users: BTreeMap<Vec<u8>, User>,
}

impl Default for Users {
    fn default() -> Self {
        let user = User::unrestricted();
        Self { users: BTreeMap::from([(user.name.clone(), user)]) }
    }
}

impl Users {
    /// Name of the user of each new connection.
    pub const DEFAULT: &'static [u8] = b"default";

    /// Reads the lines of an ACL file: `user`, a name, and rules. Empty lines and lines that begin
    /// with `#` are skipped.
    ///
    /// # Errors
    ///
    /// The first line that is wrong.
    pub fn parse(text: &[u8]) -> Result<Self, FileError> {
        let mut users = BTreeMap::new();
        for (index, text) in text.split(|&byte| byte == b'\n').enumerate() {
            let line = index + 1;
            let mut words = text.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
            match words.next() {
                None => continue,
                Some([b'#', ..]) => continue,
                Some(b"user") => {}
                Some(_) => return Err(FileError::Line(line)),
            }
            let name = words.next().ok_or(FileError::Line(line))?;
            let mut user = User::new(name);
            user.apply_all(words).map_err(|rule| FileError::Rule { line, rule })?;
            if users.insert(name.to_vec(), user).is_some() {
                return Err(FileError::Twice(line, String::from_utf8_lossy(name).into_owned()));
            }
        }
        let Self { users: default } = Self::default();
        default.into_iter().for_each(|(name, user)| {
            users.entry(name).or_insert(user);
        });
        Ok(Self { users })
    }

    /// Returns the content of an ACL file.
    pub fn text(&self) -> Vec<u8> {
        self.iter().flat_map(|user| user.line().into_iter().chain([b'\n'])).collect()
    }

    /// Iterates over the users in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = &User> {
        self.users.values()
    }

    /// Returns a user.
    pub fn get(&self, name: &[u8]) -> Option<&User> {
        self.users.get(name)
    }

    /// Creates or changes a user (ACL SETUSER). All rules are applied, or none.
    ///
    /// # Errors
    ///
    /// The error of the first rule that cannot be applied. A name with blanks or zeros is an error
    /// of the name as a rule; Redis's text for it is [`NAME_TEXT`](Self::NAME_TEXT).
    pub fn set<R: AsRef<[u8]>>(
        &mut self,
        name: &[u8],
        rules: impl IntoIterator<Item = R>,
    ) -> Result<(), RuleError> {
        if is_malformed(name) {
            let rule = String::from_utf8_lossy(name).into_owned();
            return Err(RuleError { rule, cause: Cause::Syntax });
        }
        let mut user = self.users.get(name).cloned().unwrap_or_else(|| User::new(name));
        user.apply_all(rules)?;
        self.users.insert(name.to_vec(), user);
        Ok(())
    }

    /// Text of the error reply for a name that [`is_name`](Self::is_name) refuses.
    pub const NAME_TEXT: &'static str = "ERR Usernames can't contain spaces or null characters";

    /// Returns whether a user may have the name.
    pub fn is_name(name: &[u8]) -> bool {
        !is_malformed(name)
    }

    /// Deletes a user. Returns whether the user was there; the user `default` stays.
    pub fn remove(&mut self, name: &[u8]) -> bool {
        name != Self::DEFAULT && self.users.remove(name).is_some()
    }
}

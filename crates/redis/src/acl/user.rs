//! A user: state, printed rules, authentication.

use super::PasswordHash;
use super::commands::Commands;

/// Patterns of keys or of channels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Patterns {
    /// Every key or channel.
    pub all: bool,
    pub list: Vec<Vec<u8>>,
}

impl Patterns {
    pub fn set_all(&mut self, all: bool) {
        *self = Self { all, list: Vec::new() };
    }

    fn write(&self, mark: u8, out: &mut Vec<u8>) {
        if self.all {
            out.extend([mark, b'*']);
        }
        for (index, pattern) in self.list.iter().enumerate() {
            if index > 0 {
                out.push(b' ');
            }
            out.push(mark);
            out.extend(pattern);
        }
    }
}

/// A user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub(super) name: Vec<u8>,
    pub(super) is_on: bool,
    pub(super) needs_no_password: bool,
    /// Whether RESTORE checks payloads of the user; absent without a rule about it.
    pub(super) sanitizes: Option<bool>,
    pub(super) passwords: Vec<PasswordHash>,
    pub(super) keys: Patterns,
    pub(super) channels: Patterns,
    pub(super) commands: Commands,
}

impl User {
    /// Creates a user that is off, without passwords and rights.
    pub fn new(name: &[u8]) -> Self {
        Self {
            name: name.to_vec(),
            is_on: false,
            needs_no_password: false,
            sanitizes: None,
            passwords: Vec::new(),
            keys: Patterns::default(),
            channels: Patterns::default(),
            commands: Commands::default(),
        }
    }

    /// Creates the user `default` as it is without any rule: no password, all rights.
    pub fn unrestricted() -> Self {
        let mut user = Self::new(b"default");
        (user.is_on, user.needs_no_password) = (true, true);
        user.keys.set_all(true);
        user.channels.set_all(true);
        user.commands.set_all(true);
        user
    }

    /// The name.
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    /// Returns whether the user may authenticate.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// Returns whether any password authenticates the user.
    pub fn needs_no_password(&self) -> bool {
        self.needs_no_password
    }

    /// The hashes of the passwords.
    pub fn passwords(&self) -> &[PasswordHash] {
        &self.passwords
    }

    /// Returns whether the user is on and has the password.
    ///
    /// The time depends on the number of the user's passwords, not on their content.
    pub fn authenticate(&self, password: &[u8]) -> bool {
        let matches = PasswordHash::any_matches(&self.passwords, password);
        self.is_on && (self.needs_no_password || matches)
    }

    /// Returns whether the user has every right, so that no check is needed.
    pub fn is_unrestricted(&self) -> bool {
        self.keys.all && self.channels.all && self.commands.allows_all()
    }

    /// The flags, as ACL GETUSER lists them.
    pub fn flags(&self) -> impl Iterator<Item = &'static str> {
        let sanitizes = match self.sanitizes {
            None => None,
            Some(true) => Some("sanitize-payload"),
            Some(false) => Some("skip-sanitize-payload"),
        };
        let password = self.needs_no_password.then_some("nopass");
        let state = if self.is_on { "on" } else { "off" };
        std::iter::once(state).chain(password).chain(sanitizes)
    }

    /// Appends the rules for commands to `out`.
    pub fn write_commands(&self, out: &mut Vec<u8>) {
        self.commands.write(out);
    }

    /// Appends the rules for keys to `out`: nothing without a right.
    pub fn write_keys(&self, out: &mut Vec<u8>) {
        self.keys.write(b'~', out);
    }

    /// Appends the rules for channels to `out`: nothing without a right.
    pub fn write_channels(&self, out: &mut Vec<u8>) {
        self.channels.write(b'&', out);
    }

    /// Returns the line of ACL LIST and of an ACL file: `user`, the name, and rules that make the
    /// same user.
    pub fn line(&self) -> Vec<u8> {
        let mut out = b"user ".to_vec();
        out.extend(&self.name);
        for flag in self.flags() {
            out.push(b' ');
            out.extend(flag.bytes());
        }
        for password in &self.passwords {
            out.extend(b" #");
            password.write(&mut out);
        }
        if self.keys != Patterns::default() {
            out.push(b' ');
            self.write_keys(&mut out);
        }
        if !self.channels.all {
            out.extend(b" resetchannels");
        }
        if self.channels.all || !self.channels.list.is_empty() {
            out.push(b' ');
            self.write_channels(&mut out);
        }
        out.push(b' ');
        self.write_commands(&mut out);
        out
    }
}

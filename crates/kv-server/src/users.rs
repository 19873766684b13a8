//! The users of the server, and the login of a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use redis_formats::acl::{User, Users as Table};

use crate::session::Subscriptions;

/// The users. A change increases the version, and connections then look up their user again.
#[derive(Debug)]
pub(crate) struct Users {
    table: RwLock<Table>,
    version: AtomicU64,
}

impl Default for Users {
    fn default() -> Self {
        Self { table: RwLock::default(), version: AtomicU64::new(1) }
    }
}

/// The user of a connection, with the rights that hold for `version` of the users.
#[derive(Clone, Debug)]
pub(crate) struct Login {
    pub name: Arc<[u8]>,
    pub user: Arc<User>,
    /// The user has proven its identity, or needs no proof.
    pub is_authenticated: bool,
    /// The user may do everything, so that commands are not checked.
    pub is_unrestricted: bool,
    version: u64,
}

impl Users {
    /// Reads the users.
    pub fn read<T>(&self, read: impl FnOnce(&Table) -> T) -> T {
        read(&self.table.read())
    }

    /// Changes the users.
    pub fn change<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        let mut table = self.table.write();
        let result = change(&mut table);
        self.version.fetch_add(1, Ordering::AcqRel);
        result
    }

    fn login(&self, user: &User, is_authenticated: bool, version: u64) -> Login {
        Login {
            name: user.name().into(),
            user: Arc::new(user.clone()),
            is_authenticated,
            is_unrestricted: user.is_unrestricted(),
            version,
        }
    }

    /// The login of a new connection: the user `default`, who may need no password.
    pub fn first_login(&self) -> Login {
        let table = self.table.read();
        let version = self.version.load(Ordering::Acquire);
        let unrestricted = User::unrestricted();
        let user = table.get(Table::DEFAULT).unwrap_or(&unrestricted);
        self.login(user, user.needs_no_password() && user.is_on(), version)
    }

    /// Checks a password.
    pub fn authenticate(&self, name: &[u8], password: &[u8]) -> Option<Login> {
        let table = self.table.read();
        let version = self.version.load(Ordering::Acquire);
        // Takes as long for a user that does not exist.
        let nobody = User::new(name);
        let user = table.get(name).unwrap_or(&nobody);
        user.authenticate(password).then(|| self.login(user, true, version))
    }

    /// Renews a login after a change. Returns false if the user is gone.
    pub fn renew(&self, login: &mut Login) -> bool {
        if login.version == self.version.load(Ordering::Acquire) {
            return true;
        }
        let table = self.table.read();
        let version = self.version.load(Ordering::Acquire);
        let Some(user) = table.get(&login.name) else { return false };
        *login = self.login(user, login.is_authenticated, version);
        true
    }

    /// Returns whether a connection may go on after a change of the users: its user exists, and
    /// has the right to each subscription.
    pub fn admits(&self, login: &mut Login, subscriptions: &Subscriptions) -> bool {
        self.renew(login)
            && (login.is_unrestricted
                || subscriptions.channels.iter().all(|name| login.user.may_receive(name))
                    && subscriptions.shards.iter().all(|name| login.user.may_receive(name))
                    && subscriptions.patterns.iter().all(|name| login.user.may_receive_all(name)))
    }

    /// Sets the password of the user `default`; an empty one removes it.
    pub fn require_password(&self, password: &str) {
        let rule = match password {
            "" => "nopass".to_owned(),
            password => format!(">{password}"),
        };
        // The rules are valid, so the change cannot fail.
        let _ = self.change(|table| table.set(Table::DEFAULT, ["resetpass".to_owned(), rule]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn login_follows_changes_of_its_user() {
        let users = Users::default();
        let first = users.first_login();
        assert!(first.is_authenticated && first.is_unrestricted);
        users.require_password("secret");
        assert!(!users.first_login().is_authenticated);
        assert!(users.authenticate(b"default", b"wrong").is_none());
        assert!(users.authenticate(b"default", b"secret").is_some());
        users.change(|table| table.set(b"bob", ["on", ">p", "+get", "~*"])).unwrap();
        let mut bob = users.authenticate(b"bob", b"p").unwrap();
        assert!(!bob.is_unrestricted && users.renew(&mut bob));
        users.change(|table| table.set(b"bob", ["allcommands", "allchannels"])).unwrap();
        assert!(users.renew(&mut bob) && bob.is_unrestricted);
        users.change(|table| table.remove(b"bob"));
        assert!(!users.renew(&mut bob));
        users.require_password("");
        assert!(users.first_login().is_authenticated);
    }

    #[test]
    fn renewed_login_is_authenticated_only_if_it_was() {
        let users = Users::default();
        let mut known = users.first_login();
        users.require_password("secret");
        let mut unknown = users.first_login();
        users.change(|table| table.set(b"default", ["+get"])).unwrap();
        assert!(users.renew(&mut known) && known.is_authenticated);
        assert!(users.renew(&mut unknown) && !unknown.is_authenticated);
    }
}

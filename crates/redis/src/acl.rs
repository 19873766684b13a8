//! Users and their rights: access control lists of version 1.
//!
//! A [`User`] has passwords, patterns of keys and of channels, and rights to commands. Rules change
//! a user ([`User::apply`]), and [`User::line`] prints rules that make the same user.
//! [`User::check`] tests a command with its arguments.
//!
//! ```
//! use redis_formats::acl::{Denied, User};
//! use redis_formats::command::lookup;
//!
//! # fn main() -> Result<(), redis_formats::Error> {
//! let mut user = User::new(b"reader");
//! user.apply_all(["on", ">secret", "~cache:*", "+@read"])?;
//! assert!(user.authenticate(b"secret"));
//!
//! let arguments = ["get", "other"];
//! let command = lookup(&arguments[..]).unwrap();
//! assert_eq!(user.check(command, &arguments[..]), Err(Denied::Key(1)));
//! # Ok(())
//! # }
//! ```
//!
//! # Differences from Redis 7.0
//!
//! - Rules of version 2 (`%R~`, `%W~`, selectors in parentheses) are refused.
//! - A line has the rules for commands in the order in which they were given, as Redis 7.2 prints
//!   them. Redis 7.0 searches for rules with the same effect.
//! - A category contains the commands of this project's table.

mod check;
mod commands;
mod password;
mod rules;
#[cfg(test)]
mod tests;
mod user;
mod users;

pub use check::Denied;
pub use password::PasswordHash;
pub use rules::{Cause, RuleError};
pub use user::User;
pub use users::{FileError, Users};

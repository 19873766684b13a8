//! The errors of all modules.

/// Any error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A request or a reply breaks the protocol.
    #[error(transparent)]
    Protocol(#[from] crate::request::ProtocolError),
    /// A reply breaks the protocol.
    #[error(transparent)]
    Reply(#[from] crate::reply::BadReply),
    /// A line of a configuration is wrong.
    #[error(transparent)]
    Conf(#[from] crate::conf::ConfError),
    /// A rule for a user is wrong.
    #[error(transparent)]
    Rule(#[from] crate::acl::RuleError),
    /// A line of an ACL file is wrong.
    #[error(transparent)]
    AclFile(#[from] crate::acl::FileError),
    /// A database file or a payload of DUMP is wrong.
    #[error(transparent)]
    Rdb(#[from] crate::rdb::RdbError),
    /// A text is no number.
    #[error(transparent)]
    Number(#[from] crate::number::NumberError),
}

//! Addresses of memory nodes, as `--pool` and `GRANARY_POOL` give them.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::Error;
use crate::client::ANSWER_TIMEOUT;
use crate::client::control::{SocketControl, until_admitted};
use crate::remote::{RemoteAddress, Token};

/// Address of a memory node, with the token and NIC needed to reach it.
///
/// ```
/// use pool::Address;
///
/// let local: Address = "shm:/run/granary.sock".parse()?;
/// assert_eq!(local, Address::Shm("/run/granary.sock".into()));
///
/// let remote: Address = "roce://memory-1;token=/etc/granary.token".parse()?;
/// assert_eq!(remote.to_string(), "roce://memory-1:4791;token=/etc/granary.token");
/// // remote.connect(Options::default()) connects to the memory node.
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    /// `shm:PATH`: the control socket of a memory node on this host.
    Shm(PathBuf),
    /// `roce://HOST:PORT`: a memory node on another host.
    Roce(Remote),
}

/// A memory node on another host.
///
/// Its text form is `roce://HOST:PORT`, optionally followed by `;token=FILE` and
/// `;nic=SOCKET;port=PORT`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Remote {
    /// Host and port of the memory node.
    pub to: RemoteAddress,
    /// The file that contains the token.
    pub token: Option<PathBuf>,
    /// The NIC of this host to use. Without it, the process runs a NIC of its own.
    pub nic: Option<LocalNic>,
}

/// A NIC of this host to which processes attach: see [`crate::NicService`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LocalNic {
    /// Path of its control socket.
    pub socket: PathBuf,
    /// UDP port of its RoCEv2 traffic.
    pub port: u16,
}

impl Address {
    /// Parses a list of addresses that are separated by commas.
    ///
    /// # Errors
    /// The error of the first invalid address.
    pub fn list(text: &str) -> Result<Vec<Self>, String> {
        let (mut all, mut rest) = (Vec::new(), text);
        loop {
            // A comma belongs to the path unless an address scheme follows it.
            let begins = |at: &usize| {
                let behind = &rest[at + 1..];
                behind.starts_with("shm:") || behind.starts_with(RemoteAddress::SCHEME)
            };
            let end = rest.match_indices(',').map(|(at, _)| at).find(begins);
            all.push(rest[..end.unwrap_or(rest.len())].parse()?);
            match end {
                Some(at) => rest = &rest[at + 1..],
                None => return Ok(all),
            }
        }
    }

    /// Formats a list in the form that [`Address::list`] parses.
    pub fn write_list(all: &[Self]) -> String {
        all.iter().map(Self::to_string).collect::<Vec<_>>().join(",")
    }

    /// Opens a connection for control requests only, without access to the pool's memory.
    pub fn ask(&self) -> Result<SocketControl, Error> {
        self.ask_within(ANSWER_TIMEOUT)
    }

    /// [`Address::ask`] with a time limit for each answer of the memory node.
    pub fn ask_within(&self, limit: Duration) -> Result<SocketControl, Error> {
        until_admitted(|| match self {
            Self::Shm(path) => SocketControl::connect_within(path, limit),
            Self::Roce(remote) => {
                let token = remote.token()?;
                let token = token.as_ref();
                SocketControl::connect_remote(&remote.to, token, limit, |_, _| Ok(None))
            }
        })
    }
}

impl Remote {
    /// Reads the token from its file, if one is given.
    pub fn token(&self) -> Result<Option<Token>, Error> {
        self.token.as_deref().map(Token::read).transpose()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shm(path) => write!(f, "shm:{}", path.display()),
            Self::Roce(Remote { to, token, nic }) => {
                write!(f, "{to}")?;
                if let Some(token) = token {
                    write!(f, ";token={}", token.display())?;
                }
                if let Some(nic) = nic {
                    write!(f, ";nic={};port={}", nic.socket.display(), nic.port)?;
                }
                Ok(())
            }
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const KNOWN: &str = "a pool is shm:PATH, where PATH is the socket that granary serve \
                             prints, or roce://HOST:PORT, where granary serve --listen runs";
        if text.starts_with(RemoteAddress::SCHEME) {
            return Remote::from_str(text).map(Self::Roce);
        }
        match text.split_once(':') {
            Some((_, "")) => Err(format!("{text:?} has nothing after the colon: {KNOWN}")),
            Some(("shm", path)) => Ok(Self::Shm(path.into())),
            _ => Err(format!("{text:?} is not a pool address: {KNOWN}")),
        }
    }
}

impl FromStr for Remote {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(';');
        let to = parts.next().unwrap_or_default().parse()?;
        let (mut token, mut socket, mut port) = (None, None, None);
        for part in parts {
            match part.split_once('=') {
                Some(("token", file)) if !file.is_empty() => token = Some(PathBuf::from(file)),
                Some(("nic", path)) if !path.is_empty() => socket = Some(PathBuf::from(path)),
                Some(("port", number)) => port = number.parse().ok().filter(|port| *port > 0),
                _ => {
                    return Err(format!(
                        "{part:?} is not one of token=FILE, nic=SOCKET, port=PORT"
                    ));
                }
            }
        }
        let nic = match (socket, port) {
            (Some(socket), Some(port)) => Some(LocalNic { socket, port }),
            (None, None) => None,
            _ => return Err(format!("{text:?}: give both nic=SOCKET and port=PORT, or neither")),
        };
        Ok(Self { to, token, nic })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_read_and_written() {
        for text in [
            "shm:/run/g.sock",
            "roce://host:4791",
            "roce://[::1]:7;token=/etc/token",
            "roce://host:4791;token=t;nic=/tmp/n.sock;port=40000",
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
        }
        let several = "shm:/run/a,b.sock,roce://host:4791;token=t,shm:/c";
        let all = Address::list(several).unwrap();
        assert_eq!((all.len(), Address::write_list(&all)), (3, several.to_string()));
        assert_eq!(Address::list("shm:/a").unwrap(), [Address::Shm("/a".into())]);
        assert!(Address::list("memory:1GiB").is_err() && Address::list("shm:/a,shm:").is_err());
        for (text, why) in [
            ("", "not a pool"),
            ("shm:", "after the colon"),
            ("/run/g.sock", "not a pool"),
            ("roce://", "not a name"),
            ("roce://h;nic=/n", "give both"),
            ("roce://h;nic=/n;port=0", "give both"),
            ("roce://h;token=", "not one of"),
        ] {
            let error = text.parse::<Address>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}

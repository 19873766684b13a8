//! Address of a memory node on another host: `roce://HOST:PORT`, by name or IP address.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

use crate::Error;

/// Default port of a memory node, for TCP and UDP: the port of RoCEv2.
pub const PORT: u16 = super::route::UDP_PORT;

/// Host and port of a memory node. `HOST` is a name, an IPv4 address, or an IPv6 address in
/// brackets.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct RemoteAddress {
    host: String,
    port: u16,
}

impl RemoteAddress {
    /// Prefix of an address on another host.
    pub const SCHEME: &str = "roce://";

    /// Resolves the name to its IP addresses, in the system's order.
    pub fn resolve(&self) -> Result<Vec<SocketAddr>, Error> {
        let attempt = || format!("looking up {}", self.host);
        let found = (self.host.as_str(), self.port)
            .to_socket_addrs()
            .map_err(|source| Error::System { attempt: attempt(), source })?;
        // Converts an IPv4 address in IPv6 form to IPv4, because RoCEv2 packets to it use IPv4.
        let canonical = |a: SocketAddr| match a.ip().to_canonical() {
            IpAddr::V4(ip) => SocketAddr::from((ip, a.port())),
            IpAddr::V6(_) => a,
        };
        let found: Vec<SocketAddr> = found.map(canonical).collect();
        if found.is_empty() {
            let why = "the name has no address; check the name, or give the IP address".into();
            return Err(Error::Unreachable { attempt: attempt(), why });
        }
        Ok(found)
    }
}

impl From<SocketAddr> for RemoteAddress {
    fn from(address: SocketAddr) -> Self {
        Self { host: address.ip().to_string(), port: address.port() }
    }
}

impl fmt::Display for RemoteAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        let scheme = Self::SCHEME;
        match host.contains(':') {
            true => write!(f, "{scheme}[{host}]:{port}"),
            false => write!(f, "{scheme}{host}:{port}"),
        }
    }
}

impl FromStr for RemoteAddress {
    type Err = String;

    /// Parses an address with or without `roce://`. The default port is [`PORT`].
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| {
            Err(format!(
                "{text:?} is not roce://HOST:PORT: {why} (write an IPv6 address in brackets)"
            ))
        };
        let rest = text.strip_prefix(Self::SCHEME).unwrap_or(text);
        let (host, port) = match rest.strip_prefix('[') {
            Some(rest) => match rest.split_once(']') {
                Some((host, "")) => (host, None),
                Some((host, port)) => match port.strip_prefix(':') {
                    Some(port) => (host, Some(port)),
                    None => return wrong("there is text after the bracket"),
                },
                None => return wrong("the bracket is not closed"),
            },
            None => match rest.split_once(':') {
                Some((_, port)) if port.contains(':') => return wrong("it has too many colons"),
                Some((host, port)) => (host, Some(port)),
                None => (rest, None),
            },
        };
        let odd = |c: char| c.is_whitespace() || c.is_control() || "/@?#".contains(c);
        if host.is_empty() || host.contains(odd) {
            return wrong("the host is not a name or address");
        }
        let port = match port.map(str::parse::<u16>) {
            None => PORT,
            Some(Ok(port)) if port > 0 => port,
            Some(_) => return wrong("the port is not a number from 1 to 65535"),
        };
        Ok(Self { host: host.into(), port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, full) in [
            ("roce://memory-1", "roce://memory-1:4791"),
            ("memory-1:7", "roce://memory-1:7"),
            ("roce://10.0.0.2:4792", "roce://10.0.0.2:4792"),
            ("roce://[fd00::2]", "roce://[fd00::2]:4791"),
            ("[::1]:9", "roce://[::1]:9"),
        ] {
            let address: RemoteAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), full);
            assert_eq!(full.parse(), Ok(address));
        }
        for (text, why) in [
            ("roce://", "not a name"),
            ("fd00::2", "too many colons"),
            ("[fd00::2", "not closed"),
            ("[fd00::2]4791", "after the bracket"),
            ("host:0", "1 to 65535"),
            ("host:70000", "1 to 65535"),
            ("ho st", "not a name"),
            ("host/pool", "not a name"),
        ] {
            let error = text.parse::<RemoteAddress>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn resolve_skips_the_lookup_of_an_ip_address() {
        let address: RemoteAddress = "[::1]:7".parse().unwrap();
        assert_eq!(address.resolve().unwrap(), ["[::1]:7".parse().unwrap()]);
        let address: RemoteAddress = "[::ffff:10.0.0.2]:7".parse().unwrap();
        assert_eq!(address.resolve().unwrap(), ["10.0.0.2:7".parse().unwrap()]);
        let address: RemoteAddress = "[::1]:7".parse().unwrap();
        assert_eq!(RemoteAddress::from("[::1]:7".parse::<SocketAddr>().unwrap()), address);
    }

    proptest! {
        #[test]
        fn reading_never_panics(text in ".{0,40}") {
            if let Ok(address) = text.parse::<RemoteAddress>() {
                prop_assert_eq!(address.to_string().parse(), Ok(address));
            }
        }
    }
}

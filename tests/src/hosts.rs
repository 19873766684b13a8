//! Two hosts on one machine: network namespaces, with a cable between them that is good, or is not.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};

pub use crate::cable::Trouble;
use crate::cable::{End, Shuttle, in_namespace, open_device};
use crate::needs;

/// The cable's name at both ends.
const CABLE: &str = "cable";
/// Their addresses.
pub const V4: [&str; 2] = ["10.77.0.1", "10.77.0.2"];
/// The same in IPv6.
pub const V6: [&str; 2] = ["fd77::1", "fd77::2"];

/// Two hosts.
pub struct Hosts {
    names: [String; 2],
    _shuttle: Option<Shuttle>,
}

impl Hosts {
    /// Two hosts with a good cable (veth). `None` where this user may make none: the test is skipped.
    pub fn new() -> Result<Option<Self>> {
        Self::made(None)
    }

    /// Two hosts with a bad cable: every packet passes through this process.
    pub fn with(trouble: Trouble) -> Result<Option<Self>> {
        Self::made(Some(trouble))
    }

    fn made(trouble: Option<Trouble>) -> Result<Option<Self>> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        if !rustix::process::geteuid().is_root() {
            needs::skip("only root can make network namespaces");
            return Ok(None);
        }
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("granary-{}-{number}-{side}", std::process::id());
        let mut hosts = Self { names: [name("a"), name("b")], _shuttle: None };
        for name in &hosts.names {
            ip(&["netns", "add", name])?;
        }
        match trouble {
            None => {
                let [a, b] = &hosts.names;
                let ends = ["link", "add", CABLE, "netns", a, "type", "veth", "peer"];
                ip(&[&ends[..], &["name", CABLE, "netns", b]].concat())?;
            }
            Some(trouble) => {
                let end = |name: &String| open_device(name, CABLE, false).map(End::Device);
                let ends = [end(&hosts.names[0])?, end(&hosts.names[1])?];
                hosts._shuttle = Some(Shuttle::start(ends, trouble)?);
            }
        }
        for (i, name) in hosts.names.iter().enumerate() {
            let inside = |more: &[&str]| ip(&[&["-n", name.as_str()], more].concat());
            inside(&["addr", "add", &format!("{}/24", V4[i]), "dev", CABLE])?;
            inside(&["addr", "add", &format!("{}/64", V6[i]), "dev", CABLE, "nodad"])?;
            inside(&["link", "set", "lo", "up"])?;
            inside(&["link", "set", CABLE, "up"])?;
        }
        Ok(Some(hosts))
    }

    /// A program on a host, 0 or 1.
    pub fn command(&self, host: usize, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host]]).arg(program);
        command
    }

    /// Does something in this process as if it ran on a host.
    pub fn inside<T: Send + 'static>(
        &self,
        host: usize,
        what: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        in_namespace(&self.names[host], what)
    }

    /// Pulls the cable out at a host.
    pub fn unplug(&self, host: usize) -> Result<()> {
        ip(&["-n", &self.names[host], "link", "set", CABLE, "down"])
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&["netns", "del", name]);
        }
    }
}

/// Runs `ip`.
pub(crate) fn ip(arguments: &[&str]) -> Result<()> {
    let out = Command::new("ip").args(arguments).output().context("ip (Debian: iproute2)")?;
    let said = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "ip {}: {}", arguments.join(" "), said.trim());
    Ok(())
}

//! Two hosts on one machine: network namespaces, connected by a perfect or an impaired link.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};

pub use crate::impaired_link::Impairment;
use crate::impaired_link::{ImpairedLink, LinkEnd, in_namespace, open_device};
use crate::needs;

/// Name of the network device at both ends of the link.
const DEVICE: &str = "cable";
/// IPv4 addresses of the hosts.
pub const V4: [&str; 2] = ["10.77.0.1", "10.77.0.2"];
/// IPv6 addresses of the hosts.
pub const V6: [&str; 2] = ["fd77::1", "fd77::2"];

/// Two hosts.
pub struct Hosts {
    names: [String; 2],
    _link: Option<ImpairedLink>,
}

impl Hosts {
    /// Creates two hosts with a perfect link (veth). `None` if this user may not create network
    /// namespaces; then the test is skipped.
    pub fn new() -> Result<Option<Self>> {
        Self::create(None)
    }

    /// Creates two hosts with an impaired link: every packet passes through this process.
    pub fn with(impairment: Impairment) -> Result<Option<Self>> {
        Self::create(Some(impairment))
    }

    fn create(impairment: Option<Impairment>) -> Result<Option<Self>> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        if !rustix::process::geteuid().is_root() {
            needs::skip("only root can create network namespaces");
            return Ok(None);
        }
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("granary-{}-{number}-{side}", std::process::id());
        let mut hosts = Self { names: [name("a"), name("b")], _link: None };
        for name in &hosts.names {
            ip(&["netns", "add", name])?;
        }
        match impairment {
            None => {
                let [a, b] = &hosts.names;
                let ends = ["link", "add", DEVICE, "netns", a, "type", "veth", "peer"];
                ip(&[&ends[..], &["name", DEVICE, "netns", b]].concat())?;
            }
            Some(impairment) => {
                let end = |name: &String| open_device(name, DEVICE, false).map(LinkEnd::Device);
                let ends = [end(&hosts.names[0])?, end(&hosts.names[1])?];
                hosts._link = Some(ImpairedLink::start(ends, impairment)?);
            }
        }
        for (i, name) in hosts.names.iter().enumerate() {
            let inside = |more: &[&str]| ip(&[&["-n", name.as_str()], more].concat());
            inside(&["addr", "add", &format!("{}/24", V4[i]), "dev", DEVICE])?;
            inside(&["addr", "add", &format!("{}/64", V6[i]), "dev", DEVICE, "nodad"])?;
            inside(&["link", "set", "lo", "up"])?;
            inside(&["link", "set", DEVICE, "up"])?;
        }
        Ok(Some(hosts))
    }

    /// A command that runs a program on a host, 0 or 1.
    pub fn command(&self, host: usize, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host]]).arg(program);
        command
    }

    /// Runs a closure of this process in the network namespace of a host.
    pub fn inside<T: Send + 'static>(
        &self,
        host: usize,
        what: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        in_namespace(&self.names[host], what)
    }

    /// Takes the link of a host up again, with its addresses.
    pub fn plug(&self, host: usize) -> Result<()> {
        ip(&["-n", &self.names[host], "link", "set", DEVICE, "up"])?;
        let address = format!("{}/64", V6[host]);
        ip(&["-n", &self.names[host], "addr", "replace", &address, "dev", DEVICE, "nodad"])
    }

    /// Takes the link down at a host.
    pub fn unplug(&self, host: usize) -> Result<()> {
        ip(&["-n", &self.names[host], "link", "set", DEVICE, "down"])
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&["netns", "del", name]);
        }
    }
}

/// Runs the command `ip`.
pub(crate) fn ip(arguments: &[&str]) -> Result<()> {
    let out =
        Command::new("ip").args(arguments).output().context("running ip (Debian: iproute2)")?;
    let error = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "ip {}: {}", arguments.join(" "), error.trim());
    Ok(())
}

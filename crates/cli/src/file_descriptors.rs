//! The limit of open file descriptors of a memory node's process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors per client: two connections, an eventfd, and a short-lived one.
const PER_CLIENT: u64 = 4;
/// Descriptors of the memory node itself, and of connections that only query its status.
const BASE: u64 = 256;

/// Raises this process's soft limit to the hard limit, and warns if that is too low for `clients`.
///
/// The usual soft limit, 1024, protects programs that use `select`; 256 clients need more.
pub fn raise_limit_for(clients: u32) {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let current = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    let needed = BASE + PER_CLIENT * u64::from(clients);
    if let Some(current) = current
        && current < needed
    {
        eprintln!(
            "granary: warning: this process may open {current} file descriptors, but {clients} \
             clients need about {needed}: raise the limit (ulimit -n) or lower --clients"
        );
    }
}

//! The limit of open file descriptors of a server's process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors per client: two connections, an eventfd, and a short-lived one.
const PER_CLIENT: u64 = 4;
/// Descriptors of the memory node itself, and of connections that only query its status.
const BASE: u64 = 256;

/// Raises this process's soft limit to the hard limit. Returns the limit, `None` if there is none.
pub fn raise_limit() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    }
}

/// Raises this process's soft limit to the hard limit, and warns if that is too low for `clients`.
///
/// The usual soft limit, 1024, protects programs that use `select`; 256 clients need more.
pub fn raise_limit_for(clients: u32) {
    let current = raise_limit();
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

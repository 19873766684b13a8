//! Descriptors of a memory node: how many its process may have.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors of a client: two connections, an eventfd, and one that is in use for a moment.
const EACH: u64 = 4;
/// Descriptors of the memory node itself, and of those who only ask.
const OWN: u64 = 256;

/// Raises this process's limit as far as it may, and warns if that is too little for so many
/// clients.
///
/// The usual soft limit, 1024, is for programs that use `select`; it is less than 256 clients need.
pub fn provide_for(clients: u32) {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let now = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    let needed = OWN + EACH * u64::from(clients);
    if let Some(now) = now
        && now < needed
    {
        eprintln!(
            "granary: warning: this process may have {now} descriptors, and {clients} clients \
             need about {needed}: raise the limit (ulimit -n), or serve fewer (--clients)"
        );
    }
}

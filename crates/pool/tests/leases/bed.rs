//! A memory node of a scheme with leases, and its compute nodes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pool::scheme::{ConnectionEpoch, LeaseStatus};
use pool::{
    DomainToken, EmbeddedNode, Endpoint, Error, Grant, Object, Options, Permission, Pool, Right,
    Scheme, Service, Settings, schemes,
};

/// The domain of most compute nodes of a check.
pub const OURS: Option<DomainToken> = Some(DomainToken([1; 32]));
/// Another domain.
pub const THEIRS: Option<DomainToken> = Some(DomainToken([2; 32]));
/// A lease that does not end during a check.
pub const LONG: Duration = Duration::from_secs(60);
/// A lease that a check waits for.
pub const SHORT: Duration = Duration::from_millis(20);
/// Longest time that a condition of a check may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// A memory node.
pub enum Bed {
    /// In this process, on the inline NIC.
    Embedded(Arc<EmbeddedNode>),
    /// Behind its control socket.
    Served(Service),
}

/// Settings of a memory node of 16 chunks.
pub fn settings(scheme: Scheme) -> Settings {
    let settings =
        Settings { donate_bytes: 1 << 20, chunk_bytes: 64 << 10, scheme, ..Settings::default() };
    settings.with("lease_max_us", 2 * LONG.as_micros() as u64)
}

/// Runs `check` on a memory node of each scheme with leases, in each place. Afterwards nothing is
/// left at the memory node.
pub fn each(check: impl Fn(&Bed)) {
    each_with(|settings| settings, check);
}

/// Like [`each`], and also runs `check` on `patronus-paper`, which has other keys and headers.
pub fn each_form(check: impl Fn(&Bed)) {
    each(&check);
    let embedded = EmbeddedNode::start(&settings(schemes::PATRONUS_PAPER)).unwrap();
    check_on(Bed::Embedded(Arc::new(embedded)), &check);
}

/// Like [`each`], with other settings.
pub fn each_with(change: impl Fn(Settings) -> Settings, check: impl Fn(&Bed)) {
    for scheme in schemes::ALL.iter().copied().filter(|scheme| scheme.leases) {
        let settings = change(settings(scheme));
        let embedded = EmbeddedNode::start(&settings).unwrap();
        let served = Service::start(&settings, &Endpoint::Fresh).unwrap();
        for bed in [Bed::Embedded(Arc::new(embedded)), Bed::Served(served)] {
            check_on(bed, &check);
        }
    }
}

/// Runs `check`, after which nothing may be left at the memory node.
pub fn check_on(bed: Bed, check: impl Fn(&Bed)) {
    check(&bed);
    let pool = bed.connect(None);
    until(|| {
        let status = pool.node_status().unwrap().node;
        let lease = status.lease.expect("a scheme with leases");
        status.free == status.chunks && lease.objects == 0 && lease.permissions == 0
    });
    pool.audit().unwrap();
}

impl Bed {
    /// A compute node of a domain.
    pub fn connect(&self, domain: Option<DomainToken>) -> Pool {
        let options = Options { groups: Some(1), domain, ..Options::default() };
        match self {
            Bed::Embedded(node) => Pool::embedded_in(node, options).unwrap(),
            Bed::Served(service) => Pool::connect(service.path(), options).unwrap(),
        }
    }
}

/// Waits until a condition holds.
pub fn until(mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "the condition does not come true");
        std::thread::yield_now();
    }
}

/// State of the leases at the memory node.
pub fn lease_status(pool: &Pool) -> LeaseStatus {
    pool.node_status().unwrap().node.lease.expect("a scheme with leases")
}

/// Waits until `count` requests wait for permissions to end.
pub fn until_waiting(pool: &Pool, count: u64) {
    until(|| lease_status(pool).waiting == count);
}

/// Waits until the compute node believes that a lease has ended.
pub fn until_expired(pool: &Pool, permission: &Permission) {
    until(|| pool.left(permission).is_zero());
}

/// The grant of a permission as a compute node has it that ignores right, lease and holder.
pub fn forged(permission: &Permission) -> Grant {
    let grant = permission.lease().grant.with_connection(ConnectionEpoch::default());
    grant.leased(Right::Write, Grant::FOREVER)
}

/// Asserts that the memory node's NIC refuses the keys of `grant`.
pub fn assert_dead(pool: &Pool, grant: &Grant) {
    let refused = pool.read_blocking(grant, 0, &mut [0; 8]);
    assert!(matches!(refused, Err(Error::Access { .. })), "{refused:?}");
}

/// Asserts that a request does not find its object.
pub fn assert_no_such<T: std::fmt::Debug>(result: Result<T, Error>) {
    assert!(matches!(result, Err(Error::NoSuchObject { .. })), "{result:?}");
}

/// Bytes 0 to 7 of what a permission opens, as a word.
pub fn word(pool: &Pool, permission: &Permission) -> u64 {
    let mut bytes = [0; 8];
    pool.read_blocking(permission, 0, &mut bytes).unwrap();
    u64::from_be_bytes(bytes)
}

/// An object with the same entry that was allocated before this one.
pub fn stale(object: Object) -> Object {
    Object { generation: object.generation.wrapping_sub(1), ..object }
}

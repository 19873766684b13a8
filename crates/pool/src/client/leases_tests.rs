//! Tests of the checks before an access, and of requests to a scheme with leases that is made of
//! scheme `rpc-mw-2`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use scheme::info::SchemeInfo;
use scheme::lease::Lease;
use scheme::registry::{ClientFamily, ClientParts, Family};
use scheme::{Answer, ClientScheme, ConnectionEpoch, Lane, Right, Scheme};
use std::future::Future;

use super::*;
use crate::client::{EmbeddedNode, Options, Step, Transfer};
use crate::edge::DefaultNic;
use crate::{ConnectReply, MultiPool, NodeIndex, Placement, Settings, schemes};

const LEASE: Duration = Duration::from_secs(600);

fn settings() -> Settings {
    let scheme = schemes::RPC_MW_2;
    Settings { donate_bytes: 1 << 20, chunk_bytes: 64 << 10, scheme, ..Settings::default() }
}

/// Result of an access without its value.
type Outcome = Result<(), Error>;

/// Executes every kind of access to `grant`. Returns the results of those that read, and of those
/// that write.
fn every_access(pool: &Pool, grant: &Grant) -> (Vec<Outcome>, Vec<Outcome>) {
    let buffer = pool.buffer(64).unwrap();
    let transfer = Transfer { grant, offset: 0, buffer_offset: 0, len: 8 };
    let (mut word, mut old, lane) = ([0; 8], 0, Lane(0));
    let into = &mut word;
    let reads = vec![
        pool.read_blocking(grant, 0, into),
        block_on(pool.read(grant, 0, into)),
        pool.read_into(&transfer, &buffer, lane).and_then(|read| read.wait()),
        pool.read_batch_blocking(&[transfer], &buffer, lane),
        pool.run_blocking(lane, &mut [Step::Read { grant, offset: 0, into }]),
        pool.run_blocking(lane, &mut [Step::ReadInto(transfer, &buffer)]),
    ];
    let (expected, new, add) = (0, 0, 0);
    let cas = Step::CompareAndSwap { grant, offset: 0, expected, new, old: &mut old };
    let cas = pool.run_blocking(lane, &mut [cas]);
    let faa =
        pool.run_blocking(lane, &mut [Step::FetchAndAdd { grant, offset: 0, add, old: &mut old }]);
    let writes = vec![
        pool.write_blocking(grant, 0, &[0; 8]),
        pool.write_blocking(grant, 0, &[0; 4096]),
        block_on(pool.write(grant, 0, &[0; 8])),
        pool.compare_and_swap_blocking(grant, 0, expected, new).map(drop),
        block_on(pool.compare_and_swap(grant, 0, expected, new)).map(drop),
        pool.fetch_and_add_blocking(grant, 0, add).map(drop),
        block_on(pool.fetch_and_add(grant, 0, add)).map(drop),
        pool.write_from(&transfer, &buffer, lane).and_then(|write| write.wait()),
        pool.write_batch_blocking(&[transfer], &buffer, lane),
        pool.run_blocking(lane, &mut [Step::Write { grant, offset: 0, from: &[0; 8] }]),
        pool.run_blocking(lane, &mut [Step::WriteFrom(transfer, &buffer)]),
        cas,
        faa,
    ];
    (reads, writes)
}

/// Number of accesses that the NIC executed.
fn executed(pool: &Pool) -> u64 {
    let stats = pool.stats();
    stats.reads + stats.writes + stats.atomics
}

#[test]
fn right_and_lease_are_checked_before_every_access() {
    let pool = Pool::embedded(settings()).unwrap();
    let grant = pool.allocate_blocking().unwrap();
    let now = pool.nic().now();
    let all_ok = |results: &[Outcome]| results.iter().all(|result| result.is_ok());

    let (reads, writes) = every_access(&pool, &grant.leased(Right::Write, now + LEASE));
    assert!(all_ok(&reads) && all_ok(&writes), "{reads:?} {writes:?}");
    assert_eq!(executed(&pool), (reads.len() + writes.len()) as u64);

    let before = executed(&pool);
    let (reads, writes) = every_access(&pool, &grant.leased(Right::Read, now + LEASE));
    assert!(all_ok(&reads), "{reads:?}");
    for refused in &writes {
        assert!(matches!(refused, Err(Error::NotPermitted { .. })), "{refused:?}");
    }
    assert_eq!(executed(&pool) - before, reads.len() as u64, "nothing else was posted");

    let before = executed(&pool);
    let (reads, writes) = every_access(&pool, &grant.leased(Right::Write, now));
    for refused in reads.iter().chain(&writes) {
        assert!(matches!(refused, Err(Error::Expired { .. })), "{refused:?}");
    }
    assert_eq!(executed(&pool), before, "nothing was posted");
    assert_eq!(pool.stats().expiries, (reads.len() + writes.len()) as u64);
}

#[test]
fn list_with_an_expired_step_has_no_effect() {
    let pool = Pool::embedded(settings()).unwrap();
    let grant = &pool.allocate_blocking().unwrap();
    let expired = &grant.leased(Right::Write, pool.nic().now());
    let steps = &mut [
        Step::Write { grant, offset: 0, from: &[7; 8] },
        Step::Write { grant: expired, offset: 8, from: &[7; 8] },
    ];
    let refused = pool.run_blocking(Lane(0), steps);
    assert!(matches!(refused, Err(Error::Expired { op: "write" })), "{refused:?}");
    assert_eq!(executed(&pool), 0);
}

/// The check of a lease relies on this.
#[test]
fn coarse_time_is_never_later_than_the_exact_one() {
    let pool = Pool::embedded(settings()).unwrap();
    for _ in 0..100_000 {
        let coarse = pool.nic().now_coarse();
        assert!(coarse <= pool.nic().now());
    }
}

#[test]
fn refused_access_has_expired_only_after_its_lease() {
    let pool = Pool::embedded(settings()).unwrap();
    let inner = &*pool.inner;
    let (past, future) = (pool.nic().now(), pool.nic().now() + LEASE);
    for (status, until, expired) in [
        (Status::RemoteAccess, past, true),
        (Status::RemoteAccess, future, false),
        (Status::RemoteAccess, Grant::FOREVER, false),
        // The access may have taken effect.
        (Status::RetryExceeded, past, false),
    ] {
        let error = inner.refused("read", status, until);
        match expired {
            true => assert!(matches!(error, Error::Expired { op: "read" }), "{error}"),
            false => assert!(matches!(error, Error::Access { .. }), "{error}"),
        }
    }
    assert_eq!(pool.stats().expiries, 1);

    // A dead key without a lease.
    let grant = pool.allocate_blocking().unwrap();
    pool.free_blocking(grant).unwrap();
    let refused = pool.read_blocking(&grant, 0, &mut [0; 8]);
    assert!(matches!(refused, Err(Error::Access { .. })), "{refused:?}");
}

#[test]
fn scheme_without_leases_is_named() {
    let pool = Pool::embedded(settings()).unwrap();
    assert!(!pool.has_leases());
    let terms = LeaseTerms::exclusive(LEASE);
    let error = pool.allocate_object_blocking(64, Others::None, &terms).unwrap_err().to_string();
    assert!(error.starts_with("scheme = rpc-mw-2") && error.contains("patronus"), "{error}");
}

/// The client of `rpc-mw-2`, with leases that the client alone keeps: each object is a chunk.
struct Leasing {
    client: Box<dyn ClientScheme>,
    nic: DefaultNic,
    chunks: Mutex<BTreeMap<u32, Grant>>,
    /// Permissions granted so far.
    granted: Mutex<u64>,
    done: Sender<Done>,
}

/// A request that the scheme has executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Done {
    Extend,
    Renew,
    Revoke(u64),
    Free(u32),
}

/// The family of [`Leasing`].
struct LeasingFamily(Mutex<Sender<Done>>);

static LEASING: SchemeInfo = SchemeInfo { leases: true, ..*schemes::RPC_MW_2 };

impl Family for LeasingFamily {
    fn schemes(&self) -> &'static [Scheme] {
        const { &[&LEASING] }
    }
}

impl ClientFamily<DefaultNic> for LeasingFamily {
    fn client(&self, parts: &ClientParts<'_, DefaultNic>) -> Result<Box<dyn ClientScheme>, Error> {
        let (_, family) = schemes::clients::<DefaultNic>().known(LEASING.name)?;
        Ok(Box::new(Leasing {
            client: family.client(parts)?,
            nic: parts.nic.clone(),
            chunks: Mutex::default(),
            granted: Mutex::default(),
            done: self.0.lock().clone(),
        }))
    }
}

impl ClientScheme for Leasing {
    fn allocate(&self, group: GroupId) -> Answer<'_, Grant> {
        self.client.allocate(group)
    }

    fn free<'a>(&'a self, grant: &'a Grant) -> Answer<'a, ()> {
        self.client.free(grant)
    }

    fn leases(&self) -> Option<&dyn LeaseScheme> {
        Some(self)
    }

    fn each_queue(&self, each: &mut dyn FnMut(&dyn scheme::request_queue::ManagementQp)) {
        self.client.each_queue(each);
    }

    fn accept(&self, terms: &ConnectReply) -> Result<(), Error> {
        self.client.accept(terms)
    }
}

impl Leasing {
    fn grant(&self, chunk: &Grant, object: Object, terms: &LeaseTerms) -> Permission {
        let mut granted = self.granted.lock();
        *granted += 1;
        let since = self.nic.now();
        let grant = chunk.leased(terms.right, since + terms.lease);
        let number = *granted;
        let lease = Lease { grant, number, slot: 0, word: 0, header: None, since, ended: false };
        Permission::new(object, terms.clone(), lease)
    }

    fn done(&self, what: Done) {
        // The receiver outlives the pool, except in a test that does not look at it.
        let _ = self.done.send(what);
    }
}

/// Is pending once, so that a caller can drop a request that is under way.
async fn pending_once() {
    let mut polled = false;
    std::future::poll_fn(|cx| {
        cx.waker().wake_by_ref();
        if std::mem::replace(&mut polled, true) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

impl LeaseScheme for Leasing {
    fn allocate_object<'a>(
        &'a self,
        group: GroupId,
        bytes: u64,
        _: Others,
        terms: &'a LeaseTerms,
    ) -> Answer<'a, (Object, Permission)> {
        Box::pin(async move {
            let chunk = self.client.allocate(group).await?;
            pending_once().await;
            let entry = u32::from(chunk.entry);
            self.chunks.lock().insert(entry, chunk);
            let object = Object { incarnation: 0, entry, generation: 0, len: bytes, node: 0 };
            Ok((object, self.grant(&chunk, object, terms)))
        })
    }

    fn acquire<'a>(
        &'a self,
        _: GroupId,
        object: &'a Object,
        terms: &'a LeaseTerms,
    ) -> Answer<'a, Permission> {
        Box::pin(async move {
            pending_once().await;
            let entry = object.entry;
            let none = Error::NoSuchObject { attempt: "acquiring object", entry };
            let chunk = self.chunks.lock().get(&entry).copied().ok_or(none)?;
            Ok(self.grant(&chunk, *object, terms))
        })
    }

    fn extend<'a>(&'a self, permission: &'a Permission, by: Duration) -> Answer<'a, Duration> {
        Box::pin(async move {
            pending_once().await;
            permission.update(|lease| lease.grant.until = self.nic.now() + by);
            self.done(Done::Extend);
            Ok(by)
        })
    }

    fn renew<'a>(&'a self, permission: &'a Permission) -> Answer<'a, Duration> {
        Box::pin(async move {
            let chunk = self.chunks.lock()[&permission.object().entry];
            let new = self.grant(&chunk, permission.object(), permission.terms()).lease();
            permission.update(|lease| *lease = new);
            self.done(Done::Renew);
            Ok(permission.terms().lease)
        })
    }

    fn revoke<'a>(&'a self, permission: &'a Permission) -> Answer<'a, ()> {
        Box::pin(async move {
            let number = permission.update(|lease| {
                lease.ended = true;
                lease.number
            });
            self.done(Done::Revoke(number));
            Ok(())
        })
    }

    fn free_object<'a>(&'a self, object: &'a Object) -> Answer<'a, ()> {
        Box::pin(async move {
            let chunk = self.chunks.lock().remove(&object.entry).expect("freed once");
            self.client.free(&chunk).await?;
            self.done(Done::Free(object.entry));
            Ok(())
        })
    }
}

/// A memory node for clients with leases.
fn leasing() -> (Arc<EmbeddedNode>, Receiver<Done>) {
    let (done, dones) = mpsc::channel();
    let family: &'static LeasingFamily = Box::leak(Box::new(LeasingFamily(Mutex::new(done))));
    let clients = schemes::clients().with(family);
    let node = EmbeddedNode::start_with(&settings(), &schemes::nodes(), clients).unwrap();
    (Arc::new(node), dones)
}

fn connect(node: &Arc<EmbeddedNode>) -> Pool {
    Pool::embedded_in(node, Options { groups: Some(1), ..Options::default() }).unwrap()
}

#[test]
fn permission_opens_its_range_until_it_ends() {
    let (node, dones) = leasing();
    let pool = connect(&node);
    assert!(pool.has_leases());
    let terms = LeaseTerms::exclusive(LEASE);
    let (object, first) = pool.allocate_object_blocking(64, Others::Write, &terms).unwrap();
    assert_eq!(object.incarnation, pool.welcome().incarnation);
    assert_eq!(first.object(), object);
    pool.write_blocking(&first, 0, b"8 bytes.").unwrap();

    let reader = pool.acquire_blocking(&object, &LeaseTerms::shared_read(LEASE)).unwrap();
    let mut bytes = [0; 8];
    block_on(pool.read(&reader, 0, &mut bytes)).unwrap();
    assert_eq!(&bytes, b"8 bytes.");
    let refused = block_on(pool.fetch_and_add(&reader, 0, 1));
    assert!(matches!(refused, Err(Error::NotPermitted { op: "fetch-and-add" })), "{refused:?}");

    assert_eq!(pool.extend_blocking(&reader, 2 * LEASE).unwrap(), 2 * LEASE);
    assert!(pool.left(&reader) > LEASE);
    assert_eq!(pool.renew_blocking(&reader).unwrap(), LEASE);
    assert!(!reader.grant().belongs_to(ConnectionEpoch { incarnation: 1, client: 1 }));
    pool.revoke_blocking(&reader).unwrap();
    pool.revoke_blocking(&reader).unwrap();
    let refused = pool.read_blocking(&reader, 0, &mut bytes);
    assert!(matches!(refused, Err(Error::Expired { op: "read" })), "{refused:?}");
    for ended in [pool.extend_blocking(&reader, LEASE), pool.renew_blocking(&reader)] {
        assert!(matches!(ended, Err(Error::Expired { .. })), "{ended:?}");
    }
    pool.free_object_blocking(&object).unwrap();
    let number = reader.lease().number;
    let revoked = Done::Revoke(number);
    let expected = [Done::Extend, Done::Renew, revoked, revoked, Done::Free(object.entry)];
    assert_eq!(dones.try_iter().collect::<Vec<_>>(), expected);

    let stats = pool.stats();
    assert_eq!((stats.acquisitions, stats.extensions, stats.renewals), (2, 1, 1));
    assert_eq!((stats.revocations, stats.expiries), (2, 3));
    assert_eq!((stats.allocations, stats.frees), (1, 1));
}

#[test]
fn foreign_permissions_and_objects_are_refused_locally() {
    let (node, dones) = leasing();
    let (pool, other) = (connect(&node), connect(&node));
    let terms = LeaseTerms::exclusive(LEASE);
    let (object, permission) = pool.allocate_object_blocking(64, Others::None, &terms).unwrap();
    let stale = [
        other.extend_blocking(&permission, LEASE).map(drop),
        other.renew_blocking(&permission).map(drop),
        other.revoke_blocking(&permission),
    ];
    for refused in stale {
        assert!(matches!(refused, Err(Error::Stale { what: "permission", .. })), "{refused:?}");
    }
    let refused = other.read_blocking(&permission, 0, &mut [0; 8]);
    assert!(matches!(refused, Err(Error::Stale { what: "grant", .. })), "{refused:?}");

    let earlier = Object { incarnation: object.incarnation ^ 1, ..object };
    let refused =
        [pool.acquire_blocking(&earlier, &terms).map(drop), pool.free_object_blocking(&earlier)];
    for refused in refused {
        assert!(matches!(refused, Err(Error::NoSuchObject { .. })), "{refused:?}");
    }
    let refused = pool.acquire_in_blocking(GroupId(1), &object, &terms).unwrap_err();
    assert!(matches!(refused, Error::Setting { setting: "group", .. }), "{refused}");
    assert_eq!(dones.try_iter().count(), 0, "a request was sent");
}

#[test]
fn request_whose_future_is_dropped_is_undone_or_completed() {
    const PATIENCE: Duration = Duration::from_secs(30);
    let (node, dones) = leasing();
    let pool = connect(&node);
    let terms = LeaseTerms::exclusive(LEASE);
    let cx = &mut Context::from_waker(Waker::noop());

    let mut allocate = Box::pin(pool.allocate_object(64, Others::None, &terms));
    assert!(allocate.as_mut().poll(cx).is_pending());
    drop(allocate);
    assert!(matches!(dones.recv_timeout(PATIENCE), Ok(Done::Free(_))));

    let (object, permission) = pool.allocate_object_blocking(64, Others::None, &terms).unwrap();
    let mut acquire = Box::pin(pool.acquire(&object, &terms));
    assert!(acquire.as_mut().poll(cx).is_pending());
    drop(acquire);
    let next = permission.lease().number + 1;
    assert_eq!(dones.recv_timeout(PATIENCE), Ok(Done::Revoke(next)));
    assert!(!permission.lease().ended);

    let mut extend = Box::pin(pool.extend(&permission, 2 * LEASE));
    assert!(extend.as_mut().poll(cx).is_pending());
    drop(extend);
    assert_eq!(dones.recv_timeout(PATIENCE), Ok(Done::Extend));
    assert!(pool.left(&permission) > LEASE);
}

#[test]
fn objects_of_several_memory_nodes_go_to_their_own() {
    let ((first, of_first), (second, of_second)) = (leasing(), leasing());
    let pools = |nodes: [&Arc<EmbeddedNode>; 2]| {
        MultiPool::over(nodes.map(connect).into(), Placement::RoundRobin).unwrap()
    };
    let pool = pools([&first, &second]);
    let terms = LeaseTerms::exclusive(LEASE);
    let mut objects = Vec::new();
    for node in 0..2u32 {
        let (object, permission) = pool.allocate_object_blocking(64, Others::Own, &terms).unwrap();
        assert_eq!((object.node, permission.object()), (node, object));
        pool.write_blocking(&pool.place(&permission), 0, &node.to_be_bytes()).unwrap();
        objects.push(object);
    }
    let [at_first, at_second] = objects[..] else { unreachable!("two were allocated") };
    assert_eq!(at_first.entry, at_second.entry, "only the memory node tells them apart");

    // The connections in the other order: the same object, with another index.
    let reversed = MultiPool::over(
        vec![pool.node(NodeIndex(1)), pool.node(NodeIndex(0))],
        Placement::RoundRobin,
    )
    .unwrap();
    for (pool, index) in [(&pool, 1), (&reversed, 0)] {
        let permission = pool.acquire_blocking(&at_second, &terms).unwrap();
        assert_eq!(permission.object().node, index);
        let mut word = [0; 4];
        pool.read_blocking(&pool.place(&permission), 0, &mut word).unwrap();
        assert_eq!(word, 1u32.to_be_bytes());
        pool.extend_blocking(&permission, LEASE).unwrap();
        pool.renew_blocking(&permission).unwrap();
        pool.revoke_blocking(&permission).unwrap();
        let done: Vec<_> = of_second.try_iter().collect();
        assert!(matches!(done[..], [Done::Extend, Done::Renew, Done::Revoke(_)]), "{done:?}");
    }
    assert_eq!(of_first.try_iter().count(), 0);
    reversed.free_object_blocking(&at_first).unwrap();
    assert_eq!(of_first.try_iter().collect::<Vec<_>>(), [Done::Free(at_first.entry)]);

    let foreign = Object { incarnation: 5, node: u32::MAX, ..at_second };
    let refused = pool.acquire_blocking(&foreign, &terms);
    assert!(matches!(refused, Err(Error::NoSuchObject { .. })), "{refused:?}");
    pool.free_object_blocking(&at_second).unwrap();
}

/// A memory node that polls QPs, and two compute nodes of one domain.
fn polled(cores: u32) -> (Arc<EmbeddedNode>, [Pool; 2]) {
    let scheme = schemes::PATRONUS;
    let settings = Settings { scheme, ..settings() }
        .with("poll_qps_us", 200)
        .with("lease_max_us", 2 * LEASE.as_micros() as u64)
        .with("cores", cores);
    let node = Arc::new(EmbeddedNode::start(&settings).unwrap());
    let domain = Some(scheme::DomainToken([1; 32]));
    let options = Options { groups: Some(1), domain, ..Options::default() };
    let pools = [(); 2].map(|()| Pool::embedded_in(&node, options.clone()).unwrap());
    (node, pools)
}

fn lease_status(pool: &Pool) -> scheme::LeaseStatus {
    pool.node_status().unwrap().node.lease.expect("a scheme with leases")
}

/// A compute node whose QP is dead loses its permission long before its lease ends, and what it has
/// is freed. It may connect again.
#[test]
fn polled_qp_that_is_dead_loses_its_permission() {
    for cores in [1, 2] {
        let (node, [holder, waiter]) = polled(cores);
        let terms = LeaseTerms::exclusive(LEASE);
        let (object, held) = holder.allocate_object_blocking(64, Others::Own, &terms).unwrap();
        holder.write_blocking(&held, 0, b"mine").unwrap();
        let own = holder.allocate_blocking().unwrap();
        let busy = waiter.acquire_blocking(&object, &terms.clone().wait(Duration::ZERO));
        assert!(matches!(busy, Err(Error::Busy { .. })), "{busy:?}");
        holder.inner.scheme.break_management().unwrap();
        let next = waiter.acquire_blocking(&object, &terms.clone().wait(LEASE)).unwrap();
        let mut found = [0; 4];
        waiter.read_blocking(&next, 0, &mut found).unwrap();
        assert_eq!(&found, b"mine");
        let status = lease_status(&waiter);
        assert_eq!((status.dead_qps, status.expiries), (1, 0));
        assert!(holder.write_blocking(&held, 0, b"late").is_err());
        assert!(holder.read_blocking(&own, 0, &mut found).is_err());
        let refused = holder.allocate_blocking();
        assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
        waiter.read_blocking(&next, 0, &mut found).unwrap();
        assert_eq!(&found, b"mine");
        // The first connection ends after the second one has begun.
        let again = holder.reconnect().unwrap();
        drop(holder);
        again.allocate_blocking().unwrap();
        waiter.revoke_blocking(&next).unwrap();
        waiter.free_object_blocking(&object).unwrap();
        drop((again, waiter, node));
    }
}

/// A compute node that hangs answers heartbeats by its NIC, and keeps its permission (Patronus
/// §5.3, the weakness of polling).
#[test]
fn polled_qp_of_a_hung_compute_node_is_alive() {
    let (_node, [holder, waiter]) = polled(1);
    let terms = LeaseTerms::exclusive(LEASE);
    let (object, held) = holder.allocate_object_blocking(64, Others::Write, &terms).unwrap();
    let before = lease_status(&waiter).heartbeats;
    while lease_status(&waiter).heartbeats < before + 40 {
        std::thread::yield_now();
    }
    let busy = waiter.acquire_blocking(&object, &terms.clone().wait(Duration::ZERO));
    assert!(matches!(busy, Err(Error::Busy { .. })), "{busy:?}");
    assert_eq!(lease_status(&waiter).dead_qps, 0);
    holder.write_blocking(&held, 0, b"mine").unwrap();
    holder.revoke_blocking(&held).unwrap();
    waiter.acquire_blocking(&object, &terms).unwrap();
}

//! QP polling instead of leases (Patronus §5.3), in virtual time.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pool::{
    DomainToken, Error, GroupId, LeaseTerms, NodeStatus, Object, Options, Others, Settings, schemes,
};
use sim::{Cluster, ClusterSpec, Faults, NodeId, Params, Partition, Process, Time, fiber};

/// Period of the polling, in microseconds.
const PERIOD_US: u64 = 100;
/// A lease that does not end during a check.
const LEASE: Duration = Duration::from_millis(900);

fn cluster() -> (Cluster, [Process; 2]) {
    let settings = Settings {
        donate_bytes: 1 << 20,
        chunk_bytes: 4096,
        group_size: 2,
        groups_max: 1,
        clients_max: 4,
        scheme: schemes::PATRONUS,
        ..Settings::default()
    };
    let cluster = Cluster::new(&ClusterSpec {
        params: Arc::new(Params::connectx5()),
        seed: 1,
        shuffled: false,
        compute_nodes: 2,
        memory_nodes: 1,
        settings: settings.with("poll_qps_us", PERIOD_US),
    })
    .expect("a cluster");
    let domain = Some(DomainToken([1; 32]));
    let options = Options { groups: Some(1), domain, ..Options::default() };
    let connect = |node| cluster.connect(NodeId(node), options.clone()).expect("a process");
    let processes = [1, 2].map(connect);
    (cluster, processes)
}

fn status(cluster: &mut Cluster) -> NodeStatus {
    cluster.with_scheme(|scheme| scheme.status().expect("the status")).expect("an idle moment")
}

/// A holder that hangs keeps its permission, because its NIC answers. A holder that the network
/// does not reach loses it within two periods, although its lease goes on.
#[test]
fn polling_notices_a_dead_holder_and_no_hung_one() {
    let (mut cluster, [holder, waiter]) = cluster();
    cluster.start();
    let name: Arc<Mutex<Option<Object>>> = Arc::default();
    let (pool, to) = (holder.pool.clone(), name.clone());
    let holds = cluster.sim.spawn("holder", Time::us(1), move || {
        let terms = LeaseTerms::exclusive(LEASE);
        let allocated = pool.allocate_object_in(GroupId(0), 64, Others::Write, &terms);
        *to.lock() = Some(fiber::block_on(allocated).expect("an object").0);
    });
    cluster.sim.run_to_end(&[holds]).expect("it ends");
    let object = name.lock().expect("the holder has allocated it");

    // The holder's program does nothing any more, for 40 periods.
    let (pool, terms) = (waiter.pool.clone(), LeaseTerms::exclusive(LEASE));
    let hung = Duration::from_micros(40 * PERIOD_US);
    let waits = cluster.sim.spawn("waiter", Time::us(1), move || {
        let acquired = fiber::block_on(pool.acquire_in(GroupId(0), &object, &terms.wait(hung)));
        assert!(matches!(acquired, Err(Error::Busy { .. })), "{acquired:?}");
    });
    cluster.sim.run_to_end(&[waits]).expect("it ends");
    let lease = status(&mut cluster).lease.expect("leases");
    assert_eq!((lease.dead_qps, lease.permissions), (0, 1));
    assert!((70..90).contains(&lease.heartbeats), "{}", lease.heartbeats);

    let from = cluster.sim.now();
    let (a, b, until) = (NodeId(0), NodeId(1), from + Time::us(100 * PERIOD_US));
    let partition = Some(Partition { a, b, from, until, one_way: false });
    cluster.sim.set_faults(Faults { partition, ..Faults::default() });
    let (pool, hooks) = (waiter.pool.clone(), waiter.hooks.clone());
    let gets = cluster.sim.spawn("waiter", Time::us(1), move || {
        let terms = LeaseTerms::exclusive(LEASE);
        let acquired = fiber::block_on(pool.acquire_in(GroupId(0), &object, &terms));
        let took = hooks.now().since(from).as_us();
        assert!(took < 2.5 * PERIOD_US as f64, "{took} us");
        fiber::block_on(pool.write(&acquired.expect("a permission"), 0, b"mine")).expect("open");
    });
    cluster.sim.run_to_end(&[gets]).expect("it ends");
    assert_eq!(cluster.failure(), None);
    let status = status(&mut cluster);
    let lease = status.lease.expect("leases");
    assert_eq!((lease.dead_qps, lease.expiries, status.clients), (1, 0, 1));
    cluster.with_scheme(|scheme| scheme.audit().expect("consistent")).expect("an idle moment");
    drop((holder, waiter));
}

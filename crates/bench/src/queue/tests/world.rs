//! A queue in a simulated cluster: members of which one may end or hang at any verb, and the check
//! of what the consumers got.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use pool::{DomainToken, Error, GroupId, Object, Options, Pool, Scheme, Settings, schemes};
use sim::{Cluster, ClusterSpec, NodeId, Params, SimNic, Time, VerbStall, fiber};

use super::super::{Connection, Consumer, Payload, Producer, create};

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub scheme: Scheme,
    pub producers: u16,
    pub consumers: u16,
    /// Inserts of each producer.
    pub inserts: u32,
    /// Entries of a segment.
    pub entries: u64,
    pub lease_us: u64,
    /// Producers revoke their permissions of segments that they leave.
    pub revokes: bool,
    /// Patience of the consumers.
    pub patience_us: u64,
    /// Delay after which the last producer joins, and reads the tail.
    pub late_us: u64,
    pub fault: Option<Fault>,
}

/// A member that stops at a verb.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// The member: the producers come first, then the consumers.
    pub member: usize,
    /// Beginnings and ends of verbs of the member before it stops.
    pub passes: u32,
    /// Time after which it goes on; `None` if it dies.
    pub hang: Option<Time>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            seed: 1,
            scheme: schemes::PATRONUS,
            producers: 3,
            consumers: 1,
            inserts: 8,
            entries: 4,
            lease_us: 100,
            revokes: false,
            patience_us: 100,
            late_us: 0,
            fault: None,
        }
    }
}

/// Most entries taken at once.
const MOST: usize = 3;
/// Time between two calls of a consumer that finds no entry.
const IDLE: Time = Time::us(20);
/// Time beyond its patience in which a consumer must find an entry, after all producers have ended.
const GRACE: Time = Time::us(200);
/// Time after which a member that has not ended stands still.
const STUCK: Time = Time::us(20_000);
/// Time until no work is left, including the end of every lease.
const REST: Time = Time::us(20_000);

/// An insert.
#[derive(Clone, Copy, Debug)]
pub struct Insert {
    begun: Time,
    /// `None` while it is not acknowledged, or if it failed.
    done: Option<Time>,
}

/// Inserts, and entries that were taken.
#[derive(Default)]
struct Record {
    /// Inserts by payload.
    inserts: BTreeMap<Payload, Insert>,
    /// Payloads in the order in which the consumers got them, with the consumer and the time.
    taken: Vec<(usize, Time, Payload)>,
    failed: Vec<String>,
}

/// Result of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// True if a member ended or hung at the planned verb.
    pub stopped: bool,
    /// Inserts that were not acknowledged.
    pub unknown: usize,
    /// Objects that were left while all members were there: beside the metadata block and one
    /// segment.
    pub left_over: u64,
    /// Permissions that were marked as not extendable, for exclusive acquisitions and frees.
    pub notices: u64,
}

fn payload(producer: u64, number: u32) -> Payload {
    let mut payload = [0; 24];
    payload[..8].copy_from_slice(&producer.to_be_bytes());
    payload[8..16].copy_from_slice(&u64::from(number).to_be_bytes());
    payload
}

impl Plan {
    fn settings(&self) -> Settings {
        Settings {
            donate_bytes: 1 << 20,
            chunk_bytes: 4096,
            group_size: 2,
            credits: 4,
            groups_max: 1,
            clients_max: 16,
            scheme: self.scheme,
            ..Settings::default()
        }
        .with("lease_max_us", 10 * self.lease_us)
    }

    fn connection(&self, pool: Pool<SimNic>) -> Connection<SimNic> {
        let (lease, revokes) = (Duration::from_micros(self.lease_us), self.revokes);
        Connection { pool, group: GroupId(0), lease, revokes }
    }

    /// Runs the plan, and checks what the consumers got. Panics if an entry is missing, was taken
    /// twice, or was taken in another order.
    pub fn run(&self) -> Seen {
        let members = usize::from(self.producers + self.consumers);
        let spec = ClusterSpec {
            params: Arc::new(Params::connectx5()),
            seed: self.seed,
            shuffled: true,
            compute_nodes: 1 + members as u16,
            memory_nodes: 1,
            settings: self.settings(),
        };
        let mut cluster = Cluster::new(&spec).unwrap();
        let options = Options {
            groups: Some(1),
            send_blocks: 16,
            domain: Some(DomainToken([1; 32])),
            ..Options::default()
        };
        let mut processes: Vec<_> = (1..=1 + members as u16)
            .map(|node| cluster.connect(NodeId(node), options.clone()).unwrap())
            .collect();
        cluster.start();
        let keeper = processes.remove(0);
        let queue: Rc<Cell<Option<Object>>> = Rc::default();
        let (connection, made) = (self.connection(keeper.pool.clone()), queue.clone());
        let entries = self.entries;
        let creator = cluster.sim.spawn("creator", Time::ZERO, move || {
            made.set(Some(fiber::block_on(create(&connection, entries)).unwrap()));
        });
        cluster.sim.run_to_end(&[creator]).unwrap();
        let queue = queue.get().expect("a queue");

        let record: Rc<RefCell<Record>> = Rc::default();
        let is_closed: Rc<Cell<bool>> = Rc::default();
        let mut fibers = Vec::new();
        let mut functions = Vec::new();
        for (member, process) in processes.into_iter().enumerate() {
            functions.push((process.function.clone(), process.client));
            let (plan, record, is_closed) = (self.clone(), record.clone(), is_closed.clone());
            fibers.push(cluster.sim.spawn(format!("member {member}"), Time::ZERO, move || {
                let connection = plan.connection(process.pool);
                let now = || process.hooks.now();
                match member < usize::from(plan.producers) {
                    true => plan.produce(connection, queue, member as u64, now, &record),
                    false => plan.consume(connection, queue, member, now, &record, &is_closed),
                }
            }));
        }
        if let Some(Fault { member, passes, hang }) = self.fault {
            let time = hang.unwrap_or(Time::us(1_000_000_000));
            let stall = VerbStall { passes, time, stops_clock: false };
            cluster.sim.stall_at_verb(fibers[member], stall);
        }
        let (producers, consumers) = fibers.split_at(usize::from(self.producers));
        let dying =
            self.fault.filter(|fault| fault.hang.is_none()).map(|fault| fibers[fault.member]);
        let ended = |sim: &sim::Sim, ids: &[_]| ids.iter().all(|id| sim.has_ended(*id));
        let others: Vec<_> = producers.iter().filter(|id| Some(**id) != dying).copied().collect();
        cluster.sim.run_until(|sim| ended(sim, &others)).unwrap();
        let mut seen = Seen::default();
        if let Some(dying) = dying {
            cluster.sim.run_for(STUCK);
            if !cluster.sim.has_ended(dying) {
                let at = fibers.iter().position(|id| *id == dying).expect("one of them");
                let (function, client) = &functions[at];
                // A consumer that waits for entries is not at the planned verb yet.
                seen.stopped = true;
                cluster.crash(dying, function, *client);
            }
        }
        is_closed.set(true);
        let consumers: Vec<_> =
            consumers.iter().filter(|id| Some(**id) != dying).copied().collect();
        cluster.sim.run_until(|sim| ended(sim, &consumers)).unwrap();
        cluster.sim.run_for(REST);

        let status = cluster.with_scheme(|scheme| scheme.status().unwrap()).unwrap();
        let leases = status.lease.expect("a scheme with leases");
        seen.left_over = leases.objects - 2;
        seen.notices = leases.notices;
        let leaver = cluster.sim.spawn("leaver", Time::ZERO, move || drop(keeper.pool));
        cluster.sim.run_to_end(&[leaver]).unwrap();
        cluster.sim.run_for(REST);
        let status = cluster.with_scheme(|scheme| {
            scheme.audit().unwrap();
            scheme.status().unwrap()
        });
        let leases = status.unwrap().lease.expect("a scheme with leases");
        assert_eq!((leases.objects, leases.permissions), (0, 0), "{self:?}: nothing is left");
        assert_eq!(cluster.failure(), None, "{self:?}");

        let record = record.borrow();
        assert_eq!(record.failed, Vec::<String>::new(), "{self:?}");
        seen.unknown = self.check(&record);
        seen
    }

    /// Opens the queue. A member that hangs between an acquisition and its reply finds the lease
    /// ended, and opens the queue again.
    fn opened<T>(&self, open: impl Fn() -> Result<T, Error>) -> T {
        let hangs = self.fault.is_some_and(|fault| fault.hang.is_some());
        match open() {
            Err(Error::Expired { .. }) if hangs => open().unwrap(),
            result => result.unwrap(),
        }
    }

    fn produce(
        &self,
        connection: Connection<SimNic>,
        queue: Object,
        me: u64,
        now: impl Fn() -> Time,
        record: &RefCell<Record>,
    ) {
        if me + 1 == u64::from(self.producers) {
            fiber::sleep(Time::us(self.late_us));
        }
        let mut producer =
            self.opened(|| fiber::block_on(Producer::open(connection.clone(), &queue)));
        for number in 0..self.inserts {
            let payload = payload(me, number);
            record.borrow_mut().inserts.insert(payload, Insert { begun: now(), done: None });
            match fiber::block_on(producer.insert(&payload)) {
                Ok(()) => {
                    let mut record = record.borrow_mut();
                    let insert = record.inserts.get_mut(&payload).expect("it was begun");
                    insert.done = Some(now());
                }
                // The entry's segment was freed before the outcome of its WRITE was known.
                Err(Error::NoSuchObject { .. }) if self.fault.is_some() => {}
                Err(_) if fiber::is_ending() => return,
                Err(error) => record.borrow_mut().failed.push(format!("producer {me}: {error}")),
            }
        }
    }

    fn consume(
        &self,
        connection: Connection<SimNic>,
        queue: Object,
        me: usize,
        now: impl Fn() -> Time,
        record: &RefCell<Record>,
        is_closed: &Cell<bool>,
    ) {
        let patience = Duration::from_micros(self.patience_us);
        let open = || Consumer::open(connection.clone(), &queue, patience);
        let mut consumer = self.opened(|| fiber::block_on(open()));
        let mut idle = Time::ZERO;
        while idle < Time::from(patience) + GRACE {
            match fiber::block_on(consumer.take(MOST)) {
                Ok(taken) if taken.is_empty() => {
                    fiber::sleep(IDLE);
                    idle = if is_closed.get() { idle + IDLE } else { Time::ZERO };
                }
                Ok(taken) => {
                    idle = Time::ZERO;
                    let taken = taken.into_iter().map(|entry| (me, now(), entry));
                    record.borrow_mut().taken.extend(taken);
                }
                Err(_) if fiber::is_ending() => return,
                Err(error) => {
                    return record.borrow_mut().failed.push(format!("consumer {me}: {error}"));
                }
            }
        }
    }

    /// Checks the entries that the consumers got. Returns the number of inserts whose outcome their
    /// producers do not know.
    fn check(&self, record: &Record) -> usize {
        let mut at = BTreeMap::new();
        for (place, (_, time, payload)) in record.taken.iter().enumerate() {
            let insert = record.inserts.get(payload);
            let insert = insert.unwrap_or_else(|| panic!("{self:?}: {payload:?} is not an entry"));
            assert!(*time > insert.begun, "{self:?}: {payload:?} was taken before its insert");
            let earlier = at.insert(*payload, place);
            assert_eq!(earlier, None, "{self:?}: {payload:?} was taken twice");
        }
        let known = record.inserts.iter().filter(|(_, insert)| insert.done.is_some());
        let missing: Vec<_> =
            known.clone().filter(|(payload, _)| !at.contains_key(*payload)).collect();
        // A consumer that dies may have taken entries that it did not get.
        let producers = usize::from(self.producers);
        let consumer_died =
            self.fault.is_some_and(|fault| fault.hang.is_none() && fault.member >= producers);
        let most = if consumer_died { MOST } else { 0 };
        assert!(missing.len() <= most, "{self:?}: missing {missing:?}");
        // Each consumer gets entries in the order of their inserts.
        let consumers: BTreeSet<_> = record.taken.iter().map(|(consumer, ..)| *consumer).collect();
        for consumer in consumers {
            let order = record.taken.iter().filter(|(me, ..)| *me == consumer);
            let order: Vec<_> = order.map(|(.., payload)| record.inserts[payload]).collect();
            for (i, later) in order.iter().enumerate() {
                let before = order[..i]
                    .iter()
                    .all(|earlier| later.done.is_none_or(|done| done > earlier.begun));
                assert!(before, "{self:?}: consumer {consumer} got entry {i} too late");
            }
        }
        record.inserts.len() - known.count()
    }
}

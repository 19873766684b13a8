//! Tests of a memory node whose NIC refuses operations, and of the threads that drive workers.

use std::sync::mpsc;

use super::*;
use scheme::options::Terms;

/// A scheme that admits every compute node; its first calls of `retire` fail.
#[derive(Default)]
struct Stubborn {
    here: BTreeSet<ClientId>,
    refusals: u32,
    worker: Option<IdleWorker>,
}

/// A worker without work whose next poll is due after `next_poll`.
struct IdleWorker {
    next_poll: Option<Duration>,
    events: Arc<Sleeps>,
}

/// An event source that reports each requested sleep, and wakes the sleeper when told to.
struct Sleeps {
    report: Mutex<mpsc::Sender<Duration>>,
    woken: (Mutex<bool>, Condvar),
}

impl Sleeps {
    fn new() -> (Arc<Self>, mpsc::Receiver<Duration>) {
        let (report, reports) = mpsc::channel();
        (Arc::new(Self { report: Mutex::new(report), woken: Default::default() }), reports)
    }
}

impl CpuEvents for Sleeps {
    fn wait(&self, timeout: Duration) -> Result<bool, Error> {
        // After the test has its reports, it does not receive further ones.
        let _ = self.report.lock().send(timeout);
        let mut woken = self.woken.0.lock();
        if !*woken {
            self.woken.1.wait_for(&mut woken, timeout);
        }
        Ok(std::mem::take(&mut *woken))
    }

    fn wake(&self) {
        *self.woken.0.lock() = true;
        self.woken.1.notify_all();
    }
}

impl Worker for IdleWorker {
    fn poll(&mut self) -> Result<bool, Error> {
        Ok(false)
    }

    fn events(&self) -> Arc<dyn CpuEvents> {
        self.events.clone()
    }

    fn next_poll(&self) -> Option<Duration> {
        self.next_poll
    }
}

impl NodeScheme for Stubborn {
    fn admit(&mut self, client: ClientId, _: &ConnectRequest) -> Result<ConnectReply, Error> {
        self.here.insert(client);
        Ok(ConnectReply {
            client: client.0,
            chunk_bytes: 4096,
            group_size: 2,
            credits: 1,
            management: Vec::new(),
            groups: Vec::new(),
            first_chunk: None,
            terms: Terms::new(),
        })
    }

    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        if self.refusals > 0 {
            self.refusals -= 1;
            let verb = verbs::Error::Refused { verb: "modify_qp", why: "injected".into() };
            return Err(verb.into());
        }
        self.here.remove(&client);
        Ok(())
    }

    fn is_retired(&self, client: ClientId) -> bool {
        !self.here.contains(&client)
    }

    fn poll(&mut self) -> Result<bool, Error> {
        Ok(false)
    }

    fn is_watching(&self) -> bool {
        false
    }

    fn client_waits(&mut self, _: ClientId) -> Result<bool, Error> {
        Ok(false)
    }

    fn reset_management(&mut self, _: ClientId) -> Result<Option<Vec<u32>>, Error> {
        Ok(None)
    }

    fn management_is_open(&self, client: ClientId) -> Result<bool, Error> {
        Ok(client == ClientId(1))
    }

    fn reset_access(&mut self, _: ClientId, _: GroupId, _: Lane) -> Result<u32, Error> {
        Ok(0)
    }

    fn set_start(&mut self, _: ClientId, _: QpSet, _: Start) {}

    fn cpu(&mut self) -> Cpu {
        let Some(worker) = self.worker.take() else { return Cpu::default() };
        let workers: Vec<Box<dyn Worker>> = vec![Box::new(worker)];
        Cpu { events: Some(workers[0].events()), workers, polls: false }
    }

    fn spares(&self) -> u32 {
        2
    }

    fn first_chunk(&self) -> Option<u64> {
        None
    }

    fn status(&mut self) -> Result<NodeStatus, Error> {
        Ok(NodeStatus { clients: self.here.len() as u64, ..NodeStatus::default() })
    }

    fn audit(&self) -> Result<(), Error> {
        Ok(())
    }
}

#[test]
fn failed_retire_keeps_the_chunks_and_is_retried() {
    let stubborn = Stubborn { refusals: 2, ..Stubborn::default() };
    let node = MemoryNode::new(Box::new(stubborn), Settings::default());
    let admit = || ClientId(node.admit(&ConnectRequest::default()).unwrap().client);
    let (first, second) = (admit(), admit());
    node.retire(first);
    let (count, why) = node.unretired();
    assert_eq!(count, 1);
    assert!(why.is_some_and(|why| why.contains("compute node 1") && why.contains("injected")));
    assert!(!node.is_retired(first));
    assert!(node.has_memory(first).is_err(), "the departed one is not served");
    assert!(node.has_memory(second).unwrap(), "the other one is served");
    // The second attempt fails as well. The third is due soon, although no event arrives.
    assert_eq!(node.poll().unwrap().next_poll, Some(RETIRE_AGAIN));
    assert_eq!(node.poll().unwrap().next_poll, None);
    assert!(node.is_retired(first) && !node.is_retired(second));
    assert_eq!(node.unretired(), (0, None));
    node.retire(second);
    assert!(node.is_retired(second));
}

#[test]
fn management_is_open_is_answered_by_the_scheme() {
    let node = MemoryNode::new(Box::new(Stubborn::default()), Settings::default());
    let admit = || ClientId(node.admit(&ConnectRequest::default()).unwrap().client);
    let (first, second) = (admit(), admit());
    assert!(node.management_is_open(first).unwrap());
    assert!(!node.management_is_open(second).unwrap());
    assert!(node.management_is_open(ClientId(99)).is_err());
}

#[test]
fn admit_refuses_invalid_and_duplicate_qp_numbers() {
    let node = MemoryNode::new(Box::new(Stubborn::default()), Settings::default());
    let (last, beyond) = (Qpn::MAX, Qpn::MAX + 1);
    for (management, group, why) in [
        (vec![last], vec![1, 2], None),
        (vec![beyond], vec![1, 2], Some("0x1000000 is not a QP number")),
        (vec![3], vec![1, u32::MAX], Some("0xffffffff is not a QP number")),
        (vec![3], vec![1, 3], Some("QP 0x3 twice")),
        (vec![last], vec![1, last], Some("QP 0xffffff twice")),
    ] {
        let request =
            ConnectRequest { management, groups: vec![group], ..ConnectRequest::default() };
        match (node.admit(&request), why) {
            (Ok(_), None) => {}
            (Err(e), Some(why)) => assert!(e.to_string().contains(why), "{e}"),
            (result, why) => panic!("{result:?}, not {why:?}"),
        }
    }
}

#[test]
fn wait_closed_returns_when_the_thread_is_held_or_ended() {
    for _ in 0..50 {
        let gate = PauseGate::default();
        gate.close();
        thread::scope(|scope| {
            let passing = scope.spawn(|| {
                gate.pass();
                gate.leave();
            });
            gate.wait_closed();
            let held = gate.state.lock().held;
            gate.open();
            assert!(held);
            passing.join().unwrap();
        });
        gate.wait_closed();
    }
}

#[test]
fn worker_sleeps_until_its_next_poll_at_most() {
    let due = Duration::from_micros(300);
    for (next_poll, longest) in [(Some(due), due), (None, SLEEP)] {
        let (events, sleeps) = Sleeps::new();
        let worker = Some(IdleWorker { next_poll, events });
        let scheme = Stubborn { worker, ..Stubborn::default() };
        let node = MemoryNode::new(Box::new(scheme), Settings::default());
        let threads = NodeThreads::start(&node).unwrap();
        assert_eq!(sleeps.recv_timeout(SLEEP).unwrap(), longest);
        drop(threads);
    }
}

#[test]
fn offer_has_the_spares_of_the_scheme() {
    let node = MemoryNode::new(Box::new(Stubborn::default()), Settings::default());
    assert_eq!(node.welcome().offer.spares, 2);
    let settings = node.settings();
    let without = node.client_qps() - 2 * settings.groups_max * settings.lanes();
    assert_eq!(without, settings.client_qps(1));
}

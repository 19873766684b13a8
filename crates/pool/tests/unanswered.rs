//! Requests that are acknowledged and never answered: the NICs have nothing to report, and whoever waits learns
//! from the control plane that there will be no answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use fabric::PeerAddress;
use fabric::soft::SoftNic;
use parking_lot::Mutex;
use pool::protocol::{Status, Welcome};
use pool::{
    Admission, Admitted, AnyNode, ClientId, ControlPlane, Error, GroupId, Lane, MemoryNode,
    Options, Pool, SchemeKind, Settings,
};

/// A memory node whose CPU does nothing, and a control plane that says so when it is asked.
struct Mute {
    node: MemoryNode<AnyNode<SoftNic>>,
    welcome: Welcome,
    client: Mutex<Option<ClientId>>,
    asked: Arc<AtomicU32>,
    /// The answer, at the third look after each question.
    open: bool,
}

impl Mute {
    fn answered(&self) -> u32 {
        self.asked.fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl ControlPlane for Mute {
    fn welcome(&self) -> &Welcome {
        &self.welcome
    }
    fn admit(&self, admission: &Admission) -> Result<Admitted, Error> {
        let admitted = self.node.admit(admission)?;
        *self.client.lock() = Some(ClientId(admitted.client));
        Ok(admitted)
    }
    fn management_is_open(&self) -> Option<bool> {
        self.answered().is_multiple_of(3).then_some(self.open)
    }
    fn reset_management(&self) -> Result<Vec<PeerAddress>, Error> {
        let why = "for a test".to_string();
        let attempt = "re-establishing the management QPs".to_string();
        Err(Error::OverBudget { attempt, why, retry_after: Duration::from_secs(1) })
    }
    fn await_memory(&self, _: Duration) -> Result<bool, Error> {
        unreachable!("nobody is told that there is no memory")
    }
    fn reset_access(&self, _: GroupId, _: Lane) -> Result<PeerAddress, Error> {
        unreachable!("no access QP breaks")
    }
    fn status(&self) -> Result<Status, Error> {
        unreachable!("nobody asks")
    }
    fn audit(&self) -> Result<(), Error> {
        unreachable!("nobody asks")
    }
    fn goodbye(&self) -> Result<(), Error> {
        Ok(())
    }
    fn check_alive(&self) -> Result<(), Error> {
        Ok(())
    }
    fn descriptors(&self) -> Vec<i32> {
        Vec::new()
    }
}

/// A pool whose requests nobody answers, and how often it asked why.
fn unanswered(open: bool) -> (Pool, Arc<AtomicU32>) {
    let settings = Settings {
        scheme: SchemeKind::RpcMw2,
        donate_bytes: 1 << 20,
        chunk_bytes: 64 << 10,
        ..Settings::default()
    };
    let nic = SoftNic::inline();
    let node = MemoryNode::new(AnyNode::new(&nic, &settings).unwrap(), settings);
    let welcome = node.welcome();
    let asked = Arc::new(AtomicU32::new(0));
    let control = Mute { node, welcome, client: Mutex::default(), asked: asked.clone(), open };
    let options = Options { groups: Some(1), ..Options::default() };
    (Pool::over(nic, Box::new(control), options).unwrap(), asked)
}

#[test]
fn who_waits_for_an_answer_that_will_not_come_is_told_why() {
    let (pool, asked) = unanswered(false);
    let (told, why) = mpsc::channel();
    for _ in 0..3 {
        let (pool, told) = (pool.clone(), told.clone());
        std::thread::spawn(move || told.send(pool.allocate_blocking().map(drop)));
    }
    for _ in 0..3 {
        let result = why.recv_timeout(Duration::from_secs(60)).expect("who waits is told");
        assert!(matches!(result, Err(Error::OverBudget { .. })), "{result:?}");
    }
    assert!(asked.load(Ordering::Relaxed) >= 3, "the answer was waited for");
}

#[test]
fn who_waits_for_a_memory_node_that_is_slow_goes_on_waiting() {
    let (pool, asked) = unanswered(true);
    let (told, why) = mpsc::channel();
    let waiting = pool.clone();
    std::thread::spawn(move || told.send(waiting.allocate_blocking().map(drop)));
    // Asked twice: the first answer has ended nothing.
    while asked.load(Ordering::Relaxed) < 4 {
        let early = why.recv_timeout(Duration::from_millis(10));
        assert!(matches!(early, Err(mpsc::RecvTimeoutError::Timeout)), "{early:?}");
    }
}

//! Tests of requests that are acknowledged but never answered. The NICs report no error, so a
//! waiting request learns from the control plane that no answer will come.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use parking_lot::Mutex;
use pool::protocol::{NodeHello, Status};
use pool::{
    ClientId, ConnectReply, ConnectRequest, ControlPlane, Error, GroupId, Lane, MemoryNode,
    Options, Pool, Settings, schemes,
};
use rnic::nic::SoftNic;
use verbs::PeerAddress;

/// A memory node whose CPU is idle, with a control plane that reports this when asked.
struct Mute {
    node: MemoryNode,
    welcome: NodeHello,
    client: Mutex<Option<ClientId>>,
    asked: Arc<AtomicU32>,
    /// The answer, given at the third call after each question.
    open: bool,
}

impl Mute {
    fn answered(&self) -> u32 {
        self.asked.fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl ControlPlane for Mute {
    fn welcome(&self) -> &NodeHello {
        &self.welcome
    }
    fn admit(&self, admission: &ConnectRequest) -> Result<ConnectReply, Error> {
        let admitted = self.node.admit(admission)?;
        *self.client.lock() = Some(ClientId(admitted.client));
        Ok(admitted)
    }
    fn management_is_open(&self) -> Option<bool> {
        self.answered().is_multiple_of(3).then_some(self.open)
    }
    fn reset_management(&self) -> Result<Vec<PeerAddress>, Error> {
        let why = "injected".to_string();
        let attempt = "re-establishing the management QPs".to_string();
        Err(Error::OverBudget { attempt, why, retry_after: Duration::from_secs(1) })
    }
    fn await_memory(&self, _: Duration) -> Result<bool, Error> {
        unreachable!("no bulletin says empty")
    }
    fn reset_access(&self, _: GroupId, _: Lane) -> Result<PeerAddress, Error> {
        unreachable!("no access QP breaks")
    }
    fn status(&self) -> Result<Status, Error> {
        unreachable!("not called")
    }
    fn audit(&self) -> Result<(), Error> {
        unreachable!("not called")
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

/// A pool whose requests are never answered, and the number of calls that asked for the reason.
fn unanswered(open: bool) -> (Pool, Arc<AtomicU32>) {
    let settings = Settings {
        scheme: schemes::RPC_MW_2,
        donate_bytes: 1 << 20,
        chunk_bytes: 64 << 10,
        ..Settings::default()
    };
    let nic = SoftNic::inline();
    let node =
        MemoryNode::new(schemes::nodes().node(&nic, &settings.node().unwrap()).unwrap(), settings);
    let welcome = node.welcome();
    let asked = Arc::new(AtomicU32::new(0));
    let control = Mute { node, welcome, client: Mutex::default(), asked: asked.clone(), open };
    let options = Options { groups: Some(1), ..Options::default() };
    (Pool::over(nic, Box::new(control), options).unwrap(), asked)
}

#[test]
fn request_without_an_answer_ends_with_an_error() {
    let (pool, asked) = unanswered(false);
    let (sender, why) = mpsc::channel();
    for _ in 0..3 {
        let (pool, sender) = (pool.clone(), sender.clone());
        std::thread::spawn(move || sender.send(pool.allocate_blocking().map(drop)));
    }
    for _ in 0..3 {
        let result =
            why.recv_timeout(Duration::from_secs(60)).expect("the waiting request did not end");
        assert!(matches!(result, Err(Error::OverBudget { .. })), "{result:?}");
    }
    assert!(asked.load(Ordering::Relaxed) >= 3, "the pool did not wait for the answer");
}

#[test]
fn request_to_a_slow_memory_node_keeps_waiting() {
    let (pool, asked) = unanswered(true);
    let (sender, why) = mpsc::channel();
    let waiting = pool.clone();
    std::thread::spawn(move || sender.send(waiting.allocate_blocking().map(drop)));
    // After two questions: the first answer has not ended the request.
    while asked.load(Ordering::Relaxed) < 4 {
        let early = why.recv_timeout(Duration::from_millis(10));
        assert!(matches!(early, Err(mpsc::RecvTimeoutError::Timeout)), "{early:?}");
    }
}

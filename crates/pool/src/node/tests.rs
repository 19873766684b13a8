//! Tests of a memory node whose NIC refuses operations.

use super::*;
use scheme::options::Terms;

/// A scheme that admits every compute node; its first calls of `retire` fail.
struct Stubborn {
    here: BTreeSet<ClientId>,
    refusals: u32,
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
    let stubborn = Stubborn { here: BTreeSet::new(), refusals: 2 };
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
    let node = MemoryNode::new(
        Box::new(Stubborn { here: BTreeSet::new(), refusals: 0 }),
        Settings::default(),
    );
    let admit = || ClientId(node.admit(&ConnectRequest::default()).unwrap().client);
    let (first, second) = (admit(), admit());
    assert!(node.management_is_open(first).unwrap());
    assert!(!node.management_is_open(second).unwrap());
    assert!(node.management_is_open(ClientId(99)).is_err());
}

#[test]
fn admit_refuses_invalid_and_duplicate_qp_numbers() {
    let node = MemoryNode::new(
        Box::new(Stubborn { here: BTreeSet::new(), refusals: 0 }),
        Settings::default(),
    );
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

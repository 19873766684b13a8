//! A memory node whose NIC refuses something.

use super::*;

/// A scheme that admits everybody, and cannot retire a compute node the first few times.
struct Stubborn {
    here: BTreeSet<ClientId>,
    refusals: u32,
}

impl NodeScheme for Stubborn {
    fn admit(&mut self, client: ClientId, _: &Admission) -> Result<Admitted, Error> {
        self.here.insert(client);
        Ok(Admitted {
            client: client.0,
            chunk_bytes: 4096,
            group_size: 2,
            credits: 1,
            management: Vec::new(),
            groups: Vec::new(),
            metadata: None,
        })
    }

    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        if self.refusals > 0 {
            self.refusals -= 1;
            let verb = fabric::Error::Refused { verb: "modify_qp", why: "a test says so".into() };
            return Err(verb.into());
        }
        self.here.remove(&client);
        Ok(())
    }

    fn is_retired(&self, client: ClientId) -> bool {
        !self.here.contains(&client)
    }

    fn turn(&mut self) -> Result<bool, Error> {
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

    fn renew(&mut self, _: ClientId, _: Part, _: Start) {}

    fn status(&mut self) -> Result<NodeStatus, Error> {
        Ok(NodeStatus { clients: self.here.len() as u64, ..NodeStatus::default() })
    }

    fn audit(&self) -> Result<(), Error> {
        Ok(())
    }
}

#[test]
fn a_compute_node_that_cannot_be_retired_keeps_its_chunks_until_it_can() {
    let stubborn = Stubborn { here: BTreeSet::new(), refusals: 2 };
    let node = MemoryNode::new(stubborn, Settings::default());
    let admit = || ClientId(node.admit(&Admission::default()).unwrap().client);
    let (first, second) = (admit(), admit());
    node.retire(first);
    let (count, why) = node.unretired();
    assert_eq!(count, 1);
    assert!(
        why.is_some_and(|why| why.contains("compute node 1") && why.contains("a test says so"))
    );
    assert!(!node.is_retired(first));
    assert!(node.has_memory(first).is_err(), "it is not served any more");
    assert!(node.has_memory(second).unwrap(), "the other one is");
    // The second attempt fails as well. The third comes soon, though nothing else happens.
    assert_eq!(node.turn().unwrap().look, Some(RETIRE_AGAIN));
    assert_eq!(node.turn().unwrap().look, None);
    assert!(node.is_retired(first) && !node.is_retired(second));
    assert_eq!(node.unretired(), (0, None));
    node.retire(second);
    assert!(node.is_retired(second));
}

#[test]
fn the_scheme_says_whose_management_connection_is_open() {
    let node =
        MemoryNode::new(Stubborn { here: BTreeSet::new(), refusals: 0 }, Settings::default());
    let admit = || ClientId(node.admit(&Admission::default()).unwrap().client);
    let (first, second) = (admit(), admit());
    assert!(node.management_is_open(first).unwrap());
    assert!(!node.management_is_open(second).unwrap());
    assert!(node.management_is_open(ClientId(99)).is_err());
}

#[test]
fn numbers_that_are_of_no_qp_or_named_twice_are_refused() {
    let node =
        MemoryNode::new(Stubborn { here: BTreeSet::new(), refusals: 0 }, Settings::default());
    let (last, beyond) = (Qpn::MAX, Qpn::MAX + 1);
    for (management, group, why) in [
        (vec![last], vec![1, 2], None),
        (vec![beyond], vec![1, 2], Some("0x1000000 is no QP number")),
        (vec![3], vec![1, u32::MAX], Some("0xffffffff is no QP number")),
        (vec![3], vec![1, 3], Some("QP 0x3 twice")),
        (vec![last], vec![1, last], Some("QP 0xffffff twice")),
    ] {
        let request = Admission { management, groups: vec![group], ..Admission::default() };
        match (node.admit(&request), why) {
            (Ok(_), None) => {}
            (Err(e), Some(why)) => assert!(e.to_string().contains(why), "{e}"),
            (result, why) => panic!("{result:?}, not {why:?}"),
        }
    }
}

#[test]
fn the_wait_at_a_closed_gate_ends_when_the_thread_is_held_or_has_left() {
    for _ in 0..50 {
        let gate = Gate::default();
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

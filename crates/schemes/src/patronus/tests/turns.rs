//! Tests of what one core leaves to another one, and of what a connection leaves to the next one.

use std::time::Duration;

use scheme::{DomainToken, Worker};

use super::*;

/// Longest wait for a core to be woken, which comes at once.
const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes of a chunk: more than a core clears in one turn beside other ranges.
const CHUNK: u64 = 2 << 20;

/// A memory node of two cores, with a compute node on each.
struct TwoCores {
    node: Node<SoftNic>,
    workers: Vec<Box<dyn Worker>>,
    hands: [Hand; 2],
}

impl TwoCores {
    fn new() -> Self {
        let settings = settings(PATRONUS).with("cores", 2);
        let settings = NodeSettings { chunks: 4, chunk_bytes: CHUNK, ..settings };
        let nic = SoftNic::inline();
        let mut node = Node::new(&nic, &settings).unwrap();
        let hands = [1, 2].map(|id| Hand::join(&nic, &mut node, &settings, id));
        let workers = node.cpu().workers;
        assert_eq!(workers.len(), 2);
        Self { node, workers, hands }
    }

    /// Turns of one core until it has no work.
    fn rest(&mut self, core: usize) {
        while self.workers[core].poll().unwrap() {}
    }

    /// A request by the compute node of a core, with its outcome.
    fn ask(&mut self, core: usize, ask: Ask) -> Outcome {
        self.hands[core].ask(ask);
        self.rest(core);
        self.hands[core].outcomes()[0]
    }

    fn allocate(&mut self, core: usize) -> Granted {
        let (terms, others) = (terms(1_000_000_000), Others::None);
        match self.ask(core, Ask::Allocate { terms, bytes: CHUNK, others }) {
            Outcome::Granted(granted) => granted,
            other => panic!("{other:?}"),
        }
    }

    /// True if a core that had no work is woken.
    fn is_woken(&self, core: usize) -> bool {
        self.workers[core].events().wait(PATIENCE).unwrap()
    }
}

/// A free by one core wakes another core that had announced "empty" to its compute nodes.
#[test]
fn clearing_wakes_the_cores_that_announced_empty() {
    let mut bed = TwoCores::new();
    let all: Vec<_> = (0..4).map(|_| bed.allocate(0)).collect();
    let (terms, others) = (terms(1_000_000), Others::None);
    let empty = bed.ask(1, Ask::Allocate { terms, bytes: CHUNK, others });
    assert_eq!(empty, Outcome::Empty);
    bed.rest(1);
    assert_eq!(bed.ask(0, Ask::Free { object: all[0].object }), Outcome::Done);
    assert!(bed.is_woken(1));
}

/// A core removes a departed compute node when another core has cleared its last object.
#[test]
fn clearing_wakes_the_core_of_a_departed_owner() {
    let mut bed = TwoCores::new();
    for _ in 0..2 {
        bed.allocate(1);
    }
    bed.node.retire(ClientId(2)).unwrap();
    // The core leaves the second object to the first core.
    bed.rest(1);
    assert!(!bed.node.is_retired(ClientId(2)));
    bed.rest(0);
    assert!(bed.is_woken(1));
    bed.rest(1);
    assert!(bed.node.is_retired(ClientId(2)));
}

/// A reply of another core is not sent on a connection that is newer than its request.
#[test]
fn reply_to_a_closed_connection_is_not_sent() {
    let mut bed = TwoCores::new();
    let Granted { object, permission, .. } = bed.allocate(0);
    let terms = AskTerms { wait_us: LEASE_US, ..terms(1_000_000) };
    bed.hands[0].ask(Ask::Acquire { terms, object, offset: 0, len: 64 });
    bed.rest(0);
    // The other core finds that the request has waited too long.
    while bed.workers[1].next_poll() > Some(Duration::ZERO) {
        std::hint::spin_loop();
    }
    bed.rest(1);
    let qpn = bed.node.reset_management(ClientId(1)).unwrap().unwrap()[0];
    bed.hands[0].reconnect(qpn);
    assert_eq!(bed.ask(0, Ask::Revoke { permission }), Outcome::Done);
}

/// A departed compute node leaves neither its place nor its lifetime words behind.
#[test]
fn departed_compute_nodes_make_room_for_others() {
    let (nic, settings) = (SoftNic::inline(), settings(PATRONUS));
    let mut node = Node::new(&nic, &settings).unwrap();
    for id in 1..=3 * settings.clients_max {
        let _hand = Hand::join(&nic, &mut node, &settings, id);
        node.retire(ClientId(id)).unwrap();
        while node.poll().unwrap() {}
        assert!(node.is_retired(ClientId(id)));
        assert!(node.lease_view().words(ClientId(id)).is_none(), "its words are left");
    }
}

/// An object of a domain lives as long as the domain. One whose name its allocator never got would
/// be lost.
#[test]
fn undelivered_object_is_freed_when_its_allocator_departs() {
    let (nic, settings) = (SoftNic::inline(), settings(PATRONUS));
    let mut node = Node::new(&nic, &settings).unwrap();
    let domain = Some(DomainToken([1; 32]));
    let [hand, _other] = [1, 2].map(|id| Hand::join_in(&nic, &mut node, &settings, (id, domain)));
    let (terms, others) = (terms(1_000_000), Others::Write);
    hand.send(Ask::Allocate { terms, bytes: 64, others });
    node.poll().unwrap();
    assert_eq!(node.status().unwrap().lease.unwrap().objects, 1);
    node.retire(ClientId(1)).unwrap();
    while node.poll().unwrap() {}
    assert_eq!(node.status().unwrap().lease.unwrap().objects, 0);
}

/// The slot of a permission without a lease lies beyond every table of lifetime words.
#[test]
fn grant_beside_the_largest_table_has_no_word() {
    let settings = settings(PATRONUS).with("permissions_max", PermissionNumber::LEASED_MAX);
    let nic = SoftNic::inline();
    let mut node = Node::new(&nic, &settings).unwrap();
    let mut hand = Hand::join(&nic, &mut node, &settings, 1);
    let (terms, others) = (terms(AskTerms::FOREVER), Others::None);
    hand.ask(Ask::Allocate { terms, bytes: 4096, others });
    node.poll().unwrap();
    let granted = hand.grants()[0];
    assert_eq!(granted.permission.slot(), PermissionNumber::LEASED_MAX);
    hand.ask(Ask::FreeGrant { entry: granted.object.entry, address: granted.address });
    node.poll().unwrap();
    assert_eq!(hand.outcomes(), [Outcome::Done]);
}

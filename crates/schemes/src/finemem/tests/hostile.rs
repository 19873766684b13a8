//! A compute node that changes words of the metadata for ever, beside one with the client code.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rnic::nic::SoftNic;
use rnic::nic::interposed::{Call, Hooks, InterposedNic};
use scheme::{ClientId, ConnectRequest, Grant, GroupId, Offer};
use verbs::{CqAttr, Cqn, DmaMemory, QpAttr, Qpn, QueuePair, Receive};

use super::super::client::FREE_ATTEMPTS;
use super::super::layout::Word;
use super::super::tree::{Changed, REPEATS_MAX, Verbs};
use super::*;

type StormNic = InterposedNic<Storm>;

/// Changes a word just before each list of verbs of this length that the victim posts.
#[derive(Clone, Default)]
struct Storm(Arc<Mutex<Option<Target>>>);

struct Target {
    victim: Qpn,
    list: usize,
    metadata: DmaMemory,
    word: Word,
    changes: u32,
    change: fn(u64) -> u64,
}

impl Hooks for Storm {
    const VIRTUAL: bool = false;

    fn name(&self) -> &'static str {
        "storm"
    }

    fn now(&self) -> Duration {
        static BEGIN: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
        BEGIN.elapsed()
    }

    fn before(&self, call: Call) {
        if let Some(target) = &mut *self.0.lock()
            && call == Call::PostSend(target.victim, target.list)
        {
            target.changes += 1;
            assert!(target.changes < 2 * REPEATS_MAX, "a loop repeats its CAS without a bound");
            let at = target.word.offset();
            let word = target.metadata.load_be64(at);
            target.metadata.store_be64(at, (target.change)(word));
        }
    }

    fn made_qp(&self, _: Qpn, _: Cqn, _: Option<DmaMemory>) {}

    /// Work is done when it is posted.
    fn wait(&self, _: Cqn, _: u32, _: Duration) -> Result<bool, verbs::Error> {
        Ok(true)
    }
}

/// A memory node, and a compute node that keeps the protocol.
struct Scene {
    nic: StormNic,
    node: Node<StormNic>,
    client: Client<StormNic>,
    _access: Vec<<StormNic as Nic>::Qp>,
}

impl Scene {
    fn new(scheme: Scheme) -> Self {
        let nic = StormNic::new(SoftNic::inline(), Storm::default());
        let settings = NodeSettings::new(scheme, CHUNKS, 4096);
        let mut node = Node::new(&nic, &settings).unwrap();
        let pd = nic.alloc_pd().unwrap();
        let offer = Offer::new(&settings, node.functions(), node.terms());
        let client = Client::new(&nic, &pd, &offer).unwrap();
        let cq = nic.create_cq(CqAttr { entries: 64, ignore_overrun: false }).unwrap();
        let qp = || {
            let (receive, access) = (Receive::None, Access::NONE);
            let attr = QpAttr { send_cq: &cq, recv_cq: &cq, send_blocks: 16, receive, access };
            nic.create_qp(&pd, attr).unwrap()
        };
        let access: Vec<_> = (0..settings.lanes() * node.functions()).map(|_| qp()).collect();
        let request = ConnectRequest {
            management: client.management().iter().map(|qpn| qpn.raw()).collect(),
            groups: vec![access.iter().map(|qp| qp.qpn().raw()).collect()],
            ..ConnectRequest::default()
        };
        let admitted = node.admit(ClientId(1), &request).unwrap();
        client.accept(&admitted).unwrap();
        let peers: Vec<_> = admitted.management.iter().map(|q| Qpn::new(*q).into()).collect();
        client.connect(&peers).unwrap();
        Self { nic, node, client, _access: access }
    }

    fn begin_storm(&self, list: usize, word: Word, change: fn(u64) -> u64) {
        let victim = self.client.management()[0];
        let metadata = self.node.words.memory().clone();
        let target = Target { victim, list, metadata, word, changes: 0, change };
        *self.nic.hooks().0.lock() = Some(target);
    }

    fn end_storm(&self) {
        *self.nic.hooks().0.lock() = None;
    }

    /// Runs a request of the client, and the memory node beside it.
    fn run<T>(
        &mut self,
        request: impl AsyncFn(&Client<StormNic>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let Self { node, client, .. } = self;
        let mut request: Pin<&mut dyn Future<Output = _>> = pin!(request(client));
        loop {
            let mut cx = Context::from_waker(Waker::noop());
            if let Poll::Ready(result) = request.as_mut().poll(&mut cx) {
                return result;
            }
            node.poll().unwrap();
        }
    }

    fn allocate(&mut self) -> Result<Grant, Error> {
        self.run(async |client| client.allocate(GroupId(0)).await)
    }

    fn free(&mut self, grant: &Grant) -> Result<(), Error> {
        self.run(async |client| client.free(grant).await)
    }

    /// Checks that all chunks but `held` can be allocated, and that all are free in the end.
    fn check(&mut self, mut held: Vec<Grant>) {
        while let Ok(grant) = self.allocate() {
            held.push(grant);
        }
        let mut entries: Vec<_> = held.iter().map(|grant| grant.entry).collect();
        entries.sort();
        entries.dedup();
        assert_eq!((entries.len(), held.len() as u64), (held.len(), CHUNKS));
        held.iter().for_each(|grant| self.free(grant).unwrap());
        while self.node.free_chunks() < CHUNKS {
            self.node.poll().unwrap();
        }
        self.node.audit().unwrap();
    }
}

/// The words that the error of a request names.
fn contended(result: Result<impl Sized, Error>, bound: u32) -> String {
    let error = result.err().expect("the request ends with an error");
    let text = error.to_string();
    assert!(matches!(error, Error::Contended { attempts, .. } if attempts == bound), "{text}");
    text
}

#[test]
fn allocation_ends_beside_a_client_that_changes_a_header() {
    let mut scene = Scene::new(FINEMEM);
    let [kept, freed] = [(); 2].map(|()| scene.allocate().unwrap());
    let span = scene.node.shape.span(block::SpanIndex::new(0));
    // A CAS of a header is posted with three READs.
    scene.begin_storm(4, span, |word| word ^ 1 << 30);
    let text = contended(scene.allocate(), REPEATS_MAX);
    assert!(text.starts_with("allocating a block: no success in 65536 attempts: "), "{text}");
    assert!(text.contains("the header of span 0") && text.contains("try again"), "{text}");
    // A free does not need the header.
    scene.free(&freed).unwrap();
    scene.end_storm();
    scene.check(vec![kept]);
}

#[test]
fn free_ends_beside_a_client_that_changes_the_keys() {
    let mut scene = Scene::new(FINEMEM_PAPER);
    let [kept, freed, other] = [(); 3].map(|()| scene.allocate().unwrap());
    let keys = scene.node.shape.capability(freed.entry);
    let before = scene.node.words.load(keys);
    scene.begin_storm(1, keys, |word| word & !0xff | (word + 1) & 0xff);
    let text = contended(scene.free(&freed), FREE_ATTEMPTS);
    assert!(text.contains(&format!("the keys of block {}", freed.entry)), "{text}");
    scene.free(&other).unwrap();
    scene.end_storm();
    scene.node.words.store(keys, before);
    scene.check(vec![kept]);
}

/// A turn of background work in which clients undo each change ends as one that is aborted.
#[test]
fn memory_node_aborts_an_undone_turn() {
    let mut bed = Bed::new();
    bed.die_with_a_chunk();
    let word = Changed::Log(crate::blocks::ChunkIndex::new(0));
    let repeated = (0..2 * REPEATS_MAX).find(|_| bed.node.words.repeat(word).is_err());
    assert_eq!(repeated, Some(REPEATS_MAX - 1));
    // The next change of the turn is aborted, too.
    assert!(bed.node.words.step().is_err());
    while !bed.node.is_retired(bed.id) {
        bed.node.poll().unwrap();
    }
    assert_eq!((bed.node.aborts(), bed.node.free_chunks()), (1, CHUNKS));
    bed.node.audit().unwrap();
}

//! Messages enter a link in the order in which their data is there, not in the order of the calls.

use std::sync::Arc;

use parking_lot::Mutex;
use pool::Settings;
use rnic::port::inline::InlineFunction;
use sim::{Cluster, ClusterSpec, NodeId, Params, SimNic, Time, fiber};
use verbs::{
    Access, CompletionQueue, CqAttr, DmaMemory, MemoryRegion, Nic, Op, QpAttr, QueuePair, Receive,
    Sge, Status, WorkRequest,
};

/// Bytes of a payload that takes 86 us on the link.
const LONG: u32 = 1 << 20;

type Mr = <SimNic as Nic>::Mr;

/// A node with memory, and one of its QPs.
struct Host {
    nic: SimNic,
    region: Mr,
    cq: <SimNic as Nic>::Cq,
    qp: <SimNic as Nic>::Qp,
    _memory: DmaMemory,
}

impl Host {
    fn new(nic: &SimNic) -> Self {
        let pd = nic.alloc_pd().expect("a PD");
        let memory = nic.alloc_dma(LONG as usize).expect("memory");
        let access = Access(Access::LOCAL_ALL.0 | Access::REMOTE_ALL.0);
        let region = nic.reg_mr(&pd, &memory, access).expect("a region");
        let cq = nic.create_cq(CqAttr { entries: 64, ignore_overrun: false }).expect("a CQ");
        let attr = QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: 64,
            receive: Receive::None,
            access: Access::REMOTE_ALL,
        };
        let qp = nic.create_qp(&pd, attr).expect("a QP");
        Self { nic: nic.clone(), region, cq, qp, _memory: memory }
    }

    /// Posts a list of operations, and waits for the completion of the last; returns its time.
    fn run(&self, ops: &[Op<'_>]) -> Time {
        let mut list: Vec<_> =
            ops.iter().map(|op| WorkRequest { id: 0, op: *op, signaled: false }).collect();
        list.last_mut().expect("an operation").signaled = true;
        self.qp.post_send(&list).expect("a post");
        let mut completions = [verbs::Completion::EMPTY; 1];
        while self.cq.poll(&mut completions) == 0 {
            self.cq.wait(std::time::Duration::MAX).expect("a wait");
        }
        assert_eq!(completions[0].status, Status::Success);
        self.nic.hooks().now()
    }

    fn read(&self, peer: &Mr, to: &[Sge; 1]) -> Time {
        self.run(&[Op::Read { from: peer.remote(0), to }])
    }
}

/// Two compute nodes, each with a QP to the other one, and the regions that the QPs reach: a writer
/// of the second node's memory, and a reader of the first node's.
fn hosts() -> (Cluster, [(Host, Mr); 2]) {
    let spec = ClusterSpec {
        params: Arc::new(Params::connectx5()),
        seed: 1,
        shuffled: false,
        compute_nodes: 2,
        memory_nodes: 1,
        settings: Settings { donate_bytes: 1 << 20, clients_max: 2, ..Settings::default() },
    };
    let cluster = Cluster::new(&spec).expect("a cluster");
    let connector = cluster.connector();
    let functions: [InlineFunction; 2] =
        [(); 2].map(|()| connector.function().expect("a function"));
    let nics = [1, 2].map(|n| connector.nic(NodeId(n), &functions[n as usize - 1]));
    // A WRITE from the first node to the second, and a READ by the second of the first.
    let [writer, written] = [Host::new(&nics[0]), Host::new(&nics[1])];
    let [reader, read] = [Host::new(&nics[1]), Host::new(&nics[0])];
    for (a, b) in [(&writer, &written), (&reader, &read)] {
        a.qp.connect(b.qp.qpn()).expect("a connection");
        b.qp.connect(a.qp.qpn()).expect("a connection");
    }
    let regions = [written.region.clone(), read.region.clone()];
    // The passive QPs and the processes live as long as the world.
    std::mem::forget((written, read, functions));
    let [to, from] = regions;
    (cluster, [(writer, to), (reader, from)])
}

/// Returns how long a READ of 64 bytes takes whose responder posts a long WRITE, if it does,
/// `after` the READ was posted.
fn read_beside_a_write(after: Option<Time>) -> Time {
    let (mut cluster, [(writer, to_write), (reader, to_read)]) = hosts();
    let taken = Arc::new(Mutex::new(Time::ZERO));
    let begin = Time::us(100);
    let mut fibers = vec![cluster.sim.spawn("reader", Time::ZERO, {
        let taken = taken.clone();
        move || {
            let to = [reader.region.sge(0, 64)];
            // The first READ brings the QP's context into the cache.
            reader.read(&to_read, &to);
            fiber::sleep(begin.since(reader.nic.hooks().now()));
            *taken.lock() = reader.read(&to_read, &to).since(begin);
        }
    })];
    if let Some(after) = after {
        fibers.push(cluster.sim.spawn("writer", Time::ZERO, move || {
            fiber::sleep(begin + after);
            let from = [writer.region.sge(0, LONG)];
            writer.run(&[Op::Write { to: to_write.remote(0), from: &from }]);
        }));
    }
    cluster.sim.run_to_end(&fibers).expect("the programs end");
    *taken.lock()
}

#[test]
fn response_passes_the_link_before_a_payload_that_is_not_there() {
    let alone = read_beside_a_write(None);
    // The NIC has the WRITE before the READ arrives, and its payload after the READ's response.
    let beside = read_beside_a_write(Some(Time::us(1)));
    assert_eq!(beside, alone, "the link was idle");
    // Control: behind the payload the response waits.
    let behind = read_beside_a_write(Some(Time::ZERO));
    assert!(behind > Time::us(80), "{behind}");
}

//! Attacks on scheme `finemem`, in which compute nodes change the memory node's metadata with READ
//! and CAS. The attacker uses access QPs only, or a management QP without following the protocol.

use std::future::Future;
use std::pin::pin;
use std::sync::Mutex;
use std::task::{Context as Waiting, Poll, Waker};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use granary_tests::control::Control;
use pool::protocol::{Admission, Reply, Request};
use pool::{ConnectReply, ConnectRequest};
use scheme::index::IndexRange;
use schemes::blocks::ChunkIndex;
use schemes::finemem::Metadata;
use schemes::finemem::block::{Block, Order, Place, SectionIndex, SpanIndex, SpanOffset};
use schemes::finemem::header::{Header, Spread, User};
use schemes::finemem::layout::{Shape, Word};
use schemes::finemem::log::{Capability, FullLog};
use schemes::finemem::tree::{Changed, Taken, Tree, Verbs};
use serde_json::{Value, json};
use verbs::cqe::Syndrome;
use verbs::wqe::{Builder, Sge};
use verbs::{Access, DmaMemory, Key, Qpn};

use crate::compute::{LONG, remote};
use crate::nic::Nic;
use crate::queue::{Qp, Shape as QpShape};
use units::Random;

use crate::Arguments;

/// A hand-made allocation service of a compute node, with access QPs.
struct Service {
    nic: Nic,
    control: Control,
    management: Mutex<Qp>,
    access: Vec<Qp>,
    terms: ConnectReply,
    metadata: Metadata,
    shape: Shape,
    user: User,
    local: DmaMemory,
    lkey: Key,
}

/// Offset in local memory of the results of verbs on the metadata. Accesses use the memory below.
const RESULTS: usize = 64 << 10;

impl Service {
    /// Attaches to the NIC and is admitted by the memory node.
    fn join(a: &Arguments) -> Result<Self> {
        let nic = Nic::open(&a.socket)?;
        let control = Control::pool(&a.socket)?;
        let pd = nic.pd()?;
        let receives = QpShape { receives: 4, ..QpShape::default() };
        let management = Qp::new(&nic, pd, receives)?;
        let access = (0..2).map(|_| Qp::new(&nic, pd, QpShape::default()));
        let access = access.collect::<Result<Vec<_>>>()?;
        let local = nic.memory(1 << 20)?;
        let lkey = nic.register(pd, &local, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let connect = ConnectRequest {
            management: vec![management.qpn.raw()],
            groups: vec![access.iter().map(|q| q.qpn.raw()).collect()],
            bulletin_addr: local.addr(),
            bulletin_rkey: lkey.0,
            ..ConnectRequest::default()
        };
        let admission = Admission { connect, session: Some(nic.secret()), ..Admission::default() };
        let terms = match control.ask(Request::Admit(Box::new(admission)))? {
            Reply::Admitted(terms) => terms,
            other => bail!("not admitted: {other:?}"),
        };
        let metadata = Metadata::of(&terms).context("a scheme without metadata")?;
        let shape = Shape { chunks: metadata.chunks, chunk_bytes: terms.chunk_bytes };
        let user = User::new(metadata.user).context("a number of a user")?;
        management.connect(&nic, Qpn::new(terms.management[0]))?;
        for (qp, peer) in access.iter().zip(&terms.groups[0]) {
            qp.connect(&nic, Qpn::new(*peer))?;
        }
        let management = Mutex::new(management);
        Ok(Self { nic, control, management, access, terms, metadata, shape, user, local, lkey })
    }

    fn sge(&self, at: usize, len: u32) -> Sge {
        Sge { addr: self.local.addr() + at as u64, len, lkey: self.lkey }
    }

    fn at(&self, word: Word) -> verbs::wqe::Remote {
        remote(self.metadata.addr + word.offset() as u64, self.metadata.rkey)
    }

    /// Executes one request on the management QP and returns its syndrome, 0 for success.
    fn manage(&self, build: impl FnOnce(&mut Builder)) -> Result<u8> {
        let mut qp = self.management.lock().expect("no thread has panicked");
        qp.post(&self.nic, |b| {
            build(b);
            b.signaled();
        });
        let cqe = qp.wait(LONG).context("a request on the metadata did not complete")?;
        Ok(cqe.error.map_or(0, |e| e.syndrome))
    }

    /// Re-establishes the broken management QP.
    fn recover_management(&self) -> Result<()> {
        let mut qp = self.management.lock().expect("no thread has panicked");
        qp.reset(&self.nic)?;
        while qp.poll().is_some() {}
        match self.control.ask(Request::ResetManagement { salt: None })? {
            Reply::Management { peers } => qp.connect(&self.nic, Qpn::new(peers[0])),
            other => bail!("the management QP was not re-established: {other:?}"),
        }
    }

    /// Executes one access over a lane and returns its syndrome. Re-establishes a broken lane.
    fn access(&mut self, lane: usize, build: impl FnOnce(&mut Builder)) -> Result<u8> {
        let qp = &mut self.access[lane];
        qp.post(&self.nic, |b| {
            build(b);
            b.signaled();
        });
        let cqe = qp.wait(LONG).context("an access did not complete")?;
        let Some(error) = cqe.error else { return Ok(0) };
        qp.reset(&self.nic)?;
        while qp.poll().is_some() {}
        let request = Request::ResetAccess { group: 0, lane: lane as u8, salt: None };
        match self.control.ask(request)? {
            Reply::Access { peer } => self.access[lane].connect(&self.nic, Qpn::new(peer))?,
            other => bail!("lane {lane} was not re-established: {other:?}"),
        }
        Ok(error.syndrome)
    }

    /// READs, WRITEs or FAAs a word, depending on `kind`.
    fn touch(&mut self, lane: usize, addr: u64, key: u32, kind: u32) -> Result<u8> {
        let (at, local) = (remote(addr, key), self.sge(64, 8));
        self.access(lane, |b| match kind % 3 {
            0 => _ = b.rdma_read(at, &[local]),
            1 => _ = b.rdma_write(at, &[local]),
            _ => _ = b.fetch_add(at, 1, local),
        })
    }

    fn load(&self, at: Word) -> Result<u64> {
        let mut word = [0];
        now(self.read(at, &mut word))?;
        Ok(word[0])
    }

    /// Executes a CAS; true if it succeeded.
    fn swap(&self, at: Word, expected: u64, new: u64) -> Result<bool> {
        Ok(now(self.cas(at, expected, new))? == expected)
    }

    /// Allocates a block as a normal compute node does.
    fn take(&self, tree: &Tree, order: u32) -> Result<Taken> {
        now(tree.allocate(self, Order::new(order)))?.context("the pool is empty")
    }

    fn capability(&self, block: Block) -> Word {
        self.shape.capability(self.shape.entry(block))
    }

    /// Frees a block as a normal compute node does.
    fn free(&self, taken: &Taken) -> Result<()> {
        let (at, key) = (self.capability(taken.block), taken.capability.main);
        let (open, shut) = (Capability::open(key), Capability::quarantined(key));
        ensure!(
            self.swap(at, open.to_word(), shut.to_word())?,
            "the attacker does not own its block"
        );
        Ok(())
    }

    fn addr(&self, block: Block) -> u64 {
        self.metadata.data + self.shape.range(block).0
    }

    /// The block of a victim's chunk.
    fn block_at(&self, addr: u64, len: u64) -> Result<Block> {
        let chunk = (addr - self.metadata.data) / self.terms.chunk_bytes;
        let order = self.shape.order_for(len).context("a length of no block")?;
        Ok(Block { chunk: ChunkIndex::new(chunk as u32), order })
    }
}

impl Verbs for Service {
    type Error = anyhow::Error;

    /// Without a bound: the test ends an attacker that takes too long.
    fn repeat(&self, _: Changed) -> Result<()> {
        Ok(())
    }

    async fn read(&self, at: Word, out: &mut [u64]) -> Result<()> {
        let to = self.sge(RESULTS, 8 * out.len() as u32);
        let got = self.manage(|b| _ = b.rdma_read(self.at(at), &[to]))?;
        ensure!(got == 0, "reading the metadata: {got:#x}");
        for (i, word) in out.iter_mut().enumerate() {
            *word = self.local.load_be64(RESULTS + 8 * i);
        }
        Ok(())
    }

    async fn cas(&self, at: Word, expected: u64, new: u64) -> Result<u64> {
        let old = self.sge(RESULTS, 8);
        let got = self.manage(|b| _ = b.compare_swap(self.at(at), expected, new, old))?;
        ensure!(got == 0, "changing the metadata: {got:#x}");
        Ok(self.local.load_be64(RESULTS))
    }
}

/// Runs a future whose verbs complete when they are posted.
fn now<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    match pin!(future).poll(&mut Waiting::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => bail!("a verb did not complete when it was posted"),
    }
}

const REFUSED: u8 = Syndrome::RemoteAccess as u8;

/// With access QPs only: tries all tags of the victims' keys, of the windows of larger blocks at
/// the same address, and of the metadata's key.
pub fn guess(a: &Arguments) -> Result<Value> {
    let mut me = Service::join(a)?;
    a.ready()?;
    let mut refused = 0;
    let mut targets: Vec<(u64, u32)> = vec![(me.metadata.addr, me.metadata.rkey)];
    for chunk in &a.of {
        let block = me.block_at(chunk.addr, chunk.len)?;
        for order in (block.order..Order::new(6)).iter() {
            let larger = Block::around(block.chunk, order);
            if larger.chunk == block.chunk && larger.end() <= me.shape.end() {
                let by = me.shape.entry(larger).raw() - me.shape.entry(block).raw();
                targets.push((chunk.addr, chunk.keys[0] + (by << 8)));
            }
        }
    }
    for (i, (addr, key)) in targets.iter().enumerate() {
        // All tags of the first two targets, some tags of the rest, because each refusal breaks a
        // connection.
        for tag in (0..256u32).step_by(if i < 2 { 1 } else { 37 }) {
            let key = key & !0xff | (key + tag) & 0xff;
            let got = me.touch(tag as usize % 2, *addr, key, tag)?;
            ensure!(got == REFUSED, "key {key:#x} at {addr:#x}: {got:#x}");
            refused += 1;
        }
    }
    Ok(json!({ "refused": refused }))
}

/// Uses keys after freeing their blocks. Until the window is rebound, the key accesses a block
/// without an owner. Afterwards every access must fail, even if the block has a new owner.
pub fn late(a: &Arguments) -> Result<Value> {
    let mut me = Service::join(a)?;
    let tree = Tree::new(me.shape, me.user);
    a.ready()?;
    let (mut refused, mut late) = (0, 0);
    for round in 0..a.count.max(1) as u32 {
        let taken = me.take(&tree, round % 3)?;
        let (addr, key) = (me.addr(taken.block), taken.capability.main.0);
        ensure!(me.touch(0, addr, key, round)? == 0, "an access to its own block was refused");
        me.free(&taken)?;
        // A second free of the block must fail.
        let (open, shut) = (Capability::open(Key(key)), Capability::quarantined(Key(key)));
        ensure!(!me.swap(me.capability(taken.block), open.to_word(), shut.to_word())?, "twice");
        let deadline = Instant::now() + LONG;
        while me.touch(0, addr, key, 1)? == 0 {
            late += 1;
            ensure!(Instant::now() < deadline, "the key of a freed block is not revoked");
        }
        for kind in 0..3 {
            let got = me.touch(kind as usize % 2, addr, key, kind)?;
            ensure!(got == REFUSED, "a revoked key: {got:#x}");
            refused += 1;
        }
    }
    Ok(json!({ "refused": refused, "late": late }))
}

/// On the management QP: WRITEs, and accesses beyond the metadata. The NIC must refuse both.
pub fn beyond(a: &Arguments) -> Result<Value> {
    let mut me = Service::join(a)?;
    a.ready()?;
    let (start, rkey) = (me.metadata.addr, me.metadata.rkey);
    let end = start + 8 * me.shape.words() as u64;
    let word = me.sge(RESULTS, 8);
    let mut refused = 0;
    let victims = a.of.first().map_or(me.metadata.data, |chunk| chunk.addr);
    for at in [start, start + 8, end - 8, victims] {
        let got = me.manage(|b| _ = b.rdma_write(remote(at, rkey), &[word]))?;
        ensure!(got == REFUSED, "a WRITE at {at:#x}: {got:#x}");
        me.recover_management()?;
        refused += 1;
    }
    for at in [start - 8, end.next_multiple_of(4096), victims, 0, u64::MAX - 7] {
        for read in [true, false] {
            let got = me.manage(|b| match read {
                true => _ = b.rdma_read(remote(at, rkey), &[word]),
                false => _ = b.compare_swap(remote(at, rkey), 0, u64::MAX, word),
            })?;
            ensure!(got == REFUSED, "beyond the metadata, at {at:#x}: {got:#x}");
            me.recover_management()?;
            refused += 1;
        }
    }
    // The victims' keys on the management QP, which is in another protection domain than the
    // memory.
    for chunk in &a.of {
        let got = me.manage(|b| _ = b.rdma_read(remote(chunk.addr, chunk.keys[0]), &[word]))?;
        ensure!(got == REFUSED, "another's key: {got:#x}");
        me.recover_management()?;
        refused += 1;
    }
    // The attacker can still work normally.
    let tree = Tree::new(me.shape, me.user);
    let taken = me.take(&tree, 0)?;
    let addr = me.addr(taken.block);
    ensure!(
        me.touch(0, addr, taken.capability.main.0, 0)? == 0,
        "a normal access failed after the attack"
    );
    me.free(&taken)?;
    Ok(json!({ "refused": refused }))
}

/// CASes two headers continuously. The successful CASes change only retry bits, so other clients
/// see an unexpected word but no change of the tree.
pub fn storm(a: &Arguments) -> Result<Value> {
    let me = Service::join(a)?;
    a.ready()?;
    let (mut changed, mut tried) = (0u64, 0u64);
    let deadline = Instant::now() + a.time;
    let headers = [Place::Section(SectionIndex::new(0)), Place::Span(SpanIndex::new(0))];
    let headers = headers.map(|place| place.word(me.shape));
    while Instant::now() < deadline {
        for at in headers {
            let mut seen = me.load(at)?;
            for level in 0..64u32 {
                let next = Header(seen).with_retry((Header(seen).retry() + 1 + level % 2) % 4);
                let found = now(me.cas(at, seen, next.0))?;
                tried += 1;
                changed += (found == seen) as u64;
                seen = if found == seen { next.0 } else { found };
                // A CAS that always fails.
                now(me.cas(at, !seen, 0))?;
                tried += 1;
            }
        }
    }
    Ok(json!({ "tried": tried, "changed": changed }))
}

/// Names other clients in the logs of its own blocks, opens spans without a block, and disconnects.
pub fn misnames(a: &Arguments) -> Result<Value> {
    let me = Service::join(a)?;
    let tree = Tree::new(me.shape, me.user);
    a.ready()?;
    let mut misnamed = 0;
    for order in 0..3 {
        let taken = me.take(&tree, order)?;
        let at = me.shape.log(taken.block.chunk);
        let word = me.load(at)?;
        // The clients that were admitted first.
        let other = User::new(1 + order as u16 % 2).context("a user")?;
        let log = FullLog { user: other, ..FullLog::parse(word) };
        misnamed += me.swap(at, word, log.to_word())? as u32;
    }
    // Marks spans as open that have no allocated block.
    for section in me.shape.each_section() {
        let at = me.shape.section(section);
        let header = Header(me.load(at)?);
        let opened = header.with_spread(SpanOffset::new(1), Spread::Normal);
        misnamed += me.swap(at, header.0, opened.0)? as u32;
    }
    Ok(json!({ "misnamed": misnamed }))
}

/// Frees victims' blocks, which the scheme cannot refuse. Any client may allocate the blocks next.
pub fn takes(a: &Arguments) -> Result<Value> {
    let me = Service::join(a)?;
    a.ready()?;
    let mut taken = 0;
    for chunk in &a.of {
        let block = me.block_at(chunk.addr, chunk.len)?;
        let key = Key(chunk.keys[0]);
        let (open, shut) = (Capability::open(key), Capability::quarantined(key));
        taken += me.swap(me.capability(block), open.to_word(), shut.to_word())? as u32;
    }
    Ok(json!({ "taken": taken }))
}

/// Writes pseudo-random values to pseudo-random words of the metadata.
pub fn nonsense(a: &Arguments) -> Result<Value> {
    let me = Service::join(a)?;
    let mut random = Random::new(a.seed);
    a.ready()?;
    let mut changed = 0;
    for _ in 0..a.count.max(1) {
        let at = Word::new(random.below(me.shape.words() as u64) as u32);
        let word = me.load(at)?;
        let new = match random.below(4) {
            0 => random.bits(),
            1 => word ^ 1 << random.below(64),
            2 => 0,
            // Turns an open capability into a quarantined one, or swaps the halves of a log.
            _ => word.rotate_right(32),
        };
        changed += me.swap(at, word, new)? as u32;
    }
    Ok(json!({ "changed": changed }))
}

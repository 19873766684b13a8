//! The client's side of FineMem. The tree's READs and CASes go over the management QP, to which the
//! memory node has given access to the metadata. A free is one CAS on the capability of the block.
//!
//! An interrupted allocation or free may or may not have been executed. Before the next allocation,
//! the client searches the logs for blocks that it owns without knowing it, and puts them into
//! quarantine.

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use scheme::credits::{Credit, Credits};
use scheme::index::EntryId;
use scheme::request_queue::{ManagementQp, RequestQueue, RequestQueueAttr};
use scheme::{
    Answer, ClientScheme, ConnectReply, Counter, Error, Grant, GroupId, MAX_GROUP, Offer, Scheme,
    too_large,
};
use verbs::{Access, Key, MemoryRegion, Nic, Op, Remote, Status, WorkRequest};

use super::block::{CHUNK_ORDER, Order};
use super::effort::{AttemptCost, EffortCounts};
use super::header::User;
use super::layout::{Functions, Shape, Word};
use super::log::Capability;
use super::map::Map;
use super::options::{Metadata, Options};
use super::release::Release;
use super::tree::{BATCH, Changed, REPEATS_MAX, Repeats, Verbs};

/// Bytes for the results of the verbs of a request in flight.
const SLOT_BYTES: usize = 8 * BATCH;
/// Building blocks of the management QP per request in flight: a CAS and three READs posted
/// together, or a scan request, and the same number again that completed but were not polled.
const BLOCKS: u32 = 8;
/// Maximum number of scan requests of one allocation, as long as each scan ends any quarantine.
const SCAN_REQUESTS_MAX: u32 = 64;
/// Attempts at a free, each of which another client has to undo.
///
/// Only the scan changes the capability of a block that is in use, and only once. An attempt may
/// wait for a scan of all entries, so the bound is small.
pub(super) const FREE_ATTEMPTS: u32 = 64;

/// The scheme's client on the NIC `N`.
pub struct Client<N: Nic> {
    queue: RequestQueue<N>,
    /// Buffer for the results of verbs: a slot for each request in flight.
    scratch: N::Mr,
    /// Buffer for the answer to a scan request.
    answers: N::Mr,
    in_flight: u32,
    scheme: Scheme,
    chunk_bytes: u64,
    contention_control: bool,
    /// Functions of the memory node's NIC that have windows.
    functions: u32,
    lanes: usize,
    /// Held while requesting a scan or resolving doubts.
    alone: Credits,
    admitted: OnceLock<Terms>,
    /// Blocks granted to this client, with their capabilities at that time.
    held: Mutex<HashMap<EntryId, Capability>>,
    release: Release,
    /// An interrupted allocation may have taken a block.
    in_doubt: AtomicBool,
    effort: EffortCounts,
}

/// Terms that the memory node announced when it admitted this client.
struct Terms {
    metadata: Remote,
    data: u64,
    user: User,
    map: Map,
    functions: Functions,
}

impl<N: Nic> Client<N> {
    /// Creates the management QP.
    pub fn new(nic: &N, pd: &N::Pd, offer: &Offer) -> Result<Self, Error> {
        let scheme = super::find(&offer.scheme)?;
        let credits = offer.credits;
        let blocks = (credits * BLOCKS).next_power_of_two().max(16);
        let attr = RequestQueueAttr {
            credits,
            receives: 2,
            send_blocks: blocks,
            completions: 2 * blocks,
            access: Access::NONE,
        };
        let local = |bytes| -> Result<N::Mr, Error> {
            Ok(nic.reg_mr(pd, &nic.alloc_dma(bytes)?, Access::LOCAL_ALL)?)
        };
        Ok(Self {
            queue: RequestQueue::new(nic, pd, attr)?,
            scratch: local(credits as usize * SLOT_BYTES)?,
            answers: local(8)?,
            in_flight: credits,
            scheme,
            chunk_bytes: offer.chunk_bytes,
            contention_control: Options::told(offer)?.contention_control,
            functions: offer.functions,
            lanes: (offer.group_size as usize).saturating_sub(1).clamp(1, MAX_GROUP),
            alone: Credits::new(1),
            admitted: OnceLock::new(),
            held: Mutex::default(),
            release: Release::of(scheme),
            in_doubt: AtomicBool::new(false),
            effort: EffortCounts::default(),
        })
    }

    fn terms(&self, attempt: &'static str) -> Result<&Terms, Error> {
        self.admitted.get().ok_or_else(|| Error::Protocol {
            attempt: attempt.into(),
            why: "the memory node did not announce the address of its metadata".into(),
        })
    }

    /// Takes a credit for a request in flight.
    pub(super) async fn session(&self, attempt: &'static str) -> Result<Session<'_, N>, Error> {
        let metadata = self.terms(attempt)?.metadata;
        let credit = self.queue.slot().await;
        let repeats = Repeats::default();
        Ok(Session {
            client: self,
            credit,
            metadata,
            attempt,
            spent: AttemptCost::default(),
            repeats,
        })
    }

    /// Sends a scan request to the memory node's CPU and waits for the answer: the number of
    /// quarantines that the scan ended, and the number of free blocks of the order.
    pub(super) async fn request_scan(
        &self,
        attempt: &str,
        order: Order,
    ) -> Result<(u32, u32), Error> {
        let alone = self.alone.take().await;
        self.request_scan_exclusive(attempt, order, &alone).await
    }

    async fn request_scan_exclusive(
        &self,
        attempt: &str,
        order: Order,
        _: &Credit<'_>,
    ) -> Result<(u32, u32), Error> {
        let to = self.answers.sge(0, 8);
        let request = u64::from(order.raw()).to_be_bytes();
        let (answered, sent) = self.queue.exchange(attempt, &request, &[to]).await?;
        if let Some(status) = [answered, sent].into_iter().find(|s| *s != Status::Success) {
            return Err(Error::ManagementBroken { attempt: attempt.into(), status });
        }
        let answer = self.answers.memory().load_be64(0);
        Ok(((answer >> 32) as u32, answer as u32))
    }

    /// Quarantines the blocks that this client owns without knowing it. Nothing else may be in
    /// flight.
    ///
    /// The logs name this client as the owner of a freed block until its quarantine has ended. Just
    /// before that, the block has its new key, and looks like a block granted last. Therefore all
    /// quarantines are ended first.
    async fn recover_undelivered(&self, attempt: &'static str) -> Result<(), Error> {
        let alone = self.alone.take().await;
        let mut all = Vec::new();
        for _ in 1..self.in_flight {
            all.push(self.queue.slot().await);
        }
        let session = self.session(attempt).await?;
        if !self.in_doubt.load(Ordering::Acquire) {
            return Ok(());
        }
        self.request_scan_exclusive(attempt, CHUNK_ORDER, &alone).await?;
        let Terms { map, user, .. } = self.terms(attempt)?;
        let shape = map.shape();
        // All blocks are found before any is quarantined. A quarantined block soon has another
        // owner, and the parts of a block are identified by the log of its first section.
        let mut blocks = Vec::new();
        for section in shape.each_section() {
            blocks.extend(map.taken_by(&session, *user, section).await?);
        }
        for block in blocks {
            let entry = shape.entry(block);
            let at = shape.capability(entry);
            let mut word = [0];
            session.read(at, &mut word).await?;
            let capability = Capability::parse(word[0]);
            let is_held = self.held(entry, capability.main).is_some();
            if !is_held && !capability.is_quarantined() {
                let quarantined = Capability::quarantined(capability.main);
                session.cas(at, word[0], quarantined.to_word()).await?;
            }
        }
        self.in_doubt.store(false, Ordering::Release);
        Ok(())
    }

    async fn try_allocate(
        &self,
        attempt: &'static str,
        group: GroupId,
        order: Order,
    ) -> Result<Option<Grant>, Error> {
        let session = self.session(attempt).await?;
        let Terms { map, data, functions, .. } = self.terms(attempt)?;
        let shape = map.shape();
        let granted = async {
            let Some((block, capability)) = map.allocate(&session, order).await? else {
                return Ok(None);
            };
            let (entry, key) = (shape.entry(block), capability.main);
            let (offset, bytes) = shape.range(block);
            // One window serves all lanes.
            let keys = &[key; MAX_GROUP][..self.lanes];
            let grant = Grant::new(data + offset, bytes, entry, group, keys)
                .in_function(functions.of(entry) as u8);
            self.held.lock().insert(entry, capability);
            Ok(Some(grant))
        };
        let granted: Result<Option<Grant>, Error> = granted.await;
        self.effort.add(&session.spent, matches!(granted, Ok(Some(_))));
        if granted.is_err() {
            self.in_doubt.store(true, Ordering::Release);
        }
        granted
    }

    /// The capability of a block granted under `key`, at the time of the grant.
    pub(super) fn held(&self, entry: EntryId, key: Key) -> Option<Capability> {
        self.held.lock().get(&entry).copied().filter(|held| held.main == key)
    }

    /// Removes a block granted under `key` from the held blocks.
    pub(super) fn forget(&self, entry: EntryId, key: Key) {
        let mut held = self.held.lock();
        if held.get(&entry).is_some_and(|held| held.main == key) {
            held.remove(&entry);
        }
    }

    /// The map of the pool, and this client's user number.
    pub(super) fn map(&self, attempt: &'static str) -> Result<(&Map, User), Error> {
        self.terms(attempt).map(|terms| (&terms.map, terms.user))
    }
}

impl<N: Nic> Client<N> {
    /// Puts a block into quarantine. Returns false if this client does not own it under that key.
    pub(super) async fn quarantine(
        &self,
        attempt: &'static str,
        (entry, key): (EntryId, Key),
    ) -> Result<bool, Error> {
        let at = self.map(attempt)?.0.shape().capability(entry);
        let session = self.session(attempt).await?;
        let (open, given_up) = (Capability::open(key), Capability::quarantined(key));
        let found = session.cas(at, open.to_word(), given_up.to_word()).await?;
        if found != open.to_word() {
            return Ok(false); // another free of this block was faster
        }
        self.forget(entry, key);
        Ok(true)
    }

    /// Frees a block at once. Returns false if this client does not own it under that key. The key
    /// stays valid until the memory node has rebound its window.
    pub(super) async fn free_at_once(
        &self,
        attempt: &'static str,
        (entry, key): (EntryId, Key),
    ) -> Result<bool, Error> {
        let (map, user) = self.map(attempt)?;
        let at = map.shape().capability(entry);
        let Some(mut seen) = self.held(entry, key) else { return Ok(false) };
        for _ in 0..FREE_ATTEMPTS {
            if seen.lacks_backup() {
                // No scan has run since the block was last freed.
                self.request_scan(attempt, CHUNK_ORDER).await?;
            }
            let session = self.session(attempt).await?;
            if seen.lacks_backup() {
                let mut word = [0];
                session.read(at, &mut word).await?;
                seen = Capability::parse(word[0]);
            }
            if seen.main != key {
                return Ok(false);
            }
            if seen.lacks_backup() {
                continue;
            }
            let next = Capability::open(seen.backup);
            let found = session.cas(at, seen.to_word(), next.to_word()).await?;
            if found == seen.to_word() {
                self.forget(entry, key);
                let block = map.shape().block(entry).ok_or(Error::NotYours { entry })?;
                map.give_back(&session, block, user).await?;
                return Ok(true);
            }
            seen = Capability::parse(found);
        }
        Err(undone(attempt, FREE_ATTEMPTS, &format_args!("the keys of block {entry}")))
    }
}

/// The error of a request whose attempts were undone by changes of `word`, last of all.
#[cold]
fn undone(attempt: &str, attempts: u32, word: &dyn Display) -> Error {
    Error::Contended {
        attempt: attempt.into(),
        attempts,
        why: format!(
            "another compute node changed the metadata before each of them, and {word} before the \
             last one; end the compute node that does so for ever, and try again"
        ),
    }
}

/// A request in flight.
pub(super) struct Session<'a, N: Nic> {
    client: &'a Client<N>,
    credit: Credit<'a>,
    metadata: Remote,
    attempt: &'static str,
    spent: AttemptCost,
    repeats: Repeats,
}

impl<N: Nic> Session<'_, N> {
    fn at(&self, word: Word) -> Remote {
        Remote { addr: self.metadata.addr + word.offset() as u64, ..self.metadata }
    }

    fn slot(&self, word: usize) -> usize {
        self.credit.slot().offset(SLOT_BYTES) + 8 * word
    }

    fn result(&self, word: usize) -> u64 {
        self.client.scratch.memory().load_be64(self.slot(word))
    }

    async fn run(&self, list: &mut [WorkRequest<'_>]) -> Result<(), Error> {
        self.spent.round_trip();
        self.client.queue.execute(self.attempt, list).await
    }
}

impl<N: Nic> Verbs for Session<'_, N> {
    type Error = Error;

    fn repeat(&self, word: Changed) -> Result<(), Error> {
        match self.repeats.may_repeat() {
            true => Ok(()),
            false => Err(undone(self.attempt, REPEATS_MAX, &word)),
        }
    }

    async fn read(&self, at: Word, out: &mut [u64]) -> Result<(), Error> {
        let to = [self.client.scratch.sge(self.slot(0), 8 * out.len() as u32)];
        let op = Op::Read { from: self.at(at), to: &to };
        self.run(&mut [WorkRequest { id: 0, op, signaled: true }]).await?;
        (0..).zip(out).for_each(|(i, word)| *word = self.result(i));
        Ok(())
    }

    async fn cas(&self, at: Word, expected: u64, new: u64) -> Result<u64, Error> {
        let old = self.client.scratch.sge(self.slot(0), 8);
        let op = Op::CompareSwap { at: self.at(at), compare: expected, swap: new, old };
        self.run(&mut [WorkRequest { id: 0, op, signaled: true }]).await?;
        let found = self.result(0);
        self.spent.cas(found == expected);
        Ok(found)
    }

    async fn read_both(&self, first: Word, second: Word) -> Result<(u64, u64), Error> {
        let to = [0, 1].map(|word| [self.client.scratch.sge(self.slot(word), 8)]);
        let read = |at, to| Op::Read { from: self.at(at), to };
        self.run(&mut [
            WorkRequest { id: 0, op: read(first, &to[0]), signaled: false },
            WorkRequest { id: 0, op: read(second, &to[1]), signaled: true },
        ])
        .await?;
        Ok((self.result(0), self.result(1)))
    }

    async fn read_two(
        &self,
        first: (Word, &mut [u64]),
        second: (Word, &mut [u64]),
    ) -> Result<(), Error> {
        let ((first, a), (second, b)) = (first, second);
        let sge = |at, count: usize| [self.client.scratch.sge(self.slot(at), 8 * count as u32)];
        let to = [sge(0, a.len()), sge(a.len(), b.len())];
        let read = |at, to| Op::Read { from: self.at(at), to };
        self.run(&mut [
            WorkRequest { id: 0, op: read(first, &to[0]), signaled: false },
            WorkRequest { id: 0, op: read(second, &to[1]), signaled: true },
        ])
        .await?;
        (0..).zip(a.iter_mut().chain(b)).for_each(|(i, word)| *word = self.result(i));
        Ok(())
    }

    async fn cas_and_read_one(
        &self,
        at: Word,
        expected: u64,
        new: u64,
        then: Word,
    ) -> Result<(u64, u64), Error> {
        // A QP executes its requests in order.
        let [old, read] = [0, 1].map(|word| [self.client.scratch.sge(self.slot(word), 8)]);
        let swap = Op::CompareSwap { at: self.at(at), compare: expected, swap: new, old: old[0] };
        let read = Op::Read { from: self.at(then), to: &read };
        self.run(&mut [
            WorkRequest { id: 0, op: swap, signaled: false },
            WorkRequest { id: 0, op: read, signaled: true },
        ])
        .await?;
        self.spent.cas(self.result(0) == expected);
        Ok((self.result(0), self.result(1)))
    }

    async fn cas_and_read(
        &self,
        at: Word,
        expected: u64,
        new: u64,
        then: [Word; 3],
    ) -> Result<(u64, [u64; 3]), Error> {
        if self.client.release == Release::AtOnce {
            // As published, each step waits for the previous one.
            let (found, mut words) = (self.cas(at, expected, new).await?, [0; 3]);
            if found == expected {
                self.read(then[2], &mut words[2..]).await?;
                (words[0], words[1]) = self.read_both(then[0], then[1]).await?;
            }
            return Ok((found, words));
        }
        // A QP executes its requests in order.
        let old = self.client.scratch.sge(self.slot(0), 8);
        let op = Op::CompareSwap { at: self.at(at), compare: expected, swap: new, old };
        let to = [1, 2, 3].map(|word| [self.client.scratch.sge(self.slot(word), 8)]);
        let read = |at, to| Op::Read { from: self.at(at), to };
        self.run(&mut [
            WorkRequest { id: 0, op, signaled: false },
            WorkRequest { id: 0, op: read(then[0], &to[0]), signaled: false },
            WorkRequest { id: 0, op: read(then[1], &to[1]), signaled: false },
            WorkRequest { id: 0, op: read(then[2], &to[2]), signaled: true },
        ])
        .await?;
        self.spent.cas(self.result(0) == expected);
        Ok((self.result(0), [1, 2, 3].map(|word| self.result(word))))
    }
}

impl<N: Nic> ClientScheme for Client<N> {
    fn allocate(&self, group: GroupId) -> Answer<'_, Grant> {
        self.allocate_bytes(group, self.chunk_bytes)
    }

    fn allocate_bytes(&self, group: GroupId, bytes: u64) -> Answer<'_, Grant> {
        Box::pin(async move {
            let attempt = "allocating a block";
            let shape: Shape = self.terms(attempt)?.map.shape();
            let Some(order) = shape.order_for(bytes) else {
                return Err(too_large(bytes, shape.block_bytes(shape.order_max()), true));
            };
            if self.in_doubt.load(Ordering::Acquire) {
                self.recover_undelivered(attempt).await?;
            }
            if let Some(grant) = self.try_allocate(attempt, group, order).await? {
                return Ok(grant);
            }
            // Blocks in quarantine may satisfy the request once the scan has ended, but other
            // clients may take them first and free them again. So the client also retries if a
            // block was free when the scan ended.
            for _ in 0..SCAN_REQUESTS_MAX {
                let (ended, free) = self.request_scan(attempt, order).await?;
                if let Some(grant) = self.try_allocate(attempt, group, order).await? {
                    return Ok(grant);
                }
                if ended == 0 && free == 0 {
                    break;
                }
            }
            Err(Error::OutOfMemory { bytes })
        })
    }

    fn free<'a>(&'a self, grant: &'a Grant) -> Answer<'a, ()> {
        Box::pin(async move {
            let attempt = "freeing a block";
            let key = grant.keys().first().copied().unwrap_or_default();
            if self.held(grant.entry, key).is_none() {
                return Err(Error::NotYours { entry: grant.entry });
            }
            let freed = match self.release {
                Release::Quarantined => self.quarantine(attempt, (grant.entry, key)).await,
                Release::AtOnce => self.free_at_once(attempt, (grant.entry, key)).await,
            };
            if freed.is_err() {
                // The block may or may not have been freed; resolving the doubts frees it.
                self.forget(grant.entry, key);
                self.in_doubt.store(true, Ordering::Release);
            }
            match freed? {
                true => Ok(()),
                // Another free of this block was faster.
                false => Err(Error::NotYours { entry: grant.entry }),
            }
        })
    }

    fn each_queue(&self, each: &mut dyn FnMut(&dyn ManagementQp)) {
        each(&self.queue);
    }

    fn accept(&self, terms: &ConnectReply) -> Result<(), Error> {
        let Some(m) = Metadata::of(terms) else { return Ok(()) };
        let shape = Shape { chunks: m.chunks, chunk_bytes: terms.chunk_bytes };
        let Some(user) = User::new(m.user) else { return Ok(()) };
        let metadata = Remote { addr: m.addr, rkey: Key(m.rkey) };
        let map = Map::new(self.scheme, shape, user, self.contention_control);
        let functions = Functions::new(shape, self.functions);
        let _ = self.admitted.set(Terms { metadata, data: m.data, user, map, functions });
        Ok(())
    }

    /// Returns the block that a failed request may have obtained.
    fn settle(&self) -> Answer<'_, ()> {
        Box::pin(async move {
            match self.in_doubt.load(Ordering::Acquire) {
                true => self.recover_undelivered("recovering undelivered grants").await,
                false => Ok(()),
            }
        })
    }

    fn counters(&self) -> Vec<Counter> {
        self.effort.get().counters()
    }
}

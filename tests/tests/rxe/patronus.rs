//! Permissions with leases from the guest: a compute node of scheme `patronus` that uses SEND,
//! READ, WRITE and CAS only. A compute node needs no more than docs/internals/patronus.md. This
//! file builds the messages from that page, without the code of the scheme.
//!
//! A second compute node, a [`Pool`] of this process, shares an object with the guest. No step
//! depends on the speed of the guest: leases that have to last are long, and the end of a short
//! lease is awaited at the memory node.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use granary_tests::guest::pattern;
use granary_tests::record::DOMAIN;
use pool::remote::route::{Route, Start};
use pool::{
    ClientId, ConnectReply, ConnectRequest, DefaultNic, EmbeddedNode, Error, LeaseTerms, Object,
    Options, Others, Permission, Pool, Settings, schemes,
};
use scheme::options::parse_terms;
use schemes::patronus::TableTerms;

use crate::bench::{BUFFER, Bench, How, REMOTE_ACCESS, SUCCESS};

/// Offset in the guest's memory of the results of READs and atomics.
const RESULT: usize = 0;
/// Offset of the request that is sent.
const REQUEST: usize = 1024;
/// Offset of the receives for replies.
const REPLIES: usize = 2048;
/// Receives for replies that can be posted at the same time.
const RECEIVES: u64 = 4;
/// Offset of an object's data.
const DATA: usize = 4096;
/// Bytes of the shared object: one packet, because an ACK that the link repeats ends rxe's longer
/// READs.
const BYTES: usize = 512;
/// Offset in the object of the word for atomics. The data comes before it.
const WORD: u64 = BYTES as u64 - 8;

/// Length of a lease that the guest extends or lets end.
const SHORT_US: u64 = 2_000_000;
/// Length of a lease that lasts. Longer than the time limit of each step.
const LONG_US: u64 = 3_600_000_000;
const LONG: Duration = Duration::from_micros(LONG_US);
/// Time limit of the notice.
const TIMEOUT: Duration = Duration::from_secs(200);

/// Id of a SEND of a request; receives have the ids from 0 on.
const SEND: u64 = 50;

/// Operations of requests.
const ALLOCATE: u8 = 1;
const ACQUIRE: u8 = 2;
const RENEW: u8 = 3;
const REVOKE: u8 = 4;
const FREE: u8 = 5;

/// Outcomes of requests.
const GRANTED: u8 = 1;
const DONE: u8 = 2;
const NO_SUCH_OBJECT: u8 = 5;
const NOT_YOURS: u8 = 6;
const EXPIRED: u8 = 7;
const BAD_REQUEST: u8 = 11;

/// A request, without its number. Its group is the first one.
#[derive(Clone, Copy, Default)]
struct Request {
    op: u8,
    /// 0 read, 1 write.
    right: u8,
    /// 0 shared, 1 exclusive.
    sharing: u8,
    /// 0 none, 1 read, 2 write, 3 own.
    others: u8,
    /// Entry (32), generation (32).
    object: u64,
    permission: u64,
    offset: u64,
    len: u64,
    lease_us: u64,
    wait_us: u64,
}

/// A reply.
#[derive(Clone, Copy, Debug)]
struct Reply {
    outcome: u8,
    number: u64,
    lease: Lease,
}

/// A permission of the guest.
#[derive(Clone, Copy, Debug)]
struct Lease {
    object: u64,
    permission: u64,
    slot: u32,
    address: u64,
    /// The lifetime word as the guest knows it.
    word: u64,
    key: u32,
}

/// The guest as a compute node. QPs are the guest's, by slot.
struct ComputeNode<'a> {
    bench: &'a mut Bench,
    management: usize,
    table: TableTerms,
    /// Number of requests so far, and the number of receives.
    requests: u64,
    /// Completed receives whose replies were not looked at yet.
    arrived: VecDeque<u64>,
}

/// Shares an object between the guest and a [`Pool`]: extension by CAS, notice, revocation,
/// postponed requests, renewal, expiry, refusals by the NIC and by the memory node.
pub fn leases(bench: &mut Bench, how: How) -> Result<()> {
    let settings = Settings {
        scheme: schemes::PATRONUS,
        donate_bytes: 1 << 20,
        chunk_bytes: 64 << 10,
        group_size: 2,
        ..Settings::default()
    };
    let settings = settings.with("lease_max_us", LONG_US);
    let (nodes, clients) = (schemes::nodes(), schemes::clients());
    let node = Arc::new(EmbeddedNode::start_on(bench.nic(how), &settings, &nodes, clients)?);
    let options = Options { groups: Some(1), domain: Some(DOMAIN), ..Options::default() };
    let pool = Pool::embedded_in(&node, options)?;
    let [management, access, spare] = [bench.take_slot()?, bench.take_slot()?, bench.take_slot()?];
    let admitted = admit(bench, how, &node, [management, access, spare])?;
    let table = parse_terms(&admitted.terms)?;
    let arrived = VecDeque::new();
    let mut guest = ComputeNode { bench, management, table, requests: 0, arrived };

    let lease = guest.extended_object(&pool)?;
    guest.use_object(access, &lease)?;
    let object = name(&node, lease.object);
    let permission = guest.notice_and_revocation(&pool, &object, access, &lease)?;

    // The access QP is broken. The keys of later permissions are valid on the spare QP.
    let lease = guest.postponed(&pool, &permission, spare, &lease)?;
    let permission = guest.renewal_and_expiry(&pool, &object, spare, &lease)?;
    guest.refusals(&pool, &permission, &lease)?;
    pool.revoke_blocking(&permission)?;
    let free = guest.ask(Request { op: FREE, object: lease.object, ..Request::default() })?;
    ensure!(free.outcome == DONE, "{free:?}");
    let late = pool.acquire_blocking(&object, &LeaseTerms::exclusive(LONG));
    ensure!(matches!(late, Err(Error::NoSuchObject { .. })), "a freed object: {late:?}");

    // The guest may not WRITE its lifetimes.
    let word = table_word(&guest.table, 0);
    let status = guest.bench.run_on(management, "write", &format!("{RESULT} 8 {word}"))?;
    ensure!(status == REMOTE_ACCESS, "a WRITE of a lifetime word: status {status}");

    node.node().retire_blocking(ClientId(admitted.client))?;
    drop(pool);
    node.node().audit()?;
    let status = node.node().status()?;
    ensure!(status.free == status.chunks && status.clients == 0, "{status:?}");
    for slot in [management, access, spare] {
        bench.guest.ask(&format!("destroy {slot}"))?;
        bench.free(slot);
    }
    Ok(())
}

/// Admits the guest with its QPs: management, access, spare.
fn admit(
    bench: &mut Bench,
    how: How,
    node: &EmbeddedNode<DefaultNic>,
    slots: [usize; 3],
) -> Result<ConnectReply> {
    let mut qpns = Vec::new();
    for slot in slots {
        qpns.push(bench.guest.number(&format!("qp {slot}"))? as u32);
    }
    let [local, remote]: [IpAddr; 2] = Bench::addresses(how)?;
    let address = SocketAddr::new(remote, rnic::wire::UDP_PORT);
    let psn = 0xff_ffe0;
    let admitted = node.node().admit(&ConnectRequest {
        management: vec![qpns[0]],
        groups: vec![qpns[1..].to_vec()],
        domain: Some(DOMAIN),
        route: Some(Route { address, local, mtu: how.mtu }),
        start: Start::Psn(verbs::Psn::new(psn)),
        ..ConnectRequest::default()
    })?;
    let peers = [admitted.management[0], admitted.groups[0][0], admitted.groups[0][1]];
    for (slot, peer) in slots.into_iter().zip(peers) {
        bench.connect(how, slot, peer, psn)?;
    }
    Ok(admitted)
}

/// The name of an object for a [`Pool`].
fn name(node: &EmbeddedNode<DefaultNic>, object: u64) -> Object {
    let incarnation = node.node().welcome().incarnation;
    let (entry, generation) = ((object >> 32) as u32, object as u32);
    Object { incarnation, entry, generation, len: BYTES as u64, node: 0 }
}

/// Address and key of a lifetime word, as in the guest's commands.
fn table_word(table: &TableTerms, slot: u32) -> String {
    format!("{} {}", table.lifetimes_addr + 8 * u64::from(slot), table.lifetimes_key)
}

fn nonce(word: u64) -> u64 {
    word >> 48
}

fn lifetime_us(word: u64) -> u64 {
    word & ((1 << 48) - 1)
}

/// A word with the same nonce and another lifetime.
fn with_lifetime(word: u64, us: u64) -> u64 {
    nonce(word) << 48 | us
}

/// Waits until the memory node has ended a lease of this length that begins later than now.
fn outlast(pool: &Pool, lease: Duration) -> Result<()> {
    let terms = LeaseTerms::exclusive(lease);
    let (object, _) = pool.allocate_object_blocking(64, Others::None, &terms)?;
    // Postponed until the first permission has ended.
    pool.acquire_blocking(&object, &terms)?;
    Ok(pool.free_object_blocking(&object)?)
}

impl ComputeNode<'_> {
    // --- steps ---------------------------------------------------------------------------------

    /// Allocates the shared object with a short lease, and extends the lease by CAS. The permission
    /// outlasts its first lease.
    fn extended_object(&mut self, pool: &Pool) -> Result<Lease> {
        let mut lease_us = SHORT_US;
        let request = Request {
            right: 1,
            sharing: 1,
            others: 2,
            len: BYTES as u64,
            lease_us,
            ..Request::default()
        };
        let mut lease = self.granted(Request { op: ALLOCATE, ..request })?;
        ensure!(lifetime_us(lease.word) == lease_us, "a lease of another length: {lease:?}");
        while !self.extend(&mut lease, LONG_US)? {
            // The guest was too slow.
            lease_us *= 2;
            let again = Request { op: ACQUIRE, object: lease.object, lease_us, ..request };
            lease = self.granted(again)?;
        }
        // A CAS that expects an outdated word changes nothing.
        let before = with_lifetime(lease.word, lease_us);
        let found = self.swap_word(lease.slot, before, with_lifetime(lease.word, 1))?;
        ensure!(found == lease.word, "a CAS of an outdated word found {found:#x}");
        ensure!(self.load_word(lease.slot)? == lease.word, "a CAS of an outdated word swapped");
        outlast(pool, Duration::from_micros(lease_us))?;
        Ok(lease)
    }

    /// Fills the object with a pattern by a WRITE; CAS and FAA of its last word; READ.
    fn use_object(&mut self, qp: usize, lease: &Lease) -> Result<()> {
        self.bench.fill(DATA, WORD as usize, 1)?;
        let all = format!("{DATA} {WORD} {} {}", lease.address, lease.key);
        self.ok(qp, "write", &all)?;
        let word = format!("{RESULT} {} {}", lease.address + WORD, lease.key);
        self.ok(qp, "cas", &format!("{word} 0 40"))?;
        self.ok(qp, "faa", &format!("{word} 2"))?;
        ensure!(self.bench.guest.number(&format!("get {RESULT}"))? == 40, "the CAS did not swap");
        self.bench.fill(DATA, WORD as usize, 2)?;
        self.ok(qp, "read", &all)?;
        self.bench.check(DATA, WORD as usize, 1)
    }

    /// The pool waits for the guest's permission: the guest cannot extend it any more, and revokes
    /// it. Then the pool has the object, and the guest's key is dead. Returns the pool's
    /// permission, under which the pool has written.
    fn notice_and_revocation(
        &mut self,
        pool: &Pool,
        object: &Object,
        qp: usize,
        lease: &Lease,
    ) -> Result<Permission> {
        let terms = LeaseTerms::exclusive(LONG);
        let permission = std::thread::scope(|scope| {
            let waiter = scope.spawn(|| pool.acquire_blocking(object, &terms));
            self.await_notice(lease)?;
            ensure!(!waiter.is_finished(), "the pool has the object beside the guest");
            let mut wanted = *lease;
            ensure!(!self.extend(&mut wanted, LONG_US)?, "an extension after the notice");
            let revoke = Request { op: REVOKE, permission: lease.permission, ..Request::default() };
            let reply = self.ask(revoke)?;
            ensure!(reply.outcome == DONE, "{reply:?}");
            Ok(waiter.join().expect("the pool does not panic")?)
        })?;
        let mut found = [0; BYTES];
        pool.read_blocking(&permission, 0, &mut found)?;
        let word = pool.fetch_and_add_blocking(&permission, WORD, 1)?;
        ensure!(found[..WORD as usize] == pattern(1, WORD as usize), "the guest's data is lost");
        ensure!(word == 42, "the guest's word is {word}");
        pool.write_blocking(&permission, 0, &pattern(3, WORD as usize))?;
        self.refused(qp, lease)?;
        Ok(permission)
    }

    /// Reads the guest's lifetime word until the memory node has put the notice there.
    fn await_notice(&mut self, lease: &Lease) -> Result<()> {
        let start = Instant::now();
        loop {
            let word = self.load_word(lease.slot)?;
            ensure!(nonce(word) == nonce(lease.word), "the word has another nonce: {word:#x}");
            if lifetime_us(word) == 0 {
                return Ok(());
            }
            ensure!(start.elapsed() < TIMEOUT, "no notice; the word is {word:#x}");
        }
    }

    /// The guest waits for the pool's permission. A later request is answered before. Returns a
    /// permission for reading, which is valid on the spare QP.
    fn postponed(
        &mut self,
        pool: &Pool,
        permission: &Permission,
        spare: usize,
        ended: &Lease,
    ) -> Result<Lease> {
        let read = Request {
            op: ACQUIRE,
            object: ended.object,
            len: BYTES as u64,
            lease_us: LONG_US,
            wait_us: LONG_US,
            ..Request::default()
        };
        let acquire = self.send(read)?;
        // The revocation of an ended permission is no error.
        let revoke = Request { op: REVOKE, permission: ended.permission, ..Request::default() };
        let reply = self.ask(revoke)?;
        ensure!(reply.outcome == DONE, "{reply:?}");
        pool.revoke_blocking(permission)?;
        let reply = self.reply()?;
        ensure!(reply.number == acquire && reply.outcome == GRANTED, "{reply:?}");
        let lease = reply.lease;
        ensure!(lease.permission != ended.permission && lease.key != ended.key, "{lease:?}");
        self.ok(spare, "read", &format!("{DATA} {WORD} {} {}", lease.address, lease.key))?;
        self.bench.check(DATA, WORD as usize, 3)?;
        Ok(lease)
    }

    /// The guest renews its permission for a short time, and lets it end. Then the pool has the
    /// object, and neither key opens anything. Returns the pool's permission.
    fn renewal_and_expiry(
        &mut self,
        pool: &Pool,
        object: &Object,
        spare: usize,
        lease: &Lease,
    ) -> Result<Permission> {
        let permission = lease.permission;
        let renew = Request { op: RENEW, permission, lease_us: SHORT_US, ..Request::default() };
        let mut renewed = self.granted(renew)?;
        ensure!(renewed.slot == lease.slot && renewed.object == lease.object, "{renewed:?}");
        ensure!(renewed.permission != lease.permission && renewed.key != lease.key, "{renewed:?}");
        ensure!(nonce(renewed.word) != nonce(lease.word), "a renewed lease has its old nonce");
        // Postponed until the lease has ended.
        let permission = pool.acquire_blocking(object, &LeaseTerms::exclusive(LONG))?;
        let word = self.load_word(renewed.slot)?;
        ensure!(word == with_lifetime(renewed.word, 0), "the word of an ended lease: {word:#x}");
        ensure!(!self.extend(&mut renewed, LONG_US)?, "an ended lease was extended");
        let renew = Request { permission: renewed.permission, ..renew };
        let reply = self.ask(renew)?;
        ensure!(reply.outcome == EXPIRED, "{reply:?}");
        self.refused(spare, &renewed)?;
        Ok(permission)
    }

    /// Requests that the memory node refuses.
    fn refusals(&mut self, pool: &Pool, foreign: &Permission, lease: &Lease) -> Result<()> {
        let terms = LeaseTerms::exclusive(LONG);
        let (private, _) = pool.allocate_object_blocking(64, Others::None, &terms)?;
        let private_name = u64::from(private.entry) << 32 | u64::from(private.generation);
        let request = Request {
            op: ACQUIRE,
            right: 1,
            object: lease.object,
            len: 64,
            lease_us: LONG_US,
            ..Request::default()
        };
        let number = foreign.lease().number;
        let cases = [
            ("another generation", NO_SUCH_OBJECT, Request { object: lease.object + 1, ..request }),
            ("a range beyond the end", NO_SUCH_OBJECT, Request { offset: WORD, ..request }),
            ("a private object", NO_SUCH_OBJECT, Request { object: private_name, ..request }),
            (
                "a foreign object",
                NO_SUCH_OBJECT,
                Request { op: FREE, object: private_name, ..Request::default() },
            ),
            (
                "a number that was not given",
                NOT_YOURS,
                Request { op: REVOKE, permission: number + (9 << 24), ..Request::default() },
            ),
            ("an empty range", BAD_REQUEST, Request { len: 0, ..request }),
            ("no operation", BAD_REQUEST, Request { op: 0, ..request }),
        ];
        for (what, outcome, request) in cases {
            let reply = self.ask(request).context(what)?;
            ensure!(reply.outcome == outcome, "{what}: {reply:?}");
        }
        ensure!(!pool.left(foreign).is_zero(), "a refused request has ended a permission");
        Ok(pool.free_object_blocking(&private)?)
    }

    // --- lifetimes -----------------------------------------------------------------------------

    /// Extends a lease to a lifetime by CAS. False if the word was another one: the lease has ended
    /// or cannot be extended.
    fn extend(&mut self, lease: &mut Lease, us: u64) -> Result<bool> {
        let new = with_lifetime(lease.word, us);
        let found = self.swap_word(lease.slot, lease.word, new)?;
        if found != lease.word {
            return Ok(false);
        }
        lease.word = new;
        Ok(true)
    }

    /// CASes a lifetime word; returns its old value, in this CPU's byte order as atomics do.
    fn swap_word(&mut self, slot: u32, old: u64, new: u64) -> Result<u64> {
        let word = table_word(&self.table, slot);
        self.ok(self.management, "cas", &format!("{RESULT} {word} {old} {new}"))?;
        self.bench.guest.number(&format!("get {RESULT}"))
    }

    /// READs a lifetime word, which is big-endian in memory.
    fn load_word(&mut self, slot: u32) -> Result<u64> {
        let word = table_word(&self.table, slot);
        self.ok(self.management, "read", &format!("{RESULT} 8 {word}"))?;
        Ok(self.bench.guest.number(&format!("get {RESULT}"))?.swap_bytes())
    }

    // --- requests ------------------------------------------------------------------------------

    /// Posts a receive, SENDs a request, and waits until the SEND is acknowledged. Returns the
    /// number of the request.
    fn send(&mut self, request: Request) -> Result<u64> {
        self.requests += 1;
        let number = self.requests;
        let byte = |value: u8, at: u32| u64::from(value) << (56 - 8 * at);
        let Request { op, right, sharing, others, .. } = request;
        let words = [
            byte(op, 0) | byte(right, 1) | byte(sharing, 2) | byte(others, 3),
            number,
            request.object,
            request.permission,
            request.offset,
            request.len,
            request.lease_us,
            request.wait_us,
        ];
        for (i, word) in words.into_iter().enumerate() {
            let at = REQUEST + 8 * i;
            self.bench.guest.ask(&format!("put {at} {}", word.swap_bytes()))?;
        }
        let (slot, receive) = (self.management, number % RECEIVES);
        self.bench.guest.ask(&format!("recv {slot} {receive} {} 80", reply_at(receive)))?;
        self.bench.guest.ask(&format!("send {slot} {SEND} {REQUEST} 64"))?;
        loop {
            match self.completion()? {
                SEND => return Ok(number),
                receive => self.arrived.push_back(receive),
            }
        }
    }

    /// The id of the next completion of the management QP, which must be a success.
    fn completion(&mut self) -> Result<u64> {
        self.bench.guest.send(&format!("wait {}", self.management))?;
        let wc = self.bench.receive_completion()?;
        ensure!(wc.status == SUCCESS, "the management QP: {wc:?}");
        ensure!(wc.id == SEND || wc.bytes == 80, "a reply of another length: {wc:?}");
        Ok(wc.id)
    }

    /// The next reply.
    fn reply(&mut self) -> Result<Reply> {
        let receive = match self.arrived.pop_front() {
            Some(receive) => receive,
            None => self.completion()?,
        };
        let mut words = [0; 8];
        for (i, word) in words.iter_mut().enumerate() {
            let at = reply_at(receive) + 8 * i;
            *word = self.bench.guest.number(&format!("get {at}"))?.swap_bytes();
        }
        let [first, number, object, permission, address, _waited, word, keys] = words;
        let (slot, key) = (first as u32, (keys >> 32) as u32);
        let lease = Lease { object, permission, slot, address, word, key };
        Ok(Reply { outcome: (first >> 56) as u8, number, lease })
    }

    /// Sends a request; returns its reply, which must be the next one.
    fn ask(&mut self, request: Request) -> Result<Reply> {
        let number = self.send(request)?;
        let reply = self.reply()?;
        ensure!(reply.number == number, "not the reply to request {number}: {reply:?}");
        Ok(reply)
    }

    /// Sends a request that must be granted.
    fn granted(&mut self, request: Request) -> Result<Lease> {
        let reply = self.ask(request)?;
        ensure!(reply.outcome == GRANTED, "not granted: {reply:?}");
        Ok(reply.lease)
    }

    // --- accesses ------------------------------------------------------------------------------

    fn ok(&mut self, qp: usize, verb: &str, rest: &str) -> Result<()> {
        let status = self.bench.run_on(qp, verb, rest)?;
        ensure!(status == SUCCESS, "{verb} {rest}: status {status}");
        Ok(())
    }

    /// READs under an ended permission: the memory node's NIC refuses, and the QP breaks.
    fn refused(&mut self, qp: usize, lease: &Lease) -> Result<()> {
        let read = format!("{DATA} 8 {} {}", lease.address, lease.key);
        let status = self.bench.run_on(qp, "read", &read)?;
        ensure!(status == REMOTE_ACCESS, "the key of an ended permission: status {status}");
        Ok(())
    }
}

/// Offset in the guest's memory of the reply of a receive.
const fn reply_at(receive: u64) -> usize {
    REPLIES + 128 * receive as usize
}

const _: () = assert!(reply_at(RECEIVES) <= DATA && DATA + BYTES <= BUFFER);

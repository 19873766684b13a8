//! A client that follows the protocol: it allocates, writes data of its own, reads the data back,
//! and frees.
//!
//! It knows the expected contents of each of its chunks byte by byte, and reports a violation if
//! they differ.

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use pool::{Error, Options, Pool, Transfer};
use scheme::{Grant, GroupId, Lane};
use verbs::Status;

use super::Context;
use super::invariant::Invariant;
use super::scenario::{End, Role};
use crate::fiber;
use crate::nic::SimNic;
use crate::random::Random;
use crate::time::Time;

/// Number of errors after which a client stops and leaves.
const PATIENCE: u32 = 40;

/// A chunk and its expected contents.
struct HeldChunk {
    grant: Grant,
    bytes: Vec<u8>,
    /// Offset and new bytes of a write whose outcome is unknown.
    doubt: Option<(usize, Vec<u8>)>,
}

/// An honest client at work.
struct Honest {
    cx: Context,
    pool: Pool<SimNic>,
    held: Vec<HeldChunk>,
    random: Random,
    errors: u32,
}

/// Program of an honest client's fiber.
pub(super) fn run(cx: Context, role: Role, mut random: Random) {
    let pool = loop {
        match connect(&cx) {
            Ok(pool) => break pool,
            Err(e) if cx.may_connect_again(&e) => {
                fiber::sleep(Time::us(200 + random.below(2000)));
            }
            Err(e) => return cx.with_oracle(|o| o.error(cx.client, "connects", &e)),
        }
    };
    let mut me = Honest { cx, pool, held: Vec::new(), random, errors: 0 };
    for _ in 0..role.rounds {
        if me.errors > PATIENCE {
            break;
        }
        me.round();
    }
    me.end(role.end);
}

fn connect(cx: &Context) -> Result<Pool<SimNic>, Error> {
    let nic = cx.nic();
    let control = cx.connector.control(&nic, cx.link.clone());
    let options = Options {
        groups: Some(cx.groups),
        send_blocks: 16,
        domain: cx.domain,
        ..Options::default()
    };
    Pool::over(nic, Box::new(control), options)
}

impl Honest {
    fn round(&mut self) {
        let room = self.held.len() < 4;
        match self.random.below(16) {
            0..=4 if room => self.allocate(1),
            5 if room => {
                let several = 2 + self.random.below(2);
                self.allocate(several);
            }
            0..=6 | 14.. => self.free_one(),
            7..=9 => self.write(),
            10..=11 => self.verify(),
            // Pages are read and written as a whole.
            12..=13 if self.cx.case.is_paged() => self.write(),
            12 => self.add(),
            _ => self.swap(),
        }
        if self.random.below(4) == 0 {
            fiber::sleep(Time(self.random.below(Time::us(30).0)));
        }
    }

    fn end(mut self, end: End) {
        match end {
            End::Tidy => {
                while !self.held.is_empty() && self.errors <= PATIENCE {
                    self.free_one();
                }
                self.nothing_is_left();
            }
            End::Careless => {}
            // The driver kills the process.
            End::Dies => return self.cx.die(),
        }
        self.cx.leaves();
        // Dropping the pool closes the connection.
    }

    /// Checks that the client owns nothing that it was not granted, some time after its last
    /// request.
    fn nothing_is_left(&mut self) {
        if !self.held.is_empty() {
            return;
        }
        let client = self.cx.client;
        for _ in 0..20 {
            if self.cx.with_oracle(|o| o.owned(client).is_empty()) {
                return;
            }
            if self.cx.case.is_trusting() {
                // The next allocation finds chunks that the client's own lost requests have taken,
                // unless that allocation is lost too.
                self.allocate(1);
                while !self.held.is_empty() {
                    self.free_one();
                }
            }
            fiber::sleep(Time::us(2000));
        }
        self.cx.with_oracle(|o| {
            let (name, owned) = (o.name(client), o.owned(client));
            o.wrong(
                Invariant::Forgotten,
                format!("{name} has freed all its chunks, but owns chunks {owned:?}"),
            );
        });
    }

    fn failed(&mut self, what: &str, error: &Error) {
        self.errors += 1;
        self.cx.with_oracle(|o| o.error(self.cx.client, what, error));
    }

    // --- allocate and free ---------------------------------------------------------------------

    fn allocate(&mut self, count: u64) {
        let group = GroupId(self.random.below(self.cx.groups as u64) as u16);
        let client = self.cx.client;
        let requests = (0..count).map(|_| {
            self.cx.with_oracle(|o| o.requests_chunk(client));
            let (pool, order) = (self.pool.clone(), self.cx.some_order(&mut self.random));
            let request: GrantFuture = Box::pin(async move {
                match order {
                    None => pool.allocate_in(group).await,
                    Some(order) => pool.allocate_bytes_in(group, pool.chunk_bytes() << order).await,
                }
            });
            request
        });
        let requests = requests.collect();
        let cx = self.cx.clone();
        // Each result is reported when it arrives, because other requests may take longer.
        let report = |result: &Result<Grant, Error>| match result {
            Ok(grant) => cx.with_oracle(|o| o.granted(client, grant)),
            Err(Error::OutOfMemory { .. }) => cx.with_oracle(|o| {
                o.counts.empty += 1;
                o.not_granted(client, "there is none");
            }),
            Err(e) => cx.with_oracle(|o| o.not_granted(client, &super::trace_text(e))),
        };
        let mut empty = false;
        for result in fiber::block_on(run_together(requests, report)) {
            match result {
                Ok(grant) => {
                    let bytes = match self.cx.case.clears() {
                        true => vec![0; grant.len as usize],
                        false => self.cx.with_oracle(|o| o.contents(grant.entry.raw())),
                    };
                    self.held.push(HeldChunk { grant, bytes, doubt: None });
                    let last = self.held.len() - 1;
                    if self.random.below(2) == 0 {
                        self.verify_chunk(last);
                    }
                    if self.random.below(4) != 0 {
                        self.write_to(last);
                    }
                }
                Err(Error::OutOfMemory { .. }) => empty = true,
                Err(e) => self.failed("allocates", &e),
            }
        }
        if empty && self.random.below(2) == 0 {
            self.wait_for_memory();
        }
    }

    fn wait_for_memory(&mut self) {
        let timeout = Duration::from_micros(50 + self.random.below(3000));
        let before = self.cx.now();
        match self.pool.wait_for_memory_blocking(timeout) {
            Ok(memory) => self.cx.with_oracle(|o| {
                o.note(|o| format!("{} has waited for memory: {memory}", o.name(self.cx.client)));
            }),
            Err(e) => self.failed("waits for memory", &e),
        }
        let waited = self.cx.now().since(before);
        self.cx.with_oracle(|o| {
            let limit = Time::from(timeout) + o.slack;
            if waited > limit {
                let name = o.name(self.cx.client);
                o.wrong(
                    Invariant::Answers,
                    format!("{name} waited for memory for {waited}; the time-out was {timeout:?}"),
                );
            }
        });
    }

    fn free_one(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let at = self.random.below(self.held.len() as u64) as usize;
        if self.random.below(2) == 0 {
            self.verify_chunk(at);
        }
        let HeldChunk { grant, .. } = self.held.swap_remove(at);
        let (client, entry) = (self.cx.client, self.cx.with_oracle(|o| o.first_chunk(&grant)));
        let keys = grant.keys().to_vec();
        self.cx.with_oracle(|o| o.frees(client, entry, &keys));
        let mut asked_before = false;
        // A broken free is repeated before any chunk can be granted to this client, so the reply
        // "not yours" means that the first attempt freed the chunk.
        while self.errors <= PATIENCE {
            match fiber::block_on(self.pool.free(grant)) {
                Ok(()) => return self.cx.with_oracle(|o| o.freed(client, entry, &keys)),
                Err(Error::NotYours { .. }) if asked_before => {
                    return self.cx.with_oracle(|o| o.freed(client, entry, &keys));
                }
                Err(e) => self.failed("frees", &e),
            }
            asked_before = true;
        }
    }

    // --- accesses ------------------------------------------------------------------------------

    fn some_chunk(&mut self) -> Option<usize> {
        let count = self.held.len() as u64;
        (count > 0).then(|| self.random.below(count) as usize)
    }

    fn write(&mut self) {
        if let Some(at) = self.some_chunk() {
            self.write_to(at);
        }
    }

    fn write_to(&mut self, at: usize) {
        if !self.is_known(at) {
            return;
        }
        let len = self.held[at].bytes.len() as u64;
        let paged = self.cx.case.is_paged();
        let from = if paged { 0 } else { self.random.below(len - 8) };
        let length = if paged { len } else { 1 + self.random.below((len - from).min(300)) };
        // No byte is 0, and the first byte identifies the client.
        let mark = 1 + (self.cx.client as u8 * 37 + self.random.below(30) as u8) % 250;
        let data: Vec<u8> = (0..length).map(|i| mark.wrapping_add(i as u8).max(1)).collect();
        let grant = self.held[at].grant;
        let result = match self.random.below(2) {
            _ if paged => fiber::block_on(self.pool.write(&grant, from, &data)),
            0 => fiber::block_on(self.pool.write(&grant, from, &data)),
            _ => self.write_on_a_lane(&grant, from, &data),
        };
        let held = &mut self.held[at];
        let range = from as usize..from as usize + data.len();
        match result {
            Ok(()) => held.bytes[range].copy_from_slice(&data),
            // A page is allocated by the first write.
            Err(Error::OutOfMemory { .. }) if paged => self.cx.with_oracle(|o| o.counts.empty += 1),
            Err(e) => {
                held.doubt = Some((from as usize, data));
                self.failed("writes", &e);
            }
        }
    }

    /// Writes from registered memory on a random lane.
    fn write_on_a_lane(&mut self, grant: &Grant, from: u64, data: &[u8]) -> Result<(), Error> {
        let lane = Lane(self.random.below(self.cx.lanes as u64) as u8);
        let buffer = self.pool.buffer(data.len())?;
        buffer.memory().write(0, data);
        let transfer = Transfer { grant, offset: from, buffer_offset: 0, len: data.len() as u32 };
        fiber::block_on(self.pool.write_from(&transfer, &buffer, lane)?)
    }

    fn verify(&mut self) {
        if let Some(at) = self.some_chunk() {
            self.verify_chunk(at);
        }
    }

    /// Returns whether the contents of a chunk are known; reads the chunk if they are not.
    fn is_known(&mut self, at: usize) -> bool {
        self.held[at].doubt.is_none() || self.verify_chunk(at)
    }

    /// Reads a chunk and compares its contents. Returns whether the read succeeded.
    fn verify_chunk(&mut self, at: usize) -> bool {
        let grant = self.held[at].grant;
        let mut bytes = vec![0; grant.len as usize];
        if let Err(e) = fiber::block_on(self.pool.read(&grant, 0, &mut bytes)) {
            self.failed("reads", &e);
            return false;
        }
        let held = &mut self.held[at];
        if let Some((from, new)) = held.doubt.take()
            && bytes[from..from + new.len()] == new
        {
            held.bytes[from..from + new.len()].copy_from_slice(&new);
        }
        if let Some(i) = (0..bytes.len()).find(|i| bytes[*i] != held.bytes[*i]) {
            let (is, must) = (bytes[i], held.bytes[i]);
            self.cx.with_oracle(|o| {
                let name = o.name(self.cx.client);
                let entry = grant.entry;
                o.wrong(
                    Invariant::Contents,
                    format!("{name} reads {is:#x} at byte {i} of chunk {entry}, not {must:#x}"),
                );
            });
        }
        true
    }

    /// Returns offset and value of a random word of a chunk.
    fn some_word(&mut self, at: usize) -> (u64, u64) {
        let held = &self.held[at];
        let from = 8 * self.random.below(held.bytes.len() as u64 / 8);
        let word = &held.bytes[from as usize..][..8];
        (from, u64::from_be_bytes(word.try_into().expect("8 bytes")))
    }

    fn add(&mut self) {
        let Some(at) = self.some_chunk().filter(|at| self.is_known(*at)) else { return };
        let (from, old) = self.some_word(at);
        let add = 1 + self.random.below(1000);
        let grant = self.held[at].grant;
        let result = fiber::block_on(self.pool.fetch_and_add(&grant, from, add));
        self.changed(at, from, (old, old.wrapping_add(add)), "adds", result);
    }

    fn swap(&mut self) {
        let Some(at) = self.some_chunk().filter(|at| self.is_known(*at)) else { return };
        let (from, old) = self.some_word(at);
        let (new, fits) = (self.random.bits(), self.random.below(2) == 0);
        let expected = if fits { old } else { !old };
        let grant = self.held[at].grant;
        let result = fiber::block_on(self.pool.compare_and_swap(&grant, from, expected, new));
        let new = if fits { new } else { old };
        self.changed(at, from, (old, new), "swaps", result);
    }

    fn changed(
        &mut self,
        at: usize,
        from: u64,
        (old, new): (u64, u64),
        what: &str,
        result: Result<u64, Error>,
    ) {
        let held = &mut self.held[at];
        let entry = held.grant.entry;
        match result {
            Ok(was) => {
                held.bytes[from as usize..][..8].copy_from_slice(&new.to_be_bytes());
                if was != old {
                    self.cx.with_oracle(|o| {
                        let name = o.name(self.cx.client);
                        o.wrong(
                            Invariant::Contents,
                            format!(
                                "{name} {what} at byte {from} of chunk {entry}: the old value is \
                             {was:#x}, not {old:#x}"
                            ),
                        );
                    });
                }
            }
            // The operation was flushed before execution.
            Err(e @ Error::Access { status: Status::Flushed, .. }) => self.failed(what, &e),
            Err(e) => {
                held.doubt = Some((from as usize, new.to_be_bytes().to_vec()));
                self.failed(what, &e);
            }
        }
    }
}

type GrantFuture = Pin<Box<dyn Future<Output = Result<Grant, Error>>>>;

/// Runs futures concurrently; `completed` is called with each result when it arrives.
pub(super) async fn run_together<T>(
    futures: Vec<Pin<Box<dyn Future<Output = T> + '_>>>,
    mut completed: impl FnMut(&T),
) -> Vec<T> {
    let mut futures: Vec<_> = futures.into_iter().map(Some).collect();
    let mut results = Vec::new();
    std::future::poll_fn(move |cx| {
        for slot in &mut futures {
            if let Some(future) = slot
                && let Poll::Ready(result) = future.as_mut().poll(cx)
            {
                completed(&result);
                results.push(result);
                *slot = None;
            }
        }
        match futures.iter().all(Option::is_none) {
            true => Poll::Ready(std::mem::take(&mut results)),
            false => Poll::Pending,
        }
    })
    .await
}

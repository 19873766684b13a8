//! The task of a connection: reads requests, executes them in order, writes the replies.

use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use redis_formats::request::{self, Limits, Parser};
use smallvec::SmallVec;

use crate::channels::To;
use crate::client::{Client, flag};
use crate::context::{Args, Large};
use crate::dispatch::{self, Request};
use crate::keyspace::Keyspace;
use crate::net::event_loop::{Readiness, Seat};
use crate::net::listen::Accepted;
use crate::net::stream::Stream;
use crate::panics;
use crate::session::Session;
use crate::worker::Worker;

/// Bytes of a read.
const READ_BYTES: usize = 16 << 10;
/// A value of this length is read into memory of its own.
const LARGE_BYTES: usize = 16 << 10;
/// Least growth of the memory of a large value.
const LARGE_GROWTH_BYTES: usize = 1 << 20;
/// Replies of this length are sent before the next command is executed.
const FLUSH_BYTES: usize = 64 << 10;
/// Memory of the output that a connection keeps.
const OUTPUT_KEPT_BYTES: usize = 1 << 20;
/// Growth of the output after which the memory of all connections is tested.
const TEST_BYTES: usize = 1 << 20;
/// Commands that a connection executes before other connections have their turn.
const COMMANDS_MAX: u32 = 256;

/// Why the work on the input stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Bytes are missing.
    Read,
    /// The connection ends, after its replies are sent.
    Close,
}

struct Connection<K: Keyspace> {
    stream: Stream,
    readiness: Rc<Readiness>,
    session: Session,
    watches: K::Watches,
    parser: Parser,
    input: Vec<u8>,
    /// Offset of the first request that is not executed.
    begin: usize,
    /// Large values of this request.
    large: Vec<Large>,
    /// Bytes of the last large value that are missing.
    missing: usize,
    out: Vec<u8>,
    /// Bytes of `out` that the socket has taken.
    sent: usize,
    /// Bytes of `out` that waited when limits were tested.
    noted: usize,
    /// Bytes that waited when the memory of all connections was tested.
    tested: usize,
    worker: Rc<Worker>,
    store: Arc<K>,
}

/// Serves a connection until its end.
pub(crate) async fn serve<K: Keyspace>(accepted: Accepted, seat: Seat<K>) {
    let Some(client) = seat.client.clone() else { return };
    let worker = seat.worker.clone();
    match Stream::new(accepted.fd, accepted.tls) {
        Ok(stream) => {
            // Other threads end or wake the connection from now on.
            let waker = poll_fn(|cx| Poll::Ready(cx.waker().clone())).await;
            client.set_waker(waker);
            let login = worker.server.users.first_login();
            let mut connection = Connection::<K> {
                stream,
                readiness: seat.readiness,
                session: Session::new(client.clone(), login),
                watches: K::Watches::default(),
                parser: Parser::default(),
                input: Vec::new(),
                begin: 0,
                large: Vec::new(),
                missing: 0,
                out: Vec::new(),
                sent: 0,
                noted: 0,
                tested: 0,
                worker: seat.worker,
                store: seat.store,
            };
            // The peer has gone, or the connection was ended.
            let _ = connection.run().await;
            connection.end();
        }
        Err(error) => tracing::warn!(%error, "beginning TLS failed"),
    }
    worker.server.clients.remove(&client);
    worker.server.threads[worker.index].connections.fetch_sub(1, Ordering::Relaxed);
}

impl<K: Keyspace> Connection<K> {
    fn client(&self) -> &Client {
        &self.session.client
    }

    async fn run(&mut self) -> io::Result<()> {
        loop {
            let next = self.execute_input().await?;
            if next == Next::Close {
                self.flush().await?;
                self.stream.close();
                return Ok(());
            }
            self.send()?;
            self.read().await?;
        }
    }

    /// Releases what the connection has at other places.
    fn end(&mut self) {
        let server = &self.worker.server;
        let client = &self.session.client;
        for to in To::ALL {
            for name in self.session.subscriptions.of(to) {
                server.channels.unsubscribe(to, name, client);
            }
        }
        server.monitors.remove(client);
        self.store.unwatch(&mut self.watches);
        self.worker.note_freed(client.memory());
        self.worker.give_buffer(std::mem::take(&mut self.input));
        self.worker.give_buffer(std::mem::take(&mut self.out));
        self.worker.give_buffer(self.session.ahead.take_bytes());
    }

    fn limits(&self) -> Limits {
        Limits { bulk: self.worker.server.config.live.bulk_max(), ..Limits::default() }
    }

    /// Executes the requests of the input.
    async fn execute_input(&mut self) -> io::Result<Next> {
        let mut executed = 0;
        loop {
            self.take_events()?;
            let limits = self.limits();
            let input = &mut self.input[self.begin..];
            let is_authenticated = self.session.login.is_authenticated;
            let parsed = match self.missing {
                0 => self.parser.parse(input, &limits, is_authenticated),
                _ => Ok(None),
            };
            match parsed {
                Ok(Some(used)) => {
                    self.client().note_input(self.input.len() - self.begin);
                    self.read_ahead().await;
                    self.execute().await?;
                    self.begin += used;
                    self.large.clear();
                }
                Ok(None) => return self.prepare_read(),
                Err(error) => {
                    self.out.push(b'-');
                    error.text(&mut self.out);
                    self.out.extend(b"\r\n");
                    return Ok(Next::Close);
                }
            }
            if self.session.is_closing {
                self.client().set(flag::CLOSING);
                return Ok(Next::Close);
            }
            if self.waiting() >= FLUSH_BYTES {
                self.send()?;
            }
            executed += 1;
            if executed % COMMANDS_MAX == 0 {
                self.worker.yield_now().await;
            }
        }
    }

    /// Reads the values of the next requests together, if these are GETs.
    async fn read_ahead(&mut self) {
        self.session.ahead.begin_next();
        let session = &self.session;
        let is_use = !session.client.has(flag::NO_TOUCH);
        let is_plain = session.queue.is_none() && session.login.is_unrestricted && is_use;
        if !session.ahead.is_empty() || !is_plain || self.worker.server.is_loading() {
            return;
        }
        let (mut keys, mut at) = (SmallVec::<[Range<usize>; kv::AHEAD_MAX]>::new(), self.begin);
        while keys.len() < kv::AHEAD_MAX
            && let Some((key, len)) = request::single(&self.input[at..], b"GET")
        {
            keys.push(at + key.start..at + key.end);
            at += len;
        }
        if keys.len() < 2 {
            return;
        }
        self.worker.give_buffer(self.session.ahead.take_bytes());
        self.session.ahead.set_bytes(self.worker.take_buffer());
        let keys = keys.iter().map(|key| &self.input[key.clone()]);
        let (worker, store, db) = (&self.worker, &self.store, self.session.db);
        // On the heap, since an idle connection should need little memory.
        Box::pin(store.read_ahead(worker, db, keys, &mut self.session.ahead)).await;
        self.session.ahead.begin_next();
    }

    /// Executes the request that the parser has returned. Fails if the command has panicked.
    async fn execute(&mut self) -> io::Result<()> {
        let input = &self.input[self.begin..];
        let args = Args::of_request(self.parser.arguments(input), &self.large);
        let request = Request {
            args,
            out: &mut self.out,
            session: &mut self.session,
            watches: &mut self.watches,
            worker: &self.worker,
            store: &*self.store,
        };
        if panics::catch(dispatch::execute(request)).await.is_ok() {
            return Ok(());
        }
        let (client, server) = (&self.session.client, &self.worker.server);
        tracing::error!(
            client = client.id,
            address = &*client.address,
            "a command failed inside the server, and its connection is closed; report the message \
             above"
        );
        // The code of the commands works on copies, and its panics are caught there. This panic is
        // of the store, in a change of which any part may be done.
        if client.writes() {
            server.fail("the store failed in a change of data; report the error".to_owned());
        }
        Err(ErrorKind::Other.into())
    }

    /// Takes the mail of other connections. Fails if the connection was ended.
    fn take_events(&mut self) -> io::Result<()> {
        let client = &self.session.client;
        if !client.has(flag::EVENTS) {
            return Ok(());
        }
        if client.has(flag::KILLED) {
            return Err(ErrorKind::ConnectionAborted.into());
        }
        if client.has(flag::USERS) {
            client.clear(flag::USERS);
            let users = &self.worker.server.users;
            if !users.admits(&mut self.session.login, &self.session.subscriptions) {
                return Err(ErrorKind::PermissionDenied.into());
            }
        }
        client.take_mail(&mut self.out);
        Ok(())
    }

    /// Makes room in the input, and begins to read a large value into memory of its own.
    fn prepare_read(&mut self) -> io::Result<Next> {
        self.input.drain(..self.begin);
        self.begin = 0;
        if self.missing == 0
            && let Some(pending) = self.parser.pending().filter(|own| own.len >= LARGE_BYTES)
            && self.parser.divert()
        {
            let here = (self.input.len() - pending.start).min(pending.len);
            let bytes = self.input.drain(pending.start..pending.start + here).collect();
            self.missing = pending.len - here;
            self.large.push(Large { index: pending.index, bytes });
            if self.missing == 0 {
                return Ok(Next::Read);
            }
        }
        let queued = self.session.queue.as_ref().map_or(0, |queue| queue.bytes());
        let large: usize = self.large.iter().map(|own| own.bytes.len()).sum();
        if self.input.len() + large + queued > self.worker.server.config.live.query_max() {
            tracing::warn!(
                client = self.client().id,
                address = &*self.client().address,
                "a connection reached client-query-buffer-limit and is closed"
            );
            return Err(ErrorKind::OutOfMemory.into());
        }
        Ok(Next::Read)
    }

    /// Bytes of the replies that the socket has not taken.
    fn waiting(&self) -> usize {
        self.out.len() - self.sent
    }

    /// Sends as much as the socket takes now. Fails if the rest is above a limit.
    fn send(&mut self) -> io::Result<()> {
        while self.readiness.writable.get() && (self.waiting() > 0 || self.stream.holds_bytes()) {
            match self.stream.write(&self.out[self.sent..]) {
                Ok(count) => {
                    self.sent += count;
                    self.worker.stats().sent.add(count as u64);
                    self.worker.stats().writes.add(1);
                    self.client().note_active(self.worker.now_ms());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.readiness.writable.set(false);
                }
                Err(error) => return Err(error),
            }
        }
        if self.waiting() == 0 {
            self.out.clear();
            self.out.shrink_to(OUTPUT_KEPT_BYTES);
            self.sent = 0;
        } else if self.sent > self.waiting() {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        self.test_limits()
    }

    /// Fails if the bytes that wait are above a limit of this connection or of all connections.
    fn test_limits(&mut self) -> io::Result<()> {
        let waiting = self.waiting();
        if waiting == self.noted {
            return Ok(());
        }
        self.noted = waiting;
        self.note_buffers(waiting);
        let (client, live) = (&self.session.client, &self.worker.server.config.live);
        if client.is_over_hard(live.output_limit(client.output_class())) {
            client.log_output();
            return Err(ErrorKind::OutOfMemory.into());
        }
        self.tested = self.tested.min(waiting);
        if waiting - self.tested >= TEST_BYTES {
            self.tested = waiting;
            let evicted = self.worker.server.clients.evict(live.client_memory());
            self.worker.stats().evicted_clients.add(evicted);
        }
        match client.has(flag::KILLED) {
            true => Err(ErrorKind::ConnectionAborted.into()),
            false => Ok(()),
        }
    }

    /// Sends all replies before the end of the connection. Waits if the peer does not read.
    async fn flush(&mut self) -> io::Result<()> {
        loop {
            self.send()?;
            if self.waiting() == 0 && !self.stream.holds_bytes() {
                return Ok(());
            }
            let (client, readiness) = (&self.session.client, &self.readiness);
            let _rest = self.worker.rest();
            readiness.wait(|| client.has(flag::KILLED) || readiness.writable.get()).await;
            if client.has(flag::KILLED) {
                return Err(ErrorKind::ConnectionAborted.into());
            }
        }
    }

    fn note_buffers(&self, output: usize) {
        let large: usize = self.large.iter().map(|own| own.bytes.len()).sum();
        let (input, capacity) = (self.input.len() + large, self.input.capacity() + large);
        self.worker.note_freed(self.client().note_buffers(input, capacity, output));
    }

    /// Waits for bytes, and reads them. Sends mail and replies meanwhile.
    async fn read(&mut self) -> io::Result<()> {
        loop {
            if !self.readiness.readable.get() {
                self.rest();
                self.wait().await;
            }
            self.take_events()?;
            self.send()?;
            if !self.readiness.readable.get() {
                continue;
            }
            match self.read_now() {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    // A peer that has closed its side only reads on.
                    self.flush().await?;
                    return Err(error);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Gives empty buffers back before a wait, so that an idle connection has none.
    fn rest(&mut self) {
        self.note_buffers(self.waiting());
        if self.input.is_empty() {
            self.worker.give_buffer(std::mem::take(&mut self.input));
        }
        if self.out.is_empty() {
            self.worker.give_buffer(std::mem::take(&mut self.out));
        }
        self.worker.give_buffer(self.session.ahead.take_bytes());
    }

    async fn wait(&self) {
        let (client, readiness, stream) = (&self.session.client, &self.readiness, &self.stream);
        let has_output = self.waiting() > 0;
        let has_room = || (has_output || stream.holds_bytes()) && readiness.writable.get();
        let is_awaited = || client.has(flag::EVENTS) || readiness.readable.get() || has_room();
        let _rest = self.worker.rest();
        readiness.wait(is_awaited).await;
    }

    /// Reads once. Returns whether bytes were read.
    fn read_now(&mut self) -> io::Result<bool> {
        if self.input.capacity() == 0 {
            self.input = self.worker.take_buffer();
        }
        if self.out.capacity() == 0 {
            self.out = self.worker.take_buffer();
        }
        let taken = match self.large.last_mut().filter(|_| self.missing > 0) {
            Some(large) => {
                // Memory follows the bytes that came, not the length that was announced.
                if large.bytes.len() == large.bytes.capacity() {
                    let more = large.bytes.len().max(LARGE_GROWTH_BYTES);
                    large.bytes.try_reserve_exact(more.min(self.missing))?;
                }
                let spare = large.bytes.capacity() - large.bytes.len();
                let most = spare.min(self.missing);
                self.stream.read(&mut large.bytes, most)
            }
            None => self.stream.read(&mut self.input, READ_BYTES),
        };
        let taken = match taken {
            Ok(taken) => taken,
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(false),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.readiness.readable.set(false);
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        if taken.count == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        if taken.is_drained && !self.readiness.ends.get() {
            self.readiness.readable.set(false);
        }
        let stats = self.worker.stats();
        stats.received.add(taken.count as u64);
        stats.reads.add(1);
        self.client().note_active(self.worker.now_ms());
        if self.missing > 0 {
            self.missing -= taken.count;
        }
        Ok(true)
    }
}

//! The driver of a server: connections with a pipeline, as lanes of a workload.
//!
//! Each connection writes a batch of requests as long as its pipeline, and the next batch when all
//! replies have arrived. A thread serves its connections with `epoll`.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use rustix::event::{Timespec, epoll};

use super::protocol::{Protocol, Reply};
use super::workload::{Kind, Lane, Plan, Request, key_bytes};
use super::{Outcome, Target};
use crate::Error;

/// Bytes by which the memory for replies grows.
const READ_BYTES: usize = 64 << 10;
/// Longest wait for any reply.
const REPLY_SECONDS_MAX: i64 = 30;
/// Events that one `epoll_wait` returns.
const EVENTS: usize = 256;

/// A server, and the connections of the driver.
#[derive(Clone, Debug)]
pub struct Server {
    /// The protocol.
    pub protocol: Protocol,
    /// HOST:PORT.
    pub address: String,
    /// Connections.
    pub connections: u32,
    /// Requests of a batch.
    pub depth: u32,
    /// Threads of the driver, at most one for each connection.
    pub threads: u32,
}

impl Server {
    fn error(&self, why: impl ToString) -> Error {
        Error::Server { address: self.address.clone(), why: why.to_string() }
    }

    fn connect(&self) -> Result<TcpStream, Error> {
        let connecting = |why| self.error(format!("connecting: {why}; is the server running?"));
        let addresses = self.address.to_socket_addrs().map_err(connecting)?;
        let addresses: Vec<_> = addresses.collect();
        let stream = TcpStream::connect(&addresses[..]).map_err(connecting)?;
        stream.set_nodelay(true).map_err(connecting)?;
        stream.set_nonblocking(true).map_err(connecting)?;
        Ok(stream)
    }

    /// Runs lanes on connections of their own.
    fn drive(&self, plan: &Plan, lanes: Vec<Vec<Requests>>) -> Result<Outcome, Error> {
        let value: Vec<u8> = (0..plan.value_bytes).map(|at| at as u8).collect();
        let mut drivers = Vec::new();
        for lanes in lanes {
            let connect = |requests| Ok::<_, Error>(Connection::new(self.connect()?, requests));
            drivers.push(lanes.into_iter().map(connect).collect::<Result<Vec<_>, _>>()?);
        }
        let barrier = &Barrier::new(drivers.len());
        let value = &value;
        let outcomes = thread::scope(|scope| {
            let start = |connections| {
                scope.spawn(move || {
                    let driver = Driver { server: self, connections, value };
                    barrier.wait();
                    driver.run().map_err(|why| self.error(why))
                })
            };
            let threads: Vec<_> = drivers.into_iter().map(start).collect();
            let ended = threads.into_iter().map(|t| t.join().expect("a driver does not panic"));
            ended.collect::<Result<Vec<Outcome>, Error>>()
        })?;
        let mut all = Outcome::default();
        outcomes.iter().for_each(|one| all.join(one));
        Ok(all)
    }

    /// Lane `lane` belongs to thread `lane % threads`.
    fn divided(&self, requests: impl Fn(u32) -> Requests) -> Vec<Vec<Requests>> {
        let threads = self.threads.clamp(1, self.connections.max(1));
        let of = |thread| (thread..self.connections).step_by(threads as usize);
        (0..threads).map(|thread| of(thread).map(&requests).collect()).collect()
    }
}

impl Target for Server {
    fn run(&mut self, plan: &Plan) -> Result<Outcome, Error> {
        let lanes = self.connections;
        self.drive(plan, self.divided(|lane| Requests::Lane(plan.lane(lane, lanes))))
    }

    fn clear(&mut self, keys: u64, plan: &Plan) -> Result<(), Error> {
        let lanes = u64::from(self.connections);
        let every = |lane| Requests::Delete { next: u64::from(lane), step: lanes, end: keys };
        self.drive(plan, self.divided(every)).map(drop)
    }
}

/// The requests of a connection.
#[derive(Clone, Debug)]
enum Requests {
    /// Those of a workload.
    Lane(Lane),
    /// Deletions of all keys of the connection.
    Delete { next: u64, step: u64, end: u64 },
}

impl Iterator for Requests {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        match self {
            Self::Lane(lane) => lane.next(),
            Self::Delete { next, step, end } => {
                let key = *next;
                *next += *step;
                (key < *end).then_some(Request { kind: Kind::Delete, key })
            }
        }
    }
}

/// A request whose reply has not arrived.
#[derive(Clone, Copy, Debug)]
enum Awaited {
    /// A request of the workload.
    Whole(Kind),
    /// The read of a [`Kind::Modify`]; the write follows in the next batch.
    First(u64),
    /// The write of a [`Kind::Modify`] whose read was written at this time.
    Second(Instant),
}

struct Connection {
    stream: TcpStream,
    requests: Requests,
    awaited: VecDeque<Awaited>,
    /// Writes of [`Kind::Modify`] for the next batch, with the times of their reads.
    second: Vec<(u64, Instant)>,
    out: Vec<u8>,
    written: usize,
    /// Bytes of replies from `parsed` to `filled`.
    input: Vec<u8>,
    parsed: usize,
    filled: usize,
    /// Time at which the batch was written.
    since: Instant,
    waits_for_room: bool,
}

impl Connection {
    fn new(stream: TcpStream, requests: Requests) -> Self {
        Self {
            stream,
            requests,
            awaited: VecDeque::new(),
            second: Vec::new(),
            out: Vec::new(),
            written: 0,
            input: vec![0; READ_BYTES],
            parsed: 0,
            filled: 0,
            since: Instant::now(),
            waits_for_room: false,
        }
    }

    /// Makes the next batch. Returns false if there is none.
    fn begin(&mut self, server: &Server, value: &[u8]) -> bool {
        self.out.clear();
        self.written = 0;
        let depth = server.depth as usize;
        let protocol = server.protocol;
        for (key, began) in self.second.drain(..) {
            protocol.request(Kind::Update, &key_bytes(key), value, &mut self.out);
            self.awaited.push_back(Awaited::Second(began));
        }
        while self.awaited.len() < depth {
            let Some(Request { kind, key }) = self.requests.next() else { break };
            let (posted, awaited) = match kind {
                Kind::Modify => (Kind::Read, Awaited::First(key)),
                _ => (kind, Awaited::Whole(kind)),
            };
            protocol.request(posted, &key_bytes(key), value, &mut self.out);
            self.awaited.push_back(awaited);
        }
        self.since = Instant::now();
        !self.awaited.is_empty()
    }

    /// Writes as much of the batch as the socket takes.
    fn write(&mut self) -> Result<(), String> {
        while self.written < self.out.len() {
            match self.stream.write(&self.out[self.written..]) {
                Ok(0) => return Err("the server has closed the connection".into()),
                Ok(bytes) => self.written += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("writing requests: {error}")),
            }
        }
        Ok(())
    }

    /// Reads once, and parses the complete replies.
    fn read(
        &mut self,
        protocol: Protocol,
        value_bytes: usize,
        outcome: &mut Outcome,
    ) -> Result<(), String> {
        if self.input.len() - self.filled < READ_BYTES / 2 {
            self.input.copy_within(self.parsed..self.filled, 0);
            self.filled -= self.parsed;
            self.parsed = 0;
            self.input.resize(self.input.len().max(self.filled + READ_BYTES), 0);
        }
        match self.stream.read(&mut self.input[self.filled..]) {
            Ok(0) => return Err("the server has closed the connection".into()),
            Ok(bytes) => self.filled += bytes,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return Ok(());
            }
            Err(error) => return Err(format!("reading replies: {error}")),
        }
        let now = Instant::now();
        while let Some(first) = self.awaited.front().copied() {
            let bytes = &self.input[self.parsed..self.filled];
            let Some((length, reply)) = protocol.reply(bytes).map_err(|e| e.to_string())? else {
                return Ok(());
            };
            self.parsed += length;
            self.awaited.pop_front();
            match reply {
                Reply::Refused(why) => return Err(format!("the server refuses: {why}")),
                Reply::Missing => outcome.misses += 1,
                Reply::Value(bytes) if bytes != value_bytes => {
                    return Err(format!(
                        "a value has {bytes} bytes instead of {value_bytes}; does another program \
                         write the same keys?"
                    ));
                }
                Reply::Value(_) | Reply::Done => {}
            }
            match first {
                Awaited::Whole(kind) => outcome.record(kind, now - self.since),
                Awaited::First(key) => self.second.push((key, self.since)),
                Awaited::Second(began) => outcome.record(Kind::Modify, now - began),
            }
        }
        if self.parsed < self.filled {
            return Err("the server has sent a reply without a request".into());
        }
        (self.parsed, self.filled) = (0, 0);
        Ok(())
    }
}

/// A thread of the driver.
struct Driver<'a> {
    server: &'a Server,
    connections: Vec<Connection>,
    value: &'a [u8],
}

impl Driver<'_> {
    fn run(mut self) -> Result<Outcome, String> {
        let system = |what: &str, error: rustix::io::Errno| format!("{what}: {error}");
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC);
        let poller: OwnedFd = poller.map_err(|error| system("creating an epoll", error))?;
        let began = Instant::now();
        let mut outcome = Outcome::default();
        let mut open = 0;
        for (at, connection) in self.connections.iter_mut().enumerate() {
            let data = epoll::EventData::new_u64(at as u64);
            epoll::add(&poller, &connection.stream, data, epoll::EventFlags::IN)
                .map_err(|error| system("watching a connection", error))?;
            if connection.begin(self.server, self.value) {
                open += 1;
                connection.write()?;
            }
        }
        self.watch_writes(&poller).map_err(|error| system("watching a connection", error))?;
        let timeout = Timespec { tv_sec: REPLY_SECONDS_MAX, tv_nsec: 0 };
        let mut events = Vec::with_capacity(EVENTS);
        while open > 0 {
            events.clear();
            let buffer = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&poller, buffer, Some(&timeout)) {
                Ok(0) => return Err(format!("no reply for {REPLY_SECONDS_MAX} s")),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(system("waiting for replies", error)),
            }
            for event in &events {
                let event: &epoll::Event = event;
                let at = { event.data }.u64() as usize;
                if self.turn(at, &mut outcome)? {
                    open -= 1;
                }
                self.watch_write(&poller, at).map_err(|e| system("watching a connection", e))?;
            }
        }
        outcome.elapsed = began.elapsed();
        Ok(outcome)
    }

    /// Serves a connection with an event. Returns true if it has no more requests.
    fn turn(&mut self, at: usize, outcome: &mut Outcome) -> Result<bool, String> {
        let connection = &mut self.connections[at];
        let was_open = !connection.awaited.is_empty();
        connection.write()?;
        connection.read(self.server.protocol, self.value.len(), outcome)?;
        if !connection.awaited.is_empty() || !was_open {
            return Ok(false);
        }
        if !connection.begin(self.server, self.value) {
            return Ok(true);
        }
        connection.write()?;
        Ok(false)
    }

    fn watch_writes(&mut self, poller: &OwnedFd) -> rustix::io::Result<()> {
        (0..self.connections.len()).try_for_each(|at| self.watch_write(poller, at))
    }

    /// Watches for room in a socket as long as a part of a batch is not written.
    fn watch_write(&mut self, poller: &OwnedFd, at: usize) -> rustix::io::Result<()> {
        let connection = &mut self.connections[at];
        let waits = connection.written < connection.out.len();
        if std::mem::replace(&mut connection.waits_for_room, waits) == waits {
            return Ok(());
        }
        let mut flags = epoll::EventFlags::IN;
        flags.set(epoll::EventFlags::OUT, waits);
        epoll::modify(poller, &connection.stream, epoll::EventData::new_u64(at as u64), flags)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::process::{Child, Command, Stdio};

    use super::super::run_all;
    use super::super::workload::{Keys, Workload};
    use super::*;

    /// A server of another project. Ends with the value.
    struct Foreign(Child);

    impl Drop for Foreign {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Starts a program that listens at a free port. `None` if the program is not installed.
    fn foreign(program: &str, options: impl Fn(u16) -> Vec<String>) -> Option<(Foreign, String)> {
        for _ in 0..10 {
            let free = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = free.local_addr().unwrap().port();
            drop(free);
            let mut command = Command::new(program);
            command.args(options(port)).stdout(Stdio::null()).stderr(Stdio::null());
            let mut child = match command.spawn() {
                Ok(child) => Foreign(child),
                Err(error) if error.kind() == ErrorKind::NotFound => return None,
                Err(error) => panic!("{program}: {error}"),
            };
            let address = format!("127.0.0.1:{port}");
            // The server ends if another program has taken the port.
            while child.0.try_wait().unwrap().is_none() {
                if TcpStream::connect(&address).is_ok() {
                    return Some((child, address));
                }
                thread::yield_now();
            }
        }
        panic!("{program} has found no free port");
    }

    fn check(protocol: Protocol, address: &str, depth: u32, threads: u32) {
        let mut server =
            Server { protocol, address: address.into(), connections: 5, depth, threads };
        let plan = |workload| Plan::new(workload, 300, 1000, 2000, 1);
        let plans: Vec<Plan> = Workload::ALL.into_iter().map(plan).collect();
        run_all(&mut server, &plans, Keys::None, |at, outcome| {
            let workload = plans[at].workload;
            assert_eq!(outcome.operations, workload.operations(300, 1000), "{workload:?}");
            assert_eq!(outcome.misses, 0, "{workload:?}");
        })
        .unwrap();
        // All keys that are left are deleted, and no others.
        server.clear(1300, &plans[0]).unwrap();
        let read = server.run(&plan(Workload::ReadRandom)).unwrap();
        assert_eq!(read.misses, 1000);
    }

    #[test]
    fn redis_server_is_driven() {
        let options = |port: u16| {
            ["--port", &port.to_string(), "--save", "", "--appendonly", "no"]
                .map(str::to_owned)
                .to_vec()
        };
        let Some((_server, address)) = foreign("redis-server", options) else { return };
        for (depth, threads) in [(1, 1), (16, 2)] {
            check(Protocol::Resp, &address, depth, threads);
        }
    }

    #[test]
    fn memcached_is_driven() {
        let options = |port: u16| {
            ["-l", "127.0.0.1", "-p", &port.to_string(), "-U", "0", "-u", "nobody", "-t", "1"]
                .map(str::to_owned)
                .to_vec()
        };
        let Some((_server, address)) = foreign("memcached", options) else { return };
        for (depth, threads) in [(1, 1), (16, 2)] {
            check(Protocol::Memcached, &address, depth, threads);
        }
    }

    /// A server that answers each request with the same bytes.
    fn fake(reply: &'static [u8]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            while matches!(stream.read(&mut request), Ok(1..)) {
                if stream.write_all(reply).is_err() {
                    return;
                }
            }
        });
        address
    }

    fn failure(reply: &'static [u8]) -> String {
        let address = fake(reply);
        let mut server =
            Server { protocol: Protocol::Resp, address, connections: 1, depth: 1, threads: 1 };
        let plan = Plan::new(Workload::ReadRandom, 10, 20, 3, 1);
        server.run(&plan).unwrap_err().to_string()
    }

    #[test]
    fn wrong_replies_end_the_run_with_a_reason() {
        for (reply, why) in [
            (&b"nonsense\r\n"[..], "no reply to GET"),
            (b"-NOAUTH Authentication required.\r\n", "refuses: NOAUTH"),
            (b"$4\r\nlong\r\n", "4 bytes instead of 3"),
            (b"$3\r\nabc\r\n$3\r\nabc\r\n", "without a request"),
        ] {
            let error = failure(reply);
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn server_that_is_not_there_is_an_error() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap().to_string();
        drop(free);
        let protocol = Protocol::Memcached;
        let mut server = Server { protocol, address, connections: 1, depth: 1, threads: 1 };
        let plan = Plan::new(Workload::ReadRandom, 10, 20, 3, 1);
        let error = server.run(&plan).unwrap_err().to_string();
        assert!(error.contains("is the server running?"), "{error}");
    }
}

//! What other threads see of a connection, and the mail that they send to it.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;

use parking_lot::Mutex;
use redis_formats::command::bits::flag::WRITE;
use redis_formats::command::{Command, Id, by_id};
use redis_formats::reply::Protocol;
use rustix::net::{Shutdown, shutdown};

/// Flags of a connection.
pub mod flag {
    /// The connection must end.
    pub const KILLED: u32 = 1;
    /// Mail has come.
    pub const MAIL: u32 = 1 << 1;
    /// Sees each command of the server.
    pub const MONITOR: u32 = 1 << 2;
    /// Has subscriptions.
    pub const SUBSCRIBER: u32 = 1 << 3;
    /// The connection ends behind a reply.
    pub const CLOSING: u32 = 1 << 4;
    /// CLIENT NO-EVICT was called.
    pub const NO_EVICT: u32 = 1 << 5;
    /// The connection is a Unix socket.
    pub const UNIX: u32 = 1 << 6;
    /// A pause holds the next command back.
    pub const PAUSED: u32 = 1 << 7;
    /// The users have changed: the connection looks up its user and its rights again.
    pub const USERS: u32 = 1 << 8;
    /// CLIENT NO-TOUCH was called: reads are no uses of keys.
    pub const NO_TOUCH: u32 = 1 << 9;
    /// An event for the connection's task: it must look at the flags.
    pub const EVENTS: u32 = KILLED | MAIL | USERS;
}

/// Limits of the bytes that wait for a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutputLimit {
    /// Maximum bytes; 0 is no limit.
    pub hard: u64,
    /// Maximum bytes for longer than `soft_s`; 0 is no limit.
    pub soft: u64,
    /// Seconds for which more than `soft` bytes may wait.
    pub soft_s: u64,
}

/// What CLIENT SETINFO tells of the library of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    Name,
    Version,
}

impl Library {
    pub const ALL: [Self; 2] = [Self::Name, Self::Version];

    /// The name in CLIENT SETINFO and CLIENT LIST.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Name => "lib-name",
            Self::Version => "lib-ver",
        }
    }
}

/// A connection, as other threads see it.
#[derive(Debug)]
pub struct Client {
    /// Number of the connection; never used again.
    pub id: u64,
    /// Address of the peer.
    pub address: Box<str>,
    /// Address of the server's side.
    pub local: Box<str>,
    /// Descriptor of the socket.
    pub fd: i32,
    /// The socket, until the connection's task drops it.
    socket: Weak<OwnedFd>,
    /// Index of the connection's thread.
    pub thread: usize,
    /// When the connection came, in milliseconds since 1970.
    pub since_ms: u64,
    /// Set by the connection's task at its begin.
    waker: OnceLock<Waker>,
    flags: AtomicU32,
    last_ms: AtomicU64,
    db: AtomicU32,
    /// Number of the latest command plus 1; 0 before the first one.
    command: AtomicU32,
    protocol: AtomicU32,
    /// By number of `To`.
    subscriptions: [AtomicUsize; 3],
    queued: AtomicI64,
    /// Bytes of the commands that wait for EXEC.
    queued_bytes: AtomicUsize,
    input: AtomicUsize,
    input_capacity: AtomicUsize,
    output: AtomicUsize,
    name: Mutex<Box<[u8]>>,
    /// By number of [`Library`].
    library: Mutex<[Box<[u8]>; 2]>,
    user: Mutex<Arc<[u8]>>,
    mail: Mutex<Vec<u8>>,
    /// Since when more than the soft limit waits; 0 if less does.
    over_since_ms: AtomicU64,
    is_listed: AtomicBool,
}

/// What [`Client::new`] needs.
#[derive(Debug)]
pub(crate) struct Origin {
    pub id: u64,
    pub address: Box<str>,
    pub local: Box<str>,
    pub fd: i32,
    pub socket: Weak<OwnedFd>,
    pub thread: usize,
    pub now_ms: u64,
    pub is_unix: bool,
    pub user: Arc<[u8]>,
}

impl Client {
    /// A connection without a peer.
    #[cfg(test)]
    pub(crate) fn for_tests(id: u64) -> Arc<Self> {
        let user = Arc::from(&b"default"[..]);
        let (address, local) = ("a".into(), "b".into());
        let (fd, socket, thread, now_ms, is_unix) = (0, Weak::new(), 0, 0, false);
        let origin = Origin { id, address, local, fd, socket, thread, now_ms, is_unix, user };
        Arc::new(Self::new(origin))
    }

    pub(crate) fn new(origin: Origin) -> Self {
        Self {
            id: origin.id,
            address: origin.address,
            local: origin.local,
            fd: origin.fd,
            socket: origin.socket,
            thread: origin.thread,
            since_ms: origin.now_ms,
            waker: OnceLock::new(),
            flags: AtomicU32::new(if origin.is_unix { flag::UNIX } else { 0 }),
            last_ms: AtomicU64::new(origin.now_ms),
            db: AtomicU32::new(0),
            command: AtomicU32::new(0),
            protocol: AtomicU32::new(2),
            subscriptions: Default::default(),
            queued: AtomicI64::new(-1),
            queued_bytes: AtomicUsize::new(0),
            input: AtomicUsize::new(0),
            input_capacity: AtomicUsize::new(0),
            output: AtomicUsize::new(0),
            name: Mutex::default(),
            library: Mutex::default(),
            user: Mutex::new(origin.user),
            mail: Mutex::default(),
            over_since_ms: AtomicU64::new(0),
            is_listed: AtomicBool::new(true),
        }
    }

    /// Returns whether any of `flags` is set.
    pub fn has(&self, flags: u32) -> bool {
        self.flags.load(Ordering::Acquire) & flags != 0
    }

    pub(crate) fn set(&self, flags: u32) {
        self.flags.fetch_or(flags, Ordering::AcqRel);
    }

    pub(crate) fn clear(&self, flags: u32) {
        self.flags.fetch_and(!flags, Ordering::AcqRel);
    }

    /// Ends the connection. Its task drops the socket.
    pub fn kill(&self) {
        self.set(flag::KILLED);
        self.wake();
    }

    /// Ends the connection as [`Client::kill`] does, and shuts the socket down. The peer sees the
    /// end of the stream at once, and not a reset at its next command.
    pub fn hang_up(&self) {
        self.kill();
        if let Some(socket) = self.socket.upgrade() {
            // An error says that the peer has gone already.
            let _ = shutdown(&*socket, Shutdown::Both);
        }
    }

    /// Has the connection look up its user again, before it takes its mail.
    pub(crate) fn review(&self) {
        self.set(flag::USERS);
        self.wake();
    }

    /// Sets the waker of the connection's task.
    pub(crate) fn set_waker(&self, waker: Waker) {
        self.waker.get_or_init(|| waker);
    }

    fn wake(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake_by_ref();
        }
    }

    /// Appends bytes to the mail, unless the connection does not read for too long: then ends it.
    pub(crate) fn send(&self, limit: OutputLimit, write: impl FnOnce(&mut Vec<u8>)) {
        if self.has(flag::KILLED) {
            return;
        }
        let waiting = {
            let mut mail = self.mail.lock();
            write(&mut mail);
            mail.len() + self.output.load(Ordering::Relaxed)
        };
        if limit.hard > 0 && waiting as u64 > limit.hard {
            self.log_output();
            return self.kill();
        }
        if !self.has(flag::MAIL) {
            self.set(flag::MAIL);
            self.wake();
        }
    }

    /// Moves the mail to `out`.
    pub(crate) fn take_mail(&self, out: &mut Vec<u8>) {
        self.clear(flag::MAIL);
        let mut mail = self.mail.lock();
        if out.is_empty() && out.capacity() <= mail.capacity() {
            std::mem::swap(out, &mut mail);
        } else {
            out.append(&mut mail);
        }
    }

    /// Bytes that wait for the connection.
    pub(crate) fn waiting_bytes(&self) -> usize {
        self.output.load(Ordering::Relaxed) + self.mail.lock().len()
    }

    /// Returns whether the soft limit is exceeded for too long.
    pub(crate) fn is_over(&self, limit: OutputLimit, now_ms: u64) -> bool {
        if limit.soft == 0 || self.waiting_bytes() as u64 <= limit.soft {
            self.over_since_ms.store(0, Ordering::Relaxed);
            return false;
        }
        let since = self.over_since_ms.load(Ordering::Relaxed);
        if since == 0 {
            self.over_since_ms.store(now_ms.max(1), Ordering::Relaxed);
        }
        since > 0 && now_ms.saturating_sub(since) > limit.soft_s * 1000
    }

    pub(crate) fn note_command(&self, command: &Command, now_ms: u64) {
        self.command.store(command.id as u32 + 1, Ordering::Relaxed);
        self.last_ms.store(now_ms, Ordering::Relaxed);
    }

    /// Notes the bytes of the buffers. Returns by how many bytes they have shrunk.
    pub(crate) fn note_buffers(&self, input: usize, capacity: usize, output: usize) -> usize {
        let shrunk =
            |atomic: &AtomicUsize, new| atomic.swap(new, Ordering::Relaxed).saturating_sub(new);
        self.input.store(input, Ordering::Relaxed);
        shrunk(&self.input_capacity, capacity) + shrunk(&self.output, output)
    }

    /// Notes that bytes came from the peer, or went to it.
    pub(crate) fn note_active(&self, now_ms: u64) {
        self.last_ms.store(now_ms, Ordering::Relaxed);
    }

    /// Returns whether more bytes wait for the connection than `limit` allows at any time.
    pub(crate) fn is_over_hard(&self, limit: OutputLimit) -> bool {
        limit.hard > 0 && self.waiting_bytes() as u64 > limit.hard
    }

    /// Logs that the connection ends because of `client-output-buffer-limit`.
    pub(crate) fn log_output(&self) {
        tracing::warn!(
            client = self.id,
            address = &*self.address,
            bytes = self.waiting_bytes(),
            class = self.output_class(),
            "a connection reached client-output-buffer-limit and is closed: it does not read"
        );
    }

    /// Bytes of this process's memory for the connection.
    pub(crate) fn memory(&self) -> usize {
        let number = |atomic: &AtomicUsize| atomic.load(Ordering::Relaxed);
        let buffers = number(&self.input_capacity) + self.waiting_bytes();
        buffers + number(&self.queued_bytes) + size_of::<Self>()
    }

    /// The class whose limit of output the connection has.
    pub(crate) fn output_class(&self) -> &'static str {
        if self.has(flag::SUBSCRIBER | flag::MONITOR) { "pubsub" } else { "normal" }
    }

    /// Returns whether the latest command may change data.
    pub(crate) fn writes(&self) -> bool {
        let number = self.command.load(Ordering::Relaxed);
        let id = number.checked_sub(1).and_then(id_of);
        id.is_some_and(|id| id == Id::Exec || by_id(id).0.has(WRITE))
    }

    /// Notes the bytes of the input from the present request on.
    pub(crate) fn note_input(&self, bytes: usize) {
        self.input.store(bytes, Ordering::Relaxed);
    }

    pub(crate) fn set_db(&self, db: u8) {
        self.db.store(db.into(), Ordering::Relaxed);
    }

    pub(crate) fn set_protocol(&self, protocol: Protocol) {
        self.protocol.store(protocol.number() as u32, Ordering::Relaxed);
    }

    pub(crate) fn set_queued(&self, count: Option<usize>, bytes: usize) {
        self.queued_bytes.store(bytes, Ordering::Relaxed);
        self.queued.store(count.map_or(-1, |count| count as i64), Ordering::Relaxed);
    }

    /// Notes the numbers of channels, patterns and shard channels.
    pub(crate) fn set_subscriptions(&self, counts: [usize; 3]) {
        for (own, count) in self.subscriptions.iter().zip(counts) {
            own.store(count, Ordering::Relaxed);
        }
        match counts.iter().sum::<usize>() {
            0 => self.clear(flag::SUBSCRIBER),
            _ => self.set(flag::SUBSCRIBER),
        }
    }

    pub(crate) fn set_user(&self, user: Arc<[u8]>) {
        *self.user.lock() = user;
    }

    pub(crate) fn set_name(&self, name: &[u8]) {
        *self.name.lock() = name.into();
    }

    pub(crate) fn set_library(&self, which: Library, value: &[u8]) {
        self.library.lock()[which as usize] = value.into();
    }

    /// Name of the user.
    pub fn user(&self) -> Arc<[u8]> {
        self.user.lock().clone()
    }

    /// Name of the connection.
    pub fn name(&self) -> Box<[u8]> {
        self.name.lock().clone()
    }

    /// Protocol of replies.
    pub fn protocol(&self) -> Protocol {
        match self.protocol.load(Ordering::Relaxed) {
            3 => Protocol::Resp3,
            _ => Protocol::Resp2,
        }
    }

    /// When the latest command came, in milliseconds since 1970.
    pub(crate) fn last_ms(&self) -> u64 {
        self.last_ms.load(Ordering::Relaxed)
    }

    /// The class of the connection, as CLIENT LIST TYPE names it.
    pub(crate) fn class(&self) -> &'static str {
        if self.has(flag::SUBSCRIBER) { "pubsub" } else { "normal" }
    }

    /// The number of bytes of the input and the output.
    pub(crate) fn buffers(&self) -> (usize, usize) {
        (self.input.load(Ordering::Relaxed), self.output.load(Ordering::Relaxed))
    }

    /// Removes the connection from lists: its task is about to end. Returns false at a second call.
    pub(crate) fn unlist(&self) -> bool {
        self.is_listed.swap(false, Ordering::AcqRel)
    }

    /// Appends the line of CLIENT LIST to `out`, without the line end.
    pub(crate) fn describe(&self, now_ms: u64, out: &mut Vec<u8>) {
        // Writing to a vector does not fail.
        let number = |atomic: &AtomicUsize| atomic.load(Ordering::Relaxed);
        let seconds = |since: u64| now_ms.saturating_sub(since) / 1000;
        let (input, capacity) = (number(&self.input), number(&self.input_capacity));
        let waiting = self.waiting_bytes();
        let (memory, queued) = (self.memory(), number(&self.queued_bytes));
        let (age, idle) = (seconds(self.since_ms), seconds(self.last_ms()));
        let _ = write!(
            out,
            "id={} addr={} laddr={} fd={} name=",
            self.id, self.address, self.local, self.fd
        );
        out.extend_from_slice(&self.name.lock());
        let _ = write!(out, " age={age} idle={idle} flags={}", self.letters());
        let _ = write!(
            out,
            " db={} sub={} psub={} ssub={} multi={} qbuf={input} qbuf-free={} argv-mem=0 \
             multi-mem={queued} rbs=0 rbp=0 obl={waiting} oll=0 omem={waiting} tot-mem={memory}",
            self.db.load(Ordering::Relaxed),
            number(&self.subscriptions[0]),
            number(&self.subscriptions[1]),
            number(&self.subscriptions[2]),
            self.queued.load(Ordering::Relaxed),
            capacity.saturating_sub(input),
        );
        let _ = write!(out, " events=r cmd={} user=", self.command_name());
        out.extend_from_slice(&self.user.lock());
        let _ = write!(out, " redir=-1 resp={}", self.protocol().number());
        for (which, value) in Library::ALL.iter().zip(self.library.lock().iter()) {
            let _ = write!(out, " {}=", which.name());
            out.extend_from_slice(value);
        }
    }

    fn letters(&self) -> String {
        let letters = [
            (flag::MONITOR, 'O'),
            (flag::SUBSCRIBER, 'P'),
            (flag::CLOSING, 'c'),
            (flag::PAUSED, 'b'),
            (flag::UNIX, 'U'),
            (flag::NO_EVICT, 'e'),
            (flag::NO_TOUCH, 'T'),
        ];
        let mut text: String =
            letters.iter().filter(|(flag, _)| self.has(*flag)).map(|(_, letter)| letter).collect();
        if self.queued.load(Ordering::Relaxed) >= 0 {
            text.push('x');
        }
        if text.is_empty() {
            text.push('N');
        }
        text
    }

    fn command_name(&self) -> String {
        let number = self.command.load(Ordering::Relaxed);
        let Some(id) = number.checked_sub(1).and_then(id_of) else { return "NULL".to_owned() };
        full_name(id)
    }
}

/// The command of a number.
fn id_of(number: u32) -> Option<Id> {
    redis_formats::command::all()
        .flat_map(|command| std::iter::once(command).chain(command.subcommands))
        .map(|command| command.id)
        .find(|&id| id as u32 == number)
}

/// The name of a command, such as `config|get`.
pub(crate) fn full_name(id: Id) -> String {
    match by_id(id) {
        (command, None) => command.name.to_owned(),
        (command, Some(container)) => format!("{}|{}", container.name, command.name),
    }
}

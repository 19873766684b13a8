//! State that all threads of a server share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::task::Waker;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use redis_formats::command::bits::flag;
use redis_formats::command::{Command, Id};

use crate::channels::Channels;
use crate::client::{Client, flag as client_flag};
use crate::config::Config;
use crate::latency::Latency;
use crate::monitor::Monitors;
use crate::net::event_loop::Job;
use crate::net::inbox::Inbox;
use crate::notify;
use crate::security_log::SecurityLog;
use crate::slowlog::SlowLog;
use crate::stats::Stats;
use crate::users::Users;

/// How many connections, and which.
#[derive(Debug, Default)]
pub(crate) struct Clients {
    next: AtomicU64,
    count: AtomicUsize,
    all: Mutex<BTreeMap<u64, Arc<Client>>>,
}

impl Clients {
    /// The number of the next connection.
    pub fn next_id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Takes the place of a connection, if there is one below `limit`.
    pub fn enter(&self, limit: usize) -> bool {
        let enter = |count: usize| (count < limit).then_some(count + 1);
        self.count.fetch_update(Ordering::AcqRel, Ordering::Acquire, enter).is_ok()
    }

    /// Gives a place back that [`Clients::enter`] has taken.
    pub fn leave(&self) {
        self.count.fetch_sub(1, Ordering::AcqRel);
    }

    pub fn add(&self, client: &Arc<Client>) {
        self.all.lock().insert(client.id, client.clone());
    }

    pub fn remove(&self, client: &Client) {
        if client.unlist() {
            self.all.lock().remove(&client.id);
            self.leave();
        }
    }

    /// Has the connections that receive messages look up their users: a user is gone or changed.
    /// Other connections do so at their next command.
    pub fn review(&self) {
        let listens =
            |client: &&Arc<Client>| client.has(client_flag::SUBSCRIBER | client_flag::MONITOR);
        self.all.lock().values().filter(listens).for_each(|client| client.review());
    }

    /// Ends the connections with the most memory until all have at most `limit` bytes; 0 is no
    /// limit. Returns how many end.
    pub fn evict(&self, limit: u64) -> u64 {
        let all = if limit == 0 { Vec::new() } else { self.list() };
        let lives = |client: &&Arc<Client>| !client.has(client_flag::KILLED);
        let mut sizes: Vec<_> =
            all.iter().filter(lives).map(|client| (client.memory() as u64, client)).collect();
        let mut total: u64 = sizes.iter().map(|(bytes, _)| bytes).sum();
        if total <= limit {
            return 0;
        }
        sizes.retain(|(_, client)| !client.has(client_flag::NO_EVICT));
        sizes.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        let mut evicted = 0;
        for (bytes, client) in sizes {
            if total <= limit {
                break;
            }
            tracing::warn!(
                client = client.id,
                address = &*client.address,
                bytes,
                "the connections have more memory than maxmemory-clients: this one is closed"
            );
            client.kill();
            total -= bytes;
            evicted += 1;
        }
        evicted
    }

    /// All connections, in the order of their numbers.
    pub fn list(&self) -> Vec<Arc<Client>> {
        self.all.lock().values().cloned().collect()
    }
}

/// Returns whether a command sends a message to subscribers.
pub(crate) fn is_publish(id: Id) -> bool {
    matches!(id, Id::Publish | Id::Spublish)
}

/// A pause of the execution of commands (CLIENT PAUSE).
#[derive(Debug, Default)]
pub(crate) struct Pause {
    until_ms: AtomicU64,
    holds_all: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

impl Pause {
    /// Begins or extends a pause.
    pub fn begin(&self, until_ms: u64, holds_all: bool, now_ms: u64) {
        let all = holds_all || self.is_active(now_ms) && self.holds_all.load(Ordering::Acquire);
        self.holds_all.store(all, Ordering::Release);
        self.until_ms.fetch_max(until_ms, Ordering::AcqRel);
    }

    /// Ends the pause.
    pub fn end(&self) {
        self.until_ms.store(0, Ordering::Release);
        std::mem::take(&mut *self.waiting.lock()).into_iter().for_each(Waker::wake);
    }

    /// Returns whether a pause holds any command back.
    pub fn is_active(&self, now_ms: u64) -> bool {
        self.until_ms.load(Ordering::Acquire) > now_ms
    }

    /// The end of the pause that holds `command` back, in milliseconds since 1970.
    pub fn holds(&self, command: &Command, writes: bool, now_ms: u64) -> Option<u64> {
        let until = self.until_ms.load(Ordering::Acquire);
        if until <= now_ms {
            return None;
        }
        let changes = writes || command.has(flag::WRITE) || is_publish(command.id);
        (changes || self.holds_all.load(Ordering::Acquire)).then_some(until)
    }

    /// Calls `waker` at the end of the pause, if [`Pause::end`] ends the pause early.
    pub fn register(&self, waker: Waker) {
        self.waiting.lock().push(waker);
    }

    /// Removes wakers of pauses that are over.
    pub fn forget(&self, now_ms: u64) {
        if !self.is_active(now_ms) {
            std::mem::take(&mut *self.waiting.lock()).into_iter().for_each(Waker::wake);
        }
    }
}

/// What other threads reach of a thread.
#[derive(Debug)]
pub(crate) struct Handle {
    pub inbox: Inbox,
    pub stats: Stats,
    pub connections: AtomicUsize,
}

impl Handle {
    pub fn new(inbox: Inbox) -> Self {
        Self { inbox, stats: Stats::default(), connections: AtomicUsize::new(0) }
    }
}

/// Rates over the last 1.6 s, which INFO shows.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    pub commands: AtomicU64,
    pub received: AtomicU64,
    pub sent: AtomicU64,
}

const RUNNING: u32 = 0;
const ASKED: u32 = 1;
const ENDING: u32 = 2;

/// State that all threads share.
#[derive(Debug)]
pub struct Server {
    /// The configuration.
    pub config: Config,
    pub(crate) users: Users,
    pub(crate) clients: Clients,
    pub(crate) channels: Channels,
    pub(crate) monitors: Monitors,
    pub(crate) slowlog: SlowLog,
    pub(crate) latency: Latency,
    pub(crate) security_log: SecurityLog,
    pub(crate) pause: Pause,
    pub(crate) rates: Rates,
    pub(crate) threads: Box<[Handle]>,
    /// Error replies by code.
    pub(crate) errors: Mutex<BTreeMap<Vec<u8>, u64>>,
    /// 40 hexadecimal digits, random for each start.
    pub(crate) run_id: String,
    pub(crate) since_ms: u64,
    pub(crate) peak_memory: AtomicU64,
    pub(crate) config_file: String,
    is_loading: AtomicBool,
    expires_actively: AtomicBool,
    ending: AtomicU32,
    failure: Mutex<Option<String>>,
}

impl Server {
    pub(crate) fn new(config: Config, users: Users, threads: Box<[Handle]>, file: String) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            config,
            users,
            clients: Clients::default(),
            channels: Channels::default(),
            monitors: Monitors::default(),
            slowlog: SlowLog::default(),
            latency: Latency::default(),
            security_log: SecurityLog::default(),
            pause: Pause::default(),
            rates: Rates::default(),
            threads,
            errors: Mutex::default(),
            run_id: crate::random::hexadecimal(20),
            since_ms: since.as_millis() as u64,
            peak_memory: AtomicU64::new(0),
            config_file: file,
            is_loading: AtomicBool::new(true),
            expires_actively: AtomicBool::new(true),
            ending: AtomicU32::new(RUNNING),
            failure: Mutex::default(),
        }
    }

    /// Returns whether the server ends: tasks must return soon.
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire) == ENDING
    }

    /// Returns whether expired keys are deleted in the background (DEBUG SET-ACTIVE-EXPIRE).
    pub fn expires_actively(&self) -> bool {
        self.expires_actively.load(Ordering::Relaxed)
    }

    pub(crate) fn set_expires_actively(&self, expires: bool) {
        self.expires_actively.store(expires, Ordering::Relaxed);
    }

    /// Returns whether the file is being loaded.
    pub fn is_loading(&self) -> bool {
        self.is_loading.load(Ordering::Acquire)
    }

    pub(crate) fn loading(&self) {
        self.is_loading.store(true, Ordering::Release);
    }

    pub(crate) fn loaded(&self) {
        self.is_loading.store(false, Ordering::Release);
    }

    /// Asks the server to save if the configuration has points for saving, and to end.
    pub(crate) fn ask_to_end(&self) {
        let before =
            self.ending.compare_exchange(RUNNING, ASKED, Ordering::AcqRel, Ordering::Acquire);
        if before.is_ok() {
            self.threads[0].inbox.push(Job::Finish);
        }
    }

    /// Goes on after [`Server::ask_to_end`]: the save has failed.
    pub(crate) fn go_on(&self) {
        let _ = self.ending.compare_exchange(ASKED, RUNNING, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Ends all threads. Connections are closed without a further reply.
    pub(crate) fn end(&self) {
        self.ending.store(ENDING, Ordering::Release);
        self.threads.iter().for_each(|thread| thread.inbox.wake());
    }

    /// Ends the server because of an error.
    pub(crate) fn fail(&self, text: String) {
        self.failure.lock().get_or_insert(text);
        self.end();
    }

    /// The error that ended the server.
    pub(crate) fn failure(&self) -> Option<String> {
        self.failure.lock().clone()
    }

    /// The counters of all threads.
    pub(crate) fn stats(&self) -> impl Iterator<Item = &Stats> + Clone {
        self.threads.iter().map(|thread| &thread.stats)
    }

    /// The sum of a counter over all threads.
    pub(crate) fn sum(&self, counter: impl Fn(&Stats) -> &crate::stats::Counter) -> u64 {
        self.stats().map(|stats| counter(stats).get()).sum()
    }

    /// Publishes a keyspace event.
    pub fn notify(&self, class: u8, event: &str, db: u8, key: &[u8]) {
        let wanted = self.config.live.notify();
        if !notify::wants(wanted, class) {
            return;
        }
        let limit = self.config.live.output_limit("pubsub");
        if wanted & notify::KEYSPACE != 0 {
            let channel = [format!("__keyspace@{db}__:").as_bytes(), key].concat();
            self.channels.publish(&channel, event.as_bytes(), limit);
        }
        if wanted & notify::KEYEVENT != 0 {
            let channel = format!("__keyevent@{db}__:{event}");
            self.channels.publish(channel.as_bytes(), key, limit);
        }
    }

    /// The thread with the fewest connections.
    pub(crate) fn idlest(&self) -> usize {
        let connections = |index: &usize| self.threads[*index].connections.load(Ordering::Relaxed);
        (0..self.threads.len()).min_by_key(connections).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::OutputLimit;

    #[test]
    fn connections_with_the_most_memory_end_first() {
        let clients = Clients::default();
        let all: Vec<_> = (1..=4).map(Client::for_tests).collect();
        for (client, kib) in all.iter().zip([300, 100, 500, 200]) {
            client.note_buffers(0, kib << 10, 0);
            clients.add(client);
        }
        all[2].set(client_flag::NO_EVICT);
        let killed = || {
            let is_killed = |client: &Arc<Client>| client.has(client_flag::KILLED);
            all.iter().map(is_killed).collect::<Vec<_>>()
        };
        assert_eq!((clients.evict(0), clients.evict(2 << 20)), (0, 0));
        // The memory of a connection that ends does not count again.
        for _ in 0..2 {
            clients.evict(900 << 10);
            assert_eq!(killed(), [true, false, false, false]);
        }
        assert_eq!(clients.evict(700 << 10), 1);
        assert_eq!(killed(), [true, false, false, true]);
        assert_eq!(clients.evict(1), 1);
        assert_eq!(killed(), [true, true, false, true], "one is exempt");
    }

    #[test]
    fn soft_limit_of_the_output_is_one_of_time() {
        let client = Client::for_tests(1);
        let limit = OutputLimit { hard: 0, soft: 1000, soft_s: 2 };
        let is_over = |bytes, now_ms| {
            client.note_buffers(0, 0, bytes);
            client.is_over(limit, now_ms)
        };
        assert!(!is_over(1001, 10) && !is_over(1001, 2010) && is_over(1001, 2011));
        // The time begins again.
        assert!(!is_over(1000, 3000) && !is_over(1001, 3001) && !is_over(1001, 5001));
        assert!(is_over(1001, 5002));
        assert!(!client.is_over(OutputLimit::default(), 9999));
    }
}

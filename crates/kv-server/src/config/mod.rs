//! The configuration: parameters with the names of redis.conf.
//!
//! Values are text, as CONFIG GET shows them. What commands read often has a copy as a number in
//! [`Live`], which each change renews.

pub(crate) mod check;
pub(crate) mod table;

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use redis_formats::conf::Directive;

use self::table::{PARAMETERS, Use, find};
use crate::client::OutputLimit;
use crate::error::Error;
use crate::notify;

/// Limits of output buffers, as atomic words.
#[derive(Debug, Default)]
struct AtomicLimit {
    hard: AtomicU64,
    soft: AtomicU64,
    soft_s: AtomicU64,
}

impl AtomicLimit {
    fn set(&self, limit: OutputLimit) {
        self.hard.store(limit.hard, Ordering::Relaxed);
        self.soft.store(limit.soft, Ordering::Relaxed);
        self.soft_s.store(limit.soft_s, Ordering::Relaxed);
    }

    fn get(&self) -> OutputLimit {
        OutputLimit {
            hard: self.hard.load(Ordering::Relaxed),
            soft: self.soft.load(Ordering::Relaxed),
            soft_s: self.soft_s.load(Ordering::Relaxed),
        }
    }
}

/// Parameters as numbers.
#[derive(Debug, Default)]
pub struct Live {
    max_memory: AtomicU64,
    cache: AtomicU64,
    client_memory: AtomicU64,
    max_clients: AtomicUsize,
    timeout_s: AtomicU64,
    pool_timeout_s: AtomicU64,
    keepalive_s: AtomicU32,
    bulk_max: AtomicUsize,
    query_max: AtomicUsize,
    slow_us: AtomicI64,
    slow_entries: AtomicUsize,
    latency_ms: AtomicU64,
    tracks_latency: AtomicBool,
    notify: AtomicU32,
    is_protected: AtomicBool,
    acl_log_entries: AtomicUsize,
    normal: AtomicLimit,
    pubsub: AtomicLimit,
}

impl Live {
    /// `maxmemory` in bytes; 0 is no limit.
    pub fn max_memory(&self) -> u64 {
        self.max_memory.load(Ordering::Relaxed)
    }

    /// `cache` in bytes; 0: no value is cached.
    pub(crate) fn cache(&self) -> u64 {
        self.cache.load(Ordering::Relaxed)
    }

    /// `maxmemory-clients` in bytes; 0 is no limit.
    pub(crate) fn client_memory(&self) -> u64 {
        self.client_memory.load(Ordering::Relaxed)
    }

    pub(crate) fn max_clients(&self) -> usize {
        self.max_clients.load(Ordering::Relaxed)
    }

    /// `pool-timeout`.
    pub(crate) fn pool_timeout(&self) -> Duration {
        Duration::from_secs(self.pool_timeout_s.load(Ordering::Relaxed))
    }

    pub(crate) fn timeout_s(&self) -> u64 {
        self.timeout_s.load(Ordering::Relaxed)
    }

    pub(crate) fn keepalive_s(&self) -> u32 {
        self.keepalive_s.load(Ordering::Relaxed)
    }

    /// Maximum bytes of a string (`proto-max-bulk-len`).
    pub fn bulk_max(&self) -> usize {
        self.bulk_max.load(Ordering::Relaxed).min(kv::VALUE_MAX)
    }

    pub(crate) fn query_max(&self) -> usize {
        self.query_max.load(Ordering::Relaxed)
    }

    /// Commands that take this many microseconds enter the slow log; negative: none does.
    pub(crate) fn slow_us(&self) -> i64 {
        self.slow_us.load(Ordering::Relaxed)
    }

    pub(crate) fn slow_entries(&self) -> usize {
        self.slow_entries.load(Ordering::Relaxed)
    }

    pub(crate) fn latency_ms(&self) -> u64 {
        self.latency_ms.load(Ordering::Relaxed)
    }

    pub(crate) fn tracks_latency(&self) -> bool {
        self.tracks_latency.load(Ordering::Relaxed)
    }

    /// Classes of keyspace events, as bits of [`notify`].
    pub(crate) fn notify(&self) -> u32 {
        self.notify.load(Ordering::Relaxed)
    }

    pub(crate) fn is_protected(&self) -> bool {
        self.is_protected.load(Ordering::Relaxed)
    }

    pub(crate) fn acl_log_entries(&self) -> usize {
        self.acl_log_entries.load(Ordering::Relaxed)
    }

    pub(crate) fn output_limit(&self, class: &str) -> OutputLimit {
        if class == "pubsub" { self.pubsub.get() } else { self.normal.get() }
    }

    fn renew(&self, config: &Config) {
        let number = |name| config.number(name);
        let size = |name| usize::try_from(config.number(name)).unwrap_or(usize::MAX);
        self.max_memory.store(number("maxmemory"), Ordering::Relaxed);
        self.cache.store(number("cache"), Ordering::Relaxed);
        let clients = config.get("maxmemory-clients");
        let bytes = match clients.strip_suffix('%').map(str::parse::<u64>) {
            Some(percent) => number("maxmemory") / 100 * percent.unwrap_or(0),
            None => number("maxmemory-clients"),
        };
        self.client_memory.store(bytes, Ordering::Relaxed);
        self.max_clients.store(size("maxclients"), Ordering::Relaxed);
        self.timeout_s.store(number("timeout"), Ordering::Relaxed);
        self.pool_timeout_s.store(number("pool-timeout"), Ordering::Relaxed);
        self.keepalive_s.store(size("tcp-keepalive") as u32, Ordering::Relaxed);
        self.bulk_max.store(size("proto-max-bulk-len"), Ordering::Relaxed);
        self.query_max.store(size("client-query-buffer-limit"), Ordering::Relaxed);
        let slow = config.get("slowlog-log-slower-than").parse().unwrap_or(-1);
        self.slow_us.store(slow, Ordering::Relaxed);
        self.slow_entries.store(size("slowlog-max-len"), Ordering::Relaxed);
        self.latency_ms.store(number("latency-monitor-threshold"), Ordering::Relaxed);
        self.tracks_latency.store(config.is("latency-tracking", "yes"), Ordering::Relaxed);
        let events = notify::parse(config.get("notify-keyspace-events").as_bytes());
        self.notify.store(events.unwrap_or(0), Ordering::Relaxed);
        self.is_protected.store(config.is("protected-mode", "yes"), Ordering::Relaxed);
        self.acl_log_entries.store(size("acllog-max-len"), Ordering::Relaxed);
        let limits = config.get("client-output-buffer-limit");
        self.normal.set(check::output_limit(&limits, "normal"));
        self.pubsub.set(check::output_limit(&limits, "pubsub"));
    }
}

/// A parameter that CONFIG SET refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Unknown(Vec<u8>),
    Value { name: Vec<u8>, why: String },
}

/// The values of all parameters.
#[derive(Debug)]
pub struct Config {
    values: RwLock<Vec<String>>,
    /// Parameters as numbers.
    pub live: Live,
}

impl Default for Config {
    fn default() -> Self {
        let values = PARAMETERS.iter().map(|row| row.default.to_owned()).collect();
        let config = Self { values: RwLock::new(values), live: Live::default() };
        if let Ok(dir) = std::env::current_dir()
            && let Some(at) = find(b"dir")
        {
            config.values.write()[at] = dir.to_string_lossy().into_owned();
        }
        config.live.renew(&config);
        config
    }
}

impl Config {
    /// The value of `name`. Empty if there is no such parameter.
    pub fn get(&self, name: &str) -> String {
        find(name.as_bytes()).map_or(String::new(), |at| self.values.read()[at].clone())
    }

    /// The value of `name` as a number, or 0.
    pub fn number(&self, name: &str) -> u64 {
        self.get(name).parse().unwrap_or(0)
    }

    /// Returns whether the value of `name` is `value`.
    pub fn is(&self, name: &str, value: &str) -> bool {
        find(name.as_bytes()).is_some_and(|at| self.values.read()[at] == value)
    }

    /// Sets a parameter at the start: from the command line, or from a file.
    ///
    /// A name that is not known is no error: the function returns false.
    ///
    /// # Errors
    ///
    /// The value is impossible.
    pub fn set_at_start(&self, name: &str, words: &[&[u8]]) -> Result<bool, Error> {
        let Some(at) = find(name.as_bytes()) else { return Ok(false) };
        let old = self.values.read()[at].clone();
        let mut value = check::check(&PARAMETERS[at], words, &old)
            .map_err(|why| Error::Parameter { name: name.to_owned(), why })?;
        // A file has one line for each point; an empty one removes the points before.
        if PARAMETERS[at].name == "save" && !value.is_empty() && !old.is_empty() {
            value = format!("{old} {value}");
        }
        self.values.write()[at] = value;
        self.live.renew(self);
        Ok(true)
    }

    /// Sets the parameters of a file. Returns what the server does not use.
    ///
    /// # Errors
    ///
    /// The first line with an impossible value.
    pub fn load(&self, directives: &[Directive]) -> Result<Ignored, Error> {
        let mut ignored = Ignored::default();
        for directive in directives {
            let words: Vec<&[u8]> = directive.arguments.iter().map(Vec::as_slice).collect();
            let at = format!("{}:{} {}", directive.file, directive.line, directive.name);
            if directive.name == "user" {
                ignored.users.push(directive.arguments.clone());
                continue;
            }
            match self.set_at_start(&directive.name, &words) {
                Ok(true) if Self::is_unused(&directive.name) => ignored.unused.push(at),
                Ok(true) => {}
                Ok(false) => ignored.unknown.push(at),
                Err(Error::Parameter { why, .. }) => {
                    return Err(Error::Parameter { name: at, why });
                }
                Err(error) => return Err(error),
            }
        }
        Ok(ignored)
    }

    fn is_unused(name: &str) -> bool {
        find(name.as_bytes()).is_some_and(|at| PARAMETERS[at].used == Use::Unused)
    }

    /// Sets several parameters, all or none. Returns their names.
    pub(crate) fn set(&self, pairs: &[(&[u8], &[u8])]) -> Result<Vec<&'static str>, Refused> {
        let refuse =
            |name: &[u8], why: &str| Refused::Value { name: name.to_vec(), why: why.to_owned() };
        let mut new: Vec<(usize, String)> = Vec::new();
        for &(name, value) in pairs {
            let at = find(name).ok_or_else(|| Refused::Unknown(name.to_vec()))?;
            if new.iter().any(|(other, _)| *other == at) {
                return Err(refuse(name, "duplicate parameter"));
            }
            match PARAMETERS[at].used {
                Use::Start => return Err(refuse(name, "can't set immutable config")),
                Use::Protected if !self.is("enable-protected-configs", "yes") => {
                    return Err(refuse(name, "can't set protected config"));
                }
                _ => {}
            }
            let old = self.values.read()[at].clone();
            let value = check::check(&PARAMETERS[at], &[value], &old);
            let value = value.map_err(|why| refuse(name, &why))?;
            if PARAMETERS[at].name == "maxclients"
                && let Some(most) = crate::process::connections_max()
                && value.parse().is_ok_and(|wanted: u64| wanted > most)
            {
                let why = format!(
                    "The operating system is not able to handle the specified number of clients, \
                     try with {most}"
                );
                return Err(refuse(name, &why));
            }
            if PARAMETERS[at].used == Use::Kept && value != old {
                return Err(refuse(name, "can't set immutable config"));
            }
            new.push((at, value));
        }
        let names = new.iter().map(|(at, _)| PARAMETERS[*at].name).collect();
        let mut values = self.values.write();
        new.into_iter().for_each(|(at, value)| values[at] = value);
        drop(values);
        self.live.renew(self);
        Ok(names)
    }

    /// The parameters whose name `is_wanted` selects, with their values.
    pub(crate) fn select(&self, is_wanted: impl Fn(&[u8]) -> bool) -> Vec<(&'static str, String)> {
        let values = self.values.read();
        let mut found = Vec::new();
        for (row, value) in PARAMETERS.iter().zip(values.iter()) {
            let names = [Some(row.name), row.alias].into_iter().flatten();
            let names = names.filter(|name| is_wanted(name.as_bytes()));
            found.extend(names.map(|name| (name, value.clone())));
        }
        found
    }
}

/// Lines of a file that have no effect here.
#[derive(Clone, Debug, Default)]
pub struct Ignored {
    /// The server does not know these names.
    pub unknown: Vec<String>,
    /// The server knows these names, and has not what they are about.
    pub unused: Vec<String>,
    /// The arguments of the lines `user`, for the list of users.
    pub users: Vec<Vec<Vec<u8>>>,
}

#[cfg(test)]
mod tests;

//! Connections that see each command of the server (MONITOR).

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use redis_formats::command::Arguments;
use redis_formats::words;

use crate::client::{Client, OutputLimit, flag};

/// The connections with MONITOR.
#[derive(Debug, Default)]
pub(crate) struct Monitors {
    count: AtomicUsize,
    clients: Mutex<Vec<Arc<Client>>>,
}

impl Monitors {
    pub fn add(&self, client: &Arc<Client>) {
        if client.has(flag::MONITOR) {
            return;
        }
        client.set(flag::MONITOR);
        self.clients.lock().push(client.clone());
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    pub fn remove(&self, client: &Client) {
        if client.has(flag::MONITOR) {
            client.clear(flag::MONITOR);
            self.clients.lock().retain(|other| other.id != client.id);
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns whether any connection has MONITOR.
    pub fn is_any(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Shows a command. `redacted` tells arguments that are secrets.
    pub fn show<A: Arguments + ?Sized>(
        &self,
        client: &Client,
        db: u8,
        arguments: &A,
        redacted: impl Fn(usize) -> bool,
        limit: OutputLimit,
    ) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut line = Vec::new();
        // Writing to a vector does not fail.
        let _ = write!(line, "+{}.{:06} [{db} ", since.as_secs(), since.subsec_micros());
        let address = if client.has(flag::UNIX) { &client.local } else { &client.address };
        if client.has(flag::UNIX) {
            line.extend(b"unix:");
        }
        line.extend(address.bytes());
        line.push(b']');
        for index in 0..arguments.len() {
            line.push(b' ');
            match redacted(index) {
                true => line.extend(b"\"(redacted)\""),
                false => words::quote(arguments.at(index), &mut line),
            }
        }
        line.extend(b"\r\n");
        for monitor in self.clients.lock().iter() {
            monitor.send(limit, |mail| mail.extend_from_slice(&line));
        }
    }
}

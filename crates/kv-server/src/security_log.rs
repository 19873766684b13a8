//! Log of refused logins and commands (ACL LOG).

use std::collections::VecDeque;

use parking_lot::Mutex;

/// Entries closer than this are one entry with a count.
const SAME_MS: u64 = 60_000;

/// A refusal.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub count: u64,
    pub reason: &'static str,
    pub context: &'static str,
    pub object: Vec<u8>,
    pub user: Vec<u8>,
    pub client: Vec<u8>,
    pub created_ms: u64,
    pub updated_ms: u64,
}

/// The log; the newest entry is first.
#[derive(Debug, Default)]
pub(crate) struct SecurityLog {
    entries: Mutex<VecDeque<Entry>>,
}

impl SecurityLog {
    /// Adds an entry, whose count and times are set here.
    pub fn add(&self, entry: Entry, limit: usize, now_ms: u64) {
        let mut entries = self.entries.lock();
        let is_same = |own: &&mut Entry| {
            own.reason == entry.reason
                && own.context == entry.context
                && own.object == entry.object
                && own.user == entry.user
                && now_ms.saturating_sub(own.updated_ms) < SAME_MS
        };
        if let Some(own) = entries.iter_mut().find(is_same) {
            own.count += 1;
            own.updated_ms = now_ms;
            own.client = entry.client;
            return;
        }
        entries.push_front(Entry { count: 1, created_ms: now_ms, updated_ms: now_ms, ..entry });
        entries.truncate(limit);
    }

    pub fn newest(&self, count: usize) -> Vec<Entry> {
        self.entries.lock().iter().take(count).cloned().collect()
    }

    pub fn clear(&self) {
        self.entries.lock().clear();
    }
}

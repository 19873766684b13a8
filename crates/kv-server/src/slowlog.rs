//! Log of commands that took long.

use std::collections::VecDeque;

use parking_lot::Mutex;
use redis_formats::command::Arguments;

/// Maximum number of arguments in an entry.
const ARGUMENTS_MAX: usize = 32;
/// Maximum bytes of an argument in an entry.
const BYTES_MAX: usize = 128;

/// A command that took long.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub id: u64,
    pub at_s: u64,
    pub us: u64,
    pub arguments: Vec<Vec<u8>>,
    pub address: Box<str>,
    pub name: Box<[u8]>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    entries: VecDeque<Entry>,
}

/// The log; the newest entry is first.
#[derive(Debug, Default)]
pub(crate) struct SlowLog {
    state: Mutex<State>,
}

impl SlowLog {
    /// Adds an entry, whose `id` is ignored, and keeps at most `limit` entries.
    pub fn add(&self, entry: Entry, limit: usize) {
        let mut state = self.state.lock();
        let id = state.next;
        state.next += 1;
        state.entries.push_front(Entry { id, ..entry });
        state.entries.truncate(limit);
    }

    /// The newest `count` entries.
    pub fn newest(&self, count: usize) -> Vec<Entry> {
        self.state.lock().entries.iter().take(count).cloned().collect()
    }

    pub fn len(&self) -> usize {
        self.state.lock().entries.len()
    }

    pub fn clear(&self) {
        self.state.lock().entries.clear();
    }

    pub fn truncate(&self, limit: usize) {
        self.state.lock().entries.truncate(limit);
    }
}

/// Copies arguments, but shortens long ones and long lists. `redacted` tells secrets.
pub(crate) fn shorten<A: Arguments + ?Sized>(
    arguments: &A,
    redacted: impl Fn(usize) -> bool,
) -> Vec<Vec<u8>> {
    let count = arguments.len();
    let shown = if count > ARGUMENTS_MAX { ARGUMENTS_MAX - 1 } else { count };
    let mut all: Vec<Vec<u8>> = (0..shown)
        .map(|index| match arguments.at(index) {
            _ if redacted(index) => b"(redacted)".to_vec(),
            long if long.len() > BYTES_MAX => {
                let mut text = long[..BYTES_MAX].to_vec();
                text.extend(format!("... ({} more bytes)", long.len() - BYTES_MAX).bytes());
                text
            }
            short => short.to_vec(),
        })
        .collect();
    if shown < count {
        all.push(format!("... ({} more arguments)", count - shown).into_bytes());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_arguments_are_shortened_and_secrets_hidden() {
        let words: Vec<String> = (0..40).map(|n| n.to_string()).collect();
        let short = shorten(&words[..], |index| index == 1);
        assert_eq!(short.len(), 32);
        assert_eq!(short[1], b"(redacted)");
        assert_eq!(short[31], b"... (9 more arguments)");
        let long = shorten(&["set".to_owned(), "x".repeat(200)][..], |_| false);
        assert!(long[1].ends_with(b"x... (72 more bytes)"));
    }

    #[test]
    fn log_keeps_the_newest_entries() {
        let log = SlowLog::default();
        for us in 0..10 {
            let entry = Entry {
                id: 0,
                at_s: 0,
                us,
                arguments: Vec::new(),
                address: "".into(),
                name: Box::default(),
            };
            log.add(entry, 3);
        }
        let ids: Vec<u64> = log.newest(9).iter().map(|entry| entry.id).collect();
        assert_eq!((ids, log.len()), (vec![9, 8, 7], 3));
        log.clear();
        assert_eq!(log.len(), 0);
    }
}

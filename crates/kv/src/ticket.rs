//! Tickets: the order of operations on each key.
//!
//! Each key has a queue of shared and exclusive tickets. A ticket is valid when all tickets before
//! it are returned, or when the ticket and all before it are shared. A call that needs several keys
//! takes all its tickets at once, with the shards locked in order, so two calls cannot wait for
//! each other. A key without tickets has no queue.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

const SHARDS: usize = 256;

/// Set in the numbers of tickets of several keys.
const SEVERAL: u64 = 1 << 63;

/// Whether other tickets of the same key may be valid at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Hold {
    Shared,
    Exclusive,
}

/// A key as tickets know it: the tag of its hash, mixed with the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Name(u64);

impl Name {
    pub fn new(db: u8, tag: u64) -> Self {
        // Odd multiple: distinct for each database, and no bits of the tag are lost.
        Self(tag ^ u64::from(db).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn shard(self) -> usize {
        self.0 as usize % SHARDS
    }
}

struct Entry {
    name: Name,
    id: u64,
    hold: Hold,
    waker: Option<Waker>,
}

/// The tickets of the keys of a shard, in the order in which they were taken: the queues of all its
/// keys, one in the other. A shard has few tickets, unless many wait for one key.
#[derive(Default)]
struct Shard {
    entries: Vec<Entry>,
    /// Number of the next ticket of one key.
    next: u64,
}

impl Shard {
    /// Appends a ticket. Returns whether it is valid at once.
    fn append(&mut self, name: Name, id: u64, hold: Hold) -> bool {
        let mut before = self.entries.iter().filter(|entry| entry.name == name);
        let is_valid = before.all(|entry| entry.hold == Hold::Shared && hold == Hold::Shared);
        self.entries.push(Entry { name, id, hold, waker: None });
        is_valid
    }

    /// True if the ticket at `at` is valid.
    fn is_valid(&self, at: usize) -> bool {
        let Entry { name, hold, .. } = self.entries[at];
        let mut before = self.entries[..at].iter().filter(|entry| entry.name == name);
        before.all(|entry| entry.hold == Hold::Shared && hold == Hold::Shared)
    }

    fn position(&self, name: Name, id: u64) -> Option<usize> {
        self.entries.iter().position(|entry| entry.id == id && entry.name == name)
    }

    /// Takes the wakers of the tickets of `name` that are valid.
    fn wakers(&mut self, name: Name) -> SmallVec<[Waker; 4]> {
        let mut queue = self.entries.iter_mut().filter(|entry| entry.name == name);
        let mut woken = SmallVec::new();
        let Some(first) = queue.next() else { return woken };
        woken.extend(first.waker.take());
        if first.hold == Hold::Shared {
            let shared = queue.take_while(|entry| entry.hold == Hold::Shared);
            woken.extend(shared.filter_map(|entry| entry.waker.take()));
        }
        woken
    }
}

/// The queues of all keys.
pub(crate) struct Tickets {
    shards: Box<[Mutex<Shard>]>,
    /// Number of the next ticket of several keys.
    next: AtomicU64,
}

impl Tickets {
    pub fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::new(Shard::default())).collect();
        Self { shards, next: AtomicU64::new(SEVERAL) }
    }

    /// Takes the ticket of one key.
    pub fn one(&self, name: Name, hold: Hold) -> Ticket<'_> {
        let mut shard = self.shards[name.shard()].lock();
        let id = shard.next;
        shard.next += 1;
        let is_valid = shard.append(name, id, hold);
        drop(shard);
        let mut names = SmallVec::new();
        names.push(name);
        Ticket { tickets: self, id, names, is_valid }
    }

    /// Takes tickets of all `names` at once.
    pub fn all(&self, names: impl IntoIterator<Item = Name>, hold: Hold) -> Ticket<'_> {
        let mut names: SmallVec<[Name; 1]> = names.into_iter().collect();
        names.sort_unstable_by_key(|name| (name.shard(), *name));
        names.dedup();
        let mut locked: Vec<(usize, MutexGuard<'_, Shard>)> = Vec::new();
        for name in &names {
            if locked.last().is_none_or(|(shard, _)| *shard != name.shard()) {
                locked.push((name.shard(), self.shards[name.shard()].lock()));
            }
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (mut at, mut is_valid) = (0, true);
        for name in &names {
            while locked[at].0 != name.shard() {
                at += 1;
            }
            is_valid &= locked[at].1.append(*name, id, hold);
        }
        drop(locked);
        Ticket { tickets: self, id, names, is_valid }
    }

    fn is_valid(&self, name: Name, id: u64, cx: &Context<'_>) -> bool {
        let mut shard = self.shards[name.shard()].lock();
        let Some(at) = shard.position(name, id) else { return true };
        if shard.is_valid(at) {
            return true;
        }
        shard.entries[at].waker = Some(cx.waker().clone());
        false
    }

    fn give_back(&self, name: Name, id: u64) {
        let mut shard = self.shards[name.shard()].lock();
        let Some(at) = shard.position(name, id) else { return };
        shard.entries.remove(at);
        if shard.entries.is_empty() {
            return;
        }
        let woken = shard.wakers(name);
        drop(shard);
        woken.into_iter().for_each(Waker::wake);
    }

    /// Number of tickets.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().entries.len()).sum()
    }
}

/// Tickets of one call; returned when the value is dropped.
pub(crate) struct Ticket<'a> {
    tickets: &'a Tickets,
    id: u64,
    names: SmallVec<[Name; 1]>,
    /// True if all tickets were valid when they were taken.
    is_valid: bool,
}

impl Ticket<'_> {
    /// Waits until all tickets are valid.
    pub async fn valid(&self) {
        if self.is_valid {
            return;
        }
        let mut at = 0;
        poll_fn(|cx| {
            while at < self.names.len() {
                if !self.tickets.is_valid(self.names[at], self.id, cx) {
                    return Poll::Pending;
                }
                at += 1;
            }
            Poll::Ready(())
        })
        .await;
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        for name in &self.names {
            self.tickets.give_back(*name, self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;

    fn is_ready(ticket: &Ticket<'_>) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        pin!(ticket.valid()).poll(&mut cx).is_ready()
    }

    #[test]
    fn tickets_of_a_key_are_valid_in_order() {
        let tickets = Tickets::new();
        let name = Name::new(0, 7);
        let first = tickets.one(name, Hold::Shared);
        let second = tickets.one(name, Hold::Shared);
        let third = tickets.one(name, Hold::Exclusive);
        let fourth = tickets.one(name, Hold::Shared);
        assert!(is_ready(&first) && is_ready(&second));
        assert!(!is_ready(&third) && !is_ready(&fourth));
        drop(first);
        assert!(!is_ready(&third));
        drop(second);
        assert!(is_ready(&third) && !is_ready(&fourth));
        drop(third);
        assert!(is_ready(&fourth));
        drop(fourth);
        assert_eq!(tickets.count(), 0);
    }

    #[test]
    fn tickets_of_several_keys_do_not_wait_for_each_other() {
        let tickets = Tickets::new();
        let names = |range: std::ops::Range<u64>| range.map(|tag| Name::new(1, tag * 97));
        let first = tickets.all(names(0..9), Hold::Exclusive);
        let second = tickets.all(names(5..20).rev(), Hold::Exclusive);
        let third = tickets.all(names(15..20), Hold::Exclusive);
        assert!(is_ready(&first) && !is_ready(&second) && !is_ready(&third));
        drop(first);
        assert!(is_ready(&second) && !is_ready(&third));
        drop(second);
        assert!(is_ready(&third));
        assert!(is_ready(&tickets.one(Name::new(0, 15 * 97), Hold::Exclusive)));
    }

    #[test]
    fn dropped_ticket_leaves_the_queue() {
        let tickets = Tickets::new();
        let name = Name::new(0, 7);
        let first = tickets.one(name, Hold::Exclusive);
        let second = tickets.one(name, Hold::Exclusive);
        let third = tickets.one(name, Hold::Exclusive);
        drop(second);
        drop(first);
        assert!(is_ready(&third));
    }
}

//! Tickets: the order of operations on each key.
//!
//! Each key has a queue of shared and exclusive tickets. A ticket is valid when all tickets before
//! it are returned, or when the ticket and all before it are shared. A call that needs several keys
//! takes all its tickets at once, with the shards locked in order, so two calls cannot wait for
//! each other. A key without tickets has no queue.

use std::collections::HashMap;
use std::future::poll_fn;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

const SHARDS: usize = 256;

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
    id: u64,
    hold: Hold,
    waker: Option<Waker>,
}

/// Two tickets fit without memory from the allocator.
type Queue = SmallVec<[Entry; 2]>;
type Shard = HashMap<u64, Queue, BuildHasherDefault<Identity>>;

/// The names are parts of a keyed hash already.
#[derive(Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0.rotate_left(29)
    }

    fn write(&mut self, _bytes: &[u8]) {}

    fn write_u64(&mut self, name: u64) {
        self.0 = name;
    }
}

/// The queues of all keys.
pub(crate) struct Tickets {
    shards: Box<[Mutex<Shard>]>,
    next: AtomicU64,
}

impl Tickets {
    pub fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::new(Shard::default())).collect();
        Self { shards, next: AtomicU64::new(0) }
    }

    /// Takes the ticket of one key.
    pub fn one(&self, name: Name, hold: Hold) -> Ticket<'_> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let is_valid = append(&mut self.shards[name.shard()].lock(), name, id, hold);
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
            is_valid &= append(&mut locked[at].1, *name, id, hold);
        }
        drop(locked);
        Ticket { tickets: self, id, names, is_valid }
    }

    fn is_valid(&self, name: Name, id: u64, cx: &Context<'_>) -> bool {
        let mut shard = self.shards[name.shard()].lock();
        let Some(queue) = shard.get_mut(&name.0) else { return true };
        let Some(at) = queue.iter().position(|entry| entry.id == id) else { return true };
        if valid(queue, at) {
            return true;
        }
        queue[at].waker = Some(cx.waker().clone());
        false
    }

    fn give_back(&self, name: Name, id: u64) {
        let mut woken = SmallVec::<[Waker; 4]>::new();
        let mut shard = self.shards[name.shard()].lock();
        if let Some(queue) = shard.get_mut(&name.0) {
            queue.retain(|entry| entry.id != id);
            if queue.is_empty() {
                shard.remove(&name.0);
            } else {
                woken.extend(
                    (0..queue.len())
                        .map_while(|at| valid(queue, at).then(|| queue[at].waker.take()))
                        .flatten(),
                );
            }
        }
        drop(shard);
        woken.into_iter().for_each(Waker::wake);
    }

    /// Number of keys with a queue.
    #[cfg(test)]
    pub fn queues(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }
}

/// Appends a ticket to the queue of `name`. Returns whether the ticket is valid at once.
fn append(shard: &mut Shard, name: Name, id: u64, hold: Hold) -> bool {
    let queue = shard.entry(name.0).or_default();
    queue.push(Entry { id, hold, waker: None });
    valid(queue, queue.len() - 1)
}

fn valid(queue: &Queue, at: usize) -> bool {
    at == 0 || queue[..=at].iter().all(|entry| entry.hold == Hold::Shared)
}

/// Tickets of one call; returned when the value is dropped.
pub(crate) struct Ticket<'a> {
    tickets: &'a Tickets,
    id: u64,
    names: SmallVec<[Name; 1]>,
    /// True if all tickets were valid when they were taken. A valid ticket stays valid.
    is_valid: bool,
}

impl Ticket<'_> {
    /// True if all tickets were valid when they were taken.
    pub fn was_valid(&self) -> bool {
        self.is_valid
    }

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
        assert_eq!(tickets.queues(), 0);
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

//! Explores every order of what three compute nodes, the NIC and the time do, up to a depth.
//!
//! A state is the world without what changes nothing: times count from now on, a permission is its
//! slot, an object its entry, and compute nodes have no names. Equal states have equal
//! continuations, so each is explored once. After some of the states all compute nodes die: nothing
//! may be left.

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use scheme::{ClientId, Others, Sharing};

use super::world::{Entry, Stage, Thing, World, exclusive, settings, shared};
use crate::patronus::book::BookSettings;
use crate::patronus::message::{Ask, AskTerms, ObjectId, PermissionNumber};

/// Longest lease, and longest wait.
const LEASE_MAX: u64 = 3;

/// A step of an order.
#[derive(Clone, Copy, Debug)]
enum Step {
    Ask(ClientId, Ask),
    /// The holder of an entry extends its lease by a CAS to the longest.
    Extend(usize),
    Opened(usize, bool),
    Closed(usize),
    Cleared(usize),
    Deliver(usize),
    Lose(usize),
    Depart(ClientId),
    /// A microsecond passes. The manager may look at deadlines late.
    Pass,
    Tick,
}

fn world() -> World {
    let settings = BookSettings {
        lease_min_us: 1,
        lease_max_us: LEASE_MAX,
        permissions_max: 3,
        waiting_max: 1,
        ..settings(4)
    };
    let mut world = World::new(settings);
    (1..=3).for_each(|client| {
        world.join(client, Some(1));
    });
    world
}

/// An allocation whose object every compute node may acquire and free.
fn allocation() -> Ask {
    Ask::Allocate { terms: exclusive(2, 0), bytes: 64, others: Others::Own }
}

impl World {
    /// Every step that is possible, except those that change nothing.
    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for (client, _) in self.nodes.iter().filter(|(_, node)| node.is_alive) {
            self.asks(*client, &mut steps);
            steps.push(Step::Depart(*client));
        }
        for (at, entry) in self.entries.iter().enumerate() {
            match entry.stage {
                Stage::Opening => {
                    steps.extend([Step::Opened(at, true), Step::Opened(at, false)]);
                }
                Stage::Closing => steps.push(Step::Closed(at)),
                Stage::Open if self.can_extend(at) => steps.push(Step::Extend(at)),
                _ => {}
            }
        }
        steps.extend((0..self.clears.len()).map(Step::Cleared));
        for at in 0..self.in_flight.len() {
            steps.extend([Step::Deliver(at), Step::Lose(at)]);
        }
        let next = self.book.next_deadline().map(|at| at.as_micros() as u64);
        if let Some(next) = next {
            // Later than two longest leases after the deadline is as late as that.
            if self.now < next + 2 * LEASE_MAX {
                steps.push(Step::Pass);
            }
            if next <= self.now {
                steps.push(Step::Tick);
            }
        }
        steps
    }

    fn can_extend(&self, at: usize) -> bool {
        let entry = &self.entries[at];
        let is_alive = self.nodes[&entry.client].is_alive;
        is_alive && entry.word.is_some_and(|word| word.micros() < LEASE_MAX)
    }

    /// Requests of a compute node, one at a time.
    fn asks(&self, client: ClientId, steps: &mut Vec<Step>) {
        let own = || self.entries.iter().filter(|entry| entry.client == client);
        let is_busy = own().any(|entry| entry.number.is_some())
            || self.asked.iter().any(|asked| asked.client == client);
        if is_busy {
            return;
        }
        let mut ask = |ask| steps.push(Step::Ask(client, ask));
        if self.things.len() < 2 {
            ask(allocation());
        }
        if own().count() < 2 {
            for thing in self.things.iter().filter(|thing| !thing.is_freeing) {
                let acquire = |terms, offset, len| {
                    let object = thing.id;
                    Ask::Acquire { terms, object, offset, len }
                };
                ask(acquire(exclusive(1, 2), 0, 64));
                ask(acquire(shared(2, LEASE_MAX), 0, 64));
                ask(acquire(exclusive(1, 0), 32, 32));
            }
        }
        for thing in self.things.iter().filter(|thing| !thing.is_freeing) {
            ask(Ask::Free { object: thing.id });
        }
        for entry in own().filter(|entry| entry.word.is_some()) {
            let permission = entry.id.expect("a granted permission").number;
            ask(Ask::Revoke { permission });
            if entry.stage == Stage::Open {
                ask(Ask::Renew { permission, lease_us: 2 });
            }
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Ask(client, ask) => drop(self.request(client, ask)),
            Step::Extend(at) => drop(self.cas(at, LEASE_MAX)),
            Step::Opened(at, is_open) => self.opened(at, is_open),
            Step::Closed(at) => self.closed(at),
            Step::Cleared(at) => self.cleared(at),
            Step::Deliver(at) => self.deliver(at),
            Step::Lose(at) => self.lose(at),
            Step::Depart(client) => self.depart(client),
            Step::Pass => self.now += 1,
            Step::Tick => self.tick(),
        }
    }

    /// The state: equal states have equal continuations. States that differ only in the names of
    /// compute nodes are equal.
    fn fingerprint(&self) -> u64 {
        const ORDERS: [[u32; 3]; 6] =
            [[1, 2, 3], [1, 3, 2], [2, 1, 3], [2, 3, 1], [3, 1, 2], [3, 2, 1]];
        ORDERS.iter().map(|order| self.fingerprint_with(order)).min().expect("six orders")
    }

    /// The state, with other names for the compute nodes. Permissions and requests count in the
    /// order of their arrival only if they wait.
    fn fingerprint_with(&self, names: &[u32; 3]) -> u64 {
        let name = |client: ClientId| names[client.0 as usize - 1];
        let mut nodes = [None; 3];
        for (client, node) in &self.nodes {
            let member = self.book.members.get(client);
            let free = member.map(|member| member.slots.free_slots());
            nodes[name(*client) as usize - 1] = Some((node.is_alive, free));
        }
        let things = self.things.iter().map(|thing| {
            let Thing { owner, others, is_freeing, was_open, .. } = thing;
            let is_clearing = self.clears.contains(&thing.id);
            let mine = |entry: &&Entry| entry.object == Some(thing.id);
            let waiting = self.entries.iter().filter(mine).filter(|entry| !entry.is_holder());
            let queue: Vec<_> =
                waiting.map(|entry| hash(&(name(entry.client), self.entry_state(entry)))).collect();
            let owner = owner.map(name);
            hash(&(thing.id.entry, owner, *others as u8, is_freeing, was_open, is_clearing, queue))
        });
        let holders = self.entries.iter().filter(|entry| entry.is_holder());
        let holders =
            holders.map(|entry| hash(&(name(entry.client), self.entry_state(entry), "holder")));
        let asked = self.asked.iter().map(|asked| {
            let what = match asked.ask {
                Ask::Revoke { permission } => (Some(self.age(asked.client, permission)), None),
                Ask::Free { object } => (None, Some(self.entry_of(object))),
                _ => unreachable!("such requests are not made, or answered at once"),
            };
            hash(&(name(asked.client), asked.number, what))
        });
        let in_flight = self.in_flight.iter().map(|(id, word, object)| {
            let object = object.map(|object| self.entry_of(object));
            hash(&(name(id.client), self.age(id.client, id.number), word.micros(), object))
        });
        let parts = things.chain(holders).chain(asked).chain(in_flight);
        hash(&(nodes, parts.fold(0, u64::wrapping_add)))
    }

    fn entry_state(&self, entry: &Entry) -> u64 {
        let AskTerms { right, sharing, lease_us, .. } = entry.terms;
        let request = (entry.number, entry.stage, entry.offset, entry.len, lease_us);
        let kind = (right as u8, sharing == Sharing::Shared, entry.allocates);
        let object = entry.object.map(|object| self.entry_of(object));
        let time = match entry.stage {
            Stage::Waiting => (entry.until.saturating_sub(self.now), 0),
            Stage::Open => ((self.now - entry.start).min(LEASE_MAX + 1), entry.life_us),
            _ => (0, 0),
        };
        let book = entry.id.map(|id| {
            let view = self.book.permission(id).expect("a permission of the book");
            let deadline = view.deadline.map(|at| at.as_micros() as u64);
            let word = self.words.word(id.client, id.number.slot());
            let is_own = word.nonce() == id.number.nonce();
            (
                deadline.map(|at| at.saturating_sub(self.now)),
                view.is_noticed,
                is_own.then(|| word.micros()),
                id.number.slot(),
            )
        });
        let ends = (entry.is_renewing, entry.is_doomed, entry.word.map(|word| word.micros()));
        hash(&(request, kind, object, time, book, ends))
    }

    /// A permission of a compute node: its slot, and whether it has not ended.
    fn age(&self, client: ClientId, number: PermissionNumber) -> (u32, bool) {
        let is_present = self
            .entries
            .iter()
            .any(|entry| entry.id.is_some_and(|id| (id.client, id.number) == (client, number)));
        (number.slot(), is_present)
    }

    /// An object: its entry, if it has not been released.
    fn entry_of(&self, object: ObjectId) -> Option<u32> {
        self.things.iter().any(|thing| thing.id == object).then_some(object.entry)
    }
}

fn hash(state: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    hasher.finish()
}

/// Explores the states within `depth` steps. Returns their number.
fn explore(start: World, depth: usize) -> usize {
    let mut seen = HashSet::from([start.fingerprint()]);
    let mut level = vec![start];
    for left in (0..depth).rev() {
        let mut next = Vec::new();
        for world in level {
            for step in world.steps() {
                let mut after = world.clone();
                after.step(step);
                let state = after.fingerprint();
                if !seen.insert(state) {
                    continue;
                }
                if state.is_multiple_of(16) {
                    after.clone().drain();
                }
                if left > 0 {
                    next.push(after);
                }
            }
        }
        level = next;
    }
    seen.len()
}

fn depth(usual: usize, full: usize) -> usize {
    let is_full = std::env::var_os("GRANARY_TEST_FULL").is_some_and(|value| value == "1");
    if is_full { full } else { usual }
}

/// One compute node holds an object, and another one waits for it.
fn contended() -> World {
    let mut world = world();
    world.request(ClientId(1), allocation());
    world.opened(0, true);
    world.deliver(0);
    let ask =
        Ask::Acquire { terms: exclusive(1, 2), object: world.things[0].id, offset: 0, len: 64 };
    world.request(ClientId(2), ask);
    world
}

/// 16,459 states, or 160,100 in full runs.
#[test]
fn every_order_from_the_beginning() {
    let states = explore(world(), depth(7, 9));
    println!("{states} states");
    assert!(states > 10_000, "{states}");
}

/// 13,391 states, or 117,792 in full runs.
#[test]
fn every_order_with_a_waiter() {
    let states = explore(contended(), depth(6, 8));
    println!("{states} states");
    assert!(states > 10_000, "{states}");
}

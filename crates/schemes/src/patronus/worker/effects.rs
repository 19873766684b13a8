//! Execution of the book's effects.

use std::sync::atomic::Ordering;

use scheme::index::{EntryId, Slot};
use scheme::{ClientId, CpuEvents, Error};
use verbs::{Nic, Zeros};

use super::doors::DoorTask;
use super::{Shared, State};
use crate::patronus::book::{Effect, PermissionId, Place};
use crate::patronus::door::Opening;
use crate::patronus::message::{Granted, ObjectId, Outcome, Reply};

/// Bytes that one turn clears before it answers other requests.
const CLEAR_BYTES: u64 = 1 << 20;

impl<N: Nic> State<N> {
    /// Executes effects, and those that follow from their results. Clearing beyond
    /// [`CLEAR_BYTES`] is left for the next turn.
    pub(super) fn execute(
        &mut self,
        shared: &Shared<N>,
        mut effects: Vec<Effect>,
    ) -> Result<(), Error> {
        let mut clear_left = CLEAR_BYTES;
        let mut tasks = Vec::new();
        let mut later = Vec::new();
        while !effects.is_empty() {
            let mut next = Vec::new();
            for effect in effects.drain(..) {
                if shared.cores.len() > 1
                    && let Some(client) = effect.client()
                    && shared.core_of(client) != self.index
                {
                    later.push(effect);
                    continue;
                }
                match effect {
                    Effect::Open { id, place, right, group, has_hole } => {
                        let number = id.number;
                        let opening = Opening { number, place, right, group, has_hole };
                        tasks.push(DoorTask::open(id.client, opening));
                    }
                    Effect::Close { id } => tasks.push(DoorTask::close(id)),
                    Effect::Abandon { id } => tasks.push(DoorTask::abandon(id)),
                    Effect::Clear { object, place } => {
                        // A large range is cleared alone.
                        if place.len > clear_left && clear_left < CLEAR_BYTES {
                            later.push(effect);
                            continue;
                        }
                        clear_left = clear_left.saturating_sub(place.len);
                        self.clear(shared, object, place, &mut next);
                    }
                    Effect::Reply { client, number, outcome, entry } => {
                        self.reply(shared, (client, number), outcome, entry, &mut next);
                    }
                }
            }
            self.run_doors(shared, &mut tasks, &mut next)?;
            effects = next;
        }
        if !later.is_empty() {
            shared.give(later);
        }
        Ok(())
    }

    fn clear(
        &mut self,
        shared: &Shared<N>,
        object: ObjectId,
        place: Place,
        next: &mut Vec<Effect>,
    ) {
        {
            let mut zeros = Zeros::default();
            let (at, len) = (place.offset as usize, place.len as usize);
            shared.nic.zero(&mut zeros, &shared.memory, at, len);
        }
        let now = shared.nic.now();
        shared.with_book(|book| book.cleared(now, object, &mut &shared.tables, next));
        self.counts.frees += 1;
        // Compute nodes of other cores may wait for memory.
        for (index, core) in shared.cores.iter().enumerate() {
            if index != self.index && core.announced_empty.load(Ordering::Acquire) {
                core.events.wake();
            }
        }
    }

    /// Sends a reply. `number`: the book's number of the request.
    fn reply(
        &mut self,
        shared: &Shared<N>,
        (client, number): (ClientId, u64),
        outcome: Outcome,
        entry: u32,
        next: &mut Vec<Effect>,
    ) {
        let grant = match outcome {
            Outcome::Granted(granted) => Some(granted.permission),
            _ => None,
        };
        let (epoch, slot) = ((number >> 32) as u32, Slot::new(number as u32));
        let peer = self.peers.get_mut(&client).filter(|peer| !peer.leaving);
        let Some(peer) = peer.filter(|peer| peer.answers.epoch() == epoch) else {
            // The connection of the request is closed: nothing is delivered any more.
            if let Some(number) = grant {
                let id = PermissionId { client, number };
                let now = shared.nic.now();
                shared.with_book(|book| book.undelivered(now, id, &mut &shared.tables, next));
            }
            return;
        };
        let outcome = match outcome {
            Outcome::Granted(granted) => {
                self.counts.allocations += 1;
                let mut keys = granted.keys;
                let lanes = shared.settings.lanes() as usize;
                peer.door.keys(granted.permission, &mut keys[..lanes]);
                let mut header = None;
                if let Some((windows, headers)) = self.published.as_ref().zip(shared.headers()) {
                    let id = PermissionId { client, number: granted.permission };
                    keys[..lanes].fill(windows.key(id).unwrap_or_default());
                    header = windows.header(id, headers);
                }
                let address = shared.memory.addr() + granted.address;
                Outcome::Granted(Granted { address, lanes, keys, header, ..granted })
            }
            outcome => outcome,
        };
        match outcome {
            Outcome::Empty => {
                shared.cores[self.index].announced_empty.store(true, Ordering::Release);
                peer.answers.announce_empty();
            }
            Outcome::Extended(_) => self.counts.extensions += 1,
            Outcome::Granted(_) | Outcome::Done | Outcome::NoBlock => {}
            _ => self.counts.refused += 1,
        }
        let number = peer.numbers[slot.as_usize()];
        let reply = Reply { number, outcome, entry: EntryId::new(entry) };
        peer.answers.answer(slot, &reply.to_bytes(), grant.map(|number| number.0));
    }
}

//! Specification of the pool as a state machine.
//!
//! Each chunk is in one of four states, and each worker in one of a few phases. Every change that a
//! step of the NIC or of the CPU makes must be a transition of this machine. The machine does not
//! use the chains' code: it knows only the rules below.
//!
//! ```text
//!          alloc worker of c            ... writes owner_id         free worker of c
//!          swaps the slot               with every window bound     unbinds the guard
//!   Free --------------------> Taken(c) ------------------> Owned(c) ----------------> Releasing
//!    ^                                                         |    the CPU, c has crashed  |
//!    |                                                         +--------------------------->|
//!    +---- the same releaser pushes it: windows dead, chunk zero, owner 0 ------------------+
//!
//!   alloc worker: None --takes a permit--> Permit --advances head--> Ticket(slot) --swaps--> None
//!                      \--takes a missing one--> Overdraft --gives it back--> None
//!   releaser:     pushes the entry, owes a permit, gives the permit
//! ```

use schemes::onesidedmw::layout::Shape;
use verbs::Qpn;

/// Maximum number of chunks of a world.
pub const CHUNKS: usize = 4;
/// Maximum number of windows per group.
pub const GROUP: usize = 3;
/// Maximum number of slots of the free queue.
pub const SLOTS: usize = 64;
/// Maximum number of clients.
pub const CLIENTS: usize = 3;

/// State of a memory window in the NIC.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Window {
    /// The QP that the window is bound to.
    pub bound: Option<u32>,
    /// The tag of the window's key.
    pub tag: u8,
}

/// The part of a world's state that the machine observes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct View {
    /// Content of each slot of the free queue: chunk + 1, 0 if empty, or [`FORGED`].
    pub slots: [u8; SLOTS],
    /// The slot that is taken next.
    pub head: u8,
    /// The row of the steering table that the word `avail` points at: the number of permits.
    pub avail: u8,
    /// `owner_id` of each chunk.
    pub owners: [u64; CHUNKS],
    /// The windows of each chunk.
    pub windows: [[Window; GROUP]; CHUNKS],
    /// Whether each chunk contains only zeros.
    pub zero: [bool; CHUNKS],
}

/// Content of a slot whose value names no entry.
pub const FORGED: u8 = 0xff;

/// The executor of a step.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Actor {
    /// The allocation worker of a client.
    AllocWorker(u8),
    /// The free worker of a client.
    FreeWorker(u8),
    /// A QP of the memory node that is connected to a client and sends replies.
    Front(u8),
    /// A client's own QP, or the client itself.
    Client(u8),
    /// The memory node's CPU, or one of its QPs.
    Cpu,
}

/// The releaser of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Releaser {
    /// The free worker of a client.
    Worker(u8),
    /// The CPU.
    Cpu,
}

/// State of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Chunk {
    /// In the free queue.
    Free,
    /// Removed from the queue by a client's allocation chain, not yet owned.
    Taken(u8),
    /// Owned by a client.
    Owned(u8),
    /// On its way back to the queue.
    Releasing(Releaser),
}

/// Phase of an allocation chain.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Phase {
    /// The chain holds nothing.
    None,
    /// The chain holds a permit.
    Permit,
    /// The chain took a permit that did not exist.
    Overdraft,
    /// The chain holds the ticket for this slot.
    Ticket(u8),
}

/// The state machine.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Spec {
    chunks: usize,
    group: usize,
    slots: usize,
    rows: usize,
    /// State of each chunk.
    pub chunk: [Chunk; CHUNKS],
    /// Phase of each client's allocation chain.
    pub phase: [Phase; CLIENTS],
    /// Permits that each client's free worker, and the CPU (last element), have yet to give.
    pub owes: [u8; CLIENTS + 1],
    /// Releaser client and chunk: how often the client's free worker has released the chunk.
    pub released: [[u8; CHUNKS]; CLIENTS],
    /// Clients whose process has ended or that have reset their queues; their undelivered grants
    /// are reclaimed.
    pub gone: [bool; CLIENTS],
    /// Identity of each client.
    pub identities: [Identity; CLIENTS],
}

/// Numbers by which the machine recognizes a client.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Identity {
    /// The number that the memory node assigned.
    pub id: u64,
    /// QP number of the client's free worker.
    pub free_worker: u32,
    /// QPs that the client's requests name, by lane.
    pub named: [[u32; 2]; GROUP],
}

impl Spec {
    /// Creates the machine for a pool of `shape` in which all chunks are free.
    pub fn new(shape: &Shape, identities: [Identity; CLIENTS]) -> Self {
        Self {
            chunks: shape.chunks as usize,
            group: shape.group,
            slots: shape.slots() as usize,
            rows: shape.rows() as usize,
            chunk: [Chunk::Free; CHUNKS],
            phase: [Phase::None; CLIENTS],
            owes: [0; CLIENTS + 1],
            released: [[0; CHUNKS]; CLIENTS],
            gone: [false; CLIENTS],
            identities,
        }
    }

    /// Applies the step that `actor` made from `old` to `new`. Returns a description of the
    /// changes, or an error if the machine does not allow them.
    pub fn step(&mut self, actor: Actor, old: &View, new: &View) -> Result<Vec<String>, String> {
        let mut events = Vec::new();
        if old == new {
            return Ok(events);
        }
        let require = |ok: bool, what: String| match ok {
            true => Ok(()),
            false => Err(format!("{actor:?} {what}")),
        };
        let mine = match actor {
            Actor::AllocWorker(c) | Actor::FreeWorker(c) | Actor::Front(c) | Actor::Client(c) => {
                Some(c as usize)
            }
            Actor::Cpu => None,
        };
        let alloc = if let Actor::AllocWorker(c) = actor { Some(c as usize) } else { None };
        let by = match actor {
            Actor::FreeWorker(c) => Some(Releaser::Worker(c)),
            Actor::Cpu => Some(Releaser::Cpu),
            _ => None,
        };
        let debtor = match actor {
            Actor::FreeWorker(c) => Some(c as usize),
            Actor::Cpu => Some(CLIENTS),
            _ => None,
        };

        // --- windows ---------------------------------------------------------------------------
        for i in 0..self.chunks {
            for j in 0..self.group {
                let (a, b) = (old.windows[i][j], new.windows[i][j]);
                let name = format!("window {j} of chunk {i}");
                match (a.bound, b.bound) {
                    _ if a == b => {}
                    (None, Some(qpn)) => {
                        let c = alloc.filter(|&c| self.chunk[i] == Chunk::Taken(c as u8));
                        require(
                            c.is_some(),
                            format!("binds {name}, which is {:?}", self.chunk[i]),
                        )?;
                        require(
                            a.tag != b.tag,
                            format!("binds {name} with its old tag {}", a.tag),
                        )?;
                        let identity = self.identities[c.expect("just seen")];
                        let right = if j == 0 {
                            qpn == identity.free_worker
                        } else {
                            identity.named[j].contains(&qpn)
                        };
                        require(
                            right,
                            format!("binds {name} to QP {qpn:#x}, which its request does not name"),
                        )?;
                        events.push(format!("binds {name} to QP {qpn:#x}"));
                    }
                    (Some(_), None) => {
                        let proof = match (self.chunk[i], by) {
                            (Chunk::Owned(c), Some(Releaser::Worker(me))) => j == 0 && c == me,
                            (Chunk::Owned(c), Some(Releaser::Cpu)) => self.gone[c as usize],
                            (Chunk::Releasing(releaser), Some(me)) => releaser == me,
                            _ => false,
                        };
                        let state = self.chunk[i];
                        require(proof, format!("unbinds {name} while the chunk is {state:?}"))?;
                        self.chunk[i] = Chunk::Releasing(by.expect("just matched"));
                        events.push(format!("unbinds {name}"));
                    }
                    _ => require(false, format!("changes {name} from {a:?} to {b:?}"))?,
                }
            }
        }
        let bound = |i: usize| new.windows[i][..self.group].iter().filter(|w| w.bound.is_some());

        // --- data ------------------------------------------------------------------------------
        for i in 0..self.chunks {
            match (old.zero[i], new.zero[i]) {
                (true, false) => {
                    let own = mine.is_some_and(|c| self.chunk[i] == Chunk::Owned(c as u8));
                    let own = own && matches!(actor, Actor::Client(_));
                    require(own, format!("writes to chunk {i}, which is {:?}", self.chunk[i]))?;
                    events.push(format!("writes to chunk {i}"));
                }
                (false, true) => {
                    let own = by.is_some_and(|by| self.chunk[i] == Chunk::Releasing(by));
                    require(own, format!("clears chunk {i}, which is {:?}", self.chunk[i]))?;
                    require(
                        bound(i).count() == 0,
                        format!("clears chunk {i}, whose keys are still valid"),
                    )?;
                    events.push(format!("clears chunk {i}"));
                }
                _ => {}
            }
        }

        // --- owners ----------------------------------------------------------------------------
        for i in 0..self.chunks {
            let (a, b) = (old.owners[i], new.owners[i]);
            if a == b {
                continue;
            }
            if b == 0 {
                // The CPU takes over the chunks of a departed client, here or at the first
                // unbinding.
                if let (Chunk::Owned(c), Some(Releaser::Cpu)) = (self.chunk[i], by)
                    && self.gone[c as usize]
                {
                    self.chunk[i] = Chunk::Releasing(Releaser::Cpu);
                }
                let own = by.is_some_and(|by| self.chunk[i] == Chunk::Releasing(by));
                require(own, format!("disowns chunk {i}, which is {:?}", self.chunk[i]))?;
                events.push(format!("disowns chunk {i}"));
            } else {
                let c = alloc.filter(|&c| self.chunk[i] == Chunk::Taken(c as u8));
                require(c.is_some() && a == 0, format!("makes {b} the owner of chunk {i}"))?;
                let c = c.expect("just seen");
                require(
                    self.identities[c].id == b,
                    format!("writes {b} as the owner of chunk {i}"),
                )?;
                let whole = bound(i).count() == self.group;
                require(whole, format!("grants chunk {i} with an unbound window"))?;
                self.chunk[i] = Chunk::Owned(c as u8);
                events.push(format!("makes {b} the owner of chunk {i}"));
            }
        }

        // --- permits and head ------------------------------------------------------------------
        let moved = (new.avail as usize + self.rows - old.avail as usize) % self.rows;
        if moved == self.rows - 1 {
            let c = alloc.filter(|&c| self.phase[c] == Phase::None);
            require(c.is_some(), "takes a permit in the wrong phase".into())?;
            let there = (1..=self.chunks).contains(&(old.avail as usize));
            let phase = if there { Phase::Permit } else { Phase::Overdraft };
            self.phase[c.expect("just seen")] = phase;
            events.push(format!("takes a permit: {phase:?}"));
        } else if moved == 1 {
            if let Some(c) = alloc.filter(|&c| self.phase[c] == Phase::Overdraft) {
                self.phase[c] = Phase::None;
            } else {
                let debt = debtor.filter(|&d| self.owes[d] > 0);
                require(debt.is_some(), "gives a permit without owing one".into())?;
                self.owes[debt.expect("just seen")] -= 1;
            }
            events.push("gives a permit back".into());
        } else {
            require(moved == 0, format!("moves the permits by {moved}"))?;
        }
        if old.head != new.head {
            let c = alloc.filter(|&c| self.phase[c] == Phase::Permit);
            require(c.is_some(), "advances the head without a permit".into())?;
            let next = (old.head as usize + 1) % self.slots;
            require(new.head as usize == next, format!("moves the head to {}", new.head))?;
            self.phase[c.expect("just seen")] = Phase::Ticket(old.head);
            events.push(format!("gets the ticket for slot {}", old.head));
        }

        // --- the queue -------------------------------------------------------------------------
        for k in 0..self.slots {
            let (a, b) = (old.slots[k], new.slots[k]);
            if a == b {
                continue;
            }
            require(b != FORGED, format!("writes a value that names no entry into slot {k}"))?;
            if b == 0 {
                let c = alloc.filter(|&c| self.phase[c] == Phase::Ticket(k as u8));
                require(c.is_some(), format!("takes slot {k} without a ticket"))?;
                let (c, i) = (c.expect("just seen"), a as usize - 1);
                let state = self.chunk[i];
                require(state == Chunk::Free, format!("takes chunk {i}, which is {state:?}"))?;
                self.phase[c] = Phase::None;
                self.chunk[i] = Chunk::Taken(c as u8);
                events.push(format!("takes chunk {i} from slot {k}"));
            } else {
                require(a == 0, format!("overwrites slot {k}"))?;
                let i = b as usize - 1;
                let own = by.is_some_and(|by| self.chunk[i] == Chunk::Releasing(by));
                require(own, format!("pushes chunk {i}, which is {:?}", self.chunk[i]))?;
                require(
                    bound(i).count() == 0,
                    format!("pushes chunk {i}, whose keys are still valid"),
                )?;
                require(new.zero[i], format!("pushes chunk {i}, which is not cleared"))?;
                require(new.owners[i] == 0, format!("pushes chunk {i}, which has an owner"))?;
                self.chunk[i] = Chunk::Free;
                self.owes[debtor.expect("a releaser has a debt counter")] += 1;
                if let Actor::FreeWorker(c) = actor {
                    self.released[c as usize][i] += 1;
                }
                events.push(format!("pushes chunk {i} into slot {k}"));
            }
        }
        self.check(new)?;
        Ok(events)
    }

    /// Checks the invariants of every state.
    fn check(&self, v: &View) -> Result<(), String> {
        let mut in_queue = [0; CHUNKS];
        let mut filled = 0;
        for &value in v.slots[..self.slots].iter().filter(|&&s| s != 0) {
            in_queue[value as usize - 1] += 1;
            filled += 1;
        }
        for (i, &times) in in_queue[..self.chunks].iter().enumerate() {
            if times != usize::from(self.chunk[i] == Chunk::Free) {
                return Err(format!(
                    "chunk {i} is {:?} and occurs {times} times in the queue",
                    self.chunk[i]
                ));
            }
        }
        let mut claims: usize = self.owes.iter().map(|&o| o as usize).sum();
        for (c, phase) in self.phase.iter().enumerate() {
            claims += usize::from(*phase != Phase::None);
            if let Phase::Ticket(k) = *phase {
                if v.slots[k as usize] == 0 {
                    return Err(format!("the head has passed slot {k}, which is empty"));
                }
                if self.phase[..c].contains(phase) {
                    return Err(format!("two chains hold the ticket for slot {k}"));
                }
            }
        }
        // A negative number of permits is a row counted from the end of the table.
        let permits = (self.rows + filled - claims) % self.rows;
        if permits != v.avail as usize {
            let avail = v.avail;
            return Err(format!(
                "row {avail} of permits; {filled} entries, {claims} claims on them"
            ));
        }
        Ok(())
    }

    /// Checks that a client that the memory node has forgotten holds nothing.
    pub fn check_forgotten(&self, c: u8) -> Result<(), String> {
        let left = |chunk: &Chunk| match *chunk {
            Chunk::Taken(x) | Chunk::Owned(x) | Chunk::Releasing(Releaser::Worker(x)) => x == c,
            _ => false,
        };
        if let Some(i) = self.chunk[..self.chunks].iter().position(left) {
            let state = self.chunk[i];
            return Err(format!("client {c} is retired, and chunk {i} is still {state:?}"));
        }
        if self.phase[c as usize] != Phase::None || self.owes[c as usize] > 0 {
            let (phase, owes) = (self.phase[c as usize], self.owes[c as usize]);
            return Err(format!(
                "client {c} is retired; its chain: {phase:?}, owes {owes} permits"
            ));
        }
        Ok(())
    }

    /// Returns whether client `c` may have its windows bound to `qpn`.
    pub fn is_named(&self, c: usize, lane: usize, qpn: Qpn) -> bool {
        self.identities[c].named[lane].contains(&qpn.raw())
    }
}

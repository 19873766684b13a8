//! What the pool must be like at every moment, as a machine of its own: each chunk is in one of four
//! states, each worker in one of a few phases, and whatever a step of the NIC or of the CPU changes must be a
//! move of this machine. It knows of the chains only what is said here.
//!
//! ```text
//!            alloc worker of c             ... writes owner_id          free worker of c
//!            swaps the slot                with every window bound      unbinds the guard
//!   Free ----------------------> Taken(c) ------------------> Owned(c) -----------------> Releasing
//!    ^                                                           |       the CPU, c is gone    |
//!    |                                                           +---------------------------->|
//!    +-------- the same one pushes it: windows dead, chunk zero, owner 0 ----------------------+
//!
//!   alloc worker: None --takes a permit--> Permit --advances head--> Ticket(slot) --swaps--> None
//!                      \--finds none-----> Overdraft --gives it back--> None
//!   releaser:     pushes, owes a permit, gives it
//! ```

use fabric::Qpn;
use pool::onesidedmw::layout::Shape;

/// The most chunks, windows of a group, slots and clients of a world.
pub const CHUNKS: usize = 4;
/// The most windows of a group.
pub const GROUP: usize = 3;
/// The most slots of the free queue.
pub const SLOTS: usize = 64;
/// The most clients.
pub const CLIENTS: usize = 3;

/// A window as the NIC has it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Window {
    /// The QP that it is bound to.
    pub bound: Option<u32>,
    /// The tag of its key.
    pub tag: u8,
}

/// What the machine sees of a world.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct View {
    /// What each slot of the queue holds: a chunk + 1, 0 for nothing, [`FORGED`] for what is no entry.
    pub slots: [u8; SLOTS],
    /// The slot that is taken next.
    pub head: u8,
    /// Row of the steering table that `avail` points at.
    pub avail: u8,
    /// `owner_id` of each chunk.
    pub owners: [u64; CHUNKS],
    /// Windows of each chunk.
    pub windows: [[Window; GROUP]; CHUNKS],
    /// Whether each chunk is all zeros.
    pub zero: [bool; CHUNKS],
}

/// A slot holds this if its value names no entry.
pub const FORGED: u8 = 0xff;

/// Who made a step.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Actor {
    /// The worker of a client's allocations.
    AllocWorker(u8),
    /// The worker of a client's frees.
    FreeWorker(u8),
    /// A QP that faces a client: replies.
    Front(u8),
    /// A client's own QP, or the client itself.
    Client(u8),
    /// The memory node's CPU, or a QP that works for it.
    Cpu,
}

/// Who releases a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum By {
    /// The free worker of a client.
    Worker(u8),
    /// The CPU.
    Cpu,
}

/// Where a chunk is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Chunk {
    /// In the queue.
    Free,
    /// In flight in a client's allocation chain.
    Taken(u8),
    /// A client's.
    Owned(u8),
    /// In flight on its way back.
    Releasing(By),
}

/// Where an allocation chain is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Phase {
    /// It holds nothing.
    None,
    /// It has taken a permit.
    Permit,
    /// It took one that was not there.
    Overdraft,
    /// It has the slot that it is to take.
    Ticket(u8),
}

/// The machine.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Spec {
    chunks: usize,
    group: usize,
    slots: usize,
    rows: usize,
    /// Where each chunk is.
    pub chunk: [Chunk; CHUNKS],
    /// Where each client's allocation chain is.
    pub phase: [Phase; CLIENTS],
    /// Permits that each client's free worker, and the CPU (last), have to give.
    pub owes: [u8; CLIENTS + 1],
    /// Times that a client's free worker has released each chunk.
    pub released: [[u8; CHUNKS]; CLIENTS],
    /// The client's process has ended, or it has reset its queues: grants that were not delivered
    /// are taken back.
    pub gone: [bool; CLIENTS],
    /// Who each client is.
    pub who: [Identity; CLIENTS],
}

/// What the machine knows a client by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Identity {
    /// The number that the memory node gave it.
    pub id: u64,
    /// Number of its free worker.
    pub free_worker: u32,
    /// QPs that its requests name, by lane.
    pub named: [[u32; 2]; GROUP],
}

impl Spec {
    /// The machine for a pool of `shape` with everything free.
    pub fn new(shape: &Shape, who: [Identity; CLIENTS]) -> Self {
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
            who,
        }
    }

    /// Moves as `actor` did from `old` to `new`; what it did in words, or why it may not.
    pub fn step(&mut self, actor: Actor, old: &View, new: &View) -> Result<Vec<String>, String> {
        let mut said = Vec::new();
        if old == new {
            return Ok(said);
        }
        let may = |ok: bool, what: String| match ok {
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
            Actor::FreeWorker(c) => Some(By::Worker(c)),
            Actor::Cpu => Some(By::Cpu),
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
                        may(c.is_some(), format!("binds {name}, which is {:?}", self.chunk[i]))?;
                        may(a.tag != b.tag, format!("binds {name} with its old tag {}", a.tag))?;
                        let who = self.who[c.expect("just seen")];
                        let right = if j == 0 {
                            qpn == who.free_worker
                        } else {
                            who.named[j].contains(&qpn)
                        };
                        may(right, format!("binds {name} to QP {qpn:#x}, which nobody asked for"))?;
                        said.push(format!("binds {name} to QP {qpn:#x}"));
                    }
                    (Some(_), None) => {
                        let proof = match (self.chunk[i], by) {
                            (Chunk::Owned(c), Some(By::Worker(me))) => j == 0 && c == me,
                            (Chunk::Owned(c), Some(By::Cpu)) => self.gone[c as usize],
                            (Chunk::Releasing(who), Some(me)) => who == me,
                            _ => false,
                        };
                        let is = self.chunk[i];
                        may(proof, format!("unbinds {name} while the chunk is {is:?}"))?;
                        self.chunk[i] = Chunk::Releasing(by.expect("just matched"));
                        said.push(format!("unbinds {name}"));
                    }
                    _ => may(false, format!("changes {name} from {a:?} to {b:?}"))?,
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
                    may(own, format!("writes to chunk {i}, which is {:?}", self.chunk[i]))?;
                    said.push(format!("writes to chunk {i}"));
                }
                (false, true) => {
                    let own = by.is_some_and(|by| self.chunk[i] == Chunk::Releasing(by));
                    may(own, format!("clears chunk {i}, which is {:?}", self.chunk[i]))?;
                    may(bound(i).count() == 0, format!("clears chunk {i}, whose keys still live"))?;
                    said.push(format!("clears chunk {i}"));
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
                // What a client that is gone owned is the CPU's from here on, or from the first unbinding.
                if let (Chunk::Owned(c), Some(By::Cpu)) = (self.chunk[i], by)
                    && self.gone[c as usize]
                {
                    self.chunk[i] = Chunk::Releasing(By::Cpu);
                }
                let own = by.is_some_and(|by| self.chunk[i] == Chunk::Releasing(by));
                may(own, format!("disowns chunk {i}, which is {:?}", self.chunk[i]))?;
                said.push(format!("disowns chunk {i}"));
            } else {
                let c = alloc.filter(|&c| self.chunk[i] == Chunk::Taken(c as u8));
                may(c.is_some() && a == 0, format!("makes {b} the owner of chunk {i}"))?;
                let c = c.expect("just seen");
                may(self.who[c].id == b, format!("writes {b} as the owner of chunk {i}"))?;
                let whole = bound(i).count() == self.group;
                may(whole, format!("gives chunk {i} away with a window that is not bound"))?;
                self.chunk[i] = Chunk::Owned(c as u8);
                said.push(format!("makes {b} the owner of chunk {i}"));
            }
        }

        // --- permits and head ------------------------------------------------------------------
        let moved = (new.avail as usize + self.rows - old.avail as usize) % self.rows;
        if moved == self.rows - 1 {
            let c = alloc.filter(|&c| self.phase[c] == Phase::None);
            may(c.is_some(), "takes a permit out of turn".into())?;
            let there = (1..=self.chunks).contains(&(old.avail as usize));
            let phase = if there { Phase::Permit } else { Phase::Overdraft };
            self.phase[c.expect("just seen")] = phase;
            said.push(format!("takes a permit: {phase:?}"));
        } else if moved == 1 {
            if let Some(c) = alloc.filter(|&c| self.phase[c] == Phase::Overdraft) {
                self.phase[c] = Phase::None;
            } else {
                let debt = debtor.filter(|&d| self.owes[d] > 0);
                may(debt.is_some(), "gives a permit that it does not owe".into())?;
                self.owes[debt.expect("just seen")] -= 1;
            }
            said.push("gives a permit back".into());
        } else {
            may(moved == 0, format!("moves the permits by {moved}"))?;
        }
        if old.head != new.head {
            let c = alloc.filter(|&c| self.phase[c] == Phase::Permit);
            may(c.is_some(), "advances the head without a permit".into())?;
            let next = (old.head as usize + 1) % self.slots;
            may(new.head as usize == next, format!("moves the head to {}", new.head))?;
            self.phase[c.expect("just seen")] = Phase::Ticket(old.head);
            said.push(format!("has the ticket for slot {}", old.head));
        }

        // --- the queue -------------------------------------------------------------------------
        for k in 0..self.slots {
            let (a, b) = (old.slots[k], new.slots[k]);
            if a == b {
                continue;
            }
            may(b != FORGED, format!("puts into slot {k} what is no entry"))?;
            if b == 0 {
                let c = alloc.filter(|&c| self.phase[c] == Phase::Ticket(k as u8));
                may(c.is_some(), format!("takes slot {k} without a ticket"))?;
                let (c, i) = (c.expect("just seen"), a as usize - 1);
                let is = self.chunk[i];
                may(is == Chunk::Free, format!("takes chunk {i}, which is {is:?}"))?;
                self.phase[c] = Phase::None;
                self.chunk[i] = Chunk::Taken(c as u8);
                said.push(format!("takes chunk {i} from slot {k}"));
            } else {
                may(a == 0, format!("overwrites slot {k}"))?;
                let i = b as usize - 1;
                let own = by.is_some_and(|by| self.chunk[i] == Chunk::Releasing(by));
                may(own, format!("pushes chunk {i}, which is {:?}", self.chunk[i]))?;
                may(bound(i).count() == 0, format!("pushes chunk {i}, whose keys still live"))?;
                may(new.zero[i], format!("pushes chunk {i}, which is not cleared"))?;
                may(new.owners[i] == 0, format!("pushes chunk {i}, which has an owner"))?;
                self.chunk[i] = Chunk::Free;
                self.owes[debtor.expect("it releases")] += 1;
                if let Actor::FreeWorker(c) = actor {
                    self.released[c as usize][i] += 1;
                }
                said.push(format!("pushes chunk {i} into slot {k}"));
            }
        }
        self.check(new)?;
        Ok(said)
    }

    /// What holds at every moment.
    fn check(&self, v: &View) -> Result<(), String> {
        let mut in_queue = [0; CHUNKS];
        let mut filled = 0;
        for &value in v.slots[..self.slots].iter().filter(|&&s| s != 0) {
            in_queue[value as usize - 1] += 1;
            filled += 1;
        }
        for (i, &times) in in_queue[..self.chunks].iter().enumerate() {
            if times != usize::from(self.chunk[i] == Chunk::Free) {
                return Err(format!("chunk {i} is {:?} and {times} times queued", self.chunk[i]));
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
                    return Err(format!("two chains have the ticket for slot {k}"));
                }
            }
        }
        // Negative numbers of permits are rows from the end of the table.
        let permits = (self.rows + filled - claims) % self.rows;
        if permits != v.avail as usize {
            let avail = v.avail;
            return Err(format!(
                "row {avail} of permits; {filled} entries, {claims} claims on them"
            ));
        }
        Ok(())
    }

    /// What is left of a client that the memory node has forgotten.
    pub fn check_forgotten(&self, c: u8) -> Result<(), String> {
        let left = |chunk: &Chunk| match *chunk {
            Chunk::Taken(x) | Chunk::Owned(x) | Chunk::Releasing(By::Worker(x)) => x == c,
            _ => false,
        };
        if let Some(i) = self.chunk[..self.chunks].iter().position(left) {
            let is = self.chunk[i];
            return Err(format!("client {c} is retired, and chunk {i} is still {is:?}"));
        }
        if self.phase[c as usize] != Phase::None || self.owes[c as usize] > 0 {
            let (phase, owes) = (self.phase[c as usize], self.owes[c as usize]);
            return Err(format!(
                "client {c} is retired; its chain: {phase:?}, owes {owes} permits"
            ));
        }
        Ok(())
    }

    /// True if `qpn` is a QP that client `c` may have its windows bound to.
    pub fn is_named(&self, c: usize, lane: usize, qpn: Qpn) -> bool {
        self.who[c].named[lane].contains(&qpn.raw())
    }
}

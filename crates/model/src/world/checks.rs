//! Invariants of a world: of grants that clients receive, of the workers, and of the final state.

use scheme::index::EntryId;

use super::*;

impl World {
    /// Checks that a grant that a client has received belongs to the client and has valid keys.
    pub(super) fn check_grant(&self, c: usize, what: Op, grant: &Grant) -> Result<(), String> {
        let (entry, i) = (EntryId::new(grant.entry), grant.entry as usize);
        let claim = format!("client {c} was granted chunk {i}");
        if i >= self.memory.shape.chunks as usize || grant.addr != self.memory.chunk_addr(entry) {
            return Err(format!("{claim}, at {:#x}: no such chunk exists", grant.addr));
        }
        if self.spec.chunk[i] != crate::spec::Chunk::Owned(c as u8) {
            return Err(format!("{claim}, which is {:?}", self.spec.chunk[i]));
        }
        for lane in 1..self.memory.shape.group {
            let window = self.view.windows[i][lane];
            let key = Key::new(self.windows[i][lane].index(), window.tag);
            if Key(grant.keys[lane]) != key {
                return Err(format!("{claim}, with an invalid key: lane {lane}"));
            }
            if what == Op::Allocate && window.bound != Some(self.clients[c].peers[lane - 1].raw()) {
                return Err(format!("{claim}; its window is bound to {:?}", window.bound));
            }
        }
        Ok(())
    }

    pub(super) fn check_workers(&self) -> Result<(), String> {
        for (qpn, actor, name) in &self.roles {
            let may_break = match actor {
                Actor::AllocWorker(_) => false,
                Actor::FreeWorker(c) => !self.clients[*c as usize].honest,
                _ => continue,
            };
            let state = query(&self.physical, *qpn).map(|i| i.info.state);
            if !may_break && state == Some(verbs::QpState::Error) {
                return Err(format!("the {name} of {actor:?} is in the error state"));
            }
        }
        Ok(())
    }

    pub(super) fn observe(&self) -> View {
        let m = &self.memory;
        let (chunks, slots) = (m.shape.chunks as usize, m.shape.slots() as usize);
        let mut view = View {
            slots: [0; SLOTS],
            head: ((m.words.memory().load_be64(0) - m.queue.memory().addr()) / 8) as u8,
            avail: ((m.words.memory().load_be64(schemes::onesidedmw::layout::AVAIL)
                - m.steer.memory().addr())
                / 64) as u8,
            owners: [0; CHUNKS],
            windows: [[Window::default(); GROUP]; CHUNKS],
            zero: [true; CHUNKS],
        };
        for (k, slot) in view.slots[..slots].iter_mut().enumerate() {
            *slot = match m.queue.memory().load_be64(8 * k) {
                0 => 0,
                value => m.entry_of(value).map_or(FORGED, |i| i.raw() as u8 + 1),
            };
        }
        for i in 0..chunks {
            view.owners[i] = m.owner(EntryId::new(i as u32));
            let mut data = [0; CHUNK as usize];
            m.chunks.memory().read(i * CHUNK as usize, &mut data);
            view.zero[i] = data.iter().all(|&b| b == 0);
            for j in 0..m.shape.group {
                let query = Control::QueryKey { index: self.windows[i][j].index() };
                let Ok(Reply::KeyInfo(info)) = self.physical.execute(query) else {
                    panic!("window {j} of chunk {i} is gone")
                };
                let bound = info.bound.then_some(info.qpn.raw());
                view.windows[i][j] = Window { bound, tag: info.tag };
            }
        }
        view
    }

    /// Checks the state in which no action is possible any more. Changes the world.
    pub fn check_end(&mut self) -> Result<(), String> {
        if let Some(task) = self.cpu.task {
            return Err(format!("the CPU is stuck: {task:?}, {:?}", self.cpu.state));
        }
        for (c, client) in self.clients.iter().enumerate().filter(|(_, c)| c.alive) {
            let undone =
                client.outcome.iter().position(|o| matches!(o, Outcome::Ahead | Outcome::Posted));
            if let Some(op) = undone {
                let (what, is) = (client.program[op], client.outcome[op]);
                return Err(format!("client {c} waits forever: {what:?} is {is:?}"));
            }
        }
        self.audit()?;
        // The chains must serve further requests, more than once around their rings, and leave the
        // pool unchanged.
        let before = self.spec.chunk;
        for _ in 0..=self.in_flight {
            for c in 0..self.clients.len() {
                if self.clients[c].alive && self.clients[c].works() {
                    let at = self.clients[c].program.len();
                    self.run_fairly(c, Op::Allocate)?;
                    if matches!(self.clients[c].outcome[at], Outcome::Granted(_)) {
                        self.run_fairly(c, Op::Free(at as u8))?;
                    }
                }
            }
        }
        if self.spec.chunk != before {
            return Err(format!(
                "the pool was {before:?} and is {:?} after further requests",
                self.spec.chunk
            ));
        }
        self.audit()
    }

    fn audit(&self) -> Result<(), String> {
        // SAFETY: the CPU is idle, and no other code uses the node.
        let node = unsafe { &*self.node };
        arena::inside(|| node.audit()).map_err(|e| {
            let text = arena::inside(|| e.to_string());
            arena::outside(|| format!("at the end: {text}"))
        })
    }

    fn run_fairly(&mut self, c: usize, op: Op) -> Result<(), String> {
        arena::inside(|| {
            self.clients[c].program.push(op);
            self.clients[c].outcome.push(Outcome::Ahead);
        });
        self.act(Action::Post(c as u8))?;
        while let Some(&qpn) = self.nic.ready_qps().first() {
            self.act(Action::Step(qpn))?;
        }
        match *self.clients[c].outcome.last().expect("just pushed") {
            Outcome::Granted(_) | Outcome::Said(status::FREED | status::EMPTY) => Ok(()),
            outcome => Err(format!("after the run, client {c}: {op:?} ends with {outcome:?}")),
        }
    }
}

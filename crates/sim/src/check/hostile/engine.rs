//! Hostile clients against an engine: commands for any page and in any name, accesses to any
//! address, and floods of commands.

use schemes::tdmem::command::{ANSWER_BYTES, Answer, COMMAND_BYTES, Command, Operation, Status};
use schemes::tdmem::layout::Peer;
use schemes::tdmem::{PAGE_BYTES, Region};
use verbs::{CompletionKind, MemoryRegion, Op, QueuePair, Remote, Status as Outcome, WorkRequest};

use super::{Hostile, PAGE};
use crate::check::invariant::Invariant;

/// The byte that the client writes, to recognize foreign contents.
const OWN: u8 = 0xbb;

impl Hostile {
    pub(super) fn round_on_engine(&mut self) {
        let Ok(region) = Region::of(&self.terms) else { return self.out = true };
        match self.random.below(16) {
            0..=3 => _ = self.command(&region, |_, _| {}),
            4 => _ = self.command(&region, |me, c| c.src_mid = me.random.below(9) as u16),
            5 => _ = self.command(&region, |me, c| c.target_tier = me.random.bits() as u8),
            6 | 7 => self.any_command(&region),
            8..=10 => self.read_any_page(&region),
            11 => self.access_anything(&region),
            12 => self.write_foreign_slot(&region),
            13 => self.flood_commands(&region),
            14 => self.partial_command(&region),
            _ => self.windows(),
        }
    }

    fn at(&self, region: &Region, addr: u64) -> Remote {
        Remote { addr, rkey: region.key() }
    }

    fn own_slot(&self, region: &Region) -> u64 {
        region.layout.first_slot(Peer::Donee(region.owner))
    }

    fn any_page(&mut self, region: &Region) -> u64 {
        let page = self.random.below(u64::from(region.layout.pages) + 1) as u32;
        region.layout.page(page)
    }

    /// Executes work on the management QP. Returns whether it succeeded; re-establishes the QP
    /// otherwise.
    fn execute(&mut self, op: Op<'_>) -> bool {
        let side = self.side(0);
        let (qp, cq) = (side.qp.clone(), side.cq.clone());
        if qp.post_send(&[WorkRequest { id: 4, op, signaled: true }]).is_ok()
            && self.next(&cq, CompletionKind::Send) == Some(Outcome::Success)
        {
            return true;
        }
        self.recover();
        false
    }

    /// A STORE of a new page, changed by `change`; returns the answer.
    fn command(
        &mut self,
        region: &Region,
        change: impl FnOnce(&mut Self, &mut Command),
    ) -> Option<Answer> {
        self.number += 1;
        let mut command = Command {
            operation: Operation::Store,
            tier: 1 + self.random.below(2) as u8,
            target_tier: 1 + self.random.below(2) as u8,
            src_mid: region.owner,
            sequence: self.number,
            remote_addr: 0,
        };
        change(self, &mut command);
        let slot = self.own_slot(region);
        self.memory.memory().write(PAGE, &[OWN; PAGE_BYTES]);
        let page = [self.memory.sge(PAGE, PAGE_BYTES as u32)];
        let answer = [self.memory.sge(0, ANSWER_BYTES as u32)];
        let to = self.at(region, region.layout.data(slot));
        let control = self.at(region, region.layout.command(slot));
        let from = self.at(region, region.layout.answer(slot));
        let done = self.execute(Op::Write { to, from: &page })
            && self.execute(Op::WriteInline { to: control, data: &command.to_bytes() })
            && self.execute(Op::Read { from, to: &answer });
        let mut bytes = [0; ANSWER_BYTES];
        self.memory.memory().read(0, &mut bytes);
        let answer = Answer::parse(&bytes).filter(|_| done)?;
        if answer.sequence != command.sequence {
            let name = self.cx.with_oracle(|o| o.name(self.cx.client).to_owned());
            let why = format!("{name} reads the answer to command {}", answer.sequence);
            self.cx.with_oracle(|o| o.wrong(Invariant::Answers, why));
        }
        Some(answer)
    }

    /// A command of any kind for any page.
    fn any_command(&mut self, region: &Region) {
        let page = self.any_page(region);
        let shift = if self.random.below(4) == 0 { self.random.below(4096) } else { 0 };
        let operations = [Operation::Store, Operation::InvalidatePage, Operation::InvalidateArea];
        let operation = operations[self.random.below(3) as usize];
        self.command(region, |_, command| {
            (command.operation, command.remote_addr) = (operation, page + shift);
        });
    }

    /// READs a page, which may be another client's.
    fn read_any_page(&mut self, region: &Region) {
        let stored = self.command(region, |_, _| {});
        let own = stored.filter(|answer| answer.status == Status::Done).map(|a| a.remote_addr);
        let page = self.any_page(region);
        let page = own.filter(|_| self.random.below(4) == 0).unwrap_or(page);
        self.memory.memory().zero(PAGE, PAGE_BYTES);
        let to = [self.memory.sge(PAGE, PAGE_BYTES as u32)];
        let from = self.at(region, page);
        if !self.execute(Op::Read { from, to: &to }) {
            return;
        }
        let mut content = [0; PAGE_BYTES];
        self.memory.memory().read(PAGE, &mut content);
        if let Some(at) = content.iter().position(|byte| *byte != OWN) {
            let name = self.cx.with_oracle(|o| o.name(self.cx.client).to_owned());
            let why = format!("{name} reads {:#x} at byte {at} of a page", content[at]);
            self.cx.with_oracle(|o| o.wrong(Invariant::Contents, why));
        }
    }

    /// READs or WRITEs any part of the region.
    fn access_anything(&mut self, region: &Region) {
        let addr = self.random.below(region.layout.bytes() + 4096);
        let buffer = [self.memory.sge(PAGE, 1 + self.random.below(4096) as u32)];
        let remote = self.at(region, addr);
        match self.random.below(3) {
            0 => self.execute(Op::Read { from: remote, to: &buffer }),
            1 => self.execute(Op::Write { to: remote, from: &buffer }),
            _ => self.execute(Op::FetchAdd {
                at: Remote { addr: addr / 8 * 8, ..remote },
                add: 1,
                old: self.memory.sge(0, 8),
            }),
        };
    }

    /// WRITEs a valid command into the slot of another client.
    fn write_foreign_slot(&mut self, region: &Region) {
        let other = 1 + self.random.below(u64::from(region.layout.owners)) as u16;
        let peer = match self.random.below(3) {
            0 => Peer::Administrator,
            _ => Peer::Donee(other),
        };
        let slot = region.layout.first_slot(peer);
        let command = Command {
            operation: Operation::InvalidateArea,
            tier: 0,
            target_tier: 0,
            src_mid: other,
            sequence: self.number,
            remote_addr: 0,
        };
        let to = self.at(region, region.layout.command(slot));
        let done = self.execute(Op::WriteInline { to, data: &command.to_bytes() });
        if done && peer != Peer::Donee(region.owner) {
            let name = self.cx.with_oracle(|o| o.name(self.cx.client).to_owned());
            let why = format!("{name} writes a command of {peer:?}");
            self.cx.with_oracle(|o| o.wrong(Invariant::Privilege, why));
        }
    }

    /// Posts many commands without waiting for any.
    fn flood_commands(&mut self, region: &Region) {
        for _ in 0..8 + self.random.below(16) {
            self.post_any_command(region);
        }
        self.recover();
    }

    /// Posts a command, valid or not, and does not wait for it.
    pub(super) fn post_any_command(&mut self, region: &Region) {
        let slot = self.own_slot(region) + self.random.below(u64::from(region.layout.slots));
        let mut bytes = [0; COMMAND_BYTES];
        bytes.fill_with(|| self.random.bits() as u8);
        bytes[0] = self.random.below(5) as u8;
        bytes[2] = 1 + self.random.below(2) as u8;
        bytes[4..6].copy_from_slice(&region.owner.to_be_bytes());
        let page = if bytes[0] % 2 == 1 { 0 } else { self.any_page(region) };
        bytes[16..24].copy_from_slice(&page.to_be_bytes());
        let to = self.at(region, region.layout.command(slot));
        let op = Op::WriteInline { to, data: &bytes };
        let _ = self.side(0).qp.post_send(&[WorkRequest { id: 5, op, signaled: true }]);
    }

    /// WRITEs a part of a command.
    fn partial_command(&mut self, region: &Region) {
        let (from, len) = (self.random.below(64), 1 + self.random.below(63) as usize);
        let to = self.at(region, region.layout.command(self.own_slot(region)) + from);
        self.execute(Op::WriteInline { to, data: &[1; COMMAND_BYTES][..len] });
    }
}

//! Accesses and commands to the donor engine of scheme `tdmem`, by several peers.
//!
//! The scene plays the NIC: it asks the engine before each part of an access, and calls the engine
//! at the end of a WRITE. The scene decides by a layout of its own, and not by that of the engine,
//! which accesses are permitted.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use pool::schemes::tdmem::command::{ANSWER_BYTES, Answer, COMMAND_BYTES, Command, Operation};
use pool::schemes::tdmem::command::{Status, sequence};
use pool::schemes::tdmem::engine::Engine;
use pool::schemes::tdmem::layout::{Layout, Owner};
use pool::schemes::tdmem::table::Tables;
use pool::schemes::tdmem::{PAGE_BYTES, Random, Tier};
use verbs::{DmaMemory, RegionEngine};

use crate::input::Input;

const PAGE: u64 = PAGE_BYTES as u64;
const OWNERS: u16 = 3;
const SLOTS: u64 = 2;
const PAGES: u32 = 10;
/// Pages of tier `fast`.
const FAST: u32 = 4;
/// Slots of all peers; the last one is that of the memory node's CPU.
const SLOTS_IN_ALL: u64 = OWNERS as u64 * SLOTS + 1;
const ADMINISTRATOR: u64 = 1 << 63;
/// First byte of the commands, and of the pages.
const CONTROLS_AT: u64 = SLOTS_IN_ALL * PAGE;
const PAGES_AT: u64 = CONTROLS_AT + PAGE;
const END: u64 = PAGES_AT + PAGES as u64 * PAGE;
/// Bytes after the region, which no access may change.
const BEYOND: [u8; PAGE_BYTES] = [0x5a; PAGE_BYTES];
/// Maximum number of accesses in a run.
const STEPS: u32 = 400;

/// The engine, and what its pages must be.
struct Scene {
    memory: DmaMemory,
    tables: Arc<Tables>,
    engine: Engine,
    /// Owner and content of the pages that are not free.
    pages: BTreeMap<u32, (Owner, Vec<u8>)>,
}

/// Interprets `bytes` as accesses of several peers, and checks each.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut scene = Scene::new(input.short().into());
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        scene.step(&mut input);
    }
    assert_eq!(scene.bytes(END, PAGE_BYTES), BEYOND, "memory beyond the region");
}

impl Scene {
    fn new(seed: u64) -> Self {
        let layout = Layout { owners: OWNERS, slots: SLOTS as u32, pages: PAGES };
        let memory = DmaMemory::anonymous((END + PAGE) as usize).expect("memory for a region");
        memory.write(END as usize, &BEYOND);
        let tables = Arc::new(Tables::new(PAGES, FAST));
        let random = Random::new(Some(seed)).expect("a seed needs no randomness");
        let engine = Engine::new(memory.clone(), layout, tables.clone(), random);
        Self { memory, tables, engine, pages: BTreeMap::new() }
    }

    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(at as usize, &mut bytes);
        bytes
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let kind = input.byte();
        let tag = tag(input);
        match kind % 8 {
            0..=3 => self.command(tag, input),
            4 => {
                let at = data_at(own_slot(tag, input));
                self.write(tag, at, &[input.byte(); PAGE_BYTES], PAGE_BYTES);
            }
            5 => {
                let (at, step) = (address(input), usize::from(input.byte()) + 1);
                let len = input.number() as usize;
                self.write(tag, at, input.take(len), step);
            }
            6 => {
                let at = address(input);
                self.read(tag, at, input.number().into());
            }
            _ => self.read(tag, page_at(input.byte().into()), PAGE),
        }
    }

    /// A command whose fields are usually valid.
    fn command(&mut self, tag: u64, input: &mut Input<'_>) {
        let [kind, page, unusual] = [input.byte(), input.byte(), input.byte()];
        let page = u32::from(page) % (PAGES + 1);
        let operations = [Operation::Store, Operation::InvalidatePage, Operation::InvalidateArea];
        let tier = if page < FAST { Tier::Fast } else { Tier::Dram };
        let mut command = Command {
            operation: operations[usize::from(kind % 3)],
            tier: tier as u8,
            target_tier: 1 + kind / 3 % 2,
            src_mid: tag as Owner,
            sequence: u64::from(kind) << 32 | u64::from(page),
            remote_addr: if page == PAGES { 0 } else { page_at(page.into()) },
        };
        if tag == ADMINISTRATOR {
            command.src_mid = Owner::from(unusual % 5);
        }
        match unusual % 16 {
            0 => command.src_mid = input.short(),
            1 => command.remote_addr = address(input),
            2 => command.target_tier = input.byte(),
            3 => command.tier = input.byte(),
            _ => {}
        }
        let mut bytes = command.to_bytes();
        if unusual == 0xf4 {
            bytes[usize::from(input.byte() % 64)] = input.byte();
        }
        let step = if unusual == 0xf5 { 7 } else { COMMAND_BYTES };
        self.write(tag, command_at(own_slot(tag, input)), &bytes, step);
    }

    /// A WRITE in steps. A WRITE of which the engine refuses a part ends there, without the call at
    /// its end.
    fn write(&mut self, tag: u64, at: u64, bytes: &[u8], step: usize) {
        for (number, part) in bytes.chunks(step).enumerate() {
            let Some(at) = at.checked_add((number * step) as u64) else { return };
            let is_permitted = self.engine.may_write(tag, at, part.len() as u64);
            assert_eq!(is_permitted, may_write(tag, at, part.len() as u64), "{tag:#x} at {at:#x}");
            if !is_permitted {
                return;
            }
            self.memory.write(at as usize, part);
        }
        self.engine.written(tag, at, bytes.len() as u64);
        let slot = at.wrapping_sub(CONTROLS_AT) / CONTROL;
        let is_command = bytes.len() == COMMAND_BYTES && slots_of(tag).any(|s| command_at(s) == at);
        match is_command {
            true => self.executed(tag, slot, bytes.try_into().expect("64 bytes")),
            false => self.check(),
        }
    }

    fn read(&mut self, tag: u64, at: u64, len: u64) {
        let is_permitted = self.engine.may_read(tag, at, len);
        assert_eq!(is_permitted, self.may_read(tag, at, len), "{tag:#x} at {at:#x}, {len} bytes");
    }

    /// Whether all bytes lie in an answer of the peer, or in a page of the peer.
    fn may_read(&self, tag: u64, at: u64, len: u64) -> bool {
        let answers = slots_of(tag).map(|slot| span(command_at(slot) + 64, ANSWER_BYTES as u64));
        let own = self.pages.iter().filter(|(_, (owner, _))| u64::from(*owner) == tag);
        let pages = own.map(|(page, _)| span(page_at(u64::from(*page)), PAGE));
        answers.chain(pages).any(|place| is_within(at, len, &place))
    }

    /// Checks the answer to a command, and that it changed only what it may.
    fn executed(&mut self, tag: u64, slot: u64, bytes: &[u8; COMMAND_BYTES]) {
        let answer = self.bytes(command_at(slot) + 64, ANSWER_BYTES);
        let answer = Answer::parse(&answer.try_into().expect("64 bytes")).expect("an answer");
        assert_eq!(answer.sequence, sequence(bytes));
        let command = Command::parse(bytes);
        let Some(command) = command.filter(|_| answer.status == Status::Done) else {
            let is_valid = command.is_some_and(|command| self.is_valid(tag, &command));
            assert!(!is_valid || answer.status == Status::Full, "{command:?}: {answer:?}");
            let is_full = answer.status == Status::Full;
            assert!(!is_full || self.pages.len() == PAGES as usize, "{command:?}: {answer:?}");
            return self.check();
        };
        assert!(self.is_valid(tag, &command), "{command:?} of {tag:#x} was executed");
        let named = page_of(command.remote_addr);
        match command.operation {
            Operation::Store => {
                if let Some(replaced) = named {
                    self.pages.remove(&replaced);
                }
                let page = page_of(answer.remote_addr).expect("a STORE names a page");
                let content = self.bytes(data_at(slot), PAGE_BYTES);
                let before = self.pages.insert(page, (tag as Owner, content));
                assert!(before.is_none(), "page {page} was in use");
                self.check();
            }
            Operation::InvalidatePage => {
                self.pages.remove(&named.expect("checked above"));
                self.check();
            }
            // All pages fit into one slice.
            Operation::InvalidateArea => {
                let first = named.unwrap_or(0);
                assert_eq!(answer.remote_addr, 0, "{PAGES} pages are one slice");
                self.pages.retain(|page, (owner, _)| *page < first || *owner != command.src_mid);
                self.check();
            }
        }
    }

    /// Whether a peer may give a command, except for the lack of a free page.
    fn is_valid(&self, tag: u64, command: &Command) -> bool {
        let Command { operation, tier, target_tier, src_mid, remote_addr, .. } = *command;
        let named = page_of(remote_addr);
        let is_own = named.is_some_and(|page| {
            let expected = if page < FAST { Tier::Fast } else { Tier::Dram };
            let owner = self.pages.get(&page).map(|(owner, _)| u64::from(*owner));
            owner == Some(tag) && tier == expected as u8
        });
        let is_requester = u64::from(src_mid) == tag;
        match operation {
            Operation::Store => {
                let is_target = [Tier::Fast as u8, Tier::Dram as u8].contains(&target_tier);
                is_requester && is_target && (remote_addr == 0 || is_own)
            }
            Operation::InvalidatePage => is_requester && is_own,
            Operation::InvalidateArea => {
                let may = is_requester || tag == ADMINISTRATOR;
                may && src_mid != 0 && (remote_addr == 0 || named.is_some())
            }
        }
    }

    /// Checks owner and content of each page: a free page is clear.
    fn check(&self) {
        for page in 0..PAGES {
            let content = self.bytes(page_at(page.into()), PAGE_BYTES);
            match self.pages.get(&page) {
                None => {
                    assert_eq!(self.tables.owner(page), 0, "page {page} is free");
                    assert!(content.iter().all(|byte| *byte == 0), "page {page} is not clear");
                }
                Some((owner, expected)) => {
                    assert_eq!(self.tables.owner(page), *owner, "page {page}");
                    assert!(content == *expected, "page {page} of owner {owner} was changed");
                }
            }
        }
        assert_eq!(self.tables.free() as usize, PAGES as usize - self.pages.len());
        self.tables.audit(|owner| (1..=OWNERS).contains(&owner)).expect("consistent tables");
    }
}

/// Bytes of a command and its answer.
const CONTROL: u64 = (COMMAND_BYTES + ANSWER_BYTES) as u64;

fn data_at(slot: u64) -> u64 {
    slot * PAGE
}

fn command_at(slot: u64) -> u64 {
    CONTROLS_AT + slot * CONTROL
}

fn page_at(page: u64) -> u64 {
    PAGES_AT + page * PAGE
}

/// The page with this address.
fn page_of(address: u64) -> Option<u32> {
    (0..PAGES).find(|page| page_at(u64::from(*page)) == address)
}

/// The slots of the peer whose QP has this tag.
fn slots_of(tag: u64) -> Range<u64> {
    match tag {
        ADMINISTRATOR => SLOTS_IN_ALL - 1..SLOTS_IN_ALL,
        1..=3 => (tag - 1) * SLOTS..tag * SLOTS,
        _ => 0..0,
    }
}

fn span(from: u64, len: u64) -> Range<u64> {
    from..from + len
}

/// Whether `len` bytes lie in `place`. An access of no bytes is one of its first byte.
fn is_within(at: u64, len: u64, place: &Range<u64>) -> bool {
    at >= place.start && at.checked_add(len.max(1)).is_some_and(|end| end <= place.end)
}

/// Whether all bytes lie in a data window or a command of the peer.
fn may_write(tag: u64, at: u64, len: u64) -> bool {
    slots_of(tag).any(|slot| {
        let places = [span(data_at(slot), PAGE), span(command_at(slot), COMMAND_BYTES as u64)];
        places.iter().any(|place| is_within(at, len, place))
    })
}

/// Tag of a peer's QP: usually one that exists.
fn tag(input: &mut Input<'_>) -> u64 {
    match input.byte() % 16 {
        0 => ADMINISTRATOR,
        1 => u64::from(input.number()) << (input.byte() % 64),
        other => u64::from(other) % u64::from(OWNERS) + 1,
    }
}

/// A slot of the peer; if it has none, one of others.
fn own_slot(tag: u64, input: &mut Input<'_>) -> u64 {
    let choice = u64::from(input.byte());
    let own = slots_of(tag);
    match own.end - own.start {
        0 => choice % SLOTS_IN_ALL,
        _ if choice >= 0xf0 => choice % SLOTS_IN_ALL,
        count => own.start + choice % count,
    }
}

/// An address: near the parts of the region, or any.
fn address(input: &mut Input<'_>) -> u64 {
    let [kind, at] = [input.byte(), input.byte()];
    let at = u64::from(at);
    let near = match kind % 8 {
        0 | 1 => data_at(at % SLOTS_IN_ALL),
        2 | 3 => command_at(at % SLOTS_IN_ALL) + 64 * (at / SLOTS_IN_ALL % 2),
        4 | 5 => page_at(at % u64::from(PAGES + 2)),
        6 => u64::from(input.number()) << (at % 64),
        _ => u64::MAX - at,
    };
    match kind / 8 % 4 {
        0 => near.wrapping_add(u64::from(input.byte())),
        1 => near.wrapping_sub(u64::from(input.byte())),
        _ => near,
    }
}

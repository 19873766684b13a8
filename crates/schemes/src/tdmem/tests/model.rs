//! Random and hostile streams of commands, compared with a simple model of the pages.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// The pages that are in use, by address: owner and content.
#[derive(Default)]
struct Model {
    pages: BTreeMap<u64, (Owner, u8)>,
}

const PAGES: u32 = 12;
const FAST: u32 = 4;

/// A step: numbers from which an operation and its arguments follow.
type Step = [u8; 6];

struct Run {
    bench: Bench,
    model: Model,
    /// Addresses that were ever given.
    known: Vec<u64>,
}

impl Run {
    fn new(seed: u64) -> Self {
        let bench = Bench::new(PAGES, FAST, seed);
        Self { bench, model: Model::default(), known: vec![0] }
    }

    fn tier(&self, address: u64) -> Option<Tier> {
        self.bench.layout.page_at(address).map(|page| match page < FAST {
            true => Tier::Fast,
            false => Tier::Dram,
        })
    }

    /// Number of free pages of a tier.
    fn free(&self, tier: Tier) -> u32 {
        let used = self.model.pages.keys().filter(|at| self.tier(**at) == Some(tier)).count();
        let pages = if tier == Tier::Fast { FAST } else { PAGES - FAST };
        pages - used as u32
    }

    /// An address: one that was given at some time, one near it, or any.
    fn address(&self, [which, at, shift, ..]: Step) -> u64 {
        let known = self.known[at as usize % self.known.len()];
        match which % 8 {
            0..=5 => known,
            6 => known.wrapping_add(u64::from(shift)),
            _ => u64::from(shift) * 4096 + u64::from(at),
        }
    }

    /// The result that the model expects of a command of `owner`.
    fn expected(&self, owner: Owner, command: &Command) -> Status {
        if command.src_mid != owner {
            return Status::Invalid;
        }
        let aligned = self.tier(command.remote_addr);
        let named = || match (aligned, self.model.pages.get(&command.remote_addr)) {
            (None, _) => Status::Invalid,
            (_, held) if held.is_none_or(|(holder, _)| *holder != owner) => Status::NotYours,
            (Some(tier), _) if tier as u8 != command.tier => Status::Invalid,
            _ => Status::Done,
        };
        match command.operation {
            Operation::InvalidatePage => named(),
            Operation::InvalidateArea if command.remote_addr == 0 => Status::Done,
            Operation::InvalidateArea => aligned.map_or(Status::Invalid, |_| Status::Done),
            Operation::Store if !(1..=2).contains(&command.target_tier) => Status::Invalid,
            Operation::Store if command.remote_addr != 0 => named(),
            Operation::Store if self.model.pages.len() == PAGES as usize => Status::Full,
            Operation::Store => Status::Done,
        }
    }

    fn step(&mut self, step: Step) {
        let [kind, who, value, sub, ..] = step;
        let owner = 1 + Owner::from(who) % OWNERS;
        let address = self.address([sub, step[4], step[5], 0, 0, 0]);
        match kind % 12 {
            0..=3 => self.command(owner, Operation::Store, address, step),
            4 | 5 => self.command(owner, Operation::InvalidatePage, address, step),
            6 if value < 40 => self.command(owner, Operation::InvalidateArea, address, step),
            7 => self.garbage(owner, step),
            8 => self.foreign_slot(owner, step),
            9 if value < 10 => self.depart(owner),
            _ => self.load(owner, address),
        }
    }

    fn command(&mut self, owner: Owner, operation: Operation, address: u64, step: Step) {
        let [_, who, value, sub, ..] = step;
        let address = if operation == Operation::Store && sub % 2 == 0 { 0 } else { address };
        let mut command = self.bench.command(owner, operation, address);
        match who / 8 {
            0 => command.src_mid = Owner::from(sub) % 5,
            1 => command.target_tier = sub % 4,
            2 => command.tier = sub % 4,
            _ => command.target_tier = 1 + sub % 2,
        }
        let expected = self.expected(owner, &command);
        let (fast, dram) = (self.free(Tier::Fast), self.free(Tier::Dram));
        self.bench.set_data(owner, &[value; PAGE_BYTES]);
        let answer = self.bench.execute(Peer::Donee(owner), &command);
        assert_eq!(answer.status, expected, "{command:?} of {owner}");
        if answer.status != Status::Done {
            assert_eq!((answer.tier, answer.remote_addr), (0, 0));
            return;
        }
        match operation {
            Operation::Store => {
                let tier = self.tier(answer.remote_addr).expect("the address of a page");
                assert_eq!(answer.tier, tier as u8);
                if fast + dram == 0 {
                    assert_eq!(answer.remote_addr, command.remote_addr, "overwritten in place");
                } else {
                    let target = Tier::from_raw(command.target_tier).unwrap();
                    let has_room = if target == Tier::Fast { fast > 0 } else { dram > 0 };
                    assert_eq!(tier == target, has_room, "{target}: {fast} {dram}");
                    assert!(!self.model.pages.contains_key(&answer.remote_addr), "in use");
                    self.model.pages.remove(&command.remote_addr);
                }
                self.model.pages.insert(answer.remote_addr, (owner, value));
                self.known.push(answer.remote_addr);
            }
            Operation::InvalidatePage => _ = self.model.pages.remove(&command.remote_addr),
            // One slice covers all pages.
            Operation::InvalidateArea => {
                let from = command.remote_addr;
                self.model.pages.retain(|at, (holder, _)| *holder != owner || *at < from);
                assert_eq!(answer.remote_addr, 0);
            }
        }
    }

    /// Bytes that are no command, in any place of the peer's slot.
    fn garbage(&mut self, owner: Owner, [_, _, value, sub, at, len]: Step) {
        let peer = Peer::Donee(owner);
        let command = self.bench.layout.command(self.bench.layout.first_slot(peer));
        let bytes = vec![value; usize::from(len).max(1)];
        let at = command + u64::from(at) - u64::from(sub % 64);
        let fits = at >= command && at + bytes.len() as u64 <= command + 64;
        // Operations 1 to 3 are commands, but of a requester that does not exist.
        if self.bench.write(peer, at, &bytes) {
            let second = self.bench.layout.command(self.bench.layout.first_slot(peer) + 1);
            let in_second = at >= second && at + bytes.len() as u64 <= second + 64;
            assert!(fits || in_second, "{} bytes at {at}", bytes.len());
        }
    }

    /// Accesses to the slot of another peer are refused.
    fn foreign_slot(&mut self, owner: Owner, [_, who, value, ..]: Step) {
        let other = 1 + (owner + Owner::from(who) / 4 % (OWNERS - 1)) % OWNERS;
        assert_ne!(other, owner);
        let other = if value % 4 == 0 { Peer::Administrator } else { Peer::Donee(other) };
        let (layout, slot) = (self.bench.layout, self.bench.layout.first_slot(other));
        let command = self.bench.command(owner, Operation::InvalidateArea, 0);
        let peer = Peer::Donee(owner);
        assert!(!self.bench.write(peer, layout.command(slot), &command.to_bytes()));
        assert!(!self.bench.write(peer, layout.data(slot), &[value; 64]));
        assert!(self.bench.read(peer, layout.answer(slot), 64).is_none());
    }

    /// The memory node frees the pages of a departed owner.
    fn depart(&mut self, owner: Owner) {
        self.bench.invalidate_area(Peer::Administrator, owner);
        self.model.pages.retain(|_, (holder, _)| *holder != owner);
    }

    fn load(&self, owner: Owner, address: u64) {
        let expected = match self.model.pages.get(&address) {
            Some((holder, value)) if *holder == owner => Some([*value; PAGE_BYTES]),
            _ => None,
        };
        assert!(self.bench.load(owner, address) == expected, "{owner} loads {address:#x}");
    }

    fn check(&self) {
        self.bench.check();
        for (at, (owner, value)) in &self.model.pages {
            assert_eq!(self.bench.load(*owner, *at), Some([*value; PAGE_BYTES]));
        }
        assert_eq!(self.bench.tables.free(), PAGES - self.model.pages.len() as u32);
    }
}

#[test]
fn random_commands_match_the_model() {
    for seed in 0..3 {
        let mut random = Random::new(Some(seed)).unwrap();
        let mut run = Run::new(seed + 100);
        for i in 0..100_000 {
            run.step(std::array::from_fn(|_| random.below(256) as u8));
            if i % 1000 == 0 {
                run.check();
            }
        }
        run.check();
        assert!(run.known.len() > 10_000, "few stores: {}", run.known.len());
    }
}

proptest! {
    #[test]
    fn any_commands_match_the_model(
        seed: u64,
        steps in proptest::collection::vec(any::<Step>(), 0..200),
    ) {
        let mut run = Run::new(seed);
        steps.into_iter().for_each(|step| run.step(step));
        run.check();
    }
}

//! Kinds of worlds: the operations of the program, and the amount of memory.

use super::program::{Order, Program};
use super::random::Random;
use super::world::Setup;
use crate::config::{Hide, Paths};
use crate::memory::model::Odds;
use crate::pages::Sizes;
use crate::policy::Name;

/// A kind of worlds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One thread uses one page after another, forwards or backwards.
    Sequential,
    /// Threads use random pages.
    Random,
    /// Threads use sets of pages that fit into local memory, or almost.
    WorkingSets,
    /// Threads use pages at a stride.
    Strides,
    /// Threads use the same few pages.
    SamePages,
    /// Threads drop pages, also by raw system calls that the pager does not see.
    Drops,
    /// The pool is full.
    FullPool,
    /// Threads fork.
    Forks,
    /// The limit changes.
    Resizes,
    /// The process shares the bound with another one, and the bound changes.
    Leases,
    /// Threads move pages.
    Moves,
    /// Devices pin pages.
    Pins,
    /// The kernel cannot move pages: they are copied.
    Copies,
    /// The shelf has fewer positions than are wanted.
    SmallShelf,
    /// The process is a promoted child.
    Inherits,
    /// Chunks are compacted.
    Compacts,
    /// All events together.
    All,
}

/// Returns a world of a kind.
pub(crate) fn setup(kind: Kind, seed: u64) -> Setup {
    let mut random = Random::new(seed, 10);
    let limit = random.within(12..=40);
    let window = random.pick(&[2, 4, 8]);
    let sizes = Sizes {
        limit,
        window,
        windows: random.within(1..=3),
        writes: random.within(1..=2),
        positions: 64,
        stock: random.within(2..=6),
        keep: random.within(1..=4),
    };
    let inline = random.once_in(2);
    let mut setup = Setup {
        pages: limit + random.within(2..=2 * limit),
        sizes,
        programs: Vec::new(),
        handlers: if random.once_in(4) { 2 } else { 1 },
        inline,
        odds: Odds {
            pinned: random.pick(&[0, 0, 20]),
            changed: random.pick(&[0, 0, 20]),
            forking: 0,
        },
        copied_run: None,
        chunk_pages: random.pick(&[4, 16, 64]),
        capacity: u32::MAX,
        resizes: 0,
        shared_units: None,
        pins: 0,
        inherits: false,
        policy: Name::default(),
        paths: Paths::Two,
        advised: true,
        alone: false,
        compacts: false,
        sealed: Random::new(seed, 13).once_in(3),
        lie: None,
        stuck_s: None,
        refuses_moves: false,
        hide: Random::new(seed, 14).pick(&[Hide::Off, Hide::Off, Hide::Writes, Hide::Reads]),
        max_steps: 200_000,
    };
    // Every policy with as many seeds.
    setup.policy = Name::ALL[(seed % Name::ALL.len() as u64) as usize];
    setup.paths =
        Random::new(seed, 12).pick(&[Paths::Two, Paths::Two, Paths::Fastswap, Paths::Linux]);
    setup.alone = Random::new(seed, 11).once_in(8);
    setup.compacts = Random::new(seed, 12).once_in(3);
    if setup.compacts {
        setup.chunk_pages = 4;
    }
    let threads = random.within(1..=3);
    let operations = random.within(20..=100);
    let mut program = Program { operations, writes: random.pick(&[1, 2, 4]), ..Program::default() };
    let orders = [
        Order::Random,
        Order::Stride(1),
        Order::Stride(-1),
        Order::Working(limit - 2),
        Order::Working(limit / 2),
    ];
    match kind {
        Kind::Sequential => {
            let program = Program {
                order: random.pick(&[Order::Stride(1), Order::Stride(-1)]),
                operations: 2 * operations,
                ..program
            };
            setup.programs.push(program);
            return setup;
        }
        Kind::Random => {}
        Kind::WorkingSets => {
            program.operations *= 2;
        }
        Kind::Strides => {
            program.operations *= 2;
        }
        Kind::SamePages => {
            setup.pages = random.within(2..=5);
            setup.sizes.limit = random.within(setup.pages.max(3) - 1..=setup.pages + 1);
            setup.sizes.stock = random.within(1..=2);
            setup.sizes.keep = random.within(0..=1);
            program.drops = random.pick(&[0, 6]);
        }
        Kind::Drops => {
            (program.drops, program.raw_drops) = (8, random.pick(&[0, 8]));
        }
        Kind::FullPool => {
            setup.capacity = random.within(0..=3);
            setup.chunk_pages = 4;
            program.drops = random.pick(&[0, 8]);
        }
        Kind::Forks => {
            program.forks = 12;
            program.drops = random.pick(&[0, 12]);
        }
        Kind::Resizes => setup.resizes = random.within(2..=10),
        Kind::Leases => {
            setup.sizes.window = random.pick(&[1, 2]);
            setup.shared_units = Some(random.within(4..=14));
            setup.pages = random.within(20..=80);
            program.operations *= 2;
            program.forks = random.pick(&[0, 0, 24]);
            program.drops = random.pick(&[0, 12]);
        }
        Kind::Moves => {
            program.moves = 6;
            program.raw_drops = random.pick(&[0, 12]);
        }
        Kind::Pins => setup.pins = random.within(4..=20),
        Kind::Copies => {
            setup.copied_run = Some(random.within(1..=8));
            setup.odds = Odds { changed: 20, ..Odds::default() };
            program.drops = random.pick(&[0, 12]);
            program.forks = random.pick(&[0, 16]);
        }
        Kind::SmallShelf => {
            setup.sizes.limit = random.within(90..=110);
            setup.sizes.stock = random.within(30..=60);
            setup.sizes.keep = random.within(20..=60);
            setup.pages = setup.sizes.limit + random.within(10..=60);
            program.operations = 150;
            program.writes = 1;
        }
        Kind::Inherits => {
            setup.inherits = true;
            program.drops = random.pick(&[0, 12]);
            program.moves = random.pick(&[0, 12]);
            program.forks = random.pick(&[0, 16]);
        }
        Kind::Compacts => {
            setup.compacts = true;
            setup.chunk_pages = random.pick(&[2, 4, 8]);
            setup.pages = 4 * limit;
            program.operations *= 2;
            program.writes = 1;
            program.drops = random.pick(&[4, 8]);
            program.forks = random.pick(&[0, 16]);
        }
        Kind::All => {
            setup.inherits = random.once_in(4);
            let mut rare = || random.pick(&[0, 12, 40]);
            program.drops = rare();
            program.raw_drops = rare();
            program.moves = rare();
            // The child of a fork sees the old content of a page that was dropped by a raw system
            // call.
            program.forks = if program.raw_drops == 0 { rare() } else { 0 };
            setup.resizes = random.below(6);
            setup.pins = random.below(10);
            setup.chunk_pages = 4;
            setup.capacity = random.pick(&[2, 8, u32::MAX]);
        }
    }
    for _ in 0..threads {
        let order = match kind {
            Kind::Random => Order::Random,
            Kind::WorkingSets => random.pick(&[
                Order::Working(limit / 2),
                Order::Working(limit - 4),
                Order::Working(limit + 2),
            ]),
            Kind::Strides => Order::Stride(random.pick(&[2, 3, 5, -2, -3])),
            Kind::SmallShelf => random.pick(&[Order::Random, Order::Stride(1)]),
            _ => random.pick(&orders),
        };
        setup.programs.push(Program { order, ..program.clone() });
    }
    setup.odds.forking = random.pick(&[0, 0, 20]);
    setup
}

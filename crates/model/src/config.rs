//! The explored configurations: small pools, few clients, short programs.

/// An operation of a client. A number names an earlier operation of the client's program.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    /// Request a chunk.
    Allocate,
    /// Free the chunk of operation n.
    Free(u8),
    /// Write to the chunk of operation n.
    Use(u8),
    /// Invalid: free the chunk of operation n again.
    FreeTwice(u8),
    /// Invalid: free an entry regardless of its owner; the entry may lie beyond the table.
    FreeEntry(u32),
    /// Invalid: write with the key of operation n's chunk after freeing the chunk.
    UseStale(u8),
    /// Invalid: write with the key that another client was granted last.
    Steal(u8),
    /// Invalid: request a chunk for a QP of another owner.
    AllocateFor(WrongQp),
    /// Invalid: request a chunk with a reply address that cannot be written.
    AllocateUnwritable,
}

/// A QP that a request must not name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WrongQp {
    /// The next client's access QP.
    Foreign,
    /// A QP that does not exist.
    Nonexistent,
    /// The next client's free worker.
    Worker,
}

impl Op {
    /// Returns whether the pool's own client also performs this operation.
    pub fn is_honest(self) -> bool {
        matches!(self, Op::Allocate | Op::Free(_) | Op::Use(_))
    }
}

/// A configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Name of the configuration.
    pub name: &'static str,
    /// The program of each client.
    pub clients: Vec<Vec<Op>>,
    /// Chunks of the pool.
    pub chunks: u32,
    /// Access QPs of a group.
    pub lanes: u32,
    /// Requests that each client may have in flight: a power of two, the number of chain instances.
    pub in_flight: u32,
    /// The client whose process may end at any moment.
    pub crash: Option<usize>,
    /// Explore commuting actions alone ([`crate::explore()`] visits fewer states).
    pub reduce: bool,
    /// States that an ordinary test run visits; 0 for configurations of full runs only.
    pub quick: u64,
}

use Op::*;

/// Allocate, write, free.
const ROUND: &[Op] = &[Allocate, Use(0), Free(0)];
/// Allocate and free.
const BARE: &[Op] = &[Allocate, Free(0)];
/// Allocate and keep.
const ONE: &[Op] = &[Allocate];
/// Allocate two chunks, then free both.
const PAIR: &[Op] = &[Allocate, Allocate, Free(0), Free(1)];

fn config(
    name: &'static str,
    clients: &[&[Op]],
    chunks: u32,
    lanes: u32,
    in_flight: u32,
) -> Config {
    Config {
        name,
        clients: clients.iter().map(|p| p.to_vec()).collect(),
        chunks,
        lanes,
        in_flight,
        crash: None,
        reduce: true,
        quick: u64::MAX,
    }
}

impl Config {
    fn full(self) -> Self {
        Self { quick: 0, ..self }
    }

    /// Too large for an ordinary run, which visits only some of the states.
    fn in_part(self) -> Self {
        Self { quick: 12_000, ..self }
    }

    fn unreduced(self) -> Self {
        Self { reduce: false, ..self }
    }

    fn crash(self, client: usize) -> Self {
        Self { crash: Some(client), ..self }
    }
}

/// Returns all configurations.
pub fn all() -> Vec<Config> {
    let wrong = |wrong| vec![AllocateFor(wrong), Free(0)];
    let twice: &[Op] = &[Allocate, Free(0), FreeTwice(0)];
    let unwritable: &[Op] = &[AllocateUnwritable, Allocate, Free(1)];
    let mut all = vec![
        // All clients are honest.
        config("one client", &[ROUND], 1, 2, 1),
        config("one client, unreduced", &[ROUND], 1, 2, 1).unreduced(),
        config("one client, two in flight", &[PAIR], 2, 1, 2),
        config("one client, two in flight, unreduced", &[PAIR], 2, 1, 2).unreduced(),
        config("one chunk for two", &[BARE, BARE], 1, 1, 1),
        config("one chunk for two, unreduced", &[BARE, BARE], 1, 1, 1).unreduced().full(),
        config("two clients", &[ROUND, ROUND], 2, 1, 1).full(),
        config("two clients, two lanes", &[ROUND, ROUND], 2, 2, 1).full(),
        config("two in flight", &[PAIR, BARE], 2, 1, 2).full(),
        config("two in flight each", &[PAIR, PAIR], 3, 1, 2).full(),
        config("two in flight each, two lanes", &[PAIR, PAIR], 4, 2, 2).full(),
        config("one chunk for three", &[ONE, ONE, BARE], 1, 1, 1).full(),
        config("two chunks for three", &[BARE, BARE, BARE], 2, 1, 1).full(),
        config("three clients, two lanes", &[ROUND, ROUND, ROUND], 3, 2, 1).full(),
        // One client crashes.
        config("crash alone", &[ROUND], 1, 1, 1).crash(0),
        config("crash beside another", &[ONE, ONE], 2, 1, 1).crash(0).full(),
        config("crash over the last chunk", &[BARE, BARE], 1, 1, 1).crash(0).full(),
        config("crash, two lanes", &[ROUND, BARE], 2, 2, 1).crash(0).full(),
        config("crash, two in flight", &[PAIR, BARE], 2, 1, 2).crash(0).full(),
        config("crash among three", &[BARE, BARE, BARE], 2, 1, 1).crash(0).full(),
        // One client sends invalid requests.
        config("foreign free", &[BARE, &[FreeEntry(0)]], 1, 1, 1).in_part(),
        config("foreign free, in the middle", &[ROUND, &[FreeEntry(0), Allocate]], 2, 1, 1).full(),
        config("foreign frees, two in flight", &[BARE, &[FreeEntry(0), FreeEntry(1)]], 2, 1, 2)
            .full(),
        config("double free", &[twice], 1, 1, 1).in_part(),
        config("double free beside another", &[BARE, twice], 1, 1, 1).full(),
        config("free while a free is in flight", &[twice], 2, 1, 2).in_part(),
        config("free while a free is in flight, beside", &[BARE, twice], 2, 1, 2).full(),
        config("index of the null entry", &[ONE, &[FreeEntry(1), Allocate]], 1, 1, 1).in_part(),
        config("index beyond the table", &[ONE, &[FreeEntry(0xff_ffff), Allocate]], 1, 1, 1)
            .in_part(),
        config("unwritable reply", &[unwritable], 2, 1, 1).in_part(),
        config("unwritable reply beside another", &[ONE, unwritable], 2, 1, 1).full(),
        config("unwritable reply, crash", &[ONE, unwritable], 2, 1, 1).crash(1).full(),
        config("stale key", &[ONE, &[Allocate, Free(0), UseStale(0)]], 1, 1, 1),
        config("stolen key", &[ROUND, &[Steal(0)]], 1, 1, 1),
        config("stolen key, own chunk", &[ROUND, &[Allocate, Steal(0), Free(0)]], 2, 1, 1).full(),
        config("foreign free and crash", &[BARE, &[FreeEntry(0), Allocate]], 2, 1, 1)
            .crash(0)
            .full(),
    ];
    for (name, lie) in [
        ("wrong QP: another client's", WrongQp::Foreign),
        ("wrong QP: nonexistent", WrongQp::Nonexistent),
        ("wrong QP: a worker", WrongQp::Worker),
    ] {
        all.push(config(name, &[ONE, &wrong(lie)], 2, 1, 1));
    }
    all
}

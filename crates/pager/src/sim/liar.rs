//! A memory node that lies: one READ returns other bytes than were written last (TDMEM §3).
//!
//! With encryption, the world must end with status 119 as soon as the lie arrives. The oracle sees
//! to it that no byte of the lie is used. The control without encryption shows wrong content.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Once;

use super::random::Random;
use super::{Kind, RandomOrder, kinds, world};
use crate::config::EXIT_TAMPERED;
use crate::memory::model::{Bytes, WORDS};

/// A page of a chunk.
type Address = (u32, u32);

/// The liar, with all that was ever written.
pub(super) struct Liar {
    /// READs until the lie.
    left: u64,
    random: Random,
    written: BTreeMap<Address, Vec<Box<Bytes>>>,
}

impl Liar {
    pub(super) fn new(read: u64, random: Random) -> Self {
        Self { left: read, random, written: BTreeMap::new() }
    }

    /// Notes a WRITE.
    pub(super) fn note(&mut self, at: Address, content: &Bytes) {
        self.written.entry(at).or_default().push(Box::new(content.clone()));
    }

    /// Returns the answer to a READ of `content`. `frame` is the frame as it is now.
    pub(super) fn answer(
        &mut self,
        at: Address,
        content: Box<Bytes>,
        frame: Box<Bytes>,
    ) -> Box<Bytes> {
        let Some(left) = self.left.checked_sub(1) else { return content };
        self.left = left;
        if left > 0 {
            return content;
        }
        let lie = self.lie(at, &content, frame);
        // Another version may have the same bytes, if nothing is encrypted. Then the next READ
        // lies.
        self.left = u64::from(*lie == *content);
        lie
    }

    fn lie(&mut self, at: Address, content: &Bytes, frame: Box<Bytes>) -> Box<Bytes> {
        let mut lie = Box::new(content.clone());
        let word = self.random.below(WORDS as u32) as usize;
        match self.random.below(6) {
            0 => lie.0[word] ^= 1 << self.random.below(64),
            1 => lie.0.fill(0),
            // Truncated.
            2 => lie.0[word..].fill(0),
            // Nothing arrives, although the transfer is complete.
            3 => lie = frame,
            // Another page.
            4 => {
                let others: Vec<_> =
                    self.written.iter().filter(|(other, _)| **other != at).collect();
                if !others.is_empty() {
                    let (_, versions) = self.random.pick(&others);
                    lie = versions.last().expect("written at least once").clone();
                }
            }
            // An older version of the page.
            _ => {
                if let Some(versions) = self.written.get(&at) {
                    lie = versions[self.random.below(versions.len() as u32) as usize].clone();
                }
            }
        }
        lie
    }
}

/// Result of a world with a lie.
enum Outcome {
    /// The world has ended without the READ that was to be a lie, or without its effect.
    Unharmed,
    /// The process ended itself.
    Ended,
    /// Another error, such as wrong content.
    Wrong(String),
}

thread_local! {
    /// True while a panic of this thread is expected.
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Calls `run` without a message and a backtrace for each panic, which would take most of the time.
fn quietly<T>(run: impl FnOnce() -> T) -> T {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !IS_QUIET.get() {
                before(panic);
            }
        }));
    });
    IS_QUIET.set(true);
    let result = run();
    IS_QUIET.set(false);
    result
}

fn run(kind: Kind, seed: u64, sealed: bool) -> Outcome {
    let lie = Some(Random::new(seed, 21).within(1..=40).into());
    let setup = world::Setup { sealed, lie, ..kinds::setup(kind, seed) };
    match quietly(|| world::run(&setup, seed, &mut RandomOrder::new(seed))) {
        Ok(_) => Outcome::Unharmed,
        Err(error) if error.contains(&format!("status {EXIT_TAMPERED}")) => Outcome::Ended,
        Err(error) => Outcome::Wrong(error),
    }
}

const KINDS: [Kind; 6] =
    [Kind::Random, Kind::Sequential, Kind::Forks, Kind::Moves, Kind::Compacts, Kind::All];

/// Environment variable of a process that runs lying worlds: `sealed` or `plain`.
const LIES: &str = "GRANARY_LIES";
/// Worlds of one process.
const BATCH: u64 = 250;

/// Numbers of worlds by their outcome.
#[derive(Clone, Copy, Debug, Default)]
struct Outcomes {
    ended: u64,
    wrong: u64,
}

/// Runs lying worlds in processes of their own: a world that ends early leaves its memory behind.
fn in_processes(seeds: Range<u64>, lies: &str) -> Outcomes {
    let mut sum = Outcomes::default();
    for from in seeds.clone().step_by(BATCH as usize) {
        let part = from..seeds.end.min(from + BATCH);
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["sim::liar::lying_worlds", "--exact", "--ignored", "--nocapture"])
            .env("GRANARY_PAGER_SEEDS", format!("{}..{}", part.start, part.end))
            .env(LIES, lies)
            .output()
            .unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{part:?}: {stdout}{stderr}");
        let number = |name: &str| -> u64 {
            let number = stdout.split_whitespace().find_map(|word| word.strip_prefix(name));
            number.unwrap_or_else(|| panic!("{stdout}{stderr}")).parse().unwrap()
        };
        sum.ended += number("ended=");
        sum.wrong += number("wrong=");
    }
    sum
}

#[test]
#[ignore = "a lie may end its process: the other tests of this file start it, in make test too"]
fn lying_worlds() {
    let is_sealed = std::env::var(LIES).expect("set by the other tests") == "sealed";
    let mut outcomes = Outcomes::default();
    for seed in super::seeds() {
        let kind =
            if is_sealed { KINDS[(seed % KINDS.len() as u64) as usize] } else { Kind::Random };
        match run(kind, seed, is_sealed) {
            Outcome::Unharmed => {}
            Outcome::Ended => outcomes.ended += 1,
            Outcome::Wrong(error) if is_sealed => panic!("{kind:?} seed {seed}: {error}"),
            Outcome::Wrong(_) => outcomes.wrong += 1,
        }
    }
    let Outcomes { ended, wrong } = outcomes;
    println!(" ended={ended} wrong={wrong} ");
}

#[test]
fn altered_sealed_page_ends_the_process_before_it_is_used() {
    let outcomes = in_processes(super::seeds(), "sealed");
    assert!(outcomes.ended >= 300, "{outcomes:?}");
}

#[test]
fn altered_plain_page_is_used() {
    let outcomes = in_processes(0..200, "plain");
    assert!(outcomes.wrong >= 50 && outcomes.ended == 0, "{outcomes:?}");
}

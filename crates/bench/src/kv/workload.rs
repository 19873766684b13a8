//! Workloads of key-value stores: which keys are used, in which order, for what.
//!
//! A workload is divided into *lanes*: threads of a store, or connections to a server. Each lane
//! generates its own requests from a seed, without state that it shares with other lanes. The keys
//! of the loaded data are numbered from 0, and a lane inserts keys that no other lane inserts.

use std::sync::Arc;

use units::Random;

use super::zipf::Zipf;

/// Bytes of a key.
pub const KEY_BYTES: usize = 16;
/// Percent of the keys that `deleterandom` deletes, as in OneSidedMW §6.1.
pub const DELETED_PERCENT: u64 = 90;

/// A workload: `db_bench`'s names for single kinds of requests, YCSB's for mixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Inserts each key once, in random order.
    FillSync,
    /// Writes keys drawn at random, so that some keys are written several times and some never.
    FillRandom,
    /// Writes keys that are there, drawn at random.
    Overwrite,
    /// Reads keys drawn at random.
    ReadRandom,
    /// Deletes 90 % of the keys, in random order.
    DeleteRandom,
    /// YCSB A: 50 % reads, 50 % updates; few keys are used often (Zipf).
    YcsbA,
    /// YCSB B: 95 % reads, 5 % updates; Zipf.
    YcsbB,
    /// YCSB C: reads; Zipf.
    YcsbC,
    /// YCSB D: 95 % reads, mostly of the newest keys; 5 % inserts.
    YcsbD,
    /// YCSB F: 50 % reads, 50 % reads whose value is changed and written; Zipf.
    YcsbF,
    /// OneSidedMW's mix (§6.1): 50 % reads, 50 % inserts.
    Mixed,
}

/// The state of the keys that a workload starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// No key is there.
    None,
    /// All keys are there.
    All,
    /// Some keys are there.
    Some,
}

impl Workload {
    /// All workloads, in the order in which they run.
    pub const ALL: [Self; 10] = [
        Self::FillSync,
        Self::FillRandom,
        Self::Overwrite,
        Self::ReadRandom,
        Self::YcsbA,
        Self::YcsbB,
        Self::YcsbC,
        Self::YcsbD,
        Self::YcsbF,
        Self::DeleteRandom,
    ];

    /// Name on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::FillSync => "fillsync",
            Self::FillRandom => "fillrandom",
            Self::Overwrite => "overwrite",
            Self::ReadRandom => "readrandom",
            Self::DeleteRandom => "deleterandom",
            Self::YcsbA => "ycsb-a",
            Self::YcsbB => "ycsb-b",
            Self::YcsbC => "ycsb-c",
            Self::YcsbD => "ycsb-d",
            Self::YcsbF => "ycsb-f",
            Self::Mixed => "mixed",
        }
    }

    /// The keys that must be there before.
    pub fn needs(self) -> Keys {
        match self {
            Self::FillSync | Self::FillRandom => Keys::None,
            _ => Keys::All,
        }
    }

    /// The keys that are there after, for a workload that began with the keys that it needs.
    pub fn leaves(self) -> Keys {
        match self {
            Self::FillRandom | Self::DeleteRandom => Keys::Some,
            _ => Keys::All,
        }
    }

    /// Number of operations over `keys` keys; `operations` of a workload without a number of its
    /// own.
    pub fn operations(self, keys: u64, operations: u64) -> u64 {
        match self {
            Self::FillSync => keys,
            Self::DeleteRandom => keys * DELETED_PERCENT / 100,
            _ => operations,
        }
    }

    /// Most keys that exist at any time, over `keys` keys and with `operations` operations.
    pub fn keys_max(self, keys: u64, operations: u64) -> u64 {
        match self {
            Self::YcsbD | Self::Mixed => keys + operations,
            _ => keys,
        }
    }

    /// Percent of reads, and the request that is no read.
    fn mix(self) -> (u64, Kind) {
        match self {
            Self::FillSync => (0, Kind::Insert),
            Self::FillRandom | Self::Overwrite => (0, Kind::Update),
            Self::ReadRandom | Self::YcsbC => (100, Kind::Read),
            Self::DeleteRandom => (0, Kind::Delete),
            Self::YcsbA => (50, Kind::Update),
            Self::YcsbB => (95, Kind::Update),
            Self::YcsbD => (95, Kind::Insert),
            Self::YcsbF => (50, Kind::Modify),
            Self::Mixed => (50, Kind::Insert),
        }
    }

    fn is_skewed(self) -> bool {
        matches!(self, Self::YcsbA | Self::YcsbB | Self::YcsbC | Self::YcsbD | Self::YcsbF)
    }
}

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reads a value.
    Read,
    /// Writes a key that is not there.
    Insert,
    /// Writes a key that may be there.
    Update,
    /// Reads a value, and writes another value that depends on the first.
    Modify,
    /// Deletes a key.
    Delete,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 5] = [Self::Read, Self::Insert, Self::Update, Self::Modify, Self::Delete];

    /// Prefix of the metrics of this kind.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Insert => "insert",
            Self::Update => "update",
            Self::Modify => "modify",
            Self::Delete => "delete",
        }
    }
}

/// A request: its kind, and the number of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Kind of the request.
    pub kind: Kind,
    /// Number of the key.
    pub key: u64,
}

/// The bytes of a key: 16 hexadecimal digits that differ for each number.
pub fn key_bytes(number: u64) -> [u8; KEY_BYTES] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let hashed = mixed(number);
    std::array::from_fn(|at| DIGITS[(hashed >> (60 - 4 * at)) as usize & 15])
}

/// A bijection of 64-bit numbers (the finalizer of SplitMix64).
fn mixed(number: u64) -> u64 {
    Random::new(number).bits()
}

/// Parameters of a workload that all its lanes share.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The workload.
    pub workload: Workload,
    /// Keys of the loaded data, above zero.
    pub keys: u64,
    /// Operations of all lanes, for a workload without a number of its own.
    pub operations: u64,
    /// Bytes of a value.
    pub value_bytes: usize,
    /// Seed of all random choices.
    pub seed: u64,
    zipf: Option<Arc<Zipf>>,
}

impl Plan {
    /// A plan. Takes time in proportion to `keys` for workloads with a Zipf distribution.
    pub fn new(
        workload: Workload,
        keys: u64,
        operations: u64,
        value_bytes: usize,
        seed: u64,
    ) -> Self {
        assert!(keys > 0, "a workload has keys");
        let zipf = workload.is_skewed().then(|| Arc::new(Zipf::new(keys)));
        Self { workload, keys, operations, value_bytes, seed, zipf }
    }

    /// The plan that loads the keys of this plan.
    pub fn loading(&self) -> Self {
        Self { workload: Workload::FillSync, zipf: None, ..self.clone() }
    }

    /// The requests of lane `lane` of `lanes`.
    pub fn lane(&self, lane: u32, lanes: u32) -> Lane {
        let (lane, lanes) = (u64::from(lane), u64::from(lanes));
        let share = |all: u64| (all + lanes - 1 - lane) / lanes;
        let operations = self.workload.operations(self.keys, self.operations);
        Lane {
            workload: self.workload,
            keys: self.keys,
            zipf: self.zipf.clone(),
            // Insertions and deletions have different orders, so that the deleted keys are a
            // random part of any keys that were inserted one after the other.
            order: Permutation::new(self.keys, self.seed ^ ((self.workload as u64) << 32)),
            random: Random::stream(self.seed ^ (self.workload as u64), lane as u32),
            lane,
            lanes,
            left: share(operations),
            done: 0,
            inserted: share(self.keys),
        }
    }
}

/// The requests of one lane.
#[derive(Clone, Debug)]
pub struct Lane {
    workload: Workload,
    keys: u64,
    zipf: Option<Arc<Zipf>>,
    order: Permutation,
    random: Random,
    lane: u64,
    lanes: u64,
    left: u64,
    done: u64,
    /// Keys of this lane that exist: those with the numbers `lane + i * lanes`.
    inserted: u64,
}

impl Iterator for Lane {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        self.left = self.left.checked_sub(1)?;
        let (reads, other) = self.workload.mix();
        let is_read = reads == 100 || (reads > 0 && self.random.below(100) < reads);
        let kind = if is_read { Kind::Read } else { other };
        Some(Request { kind, key: self.key(kind) })
    }
}

impl Lane {
    fn key(&mut self, kind: Kind) -> u64 {
        match (self.workload, kind) {
            (Workload::FillSync | Workload::DeleteRandom, _) => {
                self.done += 1;
                self.order.at(self.lane + (self.done - 1) * self.lanes)
            }
            (_, Kind::Insert) => {
                self.inserted += 1;
                self.own(self.inserted - 1)
            }
            // A lane without keys of its own reads a key of another lane.
            (Workload::YcsbD, _) if self.inserted > 0 => {
                let zipf = self.zipf.as_ref().expect("the workload is skewed");
                let age = zipf.draw(&mut self.random) % self.inserted;
                self.own(self.inserted - 1 - age)
            }
            (Workload::Mixed, _) if self.inserted > 0 => {
                let at = self.random.below(self.inserted);
                self.own(at)
            }
            _ => match &self.zipf {
                Some(zipf) => mixed(zipf.draw(&mut self.random)) % self.keys,
                None => self.random.below(self.keys),
            },
        }
    }

    fn own(&self, at: u64) -> u64 {
        self.lane + at * self.lanes
    }
}

/// A pseudo-random order of the numbers from 0 to below a length.
///
/// A Feistel network of four rounds permutes the numbers below a power of four; numbers beyond the
/// length are permuted again.
#[derive(Clone, Copy, Debug)]
struct Permutation {
    length: u64,
    half_bits: u32,
    seed: u64,
}

impl Permutation {
    fn new(length: u64, seed: u64) -> Self {
        let bits = u64::BITS - length.saturating_sub(1).leading_zeros();
        Self { length, half_bits: bits.div_ceil(2).max(1), seed }
    }

    /// The number at a position below the length.
    fn at(&self, position: u64) -> u64 {
        let mut number = position;
        loop {
            number = self.permuted(number);
            if number < self.length {
                return number;
            }
        }
    }

    fn permuted(&self, number: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (number >> self.half_bits, number & mask);
        for round in 0..4 {
            let f = mixed(self.seed ^ right ^ round << 56);
            (left, right) = (right, (left ^ f) & mask);
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn all(plan: &Plan, lanes: u32) -> Vec<Request> {
        (0..lanes).flat_map(|lane| plan.lane(lane, lanes)).collect()
    }

    proptest! {
        #[test]
        fn permutation_has_each_number_once(length in 1_u64..3000, seed: u64) {
            let order = Permutation::new(length, seed);
            let numbers: HashSet<u64> = (0..length).map(|at| order.at(at)).collect();
            prop_assert_eq!(numbers.len() as u64, length);
            prop_assert!(numbers.iter().all(|number| *number < length));
        }

        #[test]
        fn fills_and_deletions_use_each_key_once(keys in 1_u64..500, lanes in 1_u32..9) {
            for workload in [Workload::FillSync, Workload::DeleteRandom] {
                let requests = all(&Plan::new(workload, keys, 7, 10, 1), lanes);
                let distinct: HashSet<u64> = requests.iter().map(|r| r.key).collect();
                prop_assert_eq!(distinct.len(), requests.len());
                prop_assert_eq!(requests.len() as u64, workload.operations(keys, 7));
            }
        }

        /// A lane reads a key of its own only after it has inserted the key.
        #[test]
        fn reads_find_their_keys(keys in 1_u64..300, lanes in 1_u32..5, seed: u64) {
            for workload in [Workload::YcsbD, Workload::Mixed, Workload::ReadRandom] {
                let plan = Plan::new(workload, keys, 500, 10, seed);
                for lane in 0..lanes {
                    let mut there: HashSet<u64> = (0..keys).collect();
                    for request in plan.lane(lane, lanes) {
                        match request.kind {
                            Kind::Insert => prop_assert!(there.insert(request.key)),
                            _ => prop_assert!(there.contains(&request.key)),
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn mixes_have_their_shares() {
        for (workload, reads) in
            [(Workload::YcsbA, 50), (Workload::YcsbB, 95), (Workload::YcsbD, 95)]
        {
            let requests = all(&Plan::new(workload, 1000, 20_000, 10, 3), 4);
            assert_eq!(requests.len(), 20_000);
            let read = requests.iter().filter(|r| r.kind == Kind::Read).count() / 200;
            assert!(read.abs_diff(reads) <= 1, "{workload:?}: {read} %");
        }
    }

    #[test]
    fn deleted_keys_are_a_random_part_of_neighbours() {
        let deleted: HashSet<u64> = all(&Plan::new(Workload::DeleteRandom, 40_000, 0, 10, 5), 8)
            .iter()
            .map(|request| request.key)
            .collect();
        // Keys in the order of their insertion: four of them share a chunk.
        let order = Plan::new(Workload::FillSync, 40_000, 0, 10, 5).lane(0, 1).order;
        let empty = (0..10_000)
            .filter(|chunk| (0..4).all(|at| deleted.contains(&order.at(4 * chunk + at))))
            .count();
        let share = empty as f64 / 10_000.0;
        assert!((share - 0.9_f64.powi(4)).abs() < 0.02, "{share}");
    }

    #[test]
    fn keys_have_distinct_bytes() {
        let distinct: HashSet<_> = (0..10_000).map(key_bytes).collect();
        assert_eq!(distinct.len(), 10_000);
    }
}

//! Replacement policies: which resident pages are evicted first.
//!
//! A policy sees page faults only. Hits on resident pages are invisible without the kernel's
//! accessed bits, so the usual cache policies do not apply unchanged. A *soft* fault maps a page
//! back that was evicted but is still held on this machine; a *hard* fault reads it from the pool.
//! Both cost about the same, so a policy must not evict pages only to learn whether they are used.
//!
//! | name | order of eviction |
//! | --- | --- |
//! | `fifo` | first in, first out |
//! | `segmented` | `fifo`, with an eighth of the memory for evicted pages (Turner and Levy 1981) |
//! | `random` | a random run |
//! | `bip` | bimodal insertion (Qureshi et al. 2007): newly arrived pages first, except 1 in 64 |
//! | `stream` | the window that a sequential stream has left, else a random run |
//! | `s3fifo` | S3-FIFO (Yang et al. 2023): a small queue for new pages, a main queue |
//! | `duel` | classes of pages try the rules; all other pages follow the cheapest ([`duel`]) |
//! | `contest` | a sample of victims by each rule shows whose are needed last ([`contest`]) |
//!
//! All calls name runs of at most [`RUN_PAGES`] pages, because the kernel moves a run for little
//! more than a page. A policy is deterministic: the same calls with the same seed give the same
//! victims. It makes no system call, reads no clock, and allocates only when it is made and while
//! more pages are resident than the limit allows.
//!
//! A policy holds exactly the pages that are resident and are not being taken out. A page may
//! arrive while the policy holds the page; then the page keeps its place.

pub mod contest;
#[cfg(test)]
pub(crate) mod counted;
pub mod duel;
mod queues;
pub mod rules;
mod runs;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::str::FromStr;

pub use self::contest::Contest;
pub use self::duel::Duel;
pub use self::rules::{Rule, RuleQueue};

/// The largest number of pages of a run.
pub const RUN_PAGES: u32 = 64;

/// Consecutive pages of the region: 1 to [`RUN_PAGES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Number of the first page.
    pub start: u32,
    /// Number of pages.
    pub pages: u32,
}

impl Run {
    /// Returns the page behind the run.
    pub fn end(self) -> u32 {
        self.start + self.pages
    }
}

/// A replacement policy. The module documentation has the rules for callers.
pub trait Policy {
    /// Adds pages that became resident for the first time, as zeros.
    fn arrived(&mut self, run: Run);

    /// Adds pages that were read from the pool. More than one page means that a stream was read
    /// ahead. `recent` is true if as many pages as the limit have not yet been evicted since these
    /// were.
    fn refetched(&mut self, run: Run, recent: bool);

    /// Adds pages that were evicted and mapped back without I/O.
    fn restored(&mut self, run: Run);

    /// Takes back victims that cannot be evicted now: they are in use, or a device has pinned them.
    /// They go to the end of a queue, so that other pages are named before them.
    fn returned(&mut self, run: Run);

    /// Reports pages that a sequential stream has left, and does not look back at any more. They
    /// may be resident or not.
    fn left_behind(&mut self, _run: Run) {}

    /// Makes pages the next victims, because the program has advised that it does not need them
    /// soon. They may be resident or not.
    fn unneeded(&mut self, run: Run);

    /// Removes pages that the program has dropped or has advised to take out.
    fn removed(&mut self, run: Run);

    /// Takes the next victims out of the policy: a run of at most `max` pages. `None` if the policy
    /// holds no page. `max` must not be 0.
    fn victim_run(&mut self, max: u32) -> Option<Run>;

    /// Returns the number of pages that the policy holds.
    fn pages(&self) -> u32;

    /// Returns true if the policy holds the page.
    fn holds(&self, page: u32) -> bool;
}

/// The name of a policy, as in `GRANARY_POLICY=NAME`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Name {
    /// First in, first out.
    Fifo,
    /// First in, first out, with more memory for evicted pages.
    Segmented,
    /// Random runs.
    Random,
    /// Bimodal insertion.
    Bip,
    /// Behind a stream the window that the stream has left, else random.
    Stream,
    /// S3-FIFO.
    S3Fifo,
    /// Classes of pages try the rules.
    Duel,
    /// Victims of all rules are compared. The policy of least cost on the recorded traces
    /// (`docs/results/policy.md`).
    #[default]
    Contest,
}

impl Name {
    /// All policies.
    pub const ALL: [Self; 8] = [
        Self::Fifo,
        Self::Segmented,
        Self::Random,
        Self::Bip,
        Self::Stream,
        Self::S3Fifo,
        Self::Duel,
        Self::Contest,
    ];

    /// Returns the name as text.
    pub fn text(self) -> &'static str {
        match self {
            Self::Fifo => "fifo",
            Self::Segmented => "segmented",
            Self::Random => "random",
            Self::Bip => "bip",
            Self::Stream => "stream",
            Self::S3Fifo => "s3fifo",
            Self::Duel => "duel",
            Self::Contest => "contest",
        }
    }

    /// Returns how many pages of the limit hold evicted pages until they are written and reused.
    pub fn shelf_pages(self, limit: u32) -> u32 {
        let share = if self == Self::Segmented { 8 } else { 64 };
        (limit / share).max(1)
    }

    /// Creates the policy for at most `limit` resident pages with numbers below `end`.
    ///
    /// # Errors
    /// Errors of mapping memory.
    pub fn policy(self, limit: u32, end: u32, seed: u64) -> io::Result<AnyPolicy> {
        let rule = |rule| RuleQueue::new(rule, limit, end, seed).map(AnyPolicy::Rule);
        match self {
            Self::Fifo | Self::Segmented => rule(Rule::Fifo),
            Self::Random => rule(Rule::Random),
            Self::Bip => rule(Rule::Bip),
            Self::Stream => rule(Rule::Stream),
            Self::S3Fifo => rule(Rule::S3Fifo),
            Self::Duel => Duel::new(limit, end, seed).map(AnyPolicy::Duel),
            Self::Contest => Contest::new(limit, end, seed).map(AnyPolicy::Contest),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.text())
    }
}

/// Error: no policy has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected fifo, segmented, random, bip, stream, s3fifo, duel or contest")]
pub struct UnknownPolicy;

impl FromStr for Name {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|name| name.text() == text);
        found.ok_or(UnknownPolicy)
    }
}

/// A policy that is chosen at run time. The dispatch is a match, not a virtual call.
#[derive(Debug)]
pub enum AnyPolicy {
    /// One rule for all pages.
    Rule(RuleQueue),
    /// Classes of pages try the rules.
    Duel(Duel),
    /// Victims of all rules are compared.
    Contest(Contest),
    /// Another policy, whose calls are counted.
    #[cfg(test)]
    Counted(Box<counted::Counted>),
}

macro_rules! each {
    ($any:expr, $policy:ident => $call:expr) => {
        match $any {
            AnyPolicy::Rule($policy) => $call,
            AnyPolicy::Duel($policy) => $call,
            AnyPolicy::Contest($policy) => $call,
            #[cfg(test)]
            AnyPolicy::Counted($policy) => $call,
        }
    };
}

impl Policy for AnyPolicy {
    fn arrived(&mut self, run: Run) {
        each!(self, policy => policy.arrived(run));
    }

    fn refetched(&mut self, run: Run, recent: bool) {
        each!(self, policy => policy.refetched(run, recent));
    }

    fn restored(&mut self, run: Run) {
        each!(self, policy => policy.restored(run));
    }

    fn returned(&mut self, run: Run) {
        each!(self, policy => policy.returned(run));
    }

    fn left_behind(&mut self, run: Run) {
        each!(self, policy => policy.left_behind(run));
    }

    fn unneeded(&mut self, run: Run) {
        each!(self, policy => policy.unneeded(run));
    }

    fn removed(&mut self, run: Run) {
        each!(self, policy => policy.removed(run));
    }

    fn victim_run(&mut self, max: u32) -> Option<Run> {
        each!(self, policy => policy.victim_run(max))
    }

    fn pages(&self) -> u32 {
        each!(self, policy => policy.pages())
    }

    fn holds(&self, page: u32) -> bool {
        each!(self, policy => policy.holds(page))
    }
}

#[cfg(test)]
impl AnyPolicy {
    /// Returns the number of entries for which there is memory.
    pub(crate) fn capacity(&self) -> usize {
        each!(self, policy => policy.capacity())
    }
}

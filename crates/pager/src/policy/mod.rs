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
//! victims. It makes no system call and reads no clock. Its memory is proportional to the pages
//! that it holds, and [`Policy::sweep`] bounds these.
//!
//! The pager owns the truth about residency. A page may leave without notice, and then its entry is
//! stale: the policy may still name the page as a victim, and the pager skips it. A page may also
//! arrive while the policy holds it; then it keeps its place.

pub mod contest;
pub mod duel;
pub mod rules;
mod runs;
#[cfg(test)]
mod tests;

use std::fmt;
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

    /// Reports the window that a sequential stream has just left. Its pages may be resident or not.
    fn left_behind(&mut self, _run: Run) {}

    /// Removes pages that the program has dropped.
    fn removed(&mut self, run: Run);

    /// Takes the next victims out of the policy: a run of at most `max` pages. `None` if the policy
    /// holds no page. `max` must not be 0.
    fn victim_run(&mut self, max: u32) -> Option<Run>;

    /// Returns the number of pages that the policy holds, stale ones included.
    fn pages(&self) -> u32;

    /// Removes stale pages: those for which `resident` returns false. The caller sweeps when
    /// [`Policy::pages`] is over twice the limit.
    fn sweep(&mut self, resident: &mut dyn FnMut(u32) -> bool);
}

/// The name of a policy, as in `--policy NAME`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    /// Victims of all rules are compared.
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

    /// Creates the policy for at most `limit` resident pages.
    pub fn policy(self, limit: u32, seed: u64) -> AnyPolicy {
        let rule = |rule| AnyPolicy::Rule(RuleQueue::new(rule, limit, seed));
        match self {
            Self::Fifo | Self::Segmented => rule(Rule::Fifo),
            Self::Random => rule(Rule::Random),
            Self::Bip => rule(Rule::Bip),
            Self::Stream => rule(Rule::Stream),
            Self::S3Fifo => rule(Rule::S3Fifo),
            Self::Duel => AnyPolicy::Duel(Duel::new(limit, seed)),
            Self::Contest => AnyPolicy::Contest(Contest::new(limit, seed)),
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
#[error(
    "unknown policy {0:?}: expected fifo, segmented, random, bip, stream, s3fifo, duel or contest"
)]
pub struct UnknownPolicy(pub String);

impl FromStr for Name {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|name| name.text() == text);
        found.ok_or_else(|| UnknownPolicy(text.to_owned()))
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
}

macro_rules! each {
    ($any:expr, $policy:ident => $call:expr) => {
        match $any {
            AnyPolicy::Rule($policy) => $call,
            AnyPolicy::Duel($policy) => $call,
            AnyPolicy::Contest($policy) => $call,
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

    fn left_behind(&mut self, run: Run) {
        each!(self, policy => policy.left_behind(run));
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

    fn sweep(&mut self, resident: &mut dyn FnMut(u32) -> bool) {
        each!(self, policy => policy.sweep(resident));
    }
}

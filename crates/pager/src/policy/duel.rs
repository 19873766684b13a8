//! A duel of rules: small classes of pages each follow a rule, all other pages the cheapest.
//!
//! No rule is good for all programs. A cyclic scan needs `bip`, a working set that moves needs
//! `fifo`. So pages are divided into classes by a hash of their block. Each of the first classes,
//! the leaders, has a rule. The last class holds the remaining pages, and follows the rule whose
//! leader has had the least cost per page of late (set dueling: Qureshi et al., ISCA 2007).
//!
//! Leaders have a quota of their own. In one common memory, another class's rule would evict the
//! pages that a leader keeps, and the leader's cost would say nothing about its rule. The quota of
//! a class is proportional to the pages that the program has ever touched in it, because with few
//! blocks the classes differ much in size.
//!
//! When the rule of the last class changes, its pages keep their places.

use std::io;

use super::rules::{Rule, RuleQueue};
use super::runs::{LeftWindows, blocks};
use super::{Policy, RUN_PAGES, Run};

/// Costs in nanoseconds by which rules are compared. Only their ratios matter.
const HARD_NS: u64 = 7600;
const SOFT_NS: u64 = 6700;
/// A page that a stream was read ahead for, or that is mapped with others.
const AHEAD_NS: u64 = 700;

/// How a duel is fought.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Rules of the leaders. The first one is followed at the start.
    pub leaders: &'static [Rule],
    /// One in this many blocks belongs to a given leader.
    pub one_in: u32,
    /// Faults between two comparisons. Earlier costs then count half.
    pub window: u32,
    /// A rule must be cheaper than this many percent of the followed one.
    pub percent: u64,
}

/// The settings of [`Duel::new`].
pub const SETTINGS: Settings = Settings {
    leaders: &[Rule::Random, Rule::Bip, Rule::Fifo],
    one_in: 32,
    window: 4096,
    percent: 90,
};

/// The pages of one class.
#[derive(Debug)]
struct Class {
    queue: RuleQueue,
    /// Pages that the program has touched, without those that it has dropped.
    touched: u64,
    /// Cost of late, in nanoseconds.
    cost: u64,
    /// Victims of late that could not leave. They do not count as held, because otherwise a class
    /// with more of them than its quota would name all further victims. The number may exceed that
    /// of the class's pages: then the classes take turns.
    returned: u32,
}

/// Classes of pages: the leaders, then the followers.
#[derive(Debug)]
pub struct Duel {
    settings: Settings,
    limit: u32,
    seed: u64,
    classes: Vec<Class>,
    touched: u64,
    /// Pages that the program does not need soon. A class holds them too.
    unneeded: LeftWindows,
    /// Index of the followed leader.
    followed: usize,
    faults: u32,
}

impl Duel {
    /// Creates a duel with the usual settings, for `limit` pages with numbers below `end`.
    ///
    /// # Errors
    /// Errors of mapping memory.
    pub fn new(limit: u32, end: u32, seed: u64) -> io::Result<Self> {
        Self::with(SETTINGS, limit, end, seed)
    }

    /// Creates a duel with other settings, for comparison.
    ///
    /// # Errors
    /// Errors of mapping memory.
    pub fn with(settings: Settings, limit: u32, end: u32, seed: u64) -> io::Result<Self> {
        let rules = settings.leaders.iter().chain(settings.leaders.first());
        let class = |(index, rule): (usize, &Rule)| {
            let queue = RuleQueue::new(*rule, limit, end, seed.wrapping_add(index as u64))?;
            Ok(Class { queue, touched: 0, cost: 0, returned: 0 })
        };
        let classes = rules.enumerate().map(class).collect::<io::Result<_>>()?;
        Ok(Self {
            settings,
            limit,
            seed,
            classes,
            touched: 0,
            unneeded: LeftWindows::new(),
            followed: 0,
            faults: 0,
        })
    }

    /// Returns the rule that the last class follows.
    pub fn followed(&self) -> Rule {
        self.settings.leaders[self.followed]
    }

    fn class_of(&self, block: u32) -> usize {
        let hash = (u64::from(block) ^ self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let leaders = self.settings.leaders.len();
        ((hash % u64::from(self.settings.one_in)) as usize).min(leaders)
    }

    /// Takes at most `max` pages that the program does not need soon.
    fn take_unneeded(&mut self, max: u32) -> Option<Run> {
        let mut unneeded = std::mem::replace(&mut self.unneeded, LeftWindows::none());
        let first = |run| {
            let mut first = None;
            blocks(run, |block, part| {
                let class = &self.classes[self.class_of(block)];
                first = first.or_else(|| class.queue.first_part(part));
            });
            first
        };
        let run = unneeded.next(max, first);
        self.unneeded = unneeded;
        self.each_class(run?, |class, part| class.queue.take_out(part));
        run
    }

    /// Calls `visit` with the parts of a run, each with its class.
    fn each_class(&mut self, run: Run, mut visit: impl FnMut(&mut Class, Run)) {
        blocks(run, |block, part| {
            let class = self.class_of(block);
            visit(&mut self.classes[class], part);
        });
    }

    /// Compares the leaders once in a while.
    fn count_fault(&mut self) {
        self.faults += 1;
        if self.faults < self.settings.window {
            return;
        }
        self.faults = 0;
        let leaders = &self.classes[..self.settings.leaders.len()];
        let cost = |class: &Class| class.cost * 1024 / class.touched.max(1);
        let cheapest = (0..leaders.len()).min_by_key(|index| cost(&leaders[*index]));
        if let Some(cheapest) = cheapest
            && leaders.iter().all(|class| class.touched > 0)
            && cost(&leaders[cheapest]) * 100
                < cost(&leaders[self.followed]) * self.settings.percent
        {
            self.followed = cheapest;
            let rule = self.followed();
            self.classes.last_mut().expect("followers").queue.set_rule(rule);
        }
        for class in &mut self.classes {
            class.cost /= 2;
            class.returned /= 2;
        }
    }

    /// Returns the number of pages that a class should hold.
    fn quota(&self, class: &Class) -> u32 {
        (u64::from(self.limit) * class.touched / self.touched.max(1)) as u32
    }

    /// Returns how many pages that can leave a class holds beyond its quota.
    fn excess(&self, class: &Class) -> i64 {
        let held = i64::from(class.queue.pages()) - i64::from(class.returned);
        held - i64::from(self.quota(class))
    }
}

/// Cost of a fault that mapped `pages` pages, in nanoseconds.
fn cost(pages: u32, single: u64) -> u64 {
    if pages == 1 { single } else { AHEAD_NS * u64::from(pages) }
}

impl Policy for Duel {
    fn arrived(&mut self, run: Run) {
        self.each_class(run, |class, part| {
            class.touched += u64::from(part.pages);
            class.queue.arrived(part);
        });
        self.touched += u64::from(run.pages);
    }

    fn refetched(&mut self, run: Run, recent: bool) {
        self.each_class(run, |class, part| {
            class.cost += cost(run.pages, HARD_NS) * u64::from(part.pages) / u64::from(run.pages);
            class.queue.refetched(part, recent);
        });
        self.count_fault();
    }

    fn restored(&mut self, run: Run) {
        self.each_class(run, |class, part| {
            class.cost += cost(run.pages, SOFT_NS) * u64::from(part.pages) / u64::from(run.pages);
            class.queue.restored(part);
        });
        self.count_fault();
    }

    fn returned(&mut self, run: Run) {
        self.each_class(run, |class, part| {
            class.returned = class.returned.saturating_add(part.pages);
            class.queue.returned(part);
        });
    }

    fn left_behind(&mut self, run: Run) {
        self.each_class(run, |class, part| class.queue.left_behind(part));
    }

    fn unneeded(&mut self, run: Run) {
        self.unneeded.join(run);
    }

    fn removed(&mut self, run: Run) {
        self.each_class(run, |class, part| {
            class.touched = class.touched.saturating_sub(u64::from(part.pages));
            class.queue.removed(part);
        });
        self.touched = self.classes.iter().map(|class| class.touched).sum();
    }

    fn victim_run(&mut self, max: u32) -> Option<Run> {
        if let Some(run) = self.take_unneeded(max) {
            return Some(run);
        }
        let fullest = (0..self.classes.len())
            .filter(|index| self.classes[*index].queue.pages() > 0)
            .max_by_key(|index| self.excess(&self.classes[*index]))?;
        let excess = self.excess(&self.classes[fullest]);
        let followers = fullest == self.settings.leaders.len();
        let max = if followers { max } else { max.min(excess.clamp(1, 64) as u32) };
        let quota = self.quota(&self.classes[fullest]);
        let queue = &mut self.classes[fullest].queue;
        queue.set_limit(quota.max(1));
        queue.victim_run(max)
    }

    fn pages(&self) -> u32 {
        self.classes.iter().map(|class| class.queue.pages()).sum()
    }

    fn holds(&self, page: u32) -> bool {
        self.classes[self.class_of(page / RUN_PAGES)].queue.holds(page)
    }
}

#[cfg(test)]
impl Duel {
    pub(super) fn capacity(&self) -> usize {
        let classes: usize = self.classes.iter().map(|class| class.queue.capacity()).sum();
        classes + self.unneeded.capacity()
    }
}

//! A contest of victims: several rules each name a victim, and the one that is needed last wins.
//!
//! No rule is good for all programs. A cyclic scan wants the newest pages evicted, a working set
//! that moves the oldest. Once in a while the policy therefore evicts one run by each rule, at the
//! same time. If the program needs the victim of one rule before that of another, the first rule
//! loses a point to the second. All other victims come from the rule that wins. This is Belady's
//! criterion, measured on a sample: the best victim is the page whose next use is farthest away.
//!
//! Set dueling (Qureshi et al., ISCA 2007) compares the misses of classes of pages instead. It
//! needs many pages: a class of one 32nd of a memory of 16 MiB is two runs.
//!
//! Newly arrived pages wait in a window before they join the main queue, so that rule `Newest` does
//! not evict pages that the program is still working on.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::io;

use super::queues::Queues;
use super::runs::PageHasher;
use super::{Policy, Run};

/// A rule that names victims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// A random run of the main queue.
    Random,
    /// The run that arrived first.
    Oldest,
    /// The run that arrived last, without those in the window.
    Newest,
    /// The oldest window that a stream has left, else a random run.
    Left,
}

const RULES: [Rule; 4] = [Rule::Random, Rule::Oldest, Rule::Newest, Rule::Left];

/// How a contest is held.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Evicted runs between two contests, at least. The contests that are remembered extend over
    /// the eviction of twice as many pages as the limit.
    pub every: u32,
    /// Pages that a rule evicts in a contest at most.
    pub pages: u32,
    /// Points that are kept when a contest begins.
    pub kept: f32,
    /// A rule must have this many times the points of the followed one, and `margin` more.
    pub factor: f32,
    /// See `factor`.
    pub margin: f32,
    /// The rule that is followed first.
    pub first: Rule,
}

/// The settings of [`Contest::new`].
pub const SETTINGS: Settings =
    Settings { every: 16, pages: 32, kept: 0.95, factor: 1.2, margin: 2.0, first: Rule::Left };

/// Contests whose victims are remembered at most.
const CONTESTS_MAX: usize = 128;

/// The victims of a contest that the program has not needed yet.
type Victims = [Option<Run>; RULES.len()];

/// Pages in the order of their arrival, and the results of contests.
#[derive(Debug)]
pub struct Contest {
    settings: Settings,
    queues: Queues,
    /// `points[a][b]`: how often a victim of rule `a` was needed after that of rule `b`.
    points: [[f32; RULES.len()]; RULES.len()],
    /// Index of the followed rule.
    followed: usize,
    /// Runs and pages that were evicted since the last contest began.
    runs: u32,
    evicted: u32,
    /// Rules that have still to name a victim in the contest that is held.
    turns: Vec<usize>,
    contests: Vec<Victims>,
    /// Index of the contest that is held.
    current: usize,
    /// The contest and the rule of each remembered page.
    victims: HashMap<u32, (u8, u8), BuildHasherDefault<PageHasher>>,
}

impl Contest {
    /// Creates an empty policy for `limit` pages with numbers below `end`.
    ///
    /// # Errors
    /// Errors of mapping memory.
    pub fn new(limit: u32, end: u32, seed: u64) -> io::Result<Self> {
        Self::with(SETTINGS, limit, end, seed)
    }

    /// Creates a policy with other settings, for comparison.
    ///
    /// # Errors
    /// Errors of mapping memory.
    pub fn with(settings: Settings, limit: u32, end: u32, seed: u64) -> io::Result<Self> {
        // The remembered pages are at most as many as the limit.
        let contests = (limit as usize / 128).clamp(16, CONTESTS_MAX);
        let victims = contests * RULES.len() * settings.pages as usize;
        Ok(Self {
            settings,
            queues: Queues::new(limit, end, seed)?,
            points: [[0.0; RULES.len()]; RULES.len()],
            followed: RULES.iter().position(|rule| *rule == settings.first).unwrap_or(0),
            runs: 0,
            evicted: 0,
            turns: Vec::with_capacity(RULES.len()),
            contests: vec![[None; RULES.len()]; contests],
            current: 0,
            // A map that is at most half full never allocates: it reuses the places of removed
            // entries.
            victims: HashMap::with_capacity_and_hasher(2 * victims, BuildHasherDefault::default()),
        })
    }

    /// Returns the rule that names most victims.
    pub fn followed(&self) -> Rule {
        RULES[self.followed]
    }

    /// Gives points for pages that the program needs again.
    fn needed(&mut self, run: Run) {
        for page in run.start..run.end() {
            let Some((contest, rule)) = self.victim(page) else { continue };
            self.forget(contest, rule);
            for (other, later) in self.contests[contest].iter().enumerate() {
                if later.is_some() {
                    self.points[other][rule] += 1.0;
                }
            }
        }
    }

    /// Returns the contest and the rule of a remembered page.
    fn victim(&self, page: u32) -> Option<(usize, usize)> {
        self.victims.get(&page).map(|&(contest, rule)| (contest.into(), rule.into()))
    }

    fn forget(&mut self, contest: usize, rule: usize) {
        if let Some(run) = self.contests[contest][rule].take() {
            for page in run.start..run.end() {
                self.victims.remove(&page);
            }
        }
    }

    /// Begins a contest: forgets the oldest one, and follows the rule that wins.
    fn begin(&mut self) {
        (self.runs, self.evicted) = (0, 0);
        self.current = (self.current + 1) % self.contests.len();
        (0..RULES.len()).for_each(|rule| self.forget(self.current, rule));
        self.points.iter_mut().flatten().for_each(|points| *points *= self.settings.kept);
        let score = |rule: usize| -> f32 {
            (0..RULES.len()).map(|other| self.points[rule][other] - self.points[other][rule]).sum()
        };
        let best = (0..RULES.len()).max_by(|a, b| score(*a).total_cmp(&score(*b)));
        let best = best.expect("there are rules");
        let (won, lost) = (self.points[best][self.followed], self.points[self.followed][best]);
        if won > lost * self.settings.factor + self.settings.margin {
            self.followed = best;
        }
        self.turns.extend(0..RULES.len());
        self.queues.random.shuffle(&mut self.turns);
    }

    /// Takes a victim by a rule, if it can name one.
    fn take(&mut self, rule: Rule, max: u32) -> Option<Run> {
        let queues = &mut self.queues;
        let window = queues.window(8);
        let run = match rule {
            Rule::Random => queues.take_random(max)?,
            Rule::Oldest => queues.take_main(max)?,
            Rule::Left => queues.take_left(max)?,
            Rule::Newest if queues.new.len() > window => return queues.take_new(max),
            Rule::Newest => return None,
        };
        // In place of an old run, as many new pages are kept.
        let mut moved = 0;
        while moved < run.pages && queues.new.len() > window {
            let (run, credit) = queues.new.pop()?;
            moved += run.pages;
            queues.set.each_part(run, |part| queues.main.push(part, credit));
        }
        Some(run)
    }
}

impl Policy for Contest {
    fn arrived(&mut self, run: Run) {
        self.queues.add(run, self.queues.is_full(), 0);
    }

    fn refetched(&mut self, run: Run, _recent: bool) {
        self.needed(run);
        self.arrived(run);
    }

    fn restored(&mut self, run: Run) {
        self.needed(run);
        self.queues.add(run, false, 1);
    }

    fn returned(&mut self, run: Run) {
        // A page that cannot leave says nothing about the rule that named it.
        for page in run.start..run.end() {
            if let Some((contest, rule)) = self.victim(page) {
                self.forget(contest, rule);
            }
        }
        self.queues.put_back(run);
    }

    fn left_behind(&mut self, run: Run) {
        self.queues.left.push(run);
    }

    fn unneeded(&mut self, run: Run) {
        self.queues.unneeded.join(run);
    }

    fn removed(&mut self, run: Run) {
        self.queues.remove(run);
    }

    fn victim_run(&mut self, max: u32) -> Option<Run> {
        if let Some(run) = self.queues.take_unneeded(max) {
            return Some(run);
        }
        let between = 2 * self.queues.limit / self.contests.len() as u32;
        let is_due = self.runs >= self.settings.every && self.evicted >= between;
        if is_due && self.turns.is_empty() {
            self.begin();
        }
        let mut victim = None;
        while victim.is_none()
            && let Some(rule) = self.turns.pop()
        {
            victim = self.take(RULES[rule], max.min(self.settings.pages));
            if let Some(run) = victim {
                self.contests[self.current][rule] = Some(run);
                let place = (self.current as u8, rule as u8);
                for page in run.start..run.end() {
                    self.victims.insert(page, place);
                }
            }
        }
        if victim.is_none() && self.queues.is_stuck() {
            victim = self.queues.take_new(max);
        }
        let victim = victim
            .or_else(|| self.take(self.followed(), max))
            .or_else(|| self.take(Rule::Random, max))
            .or_else(|| self.queues.take_new(max));
        self.queues.end_choice();
        let victim = victim?;
        self.runs += 1;
        self.evicted = self.evicted.saturating_add(victim.pages);
        Some(victim)
    }

    fn pages(&self) -> u32 {
        self.queues.set.len()
    }

    fn holds(&self, page: u32) -> bool {
        self.queues.set.has(page)
    }
}

#[cfg(test)]
impl Contest {
    pub(super) fn capacity(&self) -> usize {
        self.queues.capacity() + self.victims.capacity() + self.turns.capacity()
    }
}

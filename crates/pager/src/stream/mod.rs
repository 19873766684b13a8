//! The prefetcher: finds sequential and strided faults, and plans which pages to read ahead.
//!
//! [`Streams`] is a pure state machine without system calls, clock, locks and allocation. The fault
//! handler calls [`Streams::fault`] for each fault, posts the READs of the planned windows, and
//! reports arrivals and reclaimed pages.
//!
//! ```text
//!            fault at the first page of window 7
//!                          |
//!      left       left     v run (mapped now)    queue (in flight, or on the shelf)   frontier
//!   |----------|----------|----------------------|----------------------|----------------------|
//!     window 5   window 6   window 7               window 8               planned next
//! ```
//!
//! - `context` assigns a fault to one of 16 contexts of its thread, by the distance to the
//!   context's last page.
//! - `trend` finds the delta that most of the context's newest faults have.
//! - `window` follows each planned window until its pages are used or wasted.
//! - `cluster` plans aligned clusters instead of streams, as Linux does.
//!
//! Source: Leap (ATC 2020) for the trend. Leap keeps one history for a process. Here each thread
//! has several, because a loop over three arrays has no majority in a single history.

mod cluster;
mod context;
#[cfg(test)]
mod machine;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;
mod trend;
mod window;

use std::ops::Range;

pub use cluster::CLUSTER_PAGES;
pub use window::{Window, WindowId};

use crate::page_table::PageId;
use context::{AHEAD, CONFIDENCE_MAX, CONFIDENT, Context, Contexts, ZONE};
use window::{Span, Wasteful, Windows};

/// Maximum length of a window in pages: a longer one would not fit into a tray of the shelf.
const WINDOW_PAGES: u32 = 64;
/// Length of a stream's first window.
const FIRST_PAGES: u32 = 4;
/// Length of the first window where the program has announced sequential access.
const ADVISED_PAGES: u32 = 16;
/// Factor by which the next window is longer when the stream reaches a window.
const GROWTH: u32 = 4;
/// Maximum length of a window of pages at a stride.
const STRIDE_PAGES: u32 = 16;
/// Faults of a context until its probation ends, and the additional faults for each level of the
/// thread's caution.
const PROBATION_FAULTS: u64 = 3;
const CAUTION_FAULTS: u64 = 2;
/// Windows in succession that must arrive in time before a stream has fewer windows ahead. These
/// are the first value and the maximum of that number, which doubles each time that the stream gets
/// more windows ahead.
const TIMELY_WINDOWS: u32 = 8;
const PATIENCE_WINDOWS: u32 = 256;
/// Faults for which a context does not read ahead after two wasteful windows.
const SUSPENDED_FAULTS: u32 = 64;

/// Settings of the prefetcher.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Maximum length of a window in pages, 1 to 64.
    pub window_pages: u32,
    /// Reads ahead at strides other than 1 and -1. Useful only where a fault on a page that was
    /// read ahead costs less than a READ, because each page of a stride faults.
    pub strides: bool,
    /// Number of threads with contexts. A further thread takes the contexts of the thread whose
    /// last fault is oldest.
    pub threads: u32,
    /// Reads aligned clusters ahead, and follows no streams (`cluster`).
    pub clusters: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { window_pages: WINDOW_PAGES, strides: false, threads: 16, clusters: false }
    }
}

/// A fault of the program.
#[derive(Clone, Debug)]
pub struct Fault {
    /// The faulting thread.
    pub thread: u32,
    /// The page.
    pub page: PageId,
    /// Pages of the mapping that contains the page. No window leaves them.
    pub bounds: Range<u32>,
    /// The program's advice for the page.
    pub advice: Advice,
    /// Where the page was found.
    pub found: Found,
}

/// The program's advice for a range of pages (madvise).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Advice {
    /// Reads ahead where the faults have a trend.
    #[default]
    Normal,
    /// Reads ahead from the first fault. The pages behind the stream are victims at once.
    Sequential,
    /// Never reads ahead.
    Random,
    /// As `Sequential`, but the pages behind the stream are no victims: the program will need them.
    WillNeed,
}

impl Advice {
    fn is_sequential(self) -> bool {
        matches!(self, Advice::Sequential | Advice::WillNeed)
    }
}

/// Where a fault found its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nowhere: the page reads as zeros.
    Absent,
    /// In the pool.
    Remote,
    /// On the shelf, because the page was evicted.
    Evicted,
    /// On the shelf, because the page was read ahead in this window.
    Ready(WindowId),
    /// In flight in this window: the fault must wait.
    Late(WindowId),
}

/// The response to a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Pages to map: the faulting page, and its neighbours in the direction of the stream that need
    /// no I/O. At least 1.
    pub map: u32,
    /// The neighbours to map are those below the page.
    pub backwards: bool,
    /// Windows to post. [`Streams::arrived`] is due for each of them.
    pub issue: [Option<Window>; AHEAD],
    /// Pages that the stream has left. The program needs these pages last, so they are the best
    /// victims.
    pub behind: Option<Range<u32>>,
}

impl Plan {
    fn one() -> Plan {
        Plan { map: 1, backwards: false, issue: [None; AHEAD], behind: None }
    }
}

/// Totals since the start, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Pages that were read ahead.
    pub issued: u64,
    /// Pages read ahead that the program needed. A fault found the page, or the page was mapped in
    /// a run behind which the stream went on.
    pub used: u64,
    /// Faults that had to wait for a page in flight.
    pub late: u64,
    /// Pages reclaimed unmapped, or mapped in a run in which the stream ended.
    pub wasted: u64,
    /// Faults on pages in the pool that were not read ahead.
    pub demand: u64,
}

impl Counters {
    /// Pages read ahead that are neither used nor wasted as yet.
    pub fn outstanding(&self) -> u64 {
        self.issued - self.used - self.wasted
    }

    /// Share of used pages in the pages whose fate is known. None before the first one.
    pub fn accuracy(&self) -> Option<f64> {
        ratio(self.used, self.used + self.wasted)
    }

    /// Share of pages read ahead in the pages that the program needed from the pool.
    pub fn coverage(&self) -> Option<f64> {
        ratio(self.used, self.used + self.demand)
    }

    /// Share of used pages for which a fault had to wait.
    pub fn late_share(&self) -> Option<f64> {
        ratio(self.late.min(self.used), self.used)
    }
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// The prefetcher's state. The callers serialize all calls.
#[derive(Debug)]
pub struct Streams {
    settings: Settings,
    contexts: Contexts,
    windows: Windows,
}

impl Streams {
    /// Allocates all memory that the prefetcher will ever use, about 130 KiB with 16 threads.
    /// Settings outside their limits count as the nearest limit.
    pub fn new(settings: Settings) -> Streams {
        let window_pages = settings.window_pages.clamp(1, WINDOW_PAGES);
        let threads = settings.threads.clamp(1, 1024);
        Streams {
            settings: Settings { window_pages, threads, ..settings },
            contexts: Contexts::new(threads as usize),
            windows: Windows::new(),
        }
    }

    /// Records a fault, and plans the pages to map and to read ahead.
    pub fn fault(&mut self, fault: &Fault) -> Plan {
        let page = fault.page.0;
        let owner = self.windows.fault(fault.found, fault.page);
        if fault.advice == Advice::Random {
            return Plan::one();
        }
        if self.settings.clusters {
            return self.cluster(fault);
        }
        let found = self.contexts.find(fault.thread, page, owner);
        let Some(at) = found.or_else(|| self.create(fault.thread)) else { return Plan::one() };
        self.contexts.hit(at);
        let context = self.contexts.get(at);
        if context.suspended > 0 {
            context.suspended -= 1;
            context.record_delta(page);
            self.contexts.set_end(at, page);
            return Plan::one();
        }
        if !context.is_on_stream(page) {
            context.record_delta(page);
            if context.is_stream() {
                // The stream may go on after this fault: its place stays the same.
                context.confidence = context.confidence.saturating_sub(1);
                if context.confidence > 0 {
                    return Plan::one();
                }
                self.stop(at);
            }
            self.contexts.set_end(at, page);
            let Some(step) = self.step(at, fault.advice) else { return Plan::one() };
            let advised = fault.advice.is_sequential();
            let first = if advised { ADVISED_PAGES } else { FIRST_PAGES };
            let max = self.max_pages(step);
            let context = self.contexts.get(at);
            context.start(page, step, (first >> context.wasteful).min(max));
            context.patience = TIMELY_WINDOWS;
        }
        self.advance(at, fault)
    }

    /// Records that a window is no longer in flight.
    /// `pages` is the number of pages for which a READ was posted: 0 if the window was not posted
    /// at all. Due exactly once for each planned window, before any of its pages is reclaimed. A
    /// second call has no effect.
    pub fn arrived(&mut self, id: WindowId, pages: u32) {
        let Some((owner, wasteful)) = self.windows.arrived(id, pages) else { return };
        if let Some(context) = self.contexts.of(owner) {
            context.in_flight -= 1;
        }
        self.waste(wasteful);
    }

    /// Records that pages of a window were reclaimed before any fault or run mapped them.
    pub fn reclaimed(&mut self, id: WindowId, pages: u32) {
        let wasteful = self.windows.reclaimed(id, pages);
        self.waste(wasteful);
    }

    /// Totals since the start.
    pub fn counters(&self) -> Counters {
        self.windows.counters()
    }

    /// Returns the number of planned windows of which [`Streams::arrived`] is still due.
    #[cfg(test)]
    pub(crate) fn in_flight(&self) -> usize {
        self.windows.totals().0
    }

    /// Makes a context for a fault. None if no context may be displaced.
    fn create(&mut self, thread: u32) -> Option<usize> {
        let victims = self.contexts.victims(thread)?;
        let at = victims.start;
        for victim in victims {
            if let Some(window) = self.contexts.clear(victim) {
                self.windows.dropped(window);
            }
        }
        self.contexts.create(at);
        Some(at)
    }

    /// Returns the step of the stream that the faults of a context show.
    fn step(&mut self, at: usize, advice: Advice) -> Option<i32> {
        let probation = PROBATION_FAULTS + CAUTION_FAULTS * u64::from(self.contexts.caution(at));
        let context = self.contexts.get(at);
        let is_known = context.faults >= probation;
        let trend = context.deltas.trend().filter(|_| is_known);
        let strides = self.settings.strides;
        let trend = trend.filter(|step| step.abs() == 1 || strides && step.unsigned_abs() <= ZONE);
        trend.or(advice.is_sequential().then_some(1))
    }

    fn max_pages(&self, step: i32) -> u32 {
        let max = if step.abs() == 1 { WINDOW_PAGES } else { STRIDE_PAGES };
        max.min(self.settings.window_pages)
    }

    /// Moves a stream to the page of a fault that it predicted.
    fn advance(&mut self, at: usize, fault: &Fault) -> Plan {
        let page = i64::from(fault.page.0);
        let mut plan = Plan::one();
        let run = self.contexts.get(at).run;
        if run.index(page).is_none_or(|index| index >= i64::from(run.pages)) {
            plan.behind = self.leave(at, fault.advice);
            self.enter(at, fault);
        }
        let context = self.contexts.get(at);
        let (run, current) = (context.run, context.current);
        let index = run.index(page).unwrap_or(0) as u32;
        let end = if run.is_contiguous() { run.page(i64::from(run.pages) - 1) } else { page };
        context.record_stream(end as u32);
        plan.backwards = run.step < 0;
        if run.is_contiguous() {
            // The mapping may have shrunk since the run was planned.
            plan.map = (run.pages - index).min(room(&fault.bounds, page, run.step)).max(1);
            self.count_mapped(at, fault, plan.map);
        }
        self.contexts.set_end(at, end as u32);
        // At the end of the mapping no next run can prove that the program uses this one.
        if room(&fault.bounds, run.end(), run.step) == 0
            && let Some(window) = current
        {
            self.reward(at, window);
        }
        let mut issue = plan.issue.iter_mut();
        if fault.found == Found::Remote && index + 1 < run.pages {
            let rest = Span { first: fault.page.0, pages: run.pages - index, step: run.step };
            self.plan_again(at, fault, rest, &mut issue);
        }
        if fault.found != Found::Absent {
            self.plan_ahead(at, fault, &mut issue);
        }
        plan
    }

    /// Ends a stream's run, because the stream has reached the next one. Returns the best victims.
    fn leave(&mut self, at: usize, advice: Advice) -> Option<Range<u32>> {
        if let Some(window) = self.contexts.get(at).current.take() {
            self.reward(at, window);
        }
        let context = self.contexts.get(at);
        let run = context.run;
        if run.pages == 0 || !run.is_contiguous() || advice == Advice::WillNeed {
            return None;
        }
        if advice == Advice::Sequential {
            return Some(run.range());
        }
        if context.confidence < CONFIDENT {
            return None;
        }
        // Two runs of grace, because a loop may look back a little.
        let [newer, older] = context.left;
        context.left = [Some(run), newer];
        older.map(Span::range)
    }

    /// Begins a stream's run at the page of a fault behind the last run.
    fn enter(&mut self, at: usize, fault: &Fault) {
        let page = i64::from(fault.page.0);
        let step = self.contexts.get(at).run.step;
        let max = self.max_pages(step);
        let context = self.contexts.get(at);
        let mut entered = None;
        // The queue begins at the end of the run, and has no gaps. So a page in no window is behind
        // the frontier, and the queue is empty then.
        while let Some(window) = context.queue.first() {
            context.queue.remove_first();
            if window.span().index(page).is_some_and(|index| index < i64::from(window.pages)) {
                entered = Some(window);
                break;
            }
        }
        // A fault that hits the stream by chance is seldom at its exact next page, so only an exact
        // prediction gives confidence and longer windows. The delta of a stream's first fault is
        // recorded already.
        let is_exact = page == context.run.end();
        if context.run.pages > 0 {
            match is_exact || entered.is_some() {
                true => context.deltas.push(step.into()),
                false => context.record_delta(fault.page.0),
            }
        }
        if is_exact {
            context.confidence = (context.confidence + 1).min(CONFIDENCE_MAX);
        }
        let (pages, grows) = match entered {
            Some(window) => (window.pages, window.pages == context.size),
            None if fault.found == Found::Remote || step.abs() != 1 => (1, false),
            None => (context.size.min(room(&fault.bounds, page, step)).max(1), true),
        };
        if let Some(window) = entered {
            context.run = window.span();
            context.current = Some(window.id);
            set_ahead(context, matches!(fault.found, Found::Late(_)), window.pages == max);
        } else {
            context.run = Span { first: fault.page.0, pages, step };
            context.frontier = context.run.end();
        }
        if grows && is_exact {
            context.size = (context.size * GROWTH).min(max);
        }
    }

    /// Counts the pages behind the faulting one as mapped. They are used when the stream leaves its
    /// run. A fault on a page that was not read ahead does not count, because its run may end at
    /// once.
    fn count_mapped(&mut self, at: usize, fault: &Fault, map: u32) {
        let (Found::Ready(window) | Found::Late(window)) = fault.found else { return };
        if map == 1 {
            return;
        }
        if self.contexts.get(at).current == Some(window) {
            self.windows.mapped_to_end(window, fault.page);
        } else {
            // The window was planned by another context, or by this context before it planned the
            // rest of its run again. Because no later fault of this stream settles that window, its
            // pages are used now.
            self.windows.mapped_in_passing(window, map);
        }
    }

    /// Plans the rest of a run again behind its first page, because that page was not read ahead.
    /// The caller lacked room for the window, or for a part of the window.
    fn plan_again<'a>(
        &mut self,
        at: usize,
        fault: &Fault,
        run: Span,
        issue: &mut impl Iterator<Item = &'a mut Option<Window>>,
    ) {
        let current = self.contexts.get(at).current;
        if current.is_some_and(|window| self.windows.is_in_flight(window)) {
            return;
        }
        let first = run.page(1);
        let size = self.contexts.get(at).size;
        let pages = (run.pages - 1).min(size).min(room(&fault.bounds, first, run.step));
        if let Some(window) = self.plan(at, first, pages, issue) {
            if let Some(window) = current {
                self.windows.passed(window);
            }
            self.contexts.get(at).current = Some(window.id);
        }
    }

    /// Plans windows until enough of them are ahead of the stream.
    fn plan_ahead<'a>(
        &mut self,
        at: usize,
        fault: &Fault,
        issue: &mut impl Iterator<Item = &'a mut Option<Window>>,
    ) {
        loop {
            let context = self.contexts.get(at);
            if context.queue.len() >= context.ahead {
                return;
            }
            let (first, step) = (context.frontier, context.run.step);
            let pages = context.size.min(room(&fault.bounds, first, step));
            let Some(window) = self.plan(at, first, pages, issue) else { return };
            let context = self.contexts.get(at);
            context.queue.push(window);
            context.frontier = window.span().end();
        }
    }

    /// Plans one window of a stream. None without pages, or if too many windows are in flight.
    fn plan<'a>(
        &mut self,
        at: usize,
        first: i64,
        pages: u32,
        issue: &mut impl Iterator<Item = &'a mut Option<Window>>,
    ) -> Option<Window> {
        let owner = self.contexts.owner(at);
        let context = self.contexts.get(at);
        if pages == 0 || context.in_flight as usize >= AHEAD {
            return None;
        }
        let place = issue.next()?;
        let span = Span { first: u32::try_from(first).ok()?, pages, step: context.run.step };
        let window = self.windows.plan(owner, span)?;
        context.in_flight += 1;
        *place = Some(window);
        Some(window)
    }

    /// Ends a stream that the faults do not follow any more.
    fn stop(&mut self, at: usize) {
        if let Some(window) = self.contexts.get(at).stop() {
            let wasteful = self.windows.dropped(window);
            self.waste(wasteful);
        }
    }

    /// Counts a window as used up to its end.
    fn reward(&mut self, at: usize, window: WindowId) {
        if self.windows.passed(window) {
            self.contexts.get(at).wasteful = 0;
            self.contexts.lower_caution(at);
        }
    }

    /// Shortens the next window of a context that planned a wasteful one. Suspends the context
    /// after two of them in succession. Because a context that follows only short runs is soon
    /// displaced, the thread's new contexts also stay on probation for longer.
    fn waste(&mut self, wasteful: Option<Wasteful>) {
        let Some(Wasteful { owner, pages }) = wasteful else { return };
        self.contexts.raise_caution(owner.context);
        let Some(context) = self.contexts.of(owner).filter(|c| c.suspended == 0) else { return };
        context.size = context.size.min(pages / 2).max(1);
        context.wasteful += 1;
        if context.wasteful == 2 {
            context.wasteful = 0;
            context.suspended = SUSPENDED_FAULTS;
            self.stop(owner.context);
        }
    }
}

/// Adjusts the number of windows ahead of a stream. A late window doubles the number, and many
/// timely windows in succession halve it. Each doubling also doubles how many timely windows the
/// next halving needs. A late window that is shorter than the maximum does not double the number,
/// because a short window cannot hide a READ.
fn set_ahead(context: &mut Context, is_late: bool, is_full: bool) {
    if is_late {
        context.timely = 0;
        if is_full && context.ahead < AHEAD {
            context.ahead *= 2;
            context.patience = (2 * context.patience).min(PATIENCE_WINDOWS);
        }
        return;
    }
    context.timely += 1;
    if context.timely >= context.patience {
        context.timely = 0;
        context.ahead = (context.ahead / 2).max(1);
    }
}

/// Returns the number of pages `first`, `first + step` and so on within the bounds.
fn room(bounds: &Range<u32>, first: i64, step: i32) -> u32 {
    let (start, end) = (i64::from(bounds.start), i64::from(bounds.end));
    if first < start || first >= end || step == 0 {
        return 0;
    }
    let pages = match step > 0 {
        true => (end - 1 - first) / i64::from(step),
        false => (first - start) / -i64::from(step),
    };
    pages as u32 + 1
}

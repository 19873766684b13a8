//! Replay of accesses through a policy and a model of the pager.
//!
//! The model holds resident pages and a *shelf*: evicted pages, which leave it in the order of
//! their eviction. Resident pages and the shelf together are at most the limit.
//!
//! - A *soft* fault finds its page on the shelf. A *hard* fault reads it from the pool, or fills it
//!   with zeros at the first access.
//! - A thread's faults at consecutive pages are a *stream*, ascending or descending. The second
//!   fault brings 4 pages, and the next 16, then 64. From the third on, the pages were brought in
//!   time, and each page costs the time to copy and map it. Pages of the window that are resident
//!   are skipped, and the stream continues at the next page that is not.
//! - When a stream goes on to a window, the one before the last two is left behind.
//!
//! Pages that a window brings in vain cost as much as the others, and take room.

use std::collections::{BTreeSet, HashMap, VecDeque};

use pager::policy::{Policy, RUN_PAGES, Run};
use pager::trace::{Event, Trace, ZONE_PAGES};

/// Costs in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// A fault whose page is read from the pool.
    pub hard: f64,
    /// A fault whose page is on the shelf.
    pub soft: f64,
    /// A page that a stream has brought.
    pub ahead: f64,
    /// Whether streams are read ahead.
    pub streams: bool,
}

impl Default for Costs {
    fn default() -> Self {
        Self { hard: 7.6, soft: 6.7, ahead: 0.7, streams: true }
    }
}

/// An access to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Page of the region.
    pub page: u32,
    /// The accessing thread.
    pub thread: u32,
}

impl Access {
    /// The accesses of a trace. Pages get new numbers, so that tables by page are small: zones
    /// that are neighbours stay neighbours, and each gap between zones becomes one zone.
    pub fn of(trace: &Trace) -> Vec<Self> {
        let zones: BTreeSet<u32> = trace.events.iter().map(|e| e.page / ZONE_PAGES).collect();
        let mut numbers = HashMap::new();
        let (mut number, mut behind) = (0, 0);
        for zone in zones {
            number += u32::from(zone != behind);
            numbers.insert(zone, number);
            number += 1;
            behind = zone + 1;
        }
        let access = |event: &Event| Self {
            page: numbers[&(event.page / ZONE_PAGES)] * ZONE_PAGES + event.page % ZONE_PAGES,
            thread: event.thread,
        };
        trace.events.iter().map(access).collect()
    }
}

/// Result of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Hard faults.
    pub hard: u64,
    /// Soft faults.
    pub soft: u64,
    /// Pages that streams have brought.
    pub ahead: u64,
    /// Sum of the costs, in microseconds.
    pub us: f64,
}

impl Outcome {
    /// Computes the cost.
    pub(super) fn with_costs(mut self, costs: &Costs) -> Self {
        self.us = self.hard as f64 * costs.hard
            + self.soft as f64 * costs.soft
            + self.ahead as f64 * costs.ahead;
        self
    }
}

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Never accessed.
    Nowhere,
    Resident,
    Shelf,
    Pool,
}

#[derive(Clone, Copy)]
struct Page {
    place: Place,
    /// Number of pages that had been evicted when this one was.
    evicted: u64,
}

/// Streams that a thread can have at a time.
const STREAMS: usize = 16;
/// The resident pages at most that a stream skips.
const SKIP_MAX: u32 = 256;

/// A stream of a thread.
#[derive(Clone, Copy)]
struct Stream {
    thread: u32,
    /// The page at which the next window begins.
    next: u32,
    /// 1 or -1.
    step: i64,
    /// Pages of the last window.
    window: u32,
    /// The two windows before the last one, the newer first. As the prefetcher does, a stream
    /// reports a window only after two others, because a loop may look back a little.
    left: [Option<Run>; 2],
    used: u64,
}

impl Stream {
    /// Returns the page `pages` steps from `page` on, if there is one.
    fn step(&self, page: u32, pages: u32) -> Option<u32> {
        u32::try_from(i64::from(page) + self.step * i64::from(pages)).ok()
    }
}

/// The streams of all threads, the candidates included.
#[derive(Default)]
pub(super) struct Streams {
    streams: Vec<Stream>,
    clock: u64,
}

/// A fault as streams see it.
pub(super) struct Seen {
    /// Pages to bring, the faulting one included.
    pub window: u32,
    /// 1 or -1.
    pub step: i64,
    /// True if the stream had brought the faulting page in time.
    pub in_time: bool,
    /// The window that the stream has left, two others ago.
    pub left: Option<Run>,
}

impl Streams {
    /// Sees a fault. `is_resident` tells of a page whether the stream skips it.
    pub fn see(
        &mut self,
        thread: u32,
        page: u32,
        mut is_resident: impl FnMut(u32) -> bool,
    ) -> Seen {
        self.clock += 1;
        let clock = self.clock;
        let mut continues = |stream: &Stream| {
            let distance = (i64::from(page) - i64::from(stream.next)) * stream.step;
            stream.thread == thread
                && (0..i64::from(SKIP_MAX)).contains(&distance)
                && (0..distance as u32)
                    .all(|at| stream.step(stream.next, at).is_none_or(&mut is_resident))
        };
        if let Some(stream) = self.streams.iter_mut().find(|stream| continues(stream)) {
            let (last, start) = (stream.window, stream.next);
            stream.window = (last * 4).min(RUN_PAGES);
            stream.used = clock;
            let behind = i64::from(start) - stream.step * i64::from(last);
            let low = if stream.step > 0 { behind } else { i64::from(start) + 1 };
            let [newer, left] = stream.left;
            stream.left = [u32::try_from(low).ok().map(|start| Run { start, pages: last }), newer];
            stream.next = stream.step(page, stream.window).unwrap_or(0);
            return Seen { window: stream.window, step: stream.step, in_time: last > 1, left };
        }
        self.start(thread, page);
        Seen { window: 1, step: 1, in_time: false, left: None }
    }

    /// Sees a miss of one page. Returns true if a stream would have brought it in time.
    pub fn continues(&mut self, access: &Access, is_resident: impl FnMut(u32) -> bool) -> bool {
        let seen = self.see(access.thread, access.page, is_resident);
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.used == self.clock)
            && seen.window > 1
        {
            // The next miss of the stream is at the next page and not behind the window.
            stream.next = stream.step(access.page, 1).unwrap_or(0);
        }
        seen.in_time
    }

    /// Adds the candidates of a fault that continues no stream: one upwards, one downwards.
    fn start(&mut self, thread: u32, page: u32) {
        for step in [1, -1] {
            let (left, used) = ([None; 2], self.clock);
            let stream = Stream { thread, next: page, step, window: 1, left, used };
            let Some(next) = stream.step(page, 1) else { continue };
            let stream = Stream { next, ..stream };
            let own = self.streams.iter().filter(|stream| stream.thread == thread).count();
            if own < 2 * STREAMS {
                self.streams.push(stream);
                continue;
            }
            let oldest = self.streams.iter_mut().filter(|stream| stream.thread == thread);
            // Candidates go before streams.
            let oldest = oldest.min_by_key(|stream| (stream.window > 4, stream.used));
            *oldest.expect("the thread has streams") = stream;
        }
    }
}

/// The model of the pager.
struct Model<'a, P> {
    policy: &'a mut P,
    pages: Vec<Page>,
    shelf: VecDeque<u32>,
    shelf_max: usize,
    /// Pages that may be resident.
    resident_max: u32,
    resident: u32,
    evicted: u64,
    outcome: Outcome,
}

impl<P: Policy> Model<'_, P> {
    fn place(&self, page: u32) -> Place {
        self.pages.get(page as usize).map_or(Place::Nowhere, |page| page.place)
    }

    /// Evicts pages until `wanted` more may be resident.
    fn make_room(&mut self, wanted: u32) {
        while self.resident + wanted > self.resident_max {
            let over = self.resident + wanted - self.resident_max;
            let run = self.policy.victim_run(over.min(RUN_PAGES)).expect("a page is resident");
            for page in run.start..run.end() {
                let entry = &mut self.pages[page as usize];
                if entry.place != Place::Resident {
                    continue;
                }
                self.evicted += 1;
                *entry = Page { place: Place::Shelf, evicted: self.evicted };
                self.resident -= 1;
                self.shelf.push_back(page);
            }
            self.give_up();
        }
    }

    /// Gives up the oldest pages of the shelf. Entries of pages that have left it are stale.
    fn give_up(&mut self) {
        while self.shelf.len() > self.shelf_max {
            let page = self.shelf.pop_front().expect("not empty");
            self.pages[page as usize].place = Place::Pool;
        }
    }

    /// Makes pages resident and tells the policy, in runs that are in the same place.
    fn bring(&mut self, pages: &[u32]) {
        if pages.iter().any(|page| self.place(*page) == Place::Shelf) {
            self.shelf.retain(|page| !pages.contains(page));
        }
        self.make_room(pages.len() as u32);
        let mut at = 0;
        while at < pages.len() {
            let place = self.place(pages[at]);
            let recent = self.is_recent(pages[at]);
            let mut end = at + 1;
            while end < pages.len()
                && pages[end] == pages[end - 1] + 1
                && self.place(pages[end]) == place
                && self.is_recent(pages[end]) == recent
            {
                end += 1;
            }
            let run = Run { start: pages[at], pages: (end - at) as u32 };
            for page in run.start..run.end() {
                self.pages[page as usize].place = Place::Resident;
            }
            self.resident += run.pages;
            match place {
                Place::Nowhere => self.policy.arrived(run),
                Place::Shelf => self.policy.restored(run),
                Place::Pool => self.policy.refetched(run, recent),
                Place::Resident => unreachable!("only missing pages are brought"),
            }
            at = end;
        }
    }

    fn is_recent(&self, page: u32) -> bool {
        let entry = self.pages[page as usize];
        entry.place == Place::Pool && self.evicted - entry.evicted < u64::from(self.resident_max)
    }
}

/// Replays accesses. `limit` pages are resident or on the shelf, which holds `shelf` of them.
pub fn replay(
    accesses: &[Access],
    policy: &mut impl Policy,
    limit: u32,
    shelf: u32,
    costs: &Costs,
) -> Outcome {
    let end = accesses.iter().map(|access| access.page + 1).max().unwrap_or(0);
    let mut used = vec![false; end as usize];
    accesses.iter().for_each(|access| used[access.page as usize] = true);
    let mut model = Model {
        policy,
        pages: vec![Page { place: Place::Nowhere, evicted: 0 }; end as usize],
        shelf: VecDeque::new(),
        shelf_max: shelf as usize,
        resident_max: limit.saturating_sub(shelf).max(1),
        resident: 0,
        evicted: 0,
        outcome: Outcome::default(),
    };
    let mut streams = Streams::default();
    let mut window = Vec::new();
    for access in accesses {
        let place = model.place(access.page);
        if place == Place::Resident {
            continue;
        }
        let seen = if costs.streams {
            streams.see(access.thread, access.page, |page| model.place(page) == Place::Resident)
        } else {
            Seen { window: 1, step: 1, in_time: false, left: None }
        };
        if let Some(left) = seen.left {
            model.policy.left_behind(left);
        }
        let pages = seen.window.min(model.resident_max / 4).max(1);
        window.clear();
        for at in 0..i64::from(pages) {
            let page = i64::from(access.page) + at * seen.step;
            // Pages that the program never uses are not mapped, as far as the trace tells.
            let Some(page) =
                u32::try_from(page).ok().filter(|page| used.get(*page as usize) == Some(&true))
            else {
                break;
            };
            if model.place(page) != Place::Resident {
                window.push(page);
            }
        }
        window.sort_unstable();
        let ahead = window.len() as u64;
        match (seen.in_time, place) {
            (true, _) => model.outcome.ahead += ahead,
            (false, Place::Shelf) => {
                model.outcome.soft += 1;
                model.outcome.ahead += ahead - 1;
            }
            (false, _) => {
                model.outcome.hard += 1;
                model.outcome.ahead += ahead - 1;
            }
        }
        model.bring(&window);
    }
    model.outcome.with_costs(costs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pager::policy::Name;

    fn accesses(pages: impl IntoIterator<Item = u32>) -> Vec<Access> {
        pages.into_iter().map(|page| Access { page, thread: 1 }).collect()
    }

    fn fifo(accesses: &[Access], limit: u32, shelf: u32, costs: &Costs) -> Outcome {
        let mut policy = Name::Fifo.policy(limit - shelf, 200_010, 0).unwrap();
        replay(accesses, &mut policy, limit, shelf, costs)
    }

    #[test]
    fn pages_are_numbered_anew_with_their_neighbours() {
        let event = |page| Event { page, thread: 1, ns: 0, write: false };
        let pages = [1_000_000, 255, 256, 1_000_193];
        let trace = Trace::new("x", 1 << 20, pages.map(event).to_vec());
        let dense: Vec<u32> = Access::of(&trace).iter().map(|access| access.page).collect();
        // Zones 0, 1 and 3906 become 0, 1 and 3; page 1,000,193 begins zone 3907.
        assert_eq!(dense, [3 * 256 + 64, 255, 256, 4 * 256 + 1]);
    }

    #[test]
    fn shelf_turns_hard_faults_into_soft_ones() {
        let costs = Costs { streams: false, ..Costs::default() };
        // Pages 10, 20 and 30 are resident; 10 and then 20 go to the shelf.
        let outcome = fifo(&accesses([10, 20, 30, 40, 10, 20]), 4, 1, &costs);
        assert_eq!((outcome.hard, outcome.soft), (4, 2));
        let expected = 4.0 * 7.6 + 2.0 * 6.7;
        assert!((outcome.us - expected).abs() < 1e-9, "{outcome:?}");
    }

    #[test]
    fn stream_pages_cost_less_in_both_directions() {
        let up = accesses(0..1000);
        let down = accesses((0..1000).rev());
        for stream in [up, down] {
            let outcome = fifo(&stream, 500, 10, &Costs::default());
            assert_eq!((outcome.hard, outcome.soft, outcome.ahead), (2, 0, 998));
        }
    }

    #[test]
    fn streams_of_two_threads_and_arrays_do_not_mix() {
        let mut pages = Vec::new();
        for at in 0..500 {
            pages.push(Access { page: at, thread: 1 });
            pages.push(Access { page: 10_000 + at, thread: 1 });
            pages.push(Access { page: 20_000 + at, thread: 2 });
        }
        let outcome = fifo(&pages, 2000, 10, &Costs::default());
        assert_eq!((outcome.hard, outcome.ahead), (6, 1494));
    }

    #[test]
    fn random_pages_are_not_read_ahead() {
        let pages = accesses((0..5000u32).map(|at| at.wrapping_mul(7919) % 100_003 * 2));
        let outcome = fifo(&pages, 500, 10, &Costs::default());
        assert_eq!(outcome.ahead, 0);
    }

    #[test]
    fn stream_continues_behind_resident_pages() {
        let mut streams = Streams::default();
        let resident = |page: u32| (30..100).contains(&page);
        let windows = [10, 11, 15, 100].map(|page| streams.see(1, page, resident).window);
        assert_eq!(windows, [1, 4, 16, 64], "pages 31 to 99 are resident");
        let window = streams.see(1, 200, |_| false).window;
        assert_eq!(window, 1, "pages 164 to 199 are missing");
    }
}

//! A model of the prefetcher's caller for tests: pages, a shelf, and READs that take time.

use std::collections::VecDeque;
use std::ops::Range;

use super::window::IN_FLIGHT;
use super::{Advice, Fault, Found, Plan, Settings, Streams, Window, WindowId};
use crate::page_table::PageId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Absent,
    Remote,
    Evicted,
    Resident,
    Fetching(WindowId),
    Ready(WindowId),
}

/// A posted window.
pub(super) struct Flight {
    pub id: WindowId,
    pages: Vec<u32>,
    posted: u32,
    due: u64,
}

pub(super) struct Machine {
    pub streams: Streams,
    pub places: Vec<Place>,
    /// Number of the first page in `places`.
    pub base: u32,
    pub advice: Advice,
    /// Pages of the mapping, relative to `base`.
    pub bounds: Range<u32>,
    /// Accesses until a window arrives.
    pub latency: u64,
    /// Maximum number of pages posted of one window.
    pub blanks: u32,
    /// Maximum numbers of resident pages, and of read-ahead pages on the shelf.
    pub local: usize,
    pub shelf: usize,
    now: u64,
    resident: VecDeque<u32>,
    ready: VecDeque<(u32, WindowId)>,
    pub flights: Vec<Flight>,
    pub faults: u64,
    pub demand: u64,
    pub posted: u64,
    /// Pages of windows that were mapped, and that were reclaimed.
    pub mapped: u64,
    pub reclaimed: u64,
    /// All windows and all best victims, in the order of the plans.
    pub windows: Vec<Window>,
    pub behind: Vec<Range<u32>>,
}

impl Machine {
    /// A mapping of `pages` remote pages that begins at page 1,000,000.
    pub(super) fn new(settings: Settings, pages: u32) -> Machine {
        Machine {
            streams: Streams::new(settings),
            places: vec![Place::Remote; pages as usize],
            base: 1_000_000,
            advice: Advice::Normal,
            bounds: 0..pages,
            latency: 100,
            blanks: 64,
            local: 4096,
            shelf: 2048,
            now: 0,
            resident: VecDeque::new(),
            ready: VecDeque::new(),
            flights: Vec::new(),
            faults: 0,
            demand: 0,
            posted: 0,
            mapped: 0,
            reclaimed: 0,
            windows: Vec::new(),
            behind: Vec::new(),
        }
    }

    pub(super) fn access_all(&mut self, thread: u32, pages: impl IntoIterator<Item = u32>) {
        for page in pages {
            self.access(thread, page);
        }
    }

    /// Accesses a page, given relative to `base`. Returns the plan if the access faults.
    pub(super) fn access(&mut self, thread: u32, page: u32) -> Option<Plan> {
        self.now += 1;
        self.deliver(|flight, now| flight.due <= now);
        let found = match self.places[page as usize] {
            Place::Resident => return None,
            Place::Absent => Found::Absent,
            Place::Remote => Found::Remote,
            Place::Evicted => Found::Evicted,
            Place::Ready(id) => Found::Ready(id),
            Place::Fetching(id) => Found::Late(id),
        };
        self.faults += 1;
        self.demand += u64::from(found == Found::Remote);
        let bounds = self.base + self.bounds.start..self.base + self.bounds.end;
        let id = PageId(self.base + page);
        let fault = Fault { thread, page: id, bounds, advice: self.advice, found };
        let plan = self.streams.fault(&fault);
        if let Found::Late(id) = found {
            // The wait lasts until the whole window is there, or only until this page is there.
            if self.latency < u64::MAX {
                let due = self.flights.iter().find(|flight| flight.id == id).unwrap().due;
                self.now = self.now.max(if due == u64::MAX { self.now } else { due });
                self.deliver(|flight, _| flight.id == id);
            }
        }
        self.map(page, found, &plan);
        plan.issue.iter().flatten().for_each(|window| self.post(*window));
        assert!(self.flights.len() <= IN_FLIGHT as usize, "{} in flight", self.flights.len());
        if let Some(behind) = &plan.behind {
            assert!(!behind.is_empty() && !behind.contains(&(self.base + page)));
            self.behind.push(behind.start - self.base..behind.end - self.base);
        }
        while self.resident.len() > self.local {
            let victim = self.resident.pop_front().unwrap();
            self.places[victim as usize] = Place::Remote;
        }
        while self.ready.len() > self.shelf {
            self.reclaim_oldest();
        }
        Some(plan)
    }

    fn map(&mut self, page: u32, found: Found, plan: &Plan) {
        assert!((1..=64).contains(&plan.map), "{plan:?}");
        self.make_resident(page);
        for distance in 1..plan.map {
            let next = match plan.backwards {
                false => page.checked_add(distance),
                true => page.checked_sub(distance),
            };
            let Some(next) = next.filter(|next| self.bounds.contains(next)) else {
                panic!("{plan:?} leaves the mapping at {page}")
            };
            match self.places[next as usize] {
                Place::Resident => {}
                Place::Absent if found == Found::Absent => self.make_resident(next),
                Place::Ready(_) | Place::Evicted => self.make_resident(next),
                _ => break,
            }
        }
    }

    fn make_resident(&mut self, page: u32) {
        let place = std::mem::replace(&mut self.places[page as usize], Place::Resident);
        if let Place::Ready(_) = place {
            let at = self.ready.iter().position(|(ready, _)| *ready == page).unwrap();
            self.ready.remove(at);
        }
        if let Place::Fetching(id) = place {
            let flight = self.flights.iter_mut().find(|flight| flight.id == id).unwrap();
            flight.pages.retain(|fetching| *fetching != page);
        }
        self.mapped += u64::from(matches!(place, Place::Ready(_) | Place::Fetching(_)));
        self.resident.push_back(page);
    }

    fn post(&mut self, window: Window) {
        let bounds = self.base + self.bounds.start..self.base + self.bounds.end;
        assert!((1..=64).contains(&window.pages) && window.step != 0, "{window:?}");
        let mut pages = Vec::new();
        for page in window.iter() {
            assert!(bounds.contains(&page.0), "{window:?} leaves {bounds:?}");
            let page = page.0 - self.base;
            if self.places[page as usize] == Place::Remote && pages.len() < self.blanks as usize {
                self.places[page as usize] = Place::Fetching(window.id);
                pages.push(page);
            }
        }
        self.windows.push(window);
        let posted = pages.len() as u32;
        self.posted += u64::from(posted);
        if posted == 0 {
            self.streams.arrived(window.id, 0);
        } else {
            let due = self.now.saturating_add(self.latency);
            self.flights.push(Flight { id: window.id, pages, posted, due });
        }
    }

    /// Lets windows arrive for which `is_due(flight, now)`.
    pub(super) fn deliver(&mut self, is_due: impl Fn(&Flight, u64) -> bool) {
        let mut at = 0;
        while at < self.flights.len() {
            if !is_due(&self.flights[at], self.now) {
                at += 1;
                continue;
            }
            let Flight { id, pages, posted, .. } = self.flights.remove(at);
            for page in pages {
                self.places[page as usize] = Place::Ready(id);
                self.ready.push_back((page, id));
            }
            self.streams.arrived(id, posted);
        }
    }

    /// Reclaims the oldest page that was read ahead.
    pub(super) fn reclaim_oldest(&mut self) {
        let Some((page, id)) = self.ready.pop_front() else { return };
        self.places[page as usize] = Place::Remote;
        self.reclaimed += 1;
        self.streams.reclaimed(id, 1);
    }

    pub(super) fn reclaim_all(&mut self) {
        while !self.ready.is_empty() {
            self.reclaim_oldest();
        }
    }

    /// Checks the prefetcher's numbers against this model's.
    #[track_caller]
    pub(super) fn check(&mut self) {
        let counters = self.streams.counters();
        let (in_flight, outstanding) = self.streams.windows.totals();
        assert_eq!(in_flight, self.flights.len());
        let in_flight: u64 = self.flights.iter().map(|flight| u64::from(flight.posted)).sum();
        assert_eq!(counters.issued, self.posted - in_flight);
        assert_eq!(counters.issued, counters.used + counters.wasted + outstanding);
        assert_eq!(counters.outstanding(), outstanding);
        assert_eq!(counters.demand, self.demand);
        assert!(counters.late <= self.faults);
        for share in [counters.accuracy(), counters.coverage(), counters.late_share()] {
            assert!(share.is_none_or(|share| (0.0..=1.0).contains(&share)));
        }
    }

    pub(super) fn accuracy(&self) -> f64 {
        self.streams.counters().accuracy().unwrap_or(1.0)
    }

    /// Windows of the newest plan with their first page relative to `base`.
    pub(super) fn last_window(&self) -> Option<(u32, u32, i32)> {
        let window = self.windows.last()?;
        Some((window.first.0 - self.base, window.pages, window.step))
    }
}

//! Stream contexts: per thread, the places in memory where the thread's faults go on.

use super::trend::Deltas;
use super::window::{Owner, Span, Window, WindowId};

/// Distance, in pages, within which a fault belongs to a context.
pub(super) const ZONE: u32 = 256;
/// Contexts of a thread.
const CONTEXTS: usize = 16;
/// Confidence, of 0 to 3, from which other faults do not displace a context.
pub(super) const CONFIDENT: u8 = 2;
pub(super) const CONFIDENCE_MAX: u8 = 3;
/// Maximum number of windows that a stream has planned and not reached.
pub(super) const AHEAD: usize = 4;
const CAUTION_MAX: u8 = 3;
/// Faults of its thread after which an unused confident context is stale.
const STALE_FAULTS: u64 = 64;

/// Windows that a stream has planned and not reached, in its order.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    windows: [Option<Window>; AHEAD],
    length: usize,
}

impl Queue {
    pub(super) fn len(&self) -> usize {
        self.length
    }

    pub(super) fn first(&self) -> Option<Window> {
        self.windows[0]
    }

    /// Adds a window. The caller has checked that the length is below [`AHEAD`].
    pub(super) fn push(&mut self, window: Window) {
        self.windows[self.length] = Some(window);
        self.length += 1;
    }

    pub(super) fn remove_first(&mut self) {
        self.windows[0] = None;
        self.windows.rotate_left(1);
        self.length = self.length.saturating_sub(1);
    }
}

/// The history of one place, and the stream there if the history has a trend.
#[derive(Clone, Debug)]
pub(super) struct Context {
    /// Distinguishes successive contexts of one table entry. 0: an empty entry.
    pub birth: u64,
    /// Number of faults. The context is on probation until the third one.
    pub faults: u64,
    /// Value of the thread's fault counter at the newest fault.
    hit: u64,
    pub confidence: u8,
    pub deltas: Deltas,
    /// Page from which the next delta is measured.
    previous: u32,
    /// The mapped run in which the stream is. The step is 0 while there is no stream.
    pub run: Span,
    /// The window that covers the run, if the run was read ahead.
    pub current: Option<WindowId>,
    pub queue: Queue,
    /// The next page to plan.
    pub frontier: i64,
    /// Pages of the next window.
    pub size: u32,
    /// Number of windows to plan ahead of the stream: 1, 2 or 4.
    pub ahead: usize,
    /// Windows in succession that arrived before the stream reached them. After `patience` of these
    /// the stream has fewer windows ahead.
    pub timely: u32,
    pub patience: u32,
    pub in_flight: u32,
    /// Wasteful windows in succession, 0 or 1.
    pub wasteful: u32,
    /// Faults until the context may read ahead again.
    pub suspended: u32,
    /// The last two runs that the stream has left, newest first.
    pub left: [Option<Span>; 2],
}

impl Context {
    const fn new(birth: u64) -> Context {
        Context {
            birth,
            faults: 0,
            hit: 0,
            confidence: 0,
            deltas: Deltas::new(),
            previous: 0,
            run: Span { first: 0, pages: 0, step: 0 },
            current: None,
            queue: Queue { windows: [None; AHEAD], length: 0 },
            frontier: 0,
            size: 0,
            ahead: 1,
            timely: 0,
            patience: 0,
            in_flight: 0,
            wasteful: 0,
            suspended: 0,
            left: [None; 2],
        }
    }

    pub(super) fn is_stream(&self) -> bool {
        self.run.step != 0
    }

    /// True if the stream predicted `page`. The page is in the run, in a window, or at most the
    /// size of a window behind the last one. Pages between may be resident, so they do not fault.
    pub(super) fn is_on_stream(&self, page: u32) -> bool {
        if !self.is_stream() {
            return false;
        }
        let Some(index) = self.run.index(page.into()) else { return false };
        let planned = self.run.index(self.frontier).unwrap_or(0);
        (0..=planned + i64::from(self.size)).contains(&index)
    }

    /// Records the delta to `page`, which the context did not predict.
    pub(super) fn record_delta(&mut self, page: u32) {
        if self.faults > 1 && page != self.previous {
            self.deltas.push(i64::from(page) - i64::from(self.previous));
        }
        self.previous = page;
    }

    /// Records that the stream has reached `page`.
    pub(super) fn record_stream(&mut self, page: u32) {
        self.previous = page;
    }

    /// Begins a stream at `page`, whose run is empty as yet.
    pub(super) fn start(&mut self, page: u32, step: i32, size: u32) {
        self.run = Span { first: page, pages: 0, step };
        self.current = None;
        self.queue = Queue::default();
        self.frontier = page.into();
        self.size = size;
        self.ahead = 1;
        self.timely = 0;
        self.confidence = 0;
        self.left = [None; 2];
    }

    /// Ends the stream. Returns the window in which it was.
    pub(super) fn stop(&mut self) -> Option<WindowId> {
        self.run.step = 0;
        self.queue = Queue::default();
        self.confidence = 0;
        self.current.take()
    }
}

/// The contexts of all threads.
#[derive(Debug)]
pub(super) struct Contexts {
    /// Thread of each 16 contexts.
    threads: Box<[Thread]>,
    contexts: Box<[Context]>,
    /// Page at which each context ended. Separate, because every random fault scans all of them.
    ends: Box<[u32]>,
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct Thread {
    id: u32,
    /// Value of the clock at the newest fault. 0: an empty entry.
    hit: u64,
    /// Faults that the contexts of this thread received, or were refused.
    faults: u64,
    /// Rises with each wasteful window, and falls with each window that was used: 0 to 3.
    caution: u8,
}

impl Contexts {
    pub(super) fn new(threads: usize) -> Contexts {
        Contexts {
            threads: vec![Thread { id: 0, hit: 0, faults: 0, caution: 0 }; threads]
                .into_boxed_slice(),
            contexts: vec![Context::new(0); threads * CONTEXTS].into_boxed_slice(),
            ends: vec![u32::MAX; threads * CONTEXTS].into_boxed_slice(),
            clock: 0,
        }
    }

    pub(super) fn get(&mut self, at: usize) -> &mut Context {
        &mut self.contexts[at]
    }

    /// The context of a window's owner, if that context still exists.
    pub(super) fn of(&mut self, owner: Owner) -> Option<&mut Context> {
        Some(&mut self.contexts[owner.context]).filter(|context| context.birth == owner.birth)
    }

    pub(super) fn owner(&self, at: usize) -> Owner {
        Owner { context: at, birth: self.contexts[at].birth }
    }

    /// The caution of a context's thread.
    pub(super) fn caution(&self, at: usize) -> u8 {
        self.threads[at / CONTEXTS].caution
    }

    pub(super) fn raise_caution(&mut self, at: usize) {
        let caution = &mut self.threads[at / CONTEXTS].caution;
        *caution = (*caution + 1).min(CAUTION_MAX);
    }

    pub(super) fn lower_caution(&mut self, at: usize) {
        let caution = &mut self.threads[at / CONTEXTS].caution;
        *caution = caution.saturating_sub(1);
    }

    /// Sets the page near which further faults belong to a context.
    pub(super) fn set_end(&mut self, at: usize, page: u32) {
        self.ends[at] = page;
    }

    /// Counts a fault of a context.
    pub(super) fn hit(&mut self, at: usize) {
        self.clock += 1;
        let thread = &mut self.threads[at / CONTEXTS];
        thread.faults += 1;
        thread.hit = self.clock;
        self.contexts[at].faults += 1;
        self.contexts[at].hit = thread.faults;
    }

    /// Finds the context of a fault: the first context of this list that exists.
    ///
    /// 1. The owner of the window in which the page was found, if the page is exactly the next one
    ///    of the owner's stream.
    /// 2. The context of the same thread that the page continues.
    /// 3. Such a context of another thread, because a stream may move between threads.
    /// 4. The owner, if the page is anywhere on the owner's stream.
    /// 5. The nearest context of the same thread within a zone.
    pub(super) fn find(&self, thread: u32, page: u32, owner: Option<Owner>) -> Option<usize> {
        let owner = owner.map(|owner| (owner, &self.contexts[owner.context]));
        let owner = owner
            .filter(|(owner, context)| context.birth == owner.birth && context.is_on_stream(page));
        if let Some((owner, context)) = owner
            && context.run.end() == i64::from(page)
        {
            return Some(owner.context);
        }
        let own = self.thread(thread);
        own.and_then(|own| self.continued(own, page))
            .or_else(|| {
                let is_other = |slot: &usize| Some(*slot) != own && self.threads[*slot].hit > 0;
                let others = (0..self.threads.len()).filter(is_other);
                others.filter_map(|slot| self.continued(slot, page)).next()
            })
            .or(owner.map(|(owner, _)| owner.context))
            .or_else(|| own.and_then(|own| self.nearest(own, page)))
    }

    fn thread(&self, id: u32) -> Option<usize> {
        self.threads.iter().position(|thread| thread.id == id && thread.hit > 0)
    }

    /// Returns the context of a thread that `page` continues. The page is a neighbour of the
    /// context's end, in the direction of the stream if there is a stream.
    fn continued(&self, slot: usize, page: u32) -> Option<usize> {
        let base = slot * CONTEXTS;
        let ends: &[u32; CONTEXTS] = self.ends[base..][..CONTEXTS].try_into().ok()?;
        let (below, above) = (page.wrapping_sub(1), page.wrapping_add(1));
        let is_near = |end: u32| (end == below) | (end == page) | (end == above);
        // The search has no early end, so that the compiler compares all ends with few vector
        // instructions.
        if ends.iter().fold(0, |any, end| any | u32::from(is_near(*end))) == 0 {
            return None;
        }
        (base..base + CONTEXTS).find(|at| {
            let context = &self.contexts[*at];
            let is_live = context.birth != 0 && is_near(self.ends[*at]);
            is_live && (!context.is_stream() || context.is_on_stream(page))
        })
    }

    fn nearest(&self, slot: usize, page: u32) -> Option<usize> {
        let base = slot * CONTEXTS;
        let ends: &[u32; CONTEXTS] = self.ends[base..][..CONTEXTS].try_into().ok()?;
        let distances = (0u64..).zip(ends).map(|(n, end)| u64::from(end.abs_diff(page)) << 8 | n);
        let nearest = distances.min()?;
        let at = base + (nearest & 0xff) as usize;
        let is_live = nearest >> 8 <= u64::from(ZONE) && self.contexts[at].birth != 0;
        is_live.then_some(at)
    }

    /// Returns the entries whose contexts a new context of `thread` displaces. For a thread without
    /// contexts, these are all entries of the least recently used thread; otherwise one entry. None
    /// if all contexts of the thread are confident and in use.
    pub(super) fn victims(&mut self, thread: u32) -> Option<std::ops::Range<usize>> {
        let Some(slot) = self.thread(thread) else {
            let slots = 0..self.threads.len();
            let slot = slots.min_by_key(|slot| self.threads[*slot].hit)?;
            self.threads[slot] = Thread { id: thread, hit: self.clock + 1, faults: 0, caution: 0 };
            return Some(slot * CONTEXTS..(slot + 1) * CONTEXTS);
        };
        let faults = self.threads[slot].faults;
        let own = slot * CONTEXTS..(slot + 1) * CONTEXTS;
        // The victim is the least confident context, and among equals the least recent one. An
        // empty entry has neither confidence nor hits. Confident contexts come last.
        let rank =
            |context: &Context| u64::from(context.confidence.min(CONFIDENT)) << 48 | context.hit;
        // Confidence, hits and index are in one number, so that the search has no branch to
        // mispredict.
        let ranked = (0u64..).zip(&self.contexts[own.clone()]);
        let victim = ranked.map(|(n, context)| rank(context) << 8 | n).min()?;
        let at = own.start + (victim & 0xff) as usize;
        let Context { confidence, hit, .. } = self.contexts[at];
        if confidence >= CONFIDENT && faults - hit <= STALE_FAULTS {
            self.threads[slot].faults += 1;
            return None;
        }
        Some(at..at + 1)
    }

    /// Empties an entry. Returns the window in which its stream was.
    pub(super) fn clear(&mut self, at: usize) -> Option<WindowId> {
        let context = &mut self.contexts[at];
        (context.birth, context.hit, context.confidence) = (0, 0, 0);
        self.ends[at] = u32::MAX;
        context.current.take()
    }

    /// Makes a new context in an empty entry.
    pub(super) fn create(&mut self, at: usize) {
        self.contexts[at] = Context::new(self.clock + 1);
    }
}

//! The ring of a session: page lists from the host to the assist, and their completions.
//!
//! ```text
//!  +0     magic and version, u64, host
//!  +64    produced, u32, host: number of requests so far
//!  +128   sleeps, u32, assist: 1 while the assist sleeps, and a packet must wake it
//!  +192   waiters, u32, host: threads that sleep on a completion word
//!  +256   completion words, u32 for each entry, assist (after its death: host)
//!  +512   entries, 512 bytes each, host
//!
//!  entry  +0   count of items, bit 31: WRITE
//!         +8   items of three u64: address; rkey, node (from bit 32), pages (from bit 48);
//!              frame, qp (from bit 32)
//! ```
//!
//! Request `n` is in entry `n % ENTRIES`. Its completion word becomes `mark(n)`, with `FAILED` if
//! a page was not moved. An entry is used again only after its completion, so the completion word
//! of the request before never equals the mark of the request after.
//!
//! # Sleep
//! Both sides store their own word and then load the other side's, with the functions of `wake.rs`:
//! the host stores `produced` and loads `sleeps`, the assist stores `sleeps` and loads `produced`.
//! A waiter raises `waiters` and then sleeps on the completion word as a futex, and the assist
//! stores the completion word and loads `waiters`.
//!
//! # Trust
//! The host may write any bytes at any time. The assist copies an entry once and validates the copy
//! ([`Consumer::take`]). The host believes only the completion words.

use std::sync::atomic::{AtomicU32, Ordering, fence};

use smallvec::SmallVec;
use verbs::DmaMemory;

use crate::sys;
use crate::transport::Direction;
use crate::wake;

/// Entries of a ring.
pub const ENTRIES: u32 = 64;
/// Maximum number of items of a request.
pub const ITEMS_MAX: usize = 16;
/// Bytes of a ring.
pub const BYTES: usize = ENTRIES_AT + ENTRIES as usize * ENTRY_BYTES;

const MAGIC: u64 = u64::from_le_bytes(*b"gr-asst\x01");
const PRODUCED: usize = 64;
const SLEEPS: usize = 128;
const WAITERS: usize = 192;
const COMPLETIONS: usize = 256;
const ENTRIES_AT: usize = 512;
const ENTRY_BYTES: usize = 512;
const ITEM_BYTES: usize = 24;

/// Bit of an entry's first word: the request is a WRITE.
const WRITE: u32 = 1 << 31;
/// Bit of a completion word: the host must run the request again.
const FAILED: u32 = 1 << 31;
/// Bit of every completion word, which distinguishes it from that of an unused entry.
const MARKED: u32 = 1 << 30;

/// Number of a request: counts from 0, and wraps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Number(u32);

impl Number {
    /// Returns the index of the request's entry.
    pub fn entry(self) -> usize {
        (self.0 % ENTRIES) as usize
    }

    /// Returns the completion word of the request.
    fn mark(self) -> u32 {
        (self.0 & (MARKED - 1)) | MARKED
    }

    /// Returns the number as a token of transfers.
    pub fn to_u64(self) -> u64 {
        self.0.into()
    }

    /// Returns the number of a token.
    pub fn from_u64(token: u64) -> Self {
        Self(token as u32)
    }

    fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

/// One contiguous run of pages of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Address of the first byte at the memory node.
    pub address: u64,
    /// Key of the chunk; without meaning where no NIC moves the pages.
    pub rkey: u32,
    /// Index of the memory node. All items of a request have the same one.
    pub node: u16,
    /// Index of the lent queue pair; without meaning where no NIC moves the pages.
    pub qp: u16,
    /// First frame of this node.
    pub frame: u32,
    /// Number of pages.
    pub pages: u16,
}

/// A page list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Direction of all items.
    pub direction: Direction,
    /// 1 to [`ITEMS_MAX`] items.
    pub items: SmallVec<[Item; ITEMS_MAX]>,
}

/// End of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All pages are where they belong.
    Moved,
    /// Some pages were not moved. The host runs the request again.
    Failed,
}

/// A violation of the layout by the host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The memory does not begin with the magic number, or is too small.
    #[error("its memory is not a ring of this version")]
    Version,
    /// More requests were produced than the ring holds.
    #[error("{produced} requests were produced, and {consumed} taken")]
    Overrun {
        /// Value of the index.
        produced: u32,
        /// Requests that were taken.
        consumed: u32,
    },
    /// A request has no item, or too many.
    #[error("a request has {0} items")]
    Items(u32),
    /// The items of a request name different memory nodes.
    #[error("a request names several memory nodes")]
    Nodes,
    /// An item lies outside of the frames, or names no memory node.
    #[error("a request names {pages} pages at frame {frame} of memory node {node}")]
    Frames {
        /// First frame.
        frame: u32,
        /// Number of pages.
        pages: u16,
        /// Index of the memory node.
        node: u16,
    },
}

/// Memory of a ring, of at least [`BYTES`] bytes.
struct Ring(DmaMemory);

impl Ring {
    fn produced(&self) -> &AtomicU32 {
        self.0.word32(PRODUCED)
    }

    fn sleeps(&self) -> &AtomicU32 {
        self.0.word32(SLEEPS)
    }

    fn waiters(&self) -> &AtomicU32 {
        self.0.word32(WAITERS)
    }

    fn completion(&self, number: Number) -> &AtomicU32 {
        self.0.word32(COMPLETIONS + number.entry() * 4)
    }

    fn load(&self, at: usize) -> u64 {
        self.0.word64(at).load(Ordering::Relaxed)
    }

    fn store(&self, at: usize, value: u64) {
        self.0.word64(at).store(value, Ordering::Relaxed);
    }

    fn complete(&self, number: Number, outcome: Outcome) {
        let failed = if outcome == Outcome::Failed { FAILED } else { 0 };
        let word = self.completion(number);
        word.store(number.mark() | failed, Ordering::Release);
        if wake::is_announced(self.waiters()) {
            sys::futex_wake_shared(word);
        }
    }
}

fn entry_at(number: Number) -> usize {
    ENTRIES_AT + number.entry() * ENTRY_BYTES
}

/// The host's side that writes requests. One thread at a time.
pub struct Producer {
    ring: Ring,
    next: Number,
}

impl Producer {
    /// Makes a ring in zeroed memory of at least [`BYTES`] bytes.
    pub fn new(memory: DmaMemory) -> Self {
        let ring = Ring(memory);
        ring.0.word64(0).store(MAGIC, Ordering::Release);
        Self { ring, next: Number(0) }
    }

    /// Returns the number that the next request gets.
    pub fn next(&self) -> Number {
        self.next
    }

    /// Writes a request. The request before in its entry has ended. Returns true if a packet must
    /// wake the assist.
    pub fn push(&mut self, request: &Request) -> bool {
        let at = entry_at(self.next);
        let write = if request.direction == Direction::Write { WRITE } else { 0 };
        self.ring.store(at, u64::from(request.items.len() as u32 | write));
        for (index, item) in request.items.iter().enumerate() {
            let at = at + 8 + index * ITEM_BYTES;
            let key = u64::from(item.rkey);
            self.ring.store(at, item.address);
            self.ring.store(at + 8, key | u64::from(item.node) << 32 | u64::from(item.pages) << 48);
            self.ring.store(at + 16, u64::from(item.frame) | u64::from(item.qp) << 32);
        }
        self.next = self.next.next();
        self.ring.produced().store(self.next.0, Ordering::Release);
        wake::is_announced(self.ring.sleeps())
    }

    /// Returns the side that waits for completions.
    pub fn completions(&self) -> Completions {
        Completions(Ring(self.ring.0.clone()))
    }
}

/// The host's side that waits for completions.
pub struct Completions(Ring);

impl Completions {
    /// Returns the end of a request, once it has ended.
    pub fn outcome(&self, number: Number) -> Option<Outcome> {
        let word = self.0.completion(number).load(Ordering::Acquire);
        if word & !FAILED != number.mark() {
            return None;
        }
        Some(if word & FAILED == 0 { Outcome::Moved } else { Outcome::Failed })
    }

    /// Sleeps until a request ends, at most `timeout_ms`. May return early.
    pub fn sleep(&self, number: Number, timeout_ms: u64) {
        let word = self.0.completion(number);
        self.0.waiters().fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let seen = word.load(Ordering::Acquire);
        if seen & !FAILED != number.mark() {
            sys::futex_wait_shared(word, seen, Some(timeout_ms));
        }
        self.0.waiters().fetch_sub(1, Ordering::SeqCst);
    }

    /// Ends a request in place of an assist that is gone, and wakes the threads that wait for it.
    pub fn complete(&self, number: Number, outcome: Outcome) {
        self.0.complete(number, outcome);
    }
}

/// The assist's side.
pub struct Consumer {
    ring: Ring,
    next: Number,
    /// Number of frames of each memory node.
    frames: SmallVec<[u32; 1]>,
}

impl Consumer {
    /// Takes part in a ring whose requests name frames of these numbers, for each memory node.
    ///
    /// # Errors
    /// The memory is too small, or has no ring of this version.
    pub fn new(memory: DmaMemory, frames: &[u32]) -> Result<Self, Violation> {
        if memory.len() < BYTES || memory.word64(0).load(Ordering::Acquire) != MAGIC {
            return Err(Violation::Version);
        }
        Ok(Self { ring: Ring(memory), next: Number(0), frames: frames.into() })
    }

    /// Takes the next request, if there is one.
    ///
    /// # Errors
    /// The host violates the layout. The ring must not be used any more.
    pub fn take(&mut self) -> Result<Option<(Number, Request)>, Violation> {
        let (produced, consumed) = (self.ring.produced().load(Ordering::Acquire), self.next.0);
        match produced.wrapping_sub(consumed) {
            0 => return Ok(None),
            1..=ENTRIES => {}
            _ => return Err(Violation::Overrun { produced, consumed }),
        }
        let number = self.next;
        let request = self.copy(number)?;
        self.next = number.next();
        Ok(Some((number, request)))
    }

    /// Returns true if there is a request to take, or the host violates the layout.
    pub fn has_request(&self) -> bool {
        self.ring.produced().load(Ordering::Acquire) != self.next.0
    }

    fn copy(&self, number: Number) -> Result<Request, Violation> {
        let at = entry_at(number);
        let head = self.ring.load(at) as u32;
        let count = head & !WRITE;
        if count == 0 || count as usize > ITEMS_MAX {
            return Err(Violation::Items(count));
        }
        let direction = if head & WRITE == 0 { Direction::Read } else { Direction::Write };
        let items = (0..count as usize).map(|index| self.item(at + 8 + index * ITEM_BYTES));
        let items: SmallVec<[Item; ITEMS_MAX]> = items.collect::<Result<_, _>>()?;
        match items.iter().all(|item| item.node == items[0].node) {
            true => Ok(Request { direction, items }),
            false => Err(Violation::Nodes),
        }
    }

    fn item(&self, at: usize) -> Result<Item, Violation> {
        let [address, middle, last] = [0, 8, 16].map(|offset| self.ring.load(at + offset));
        let (frame, qp) = (last as u32, (last >> 32) as u16);
        let (rkey, node, pages) = (middle as u32, (middle >> 32) as u16, (middle >> 48) as u16);
        let frames = self.frames.get(usize::from(node)).copied().unwrap_or(0);
        let fits = frame <= frames && u32::from(pages) <= frames - frame;
        if pages == 0 || !fits {
            return Err(Violation::Frames { frame, pages, node });
        }
        Ok(Item { address, rkey, node, qp, frame, pages })
    }

    /// Ends a request, and wakes the threads of the host that wait for it.
    pub fn complete(&self, number: Number, outcome: Outcome) {
        self.ring.complete(number, outcome);
    }

    /// Announces that the assist is about to sleep. The caller looks for requests once more
    /// afterwards.
    pub fn announce_sleep(&self) {
        wake::announce(self.ring.sleeps());
    }

    /// Announces that the assist is awake.
    pub fn announce_awake(&self) {
        wake::end_sleep(self.ring.sleeps());
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;

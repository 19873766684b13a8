//! Epochs in remote memory: the time from which on no client knows an unlinked block.
//!
//! ```text
//! block of epochs   +0 the epoch      +64 (1 + i) line of client i
//! line              +0 63 epoch, 0 = no client 8 | 7 number of clients so far, modulo 256 0
//!                   +8 63 tag 48 | 47 place of the client's word of life 0;    0 = no client
//! ```
//!
//! A client owns a line from its CAS of the second word until another CAS of this word to 0. The
//! number of clients makes the first words of two clients of one line differ.
//!
//! The epoch is a counter that each client may increase. A client reads the epoch from time to
//! time (a *tick*), and writes the value into its word when all operations that began before the
//! tick have ended. So a block that was unlinked while the epoch was `e` is free when all words are
//! greater than `e`.
//!
//! A client that has ended without leaving holds the epoch back. The others read its word of life
//! then, which has the value of the line's second word as long as the client's connection lives.

use std::collections::{BTreeMap, VecDeque};

use parking_lot::Mutex;

use crate::layout::word;
use crate::place::{Address, Place};

/// Bytes of one word's line.
pub(super) const LINE: usize = 64;
/// Maximum number of clients.
pub(super) const CLIENTS: usize = 63;

/// Bits of the number of clients in the first word of a line.
pub(super) const COUNT_BITS: u32 = 8;

/// The first word of a line, of the client with the number `count` in this line.
pub(super) const fn line_word(epoch: u64, count: u64) -> u64 {
    epoch << COUNT_BITS | count & 0xff
}

/// The epoch in the first word of a line. 0: no client.
pub(super) const fn epoch_of(word: u64) -> u64 {
    word >> COUNT_BITS
}

/// Number of clients for which a slab of `slab` bytes has lines.
pub(super) fn clients_of(slab: u32) -> usize {
    (slab as usize / LINE).saturating_sub(1).min(CLIENTS)
}

/// The epochs as one client knows them.
#[derive(Debug)]
pub(super) struct Epochs {
    block: Place,
    client: u32,
    /// Number of the client in its line.
    count: u64,
    clients: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Number of the latest tick.
    tick: u64,
    /// Time of the latest tick in ms.
    at: u64,
    /// A tick is under way.
    busy: bool,
    /// Operations that run, by the number of the latest tick at their begin.
    running: BTreeMap<u64, u32>,
    /// Ticks whose epoch is not in the client's word yet: number and epoch.
    open: VecDeque<(u64, u64)>,
    /// Unlinked since the latest tick.
    fresh: Vec<(Place, u32)>,
    /// Unlinked before: epoch, block, bytes.
    limbo: VecDeque<(u64, Place, u32)>,
    limbo_bytes: u64,
    /// The least epoch of the clients, and the time in ms since which it holds the epoch back.
    stalled: (u64, u64),
}

/// An operation that runs: no block that it can know is used again.
#[derive(Debug)]
pub(super) struct Running<'a> {
    epochs: &'a Epochs,
    /// Number of the latest tick at the operation's begin.
    pub tick: u64,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut state = self.epochs.state.lock();
        if let Some(count) = state.running.get_mut(&self.tick) {
            *count -= 1;
            if *count == 0 {
                state.running.remove(&self.tick);
            }
        }
    }
}

/// The findings of a tick in remote memory.
pub(super) struct Found {
    /// The epoch.
    pub epoch: u64,
    /// The value for the client's word, if it is to change.
    pub own: Option<u64>,
    /// True if all clients have reached the epoch, which can increase then.
    pub is_reached: bool,
    /// Lines of clients that have held the epoch back for the time of suspicion: number and second
    /// word.
    pub suspects: Vec<(u32, u64)>,
    /// Blocks that are free, with their bytes.
    pub free: Vec<(Place, u32)>,
}

impl Epochs {
    /// The epochs of a client that has registered with the value `epoch`.
    pub fn new(block: Place, (client, count): (u32, u64), slab: u32, now: u64) -> Self {
        let state = State {
            tick: 0,
            at: now,
            busy: false,
            running: BTreeMap::new(),
            open: VecDeque::new(),
            fresh: Vec::new(),
            limbo: VecDeque::new(),
            limbo_bytes: 0,
            stalled: (0, now),
        };
        Self { block, client, count, clients: clients_of(slab), state: Mutex::new(state) }
    }

    /// Number of this client.
    pub fn client(&self) -> u32 {
        self.client
    }

    /// Place of the block of epochs.
    pub fn place(&self) -> Place {
        self.block
    }

    /// Address of the epoch.
    pub fn epoch_word(&self) -> Address {
        self.block.at(0)
    }

    /// Address of the word of client `client`.
    pub fn client_word(&self, client: u32) -> Address {
        client_word(self.block, client)
    }

    /// Bytes of the block of epochs.
    pub fn block_bytes(&self) -> usize {
        LINE * (1 + self.clients)
    }

    /// Begins an operation.
    pub fn begin(&self) -> Running<'_> {
        let mut state = self.state.lock();
        let tick = state.tick;
        *state.running.entry(tick).or_default() += 1;
        Running { epochs: self, tick }
    }

    /// Notes a block that no word names any more.
    pub fn retire(&self, place: Place, bytes: u32) {
        let mut state = self.state.lock();
        state.fresh.push((place, bytes));
        state.limbo_bytes += u64::from(bytes);
    }

    /// Bytes of the blocks that are not free yet.
    pub fn limbo_bytes(&self) -> u64 {
        self.state.lock().limbo_bytes
    }

    /// Begins a tick, unless another is under way or the latest is less than `interval` ms ago.
    /// Returns the number of unlinked blocks that the tick may give the epoch. [`Epochs::end_tick`]
    /// or [`Epochs::abort_tick`] must follow.
    pub fn begin_tick(&self, now: u64, interval: u64) -> Option<usize> {
        let mut state = self.state.lock();
        if state.busy || now < state.at.saturating_add(interval) {
            return None;
        }
        state.busy = true;
        state.at = now;
        Some(state.fresh.len())
    }

    /// The first word of this client's line with `epoch`.
    pub fn own_word(&self, epoch: u64) -> u64 {
        line_word(epoch, self.count)
    }

    /// Evaluates the block of epochs, which was read after [`Epochs::begin_tick`] had returned
    /// `unlinked`. Clients that hold the epoch back for `suspect_ms` are suspects.
    pub fn end_tick(&self, block: &[u8], unlinked: usize, suspect_ms: u64) -> Found {
        let mut state = self.state.lock();
        state.busy = false;
        let epoch = word(block, 0);
        // Operations that begin from here on read the index after the epoch was read.
        state.tick += 1;
        let tick = state.tick;
        state.open.push_back((tick, epoch));
        let older: Vec<_> = state.fresh.drain(..unlinked).collect();
        state.limbo.extend(older.into_iter().map(|(place, bytes)| (epoch, place, bytes)));
        let oldest = state.running.keys().next().copied().unwrap_or(u64::MAX);
        let mut own = None;
        while let Some((_, epoch)) = state.open.front().filter(|(tick, _)| *tick <= oldest) {
            own = Some(*epoch);
            state.open.pop_front();
        }
        let words = (0..self.clients).map(|i| epoch_of(word(block, LINE * (1 + i))));
        let least = words.clone().filter(|epoch| *epoch != 0).min().unwrap_or(0);
        let (at, mut suspects) = (state.at, Vec::new());
        if least >= epoch || state.stalled.0 != least {
            state.stalled = (least, at);
        } else if at >= state.stalled.1.saturating_add(suspect_ms) {
            state.stalled.1 = at;
            let slow = words
                .enumerate()
                .filter(|(i, epoch)| *epoch == least && *i != self.client as usize);
            suspects.extend(slow.map(|(i, _)| (i as u32, word(block, LINE * (1 + i) + 8))));
        }
        let mut free = Vec::new();
        while let Some((_, place, bytes)) =
            state.limbo.front().copied().filter(|(epoch, ..)| *epoch < least)
        {
            state.limbo.pop_front();
            state.limbo_bytes -= u64::from(bytes);
            free.push((place, bytes));
        }
        let mine = epoch_of(word(block, LINE * (1 + self.client as usize)));
        let own = own.filter(|own| *own > mine);
        Found { epoch, own, is_reached: least >= epoch, suspects, free }
    }

    /// Ends a tick whose READ failed.
    pub fn abort_tick(&self) {
        self.state.lock().busy = false;
    }
}

/// Address of the word of client `client` in the block of epochs at `block`.
pub(super) const fn client_word(block: Place, client: u32) -> Address {
    block.at(LINE as u64 * (1 + client as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::put;

    fn block(epoch: u64, words: &[u64]) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        put(&mut bytes, 0, epoch);
        for (i, epoch) in words.iter().enumerate() {
            put(&mut bytes, LINE * (1 + i), line_word(*epoch, 7));
        }
        bytes
    }

    fn tick(epochs: &Epochs, now: u64, block: &[u8]) -> Found {
        let unlinked = epochs.begin_tick(now, 1).expect("a tick");
        epochs.end_tick(block, unlinked, 10)
    }

    #[test]
    fn block_is_free_when_all_words_have_passed() {
        let epochs = Epochs::new(Place::of(1), (0, 7), 4096, 0);
        epochs.retire(Place::of(9), 64);
        assert!(tick(&epochs, 1, &block(5, &[5, 5])).free.is_empty());
        assert!(tick(&epochs, 2, &block(6, &[6, 5])).free.is_empty());
        assert_eq!(tick(&epochs, 3, &block(6, &[6, 6])).free, [(Place::of(9), 64)]);
        assert_eq!(epochs.limbo_bytes(), 0);
        assert!(epochs.begin_tick(3, 1).is_none());
    }

    #[test]
    fn operation_holds_the_word_back() {
        let epochs = Epochs::new(Place::of(1), (0, 7), 4096, 0);
        let running = epochs.begin();
        assert_eq!(tick(&epochs, 1, &block(6, &[5])).own, None);
        let later = epochs.begin();
        drop(running);
        // The later operation began after the first of the two ticks, and before the second.
        assert_eq!(tick(&epochs, 2, &block(7, &[5])).own, Some(6));
        drop(later);
        assert_eq!(tick(&epochs, 3, &block(8, &[6])).own, Some(8));
    }

    #[test]
    fn client_that_holds_the_epoch_back_is_suspected() {
        let epochs = Epochs::new(Place::of(1), (0, 7), 4096, 0);
        let suspects = |now, words: &[u64]| tick(&epochs, now, &block(6, words)).suspects;
        assert!(suspects(1, &[6, 5, 6]).is_empty());
        assert!(suspects(10, &[6, 5, 5]).is_empty());
        assert_eq!(suspects(11, &[6, 5, 5]), [(1, 0), (2, 0)]);
        assert!(suspects(12, &[6, 5, 5]).is_empty());
        assert_eq!(suspects(21, &[5, 5, 6]), [(1, 0)]);
        assert!(suspects(40, &[6, 6, 6]).is_empty());
        assert!(suspects(60, &[6, 6, 6]).is_empty());
    }

    #[test]
    fn block_unlinked_during_a_tick_waits_for_the_next() {
        let epochs = Epochs::new(Place::of(1), (0, 7), 4096, 0);
        let unlinked = epochs.begin_tick(1, 1).expect("a tick");
        epochs.retire(Place::of(9), 64);
        epochs.end_tick(&block(5, &[5]), unlinked, 10);
        assert!(tick(&epochs, 2, &block(6, &[6])).free.is_empty());
        assert_eq!(tick(&epochs, 3, &block(7, &[7])).free, [(Place::of(9), 64)]);
    }
}

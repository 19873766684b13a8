//! Keys by generation: the counters of their nonces, and the release of keys that no seal names.
//!
//! Each generation has a slot of one cache line. The slot's `state` counts the reasons to keep the
//! key, in one word:
//!
//! | bits | count |
//! | --- | --- |
//! | 48 to 63 | *pins*: calls that use the key at the moment, and 1 for the current generation |
//! | 0 to 47 | *live* seals: stored contents that the owner has not forgotten |
//!
//! The thread that makes the word zero drops the key. No thread can pin a slot whose word is zero,
//! so this thread has the key for itself. Seals and pins are counted apart, because the owner
//! counts down the seals: a seal that is forgotten twice can make the key go early, but never while
//! a call uses the key.
//!
//! The slots of used generations stay, so a number never gets a second key.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, TryLockError};

use crate::STORE_BITS;

/// The largest store number.
pub const STORES_MAX: u64 = (1 << STORE_BITS) - 1;

const LIVE: u64 = 1;
const PIN: u64 = 1 << STORE_BITS;
const LIVE_MASK: u64 = PIN - 1;
const PINS_MAX: u64 = u64::MAX >> STORE_BITS;

/// Slots are allocated in chunks, most sealers need one.
const CHUNK_SLOTS: usize = 128;
const CHUNKS: usize = (1 << 16) / CHUNK_SLOTS;
type Chunk<K> = Box<[Slot<K>; CHUNK_SLOTS]>;

/// Value of `current` after [`Generations::wipe`].
const WIPED: u32 = u32::MAX;

/// All generations of a sealer's keys.
pub struct Generations<K> {
    current: AtomicU32,
    /// Held while a generation is added.
    adding: Mutex<()>,
    chunks: Box<[OnceLock<Chunk<K>>; CHUNKS]>,
}

// The counters lie in one cache line, because each call changes them together.
#[repr(align(64))]
struct Slot<K> {
    state: AtomicU64,
    /// Store numbers that were taken.
    stores: AtomicU64,
    /// Contents that were opened.
    opens: AtomicU64,
    /// Initialized while `state` is not zero.
    key: UnsafeCell<MaybeUninit<K>>,
}

// SAFETY: threads share `&K` and drop K, which its bounds allow. `state` orders both.
unsafe impl<K: Send + Sync> Sync for Slot<K> {}

/// Reasons why no generation could be added.
#[derive(Debug, PartialEq, Eq)]
pub enum NotAdded<E> {
    /// All numbers are used.
    Used,
    /// The keys were wiped.
    Wiped,
    /// The key could not be made.
    Failed(E),
}

impl<K> Generations<K> {
    /// Makes generation 0.
    pub fn new(key: K) -> Self {
        let generations = Self {
            current: AtomicU32::new(0),
            adding: Mutex::new(()),
            chunks: Box::new([const { OnceLock::new() }; CHUNKS]),
        };
        generations.add(0, key);
        generations
    }

    /// Pins the current generation. `None` after [`Self::wipe`].
    #[inline]
    pub fn current(&self) -> Option<Pinned<'_, K>> {
        loop {
            let current = self.current.load(Ordering::Acquire);
            let generation = u16::try_from(current).ok()?;
            // Otherwise the generation has just been replaced.
            if let Some(pinned) = self.pin(generation) {
                return Some(pinned);
            }
        }
    }

    /// Pins a generation. `None` if the generation has no key.
    #[inline]
    pub fn pin(&self, generation: u16) -> Option<Pinned<'_, K>> {
        let slot = self.slot(generation)?;
        slot.pin().then(|| Pinned { slot, generation })
    }

    /// Counts down the live seals of a generation, and drops the key with the last of them.
    pub fn forget(&self, generation: u16) {
        if let Some(slot) = self.slot(generation) {
            slot.forget();
        }
    }

    /// Adds a generation with the key that `make` returns. It becomes the current one.
    ///
    /// # Errors
    /// [`NotAdded`].
    pub fn replace<E>(&self, make: impl FnOnce() -> Result<K, E>) -> Result<(), NotAdded<E>> {
        let _adding = self.adding.lock().unwrap_or_else(PoisonError::into_inner);
        self.replace_locked(make)
    }

    /// Like [`Self::replace`], if `generation` is the current one. Does nothing while another
    /// thread adds a generation, and never waits.
    pub fn replace_if_current<E>(
        &self,
        generation: u16,
        make: impl FnOnce() -> Result<K, E>,
    ) -> Result<(), NotAdded<E>> {
        let _adding = match self.adding.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        if self.current.load(Ordering::Relaxed) != u32::from(generation) {
            return Ok(());
        }
        self.replace_locked(make)
    }

    fn replace_locked<E>(&self, make: impl FnOnce() -> Result<K, E>) -> Result<(), NotAdded<E>> {
        let old = self.current.load(Ordering::Relaxed);
        let old = u16::try_from(old).map_err(|_| NotAdded::Wiped)?;
        let new = old.checked_add(1).ok_or(NotAdded::Used)?;
        self.add(new, make().map_err(NotAdded::Failed)?);
        self.current.store(new.into(), Ordering::Release);
        self.slot(old).expect("the current generation has a slot").release(PIN);
        Ok(())
    }

    /// Initializes the slot of a generation. Each number is added once.
    fn add(&self, generation: u16, key: K) {
        let (chunk, at) = place(generation);
        let chunk = self.chunks[chunk].get_or_init(|| Box::new([const { Slot::NEW }; CHUNK_SLOTS]));
        chunk[at].fill(key);
    }

    #[inline]
    fn slot(&self, generation: u16) -> Option<&Slot<K>> {
        let (chunk, at) = place(generation);
        self.chunks[chunk].get().map(|chunk| &chunk[at])
    }

    fn slots(&self) -> impl Iterator<Item = &Slot<K>> {
        self.chunks.iter().filter_map(OnceLock::get).flat_map(|chunk| chunk.iter())
    }

    /// Drops all keys. No generation can be pinned or added afterwards.
    pub fn wipe(&mut self) {
        // SAFETY: an exclusive borrow.
        unsafe { self.wipe_shared() }
    }

    /// Like [`Self::wipe`].
    ///
    /// # Safety
    /// No other thread of this process uses these generations, and no [`Pinned`] of this process is
    /// used or dropped later.
    pub unsafe fn wipe_shared(&self) {
        self.current.store(WIPED, Ordering::Release);
        for slot in self.slots() {
            if slot.state.swap(0, Ordering::AcqRel) != 0 {
                // SAFETY: initialized, since the state was not zero. The caller excludes users.
                unsafe { (*slot.key.get()).assume_init_drop() };
            }
        }
    }

    /// Sums of all generations: stores, opens, and keys that exist.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for slot in self.slots() {
            totals.stores += slot.stores.load(Ordering::Relaxed).min(STORES_MAX);
            totals.opens += slot.opens.load(Ordering::Relaxed);
            totals.keys += u32::from(slot.state.load(Ordering::Relaxed) != 0);
        }
        totals
    }

    /// Bytes of the slots and their index.
    pub fn bytes(&self) -> usize {
        let chunks = self.chunks.iter().filter(|chunk| chunk.get().is_some()).count();
        chunks * size_of::<[Slot<K>; CHUNK_SLOTS]>() + size_of::<[OnceLock<Chunk<K>>; CHUNKS]>()
    }
}

impl<K> Drop for Generations<K> {
    fn drop(&mut self) {
        self.wipe();
    }
}

/// Result of [`Generations::totals`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub stores: u64,
    pub opens: u64,
    pub keys: u32,
}

fn place(generation: u16) -> (usize, usize) {
    let generation = usize::from(generation);
    (generation / CHUNK_SLOTS, generation % CHUNK_SLOTS)
}

impl<K> Slot<K> {
    #[expect(
        clippy::declare_interior_mutable_const,
        reason = "the initial value of array elements"
    )]
    const NEW: Self = Self {
        state: AtomicU64::new(0),
        stores: AtomicU64::new(0),
        opens: AtomicU64::new(0),
        key: UnsafeCell::new(MaybeUninit::uninit()),
    };

    /// Gives a new slot its key, and the pin of the current generation.
    fn fill(&self, key: K) {
        debug_assert_eq!(self.state.load(Ordering::Relaxed), 0);
        // SAFETY: the state is zero, so no other thread accesses the key. The callers add each
        // generation once, in `new` or under `adding`.
        unsafe { (*self.key.get()).write(key) };
        self.state.store(PIN, Ordering::Release);
    }

    #[inline]
    fn pin(&self) -> bool {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            if state == 0 {
                return false;
            }
            assert!(state >> STORE_BITS < PINS_MAX, "fewer than 65535 calls at a time");
            match self.state.compare_exchange_weak(
                state,
                state + PIN,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
    }

    fn forget(&self) {
        let mut state = self.state.load(Ordering::Relaxed);
        // A seal that is forgotten twice does not count down a pin.
        while state & LIVE_MASK != 0 {
            match self.state.compare_exchange_weak(
                state,
                state - LIVE,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(LIVE) => return self.drop_key(),
                Ok(_) => return,
                Err(now) => state = now,
            }
        }
    }

    /// Takes `count`, which the caller has added, off the state.
    #[inline]
    fn release(&self, count: u64) {
        if self.state.fetch_sub(count, Ordering::AcqRel) == count {
            self.drop_key();
        }
    }

    /// Called by the thread that has made the state zero.
    #[cold]
    fn drop_key(&self) {
        // SAFETY: initialized, since the state was not zero before. No thread pins a slot with
        // state zero, and all pins were released before, so this thread is the only user.
        unsafe { (*self.key.get()).assume_init_drop() };
    }
}

/// A generation whose key exists while this value does.
pub struct Pinned<'a, K> {
    slot: &'a Slot<K>,
    generation: u16,
}

impl<K> Pinned<'_, K> {
    pub fn generation(&self) -> u16 {
        self.generation
    }

    /// Takes a store number, from 1 on. No other call for this generation returns the same number.
    /// `None` if all numbers are taken.
    ///
    /// The counter itself has 64 bits. It cannot wrap around: at one call each nanosecond that
    /// takes 584 years.
    #[inline]
    pub fn take_store_number(&self) -> Option<u64> {
        let number = self.slot.stores.fetch_add(1, Ordering::Relaxed) + 1;
        (number <= STORES_MAX).then_some(number)
    }

    /// Counts a live seal in exchange for the pin.
    #[inline]
    pub fn keep(self) {
        // The slot keeps the key for the seal, so the state does not become zero. The live seals
        // cannot overflow, because each has a store number.
        self.slot.state.fetch_sub(PIN - LIVE, Ordering::AcqRel);
        std::mem::forget(self);
    }

    /// Counts a content that was opened.
    #[inline]
    pub fn count_open(&self) {
        self.slot.opens.fetch_add(1, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub fn set_stores(&self, stores: u64) {
        self.slot.stores.store(stores, Ordering::Relaxed);
    }
}

impl<K> Deref for Pinned<'_, K> {
    type Target = K;

    #[inline]
    fn deref(&self) -> &K {
        // SAFETY: initialized and not dropped while the pin is counted.
        unsafe { (*self.slot.key.get()).assume_init_ref() }
    }
}

impl<K> Drop for Pinned<'_, K> {
    #[inline]
    fn drop(&mut self) {
        self.slot.release(PIN);
    }
}

#[cfg(test)]
mod tests;

//! Orders of guards and epochs, and all orders of their memory accesses under loom.

use super::*;

#[test]
fn guards_end_in_any_order() {
    let epochs = Epochs::new(2);
    let first = epochs.pin(0);
    assert_eq!(epochs.advance(), first.epoch() + 1);
    let second = epochs.pin(1);
    assert_eq!(epochs.advance(), second.epoch(), "the first guard is left");
    let third = epochs.pin(3);
    drop(first);
    assert_eq!(epochs.advance(), second.epoch() + 1);
    drop(third);
    assert_eq!(epochs.advance(), second.epoch() + 1, "the second guard is left");
    drop(second);
    assert_eq!(epochs.advance(), epochs.now());
}

#[test]
fn owned_guard_outlives_the_borrow() {
    let epochs = Arc::new(Epochs::new(0));
    let guard = epochs.pin_owned(7);
    let unlinked = epochs.retire();
    for _ in 0..5 {
        epochs.advance();
    }
    assert!(!epochs.has_passed(unlinked));
    drop(guard);
    epochs.advance();
    assert!(epochs.has_passed(unlinked));
}

mod model {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::atomic as modelled;

    /// A word of the model checker. `FENCES` selects whether its fences have an effect.
    pub struct Modelled<const FENCES: bool>(modelled::AtomicU64);

    impl<const FENCES: bool> Word for Modelled<FENCES> {
        fn new(value: u64) -> Self {
            Self(modelled::AtomicU64::new(value))
        }

        fn load(&self, order: Ordering) -> u64 {
            self.0.load(order)
        }

        fn add(&self, order: Ordering) {
            self.0.fetch_add(1, order);
        }

        fn subtract(&self, order: Ordering) {
            self.0.fetch_sub(1, order);
        }

        fn replace(&self, from: u64, to: u64) -> Result<u64, u64> {
            self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
        }

        fn fence() {
            if FENCES {
                modelled::fence(Ordering::SeqCst);
            }
        }
    }

    /// A block, the link to it, and the epochs.
    pub struct Shared<W> {
        pub clock: Clock<W>,
        link: modelled::AtomicBool,
        /// loom fails if a read and a write are concurrent.
        block: UnsafeCell<()>,
    }

    impl<W: Word> Shared<W> {
        pub fn new() -> Self {
            let (link, block) = (modelled::AtomicBool::new(true), UnsafeCell::new(()));
            Self { clock: Clock::new(2), link, block }
        }

        /// Reads the block if it is linked.
        pub fn read(&self, lane: usize) {
            let epoch = self.clock.pin(lane);
            if self.link.load(Ordering::Relaxed) {
                self.block.with(|_| ());
            }
            self.clock.unpin(lane, epoch);
        }

        /// Unlinks the block, and uses it again if `rule` allows that.
        pub fn reuse(&self, epochs: u64) {
            self.link.store(false, Ordering::Relaxed);
            let unlinked = self.clock.retire();
            self.clock.advance();
            if self.clock.advance() >= unlinked + epochs {
                self.block.with_mut(|_| ());
            }
        }
    }

    pub fn check(model: fn()) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = match std::env::var_os("GRANARY_TEST_FULL") {
            None => Some(3),
            Some(_) => Some(4),
        };
        builder.check(model);
    }

    /// A reader, a thread that uses the block again after `EPOCHS` epochs, and a third thread that
    /// begins epochs meanwhile.
    pub fn reader_and_owner<const FENCES: bool, const EPOCHS: u64>() {
        let shared = loom::sync::Arc::new(Shared::<Modelled<FENCES>>::new());
        let reader = loom::thread::spawn({
            let shared = shared.clone();
            move || shared.read(0)
        });
        let third = loom::thread::spawn({
            let shared = shared.clone();
            move || (shared.clock.advance(), shared.clock.advance())
        });
        shared.reuse(EPOCHS);
        reader.join().unwrap();
        third.join().unwrap();
    }
}

#[test]
fn no_reader_sees_a_block_that_is_used_again() {
    model::check(model::reader_and_owner::<true, 2>);
}

#[test]
#[should_panic]
fn without_fences_a_reader_sees_a_block_that_is_used_again() {
    model::check(model::reader_and_owner::<false, 2>);
}

#[test]
#[should_panic]
fn one_epoch_is_too_short() {
    model::check(model::reader_and_owner::<true, 1>);
}

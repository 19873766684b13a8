//! The sleep/wake handshakes: NIC and doorbell writer, CQ reader and NIC.
//!
//! Each handshake is a store-buffer (Dekker) pair: each side stores its own word, executes a
//! sequentially consistent fence, and loads the other side's word. At least one side sees the
//! other's store, so no wake-up is lost.
//!
//! | side | stores | then loads |
//! | --- | --- | --- |
//! | a client that writes a doorbell | the doorbell | `sleeping`: wake the NIC? |
//! | the NIC before it sleeps | `sleeping` | all doorbells |
//! | a client before it sleeps on a CQ | `armed` | the CQ ring |
//! | the NIC after it has written a completion | the CQE | `armed`: wake the sleeper? |
//!
//! The words are generic so that a model checker can replace the machine's memory: the tests run
//! these functions under every interleaving and reordering that C11 allows, with and without the
//! fence.

use std::sync::atomic::{AtomicU32, Ordering, fence};

/// A 32-bit word that both sides of a handshake access.
pub trait Word {
    /// Loads the word.
    fn load(&self, order: Ordering) -> u32;
    /// Stores `value`.
    fn store(&self, value: u32, order: Ordering);
    /// Stores `value` and returns the previous value.
    fn swap(&self, value: u32, order: Ordering) -> u32;
    /// Stores `value` if the word is 0. Returns the previous value in any case.
    fn set_if_zero(&self, value: u32) -> u32;
    /// A sequentially consistent fence between such words.
    fn fence();
}

impl Word for AtomicU32 {
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }
    #[inline]
    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order)
    }
    #[inline]
    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.swap(value, order)
    }
    #[inline]
    fn set_if_zero(&self, value: u32) -> u32 {
        self.compare_exchange(0, value, Ordering::SeqCst, Ordering::SeqCst).unwrap_or_else(|v| v)
    }
    #[inline]
    fn fence() {
        fence(Ordering::SeqCst)
    }
}

/// Whether the NIC sleeps at level `from` or deeper and must be woken. Called after the store that
/// the NIC has to see.
#[inline]
pub fn must_wake_nic<W: Word>(sleeping: &W, from: u32) -> bool {
    W::fence();
    sleeping.load(Ordering::Relaxed) >= from
}

/// Announces that the NIC is about to sleep, and checks for work once more. Returns false if
/// `has_work` has found work; then the caller must revoke the announcement.
#[inline]
pub fn may_sleep<W: Word, N>(
    nic: &mut N,
    announce: impl FnOnce(&N),
    has_work: impl FnOnce(&mut N) -> bool,
) -> bool {
    announce(nic);
    W::fence();
    !has_work(nic)
}

/// Value of `armed`: any completion wakes the sleepers.
pub const ANY: u32 = 1;
/// Value of `armed`: only a solicited completion or one with an error wakes the sleepers.
pub const SOLICITED: u32 = 2;

/// Arms a CQ for any completion. Returns true if the caller may sleep while the word is [`ANY`],
/// because `ready` has found no completion.
#[inline]
pub fn arm<W: Word>(armed: &W, ready: impl FnOnce() -> bool) -> bool {
    armed.store(ANY, Ordering::SeqCst);
    W::fence();
    !ready()
}

/// Arms a CQ for solicited completions only. Returns the armed value, or `None` if `ready` has
/// found a completion. The caller may sleep while the word has that value. A word that is armed for
/// any completion stays so (IBTA vol. 1, chapter 11, "request completion notification").
#[inline]
pub fn arm_solicited<W: Word>(armed: &W, ready: impl FnOnce() -> bool) -> Option<u32> {
    let before = armed.set_if_zero(SOLICITED);
    W::fence();
    (!ready()).then_some(if before == 0 { SOLICITED } else { before })
}

/// Whether the CQ is still armed with `value`. Then no completion has come that wakes the caller,
/// which may sleep on.
#[inline]
pub fn is_armed<W: Word>(armed: &W, value: u32) -> bool {
    armed.load(Ordering::SeqCst) == value
}

/// Disarms a CQ if the new completion has to wake its sleepers, and returns whether it did. Called
/// after the CQE was written and a full fence. `solicited`: the completion also wakes [`SOLICITED`]
/// sleepers.
#[inline]
pub fn disarm<W: Word>(armed: &W, solicited: bool) -> bool {
    match armed.load(Ordering::Relaxed) {
        0 => false,
        SOLICITED if !solicited => false,
        _ => armed.swap(0, Ordering::SeqCst) != 0,
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use loom::sync::atomic as model;
    use loom::sync::{Arc, Condvar, Mutex};

    /// A word of the model checker. `FENCES` selects whether its fences have an effect.
    struct Modelled<const FENCES: bool>(model::AtomicU32);

    impl<const FENCES: bool> Word for Modelled<FENCES> {
        fn load(&self, order: Ordering) -> u32 {
            self.0.load(order)
        }
        fn store(&self, value: u32, order: Ordering) {
            self.0.store(value, order)
        }
        fn swap(&self, value: u32, order: Ordering) -> u32 {
            self.0.swap(value, order)
        }
        fn set_if_zero(&self, value: u32) -> u32 {
            let order = Ordering::SeqCst;
            self.0.compare_exchange(0, value, order, order).unwrap_or_else(|v| v)
        }
        fn fence() {
            if FENCES {
                model::fence(Ordering::SeqCst)
            }
        }
    }

    fn word<const FENCES: bool>() -> Modelled<FENCES> {
        Modelled(model::AtomicU32::new(0))
    }

    /// Model of an eventfd that the NIC polls: `sleep` returns once the eventfd was written.
    struct Eventfd(Mutex<bool>, Condvar);

    impl Eventfd {
        fn new() -> Self {
            Self(Mutex::new(false), Condvar::new())
        }
        fn write(&self) {
            *self.0.lock().unwrap() = true;
            self.1.notify_one();
        }
        fn sleep(&self) {
            let mut written = self.0.lock().unwrap();
            while !std::mem::take(&mut *written) {
                written = self.1.wait(written).unwrap();
            }
        }
    }

    const AWAKE: u32 = 0;
    const ASLEEP: u32 = 1;

    /// A client writes its doorbell twice while the NIC sleeps whenever it sees no new value.
    fn doorbell<const FENCES: bool>() {
        let shared = Arc::new((word::<FENCES>(), word::<FENCES>(), Eventfd::new()));
        let client = loom::thread::spawn({
            let shared = shared.clone();
            move || {
                let (bell, sleeping, eventfd) = &*shared;
                for value in 1..=2 {
                    bell.store(value, Ordering::Release);
                    if must_wake_nic(sleeping, ASLEEP) {
                        eventfd.write();
                    }
                }
            }
        });
        let (bell, sleeping, eventfd) = &*shared;
        let mut seen = 0;
        while seen < 2 {
            let look = |seen: &mut u32| {
                let rung = bell.load(Ordering::Acquire);
                std::mem::replace(seen, rung) != rung
            };
            let announce = |_: &u32| sleeping.store(ASLEEP, Ordering::Relaxed);
            if may_sleep::<Modelled<FENCES>, _>(&mut seen, announce, look) {
                eventfd.sleep();
            }
            sleeping.store(AWAKE, Ordering::Relaxed);
            look(&mut seen);
        }
        client.join().unwrap();
    }

    /// The NIC writes a completion while the reader goes to sleep on the CQ.
    fn completion<const FENCES: bool>() {
        // The CQE, the armed word, and the lock and condition variable that model a futex.
        let shared = Arc::new((word::<FENCES>(), word::<FENCES>(), Mutex::new(()), Condvar::new()));
        let nic = loom::thread::spawn({
            let shared = shared.clone();
            move || {
                let (cqe, armed, lock, condvar) = &*shared;
                cqe.store(7, Ordering::Release);
                Modelled::<FENCES>::fence();
                if disarm(armed, true) {
                    drop(lock.lock().unwrap());
                    condvar.notify_all();
                }
            }
        });
        let (cqe, armed, lock, condvar) = &*shared;
        let ready = || cqe.load(Ordering::Acquire) == 7;
        while !ready() {
            if arm(armed, ready) {
                // A futex: compares and sleeps atomically.
                let guard = lock.lock().unwrap();
                if armed.load(Ordering::SeqCst) == 1 {
                    drop(condvar.wait(guard).unwrap());
                }
            }
        }
        nic.join().unwrap();
    }

    /// Checks every interleaving with at most three preemptions, or with any number in a full test
    /// run (`GRANARY_TEST_FULL`).
    fn check(model: fn()) {
        check_up_to(Some(3), None, model);
    }

    /// Checks every interleaving with at most `short` preemptions, or `full` in a full test run. In
    /// a model with three threads, each further preemption multiplies the interleavings by about
    /// eight.
    fn check_up_to(short: Option<usize>, full: Option<usize>, model: fn()) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = match std::env::var_os("GRANARY_TEST_FULL") {
            None => short,
            Some(_) => full,
        };
        builder.check(model);
    }

    #[test]
    fn no_doorbell_is_lost() {
        check(doorbell::<true>);
    }

    /// The NIC writes an unsolicited completion, then a solicited one, while one thread goes to
    /// sleep for any completion and another one for solicited completions.
    #[test]
    fn no_solicited_completion_is_lost() {
        check_up_to(Some(2), Some(4), || {
            let shared = Arc::new((word::<true>(), word::<true>(), Mutex::new(()), Condvar::new()));
            let spawn = |program: fn(&Cq)| {
                let shared = shared.clone();
                loom::thread::spawn(move || program(&shared))
            };
            type Cq = (Modelled<true>, Modelled<true>, Mutex<()>, Condvar);
            fn sleep((_, armed, lock, condvar): &Cq, value: u32) {
                let guard = lock.lock().unwrap();
                if is_armed(armed, value) {
                    drop(condvar.wait(guard).unwrap());
                }
            }
            let nic = spawn(|(cqe, armed, lock, condvar)| {
                for number in 1..=2 {
                    cqe.store(number, Ordering::Release);
                    Modelled::<true>::fence();
                    if disarm(armed, number == 2) {
                        drop(lock.lock().unwrap());
                        condvar.notify_all();
                    }
                }
            });
            let any = spawn(|cq| {
                let ready = || cq.0.load(Ordering::Acquire) >= 1;
                while !ready() {
                    if arm(&cq.1, ready) {
                        sleep(cq, ANY);
                    }
                }
            });
            let ready = || shared.0.load(Ordering::Acquire) == 2;
            while !ready() {
                if let Some(value) = arm_solicited(&shared.1, ready) {
                    // A thread that was woken although the word is still armed sleeps on.
                    while is_armed(&shared.1, value) {
                        sleep(&shared, value);
                    }
                }
            }
            nic.join().unwrap();
            any.join().unwrap();
        });
    }

    #[test]
    fn no_completion_is_lost() {
        check(completion::<true>);
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn a_doorbell_without_fences_is_lost() {
        check(doorbell::<false>);
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn a_completion_without_fences_is_lost() {
        check(completion::<false>);
    }

    #[test]
    fn machine_words_behave_like_model_words() {
        let armed = AtomicU32::new(0);
        assert!(!arm(&armed, || true));
        assert_eq!(armed.load(Ordering::SeqCst), ANY);
        assert_eq!(arm_solicited(&armed, || false), Some(ANY), "the CQ stays armed for any");
        assert!(!is_armed(&armed, SOLICITED) && is_armed(&armed, ANY));
        assert!(disarm(&armed, false));
        assert_eq!(arm_solicited(&armed, || true), None);
        assert!(is_armed(&armed, SOLICITED));
        armed.store(0, Ordering::SeqCst);
        assert_eq!(arm_solicited(&armed, || false), Some(SOLICITED));
        assert!(!disarm(&armed, false) && disarm(&armed, true) && !disarm(&armed, true));
        let sleeping = AtomicU32::new(0);
        Word::store(&sleeping, 1, Ordering::SeqCst);
        assert!(must_wake_nic(&sleeping, 1) && !must_wake_nic(&sleeping, 2));
    }
}

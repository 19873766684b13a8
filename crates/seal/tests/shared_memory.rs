//! Memory that a hostile process changes while a page is sealed or opened.
//!
//! On CPUs with VAES and AVX-512, aws-lc reads each byte once, and these tests pass without the
//! copies that they test. `OPENSSL_ia32cap` selects the code for other CPUs.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use seal::{Cipher, Sealer, Tampered};

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;

struct Shared([AtomicU64; WORDS]);

impl Shared {
    fn new() -> Box<Self> {
        Box::new(Self([const { AtomicU64::new(0) }; WORDS]))
    }

    fn pointer(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }

    /// Inverts bits of a word for a short time, again and again.
    fn disturb(&self, done: &AtomicBool) {
        let mut at = 0;
        while !done.load(Ordering::Relaxed) {
            let word = &self.0[at % WORDS];
            let right = word.fetch_xor(1 << 17, Ordering::Relaxed);
            for _ in 0..at % 64 {
                std::hint::spin_loop();
            }
            let _ =
                word.compare_exchange(right ^ 1 << 17, right, Ordering::Relaxed, Ordering::Relaxed);
            at += 37;
        }
    }
}

fn with_disturbance(shared: &Shared, work: impl FnOnce()) {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| shared.disturb(&done));
        work();
        done.store(true, Ordering::Relaxed);
    });
}

const ROUNDS: usize = 30_000;

#[test]
fn page_that_changes_while_it_is_opened_is_right_or_refused() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    let plain = [0x5a; PAGE];
    let shared = Shared::new();
    // SAFETY: two buffers of a page.
    let seal = unsafe { sealer.seal_raw(1, plain.as_ptr(), shared.pointer(), PAGE) }.unwrap();
    let mut refused = 0;
    with_disturbance(&shared, || {
        for _ in 0..ROUNDS {
            let mut opened = [0xee; PAGE];
            let to = opened.as_mut_ptr();
            // SAFETY: two buffers of a page. `opened` is private.
            match unsafe { sealer.open_raw(1, &seal, shared.pointer(), to, PAGE) } {
                Ok(()) => assert!(opened == plain, "a page with unverified bytes"),
                Err(Tampered) => {
                    assert!(opened == [0; PAGE], "unverified bytes are visible");
                    refused += 1;
                }
            }
        }
    });
    println!("{refused} of {ROUNDS} refused");
}

#[test]
fn page_that_changes_while_it_is_sealed_is_not_forged() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    let plain = [0x5a; PAGE];
    let shared = Shared::new();
    let mut refused = 0;
    with_disturbance(&shared, || {
        for _ in 0..ROUNDS {
            // SAFETY: two buffers of a page.
            let seal = unsafe { sealer.seal_raw(1, plain.as_ptr(), shared.pointer(), PAGE) };
            let seal = seal.unwrap();
            let mut opened = [0xee; PAGE];
            let to = opened.as_mut_ptr();
            // SAFETY: two buffers of a page. `opened` is private.
            match unsafe { sealer.open_raw(1, &seal, shared.pointer(), to, PAGE) } {
                Ok(()) => assert!(opened == plain, "the tag authenticates changed bytes"),
                Err(Tampered) => refused += 1,
            }
            sealer.forget(&seal);
        }
    });
    println!("{refused} of {ROUNDS} refused");
}

/// A page whose plaintext changes while it is sealed opens: a mixture of old and new bytes.
#[test]
fn plaintext_that_changes_while_it_is_sealed_opens() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    let shared = Shared::new();
    with_disturbance(&shared, || {
        for _ in 0..ROUNDS / 10 {
            let mut sealed = [0; PAGE];
            let to = sealed.as_mut_ptr();
            // SAFETY: two buffers of a page.
            let seal = unsafe { sealer.seal_raw(1, shared.pointer(), to, PAGE) }.unwrap();
            let mut opened = [0; PAGE];
            sealer.open(1, &seal, &sealed, &mut opened).unwrap();
            let (words, _) = opened.as_chunks();
            assert!(words.iter().all(|word| u64::from_ne_bytes(*word) & !(1 << 17) == 0));
            sealer.forget(&seal);
        }
    });
}

//! Memory that a hostile process changes while a page is sealed or opened.
//!
//! On CPUs with VAES and AVX-512, aws-lc reads each byte once, and these tests would pass without
//! the copies that they test. So they also run with the code for other CPUs.

#[cfg(target_arch = "x86_64")]
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

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

    /// Inverts a bit of a word, again and again: for a short time if `back`, otherwise until the
    /// page is written. About one change falls into the time of one page, because a page with
    /// several changes is refused in any case.
    fn disturb(&self, back: bool, done: &AtomicBool) {
        let mut at = 0;
        while !done.load(Ordering::Relaxed) {
            let word = &self.0[at % WORDS];
            let right = word.fetch_xor(1 << 17, Ordering::Relaxed);
            if back {
                wait(at % 128);
                let (order, wrong) = (Ordering::Relaxed, right ^ 1 << 17);
                let _ = word.compare_exchange(wrong, right, order, order);
            }
            wait(at % 1021);
            at += 37;
        }
    }
}

/// Waits for about this number of nanoseconds. `spin_loop` waits longer.
fn wait(steps: usize) {
    (0..steps).for_each(|step| _ = std::hint::black_box(step));
}

/// Ends the disturbance, after a panic too.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn with_disturbance(shared: &Shared, back: bool, work: impl FnOnce()) {
    // Each test needs two cores.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| shared.disturb(back, &done));
        let _end = End(&done);
        work();
    });
}

const ROUNDS: usize = 300_000;

#[test]
fn page_that_changes_while_it_is_opened_is_right_or_refused() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    let plain = [0x5a; PAGE];
    let shared = Shared::new();
    // SAFETY: two buffers of a page.
    let seal = unsafe { sealer.seal_raw(1, plain.as_ptr(), shared.pointer(), PAGE) }.unwrap();
    let mut refused = 0;
    with_disturbance(&shared, true, || {
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
    with_disturbance(&shared, false, || {
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
    with_disturbance(&shared, false, || {
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

/// Runs the other tests in a process where aws-lc does not see VAES and VPCLMULQDQ.
#[test]
#[cfg(target_arch = "x86_64")]
fn tests_pass_with_the_code_for_cpus_without_vaes() {
    const VARIABLE: &str = "OPENSSL_ia32cap";
    if std::env::var_os(VARIABLE).is_some() {
        return;
    }
    let mut tests = Command::new(std::env::current_exe().unwrap());
    let output = tests.env(VARIABLE, "~0:~0x60000000000").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

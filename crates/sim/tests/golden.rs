//! The same seed gives the same trace, byte for byte, in any build on any machine: compares digests
//! of traces with recorded ones.
//!
//! Any change of the operations of programs or of the NIC, of their order or of their timing
//! changes traces. If the change is intended, `GRANARY_GOLDEN=renew cargo test -p granary-sim
//! --test golden` records the new digests.

use std::fmt::Write as _;
use std::path::Path;

use sim::check::{self, Case};

/// Number of seeds per case.
const SEEDS: u64 = 32;

/// Returns the 64-bit FNV-1a hash, which is short and the same on every machine.
fn digest(text: &str) -> u64 {
    let mix = |hash: u64, byte: &u8| (hash ^ *byte as u64).wrapping_mul(0x0100_0000_01b3);
    text.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, mix)
}

/// Returns a line for each seed: case, seed, number of lines of the trace, digest.
fn digests() -> String {
    let mut out = String::new();
    for case in Case::ALL {
        for seed in 0..SEEDS {
            let trace = check::run(*case, seed, true).trace.expect("a trace was wanted");
            // Without the first line, which contains the settings: new settings must not change
            // digests.
            let (_, trace) = trace.split_once('\n').expect("more than a line");
            let (lines, digest) = (trace.lines().count(), digest(trace));
            writeln!(out, "{case} {seed} {lines} {digest:016x}").expect("it has room");
        }
    }
    out
}

#[test]
fn traces_match_recorded_digests() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden.txt");
    let now = digests();
    if std::env::var("GRANARY_GOLDEN").is_ok_and(|v| v == "renew") {
        std::fs::write(&path, now).expect("the file is written");
        return;
    }
    let golden = std::fs::read_to_string(&path).expect("the file is there");
    let differ: Vec<_> = golden.lines().zip(now.lines()).filter(|(a, b)| a != b).collect();
    let first = differ.first().map(|(a, b)| format!("was {a:?}, is {b:?}"));
    assert!(
        golden == now,
        "{} of {} traces differ, the first: {first:?}. Look at it with `granary sim check --scheme \
         CASE --seed N --trace`, and if the change was meant, renew the file: GRANARY_GOLDEN=renew \
         cargo test -p granary-sim --test golden",
        differ.len(),
        golden.lines().count(),
    );
}

#[test]
fn the_digest_is_fnv_1a() {
    assert_eq!(digest(""), 0xcbf2_9ce4_8422_2325);
    assert_eq!(digest("a"), 0xaf63_dc4c_8601_ec8c);
    assert_eq!(digest("foobar"), 0x8594_4171_f739_67e8);
}

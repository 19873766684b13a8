//! The check of `granary sim check` as a small program that builds quickly.
//!
//! `cargo run -p granary-sim --example seeds -- CASE FROM TO [trace]`; a case is a scheme or a
//! variant of a scheme.

use std::process::ExitCode;

use sim::check::{self, Case};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).and_then(|n| n.parse::<u64>().ok());
    let (Some(case), Some(from), Some(to)) =
        (arguments.first().and_then(|s| s.parse::<Case>().ok()), number(1), number(2))
    else {
        eprintln!("usage: seeds CASE FROM TO [trace]");
        return ExitCode::from(2);
    };
    for seed in from..to {
        let outcome = check::run(case, seed, arguments.get(3).is_some());
        print!("{}", outcome.trace.unwrap_or_default());
        if let Some(why) = outcome.violation {
            println!("wrong: {case}: seed {seed}: {why}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

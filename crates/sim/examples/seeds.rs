//! `granary sim check` without the command: what is built quickly, after a change to look at.
//!
//! `cargo run -p granary-sim --example seeds -- SCHEME FROM TO [trace]`

use std::process::ExitCode;

use sim::check;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).and_then(|n| n.parse::<u64>().ok());
    let (Some(scheme), Some(from), Some(to)) =
        (arguments.first().and_then(|s| s.parse().ok()), number(1), number(2))
    else {
        eprintln!("usage: seeds SCHEME FROM TO [trace]");
        return ExitCode::from(2);
    };
    for seed in from..to {
        let outcome = check::run(scheme, seed, arguments.get(3).is_some());
        print!("{}", outcome.trace.unwrap_or_default());
        if let Some(why) = outcome.violation {
            println!("wrong: {scheme}: seed {seed}: {why}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

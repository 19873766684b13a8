//! Explores configurations and prints statistics, or the run that violates the specification.
//!
//! `granary-model [WORD...]` explores the configurations whose names contain one of the words;
//! without a word, all of them. The environment variable `LIMIT` sets the number of states after
//! which an exploration stops.

use std::process::ExitCode;

fn main() -> ExitCode {
    model::prepare();
    let words: Vec<String> = std::env::args().skip(1).collect();
    let limit = std::env::var("LIMIT").ok().and_then(|s| s.parse().ok()).unwrap_or(u64::MAX);
    println!("| configuration | states | actions | ends | longest run | s | |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for config in model::config::all() {
        if !words.is_empty() && !words.iter().any(|w| config.name.contains(w.as_str())) {
            continue;
        }
        match model::explore(&config, limit) {
            Ok(r) => println!(
                "| {} | {} | {} | {} | {} | {:.1} | {} |",
                config.name,
                r.states,
                r.actions,
                r.ends,
                r.depth,
                r.time.as_secs_f64(),
                if r.exhausted { "exhausted" } else { "bounded" },
            ),
            Err(violation) => {
                println!("\n{}:\n{violation}", config.name);
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

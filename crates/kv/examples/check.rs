//! Runs seeds of a checked case: `check CASE FROM TO`, for example `check kv-shared 0 1000`.
//! Prints each seed whose run violates a rule, and exits with 1 if there is one.

use std::process::ExitCode;

use kv::check::{Case, Counts, run};

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, from, to] = arguments.as_slice() else {
        return Err("usage: check CASE FROM TO".into());
    };
    let case = Case::ALL.into_iter().find(|case| case.name() == name);
    let case = case.ok_or("the cases are kv-alone and kv-shared")?;
    let (mut counts, mut failures) = (Counts::default(), 0);
    for seed in from.parse()?..to.parse::<u64>()? {
        let outcome = run(case, seed);
        counts.add(&outcome.counts);
        if let Some(why) = outcome.violation {
            println!("wrong: {case}: seed {seed}: {why}");
            failures += 1;
        }
    }
    println!("{case}: {failures} seeds with a violation; {counts:?}");
    Ok(ExitCode::from(u8::from(failures > 0)))
}

//! `granary bench paper tdmem` at its smallest size.

use std::process::Command;

use bench_report::record::Record;
use granary_tests::built;
use granary_tests::pager::Scratch;

const CLAIMS: [&str; 10] = [
    "tdmem.seal",
    "tdmem.open",
    "tdmem.sealed.sequential",
    "tdmem.stream.mbps.90.fastswap",
    "tdmem.stream.loss.90",
    "tdmem.stream.loss.70",
    "tdmem.stream.loss.50",
    "tdmem.fastswap.performance",
    "tdmem.overhead",
    "tdmem.kmeans.40",
];

const REMOTE: [&str; 4] =
    ["fastswap", "tdmem-plain", "tdmem-crypt", "tdmem-crypt (fastswap's paths)"];

fn run(arguments: &[&str]) -> String {
    let mut command = Command::new(built::granary());
    command.args(["bench", "paper", "tdmem", "--quick", "--memory", "16MiB"]).args(arguments);
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text
}

fn records(lines: &str) -> Vec<Record> {
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn programs_run_sealed_and_plain_over_every_system() {
    let directory = Scratch::new("bench-tdmem");
    let text = run(&["--out", directory.0.to_str().unwrap()]);
    assert!(!text.contains("No result of"), "{text}");
    let file = directory.0.join("paper-tdmem-measured.jsonl");
    let records = records(&std::fs::read_to_string(file).unwrap());
    let find = |experiment: &str, metric: &str, program: &str, system: &str| {
        let found = records.iter().find(|record| {
            let is = |key: &str, value: &str| {
                record.setting.get(key).is_some_and(|own| own.to_string() == value)
            };
            record.experiment == experiment
                && record.metric == metric
                && is("program", program)
                && is("system", system)
        });
        found.unwrap_or_else(|| panic!("{experiment}, {metric}, {program}, {system}: {text}")).value
    };
    for system in
        ["private-plain", "private-crypt", "private-crypt-256", "tdmem-plain", "tdmem-crypt"]
    {
        assert!(find("sequential", "page_us", "sequential", system) > 0.0, "{system}");
    }
    for system in REMOTE {
        assert!(find("stream", "triad_mb_per_s", "triad", system) > 0.0, "{system}");
        for program in ["k-means", "quicksort"] {
            assert!(find("programs", "performance_ratio", program, system) > 0.0, "{system}");
        }
    }
    for claim in CLAIMS {
        let found = records.iter().find(|record| record.claim.as_deref() == Some(claim));
        assert!(found.is_some_and(|record| record.paper.is_some()), "{claim}: {text}");
    }
    assert!(records.iter().all(|record| !record.simulated), "{text}");
    for name in ["sequential", "stream", "geomean", "programs"] {
        let file = directory.0.join(format!("paper-tdmem-{name}.svg"));
        assert!(file.exists(), "{}", file.display());
    }
}

#[test]
fn named_experiment_runs_alone_and_prints_records() {
    let records = records(&run(&["--experiment", "crypt", "--json"]));
    assert!(records.len() >= 5 && records.iter().all(|record| record.experiment == "crypt"));
}

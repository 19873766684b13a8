//! `granary bench paper onesidedmw --experiment swap` at its smallest size.

use std::process::Command;

use bench_report::record::Record;
use granary_tests::built;
use granary_tests::pager::Scratch;

const SCHEMES: [&str; 10] = [
    "static-mr",
    "onesidedmw",
    "onesidedmw (-Sep)",
    "onesidedmw (-Sep -Group)",
    "rpc-mw-1",
    "rpc-mw-2",
    "fine-mr 1 MB",
    "fine-mr 4 MB",
    "odrp",
    "finemem",
];

const CLAIMS: [&str; 12] = [
    "osmw.swap.overhead.25",
    "rpcmw1.swap.overhead",
    "rpcmw2.swap.overhead",
    "finemr1m.swap.overhead",
    "osmw.swap.utilization",
    "staticmr.swap.utilization.low",
    "staticmr.swap.utilization.high",
    "osmw.swap.utilization.gain.low",
    "osmw.swap.utilization.gain.high",
    "grouping.swapin.latency",
    "grouping.swap.performance",
    "separation.swap.performance",
];

#[test]
fn programs_run_over_a_memory_node_of_each_scheme() {
    let directory = Scratch::new("bench-swap");
    let mut command = Command::new(built::granary());
    command.args(["bench", "paper", "onesidedmw", "--experiment", "swap", "--quick"]);
    let output = command.args(["--memory", "16MiB", "--out"]).arg(&directory.0).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(!text.contains("No result of"), "{text}");
    let file = directory.0.join("paper-onesidedmw-swap-measured.jsonl");
    let records = std::fs::read_to_string(file).unwrap();
    let records: Vec<Record> =
        records.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let find = |metric: &str, scheme: &str, program: &str, tasks: f64| {
        let is = |record: &Record, key: &str, value: &str| {
            record.setting.get(key).is_some_and(|own| own.to_string() == value)
        };
        let found = records.iter().find(|record| {
            record.metric == metric
                && is(record, "scheme", scheme)
                && is(record, "program", program)
                && record.setting.number("tasks") == Some(tasks)
        });
        found
            .unwrap_or_else(|| panic!("{metric}, {scheme}, {program}, {tasks} tasks: {text}"))
            .value
    };
    for scheme in SCHEMES {
        for program in ["k-means", "pagerank"] {
            let of = |metric: &str| find(metric, scheme, program, 1.0);
            assert!(of("time_s") > 0.0 && of("time_over_plain_ratio") > 0.0, "{scheme}");
            let utilization = of("utilization_ratio");
            assert!(utilization > 0.0 && utilization <= 1.0, "{scheme}: {utilization}");
            // Each attaches to the memory node, whose control thread answers.
            assert!(of("node_cpu_s") > 0.0 && of("node_nic_s") > 0.0, "{scheme}");
            assert!(of("allocations") > 0.0, "{scheme}");
        }
        if !scheme.contains("(-Sep") {
            assert!(find("time_over_one_task_ratio", scheme, "k-means", 2.0) > 0.0, "{scheme}");
        }
    }
    // A chunk of odrp is a page, and one of static-mr a quarter of the data.
    assert!(find("utilization_ratio", "odrp", "k-means", 1.0) > 0.95, "{text}");
    let allocations = |scheme: &str| find("allocations", scheme, "k-means", 1.0);
    assert!(allocations("static-mr") < allocations("onesidedmw"), "{text}");
    assert!(allocations("onesidedmw") < allocations("odrp"), "{text}");
    for claim in CLAIMS {
        let found = records.iter().find(|record| record.claim.as_deref() == Some(claim));
        assert!(found.is_some_and(|record| record.paper.is_some()), "{claim}: {text}");
    }
    for name in ["time-25", "peak-25", "cpu-25", "utilization-25", "tasks-time"] {
        let file = directory.0.join(format!("paper-onesidedmw-swap-{name}.svg"));
        assert!(file.exists(), "{}", file.display());
    }
}

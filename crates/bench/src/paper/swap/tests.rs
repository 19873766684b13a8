//! Tests of the plan and of the results, over a machine that computes its numbers.

use super::*;
use crate::paper::programs::workload;
use bench_report::progress::Progress;

/// A machine on which each scheme has a factor of time.
struct Model {
    /// Difference of the checksum of `finemem`.
    damage: u64,
}

fn factor(variant: Variant) -> f64 {
    match variant {
        Variant::Plain => 1.0,
        Variant::StaticMr => 2.0,
        Variant::OneSidedMw => 2.1,
        Variant::Unseparated => 2.2,
        Variant::Ungrouped => 2.4,
        Variant::RpcMw1 | Variant::FineMem => 2.5,
        Variant::RpcMw2 => 3.0,
        Variant::FineMr1 => 4.0,
        Variant::FineMr4 | Variant::Odrp => 5.0,
    }
}

impl Machine for Model {
    fn run(&self, cell: Cell, variant: Variant) -> Result<Swapped, String> {
        if variant == Variant::Odrp {
            return Err("no chains".into());
        }
        let is_k_means = cell.job.program == Program::KMeans;
        let more = if is_k_means && variant == Variant::RpcMw2 { 1.5 } else { 1.0 };
        let seconds = factor(variant) * more * f64::from(cell.tasks);
        let damage = if variant == Variant::FineMem { self.damage } else { 0 };
        let checksum = cell.job.bytes ^ damage;
        let program = Measured { seconds, cpu_seconds: seconds, whole_seconds: seconds, checksum };
        let chunk = variant.scheme(cell.memory).map_or(1, |(_, bytes)| bytes);
        let utilization = match variant {
            Variant::StaticMr if is_k_means => 0.4,
            Variant::StaticMr => 0.5,
            _ => 0.9,
        };
        let far = Far {
            cpu_seconds: 0.1,
            cpu_peak: 0.5,
            utilization: Some(utilization),
            fault_us: Some(10.0 * factor(variant)),
            allocations: cell.job.bytes / chunk,
            ..Far::default()
        };
        Ok(Swapped { program, far: (variant != Variant::Plain).then_some(far) })
    }
}

fn measured(damage: u64) -> Outcomes {
    let plan = Plan::new(Extent::Quick, Some(64 << 20));
    plan.measure(&Model { damage }, &Progress::Silent.bar("", 0))
}

#[test]
fn claims_are_the_extremes_of_the_workloads() {
    let claims = measured(0).claims();
    let of = |id: &str| {
        let row = claims.rows.iter().find(|row| row.record.claim.as_deref() == Some(id)).unwrap();
        (row.record.value, row.what.clone())
    };
    for id in EXPERIMENT.claims {
        of(id);
    }
    assert_eq!(of("osmw.swap.overhead.25").0, 2.1 / 2.0);
    assert_eq!(of("rpcmw1.swap.overhead").0, 2.5 / 2.0);
    let (value, what) = of("rpcmw2.swap.overhead");
    assert_eq!(value, 4.5 / 2.0);
    assert!(what.contains("k-means, 25% local"), "{what}");
    assert_eq!(of("finemr1m.swap.overhead").0, 2.0);
    assert_eq!(of("osmw.swap.utilization").0, 0.9);
    assert_eq!(of("staticmr.swap.utilization.low").0, 0.4);
    assert_eq!(of("staticmr.swap.utilization.high").0, 0.5);
    assert_eq!(of("osmw.swap.utilization.gain.low").0, 0.9 / 0.5);
    assert_eq!(of("osmw.swap.utilization.gain.high").0, 0.9 / 0.4);
    assert_eq!(of("grouping.swapin.latency").0, 22.0 / 24.0);
    assert_eq!(of("grouping.swap.performance").0, 2.4 / 2.2);
    assert_eq!(of("separation.swap.performance").0, 2.2 / 2.1);
}

#[test]
fn tables_and_pictures_show_figures_without_missing_results() {
    let outcomes = measured(0);
    assert!(!outcomes.has_wrong_result());
    let missing = outcomes.missing();
    assert_eq!(missing[0], "No result of k-means, 50% local, odrp: no chains");
    assert_eq!(missing.len(), 4, "two numbers of tasks, two programs: {missing:?}");
    let tables = outcomes.tables();
    let of = |start: &str| {
        let found = tables.iter().find(|(title, _)| title.starts_with(start));
        found.unwrap_or_else(|| panic!("{start}")).1.to_string()
    };
    let row = |text: &str, start: &str| {
        let line = text.lines().find(|line| line.trim_start().starts_with(start)).unwrap();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    // static-mr, onesidedmw, rpc-mw-1, rpc-mw-2, fine-mr 1 and 4 MB, odrp, finemem.
    assert_eq!(
        row(&of("Figure 8: Execution time"), "k-means")[3..],
        ["2.000", "2.100", "2.500", "4.500", "4.000", "5.000", "-", "2.500"]
    );
    assert_eq!(row(&of("Figure 9: Execution time"), "2")[1..3], ["2.000", "2.100"]);
    assert_eq!(row(&of("Figure 9: Memory utilization"), "1")[1], "0.400");
    assert_eq!(
        row(&of("Ablations: Mean time of a fault"), "pagerank")[3..],
        ["21.000", "22.000", "24.000"]
    );
    let directory = tempfile::tempdir().unwrap();
    let files = outcomes.draw("measured", directory.path(), "swap").unwrap();
    for name in ["swap-time-25.svg", "swap-peak-25.png", "swap-tasks-utilization.svg"] {
        assert!(files.iter().any(|file| file.ends_with(name)), "{name}: {files:?}");
    }
    assert!(files.iter().all(|file| file.exists()));
}

#[test]
fn records_name_scheme_chunk_tasks_and_share() {
    let results = measured(0).results();
    let find = |metric: &str, scheme: &str, tasks: f64, program: &str| {
        let is = |key: &str, value: &str, setting: &bench_report::record::Setting| {
            setting.get(key).is_some_and(|own| own.to_string() == value)
        };
        let found = results.records().find(|record| {
            let setting = &record.setting;
            record.metric == metric
                && is("scheme", scheme, setting)
                && is("program", program, setting)
                && setting.number("tasks") == Some(tasks)
        });
        found.cloned().unwrap_or_else(|| panic!("{metric} {scheme}"))
    };
    let record = find("time_over_plain_ratio", "static-mr", 1.0, "pagerank");
    assert_eq!(record.value, 2.0);
    assert_eq!(record.setting.number("chunk"), Some((16 << 20) as f64));
    assert_eq!(record.setting.number("local_percent"), Some(25.0));
    assert_eq!(find("time_over_one_task_ratio", "onesidedmw", 2.0, "k-means").value, 2.1);
    assert_eq!(find("time_s", "plain", 1.0, "pagerank").value, 1.0);
    assert!(!results.records().any(|record| record.simulated));
}

#[test]
fn wrong_checksum_is_no_result() {
    let outcomes = measured(1);
    assert!(outcomes.has_wrong_result());
    let lines = outcomes.missing();
    assert!(lines.iter().any(|line| line.contains("finemem") && line.contains("checksum")));
}

#[test]
fn full_plan_has_the_papers_programs_shares_and_tasks() {
    let plan = Plan::new(Extent::Full, None);
    assert_eq!((plan.programs.len(), plan.shares.len()), (4, 2));
    let points = plan.points();
    // A plain run, and two shares of ten memory nodes; four numbers of tasks of eight.
    assert_eq!(points.len(), 4 * (1 + 2 * 10) + 4 * 8);
    assert_eq!(plan.steps(), 3 * points.len());
    let plain = points.iter().position(|p| *p == plan.point(Program::PageRank, 25, Variant::Plain));
    let paged = points.iter().position(|p| p.program == Program::PageRank && p.share < ALL_LOCAL);
    assert!(plain < paged, "{plain:?} {paged:?}");
    let task = plan.cell(&plan.task_point(8, Variant::Odrp));
    assert_eq!((task.tasks, task.job.bytes, task.job.local_bytes), (8, 128 << 20, 64 << 20));
    let whole = plan.cell(&plan.point(Program::KMeans, 25, Variant::Odrp));
    assert_eq!((whole.tasks, whole.job.bytes, whole.job.local_bytes), (1, 256 << 20, 64 << 20));
}

#[test]
fn programs_run_in_this_process() {
    struct Here;
    impl Machine for Here {
        fn run(&self, cell: Cell, _: Variant) -> Result<Swapped, String> {
            let program = workload::run(cell.job.program, cell.job.bytes as usize);
            Ok(Swapped { program: program.ok_or("not here")?, far: Some(Far::default()) })
        }
    }
    let plan = Plan { programs: PROGRAMS.into(), ..Plan::new(Extent::Quick, Some(1 << 20)) };
    let outcomes = plan.measure(&Here, &Progress::Silent.bar("", 0));
    assert!(!outcomes.has_wrong_result());
    assert!(outcomes.missing().iter().all(|line| line.contains("memcached")));
}

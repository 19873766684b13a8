//! Tests of the plan and of the results, over a machine that computes its times.

use super::*;
use crate::paper::programs::workload;
use crate::paper::results::{Provenance, Results};
use bench_report::progress::Progress;

/// A machine on which each system has a factor of time.
#[derive(Default)]
struct Model {
    /// Difference of the checksum of tdmem-crypt.
    damage: u64,
    /// A program without a result on tdmem-plain.
    missing: Option<Program>,
}

fn factor(system: System) -> f64 {
    match system {
        System::Plain => 1.0,
        System::Private | System::Fastswap => 2.0,
        System::PrivateCrypt | System::Tdmem => 2.5,
        System::PrivateCrypt256 | System::TdmemCryptFastswap => 4.0,
        System::TdmemCrypt => 3.2,
    }
}

impl Machine for Model {
    fn run(&self, job: Job, system: System) -> Result<Measured, String> {
        if system == System::Tdmem && self.missing == Some(job.program) {
            return Err("full".into());
        }
        // Less local memory takes more time, but for a plain run.
        let far = (job.bytes as f64 / job.local_bytes as f64).max(1.0);
        let is_plain = system == System::Plain;
        let seconds = if is_plain { 1.0 } else { factor(system) * far };
        let damage = if system == System::TdmemCrypt { self.damage } else { 0 };
        let checksum = job.program as u64 ^ damage;
        Ok(Measured { seconds, cpu_seconds: seconds, whole_seconds: seconds, checksum })
    }
}

fn measured(model: &Model, parts: &[Part]) -> Outcomes {
    let plan = Plan::new(parts, Extent::Quick, Some(64 << 20));
    plan.measure(model, &Progress::Silent.bar("", 0))
}

fn near(ours: f64, expected: f64) -> bool {
    (ours / expected - 1.0).abs() < 1e-6
}

#[test]
fn claims_are_quotients_of_the_systems() {
    let claims = measured(&Model::default(), &Part::ALL).claims();
    let of = |id: &str| {
        let row = claims.rows.iter().find(|row| row.record.claim.as_deref() == Some(id));
        let row = row.unwrap_or_else(|| panic!("{id}"));
        assert_eq!(row.kind, Provenance::Measured);
        row.record.value
    };
    assert!(near(of("tdmem.sealed.sequential"), 2.0 / 2.5));
    // Three rounds of three operands of 64 MiB / 3, in 2 s times the inverse of the share.
    let bandwidth = 3.0 * f64::from(64 << 20) / (2.0 / 0.9) / 1e6;
    assert!(near(of("tdmem.stream.mbps.90.fastswap"), bandwidth));
    for share in [90, 70, 50] {
        assert!(near(of(&format!("tdmem.stream.loss.{share}")), 1.0 - 2.0 / 3.2), "{share}");
    }
    let fastswap = ((0.7f64 / 2.0) * (0.4 / 2.0)).sqrt();
    assert!(near(of("tdmem.fastswap.performance"), fastswap));
    assert!(near(of("tdmem.overhead"), 1.0 - 2.0 / 3.2));
    assert!(near(of("tdmem.kmeans.40"), 0.4 / 3.2));
    let claimed = claims.rows.iter().filter(|row| row.record.claim.is_some()).count();
    let ids = Part::ALL.iter().flat_map(|part| part.experiment().claims).count();
    assert_eq!(claimed, ids - crypt::CLAIMS.len(), "each claim has one row");
    assert!(!claims.records().any(|record| record.simulated));
}

#[test]
fn geometric_mean_leaves_out_a_workload_that_a_system_lacks() {
    let all = measured(&Model::default(), &[Part::Programs]);
    let model = Model { missing: Some(Program::KMeans), ..Model::default() };
    let fewer = measured(&model, &[Part::Programs]);
    for (program, share) in fewer.plan.workloads(Part::Programs) {
        let mean = |outcomes: &Outcomes| outcomes.geomean(&[(program, share)], System::Fastswap);
        assert_eq!(mean(&fewer).is_some(), program != Program::KMeans);
        assert!(mean(&all).is_some());
    }
    let line = "No result of k-means, 40% local, tdmem-plain: full";
    assert!(fewer.missing().contains(&line.to_owned()), "{:?}", fewer.missing());
}

#[test]
fn tables_and_pictures_belong_to_the_parts_that_ran() {
    let outcomes = measured(&Model::default(), &Part::ALL);
    let tables = outcomes.tables();
    let of = |start: &str| {
        let found = tables.iter().find(|(title, _)| title.starts_with(start));
        found.unwrap_or_else(|| panic!("{start}")).1.to_string()
    };
    let row = |text: &str, start: &str| {
        let line = text.lines().find(|line| line.trim_start().starts_with(start)).unwrap();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(row(&of("Figure 15"), "private-crypt ")[2], "0.800");
    // plain, fastswap, tdmem-plain, tdmem-crypt, tdmem-crypt with fastswap's paths.
    let losses = of("Figure 16: Share of fastswap's");
    assert_eq!(row(&losses, "90%")[2..], ["0.000", "0.200", "0.375", "0.500"]);
    let performance = of("Figure 18");
    let last = performance.lines().rfind(|line| line.starts_with("k-means")).unwrap();
    assert_eq!(row(last, "k-means")[1..], ["40%", "1.00", "0.200", "0.160", "0.125", "0.100"]);
    assert!(of("Figure 17").contains("all shares"));
    let directory = tempfile::tempdir().unwrap();
    let files = outcomes.draw("measured", directory.path(), "paper-tdmem").unwrap();
    for name in ["sequential.svg", "stream.png", "geomean.svg", "programs.svg"] {
        let name = format!("paper-tdmem-{name}");
        assert!(files.iter().any(|file| file.ends_with(&name)), "{name}: {files:?}");
    }
    let stream = measured(&Model::default(), &[Part::Stream]);
    assert_eq!((stream.tables().len(), stream.claims().rows.len()), (2, 3 * 4));
}

#[test]
fn records_name_part_system_and_share() {
    let results = measured(&Model::default(), &Part::ALL).results();
    let find = |results: &Results, experiment: &str, metric: &str, system: &str| {
        let found = results.records().find(|record| {
            let own = record.setting.get("system").map(ToString::to_string);
            record.experiment == experiment
                && record.metric == metric
                && own.as_deref() == Some(system)
        });
        found.cloned().unwrap_or_else(|| panic!("{experiment} {metric} {system}"))
    };
    let page = find(&results, "sequential", "page_us", "private-plain");
    assert!(near(page.value, 2.0 * 10.0 * 1e6 / f64::from(4 << (26 - 12))), "{page:?}");
    assert_eq!(page.setting.number("local_percent"), Some(10.0));
    assert_eq!(find(&results, "programs", "time_s", "plain").value, 1.0);
    assert!(near(find(&results, "stream", "loss_ratio", "tdmem-plain").value, 0.2));
}

#[test]
fn wrong_checksum_is_no_result() {
    let outcomes = measured(&Model { damage: 1 << 32, ..Model::default() }, &[Part::Programs]);
    assert!(outcomes.has_wrong_result());
    let lines = outcomes.missing();
    assert!(lines.iter().all(|line| line.contains("tdmem-crypt:") && line.contains("checksum")));
}

#[test]
fn full_plan_has_the_papers_shares_and_a_plain_run_before_the_others() {
    let plan = Plan::new(&Part::ALL, Extent::Full, None);
    let points = plan.points();
    // Five systems; a plain run, and three shares of four; for each program the same with seven.
    assert_eq!(points.len(), 5 + (1 + 3 * 4) + 7 * (1 + 7 * 4));
    assert_eq!(plan.steps(), 3 * points.len());
    for point in points.iter().filter(|point| point.part != Part::Sequential) {
        let plain = points.iter().position(|other| *other == point.of(System::Plain));
        assert!(plain <= points.iter().position(|other| other == point), "{point:?}");
    }
    assert_eq!(Program::Sequential.bytes(plan.memory), 1 << 30, "the paper's size");
}

#[test]
fn parts_are_found_by_name_and_numbers_without_counterpart_exist() {
    for part in Part::ALL {
        assert_eq!(Part::find(part.experiment().name), Ok(part));
    }
    assert!(Part::find("x").unwrap_err().contains("crypt, sequential, stream, programs"));
    assert!(not_reproduced().to_string().contains("no evidence"));
}

#[test]
fn programs_run_in_this_process() {
    struct Here;
    impl Machine for Here {
        fn run(&self, job: Job, _: System) -> Result<Measured, String> {
            workload::run(job.program, job.bytes as usize).ok_or("not here".into())
        }
    }
    let plan = Plan::new(&Part::ALL, Extent::Quick, Some(1 << 20));
    let outcomes = plan.measure(&Here, &Progress::Silent.bar("", 0));
    assert!(!outcomes.has_wrong_result());
    assert_eq!(outcomes.missing(), [""; 0]);
}

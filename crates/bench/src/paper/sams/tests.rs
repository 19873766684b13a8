//! Tests of the plan and of the results, over a machine that computes its times.

use super::*;
use crate::paper::programs::workload;
use bench_report::progress::Progress;

/// A machine on which each system has a factor of time, and the half of it in CPU time.
struct Model {
    /// The reason why swap in a file is missing.
    file: &'static str,
    /// Difference of the checksum of fastswap.
    damage: u64,
}

impl Machine for Model {
    fn run(&self, job: Job, system: System) -> Result<Measured, String> {
        let factor = match system {
            System::Plain => 1.0,
            System::Zram => 4.0,
            System::File => return Err(self.file.into()),
            System::Linux if job.local_bytes < job.bytes / 3 => 8.0,
            System::Linux => 5.0,
            System::Fastswap => 2.5,
            System::Two => 2.0,
            System::Assist => 1.5,
        };
        let checksum = if system == System::Fastswap { 7 ^ self.damage } else { 7 };
        let (seconds, cpu_seconds) = (3.0 * factor, 1.0 + factor / 2.0);
        Ok(Measured { seconds, cpu_seconds, whole_seconds: seconds, checksum })
    }
}

fn measured(machine: &dyn Machine) -> Outcomes {
    let plan = Plan::new(Extent::Quick, Some(64 << 20));
    plan.measure(machine, &Progress::Silent.bar("", 0))
}

#[test]
fn savings_are_the_largest_ones_beside_the_papers() {
    let outcomes = measured(&Model { file: "needs root", damage: 0 });
    let savings = outcomes.savings();
    let of = |id: &str| {
        let row = savings.rows.iter().find(|row| row.record.claim.as_deref() == Some(id)).unwrap();
        (row.record.value, row.record.paper, row.what.clone())
    };
    let (value, paper, what) = of("sams.time.linux");
    assert_eq!((value, paper), (0.75, Some(0.74)));
    assert!(what.contains("25% local"), "{what}");
    assert_eq!(of("sams.time.fastswap").0, 1.0 - 2.0 / 2.5);
    assert_eq!(of("sams.cpu.linux").0, 1.0 - 2.0 / 5.0);
    assert!(savings.rows.iter().any(|row| row.what.contains("zram")));
    assert!(!savings.rows.iter().any(|row| row.what.contains("file")), "no result of it");
}

#[test]
fn tables_and_pictures_show_missing_results_with_their_reason() {
    let outcomes = measured(&Model { file: "needs root", damage: 0 });
    let line = "No result of file for quicksort 25%, quicksort 50%, stream 25%, stream 50%: \
                needs root";
    assert_eq!(outcomes.missing(), [line]);
    let tables = outcomes.tables();
    let text = tables.iter().map(|(_, table)| table.to_string()).collect::<String>();
    assert!(text.contains("8.00") && text.contains("2.50"), "{text}");
    let directory = tempfile::tempdir().unwrap();
    let files = outcomes.draw("measured", directory.path(), "paper-sams").unwrap();
    assert!(files.iter().any(|file| file.ends_with("paper-sams-cpu-25.svg")), "{files:?}");
    assert!(files.iter().all(|file| file.exists()), "{files:?}");
}

#[test]
fn wrong_checksum_is_no_result() {
    let outcomes = measured(&Model { file: "", damage: 1 });
    assert!(outcomes.has_wrong_result());
    let lines = outcomes.missing();
    assert!(lines.iter().any(|line| line.contains("fastswap") && line.contains("checksum")));
    assert!(outcomes.savings().rows.iter().all(|row| !row.what.contains("fastswap")));
}

#[test]
fn programs_run_in_this_process() {
    struct Here;
    impl Machine for Here {
        fn run(&self, job: Job, _: System) -> Result<Measured, String> {
            workload::run(job.program, job.bytes as usize).ok_or("not here".into())
        }
    }
    let plan = Plan { programs: PROGRAMS.into(), ..Plan::new(Extent::Quick, Some(1 << 20)) };
    let outcomes = plan.measure(&Here, &Progress::Silent.bar("", 0));
    assert!(!outcomes.has_wrong_result());
    assert!(outcomes.missing().iter().all(|line| line.contains("memcached")));
    let records = outcomes.results().rows.len();
    // Four programs; a plain result, and two shares of six systems; two numbers of two quantities.
    assert_eq!(records, 4 * (1 + 2 * 6) * 4);
    assert_eq!(plan.steps(), 5 * (1 + 2 * 6));
}

#[test]
fn full_plan_has_the_papers_programs_and_shares() {
    let plan = Plan::new(Extent::Full, None);
    assert_eq!((plan.programs.len(), plan.shares.len()), (5, 5));
    assert_eq!(Job::new(Program::Stream, 64 << 20, 50).local_bytes, 32 << 20);
    assert!(Job::new(Program::Stream, 64 << 20, 100).local_bytes > 64 << 20);
    assert_eq!(Job::new(Program::Linpack, 64 << 20, 25).bytes, 8 << 20);
}

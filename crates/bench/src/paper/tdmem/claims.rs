//! The paper's numbers beside ours, and its numbers without a counterpart.

use super::outcomes::Outcomes;
use super::{PAPERS, Part, Point, Program, SEQUENTIAL_SHARE, System};
use crate::paper::results::Results;
use bench_report::claims::Claims;
use bench_report::record::{Record, Setting, Statistic, Unit};
use bench_report::table::{Cell, Table};

/// Ids of the claims of figure 16.
pub(super) const STREAM: [&str; 4] = [
    "tdmem.stream.mbps.90.fastswap",
    "tdmem.stream.loss.90",
    "tdmem.stream.loss.70",
    "tdmem.stream.loss.50",
];

/// Ids of the claims of figures 17 and 18, and of section 8.
pub(super) const PROGRAMS: [&str; 3] =
    ["tdmem.fastswap.performance", "tdmem.overhead", "tdmem.kmeans.40"];

/// The local share of the paper's number of k-means, in percent.
const K_MEANS_SHARE: u32 = 40;

/// Ids of the claims without a counterpart, with the reasons.
const NOT_REPRODUCED: [(&str, &str); 5] = [
    ("tdmem.seal.fpga", "no FPGA; the paper's number is an estimate of its synthesis tool"),
    ("tdmem.open.fpga", "no FPGA; the paper's number is an estimate of its synthesis tool"),
    ("tdmem.page.hbm", "fitted: an input of any model, no evidence"),
    ("tdmem.page.dram", "fitted: an input of any model, no evidence"),
    ("tdmem.analytics.40", "the program needs Spark and the data of CloudSuite"),
];

/// The paper's numbers that this machine cannot give, with the reasons.
pub fn not_reproduced() -> Table {
    let mut table = Table::new(["the paper's number", "paper", "unit", "why there is no other"]);
    for (id, why) in NOT_REPRODUCED {
        let claim = Claims::builtin().get(id).expect("the list names existing claims");
        table.row([
            Cell::text(&claim.setting),
            Cell::number(claim.value),
            Cell::text(&claim.unit),
            Cell::text(why),
        ]);
    }
    table
}

impl Outcomes {
    /// The paper's numbers beside ours. A part that did not run has no row.
    pub fn claims(&self) -> Results {
        let mut results = Results::default();
        for &part in &self.plan.parts {
            let mut own = Results::new(part.experiment().name, None);
            match part {
                Part::Crypt => {}
                Part::Sequential => self.add_sequential(&mut own),
                Part::Stream => self.add_stream(&mut own),
                Part::Programs => self.add_programs(&mut own),
            }
            results.rows.extend(own.rows);
        }
        results
    }

    fn add_sequential(&self, results: &mut Results) {
        for system in System::SEQUENTIAL.into_iter().filter(|system| system.unsealed() != *system) {
            let point = Point::new(Part::Sequential, Program::Sequential, SEQUENTIAL_SHARE, system);
            let ratio = self.performance(&point, &point.of(system.unsealed()));
            let Some(record) = ratio_of(results, &point, "sealed_over_plain_ratio", ratio) else {
                continue;
            };
            let base = system.unsealed().name();
            let what = format!("sequential loads, {} over {base}", system.name());
            match system {
                System::PrivateCrypt => results.claimed(what, record, "tdmem.sealed.sequential"),
                _ => results.add(what, record),
            }
        }
    }

    fn add_stream(&self, results: &mut Results) {
        for (program, share) in self.plan.workloads(Part::Stream) {
            let base = Point::new(Part::Stream, program, share, System::Fastswap);
            if let Some(bandwidth) = self.bandwidth(&base) {
                let record = results.record(&setting(&base), "triad_mb_per_s", Unit::MbPerSecond);
                let record = record.value(Statistic::P50, bandwidth);
                let id = format!("tdmem.stream.mbps.{share}.fastswap");
                add(results, base.text(), record, &STREAM, &id);
            }
            for system in System::REMOTE.into_iter().filter(|s| *s != System::Fastswap) {
                let point = base.of(system);
                let loss = self.loss(&point);
                let Some(record) = ratio_of(results, &point, "loss_ratio", loss) else { continue };
                let what = format!("bandwidth lost against fastswap: {}", point.text());
                let is_papers = system == System::TdmemCrypt;
                let id = if is_papers { format!("tdmem.stream.loss.{share}") } else { "".into() };
                add(results, what, record, &STREAM, &id);
            }
        }
    }

    fn add_programs(&self, results: &mut Results) {
        let all = self.plan.workloads(Part::Programs);
        let papers: Vec<_> = all.iter().copied().filter(|(p, _)| PAPERS.contains(p)).collect();
        for (workloads, is_papers) in [(&papers, true), (&all, false)] {
            let which = if is_papers { "the paper's programs" } else { "all programs" };
            let base = self.geomean(workloads, System::Fastswap);
            let setting =
                |system: System| Setting::new().with("system", system.name()).with("of", which);
            if let Some(base) = base {
                let record =
                    results.record(&setting(System::Fastswap), "geomean_ratio", Unit::Ratio);
                let record = record.value(Statistic::P50, base);
                let what = format!("performance, fastswap, geometric mean of {which}");
                let id = if is_papers { "tdmem.fastswap.performance" } else { "" };
                add(results, what, record, &PROGRAMS, id);
            }
            for system in System::REMOTE.into_iter().filter(|s| *s != System::Fastswap) {
                let Some((own, base)) = self.geomean(workloads, system).zip(base) else { continue };
                let record = results.record(&setting(system), "geomean_loss_ratio", Unit::Ratio);
                let record = record.value(Statistic::P50, 1.0 - own / base);
                let what = format!("performance lost against fastswap: {}, {which}", system.name());
                let is_claim = is_papers && system == System::TdmemCrypt;
                let id = if is_claim { "tdmem.overhead" } else { "" };
                add(results, what, record, &PROGRAMS, id);
            }
        }
        let system = System::TdmemCrypt;
        let point = Point::new(Part::Programs, Program::KMeans, K_MEANS_SHARE, system);
        let performance = self.over_plain(&point);
        if let Some(record) = ratio_of(results, &point, "performance_ratio", performance) {
            let what = format!("performance: {}", point.text());
            add(results, what, record, &PROGRAMS, "tdmem.kmeans.40");
        }
    }
}

/// Adds a number, with the paper's if `id` is one of `claims`.
fn add(results: &mut Results, what: String, record: Record, claims: &[&str], id: &str) {
    match claims.contains(&id) {
        true => results.claimed(what, record, id),
        false => results.add(what, record),
    }
}

fn setting(point: &Point) -> Setting {
    Setting::new()
        .with("program", point.program.name())
        .with("system", point.system.name())
        .with("local_percent", u64::from(point.share))
}

fn ratio_of(results: &Results, point: &Point, metric: &str, ratio: Option<f64>) -> Option<Record> {
    let record = results.record(&setting(point), metric, Unit::Ratio);
    Some(record.value(Statistic::P50, ratio?))
}

//! Results of the experiment: medians over the rounds, tables, the paper's claims, and pictures.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Measured, NAME, Plan, Program, System};
use crate::Error;
use crate::paper::programs::rounds::Rounds;
use crate::paper::results::Results;
use bench_report::plot::Bars;
use bench_report::record::{Setting, Statistic, Unit};
use bench_report::table::{Cell, Table};

/// Ids of the claims that the experiment covers.
pub const CLAIMS: [&str; 4] =
    ["sams.time.linux", "sams.cpu.linux", "sams.time.fastswap", "sams.cpu.fastswap"];

/// A measured quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Quantity {
    Time,
    Cpu,
}

impl Quantity {
    const BOTH: [Self; 2] = [Self::Time, Self::Cpu];

    fn of(self, measured: &Measured) -> f64 {
        match self {
            Self::Time => measured.seconds,
            Self::Cpu => measured.cpu_seconds,
        }
    }

    /// The name in metrics and file names.
    fn name(self) -> &'static str {
        match self {
            Self::Time => "time",
            Self::Cpu => "cpu",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Time => "Execution time",
            Self::Cpu => "CPU time of the program's process",
        }
    }
}

type Point = (Program, u32, System);

/// Results of all points.
#[derive(Clone, Debug)]
pub struct Outcomes {
    plan: Plan,
    rounds: Rounds<Point, Measured>,
}

impl Outcomes {
    pub(super) fn new(plan: &Plan) -> Self {
        Self { plan: plan.clone(), rounds: Rounds::default() }
    }

    /// Adds the outcome of a run. All runs of a program have the same checksum.
    pub(super) fn add(&mut self, point: Point, round: u32, outcome: Result<Measured, String>) {
        self.rounds.add(point, round, outcome, |other| other.0 == point.0);
    }

    pub(super) fn is_missing(&self, point: Point) -> bool {
        self.rounds.is_missing(&point)
    }

    /// Returns true if a program gave a wrong result.
    pub fn has_wrong_result(&self) -> bool {
        self.rounds.has_wrong_result()
    }

    /// Median over the rounds; a quotient has its two numbers from the same round.
    fn median(&self, quantity: Quantity, point: Point, over: Option<System>) -> Option<f64> {
        let value = |measured: &Measured| Some(quantity.of(measured));
        let of = |system| self.place((point.0, point.1, system));
        match over {
            Some(base) => self.rounds.median_over(&of(point.2)?, &of(base)?, value),
            None => self.rounds.median(&of(point.2)?, value),
        }
    }

    /// The point under which a result is. A plain run has no share, and counts as the first one's.
    fn place(&self, (program, share, system): Point) -> Option<Point> {
        let first = *self.plan.shares.first()?;
        Some((program, if system == System::Plain { first } else { share }, system))
    }

    /// All numbers as records.
    pub fn results(&self) -> Results {
        let mut results = Results::new(NAME, None);
        for point in self.rounds.points() {
            let (program, share, system) = point;
            let setting = Setting::new()
                .with("program", program.name())
                .with("system", system.name())
                .size(program.bytes(self.plan.memory));
            let setting = match system {
                System::Plain => setting,
                _ => setting.with("local_percent", u64::from(share)),
            };
            for quantity in Quantity::BOTH {
                let name = quantity.name();
                let what = format!("{}, {share}% local, {}", program.name(), system.name());
                if let Some(seconds) = self.median(quantity, point, None) {
                    let record = results.record(&setting, &format!("{name}_s"), Unit::Seconds);
                    results.add(&what, record.value(Statistic::P50, seconds));
                }
                if let Some(ratio) = self.median(quantity, point, Some(System::Plain)) {
                    let metric = format!("{name}_over_plain_ratio");
                    let record = results.record(&setting, &metric, Unit::Ratio);
                    results.add(&what, record.value(Statistic::P50, ratio));
                }
            }
        }
        results
    }

    /// The largest savings of two paths against the other systems, beside the paper's.
    pub fn savings(&self) -> Results {
        let mut results = Results::new(NAME, None);
        for against in [System::Linux, System::Fastswap, System::Zram, System::File] {
            for quantity in Quantity::BOTH {
                let Some((saved, program, share)) = self.largest_saving(quantity, against) else {
                    continue;
                };
                let name = quantity.name();
                let setting = Setting::new()
                    .with("program", program.name())
                    .with("against", against.name())
                    .with("local_percent", u64::from(share));
                let record = results.record(&setting, &format!("{name}_saved_ratio"), Unit::Ratio);
                let record = record.value(Statistic::Max, saved);
                let what = format!(
                    "{name} saved against {}, at most ({}, {share}% local)",
                    against.name(),
                    program.name()
                );
                match CLAIMS.iter().find(|id| **id == format!("sams.{name}.{}", against.name())) {
                    Some(id) => results.claimed(what, record, id),
                    None => results.add(what, record),
                }
            }
        }
        results
    }

    /// The largest share of a quantity that two paths save, with its program and local share.
    fn largest_saving(&self, quantity: Quantity, against: System) -> Option<(f64, Program, u32)> {
        let shares = self.plan.shares.iter().filter(|share| **share < 100);
        let points = shares.flat_map(|share| self.plan.programs.iter().map(|p| (*p, *share)));
        let saving = |(program, share)| {
            let ratio = self.median(quantity, (program, share, System::Two), Some(against))?;
            Some((1.0 - ratio, program, share))
        };
        points.filter_map(saving).max_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// One table for each quantity: seconds of plain runs, and all systems over plain.
    pub fn tables(&self) -> Vec<(String, Table)> {
        Quantity::BOTH.map(|quantity| self.table(quantity)).into()
    }

    fn table(&self, quantity: Quantity) -> (String, Table) {
        let paged = &System::ALL[1..];
        let heads = ["program", "local", "plain (s)"].into_iter();
        let mut table = Table::new(heads.chain(paged.iter().map(|system| system.name())));
        for &program in &self.plan.programs {
            for &share in &self.plan.shares {
                let plain = self.median(quantity, (program, share, System::Plain), None);
                let mut cells = vec![
                    Cell::text(program.name()),
                    Cell::text(format!("{share}%")),
                    plain.map_or(Cell::None, Cell::number),
                ];
                cells.extend(paged.iter().map(|system| {
                    let ratio =
                        self.median(quantity, (program, share, *system), Some(System::Plain));
                    ratio.map_or(Cell::None, |ratio| Cell::Number(format!("{ratio:.2}")))
                }));
                table.row(cells);
            }
        }
        (format!("{} over plain - measured, this machine", quantity.title()), table)
    }

    /// One line for each reason of missing results.
    pub fn missing(&self) -> Vec<String> {
        let mut reasons: BTreeMap<(System, &str), Vec<String>> = BTreeMap::new();
        for ((program, share, system), why) in self.rounds.missing() {
            let points = reasons.entry((system, why)).or_default();
            points.push(match system {
                System::Plain => program.name().to_owned(),
                _ => format!("{} {share}%", program.name()),
            });
        }
        let line = |((system, why), points): (&(System, &str), &Vec<String>)| {
            format!("No result of {} for {}: {why}", system.name(), points.join(", "))
        };
        reasons.iter().map(line).collect()
    }

    /// Draws one picture for each quantity and local share below 100 %: a group of bars for each
    /// program, a bar for each system. A missing result has no bar.
    ///
    /// # Errors
    /// As [`bench_report::plot`].
    pub fn draw(
        &self,
        subtitle: &str,
        directory: &Path,
        prefix: &str,
    ) -> Result<Vec<PathBuf>, Error> {
        let mut files = Vec::new();
        for quantity in Quantity::BOTH {
            for &share in self.plan.shares.iter().filter(|share| **share < 100) {
                let title = format!("{}, {share}% of the memory local", quantity.title());
                let systems = &System::ALL[1..];
                let mut bars =
                    Bars::new(&title, "over all local", systems.iter().map(|system| system.name()));
                for &program in &self.plan.programs {
                    let value = |system: &System| {
                        let point = (program, share, *system);
                        self.median(quantity, point, Some(System::Plain)).unwrap_or(0.0)
                    };
                    bars = bars.group(program.name(), systems.iter().map(value));
                }
                let name = format!("{prefix}-{}-{share}", quantity.name());
                files.extend(bars.subtitle(subtitle).write(directory, &name)?);
            }
        }
        Ok(files)
    }
}

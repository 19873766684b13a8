//! Tables and pictures of the experiment.

use std::path::{Path, PathBuf};

use super::outcomes::{Outcomes, Quantity};
use super::{Point, Variant};
use crate::Error;
use bench_report::plot::{Axis, Bars, Lines};
use bench_report::table::{Cell, Table};

/// A part of a figure: a quantity as a number of a point.
struct Part {
    title: &'static str,
    /// Part of file names.
    file: &'static str,
    label: &'static str,
    value: fn(&Outcomes, &Point) -> Option<f64>,
}

/// The rows of figure 8.
const FIGURE_8: [Part; 4] = [TIME, PEAK, CPU, UTILIZATION];
/// The parts of figure 9.
const FIGURE_9: [Part; 4] = [TASK_TIME, PEAK, CPU, UTILIZATION];
/// The ablations of §6.3.
const ABLATIONS: [Part; 2] = [TIME, FAULT];

const TIME: Part = Part {
    title: "Execution time over plain",
    file: "time",
    label: "over all local",
    value: Outcomes::slowdown,
};
const TASK_TIME: Part = Part {
    title: "Execution time of k-means over one task's with static-mr",
    file: "time",
    label: "over one task with static-mr",
    value: Outcomes::task_slowdown,
};
const PEAK: Part = Part {
    title: "Memory node's CPU, most in 0.1 s, cores",
    file: "peak",
    label: "cores",
    value: |outcomes, point| outcomes.median(Quantity::NodePeak, point),
};
const CPU: Part = Part {
    title: "Memory node's CPU time, s",
    file: "cpu",
    label: "seconds",
    value: |outcomes, point| outcomes.median(Quantity::NodeCpu, point),
};
const UTILIZATION: Part = Part {
    title: "Memory utilization, mean over the run",
    file: "utilization",
    label: "pages over chunks",
    value: |outcomes, point| outcomes.median(Quantity::Utilization, point),
};
const FAULT: Part = Part {
    title: "Mean time of a fault, us",
    file: "fault",
    label: "us",
    value: |outcomes, point| outcomes.median(Quantity::FaultTime, point),
};

fn number(value: Option<f64>) -> Cell {
    value.map_or(Cell::None, |value| Cell::Number(format!("{value:.3}")))
}

impl Outcomes {
    /// The tables: figure 8, figure 9, the ablations.
    pub fn tables(&self) -> Vec<(String, Table)> {
        let name =
            |group: &str, part: &Part| format!("{group}: {} - measured, this machine", part.title);
        let mut tables = Vec::new();
        for part in &FIGURE_8 {
            tables.push((name("Figure 8", part), self.workload_table(part, &Variant::FIGURES)));
        }
        for part in &FIGURE_9 {
            tables.push((name("Figure 9", part), self.task_table(part)));
        }
        for part in &ABLATIONS {
            tables.push((name("Ablations", part), self.workload_table(part, &Variant::ABLATIONS)));
        }
        tables
    }

    /// A row for each program and local share.
    fn workload_table(&self, part: &Part, variants: &[Variant]) -> Table {
        let heads = ["program", "local", "plain (s)"].into_iter();
        let mut table = Table::new(heads.chain(variants.iter().map(|variant| variant.name())));
        for (program, share) in self.plan.workloads() {
            let plain = self.plan.point(program, share, Variant::Plain);
            let plain = self.median(Quantity::Time, &plain);
            let mut cells = vec![
                Cell::text(program.name()),
                Cell::text(format!("{share}%")),
                plain.map_or(Cell::None, Cell::number),
            ];
            cells.extend(variants.iter().map(|variant| {
                number((part.value)(self, &self.plan.point(program, share, *variant)))
            }));
            table.row(cells);
        }
        table
    }

    /// A row for each number of tasks.
    fn task_table(&self, part: &Part) -> Table {
        let names = Variant::FIGURES.iter().map(|variant| variant.name());
        let mut table = Table::new(["tasks"].into_iter().chain(names));
        for &tasks in &self.plan.tasks {
            let mut cells = vec![Cell::count(tasks.into())];
            cells.extend(
                Variant::FIGURES.iter().map(|variant| {
                    number((part.value)(self, &self.plan.task_point(tasks, *variant)))
                }),
            );
            table.row(cells);
        }
        table
    }

    /// Draws figure 8, a picture for each row and local share with a group of bars for each
    /// program, and figure 9, a line for each scheme over the tasks. A missing result has no bar
    /// and no point.
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
        for part in &FIGURE_8 {
            for &share in &self.plan.shares {
                let bars = self.bars(part, share).subtitle(subtitle);
                files.extend(bars.write(directory, &format!("{prefix}-{}-{share}", part.file))?);
            }
        }
        for part in &FIGURE_9 {
            // A picture needs a point.
            let Some(lines) = self.lines(part) else { continue };
            let lines = lines.subtitle(subtitle);
            files.extend(lines.write(directory, &format!("{prefix}-tasks-{}", part.file))?);
        }
        Ok(files)
    }

    fn bars(&self, part: &Part, share: u32) -> Bars {
        let title = format!("{}, {share}% local", part.title);
        let names = Variant::PAPERS.iter().map(|variant| variant.name());
        let mut bars = Bars::new(&title, part.label, names);
        for &program in &self.plan.programs {
            let value = |variant: &Variant| {
                (part.value)(self, &self.plan.point(program, share, *variant)).unwrap_or(0.0)
            };
            bars = bars.group(program.name(), Variant::PAPERS.iter().map(value));
        }
        bars
    }

    fn lines(&self, part: &Part) -> Option<Lines> {
        let axes = (Axis::linear("tasks of k-means, 50% local"), Axis::linear(part.label));
        let mut lines = Lines::new(part.title, axes.0, axes.1);
        let mut is_empty = true;
        for variant in Variant::PAPERS {
            let value = |tasks: &u32| {
                let value = (part.value)(self, &self.plan.task_point(*tasks, variant))?;
                Some((f64::from(*tasks), value))
            };
            let points: Vec<_> = self.plan.tasks.iter().filter_map(value).collect();
            is_empty &= points.is_empty();
            lines = match variant {
                Variant::OneSidedMw => lines.line(variant.name(), points),
                _ => lines.baseline(variant.name(), points),
            };
        }
        (!is_empty).then_some(lines)
    }
}

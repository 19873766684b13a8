//! Tables and pictures of the experiments.

use std::path::{Path, PathBuf};

use super::outcomes::Outcomes;
use super::{PAPERS, Part, Point, Program, SEQUENTIAL_SHARE, STREAM_SHARES, System};
use crate::Error;
use bench_report::plot::{Axis, Bars, Lines};
use bench_report::table::{Cell, Table};

fn number(value: Option<f64>, digits: usize) -> Cell {
    value.map_or(Cell::None, |value| Cell::Number(format!("{value:.digits$}")))
}

/// Heads of a table with a column for each system over a network.
fn heads<'a>(first: &[&'a str]) -> Vec<&'a str> {
    first.iter().copied().chain(System::REMOTE.iter().map(|system| system.name())).collect()
}

/// A function of the results and a point.
type Value = fn(&Outcomes, &Point) -> Option<f64>;

impl Outcomes {
    /// The tables of the parts that ran.
    pub fn tables(&self) -> Vec<(String, Table)> {
        let mut tables = Vec::new();
        for part in &self.plan.parts {
            match part {
                Part::Crypt => {}
                Part::Sequential => tables.push(("Figure 15: Sequential loads", self.sequential())),
                Part::Stream => {
                    let table = self.stream(Self::bandwidth, 0);
                    tables.push(("Figure 16: STREAM's triad, MB/s", table));
                    let table = self.stream(Self::loss, 3);
                    tables.push(("Figure 16: Share of fastswap's bandwidth that is lost", table));
                }
                Part::Programs => {
                    let table = self.programs();
                    tables.push(("Figure 18: Performance over plain", table));
                    let table = self.geomeans();
                    tables.push(("Figure 17: Geometric mean of the performance", table));
                }
            }
        }
        let titled = |(title, table)| (format!("{title} - measured, this machine"), table);
        tables.into_iter().map(titled).collect()
    }

    fn sequential(&self) -> Table {
        let mut table = Table::new(["system", "us a page", "performance over unsealed"]);
        for system in System::SEQUENTIAL {
            let point = Point::new(Part::Sequential, Program::Sequential, SEQUENTIAL_SHARE, system);
            let ratio = self.performance(&point, &point.of(system.unsealed()));
            table.row([
                Cell::text(system.name()),
                number(self.page_us(&point), 3),
                number(ratio.filter(|_| system.unsealed() != system), 3),
            ]);
        }
        table
    }

    fn stream(&self, value: Value, digits: usize) -> Table {
        let mut table = Table::new(heads(&["local", "plain"]));
        for (program, share) in self.plan.workloads(Part::Stream) {
            let of = |system: &System| {
                number(value(self, &Point::new(Part::Stream, program, share, *system)), digits)
            };
            let first = [Cell::text(format!("{share}%")), of(&System::Plain)];
            table.row(first.into_iter().chain(System::REMOTE.iter().map(of)));
        }
        table
    }

    fn programs(&self) -> Table {
        let mut table = Table::new(heads(&["program", "local", "plain (s)"]));
        for (program, share) in self.plan.workloads(Part::Programs) {
            let point = |system| Point::new(Part::Programs, program, share, system);
            let plain = self.seconds(&point(System::Plain));
            let first = [
                Cell::text(program.name()),
                Cell::text(format!("{share}%")),
                plain.map_or(Cell::None, Cell::number),
            ];
            let of = |system: &System| number(self.over_plain(&point(*system)), 3);
            table.row(first.into_iter().chain(System::REMOTE.iter().map(of)));
        }
        table
    }

    fn geomeans(&self) -> Table {
        let mut table = Table::new(heads(&["programs", "local"]));
        let all = self.plan.workloads(Part::Programs);
        for (name, is_papers) in [("the paper's", true), ("all", false)] {
            let of_program =
                |(program, _): &&(Program, u32)| !is_papers || PAPERS.contains(program);
            let own: Vec<_> = all.iter().filter(of_program).copied().collect();
            for share in self.plan.shares.iter().map(Some).chain([None]) {
                let of_share = |(_, s): &&(Program, u32)| share.is_none_or(|share| share == s);
                let workloads: Vec<_> = own.iter().filter(of_share).copied().collect();
                let local = share.map_or("all shares".to_owned(), |share| format!("{share}%"));
                let first = [Cell::text(name), Cell::text(local)];
                let of = |system: &System| number(self.geomean(&workloads, *system), 3);
                table.row(first.into_iter().chain(System::REMOTE.iter().map(of)));
            }
        }
        table
    }

    /// Draws the figures of the parts that ran. A missing result has no bar and no point.
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
        for part in &self.plan.parts {
            match part {
                Part::Crypt => {}
                Part::Sequential => {
                    let bars = self.sequential_bars().subtitle(subtitle);
                    files.extend(bars.write(directory, &format!("{prefix}-sequential"))?);
                }
                Part::Stream => {
                    let bars = self.stream_bars().subtitle(subtitle);
                    files.extend(bars.write(directory, &format!("{prefix}-stream"))?);
                }
                Part::Programs => {
                    for (lines, name) in
                        [(self.mean_lines(), "geomean"), (self.lines(), "programs")]
                    {
                        // A picture needs a point.
                        let Some(lines) = lines else { continue };
                        let lines = lines.subtitle(subtitle);
                        files.extend(lines.write(directory, &format!("{prefix}-{name}"))?);
                    }
                }
            }
        }
        Ok(files)
    }

    fn sequential_bars(&self) -> Bars {
        let names = System::SEQUENTIAL.iter().map(|system| system.name());
        let value = |system: &System| {
            let share = SEQUENTIAL_SHARE;
            let point = Point::new(Part::Sequential, Program::Sequential, share, *system);
            self.page_us(&point).unwrap_or(0.0)
        };
        Bars::new("Sequential loads, time of a page", "us", names)
            .group("sequential", System::SEQUENTIAL.iter().map(value))
    }

    fn stream_bars(&self) -> Bars {
        let names = System::REMOTE.iter().map(|system| system.name());
        let mut bars = Bars::new("Bandwidth of STREAM's triad", "MB/s", names);
        for share in STREAM_SHARES {
            let value = |system: &System| {
                let point = Point::new(Part::Stream, Program::Triad, share, *system);
                self.bandwidth(&point).unwrap_or(0.0)
            };
            bars = bars.group(&format!("{share}% local"), System::REMOTE.iter().map(value));
        }
        bars
    }

    /// A line for each system: the geometric mean of all programs over the local share.
    fn mean_lines(&self) -> Option<Lines> {
        let all = self.plan.workloads(Part::Programs);
        let series = System::REMOTE.iter().map(|system| {
            let value = |share: u32| {
                let own: Vec<_> = all.iter().filter(|(_, s)| *s == share).copied().collect();
                self.geomean(&own, *system)
            };
            (system.name(), self.over_shares(value))
        });
        drawn("Geometric mean of all programs", series.collect())
    }

    /// A line for each program, as in figure 18.
    fn lines(&self) -> Option<Lines> {
        let series = self.plan.programs.iter().map(|program| {
            let value = |share| {
                let system = System::TdmemCrypt;
                self.over_plain(&Point::new(Part::Programs, *program, share, system))
            };
            (program.name(), self.over_shares(value))
        });
        drawn("Programs with tdmem-crypt", series.collect())
    }

    fn over_shares(&self, value: impl Fn(u32) -> Option<f64>) -> Vec<(f64, f64)> {
        let point = |share: &u32| Some((f64::from(*share), value(*share)?));
        self.plan.shares.iter().filter_map(point).collect()
    }
}

/// Draws performance over the local share. Returns `None` without a point.
fn drawn(title: &str, series: Vec<(&str, Vec<(f64, f64)>)>) -> Option<Lines> {
    let axes = (Axis::linear("local memory (%)"), Axis::linear("performance over plain"));
    let series: Vec<_> = series.into_iter().filter(|(_, points)| !points.is_empty()).collect();
    let lines = Lines::new(title, axes.0, axes.1);
    let is_empty = series.is_empty();
    let lines = series.into_iter().fold(lines, |lines, (name, points)| lines.line(name, points));
    (!is_empty).then_some(lines)
}

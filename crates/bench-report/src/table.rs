//! Plain-text tables.
//!
//! [`Table`] aligns cells. [`Pivot`] makes a table out of records: one row per combination of some
//! keys of the setting, one column per metric and statistic, the paper's number where a record has
//! a claim, and a column of ratios to a baseline row.
//!
//! ```text
//!                               alloc_latency_us  alloc_latency_us      over
//! scheme      control  clients               p50               p99  rpc-mw-2
//! ----------  -------  -------  ----------------  ----------------  --------
//! onesidedmw  -              1              3.11              5.92     0.061
//! rpc-mw-2    event          1              50.8              97.0      1.00
//! ```

use std::fmt;

use crate::record::{BASELINE_NIC, Record, Setting, SettingValue, Statistic, Unit};
use units::Size;
use units::number::{engineering, significant, thousands};

/// A table of text. Columns of numbers are right-aligned. A column head may have several lines.
#[derive(Clone, Debug, Default)]
pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<Cell>>,
}

/// One cell.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// Text, left-aligned.
    Text(String),
    /// A formatted number, possibly with a unit, right-aligned.
    Number(String),
    /// No value; printed as a dash.
    None,
}

impl Cell {
    /// A cell of text.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    /// A cell with a number to three significant digits.
    pub fn number(value: f64) -> Self {
        Self::Number(significant(value))
    }

    /// A cell with a count, with thousands separators.
    pub fn count(count: u64) -> Self {
        Self::Number(thousands(count))
    }

    /// A cell with a size, rounded to three digits.
    pub fn size(bytes: u64) -> Self {
        Self::Number(Size(bytes).rounded())
    }

    fn as_str(&self) -> &str {
        match self {
            Self::Text(text) | Self::Number(text) => text,
            Self::None => "-",
        }
    }
}

impl Table {
    /// A table with these column heads.
    pub fn new<S: Into<String>>(head: impl IntoIterator<Item = S>) -> Self {
        Self { head: head.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Adds a row; it has a cell for each column.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        let cells: Vec<Cell> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.head.len(), "a row has a cell for each column");
        self.rows.push(cells);
    }

    /// True if the table has no row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |text: &str| text.lines().map(|line| line.chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.head.len())
            .map(|at| {
                let cells = self.rows.iter().map(|row| width(row[at].as_str()));
                cells.chain([width(&self.head[at])]).max().unwrap_or(0)
            })
            .collect();
        let right: Vec<bool> = (0..self.head.len())
            .map(|at| {
                self.rows.iter().any(|row| matches!(row[at], Cell::Number(_)))
                    && !self.rows.iter().any(|row| matches!(row[at], Cell::Text(_)))
            })
            .collect();
        let mut line = |cells: &mut dyn Iterator<Item = &str>| {
            let padded: Vec<String> = cells
                .zip(widths.iter().zip(&right))
                .map(
                    |(cell, (&width, &right))| {
                        if right { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
                    },
                )
                .collect();
            writeln!(f, "{}", padded.join("  ").trim_end())
        };
        let height = self.head.iter().map(|head| head.lines().count()).max().unwrap_or(0);
        for at in 0..height {
            // Heads are aligned to the bottom: a shorter head starts on a lower line.
            line(&mut self.head.iter().map(|head| {
                let above = height - head.lines().count();
                at.checked_sub(above).and_then(|at| head.lines().nth(at)).unwrap_or("")
            }))?;
        }
        let rules: Vec<String> = widths.iter().map(|&width| "-".repeat(width)).collect();
        line(&mut rules.iter().map(String::as_str))?;
        for row in &self.rows {
            line(&mut row.iter().map(Cell::as_str))?;
        }
        Ok(())
    }
}

/// Description of a table made of records.
#[derive(Clone, Debug, Default)]
pub struct Pivot {
    rows: Vec<String>,
    columns: Vec<Column>,
    ratios: Vec<Ratio>,
}

/// A column: one statistic of one metric.
#[derive(Clone, Debug)]
struct Column {
    metric: String,
    statistic: Statistic,
}

/// A column of ratios: the value of a row divided by the value of its baseline row.
#[derive(Clone, Debug)]
struct Ratio {
    column: Column,
    baseline: Setting,
}

impl Column {
    fn new(metric: &str, statistic: Statistic) -> Self {
        Self { metric: metric.into(), statistic }
    }

    fn shows(&self, record: &Record) -> bool {
        record.metric == self.metric && record.statistic == self.statistic
    }

    /// The first record with the row's values of the keys.
    fn find<'a>(&self, records: &'a [Record], keys: &[&str], row: &Setting) -> Option<&'a Record> {
        records.iter().find(|r| self.shows(r) && project(&r.setting, keys) == *row)
    }

    fn has_paper(&self, records: &[Record]) -> bool {
        records.iter().any(|r| self.shows(r) && r.paper.is_some())
    }
}

impl Pivot {
    /// A table with one row per combination of these keys' values, in order of appearance. A key
    /// that no record has makes no column.
    pub fn rows<'a>(keys: impl IntoIterator<Item = &'a str>) -> Self {
        Self { rows: keys.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    /// Adds a column: a statistic of a metric. The column is left out if no record has it.
    pub fn column(mut self, metric: &str, statistic: Statistic) -> Self {
        self.columns.push(Column::new(metric, statistic));
        self
    }

    /// Adds a column of ratios after all other columns: a statistic of a metric, divided by the
    /// same statistic in the baseline row. The baseline row has the values of `baseline`, and this
    /// row's values of all other keys.
    pub fn ratio(mut self, metric: &str, statistic: Statistic, baseline: &Setting) -> Self {
        let column = Column::new(metric, statistic);
        self.ratios.push(Ratio { column, baseline: baseline.clone() });
        self
    }

    /// Makes the table from the records that belong to one of the columns.
    pub fn table(&self, records: &[Record]) -> Table {
        let shown: Vec<&Record> =
            records.iter().filter(|r| self.columns.iter().any(|c| c.shows(r))).collect();
        let columns: Vec<&Column> =
            self.columns.iter().filter(|c| shown.iter().any(|r| c.shows(r))).collect();
        let keys: Vec<&str> = (self.rows.iter().map(String::as_str))
            .filter(|key| shown.iter().any(|r| r.setting.get(key).is_some()))
            .collect();
        let mut rows: Vec<Setting> = Vec::new();
        for record in &shown {
            let row = project(&record.setting, &keys);
            if !rows.contains(&row) {
                rows.push(row);
            }
        }

        let mut table = Table::new(self.head(records, &keys, &columns));
        for row in &rows {
            let mut cells: Vec<Cell> = keys.iter().map(|key| key_cell(key, row.get(key))).collect();
            for column in &columns {
                let record = column.find(records, &keys, row);
                cells.push(record.map_or(Cell::None, value_cell));
                if column.has_paper(records) {
                    let stated = record.and_then(|r| Some((r.value, r.paper?)));
                    cells.push(stated.map_or(Cell::None, |(_, paper)| Cell::number(paper)));
                    cells.push(stated.map_or(Cell::None, |(ours, paper)| over(ours, paper)));
                }
            }
            cells.extend(self.ratios.iter().map(|ratio| ratio.cell(records, &keys, row)));
            table.row(cells);
        }
        table
    }

    fn head(&self, records: &[Record], keys: &[&str], columns: &[&Column]) -> Vec<String> {
        let mut head: Vec<String> = keys.iter().map(ToString::to_string).collect();
        for column in columns {
            head.push(format!("{}\n{}", column.metric, column.statistic));
            if column.has_paper(records) {
                head.push("paper".into());
                head.push("over\npaper".into());
            }
        }
        head.extend(self.ratios.iter().map(Ratio::head));
        head
    }
}

impl Ratio {
    /// The column's head: the values of the baseline, one per line.
    fn head(&self) -> String {
        let names = self.baseline.iter().map(|(_, name)| name.to_string());
        let names: Vec<String> = names.filter(|name| name != BASELINE_NIC).collect();
        assert!(!names.is_empty(), "a baseline has at least one value");
        format!("over\n{}", names.join("\n"))
    }

    fn cell(&self, records: &[Record], keys: &[&str], row: &Setting) -> Cell {
        let baseline = self.baseline.iter().filter(|(key, _)| keys.contains(key));
        let baseline = baseline.fold(row.clone(), |row, (key, value)| row.with(key, value.clone()));
        let ours = self.column.find(records, keys, row);
        let theirs = self.column.find(records, keys, &project(&baseline, keys));
        ours.zip(theirs).map_or(Cell::None, |(ours, theirs)| over(ours.value, theirs.value))
    }
}

/// The given keys of a setting, in the order of `keys`.
fn project(setting: &Setting, keys: &[&str]) -> Setting {
    keys.iter().fold(Setting::new(), |projected, key| match setting.get(key) {
        Some(value) => projected.with(key, value.clone()),
        None => projected,
    })
}

/// Keys of the setting whose values are bytes.
const KEYS_OF_BYTES: [&str; 4] = ["size", "memory", "local", "cache"];

fn key_cell(key: &str, value: Option<&SettingValue>) -> Cell {
    match value {
        None => Cell::None,
        Some(SettingValue::Count(bytes)) if KEYS_OF_BYTES.contains(&key) => Cell::size(*bytes),
        Some(SettingValue::Count(n)) => Cell::count(*n),
        Some(SettingValue::Number(x)) => Cell::number(*x),
        Some(other) => Cell::text(other.to_string()),
    }
}

fn value_cell(record: &Record) -> Cell {
    match record.unit {
        Unit::Bytes => Cell::size(record.value.max(0.0) as u64),
        Unit::PerSecond => Cell::Number(engineering(record.value)),
        Unit::Count if record.value >= 0.0 && record.value.fract() == 0.0 => {
            Cell::count(record.value as u64)
        }
        _ => Cell::number(record.value),
    }
}

fn over(value: f64, base: f64) -> Cell {
    if base == 0.0 { Cell::None } else { Cell::number(value / base) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::Claims;

    fn latency(scheme: &str, clients: u64, p50: f64) -> Record {
        let setting = Setting::new().scheme(scheme).nic("shm").clients(clients);
        Record::of("alloc", &setting, "alloc_latency_us", Unit::Us).value(Statistic::P50, p50)
    }

    #[test]
    fn pivot_makes_a_table_of_records() {
        let setting = Setting::new().scheme("onesidedmw").nic("shm").clients(1);
        let rate = Record::of("alloc", &setting, "alloc_rate_per_s", Unit::PerSecond).mean(3.3e5);
        let records = [
            latency("onesidedmw", 1, 3.111),
            rate,
            latency("rpc-mw-2", 1, 50.0),
            latency("onesidedmw", 8, 12.0),
            latency("rpc-mw-2", 8, 200.0),
        ];
        let table = Pivot::rows(["scheme", "control", "clients"])
            .column("alloc_latency_us", Statistic::P50)
            .column("alloc_latency_us", Statistic::P99)
            .column("alloc_rate_per_s", Statistic::Mean)
            .ratio("alloc_latency_us", Statistic::P50, &Setting::new().scheme("rpc-mw-2"))
            .table(&records);
        assert_eq!(
            format!("\n{table}"),
            "
                     alloc_latency_us  alloc_rate_per_s      over
scheme      clients               p50              mean  rpc-mw-2
----------  -------  ----------------  ----------------  --------
onesidedmw        1              3.11              330k    0.0622
rpc-mw-2          1              50.0                 -      1.00
onesidedmw        8              12.0                 -    0.0600
rpc-mw-2          8               200                 -      1.00
"
        );
    }

    #[test]
    fn pivot_adds_paper_columns_for_claimed_numbers() {
        let claim = Claims::builtin().get("osmw.alloc.latency.1").unwrap();
        let records =
            [latency("onesidedmw", 1, 21.4).against(claim), latency("onesidedmw", 8, 12.0)];
        let table =
            Pivot::rows(["clients"]).column("alloc_latency_us", Statistic::P50).table(&records);
        assert_eq!(
            format!("\n{table}"),
            "
         alloc_latency_us          over
clients               p50  paper  paper
-------  ----------------  -----  -----
      1              21.4   10.7   2.00
      8              12.0      -      -
"
        );
    }

    #[test]
    fn pivot_formats_sizes_and_byte_metrics() {
        let setting = Setting::new().size(4096);
        let record = Record::of("x", &setting, "paged_bytes", Unit::Bytes).mean(1536.0 * 1024.0);
        let table = Pivot::rows(["size"]).column("paged_bytes", Statistic::Mean).table(&[record]);
        assert!(table.to_string().ends_with("4KiB      1.50MiB\n"), "{table}");
    }
}

//! Output of an experiment's results: JSON lines, or tables.
//!
//! Every record goes through [`Report::push`]. With JSON output a record is printed immediately, so
//! that an interrupted run has printed the numbers that it measured.

use std::fmt::Display;
use std::io::{self, Write};

use crate::Error;
use crate::record::Record;
use crate::table::Table;

/// Collects the records of a run and prints them.
pub struct Report {
    json: bool,
    records: Vec<Record>,
    out: Box<dyn Write>,
}

impl Report {
    /// A report on standard output, as JSON lines or as text.
    pub fn new(json: bool) -> Self {
        Self::to(json, Box::new(io::stdout()))
    }

    /// A report to any writer.
    pub fn to(json: bool, out: Box<dyn Write>) -> Self {
        Self { json, records: Vec::new(), out }
    }

    /// Adds a record.
    ///
    /// # Errors
    /// [`Error::Print`] if the output cannot be written.
    pub fn push(&mut self, record: Record) -> Result<(), Error> {
        if self.json {
            self.line(&record.to_json())?;
        }
        self.records.push(record);
        Ok(())
    }

    /// Adds several records.
    ///
    /// # Errors
    /// [`Error::Print`] if the output cannot be written.
    pub fn extend(&mut self, records: impl IntoIterator<Item = Record>) -> Result<(), Error> {
        records.into_iter().try_for_each(|record| self.push(record))
    }

    /// All records so far.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Prints a table under a title, in text output only. An empty table is left out.
    ///
    /// # Errors
    /// [`Error::Print`] if the output cannot be written.
    pub fn table(&mut self, title: &str, table: &Table) -> Result<(), Error> {
        if table.is_empty() {
            return Ok(());
        }
        self.say(format_args!("\n{title}\n\n{}", table.to_string().trim_end()))
    }

    /// Prints a line, in text output only.
    ///
    /// # Errors
    /// [`Error::Print`] if the output cannot be written.
    pub fn say(&mut self, line: impl Display) -> Result<(), Error> {
        if self.json { Ok(()) } else { self.line(&line.to_string()) }
    }

    /// Prints a line, in text and JSON output.
    ///
    /// # Errors
    /// [`Error::Print`] if the output cannot be written.
    pub fn print(&mut self, line: impl Display) -> Result<(), Error> {
        self.line(&line.to_string())
    }

    fn line(&mut self, line: &str) -> Result<(), Error> {
        writeln!(self.out, "{line}").and_then(|()| self.out.flush()).map_err(Error::Print)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::record::{Setting, Statistic, Unit};
    use crate::table::Pivot;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn reported(json: bool) -> String {
        let buffer = Buffer::default();
        let mut report = Report::to(json, Box::new(buffer.clone()));
        let setting = Setting::new().scheme("bare").size(8);
        let builder = Record::of("access", &setting, "read_latency_us", Unit::Us);
        report.say("a line").unwrap();
        report.extend([builder.mean(0.26)]).unwrap();
        let pivot = Pivot::rows(["scheme"]).column("read_latency_us", Statistic::Mean);
        let table = pivot.table(report.records());
        report.table("READ", &table).unwrap();
        let nothing = pivot.table(&[]);
        report.table("nothing", &nothing).unwrap();
        let bytes = buffer.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn json_report_has_one_object_per_line_only() {
        let text = reported(true);
        assert_eq!(text.lines().count(), 1);
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap().value, 0.26);
    }

    #[test]
    fn text_report_has_tables() {
        let text = reported(false);
        assert!(
            text.starts_with(
                "a line\n\nREAD\n\n        read_latency_us\nscheme             mean\n"
            ),
            "{text}"
        );
        assert!(!text.contains("nothing") && !text.contains('{'), "{text}");
    }
}

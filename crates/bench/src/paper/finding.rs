//! What an experiment found: numbers with what they are in words and how they came about; their tables,
//! and the tally.

use std::fmt;

use sim::Params;

use crate::claims::{self, Claims};
use crate::record::{Record, RecordBuilder, Setting, Statistic, Unit};
use crate::table::{Cell, Table, significant};

/// How a number came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The timing model, or what runs, was fitted to the paper's number: no evidence.
    Fitted,
    /// The timing model knows nothing of the paper's number.
    Predicted,
    /// Follows from the workload alone: no evidence.
    Arithmetic,
    /// The paper says only that it is no more than its number, or no less: met or not.
    Bound,
    /// Measured on a clock, on other hardware than the paper's.
    Measured,
    /// The text of no paper states it.
    NoClaim,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Fitted => "fitted",
            Self::Predicted => "predicted",
            Self::Arithmetic => "arithmetic",
            Self::Bound => "bound",
            Self::Measured => "measured",
            Self::NoClaim => "no claim",
        })
    }
}

/// One number.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// What it is, in words.
    pub what: String,
    /// The number.
    pub record: Record,
    /// How it came about.
    pub kind: Kind,
}

impl Finding {
    /// Ours over the paper's.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.record.value / self.record.paper?)
    }

    /// By how much it is off, as a share.
    pub fn off(&self) -> Option<f64> {
        Some((self.ratio()? - 1.0).abs())
    }

    /// Whether it is off by no more than this share.
    pub fn is_within(&self, share: f64) -> bool {
        // What is off by a tenth in decimals is within a tenth, whatever the last bit says.
        self.off().is_some_and(|off| off <= share + 1e-9)
    }
}

/// What one experiment found.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    simulated: bool,
    experiment: &'static str,
    fitted: Vec<String>,
    /// In the order of the table.
    pub all: Vec<Finding>,
}

impl Findings {
    /// None yet. `params`: those of the timing model, if it is simulated.
    pub fn new(experiment: &'static str, params: Option<&Params>) -> Self {
        let fitted = params.iter().flat_map(|p| p.fitted()).map(str::to_owned).collect();
        Self { simulated: params.is_some(), experiment, fitted, all: Vec::new() }
    }

    /// Starts a record.
    pub fn record(&self, setting: &Setting, metric: &str, unit: Unit) -> RecordBuilder {
        let builder = Record::of(self.experiment, setting, metric, unit);
        if self.simulated { builder.simulated() } else { builder }
    }

    /// Adds a number that no paper states.
    pub fn add(&mut self, what: impl Into<String>, record: Record) {
        self.all.push(Finding { what: what.into(), record, kind: Kind::NoClaim });
    }

    /// Adds a number that a paper states under this id, for which the experiment itself was fitted to the paper's: no
    /// evidence where it is simulated.
    pub fn fitted(&mut self, what: impl Into<String>, record: Record, id: &str) {
        self.fitted.push(id.to_owned());
        self.claimed(what, record, id);
    }

    /// Adds a number that a paper states under this id.
    pub fn claimed(&mut self, what: impl Into<String>, record: Record, id: &str) {
        let claim = Claims::builtin().get(id).expect("experiments name claims that there are");
        assert_eq!(record.unit.to_string(), claim.unit, "{id} is in another unit");
        let is_fitted = self.fitted.iter().any(|fitted| fitted == id);
        let kind = match () {
            () if claim.arithmetic => Kind::Arithmetic,
            () if !self.simulated => Kind::Measured,
            () if is_fitted => Kind::Fitted,
            () => Kind::Predicted,
        };
        let record = record.against(claim);
        let record = if kind == Kind::Fitted { record.fitted() } else { record };
        self.all.push(Finding { what: what.into(), record, kind });
    }

    /// Adds a number of which a paper states the most, or the least, that it is.
    pub fn bounded(&mut self, what: impl Into<String>, record: Record, id: &str) {
        let claim = Claims::builtin().get(id).expect("experiments name claims that there are");
        let met = match claim.kind {
            claims::Kind::Max => record.value <= claim.value,
            claims::Kind::Min => record.value >= claim.value,
            claims::Kind::Point => panic!("{id} states no bound"),
        };
        let kind = if self.simulated { Kind::Bound } else { Kind::Measured };
        let what = format!("{} ({})", what.into(), if met { "met" } else { "missed" });
        self.all.push(Finding { what, record: record.against(claim), kind });
    }

    /// The statistic of its latencies.
    pub fn typical(&self) -> Statistic {
        super::typical_of(self.simulated)
    }

    /// All records.
    pub fn records(&self) -> impl Iterator<Item = &Record> {
        self.all.iter().map(|finding| &finding.record)
    }

    /// The number of a metric and a statistic in the first setting that `fits`.
    pub fn find(
        &self,
        metric: &str,
        statistic: Statistic,
        fits: impl Fn(&Setting) -> bool,
    ) -> Option<f64> {
        let wanted =
            |r: &&Record| r.metric == metric && r.statistic == statistic && fits(&r.setting);
        self.records().find(wanted).map(|record| record.value)
    }

    /// The table: what, the paper's number, ours, the ratio, how it came about.
    pub fn table(&self) -> Table {
        let mut table = Table::new(["what", "paper", "ours", "unit", "ratio", "kind"]);
        for Finding { what, record, kind } in &self.all {
            let ratio = record.paper.map(|paper| record.value / paper);
            table.row([
                Cell::text(what),
                record.paper.map_or(Cell::None, Cell::number),
                Cell::number(record.value),
                Cell::text(record.unit.to_string()),
                ratio.map_or(Cell::None, |ratio| Cell::Number(format!("{ratio:.2}"))),
                Cell::text(kind.to_string()),
            ]);
        }
        table
    }
}

/// How many claims were met, of those that are evidence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    /// Claims that were predicted, each once.
    pub predicted: Vec<Finding>,
    /// Claims that the model was fitted to.
    pub fitted: usize,
    /// Claims that follow from the workload.
    pub arithmetic: usize,
}

impl Tally {
    /// Of the findings of all experiments.
    pub fn of<'a>(findings: impl IntoIterator<Item = &'a Findings>) -> Self {
        let mut tally = Self::default();
        for finding in findings.into_iter().flat_map(|f| &f.all) {
            match finding.kind {
                Kind::Predicted => tally.predicted.push(finding.clone()),
                Kind::Fitted => tally.fitted += 1,
                Kind::Arithmetic => tally.arithmetic += 1,
                Kind::Bound | Kind::Measured | Kind::NoClaim => {}
            }
        }
        tally
    }

    /// Predicted claims that are off by no more than this share.
    pub fn within(&self, share: f64) -> usize {
        self.predicted.iter().filter(|f| f.is_within(share)).count()
    }

    /// The summary, with a note for each claim that is off by more than a tenth.
    pub fn lines(&self, note: impl Fn(&str) -> Option<&'static str>) -> Vec<String> {
        let all = self.predicted.len();
        let mut lines = vec![format!(
            "Claims: {all} predicted, of which {} within 10% and {} within 20%; {} fitted and {} \
             arithmetic ones are no evidence.",
            self.within(0.1),
            self.within(0.2),
            self.fitted,
            self.arithmetic,
        )];
        for finding in self.predicted.iter().filter(|f| !f.is_within(0.1)) {
            let (Some(id), Some(ratio)) = (&finding.record.claim, finding.ratio()) else {
                continue;
            };
            let why = note(id).unwrap_or("no explanation yet");
            lines.push(format!("  {id}: {} of the paper's. {why}", significant(ratio)));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Findings {
        let params = Params::connectx5();
        let mut findings = Findings::new("latency", Some(&params));
        let of = |findings: &Findings, value| {
            findings.record(&Setting::new(), "alloc_latency_us", Unit::Us).mean(value)
        };
        let (near, far, fit, none) = (
            of(&findings, 11.77),
            of(&findings, 22.5 * 1.15),
            of(&findings, 170.0),
            of(&findings, 1.0),
        );
        findings.claimed("one thread", near, "osmw.alloc.latency.1");
        findings.claimed("24 threads", far, "osmw.alloc.latency.24");
        findings.claimed("RPC", fit, "rpcmw.alloc.latency.24");
        findings.add("something else", none);
        findings
    }

    #[test]
    fn only_predictions_count() {
        let findings = some();
        let tally = Tally::of([&findings]);
        assert_eq!((tally.predicted.len(), tally.fitted, tally.arithmetic), (2, 1, 0));
        assert_eq!((tally.within(0.1), tally.within(0.2)), (1, 2));
        let lines = tally.lines(|id| (id == "osmw.alloc.latency.24").then_some("Because."));
        assert!(lines[0].contains("2 predicted, of which 1 within 10% and 2 within 20%"));
        assert_eq!(lines[1..], ["  osmw.alloc.latency.24: 1.15 of the paper's. Because."]);
    }

    #[test]
    fn a_bound_is_met_or_not_and_in_no_tally() {
        let params = Params::connectx6();
        for (value, word) in [(999.0, "met"), (1001.0, "missed")] {
            let mut findings = Findings::new("costs", Some(&params));
            let record = findings.record(&Setting::new(), "free_latency_us", Unit::Us);
            let record = record.value(Statistic::Max, value);
            findings.bounded("a free", record, "finemem.free.peak");
            assert_eq!(findings.all[0].what, format!("a free ({word})"));
            assert_eq!(Tally::of([&findings]), Tally::default());
        }
    }

    #[test]
    fn what_an_experiment_was_fitted_to_is_in_no_tally_either() {
        for (params, kind) in [(Some(Params::connectx6()), Kind::Fitted), (None, Kind::Measured)] {
            let mut findings = Findings::new("crowd", params.as_ref());
            let record = findings.record(&Setting::new(), "cas", Unit::Count).mean(45.0);
            findings.fitted("CASes", record, "premmap.cas.mean");
            assert_eq!(findings.all[0].kind, kind);
            assert_eq!(Tally::of([&findings]).predicted, []);
        }
    }

    #[test]
    fn what_is_measured_is_in_no_tally() {
        let mut findings = Findings::new("latency", None);
        let record = findings.record(&Setting::new(), "alloc_latency_us", Unit::Us).mean(2.0);
        assert!(!record.simulated);
        findings.claimed("one thread", record, "osmw.alloc.latency.1");
        assert_eq!(findings.all[0].kind, Kind::Measured);
        assert_eq!(Tally::of([&findings]), Tally::default());
    }

    #[test]
    fn the_table_has_the_papers_column_and_the_kind() {
        let text = some().table().to_string();
        let line = |start: &str| {
            let line = text.lines().find(|l| l.starts_with(start)).expect("a line");
            line.split_whitespace().skip(2).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(line("one thread"), "10.7 11.8 us 1.10 predicted");
        assert_eq!(line("something else"), "- 1.00 us - no claim");
    }
}

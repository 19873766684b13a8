//! Results of an experiment: numbers with a description and their provenance, the table of results,
//! and the summary of claims.

use std::fmt;

use sim::Params;

use bench_report::claims::{Claim, Claims, Kind};
use bench_report::record::{Record, RecordBuilder, Setting, Statistic, Unit};
use bench_report::table::{Cell, Table};
use units::number::significant;

/// Origin of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provenance {
    /// The timing model or the workload was fitted to the paper's number: no evidence.
    Fitted,
    /// Simulated; nothing was fitted to the paper's number.
    Predicted,
    /// Follows from the workload alone, or is a sum of the timing model's parameters: no evidence.
    Arithmetic,
    /// Compared with an upper or lower bound that the paper states.
    Bound,
    /// Measured with a clock, on other hardware than the paper's.
    Measured,
    /// The paper states no number.
    NoClaim,
}

impl fmt::Display for Provenance {
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

/// One number of an experiment.
#[derive(Clone, Debug, PartialEq)]
pub struct ResultRow {
    /// Description.
    pub what: String,
    /// The number.
    pub record: Record,
    /// Origin of the number.
    pub kind: Provenance,
}

impl ResultRow {
    /// Our number divided by the paper's.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.record.value / self.record.paper?)
    }

    /// Relative deviation from the paper's number.
    pub fn off(&self) -> Option<f64> {
        Some((self.ratio()? - 1.0).abs())
    }

    /// True if the relative deviation is at most `share`.
    pub fn is_within(&self, share: f64) -> bool {
        // The margin allows for rounding, so that a deviation of 0.1 is within 0.1.
        self.off().is_some_and(|off| off <= share + 1e-9)
    }

    /// True if the number is compared with a bound of the paper, and beyond it.
    pub fn misses_bound(&self) -> bool {
        let claim = || Claims::builtin().get(self.record.claim.as_deref()?);
        self.kind == Provenance::Bound && claim().is_some_and(|c| !is_met(c, self.record.value))
    }

    /// Distance from the paper's number on the scale of its logarithm, so that half and twice the
    /// number are equally far.
    fn distance(&self) -> f64 {
        self.ratio().map_or(0.0, |ratio| ratio.max(f64::MIN_POSITIVE).ln().abs())
    }
}

/// Returns whether a value is within the bound that a claim states.
fn is_met(claim: &Claim, value: f64) -> bool {
    match claim.kind {
        Kind::Max => value <= claim.value,
        Kind::Min => value >= claim.value,
        Kind::Point => panic!("{} states no bound", claim.id),
    }
}

/// Results of one experiment.
#[derive(Clone, Debug, Default)]
pub struct Results {
    simulated: bool,
    experiment: &'static str,
    fitted: Vec<String>,
    /// Rows, in the order of the table.
    pub rows: Vec<ResultRow>,
}

impl Results {
    /// Results without rows. `params`: the timing model's parameters if the results are simulated.
    pub fn new(experiment: &'static str, params: Option<&Params>) -> Self {
        let fitted = params.iter().flat_map(|p| p.fitted()).map(str::to_owned).collect();
        Self { simulated: params.is_some(), experiment, fitted, rows: Vec::new() }
    }

    /// Starts a record of the experiment.
    pub fn record(&self, setting: &Setting, metric: &str, unit: Unit) -> RecordBuilder {
        let builder = Record::of(self.experiment, setting, metric, unit);
        if self.simulated { builder.simulated() } else { builder }
    }

    /// Adds a number that the paper does not state.
    pub fn add(&mut self, what: impl Into<String>, record: Record) {
        self.rows.push(ResultRow { what: what.into(), record, kind: Provenance::NoClaim });
    }

    /// Adds a number of the claim `id` whose workload was fitted to the claim. If simulated, the
    /// number is no evidence.
    pub fn fitted(&mut self, what: impl Into<String>, record: Record, id: &str) {
        self.fitted.push(id.to_owned());
        self.claimed(what, record, id);
    }

    /// Adds a number of the claim `id`.
    pub fn claimed(&mut self, what: impl Into<String>, record: Record, id: &str) {
        let claim = Claims::builtin().get(id).expect("experiments name existing claims");
        assert_eq!(record.unit.to_string(), claim.unit, "the claim {id} has another unit");
        let is_fitted = self.fitted.iter().any(|fitted| fitted == id);
        let kind = match () {
            () if claim.arithmetic => Provenance::Arithmetic,
            () if !self.simulated => Provenance::Measured,
            () if is_fitted => Provenance::Fitted,
            () => Provenance::Predicted,
        };
        let record = record.against(claim);
        let record = if kind == Provenance::Fitted { record.fitted() } else { record };
        self.rows.push(ResultRow { what: what.into(), record, kind });
    }

    /// Adds a number of the claim `id` that is a sum of the timing model's parameters if it is
    /// simulated. Then it is no evidence.
    pub fn derived(&mut self, what: impl Into<String>, record: Record, id: &str) {
        self.claimed(what, record, id);
        if let Some(row) = self.rows.last_mut().filter(|row| row.kind == Provenance::Predicted) {
            row.kind = Provenance::Arithmetic;
        }
    }

    /// Adds a number for which the claim `id` states an upper or lower bound.
    pub fn bounded(&mut self, what: impl Into<String>, record: Record, id: &str) {
        let claim = Claims::builtin().get(id).expect("experiments name existing claims");
        let met = is_met(claim, record.value);
        let kind = if self.simulated { Provenance::Bound } else { Provenance::Measured };
        let what = format!("{} ({})", what.into(), if met { "met" } else { "missed" });
        self.rows.push(ResultRow { what, record: record.against(claim), kind });
    }

    /// The statistic that represents latencies: see [`super::Run`].
    pub fn typical(&self) -> Statistic {
        super::typical_statistic(self.simulated)
    }

    /// The records of all rows.
    pub fn records(&self) -> impl Iterator<Item = &Record> {
        self.rows.iter().map(|row| &row.record)
    }

    /// The value of a metric and a statistic in the first setting that `matches`.
    pub fn find(
        &self,
        metric: &str,
        statistic: Statistic,
        matches: impl Fn(&Setting) -> bool,
    ) -> Option<f64> {
        let wanted =
            |r: &&Record| r.metric == metric && r.statistic == statistic && matches(&r.setting);
        self.records().find(wanted).map(|record| record.value)
    }

    /// The table: description, the paper's number, ours, unit, ratio, provenance.
    pub fn table(&self) -> Table {
        let mut table = Table::new(["what", "paper", "ours", "unit", "ratio", "kind"]);
        for ResultRow { what, record, kind } in &self.rows {
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

/// Counts of the claims by provenance. A claim counts once, whatever its number of rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClaimSummary {
    /// Predicted claims, each by its row that is farthest from the paper's number.
    pub predicted: Vec<ResultRow>,
    /// Claims that state a bound, each by a row that misses it if there is one.
    pub bounds: Vec<ResultRow>,
    /// Number of claims that the model or a workload was fitted to.
    pub fitted: usize,
    /// Number of claims that follow from the workload or the parameters.
    pub arithmetic: usize,
}

impl ClaimSummary {
    /// Summarizes the results of several experiments.
    pub fn of<'a>(results: impl IntoIterator<Item = &'a Results>) -> Self {
        let rows: Vec<_> = results.into_iter().flat_map(|results| &results.rows).collect();
        let claims = |kind| -> Vec<ResultRow> {
            let mut claims: Vec<&ResultRow> = Vec::new();
            for &row in rows.iter().filter(|row| row.kind == kind) {
                let badness = |row: &ResultRow| (row.misses_bound(), row.distance());
                match claims.iter_mut().find(|known| known.record.claim == row.record.claim) {
                    Some(known) if badness(row) > badness(known) => *known = row,
                    Some(_) => {}
                    None => claims.push(row),
                }
            }
            claims.into_iter().cloned().collect()
        };
        Self {
            predicted: claims(Provenance::Predicted),
            bounds: claims(Provenance::Bound),
            fitted: claims(Provenance::Fitted).len(),
            arithmetic: claims(Provenance::Arithmetic).len(),
        }
    }

    /// Number of predicted claims that deviate by at most `share`.
    pub fn within(&self, share: f64) -> usize {
        self.predicted.iter().filter(|row| row.is_within(share)).count()
    }

    /// The claims that need an explanation: predicted ones that deviate by more than `share`, and
    /// missed bounds.
    pub fn missed(&self, share: f64) -> impl Iterator<Item = &ResultRow> {
        let far = self.predicted.iter().filter(move |row| !row.is_within(share));
        far.chain(self.bounds.iter().filter(|row| row.misses_bound()))
    }

    /// The summary as text, with a note on each claim that deviates by more than a tenth and on
    /// each bound that is missed.
    pub fn lines(&self, note: impl Fn(&str) -> Option<&'static str>) -> Vec<String> {
        let (predicted, bounds) = (self.predicted.len(), self.bounds.len());
        let missed = self.bounds.iter().filter(|row| row.misses_bound()).count();
        let mut lines = vec![format!(
            "Claims: {predicted} predicted, of which {} within 10% and {} within 20%; {bounds} \
             bounds, of which {missed} missed; {} fitted and {} arithmetic claims are no evidence.",
            self.within(0.1),
            self.within(0.2),
            self.fitted,
            self.arithmetic,
        )];
        for row in self.missed(0.1) {
            let (Some(id), Some(ratio)) = (&row.record.claim, row.ratio()) else {
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

    fn sample() -> Results {
        let params = Params::connectx5();
        let mut results = Results::new("latency", Some(&params));
        let latency = |results: &Results, value| {
            results.record(&Setting::new(), "alloc_latency_us", Unit::Us).mean(value)
        };
        let (near, far, fit, none) = (
            latency(&results, 11.77),
            latency(&results, 22.5 * 1.15),
            latency(&results, 170.0),
            latency(&results, 1.0),
        );
        results.claimed("one thread", near, "osmw.alloc.latency.1");
        results.claimed("24 threads", far, "osmw.alloc.latency.24");
        results.claimed("RPC", fit, "rpcmw.alloc.latency.24");
        results.add("something else", none);
        results
    }

    #[test]
    fn summary_counts_predicted_claims_only() {
        let results = sample();
        let summary = ClaimSummary::of([&results]);
        assert_eq!((summary.predicted.len(), summary.fitted, summary.arithmetic), (2, 1, 0));
        assert_eq!((summary.within(0.1), summary.within(0.2)), (1, 2));
        let lines = summary.lines(|id| (id == "osmw.alloc.latency.24").then_some("Because."));
        assert!(lines[0].contains("2 predicted, of which 1 within 10% and 2 within 20%"));
        assert_eq!(lines[1..], ["  osmw.alloc.latency.24: 1.15 of the paper's. Because."]);
    }

    #[test]
    fn claim_of_several_rows_counts_once_by_its_worst() {
        let params = Params::connectx5();
        let mut results = Results::new("kv-scale", Some(&params));
        for ratio in [0.76, 0.40, 0.88] {
            let record = results.record(&Setting::new(), "peak_ratio", Unit::Ratio).mean(ratio);
            results.claimed("peak", record, "osmw.scale.8k");
            let record = results.record(&Setting::new(), "insert_ratio", Unit::Ratio).mean(ratio);
            results.fitted("inserts", record, "rpcmw2.kv.insert.2k");
        }
        let summary = ClaimSummary::of([&results, &results]);
        assert_eq!((summary.predicted.len(), summary.fitted), (1, 1));
        assert_eq!(summary.predicted[0].record.value, 0.40);
    }

    #[test]
    fn sum_of_parameters_is_arithmetic_in_the_simulation_only() {
        for (params, kind) in
            [(Some(Params::connectx5()), Provenance::Arithmetic), (None, Provenance::Measured)]
        {
            let mut results = Results::new("registration", params.as_ref());
            let record = results.record(&Setting::new(), "bind_us", Unit::Us).mean(1.21);
            results.derived("bind a window", record, "mw.generate.4m");
            assert_eq!(results.rows[0].kind, kind);
            assert_eq!(ClaimSummary::of([&results]).predicted, []);
        }
    }

    #[test]
    fn missed_bound_is_in_the_summary_and_wants_a_note() {
        let params = Params::connectx6();
        for (value, word) in [(999.0, "met"), (1001.0, "missed")] {
            let mut results = Results::new("costs", Some(&params));
            let record = results.record(&Setting::new(), "free_latency_us", Unit::Us);
            let record = record.value(Statistic::Max, value);
            results.bounded("a free", record, "finemem.free.peak");
            assert_eq!(results.rows[0].what, format!("a free ({word})"));
            let missed = usize::from(word == "missed");
            let summary = ClaimSummary::of([&results]);
            assert_eq!((summary.bounds.len(), summary.missed(0.2).count()), (1, missed));
            let lines = summary.lines(|_| None);
            assert!(lines[0].contains(&format!("1 bounds, of which {missed} missed")), "{lines:?}");
            assert_eq!(lines.len(), 1 + missed, "{lines:?}");
        }
    }

    #[test]
    fn claim_with_fitted_workload_is_not_in_the_summary() {
        for (params, kind) in
            [(Some(Params::connectx6()), Provenance::Fitted), (None, Provenance::Measured)]
        {
            let mut results = Results::new("crowd", params.as_ref());
            let record = results.record(&Setting::new(), "cas", Unit::Count).mean(45.0);
            results.fitted("CASes", record, "premmap.cas.mean");
            assert_eq!(results.rows[0].kind, kind);
            assert_eq!(ClaimSummary::of([&results]).predicted, []);
        }
    }

    #[test]
    fn measured_claim_is_not_in_the_summary() {
        let mut results = Results::new("latency", None);
        let record = results.record(&Setting::new(), "alloc_latency_us", Unit::Us).mean(2.0);
        assert!(!record.simulated);
        results.claimed("one thread", record, "osmw.alloc.latency.1");
        assert_eq!(results.rows[0].kind, Provenance::Measured);
        assert_eq!(ClaimSummary::of([&results]), ClaimSummary::default());
    }

    #[test]
    fn table_has_paper_column_and_provenance() {
        let text = sample().table().to_string();
        let line = |start: &str| {
            let line = text.lines().find(|l| l.starts_with(start)).expect("a line");
            line.split_whitespace().skip(2).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(line("one thread"), "10.7 11.8 us 1.10 predicted");
        assert_eq!(line("something else"), "- 1.00 us - no claim");
    }
}

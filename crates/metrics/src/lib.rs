//! Metrics: each is declared once, with its name, unit and help text.
//!
//! ```text
//!  struct with counters ── declare! ──> METRICS (the declarations)
//!        │                                  │
//!        └──────── sample() ──> Samples ────┴──> text, JSON, OpenMetrics page ──> server
//! ```
//!
//! The storage of the values stays with their owners: plain words that one thread writes, or words
//! of a file. A declaration adds nothing to them. Values are read only when a report is requested.
//!
//! Names follow OpenMetrics: the prefix `granary`, the subsystem, the noun, the unit, and `total`
//! for a counter. docs/user/metrics.md lists them all.

mod openmetrics;
mod samples;
pub mod server;

pub use openmetrics::page;
pub use samples::{Histogram, Measured, Sample, Samples, Value};

/// The prefix of each name.
pub const PREFIX: &str = "granary";

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only increases while the process runs.
    Counter,
    /// A current value, a peak or a limit.
    Gauge,
    /// A distribution.
    Histogram,
}

impl Kind {
    /// The OpenMetrics name of the type.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Unit of a stored value. Reports convert times to seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A number of the things that the name says.
    Count,
    /// Bytes.
    Bytes,
    /// Nanoseconds; reported in seconds.
    Nanoseconds,
    /// Milliseconds; reported in seconds.
    Milliseconds,
}

impl Unit {
    /// The unit in reports and at the end of the name, if it has one.
    pub const fn name(self) -> Option<&'static str> {
        match self {
            Self::Count => None,
            Self::Bytes => Some("bytes"),
            Self::Nanoseconds | Self::Milliseconds => Some("seconds"),
        }
    }

    /// Stored units in one reported unit.
    pub const fn divisor(self) -> u64 {
        match self {
            Self::Count | Self::Bytes => 1,
            Self::Nanoseconds => 1_000_000_000,
            Self::Milliseconds => 1_000,
        }
    }
}

/// Declaration of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Subsystem and noun, without prefix, unit and `total`.
    pub name: &'static str,
    /// The type.
    pub kind: Kind,
    /// The unit of the stored value.
    pub unit: Unit,
    /// One sentence that says what is counted or measured.
    pub help: &'static str,
    /// For an array of values: the label that tells its elements apart.
    pub label: Option<Label>,
}

/// Label of an array of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// The label's name.
    pub name: &'static str,
    /// The label's value for each element. Elements with an empty value are summed up as `other`.
    pub values: &'static [&'static str],
}

impl Metric {
    const fn new(kind: Kind, name: &'static str, help: &'static str) -> Self {
        Self { name, kind, unit: Unit::Count, help, label: None }
    }

    /// The same metric with a unit.
    pub const fn in_unit(self, unit: Unit) -> Self {
        Self { unit, ..self }
    }

    /// The same metric for an array, whose elements have these values of the label `name`.
    pub const fn per(self, name: &'static str, values: &'static [&'static str]) -> Self {
        Self { label: Some(Label { name, values }), ..self }
    }

    /// The full name, as in reports. The samples of a histogram have further suffixes.
    pub fn full_name(&self) -> String {
        let unit = self.unit.name().map_or(String::new(), |unit| format!("_{unit}"));
        let total = if self.kind == Kind::Counter { "_total" } else { "" };
        format!("{PREFIX}_{}{unit}{total}", self.name)
    }
}

/// Declares a counter.
pub const fn counter(name: &'static str, help: &'static str) -> Metric {
    Metric::new(Kind::Counter, name, help)
}

/// Declares a gauge.
pub const fn gauge(name: &'static str, help: &'static str) -> Metric {
    Metric::new(Kind::Gauge, name, help)
}

/// Declares a histogram.
pub const fn histogram(name: &'static str, help: &'static str) -> Metric {
    Metric::new(Kind::Histogram, name, help)
}

/// A struct whose fields are declared as metrics; see [`declare!`].
pub trait Declared {
    /// The declarations, in the order of the report.
    const METRICS: &'static [Metric];

    /// Adds the present values to a report.
    fn sample(&self, to: &mut Samples);
}

/// Implements [`Declared`] for a struct: one row for each field.
///
/// Fields without a metric are listed after `except`. Because the rows and that list must name all
/// fields, a field that is added to the struct without a declaration does not compile.
///
/// ```
/// struct Counters {
///     wakeups: u64,
///     by_reason: [u64; 2],
///     last: Option<String>,
/// }
///
/// metrics::declare! {
///     Counters {
///         wakeups: metrics::counter("example_wakeups", "Wake-ups of the thread."),
///         by_reason: metrics::counter("example_drops", "Dropped packets.")
///             .per("reason", &["short", "long"]),
///     } except { last }
/// }
/// ```
#[macro_export]
macro_rules! declare {
    (
        $owner:ty { $($field:ident: $metric:expr),* $(,)? }
        $(except { $($other:ident),* $(,)? })?
    ) => {
        impl $crate::Declared for $owner {
            const METRICS: &'static [$crate::Metric] = &[$($metric),*];

            fn sample(&self, to: &mut $crate::Samples) {
                let Self { $($field,)* $($($other: _,)*)? } = self;
                let mut metrics = <Self as $crate::Declared>::METRICS.iter();
                $(to.push(metrics.next().expect("one metric for each field"), $field);)*
            }
        }
    };
}

//! Sealing and opening of a page (table 2, figure 14), beside a copy of a page.

use std::time::Duration;

use ::seal::Cipher;

use crate::Error;
use crate::paper::Extent;
use crate::paper::programs::rounds::median;
use crate::paper::results::Results;
use crate::seal::{Bench, Cache, Memory, Operation, Spec};
use bench_report::progress::Bar;
use bench_report::record::{BASELINE_SCHEME, Setting, Statistic, Unit};
use bench_report::table::{Cell, Table};

/// Ids of the claims that the experiment covers.
pub(super) const CLAIMS: [&str; 2] = ["tdmem.seal", "tdmem.open"];

/// Time of one measurement in a round.
const DURATION: Duration = Duration::from_millis(100);

/// Rounds of the measurements of an extent.
pub fn rounds(extent: Extent) -> u32 {
    extent.rounds(10)
}

/// A measured operation on a page that is in the caches.
const OPERATIONS: [Operation; 5] = [
    Operation::Seal(Cipher::Aes128Gcm, Memory::Private),
    Operation::Open(Cipher::Aes128Gcm, Memory::Private),
    Operation::Seal(Cipher::Aes256Gcm, Memory::Private),
    Operation::Open(Cipher::Aes256Gcm, Memory::Private),
    Operation::Copy,
];

/// Times of the operations in microseconds: medians of the rounds.
#[derive(Clone, Debug)]
pub struct Crypt(Vec<(Operation, f64)>);

/// Measures all operations by turns, with a step of `bar` for each round.
///
/// # Errors
/// As [`Bench::new`].
pub fn measure(rounds: u32, bar: &Bar) -> Result<Crypt, Error> {
    let mut bench = Bench::new()?;
    bar.say("sealing and opening of pages");
    let mut times = OPERATIONS.map(|_| Vec::new());
    for _ in 0..rounds {
        for (operation, times) in OPERATIONS.into_iter().zip(&mut times) {
            let spec = Spec { operation, cache: Cache::Warm };
            times.push(bench.measure(spec, DURATION)? * 1e6);
        }
        bar.step();
    }
    let medians = times.map(|times| median(times).expect("there is a round"));
    Ok(Crypt(OPERATIONS.into_iter().zip(medians).collect()))
}

/// The name of an operation, its cipher, and the paper's number.
fn parts(operation: Operation) -> (&'static str, &'static str, Option<&'static str>) {
    match operation {
        Operation::Seal(Cipher::Aes128Gcm, _) => {
            ("seal", Cipher::Aes128Gcm.name(), Some(CLAIMS[0]))
        }
        Operation::Open(Cipher::Aes128Gcm, _) => {
            ("open", Cipher::Aes128Gcm.name(), Some(CLAIMS[1]))
        }
        Operation::Seal(cipher, _) => ("seal", cipher.name(), None),
        Operation::Open(cipher, _) => ("open", cipher.name(), None),
        Operation::Copy => ("copy", BASELINE_SCHEME, None),
    }
}

impl Crypt {
    /// The numbers beside the paper's.
    pub fn results(&self) -> Results {
        let mut results = Results::new(super::Part::Crypt.experiment().name, None);
        for (operation, us) in &self.0 {
            let (name, cipher, claim) = parts(*operation);
            let setting = Setting::new().with("operation", name).scheme(cipher);
            let record = results.record(&setting, "page_us", Unit::Us).value(Statistic::P50, *us);
            let what = format!("{name} a page, {cipher}");
            match claim {
                Some(id) => results.claimed(what, record, id),
                None => results.add(what, record),
            }
        }
        results
    }

    /// The times, also over the time of a copy.
    pub fn table(&self) -> (String, Table) {
        let mut table = Table::new(["operation", "cipher", "us a page", "over a copy"]);
        let copy = self.0.iter().find(|(operation, _)| *operation == Operation::Copy);
        for (operation, us) in &self.0 {
            let (name, cipher, _) = parts(*operation);
            let over = copy.map_or(Cell::None, |copy| Cell::Number(format!("{:.2}", us / copy.1)));
            table.row([
                Cell::text(name),
                Cell::text(cipher),
                Cell::Number(format!("{us:.3}")),
                over,
            ]);
        }
        ("Figure 14: A page of 4 KiB in the caches - measured, this machine".into(), table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_stand_beside_the_papers_and_over_a_copy() {
        let crypt = Crypt(OPERATIONS.into_iter().zip([0.5, 0.6, 0.7, 0.8, 0.1]).collect());
        let results = crypt.results();
        let ratios: Vec<_> = results.rows.iter().map(|row| row.ratio()).collect();
        assert_eq!(ratios, [Some(0.5 / 2.07), Some(0.6 / 2.09), None, None, None]);
        let text = crypt.table().1.to_string();
        let line = text.lines().find(|line| line.contains("aes-256-gcm")).unwrap();
        assert_eq!(
            line.split_whitespace().collect::<Vec<_>>(),
            ["seal", "aes-256-gcm", "0.700", "7.00"]
        );
    }
}

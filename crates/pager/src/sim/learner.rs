//! Classifiers that tell two programs apart by the features of their runs: logistic regression, and
//! the nearest run.

/// Features of a run, and whether the run is of the first of two programs.
pub(crate) type Run = ([f64; FEATURES], bool);

/// Number of features.
pub(crate) const FEATURES: usize = 32;
/// Passes of the regression over the runs.
const PASSES: u32 = 300;

/// Share of the judged runs whose program was named correctly.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Success {
    /// By the logistic regression.
    pub regression: f64,
    /// By the nearest learned run.
    pub nearest: f64,
}

impl Success {
    /// The share of the better classifier.
    pub(crate) fn best(&self) -> f64 {
        self.regression.max(self.nearest)
    }

    /// The means of several results.
    pub(crate) fn mean(all: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
        Self { regression: mean(|one| one.regression), nearest: mean(|one| one.nearest) }
    }
}

/// Learns from some runs, and judges others.
pub(crate) fn success(learned: &[Run], judged: &[Run]) -> Success {
    let standard = Standard::of(learned);
    let learned = standard.apply(learned);
    let judged = standard.apply(judged);
    let weights = regression(&learned);
    let share = |names: &dyn Fn(&Known) -> bool| {
        judged.iter().filter(|run| names(run) == run.is_first).count() as f64 / judged.len() as f64
    };
    Success {
        regression: share(&|run| probability(&weights, &run.features) > 0.5),
        nearest: share(&|run| nearest(&learned, run).is_first),
    }
}

/// A run with its features in standard deviations, and a constant.
struct Known {
    features: [f64; FEATURES + 1],
    is_first: bool,
}

/// Mean and standard deviation of each feature.
struct Standard([(f64, f64); FEATURES]);

impl Standard {
    fn of(runs: &[Run]) -> Self {
        let n = runs.len() as f64;
        Self(std::array::from_fn(|at| {
            let mean = runs.iter().map(|(seen, _)| seen[at]).sum::<f64>() / n;
            let square = runs.iter().map(|(seen, _)| (seen[at] - mean).powi(2)).sum::<f64>() / n;
            (mean, square.sqrt().max(1e-9))
        }))
    }

    fn apply(&self, runs: &[Run]) -> Vec<Known> {
        let known = |(seen, is_first): &Run| {
            let mut features = [1.0; FEATURES + 1];
            for (at, (mean, deviation)) in self.0.iter().enumerate() {
                features[at] = (seen[at] - mean) / deviation;
            }
            Known { features, is_first: *is_first }
        };
        runs.iter().map(known).collect()
    }
}

fn regression(learned: &[Known]) -> [f64; FEATURES + 1] {
    let mut weights = [0.0; FEATURES + 1];
    for _ in 0..PASSES {
        for run in learned {
            let error = f64::from(u8::from(run.is_first)) - probability(&weights, &run.features);
            weights.iter_mut().zip(&run.features).for_each(|(w, x)| *w += 0.01 * error * x);
        }
    }
    weights
}

fn probability(weights: &[f64], features: &[f64]) -> f64 {
    let sum: f64 = weights.iter().zip(features).map(|(weight, x)| weight * x).sum();
    1.0 / (1.0 + (-sum).exp())
}

fn nearest<'a>(learned: &'a [Known], run: &Known) -> &'a Known {
    let distance = |other: &Known| -> f64 {
        other.features.iter().zip(&run.features).map(|(a, b)| (a - b).powi(2)).sum()
    };
    let order = |a: &&Known, b: &&Known| distance(a).total_cmp(&distance(b));
    learned.iter().min_by(order).expect("some runs are learned")
}

/// Correlation of two lists; 0 if the values of a list are equal.
pub(crate) fn correlation(one: &[f64], other: &[f64]) -> f64 {
    let n = one.len() as f64;
    let mean = |list: &[f64]| list.iter().sum::<f64>() / n;
    let (a, b) = (mean(one), mean(other));
    let product = |x: &[f64], y: &[f64], a: f64, b: f64| {
        x.iter().zip(y).map(|(x, y)| (x - a) * (y - b)).sum::<f64>()
    };
    let both = product(one, other, a, b);
    let each = product(one, one, a, a) * product(other, other, b, b);
    if each == 0.0 { 0.0 } else { both / each.sqrt() }
}

/// Features of a sequence of slots, all below `all_slots`.
pub(crate) fn slot_features(slots: &[f64], all_slots: u32) -> [f64; FEATURES] {
    let (n, end) = (slots.len() as f64, f64::from(all_slots));
    let steps: Vec<f64> = slots.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let share = |is: &dyn Fn(&f64) -> bool| steps.iter().filter(|s| is(s)).count() as f64 / n;
    let mut all = vec![
        share(&|s| *s == 1.0),
        share(&|s| *s == 0.0),
        share(&|s| *s > 0.0),
        share(&|s| s.abs() < end / 256.0),
        share(&|s| s.abs() < end / 16.0),
        steps.iter().map(|s| s.abs()).sum::<f64>() / n / end,
    ];
    all.extend((1..=10).map(|lag| correlation(&slots[lag..], &slots[..slots.len() - lag])));
    let mut bins = [0.0; 16];
    slots.iter().for_each(|s| bins[(*s * 16.0 / end) as usize] += 1.0 / n);
    all.extend(bins);
    all.try_into().expect("6 + 10 + 16 features")
}

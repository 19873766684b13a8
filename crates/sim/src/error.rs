//! Errors of simulations.

/// An error of a simulation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of parameters cannot be used.
    #[error("reading the parameters of the timing model: {why}; see docs/internals/simulator.md")]
    Params {
        /// The defect.
        why: String,
    },
    /// A simulated program failed.
    #[error("simulating {attempt}: {why}")]
    Failed {
        /// The simulated program.
        attempt: String,
        /// The reason.
        why: String,
    },
    /// No event is left, but fibers still wait.
    #[error("at {at} no event is left, but {waits} fibers still wait: {names}")]
    Stuck {
        /// Virtual time.
        at: crate::Time,
        /// Number of waiting fibers.
        waits: usize,
        /// Names of the waiting fibers.
        names: String,
    },
    /// The pool's own error.
    #[error(transparent)]
    Pool(#[from] pool::Error),
    /// An error of the verbs.
    #[error(transparent)]
    Verbs(#[from] verbs::Error),
}

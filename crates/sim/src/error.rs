//! What can go wrong in a simulation.

/// An error of a simulation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of parameters cannot be used.
    #[error("reading the parameters of the timing model: {why}; see docs/simulator.md")]
    Params {
        /// What is wrong.
        why: String,
    },
    /// What ran in the simulation failed.
    #[error("simulating {attempt}: {why}")]
    Failed {
        /// What was simulated.
        attempt: String,
        /// Why it failed.
        why: String,
    },
    /// Nothing can happen any more, and somebody still waits.
    #[error("at {at} nothing can happen any more, but {waits} still wait: {who}")]
    Stuck {
        /// Virtual time.
        at: crate::Time,
        /// How many wait.
        waits: usize,
        /// Who they are.
        who: String,
    },
    /// The pool's own error.
    #[error(transparent)]
    Pool(#[from] pool::Error),
    /// The fabric's own error.
    #[error(transparent)]
    Fabric(#[from] fabric::Error),
}

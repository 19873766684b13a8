//! Time and randomness of a store.

/// The environment of a store. A simulator implements the trait with virtual time.
pub trait Environment {
    /// Milliseconds since 1970.
    fn now(&self) -> u64;

    /// A random number. The numbers need not be secret, except for the hash's secret at creation.
    fn random(&self) -> u64;
}

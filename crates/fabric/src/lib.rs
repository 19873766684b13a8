//! Verbs as a trait.

//! Quantities and files that several crates use. This crate depends on no other crate of Granary.
//!
//! | module | content |
//! | --- | --- |
//! | [`allocator`] | memory that the allocator keeps |
//! | [`cpus`] | CPUs of the host |
//! | [`files`] | files that a user names |
//! | [`number`] | formatting of numbers for people |
//! | [`random`] | pseudo-random numbers of a seed |
//! | [`scheduling`] | scheduling of threads for which others wait |
//! | [`size`] | parsing and formatting of sizes in bytes |
//! | [`token_bucket`] | rate limits |
//!
//! Two kinds of generators and constants are not here. The simulator keeps its own generator,
//! because its recorded traces and seeds name the sequences of that generator. A 4096 that is part
//! of a wire format, a scheme's layout or a workload stays beside that format.

pub mod allocator;
pub mod cpus;
pub mod files;
pub mod number;
pub mod random;
pub mod scheduling;
pub mod size;
pub mod token_bucket;

pub use random::Random;
pub use size::Size;
pub use token_bucket::TokenBucket;

/// Bytes of a page of the host's virtual memory, where code needs it at compile time.
pub const PAGE_BYTES: usize = 4096;

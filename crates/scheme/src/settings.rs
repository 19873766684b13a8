//! The part of a memory node's settings that concerns its scheme.

use serde::Serialize;

use crate::Error;
use crate::info::Scheme;
use crate::options::SchemeOptions;

/// Maximum number of chunks with 24-bit indices, minus one entry that schemes reserve.
pub const CHUNKS_MAX: u64 = (1 << 24) - 1;

/// Settings of a memory node that its scheme reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSettings {
    /// The allocation scheme.
    pub scheme: Scheme,
    /// Settings of the scheme, by name: see [`NodeSettings::with`].
    pub options: SchemeOptions,
    /// Number of chunks.
    pub chunks: u64,
    /// Chunk size in bytes: a power of two.
    pub chunk_bytes: u64,
    /// Bytes at the start of the chunks that stay resident while free: whole chunks.
    pub kept_bytes: usize,
    /// Windows of a group, including the guard: the number of lanes plus one (OneSidedMW §4.1).
    pub group_size: u32,
    /// Requests of each kind that a client may have in flight: a power of two.
    pub credits: u32,
    /// Maximum number of QP groups of a client.
    pub groups_max: u32,
    /// Maximum number of connected clients.
    pub clients_max: u32,
    /// Limits the rate at which the CPU answers requests that fail by a client's own fault.
    pub paced: bool,
}

impl NodeSettings {
    /// Settings for `chunks` chunks of `chunk_bytes`, with two lanes. All chunks stay resident.
    pub fn new(scheme: Scheme, chunks: u64, chunk_bytes: u64) -> Self {
        Self {
            scheme,
            options: SchemeOptions::default(),
            chunks,
            chunk_bytes,
            kept_bytes: (chunks * chunk_bytes) as usize,
            group_size: 3,
            credits: 16,
            groups_max: 64,
            clients_max: 256,
            paced: false,
        }
    }

    /// These settings with an option of the scheme.
    pub fn with(mut self, name: &'static str, value: impl Serialize) -> Self {
        self.options.set(name, value);
        self
    }

    /// Access QPs of a group: its windows minus the guard.
    pub fn lanes(&self) -> u32 {
        self.group_size.saturating_sub(1)
    }
}

/// Returns an error about a setting unless `holds`.
pub fn require(
    holds: bool,
    setting: &'static str,
    value: impl ToString,
    why: impl ToString,
) -> Result<(), Error> {
    if holds {
        return Ok(());
    }
    Err(Error::Setting { setting, value: value.to_string(), why: why.to_string() })
}

//! Settings of a memory node.

use std::time::Duration;

use scheme::info::AccessKind;
use scheme::options::SchemeOptions;
use scheme::{MAX_GROUP, NodeSettings, Scheme, require};
use schemes::blocks::{CHUNK_ORDER, Shape};
use serde::Serialize;

use crate::Error;

/// Settings of a memory node.
///
/// ```
/// use pool::{Settings, schemes};
///
/// let settings = Settings {
///     donate_bytes: 8 << 20,
///     chunk_bytes: 4 << 10,
///     scheme: schemes::FINEMEM,
///     ..Settings::default()
/// };
/// settings.validate()?;
/// assert_eq!(settings.chunks(), 2048);
///
/// let error = Settings { chunk_bytes: 3000, ..settings }.validate().unwrap_err();
/// assert!(error.to_string().contains("chunk_bytes"));
/// # Ok::<(), pool::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bytes to donate; rounded down to whole chunks.
    pub donate_bytes: u64,
    /// Chunk size in bytes: a power of two from 512 B to 1 GiB.
    pub chunk_bytes: u64,
    /// Windows of a group, including the guard: the number of lanes plus one (OneSidedMW §4.1).
    pub group_size: u32,
    /// Requests of each kind that a compute node may have in flight: a power of two.
    pub credits: u32,
    /// Maximum number of QP groups of a compute node.
    pub groups_max: u32,
    /// Maximum number of connected compute nodes.
    pub clients_max: u32,
    /// Reserves part of these slots so that one process, user or host cannot take all of them
    /// (`docs/user/operating.md`). Enforced by the service.
    pub client_quotas: bool,
    /// The allocation scheme.
    pub scheme: Scheme,
    /// Settings of the scheme, by name: see [`Settings::with`].
    pub options: SchemeOptions,
    /// Time within which a new connection must attach to the NIC or be admitted as a compute node.
    /// Afterwards it is closed, which frees its slot.
    pub silence: Duration,
    /// Time for which a compute node on another host may be unreachable. Afterwards it counts as
    /// dead, and its chunks are cleared and freed. Both ends of a connection use this time.
    pub client_timeout: Duration,
    /// Limits the rate at which the CPU answers requests that fail by a compute node's own fault,
    /// in scheme `onesidedmw`, because each of them takes CPU time from other compute nodes. A
    /// service always sets it.
    pub paced: bool,
    /// Memory windows of each function of the memory node's own NIC, if fewer than the maximum of
    /// 16.7 million.
    pub nic_windows: Option<u32>,
    /// Donated bytes that stay resident while free; rounded down to whole chunks. Memory beyond it
    /// is returned to the operating system when a chunk is released, if the NIC runs in the memory
    /// node's process.
    pub keep_resident_bytes: u64,
    /// Asks the system to run the NIC thread before CPU-bound threads ([`units::scheduling`]).
    pub urgent_nic: bool,
    /// Chunk memory is a file, which the service passes to processes of its own user. They then
    /// read and write chunks without the NIC, and nothing keeps one of them from the chunks of
    /// another. For a memory node that serves one program only.
    pub shares_chunks: bool,
}

impl Default for Settings {
    /// 256 MiB in chunks of 1 MiB, two lanes.
    fn default() -> Self {
        let node = NodeSettings::new(schemes::ONESIDEDMW, 256, 1 << 20);
        Self {
            donate_bytes: node.chunks * node.chunk_bytes,
            chunk_bytes: node.chunk_bytes,
            group_size: node.group_size,
            credits: node.credits,
            groups_max: node.groups_max,
            clients_max: node.clients_max,
            client_quotas: true,
            scheme: node.scheme,
            options: node.options,
            silence: Duration::from_secs(10),
            client_timeout: Self::CLIENT_TIMEOUT,
            paced: node.paced,
            nic_windows: None,
            keep_resident_bytes: 64 << 20,
            urgent_nic: false,
            shares_chunks: false,
        }
    }
}

/// Upper bound of the management QPs of a compute node in any scheme.
const MANAGEMENT_QPS_MAX: u32 = 16;

impl Settings {
    /// Minimum chunk size.
    pub const CHUNK_BYTES_MIN: u64 = 512;
    /// Maximum chunk size.
    pub const CHUNK_BYTES_MAX: u64 = 1 << 30;
    /// Maximum number of requests of one kind in flight.
    pub const CREDITS_MAX: u32 = 128;
    /// Maximum number of QP groups of a compute node.
    pub const GROUPS_MAX: u32 = 256;
    /// Default of [`Settings::client_timeout`].
    pub const CLIENT_TIMEOUT: Duration = Duration::from_secs(12);
    /// Maximum number of compute nodes.
    pub const CLIENTS_MAX: u32 = 4096;

    /// These settings with an option of the scheme.
    pub fn with(mut self, name: &'static str, value: impl Serialize) -> Self {
        self.options.set(name, value);
        self
    }

    /// The settings that the scheme reads, once all settings are checked.
    pub fn node(&self) -> Result<NodeSettings, Error> {
        self.validate()?;
        Ok(self.scheme_part())
    }

    /// The settings that the scheme reads.
    pub(crate) fn scheme_part(&self) -> NodeSettings {
        NodeSettings {
            scheme: self.scheme,
            options: self.options.clone(),
            chunks: self.chunks(),
            chunk_bytes: self.chunk_bytes,
            kept_bytes: self.kept_bytes(),
            group_size: self.group_size,
            credits: self.credits,
            groups_max: self.groups_max,
            clients_max: self.clients_max,
            paced: self.paced,
        }
    }

    /// Number of whole chunks in the donated bytes.
    pub fn chunks(&self) -> u64 {
        self.donate_bytes / self.chunk_bytes.max(1)
    }

    /// Size in bytes of the largest possible allocation: the largest block in schemes with several
    /// sizes, otherwise a chunk.
    pub fn largest_bytes(&self) -> u64 {
        let shape = Shape { chunks: self.chunks() as u32, chunk_bytes: self.chunk_bytes };
        shape.block_bytes(if self.scheme.has_sizes() { shape.order_max() } else { CHUNK_ORDER })
    }

    /// Access QPs of a group: its windows minus the guard.
    pub fn lanes(&self) -> u32 {
        self.group_size.saturating_sub(1)
    }

    /// Bytes at the start of the chunks that stay resident while free. These are all bytes if
    /// chunks are smaller than a page, because releasing a chunk then frees no page, and in schemes
    /// that do not clear chunks.
    pub fn kept_bytes(&self) -> usize {
        let chunk = self.chunk_bytes.max(1);
        let total = self.chunks() * chunk;
        let gives_back = chunk as usize >= rustix::param::page_size() && self.scheme.clears();
        let kept =
            if gives_back { self.keep_resident_bytes.min(total) / chunk * chunk } else { total };
        kept as usize
    }

    /// Maximum number of QPs of a compute node: `each_lane` access QPs of each lane, for the
    /// functions of the NIC and for spares, and its management QPs.
    pub(crate) fn client_qps(&self, each_lane: u32) -> u32 {
        self.groups_max * self.lanes() * each_lane + MANAGEMENT_QPS_MAX
    }

    /// Checks every setting. The error names the first invalid one.
    pub fn validate(&self) -> Result<(), Error> {
        let chunk = self.chunk_bytes;
        let chunks_max = self.scheme.chunks_max;
        require(
            chunk.is_power_of_two()
                && (Self::CHUNK_BYTES_MIN..=Self::CHUNK_BYTES_MAX).contains(&chunk),
            "chunk_bytes",
            chunk,
            "a chunk is a power of two from 512 B to 1 GiB",
        )?;
        require(
            self.donate_bytes >= chunk,
            "donate_bytes",
            self.donate_bytes,
            format!("at least one chunk of {chunk} bytes must fit"),
        )?;
        require(
            self.chunks() <= chunks_max,
            "donate_bytes",
            self.donate_bytes,
            format!(
                "that is {} chunks of {chunk} bytes, and a table has at most {chunks_max}; choose \
                 larger chunks",
                self.chunks(),
            ),
        )?;
        require(
            self.scheme.chunk_bytes.is_none_or(|only| only == chunk),
            "chunk_bytes",
            chunk,
            format!(
                "scheme {} has pages of {} bytes",
                self.scheme,
                self.scheme.chunk_bytes.unwrap_or(chunk)
            ),
        )?;
        require(
            (2..=MAX_GROUP as u32).contains(&self.group_size),
            "group_size",
            self.group_size,
            format!("a group has 2 to {MAX_GROUP} windows, including the guard"),
        )?;
        require(
            self.credits.is_power_of_two() && self.credits <= Self::CREDITS_MAX,
            "credits",
            self.credits,
            format!("must be a power of two up to {}", Self::CREDITS_MAX),
        )?;
        require(
            (1..=Self::GROUPS_MAX).contains(&self.groups_max),
            "groups_max",
            self.groups_max,
            format!("must be 1 to {} QP groups", Self::GROUPS_MAX),
        )?;
        require(
            (1..=Self::CLIENTS_MAX).contains(&self.clients_max),
            "clients_max",
            self.clients_max,
            format!("must be 1 to {} compute nodes", Self::CLIENTS_MAX),
        )?;
        require(
            (Duration::from_millis(1)..=Duration::from_secs(3600)).contains(&self.silence),
            "silence_ms",
            self.silence.as_millis(),
            "must be 1 ms to one hour",
        )?;
        require(
            (Duration::from_secs(4)..=Duration::from_secs(86_400)).contains(&self.client_timeout),
            "client_timeout",
            self.client_timeout.as_secs(),
            "must be 4 s to one day",
        )?;
        require(
            !self.shares_chunks || self.scheme.access == AccessKind::OneSided,
            "shares_chunks",
            true,
            format!("the addresses of scheme {} are not those of memory", self.scheme),
        )?;
        require(self.nic_windows != Some(0), "nic_windows", 0, "must be at least 1")?;
        schemes::check(&self.scheme_part())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid() {
        Settings::default().validate().unwrap();
    }

    #[test]
    fn errors_name_the_setting() {
        let cases: [(&str, Settings); 12] = [
            ("cores", Settings::default().with("cores", 2)),
            ("silence_ms", Settings { silence: Duration::ZERO, ..Settings::default() }),
            (
                "client_timeout",
                Settings { client_timeout: Duration::from_secs(3), ..Settings::default() },
            ),
            ("chunk_bytes", Settings { chunk_bytes: 256, ..Settings::default() }),
            ("chunk_bytes", Settings { chunk_bytes: 3 << 20, ..Settings::default() }),
            ("donate_bytes", Settings { donate_bytes: 1000, ..Settings::default() }),
            (
                "donate_bytes",
                Settings { donate_bytes: 1 << 40, chunk_bytes: 512, ..Settings::default() },
            ),
            (
                "shares_chunks",
                Settings {
                    shares_chunks: true,
                    chunk_bytes: 4096,
                    scheme: schemes::ODRP,
                    ..Settings::default()
                },
            ),
            ("group_size", Settings { group_size: 1, ..Settings::default() }),
            ("credits", Settings { credits: 12, ..Settings::default() }),
            ("groups_max", Settings { groups_max: 0, ..Settings::default() }),
            ("clients_max", Settings { clients_max: 1 << 20, ..Settings::default() }),
        ];
        for (name, settings) in cases {
            match settings.validate() {
                Err(Error::Setting { setting, .. }) => assert_eq!(setting, name),
                other => panic!("{name}: {other:?}"),
            }
        }
    }
}

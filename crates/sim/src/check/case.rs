//! The cases that can be checked: schemes with particular settings.

use std::fmt;
use std::str::FromStr;

use pool::{Scheme, Settings, schemes};
use scheme::info::{AccessKind, Isolation, ReleaseTime};
use schemes::tdmem::TierSizes;

/// A scheme and the settings that the seed does not determine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Case {
    /// Name on command lines and in traces.
    pub name: &'static str,
    /// The scheme.
    pub scheme: Scheme,
    /// [`schemes::onesidedmw::Options::separation`].
    pub separation: bool,
    /// Use blocks of all sizes, in larger pools.
    pub sizes: bool,
    /// Windows of a group; `None` if the seed determines them.
    pub group_size: Option<u32>,
    /// Number of functions of the memory node's NIC over which chunks are spread, where possible,
    /// because each function has few windows. Blocks of several chunks use further functions.
    pub functions: u32,
    /// The reason why hostile clients can violate the scheme's protection, if the scheme is unsafe
    /// by design. Hostile clients then guess keys nevertheless.
    pub unsafe_by_design: Option<&'static str>,
}

impl Case {
    /// Returns the case of a scheme with its usual settings.
    pub const fn of(scheme: Scheme) -> Self {
        Self {
            name: scheme.name,
            scheme,
            separation: true,
            sizes: false,
            group_size: None,
            functions: 1,
            unsafe_by_design: None,
        }
    }

    /// Cases in which all invariants hold: every scheme but `onesidedmw-paper`, and `onesidedmw`
    /// without separation and without grouping.
    pub const ALL: &[Case] = &[
        Self::of(schemes::ONESIDEDMW),
        Case {
            name: "onesidedmw-without-separation",
            separation: false,
            ..Self::of(schemes::ONESIDEDMW)
        },
        Case {
            name: "onesidedmw-without-grouping",
            group_size: Some(2),
            ..Self::of(schemes::ONESIDEDMW)
        },
        Self::of(schemes::RPC_MW_2),
        Self::of(schemes::RPC_MW_1),
        Self::of(schemes::FINE_MR),
        Self::of(schemes::STATIC_MR),
        Self::of(schemes::ODRP),
        Self::of(schemes::TDMEM),
        Self::of(schemes::FINEMEM),
        Self::of(schemes::FINEMEM_PAPER),
        Self::of(schemes::PREMMAP_ONESIDED),
        Self::of(schemes::PREMMAP_RPC),
        Self::of(schemes::ONDEMAND_RPC),
        Self::of(schemes::SHARED_REGION),
        Self::of(schemes::PATRONUS),
        Self::of(schemes::PATRONUS_2),
        Self::of(schemes::PATRONUS_MR),
        Case { name: "finemem-over-functions", functions: 3, ..Self::of(schemes::FINEMEM) },
        Case {
            name: "finemem-paper-over-functions",
            functions: 3,
            ..Self::of(schemes::FINEMEM_PAPER)
        },
    ];

    /// `rpc-mw-1` with guessed keys: a key opens its window to any client.
    pub const GUESSED: Case = Case {
        name: "rpc-mw-1-guessed",
        unsafe_by_design: Some("a type-1 window opens to any client that guesses its key"),
        ..Self::of(schemes::RPC_MW_1)
    };

    /// `finemem-paper` with a client that uses keys after it has freed their blocks.
    pub const LATE_KEYS: Case = Case {
        name: "finemem-paper-late-keys",
        unsafe_by_design: Some(
            "a key still opens its block after the block was freed and granted to another client",
        ),
        ..Self::of(schemes::FINEMEM_PAPER)
    };

    /// `onesidedmw-paper`: a window keeps its key, and an empty queue loses chunks.
    pub const PUBLISHED_CHAIN: Case = Case {
        unsafe_by_design: Some(
            "keys are granted again, and an allocation from an empty queue loses a chunk",
        ),
        ..Self::of(schemes::ONESIDEDMW_PAPER)
    };

    /// `shared-region` with hostile clients: the one key opens all memory.
    pub const ONE_KEY: Case = Case {
        name: "shared-region-abused",
        unsafe_by_design: Some("every client has the key to all memory"),
        ..Self::of(schemes::SHARED_REGION)
    };

    /// `finemem` with blocks of one chunk up to several sections. A world takes a hundred times as
    /// long as usual.
    pub const SIZES: Case =
        Case { name: "finemem-sizes", sizes: true, ..Self::of(schemes::FINEMEM) };

    fn every() -> impl Iterator<Item = &'static Case> {
        let others = [
            &Self::PUBLISHED_CHAIN,
            &Self::GUESSED,
            &Self::LATE_KEYS,
            &Self::ONE_KEY,
            &Self::SIZES,
        ];
        Self::ALL.iter().chain(others)
    }

    /// Returns the names of all cases, including the unsafe ones.
    pub fn names() -> Vec<&'static str> {
        Self::every().map(|case| case.name).collect()
    }

    /// Returns whether clients may be hostile, which needs a scheme with protection against them.
    pub(super) fn may_be_hostile(&self) -> bool {
        let is_protected = self.scheme.clears() && self.scheme.isolation != Isolation::SharedRegion;
        is_protected || self.unsafe_by_design.is_some()
    }

    /// Applies the case to `settings`.
    pub(super) fn set(&self, settings: Settings) -> Settings {
        let scheme = self.scheme;
        let nic_windows = (self.functions > 1).then(|| {
            // One window per key that a block has at a time, and per compute node one over the
            // metadata.
            let each = if scheme.clears() { 1 } else { 2 };
            let chunks = settings.chunks().div_ceil(self.functions as u64) as u32;
            chunks * each + settings.clients_max
        });
        let settings = Settings {
            nic_windows,
            scheme,
            group_size: self.group_size.unwrap_or(settings.group_size),
            ..settings
        };
        let settings = match self.has_engine() {
            // The choice of pages must not differ between two runs of a seed.
            true => {
                let fast = settings.chunks() / 3 * settings.chunk_bytes;
                settings.with("seed", 1).with("tiers", TierSizes { fast, dram: None })
            }
            false => settings,
        };
        if self.separation { settings } else { settings.with("separation", false) }
    }

    /// Returns whether compute nodes allocate by themselves. Holders of a management QP are then
    /// trusted, and a window opens to any holder of its key. Hostile clients have access QPs only.
    pub(super) fn is_trusting(&self) -> bool {
        self.scheme.is_by_cas()
    }

    /// Returns whether keys are valid before their chunk is granted and open to any holder of the
    /// key. The oracle then judges accesses instead of keys.
    pub(super) fn is_bound_ahead(&self) -> bool {
        let isolation = self.scheme.isolation;
        let is_open = matches!(isolation, Isolation::SharedWindowsAhead | Isolation::SharedRegion);
        let ahead = self.is_trusting() || is_open;
        ahead && self.scheme.isolation != Isolation::GuardedWindows
    }

    /// Returns whether each grant has keys of its own.
    pub(super) fn has_fresh_keys(&self) -> bool {
        self.scheme.release != ReleaseTime::Never
    }

    /// Returns whether compute nodes allocate on a tree. The memory node's CPU then has background
    /// work that can be aborted.
    pub(super) fn has_tree(&self) -> bool {
        schemes::finemem::has_tree(self.scheme)
    }

    /// Returns whether access is by pages.
    pub(super) fn is_paged(&self) -> bool {
        self.scheme.access == AccessKind::Pages
    }

    /// Returns whether the scheme has objects, permissions and leases.
    pub(super) fn has_leases(&self) -> bool {
        self.scheme.leases
    }

    /// Returns whether an engine of the NIC owns the pages, and clients address them directly.
    pub(super) fn has_engine(&self) -> bool {
        self.scheme == schemes::TDMEM
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::every().find(|case| case.name == name);
        known.copied().ok_or_else(|| {
            format!("unknown case {name}; known cases: {}", Self::names().join(", "))
        })
    }
}

//! The cases that can be checked: schemes with particular settings.

use std::fmt;
use std::str::FromStr;

use pool::{Scheme, Settings, schemes};
use scheme::info::{AccessKind, Isolation, ReleaseTime};
use schemes::tdmem::TierSizes;

use super::hostile::Misuse;

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
    /// The one misuse of leases that hostile clients make, of which each world then has one at
    /// least. `None`: they try everything in a safe scheme, and there are none in an unsafe one.
    pub misuse: Option<Misuse>,
    /// Whether each access of an honest client arrives before its lease ends. The published form of
    /// leases relies on it.
    pub timely: bool,
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
            misuse: None,
            timely: false,
        }
    }

    /// Cases in which all invariants hold: every scheme but `onesidedmw-paper` and `unprotected`,
    /// and `onesidedmw` without separation and without grouping. In `patronus-paper` all clients
    /// are honest, and none of their packets is late.
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
        Self::PUBLISHED_LEASES,
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

    /// `patronus-paper` with honest clients, none of whose accesses is late.
    pub const PUBLISHED_LEASES: Case = Case { timely: true, ..Self::of(schemes::PATRONUS_PAPER) };

    /// `patronus-paper` with honest clients and late accesses.
    pub const LATE_EXTENSIONS: Case = Case {
        name: "patronus-paper-late",
        unsafe_by_design: Some(
            "an extension that arrives late reaches a lifetime that may be that of another client",
        ),
        ..Self::of(schemes::PATRONUS_PAPER)
    };

    /// Schemes with leases and without protection, each with hostile clients that make one misuse.
    pub const MISUSED_LEASES: &[Case] = &[
        Case {
            name: "patronus-paper-guessed",
            unsafe_by_design: Some("the key of a window follows from the key of its last holder"),
            misuse: Some(Misuse::NextKey),
            ..Self::PUBLISHED_LEASES
        },
        Case {
            name: "patronus-paper-late-keys",
            unsafe_by_design: Some(
                "the keys of a freed object and of a header open memory after their permission",
            ),
            misuse: Some(Misuse::LateKeys),
            ..Self::PUBLISHED_LEASES
        },
        Case {
            name: "patronus-paper-exceeded",
            unsafe_by_design: Some(
                "a permission for reading opens atomics, and a holder can write its lifetime",
            ),
            misuse: Some(Misuse::Excess),
            ..Self::PUBLISHED_LEASES
        },
        Case {
            name: "patronus-paper-foreign",
            unsafe_by_design: Some("every client can acquire and free every object"),
            misuse: Some(Misuse::ForeignObjects),
            ..Self::PUBLISHED_LEASES
        },
        Case {
            name: "unprotected-abused",
            unsafe_by_design: Some("every client has the key to all memory, and no lease ends"),
            misuse: Some(Misuse::OwnKeyElsewhere),
            timely: true,
            ..Self::of(schemes::UNPROTECTED)
        },
    ];

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
            &Self::LATE_EXTENSIONS,
            &Self::SIZES,
        ];
        Self::ALL.iter().chain(others).chain(Self::MISUSED_LEASES)
    }

    /// Returns the names of all cases, including the unsafe ones.
    pub fn names() -> Vec<&'static str> {
        Self::every().map(|case| case.name).collect()
    }

    /// Returns whether clients may be hostile, which needs a scheme with protection against them.
    pub(super) fn may_be_hostile(&self) -> bool {
        let is_protected = self.scheme.clears() && self.scheme.isolation != Isolation::SharedRegion;
        is_protected
            || match self.has_leases() {
                true => self.misuse.is_some(),
                false => self.unsafe_by_design.is_some(),
            }
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
            // The contents of memory are checked, too.
            false if scheme == schemes::PATRONUS_PAPER => settings.with("clear", true),
            false => settings,
        };
        if self.separation { settings } else { settings.with("separation", false) }
    }

    /// Returns whether compute nodes allocate by themselves. Holders of a management QP are then
    /// trusted, and a window opens to any holder of its key. Hostile clients have access QPs only.
    pub(super) fn is_trusting(&self) -> bool {
        self.scheme.is_by_cas()
    }

    /// Returns whether keys are open to any holder of the key, and valid before their chunk is
    /// granted or after its permission has ended. The oracle then judges accesses instead of keys.
    pub(super) fn is_bound_ahead(&self) -> bool {
        let isolation = self.scheme.isolation;
        let is_open = matches!(isolation, Isolation::SharedWindowsAhead | Isolation::SharedRegion);
        let ahead = self.is_trusting() || is_open || self.scheme == schemes::PATRONUS_PAPER;
        ahead && self.scheme.isolation != Isolation::GuardedWindows
    }

    /// Returns whether freed memory is cleared.
    pub(super) fn clears(&self) -> bool {
        self.scheme.clears() || self.scheme == schemes::PATRONUS_PAPER
    }

    /// Returns whether the memory node looks at the rights of compute nodes that acquire or free an
    /// object.
    pub(super) fn has_rights(&self) -> bool {
        ![schemes::PATRONUS_PAPER, schemes::UNPROTECTED].contains(&self.scheme)
    }

    /// Returns whether an access needs no permission of the memory node, although the scheme has
    /// leases.
    pub(super) fn has_no_permissions(&self) -> bool {
        self.scheme == schemes::UNPROTECTED
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

//! What can be checked: the schemes, each as it is set.

use std::fmt;
use std::str::FromStr;

use pool::{SchemeKind, Settings};

/// A scheme, and what of its settings no seed draws.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Case {
    /// Its name on command lines and in traces.
    pub name: &'static str,
    /// The scheme.
    pub scheme: SchemeKind,
    /// [`Settings::separation`].
    pub separation: bool,
    /// Blocks of all sizes, in larger pools.
    pub sizes: bool,
    /// Windows of a group, if no seed draws them.
    pub group_size: Option<u32>,
    /// Chunks are spread over so many functions of the memory node's NIC, if there are as many: each has few windows.
    /// Blocks of several chunks are in further ones.
    pub functions: u32,
    /// Hostile clients guess keys although the scheme does not withstand that: what is violated then, and
    /// why.
    pub unsafe_by_design: Option<&'static str>,
}

impl Case {
    /// A scheme as it is usually set.
    pub const fn of(scheme: SchemeKind) -> Self {
        Self {
            name: scheme.name(),
            scheme,
            separation: true,
            sizes: false,
            group_size: None,
            functions: 1,
            unsafe_by_design: None,
        }
    }

    /// All that must hold: every scheme, and `onesidedmw` without separation and without grouping.
    pub const ALL: &[Case] = &[
        Self::of(SchemeKind::OneSidedMw),
        Case {
            name: "onesidedmw-without-separation",
            separation: false,
            ..Self::of(SchemeKind::OneSidedMw)
        },
        Case {
            name: "onesidedmw-without-grouping",
            group_size: Some(2),
            ..Self::of(SchemeKind::OneSidedMw)
        },
        Self::of(SchemeKind::RpcMw2),
        Self::of(SchemeKind::RpcMw1),
        Self::of(SchemeKind::FineMr),
        Self::of(SchemeKind::StaticMr),
        Self::of(SchemeKind::Odrp),
        Self::of(SchemeKind::FineMem),
        Self::of(SchemeKind::FineMemPaper),
        Self::of(SchemeKind::PremmapOneSided),
        Self::of(SchemeKind::PremmapRpc),
        Self::of(SchemeKind::OnDemandRpc),
        Case { name: "finemem-over-functions", functions: 3, ..Self::of(SchemeKind::FineMem) },
        Case {
            name: "finemem-paper-over-functions",
            functions: 3,
            ..Self::of(SchemeKind::FineMemPaper)
        },
    ];

    /// `rpc-mw-1` where keys are guessed: they open what they name, to whoever has them.
    pub const GUESSED: Case = Case {
        name: "rpc-mw-1-guessed",
        unsafe_by_design: Some("a type-1 window opens to whoever guesses its key"),
        ..Self::of(SchemeKind::RpcMw1)
    };

    /// `finemem-paper` beside somebody who uses the keys that he has given up.
    pub const LATE_KEYS: Case = Case {
        name: "finemem-paper-late-keys",
        unsafe_by_design: Some("a key that was given up opens its block in the next owner's hands"),
        ..Self::of(SchemeKind::FineMemPaper)
    };

    /// `finemem` with blocks of one chunk up to several sections. A world takes a hundred times as long.
    pub const SIZES: Case =
        Case { name: "finemem-sizes", sizes: true, ..Self::of(SchemeKind::FineMem) };

    fn every() -> impl Iterator<Item = &'static Case> {
        Self::ALL.iter().chain([&Self::GUESSED, &Self::LATE_KEYS, &Self::SIZES])
    }

    /// Names of all cases, also those that do not hold.
    pub fn names() -> Vec<&'static str> {
        Self::every().map(|case| case.name).collect()
    }

    /// Somebody may be hostile: not where the scheme promises too little to withstand it.
    pub(super) fn may_be_hostile(&self) -> bool {
        self.scheme.releases() || self.unsafe_by_design.is_some()
    }

    /// Puts what it says into settings.
    pub(super) fn set(&self, settings: Settings) -> Settings {
        let scheme = self.scheme;
        let nic_windows = (self.functions > 1).then(|| {
            // One for each key that a block has at a time, and for each compute node one over the metadata.
            let each = if scheme.releases() { 1 } else { 2 };
            let chunks = settings.chunks().div_ceil(self.functions as u64) as u32;
            chunks * each + settings.clients_max
        });
        Settings {
            nic_windows,
            scheme,
            separation: self.separation,
            group_size: self.group_size.unwrap_or(settings.group_size),
            ..settings
        }
    }

    /// Compute nodes allocate by themselves: who has a management QP is trusted, and any window opens to whoever has
    /// its key. Who is hostile has access QPs only.
    pub(super) fn is_trusting(&self) -> bool {
        self.scheme.is_by_cas()
    }

    /// Windows are bound before anybody has what they open, and open to whoever has the key: whose each is, is judged by
    /// who uses it.
    pub(super) fn is_bound_ahead(&self) -> bool {
        let ahead = self.is_trusting() || self.scheme == SchemeKind::PremmapRpc;
        ahead && !self.scheme.is_guarded()
    }

    /// Compute nodes allocate on a tree, and the memory node's CPU has background work that can be broken off.
    pub(super) fn has_tree(&self) -> bool {
        matches!(self.scheme, SchemeKind::FineMem | SchemeKind::FineMemPaper)
    }

    /// Access is by pages, whose places their users never learn.
    pub(super) fn is_paged(&self) -> bool {
        self.scheme == SchemeKind::Odrp
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
        known.copied().ok_or_else(|| format!("{name} is none of {}", Self::names().join(", ")))
    }
}

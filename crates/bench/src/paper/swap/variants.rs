//! Memory nodes of the experiment: the schemes and their chunks.

use pool::{Scheme, Settings, schemes};

/// A scheme with its chunks, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Variant {
    /// All memory is local, and no pager is loaded.
    Plain,
    /// Large regions, registered ahead.
    StaticMr,
    /// The product.
    OneSidedMw,
    /// Type-1 windows by RPC.
    RpcMw1,
    /// Type-2 windows by RPC.
    RpcMw2,
    /// Regions of 1 MiB, registered on request.
    FineMr1,
    /// Regions of 4 MiB, registered on request.
    FineMr4,
    /// Pages, with a chain at every access.
    Odrp,
    /// FineMem. Not in the paper.
    FineMem,
    /// `onesidedmw` without separation of management and access QPs.
    Unseparated,
    /// `onesidedmw` without separation and without groups of QPs and windows.
    Ungrouped,
}

/// Smallest chunk of [`Variant::StaticMr`].
const STATIC_MIN: u64 = 1 << 20;

impl Variant {
    /// The schemes of figures 8 and 9, and FineMem.
    pub const FIGURES: [Self; 8] = [
        Self::StaticMr,
        Self::OneSidedMw,
        Self::RpcMw1,
        Self::RpcMw2,
        Self::FineMr1,
        Self::FineMr4,
        Self::Odrp,
        Self::FineMem,
    ];
    /// Those of the paper.
    pub const PAPERS: [Self; 7] = {
        let [papers @ .., _] = Self::FIGURES;
        papers
    };
    /// The ablations, and the product to compare with.
    pub const ABLATIONS: [Self; 3] = [Self::OneSidedMw, Self::Unseparated, Self::Ungrouped];
    /// All with a memory node, in the order of a round.
    pub const PAGED: [Self; 10] = [
        Self::StaticMr,
        Self::OneSidedMw,
        Self::Unseparated,
        Self::Ungrouped,
        Self::RpcMw1,
        Self::RpcMw2,
        Self::FineMr1,
        Self::FineMr4,
        Self::Odrp,
        Self::FineMem,
    ];

    /// The name in records and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::StaticMr => "static-mr",
            Self::OneSidedMw => "onesidedmw",
            Self::RpcMw1 => "rpc-mw-1",
            Self::RpcMw2 => "rpc-mw-2",
            Self::FineMr1 => "fine-mr 1 MB",
            Self::FineMr4 => "fine-mr 4 MB",
            Self::Odrp => "odrp",
            Self::FineMem => "finemem",
            Self::Unseparated => "onesidedmw (-Sep)",
            Self::Ungrouped => "onesidedmw (-Sep -Group)",
        }
    }

    /// The scheme and the length of its chunks; `None` without a memory node. `memory`: bytes of a
    /// program's data.
    pub fn scheme(self, memory: u64) -> Option<(Scheme, u64)> {
        let (scheme, bytes) = match self {
            Self::Plain => return None,
            Self::StaticMr => (schemes::STATIC_MR, static_bytes(memory)),
            Self::OneSidedMw | Self::Unseparated | Self::Ungrouped => {
                (schemes::ONESIDEDMW, 1 << 20)
            }
            Self::RpcMw1 => (schemes::RPC_MW_1, 1 << 20),
            Self::RpcMw2 => (schemes::RPC_MW_2, 1 << 20),
            Self::FineMr1 => (schemes::FINE_MR, 1 << 20),
            Self::FineMr4 => (schemes::FINE_MR, 4 << 20),
            Self::Odrp => (schemes::ODRP, 4 << 10),
            Self::FineMem => (schemes::FINEMEM, 1 << 20),
        };
        Some((scheme, bytes))
    }

    /// Settings of a memory node for `bytes` of pages; `None` without a memory node.
    pub fn settings(self, memory: u64, bytes: u64) -> Option<Settings> {
        let (scheme, chunk_bytes) = self.scheme(memory)?;
        let donate_bytes = bytes.next_multiple_of(chunk_bytes);
        let settings = Settings { scheme, chunk_bytes, donate_bytes, ..Settings::default() };
        Some(match self {
            Self::Unseparated => settings.with("separation", false),
            // One lane: all requests of a thread share a window and a QP.
            Self::Ungrouped => Settings { group_size: 2, ..settings }.with("separation", false),
            _ => settings,
        })
    }
}

/// Length of a chunk of `static-mr`: a quarter of a program's data, which is a sixteenth of the
/// paper's 1 GiB for 256 MiB.
fn static_bytes(memory: u64) -> u64 {
    let quarter = (memory / 4).max(STATIC_MIN);
    (1 << quarter.ilog2()).min(Settings::CHUNK_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_nodes_have_the_papers_chunks_and_switches() {
        let memory = 256 << 20;
        for variant in Variant::PAGED {
            let settings = variant.settings(memory, 500 << 20).unwrap();
            settings.validate().unwrap_or_else(|error| panic!("{variant:?}: {error}"));
            assert!(settings.donate_bytes >= 500 << 20, "{variant:?}");
        }
        assert_eq!(Variant::Plain.settings(memory, 1), None);
        let of = |variant: Variant| variant.settings(memory, 1 << 30).unwrap();
        assert_eq!(of(Variant::StaticMr).chunk_bytes, 64 << 20);
        assert_eq!(of(Variant::FineMr4).chunk_bytes, 4 << 20);
        assert_eq!((of(Variant::OneSidedMw).lanes(), of(Variant::Ungrouped).lanes()), (2, 1));
        assert_ne!(of(Variant::OneSidedMw).options, of(Variant::Unseparated).options);
        assert_eq!(of(Variant::Ungrouped).options, of(Variant::Unseparated).options);
    }

    #[test]
    fn static_chunk_is_a_power_of_two_within_the_limits() {
        assert_eq!(static_bytes(8 << 20), 2 << 20);
        assert_eq!(static_bytes(9 << 20), 2 << 20);
        assert_eq!(static_bytes(1), 1 << 20);
        assert_eq!(static_bytes(1 << 40), 1 << 30);
    }
}

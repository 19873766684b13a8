//! What an allocation scheme is, as data. Each scheme has one constant beside its code.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Serialize, Serializer};
use verbs::{Caps, Feature};

/// Description of an allocation scheme.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SchemeInfo {
    /// Name in reports, on command lines and in the control protocol.
    pub name: &'static str,
    /// Publication and section that describe the scheme.
    pub source: &'static str,
    /// Processor that executes an allocation.
    pub allocator: Allocator,
    /// Mechanism that keeps a chunk from clients other than its owner.
    pub isolation: Isolation,
    /// Sizes of an allocation.
    pub sizes: Sizes,
    /// Operations on a grant.
    pub access: AccessKind,
    /// The scheme has objects, permissions and leases ([`crate::lease`]). A scheme without them may
    /// have objects nevertheless: a permission then excludes none and never ends.
    pub leases: bool,
    /// Invalidation and clearing of a freed chunk.
    pub release: ReleaseTime,
    /// Capabilities that the memory node's NIC must have.
    pub needs: &'static [Need],
    /// Chunk size in bytes, in a scheme that has only one.
    pub chunk_bytes: Option<u64>,
    /// Maximum number of chunks.
    pub chunks_max: u64,
    /// Names of the scheme's own settings.
    pub options: &'static [&'static str],
    /// The reason why a scheme is unsafe and exists only for comparison; `None` for a safe scheme.
    /// An unsafe scheme must be selected by name, and `granary serve` prints this reason.
    pub unsafe_because: Option<&'static str>,
}

/// A scheme: a reference to its description.
pub type Scheme = &'static SchemeInfo;

/// The processor that executes an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Allocator {
    /// The memory node's NIC.
    Nic,
    /// The compute node, with READ and CAS on the memory node's metadata. It is trusted with that
    /// metadata.
    Client,
    /// The memory node's CPU, which answers an RPC.
    NodeCpu,
}

/// The mechanism that keeps a chunk from clients other than its owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Isolation {
    /// A type-2 window, bound to the owner's QP at each allocation.
    QpWindows,
    /// A type-1 window, bound at each allocation. Any access QP can guess the 8-bit tag of its key
    /// (OneSidedMW §2.3).
    SharedWindows,
    /// A type-1 window that is bound before its chunk is granted, and open to any access QP that
    /// guesses the tag of its key.
    SharedWindowsAhead,
    /// A type-1 window that is bound before its chunk is granted. On a NIC with guarded windows
    /// its key is valid for the owner only.
    GuardedWindows,
    /// A type-1 window in a protection domain of the owner's, bound at each allocation. No QP of
    /// another compute node can use its key.
    OwnWindows,
    /// A memory region in the owner's protection domain.
    Regions,
    /// None: one region that every client can access.
    SharedRegion,
    /// A page table of the owner. The owner has no key.
    PageTable,
    /// A table of the owners of pages, in which an engine of the NIC looks each access up.
    PageOwners,
    /// The memory node's CPU, which checks each access. No client has a key.
    NodeCpu,
}

/// The sizes of an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sizes {
    /// A chunk.
    Chunk,
    /// A block: a power of two of chunks.
    Blocks,
}

/// The operations on a grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AccessKind {
    /// READ, WRITE and atomics at any offset.
    OneSided,
    /// Reads and writes of whole pages. The first write of a page allocates its memory.
    Pages,
    /// READ, WRITE and atomics at any offset, which the memory node's CPU executes on request.
    ByRpc,
}

/// The time at which a freed chunk is released: its keys are dead, and the chunk is cleared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReleaseTime {
    /// Before the free returns.
    BeforeReturn,
    /// Before the next allocation of the chunk. The chunk is in quarantine until then.
    Quarantine,
    /// After the next allocation of the chunk. The chunk is not cleared.
    AfterReuse,
    /// Never: the keys stay valid for as long as the memory node runs. The chunk is cleared before
    /// the free returns.
    Never,
}

/// A capability that the memory node's NIC must have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// WAIT, SEND_EN and RECV_EN.
    Chains,
    /// Type-2B windows.
    Type2Windows,
    /// Type-1 windows.
    Type1Windows,
    /// Atomics on big-endian words.
    BigEndianAtomics,
    /// Atomics that are atomic with respect to the CPU.
    GlobalAtomics,
    /// Regions behind an engine.
    RegionEngines,
    /// Inline data of this number of bytes.
    Inline(u32),
}

impl SchemeInfo {
    /// True if every allocation is an RPC to the memory node's CPU.
    pub fn needs_cpu(&self) -> bool {
        self.allocator == Allocator::NodeCpu
    }

    /// True if the compute node itself allocates, with READ and CAS on the memory node's metadata.
    pub fn is_by_cas(&self) -> bool {
        self.allocator == Allocator::Client
    }

    /// True if the scheme has several block sizes: a power of two times the chunk size.
    pub fn has_sizes(&self) -> bool {
        self.sizes == Sizes::Blocks
    }

    /// True if a chunk is cleared before it is allocated again.
    pub fn clears(&self) -> bool {
        self.release != ReleaseTime::AfterReuse
    }

    /// True if a free returns before the keys of the chunk are dead.
    pub fn releases_late(&self) -> bool {
        self.release != ReleaseTime::BeforeReturn
    }

    /// The first capability that the scheme needs and a NIC with `caps` lacks.
    pub fn missing(&self, caps: &Caps) -> Option<Need> {
        self.needs.iter().copied().find(|need| !need.is_met(caps))
    }

    /// Returns an error if a NIC with `caps` lacks a capability that the scheme needs.
    pub fn check_caps(&self, caps: &Caps) -> Result<(), crate::Error> {
        let Some(missing) = self.missing(caps) else { return Ok(()) };
        Err(verbs::Error::Unsupported {
            attempt: format!("serving with scheme {self}"),
            why: format!("the NIC {} lacks {missing}", caps.name),
        }
        .into())
    }
}

impl Isolation {
    /// True if chunks are accessible through windows of type 1, whose 8-bit tags every access QP
    /// can guess. Guarded windows withstand that only on a NIC that supports them.
    pub fn has_type1_windows(self) -> bool {
        match self {
            Self::SharedWindows | Self::SharedWindowsAhead | Self::GuardedWindows => true,
            Self::QpWindows
            | Self::OwnWindows
            | Self::Regions
            | Self::SharedRegion
            | Self::PageTable
            | Self::PageOwners
            | Self::NodeCpu => false,
        }
    }
}

impl Need {
    /// True if a NIC with `caps` has the capability.
    pub fn is_met(self, caps: &Caps) -> bool {
        match self {
            Self::Chains => caps.chains,
            Self::Type2Windows => caps.windows,
            Self::Type1Windows => caps.type1_windows,
            Self::BigEndianAtomics => caps.big_endian_atomics,
            Self::GlobalAtomics => caps.global_atomics,
            Self::RegionEngines => caps.has(Feature::RegionEngines),
            Self::Inline(bytes) => caps.max_inline >= bytes,
        }
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Chains => f.write_str("WAIT and SEND_EN"),
            Self::Type2Windows => f.write_str("type-2B windows"),
            Self::Type1Windows => f.write_str("type-1 windows"),
            Self::BigEndianAtomics => f.write_str("big-endian atomics"),
            Self::GlobalAtomics => f.write_str("atomics that are atomic with respect to the CPU"),
            Self::RegionEngines => f.write_str("regions behind an engine"),
            Self::Inline(bytes) => write!(f, "inline data of {bytes} bytes"),
        }
    }
}

impl fmt::Display for SchemeInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

impl fmt::Debug for SchemeInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Hash for SchemeInfo {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl Serialize for SchemeInfo {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

//! Identifiers of the NIC's objects. Each kind has its own type, so that they cannot be confused.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id24 {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[derive(Serialize, Deserialize)]
        #[serde(into = "u32", from = "u32")]
        pub struct $name(u32);

        impl From<u32> for $name {
            /// Takes the low 24 bits.
            fn from(raw: u32) -> Self {
                Self::new(raw)
            }
        }

        impl From<$name> for u32 {
            fn from(id: $name) -> u32 {
                id.raw()
            }
        }

        impl $name {
            /// The largest value: 24 bits.
            pub const MAX: u32 = 0xff_ffff;

            /// Takes the low 24 bits of `raw`.
            pub const fn new(raw: u32) -> Self {
                Self(raw & Self::MAX)
            }

            /// The number as encoded in packets and WQEs.
            pub const fn raw(self) -> u32 {
                self.0
            }

            /// The number as an index into a table.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

id24! {
    /// Queue pair number.
    Qpn
}
id24! {
    /// Completion queue number.
    Cqn
}
id24! {
    /// Shared receive queue number.
    Srqn
}
id24! {
    /// Protection domain number.
    Pdn
}
id24! {
    /// Index of an entry in the NIC's key table: the upper 24 bits of a key.
    KeyIndex
}
id24! {
    /// Packet sequence number. A CQ's running index has the same range.
    Psn
}

impl Qpn {
    /// "No QP": the QPN of an unbound window.
    pub const NONE: Qpn = Qpn(0xff_ffff);
}

/// A function of the NIC: the physical function (0, which the NIC's trusted owner uses) or a
/// virtual function, to which a client process attaches. A function owns the objects that it
/// creates.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct FunctionId(pub u32);

impl FunctionId {
    /// The physical function, which the NIC's owner uses.
    pub const PHYSICAL: FunctionId = FunctionId(0);
}

/// A memory key (lkey or rkey): 24 bits of index, 8 bits of tag.
///
/// ```text
///  31                     8 7      0
/// +------------------------+--------+
/// |       key index        |  tag   |
/// +------------------------+--------+
/// ```
///
/// The tag changes whenever a window is bound, so older keys of the same window are invalid (IBTA
/// vol. 1, §10.6.3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Key(pub u32);

impl Key {
    /// The key of table entry `index` with `tag`.
    pub const fn new(index: KeyIndex, tag: u8) -> Self {
        Self(index.raw() << 8 | tag as u32)
    }

    /// The index of the key table entry that this key names.
    pub const fn index(self) -> KeyIndex {
        KeyIndex::new(self.0 >> 8)
    }

    /// The tag, which must equal the entry's current tag.
    pub const fn tag(self) -> u8 {
        self.0 as u8
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({:#x}.{:02x})", self.0 >> 8, self.tag())
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

/// Access rights of a key or of a QP (`ibv_access_flags`). The bits are those of `access_flags` in
/// the ConnectX mkey context, which has a separate bit for local read.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug, Serialize, Deserialize)]
pub struct Access(pub u8);

impl Access {
    /// No rights.
    pub const NONE: Access = Access(0);
    /// The NIC may gather from the memory for its owner's WQEs.
    pub const LOCAL_READ: Access = Access(1 << 2);
    /// The NIC may scatter into the memory for its owner's WQEs.
    pub const LOCAL_WRITE: Access = Access(1 << 3);
    /// A peer may READ the memory.
    pub const REMOTE_READ: Access = Access(1 << 4);
    /// A peer may WRITE the memory.
    pub const REMOTE_WRITE: Access = Access(1 << 5);
    /// A peer may execute atomics on the memory.
    pub const REMOTE_ATOMIC: Access = Access(1 << 6);
    /// Every remote right, as granted by the pool's windows.
    pub const REMOTE_ALL: Access =
        Access(Self::REMOTE_READ.0 | Self::REMOTE_WRITE.0 | Self::REMOTE_ATOMIC.0);
    /// Local read and write.
    pub const LOCAL_ALL: Access = Access(Self::LOCAL_READ.0 | Self::LOCAL_WRITE.0);

    /// True if `self` contains every right of `need`.
    pub const fn allows(self, need: Access) -> bool {
        self.0 & need.0 == need.0
    }

    /// Returns the union of both sets of rights.
    pub const fn with(self, more: Access) -> Access {
        Access(self.0 | more.0)
    }
}

impl std::ops::BitOr for Access {
    type Output = Access;
    fn bitor(self, other: Access) -> Access {
        self.with(other)
    }
}

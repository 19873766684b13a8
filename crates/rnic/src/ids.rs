//! Names of the NIC's objects, each with a type of its own so that none is taken for another.

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

            /// The number as the wire and the WQEs carry it.
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
    /// Packet sequence number; also the reach of a CQ's running index.
    Psn
}

impl Qpn {
    /// "No QP": what an unbound window names.
    pub const NONE: Qpn = Qpn(0xff_ffff);
}

/// A function of the NIC: the physical function (0, the trusted owner of the NIC) or a virtual
/// one, which is what a client process attaches to. It owns the objects that it makes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct FunctionId(pub u32);

impl FunctionId {
    /// The physical function: the NIC's owner.
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
/// The tag changes whenever a window is bound, so that an older key of the same window is dead
/// (IBTA vol. 1, §10.6.3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Key(pub u32);

impl Key {
    /// The key of table entry `index` with `tag`.
    pub const fn new(index: KeyIndex, tag: u8) -> Self {
        Self(index.raw() << 8 | tag as u32)
    }

    /// The entry of the key table that this key names.
    pub const fn index(self) -> KeyIndex {
        KeyIndex::new(self.0 >> 8)
    }

    /// The tag: must equal the entry's own.
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

/// What may be done through a key or to a QP (`ibv_access_flags`; the bits are those of
/// `access_flags` in the ConnectX mkey context, where local read has a bit of its own).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug, Serialize, Deserialize)]
pub struct Access(pub u8);

impl Access {
    /// Nothing.
    pub const NONE: Access = Access(0);
    /// The NIC may gather from it on its owner's behalf.
    pub const LOCAL_READ: Access = Access(1 << 2);
    /// The NIC may scatter into it on its owner's behalf.
    pub const LOCAL_WRITE: Access = Access(1 << 3);
    /// A peer may READ it.
    pub const REMOTE_READ: Access = Access(1 << 4);
    /// A peer may WRITE it.
    pub const REMOTE_WRITE: Access = Access(1 << 5);
    /// A peer may execute atomics on it.
    pub const REMOTE_ATOMIC: Access = Access(1 << 6);
    /// Every remote right: what a window of the pool grants.
    pub const REMOTE_ALL: Access =
        Access(Self::REMOTE_READ.0 | Self::REMOTE_WRITE.0 | Self::REMOTE_ATOMIC.0);
    /// Local read and write.
    pub const LOCAL_ALL: Access = Access(Self::LOCAL_READ.0 | Self::LOCAL_WRITE.0);

    /// True if every right of `need` is in `self`.
    pub const fn allows(self, need: Access) -> bool {
        self.0 & need.0 == need.0
    }

    /// Both sets of rights.
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

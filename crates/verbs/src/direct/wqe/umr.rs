//! UMR: the WQE that binds and unbinds memory windows.
//!
//! ```text
//! +0    control: opcode 0x25; at +12 the key to change, whose tag must be the current one
//! +16   UMR control (48 B):  +16 flags   +20 KLM octowords (2)  +22 offset (2)  +24 mkey mask (8)
//! +64   mkey context (64 B): +64 free (bit 6)    +66 access   +68 QPN (3) +71 tag
//!                            +76 flags and PD (4)   +80 start (8)   +88 length (8)
//! +128  KLM (16 B, padded to 64; absent when the window is freed):
//!                            +128 byte count (4)   +132 lkey of the MR (4)   +136 address (8)
//! ```
//!
//! A UMR changes only the fields in its mask. `CHECK_FREE` requires that the window is unbound;
//! `CHECK_QPN` requires that the window is bound to the QP that executes the WQE. A free window has
//! QPN 0xffffff.
//!
//! Chains patch +12 (key index), +15 (old tag), +68 (QPN), +71 (new tag), +80 (start) and +136 (KLM
//! address): OneSidedMW §4.2 ("cross-QP MW assigning") and §4.3.

use super::offset;
use crate::{Access, Key, Qpn};

/// Offset of the flags byte of the UMR control segment.
pub const FLAGS: usize = 16;
/// Offset of the KLM octowords (2 bytes).
pub const KLM_OCTOWORDS: usize = 20;
/// Offset of the mkey mask (8 bytes).
pub const MKEY_MASK: usize = 24;
/// Offset of the byte that holds the free bit.
pub const FREE: usize = 64;
/// Offset of the access flags.
pub const ACCESS: usize = 66;
/// Offset of the window's QPN (3 bytes).
pub const QPN: usize = 68;
/// Offset of the window's new tag (1 byte).
pub const TAG: usize = 71;
/// Offset of the window's start address (8 bytes).
pub const START: usize = 80;
/// Offset of the window's length (8 bytes).
pub const LENGTH: usize = 88;
/// Offset of the KLM's byte count (4 bytes).
pub const KLM_BYTES: usize = 128;
/// Offset of the KLM's lkey (4 bytes).
pub const KLM_LKEY: usize = 132;
/// Offset of the KLM's address (8 bytes).
pub const KLM_ADDR: usize = 136;

/// Segments of a UMR that binds (with its KLM): three building blocks.
pub const BIND_SEGMENTS: usize = 12;
/// Segments of a UMR that frees: two building blocks.
pub const FREE_SEGMENTS: usize = 8;

/// In [`Umr::mask`]: change the length.
pub const MASK_LEN: u64 = 1 << 0;
/// In [`Umr::mask`]: change the start address.
pub const MASK_START: u64 = 1 << 6;
/// In [`Umr::mask`]: change the tag.
pub const MASK_MKEY: u64 = 1 << 13;
/// In [`Umr::mask`]: change the QPN.
pub const MASK_QPN: u64 = 1 << 14;
/// In [`Umr::mask`]: change local write, remote read, remote write and atomic rights.
pub const MASK_ACCESS: u64 = 1 << 18 | 1 << 19 | 1 << 20 | 1 << 21;
/// In [`Umr::mask`]: change whether the key is free.
pub const MASK_FREE: u64 = 1 << 29;

/// The free bit in the byte at [`FREE`].
pub const FREE_BIT: u8 = 1 << 6;

/// Flags of the UMR control segment: conditions on the key, and forms.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UmrFlags(pub u8);

impl UmrFlags {
    /// The WQE contains the KLM.
    pub const INLINE: UmrFlags = UmrFlags(1 << 7);
    /// Condition: the window is free.
    pub const CHECK_FREE: UmrFlags = UmrFlags(1 << 5);
    /// The translation offset is used.
    pub const TRANSLATION_OFFSET: UmrFlags = UmrFlags(1 << 4);
    /// Condition: the window is bound to the executing QP.
    pub const CHECK_QPN: UmrFlags = UmrFlags(1 << 3);

    /// True if every flag of `need` is set.
    pub const fn has(self, need: UmrFlags) -> bool {
        self.0 & need.0 == need.0
    }
}

impl std::ops::BitOr for UmrFlags {
    type Output = UmrFlags;
    fn bitor(self, other: UmrFlags) -> UmrFlags {
        UmrFlags(self.0 | other.0)
    }
}

/// A UMR's fields.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Umr {
    /// The key to change, with its current tag.
    pub key: Key,
    /// Conditions on the key, and forms.
    pub flags: UmrFlags,
    /// The fields to change.
    pub mask: u64,
    /// True: the window becomes free (unbound), and the WQE has no KLM.
    pub free: bool,
    /// The window's rights.
    pub access: Access,
    /// The QP to bind the window to.
    pub qpn: Qpn,
    /// The window's new tag.
    pub tag: u8,
    /// First address of the window.
    pub start: u64,
    /// Bytes of the window.
    pub len: u64,
    /// The range of the MR under the window.
    pub klm: Klm,
}

/// A KLM entry: a range of an MR.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Klm {
    /// Bytes.
    pub len: u32,
    /// The MR's key.
    pub lkey: Key,
    /// First address in the MR.
    pub addr: u64,
}

impl Umr {
    /// Binds the free type-2 window `key` to `qpn`, with new tag `tag`, over `len` bytes at `start`
    /// of the MR `mr`. The execution fails if the window is bound.
    pub fn bind(
        key: Key,
        tag: u8,
        qpn: Qpn,
        access: Access,
        mr: Key,
        start: u64,
        len: u32,
    ) -> Self {
        Self {
            key,
            flags: UmrFlags::INLINE | UmrFlags::TRANSLATION_OFFSET | UmrFlags::CHECK_FREE,
            mask: MASK_LEN | MASK_START | MASK_MKEY | MASK_QPN | MASK_ACCESS | MASK_FREE,
            free: false,
            access,
            qpn,
            tag,
            start,
            len: len as u64,
            klm: Klm { len, lkey: mr, addr: start },
        }
    }

    /// Unbinds the window `key`. With `check_qpn`, only the QP that the window is bound to may
    /// unbind it. Without `check_qpn`, only a privileged QP of the window's PD may.
    pub fn unbind(key: Key, check_qpn: bool) -> Self {
        Self {
            key,
            flags: UmrFlags::INLINE
                | UmrFlags::TRANSLATION_OFFSET
                | if check_qpn { UmrFlags::CHECK_QPN } else { UmrFlags::default() },
            mask: MASK_QPN | MASK_FREE,
            free: true,
            qpn: Qpn::NONE,
            ..Self::default()
        }
    }

    /// Binds or rebinds the type-1 window `key`, with new tag `tag`, over `len` bytes at `start` of
    /// the MR `mr`. A `len` of 0 unbinds it (IBTA vol. 1, §10.6.7). A type-1 window is not bound to
    /// a QP.
    pub fn bind_type1(key: Key, tag: u8, access: Access, mr: Key, start: u64, len: u32) -> Self {
        Self {
            flags: UmrFlags::INLINE | UmrFlags::TRANSLATION_OFFSET,
            ..Self::bind(key, tag, Qpn::NONE, access, mr, start, len)
        }
    }

    /// Makes the window zero-based: its first byte has address 0 instead of its address in the
    /// region (`IBV_ACCESS_ZERO_BASED`).
    pub fn zero_based(self) -> Self {
        Self { start: 0, ..self }
    }

    /// Number of segments of the WQE.
    #[inline]
    pub fn segments(&self) -> usize {
        if self.free { FREE_SEGMENTS } else { BIND_SEGMENTS }
    }

    /// Encodes all segments but the control segment into `wqe`, which is zeroed.
    pub(super) fn emit(&self, wqe: &mut [u8]) {
        wqe[FLAGS] = self.flags.0;
        wqe[KLM_OCTOWORDS..KLM_OCTOWORDS + 2]
            .copy_from_slice(&(if self.free { 0u16 } else { 4 }).to_be_bytes());
        put64(wqe, MKEY_MASK, self.mask);
        wqe[FREE] = if self.free { FREE_BIT } else { 0 };
        wqe[ACCESS] = self.access.0;
        put32(wqe, QPN, self.qpn.raw() << 8 | self.tag as u32);
        put64(wqe, START, self.start);
        put64(wqe, LENGTH, self.len);
        if !self.free {
            put32(wqe, KLM_BYTES, self.klm.len);
            put32(wqe, KLM_LKEY, self.klm.lkey.0);
            put64(wqe, KLM_ADDR, self.klm.addr);
        }
    }

    /// Decodes the fields; `None` if `wqe` has fewer segments than the UMR needs.
    #[inline]
    pub(super) fn parse(wqe: &[u8]) -> Option<Self> {
        if wqe.len() < FREE_SEGMENTS * super::SEGMENT {
            return None;
        }
        let free = wqe[FREE] & FREE_BIT != 0;
        if !free && wqe.len() < BIND_SEGMENTS * super::SEGMENT {
            return None;
        }
        let qpn_tag = get32(wqe, QPN);
        Some(Self {
            key: Key(get32(wqe, offset::UMR_KEY_INDEX)),
            flags: UmrFlags(wqe[FLAGS]),
            mask: get64(wqe, MKEY_MASK),
            free,
            access: Access(wqe[ACCESS]),
            qpn: Qpn::new(qpn_tag >> 8),
            tag: qpn_tag as u8,
            start: get64(wqe, START),
            len: get64(wqe, LENGTH),
            klm: if free {
                Klm::default()
            } else {
                Klm {
                    len: get32(wqe, KLM_BYTES),
                    lkey: Key(get32(wqe, KLM_LKEY)),
                    addr: get64(wqe, KLM_ADDR),
                }
            },
        })
    }
}

fn put32(b: &mut [u8], at: usize, v: u32) {
    b[at..at + 4].copy_from_slice(&v.to_be_bytes());
}

fn put64(b: &mut [u8], at: usize, v: u64) {
    b[at..at + 8].copy_from_slice(&v.to_be_bytes());
}

fn get32(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(b[at..at + 4].try_into().expect("4 bytes"))
}

fn get64(b: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(b[at..at + 8].try_into().expect("8 bytes"))
}

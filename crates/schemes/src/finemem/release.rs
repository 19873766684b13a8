//! Handling of freed blocks: the only difference between schemes `finemem` and `finemem-paper`.
//!
//! ```text
//! finemem         free   CAS capability (key, 0) ─> (0, key)               quarantined
//!                 scan   withdraw, rebind, clear, (new key, 0), CAS header: free
//!
//! finemem-paper   free   CAS capability (key, backup) ─> (backup, 0)       the next owner's key
//!                        CAS header: free at once
//!                 scan   rebind the window of the old key; CAS (key, 0) ─> (key, new backup)
//! ```
//!
//! `finemem-paper` is FineMem as published (§4.3), for comparison. It is **unsafe**: until the next
//! scan, the last owner's key still grants access to the block, although the block may have a new
//! owner; the block is not cleared; and windows are not guarded, so an access QP can guess a key's
//! 8 tag bits.

use scheme::info::{ReleaseTime, Scheme};

/// When a freed block becomes free for the next allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Release {
    /// After its old key is dead and it has been cleared.
    Quarantined,
    /// At once, under its backup key.
    AtOnce,
}

impl Release {
    /// The release policy of a scheme.
    pub fn of(scheme: Scheme) -> Self {
        match scheme.release {
            ReleaseTime::AfterReuse => Self::AtOnce,
            _ => Self::Quarantined,
        }
    }

    /// Windows per block: one for each key that a block has at a time.
    pub fn windows(self) -> u32 {
        match self {
            Self::Quarantined => 1,
            Self::AtOnce => 2,
        }
    }
}

//! What becomes of a freed block: the only difference between schemes `finemem` and `finemem-paper`.
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
//! `finemem-paper` is FineMem as published (§4.3), to be compared with. It is **unsafe**: the last owner's key opens the
//! block until the scan has come by, whoever has it by then; what is in the block is not cleared; and windows
//! are not guarded, so that any access QP that guesses 8 bits is in.

use fabric::{Key, Nic};

use super::client::Client;
use super::log::Capability;
use super::tree::Verbs;
use crate::Error;
use crate::settings::SchemeKind;

/// What becomes of a freed block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Release {
    /// Its old key is dead, and it is cleared, before anybody is given it.
    Quarantined,
    /// It is free at once, under its backup key.
    AtOnce,
}

impl Release {
    /// As the scheme has it.
    pub fn of(scheme: SchemeKind) -> Self {
        match scheme {
            SchemeKind::FineMemPaper => Self::AtOnce,
            _ => Self::Quarantined,
        }
    }

    /// Windows of each block: one for each key that it has at a time.
    pub fn windows(self) -> u32 {
        match self {
            Self::Quarantined => 1,
            Self::AtOnce => 2,
        }
    }
}

impl<N: Nic> Client<N> {
    /// Puts a block into quarantine; false if it is not this compute node's under that key.
    pub(super) async fn give_up(
        &self,
        attempt: &'static str,
        (entry, key): (u32, Key),
    ) -> Result<bool, Error> {
        let at = self.map(attempt)?.0.shape().capability(entry);
        let session = self.session(attempt).await?;
        let (open, given_up) = (Capability::open(key), Capability::quarantined(key));
        let found = session.cas(at, open.to_word(), given_up.to_word()).await?;
        if found != open.to_word() {
            return Ok(false); // somebody else was faster
        }
        self.forget(entry, key);
        Ok(true)
    }

    /// Frees a block at once; false if it is not this compute node's under that key. The key works on until the
    /// memory node has another for its window.
    pub(super) async fn free_at_once(
        &self,
        attempt: &'static str,
        (entry, key): (u32, Key),
    ) -> Result<bool, Error> {
        let (map, user) = self.map(attempt)?;
        let at = map.shape().capability(entry);
        let Some(mut seen) = self.held(entry, key) else { return Ok(false) };
        loop {
            if seen.lacks_backup() {
                // The scan has not come by since it was freed last.
                self.ring(attempt, 0).await?;
            }
            let session = self.session(attempt).await?;
            if seen.lacks_backup() {
                let mut word = [0];
                session.read(at, &mut word).await?;
                seen = Capability::parse(word[0]);
            }
            if seen.main != key {
                return Ok(false);
            }
            if seen.lacks_backup() {
                continue;
            }
            let next = Capability::open(seen.backup);
            let found = session.cas(at, seen.to_word(), next.to_word()).await?;
            if found == seen.to_word() {
                self.forget(entry, key);
                let block = map.shape().block(entry).ok_or(Error::NotYours { entry })?;
                map.give_back(&session, block, user).await?;
                return Ok(true);
            }
            seen = Capability::parse(found);
        }
    }
}

//! Extension of a lease by RPC (Patronus §5.3, the naive approach): the baseline of the CAS.

use std::time::Duration;

use scheme::{Error, Permission};
use verbs::Nic;

use super::super::message::{Ask, Outcome, PermissionNumber};
use super::{Client, note_end, unexpected};

impl<N: Nic> Client<N> {
    /// Extends a lease by a request to the memory node's CPU. Results are those of the CAS.
    pub(super) async fn extend_by_rpc(
        &self,
        permission: &Permission,
        by: Duration,
    ) -> Result<Duration, Error> {
        let op = "extending a permission";
        let _credit = self.credits.take().await;
        // Not at the same time as a renewal, which changes the number.
        let _alone = permission.begin_change().await;
        let (lease, now) = (permission.lease(), self.nic.now());
        if lease.ended || now >= lease.grant.until {
            return Err(Error::Expired { op });
        }
        let lifetime = now.saturating_add(by).saturating_sub(lease.since);
        let lifetime_us = self.lifetime_for(lifetime).min(self.offer.lease_max_us);
        let ask = Ask::Extend { permission: PermissionNumber(lease.number), lifetime_us };
        let outcome = self.ask(op, ask).await?;
        let left = || permission.left(self.nic.now());
        match outcome {
            Outcome::Extended(word) => {
                self.note_lifetime(permission, &lease, word);
                Ok(left())
            }
            Outcome::NotExtendable => Err(Error::NotExtendable { left: left() }),
            Outcome::Expired => {
                note_end(permission, lease.number);
                Err(Error::Expired { op })
            }
            Outcome::NotYours => Err(Error::NotYourPermission { attempt: op }),
            other => Err(unexpected(op, other)),
        }
    }
}

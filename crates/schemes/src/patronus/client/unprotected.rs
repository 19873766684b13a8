//! The compute node's side of scheme `unprotected` (Patronus §7, Unprot): objects without
//! permissions.
//!
//! The memory node's CPU allocates and frees objects. All else is local: each compute node has the
//! key to all memory, and an object's name has its address: `entry` is the offset in the donated
//! memory in units of [`UNIT`], and `generation` is the entry in the memory node's table. So an
//! acquisition of any name costs no verb and is refused by none: also that of a freed object.

use std::sync::OnceLock;
use std::time::Duration;

use scheme::index::EntryId;
use scheme::lease::Lease;
use scheme::options::parse_terms;
use scheme::request_queue::ManagementQp;
use scheme::{
    Answer, ClientScheme, ConnectReply, Error, Grant, GroupId, LeaseScheme, LeaseTerms, Object,
    Others, Permission, too_large,
};
use verbs::{Key, Nic};

use super::{Client, protocol, unexpected};
use crate::patronus::message::{Ask, Granted, Outcome};
use crate::patronus::options::UnprotectedTerms;

/// Unit of the offset in an object's name: every object's offset is a multiple of it.
pub const UNIT: u64 = 16;

/// The client of scheme `unprotected`.
pub struct UnprotectedClient<N: Nic> {
    inner: Client<N>,
    terms: OnceLock<UnprotectedTerms>,
}

impl<N: Nic> UnprotectedClient<N> {
    /// A client whose requests `inner` sends.
    pub fn new(inner: Client<N>) -> Self {
        Self { inner, terms: OnceLock::new() }
    }

    fn region(&self, attempt: &str) -> Result<&UnprotectedTerms, Error> {
        self.terms.get().ok_or_else(|| protocol(attempt, "no key to the memory"))
    }

    /// Address of an object.
    fn address(&self, attempt: &str, object: &Object) -> Result<u64, Error> {
        Ok(self.region(attempt)?.memory_addr + u64::from(object.entry) * UNIT)
    }

    /// A permission for the range of `terms`. Its lease never ends, because no lease is kept.
    fn permission(
        &self,
        attempt: &'static str,
        group: GroupId,
        object: &Object,
        terms: &LeaseTerms,
    ) -> Result<Permission, Error> {
        let range = terms.range.clone().unwrap_or(0..object.len);
        if range.is_empty() || range.end > object.len {
            return Err(Error::NoSuchObject { attempt, entry: object.entry });
        }
        let address = self.address(attempt, object)? + range.start;
        let keys = vec![Key(self.region(attempt)?.memory_key); self.inner.lanes];
        let entry = EntryId::new(object.generation);
        let grant = Grant::new(address, range.end - range.start, entry, group, &keys);
        let lease = Lease {
            grant: grant.leased(terms.right, Grant::FOREVER),
            number: 0,
            slot: 0,
            word: 0,
            header: None,
            since: self.inner.nic.now(),
            ended: false,
        };
        Ok(Permission::new(*object, terms.clone(), lease))
    }

    /// Time left of a permission: all of it, unless this compute node has revoked it.
    fn time_left(&self, op: &'static str, permission: &Permission) -> Result<Duration, Error> {
        match permission.lease().ended {
            true => Err(Error::Expired { op }),
            false => Ok(permission.left(self.inner.nic.now())),
        }
    }

    /// The name of a granted object.
    fn name(&self, attempt: &str, granted: &Granted, len: u64) -> Result<Object, Error> {
        let offset = granted.address.checked_sub(self.region(attempt)?.memory_addr);
        let entry = offset
            .filter(|offset| offset.is_multiple_of(UNIT))
            .and_then(|offset| u32::try_from(offset / UNIT).ok())
            .ok_or_else(|| protocol(attempt, "an object beyond the memory"))?;
        // The pool fills in the incarnation and the memory node.
        Ok(Object { incarnation: 0, entry, generation: granted.object.entry, len, node: 0 })
    }
}

impl<N: Nic> ClientScheme for UnprotectedClient<N> {
    fn allocate(&self, group: GroupId) -> Answer<'_, Grant> {
        self.inner.allocate(group)
    }

    fn allocate_bytes(&self, group: GroupId, bytes: u64) -> Answer<'_, Grant> {
        self.inner.allocate_bytes(group, bytes)
    }

    fn free<'a>(&'a self, grant: &'a Grant) -> Answer<'a, ()> {
        self.inner.free(grant)
    }

    fn leases(&self) -> Option<&dyn LeaseScheme> {
        Some(self)
    }

    fn accept(&self, terms: &ConnectReply) -> Result<(), Error> {
        let _ = self.terms.set(parse_terms(&terms.terms)?);
        Ok(())
    }

    fn is_broken(&self) -> bool {
        self.inner.is_broken()
    }

    fn reset(&self) -> Result<(), Error> {
        self.inner.reset()
    }

    fn settle(&self) -> Answer<'_, ()> {
        self.inner.settle()
    }

    fn each_queue(&self, each: &mut dyn FnMut(&dyn ManagementQp)) {
        self.inner.each_queue(each);
    }
}

impl<N: Nic> LeaseScheme for UnprotectedClient<N> {
    fn allocate_object<'a>(
        &'a self,
        group: GroupId,
        bytes: u64,
        others: Others,
        terms: &'a LeaseTerms,
    ) -> Answer<'a, (Object, Permission)> {
        Box::pin(async move {
            let attempt = "allocating an object";
            let most = self.inner.blocks.bytes_max();
            if bytes > most {
                return Err(too_large(bytes, most, true));
            }
            let _credit = self.inner.credits.take().await;
            let ask = Ask::Allocate { terms: self.inner.ask_terms(group, terms), bytes, others };
            let granted = match self.inner.ask(attempt, ask).await? {
                Outcome::Granted(granted) => granted,
                Outcome::Empty | Outcome::NoBlock => return Err(Error::OutOfMemory { bytes }),
                other => return Err(unexpected(attempt, other)),
            };
            let object = self.name(attempt, &granted, bytes)?;
            let whole = LeaseTerms { range: None, ..terms.clone() };
            let permission = self.permission(attempt, group, &object, &whole)?;
            Ok((object, permission))
        })
    }

    fn acquire<'a>(
        &'a self,
        group: GroupId,
        object: &'a Object,
        terms: &'a LeaseTerms,
    ) -> Answer<'a, Permission> {
        Box::pin(async move { self.permission("acquiring object", group, object, terms) })
    }

    fn extend<'a>(&'a self, permission: &'a Permission, _by: Duration) -> Answer<'a, Duration> {
        Box::pin(async move { self.time_left("extending a permission", permission) })
    }

    fn renew<'a>(&'a self, permission: &'a Permission) -> Answer<'a, Duration> {
        Box::pin(async move { self.time_left("renewing a permission", permission) })
    }

    fn revoke<'a>(&'a self, permission: &'a Permission) -> Answer<'a, ()> {
        permission.update(|lease| {
            lease.ended = true;
            lease.grant.until = Duration::ZERO;
        });
        Box::pin(std::future::ready(Ok(())))
    }

    fn free_object<'a>(&'a self, object: &'a Object) -> Answer<'a, ()> {
        Box::pin(async move {
            let attempt = "freeing object";
            let _credit = self.inner.ending_slot().await;
            let address = self.address(attempt, object)?;
            let ask = Ask::FreeGrant { entry: object.generation, address };
            match self.inner.ask(attempt, ask).await? {
                Outcome::Done => Ok(()),
                Outcome::NotYours => Err(Error::NoSuchObject { attempt, entry: object.entry }),
                other => Err(unexpected(attempt, other)),
            }
        })
    }
}

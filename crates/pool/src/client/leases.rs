//! Objects and permissions of a compute node: requests, and the check of a lease before an access.
//!
//! The compute node believes in a lease until [`Grant::until`], by its own clock. That moment comes
//! before the memory node ends the lease, so that an honest compute node has no access refused by
//! the NIC (Patronus §5.3). From then on nothing is posted any more.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use verbs::executor::block_on;
use verbs::{COARSE_LAG, Nic, Status};

use super::detached::Detached;
use super::{Inner, Pool, PoolStats};
use crate::Error;
use scheme::{
    Answer, CompareAndSwap, Grant, GroupId, LeaseScheme, LeaseTerms, Object, Others, Permission,
};

/// Counters of the requests of a pool that concern permissions.
#[derive(Default)]
pub(super) struct LeaseCounts {
    acquisitions: AtomicU64,
    extensions: AtomicU64,
    renewals: AtomicU64,
    revocations: AtomicU64,
    expiries: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl LeaseCounts {
    /// Fills the fields of `stats` that these counters have.
    pub fn fill(&self, stats: &mut PoolStats) {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        stats.acquisitions = load(&self.acquisitions);
        stats.extensions = load(&self.extensions);
        stats.renewals = load(&self.renewals);
        stats.revocations = load(&self.revocations);
        stats.expiries = load(&self.expiries);
    }
}

/// Objects and permissions, in schemes that have them.
///
/// In other schemes, all of these requests fail with [`Error::Setting`].
impl<N: Nic> Pool<N> {
    /// True if the memory node's scheme has objects, permissions and leases.
    pub fn has_leases(&self) -> bool {
        self.inner.info.leases
    }

    /// True if the memory node's scheme has objects and permissions. Without
    /// [`Pool::has_leases`], permissions are local: they exclude no other one and never end by
    /// themselves.
    pub fn has_objects(&self) -> bool {
        self.inner.scheme.leases().is_some()
    }

    /// Allocates an object of `bytes`, and a permission for the current core's group. The object
    /// reads as zeros.
    ///
    /// If the future is dropped after its first poll, the object is freed as soon as it is
    /// allocated.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::TooMany`].
    pub async fn allocate_object(
        &self,
        bytes: u64,
        others: Others,
        terms: &LeaseTerms,
    ) -> Result<(Object, Permission), Error> {
        self.allocate_object_in(self.current_group(), bytes, others, terms).await
    }

    /// [`Pool::allocate_object`] for the QPs of a given group.
    pub async fn allocate_object_in(
        &self,
        group: GroupId,
        bytes: u64,
        others: Others,
        terms: &LeaseTerms,
    ) -> Result<(Object, Permission), Error> {
        let (inner, undo, terms) = (self.inner.clone(), self.inner.clone(), terms.clone());
        let allocate = async move { inner.allocate_object(group, bytes, others, &terms).await };
        Detached::new::<N::Cq>(allocate, move |result| {
            if let Ok((object, _)) = result {
                // If this fails, the memory node has exited or the connection broke, and the
                // object is reclaimed there.
                let _ = block_on(undo.free_object(&object));
            }
        })
        .await
    }

    /// Acquires a permission for the current core's group. Waits until conflicting permissions
    /// have ended, up to [`LeaseTerms::wait`].
    ///
    /// If the future is dropped after its first poll, the permission is revoked as soon as it is
    /// granted.
    ///
    /// # Errors
    /// [`Error::NoSuchObject`], also for an object of an earlier start of the memory node;
    /// [`Error::Busy`]; [`Error::TooMany`].
    pub async fn acquire(&self, object: &Object, terms: &LeaseTerms) -> Result<Permission, Error> {
        self.acquire_in(self.current_group(), object, terms).await
    }

    /// [`Pool::acquire`] for the QPs of a given group.
    pub async fn acquire_in(
        &self,
        group: GroupId,
        object: &Object,
        terms: &LeaseTerms,
    ) -> Result<Permission, Error> {
        let (inner, undo) = (self.inner.clone(), self.inner.clone());
        let (object, terms) = (*object, terms.clone());
        let acquire = async move { inner.acquire(group, &object, &terms).await };
        Detached::new::<N::Cq>(acquire, move |result| {
            if let Ok(permission) = result {
                // If this fails, the lease ends the permission.
                let _ = block_on(undo.revoke(&permission));
            }
        })
        .await
    }

    /// Extends a lease so that at least `by` is left from now on: one CAS, without the memory
    /// node's CPU. Returns the time left.
    ///
    /// # Errors
    /// [`Error::NotExtendable`] while another compute node waits for the object, the object is
    /// being freed, or the longest lease is reached; [`Error::Expired`].
    pub async fn extend(&self, permission: &Permission, by: Duration) -> Result<Duration, Error> {
        let (inner, permission) = (self.inner.clone(), permission.clone());
        Detached::new::<N::Cq>(async move { inner.extend(&permission, by).await }, drop).await
    }

    /// Begins a new lease under new keys, unless another compute node waits for the object. Returns
    /// the time left. No access by the permission may be in flight.
    ///
    /// # Errors
    /// As [`Pool::extend`].
    pub async fn renew(&self, permission: &Permission) -> Result<Duration, Error> {
        let (inner, permission) = (self.inner.clone(), permission.clone());
        Detached::new::<N::Cq>(async move { inner.renew(&permission).await }, drop).await
    }

    /// Time left of a lease, as this compute node believes. Zero if the permission has ended.
    pub fn left(&self, permission: &Permission) -> Duration {
        permission.left(self.inner.nic.now())
    }

    /// Ends a permission. When this returns, its keys are dead. Also succeeds if the permission had
    /// ended already. If the future is dropped after its first poll, the permission ends
    /// nevertheless.
    pub async fn revoke(&self, permission: &Permission) -> Result<(), Error> {
        let (inner, permission) = (self.inner.clone(), permission.clone());
        Detached::new::<N::Cq>(async move { inner.revoke(&permission).await }, drop).await
    }

    /// Frees an object: ends the permissions of this compute node at once, and waits until those of
    /// others have ended. When this returns, the object is released. If the future is dropped after
    /// its first poll, the object is freed nevertheless.
    ///
    /// # Errors
    /// [`Error::NoSuchObject`].
    pub async fn free_object(&self, object: &Object) -> Result<(), Error> {
        let (inner, object) = (self.inner.clone(), *object);
        Detached::new::<N::Cq>(async move { inner.free_object(&object).await }, drop).await
    }

    /// [`Pool::allocate_object`], blocking.
    pub fn allocate_object_blocking(
        &self,
        bytes: u64,
        others: Others,
        terms: &LeaseTerms,
    ) -> Result<(Object, Permission), Error> {
        self.allocate_object_in_blocking(self.current_group(), bytes, others, terms)
    }

    /// [`Pool::allocate_object_in`], blocking.
    pub fn allocate_object_in_blocking(
        &self,
        group: GroupId,
        bytes: u64,
        others: Others,
        terms: &LeaseTerms,
    ) -> Result<(Object, Permission), Error> {
        block_on(self.inner.allocate_object(group, bytes, others, terms))
    }

    /// [`Pool::acquire`], blocking.
    pub fn acquire_blocking(
        &self,
        object: &Object,
        terms: &LeaseTerms,
    ) -> Result<Permission, Error> {
        self.acquire_in_blocking(self.current_group(), object, terms)
    }

    /// [`Pool::acquire_in`], blocking.
    pub fn acquire_in_blocking(
        &self,
        group: GroupId,
        object: &Object,
        terms: &LeaseTerms,
    ) -> Result<Permission, Error> {
        block_on(self.inner.acquire(group, object, terms))
    }

    /// [`Pool::extend`], blocking.
    pub fn extend_blocking(
        &self,
        permission: &Permission,
        by: Duration,
    ) -> Result<Duration, Error> {
        block_on(self.inner.extend(permission, by))
    }

    /// [`Pool::renew`], blocking.
    pub fn renew_blocking(&self, permission: &Permission) -> Result<Duration, Error> {
        block_on(self.inner.renew(permission))
    }

    /// [`Pool::revoke`], blocking.
    pub fn revoke_blocking(&self, permission: &Permission) -> Result<(), Error> {
        block_on(self.inner.revoke(permission))
    }

    /// [`Pool::free_object`], blocking.
    pub fn free_object_blocking(&self, object: &Object) -> Result<(), Error> {
        block_on(self.inner.free_object(object))
    }
}

impl<N: Nic> CompareAndSwap for Inner<N> {
    fn compare_and_swap<'a>(&'a self, word: &'a Grant, expected: u64, new: u64) -> Answer<'a, u64> {
        Box::pin(self.swap_word(word, 0, expected, new))
    }
}

impl<N: Nic> Inner<N> {
    async fn allocate_object(
        &self,
        group: GroupId,
        bytes: u64,
        others: Others,
        terms: &LeaseTerms,
    ) -> Result<(Object, Permission), Error> {
        let leases = self.leases()?;
        self.check_group(group)?;
        self.reopen_management().await?;
        let result = leases.allocate_object(group, bytes, others, terms).await;
        match &result {
            Ok(_) => {
                count(&self.allocations);
                count(&self.leases.acquisitions);
            }
            Err(Error::OutOfMemory { .. }) => self.note_empty(),
            Err(_) => {}
        }
        let (object, permission) = self.settled(result).await?;
        let incarnation = self.connection.incarnation;
        let object = Object { incarnation, ..object };
        permission.set_object(object);
        self.tie(&permission);
        Ok((object, permission))
    }

    async fn acquire(
        &self,
        group: GroupId,
        object: &Object,
        terms: &LeaseTerms,
    ) -> Result<Permission, Error> {
        let leases = self.leases()?;
        self.check_object(object, "acquiring object")?;
        self.check_group(group)?;
        self.reopen_management().await?;
        let permission = self.settled(leases.acquire(group, object, terms).await).await?;
        permission.set_object(*object);
        self.tie(&permission);
        count(&self.leases.acquisitions);
        Ok(permission)
    }

    async fn extend(&self, permission: &Permission, by: Duration) -> Result<Duration, Error> {
        let leases = self.leases()?;
        self.check_permission(permission, "extend")?;
        self.check_lease(permission.grant().until, "extend")?;
        self.reopen_management().await?;
        let left = self.settled(leases.extend_over(permission, by, self).await).await?;
        count(&self.leases.extensions);
        Ok(left)
    }

    async fn renew(&self, permission: &Permission) -> Result<Duration, Error> {
        let leases = self.leases()?;
        self.check_permission(permission, "renew")?;
        self.check_lease(permission.grant().until, "renew")?;
        self.reopen_management().await?;
        let left = self.settled(leases.renew(permission).await).await?;
        self.tie(permission);
        count(&self.leases.renewals);
        Ok(left)
    }

    async fn revoke(&self, permission: &Permission) -> Result<(), Error> {
        let leases = self.leases()?;
        self.check_permission(permission, "revoke")?;
        self.reopen_management().await?;
        self.settled(leases.revoke(permission).await).await?;
        count(&self.leases.revocations);
        Ok(())
    }

    async fn free_object(&self, object: &Object) -> Result<(), Error> {
        let leases = self.leases()?;
        self.check_object(object, "freeing object")?;
        self.reopen_management().await?;
        self.settled(leases.free_object(object).await).await?;
        count(&self.frees);
        Ok(())
    }

    fn leases(&self) -> Result<&dyn LeaseScheme, Error> {
        self.scheme.leases().ok_or_else(|| Error::Setting {
            setting: "scheme",
            value: self.info.name.into(),
            why: format!(
                "it has no objects and permissions; scheme {} has (granary serve --scheme)",
                schemes::PATRONUS
            ),
        })
    }

    /// Re-establishes the management QPs if the request has failed because they broke. The memory
    /// node takes back a permission whose reply was not delivered, so that the caller may send the
    /// request again.
    async fn settled<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(Error::ManagementBroken { .. } | Error::Verbs(_)) = &result {
            self.recover_request().await?;
        }
        result
    }

    /// Stores the identity of this connection in the permission's grant.
    fn tie(&self, permission: &Permission) {
        permission.update(|lease| lease.grant = lease.grant.with_connection(self.connection));
    }

    /// Fails if an earlier start of the memory node, or another memory node, has allocated the
    /// object.
    fn check_object(&self, object: &Object, attempt: &'static str) -> Result<(), Error> {
        match object.incarnation == self.connection.incarnation {
            true => Ok(()),
            false => Err(Error::NoSuchObject { attempt, entry: object.entry }),
        }
    }

    /// Fails if another connection acquired the permission.
    fn check_permission(&self, permission: &Permission, op: &'static str) -> Result<(), Error> {
        match permission.grant().belongs_to(self.connection) {
            true => Ok(()),
            false => Err(Error::Stale { op, what: "permission" }),
        }
    }

    /// Fails if the lease of a grant has ended. Reads the clock only for a grant with a lease.
    #[inline]
    pub(super) fn check_lease(&self, until: Duration, op: &'static str) -> Result<(), Error> {
        match self.has_expired(until) {
            false => Ok(()),
            true => Err(self.expired(op)),
        }
    }

    /// The error of an access that ended with `status`. After the end of its lease, a dead key is
    /// no surprise.
    pub(super) fn refused(&self, op: &'static str, status: Status, until: Duration) -> Error {
        match status {
            Status::RemoteAccess if self.has_expired(until) => self.expired(op),
            _ => Error::Access { op, status },
        }
    }

    /// A lease that ends much later needs no exact time, whose reading takes as long as the rest
    /// of the checks of an access.
    #[inline]
    fn has_expired(&self, until: Duration) -> bool {
        until != Grant::FOREVER
            && self.nic.now_coarse() + COARSE_LAG >= until
            && self.nic.now() >= until
    }

    #[cold]
    fn expired(&self, op: &'static str) -> Error {
        count(&self.leases.expiries);
        Error::Expired { op }
    }
}

#[cfg(test)]
#[path = "leases_tests.rs"]
mod tests;

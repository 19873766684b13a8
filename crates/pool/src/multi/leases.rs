//! Objects and permissions of several memory nodes.
//!
//! An object says which memory node has it: [`Object::node`] is the index of that memory node at
//! the compute node that allocated the object. A compute node with another list of memory nodes
//! finds the memory node by its incarnation. A permission has the index at its own compute node.

use std::future::Future;
use std::time::Duration;

use verbs::Nic;
use verbs::executor::block_on;

use super::{MultiPool, NodeIndex, PlacedGrant, is_gone};
use crate::{Error, Pool};
use scheme::{LeaseTerms, Object, Others, Permission};

impl<N: Nic> MultiPool<N> {
    /// The current grant of a permission, for accesses.
    pub fn place(&self, permission: &Permission) -> PlacedGrant {
        let node = NodeIndex(permission.object().node as u16);
        PlacedGrant { node, grant: permission.grant() }
    }

    /// Allocates an object, like [`Pool::allocate_object`], on the memory node that the placement
    /// prefers.
    ///
    /// # Errors
    /// As [`MultiPool::allocate_bytes`]; [`Error::TooMany`].
    pub async fn allocate_object(
        &self,
        bytes: u64,
        others: Others,
        terms: &LeaseTerms,
    ) -> Result<(Object, Permission), Error> {
        let mut last = None;
        for index in self.order() {
            match self.node(index).allocate_object(bytes, others, terms).await {
                Ok((object, permission)) => {
                    let object = Object { node: index.0.into(), ..object };
                    permission.set_object(object);
                    return Ok((object, permission));
                }
                Err(e @ Error::TooMany { .. }) => last = last.or(Some(e)),
                Err(e) => self.try_next(index, e, &mut last)?,
            }
        }
        Err(self.none_has(bytes, last))
    }

    /// Acquires a permission, like [`Pool::acquire`].
    pub async fn acquire(&self, object: &Object, terms: &LeaseTerms) -> Result<Permission, Error> {
        let (index, pool) = self.node_of(object, "acquiring object")?;
        let permission = self.report_failure(index, pool.acquire(object, terms)).await?;
        permission.set_object(Object { node: index.0.into(), ..*object });
        Ok(permission)
    }

    /// Extends a lease, like [`Pool::extend`].
    pub async fn extend(&self, permission: &Permission, by: Duration) -> Result<Duration, Error> {
        let (index, pool) = self.node_with(permission, "extend")?;
        self.report_failure(index, pool.extend(permission, by)).await
    }

    /// Begins a new lease, like [`Pool::renew`].
    pub async fn renew(&self, permission: &Permission) -> Result<Duration, Error> {
        let (index, pool) = self.node_with(permission, "renew")?;
        self.report_failure(index, pool.renew(permission)).await
    }

    /// Time left of a lease, like [`Pool::left`]. Zero if the memory node is not one of these.
    pub fn left(&self, permission: &Permission) -> Duration {
        let node = self.node_with(permission, "left");
        node.map_or(Duration::ZERO, |(_, pool)| pool.left(permission))
    }

    /// Ends a permission, like [`Pool::revoke`]. Succeeds if the memory node is gone or was
    /// restarted, because its keys are dead then.
    pub async fn revoke(&self, permission: &Permission) -> Result<(), Error> {
        let (index, pool) = self.node_with(permission, "revoke")?;
        match self.unless_gone(index, pool.revoke(permission)).await {
            Err(Error::Stale { .. }) => Ok(()),
            result => result,
        }
    }

    /// Frees an object, like [`Pool::free_object`]. Succeeds if the memory node is gone, because
    /// its contents are lost.
    pub async fn free_object(&self, object: &Object) -> Result<(), Error> {
        let (index, pool) = self.node_of(object, "freeing object")?;
        self.unless_gone(index, pool.free_object(object)).await
    }

    /// [`MultiPool::allocate_object`], blocking.
    pub fn allocate_object_blocking(
        &self,
        bytes: u64,
        others: Others,
        terms: &LeaseTerms,
    ) -> Result<(Object, Permission), Error> {
        block_on(self.allocate_object(bytes, others, terms))
    }

    /// [`MultiPool::acquire`], blocking.
    pub fn acquire_blocking(
        &self,
        object: &Object,
        terms: &LeaseTerms,
    ) -> Result<Permission, Error> {
        block_on(self.acquire(object, terms))
    }

    /// [`MultiPool::extend`], blocking.
    pub fn extend_blocking(
        &self,
        permission: &Permission,
        by: Duration,
    ) -> Result<Duration, Error> {
        block_on(self.extend(permission, by))
    }

    /// [`MultiPool::renew`], blocking.
    pub fn renew_blocking(&self, permission: &Permission) -> Result<Duration, Error> {
        block_on(self.renew(permission))
    }

    /// [`MultiPool::revoke`], blocking.
    pub fn revoke_blocking(&self, permission: &Permission) -> Result<(), Error> {
        block_on(self.revoke(permission))
    }

    /// [`MultiPool::free_object`], blocking.
    pub fn free_object_blocking(&self, object: &Object) -> Result<(), Error> {
        block_on(self.free_object(object))
    }

    /// The memory node that has an object: the one with its index, or another one with its
    /// incarnation.
    fn node_of(
        &self,
        object: &Object,
        attempt: &'static str,
    ) -> Result<(NodeIndex, Pool<N>), Error> {
        let named = u16::try_from(object.node).ok().filter(|i| usize::from(*i) < self.len());
        let others = 0..self.len() as u16;
        named
            .into_iter()
            .chain(others)
            .map(|index| (NodeIndex(index), self.node(NodeIndex(index))))
            .find(|(_, pool)| pool.welcome().incarnation == object.incarnation)
            .ok_or(Error::NoSuchObject { attempt, entry: object.entry })
    }

    /// The memory node of a permission that this compute node acquired.
    fn node_with(
        &self,
        permission: &Permission,
        op: &'static str,
    ) -> Result<(NodeIndex, Pool<N>), Error> {
        let index = u16::try_from(permission.object().node).ok();
        let index = index.filter(|index| usize::from(*index) < self.len()).map(NodeIndex);
        let index = index.ok_or(Error::Stale { op, what: "permission" })?;
        Ok((index, self.node(index)))
    }

    async fn unless_gone(
        &self,
        index: NodeIndex,
        request: impl Future<Output = Result<(), Error>>,
    ) -> Result<(), Error> {
        match self.report_failure(index, request).await {
            Err(e) if is_gone(&e) => Ok(()),
            result => result,
        }
    }
}

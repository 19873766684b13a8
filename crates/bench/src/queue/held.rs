//! Permissions that are kept as long as they are used.

use std::time::Duration;

use pool::{Error, Grant, GroupId, LeaseTerms, Object, Permission, Pool};
use verbs::{Nic, Status};

/// A lease is extended when less than this part of it is left.
const MARGIN_PART: u32 = 4;

/// Doublings of a lease from the shortest to the longest sensible one.
const DOUBLINGS: u32 = 16;

/// A connection to a memory node, and the terms by which it uses a queue.
pub struct Connection<N: Nic> {
    /// The connection.
    pub pool: Pool<N>,
    /// Group of the QPs that use the queue.
    pub group: GroupId,
    /// Lease of the permissions of segments.
    pub lease: Duration,
    /// True: a producer revokes its permission of a segment that it leaves. False: the lease ends
    /// it.
    pub revokes: bool,
}

impl<N: Nic> Clone for Connection<N> {
    fn clone(&self) -> Self {
        Self { pool: self.pool.clone(), ..*self }
    }
}

impl<N: Nic> Connection<N> {
    /// The time by the clock of the NIC.
    pub fn now(&self) -> Duration {
        self.pool.nic().now()
    }

    /// The word at `offset`.
    pub async fn word(&self, grant: &Grant, offset: u64) -> Result<u64, Error> {
        let mut word = [0; 8];
        self.pool.read(grant, offset, &mut word).await?;
        Ok(u64::from_be_bytes(word))
    }
}

/// True if an access failed because its permission has ended: it had no effect.
///
/// A free by this compute node ends its permissions before their leases. Then the NIC refuses an
/// access.
pub fn has_ended(error: &Error) -> bool {
    matches!(error, Error::Expired { .. } | Error::Access { status: Status::RemoteAccess, .. })
}

/// An object and a permission for it, which is extended, renewed or acquired again when needed.
pub struct Held {
    object: Object,
    terms: LeaseTerms,
    permission: Option<Permission>,
    /// The lease that was given.
    lease: Duration,
}

impl Held {
    /// An object without a permission yet.
    pub fn new(object: Object, terms: LeaseTerms) -> Self {
        Self { object, terms, permission: None, lease: Duration::ZERO }
    }

    /// An object with the permission of its allocation.
    pub fn allocated<N: Nic>(
        connection: &Connection<N>,
        (object, permission): (Object, Permission),
    ) -> Self {
        let (terms, lease) = (permission.terms().clone(), connection.pool.left(&permission));
        Self { object, terms, permission: Some(permission), lease }
    }

    /// The object.
    pub fn object(&self) -> &Object {
        &self.object
    }

    /// Forgets a permission that has ended.
    pub fn forget(&mut self) {
        self.permission = None;
    }

    /// The permission, if there is one.
    pub fn take(&mut self) -> Option<Permission> {
        self.permission.take()
    }

    /// A grant with more than a part of the lease left: extends the lease (one CAS), renews it or
    /// acquires the object again (one RPC) if necessary.
    ///
    /// A lease counts from the request. If it has ended before the reply, the next one is asked for
    /// with twice the length: otherwise a busy memory node would answer in vain again and again.
    ///
    /// # Errors
    /// As [`Pool::acquire`]; [`Error::Expired`] if the lease ended before the reply.
    pub async fn open<N: Nic>(&mut self, connection: &Connection<N>) -> Result<Grant, Error> {
        self.keep(connection).await?;
        if let Some(permission) = &self.permission {
            return Ok(permission.grant());
        }
        let Connection { pool, group, .. } = connection;
        let permission = pool.acquire_in(*group, &self.object, &self.terms).await?;
        self.lease = pool.left(&permission);
        if self.lease.is_zero() {
            self.terms.lease = self.terms.lease.saturating_mul(2);
            return Err(Error::Expired { op: "acquire" });
        }
        let grant = permission.grant();
        self.permission = Some(permission);
        Ok(grant)
    }

    /// [`Held::open`], until a lease is long enough.
    ///
    /// # Errors
    /// As [`Held::open`], after a number of leases.
    pub async fn open_surely<N: Nic>(
        &mut self,
        connection: &Connection<N>,
    ) -> Result<Grant, Error> {
        for _ in 0..DOUBLINGS {
            match self.open(connection).await {
                Err(Error::Expired { .. }) => {}
                opened => return opened,
            }
        }
        self.open(connection).await
    }

    /// Extends or renews the permission if little of the lease is left. Gives the permission up if
    /// this is not possible.
    async fn keep<N: Nic>(&mut self, connection: &Connection<N>) -> Result<(), Error> {
        let pool = &connection.pool;
        let Some(permission) = &self.permission else { return Ok(()) };
        let left = pool.left(permission);
        if left > self.lease / MARGIN_PART {
            return Ok(());
        }
        if !left.is_zero() {
            match pool.extend(permission, self.lease).await {
                Ok(_) => return Ok(()),
                Err(Error::NotExtendable { .. }) => {}
                Err(error) if has_ended(&error) => {}
                Err(error) => return Err(error),
            }
            // The longest lease is reached, unless another compute node waits.
            match pool.renew(permission).await {
                Ok(_) => return Ok(()),
                Err(Error::NotExtendable { .. }) => pool.revoke(permission).await?,
                Err(error) if has_ended(&error) => {}
                Err(error) => return Err(error),
            }
        }
        self.permission = None;
        Ok(())
    }
}

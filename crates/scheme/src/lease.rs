//! Objects and permissions: the part of a scheme in which the right to use memory is separate from
//! the memory (Patronus §5.1).
//!
//! A [`Grant`] joins three things that this module separates:
//!
//! | thing | type | lives until |
//! | --- | --- | --- |
//! | the name of memory | [`Object`] | the object is freed |
//! | the right to use a range of the object | [`Permission`] | its lease ends, or it is revoked |
//! | the compute nodes that may acquire permissions | a *domain* | its last member leaves |
//!
//! An object opens nothing: its name may be sent to any compute node. A compute node of the
//! object's domain acquires a permission of its own, for reading or writing, shared or exclusive,
//! for a limited time (the lease). It extends the lease with one CAS, which the memory node's CPU
//! does not execute, and loses the permission when it dies, hangs, or revokes the permission.
//!
//! No clocks are synchronised. The memory node ends a lease by its own clock. A compute node counts
//! from the moment at which it sent its request, so that its belief ends before the lease does;
//! only the rates of the clocks are assumed to differ by a bounded amount.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use verbs::Remote;

use crate::client::Answer;
use crate::credits::{Credit, Credits};
use crate::grant::Grant;
use crate::ids::GroupId;

/// Name of an object: memory of a memory node that permissions open. Plain data of 32 bytes.
///
/// The name opens nothing. It stays valid until the object is freed; after that, it names nothing,
/// also if the memory is allocated again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Object {
    /// Random number of the start of the memory node that allocated the object.
    pub incarnation: u64,
    /// The object's entry in the memory node's table.
    pub entry: u32,
    /// Number of earlier objects with this entry.
    pub generation: u32,
    /// Length in bytes.
    pub len: u64,
    /// Index of the memory node among those of the compute node that allocated the object; 0 with
    /// a single memory node.
    pub node: u32,
}

impl Object {
    /// Length of [`Object::to_bytes`].
    pub const BYTES: usize = 32;

    /// The name as bytes, big-endian: incarnation, entry, generation, length, node, four zeros.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..8].copy_from_slice(&self.incarnation.to_be_bytes());
        out[8..12].copy_from_slice(&self.entry.to_be_bytes());
        out[12..16].copy_from_slice(&self.generation.to_be_bytes());
        out[16..24].copy_from_slice(&self.len.to_be_bytes());
        out[24..28].copy_from_slice(&self.node.to_be_bytes());
        out
    }

    /// The name in `bytes`; `None` if they are not a name.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let be32 = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let be64 = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        (be32(28) == 0).then(|| Self {
            incarnation: be64(0),
            entry: be32(8),
            generation: be32(12),
            len: be64(16),
            node: be32(24),
        })
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.entry, self.generation)
    }
}

/// The operations that a permission opens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Right {
    /// READ only. Atomics are writes.
    Read,
    /// READ, WRITE and atomics.
    #[default]
    Write,
}

/// The permissions beside which a permission may exist on overlapping ranges.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// Beside other shared ones.
    Shared,
    /// Beside none.
    #[default]
    Exclusive,
}

/// The right to an object of the members of its domain other than its allocator.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Others {
    /// None. The object is freed when its allocator leaves.
    #[default]
    None,
    /// To acquire permissions for reading. The object lives until it is freed or the last member of
    /// the domain has left; so it does with the following values.
    Read,
    /// To acquire any permission.
    Write,
    /// To acquire any permission and to free the object.
    Own,
}

/// Terms of a permission that a compute node asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseTerms {
    /// The operations.
    pub right: Right,
    /// Permissions beside this one.
    pub sharing: Sharing,
    /// Length of the lease. The memory node brings it within its bounds.
    pub lease: Duration,
    /// Longest time to wait for conflicting permissions to end; `None`: the longest lease of the
    /// memory node.
    pub wait: Option<Duration>,
    /// Bytes of the object; `None`: all.
    pub range: Option<Range<u64>>,
}

impl LeaseTerms {
    /// An exclusive permission for writing.
    pub fn exclusive(lease: Duration) -> Self {
        Self { right: Right::Write, sharing: Sharing::Exclusive, lease, wait: None, range: None }
    }

    /// A shared permission for reading.
    pub fn shared_read(lease: Duration) -> Self {
        Self { right: Right::Read, sharing: Sharing::Shared, ..Self::exclusive(lease) }
    }

    /// A shared permission for writing, for data structures that synchronise with atomics.
    pub fn shared_write(lease: Duration) -> Self {
        Self { sharing: Sharing::Shared, ..Self::exclusive(lease) }
    }

    /// These terms for a part of the object.
    pub fn range(self, range: Range<u64>) -> Self {
        Self { range: Some(range), ..self }
    }

    /// These terms with another limit of the time to wait.
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait: Some(wait), ..self }
    }
}

/// The right of one compute node to use a range of an object, for the time of a lease.
///
/// Clones share one permission. Dropping the last one revokes nothing: the lease ends the
/// permission. [`Permission::grant`] opens the range.
#[derive(Clone)]
pub struct Permission(Arc<Shared>);

struct Shared {
    terms: LeaseTerms,
    state: Mutex<State>,
    /// Taken by a request that changes the permission's number or ends it.
    change: Credits,
}

struct State {
    object: Object,
    lease: Lease,
}

/// State of a permission at the compute node, which the client of the scheme maintains.
#[derive(Clone, Copy, Debug)]
pub struct Lease {
    /// Opens the range until [`Grant::until`].
    pub grant: Grant,
    /// Number by which requests name the permission.
    pub number: u64,
    /// Slot of its lifetime word in the compute node's table.
    pub slot: u32,
    /// The lifetime word as this compute node knows it.
    pub word: u64,
    /// Address and key of the lifetime word, in a scheme that opens each word by a key of its own.
    pub header: Option<Remote>,
    /// Moment before which the lease cannot have begun, by the compute node's clock.
    pub since: Duration,
    /// The permission was revoked, or the memory node has ended it.
    pub ended: bool,
}

impl Permission {
    /// A permission with this state.
    pub fn new(object: Object, terms: LeaseTerms, lease: Lease) -> Self {
        let (state, change) = (Mutex::new(State { object, lease }), Credits::new(1));
        Self(Arc::new(Shared { terms, state, change }))
    }

    /// The object.
    pub fn object(&self) -> Object {
        self.0.state.lock().object
    }

    /// Sets the object's name. A scheme knows only the entry, the generation and the length; the
    /// pool adds the memory node.
    pub fn set_object(&self, object: Object) {
        self.0.state.lock().object = object;
    }

    /// The terms that were asked for. The lease given may differ: [`Permission::left`].
    pub fn terms(&self) -> &LeaseTerms {
        &self.0.terms
    }

    /// The grant of the range, as of now. Its addresses begin with the range. An extension does not
    /// change a grant that was taken before. The grant of an ended permission has expired.
    #[inline]
    pub fn grant(&self) -> Grant {
        let state = self.0.state.lock();
        let mut grant = state.lease.grant;
        if state.lease.ended {
            grant.until = Duration::ZERO;
        }
        grant
    }

    /// Time left at `now`, by the clock of the compute node's NIC.
    pub fn left(&self, now: Duration) -> Duration {
        self.grant().until.saturating_sub(now)
    }

    /// The state.
    pub fn lease(&self) -> Lease {
        self.0.state.lock().lease
    }

    /// Waits until no other renewal or revocation of the permission is in flight. A client of a
    /// scheme holds the result during its own: otherwise a revocation that overtakes a renewal
    /// would end the old number, and the new one would stay open.
    pub async fn begin_change(&self) -> Credit<'_> {
        self.0.change.take().await
    }

    /// Changes the state.
    pub fn update<T>(&self, change: impl FnOnce(&mut Lease) -> T) -> T {
        change(&mut self.0.state.lock().lease)
    }
}

impl fmt::Debug for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permission")
            .field("object", &self.object())
            .field("terms", &self.0.terms)
            .field("lease", &self.lease())
            .finish()
    }
}

/// The right to memory: a [`Grant`], or a [`Permission`], which has a grant for the time of its
/// lease.
pub trait Opens: Send + Sync {
    /// The grant, borrowed or copied.
    type Current<'a>: Borrow<Grant> + Send + Sync
    where
        Self: 'a;

    /// The grant to use now.
    fn current(&self) -> Self::Current<'_>;
}

impl Opens for Grant {
    type Current<'a> = &'a Grant;

    #[inline]
    fn current(&self) -> &Grant {
        self
    }
}

impl Opens for Permission {
    type Current<'a> = Grant;

    #[inline]
    fn current(&self) -> Grant {
        self.grant()
    }
}

impl<T: Opens + ?Sized> Opens for &T {
    type Current<'a>
        = T::Current<'a>
    where
        Self: 'a;

    #[inline]
    fn current(&self) -> Self::Current<'_> {
        T::current(self)
    }
}

#[cfg(doc)]
use crate::Error;

/// CAS on the access QPs of a compute node.
pub trait CompareAndSwap: Send + Sync {
    /// Stores `new` in the 8 bytes that `word` opens if they hold `expected`. Returns their
    /// previous value. The word is big-endian in memory.
    ///
    /// # Errors
    /// [`Error::Access`] if the memory node's NIC refuses the key.
    fn compare_and_swap<'a>(&'a self, word: &'a Grant, expected: u64, new: u64) -> Answer<'a, u64>;
}

/// Operations on objects and permissions: a scheme with leases has them beside
/// [`ClientScheme`](crate::ClientScheme).
///
/// In a scheme whose [`SchemeInfo::leases`](crate::SchemeInfo::leases) is false, permissions are
/// local to the compute node: they exclude no other permission, never end by themselves, and an
/// acquisition sends no request. So programs for both kinds make the same calls.
pub trait LeaseScheme: Send + Sync {
    /// Allocates an object of `bytes`, and a permission for the QPs of `group`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::TooMany`].
    fn allocate_object<'a>(
        &'a self,
        group: GroupId,
        bytes: u64,
        others: Others,
        terms: &'a LeaseTerms,
    ) -> Answer<'a, (Object, Permission)>;

    /// Acquires a permission for the QPs of `group`: one RPC.
    ///
    /// # Errors
    /// [`Error::NoSuchObject`] for an object that does not exist or that this compute node may not
    /// acquire so; [`Error::Busy`] if conflicting permissions did not end in time;
    /// [`Error::TooMany`].
    fn acquire<'a>(
        &'a self,
        group: GroupId,
        object: &'a Object,
        terms: &'a LeaseTerms,
    ) -> Answer<'a, Permission>;

    /// Extends a lease so that at least `by` is left from now on: one CAS. Returns the time left.
    ///
    /// # Errors
    /// [`Error::NotExtendable`] while another compute node waits for the object, the object is
    /// being freed, or the longest lease is reached; [`Error::Expired`].
    fn extend<'a>(&'a self, permission: &'a Permission, by: Duration) -> Answer<'a, Duration>;

    /// As [`LeaseScheme::extend`], for a caller that has access QPs. A scheme whose lifetime words
    /// are opened to access QPs ([`Lease::header`]) executes its CAS on `qps`.
    ///
    /// # Errors
    /// As for [`LeaseScheme::extend`].
    fn extend_over<'a>(
        &'a self,
        permission: &'a Permission,
        by: Duration,
        _qps: &'a dyn CompareAndSwap,
    ) -> Answer<'a, Duration> {
        self.extend(permission, by)
    }

    /// Begins a new lease under new keys, unless another compute node waits: one RPC. Returns the
    /// time left. No access by the permission may be in flight.
    ///
    /// # Errors
    /// As for [`LeaseScheme::extend`].
    fn renew<'a>(&'a self, permission: &'a Permission) -> Answer<'a, Duration>;

    /// Ends a permission. When this returns, its keys are dead. Also succeeds if the permission had
    /// ended already.
    fn revoke<'a>(&'a self, permission: &'a Permission) -> Answer<'a, ()>;

    /// Frees an object: ends the permissions of this compute node at once, and waits until those of
    /// others have ended. When this returns, the object is released.
    ///
    /// # Errors
    /// [`Error::NoSuchObject`].
    fn free_object<'a>(&'a self, object: &'a Object) -> Answer<'a, ()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_names_are_read_back() {
        let object =
            Object { incarnation: 1 << 60, entry: 2, generation: 3, len: 4 << 40, node: 5 };
        let mut bytes = object.to_bytes();
        assert_eq!(Object::from_bytes(&bytes), Some(object));
        bytes[31] = 1;
        assert_eq!(Object::from_bytes(&bytes), None);
    }

    #[test]
    fn grant_of_an_ended_permission_has_expired() {
        let until = Duration::from_secs(9);
        let grant = Grant::new(4096, 64, 1.into(), GroupId(0), &[]).leased(Right::Read, until);
        let since = Duration::ZERO;
        let lease = Lease { grant, number: 1, slot: 0, word: 0, header: None, since, ended: false };
        let object = Object { incarnation: 0, entry: 1, generation: 0, len: 64, node: 0 };
        let permission = Permission::new(object, LeaseTerms::shared_read(until), lease);
        let clone = permission.clone();
        assert_eq!(clone.left(Duration::from_secs(2)), Duration::from_secs(7));
        assert_eq!(permission.current(), grant);
        permission.update(|lease| lease.ended = true);
        permission.set_object(Object { node: 3, ..object });
        assert_eq!(clone.left(Duration::ZERO), Duration::ZERO);
        assert_eq!((clone.current().until, clone.object().node), (Duration::ZERO, 3));
    }
}

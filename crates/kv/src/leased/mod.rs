//! An index in objects of a scheme with leases: each access needs a permission (Patronus §6.1).
//!
//! [`LeasedMemory`] is the way of one compute node to the memory of a [`SharedStore`]. Each part of
//! the index is an object, and some blocks of values are one object together. Nothing opens an
//! object but a permission, which this compute node acquires and loses by itself:
//!
//! | memory | permission |
//! | --- | --- |
//! | a part of the index: subtable, directory, root | shared, for reading and writing. Kept, and extended while in use. The header of 64 B has a permission of its own |
//! | the header of a subtable, during a split | exclusive ([`SplitLock::Exclusive`](crate::SplitLock::Exclusive)) |
//! | a block of a value that is read | shared, for reading this block |
//! | a block that is written | that of its allocation |
//!
//! An access whose permission has ended, or that the NIC refuses, is repeated under a new
//! permission. The steps that took effect before are not repeated.
//!
//! | file | content |
//! | --- | --- |
//! | `names.rs` | places and names of objects |
//! | `held.rs` | the permissions that a compute node has |
//! | `permits.rs` | acquisition, extension |
//! | `blocks.rs` | allocation of blocks in objects, frees |
//! | `mod.rs` | creation, joining, accesses |

mod blocks;
mod held;
mod names;
mod permits;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pool::{GroupId, Lane, LeaseTerms, Object, Others, Permission, Pool};
use smallvec::SmallVec;
use verbs::{Nic, Status};

use self::blocks::Free;
use self::held::Holdings;
use self::names::{ANCHOR_BYTES, Kind, Layout, ROOT, Short, Spot};
use crate::blocks::NoBlock;
use crate::environment::Environment;
use crate::error::Error;
use crate::place::{Address, Place};
use crate::pooled::lists::{LIST, LIST_BYTES, join, stopped, to_pool};
use crate::reach::{Range, Reach, Step, Stopped};
use crate::shared::{SharedSettings, SharedStore};

/// Largest slab: a WRITE of a whole object is one step of a list.
const SLAB_MAX: u32 = 64 << 10;
/// Attempts of one access, of which each ends because a lease has ended, or because an object has
/// another generation than the table of names said.
///
/// The generation of an object changes after a free and a new allocation only, of which each takes
/// longer than an attempt.
const TRIES: usize = 64;
/// Largest number of doublings of a lease. The memory node limits leases, too.
const DOUBLINGS: usize = 10;
/// Lists in flight at once.
const LISTS: usize = 3;

/// Number of blocks of values that are allocated together, as one object (Patronus §7.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Together(pub u8);

/// The end of a permission for a block of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its lease ends it, which costs no request. Until then, accesses to the block use it again.
    Expire,
    /// It is revoked after the round trip that needed it; that of an allocation, after the next
    /// allocation.
    Revoke,
}

/// Settings of a [`LeasedMemory`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeasedSettings {
    /// Bytes of the largest object of index and values: a power of two, at most 64 KiB. For the
    /// first compute node only.
    pub slab: u32,
    /// Number of objects that the memory node may have. For the first compute node only.
    pub objects: u32,
    /// Number of blocks of values that are allocated together. For the first compute node only.
    pub together: Together,
    /// Unit of the entries of objects: a power of two. 1, except in scheme `unprotected`, in which
    /// entries are addresses in units of 16 bytes. There, each object takes at least 16 bytes for
    /// each unit. For the first compute node only.
    pub entry_unit: u32,
    /// Lease of each permission but those of splits. An access whose lease ended before its use is
    /// repeated with twice the lease.
    pub lease: Duration,
    /// Lease of the exclusive permission of a split. A split takes a round trip for some slots, and
    /// an acquisition for each block. If the lease ends earlier, another client splits, too.
    pub split_lease: Duration,
    /// The end of permissions for blocks of values.
    pub end: End,
}

impl Default for LeasedSettings {
    fn default() -> Self {
        Self {
            slab: 16 << 10,
            objects: 1 << 16,
            together: Together(4),
            entry_unit: 1,
            lease: Duration::from_millis(10),
            split_lease: Duration::from_millis(100),
            end: End::Expire,
        }
    }
}

impl LeasedSettings {
    /// The lease of an access, after `ended` attempts of it whose leases ended before their use.
    ///
    /// It doubles, up to a bound: while the memory node is loaded, an acquisition may take longer
    /// than the lease, and the same lease would end before its use again.
    fn lease_after(&self, ended: usize) -> Duration {
        self.lease.saturating_mul(1 << ended.min(DOUBLINGS))
    }
}

/// The memory of an index in objects of a scheme with leases, as one compute node reaches it.
/// Clones share the permissions.
///
/// All accesses use the QPs of one group. Several threads should have a memory each
/// ([`LeasedMemory::with_group`]): an access that the NIC refuses breaks the QP, and a CAS of
/// another thread on this QP would end with [`Stopped::Lost`].
pub struct LeasedMemory<N: Nic = pool::DefaultNic> {
    shared: Arc<Shared<N>>,
}

struct Shared<N: Nic> {
    pool: Pool<N>,
    group: GroupId,
    settings: LeasedSettings,
    anchor: Object,
    layout: Layout,
    held: Mutex<Holdings>,
    /// Upper bits of the generations of entries. Those of other entries are assumed to be 0.
    upper: Mutex<HashMap<u32, u32>>,
    free: Mutex<Free>,
}

impl<N: Nic> Clone for LeasedMemory<N> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

/// A store whose memory is a [`LeasedMemory`].
pub type LeasedStore<N, E> = SharedStore<LeasedMemory<N>, LeasedMemory<N>, E>;

/// The error for a pool without objects.
const NO_LEASES: Error =
    Error::Setting("the pool's scheme has no objects and permissions; use scheme patronus");

impl<N: Nic> LeasedMemory<N> {
    /// The memory of a new index. `node` is the number of the memory node in places, at most 63.
    /// Other compute nodes join by [`LeasedMemory::anchor`].
    ///
    /// The pool must be connected with a domain: objects of an index belong to the domain, and live
    /// until its last member has left.
    ///
    /// # Errors
    /// [`Error::Setting`] for a scheme without leases and for impossible settings, and
    /// [`NoBlock::Full`] if the pool has no memory.
    pub async fn create(
        pool: Pool<N>,
        node: u8,
        group: GroupId,
        settings: LeasedSettings,
    ) -> Result<Self, Error> {
        if !pool.has_objects() {
            return Err(NO_LEASES);
        }
        let is_possible = settings.slab <= SLAB_MAX
            && settings.together.0 > 0
            && settings.entry_unit.is_power_of_two()
            && settings.entry_unit <= 1 << 16;
        if !is_possible {
            return Err(Error::Setting(
                "a slab has at most 64 KiB and at least one block, and the unit of entries is a \
                 power of two up to 65536",
            ));
        }
        let words = Layout::table_words(settings.slab, settings.objects)?;
        let terms = LeaseTerms::shared_write(settings.lease);
        let allocate = async |bytes| {
            let allocated = pool.allocate_object_in(group, bytes, Others::Own, &terms).await;
            allocated.map(|(object, _)| object).map_err(no_object)
        };
        let table = allocate(8 * words).await?;
        let anchor = allocate(ANCHOR_BYTES as u64).await?;
        let layout = Layout::new(node, &settings, words, table);
        let bytes = layout.encode();
        let memory = Self::of(pool, group, settings, anchor, layout);
        memory.at_anchor(async |pool, permission| pool.write(permission, 0, &bytes).await).await?;
        Ok(memory)
    }

    /// The memory of an index that another compute node has created.
    ///
    /// # Errors
    /// [`Error::Setting`] for a scheme without leases, [`Stopped::Refused`] for an anchor of
    /// another domain or of an earlier start of the memory node.
    pub async fn join(
        pool: Pool<N>,
        group: GroupId,
        settings: LeasedSettings,
        anchor: Object,
    ) -> Result<Self, Error> {
        if !pool.has_objects() {
            return Err(NO_LEASES);
        }
        let mut bytes = [0; ANCHOR_BYTES];
        let mut result = Err(expired());
        for ended in 0..TRIES {
            let terms = LeaseTerms::shared_read(settings.lease_after(ended));
            let permission = pool.acquire_in(group, &anchor, &terms).await.map_err(stopped)?;
            result = pool.read(&permission, 0, &mut bytes).await;
            if !result.as_ref().is_err_and(has_ended) {
                break;
            }
        }
        result.map_err(stopped)?;
        let malformed = Error::malformed(Address { node: 0, offset: 0 });
        let layout = Layout::parse(&bytes).map_err(malformed)?;
        Ok(Self::of(pool, group, settings, anchor, layout))
    }

    fn of(
        pool: Pool<N>,
        group: GroupId,
        settings: LeasedSettings,
        anchor: Object,
        layout: Layout,
    ) -> Self {
        let (held, upper, free) = (Mutex::default(), Mutex::default(), Mutex::default());
        let shared = Shared { pool, group, settings, anchor, layout, held, upper, free };
        Self { shared: Arc::new(shared) }
    }

    /// The same memory for another thread, with permissions of its own for the QPs of `group`.
    pub fn with_group(&self, group: GroupId) -> Self {
        let Shared { pool, settings, anchor, layout, .. } = &*self.shared;
        Self::of(pool.clone(), group, settings.clone(), *anchor, *layout)
    }

    /// Name of the object by which other compute nodes join.
    pub fn anchor(&self) -> Object {
        self.shared.anchor
    }

    /// The pool.
    pub fn pool(&self) -> &Pool<N> {
        &self.shared.pool
    }

    /// Place of the index's root. `None`: no client has created an index yet.
    pub async fn root(&self) -> Result<Option<Place>, Error> {
        let read = async |pool: &Pool<N>, permission: &Permission| {
            let mut bytes = [0; 8];
            pool.read(permission, ROOT, &mut bytes).await.map(|()| bytes)
        };
        let place = Place::of(u64::from_be_bytes(self.at_anchor(read).await?));
        Ok((!place.is_none()).then_some(place))
    }

    /// Notes the place of the index's root, unless there is one. Returns the root that counts.
    pub async fn set_root(&self, root: Place) -> Result<Place, Error> {
        let swap = async |pool: &Pool<N>, permission: &Permission| {
            pool.compare_and_swap(permission, ROOT, 0, root.bits()).await
        };
        let old = self.at_anchor(swap).await?;
        Ok(if old == 0 { root } else { Place::of(old) })
    }

    /// Executes one access to the anchor.
    async fn at_anchor<T>(
        &self,
        access: impl AsyncFn(&Pool<N>, &Permission) -> Result<T, pool::Error>,
    ) -> Result<T, Error> {
        let Shared { pool, group, anchor, settings, .. } = &*self.shared;
        let mut result = Err(expired());
        for ended in 0..TRIES {
            let terms = LeaseTerms::shared_write(settings.lease_after(ended));
            let permission = pool.acquire_in(*group, anchor, &terms).await.map_err(stopped)?;
            result = access(pool, &permission).await;
            if !result.as_ref().is_err_and(has_ended) {
                // The anchor is rarely used, so its permission would not be used again. If the
                // revocation fails, the lease ends the permission.
                let _ = pool.revoke(&permission).await;
                break;
            }
        }
        Ok(result.map_err(stopped)?)
    }

    /// Executes steps of one list.
    async fn run_list(&self, steps: &mut [Step<'_>]) -> Result<(), Stopped> {
        let (mut done, mut ended) = (0, 0);
        for _ in 0..TRIES {
            let lease = self.shared.settings.lease_after(ended);
            let rights = self.permits(&steps[done..], lease).await?;
            let result = {
                let rest = steps[done..].iter_mut().zip(&rights);
                let mut list: SmallVec<[pool::Step<'_, N>; LIST]> =
                    rest.map(|(step, right)| to_pool(step, &right.grant, right.offset)).collect();
                self.shared.pool.run(Lane(0), &mut list).await
            };
            match result {
                Ok(()) => return Ok(()),
                // Nothing was posted.
                Err(pool::Error::Expired { .. }) => ended += 1,
                Err(pool::Error::List { done: more, status: Status::RemoteAccess, .. }) => {
                    done += more;
                    // The failed step and those behind it had no effect.
                    let right = &rights[more];
                    self.shared.held.lock().forget(right.name, &right.permission);
                    // Without leases, a permission is local. Only the access finds out that the
                    // object was freed, or that its generation has other upper bits.
                    let Spot { name, kind, .. } = self.shared.layout.spot(steps[done].at());
                    if !self.shared.pool.has_leases()
                        && (kind == Kind::Table || !self.learn(name.entry).await?)
                    {
                        return Err(Stopped::Freed(format!("object {} was freed", name.entry)));
                    }
                }
                // Another access has broken the QP.
                Err(pool::Error::List { done: more, status: Status::Flushed, .. })
                    if !steps[done + more..].iter().any(Step::is_atomic) =>
                {
                    done += more;
                }
                Err(error) => return Err(stopped(error)),
            }
        }
        Err(Stopped::Lost(expired().to_string()))
    }
}

impl<N: Nic> Reach for LeasedMemory<N> {
    type Right = Option<Open>;

    /// Acquires the exclusive permissions of splits, and those that are revoked after one round
    /// trip. [`Reach::run`] acquires all others.
    async fn open(&self, range: Range) -> Result<Self::Right, Stopped> {
        if range.exclusive {
            return self.exclusive(&range).await.map(Some);
        }
        match self.shared.settings.end {
            End::Revoke => self.once(&range).await,
            End::Expire => Ok(None),
        }
    }

    async fn close(&self, right: Self::Right) {
        if let Some(Open { name, permission }) = right {
            self.shared.held.lock().forget(name, &permission);
            // If this fails, the lease ends the permission.
            let _ = self.shared.pool.revoke(&permission).await;
        }
    }

    async fn run(&self, steps: &mut [Step<'_>]) -> Result<(), Stopped> {
        if let [_] = steps {
            return self.run_list(steps).await;
        }
        // Lists at the same time have no order: one may be repeated.
        let is_reading = steps.iter().all(|step| matches!(step, Step::Read { .. }));
        let at_once = if is_reading { LISTS } else { 1 };
        let mut lists = lists(steps);
        for lists in lists.chunks_mut(at_once) {
            match lists {
                [list] => self.run_list(list).await?,
                lists => join(lists.iter_mut().map(|list| self.run_list(list))).await?,
            }
        }
        Ok(())
    }

    fn ordered(&self, a: Address, b: Address) -> bool {
        a.node == b.node
    }
}

/// A permission of a [`LeasedMemory`] that [`Reach::close`] revokes.
#[derive(Debug)]
pub struct Open {
    name: Short,
    permission: Permission,
}

/// Divides steps into lists for [`Pool::run`].
fn lists<'s, 'a>(mut steps: &'s mut [Step<'a>]) -> SmallVec<[&'s mut [Step<'a>]; 1]> {
    let mut lists = SmallVec::new();
    while !steps.is_empty() {
        let mut bytes = 0;
        let fits = |step: &&Step<'_>| {
            bytes += step.bytes();
            bytes <= LIST_BYTES
        };
        let count = steps.iter().take(LIST).take_while(fits).count().max(1);
        let (list, rest) = steps.split_at_mut(count);
        lists.push(list);
        steps = rest;
    }
    lists
}

/// True for the error of an access whose lease has ended.
fn has_ended(error: &pool::Error) -> bool {
    matches!(
        error,
        pool::Error::Expired { .. } | pool::Error::Access { status: Status::RemoteAccess, .. }
    )
}

fn expired() -> pool::Error {
    pool::Error::Expired { op: "accessing an index: each lease ended before its use" }
}

/// The error of an access whose object had another generation in each attempt.
fn renamed(name: Short) -> Stopped {
    Stopped::Renamed { entry: name.entry, attempts: TRIES }
}

/// The error of an allocation of an object.
fn no_object(error: pool::Error) -> Error {
    match error {
        pool::Error::OutOfMemory { .. } | pool::Error::TooMany { .. } => NoBlock::Full.into(),
        error => Error::Stopped(stopped(error)),
    }
}

impl<N: Nic, E: Environment> LeasedStore<N, E> {
    /// Opens the index in `memory`, and creates an empty one if there is none.
    ///
    /// Each client of the index joins, whichever comes first.
    pub async fn join_leased(
        memory: LeasedMemory<N>,
        environment: impl Fn() -> E,
        settings: SharedSettings,
    ) -> Result<Self, Error> {
        let open = async |root| {
            let (reach, blocks) = (memory.clone(), memory.clone());
            Self::open(reach, blocks, environment(), settings.clone(), root).await
        };
        if let Some(root) = memory.root().await? {
            return open(root).await;
        }
        let (reach, blocks) = (memory.clone(), memory.clone());
        let created = Self::create(reach, blocks, environment(), settings.clone()).await?;
        let root = memory.set_root(created.root()).await?;
        if root == created.root() {
            return Ok(created);
        }
        // Another client was faster, and no client knows this index.
        created.discard();
        open(root).await
    }
}

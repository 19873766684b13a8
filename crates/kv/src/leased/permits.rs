//! Acquisition and extension of permissions.

use std::ops;
use std::time::Duration;

use pool::join::join;
use pool::{Grant, LeaseTerms, Permission, Right, Sharing};
use smallvec::SmallVec;
use verbs::Nic;

use super::names::{Kind, Short, Spot};
use super::{LeasedMemory, Open, TRIES, renamed};
use crate::pooled::lists::{LIST, stopped};
use crate::reach::{Range, Step, Stopped, range_of};

/// Bytes of the header of a part of the index, which has a permission of its own: a split holds
/// the header of a subtable alone, while the buckets serve readers.
const HEADER_BYTES: u64 = crate::layout::table::HEADER_BYTES as u64;
/// Acquisitions in flight at once.
const WIDTH: usize = 8;
/// A permission with less than this part of its lease left is not used any more: the access would
/// come too late, and break the QP.
const MARGIN: u32 = 8;

/// The right to a step of a list.
pub(super) struct StepRight {
    pub name: Short,
    pub permission: Permission,
    pub grant: Grant,
    /// Offset of the step in the grant.
    pub offset: u64,
}

/// A right that a step needs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Wanted {
    name: Short,
    kind: Kind,
    range: ops::Range<u64>,
    right: Right,
}

impl Wanted {
    /// True if this right is enough for `other`, too.
    fn covers(&self, other: &Self) -> bool {
        self.name == other.name
            && self.range.start <= other.range.start
            && other.range.end <= self.range.end
            && other.right <= self.right
    }
}

impl<N: Nic> LeasedMemory<N> {
    /// The right that a range needs.
    fn wanted(&self, range: &Range) -> Wanted {
        let layout = &self.shared.layout;
        let Spot { name, kind, offset } = layout.spot(range.start);
        let (start, end) = (offset, offset + u64::from(range.bytes));
        let (range, right) = match kind {
            Kind::Values if range.writes => (start..end, Right::Write),
            Kind::Values => (start..end, Right::Read),
            Kind::Table => (0..layout.bytes(kind), Right::Write),
            Kind::Index(_) => {
                let bytes = layout.bytes(kind);
                let header = HEADER_BYTES.min(bytes);
                match () {
                    () if end <= header => (0..header, Right::Write),
                    () if start >= header => (header..bytes, Right::Write),
                    () => (0..bytes, Right::Write),
                }
            }
        };
        Wanted { name, kind, range, right }
    }

    /// The rights of steps of one list, some of which may just have ended. `lease` is that of new
    /// permissions and of extensions.
    pub(super) async fn permits(
        &self,
        steps: &[Step<'_>],
        lease: Duration,
    ) -> Result<SmallVec<[StepRight; LIST]>, Stopped> {
        let wanted = steps.iter().map(|step| self.wanted(&range_of(step)));
        let wanted: SmallVec<[Wanted; LIST]> = wanted.collect();
        let mut missing: SmallVec<[&Wanted; LIST]> = SmallVec::new();
        for one in wanted.iter().filter(|one| self.ready(one).is_none()) {
            if !missing.iter().any(|other| other.covers(one)) {
                missing.push(one);
            }
        }
        if missing.len() > 1 {
            let acquired =
                join(missing.into_iter().map(|one| self.permit(one, lease)), WIDTH).await;
            acquired.into_iter().try_for_each(|one| one.map(drop))?;
        }
        let mut rights = SmallVec::new();
        for (one, step) in wanted.iter().zip(steps) {
            let (permission, start) = match self.ready(one) {
                Some(ready) => ready,
                None => self.permit(one, lease).await?,
            };
            let offset = self.shared.layout.spot(step.at()).offset - start;
            let (name, grant) = (one.name, permission.grant());
            rights.push(StepRight { name, permission, grant, offset });
        }
        Ok(rights)
    }

    /// The margin of a permission's time.
    fn margin(&self) -> Duration {
        self.shared.settings.lease / MARGIN
    }

    /// A permission that needs no request before its use, and the offset of its first byte.
    fn ready(&self, wanted: &Wanted) -> Option<(Permission, u64)> {
        let found = self.shared.held.lock().find(wanted.name, &wanted.range, wanted.right)?;
        let needed = match wanted.kind {
            Kind::Values => self.margin(),
            // Extended early, so that an extension that fails leaves time for the access.
            _ => self.shared.settings.lease / 2,
        };
        (self.shared.pool.left(&found.0) >= needed).then_some(found)
    }

    /// A permission for `wanted`: one that is there, also by an extension, or a new one.
    async fn permit(&self, wanted: &Wanted, lease: Duration) -> Result<(Permission, u64), Stopped> {
        if let Some(ready) = self.ready(wanted) {
            return Ok(ready);
        }
        let Wanted { name, kind, range, right } = wanted.clone();
        let found = self.shared.held.lock().find(name, &range, right);
        if let Some((permission, start)) = found {
            if kind != Kind::Values && self.extend(&permission, lease).await? {
                return Ok((permission, start));
            }
            self.shared.held.lock().forget(name, &permission);
        }
        let terms = LeaseTerms {
            right,
            sharing: Sharing::Shared,
            lease,
            wait: None,
            range: Some(range.clone()),
        };
        for _ in 0..TRIES {
            match self.acquire(name, kind, &terms).await {
                Err(Stopped::Busy) => {}
                acquired => return Ok((acquired?, range.start)),
            }
        }
        Err(Stopped::Busy)
    }

    /// Extends a lease. Returns false if the permission is of no use any more.
    async fn extend(&self, permission: &Permission, lease: Duration) -> Result<bool, Stopped> {
        match self.shared.pool.extend(permission, lease).await {
            Ok(_) => Ok(true),
            Err(pool::Error::NotExtendable { left }) => Ok(left >= self.margin()),
            Err(pool::Error::Expired { .. }) => Ok(false),
            Err(error) => Err(stopped(error)),
        }
    }

    /// Acquires a permission, and keeps it.
    async fn acquire(
        &self,
        name: Short,
        kind: Kind,
        terms: &LeaseTerms,
    ) -> Result<Permission, Stopped> {
        let shared = &*self.shared;
        for _ in 0..TRIES {
            let object = self.object(name, kind);
            let acquired = shared.pool.acquire_in(shared.group, &object, terms).await;
            match acquired {
                Ok(permission) => {
                    let range = terms.range.clone().unwrap_or(0..shared.layout.bytes(kind));
                    let is_open = |held: &Permission| !shared.pool.left(held).is_zero();
                    shared.held.lock().add(name, range, &permission, is_open);
                    return Ok(permission);
                }
                Err(pool::Error::Busy { .. }) => return Err(Stopped::Busy),
                // The generation may have other upper bits than this compute node knows.
                Err(pool::Error::NoSuchObject { .. })
                    if kind != Kind::Table && self.learn(name.entry).await? => {}
                Err(error @ pool::Error::NoSuchObject { .. }) => {
                    return Err(Stopped::Freed(error.to_string()));
                }
                Err(error) => return Err(stopped(error)),
            }
        }
        Err(renamed(name))
    }

    /// Acquires the exclusive permission of a split.
    pub(super) async fn exclusive(&self, range: &Range) -> Result<Open, Stopped> {
        let Wanted { name, kind, range, right } = self.wanted(range);
        let terms = LeaseTerms {
            right,
            sharing: Sharing::Exclusive,
            lease: self.shared.settings.split_lease,
            wait: None,
            range: Some(range.clone()),
        };
        // This compute node's own permissions conflict, too.
        let own = self.shared.held.lock().take_conflicting(name, &range, &terms);
        for permission in own {
            self.shared.pool.revoke(&permission).await.map_err(stopped)?;
        }
        let permission = self.acquire(name, kind, &terms).await?;
        Ok(Open { name, permission })
    }

    /// A permission for one round trip. `None`: the permission of the range is kept.
    pub(super) async fn once(&self, range: &Range) -> Result<Option<Open>, Stopped> {
        let wanted = self.wanted(range);
        // The permission of an allocation is for several blocks.
        if wanted.kind != Kind::Values || wanted.right == Right::Write {
            return Ok(None);
        }
        let (permission, _) = self.permit(&wanted, self.shared.settings.lease).await?;
        Ok(Some(Open { name: wanted.name, permission }))
    }
}

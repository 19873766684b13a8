//! An honest client of a scheme with leases: it allocates objects, tells their names to the other
//! clients, acquires permissions, uses, extends, renews and revokes them, or lets them expire.
//!
//! It stands still for up to ten leases between its steps. By an exclusive permission it knows the
//! contents of its range, and reports a violation if they differ.

mod accesses;
mod threads;

use std::ops::Range;
use std::time::Duration;

use pool::{Error, Options, Pool};
use scheme::lease::Lease;
use scheme::{GroupId, LeaseTerms, Object, Others, Permission, Right, Sharing};
use verbs::{Key, Nic};

use super::Context;
use super::invariant::Invariant;
use super::lease_plan::{LEASE_MIN_US, LeasePlan};
use super::oracle::{Posted, Use};
use super::scenario::{End, Role};
use crate::fiber;
use crate::nic::SimNic;
use crate::random::Random;
use crate::state::VerbStall;
use crate::time::Time;

/// Number of broken requests and accesses after which a client stops and leaves.
const PATIENCE: u32 = 40;

/// A permission, and what the client knows of its range.
struct Held {
    permission: Permission,
    /// Contents of the range, by an exclusive permission.
    contents: Option<Vec<u8>>,
}

struct Lessee {
    cx: Context,
    plan: LeasePlan,
    pool: Pool<SimNic>,
    held: Vec<Held>,
    /// Objects that the client has allocated and not freed.
    objects: Vec<(Object, Others)>,
    random: Random,
    errors: u32,
}

/// Program of the client's fiber.
pub(super) fn run(cx: Context, role: Role, mut random: Random) {
    let plan = cx.leases.clone().expect("a scheme with leases");
    let pool = loop {
        match connect(&cx) {
            Ok(pool) => break pool,
            Err(e) if cx.may_connect_again(&e) => {
                fiber::sleep(Time::us(200 + random.below(2000)));
            }
            Err(e) => return cx.with_oracle(|o| o.lease_error(cx.client, "connects", &e)),
        }
    };
    let (held, objects) = (Vec::new(), Vec::new());
    let mut me = Lessee { cx, plan, pool, held, objects, random, errors: 0 };
    for _ in 0..2 * role.rounds {
        if me.errors > PATIENCE {
            break;
        }
        me.round();
    }
    me.end(role.end);
}

fn connect(cx: &Context) -> Result<Pool<SimNic>, Error> {
    let nic = cx.nic();
    let control = cx.connector.control(&nic, cx.link.clone());
    let options = Options {
        groups: Some(cx.groups),
        send_blocks: 16,
        domain: cx.domain,
        ..Options::default()
    };
    Pool::over(nic, Box::new(control), options)
}

fn range_of(permission: &Permission) -> Range<u64> {
    permission.terms().range.clone().unwrap_or(0..permission.object().len)
}

fn len_of(permission: &Permission) -> u64 {
    let range = range_of(permission);
    range.end - range.start
}

/// Returns the keys of a permission, with that of its lifetime if it has one.
fn keys_of(lease: &Lease) -> Vec<Key> {
    let lifetime = lease.header.map(|header| header.rkey);
    lease.grant.keys().iter().copied().chain(lifetime).collect()
}

impl Lessee {
    fn round(&mut self) {
        self.forget_expired();
        if self.plan.has_threads && self.random.below(5) == 0 {
            self.work_in_two_threads();
        }
        if self.plan.windows.is_some() && self.random.below(8) == 0 {
            self.hoard();
        }
        let room = self.held.len() < 6;
        match self.random.below(20) {
            0..=2 if room => self.allocate(),
            3..=6 if room => self.acquire(),
            0..=10 => self.use_one(),
            11..=13 => self.extend(),
            14 => self.renew(),
            15 => self.revoke_one(),
            16 => self.free_object(),
            17 => self.race(),
            18 if self.random.below(2) == 0 => self.use_after_expiry(),
            18 => {
                if let Some(at) = self.some_held() {
                    self.use_late(at);
                }
            }
            _ => self.misuse(),
        }
        match self.random.below(8) {
            0 | 1 => fiber::sleep(Time(self.random.below(Time::us(30).0))),
            2 if self.plan.pauses => fiber::sleep(self.plan.some_pause(&mut self.random)),
            _ => {}
        }
    }

    fn now(&self) -> Duration {
        self.pool.nic().now()
    }

    fn failed(&mut self, what: &str, error: &Error) {
        if matches!(error, Error::ManagementBroken { .. } | Error::Access { .. }) {
            self.errors += 1;
        }
        self.cx.with_oracle(|o| o.lease_error(self.cx.client, what, error));
    }

    fn wrong(&self, invariant: Invariant, why: impl FnOnce(&str) -> String) {
        self.cx.with_oracle(|o| {
            let why = why(o.name(self.cx.client));
            o.wrong(invariant, why);
        });
    }

    fn group(&mut self) -> GroupId {
        GroupId(self.random.below(self.cx.groups.into()) as u16)
    }

    fn some_held(&mut self) -> Option<usize> {
        let count = self.held.len() as u64;
        (count > 0).then(|| self.random.below(count) as usize)
    }

    /// Forgets most permissions that have expired.
    fn forget_expired(&mut self) {
        let now = self.now();
        let random = &mut self.random;
        self.held.retain(|held| !held.permission.left(now).is_zero() || random.below(4) == 0);
    }

    // --- requests ------------------------------------------------------------------------------

    fn terms(&mut self) -> LeaseTerms {
        let (least, most) = (LEASE_MIN_US, self.plan.lease_max_us);
        let lease = *self.random.pick(&[1, least, most / 2, most, most, 4 * most]);
        let wait = *self.random.pick(&[None, None, Some(0), Some(most / 4), Some(most)]);
        let writes = self.random.below(3) != 0;
        let is_shared = self.random.below(2) == 0;
        LeaseTerms {
            right: if writes { Right::Write } else { Right::Read },
            sharing: if is_shared { Sharing::Shared } else { Sharing::Exclusive },
            lease: Duration::from_micros(lease),
            wait: wait.map(Duration::from_micros),
            range: None,
        }
    }

    fn granted(&mut self, permission: &Permission) {
        let (client, lease) = (self.cx.client, permission.lease());
        self.cx.with_oracle(|o| {
            o.lease_granted(client, lease.number, &keys_of(&lease));
            o.believes(client, permission);
        });
    }

    fn allocate(&mut self) {
        let (terms, group) = (self.terms(), self.group());
        let chunk = self.pool.chunk_bytes();
        let most = *self.random.pick(&[64, chunk / 4, chunk / 4, chunk, 2 * chunk]);
        let bytes = 1 + self.random.below(most);
        let others = match self.cx.domain {
            None => Others::None,
            Some(_) => {
                let all = [Others::None, Others::Read, Others::Write, Others::Write, Others::Own];
                *self.random.pick(&all)
            }
        };
        match fiber::block_on(self.pool.allocate_object_in(group, bytes, others, &terms)) {
            Ok((object, permission)) => {
                self.granted(&permission);
                self.objects.push((object, others));
                let (owner, domain) = (self.cx.client, self.cx.domain);
                let posted = Posted { object, others, owner, domain, freeing: false };
                self.cx.with_oracle(|o| o.post(posted));
                let is_mine = terms.sharing == Sharing::Exclusive;
                let contents = is_mine.then(|| vec![0; bytes as usize]);
                self.held.push(Held { permission, contents });
                let last = self.held.len() - 1;
                if self.random.below(2) == 0 {
                    self.read(last);
                }
                if self.random.below(2) == 0 {
                    self.write(last);
                }
            }
            Err(e) => {
                if matches!(e, Error::OutOfMemory { .. }) {
                    self.cx.with_oracle(|o| o.counts.empty += 1);
                }
                self.failed("allocates an object", &e);
            }
        }
    }

    /// Returns an object: most often one that the client may acquire.
    fn some_object(&mut self) -> Option<Posted> {
        let board = self.cx.with_oracle(|o| o.board().to_vec());
        let (client, domain) = (self.cx.client, self.cx.domain);
        let may_acquire = |posted: &&Posted| {
            let is_member = domain.is_some() && posted.domain == domain;
            !posted.freeing
                && (posted.owner == client || is_member && posted.others != Others::None)
        };
        let usable: Vec<_> = board.iter().filter(may_acquire).copied().collect();
        let from = match self.cx.case.has_rights() {
            true if usable.is_empty() || self.random.below(6) == 0 => board,
            _ => usable,
        };
        // The latest objects are in use.
        let recent = &from[from.len().saturating_sub(4)..];
        (!recent.is_empty()).then(|| *self.random.pick(recent))
    }

    fn some_range(&mut self, len: u64) -> Option<Range<u64>> {
        match self.random.below(3) {
            0 => {
                let start = self.random.below(len);
                Some(start..start + 1 + self.random.below(len - start))
            }
            1 => Some(0..len.div_ceil(2)),
            _ => None,
        }
    }

    /// Returns terms for an object: within the client's rights if the memory node does not look at
    /// them.
    fn terms_for(&mut self, posted: &Posted) -> LeaseTerms {
        let terms = self.terms();
        let may_write = posted.owner == self.cx.client || posted.others > Others::Read;
        match may_write || self.cx.case.has_rights() {
            true => terms,
            false => LeaseTerms { right: Right::Read, ..terms },
        }
    }

    fn acquire(&mut self) {
        let Some(posted) = self.some_object() else { return };
        let range = self.some_range(posted.object.len);
        let terms = LeaseTerms { range, ..self.terms_for(&posted) };
        let group = self.group();
        let result = fiber::block_on(self.pool.acquire_in(group, &posted.object, &terms));
        self.acquired(&posted, &terms, result);
    }

    fn acquired(&mut self, posted: &Posted, terms: &LeaseTerms, got: Result<Permission, Error>) {
        let client = self.cx.client;
        match got {
            Ok(permission) => {
                self.granted(&permission);
                self.held.push(Held { permission, contents: None });
                let last = self.held.len() - 1;
                if self.random.below(2) == 0 {
                    self.read(last);
                }
            }
            Err(e) => {
                let (is_own, is_freed, by_hostile) = self.cx.with_oracle(|o| {
                    let same = |other: &&Posted| other.object == posted.object;
                    let is_freed = o.board().iter().find(same).is_none_or(|posted| posted.freeing);
                    (posted.owner == client, is_freed, o.clients.iter().any(|c| !c.honest))
                });
                let is_member = self.cx.domain.is_some() && posted.domain == self.cx.domain;
                let least = match terms.right {
                    Right::Read => Others::Read,
                    Right::Write => Others::Write,
                };
                let may = is_own || is_member && posted.others >= least;
                let by_others = by_hostile && posted.others == Others::Own;
                let is_refused = matches!(e, Error::NoSuchObject { .. });
                if is_refused && may && !is_freed && !by_others {
                    self.wrong(Invariant::Answers, |name| {
                        format!("{name} does not get {posted:?}: {e}")
                    });
                }
                self.failed("acquires an object", &e);
            }
        }
    }

    /// Acquires permissions until the memory node refuses one: it has no window left, or the limit
    /// of permissions is reached. Revokes them.
    fn hoard(&mut self) {
        let Some(posted) = self.some_object() else { return };
        let lease = Duration::from_micros(self.plan.lease_max_us);
        let terms = LeaseTerms::shared_read(lease).wait(Duration::ZERO);
        let mut hoarded = Vec::new();
        while self.errors <= PATIENCE && hoarded.len() <= self.plan.permissions_max as usize {
            let group = self.group();
            match fiber::block_on(self.pool.acquire_in(group, &posted.object, &terms)) {
                Ok(permission) => {
                    self.granted(&permission);
                    hoarded.push(permission);
                }
                Err(e) => {
                    self.acquired(&posted, &terms, Err(e));
                    break;
                }
            }
        }
        hoarded.iter().for_each(|permission| self.revoke(permission));
    }

    fn extend(&mut self) {
        let Some(at) = self.some_held() else { return };
        let permission = self.held[at].permission.clone();
        if self.random.below(3) == 0 {
            self.wait_for_end(&permission);
        }
        if self.plan.pauses && self.random.below(3) == 0 {
            // Between the check of the lease and the CAS, or between the CAS and its result.
            let time = self.plan.some_pause(&mut self.random);
            let passes = self.random.below(2) as u32;
            self.cx.with_oracle(|o| o.slack += time);
            let stall = VerbStall { passes, time, stops_clock: false };
            self.pool.nic().hooks().stall_me_at_verb(stall);
        }
        let by = self.some_extension();
        let before = self.before_extension(&permission);
        let result = fiber::block_on(self.pool.extend(&permission, by));
        let is_extended = result.is_ok();
        self.extended(&permission, before, result);
        if is_extended && self.random.below(2) == 0 {
            self.use_late(at);
        }
    }

    /// Sleeps until shortly before the end of a lease.
    fn wait_for_end(&mut self, permission: &Permission) {
        let left = permission.left(self.now());
        if left <= Duration::from_micros(4 * self.plan.lease_max_us) {
            // The clock may be faster than virtual time.
            let margin = Duration::from_micros(2 + self.random.below(20));
            fiber::sleep(Time::from((left * 99 / 100).saturating_sub(margin)));
        }
    }

    /// Uses a permission shortly before the end of its lease.
    fn use_late(&mut self, at: usize) {
        let permission = self.held[at].permission.clone();
        self.wait_for_end(&permission);
        self.read(at);
    }

    fn some_extension(&mut self) -> Duration {
        let most = self.plan.lease_max_us;
        Duration::from_micros(*self.random.pick(&[most / 4, most / 2, most, 10 * most]))
    }

    /// Returns whether the memory node has noticed a permission, and the end of its lease by the
    /// client's belief.
    fn before_extension(&self, permission: &Permission) -> (bool, Duration) {
        let lease = permission.lease();
        let noticed = self.cx.with_oracle(|o| o.is_noticed(self.cx.client, lease.number));
        (noticed, lease.grant.until)
    }

    fn extended(
        &mut self,
        permission: &Permission,
        (noticed, until): (bool, Duration),
        result: Result<Duration, Error>,
    ) {
        let lease = permission.lease();
        let is_trusted = self.cx.with_oracle(|o| o.trusts_clock(self.cx.client));
        if noticed && lease.grant.until > until {
            self.cx.with_oracle(|o| o.extended_after_notice(self.cx.client, lease.number));
        }
        match result {
            Ok(left) if left > Duration::from_micros(self.plan.lease_max_us) && is_trusted => {
                self.wrong(Invariant::Bounded, |name| format!("{name} believes in {left:?} more"));
            }
            Ok(_) => self.cx.with_oracle(|o| o.counts.extensions += 1),
            Err(e) => self.failed("extends a permission", &e),
        }
    }

    fn renew(&mut self) {
        let Some(at) = self.some_held() else { return };
        let permission = self.held[at].permission.clone();
        match fiber::block_on(self.pool.renew(&permission)) {
            Ok(_) => self.granted(&permission),
            Err(e) => {
                // The request may have been executed, and its reply lost.
                if matches!(e, Error::ManagementBroken { .. }) {
                    self.held.swap_remove(at);
                }
                self.failed("renews a permission", &e);
            }
        }
    }

    fn revoke_one(&mut self) {
        let Some(at) = self.some_held() else { return };
        let Held { permission, .. } = self.held.swap_remove(at);
        self.revoke(&permission);
        if self.random.below(4) == 0 {
            self.revoke(&permission);
        }
    }

    fn revoke(&mut self, permission: &Permission) {
        while self.errors <= PATIENCE {
            let result = fiber::block_on(self.pool.revoke(permission));
            if self.revoked(permission, result) {
                break;
            }
        }
    }

    /// Returns whether the permission has ended.
    fn revoked(&mut self, permission: &Permission, result: Result<(), Error>) -> bool {
        match result {
            Ok(()) => {
                let (client, lease) = (self.cx.client, permission.lease());
                self.cx.with_oracle(|o| {
                    o.lease_revoked(client, lease.number, &keys_of(&lease));
                });
                true
            }
            Err(e) => {
                self.failed("revokes a permission", &e);
                false
            }
        }
    }

    fn free_object(&mut self) {
        if self.objects.is_empty() || self.random.below(6) == 0 {
            // An object that every member of the domain may free, or one that the client may not
            // free.
            let Some(posted) = self.some_object() else { return };
            let is_own = self.objects.iter().any(|(object, _)| *object == posted.object);
            if !is_own {
                return self.free_foreign(&posted);
            }
        }
        if self.objects.is_empty() {
            return;
        }
        let at = self.random.below(self.objects.len() as u64) as usize;
        let (object, others) = self.objects.swap_remove(at);
        self.free(&object, others);
    }

    fn free(&mut self, object: &Object, others: Others) {
        self.held.retain(|held| held.permission.object() != *object);
        let was_freed = self.cx.with_oracle(|o| {
            let was = o.board().iter().any(|posted| posted.object == *object && posted.freeing);
            o.frees_object(self.cx.client, object);
            was
        });
        let mut asked_before = others == Others::Own || was_freed;
        while self.errors <= PATIENCE {
            match fiber::block_on(self.pool.free_object(object)) {
                Ok(()) => return self.cx.with_oracle(|o| o.object_freed(self.cx.client, object)),
                Err(Error::NoSuchObject { .. }) if asked_before => return,
                Err(e @ Error::NoSuchObject { .. }) => {
                    return self.wrong(Invariant::Answers, |name| {
                        format!("{name} frees its object {object}: {e}")
                    });
                }
                Err(e) => self.failed("frees an object", &e),
            }
            asked_before = true;
        }
    }

    fn free_foreign(&mut self, posted: &Posted) {
        let may = self.cx.domain.is_some()
            && posted.domain == self.cx.domain
            && posted.others == Others::Own;
        if !may && !self.cx.case.has_rights() {
            return;
        }
        if may {
            self.held.retain(|held| held.permission.object() != posted.object);
            self.cx.with_oracle(|o| o.frees_object(self.cx.client, &posted.object));
        }
        match fiber::block_on(self.pool.free_object(&posted.object)) {
            Ok(()) if may => {
                self.cx.with_oracle(|o| o.object_freed(self.cx.client, &posted.object));
            }
            Ok(()) => self.wrong(Invariant::Permissions, |name| {
                format!("{name} frees a foreign object: {posted:?}")
            }),
            Err(e) => self.failed("frees an object of another client", &e),
        }
    }

    // --- the end -------------------------------------------------------------------------------

    fn end(mut self, end: End) {
        match end {
            End::Tidy => {
                while let Some(Held { permission, .. }) = self.held.pop() {
                    self.revoke(&permission);
                }
                while let Some((object, others)) = self.objects.pop() {
                    self.free(&object, others);
                }
                self.nothing_is_left();
            }
            End::Careless => {}
            // The driver kills the process.
            End::Dies => return self.cx.die(),
        }
        self.cx.leaves();
        // Dropping the pool closes the connection.
    }

    /// Checks that the client owns no object, some time after its last request.
    fn nothing_is_left(&mut self) {
        if self.errors > PATIENCE {
            return;
        }
        let client = self.cx.client;
        for _ in 0..20 {
            if self.cx.with_oracle(|o| o.owned(client).is_empty()) {
                return;
            }
            fiber::sleep(Time::us(2000));
        }
        let owned = self.cx.with_oracle(|o| o.owned(client));
        self.wrong(Invariant::Forgotten, |name| {
            format!("{name} has freed all its objects, but owns objects {owned:?}")
        });
    }
}

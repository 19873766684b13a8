//! The compute node's side: requests on the management QP, and extensions by CAS.

mod by_rpc;
mod late;
mod unprotected;

pub use unprotected::{UNIT, UnprotectedClient};

use std::sync::OnceLock;
use std::time::Duration;

use scheme::credits::{Credit, Credits};
use scheme::index::EntryId;
use scheme::lease::Lease;
use scheme::mailbox::Mailbox;
use scheme::options::{SchemeOptions, parse_terms};
use scheme::request_queue::ManagementQp;
use scheme::{
    Answer, ClientScheme, CompareAndSwap, ConnectReply, Error, Grant, GroupId, LeaseScheme,
    LeaseTerms, Object, Offer, Others, Permission, Right, too_large,
};
use verbs::{Access, Key, MemoryRegion, Nic, Op, Remote, WorkRequest};

use self::late::Late;
use super::PATRONUS_PAPER;
use super::message::{
    Ask, AskTerms, Granted, Lifetime, ObjectId, Outcome, PermissionNumber, REPLY_BYTES,
    REQUEST_BYTES, Reply, Request,
};
use super::options::{ClientOptions, Extension, LeaseOffer, TableTerms};
use crate::blocks::CHUNK_ORDER;
use crate::rpc::blocks::Blocks;

/// Bytes of a lifetime word.
const WORD: usize = 8;
/// CASes of one extension: each repetition means that another thread has extended the lease.
const EXTEND_TRIES: u32 = 64;

/// The client of scheme `patronus` on a NIC of type `N`.
pub struct Client<N: Nic> {
    nic: N,
    mailbox: Mailbox<N, REPLY_BYTES>,
    /// Requests in flight.
    credits: Credits,
    /// Requests in flight that may wait for permissions to end: at most half of the credits.
    waits: Credits,
    /// One request in flight that ends permissions, while all credits are taken.
    ends: Credits,
    /// CASes in flight.
    extensions: Credits,
    /// Old values of these CASes.
    words: N::Mr,
    offer: LeaseOffer,
    extension: Extension,
    table: OnceLock<TableTerms>,
    /// The published form: each permission has its lifetime in a header.
    has_headers: bool,
    blocks: Blocks,
    lanes: usize,
    late: Late,
}

impl<N: Nic> Client<N> {
    /// Creates the management QP.
    pub fn new(nic: &N, pd: &N::Pd, offer: &Offer) -> Result<Self, Error> {
        let credits = offer.credits;
        let access = Access::REMOTE_WRITE; // the bulletin
        let sizes = (credits + 1, REQUEST_BYTES, credits);
        let words = nic.alloc_dma(credits as usize * WORD)?;
        Ok(Self {
            mailbox: Mailbox::new(nic, pd, sizes, access, Reply::number)?,
            credits: Credits::new(credits),
            waits: Credits::new((credits / 2).max(1)),
            ends: Credits::new(1),
            extensions: Credits::new(credits),
            words: nic.reg_mr(pd, &words, Access::LOCAL_WRITE)?,
            offer: parse_terms(&offer.terms)?,
            extension: Extension::default(),
            table: OnceLock::new(),
            has_headers: offer.scheme == PATRONUS_PAPER.name,
            blocks: Blocks::new(offer.chunks as u32, offer.chunk_bytes, true),
            lanes: offer.group_size as usize - 1,
            late: Late::default(),
            nic: nic.clone(),
        })
    }

    /// This client with the compute node's own options.
    pub fn with_options(self, options: &SchemeOptions) -> Result<Self, Error> {
        let ClientOptions { extend } = options.parse()?;
        Ok(Self { extension: extend, ..self })
    }

    /// A duration as the memory node may have measured it at least: shortened by the largest
    /// difference of the clocks' rates.
    fn shortened(&self, micros: u64) -> Duration {
        let cut = u128::from(micros) * u128::from(self.offer.clock_drift_ppm_max) / 1_000_000;
        Duration::from_micros(micros - cut as u64)
            .saturating_sub(Duration::from_micros((cut > 0).into()))
    }

    /// A slot for a request that ends permissions.
    async fn ending_slot(&self) -> Credit<'_> {
        match self.credits.try_take() {
            Some(credit) => credit,
            None => self.ends.take().await,
        }
    }

    /// Sends a request and waits for its reply. Outcomes that any request may have are errors. The
    /// caller holds a slot.
    async fn ask(&self, attempt: &'static str, ask: Ask) -> Result<Outcome, Error> {
        named(attempt, self.exchange(attempt, ask).await?)
    }

    /// Sends a request and waits for its reply, whatever it is. The caller holds a slot.
    async fn exchange(&self, attempt: &'static str, ask: Ask) -> Result<Outcome, Error> {
        let number = self.mailbox.number();
        let request = Request { number, ask }.to_bytes();
        let bytes = self.mailbox.ask(attempt, number, &request).await.inspect_err(|error| {
            if let Error::Unanswered { .. } = error {
                self.late.note(number, &ask);
            }
        })?;
        let reply = Reply::parse(&bytes);
        let reply = reply.ok_or_else(|| protocol(attempt, "the reply cannot be decoded"))?;
        Ok(reply.outcome)
    }

    fn ask_terms(&self, group: GroupId, terms: &LeaseTerms) -> AskTerms {
        AskTerms {
            group,
            right: terms.right,
            sharing: terms.sharing,
            // FOREVER is not for leases.
            lease_us: micros(terms.lease).min(AskTerms::FOREVER - 1),
            wait_us: terms.wait.map_or(u64::MAX, micros),
        }
    }

    /// The grant in a reply.
    fn grant(
        &self,
        attempt: &str,
        granted: &Granted,
        len: u64,
        group: GroupId,
    ) -> Result<Grant, Error> {
        if granted.lanes != self.lanes {
            return Err(protocol(attempt, format!("a grant has {} keys", granted.lanes)));
        }
        let entry = EntryId::new(granted.object.entry);
        Ok(Grant::new(granted.address, len, entry, group, &granted.keys[..granted.lanes]))
    }

    /// The state of a permission whose request was sent at `sent`.
    fn lease(&self, granted: &Granted, grant: Grant, terms: &LeaseTerms, sent: Duration) -> Lease {
        let since = sent + self.shortened(granted.waited_us);
        let until = since + self.shortened(granted.word.micros());
        Lease {
            grant: grant.leased(terms.right, until),
            number: granted.permission.0,
            slot: granted.permission.slot(),
            word: granted.word.0,
            header: granted.header,
            since,
            ended: false,
        }
    }

    /// The CAS of a lifetime word. Returns the old value.
    async fn compare_and_swap(
        &self,
        slot: u32,
        old: Lifetime,
        new: Lifetime,
    ) -> Result<Lifetime, Error> {
        let attempt = "extending a permission";
        let table = self.table.get().ok_or_else(|| protocol(attempt, "no table of lifetimes"))?;
        if slot >= table.lifetimes {
            return Err(protocol(attempt, format!("slot {slot} is beyond the table")));
        }
        let credit = self.extensions.take().await;
        let at = credit.slot().offset(WORD);
        let word = Remote {
            addr: table.lifetimes_addr + u64::from(slot) * WORD as u64,
            rkey: Key(table.lifetimes_key),
        };
        let local = self.words.sge(at, WORD as u32);
        let op = Op::CompareSwap { at: word, compare: old.0, swap: new.0, old: local };
        let work = WorkRequest { id: 0, op, signaled: true };
        self.mailbox.execute(attempt, &mut [work]).await?;
        Ok(Lifetime(self.words.memory().load_be64(at)))
    }

    /// The CAS of a lifetime in a header, which has no nonce, by an access QP. Returns the old
    /// lifetime with the nonce of `old`.
    async fn swap_in_header(
        &self,
        qps: &dyn CompareAndSwap,
        lease: &Lease,
        header: Remote,
        (old, new): (Lifetime, Lifetime),
    ) -> Result<Lifetime, Error> {
        let Grant { entry, group, until, .. } = lease.grant;
        let word = Grant::new(header.addr, WORD as u64, entry, group, &[header.rkey]);
        let word = word.leased(Right::Write, until);
        let found = qps.compare_and_swap(&word, old.micros(), new.micros()).await?;
        Ok(Lifetime::new(old.nonce(), found))
    }

    async fn extend_by_cas(
        &self,
        permission: &Permission,
        by: Duration,
        qps: Option<&dyn CompareAndSwap>,
    ) -> Result<Duration, Error> {
        let op = "extending a permission";
        for _ in 0..EXTEND_TRIES {
            let (lease, now) = (permission.lease(), self.nic.now());
            if lease.ended || now >= lease.grant.until {
                return Err(Error::Expired { op });
            }
            let (word, left) = (Lifetime(lease.word), lease.grant.until - now);
            let most = self.offer.lease_max_us;
            let end = now.saturating_add(by);
            let wanted = self.lifetime_for(end.saturating_sub(lease.since)).min(most);
            if word.micros() == 0 || wanted <= word.micros() {
                return match left >= by {
                    true => Ok(left),
                    false => Err(Error::NotExtendable { left }),
                };
            }
            let new = Lifetime::new(word.nonce(), wanted);
            let old = match (lease.header, qps) {
                (Some(header), Some(qps)) => {
                    self.swap_in_header(qps, &lease, header, (word, new)).await?
                }
                _ => self.compare_and_swap(lease.slot, word, new).await?,
            };
            let known = if old == word { new } else { old };
            if known.nonce() != word.nonce() {
                // It may be that of a renewal whose reply has not arrived.
                let _alone = permission.begin_change().await;
                if note_end(permission, lease.number) {
                    return Err(Error::Expired { op });
                }
            } else if self.note_lifetime(permission, &lease, known) && old == word {
                return Ok(permission.left(self.nic.now()));
            }
        }
        Err(protocol(op, "its lifetime word changes all the time"))
    }

    /// Stores a lifetime word that the memory node has for the permission. `before`: the state
    /// before the request. False, without an effect, if another thread has renewed the permission
    /// meanwhile: the word is that of the former lease.
    fn note_lifetime(&self, permission: &Permission, before: &Lease, word: Lifetime) -> bool {
        let until = before.since + self.shortened(word.micros());
        permission.update(|lease| {
            if lease.number != before.number {
                return false;
            }
            if Lifetime(lease.word).micros() != 0 {
                lease.word = word.0;
            }
            lease.grant.until = lease.grant.until.max(until);
            true
        })
    }

    /// The lifetime in microseconds of which at least `time` is left by the compute node's belief.
    fn lifetime_for(&self, time: Duration) -> u64 {
        let ppm = u128::from(self.offer.clock_drift_ppm_max);
        let micros = time.as_nanos().div_ceil(1000) + 1;
        u64::try_from((micros * 1_000_000).div_ceil(1_000_000 - ppm)).unwrap_or(u64::MAX)
    }
}

impl<N: Nic> ClientScheme for Client<N> {
    fn allocate(&self, group: GroupId) -> Answer<'_, Grant> {
        self.allocate_bytes(group, self.blocks.bytes(CHUNK_ORDER))
    }

    fn allocate_bytes(&self, group: GroupId, bytes: u64) -> Answer<'_, Grant> {
        Box::pin(async move {
            let attempt = "allocating a chunk";
            let Some(order) = self.blocks.order_for(bytes) else {
                let has_sizes = self.blocks.order_max() > CHUNK_ORDER;
                return Err(too_large(bytes, self.blocks.bytes_max(), has_sizes));
            };
            let len = self.blocks.bytes(order);
            let terms = AskTerms {
                group,
                right: Right::Write,
                sharing: scheme::Sharing::Exclusive,
                lease_us: AskTerms::FOREVER,
                wait_us: 0,
            };
            let _credit = self.credits.take().await;
            let ask = Ask::Allocate { terms, bytes: len, others: Others::None };
            match self.ask(attempt, ask).await? {
                Outcome::Granted(granted) => self.grant(attempt, &granted, len, group),
                Outcome::Empty | Outcome::NoBlock => Err(Error::OutOfMemory { bytes }),
                other => Err(unexpected(attempt, other)),
            }
        })
    }

    fn free<'a>(&'a self, grant: &'a Grant) -> Answer<'a, ()> {
        Box::pin(async move {
            let attempt = "freeing a chunk";
            let _credit = self.ending_slot().await;
            let ask = Ask::FreeGrant { entry: grant.entry.raw(), address: grant.addr };
            match self.ask(attempt, ask).await? {
                Outcome::Done => Ok(()),
                Outcome::NotYours => Err(Error::NotYours { entry: grant.entry }),
                other => Err(unexpected(attempt, other)),
            }
        })
    }

    fn leases(&self) -> Option<&dyn LeaseScheme> {
        Some(self)
    }

    fn accept(&self, terms: &ConnectReply) -> Result<(), Error> {
        // Headers have no table: each grant says where its lifetime is.
        if !self.has_headers {
            let _ = self.table.set(parse_terms(&terms.terms)?);
        }
        Ok(())
    }

    /// Re-establishes the QP only after a request has failed, also a request that was flushed.
    fn is_broken(&self) -> bool {
        self.mailbox.has_lost_answers()
    }

    fn reset(&self) -> Result<(), Error> {
        self.mailbox.reset()?;
        self.late.take(&self.mailbox.take_late());
        Ok(())
    }

    fn settle(&self) -> Answer<'_, ()> {
        self.return_late()
    }

    fn each_queue(&self, each: &mut dyn FnMut(&dyn ManagementQp)) {
        each(&self.mailbox);
    }
}

impl<N: Nic> LeaseScheme for Client<N> {
    fn allocate_object<'a>(
        &'a self,
        group: GroupId,
        bytes: u64,
        others: Others,
        terms: &'a LeaseTerms,
    ) -> Answer<'a, (Object, Permission)> {
        Box::pin(async move {
            let attempt = "allocating an object";
            if bytes > self.blocks.bytes_max() {
                return Err(too_large(bytes, self.blocks.bytes_max(), true));
            }
            let _credit = self.credits.take().await;
            let sent = self.nic.now();
            let ask = Ask::Allocate { terms: self.ask_terms(group, terms), bytes, others };
            let granted = match self.ask(attempt, ask).await? {
                Outcome::Granted(granted) => granted,
                // Another member of the domain has freed the object meanwhile.
                Outcome::NoSuchObject => return Err(Error::NoSuchObject { attempt, entry: 0 }),
                Outcome::Empty | Outcome::NoBlock => return Err(Error::OutOfMemory { bytes }),
                other => return Err(unexpected(attempt, other)),
            };
            let ObjectId { entry, generation } = granted.object;
            // The pool fills in the incarnation and the memory node.
            let object = Object { incarnation: 0, entry, generation, len: bytes, node: 0 };
            let grant = self.grant(attempt, &granted, bytes, group)?;
            let lease = self.lease(&granted, grant, terms, sent);
            Ok((object, Permission::new(object, terms.clone(), lease)))
        })
    }

    fn acquire<'a>(
        &'a self,
        group: GroupId,
        object: &'a Object,
        terms: &'a LeaseTerms,
    ) -> Answer<'a, Permission> {
        Box::pin(async move {
            let attempt = "acquiring object";
            let range = terms.range.clone().unwrap_or(0..object.len);
            let len = range.end.saturating_sub(range.start);
            let asked = self.ask_terms(group, terms);
            let _wait = match asked.wait_us {
                0 => None,
                _ => Some(self.waits.take().await),
            };
            let _credit = self.credits.take().await;
            let sent = self.nic.now();
            let id = ObjectId { entry: object.entry, generation: object.generation };
            let ask = Ask::Acquire { terms: asked, object: id, offset: range.start, len };
            let granted = match self.ask(attempt, ask).await? {
                Outcome::Granted(granted) => granted,
                Outcome::NoSuchObject => {
                    return Err(Error::NoSuchObject { attempt, entry: object.entry });
                }
                Outcome::Busy => {
                    let waited = self.nic.now().saturating_sub(sent);
                    return Err(Error::Busy { entry: object.entry, waited });
                }
                other => return Err(unexpected(attempt, other)),
            };
            let grant = self.grant(attempt, &granted, len, group)?;
            let lease = self.lease(&granted, grant, terms, sent);
            Ok(Permission::new(*object, terms.clone(), lease))
        })
    }

    fn extend<'a>(&'a self, permission: &'a Permission, by: Duration) -> Answer<'a, Duration> {
        match self.extension {
            Extension::Cas => Box::pin(self.extend_by_cas(permission, by, None)),
            Extension::Rpc => Box::pin(self.extend_by_rpc(permission, by)),
        }
    }

    fn extend_over<'a>(
        &'a self,
        permission: &'a Permission,
        by: Duration,
        qps: &'a dyn CompareAndSwap,
    ) -> Answer<'a, Duration> {
        match self.extension {
            Extension::Cas => Box::pin(self.extend_by_cas(permission, by, Some(qps))),
            Extension::Rpc => Box::pin(self.extend_by_rpc(permission, by)),
        }
    }

    fn renew<'a>(&'a self, permission: &'a Permission) -> Answer<'a, Duration> {
        Box::pin(async move {
            let attempt = "renewing a permission";
            let _credit = self.credits.take().await;
            let _alone = permission.begin_change().await;
            let lease = permission.lease();
            if lease.ended {
                return Err(Error::Expired { op: attempt });
            }
            let sent = self.nic.now();
            let lease_us = micros(permission.terms().lease).min(AskTerms::FOREVER - 1);
            let ask = Ask::Renew { permission: PermissionNumber(lease.number), lease_us };
            let outcome = self.exchange(attempt, ask).await;
            // Without a reply, the memory node may have ended the old keys. Without a window for
            // the new ones, it has.
            if matches!(outcome, Err(_) | Ok(Outcome::Failed | Outcome::Expired)) {
                note_end(permission, lease.number);
            }
            match named(attempt, outcome?)? {
                Outcome::Granted(granted) => {
                    let Grant { len, group, .. } = lease.grant;
                    let grant = self.grant(attempt, &granted, len, group)?;
                    // Other threads use the permission as soon as it has its new lease.
                    let grant = grant.with_connection(lease.grant.connection());
                    let new = self.lease(&granted, grant, permission.terms(), sent);
                    permission.update(|lease| *lease = new);
                    Ok(permission.left(self.nic.now()))
                }
                Outcome::NotExtendable => {
                    Err(Error::NotExtendable { left: permission.left(self.nic.now()) })
                }
                Outcome::Expired => Err(Error::Expired { op: attempt }),
                Outcome::NotYours => Err(Error::NotYourPermission { attempt }),
                other => Err(unexpected(attempt, other)),
            }
        })
    }

    fn revoke<'a>(&'a self, permission: &'a Permission) -> Answer<'a, ()> {
        Box::pin(async move {
            let attempt = "revoking a permission";
            // No access is posted any more while the keys die.
            let end = |lease: &mut Lease| {
                lease.ended = true;
                lease.grant.until = Duration::ZERO;
                lease.number
            };
            permission.update(end);
            let _credit = self.ending_slot().await;
            let _alone = permission.begin_change().await;
            // A renewal that was in flight has begun a new lease.
            let number = permission.update(end);
            match self.ask(attempt, Ask::Revoke { permission: PermissionNumber(number) }).await? {
                Outcome::Done => Ok(()),
                Outcome::NotYours => Err(Error::NotYourPermission { attempt }),
                other => Err(unexpected(attempt, other)),
            }
        })
    }

    fn free_object<'a>(&'a self, object: &'a Object) -> Answer<'a, ()> {
        Box::pin(async move {
            let attempt = "freeing object";
            let _credit = self.ending_slot().await;
            let id = ObjectId { entry: object.entry, generation: object.generation };
            match self.ask(attempt, Ask::Free { object: id }).await? {
                Outcome::Done => Ok(()),
                Outcome::NoSuchObject => Err(Error::NoSuchObject { attempt, entry: object.entry }),
                other => Err(unexpected(attempt, other)),
            }
        })
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn protocol(attempt: &str, why: impl Into<String>) -> Error {
    Error::Protocol { attempt: attempt.into(), why: why.into() }
}

/// Notes that a permission has ended which had this number. False, without an effect, if another
/// thread has renewed it meanwhile.
fn note_end(permission: &Permission, number: u64) -> bool {
    permission.update(|lease| {
        let is_it = lease.number == number;
        lease.ended |= is_it;
        is_it
    })
}

/// The outcome, or the error for an outcome that any request may have.
fn named(attempt: &'static str, outcome: Outcome) -> Result<Outcome, Error> {
    match outcome {
        Outcome::BadRequest => Err(Error::Refused {
            attempt: attempt.into(),
            why: "the memory node could not decode the request, or its values are not possible: \
                  an empty range, a lease of 0, or an object for others without a domain"
                .into(),
        }),
        Outcome::Failed => Err(Error::Refused {
            attempt: attempt.into(),
            why: "the memory node's NIC could not bind a window".into(),
        }),
        Outcome::TooMany(limit, most) => {
            Err(Error::TooMany { attempt, what: limit.name(), limit: most })
        }
        outcome => Ok(outcome),
    }
}

fn unexpected(attempt: &str, outcome: Outcome) -> Error {
    protocol(attempt, format!("the reply {outcome:?} is not one to this request"))
}

#[cfg(test)]
mod tests;

//! Hostile clients that make one misuse of leases, for the cases of unsafe schemes.
//!
//! Each misuse is a hole of an unsafe scheme and of no safe one. Apart from it, the client asks for
//! permissions as an honest client does, so that a violation is due to this misuse.

use scheme::{Grant, GroupId, Others, Right, Sharing};
use schemes::patronus::message::{Ask, AskTerms, Granted, ObjectId, Outcome, Reply};
use verbs::{Key, MemoryRegion, Op, Remote};

use super::leases::Had;
use super::{Hostile, SCRATCH, to};

/// A misuse of permissions, objects and their keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Misuse {
    /// The client uses the key that follows from its dead key, at addresses of other clients.
    NextKey,
    /// The client uses the key of an object after its free, and the key of a lifetime after its
    /// permission.
    LateKeys,
    /// The client changes by atomics an object that it may read, and WRITEs its own lifetime.
    Excess,
    /// The client acquires and frees objects of other domains.
    ForeignObjects,
    /// The client uses its own key at addresses of other clients.
    OwnKeyElsewhere,
}

/// Bytes of an object of the client.
const BYTES: u64 = 128;
/// Dead keys that the client makes in a round: the memory node has 32 windows at first.
const DEAD_KEYS: u64 = 4;
/// The largest number by which a tag has advanced until the next holder has the window: an unbind
/// and a bind are two steps.
const STEPS: u64 = 3;
/// Times that the client waits for the reply to a free, which comes after leases of others.
const WAITS: usize = 10;

impl Hostile {
    pub(super) fn misuse(&mut self, misuse: Misuse) {
        let is_first = self.random.below(2) == 0;
        match misuse {
            Misuse::NextKey => self.use_next_key(),
            Misuse::LateKeys if is_first => self.use_key_after_free(),
            Misuse::LateKeys => self.use_former_lifetime(),
            Misuse::Excess if is_first => self.change_what_it_may_read(),
            Misuse::Excess => self.write_own_lifetime(),
            Misuse::ForeignObjects if is_first => self.acquire_foreign(),
            Misuse::ForeignObjects => self.free_foreign(),
            Misuse::OwnKeyElsewhere => self.use_own_key_elsewhere(),
        }
    }

    // --- requests ------------------------------------------------------------------------------

    /// Terms of a shared permission with the longest lease, which waits for no other.
    fn usual_terms(right: Right) -> AskTerms {
        let (group, sharing) = (GroupId(0), Sharing::Shared);
        AskTerms { group, right, sharing, lease_us: AskTerms::FOREVER - 1, wait_us: 0 }
    }

    /// Sends a request and waits for its own reply.
    fn ask_alone(&mut self, ask: Ask) -> Option<Reply> {
        let reply = self.ask(ask)?;
        (reply.number == self.number).then_some(reply)
    }

    fn ask_for(&mut self, ask: Ask, len: u64) -> Option<Had> {
        let reply = self.ask_alone(ask);
        self.note_grant(reply, len)
    }

    fn own_object(&mut self, right: Right) -> Option<Had> {
        let terms = Self::usual_terms(right);
        self.ask_for(Ask::Allocate { terms, bytes: BYTES, others: Others::None }, BYTES)
    }

    /// Ends a permission. Returns whether the reply has arrived.
    fn end(&mut self, had: &Had) -> bool {
        let reply = self.ask_alone(Ask::Revoke { permission: had.granted.permission });
        reply.is_some_and(|reply| reply.outcome == Outcome::Done)
    }

    /// Frees an object. Returns whether the reply has arrived.
    fn free_object(&mut self, object: ObjectId) -> bool {
        let reply = self.ask_alone(Ask::Free { object });
        reply.is_some_and(|reply| reply.outcome == Outcome::Done)
    }

    fn write_to(&mut self, to: Remote) {
        let lane = self.some_lane();
        self.access(0, lane, Op::WriteInline { to, data: &[0xbb; 8] });
    }

    // --- keys ----------------------------------------------------------------------------------

    /// Makes keys dead, then uses what follows from one of its dead keys: the key of the window's
    /// next holder, at the address of that holder.
    fn use_next_key(&mut self) {
        for _ in 0..DEAD_KEYS {
            let Some(had) = self.own_object(Right::Write) else { return };
            if !self.end(&had) || !self.free_object(had.granted.object) {
                return;
            }
        }
        let others = self.cx.with_oracle(|o| o.lease_keys_of_others(self.cx.client));
        let dead: Vec<Key> = self.had.iter().map(|grant| grant.keys()[0]).collect();
        if others.is_empty() || dead.is_empty() {
            return;
        }
        // The client does not know the window of an address; it would try them all.
        let has_window = |(_, key): &&(u64, Key)| dead.iter().any(|d| d.index() == key.index());
        let victim = others.iter().find(has_window).or(others.first()).copied();
        let Some((addr, window)) = victim else { return };
        let latest = dead.iter().rfind(|key| key.index() == window.index());
        let key = *latest.unwrap_or(self.random.pick(&dead));
        for step in 1..=STEPS {
            self.cx.with_oracle(|o| o.counts.guesses += 1);
            let rkey = Key::new(key.index(), key.tag().wrapping_add(step as u8));
            let lane = self.some_lane();
            self.access_at(lane, Remote { addr, rkey }, 8);
            if self.out {
                return;
            }
        }
    }

    fn use_key_after_free(&mut self) {
        let Some(had) = self.own_object(Right::Write) else { return };
        if self.free_object(had.granted.object) {
            self.write_to(to(&had.grant(), 0, 0));
        }
    }

    /// Uses the lifetime of a second permission of an object, whose header is not in front of the
    /// object, after that permission.
    fn use_former_lifetime(&mut self) {
        let Some(first) = self.own_object(Right::Write) else { return };
        let (terms, object) = (Self::usual_terms(Right::Write), first.granted.object);
        let (offset, len) = (BYTES / 2, BYTES / 2);
        if let Some(had) = self.ask_for(Ask::Acquire { terms, object, offset, len }, len)
            && self.end(&had)
        {
            self.write_to(lifetime(&had.granted));
        }
        self.free_object(object);
    }

    fn change_what_it_may_read(&mut self) {
        let Some(had) = self.own_object(Right::Read) else { return };
        let (at, old) = (to(&had.grant(), 0, 0), self.memory.sge(SCRATCH, 8));
        self.access(0, 0, Op::FetchAdd { at, add: 1, old });
        self.free_object(had.granted.object);
    }

    fn write_own_lifetime(&mut self) {
        let Some(had) = self.own_object(Right::Write) else { return };
        self.write_to(lifetime(&had.granted));
        self.free_object(had.granted.object);
    }

    /// Uses its own key, which is valid, at an address of another client.
    fn use_own_key_elsewhere(&mut self) {
        let Some(had) = self.own_object(Right::Write) else { return };
        let others = self.cx.with_oracle(|o| o.objects_of_others(self.cx.client));
        if !others.is_empty() {
            let (addr, rkey) = (*self.random.pick(&others), had.granted.keys[0]);
            let lane = self.some_lane();
            self.access_at(lane, Remote { addr, rkey }, 8);
        }
        let Grant { entry, addr, .. } = had.grant();
        self.ask(Ask::FreeGrant { entry: entry.raw(), address: addr });
    }

    // --- objects -------------------------------------------------------------------------------

    fn acquire_foreign(&mut self) {
        let Some((object, len)) = self.some_posted() else { return };
        let terms = Self::usual_terms(Right::Write);
        if let Some(had) = self.ask_for(Ask::Acquire { terms, object, offset: 0, len }, len) {
            self.write_to(to(&had.grant(), 0, 0));
            self.end(&had);
        }
    }

    fn free_foreign(&mut self) {
        let Some((object, _)) = self.some_posted() else { return };
        if !self.post_ask(Ask::Free { object }) {
            return self.recover();
        }
        for _ in 0..WAITS {
            match self.answer(0) {
                Some(true) => {
                    if self.is_done() {
                        self.cx.with_oracle(|o| o.named_freed(self.cx.client, object));
                    }
                    return;
                }
                Some(false) => break,
                None => {}
            }
        }
        self.recover();
    }

    /// Returns whether the reply that has arrived is that to the last request, and successful.
    fn is_done(&self) -> bool {
        self.last_reply()
            .is_some_and(|reply| reply.number == self.number && reply.outcome == Outcome::Done)
    }
}

/// The lifetime in the header of a permission. Without a header, the bytes in front of the range.
fn lifetime(granted: &Granted) -> Remote {
    let before = Remote { addr: granted.address - 8, rkey: granted.keys[0] };
    granted.header.unwrap_or(before)
}

//! Grants to requests that had ended as unanswered. The client gives them back as soon as the
//! connection works again.

use std::collections::HashMap;

use parking_lot::Mutex;
use scheme::request_queue::return_all;
use scheme::{Answer, Error};
use verbs::Nic;

use super::Client;
use crate::patronus::message::{Ask, Outcome, PermissionNumber, REPLY_BYTES, Reply};

/// Late requests and their grants.
#[derive(Default)]
pub(super) struct Late {
    /// Requests without a reply, by number.
    asked: Mutex<HashMap<u64, LateAsk>>,
    granted: Mutex<Vec<LateGrant>>,
}

#[derive(Clone, Copy)]
enum LateAsk {
    Object,
    Permission,
}

/// A grant that no caller has got.
#[derive(Clone, Copy)]
enum LateGrant {
    Object { entry: u32, address: u64 },
    Permission(PermissionNumber),
}

impl Late {
    /// Notes a request that has ended as unanswered.
    pub fn note(&self, number: u64, ask: &Ask) {
        let late = match ask {
            Ask::Allocate { .. } => LateAsk::Object,
            Ask::Acquire { .. } | Ask::Renew { .. } => LateAsk::Permission,
            Ask::Revoke { .. } | Ask::Free { .. } | Ask::FreeGrant { .. } | Ask::Extend { .. } => {
                return;
            }
        };
        self.asked.lock().insert(number, late);
    }

    /// Takes the late replies of a connection that was reset. No further one comes.
    pub fn take(&self, replies: &[[u8; REPLY_BYTES]]) {
        let mut asked = self.asked.lock();
        for reply in replies.iter().filter_map(Reply::parse) {
            let (Some(late), Outcome::Granted(granted)) = (asked.get(&reply.number), reply.outcome)
            else {
                continue;
            };
            self.granted.lock().push(match late {
                LateAsk::Object => {
                    LateGrant::Object { entry: granted.object.entry, address: granted.address }
                }
                LateAsk::Permission => LateGrant::Permission(granted.permission),
            });
        }
        asked.clear();
    }
}

impl<N: Nic> Client<N> {
    /// Frees the objects and ends the permissions of late replies.
    pub(super) fn return_late(&self) -> Answer<'_, ()> {
        Box::pin(return_all(&self.late.granted, async |grant| {
            let attempt = "returning a grant that came late";
            let _credit = self.ending_slot().await;
            let ask = match grant {
                LateGrant::Object { entry, address } => Ask::FreeGrant { entry, address },
                LateGrant::Permission(permission) => Ask::Revoke { permission },
            };
            match self.ask(attempt, ask).await? {
                // The memory node has taken the grant back, or its lease has ended.
                Outcome::Done | Outcome::NotYours => Ok::<_, Error>(()),
                other => Err(super::unexpected(attempt, other)),
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use scheme::{GroupId, Others, Right, Sharing};

    use super::*;
    use crate::patronus::message::{AskTerms, Granted, Lifetime, ObjectId};

    /// A reply that grants `permission` to the request with this number.
    fn granting(number: u64, permission: PermissionNumber) -> [u8; REPLY_BYTES] {
        let granted = Granted {
            object: ObjectId { entry: 5, generation: 1 },
            permission,
            address: 4096,
            waited_us: 0,
            word: Lifetime(0),
            lanes: 0,
            keys: Default::default(),
            header: None,
        };
        Reply { number, outcome: Outcome::Granted(granted), entry: 5.into() }.to_bytes()
    }

    /// A late grant is kept for its return, whichever request it answers. A grant that no
    /// unanswered request has is not.
    #[test]
    fn late_grants_are_kept_for_their_return() {
        let terms = AskTerms {
            group: GroupId(0),
            right: Right::Write,
            sharing: Sharing::Exclusive,
            lease_us: 1,
            wait_us: 0,
        };
        let object = ObjectId { entry: 5, generation: 1 };
        let permission = PermissionNumber::new(1, 0);
        let late = Late::default();
        late.note(1, &Ask::Allocate { terms, bytes: 64, others: Others::None });
        late.note(2, &Ask::Acquire { terms, object, offset: 0, len: 64 });
        late.note(3, &Ask::Renew { permission, lease_us: 1 });
        let reply = |number| granting(number, PermissionNumber::new(10 + number, 0));
        late.take(&[1, 2, 3, 4].map(reply));
        let kept: Vec<_> = late.granted.lock().drain(..).collect();
        assert!(matches!(kept[0], LateGrant::Object { entry: 5, address: 4096 }));
        let serials = kept[1..].iter().map(|grant| match grant {
            LateGrant::Permission(number) => number.serial(),
            LateGrant::Object { .. } => panic!("a permission is given back as an object"),
        });
        assert_eq!(serials.collect::<Vec<_>>(), [12, 13]);
        // The connection of these requests is closed.
        late.take(&[reply(1)]);
        assert!(late.granted.lock().is_empty());
    }
}

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

//! Checks for schemes with leases: objects, permissions, and the keys that open them.
//!
//! The oracle compares the memory node's book, the access rights in the NIC's tables, the executed
//! WQEs, the donated bytes, and the beliefs of honest clients:
//!
//! | file | content |
//! | --- | --- |
//! | `book` | the book after each event: conflicts, rights, order of waiters, deadlines |
//! | `keys` | keys and accesses: each lies in a permission, none outlives it |
//! | `bytes` | changed bytes have a cause, and memory without an object is zero |
//! | `beliefs` | what honest clients know: their replies, and when their leases end |

mod beliefs;
mod book;
mod bytes;
mod keys;

pub use beliefs::Use;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use rnic::engine::{NextKind, Reachability, StepOutcome};
use scheme::{ClientId, DomainToken, Object, Others};
use schemes::patronus::book::PermissionId;
use verbs::Key;

use self::beliefs::Belief;
use super::{ClientIndex, Oracle};
use crate::check::invariant::{Invariant, Violation};
use crate::check::lease_plan::LeasePlan;
use crate::check::node_view::BookState;
use crate::qp::Observed;
use crate::time::Time;

/// Time that the memory node may need for a turn, beyond the stalls of its CPU.
const TURN: Time = Time::us(400);

/// An object whose name other clients know.
#[derive(Clone, Copy, Debug)]
pub struct Posted {
    pub object: Object,
    pub others: Others,
    pub owner: ClientIndex,
    pub domain: Option<DomainToken>,
    /// A client has asked to free it.
    pub freeing: bool,
}

/// State of the checks for leases.
pub(in crate::check) struct Leases {
    lease_max: Duration,
    /// Whether all clocks keep to the assumed bound of their rates.
    drift_is_bounded: bool,
    /// Whether a client's fiber may stand still.
    has_stalls: bool,
    /// Whether window operations fail, or the NIC has few windows.
    windows_may_fail: bool,
    /// Whether a window operation that fails breaks the QP of accesses: windows of type 2.
    breaks_qps: bool,
    /// The book after the last event.
    book: BookState,
    /// Changes of the book so far.
    changes: u64,
    /// Permissions that were granted after a wait, and those whose lease has run out.
    waited: u64,
    expired: u64,
    /// Keys of permissions by the replies to clients, until the permission has ended.
    granted: BTreeMap<PermissionId, Vec<Key>>,
    /// All keys that each client was granted.
    had: HashSet<(ClientIndex, Key)>,
    /// Keys of permissions that have ended.
    dead: HashSet<(ClientIndex, Key)>,
    /// Permissions that have ended, and requests that no longer wait.
    ended: HashSet<PermissionId>,
    /// Final deadlines of permissions that were noticed.
    noticed: HashMap<PermissionId, Duration>,
    /// Times at which requests began to wait.
    waits: BTreeMap<PermissionId, Time>,
    beliefs: Vec<Belief>,
    /// Objects whose names other clients know, of all times.
    pub board: Vec<Posted>,
}

impl Leases {
    pub fn new(plan: &LeasePlan, has_stalls: bool) -> Self {
        Self {
            lease_max: Duration::from_micros(plan.lease_max_us),
            drift_is_bounded: plan.drift_is_bounded,
            has_stalls: has_stalls || plan.pauses,
            windows_may_fail: plan.windows_may_fail(),
            breaks_qps: plan.window_faults > 0 && plan.has_qp_windows,
            book: BookState::default(),
            changes: 0,
            waited: 0,
            expired: 0,
            granted: BTreeMap::new(),
            had: HashSet::new(),
            dead: HashSet::new(),
            ended: HashSet::new(),
            noticed: HashMap::new(),
            waits: BTreeMap::new(),
            beliefs: Vec::new(),
            board: Vec::new(),
        }
    }
}

fn wrong(invariant: Invariant, why: impl Into<String>) -> Violation {
    Violation { invariant, why: why.into() }
}

impl Oracle {
    /// Has the scheme with leases checked from now on.
    pub fn expect_leases(&mut self, leases: Leases) {
        self.leases = Some(Box::new(leases));
    }

    /// State of the checks for leases. Panics in other schemes.
    pub fn leases(&mut self) -> &mut Leases {
        self.leases.as_mut().expect("a scheme with leases")
    }

    /// Runs a check of the leases and records its violation.
    fn check_leases<T>(
        &mut self,
        check: impl FnOnce(&mut Leases, &Self) -> Result<T, Violation>,
    ) -> Option<T> {
        let mut leases = self.leases.take()?;
        let result = check(&mut leases, self);
        self.leases = Some(leases);
        match result {
            Ok(result) => Some(result),
            Err(violation) => {
                self.wrong(violation.invariant, violation.why);
                None
            }
        }
    }

    /// Checks a step of a QP.
    pub(super) fn after_step_on_leases(
        &mut self,
        o: &Observed,
        read: impl FnOnce(&mut Vec<Reachability>),
    ) {
        self.look_at_book();
        if matches!(o.next.kind, NextKind::Window | NextKind::Invalidate) {
            self.check_access_rights(read);
        }
        let client = self.of_function(o.function);
        // Accesses between two queues of the same function are not restricted.
        let elsewhere = o.towards != Some(o.function);
        let aim = o.aim.filter(|aim| !o.lost && aim.len > 0 && elsewhere);
        if let (Some(client), Some(aim)) = (client, aim) {
            match o.stepped {
                StepOutcome::Done => self.lease_accessed(client, &aim),
                StepOutcome::Failed if self.place(aim.addr).is_some() => {
                    self.clients[client].refusals += 1;
                    self.counts.refusals[!self.clients[client].honest as usize] += 1;
                }
                _ => {}
            }
        }
        self.account_for_lease_bytes(client.zip(aim));
    }

    /// Checks any other event.
    pub(super) fn after_cpu_on_leases(&mut self, read: impl FnOnce(&mut Vec<Reachability>)) {
        self.look_at_book();
        self.check_access_rights(read);
        self.account_for_lease_bytes(None);
    }

    /// Returns the client with a number at the memory node.
    fn client_of(&self, id: ClientId) -> Option<ClientIndex> {
        (0..self.clients.len()).find(|client| self.is(*client, id))
    }

    fn name_of_id(&self, id: ClientId) -> &str {
        self.client_of(id).map_or("a departed client", |client| self.name(client))
    }

    /// Returns the objects that a client has allocated and not freed.
    pub(super) fn objects_of(&self, client: ClientIndex) -> Vec<u32> {
        let Some(id) = self.clients[client].link.client() else { return Vec::new() };
        let book = self.leases.as_ref().map(|leases| &leases.book);
        let objects = book.into_iter().flat_map(|book| &book.objects);
        objects.filter(|object| object.owner == Some(id)).map(|object| object.id.entry).collect()
    }
}

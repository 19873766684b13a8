//! Seeded fault tests: clients of all kinds in a world with many faults, and invariants that must
//! hold.
//!
//! A seed determines the whole run: the size of the world, the clients and their programs
//! (`scenario`), and which faults occur when (`drive`). After every step the `oracle` checks
//! the invariants.
//!
//! - `honest`: clients that follow the protocol, with the pool's own client code.
//! - `lessee`: honest clients of a scheme with leases, which share objects.
//! - `hostile`: clients that violate the protocol, with raw verbs.
//! - `node_view`: the memory node's allocation state, in one form for all schemes.

mod case;
mod drive;
mod honest;
mod hostile;
mod invariant;
mod lease_plan;
mod lessee;
mod node_view;
mod oracle;
mod scenario;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use rnic::port::inline::InlineFunction;
use scheme::DomainToken;
use schemes::finemem::block::{SECTION_ORDER, SPAN_ORDER};

use crate::cluster::{Connector, Link};
use crate::fiber;
use crate::ids::NodeId;
use crate::nic::SimNic;
use crate::params::Params;
use crate::random::Random;
use crate::time::Time;

pub use case::Case;
pub use hostile::Misuse;
pub use invariant::{Invariant, Violation};
pub use lease_plan::LeasePlan;
pub use oracle::EventCounts;
pub use scenario::{End, FaultPlan, Role, Scenario};

use oracle::{ClientIndex, Oracle};

/// Result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The first violated invariant, if any.
    pub violation: Option<Violation>,
    /// The trace, if it was requested.
    pub trace: Option<String>,
    /// Counts of what happened.
    pub counts: EventCounts,
    /// Virtual time that passed.
    pub took: Time,
}

/// Runs the world that a seed determines, to its end or to the first violation.
pub fn run(case: Case, seed: u64, trace: bool) -> Outcome {
    run_scenario(&Scenario::draw(case, seed), seed, trace)
}

/// Runs a scenario, which may be that of the seed with changes, to its end or to the first
/// violation.
pub fn run_scenario(scenario: &Scenario, seed: u64, trace: bool) -> Outcome {
    thread_local! {
        static PARAMS: Arc<Params> = Arc::new(Params::connectx5());
    }
    PARAMS.with(|params| drive::run(scenario, seed, params, trace))
}

/// State that a client's fiber shares with the driver of the world.
#[derive(Clone)]
struct Context {
    client: ClientIndex,
    oracle: Rc<RefCell<Oracle>>,
    connector: Connector,
    link: Link,
    /// The client's function of the NIC, once it has one.
    function: Rc<RefCell<Option<InlineFunction>>>,
    /// Set by the client when its process is to be killed.
    dies: Rc<Cell<bool>>,
    node: NodeId,
    groups: u16,
    lanes: usize,
    case: Case,
    /// Clocks and limits, in a scheme with leases.
    leases: Option<LeasePlan>,
    /// Token of the client's domain.
    domain: Option<DomainToken>,
    /// RNG for adversarial NIC operations, if enabled.
    nic_random: Option<Random>,
}

impl Context {
    /// Calls `f` with the oracle.
    fn with_oracle<T>(&self, f: impl FnOnce(&mut Oracle) -> T) -> T {
        f(&mut self.oracle.borrow_mut())
    }

    /// Returns the verbs of this process. Creates its function at the first call.
    fn nic(&self) -> SimNic {
        let function = match &*self.function.borrow() {
            Some(function) => function.clone(),
            None => self.connector.function().expect("the NIC has a free function"),
        };
        self.with_oracle(|o| o.set_function(self.client, function.id()));
        *self.function.borrow_mut() = Some(function.clone());
        let nic = self.connector.nic(self.node, &function);
        self.with_oracle(|o| o.clients[self.client].hooks = Some(nic.hooks().clone()));
        nic
    }

    /// Returns a random block order (log2 of the number of chunks), if the case has several block
    /// sizes. Orders below a span, below a section, and of sections are equally likely.
    fn some_order(&self, random: &mut Random) -> Option<u32> {
        let layout = self.with_oracle(|o| o.shape())?;
        let order = match random.below(3) {
            0 => random.below(SPAN_ORDER.raw().into()) as u32,
            1 => SPAN_ORDER.raw() + random.below(SECTION_ORDER.in_spans().into()) as u32,
            _ => SECTION_ORDER.raw() + random.below(3) as u32,
        };
        Some(order.min(layout.order_max().raw()))
    }

    /// Returns whether a client may try again to connect after this error.
    fn may_connect_again(&self, error: &pool::Error) -> bool {
        match error {
            // Killed clients are not forgotten yet, or a window could not be bound.
            pool::Error::Refused { .. } => true,
            pool::Error::Verbs(_) => {
                self.leases.as_ref().is_some_and(|plan| plan.windows.is_some())
            }
            _ => false,
        }
    }

    fn now(&self) -> Time {
        self.with_oracle(|o| o.now)
    }

    /// Records that the client is about to close its connection; from now on it owns nothing.
    fn leaves(&self) {
        self.with_oracle(|o| {
            let by = o.now + drive::RECLAIM;
            o.departed(self.client, by);
            o.note(|o| format!("{} leaves", o.name(self.client)));
        });
    }

    /// Waits to be killed.
    fn die(&self) {
        self.dies.set(true);
        loop {
            fiber::wait();
        }
    }
}

/// Returns the text of an error in traces.
///
/// The texts of errors that occur in recorded traces are fixed here, because `tests/golden.txt` has
/// digests of traces, which must not depend on the wording of [`pool::Error`].
fn trace_text(error: &pool::Error) -> String {
    use pool::Error as E;
    match error {
        E::OutOfMemory { bytes } => format!(
            "allocating {bytes} bytes: the memory node has no free chunk; wait for it or free some"
        ),
        E::Access { op, status } => format!("{op}: refused by the memory node's NIC: {status}"),
        E::ManagementBroken { attempt, status } => format!(
            "{attempt}: the management QP broke ({status}); it is re-established by reset and \
             connect"
        ),
        other => other.to_string(),
    }
}

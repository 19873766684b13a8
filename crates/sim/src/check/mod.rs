//! Faults by seed: clients of all kinds in a world where much goes wrong, and what must hold all the same.
//!
//! A seed decides everything: how large the world is, who is in it and what they do ([`scenario`]), what
//! fails and when ([`drive`]). After every step the [`oracle`] compares what is with what must be.
//!
//! - [`honest`]: clients that keep to the rules, on the pool's own client.
//! - [`hostile`]: clients that do not, on raw verbs.
//! - [`books`]: the memory node's books, whichever scheme keeps them.

mod books;
mod case;
mod drive;
mod honest;
mod hostile;
mod invariant;
mod oracle;
mod scenario;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use pool::finemem::layout::{SECTION_ORDER, SPAN_ORDER};
use rnic::port::inline::InlineFunction;

use crate::cluster::{Connector, Link};
use crate::fiber;
use crate::nic::SimNic;
use crate::params::Params;
use crate::random::Random;
use crate::state::NodeId;
use crate::time::Time;

pub use case::Case;
pub use invariant::{Invariant, Violation};
pub use oracle::Seen;
pub use scenario::{End, Role, Scenario, Trouble};

use oracle::{Oracle, Who};

/// What came of a seed.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What was wrong, if anything was.
    pub violation: Option<Violation>,
    /// What happened, line by line, if that was wanted.
    pub trace: Option<String>,
    /// What happened, in numbers.
    pub seen: Seen,
    /// Virtual time that passed.
    pub took: Time,
}

/// Runs the world that a seed draws, to its end or to the first violation.
pub fn run(case: Case, seed: u64, trace: bool) -> Outcome {
    thread_local! {
        static PARAMS: Arc<Params> = Arc::new(Params::connectx5());
    }
    let scenario = Scenario::draw(case, seed);
    PARAMS.with(|params| drive::run(&scenario, seed, params, trace))
}

/// What a client's fiber shares with who drives the world.
#[derive(Clone)]
struct Context {
    who: Who,
    oracle: Rc<RefCell<Oracle>>,
    connector: Connector,
    link: Link,
    /// Its function of the NIC, once it has one.
    function: Rc<RefCell<Option<InlineFunction>>>,
    /// It wants to die.
    dies: Rc<Cell<bool>>,
    node: NodeId,
    groups: u16,
    lanes: usize,
    case: Case,
    /// What it draws from for what it does with its NIC, if it does such things.
    meddles: Option<Random>,
}

impl Context {
    /// Tells the oracle something, or asks it.
    fn tell<T>(&self, f: impl FnOnce(&mut Oracle) -> T) -> T {
        f(&mut self.oracle.borrow_mut())
    }

    /// The verbs of this process.
    fn nic(&self) -> SimNic {
        let function = match &*self.function.borrow() {
            Some(function) => function.clone(),
            None => self.connector.function().expect("the NIC has functions enough"),
        };
        self.tell(|o| o.has_function(self.who, function.id()));
        *self.function.borrow_mut() = Some(function.clone());
        self.connector.nic(self.node, &function)
    }

    /// The logarithm of how many chunks are to be in a block, where there are several sizes: as often a few chunks as a
    /// few spans and as a few sections.
    fn some_order(&self, random: &mut Random) -> Option<u32> {
        let layout = self.tell(|o| o.shape())?;
        let order = match random.below(3) {
            0 => random.below(SPAN_ORDER as u64) as u32,
            1 => SPAN_ORDER + random.below((SECTION_ORDER - SPAN_ORDER) as u64) as u32,
            _ => SECTION_ORDER + random.below(3) as u32,
        };
        Some(order.min(layout.order_max()))
    }

    fn now(&self) -> Time {
        self.tell(|o| o.now)
    }

    /// It is about to say goodbye: from now on nothing is its own.
    fn leaves(&self) {
        self.tell(|o| {
            let by = o.now + drive::RECLAIM;
            o.gone(self.who, by);
            o.note(|o| format!("{} leaves", o.name(self.who)));
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

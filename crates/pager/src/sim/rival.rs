//! Another process of the run, which shares its bound with the simulated one, and the user, who
//! changes the bound.

use super::fiber::{point, trace};
use super::threads::wake_worker;
use super::world::World;
use crate::lease::Lease;
use crate::ledger::{GUARANTEED_UNITS, Ledger, Owner, UNIT_PAGES};
use crate::memory::Memory;
use crate::pages::Pages;

/// Pages of a unit in the simulation.
const SIM_UNIT_PAGES: u32 = 4;
/// Leased pages that are never present.
pub(crate) const RESERVED_PAGES: u32 = 3;
/// Steps of the rival before it ends.
const STEPS: u32 = 12;

/// A lease of the guaranteed units from a ledger of `units` units.
pub(crate) fn lease(units: u32) -> Lease {
    let ledger = Ledger::in_memory(2, units * UNIT_PAGES);
    let lease = Lease::claim(ledger, Owner::new(1, 1), SIM_UNIT_PAGES).expect("a slot is free");
    assert_eq!(lease.take(GUARANTEED_UNITS), GUARANTEED_UNITS);
    lease
}

/// Returns how many pages may be present with the units that are leased now.
pub(crate) fn may_be_present<M: Memory>(pages: &Pages<M>, lease: &Lease) -> u32 {
    let opened = pages.state().flights.opened_windows() * pages.sizes.window;
    lease.pages() - RESERVED_PAGES - opened
}

/// Runs the rival: it leases units, wants more, and gives them back, while the total changes.
pub(crate) fn run(world: &World) {
    let full = world.setup.shared_units.expect("the bound is shared");
    let ledger = world.pages.lease().expect("the bound is shared").ledger();
    let owner = Owner::new(2, 2);
    let (slot, _) = ledger.claim(owner).expect("a slot is free");
    let slot = (slot, owner);
    let within = |from: u32, to: u32| world.random.borrow_mut().within(from..=to);
    let mut own = 0;
    for _ in 0..STEPS {
        (0..within(1, 60)).for_each(|_| point());
        match within(0, 4) {
            0 | 1 => {
                let wanted = within(1, full);
                let got = ledger.take(slot, own, wanted, false).expect("its own slot");
                own += got;
                ledger.set_wants(slot.0, got < wanted);
                trace(|| format!("the rival takes {got} of {wanted} units"));
            }
            2 => {
                let units = within(0, own);
                ledger.release(slot, own, units).expect("its own slot");
                own -= units;
            }
            _ => {
                let total = within(0, full);
                ledger.set_total(total * UNIT_PAGES);
                trace(|| format!("the total is {total} units"));
            }
        }
        wake_worker(world);
    }
    ledger.leave(slot, own).expect("its own slot");
    ledger.set_total(full * UNIT_PAGES);
    world.running.set(world.running.get() - 1);
}

//! Aligned clusters of pages, as Linux reads them ahead: the neighbours of each page that is read.
//!
//! Linux aligns clusters of 2^`vm.page-cluster` pages, by default 8, in the swap device or at
//! addresses. Here the cluster is of addresses, because slots have no order.

use super::window::{Owner, Span};
use super::{Fault, Found, Plan, Streams};

/// Pages of a cluster.
pub const CLUSTER_PAGES: u32 = 8;

/// The owner of windows that no context has planned. No context has this birth.
const NO_CONTEXT: Owner = Owner { context: 0, birth: u64::MAX };

impl Streams {
    /// Plans the cluster of a page in the pool. Each page of the cluster is mapped by a fault of
    /// its own, because Linux maps pages of the swap cache so.
    pub(super) fn cluster(&mut self, fault: &Fault) -> Plan {
        let mut plan = Plan::one();
        if fault.found != Found::Remote {
            return plan;
        }
        let page = fault.page.0;
        let pages = CLUSTER_PAGES.min(self.settings.window_pages);
        let first = page - page % pages;
        let end = first.saturating_add(pages).min(fault.bounds.end).max(page + 1);
        let first = first.max(fault.bounds.start).min(page);
        // The caller skips the page of the fault, which is not in the pool any more.
        if end - first > 1 {
            let span = Span { first, pages: end - first, step: 1 };
            plan.issue[0] = self.windows.plan(NO_CONTEXT, span);
        }
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Advice, Settings, WindowId};
    use super::*;
    use crate::page_table::PageId;

    fn fault(page: u32, bounds: std::ops::Range<u32>, found: Found) -> Fault {
        Fault { thread: 1, page: PageId(page), bounds, advice: Advice::Normal, found }
    }

    fn streams() -> Streams {
        Streams::new(Settings { clusters: true, ..Settings::default() })
    }

    #[test]
    fn cluster_is_aligned_and_ends_at_its_mapping() {
        let planned = |page, bounds| {
            let plan = streams().cluster(&fault(page, bounds, Found::Remote));
            assert_eq!((plan.map, plan.behind), (1, None));
            assert!(plan.issue[1..].iter().all(Option::is_none), "one window");
            plan.issue[0].map(|window| (window.first.0, window.pages, window.step))
        };
        assert_eq!(planned(21, 0..100), Some((16, 8, 1)));
        assert_eq!(planned(16, 0..100), Some((16, 8, 1)));
        assert_eq!(planned(21, 18..23), Some((18, 5, 1)));
        assert_eq!(planned(21, 21..22), None);
    }

    #[test]
    fn pages_of_a_cluster_are_mapped_one_by_one_and_counted() {
        let mut streams = streams();
        let window = streams.fault(&fault(16, 0..100, Found::Remote)).issue[0].unwrap();
        streams.arrived(window.id, 7);
        for page in 17..22 {
            let plan = streams.fault(&fault(page, 0..100, Found::Ready(window.id)));
            assert_eq!(plan, Plan::one());
        }
        streams.reclaimed(window.id, 2);
        let counters = streams.counters();
        assert_eq!((counters.issued, counters.used, counters.wasted), (7, 5, 2));
        assert_eq!(streams.in_flight(), 0);
    }

    #[test]
    fn no_cluster_is_read_for_a_page_that_needs_no_read() {
        for found in [Found::Absent, Found::Evicted, Found::Late(WindowId(0))] {
            assert_eq!(streams().fault(&fault(16, 0..100, found)), Plan::one(), "{found:?}");
        }
        let random = Fault { advice: Advice::Random, ..fault(16, 0..100, Found::Remote) };
        assert_eq!(streams().fault(&random), Plan::one());
    }
}

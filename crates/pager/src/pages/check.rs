//! Invariants of the pager's state, for debug builds and the simulator.

use crate::memory::{Memory, Position};
use crate::page_table::{PageId, State as PageState};
use crate::pages::Pages;
use crate::policy::Policy;
use crate::shelf::Use;

impl<M: Memory> Pages<M> {
    /// Checks the invariants that hold whenever no thread works on pages:
    ///
    /// - the number of resident pages is the number of resident entries, and the policy holds these
    ///   pages and no others;
    /// - each shelved page has a position that names it, and each position that holds a page is
    ///   named by that page;
    /// - a clean position has a slot;
    /// - the number of present pages is at most the limit, if `bounded`.
    pub fn check_quiet(&self, bounded: bool) {
        let state = self.state();
        state.shelf.check();
        let (mut resident, mut shelved) = (0, 0);
        self.table.touched(0..self.table.len() as u32, |part| {
            for page in part.map(PageId) {
                let entry = self.table.load(page);
                assert!(!entry.is_busy(), "{page:?} is busy: {entry:?}");
                match entry.state() {
                    PageState::Resident => {
                        assert!(state.policy.holds(page.0), "{page:?} can be no victim: {entry:?}");
                        resident += 1;
                    }
                    PageState::Shelved => {
                        shelved += 1;
                        let position = Position(entry.position().expect("a position"));
                        let record = state.shelf.record(position);
                        assert_eq!(record.page, page, "the record of {position:?}");
                    }
                    PageState::Absent | PageState::Remote => {}
                }
            }
        });
        assert_eq!(state.resident, resident, "resident pages");
        assert_eq!(state.policy.pages(), resident, "pages that can be victims");
        let mut named = 0;
        for position in state.shelf.held() {
            let record = state.shelf.record(position);
            let is_named = self.table.load(record.page).position() == Some(position.0);
            let used = state.shelf.used(position);
            let in_flight = matches!(used, Use::Fetching(..) | Use::Writing(..));
            assert!(is_named || in_flight, "{position:?} holds {record:?}, which is elsewhere");
            assert!(used != Use::Clean || record.slot.is_some(), "{position:?} has no slot");
            named += u32::from(is_named);
        }
        assert_eq!(named, shelved, "positions that hold a page");
        if bounded {
            assert!(state.room() > 0 || state.present() == state.allowed(), "{}", state.present());
        }
    }

    /// Returns true if a lock is held under which no thread may wait.
    #[cfg(test)]
    pub(crate) fn is_locked(&self) -> bool {
        self.state.try_lock().is_err()
            || self.slots.try_lock().is_err()
            || self.emptied.try_lock().is_err()
    }
}

//! Chunks on their way back to the source.

use crate::place::Place;

struct Return<C> {
    id: u64,
    place: Place,
    chunk: C,
    is_busy: bool,
    /// The source has failed to free the chunk, and may have freed it nevertheless.
    has_failed: bool,
}

/// Chunks that the source has not confirmed to be free.
pub(crate) struct Returns<C> {
    all: Vec<Return<C>>,
    next_id: u64,
}

impl<C> Default for Returns<C> {
    fn default() -> Self {
        Self { all: Vec::new(), next_id: 0 }
    }
}

impl<C: Clone> Returns<C> {
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Enters a chunk that is about to be freed. Returns the number of the return.
    pub fn begin(&mut self, place: Place, chunk: C) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.all.push(Return { id, place, chunk, is_busy: true, has_failed: false });
        id
    }

    /// A chunk that is to be freed again.
    pub fn next_retry(&mut self) -> Option<(u64, C)> {
        let next = self.all.iter_mut().find(|each| !each.is_busy)?;
        next.is_busy = true;
        Some((next.id, next.chunk.clone()))
    }

    /// Ends a return. After a failure the chunk stays for a retry, unless it has come back since.
    pub fn finish(&mut self, id: u64, is_freed: bool) {
        let Some(at) = self.all.iter().position(|each| each.id == id) else { return };
        if is_freed {
            self.all.swap_remove(at);
        } else {
            (self.all[at].is_busy, self.all[at].has_failed) = (false, true);
        }
    }

    /// Ends the return of the chunk at `place`, because the source has allocated the chunk again.
    /// False if a repeated free is in progress, which may free the chunk under its new owner.
    pub fn arrived(&mut self, place: Place) -> bool {
        let Some(at) = self.all.iter().position(|each| each.place == place) else { return true };
        if self.all[at].is_busy && self.all[at].has_failed {
            return false;
        }
        self.all.swap_remove(at);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(number: u64) -> Place {
        Place::new(0, number * 4096).unwrap()
    }

    #[test]
    fn failed_return_is_repeated_until_it_succeeds() {
        let mut returns = Returns::default();
        let id = returns.begin(place(1), 'a');
        assert_eq!(returns.next_retry(), None, "in progress");
        returns.finish(id, false);
        assert_eq!(returns.next_retry(), Some((id, 'a')));
        returns.finish(id, false);
        assert_eq!(returns.next_retry(), Some((id, 'a')));
        returns.finish(id, true);
        assert_eq!((returns.next_retry(), returns.count()), (None, 0));
    }

    #[test]
    fn chunk_that_comes_back_is_not_freed_again() {
        let mut returns = Returns::default();
        // The source allocates the chunk again before its free has returned.
        let first = returns.begin(place(1), 'a');
        assert!(returns.arrived(place(1)));
        let second = returns.begin(place(1), 'b');
        returns.finish(first, false);
        assert_eq!(returns.next_retry(), None, "the second return is in progress");
        // The free has failed, but was executed.
        returns.finish(second, false);
        assert!(returns.arrived(place(1)));
        assert_eq!((returns.next_retry(), returns.count()), (None, 0));
    }

    #[test]
    fn chunk_under_a_repeated_free_is_refused() {
        let mut returns = Returns::default();
        let id = returns.begin(place(1), 'a');
        returns.finish(id, false);
        returns.next_retry();
        assert!(!returns.arrived(place(1)));
        assert!(returns.arrived(place(2)));
    }
}

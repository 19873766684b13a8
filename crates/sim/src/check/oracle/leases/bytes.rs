//! Checks of the donated bytes: each change has a cause, and memory without an object is zero.

use rnic::engine::Target;
use scheme::Right;
use schemes::patronus::book::{ObjectState, ObjectView, Place};
use verbs::Access;

use super::{Leases, wrong};
use crate::check::invariant::{Invariant, Violation};
use crate::check::oracle::{ClientIndex, Oracle};

impl Oracle {
    /// Checks every byte that has changed in the last event: by an access of a client, or by the
    /// memory node, which clears.
    pub(super) fn account_for_lease_bytes(&mut self, by: Option<(ClientIndex, Target)>) {
        let mut now = std::mem::take(&mut self.now_bytes);
        self.memory.read(0, &mut now);
        let changed = now != self.image;
        let objects = self.leases.as_ref().map_or(0, |leases| leases.changes);
        if changed || objects != self.zeros_checked {
            let runs = runs(&self.image, &now);
            self.image.copy_from_slice(&now);
            self.zeros_checked = objects;
            self.check_leases(|leases, oracle| {
                for (first, end) in &runs {
                    leases.check_change(oracle, (*first, *end), by.as_ref())?;
                }
                leases.check_zeros(oracle)
            });
        }
        self.now_bytes = now;
    }
}

/// Returns the ranges of bytes that differ.
fn runs(old: &[u8], new: &[u8]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for at in (0..old.len()).filter(|at| old[*at] != new[*at]) {
        match runs.last_mut().filter(|(_, end)| *end == at) {
            Some((_, end)) => *end += 1,
            None => runs.push((at, at + 1)),
        }
    }
    runs
}

/// Returns the bytes of an object, with those in front of it that are for a header.
fn with_header(object: &ObjectView) -> Place {
    let (first, place) = (object.whole.offset, object.place);
    Place { offset: first, len: place.offset + place.len - first }
}

/// Returns whether bytes are in front of an object, where only the published form has any: a
/// header, which the memory node writes.
fn is_in_header(object: &ObjectView, (first, len): (u64, u64)) -> bool {
    object.whole.offset <= first && first + len <= object.place.offset
}

impl Leases {
    fn check_change(
        &self,
        oracle: &Oracle,
        (first, end): (usize, usize),
        by: Option<&(ClientIndex, Target)>,
    ) -> Result<(), Violation> {
        let range = (first as u64, (end - first) as u64);
        if let Some((client, aim)) = by {
            let name = oracle.name(*client);
            let from = oracle.offset(aim.addr);
            let covers = from.is_some_and(|from| from <= range.0 && end as u64 <= from + aim.len);
            if aim.need == Access::REMOTE_READ || !covers {
                let why = format!("{name} changes bytes {range:?} outside its access");
                return Err(wrong(Invariant::Accesses, why));
            }
            let changes_own_lifetime = self.is_own_lifetime(oracle, *client, aim);
            if !changes_own_lifetime && !self.allows(oracle, *client, range, Right::Write) {
                let why = format!("{name} changes bytes {range:?} without a permission");
                return Err(wrong(Invariant::Permissions, why));
            }
            return Ok(());
        }
        if self.book.objects.iter().any(|object| is_in_header(object, range)) {
            return Ok(());
        }
        if oracle.image[first..end].iter().any(|b| *b != 0) {
            let why = format!("bytes {range:?} change without a cause");
            return Err(wrong(Invariant::Contents, why));
        }
        let is_over =
            |place: Place| place.offset < end as u64 && range.0 < place.offset + place.len;
        let used = self
            .book
            .objects
            .iter()
            .find(|object| object.state != ObjectState::Clearing && is_over(object.place));
        if let Some(object) = used {
            let why = format!("bytes {range:?} are cleared, which belong to {object:?}");
            return Err(wrong(Invariant::Released, why));
        }
        let start = oracle.memory.addr() + range.0;
        let reach =
            oracle.reaches.iter().find(|r| r.start < start + range.1 && start < r.start + r.len);
        if let Some(client) = reach.and_then(|r| oracle.of_function(r.function)) {
            let name = oracle.name(client);
            let why = format!("bytes {range:?} are cleared while {name} can access them");
            return Err(wrong(Invariant::Released, why));
        }
        Ok(())
    }

    /// Memory that belongs to no object is zero.
    fn check_zeros(&self, oracle: &Oracle) -> Result<(), Violation> {
        let objects = self.book.objects.iter();
        let mut places: Vec<Place> = objects.map(with_header).collect();
        places.sort_by_key(|place| place.offset);
        places.push(Place { offset: oracle.image.len() as u64, len: 0 });
        let mut from = 0;
        for place in places {
            let to = place.offset as usize;
            let gap = oracle.image.get(from..to).unwrap_or_default();
            if let Some(at) = gap.iter().position(|b| *b != 0) {
                let why = format!("byte {:#x} belongs to no object and is not zero", from + at);
                return Err(wrong(Invariant::Released, why));
            }
            from = to + place.len as usize;
        }
        Ok(())
    }
}

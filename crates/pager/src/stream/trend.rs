//! The majority trend of a context's newest deltas (Leap, ATC 2020, section 3).

/// Number of deltas that a context remembers.
const DELTAS: usize = 32;

/// The newest deltas between consecutive faults of a context, in pages.
#[derive(Clone, Debug)]
pub(super) struct Deltas {
    /// Newest first, so that each window of the vote is a prefix.
    newest: [i16; DELTAS],
    length: usize,
}

impl Deltas {
    pub(super) const fn new() -> Deltas {
        Deltas { newest: [0; DELTAS], length: 0 }
    }

    /// Records a delta. The oldest of 32 is forgotten. A delta beyond 16 bits is stored as the
    /// nearest 16-bit number, which is too long for a stride.
    pub(super) fn push(&mut self, delta: i64) {
        self.newest.copy_within(..DELTAS - 1, 1);
        self.newest[0] = delta.clamp(i16::MIN.into(), i16::MAX.into()) as i16;
        self.length = (self.length + 1).min(DELTAS);
    }

    /// Returns the delta that more than half of the newest 4, 8, 16 or 32 deltas have. The shortest
    /// window with such a delta counts. A single delta is no trend.
    pub(super) fn trend(&self) -> Option<i32> {
        if self.length < 2 {
            return None;
        }
        // Boyer and Moore's vote: if a prefix has a majority, the candidate is the majority. The
        // vote continues from one prefix to the next.
        let (mut candidate, mut votes, mut voted) = (0, 0u32, 0);
        for length in [4, 8, 16, DELTAS] {
            let prefix = &self.newest[..length.min(self.length)];
            for &delta in &prefix[voted..] {
                if votes == 0 {
                    candidate = delta;
                }
                if delta == candidate { votes += 1 } else { votes -= 1 }
            }
            voted = prefix.len();
            let count = prefix.iter().filter(|delta| **delta == candidate).count();
            if 2 * count > prefix.len() {
                return Some(candidate.into());
            }
            if prefix.len() < length {
                return None;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn deltas(oldest_first: &[i64]) -> Deltas {
        let mut deltas = Deltas::new();
        oldest_first.iter().for_each(|delta| deltas.push(*delta));
        deltas
    }

    #[test]
    fn trend_is_found_in_the_shortest_window() {
        assert_eq!(deltas(&[]).trend(), None);
        assert_eq!(deltas(&[1]).trend(), None);
        assert_eq!(deltas(&[1, 2]).trend(), None);
        assert_eq!(deltas(&[1, 1]).trend(), Some(1));
        assert_eq!(deltas(&[9, 1, 5, 1, 1]).trend(), Some(1));
        let turned = [&[1; 28][..], &[-1; 3]].concat();
        assert_eq!(deltas(&turned).trend(), Some(-1), "3 of the newest 4");
        let disturbed = [&[7; 6][..], &[100, -100]].concat();
        assert_eq!(deltas(&disturbed).trend(), Some(7), "6 of the newest 8");
        assert_eq!(deltas(&[100, -99].repeat(16)).trend(), None);
    }

    #[test]
    fn long_delta_keeps_its_sign() {
        assert_eq!(deltas(&[1 << 40; 4]).trend(), Some(i16::MAX.into()));
        assert_eq!(deltas(&[-(1 << 40); 4]).trend(), Some(i16::MIN.into()));
    }

    proptest! {
        #[test]
        fn trend_equals_a_count_of_each_window(all in prop::collection::vec(-2i64..3, 0..80)) {
            let newest: Vec<i64> = all.iter().rev().copied().take(DELTAS).collect();
            let majority = |window: &[i64]| {
                (-2i64..3).find(|d| 2 * window.iter().filter(|e| *e == d).count() > window.len())
            };
            let windows = [4, 8, 16, 32].map(|length| &newest[..length.min(newest.len())]);
            let expected = windows.iter().find_map(|window| majority(window));
            let expected = expected.filter(|_| newest.len() > 1);
            prop_assert_eq!(deltas(&all).trend().map(i64::from), expected);
        }
    }
}

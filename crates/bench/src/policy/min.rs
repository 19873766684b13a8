//! Belady's MIN: evicts the page whose next access is farthest in the future.
//!
//! MIN has the least number of misses of all policies that read a page only when it is accessed.
//! Its misses get the same discount for streams as those of a policy, but it does not take the
//! discount into account when it evicts. So its cost is a reference, and not a strict lower bound.

use std::collections::BinaryHeap;

use super::replay::{Access, Costs, Outcome, Streams};

/// Replays accesses with `limit` resident pages.
pub fn replay(accesses: &[Access], limit: u32, costs: &Costs) -> Outcome {
    let mut next = vec![u64::MAX; accesses.len()];
    let pages = accesses.iter().map(|access| access.page + 1).max().unwrap_or(0) as usize;
    let mut last = vec![u64::MAX; pages];
    for (at, access) in accesses.iter().enumerate().rev() {
        next[at] = std::mem::replace(&mut last[access.page as usize], at as u64);
    }
    // The next access of each resident page.
    let mut resident: Vec<Option<u64>> = vec![None; pages];
    let mut count = 0;
    let mut farthest = BinaryHeap::new();
    let mut streams = Streams::default();
    let mut outcome = Outcome::default();
    for (at, access) in accesses.iter().enumerate() {
        if resident[access.page as usize].is_none() {
            while count >= limit {
                let (then, page) = farthest.pop().expect("every resident page is in the heap");
                if resident[page as usize] == Some(then) {
                    resident[page as usize] = None;
                    count -= 1;
                }
            }
            let is_resident = |page| resident.get(page as usize).is_some_and(Option::is_some);
            match costs.streams && streams.continues(access, is_resident) {
                true => outcome.ahead += 1,
                false => outcome.hard += 1,
            }
            count += 1;
        }
        resident[access.page as usize] = Some(next[at]);
        farthest.push((next[at], access.page));
    }
    outcome.with_costs(costs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cyclic_scan_misses_only_what_does_not_fit() {
        let scan: Vec<Access> =
            (0..10 * 100).map(|at| Access { page: at * 7 % 100 * 2, thread: 1 }).collect();
        let outcome = replay(&scan, 90, &Costs { streams: false, ..Costs::default() });
        // 100 first accesses; then at least 10 misses for each of the 9 further rounds.
        assert!((190..=215).contains(&outcome.hard), "{outcome:?}");
        let all = replay(&scan, 100, &Costs::default());
        assert_eq!((all.hard, all.ahead), (100, 0));
    }

    #[test]
    fn streams_have_their_discount() {
        let scan: Vec<Access> = (0..1000).map(|page| Access { page, thread: 1 }).collect();
        let outcome = replay(&scan, 100, &Costs::default());
        assert_eq!((outcome.hard, outcome.ahead), (2, 998));
    }
}

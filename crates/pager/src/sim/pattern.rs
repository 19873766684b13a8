//! Orders of accesses of whole programs, for the game of an observer ([`super::observer`]).

use super::random::Random;

/// The order in which a program uses its pages, after it has written each page once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// Page after page, again and again.
    Sequential,
    /// Random pages.
    Random,
    /// Passes over the points, with the means in between.
    KMeans,
    /// Partitions from both ends, then the same of each part.
    Quicksort,
}

impl Pattern {
    /// Returns the first `count` pages of the order.
    pub(crate) fn list(self, pages: u32, count: u32, random: &mut Random) -> Vec<u32> {
        let mut list = Vec::new();
        while list.len() < count as usize {
            match self {
                Self::Sequential => list.extend(0..pages),
                Self::Random => list.push(random.below(pages)),
                Self::KMeans => k_means(pages, random, &mut list),
                Self::Quicksort => quicksort(0, pages, random, &mut list),
            }
        }
        list.truncate(count as usize);
        list
    }
}

/// One pass of k-means: an eighth of the pages are means.
fn k_means(pages: u32, random: &mut Random, list: &mut Vec<u32>) {
    let means = pages / 8;
    for point in means..pages {
        list.extend([point, random.below(means)]);
    }
}

/// Quicksort of the pages from `first` to `end`.
fn quicksort(first: u32, end: u32, random: &mut Random, list: &mut Vec<u32>) {
    if end - first < 2 {
        list.extend(first..end);
        return;
    }
    let pivot = random.within(first + 1..=end - 1);
    let (mut left, mut right) = (first, end);
    while left < right {
        if (left < pivot && random.once_in(2)) || right <= pivot {
            list.push(left);
            left += 1;
        } else {
            right -= 1;
            list.push(right);
        }
    }
    quicksort(first, pivot, random, list);
    quicksort(pivot, end, random, list);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_use_all_pages() {
        for pattern in [Pattern::Sequential, Pattern::Random, Pattern::KMeans, Pattern::Quicksort] {
            let list = pattern.list(40, 1_000, &mut Random::new(1, 40));
            assert_eq!(list.len(), 1_000);
            assert!((0..40).all(|page| list.contains(&page)), "{pattern:?}");
            assert!(list.iter().all(|page| *page < 40), "{pattern:?}");
        }
    }
}

//! Doubly linked lists of slabs. A slab is in one list at most, so a change allocates nothing.

use crate::slab::Slab;

/// Number of no slab.
const NONE: u32 = u32::MAX;

/// Number of a list.
pub(crate) type ListId = u8;

/// Links of a slab.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    before: u32,
    after: u32,
    /// The list that has the slab.
    pub list: Option<ListId>,
}

impl Default for Link {
    fn default() -> Self {
        Self { before: NONE, after: NONE, list: None }
    }
}

/// First and last slab of each list.
#[derive(Debug)]
pub(crate) struct Lists(Vec<(u32, u32)>);

impl Lists {
    pub fn new(count: usize) -> Self {
        Self(vec![(NONE, NONE); count])
    }

    /// The first slab of `list`.
    #[inline]
    pub fn first(&self, list: ListId) -> Option<u32> {
        Some(self.0[usize::from(list)].0).filter(|slab| *slab != NONE)
    }

    /// Moves a slab to the end of `to`, or to no list.
    pub fn place(&mut self, slabs: &mut [Slab], slab: u32, to: Option<ListId>) {
        if slabs[slab as usize].link.list == to {
            return;
        }
        self.remove(slabs, slab);
        let Some(list) = to else { return };
        let ends = &mut self.0[usize::from(list)];
        slabs[slab as usize].link = Link { before: ends.1, after: NONE, list: to };
        match ends.1 {
            NONE => ends.0 = slab,
            last => slabs[last as usize].link.after = slab,
        }
        ends.1 = slab;
    }

    fn remove(&mut self, slabs: &mut [Slab], slab: u32) {
        let link = std::mem::take(&mut slabs[slab as usize].link);
        let Some(list) = link.list else { return };
        let ends = &mut self.0[usize::from(list)];
        match link.before {
            NONE => ends.0 = link.after,
            before => slabs[before as usize].link.after = link.after,
        }
        match link.after {
            NONE => ends.1 = link.before,
            after => slabs[after as usize].link.before = link.before,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(lists: &Lists, slabs: &[Slab], list: ListId) -> Vec<u32> {
        let next = |slab: &u32| Some(slabs[*slab as usize].link.after).filter(|s| *s != NONE);
        std::iter::successors(lists.first(list), next).collect()
    }

    #[test]
    fn slabs_leave_lists_from_any_position() {
        let mut slabs: Vec<Slab> = (0..5).map(|_| Slab::default()).collect();
        let mut lists = Lists::new(2);
        for slab in 0..5 {
            lists.place(&mut slabs, slab, Some(0));
        }
        assert_eq!(content(&lists, &slabs, 0), [0, 1, 2, 3, 4]);
        for slab in [2, 0, 4] {
            lists.place(&mut slabs, slab, Some(1));
        }
        lists.place(&mut slabs, 0, Some(1));
        assert_eq!(content(&lists, &slabs, 0), [1, 3]);
        assert_eq!(content(&lists, &slabs, 1), [2, 0, 4]);
        for slab in 0..5 {
            lists.place(&mut slabs, slab, None);
        }
        assert_eq!((lists.first(0), lists.first(1)), (None, None));
    }
}

//! The expected content of the program's memory: for each page, the newest content that the program
//! or a device wrote.
//!
//! While one thread drops a page, other threads may use it. Then several contents are possible: the
//! drop takes effect at one moment between its start and its end.

use crate::memory::model::Bytes;

/// One possible content of a page.
#[derive(Clone)]
struct Version {
    content: Box<Bytes>,
    /// The drop in progress has taken effect already.
    is_dropped: bool,
}

/// The possible contents of a page.
struct Expected {
    versions: Vec<Version>,
    /// A thread drops the page now.
    is_dropping: bool,
}

impl Expected {
    fn add_zeros(&mut self) {
        let zeros = Version { content: Bytes::zeros(), is_dropped: true };
        if !self.versions.iter().any(|v| v.is_dropped && v.content.is_zero()) {
            self.versions.push(zeros);
        }
    }
}

/// The possible contents of all pages.
pub(crate) struct Oracle {
    pages: Vec<Expected>,
}

impl Oracle {
    /// Pages of zeros.
    pub(crate) fn new(pages: u32) -> Self {
        let zeros = || Expected {
            versions: vec![Version { content: Bytes::zeros(), is_dropped: false }],
            is_dropping: false,
        };
        Self { pages: (0..pages).map(|_| zeros()).collect() }
    }

    /// Sets the content of a page before the program starts.
    pub(crate) fn starts_with(&mut self, page: u32, content: Box<Bytes>) {
        self.pages[page as usize].versions = vec![Version { content, is_dropped: false }];
    }

    /// Checks the content that a thread sees in a page.
    pub(crate) fn sees(&mut self, page: u32, seen: &Bytes) {
        let expected = &mut self.pages[page as usize];
        if !expected.versions.iter().any(|version| *version.content == *seen) {
            let versions = expected.versions.iter().map(|v| format!("{:?}", v.content));
            let versions = versions.collect::<Vec<_>>().join("; or ");
            panic!("page {page}: the program sees {seen:?} instead of {versions}");
        }
        if expected.versions.len() > 1 || expected.is_dropping {
            expected.versions.retain(|version| *version.content == *seen);
            if expected.is_dropping && expected.versions.iter().any(|v| !v.is_dropped) {
                expected.add_zeros();
            }
        }
    }

    /// Records that a page, whose content was just checked, is written.
    pub(crate) fn writes(&mut self, page: u32, content: &Bytes) {
        let expected = &mut self.pages[page as usize];
        let old = expected.versions.iter().any(|v| !v.is_dropped);
        let new = expected.versions.iter().any(|v| v.is_dropped);
        expected.versions.clear();
        for (exists, is_dropped) in [(old, false), (new, true)] {
            if exists {
                expected.versions.push(Version { content: Box::new(content.clone()), is_dropped });
            }
        }
        if expected.is_dropping && old {
            expected.add_zeros();
        }
    }

    /// Records the start of a drop.
    pub(crate) fn drop_begins(&mut self, page: u32) {
        let expected = &mut self.pages[page as usize];
        assert!(!expected.is_dropping, "drops exclude each other");
        expected.versions.iter_mut().for_each(|version| version.is_dropped = false);
        expected.is_dropping = true;
        expected.add_zeros();
    }

    /// Records the end of a drop.
    pub(crate) fn drop_ends(&mut self, page: u32) {
        let expected = &mut self.pages[page as usize];
        expected.is_dropping = false;
        expected.versions.retain(|version| version.is_dropped);
        expected.versions.iter_mut().for_each(|version| version.is_dropped = false);
        assert!(!expected.versions.is_empty(), "page {page}: the drop has had no effect");
    }

    /// Records that a page reads as zeros from now on.
    pub(crate) fn dropped(&mut self, page: u32) {
        let expected = &mut self.pages[page as usize];
        if expected.is_dropping {
            let old = expected.versions.iter().any(|v| !v.is_dropped);
            expected.versions.clear();
            if old {
                expected.versions.push(Version { content: Bytes::zeros(), is_dropped: false });
            }
            expected.add_zeros();
        } else {
            expected.versions = vec![Version { content: Bytes::zeros(), is_dropped: false }];
        }
    }

    /// Records that a page's content has moved to another page, while no thread used either.
    pub(crate) fn moved(&mut self, from: u32, to: u32) {
        self.pages.swap(from as usize, to as usize);
        self.dropped(from);
    }

    /// Returns the possible contents of a page.
    pub(crate) fn contents(&self, page: u32) -> Vec<Box<Bytes>> {
        self.pages[page as usize].versions.iter().map(|version| version.content.clone()).collect()
    }
}

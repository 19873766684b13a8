//! Pages of a simulated kernel, for tests of single parts of the logic.

use crate::backing::Backing;
use crate::config::LOCAL_BYTES_MIN;
use crate::fingerprint::Fingerprints;
use crate::memory::model::{Bytes, ModelMemory, Odds};
use crate::page_table::{Entry, PageId, PageTable, State};
use crate::pages::{Hand, Pages, Sizes};
use crate::policy::Name;
use crate::sim::random::Random;
use crate::stats::Stats;
use crate::store::FileTransport;

/// Number of pages.
const PAGES: u32 = 4096;

/// Pages that are all absent. The simulated kernel refuses nothing.
pub(crate) fn pages() -> Pages<ModelMemory> {
    let sizes = Sizes::new(LOCAL_BYTES_MIN);
    let transport = FileTransport::open("memory:16MiB", sizes.frames()).expect("a store");
    let backing = Backing::new(Box::new(transport), std::env::temp_dir(), None);
    let memory = ModelMemory::new(PAGES, sizes.positions, None, Odds::default(), Random::new(1, 1));
    let table = PageTable::new(PAGES as usize).expect("memory for a page table");
    let stats = Stats::private().expect("memory for counters");
    let prints = Fingerprints::new().expect("random numbers for the key");
    let policy = Name::default().policy(sizes.limit, PAGES, 1).expect("memory for the order");
    Pages::new(table, memory, backing, stats, sizes, prints, policy)
}

/// Pages of which the first `count`, each with another content, are resident.
pub(crate) fn resident_pages(count: u32) -> Box<Pages<ModelMemory>> {
    let pages = Box::new(pages());
    pages.memory.watch(&pages.table);
    for page in 0..count {
        let mut content = Bytes::zeros();
        content.0[0] = u64::from(page) + 1;
        pages.memory.start_with(PageId(page), content);
        pages.enter(PageId(page), Entry::resident(None));
    }
    pages
}

/// Pages of which the first `count`, each with another content, are in the pool.
pub(crate) fn remote_pages(count: u32) -> Box<Pages<ModelMemory>> {
    let pages = resident_pages(count);
    pages.take_out_range(&mut Hand::default(), 0..count);
    (0..count).for_each(|page| assert_eq!(pages.table.load(PageId(page)).state(), State::Remote));
    pages
}

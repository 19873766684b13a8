//! Pages of a simulated kernel, for tests of single parts of the logic.

use crate::backing::Backing;
use crate::config::LOCAL_BYTES_MIN;
use crate::fingerprint::Fingerprints;
use crate::memory::model::{ModelMemory, Odds};
use crate::page_table::PageTable;
use crate::pages::{Pages, Sizes};
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

//! The compute node's own tier (the paper's donee-HBM): pages in its memory, chosen at random like
//! those of the memory node.

use parking_lot::Mutex;
use scheme::Error;
use verbs::DmaMemory;

use super::random::Random;
use super::table::FreePages;
use super::{ClientOptions, PAGE_BYTES};

/// Pages in the memory of the compute node.
pub struct LocalTier {
    memory: DmaMemory,
    free: FreePages,
    /// Locked while `free` changes.
    random: Mutex<Random>,
}

impl LocalTier {
    /// The tier that `options` ask for.
    pub fn new(options: &ClientOptions) -> Result<Option<Self>, Error> {
        let pages = (options.local_bytes / PAGE_BYTES as u64) as u32;
        if pages == 0 {
            return Ok(None);
        }
        let memory = DmaMemory::anonymous(pages as usize * PAGE_BYTES);
        let memory = memory.map_err(|e| Error::System {
            attempt: format!("allocating {} bytes for the local tier", options.local_bytes),
            source: e.into(),
        })?;
        let random = Mutex::new(Random::new(options.local_seed)?);
        Ok(Some(Self { memory, free: FreePages::new(0..pages), random }))
    }

    /// Number of pages.
    pub fn pages(&self) -> u32 {
        self.free.range().end
    }

    /// Stores a page at a random free place; `None` if no place is free.
    pub fn store(&self, content: &[u8]) -> Option<u32> {
        let page = self.free.draw(&mut self.random.lock())?;
        self.memory.write(offset(page), content);
        Some(page)
    }

    /// Stores other content at the place of a stored page.
    pub fn overwrite(&self, page: u32, content: &[u8]) {
        self.memory.write(offset(page), content);
    }

    /// Copies a stored page.
    pub fn load(&self, page: u32, into: &mut [u8]) {
        self.memory.read(offset(page), into);
    }

    /// Clears and frees a stored page.
    pub fn invalidate(&self, page: u32) {
        self.memory.zero(offset(page), PAGE_BYTES);
        let _changing = self.random.lock();
        self.free.add(page);
    }
}

fn offset(page: u32) -> usize {
    page as usize * PAGE_BYTES
}

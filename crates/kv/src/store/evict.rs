//! Choice of keys to evict, from eight bits a slot of local metadata.

use super::Store;
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::reach::Reach;
use crate::table::Table;

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Notes a use of the key in `slot`.
    pub(super) fn used(&self, table: &Table, slot: usize, _is_written: bool) {
        table.local.lock().clock[slot] = 0;
    }
}

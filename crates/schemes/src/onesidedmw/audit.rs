//! Consistency check of the pool, for tests and for `status`. No request may be in flight.

use std::collections::HashSet;

use scheme::Error;
use scheme::index::IndexRange;
use verbs::direct::DirectNic;

use super::node::Node;

/// Checks that every chunk is either owned or in the free queue once, that the queue has no hole
/// from the head on, that the permits equal its length, and that windows are bound exactly if their
/// chunk is owned.
pub fn check<N: DirectNic>(node: &Node<N>) -> Result<(), Error> {
    let broken = |why: String| Error::Protocol { attempt: "auditing the pool".into(), why };
    if !node.leaving.is_empty() {
        return Err(Error::Refused {
            attempt: "auditing the pool".into(),
            why: format!(
                "chunks of {} departed clients are being reclaimed: retry when that is complete",
                node.leaving.len()
            ),
        });
    }
    let memory = node.memory();
    let (run, filled) = memory.queued();
    if run.len() != filled {
        return Err(broken(format!(
            "{filled} slots of the free queue are filled, {} from the head on",
            run.len()
        )));
    }
    let free_chunks = node.free_chunks()?;
    if free_chunks != run.len() as i64 {
        return Err(broken(format!(
            "{free_chunks} allocations can take an entry, and the free queue has {}",
            run.len()
        )));
    }
    let mut free = HashSet::new();
    for value in run {
        let i = memory.entry_of(value).ok_or_else(|| {
            broken(format!("the free queue holds {value:#x}, which names no entry"))
        })?;
        if !free.insert(i) {
            return Err(broken(format!("chunk {i} is in the free queue twice")));
        }
    }
    for i in memory.shape.entries().iter() {
        let owner = memory.owner(i);
        if (owner == 0) != free.contains(&i) {
            return Err(broken(format!(
                "chunk {i} has owner {owner} and is {}in the free queue",
                if free.contains(&i) { "" } else { "not " }
            )));
        }
        for key in memory.window_keys(i) {
            // The table's tag is the tag of the next bind; a bound window already has it.
            let info = node.nic.query_key(key)?;
            if info.bound != (owner != 0) {
                return Err(broken(format!(
                    "chunk {i} has owner {owner}, but its window {key} has {} bytes, bound to {:?}",
                    info.len,
                    info.bound_to()
                )));
            }
            let now = info.key(key.index());
            if now != key {
                return Err(broken(format!(
                    "chunk {i}: the table has key {key}, but the NIC has {now}"
                )));
            }
        }
    }
    Ok(())
}

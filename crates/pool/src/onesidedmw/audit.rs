//! The check that the pool is whole, for tests and for `status`: nothing may be in flight.

use std::collections::HashSet;

use fabric::direct::DirectNic;

use super::node::Node;
use crate::Error;

/// Every chunk is either owned or once in the free queue; the queue is a run without holes from
/// the head on; permits equal its length; windows of free chunks are unbound, of owned ones bound.
pub fn check<N: DirectNic>(node: &Node<N>) -> Result<(), Error> {
    let broken = |why: String| Error::Protocol { attempt: "auditing the pool".into(), why };
    if !node.leaving.is_empty() {
        return Err(Error::Refused {
            attempt: "auditing the pool".into(),
            why: format!(
                "what {} compute nodes had is being taken back: ask again when that is over",
                node.leaving.len()
            ),
        });
    }
    let memory = node.memory();
    let chunks = memory.shape.chunks;
    let (run, filled) = memory.queued();
    if run.len() != filled {
        return Err(broken(format!("{filled} slots are filled, {} from the head on", run.len())));
    }
    if memory.permits() != run.len() as i64 {
        return Err(broken(format!("{} permits for {} entries", memory.permits(), run.len())));
    }
    let mut free = HashSet::new();
    for value in run {
        let i = memory
            .entry_of(value)
            .ok_or_else(|| broken(format!("the free queue holds {value:#x}: no entry")))?;
        if !free.insert(i) {
            return Err(broken(format!("chunk {i} is in the free queue twice")));
        }
    }
    for i in 0..chunks {
        let owner = memory.owner(i);
        if (owner == 0) != free.contains(&i) {
            return Err(broken(format!(
                "chunk {i} has owner {owner} and is {}in the free queue",
                if free.contains(&i) { "" } else { "not " }
            )));
        }
        for key in memory.window_keys(i) {
            // The table's tag is the next binding's to present; a bound window has it already.
            let info = node.nic.query_key(key)?;
            if info.is_bound() != (owner != 0) {
                return Err(broken(format!(
                    "chunk {i} has owner {owner}, its window {key} has {} bytes, for {:?}",
                    info.len, info.bound_to
                )));
            }
            if info.key != key {
                return Err(broken(format!(
                    "chunk {i}: the table has key {key}, the NIC {}",
                    info.key
                )));
            }
        }
    }
    Ok(())
}

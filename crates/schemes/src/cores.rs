//! The cores of a memory node's CPU: the one that serves each compute node, and the threads that
//! drive them. The schemes in which the CPU answers requests use this module.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use scheme::client_table::refuse;
use scheme::wakeup::CqEvents;
use scheme::{ClientId, Cpu, CpuEvents, Error, Worker};
use verbs::Nic;

use crate::rpc::ControlMode;

/// The core that serves each compute node. A core serves its compute nodes alone, so that their
/// requests need no lock of another core.
pub struct Assignment {
    by_client: RwLock<HashMap<ClientId, usize>>,
    cores: usize,
    clients_max: usize,
}

impl Assignment {
    /// No compute nodes yet, of which `cores` cores may serve `clients_max`.
    pub fn new(cores: usize, clients_max: u32) -> Self {
        Self { by_client: RwLock::default(), cores, clients_max: clients_max as usize }
    }

    /// The core that serves a compute node. The first one has the work of unknown compute nodes.
    pub fn core_of(&self, client: ClientId) -> usize {
        self.by_client.read().get(&client).copied().unwrap_or(0)
    }

    /// The core with the fewest compute nodes.
    ///
    /// # Errors
    /// [`Error::Refused`] if the limit of compute nodes is reached.
    pub fn least_loaded(&self) -> Result<usize, Error> {
        let by_client = self.by_client.read();
        let max = self.clients_max;
        if by_client.len() >= max {
            return Err(refuse(format!("{max} compute nodes are connected")));
        }
        let mut counts = vec![0; self.cores];
        by_client.values().for_each(|core| counts[*core] += 1);
        let least = counts.iter().enumerate().min_by_key(|(_, count)| **count);
        Ok(least.expect("there is a core").0)
    }

    /// Assigns a new compute node to a core.
    pub fn assign(&self, client: ClientId, core: usize) {
        self.by_client.write().insert(client, core);
    }

    /// Forgets a compute node that has left.
    pub fn remove(&self, client: ClientId) {
        self.by_client.write().remove(&client);
    }

    /// The compute nodes with their cores.
    pub fn all(&self) -> Vec<(ClientId, usize)> {
        self.by_client.read().iter().map(|(client, core)| (*client, *core)).collect()
    }
}

/// The CPU of a memory node with these event sources, one for each core. `worker` makes the handle
/// of a core. A single core is polled by the thread that polls the whole memory node.
pub fn cpu<N: Nic>(
    events: Vec<Arc<CqEvents<N>>>,
    worker: impl Fn(usize) -> Box<dyn Worker>,
    control: ControlMode,
) -> Cpu {
    let count = events.len();
    Cpu {
        events: Some(Arc::new(AllCores(events))),
        workers: (0..count).filter(|_| count > 1).map(worker).collect(),
        polls: control == ControlMode::Polling,
    }
}

/// Event source for all cores together. If one thread polls all cores, it waits on the first core's
/// CQ.
struct AllCores<N: Nic>(Vec<Arc<CqEvents<N>>>);

impl<N: Nic> CpuEvents for AllCores<N> {
    fn wait(&self, timeout: Duration) -> Result<bool, Error> {
        self.0[0].wait(timeout)
    }

    fn wake(&self) {
        self.0.iter().for_each(|events| events.wake());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_compute_node_gets_the_core_with_the_fewest() {
        let assignment = Assignment::new(2, 3);
        for client in [1, 2, 3] {
            let core = assignment.least_loaded().unwrap();
            assert_eq!(core, usize::from(client == 2));
            assignment.assign(ClientId(client), core);
        }
        let refused = assignment.least_loaded().unwrap_err().to_string();
        assert!(refused.contains("3 compute nodes"), "{refused}");
        assignment.remove(ClientId(1));
        assignment.remove(ClientId(3));
        assert_eq!(assignment.least_loaded().unwrap(), 0);
        assert_eq!(assignment.all(), [(ClientId(2), 1)]);
        assert_eq!((assignment.core_of(ClientId(2)), assignment.core_of(ClientId(9))), (1, 0));
    }
}

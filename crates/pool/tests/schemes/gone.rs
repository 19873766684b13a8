//! The check for the death of the memory node's process.

use std::thread;
use std::time::{Duration, Instant};

use pool::{Error, GroupId};

use crate::place::{How, Node, Place};

/// Time limit until a waiting operation reports the death.
const NOTICED: Duration = Duration::from_millis(1000);

/// Operations in flight and later ones all end with [`Error::Gone`].
pub fn operations_end_when_the_node_dies(how: How) {
    let mut node = Node::start(Place::OtherProcess, how, 4096, 4);
    let pool = node.connect();
    let grant = pool.allocate_blocking().unwrap();
    while pool.allocate_in_blocking(GroupId(1)).is_ok() {}
    thread::scope(|s| {
        let pool = &pool;
        let spawn = |what: fn(&pool::Pool, &pool::Grant) -> Result<(), Error>| {
            s.spawn(move || {
                loop {
                    if let Err(e) = what(pool, &grant) {
                        return (Instant::now(), e);
                    }
                }
            })
        };
        let workers = [
            spawn(|pool, grant| pool.read_blocking(grant, 0, &mut [0; 64])),
            spawn(|pool, grant| pool.fetch_and_add_blocking(grant, 0, 1).map(drop)),
            spawn(|pool, _| pool.wait_for_memory_blocking(Duration::from_secs(60)).map(drop)),
            spawn(|pool, _| match pool.allocate_blocking() {
                Err(Error::OutOfMemory { .. }) => Ok(()),
                other => other.map(drop),
            }),
        ];
        thread::sleep(Duration::from_millis(50));
        let Node::OtherProcess(server) = &mut node else { unreachable!() };
        server.kill();
        let killed = Instant::now();
        for worker in workers {
            let (when, error) = worker.join().unwrap();
            assert!(matches!(error, Error::Gone { .. }), "{error}");
            let late = when.saturating_duration_since(killed);
            assert!(late < NOTICED, "noticed after {late:?}: {error}");
        }
    });
    for _ in 0..3 {
        let start = Instant::now();
        assert!(matches!(pool.allocate_blocking(), Err(Error::Gone { .. })));
        assert!(matches!(pool.read_blocking(&grant, 0, &mut [0; 8]), Err(Error::Gone { .. })));
        assert!(matches!(pool.free_blocking(grant), Err(Error::Gone { .. })));
        assert!(matches!(pool.node_status(), Err(Error::Gone { .. })));
        assert!(start.elapsed() < NOTICED);
    }
}

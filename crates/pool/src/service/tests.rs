//! Tests of failing system calls, and of the CPU time of the control threads.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::{Options, Pool};

fn settings() -> Settings {
    Settings { donate_bytes: 64 * 4096, chunk_bytes: 4096, ..Settings::default() }
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// The kernel refuses to watch a connection if the user has too many epoll watches
/// (`fs.epoll.max_user_watches`).
#[test]
fn failing_epoll_add_closes_one_connection() {
    let service = Service::start(&settings(), &Endpoint::Fresh).unwrap();
    let options = Options { groups: Some(1), ..Options::default() };
    let before = Pool::connect(service.path(), options.clone()).unwrap();
    service.shared.adds_to_fail.store(1, Ordering::SeqCst);
    let lost = crate::socket::connect(service.path()).unwrap();
    wait_for("the connection ends", || matches!(crate::socket::receive(&lost), Ok(None) | Err(_)));
    assert_eq!(service.failure(), None);
    let grant = before.allocate_blocking().unwrap();
    before.free_blocking(grant).unwrap();
    let after = Pool::connect(service.path(), options).unwrap();
    after.allocate_blocking().unwrap();
    let trouble = service.status().unwrap().trouble;
    assert_eq!(trouble.connections, 1, "{trouble:?}");
    assert!(trouble.last.is_some_and(|why| why.contains("No space left")));
}

/// The thread `granary-turn` would join itself if it ended the service.
#[test]
fn only_the_service_and_its_control_thread_can_end_the_service() {
    let service = Service::start(&settings(), &Endpoint::Fresh).unwrap();
    assert_eq!((Arc::strong_count(&service.shared), Arc::weak_count(&service.shared)), (2, 0));
}

#[test]
fn cpu_time_includes_both_control_threads() {
    let service = Service::start(&settings(), &Endpoint::Fresh).unwrap();
    let pool = Pool::connect(service.path(), Options::default()).unwrap();
    pool.free_blocking(pool.allocate_blocking().unwrap()).unwrap();
    let times = || [service.shared.clock.read(), service.shared.node_threads.cpu_time()];
    // On a busy machine, a thread has its first turn late.
    wait_for("both threads have run", || times().iter().all(|time| !time.is_zero()));
    let threads = || times().iter().sum::<Duration>();
    let (before, measured, after) = (threads(), service.control_cpu(), threads());
    assert!((before..=after).contains(&measured), "{measured:?} of {before:?} to {after:?}");
}

use std::net::UdpSocket;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::super::super::Function;
use super::super::driver::Bench;
use super::super::page::{SLEEPING, WAITER, WHERE, on_one_cpu};
use super::*;

fn host() -> Host {
    Host::start(Limits::default()).unwrap()
}

fn wire() -> RoceSocket {
    RoceSocket::new(UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap()
}

/// The physical function of `host` with a doorbell page that is not registered with the NIC.
fn with_page(host: &Host, driver: Option<Arc<EngineDriver>>) -> LocalFunction {
    let memory = DmaMemory::anonymous(page_bytes(1)).unwrap();
    let page = Arc::new(DoorbellPage { memory, slots: 1, wake: eventfd().unwrap(), driver });
    LocalFunction { host: host.clone(), id: FunctionId::PHYSICAL, page, _removal: None }
}

fn has_rung(fd: &OwnedFd) -> bool {
    rustix::io::read(fd, &mut [0; 8]).is_ok()
}

#[test]
fn nic_with_a_socket_draws_random_numbers() {
    let random = complete_limits(Limits::default(), &wire()).random.unwrap();
    let first = random().unwrap();
    assert!((0..8).any(|_| random().unwrap() != first));
}

#[test]
fn port_name_distinguishes_roce_from_shm() {
    let name = |host: &Host| Function::Local(host.physical()).port_name();
    let (plain, wired) = (host(), Host::start_roce(Limits::default(), wire()).unwrap());
    assert_eq!((plain.has_roce(), name(&plain)), (false, "shm"));
    assert_eq!((wired.has_roce(), name(&wired)), (true, "roce"));
}

#[test]
fn cpu_time_includes_nic_and_waker_thread() {
    let host = host();
    let by_thread = host
        .call(|_| {
            let time = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            let start = time();
            while time() == start {}
            time()
        })
        .unwrap();
    let by_thread = Duration::new(by_thread.tv_sec as u64, by_thread.tv_nsec as u32);
    assert!(!by_thread.is_zero());
    assert!(host.cpu_time().unwrap() >= by_thread);
    assert!(host.stats().unwrap().cpu >= by_thread);
    // The first function of another process starts the waker thread.
    assert!(host.0.waker.lock().is_none());
    let memory = DmaMemory::anonymous(page_bytes(1)).unwrap();
    let function = host.shared_function(FunctionLimits::default(), memory).unwrap();
    let waker = || {
        let waker = host.0.waker.lock();
        host.cpu_time_of(waker.as_ref().expect("the waker thread was started").thread()).unwrap()
    };
    let until = Instant::now() + Duration::from_secs(20);
    while waker().is_zero() {
        assert!(Instant::now() < until, "the waker thread does not run");
        std::thread::yield_now();
    }
    let by_nic = host.cpu_time_of(host.0.thread.as_ref().unwrap()).unwrap();
    let least = by_nic + waker();
    assert!(host.cpu_time().unwrap() >= least);
    drop(function);
}

#[test]
fn functions_report_the_end_of_the_nic_thread() {
    let host = host();
    let f = host.physical();
    assert!(f.check_alive().is_ok() && Function::Local(f.clone()).check_alive().is_ok());
    host.call(|nic| nic.stop = true).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while !host.0.thread.as_ref().unwrap().is_finished() {
        assert!(Instant::now() < until, "the thread does not end");
        std::thread::yield_now();
    }
    for alive in [f.check_alive(), Function::Local(f.clone()).check_alive()] {
        assert!(matches!(alive, Err(Error::Gone { .. })), "{alive:?}");
    }
    let sleeping = f.page.memory.word32(SLEEPING).load(Ordering::Relaxed);
    assert_eq!(sleeping, super::super::page::GONE);
    assert!(matches!(f.execute(Verb::AllocPd), Err(Error::Gone { .. })));
}

#[test]
fn dropping_the_last_handle_joins_the_nic_thread() {
    let host = host();
    let (shared, done) = (host.0.shared.clone(), Arc::new(AtomicBool::new(false)));
    let for_job = done.clone();
    // A job that is still running when the handle is dropped.
    shared.submit(Box::new(move |_| {
        (0..10_000).for_each(|_| std::thread::yield_now());
        for_job.store(true, Ordering::SeqCst);
    }));
    drop(host);
    assert!(done.load(Ordering::SeqCst) && !shared.is_alive());
}

#[test]
fn function_yields_its_cpu_only_on_the_nics_cpu() {
    let host = host();
    let f = with_page(&host, None);
    on_one_cpu(|cpu| {
        let word = |at| f.page.memory.word32(at);
        for offer in
            [LocalFunction::offer_cpu, |f: &LocalFunction| Function::Local(f.clone()).offer_cpu()]
        {
            word(WHERE).store(cpu + 2, Ordering::Relaxed);
            word(WAITER).store(0, Ordering::Relaxed);
            assert!(!offer(&f));
            assert_eq!(word(WAITER).load(Ordering::Relaxed), 0);
            word(WHERE).store(cpu + 1, Ordering::Relaxed);
            assert!(offer(&f));
            assert_eq!(word(WAITER).load(Ordering::Relaxed), cpu + 1);
        }
    });
}

#[test]
fn posted_receive_wakes_a_nic_that_waits_for_one() {
    let host = host();
    let f = with_page(&host, None);
    for receive_posted in [LocalFunction::receive_posted, |f: &LocalFunction| {
        Function::Local(f.clone()).receive_posted()
    }] {
        for (depth, wakes) in [(0, false), (1, false), (ASLEEP_RNR, true)] {
            f.page.memory.word32(SLEEPING).store(depth, Ordering::Relaxed);
            receive_posted(&f);
            assert_eq!(has_rung(&f.page.wake), wakes, "asleep at level {depth}");
        }
    }
}

#[test]
fn caller_runs_rounds_only_with_a_driver() {
    let host = host();
    for take_turn in
        [LocalFunction::poll_engine, |f: &LocalFunction| Function::Local(f.clone()).poll_engine()]
    {
        let mut bench = Bench::new(true);
        let f = with_page(&host, Some(bench.driver.clone()));
        assert!(!take_turn(&f), "there is no work");
        bench.post();
        assert!(take_turn(&f) && bench.q.is_done());
        assert!(!take_turn(&with_page(&host, None)));
    }
    for poll_engine_before_sleep in
        [LocalFunction::poll_engine_before_sleep, |f: &LocalFunction| {
            Function::Local(f.clone()).poll_engine_before_sleep()
        }]
    {
        let bench = Bench::new(true);
        let f = with_page(&host, Some(bench.driver.clone()));
        bench.driver.set_recent_work();
        assert!(poll_engine_before_sleep(&f));
        assert!(!poll_engine_before_sleep(&with_page(&host, None)));
    }
    for leave in
        [LocalFunction::before_sleep, |f: &LocalFunction| Function::Local(f.clone()).before_sleep()]
    {
        let bench = Bench::new(true);
        let f = with_page(&host, Some(bench.driver.clone()));
        leave(&f);
        assert!(bench.driver.is_released());
        leave(&with_page(&host, None));
    }
}

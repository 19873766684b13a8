use std::cell::Cell;

use rustix::time::{ClockId, clock_gettime};

use super::super::sleeper::{PROBATION_MIN, PROBATION_UNIT};
use super::*;
use crate::port::waker::{Next, WakeList, WakerQueue};

thread_local! {
    /// The clocks, in ns. The CPU clock stops while another thread has the CPU.
    static WALL: Cell<u64> = const { Cell::new(0) };
    static CPU: Cell<u64> = const { Cell::new(0) };
    /// The CPU time of each wake-up, in ns.
    static COST: Cell<u64> = const { Cell::new(0) };
    /// The time for which another thread has the CPU during each wake-up, in ns.
    static AWAY: Cell<u64> = const { Cell::new(0) };
    /// Number of wake-ups made.
    static MADE: Cell<u64> = const { Cell::new(0) };
}

fn add(to: &'static std::thread::LocalKey<Cell<u64>>, ns: u64) {
    to.set(to.get() + ns);
}

const TEST: Environment = Environment {
    wall: || WALL.get(),
    cpu: || CPU.get(),
    wake: |_| {
        add(&CPU, COST.get());
        add(&WALL, COST.get() + AWAY.get());
        add(&MADE, 1);
    },
};

const FAST: u64 = 4_000;
const F: FunctionId = FunctionId(1);
const G: FunctionId = FunctionId(2);

fn word() -> DmaMemory {
    DmaMemory::anonymous(4).unwrap()
}

/// The next wake-up of a list, ignoring any pause.
fn pop(list: &mut WakeList) -> Option<Arc<Sleeper>> {
    match list.pop(u64::MAX) {
        Next::Wake(sleeper) => Some(sleeper),
        Next::At(_) | Next::Nothing => None,
    }
}

/// A NIC with a waker thread whose place the test takes.
struct Nic {
    wakes: Wakes,
    waker: WakerQueue,
}

impl Nic {
    fn new() -> Self {
        let waker = WakerQueue::unserved();
        let mut wakes = Wakes::new(TEST);
        wakes.set_waker(waker.second_handle());
        Self { wakes, waker }
    }

    /// Makes a wake-up of `cost` ns. Returns true if the NIC thread makes it, false if the waker
    /// thread does.
    fn wake(&mut self, sleeper: &Arc<Sleeper>, cost: u64) -> bool {
        COST.set(cost);
        let made = MADE.get();
        self.wakes.queue(sleeper);
        self.wakes.run();
        assert!(self.wakes.is_empty());
        let by_nic = MADE.get() > made;
        if let Some(left) = self.waker.list(pop) {
            assert!(!by_nic);
            let time = left.wake_measured(&TEST);
            self.waker.list(|list| list.charge(&left, time, WALL.get()));
        }
        assert_eq!(MADE.get(), made + 1, "each wake-up is made once");
        by_nic
    }
}

/// A function of another process that has become trusted.
fn trusted(nic: &mut Nic) -> Arc<Sleeper> {
    nic.wakes.add_untrusted(F);
    let sleeper = nic.wakes.sleeper(F, word());
    (0..PROBATION_MIN).for_each(|_| _ = nic.wake(&sleeper, FAST));
    assert!(nic.wake(&sleeper, FAST));
    sleeper
}

#[test]
fn nic_thread_stops_wakeups_after_two_slow_ones() {
    let mut nic = Nic::new();
    let sleeper = trusted(&mut nic);
    let by_nic = (0..10_000).filter(|_| nic.wake(&sleeper, 280_000)).count();
    assert_eq!(by_nic, 2, "one by the wall clock, one by its CPU time");
    // Another function stays trusted.
    let other = nic.wakes.sleeper(G, word());
    assert!(nic.wake(&other, FAST));
}

#[test]
fn attached_function_starts_at_the_waker_thread() {
    for session in 1..100 {
        let mut nic = Nic::new();
        let f = FunctionId(session);
        nic.wakes.add_untrusted(f);
        let sleeper = nic.wakes.sleeper(f, word());
        assert!((0..100).all(|_| !nic.wake(&sleeper, 280_000)), "session {session}");
        let fast = (0..).take_while(|_| !nic.wake(&sleeper, FAST)).count();
        assert_eq!(fast, PROBATION_MIN as usize);
        nic.wakes.remove(f);
    }
}

#[test]
fn descheduled_nic_thread_blames_no_client() {
    let mut nic = Nic::new();
    let sleeper = trusted(&mut nic);
    AWAY.set(3_000_000);
    assert!((0..10_000).all(|_| nic.wake(&sleeper, FAST)));
}

/// The client makes its wake-ups slow whenever it is trusted, and fast while it is on probation.
#[test]
fn slow_wakeups_cost_no_more_time_than_quick_ones() {
    for slow in [31_000, 120_000, 280_000, 2_000_000] {
        let mut nic = Nic::new();
        let sleeper = trusted(&mut nic);
        let (mut in_slow, mut in_fast) = (0, 0);
        for _ in 0..100_000 {
            let is_trusted = sleeper.probation.is_trusted();
            let cost = if is_trusted { slow } else { FAST };
            if nic.wake(&sleeper, cost) {
                *(if is_trusted { &mut in_slow } else { &mut in_fast }) += cost;
            }
        }
        let earned = in_fast * PROBATION_UNIT.as_nanos() as u64 / FAST;
        assert!(in_slow <= earned + slow, "{slow}: {in_slow} of slow ones, {in_fast} of others");
    }
}

#[test]
fn round_of_wakeups_ends_after_its_time_limit() {
    let mut nic = Nic::new();
    let sleepers: Vec<_> = (1..=8).map(|f| nic.wakes.sleeper(FunctionId(f), word())).collect();
    sleepers.iter().for_each(|sleeper| nic.wakes.queue(sleeper));
    COST.set(15_000);
    nic.wakes.run();
    assert_eq!(MADE.get(), 2);
    COST.set(1_000);
    nic.wakes.run();
    assert_eq!(MADE.get(), 2 + WAKES_PER_ROUND as u64);
}

#[test]
fn pending_wakeup_covers_later_completions() {
    let mut nic = Nic::new();
    nic.wakes.add_untrusted(F);
    let sleeper = nic.wakes.sleeper(F, word());
    for _ in 0..100 {
        nic.wakes.queue(&sleeper);
        nic.wakes.run();
    }
    assert!(nic.waker.list(pop).is_some());
    assert!(nic.waker.list(pop).is_none());
}

#[test]
fn locked_list_delays_wakeups_without_loss() {
    let mut nic = Nic::new();
    nic.wakes.add_untrusted(F);
    let sleeper = nic.wakes.sleeper(F, word());
    nic.wakes.queue(&sleeper);
    nic.waker.second_handle().list(|_| nic.wakes.run());
    assert!(!nic.wakes.is_empty());
    nic.wakes.run();
    assert!(nic.wakes.is_empty() && nic.waker.list(pop).is_some());
}

#[test]
fn honest_function_waits_for_at_most_one_slow_wakeup() {
    let mut nic = Nic::new();
    let mut made = |function: FunctionId| {
        nic.wakes.add_untrusted(function);
        nic.wakes.sleeper(function, word())
    };
    let (slow, honest) = ([made(F), made(F), made(F), made(F)], made(G));
    let mut list = WakeList::default();
    slow.iter().for_each(|sleeper| list.push(sleeper.clone()));
    for _ in 0..1000 {
        let first = pop(&mut list).unwrap();
        assert_eq!(first.function, F);
        list.push(honest.clone());
        list.charge(&first, Duration::from_micros(280), 0);
        let second = pop(&mut list).unwrap();
        assert_eq!(second.function, G, "the honest function waits for more than one slow wake-up");
        list.charge(&second, Duration::from_micros(4), 0);
        list.push(first);
    }
    list.forget(F);
    assert!(pop(&mut list).is_none());
}

/// Holds also for many slow functions that make quick wake-ups between slow ones.
#[test]
fn slow_functions_share_a_tenth_of_a_core() {
    let mut made = |function| {
        let mut wakes = Wakes::new(TEST);
        wakes.add_untrusted(FunctionId(function));
        wakes.sleeper(FunctionId(function), word())
    };
    let slow: Vec<_> = (1..=20).map(&mut made).collect();
    let mut list = WakeList::default();
    slow.iter().for_each(|sleeper| list.push(sleeper.clone()));
    let honest = made(100);
    let (mut now, mut in_slow, mut count) = (0, 0, 0u64);
    const SECOND: u64 = 1_000_000_000;
    while now < SECOND {
        match list.pop(now) {
            Next::Wake(sleeper) => {
                count += 1;
                let cost = if count % 3 == 0 { FAST } else { 280_000 };
                sleeper.probation.on_measured_wake(Duration::from_nanos(cost));
                now += cost;
                in_slow += cost;
                list.charge(&sleeper, Duration::from_nanos(cost), now);
                list.push(sleeper);
            }
            Next::At(time) => {
                // An honest function does not have to wait for that time.
                list.push(honest.clone());
                let Next::Wake(next) = list.pop(now) else {
                    panic!("waits for the slow functions")
                };
                assert_eq!(next.function, honest.function);
                assert!(time > now);
                now = time;
            }
            Next::Nothing => panic!("each slow function has a wake-up in the list"),
        }
    }
    // The first wake-up of each function is not yet known to be slow.
    let first = slow.len() as u64 * 280_000;
    assert!(in_slow <= SECOND / 10 + first + 280_000, "{in_slow} ns of {SECOND}");
    assert!(in_slow >= SECOND / 11, "{in_slow} ns of {SECOND}: the core was idle");
}

#[test]
fn removed_function_has_no_wakeups_others_keep_theirs() {
    let mut wakes = Wakes::new(TEST);
    let (gone, there) = (wakes.sleeper(F, word()), wakes.sleeper(G, word()));
    wakes.queue(&gone);
    wakes.queue(&there);
    wakes.remove(F);
    COST.set(FAST);
    let made = MADE.get();
    wakes.run();
    assert_eq!(MADE.get() - made, 1);
    assert!(wakes.is_empty());
    assert!(gone.queued.load(Ordering::SeqCst) && !there.queued.load(Ordering::SeqCst));
}

#[test]
fn system_clocks_count_nanoseconds() {
    let clocks: [(fn() -> u64, ClockId); 2] = [
        (Environment::SYSTEM.wall, ClockId::Monotonic),
        (Environment::SYSTEM.cpu, ClockId::ThreadCPUTime),
    ];
    for (clock, id) in clocks {
        let time = || {
            let time = clock_gettime(id);
            Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
        };
        let (before, now, after) = (time(), Duration::from_nanos(clock()), time());
        assert!(before <= now && now <= after, "{before:?} {now:?} {after:?}");
    }
}

#[test]
fn function_that_was_never_slow_does_not_pause() {
    let mut nic = Nic::new();
    let mut made = |function: FunctionId| {
        nic.wakes.add_untrusted(function);
        nic.wakes.sleeper(function, word())
    };
    let (slow, honest) = (made(F), made(G));
    let mut list = WakeList::default();
    list.charge(&honest, Duration::from_nanos(FAST), 0);
    for sleeper in [&slow, &honest] {
        list.push(sleeper.clone());
        list.charge(sleeper, Duration::from_nanos(FAST), 0);
    }
    list.charge(&slow, Duration::from_micros(280), 280_000);
    let Next::Wake(first) = list.pop(280_000) else { panic!("pauses with the slow function") };
    assert_eq!(first.function, G);
    assert!(matches!(list.pop(280_000), Next::At(time) if time == 2_800_000));
}

use std::cell::Cell;

use super::*;
use crate::port::waker::{Line, List, Next};

thread_local! {
    /// The clocks, in ns: the CPU clock stands where another thread has the CPU.
    static WALL: Cell<u64> = const { Cell::new(0) };
    static CPU: Cell<u64> = const { Cell::new(0) };
    /// The time of the next wake-ups, in ns.
    static COST: Cell<u64> = const { Cell::new(0) };
    /// The time for which another thread has the CPU meanwhile, in ns.
    static AWAY: Cell<u64> = const { Cell::new(0) };
    /// Wake-ups that were made.
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

/// The next wake-up of a list, however long it has to wait for its time.
fn pop(list: &mut List) -> Option<Arc<Sleeper>> {
    match list.pop(u64::MAX) {
        Next::Wake(sleeper) => Some(sleeper),
        Next::At(_) | Next::Nothing => None,
    }
}

/// A NIC with a waker thread, which the test plays.
struct Nic {
    wakes: Wakes,
    line: Line,
}

impl Nic {
    fn new() -> Self {
        let line = Line::unserved();
        let mut wakes = Wakes::new(TEST);
        wakes.set_line(line.again());
        Self { wakes, line }
    }

    /// A wake-up that takes `cost`; true if the NIC thread makes it, false if the waker thread does.
    fn wake(&mut self, sleeper: &Arc<Sleeper>, cost: u64) -> bool {
        COST.set(cost);
        let made = MADE.get();
        self.wakes.queue(sleeper);
        self.wakes.run();
        assert!(self.wakes.is_empty());
        let by_nic = MADE.get() > made;
        if let Some(left) = self.line.list(pop) {
            assert!(!by_nic);
            let time = left.wake_measured(&TEST);
            self.line.list(|list| list.took(&left, time, WALL.get()));
        }
        assert_eq!(MADE.get(), made + 1, "each wake-up is made once");
        by_nic
    }
}

/// A function of another process that has proved itself.
fn trusted(nic: &mut Nic) -> Arc<Sleeper> {
    nic.wakes.doubt(F);
    let sleeper = nic.wakes.sleeper(F, word());
    (0..PROOF).for_each(|_| _ = nic.wake(&sleeper, FAST));
    assert!(nic.wake(&sleeper, FAST));
    sleeper
}

#[test]
fn after_two_slow_wake_ups_the_nic_thread_makes_none_of_that_function() {
    let mut nic = Nic::new();
    let sleeper = trusted(&mut nic);
    let by_nic = (0..10_000).filter(|_| nic.wake(&sleeper, 280_000)).count();
    assert_eq!(by_nic, 2, "one by the wall clock, one by its CPU time");
    // Another function has nothing to do with that.
    let other = nic.wakes.sleeper(G, word());
    assert!(nic.wake(&other, FAST));
}

#[test]
fn a_function_of_another_process_begins_at_the_waker_thread() {
    for session in 1..100 {
        let mut nic = Nic::new();
        let f = FunctionId(session);
        nic.wakes.doubt(f);
        let sleeper = nic.wakes.sleeper(f, word());
        assert!((0..100).all(|_| !nic.wake(&sleeper, 280_000)), "session {session}");
        let fast = (0..).take_while(|_| !nic.wake(&sleeper, FAST)).count();
        assert_eq!(fast, PROOF as usize);
        nic.wakes.remove(f);
    }
}

#[test]
fn a_nic_that_waits_for_a_cpu_suspects_no_client() {
    let mut nic = Nic::new();
    let sleeper = trusted(&mut nic);
    AWAY.set(3_000_000);
    assert!((0..10_000).all(|_| nic.wake(&sleeper, FAST)));
}

/// The client that is slow whenever it is trusted, and works that off as fast as it can.
#[test]
fn slow_wake_ups_take_the_nic_thread_no_longer_than_those_that_work_them_off() {
    for slow in [31_000, 120_000, 280_000, 2_000_000] {
        let mut nic = Nic::new();
        let sleeper = trusted(&mut nic);
        let (mut in_slow, mut in_fast) = (0, 0);
        for _ in 0..100_000 {
            let is_trusted = sleeper.doubt.is_trusted();
            let cost = if is_trusted { slow } else { FAST };
            if nic.wake(&sleeper, cost) {
                *(if is_trusted { &mut in_slow } else { &mut in_fast }) += cost;
            }
        }
        let earned = in_fast * EARNED.as_nanos() as u64 / FAST;
        assert!(in_slow <= earned + slow, "{slow}: {in_slow} of slow ones, {in_fast} of others");
    }
}

#[test]
fn wake_ups_of_a_round_end_after_its_time() {
    let mut nic = Nic::new();
    let sleepers: Vec<_> = (1..=8).map(|f| nic.wakes.sleeper(FunctionId(f), word())).collect();
    sleepers.iter().for_each(|sleeper| nic.wakes.queue(sleeper));
    COST.set(15_000);
    nic.wakes.run();
    assert_eq!(MADE.get(), 2);
    COST.set(1_000);
    nic.wakes.run();
    assert_eq!(MADE.get(), 2 + WAKES as u64);
}

#[test]
fn a_wake_up_that_is_to_come_is_for_later_completions_too() {
    let mut nic = Nic::new();
    nic.wakes.doubt(F);
    let sleeper = nic.wakes.sleeper(F, word());
    for _ in 0..100 {
        nic.wakes.queue(&sleeper);
        nic.wakes.run();
    }
    assert!(nic.line.list(pop).is_some());
    assert!(nic.line.list(pop).is_none());
}

#[test]
fn a_list_in_other_hands_delays_a_wake_up_and_loses_none() {
    let mut nic = Nic::new();
    nic.wakes.doubt(F);
    let sleeper = nic.wakes.sleeper(F, word());
    nic.wakes.queue(&sleeper);
    nic.line.again().list(|_| nic.wakes.run());
    assert!(!nic.wakes.is_empty());
    nic.wakes.run();
    assert!(nic.wakes.is_empty() && nic.line.list(pop).is_some());
}

#[test]
fn at_the_waker_thread_an_honest_function_waits_for_one_slow_wake_up() {
    let mut nic = Nic::new();
    let mut made = |function: FunctionId| {
        nic.wakes.doubt(function);
        nic.wakes.sleeper(function, word())
    };
    let (slow, honest) = ([made(F), made(F), made(F), made(F)], made(G));
    let mut list = List::default();
    slow.iter().for_each(|sleeper| list.push(sleeper.clone()));
    for _ in 0..1000 {
        let first = pop(&mut list).unwrap();
        assert_eq!(first.function, F);
        list.push(honest.clone());
        list.took(&first, Duration::from_micros(280), 0);
        let second = pop(&mut list).unwrap();
        assert_eq!(second.function, G, "it waits for more than one");
        list.took(&second, Duration::from_micros(4), 0);
        list.push(first);
    }
    list.forget(F);
    assert!(pop(&mut list).is_none());
}

/// Also where the slow ones are many functions, and have quick wake-ups between slow ones.
#[test]
fn at_the_waker_thread_slow_functions_have_a_tenth_of_a_core_together() {
    let mut made = |function| {
        let mut wakes = Wakes::new(TEST);
        wakes.doubt(FunctionId(function));
        wakes.sleeper(FunctionId(function), word())
    };
    let slow: Vec<_> = (1..=20).map(&mut made).collect();
    let mut list = List::default();
    slow.iter().for_each(|sleeper| list.push(sleeper.clone()));
    let honest = made(100);
    let (mut now, mut in_slow, mut count) = (0, 0, 0u64);
    const SECOND: u64 = 1_000_000_000;
    while now < SECOND {
        match list.pop(now) {
            Next::Wake(sleeper) => {
                count += 1;
                let cost = if count % 3 == 0 { FAST } else { 280_000 };
                sleeper.doubt.took(Duration::from_nanos(cost));
                now += cost;
                in_slow += cost;
                list.took(&sleeper, Duration::from_nanos(cost), now);
                list.push(sleeper);
            }
            Next::At(time) => {
                // An honest function need not wait for that time.
                list.push(honest.clone());
                let Next::Wake(next) = list.pop(now) else { panic!("it waits for the slow ones") };
                assert_eq!(next.function, honest.function);
                assert!(time > now);
                now = time;
            }
            Next::Nothing => panic!("each of them has a wake-up in the list"),
        }
    }
    // The first wake-up of each is not known to be slow.
    let first = slow.len() as u64 * 280_000;
    assert!(in_slow <= SECOND / 10 + first + 280_000, "{in_slow} ns of {SECOND}");
    assert!(in_slow >= SECOND / 11, "{in_slow} ns of {SECOND}: the core was idle");
}

#[test]
fn a_function_that_is_gone_has_no_wake_ups_and_the_others_have_theirs() {
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
fn the_clocks_of_the_system_count_nanoseconds() {
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
fn at_the_waker_thread_a_function_that_was_never_slow_does_not_rest() {
    let mut nic = Nic::new();
    let mut made = |function: FunctionId| {
        nic.wakes.doubt(function);
        nic.wakes.sleeper(function, word())
    };
    let (slow, honest) = (made(F), made(G));
    let mut list = List::default();
    list.took(&honest, Duration::from_nanos(FAST), 0);
    for sleeper in [&slow, &honest] {
        list.push(sleeper.clone());
        list.took(sleeper, Duration::from_nanos(FAST), 0);
    }
    list.took(&slow, Duration::from_micros(280), 280_000);
    let Next::Wake(first) = list.pop(280_000) else { panic!("it rests with the slow one") };
    assert_eq!(first.function, G);
    assert!(matches!(list.pop(280_000), Next::At(time) if time == 2_800_000));
}

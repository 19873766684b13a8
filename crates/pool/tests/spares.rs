//! Tests of spare QPs: virtual QPs of a scheme whose keys are valid on every QP of a compute node.
//!
#[path = "common/spared.rs"]
mod spared;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pool::client::control::SocketControl;
use pool::protocol::{NodeHello, Status as PoolStatus};
use pool::{
    BorrowedLanes, BorrowedMemory, ClientId, ConnectReply, ConnectRequest, ControlPlane, Direction,
    EmbeddedNode, Endpoint, Error, Grant, GroupId, Lane, Options, Pool, Service, Settings,
    Transfer, schemes,
};
use rnic::nic::SoftNic;
use rnic::port::shm::LendableMemory;
use verbs::{Key, PeerAddress, Status};

const CHUNK: u64 = 4096;
const CHUNKS: u64 = 8;
/// Time limit for something that another thread does.
const PATIENCE: Duration = Duration::from_secs(20);

// --- the control plane -------------------------------------------------------------------------

/// Re-establishments of QPs, as the control plane sees them.
#[derive(Default)]
struct Resets {
    state: Mutex<ResetState>,
    changed: Condvar,
}

#[derive(Default)]
struct ResetState {
    /// QPs that were re-established, in the order of the calls.
    calls: Vec<(u16, u8)>,
    in_progress: BTreeSet<(u16, u8)>,
    /// No call returns.
    is_held: bool,
    /// All calls fail.
    fails: bool,
}

impl Resets {
    fn calls(&self) -> Vec<(u16, u8)> {
        self.state.lock().calls.clone()
    }

    fn set_held(&self, is_held: bool) {
        self.state.lock().is_held = is_held;
        self.changed.notify_all();
    }

    fn set_failing(&self, fails: bool) {
        self.state.lock().fails = fails;
    }

    /// Waits until the condition is true.
    fn wait_for(&self, what: &str, mut is_met: impl FnMut(&ResetState) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.state.lock();
        while !is_met(&state) {
            let is_late = self.changed.wait_until(&mut state, deadline).timed_out();
            assert!(!is_late, "{what}: {:?}, in progress {:?}", state.calls, state.in_progress);
        }
    }

    fn wait_for_calls(&self, count: usize) {
        self.wait_for("calls", |state| state.calls.len() >= count && state.in_progress.is_empty());
    }

    fn reset(
        &self,
        (group, lane): (GroupId, Lane),
        reset: impl FnOnce() -> Result<PeerAddress, Error>,
    ) -> Result<PeerAddress, Error> {
        let qp = (group.0, lane.0);
        let mut state = self.state.lock();
        assert!(state.in_progress.insert(qp), "QP {qp:?} is being re-established twice");
        self.changed.notify_all();
        self.changed.wait_while(&mut state, |state| state.is_held);
        let fails = state.fails;
        drop(state);
        let result = match fails {
            true => Err(Error::Refused { attempt: "a test".into(), why: "injected".into() }),
            false => reset(),
        };
        let mut state = self.state.lock();
        state.in_progress.remove(&qp);
        state.calls.push(qp);
        self.changed.notify_all();
        result
    }
}

/// The control plane of an embedded memory node.
struct Local {
    node: Arc<EmbeddedNode>,
    welcome: NodeHello,
    client: Mutex<Option<ClientId>>,
}

impl Local {
    fn client(&self) -> ClientId {
        self.client.lock().expect("admitted")
    }
}

impl ControlPlane for Local {
    fn welcome(&self) -> &NodeHello {
        &self.welcome
    }
    fn admit(&self, admission: &ConnectRequest) -> Result<ConnectReply, Error> {
        let admitted = self.node.node().admit(admission)?;
        *self.client.lock() = Some(ClientId(admitted.client));
        Ok(admitted)
    }
    fn await_memory(&self, _: Duration) -> Result<bool, Error> {
        unreachable!("there is always memory")
    }
    fn reset_management(&self) -> Result<Vec<PeerAddress>, Error> {
        unreachable!("no management QP breaks")
    }
    fn reset_access(&self, group: GroupId, lane: Lane) -> Result<PeerAddress, Error> {
        self.node.node().reset_access(self.client(), group, lane).map(|qpn| self.peer(qpn))
    }
    fn status(&self) -> Result<PoolStatus, Error> {
        Ok(PoolStatus { node: self.node.node().status()?, ..PoolStatus::default() })
    }
    fn audit(&self) -> Result<(), Error> {
        self.node.node().audit()
    }
    fn goodbye(&self) -> Result<(), Error> {
        self.node.node().retire_blocking(self.client())
    }
    fn check_alive(&self) -> Result<(), Error> {
        Ok(())
    }
    fn descriptors(&self) -> Vec<i32> {
        Vec::new()
    }
}

/// A control plane whose re-establishments of QPs are counted and can be held up.
struct Watched {
    control: Box<dyn ControlPlane>,
    resets: Arc<Resets>,
    /// The offer, as the compute node sees it.
    welcome: NodeHello,
}

impl ControlPlane for Watched {
    fn welcome(&self) -> &NodeHello {
        &self.welcome
    }
    fn admit(&self, admission: &ConnectRequest) -> Result<ConnectReply, Error> {
        self.control.admit(admission)
    }
    fn peer(&self, qpn: u32) -> PeerAddress {
        self.control.peer(qpn)
    }
    fn await_memory(&self, timeout: Duration) -> Result<bool, Error> {
        self.control.await_memory(timeout)
    }
    fn reset_management(&self) -> Result<Vec<PeerAddress>, Error> {
        self.control.reset_management()
    }
    fn reset_access(&self, group: GroupId, lane: Lane) -> Result<PeerAddress, Error> {
        self.resets.reset((group, lane), || self.control.reset_access(group, lane))
    }
    fn status(&self) -> Result<PoolStatus, Error> {
        self.control.status()
    }
    fn audit(&self) -> Result<(), Error> {
        self.control.audit()
    }
    fn goodbye(&self) -> Result<(), Error> {
        self.control.goodbye()
    }
    fn check_alive(&self) -> Result<(), Error> {
        self.control.check_alive()
    }
    fn descriptors(&self) -> Vec<i32> {
        self.control.descriptors()
    }
}

// --- places ------------------------------------------------------------------------------------

/// Location of the memory node.
enum Place {
    Inline(Arc<EmbeddedNode>),
    Shm(Service),
}

impl Place {
    /// A memory node on the inline NIC, and one behind its control socket.
    fn both(lanes: u32, spares: u32) -> [Place; 2] {
        let settings = Settings {
            donate_bytes: CHUNKS * CHUNK,
            chunk_bytes: CHUNK,
            scheme: schemes::RPC_MW_1,
            group_size: 1 + lanes,
            groups_max: 4,
            clients_max: 4,
            ..Settings::default()
        };
        let (nodes, clients) = (spared::nodes(spares), spared::clients(spares));
        let embedded = EmbeddedNode::start_on(SoftNic::inline(), &settings, &nodes, clients);
        let service = Service::start_on(&settings, &Endpoint::Fresh, None, spared::open, &nodes);
        [Place::Inline(Arc::new(embedded.unwrap())), Place::Shm(service.unwrap())]
    }

    /// Connects a compute node with one group.
    fn connect(&self, spares: u32) -> (Pool, Arc<Resets>) {
        let options = Options { groups: Some(1), ..Options::default() };
        match self {
            Place::Inline(node) => {
                let (welcome, client) = (node.node().welcome(), Mutex::default());
                let local = Local { node: node.clone(), welcome, client };
                Self::over(node.nic().clone(), Box::new(local), options, spares)
            }
            Place::Shm(service) => {
                self.connect_over(SoftNic::attach(service.path()).unwrap(), options, spares)
            }
        }
    }

    /// Connects a compute node of another process, which has this NIC.
    fn connect_over(&self, nic: SoftNic, options: Options, spares: u32) -> (Pool, Arc<Resets>) {
        let Place::Shm(service) = self else { unreachable!("other processes use a socket") };
        let control = SocketControl::connect(service.path()).unwrap();
        let control = control.with_session(nic.secret());
        Self::over(nic, Box::new(control), options, spares)
    }

    fn over(
        nic: SoftNic,
        control: Box<dyn ControlPlane>,
        options: Options,
        spares: u32,
    ) -> (Pool, Arc<Resets>) {
        let welcome = control.welcome().clone();
        assert_eq!(welcome.offer.spares, spares);
        let resets = Arc::new(Resets::default());
        let watched = Watched { control, resets: resets.clone(), welcome };
        let clients = spared::clients(spares);
        let pool = Pool::over_with(nic, Box::new(watched), options, &clients).unwrap();
        (pool, resets)
    }

    fn clients(&self) -> u64 {
        match self {
            Place::Inline(node) => node.node().status().unwrap().clients,
            Place::Shm(service) => service.status().unwrap().node.clients,
        }
    }
}

/// A grant of the same chunk whose key opens nothing.
fn dead(grant: &Grant) -> Grant {
    let keys = vec![Key(0xdead_be00); grant.keys().len()];
    Grant::new(grant.addr, grant.len, grant.entry, grant.group, &keys)
}

fn refuse(pool: &Pool, dead: &Grant) {
    let refused = pool.read_blocking(dead, 0, &mut [0; 8]);
    assert!(
        matches!(refused, Err(Error::Access { status: Status::RemoteAccess, .. })),
        "{refused:?}"
    );
}

/// Writes and reads a word.
fn use_word(pool: &Pool, grant: &Grant, word: u64) {
    pool.write_blocking(grant, 8, &word.to_be_bytes()).unwrap();
    let mut back = [0; 8];
    pool.read_blocking(grant, 8, &mut back).unwrap();
    assert_eq!(back, word.to_be_bytes());
}

// --- tests -------------------------------------------------------------------------------------

/// No access waits for the control plane, which does not answer.
#[test]
fn refused_access_promotes_a_spare_qp_without_the_control_plane() {
    for spares in 1..=3 {
        for place in Place::both(1, spares) {
            let (pool, resets) = place.connect(spares);
            let grant = pool.allocate_blocking().unwrap();
            resets.set_held(true);
            for n in 0..u64::from(spares) {
                refuse(&pool, &dead(&grant));
                use_word(&pool, &grant, n);
                assert_eq!(pool.fetch_and_add_blocking(&grant, 0, 1).unwrap(), n);
                assert_eq!(pool.stats().promotions, n + 1);
            }
            assert_eq!(resets.calls(), []);
            // In the background, one after the other: the first QP, then the first spare QP.
            resets.set_held(false);
            resets.wait_for_calls(spares as usize);
            let expected: Vec<_> = (0..spares as u8).map(|qp| (0, qp)).collect();
            let mut calls = resets.calls();
            calls.sort_unstable();
            assert_eq!(calls, expected);
            pool.free_blocking(grant).unwrap();
        }
    }
}

/// Each lane has spare QPs of its own: those of a group follow its lanes in the admission.
#[test]
fn lanes_have_spare_qps_of_their_own() {
    for (lanes, spares) in [(2, 1), (2, 2), (3, 1)] {
        for place in Place::both(lanes, spares) {
            let (pool, resets) = place.connect(spares);
            assert_eq!(u32::from(pool.lanes()), lanes);
            let grant = pool.allocate_blocking().unwrap();
            let (dead, buffer) = (dead(&grant), pool.buffer(4096).unwrap());
            let read = |grant: &Grant, lane| {
                let transfer = Transfer { grant, offset: 0, buffer_offset: 0, len: 8 };
                pool.read_into(&transfer, &buffer, Lane(lane)).unwrap().wait()
            };
            resets.set_held(true);
            for lane in 0..lanes as u8 {
                for _ in 0..spares {
                    let refused = read(&dead, lane);
                    assert!(matches!(refused, Err(Error::Access { .. })), "{refused:?}");
                    read(&grant, lane).unwrap();
                }
            }
            assert_eq!(pool.stats().promotions, u64::from(lanes * spares));
            resets.set_held(false);
            resets.wait_for_calls((lanes * spares) as usize);
            let mut calls = resets.calls();
            calls.sort_unstable();
            assert_eq!(calls, Vec::from_iter((0..(lanes * spares) as u8).map(|qp| (0, qp))));
        }
    }
}

/// Without a spare QP, the active QP is reset in place, as in a scheme without spare QPs.
#[test]
fn last_qp_is_reset_in_place() {
    for place in Place::both(1, 0) {
        let (pool, resets) = place.connect(0);
        let grant = pool.allocate_blocking().unwrap();
        for n in 1..4 {
            refuse(&pool, &dead(&grant));
            assert_eq!(resets.calls().len(), n, "in the foreground");
            use_word(&pool, &grant, 1);
        }
        assert_eq!(pool.stats().promotions, 0);
    }
    for place in Place::both(1, 1) {
        let (pool, resets) = place.connect(1);
        let grant = pool.allocate_blocking().unwrap();
        resets.set_failing(true);
        refuse(&pool, &dead(&grant));
        resets.wait_for_calls(1);
        assert_eq!(resets.calls(), [(0, 0)], "the spare QP is not restored");
        resets.set_failing(false);
        refuse(&pool, &dead(&grant));
        assert_eq!(resets.calls(), [(0, 0), (0, 1)], "the active QP is reset in place");
        use_word(&pool, &grant, 2);
        assert_eq!(pool.stats().promotions, 1);
        // The broken QP becomes a spare QP when it is restored at last.
        assert!(pool.restore_spares());
        assert!(!pool.restore_spares());
        refuse(&pool, &dead(&grant));
        assert_eq!(pool.stats().promotions, 2);
        use_word(&pool, &grant, 3);
    }
}

#[test]
fn broken_qp_becomes_a_spare_qp_again() {
    for place in Place::both(1, 1) {
        let (pool, resets) = place.connect(1);
        let grant = pool.allocate_blocking().unwrap();
        for n in 0..20 {
            refuse(&pool, &dead(&grant));
            use_word(&pool, &grant, n as u64);
            resets.wait_for_calls(n + 1);
            // The call has returned; the QP is connected soon after.
            while pool.restore_spares() {}
            assert_eq!(resets.calls()[n], (0, n as u8 % 2));
        }
        assert_eq!(pool.stats().promotions, 20);
    }
}

/// Flushed operations of other threads are repeated, atomics too, each exactly once.
#[test]
fn flushed_operations_of_all_threads_succeed() {
    const THREADS: usize = 3;
    for place in Place::both(1, 2) {
        let (pool, resets) = place.connect(2);
        let grant = pool.allocate_blocking().unwrap();
        let (stop, added) = (AtomicBool::new(false), AtomicU64::new(0));
        let work = |thread: usize| {
            let at = 64 * (1 + thread as u64);
            let mut own = 0u64;
            while !stop.load(Ordering::Relaxed) {
                assert_eq!(pool.compare_and_swap_blocking(&grant, at, own, own + 1).unwrap(), own);
                own += 1;
                pool.fetch_and_add_blocking(&grant, 0, 1).unwrap();
                added.fetch_add(1, Ordering::Relaxed);
                pool.write_blocking(&grant, at + 8, &own.to_be_bytes()).unwrap();
                let mut back = [0; 8];
                pool.read_blocking(&grant, at + 8, &mut back).unwrap();
                assert_eq!(back, own.to_be_bytes());
            }
        };
        std::thread::scope(|scope| {
            let (work, stop) = (&work, &stop);
            let workers: Vec<_> =
                (0..THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
            for _ in 0..200 {
                refuse(&pool, &dead(&grant));
            }
            stop.store(true, Ordering::Relaxed);
            workers.into_iter().for_each(|worker| worker.join().unwrap());
        });
        assert_eq!(
            pool.fetch_and_add_blocking(&grant, 0, 0).unwrap(),
            added.load(Ordering::Relaxed)
        );
        assert!(pool.stats().promotions > 0);
        // Each refusal has broken one QP, and each broken QP is re-established once.
        while pool.restore_spares() {}
        assert_eq!(resets.calls().len(), 200);
    }
}

/// The drop does not wait for the control plane.
#[test]
fn pool_is_dropped_while_a_qp_is_re_established() {
    for place in Place::both(1, 1) {
        let (pool, resets) = place.connect(1);
        let grant = pool.allocate_blocking().unwrap();
        resets.set_held(true);
        refuse(&pool, &dead(&grant));
        resets.wait_for("a re-establishment", |state| !state.in_progress.is_empty());
        let (dropped, is_dropped) = mpsc::channel();
        std::thread::spawn(move || {
            drop(pool);
            dropped.send(()).unwrap();
        });
        is_dropped.recv_timeout(PATIENCE).expect("the drop waits");
        resets.set_held(false);
        let deadline = Instant::now() + PATIENCE;
        while place.clients() > 0 {
            assert!(Instant::now() < deadline, "the compute node has not left");
            std::thread::yield_now();
        }
        // The next compute node has all chunks.
        let (pool, _) = place.connect(1);
        let grants: Vec<_> = (0..CHUNKS).map(|_| pool.allocate_blocking().unwrap()).collect();
        grants.into_iter().for_each(|grant| pool.free_blocking(grant).unwrap());
    }
}

/// A borrower uses the active QP of a lane, which is a spare QP here. All QPs work again after the
/// loan, also the one that was broken before it.
#[test]
fn lanes_with_spare_qps_are_lent_and_taken_back() {
    let [_, place] = Place::both(2, 1);
    let Place::Shm(service) = &place else { unreachable!("the second place is shm") };
    let memory = LendableMemory::new(1 << 20).unwrap();
    let shown = memory.descriptors().map(|file| file.try_clone_to_owned().unwrap());
    let borrowed = BorrowedMemory::map(shown).unwrap();
    let nic = SoftNic::attach_lendable(service.path(), memory).unwrap();
    let options = Options { groups: Some(1), is_lendable: true, ..Options::default() };
    let (pool, resets) = place.connect_over(nic, options, 1);
    let (grant, buffer) = (pool.allocate_blocking().unwrap(), pool.buffer(4096).unwrap());
    let (dead, lane) = (dead(&grant), Lane(1));
    let transfer = |grant| Transfer { grant, offset: 0, buffer_offset: 0, len: 8 };
    let read = |grant| pool.read_into(&transfer(grant), &buffer, lane)?.wait();
    resets.set_failing(true);
    let refused = read(&dead);
    assert!(matches!(refused, Err(Error::Access { .. })), "{refused:?}");
    resets.wait_for_calls(1);
    resets.set_failing(false);
    for word in 1..3u64 {
        let lent = pool.lend_lanes(&buffer).unwrap();
        let mut lanes = BorrowedLanes::<SoftNic>::adopt(&borrowed, lent).unwrap();
        buffer.memory().write(0, &word.to_be_bytes());
        let to = pool.lent_transfer(&transfer(&grant), lane).unwrap();
        assert!(lanes.post(7, Direction::Write, &[to]).unwrap());
        let finished = loop {
            match lanes.poll() {
                Some(finished) => break finished,
                None => std::thread::yield_now(),
            }
        };
        assert_eq!((finished.token, finished.status), (7, Status::Success));
        assert!(read(&grant).unwrap_err().to_string().contains("lent to another process"));
        drop(lanes);
        pool.take_back().unwrap();
        assert_eq!(pool.fetch_and_add_blocking(&grant, 0, 0).unwrap(), word);
    }
    assert!(!pool.restore_spares(), "a QP is still broken");
    assert_eq!(pool.stats().promotions, 1);
    resets.set_held(true);
    let refused = read(&dead);
    assert!(matches!(refused, Err(Error::Access { .. })), "{refused:?}");
    read(&grant).unwrap();
    assert_eq!(pool.stats().promotions, 2);
    resets.set_held(false);
}

/// A memory node that offers QPs that cannot exist.
#[test]
fn impossible_numbers_of_spare_qps_are_refused() {
    for (spares, functions) in [(4, 1), (u32::MAX, 1), (1, 2), (3, u32::MAX)] {
        let [place, _] = Place::both(1, 1);
        let Place::Inline(node) = &place else { unreachable!("the first place is inline") };
        let mut welcome = node.node().welcome();
        (welcome.offer.spares, welcome.offer.functions) = (spares, functions);
        let client = Mutex::default();
        let control = Box::new(Local { node: node.clone(), welcome, client });
        let options = Options { groups: Some(1), ..Options::default() };
        let error =
            Pool::over_with(node.nic().clone(), control, options, &spared::clients(1)).err();
        let error = error.expect("not refused").to_string();
        assert!(error.contains(&format!("{spares} spare QPs")), "{error}");
    }
}

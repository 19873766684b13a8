//! Accesses over RoCEv2 whose answers are lost: no atomic is executed twice, and no spare QP takes
//! the place of a QP whose peer still works.

#[path = "common/spared.rs"]
mod spared;

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use pool::client::control::SocketControl;
use pool::protocol::{NodeHello, Status as PoolStatus};
use pool::remote::roce_end;
use pool::{
    ConnectReply, ConnectRequest, ControlPlane, Endpoint, Error, Grant, GroupId, Lane, Listen,
    Options, Pool, Service, Settings, schemes,
};
use rnic::nic::SoftNic;
use verbs::executor::{Tasks, thread_waker};
use verbs::{Key, PeerAddress, RemotePeer, Status};

/// Forwards packets between two NICs, both of which see its address as the other's. It can drop
/// the packets of the memory node.
struct Path {
    address: SocketAddr,
    drops_answers: Arc<AtomicBool>,
    is_ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Path {
    fn between(client: SocketAddr, node: Arc<Mutex<Option<SocketAddr>>>) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let (drops_answers, is_ended) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let (drops, ended) = (drops_answers.clone(), Arc::<AtomicBool>::clone(&is_ended));
        let forward = move || {
            let mut packet = [0; 16 << 10];
            while !ended.load(Ordering::Relaxed) {
                let Ok((len, from)) = socket.recv_from(&mut packet) else { continue };
                let to = if from == client { *node.lock() } else { Some(client) };
                let is_dropped = from != client && drops.load(Ordering::Relaxed);
                if let Some(to) = to.filter(|_| !is_dropped) {
                    socket.send_to(&packet[..len], to).unwrap();
                }
            }
        };
        let thread = Some(std::thread::spawn(forward));
        Self { address, drops_answers, is_ended, thread }
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        self.is_ended.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

/// A control connection that leads QPs over a [`Path`], with a short retry time of the QPs.
/// The answers arrive again before a QP is re-established.
struct Led {
    control: SocketControl,
    path: SocketAddr,
    drops_answers: Arc<AtomicBool>,
    resets: Arc<Mutex<Vec<Lane>>>,
}

impl Led {
    fn lead(&self, peer: PeerAddress) -> PeerAddress {
        let PeerAddress::Remote(peer) = peer else { unreachable!("the memory node is remote") };
        RemotePeer { address: self.path, timeout: 14, retry_cnt: 1, ..peer }.into()
    }
}

impl ControlPlane for Led {
    fn welcome(&self) -> &NodeHello {
        self.control.welcome()
    }
    fn admit(&self, admission: &ConnectRequest) -> Result<ConnectReply, Error> {
        self.control.admit(admission)
    }
    fn peer(&self, qpn: u32) -> PeerAddress {
        self.lead(self.control.peer(qpn))
    }
    fn await_memory(&self, timeout: Duration) -> Result<bool, Error> {
        self.control.await_memory(timeout)
    }
    fn reset_management(&self) -> Result<Vec<PeerAddress>, Error> {
        let peers = self.control.reset_management()?;
        Ok(peers.into_iter().map(|peer| self.lead(peer)).collect())
    }
    fn reset_access(&self, group: GroupId, lane: Lane) -> Result<PeerAddress, Error> {
        self.drops_answers.store(false, Ordering::Relaxed);
        self.resets.lock().push(lane);
        self.control.reset_access(group, lane).map(|peer| self.lead(peer))
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

/// A memory node, and a pool whose packets pass a [`Path`].
struct Scene {
    pool: Pool,
    /// Lanes that were re-established.
    resets: Arc<Mutex<Vec<Lane>>>,
    path: Path,
    _service: Service,
}

/// A lane with this number of spare QPs.
fn scene(spares: u32) -> Scene {
    let listen = Listen::to_all("127.0.0.1:0".parse().unwrap());
    let settings = Settings {
        scheme: schemes::RPC_MW_1,
        donate_bytes: 1 << 20,
        chunk_bytes: 64 << 10,
        group_size: 2,
        ..Settings::default()
    };
    let (nodes, endpoint) = (spared::nodes(spares), Endpoint::Fresh);
    let service = Service::start_on(&settings, &endpoint, Some(&listen), spared::open, &nodes);
    let service = service.unwrap();
    let to = service.address().unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let node = Arc::new(Mutex::new(None));
    let path = Path::between(socket.local_addr().unwrap(), node.clone());
    let control = SocketControl::connect_remote(
        &to.into(),
        None,
        Options::default().answer_timeout,
        |link, welcome| {
            let port = welcome.roce.expect("the memory node has a RoCEv2 port").port;
            *node.lock() = Some(SocketAddr::new(to.ip(), port));
            Ok(Some(roce_end(link, path.address.port()).unwrap()))
        },
    );
    let (drops_answers, resets) = (path.drops_answers.clone(), Arc::default());
    let led = Led {
        control: control.unwrap(),
        path: path.address,
        drops_answers,
        resets: Arc::clone(&resets),
    };
    let options = Options { groups: Some(1), ..Options::default() };
    let (nic, clients) = (SoftNic::over(socket).unwrap(), spared::clients(spares));
    let pool = Pool::over_with(nic, Box::new(led), options, &clients).unwrap();
    Scene { pool, resets, path, _service: service }
}

/// The memory node executes all atomics and loses all answers. The first atomic fails for lack of
/// an answer, and the others end as flushed: they were executed, and must not be repeated.
#[test]
fn flushed_atomics_are_not_repeated_behind_a_missing_answer() {
    const ATOMICS: u64 = 8;
    let Scene { pool, path, .. } = &scene(0);
    let grant = pool.allocate_blocking().unwrap();
    pool.write_blocking(&grant, 0, &[0; 8 * ATOMICS as usize]).unwrap();
    path.drops_answers.store(true, Ordering::Relaxed);
    let mut tasks = Tasks::new(thread_waker());
    for n in 0..ATOMICS {
        let grant = &grant;
        tasks.spawn(async move { (n, pool.fetch_and_add(grant, 8 * n, 1).await) });
    }
    let mut statuses = [None; ATOMICS as usize];
    while !tasks.is_empty() {
        tasks.run(|_, (n, result)| {
            let Err(Error::Access { status, .. }) = result else {
                panic!("atomic {n} without an answer: {result:?}")
            };
            statuses[n as usize] = Some(status);
        });
        tasks.sleep(|| pool.park(Duration::from_millis(1)));
    }
    assert!(statuses.contains(&Some(Status::RetryExceeded)), "{statuses:?}");
    let flushed = |n: &u64| statuses[*n as usize] == Some(Status::Flushed);
    let executed = |n: u64| pool.fetch_and_add_blocking(&grant, 8 * n, 0).unwrap();
    let times: Vec<_> = (0..ATOMICS).map(executed).collect();
    assert!(times.iter().all(|times| *times <= 1), "{times:?} times, {statuses:?}");
    let both = (0..ATOMICS).filter(flushed).filter(|n| times[*n as usize] == 1).count();
    assert!(both > 0, "no atomic was executed and flushed: {times:?}, {statuses:?}");
    // Reads and writes are repeated.
    path.drops_answers.store(true, Ordering::Relaxed);
    pool.write_blocking(&grant, 0, &7u64.to_be_bytes()).unwrap();
    assert_eq!(executed(0), 7);
}

/// The peer of a QP without answers still works and may execute a late packet: only a reset ends
/// that, so the QP is reset in place.
#[test]
fn missing_answer_promotes_no_spare_qp() {
    let Scene { pool, path, resets, .. } = &scene(1);
    let grant = pool.allocate_blocking().unwrap();
    for n in 1..3 {
        path.drops_answers.store(true, Ordering::Relaxed);
        pool.write_blocking(&grant, 0, &7u64.to_be_bytes()).unwrap();
        assert_eq!(*resets.lock(), vec![Lane(0); n]);
        assert_eq!(pool.stats().promotions, 0);
    }
    // A refused access promotes a spare QP, also after those failures.
    let keys = vec![Key(0xdead_be00); grant.keys().len()];
    let dead = Grant::new(grant.addr, grant.len, grant.entry, grant.group, &keys);
    let refused = pool.fetch_and_add_blocking(&dead, 0, 1);
    assert!(
        matches!(refused, Err(Error::Access { status: Status::RemoteAccess, .. })),
        "{refused:?}"
    );
    assert_eq!(pool.stats().promotions, 1);
    assert_eq!(pool.fetch_and_add_blocking(&grant, 0, 1).unwrap(), 7);
    while resets.lock().len() < 3 {
        std::thread::yield_now();
    }
    path.drops_answers.store(true, Ordering::Relaxed);
    pool.write_blocking(&grant, 0, &9u64.to_be_bytes()).unwrap();
    assert_eq!(pool.stats().promotions, 1);
    assert_eq!(resets.lock()[2..], [Lane(0), Lane(1)], "in the background, then in place");
}

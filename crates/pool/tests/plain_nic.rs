//! A NIC that offers the verbs and no chains, behind the public entry points of the pool.

mod common;

use std::net::{IpAddr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::{CHUNK, check_whole, settings};
use pool::client::control::SocketControl;
use pool::nic::{
    LocalFunction, NicHost, NicOpener, NicReport, NicSession, NoSession, RemoteFunction,
    SessionNeeds,
};
use pool::{
    Address, EmbeddedNode, Endpoint, Error, GroupId, LocalNic, MultiPool, Options, Placement, Pool,
    Scheme, Service, Settings, schemes,
};
use rnic::nic::{SoftCq, SoftMr, SoftMw, SoftNic, SoftPd, SoftQp, SoftSrq};
use scheme::info::AccessKind;
use verbs::{
    Access, Caps, CqAttr, DeviceInfo, DmaMemory, Error as VerbsError, Events, Guards, Nic, QpAttr,
    Receive, ReceiveAttr, RegionEngine, Rereg,
};

/// The verbs of the software NIC, without [`verbs::direct::DirectNic`].
#[derive(Clone)]
struct PlainNic(SoftNic);

impl Nic for PlainNic {
    type Pd = SoftPd;
    type Mr = SoftMr;
    type Mw = SoftMw;
    type Cq = SoftCq;
    type Srq = SoftSrq;
    type Qp = SoftQp;

    fn caps(&self) -> Caps {
        Caps { name: "plain", chains: false, ..self.0.caps() }
    }

    fn query_device(&self) -> Result<DeviceInfo, VerbsError> {
        self.0.query_device()
    }

    fn open_function(&self) -> Result<Self, VerbsError> {
        self.0.open_function().map(Self)
    }

    fn take_events(&self) -> Result<Events, VerbsError> {
        self.0.take_events()
    }

    fn wait_events(&self, timeout: Duration) -> Result<Events, VerbsError> {
        self.0.wait_events(timeout)
    }

    fn alloc_dma(&self, bytes: usize) -> Result<DmaMemory, VerbsError> {
        self.0.alloc_dma(bytes)
    }

    fn alloc_pd(&self) -> Result<SoftPd, VerbsError> {
        self.0.alloc_pd()
    }

    fn reg_mr_iova(
        &self,
        pd: &SoftPd,
        memory: &DmaMemory,
        iova: u64,
        access: Access,
    ) -> Result<SoftMr, VerbsError> {
        self.0.reg_mr_iova(pd, memory, iova, access)
    }

    fn rereg_mr(&self, mr: SoftMr, change: Rereg<'_, Self>) -> Result<SoftMr, VerbsError> {
        let Rereg { pd, memory, access } = change;
        self.0.rereg_mr(mr, Rereg { pd, memory, access })
    }

    fn alloc_mw(&self, pd: &SoftPd) -> Result<SoftMw, VerbsError> {
        self.0.alloc_mw(pd)
    }

    fn alloc_type1_mws(&self, pd: &SoftPd, count: usize) -> Result<Vec<SoftMw>, VerbsError> {
        self.0.alloc_type1_mws(pd, count)
    }

    fn alloc_guarded_mws(
        &self,
        pd: &SoftPd,
        guards: &Guards<'_, Self>,
    ) -> Result<Vec<SoftMw>, VerbsError> {
        let Guards { region, mask, words } = *guards;
        self.0.alloc_guarded_mws(pd, &Guards { region, mask, words })
    }

    fn reg_engine_mr(
        &self,
        pd: &SoftPd,
        memory: &DmaMemory,
        access: Access,
        engine: Box<dyn RegionEngine>,
    ) -> Result<SoftMr, VerbsError> {
        self.0.reg_engine_mr(pd, memory, access, engine)
    }

    fn create_cq(&self, attr: CqAttr) -> Result<SoftCq, VerbsError> {
        self.0.create_cq(attr)
    }

    fn create_srq(&self, pd: &SoftPd, attr: ReceiveAttr) -> Result<SoftSrq, VerbsError> {
        self.0.create_srq(pd, attr)
    }

    fn create_qp(&self, pd: &SoftPd, attr: QpAttr<'_, Self>) -> Result<SoftQp, VerbsError> {
        let QpAttr { send_cq, recv_cq, send_blocks, receive, access } = attr;
        let receive = match receive {
            Receive::None => Receive::None,
            Receive::Own(own) => Receive::Own(own),
            Receive::Shared(srq) => Receive::Shared(srq),
        };
        self.0.create_qp(pd, QpAttr { send_cq, recv_cq, send_blocks, receive, access })
    }
}

/// Opens a [`PlainNic`] for a memory node on this host.
#[derive(Clone)]
struct PlainOpener;

impl NicOpener for PlainOpener {
    type Nic = PlainNic;

    fn open_local(&self, path: &Path) -> Result<LocalFunction<PlainNic>, VerbsError> {
        let nic = SoftNic::attach(path)?;
        Ok(LocalFunction { session: nic.secret(), nic: PlainNic(nic) })
    }

    fn open_remote(
        &self,
        local: IpAddr,
        _shared: Option<&LocalNic>,
    ) -> Result<RemoteFunction<PlainNic>, Error> {
        let system = |source| Error::System { attempt: "opening a socket".into(), source };
        let socket = UdpSocket::bind((local, 0)).map_err(system)?;
        let port = socket.local_addr().map_err(system)?.port();
        Ok(RemoteFunction { nic: PlainNic(SoftNic::over(socket)?), port })
    }
}

/// The host of a NIC to which no process attaches.
struct Unshared;

impl NicHost for Unshared {
    fn session(&self, _needs: &SessionNeeds) -> Box<dyn NicSession> {
        Box::new(NoSession::new("plain"))
    }

    fn name(&self) -> &str {
        "plain"
    }

    fn report(&self) -> Result<NicReport, Error> {
        Ok(NicReport::default())
    }
}

type OpenedNic = Result<(PlainNic, Arc<dyn NicHost>), Error>;

fn open(_wire: Option<UdpSocket>) -> OpenedNic {
    let (nic, host) = SoftNic::host()?;
    Ok((PlainNic(nic), Arc::new(host)))
}

const CHUNKS: u64 = 32;

fn options() -> Options {
    Options { groups: Some(1), ..Options::default() }
}

fn without_chains() -> impl Iterator<Item = Scheme> {
    let caps = PlainNic(SoftNic::inline()).caps();
    schemes::ALL.iter().copied().filter(move |scheme| scheme.missing(&caps).is_none())
}

fn start(scheme: Scheme) -> Result<Service, Error> {
    let settings = settings(scheme, CHUNKS);
    let endpoint = Endpoint::Fresh;
    Service::start_on(&settings, &endpoint, None, open, &schemes::nodes_without_chains())
}

fn embedded(nic: PlainNic, settings: &Settings) -> Result<EmbeddedNode<PlainNic>, Error> {
    EmbeddedNode::start_on(nic, settings, &schemes::nodes_without_chains(), schemes::clients())
}

/// Allocates, writes, reads and frees pages, and finds them cleared afterwards.
fn check_pages(pool: &Pool<PlainNic>) {
    for round in 1..4 {
        let grant = pool.allocate_in_blocking(GroupId(0)).unwrap();
        let mut page = [1; CHUNK as usize];
        pool.read_blocking(&grant, 0, &mut page).unwrap();
        assert_eq!(page, [0; CHUNK as usize], "a page reads as zeros");
        pool.write_blocking(&grant, 0, &[round; CHUNK as usize]).unwrap();
        pool.read_blocking(&grant, 0, &mut page).unwrap();
        assert_eq!(page, [round; CHUNK as usize]);
        pool.free_blocking(grant).unwrap();
    }
    check_whole(pool, CHUNKS);
}

/// Allocates, writes, reads, changes words, frees, and finds the chunk cleared afterwards.
fn check_use(pool: &Pool<PlainNic>) {
    let scheme = pool.scheme();
    assert_eq!(pool.nic().caps().name, "plain");
    if scheme.access == AccessKind::Pages {
        return check_pages(pool);
    }
    for round in 0..3u64 {
        let grant = pool.allocate_in_blocking(GroupId(0)).unwrap();
        let mut word = [1; 8];
        pool.read_blocking(&grant, CHUNK - 8, &mut word).unwrap();
        if scheme.clears() {
            assert_eq!(word, [0; 8], "{scheme}: a chunk reads as zeros");
        }
        pool.write_blocking(&grant, 0, &round.to_be_bytes()).unwrap();
        pool.write_blocking(&grant, CHUNK - 8, b"the last").unwrap();
        pool.read_blocking(&grant, CHUNK - 8, &mut word).unwrap();
        assert_eq!(&word, b"the last", "{scheme}");
        assert_eq!(pool.compare_and_swap_blocking(&grant, 0, round, 40).unwrap(), round);
        assert_eq!(pool.fetch_and_add_blocking(&grant, 0, 2).unwrap(), 40, "{scheme}");
        pool.read_blocking(&grant, 0, &mut word).unwrap();
        assert_eq!(u64::from_be_bytes(word), 42, "{scheme}");
        pool.free_blocking(grant).unwrap();
    }
    check_whole(pool, CHUNKS);
}

#[test]
fn schemes_without_chains_run_in_an_embedded_node() {
    assert_eq!(without_chains().count(), schemes::ALL.len() - 2);
    for scheme in without_chains() {
        let nic = PlainNic(SoftNic::inline());
        let settings = settings(scheme, CHUNKS);
        let node = embedded(nic, &settings).unwrap();
        let pool = Pool::embedded_in(&node.into(), options()).unwrap();
        check_use(&pool);
        assert_eq!(pool.node_status().unwrap().nic, "plain");
        check_use(&pool.reconnect().unwrap());
    }
}

#[test]
fn schemes_without_chains_run_in_a_service() {
    for scheme in without_chains() {
        let service = start(scheme).unwrap();
        let control = SocketControl::connect(service.path()).unwrap();
        let LocalFunction { nic, session } = PlainOpener.open_local(service.path()).unwrap();
        let control = Box::new(control.with_session(session));
        check_use(&Pool::over(nic, control, options()).unwrap());
    }
}

#[test]
fn opener_supplies_the_nic_of_each_connection() {
    let services = [start(schemes::FINEMEM).unwrap(), start(schemes::FINEMEM).unwrap()];
    let connect = |service: &Service| {
        let address = Address::Shm(service.path().to_path_buf());
        Pool::connect_with(PlainOpener, &address, options()).unwrap()
    };
    let pools: Vec<Pool<PlainNic>> = services.iter().map(connect).collect();
    check_use(&pools[0].reconnect().unwrap());
    let pool = MultiPool::over(pools, Placement::RoundRobin).unwrap();
    let placed = [(); 2].map(|()| pool.allocate_blocking().unwrap());
    assert_ne!(placed[0].node, placed[1].node);
    placed.into_iter().for_each(|placed| pool.free_blocking(placed).unwrap());
}

#[test]
fn scheme_with_chains_is_refused_by_name() {
    for scheme in [schemes::ONESIDEDMW, schemes::ODRP] {
        let nic = PlainNic(SoftNic::inline());
        let settings = settings(scheme, CHUNKS);
        let embedded = embedded(nic, &settings);
        for error in [embedded.err().unwrap(), start(scheme).err().unwrap()] {
            let text = error.to_string();
            assert!(text.contains(scheme.name) && text.contains("plain lacks WAIT"), "{text}");
        }
    }
}

#[test]
fn nic_without_sessions_refuses_to_be_attached() {
    let open = |_| -> OpenedNic { Ok((PlainNic(SoftNic::inline()), Arc::new(Unshared))) };
    let settings = settings(schemes::FINEMEM, CHUNKS);
    let endpoint = Endpoint::Fresh;
    let service =
        Service::start_on(&settings, &endpoint, None, open, &schemes::nodes_without_chains())
            .unwrap();
    assert_eq!(service.status().unwrap().nic, "plain");
    let error = Pool::connect(service.path(), options()).err().unwrap().to_string();
    assert!(error.contains("opens the NIC plain itself"), "{error}");
    assert_eq!(service.failure(), None);
}

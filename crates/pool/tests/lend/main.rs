//! Lanes that a process lends to another process: the borrower is this binary again, in the role
//! that an environment variable names. Its standard input is a socket to the owner.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use pool::{
    Address, BorrowedLanes, BorrowedMemory, Buffer, ChunkMemory, ChunkPart, DefaultNic, Direction,
    Endpoint, Error, Grant, Lane, LaneTransfer, LentLanes, Listen, LocalNic, NicService, Options,
    Pool, Remote, Service, Settings, Transfer, map_frames, schemes,
};
use rnic::port::shm::socket::{Packet, receive, send};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use verbs::Status;

mod hostile;

const ROLE: &str = "GRANARY_TEST_LEND_ROLE";
/// Bytes of a chunk. Many and large transfers are in flight when the borrower is killed.
const CHUNK: usize = 64 << 10;
const CHUNKS: usize = 16;
/// Lanes that are lent.
const LANES: [Lane; 2] = [Lane(1), Lane(2)];

// --- the borrower ------------------------------------------------------------------------------

#[test]
fn other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let owner = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    match role.as_str() {
        "borrower" => borrower(&owner),
        "direct" => direct(&owner),
        other => panic!("no role {other}"),
    }
}

fn hear(socket: &OwnedFd) -> Packet {
    receive(socket).unwrap().expect("the other side is there")
}

/// Adopts lanes, then does what the owner says, until the owner ends or kills this process.
fn borrower(owner: &OwnedFd) {
    let memory = <[OwnedFd; 2]>::try_from(hear(owner).descriptors).unwrap();
    let memory = BorrowedMemory::map(memory).unwrap();
    send(owner, b"mapped", &[]).unwrap();
    let Packet { bytes: state, descriptors } = hear(owner);
    let [wake] = <[OwnedFd; 1]>::try_from(descriptors).unwrap();
    let mut lanes = BorrowedLanes::adopt(&memory, LentLanes { state, wake }).unwrap();
    while let Ok(Some(packet)) = receive(owner) {
        let (order, transfers) = decode(&packet.bytes);
        match order {
            Order::Read => answer(owner, &run(&mut lanes, Direction::Read, &transfers)),
            Order::Write => answer(owner, &run(&mut lanes, Direction::Write, &transfers)),
            Order::Storm => storm(&mut lanes, owner, &transfers),
            Order::GiveBack => {
                drop(lanes);
                send(owner, b"given back", &[]).unwrap();
                return;
            }
        }
    }
}

fn answer(owner: &OwnedFd, status: &Status) {
    send(owner, format!("{status:?}").as_bytes(), &[]).unwrap();
}

/// Moves bytes; sleeps in poll(2) until they have arrived.
fn run(lanes: &mut BorrowedLanes, direction: Direction, transfers: &[LaneTransfer]) -> Status {
    assert!(lanes.post(17, direction, transfers).unwrap(), "the queues are empty");
    loop {
        if let Some(finished) = lanes.poll() {
            assert_eq!((finished.token, lanes.in_flight()), (17, 0));
            return finished.status;
        }
        lanes.arm().unwrap();
        let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&lanes.event(), PollFlags::IN)], Some(&limit));
        assert_eq!(ready, Ok(1), "no completion");
    }
}

/// Keeps as many transfers in flight as fit, until it is killed. READs go to the first half of the
/// transfers, WRITEs to the second half.
fn storm(lanes: &mut BorrowedLanes, owner: &OwnedFd, transfers: &[LaneTransfer]) {
    let (reads, writes) = transfers.split_at(transfers.len() / 2);
    for round in 0.. {
        while lanes.post(round, Direction::Read, reads).unwrap()
            && lanes.post(round, Direction::Write, writes).unwrap()
        {}
        while let Some(finished) = lanes.poll() {
            assert_eq!(finished.status, Status::Success);
        }
        if round == 2 {
            send(owner, b"storming", &[]).unwrap();
        }
    }
}

#[derive(Clone, Copy)]
enum Order {
    Read,
    Write,
    Storm,
    GiveBack,
}

fn encode(order: Order, transfers: &[LaneTransfer]) -> Vec<u8> {
    let mut bytes = vec![order as u8];
    for t in transfers {
        let words = [u64::from(t.qp), t.address, u64::from(t.rkey), t.offset, u64::from(t.bytes)];
        words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    }
    bytes
}

fn decode(bytes: &[u8]) -> (Order, Vec<LaneTransfer>) {
    let order = [Order::Read, Order::Write, Order::Storm, Order::GiveBack][bytes[0] as usize];
    let words: Vec<u64> =
        bytes[1..].as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let transfer = |w: &[u64; 5]| LaneTransfer {
        qp: w[0] as u16,
        address: w[1],
        rkey: w[2] as u32,
        offset: w[3],
        bytes: w[4] as u32,
    };
    (order, words.as_chunks::<5>().0.iter().map(transfer).collect())
}

// --- the owner ---------------------------------------------------------------------------------

/// Another process, killed at the latest when the handle is dropped.
struct Other {
    child: Child,
    socket: OwnedFd,
}

impl Other {
    fn start(role: &str) -> Self {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "other_process", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, socket: ours }
    }

    /// Shows the memory of the queues. True if the other process has mapped it.
    fn show(&self, memory: [BorrowedFd<'_>; 2]) -> bool {
        send(&self.socket, b"memory", &memory).is_ok()
            && receive(&self.socket).is_ok_and(|reply| reply.is_some())
    }

    fn say(&self, order: Order, transfers: &[LaneTransfer]) {
        send(&self.socket, &encode(order, transfers), &[]).unwrap();
    }

    fn hear(&self) -> String {
        String::from_utf8(hear(&self.socket).bytes).unwrap()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A pool whose lanes can be lent to one of several other processes, one after the other.
struct Owner {
    pool: Pool,
    buffer: Buffer<DefaultNic>,
    grants: Vec<Grant>,
}

impl Owner {
    fn new(address: &Address, others: &Arc<Vec<Other>>) -> Self {
        let shown = others.clone();
        let show = move |memory: [BorrowedFd<'_>; 2]| shown.iter().all(|other| other.show(memory));
        let options = Options { groups: Some(2), ..Options::default() };
        let pool = address.connect_lendable(options, show).unwrap();
        let buffer = pool.buffer(2 * CHUNKS * CHUNK).unwrap();
        let grants = (0..CHUNKS).map(|_| pool.allocate_blocking().unwrap()).collect();
        Self { pool, buffer, grants }
    }

    /// The transfer of a whole chunk, from or to its place in the buffer.
    fn transfer(&self, chunk: usize) -> Transfer<'_> {
        let grant = &self.grants[chunk];
        Transfer { grant, offset: 0, buffer_offset: chunk * CHUNK, len: CHUNK as u32 }
    }

    fn transfers(&self) -> Vec<LaneTransfer> {
        let on = |chunk: usize, lane| self.pool.lent_transfer(&self.transfer(chunk), lane).unwrap();
        (0..CHUNKS).map(|chunk| on(chunk, LANES[chunk % 2])).collect()
    }

    fn lend(&self, other: &Other) {
        let lent = self.pool.lend_lanes(&self.buffer).unwrap();
        assert!(self.pool.is_lent());
        send(&other.socket, &lent.state, &[lent.wake.as_fd()]).unwrap();
    }

    /// Fills all places in the buffer, each with a byte of its own.
    fn fill(&self, seed: usize) {
        for chunk in 0..CHUNKS {
            self.buffer.memory().write(chunk * CHUNK, &[(seed + chunk) as u8; CHUNK]);
        }
    }

    /// Checks all places in the buffer against [`Owner::fill`].
    fn check(&self, seed: usize) {
        let mut bytes = vec![0; CHUNK];
        for chunk in 0..CHUNKS {
            self.buffer.memory().read(chunk * CHUNK, &mut bytes);
            let byte = (seed + chunk) as u8;
            let wrong = bytes.iter().position(|b| *b != byte);
            assert_eq!(wrong, None, "chunk {chunk}: {} instead of {byte}", bytes[wrong.unwrap()]);
        }
    }

    /// Writes all chunks from the buffer and reads them back, on a lane that was lent.
    fn round_trip(&self, seed: usize, lane: Lane) {
        let transfers: Vec<_> = (0..CHUNKS).map(|chunk| self.transfer(chunk)).collect();
        self.fill(seed);
        self.pool.write_batch_blocking(&transfers, &self.buffer, lane).unwrap();
        self.check(seed);
        self.fill(seed + 100);
        self.pool.read_batch_blocking(&transfers, &self.buffer, lane).unwrap();
        self.check(seed);
    }
}

fn settings() -> Settings {
    Settings {
        donate_bytes: (4 * CHUNKS * CHUNK) as u64,
        chunk_bytes: CHUNK as u64,
        scheme: schemes::FINEMEM,
        // Three lanes.
        group_size: 4,
        ..Settings::default()
    }
}

fn shm() -> (Service, Address) {
    let service = Service::start(&settings(), &Endpoint::Fresh).unwrap();
    let address = Address::Shm(service.path().to_owned());
    (service, address)
}

/// A memory node over RoCEv2, and the NIC of this host by which processes reach it.
fn roce() -> (Service, NicService, Address) {
    let listen = Listen::to_all("127.0.0.1:0".parse().unwrap());
    let service = Service::start_with(&settings(), &Endpoint::Fresh, Some(&listen)).unwrap();
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    let nic = NicService::start(socket).unwrap();
    let shared = LocalNic { socket: PathBuf::from(nic.path()), port };
    let to = service.address().unwrap().into();
    let address = Address::Roce(Remote { to, token: None, nic: Some(shared) });
    (service, nic, address)
}

fn others(count: usize) -> Arc<Vec<Other>> {
    Arc::new((0..count).map(|_| Other::start("borrower")).collect())
}

/// The borrower reads and writes all chunks, and gives the lanes back; then the owner goes on.
fn lend_and_return(address: &Address) {
    let others = others(1);
    let owner = Owner::new(address, &others);
    let other = &others[0];
    owner.round_trip(1, LANES[0]);
    owner.lend(other);
    let transfers = owner.transfers();

    owner.fill(50);
    other.say(Order::Write, &transfers);
    assert_eq!(other.hear(), "Success");
    owner.fill(70);
    other.say(Order::Read, &transfers);
    assert_eq!(other.hear(), "Success");
    owner.check(50);

    let refused = owner.pool.read_batch_blocking(&[owner.transfer(0)], &owner.buffer, LANES[0]);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("lent to another process"), "{refused}");
    assert!(matches!(owner.pool.lend_lanes(&owner.buffer), Err(Error::Setting { .. })));
    owner.round_trip(9, Lane(0));

    other.say(Order::GiveBack, &[]);
    assert_eq!(other.hear(), "given back");
    owner.pool.take_back().unwrap();
    assert!(!owner.pool.is_lent() && owner.pool.take_back().is_err());
    (0..4).for_each(|i| owner.round_trip(20 + i, Lane(i as u8 % 3)));
    owner.grants.iter().for_each(|grant| owner.pool.free_blocking(*grant).unwrap());
    owner.pool.audit().unwrap();
}

#[test]
fn borrower_reads_and_writes_the_chunks_of_the_owner() {
    let (_service, address) = shm();
    lend_and_return(&address);
}

#[test]
fn borrower_reaches_two_memory_nodes_over_roce() {
    let (_service, _nic, address) = roce();
    lend_and_return(&address);
    let (_second, _second_nic, second) = roce();
    let both = [others(1), others(1)];
    let owners = [Owner::new(&address, &both[0]), Owner::new(&second, &both[1])];
    owners.iter().zip(&both).for_each(|(owner, others)| owner.lend(&others[0]));
    for (at, (owner, others)) in owners.iter().zip(&both).enumerate() {
        owner.fill(30 * at);
        others[0].say(Order::Write, &owner.transfers());
    }
    both.iter().for_each(|others| assert_eq!(others[0].hear(), "Success"));
    for (at, owner) in owners.iter().enumerate() {
        let chunk = |chunk: usize| {
            let mut bytes = vec![0; CHUNK];
            owner.pool.read_blocking(&owner.grants[chunk], 0, &mut bytes).unwrap();
            bytes == [(30 * at + chunk) as u8; CHUNK]
        };
        assert!((0..CHUNKS).all(chunk), "memory node {at}");
    }
}

/// Kills borrowers with transfers in flight. `kills` is a multiple of 4: each pool has 4 borrowers.
fn kill_borrowers(address: &Address, kills: usize) {
    const EACH: usize = 4;
    let tenant = address.connect(Options { groups: Some(1), ..Options::default() }).unwrap();
    let theirs = tenant.allocate_blocking().unwrap();
    tenant.write_blocking(&theirs, 0, &[0x77; CHUNK]).unwrap();
    let mut random = 12345u64;
    for round in 0..kills / EACH {
        let others = others(EACH);
        let owner = Owner::new(address, &others);
        for (at, other) in others.iter().enumerate() {
            let seed = 10 * round + at;
            owner.round_trip(seed, Lane(0));
            owner.lend(other);
            other.say(Order::Storm, &owner.transfers());
            assert_eq!(other.hear(), "storming");
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            std::thread::sleep(Duration::from_micros(random >> 33 & 2047));
            let pid = rustix::process::Pid::from_child(&other.child);
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            // The kernel closes the socket after the process has lost its memory.
            assert!(ended(&other.socket));
            owner.pool.take_back().unwrap();
            // A late READ would overwrite the pattern in the buffer, a late WRITE the chunks.
            LANES.iter().for_each(|lane| owner.round_trip(seed + 1, *lane));
            let mut bytes = vec![0; CHUNK];
            tenant.read_blocking(&theirs, 0, &mut bytes).unwrap();
            assert_eq!(bytes, [0x77; CHUNK], "another tenant's chunk");
        }
        owner.grants.iter().for_each(|grant| owner.pool.free_blocking(*grant).unwrap());
        drop(owner);
    }
    tenant.free_blocking(theirs).unwrap();
    tenant.audit().unwrap();
}

/// Waits for the end of the other side's process.
fn ended(socket: &OwnedFd) -> bool {
    let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&limit));
    ready == Ok(1) && matches!(receive(socket), Ok(None) | Err(_))
}

#[test]
fn owner_goes_on_after_its_borrower_was_killed() {
    let (_service, address) = shm();
    // On a busy machine each kill takes some tenths of a second.
    let is_full = std::env::var_os("GRANARY_TEST_FULL").is_some();
    kill_borrowers(&address, if is_full { 200 } else { 40 });
}

#[test]
fn owner_goes_on_over_roce_after_its_borrower_was_killed() {
    let (_service, _nic, address) = roce();
    kill_borrowers(&address, 20);
}

#[test]
fn refused_access_of_the_borrower_is_reported_and_mended() {
    let (_service, address) = shm();
    let others = others(1);
    let owner = Owner::new(&address, &others);
    owner.lend(&others[0]);
    let transfers = owner.transfers();
    let mut wrong = transfers.clone();
    wrong[4].rkey ^= 1;
    others[0].say(Order::Read, &wrong);
    assert_eq!(others[0].hear(), "RemoteAccess");
    others[0].say(Order::GiveBack, &[]);
    assert_eq!(others[0].hear(), "given back");
    owner.pool.take_back().unwrap();
    LANES.iter().for_each(|lane| owner.round_trip(3, *lane));
}

#[test]
fn lanes_that_no_borrower_can_use_are_not_lent() {
    let (_service, address) = shm();
    let plain = address.connect(Options::default()).unwrap();
    let refused = plain.lend_lanes(&plain.buffer(CHUNK).unwrap()).unwrap_err();
    assert!(refused.to_string().contains("not connected for lending"), "{refused}");
    // The borrower has not mapped the queues.
    let unmapped = address.connect_lendable(Options::default(), |_| false).unwrap();
    let buffer = unmapped.buffer(CHUNK).unwrap();
    let refused = unmapped.lend_lanes(&buffer).unwrap_err();
    assert!(refused.to_string().contains("borrower has mapped"), "{refused}");
    let grant = unmapped.allocate_blocking().unwrap();
    let whole = Transfer { grant: &grant, offset: 0, buffer_offset: 0, len: CHUNK as u32 };
    unmapped.read_batch_blocking(&[whole], &buffer, LANES[0]).unwrap();
    assert!(unmapped.lent_transfer(&whole, Lane(0)).is_err(), "the first lane is never lent");
    let beyond = Transfer { offset: 1, ..whole };
    assert!(matches!(unmapped.lent_transfer(&beyond, LANES[0]), Err(Error::OutOfRange { .. })));

    let (service, nic, roce) = roce();
    let Address::Roce(remote) = roce else { unreachable!("an address of RoCEv2") };
    let own = Address::Roce(Remote { nic: None, ..remote });
    let own = own.connect_lendable(Options::default(), |_| true).unwrap();
    let refused = own.lend_lanes(&own.buffer(CHUNK).unwrap()).unwrap_err();
    assert!(refused.to_string().contains("does not attach"), "{refused}");
    drop((service, nic));
}

// --- direct access to the chunks of a private memory node ---------------------------------------

/// Copies a chunk to the frames, and frames to the next chunk.
fn direct(owner: &OwnedFd) {
    let Packet { bytes, descriptors } = hear(owner);
    let words: Vec<u64> =
        bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let mut descriptors = descriptors.into_iter();
    let frames = map_frames(&descriptors.next().unwrap(), 1 << 30).unwrap();
    send(owner, b"mapped", &[]).unwrap();
    let part = ChunkPart { address: words[0], bytes: words[1] };
    let memory = ChunkMemory::from_parts(vec![(part, descriptors.next().unwrap())]).unwrap();
    let chunks = hear(owner).bytes;
    let [from, to] = [0, 8].map(|at| u64::from_le_bytes(chunks[at..at + 8].try_into().unwrap()));
    memory.read(from, &frames, CHUNK, CHUNK).unwrap();
    memory.write(to, &frames, CHUNK, CHUNK).unwrap();
    send(owner, b"done", &[]).unwrap();
}

#[test]
fn another_process_moves_pages_of_a_private_memory_node() {
    let settings = Settings { shares_chunks: true, ..settings() };
    let service = Service::start(&settings, &Endpoint::Fresh).unwrap();
    let pool = Pool::connect(service.path(), Options::default()).unwrap();
    let memory = ChunkMemory::open(service.path()).unwrap().unwrap();
    let other = Other::start("direct");
    let (part, file) = memory.parts().next().unwrap();
    let hello = [part.address.to_le_bytes(), part.bytes.to_le_bytes()].concat();
    let mut show = |frames: BorrowedFd<'_>| {
        send(&other.socket, &hello, &[frames, file]).unwrap();
        assert_eq!(other.hear(), "mapped");
    };
    let buffer = pool.buffer_shown(2 * CHUNK, &mut show).unwrap();
    let grants = [pool.allocate_blocking().unwrap(), pool.allocate_blocking().unwrap()];
    pool.write_blocking(&grants[0], 0, &[0x5a; CHUNK]).unwrap();
    let addresses = [grants[0].addr.to_le_bytes(), grants[1].addr.to_le_bytes()].concat();
    send(&other.socket, &addresses, &[]).unwrap();
    assert_eq!(other.hear(), "done");
    let mut bytes = vec![0; CHUNK];
    buffer.memory().read(CHUNK, &mut bytes);
    assert_eq!(bytes, [0x5a; CHUNK], "the frames");
    pool.read_blocking(&grants[1], 0, &mut bytes).unwrap();
    assert_eq!(bytes, [0x5a; CHUNK], "the second chunk");
}

#[test]
fn chunk_memory_of_a_wrong_file_is_refused() {
    let part = ChunkPart { address: 1 << 40, bytes: 8192 };
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    assert!(ChunkMemory::from_parts(vec![(part, null)]).is_err());
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("chunks", flags).unwrap();
    rustix::fs::ftruncate(&file, 8192).unwrap();
    assert!(ChunkMemory::from_parts(vec![(part, file.try_clone().unwrap())]).is_err(), "unsealed");
    let fixed = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW;
    rustix::fs::fcntl_add_seals(&file, fixed).unwrap();
    let parts = |part| ChunkMemory::from_parts(vec![(part, file.try_clone().unwrap())]);
    assert!(parts(part).is_ok());
    assert!(parts(ChunkPart { bytes: 8193, ..part }).is_err());
    assert!(parts(ChunkPart { address: u64::MAX - 4096, ..part }).is_err());
}

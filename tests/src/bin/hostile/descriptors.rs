//! Attacks with file descriptors: descriptors of shrinkable memory or of other objects, sent as
//! memory and as the doorbell page.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, bail, ensure};
use granary_tests::control::Control;
use rnic::port::control::{Reply, Verb};
use rnic::port::shm::protocol::{Request, Response, SERVICE, Span, VERSION};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use serde_json::{Value, json};
use verbs::Access;

use crate::Arguments;
use crate::compute::{LONG, remote};
use crate::nic::{Nic, filled_memfd, memfd};
use crate::queue::{Qp, Shape};

/// Bytes of a memfd.
const MIB: u64 = 1 << 20;
/// Removes pages and keeps the size.
const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// Sends every kind of descriptor that is not sealed shared memory.
pub fn kinds(a: &Arguments) -> Result<Value> {
    let nic = Nic::open(&a.socket)?;
    a.ready()?;
    let path = |path: &str, flags: OFlags| -> Result<OwnedFd> {
        Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)?)
    };
    let file = std::env::temp_dir().join(format!("hostile-{}", std::process::id()));
    let named = file.to_str().context("a path in UTF-8")?;
    let regular = path(named, OFlags::RDWR | OFlags::CREATE)?;
    rustix::fs::ftruncate(&regular, 1 << 20)?;
    std::fs::remove_file(&file)?;
    let (read, write) = rustix::pipe::pipe()?;
    let none = SealFlags::empty();
    let whole = filled_memfd(MIB, none)?;
    let read_only = path(&format!("/proc/self/fd/{}", raw(&whole)), OFlags::RDONLY)?;
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC)?;
    let holed = filled_memfd(MIB, none)?;
    rustix::fs::fallocate(&holed, PUNCH, 512 << 10, 4096)?;
    let unwritten = memfd(MIB, none)?;
    rustix::fs::fallocate(&unwritten, FallocateFlags::empty(), 0, MIB)?;
    let mut kinds = vec![
        ("a memfd without a page", memfd(MIB, none)?),
        ("a memfd with a hole", holed),
        ("a memfd with pages that were never written", unwritten),
        ("a memfd sealed against seals", filled_memfd(MIB, SealFlags::SEAL)?),
        ("a memfd sealed against writing", filled_memfd(MIB, SealFlags::WRITE)?),
        ("a memfd sealed against writing later", filled_memfd(MIB, SealFlags::FUTURE_WRITE)?),
        ("a memfd open for reading", read_only),
        ("a memfd that is too small", filled_memfd(4096, none)?),
        ("a memfd that is too large", filled_memfd(2 * MIB, none)?),
        ("a memfd of no bytes", memfd(0, none)?),
        ("a regular file", regular),
        ("a directory", path("/", OFlags::RDONLY | OFlags::DIRECTORY)?),
        ("/dev/zero", path("/dev/zero", OFlags::RDWR)?),
        ("/proc/self/mem", path("/proc/self/mem", OFlags::RDWR)?),
        ("a path only", path("/", OFlags::PATH)?),
        ("a pipe", read),
        ("a pipe's other end", write),
        ("an epoll instance", epoll),
        ("an eventfd", rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?),
        ("a socket", nic_socket(a)?),
    ];
    // A memfd that cannot be sealed, and huge pages if the machine has any.
    kinds.push((
        "a memfd that cannot be sealed",
        rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC)?,
    ));
    let huge = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    if let Ok(fd) = rustix::fs::memfd_create("x", huge)
        && rustix::fs::ftruncate(&fd, 2 << 20).is_ok()
    {
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK)?;
        kinds.push(("huge pages", fd));
    }
    let mut refusals = serde_json::Map::new();
    for (what, fd) in &kinds {
        match nic.add_memory(fd, MIB) {
            Ok(_) => bail!("{what} was accepted"),
            Err(e) => refusals.insert((*what).into(), e.to_string().into()),
        };
        // As the doorbell page the descriptor is refused, too.
        let why = open_with(a, &[fd], MIB).err();
        ensure!(why.is_some(), "{what} was accepted as a doorbell page");
    }
    let good = || filled_memfd(MIB, none);
    let add = br#"{"add_memory":{"bytes":1048576}}"#;
    for fds in [vec![], vec![&good()?, &good()?], vec![&kinds[0].1, &good()?]] {
        let response = nic.ask(add, &fds)?;
        ensure!(matches!(response, Response::Error(_)), "{} descriptors: {response:?}", fds.len());
        ensure!(open_with(a, &fds, MIB).is_err(), "opened with {} descriptors", fds.len());
    }
    for bytes in [0, 1, 4095, 4097, MIB - 4096, MIB + 4096, u64::MAX, u64::MAX - 4095, 1 << 63] {
        ensure!(nic.add_memory(&good()?, bytes).is_err(), "{bytes} bytes of 1 MiB were shared");
        ensure!(open_with(a, &[&good()?], bytes).is_err(), "{bytes} bytes of doorbells");
    }
    // The NIC closes descriptors of a request that takes none.
    let response = nic.ask(br#"{"verb":"alloc_pd"}"#, &[&good()?, &good()?])?;
    ensure!(matches!(response, Response::Reply(_)), "{response:?}");
    nic.add_memory(&good()?, MIB).context("a valid memfd")?;
    // The same memfd twice is refused: the first request sealed it against new writable mappings.
    let twice = good()?;
    nic.add_memory(&twice, MIB)?;
    ensure!(nic.add_memory(&twice, MIB).is_err(), "the same memory was accepted twice");
    Ok(json!({ "refusals": refusals }))
}

/// Opens a function of the NIC with these descriptors as its doorbell page.
fn open_with(a: &Arguments, fds: &[&OwnedFd], bytes: u64) -> Result<()> {
    let connection = Control::connect(&a.socket)?;
    connection.send(SERVICE.as_bytes(), &[])?;
    let hello = serde_json::to_vec(&Request::Hello { version: VERSION, bytes })?;
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    connection.send(&hello, &fds)?;
    let packet = connection.packet()?.context("the connection was closed")?;
    match serde_json::from_slice(&packet.bytes)? {
        Response::Welcome { .. } => Ok(()),
        other => bail!("{other:?}"),
    }
}

fn raw(fd: &OwnedFd) -> i32 {
    use std::os::fd::AsRawFd;
    fd.as_raw_fd()
}

fn nic_socket(a: &Arguments) -> Result<OwnedFd> {
    let control = Control::connect(&a.socket)?;
    Ok(control.as_fd().try_clone_to_owned()?)
}

/// Tries to remove memory while the NIC accesses it. The NIC's process has sealed the memory, so
/// the kernel refuses.
pub fn shrink(a: &Arguments) -> Result<Value> {
    let nic = Nic::open(&a.socket)?;
    let pd = nic.pd()?;
    let fd = filled_memfd(MIB, SealFlags::empty())?;
    let memory = verbs::DmaMemory::map_shared(&fd, 0, MIB as usize)?;
    let number = nic.add_memory(&fd, MIB)?;
    let start = memory.addr();
    let access = Access::LOCAL_ALL | Access::REMOTE_ALL;
    let span = Span { memory: number, offset: 0, bytes: MIB };
    let verb = Verb::RegMr { pd, memory: span, iova: start, access };
    let request = serde_json::to_vec(&Request::Verb(verb))?;
    let key = match nic.ask(&request, &[])? {
        Response::Reply(Reply::Key(key)) => key,
        other => bail!("{other:?}"),
    };
    let mut qp = Qp::new(&nic, pd, Shape::default())?;
    qp.connect(&nic, qp.qpn)?;
    a.ready()?;
    let half = MIB as u32 / 2;
    let from = verbs::wqe::Sge { addr: start, len: half, lkey: key };
    let to = remote(start + half as u64, key.0);
    let mut refused = 0;
    let rounds = a.count.max(1);
    for round in 0..rounds {
        for i in 0..32 {
            qp.put(|b| {
                b.rdma_write(to, &[from]);
                if i == 31 {
                    b.signaled();
                }
            });
        }
        qp.write_doorbell(&nic);
        for size in [0, 4096, MIB - 1, 2 * MIB] {
            refused += rustix::fs::ftruncate(&fd, size).is_err() as u32;
        }
        refused += rustix::fs::fallocate(&fd, PUNCH, 0, MIB).is_err() as u32;
        let zero = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        refused += rustix::fs::fallocate(&fd, zero, 0, MIB).is_err() as u32;
        refused += rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE).is_err() as u32;
        let cqe = qp.wait(LONG).context("the WRITEs did not complete")?;
        ensure!(cqe.error.is_none(), "round {round}: {cqe:?}");
    }
    ensure!(refused as u64 == 7 * rounds, "{refused} of {} were refused", 7 * rounds);
    // The owner may still drop its own mapping's pages; the NIC is not affected.
    // SAFETY: the advice drops page table entries only; the pages belong to the file and stay.
    unsafe {
        let advice = rustix::mm::Advice::LinuxDontNeed;
        rustix::mm::madvise(memory.as_ptr().cast(), memory.len(), advice)?;
    }
    qp.post(&nic, |b| _ = b.rdma_write(to, &[from]).signaled());
    let cqe = qp.wait(LONG).context("a WRITE did not end")?;
    ensure!(cqe.error.is_none(), "{cqe:?}");
    let beyond = remote(start + MIB, key.0);
    qp.post(&nic, |b| _ = b.rdma_write(beyond, &[from]).signaled());
    let cqe = qp.wait(LONG).context("a WRITE did not end")?;
    ensure!(cqe.error.is_some(), "a WRITE beyond the mapped memory succeeded");
    Ok(json!({ "refused": refused }))
}

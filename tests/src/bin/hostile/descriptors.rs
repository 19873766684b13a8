//! Attacks by descriptors: of memory that can shrink under the NIC, or that is no memory.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, bail, ensure};
use rnic::ids::Access;
use rnic::port::control::{Reply, Verb};
use rnic::port::shm::wire::{Request, Response, Span};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use serde_json::{Value, json};

use crate::Arguments;
use crate::compute::{LONG, remote};
use crate::nic::{Nic, memfd};
use crate::queue::{Qp, Shape};

/// Sends every kind of descriptor that is not sealed shared memory.
pub fn kinds(a: &Arguments) -> Result<Value> {
    let nic = Nic::open(&a.socket)?;
    a.ready()?;
    let path = |path: &str, flags: OFlags| -> Result<OwnedFd> {
        Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)?)
    };
    let file = std::env::temp_dir().join(format!("hostile-{}", std::process::id()));
    let named = file.to_str().context("an odd path")?;
    let regular = path(named, OFlags::RDWR | OFlags::CREATE)?;
    rustix::fs::ftruncate(&regular, 1 << 20)?;
    std::fs::remove_file(&file)?;
    let (read, write) = rustix::pipe::pipe()?;
    let sealed = memfd(1 << 20, SealFlags::SHRINK)?;
    let read_only = path(&format!("/proc/self/fd/{}", raw(&sealed)), OFlags::RDONLY)?;
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC)?;
    let mut kinds = vec![
        ("a memfd without seals", memfd(1 << 20, SealFlags::empty())?),
        ("a memfd sealed against growing", memfd(1 << 20, SealFlags::GROW)?),
        ("a memfd sealed against more seals", memfd(1 << 20, SealFlags::SEAL)?),
        ("a memfd sealed against writing", memfd(1 << 20, SealFlags::SHRINK | SealFlags::WRITE)?),
        ("a memfd open for reading", read_only),
        ("a memfd that is too small", memfd(4096, SealFlags::SHRINK)?),
        ("a memfd of no bytes", memfd(0, SealFlags::SHRINK)?),
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
    // A memfd that cannot be sealed at all, and huge pages, where there are some.
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
        match nic.add_memory(fd, 1 << 20) {
            Ok(_) => bail!("{what} was accepted"),
            Err(e) => refusals.insert((*what).into(), e.to_string().into()),
        };
    }
    let good = memfd(1 << 20, SealFlags::SHRINK)?;
    let add = br#"{"add_memory":{"bytes":1048576}}"#;
    for fds in [vec![], vec![&good, &good], vec![&kinds[0].1, &good]] {
        let response = nic.ask(add, &fds)?;
        ensure!(matches!(response, Response::Error(_)), "{} descriptors: {response:?}", fds.len());
    }
    for bytes in [0, 1, 4095, 4097, (1 << 20) + 4096, u64::MAX, u64::MAX - 4095, 1 << 63] {
        ensure!(nic.add_memory(&good, bytes).is_err(), "{bytes} bytes of 1 MiB were shared");
    }
    // Descriptors where none belong are closed.
    let response = nic.ask(br#"{"verb":"alloc_pd"}"#, &[&good, &good])?;
    ensure!(matches!(response, Response::Reply(_)), "{response:?}");
    ensure!(nic.add_memory(&good, 1 << 20).is_ok(), "what is good is accepted");
    Ok(json!({ "refusals": refusals }))
}

fn raw(fd: &OwnedFd) -> i32 {
    use std::os::fd::AsRawFd;
    fd.as_raw_fd()
}

fn nic_socket(a: &Arguments) -> Result<OwnedFd> {
    let control = granary_tests::control::Control::connect(&a.socket)?;
    Ok(control.as_fd().try_clone_to_owned()?)
}

/// Takes memory away while the NIC works in it, as far as the kernel lets it: the seal keeps the size,
/// and what is punched out reads as zeros.
pub fn shrink(a: &Arguments) -> Result<Value> {
    let nic = Nic::open(&a.socket)?;
    let pd = nic.pd()?;
    let bytes = 1usize << 20;
    let fd = memfd(bytes as u64, SealFlags::SHRINK)?;
    let number = nic.add_memory(&fd, bytes as u64)?;
    let memory = rnic::memory::DmaMemory::map_shared(&fd, 0, bytes)?;
    let start = memory.addr();
    let access = Access::LOCAL_ALL | Access::REMOTE_ALL;
    let span = Span { memory: number, offset: 0, bytes: bytes as u64 };
    let verb = Verb::RegMr { pd, memory: span, iova: start, access };
    let request = serde_json::to_vec(&Request::Verb(verb))?;
    let key = match nic.ask(&request, &[])? {
        Response::Reply(Reply::Key(key)) => key,
        other => bail!("{other:?}"),
    };
    let mut qp = Qp::new(&nic, pd, Shape::default())?;
    qp.connect(&nic, qp.qpn)?;
    a.ready()?;
    let half = bytes as u32 / 2;
    let from = rnic::wqe::Sge { addr: start, len: half, lkey: key };
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
        qp.ring(&nic);
        for size in [0, 4096, bytes as u64 - 1] {
            refused += rustix::fs::ftruncate(&fd, size).is_err() as u32;
        }
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&fd, punch, 0, bytes as u64).context("punching a hole")?;
        let cqe = qp.wait(LONG).context("the WRITEs did not end")?;
        ensure!(cqe.error.is_none(), "round {round}: {cqe:?}");
    }
    ensure!(refused as u64 == 3 * rounds, "the file shrank");
    // Growing is no harm: the mapping keeps its size.
    rustix::fs::ftruncate(&fd, 2 * bytes as u64)?;
    let beyond = remote(start + bytes as u64, key.0);
    qp.post(&nic, |b| _ = b.rdma_write(beyond, &[from]).signaled());
    let cqe = qp.wait(LONG).context("a WRITE did not end")?;
    ensure!(cqe.error.is_some(), "it wrote beyond what is mapped");
    Ok(json!({ "refused": refused }))
}

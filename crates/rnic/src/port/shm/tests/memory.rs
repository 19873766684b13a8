//! Tests of the memory that a client shares: rejected descriptors, and attacks on accepted memory.

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom};
use rustix::io::Errno;

use super::*;

fn open(path: &str, flags: OFlags) -> OwnedFd {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

#[test]
fn descriptors_of_other_files_are_rejected() {
    let host = host();
    let mut s = opened(&host);
    let a_file = tempfile();
    let others = [
        ("an eventfd", super::super::nic_thread::eventfd().unwrap()),
        ("a program", open("/proc/self/exe", OFlags::RDONLY)),
        ("memory of a process", open("/proc/self/mem", OFlags::RDWR)),
        ("a file of proc", open("/proc/self/maps", OFlags::RDONLY)),
        ("a device", open("/dev/zero", OFlags::RDWR)),
        ("a directory", open("/", OFlags::RDONLY)),
        ("a path", open("/", OFlags::PATH)),
        ("a file", a_file),
        ("a socket", TcpListener::bind("127.0.0.1:0").unwrap().into()),
    ];
    for (_what, fd) in others {
        refused(&mut s, &add(8192), vec![fd], "memfd");
    }
    // Memory files with wrong seals.
    let unwritable = memfd(8192, SealFlags::WRITE);
    refused(&mut s, &add(8192), vec![unwritable], "mapping");
    let sealed = memfd(8192, SealFlags::SHRINK | SealFlags::SEAL);
    refused(&mut s, &add(8192), vec![sealed], "sealed");
    let plain = rustix::fs::memfd_create("plain", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&plain, 8192).unwrap();
    refused(&mut s, &add(8192), vec![plain], "sealed");
    // A memfd that was opened read-only, by its name in /proc.
    let fd = whole(8192);
    let name = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
    refused(&mut s, &add(8192), vec![open(&name, OFlags::RDONLY)], "mapping");
    let huge = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    match rustix::fs::memfd_create("huge", huge) {
        Ok(fd) => refused(&mut s, &add(2 << 20), vec![fd], "1048576"),
        Err(e) => crate::needs::skip(format!("huge pages, which this kernel does not have: {e}")),
    }
    assert!(matches!(ask(&mut s, &add(8192), vec![whole(8192)]).0, Response::Memory(0)));
}

fn tempfile() -> OwnedFd {
    let path = std::env::temp_dir().join(format!("granary-rnic-test-{}", std::process::id()));
    let mut options = std::fs::File::options();
    let file = options.create(true).truncate(true).read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.set_len(8192).unwrap();
    file.into()
}

#[test]
fn memory_with_holes_is_rejected() {
    let host = host();
    let mut s = opened(&host);
    let sparse = |bytes| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("sparse", flags).unwrap();
        rustix::fs::ftruncate(&fd, bytes).unwrap();
        fd
    };
    refused(&mut s, &add(8192), vec![sparse(8192)], "no page at 0");
    let fd = sparse(16384);
    rustix::io::pwrite(&fd, &[1; 4096], 0).unwrap();
    rustix::io::pwrite(&fd, &[1; 4096], 8192).unwrap();
    refused(&mut s, &add(16384), vec![fd], "no page at 4096");
    // Pages are allocated beyond its end only.
    let fd = sparse(8192);
    rustix::fs::fallocate(&fd, FallocateFlags::KEEP_SIZE, 8192, 8192).unwrap();
    assert_eq!(rustix::fs::fstat(&fd).unwrap().st_blocks, 16);
    refused(&mut s, &add(8192), vec![fd], "no page at 0");
}

#[test]
fn accepted_memory_cannot_lose_pages() {
    let host = host();
    let mut s = opened(&host);
    let fd = whole(16384);
    let mine = DmaMemory::map_shared(&fd, 0, 16384).unwrap();
    let theirs = fd.try_clone().unwrap();
    assert!(matches!(ask(&mut s, &add(16384), vec![theirs]).0, Response::Memory(0)));
    assert_eq!(rustix::fs::ftruncate(&fd, 0), Err(Errno::PERM));
    assert_eq!(rustix::fs::ftruncate(&fd, 1 << 20), Err(Errno::PERM));
    for mode in [
        FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        FallocateFlags::ZERO_RANGE,
        FallocateFlags::COLLAPSE_RANGE,
        FallocateFlags::KEEP_SIZE,
    ] {
        let (at, bytes) = if mode == FallocateFlags::KEEP_SIZE { (16384, 4096) } else { (0, 4096) };
        let e = rustix::fs::fallocate(&fd, mode, at, bytes).unwrap_err();
        assert!(matches!(e, Errno::PERM | Errno::OPNOTSUPP), "{mode:?}: {e}");
    }
    // SAFETY: the pages belong to this test.
    let removed = unsafe { libc::madvise(mine.as_ptr().cast(), 16384, libc::MADV_REMOVE) };
    assert_eq!((removed, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EPERM)));
    assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::PERM));
    assert!(DmaMemory::map_shared(&fd, 0, 16384).is_err(), "a new mapping that writes");
    assert_eq!(rustix::fs::seek(&fd, SeekFrom::Hole(0)), Ok(16384));
    // The mapping from before the seals still works.
    mine.write(0, b"still mine");
}

/// A client shrinks its memory and punches holes until the seals stop it, while the host accepts
/// the memory.
#[test]
fn memory_changed_during_acceptance_is_whole_or_rejected() {
    let host = host();
    let mut s = opened(&host);
    let (mut accepted, mut refused) = (0, 0);
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        let fd = whole(65536);
        let attacker = fd.try_clone().unwrap();
        let attack = std::thread::spawn(move || {
            for turn in 0.. {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let punched = rustix::fs::fallocate(&attacker, flags, turn % 16 * 4096, 4096);
                let _ = rustix::io::pwrite(&attacker, &[1; 4096], turn % 16 * 4096);
                if punched.is_err() {
                    break;
                }
                let _ = rustix::fs::ftruncate(&attacker, 4096);
                let _ = rustix::fs::ftruncate(&attacker, 65536);
                let _ = rustix::io::pwrite(&attacker, &[1; 65536], 0);
            }
            attacker
        });
        match ask(&mut s, &add(65536), vec![fd]).0 {
            Response::Memory(number) => {
                let fd = attack.join().unwrap();
                assert_eq!(rustix::fs::fstat(&fd).unwrap().st_size, 65536);
                assert_eq!(rustix::fs::seek(&fd, SeekFrom::Hole(0)), Ok(65536));
                ask(&mut s, &format!(r#"{{"remove_memory":{{"memory":{number}}}}}"#), Vec::new());
                accepted += 1;
            }
            Response::Error(_) => {
                // Wait for the end of the attack.
                let fd = attack.join().unwrap();
                drop(fd);
                refused += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    eprintln!("accepted {accepted}, refused {refused}");
}

#[test]
fn memory_counts_while_a_region_uses_it() {
    let host = host();
    let mut s = opened(&host);
    let Response::Reply(Reply::Pd(pd)) = ask(&mut s, r#"{"verb":"alloc_pd"}"#, Vec::new()).0 else {
        panic!("no PD");
    };
    let mut key = None;
    for number in 0..3 {
        ask(&mut s, &add(8192), vec![whole(8192)]);
        let memory = Span { memory: number, offset: 4096, bytes: 4096 };
        let access = Access::LOCAL_ALL;
        let verb = Verb::RegMr { pd, memory, iova: 0, access };
        let request = serde_json::to_string(&Request::Verb(verb)).unwrap();
        let Response::Reply(Reply::Key(k)) = ask(&mut s, &request, Vec::new()).0 else {
            panic!("not registered");
        };
        key = Some(k);
        let remove = format!(r#"{{"remove_memory":{{"memory":{number}}}}}"#);
        assert!(matches!(ask(&mut s, &remove, Vec::new()).0, Response::Reply(Reply::Done)));
    }
    refused(&mut s, &add(8192), vec![whole(8192)], "limit is 3");
    let dereg = Request::Verb(Verb::DeregMr { key: key.unwrap() });
    ask(&mut s, &serde_json::to_string(&dereg).unwrap(), Vec::new());
    assert!(matches!(ask(&mut s, &add(8192), vec![whole(8192)]).0, Response::Memory(3)));
}

#[test]
fn client_may_share_up_to_its_limit_and_reuse_it() {
    let host = host();
    let mut s = opened(&host);
    let mut shared = |bytes| ask(&mut s, &add(bytes), vec![whole(bytes)]).0;
    let is_memory = |answer: &Response| matches!(answer, Response::Memory(_));
    assert!(is_memory(&shared(1 << 19)));
    assert!(!is_memory(&shared((1 << 19) + 4096)), "more than the rest");
    assert!(is_memory(&shared(1 << 19)), "the rest");
    assert!(!is_memory(&shared(4096)));
    for round in 2..4 {
        let remove = format!(r#"{{"remove_memory":{{"memory":{}}}}}"#, round - 1);
        assert!(matches!(ask(&mut s, &remove, Vec::new()).0, Response::Reply(Reply::Done)));
        let again = ask(&mut s, &add(1 << 19), vec![whole(1 << 19)]).0;
        assert!(matches!(again, Response::Memory(n) if n == round), "{again:?}");
        refused(&mut s, &add(4096), vec![whole(4096)], "limit is 1048576");
    }
}

/// A socket whose last descriptor takes a minute to close.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (receiver, _) = listener.accept().unwrap();
    sender.set_nonblocking(true).unwrap();
    // Fill the buffers of both sides.
    while std::io::Write::write(&mut &sender, &[0; 65536]).is_ok() {}
    sender.set_nonblocking(false).unwrap();
    let minute = Some(Duration::from_secs(60));
    rustix::net::sockopt::set_socket_linger(&sender, minute).unwrap();
    (sender.into(), receiver)
}

#[test]
fn slow_descriptors_do_not_delay_the_host() {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let host = host();
    let started = Instant::now();
    let (client, server) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let server = socket::PeerSocket::from(server);
    let mut s = opened(&host);
    let mut receivers = Vec::new();
    // With a request, with more descriptors than a request may have, and with a request that is too
    // long.
    for (count, bytes) in [(1, add(8192)), (2, add(8192)), (1, "x".repeat(40 << 10))] {
        let mut sent = Vec::new();
        for _ in 0..count {
            let (fd, receiver) = lingering();
            sent.push(fd);
            receivers.push(receiver);
        }
        let fds: Vec<_> = sent.iter().map(|fd| fd.as_fd()).collect();
        socket::send(&client, bytes.as_bytes(), &fds).unwrap();
        drop(sent);
        match socket::receive(&server) {
            Ok(Some(packet)) => {
                assert_eq!(packet.descriptors.len(), count);
                s.handle(&packet.bytes, packet.descriptors);
            }
            Err(Errno::MSGSIZE) => {}
            other => panic!("{:?}", other.map(|p| p.is_some())),
        }
    }
    // In the receive queue of a connection that ends.
    let (fd, receiver) = lingering();
    socket::send(&client, b"{}", &[fd.as_fd()]).unwrap();
    drop(fd);
    drop(server);
    let end = socket::receive(&client).map(|p| p.is_some());
    assert!(
        matches!(end, Ok(false) | Err(Errno::CONNRESET)),
        "the connection ended at once: {end:?}"
    );
    assert!(started.elapsed() < Duration::from_secs(30), "took {:?}", started.elapsed());
    drop((receivers, receiver));
}

#[test]
fn all_descriptors_of_a_packet_are_closed() {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let host = host();
    let mut s = opened(&host);
    let (client, server) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let many = [writer.as_fd(); 253];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    for length in [1, 5, 40 << 10] {
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        let bytes = vec![b'x'; length];
        let part = [std::io::IoSlice::new(&bytes)];
        sendmsg(&client, &part, &mut control, SendFlags::empty()).unwrap();
        if let Ok(Some(packet)) = socket::receive(&server) {
            assert_eq!(packet.descriptors.len(), 253);
            s.handle(&packet.bytes, packet.descriptors);
        }
    }
    drop(writer);
    // The reader sees the end of the pipe only if no writing descriptor is open any more.
    let mut fds = [rustix::event::PollFd::new(&reader, rustix::event::PollFlags::IN)];
    let timeout = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(
        rustix::event::poll(&mut fds, Some(&timeout)),
        Ok(1),
        "a writing descriptor is still open"
    );
    assert_eq!(rustix::io::read(&reader, &mut [0]), Ok(0));
}

#[test]
fn error_texts_have_a_maximum_length() {
    let host = host();
    let mut s = opened(&host);
    let quoted = format!(r#"{{"verb":{{"{}":1}}}}"#, "\\u0001".repeat(5000));
    let (reply, _) = s.handle(quoted.as_bytes(), Vec::new());
    assert!(reply.len() < 8 << 10, "{} bytes", reply.len());
    for deep in ["[", r#"{"verb":"#, r#"{"verb":{"create_qp":"#] {
        refused(&mut s, &deep.repeat(1500), Vec::new(), "malformed request");
    }
}

#[test]
fn new_client_gets_pieces_from_the_reserve() {
    let host = host();
    let greedy: Vec<_> = (0..32 << 10).map(|_| host.take_piece(64).unwrap()).collect();
    assert!(host.take_piece(64).is_err());
    let mut s = opened(&host);
    assert!(matches!(ask(&mut s, &add(8192), vec![whole(8192)]).0, Response::Memory(0)));
    let more: Vec<_> = (1..16 << 10).map(|_| host.take_piece(0).unwrap()).collect();
    refused(&mut s, &add(8192), vec![whole(8192)], "of all attached processes");
    drop((greedy, more));
    assert!(host.take_piece(64).is_ok());
}

/// A client controls how long closing its session's eventfd takes: the close removes a link for
/// each epoll instance that watches the eventfd and for each descriptor number under which the
/// instance does so.
#[test]
fn watched_eventfd_is_not_closed_by_the_nic_thread() {
    use rustix::event::epoll;
    const INSTANCES: usize = 160;
    const NUMBERS: i32 = 400;
    let watched = |fd: &OwnedFd| {
        let instance = |_| {
            let instance = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            for number in 0..NUMBERS {
                // The lowest free descriptor number from 500 + `number` on.
                let again = rustix::io::fcntl_dupfd_cloexec(fd, 500 + number).unwrap();
                let data = epoll::EventData::new_u64(0);
                // May fail if a number repeats, because another test used it for a moment.
                let _ = epoll::add(&instance, &again, data, epoll::EventFlags::IN);
            }
            instance
        };
        (0..INSTANCES).map(instance).collect::<Vec<_>>()
    };
    let links = |instances: &[OwnedFd]| {
        let watched_by = |fd: &OwnedFd| {
            let path = format!("/proc/self/fdinfo/{}", std::os::fd::AsRawFd::as_raw_fd(fd));
            std::fs::read_to_string(path).unwrap().matches("tfd:").count()
        };
        instances.iter().map(watched_by).sum::<usize>()
    };
    let cpu = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    // Reference: the CPU time of the same close on this test's thread.
    let own = super::super::nic_thread::eventfd().unwrap();
    let instances = watched(&own);
    assert!(links(&instances) > INSTANCES * 100);
    let start = cpu();
    drop(own);
    let closing = cpu() - start;
    assert_eq!(links(&instances), 0);
    drop(instances);
    let host = host();
    let mut s = session(&host);
    let (_, wake) = ask(&mut s, HELLO, vec![whole(8192)]);
    let instances = watched(&wake[0]);
    drop(wake);
    let before = host.cpu_time().unwrap();
    drop(s);
    let deadline = Instant::now() + Duration::from_secs(20);
    while links(&instances) > 0 {
        assert!(Instant::now() < deadline, "the session's eventfd is still open");
        std::thread::yield_now();
    }
    let by_nic = host.cpu_time().unwrap() - before;
    println!("closing: {closing:?}; the NIC's thread: {by_nic:?}");
    assert!(by_nic < closing / 2, "{by_nic:?} of {closing:?} by the NIC's thread");
}

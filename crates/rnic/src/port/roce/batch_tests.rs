use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use super::*;

/// A pair of sockets that deliver a datagram before `send` returns.
fn pair() -> (UnixDatagram, UnixDatagram) {
    let (sender, receiver) = UnixDatagram::pair().expect("sockets");
    sender.set_nonblocking(true).expect("a flag");
    (sender, receiver)
}

fn udp() -> UdpSocket {
    UdpSocket::bind("127.0.0.1:0").expect("a socket")
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn receive_offers_more_slots_after_filling_all() {
    let (sender, socket) = pair();
    let mut receiver = Receiver::new();
    for _ in 0..2 {
        for slots in [1, 1, 2, 4, 8] {
            // Fill the socket's queue: eleven datagrams or more.
            while sender.send(&[0; 20]).is_ok() {}
            assert_eq!(receiver.receive(socket.as_fd()), Ok(slots));
        }
        while receiver.receive(socket.as_fd()).is_ok() {}
        // A call that finds no datagram resets the number of offered slots.
        assert_eq!(receiver.receive(socket.as_fd()), Err(Errno::WOULDBLOCK));
    }
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn long_batches_are_received_one_at_a_time() {
    let (sender, socket) = pair();
    let mut receiver = Receiver::new();
    let long = [0; LONG_BYTES as usize];
    for _ in 0..2 {
        sender.send(&long).unwrap();
        assert_eq!(receiver.receive(socket.as_fd()), Ok(1));
        assert_eq!(receiver.offered, 1);
    }
    sender.send(&[0; 20]).unwrap();
    assert_eq!(receiver.receive(socket.as_fd()), Ok(1));
    for datagram in [&long[..20], &long] {
        sender.send(datagram).unwrap();
    }
    assert_eq!(receiver.receive(socket.as_fd()), Ok(2));
    assert_eq!(receiver.offered, 1);
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn truncated_or_empty_datagram_is_no_packet() {
    let (sender, socket) = pair();
    let mut receiver = Receiver::new();
    sender.send(&vec![1; SLOT_BYTES + 1]).unwrap();
    assert_eq!(receiver.receive(socket.as_fd()), Ok(1));
    assert_eq!((receiver.received, receiver.lens[0]), (1, 0));
    // The truncated datagram was consumed: the next call receives the following one.
    sender.send(&[]).unwrap();
    assert_eq!(receiver.receive(socket.as_fd()), Ok(1));
    write_name(&mut receiver.names[0], udp().local_addr().unwrap());
    assert!(receiver.batches().next().is_none());
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn each_received_datagram_has_its_own_slot() {
    let (sender, socket) = (udp(), udp());
    let mut receiver = Receiver::new();
    let sent: Vec<_> = (0..8).map(|n| vec![n; 20 + n as usize]).collect();
    for datagram in &sent {
        sender.send_to(datagram, socket.local_addr().unwrap()).unwrap();
    }
    let until = Instant::now() + Duration::from_secs(20);
    let mut came = Vec::new();
    while came.len() < sent.len() {
        assert!(Instant::now() < until, "{} of 8 datagrams", came.len());
        if receiver.receive(socket.as_fd()).is_err() {
            std::thread::yield_now();
            continue;
        }
        for batch in receiver.batches() {
            assert_eq!(batch.source, sender.local_addr().unwrap());
            assert_eq!((batch.bytes.as_ptr() as usize + BTH) % ALIGNED, 0, "payloads are aligned");
            came.push(batch.bytes.to_vec());
        }
    }
    assert_eq!(came, sent);
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn zero_segment_size_yields_one_batch() {
    let mut receiver = Receiver::new();
    let mut bytes = [0; size_of::<Control>()];
    let len = put_item(&mut bytes, 0, libc::SOL_UDP, libc::UDP_GRO, &0i32.to_ne_bytes());
    let word = |i: usize| u64::from_ne_bytes(bytes[i * 8..][..8].try_into().unwrap());
    receiver.controls[0] = std::array::from_fn(word);
    (receiver.control_lens[0], receiver.lens[0], receiver.received) = (len, 20, 1);
    write_name(&mut receiver.names[0], "127.0.0.1:4791".parse().unwrap());
    assert_eq!(read_control(&receiver.controls[0], len), (Some(0), None));
    let each: Vec<_> = receiver.batches().map(|batch| batch.each).collect();
    assert_eq!(each, [20]);
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn rejected_datagrams_are_an_error() {
    let socket = udp();
    // A broadcast, which needs a socket option (SO_BROADCAST) that is not set.
    let to = "255.255.255.255:4791".parse().unwrap();
    let burst = Outgoing { from: None, to, bytes: &[0; 20], each: 20 };
    for count in [1, 2] {
        let sent = Sender::new().send(socket.as_fd(), std::iter::repeat_n(burst, count));
        assert!(sent.is_err(), "{sent:?}");
    }
}

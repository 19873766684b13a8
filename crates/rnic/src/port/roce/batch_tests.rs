use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use super::*;

/// A pair of sockets through which a datagram has come when `send` returns.
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
fn a_call_offers_more_slots_the_more_of_them_were_filled() {
    let (sender, socket) = pair();
    let mut receiver = Receiver::new();
    for _ in 0..2 {
        for slots in [1, 1, 2, 4, 8] {
            // Until the queue is full: eleven of them, or more.
            while sender.send(&[0; 20]).is_ok() {}
            assert_eq!(receiver.receive(socket.as_fd()), Ok(slots));
        }
        while receiver.receive(socket.as_fd()).is_ok() {}
        // A call that finds nothing begins anew.
        assert_eq!(receiver.receive(socket.as_fd()), Err(Errno::WOULDBLOCK));
    }
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn long_rows_are_received_one_by_one() {
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
fn a_datagram_that_was_cut_off_or_is_empty_is_no_packet() {
    let (sender, socket) = pair();
    let mut receiver = Receiver::new();
    sender.send(&vec![1; SLOT_BYTES + 1]).unwrap();
    assert_eq!(receiver.receive(socket.as_fd()), Ok(1));
    assert_eq!((receiver.received, receiver.lens[0]), (1, 0));
    // It was received nevertheless: the call after it has the next one.
    sender.send(&[]).unwrap();
    assert_eq!(receiver.receive(socket.as_fd()), Ok(1));
    write_name(&mut receiver.names[0], udp().local_addr().unwrap());
    assert!(receiver.rows().next().is_none());
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn each_datagram_of_a_call_has_a_place_of_its_own() {
    let (sender, socket) = (udp(), udp());
    let mut receiver = Receiver::new();
    let sent: Vec<_> = (0..8).map(|n| vec![n; 20 + n as usize]).collect();
    for datagram in &sent {
        sender.send_to(datagram, socket.local_addr().unwrap()).unwrap();
    }
    let until = Instant::now() + Duration::from_secs(20);
    let mut came = Vec::new();
    while came.len() < sent.len() {
        assert!(Instant::now() < until, "{} of them", came.len());
        if receiver.receive(socket.as_fd()).is_err() {
            std::thread::yield_now();
            continue;
        }
        for row in receiver.rows() {
            assert_eq!(row.source, sender.local_addr().unwrap());
            assert_eq!((row.bytes.as_ptr() as usize + BTH) % ALIGNED, 0, "payloads are aligned");
            came.push(row.bytes.to_vec());
        }
    }
    assert_eq!(came, sent);
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn datagrams_of_no_bytes_make_no_row() {
    let mut receiver = Receiver::new();
    let mut bytes = [0; size_of::<Control>()];
    let len = put_item(&mut bytes, 0, libc::SOL_UDP, libc::UDP_GRO, &0i32.to_ne_bytes());
    let word = |i: usize| u64::from_ne_bytes(bytes[i * 8..][..8].try_into().unwrap());
    receiver.controls[0] = std::array::from_fn(word);
    (receiver.control_lens[0], receiver.lens[0], receiver.received) = (len, 20, 1);
    write_name(&mut receiver.names[0], "127.0.0.1:4791".parse().unwrap());
    assert_eq!(read_control(&receiver.controls[0], len), (Some(0), None));
    let each: Vec<_> = receiver.rows().map(|row| row.each).collect();
    assert_eq!(each, [20]);
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn datagrams_that_the_kernel_does_not_take_are_an_error() {
    let socket = udp();
    // A broadcast, for which the socket has no permission.
    let to = "255.255.255.255:4791".parse().unwrap();
    let burst = Outgoing { from: None, to, bytes: &[0; 20], each: 20 };
    for count in [1, 2] {
        let sent = Sender::new().send(socket.as_fd(), std::iter::repeat_n(burst, count));
        assert!(sent.is_err(), "{sent:?}");
    }
}

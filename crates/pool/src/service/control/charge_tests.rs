//! Tests of the credit that the control thread charges for received data.

use std::io::Write;
use std::net::{TcpListener, TcpStream};

use rustix::event::epoll::Event;

use super::*;
use crate::service::Service;
use crate::{Endpoint, Settings};

/// Initial credit of the connection.
const CREDIT: u32 = 100;

/// Runs a test with a control thread's state and one TCP connection. The service only provides the
/// memory node.
fn with_connection(test: impl FnOnce(&mut Control<'_>, ConnectionId, TcpStream)) {
    let settings = Settings { donate_bytes: 1 << 20, ..Settings::default() };
    let service = Service::start(&settings, &Endpoint::Fresh).unwrap();
    let listener = Listener::bind(&Endpoint::Fresh).unwrap();
    let sockets =
        ControlSockets::new(Epoll::new().unwrap(), &service.shared.wake.eventfd, listener, None)
            .unwrap();
    let mut control = Control::new(&service.shared, sockets);
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
    peer.set_nodelay(true).unwrap();
    let (stream, _) = tcp.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    let connection = Connection::remote(stream.into(), 4791, CREDIT).unwrap();
    let id = ConnectionId(control.next);
    control.add(connection);
    test(&mut control, id, peer);
}

/// Waits until data can be read.
fn wait_for(control: &Control<'_>, id: ConnectionId) {
    let mut events = Vec::with_capacity(4);
    while !events.iter().any(|e: &Event| e.data.u64() == id.0) {
        control.epoll.wait(&mut events, None).unwrap();
    }
}

fn credit(control: &Control<'_>, id: ConnectionId) -> u32 {
    control.connections[&id].credit
}

#[test]
fn each_part_of_a_frame_is_charged_as_a_request() {
    with_connection(|control, id, mut peer| {
        // A header that announces 64 bytes, and fewer bytes than that.
        let bytes: Vec<u8> = [0, 0, 0, 64].into_iter().chain([b' '; 40]).collect();
        for (n, byte) in bytes.iter().enumerate() {
            peer.write_all(&[*byte]).unwrap();
            wait_for(control, id);
            control.serve_connection(id, EventFlags::IN);
            assert_eq!(credit(control, id), CREDIT - 1 - n as u32, "after byte {n}");
        }
        // A read without data costs nothing.
        control.serve_connection(id, EventFlags::IN);
        assert_eq!(credit(control, id), CREDIT - bytes.len() as u32);
    });
}

//! Tests of the deadline for idle connections, and of dependent connections that close together.

use super::*;
use crate::nic::SessionNeeds;
use crate::protocol::{Opening, Reply};
use crate::service::Service;
use crate::service::connection::PoolSession;
use crate::socket::{receive, send};
use crate::{Endpoint, Settings};

/// Deadline for idle connections. The machine must have been up for longer.
const SILENCE: Duration = Duration::from_secs(20);

/// Runs a test with a control thread's state. The service only provides the memory node.
fn with_control(test: impl FnOnce(&mut Control<'_>)) {
    let settings = Settings { donate_bytes: 1 << 20, silence: SILENCE, ..Settings::default() };
    let service = Service::start(&settings, &Endpoint::Fresh).unwrap();
    let listener = Listener::bind(&Endpoint::Fresh).unwrap();
    let sockets =
        ControlSockets::new(Epoll::new().unwrap(), &service.shared.wake.eventfd, listener, None)
            .unwrap();
    test(&mut Control::new(&service.shared, sockets));
}

/// An accepted connection and its client end.
fn connect(control: &mut Control<'_>) -> (ConnectionId, OwnedFd) {
    let client = crate::socket::connect(control.listener.path()).unwrap();
    let id = ConnectionId(control.next);
    control.accept().unwrap();
    assert!(control.connections.contains_key(&id));
    (id, client)
}

/// Simulates that the connection's deadline has passed.
fn let_time_pass(control: &mut Control<'_>, id: ConnectionId) {
    let (now, connection) = (Instant::now(), control.connections.get_mut(&id).unwrap());
    let until = connection.deadline.replace(now).expect("not settled");
    connection.last_request = now.checked_sub(SILENCE).unwrap();
    control.silent.remove(&(until, id));
    control.silent.insert((now, id));
}

#[test]
fn unread_request_at_the_deadline_keeps_the_connection() {
    with_control(|control| {
        let (id, client) = connect(control);
        let opening = serde_json::to_vec(&Opening::pool()).unwrap();
        send(&client, &opening, &[]).unwrap();
        control.serve_connection(id, EventFlags::IN);
        receive(&client).unwrap().expect("a welcome");
        let_time_pass(control, id);
        let request = serde_json::to_vec(&Numbered { id: 1, body: Request::Audit }).unwrap();
        send(&client, &request, &[]).unwrap();
        control.close_idle();
        assert!(control.connections.contains_key(&id));
        let answer = receive(&client).unwrap().expect("an answer").bytes;
        let answer: Numbered<Reply> = serde_json::from_slice(&answer).unwrap();
        assert_eq!((answer.id, answer.body), (1, Reply::Done));
        let_time_pass(control, id);
        control.close_idle();
        assert!(!control.connections.contains_key(&id));
        assert!(matches!(receive(&client), Ok(None)));
    });
}

#[test]
fn nic_session_ends_with_its_last_compute_node() {
    with_control(|control| {
        let mut clients = Vec::new();
        let mut with = |control: &mut Control<'_>, role| {
            let (id, client) = connect(control);
            clients.push(client);
            control.connections.get_mut(&id).unwrap().role = role;
            id
        };
        let mut nic = |control: &mut Control<'_>| {
            let session = control.shared.host.session(&SessionNeeds::default());
            with(control, Role::Nic(session))
        };
        let (nic, other_nic) = (nic(control), nic(control));
        let mut pool = |control: &mut Control<'_>, nic| {
            with(control, Role::Pool(PoolSession { nic: Some(nic), ..PoolSession::default() }))
        };
        let (first, second) = (pool(control, nic), pool(control, nic));
        let other = pool(control, other_nic);
        let there = |control: &Control<'_>| -> Vec<ConnectionId> {
            control.connections.keys().copied().collect()
        };
        control.close(first);
        assert_eq!(there(control), [nic, other_nic, second, other]);
        control.close(second);
        assert_eq!(there(control), [other_nic, other]);
        control.close(other);
        assert!(there(control).is_empty());
    });
}

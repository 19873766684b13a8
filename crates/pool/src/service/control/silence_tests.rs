//! Tests of which connections are ended, and what ends with them.

use rnic::port::shm::socket::{receive, send};
use rnic::port::shm::{Session, SessionLimits};

use super::*;
use crate::protocol::{Opening, Reply};
use crate::service::Service;
use crate::service::connection::PoolSession;
use crate::{Endpoint, Settings};

/// How long a connection may say nothing. The machine runs for longer than that.
const SILENCE: Duration = Duration::from_secs(20);

/// Runs a test with a control thread's state. The service lends its memory node only.
fn with_control(test: impl FnOnce(&mut Control<'_>)) {
    let settings = Settings { donate_bytes: 1 << 20, silence: SILENCE, ..Settings::default() };
    let service = Service::start(&settings, &Endpoint::Fresh).unwrap();
    let listener = Listener::bind(&Endpoint::Fresh).unwrap();
    let ears =
        Ears::new(Watch::new().unwrap(), &service.shared.wake.eventfd, listener, None).unwrap();
    test(&mut Control::new(&service.shared, ears));
}

/// A connection that was accepted, and its other end.
fn connect(control: &mut Control<'_>) -> (ConnectionId, OwnedFd) {
    let client = crate::socket::connect(control.listener.path()).unwrap();
    let id = ConnectionId(control.next);
    control.accept().unwrap();
    assert!(control.connections.contains_key(&id));
    (id, client)
}

/// Has the connection's time be over.
fn let_time_pass(control: &mut Control<'_>, id: ConnectionId) {
    let (now, connection) = (Instant::now(), control.connections.get_mut(&id).unwrap());
    let until = connection.expected.replace(now).expect("it has not settled");
    connection.heard = now.checked_sub(SILENCE).unwrap();
    control.silent.remove(&(until, id));
    control.silent.insert((now, id));
}

#[test]
fn a_connection_whose_request_was_not_read_in_time_was_not_silent() {
    with_control(|control| {
        let (id, client) = connect(control);
        let opening = serde_json::to_vec(&Opening::pool()).unwrap();
        send(&client, &opening, &[]).unwrap();
        control.serve_connection(id, EventFlags::IN);
        receive(&client).unwrap().expect("a welcome");
        let_time_pass(control, id);
        let request = serde_json::to_vec(&Numbered { id: 1, body: Request::Audit }).unwrap();
        send(&client, &request, &[]).unwrap();
        control.end_silent();
        assert!(control.connections.contains_key(&id));
        let answer = receive(&client).unwrap().expect("an answer").bytes;
        let answer: Numbered<Reply> = serde_json::from_slice(&answer).unwrap();
        assert_eq!((answer.id, answer.body), (1, Reply::Done));
        let_time_pass(control, id);
        control.end_silent();
        assert!(!control.connections.contains_key(&id));
        assert!(matches!(receive(&client), Ok(None)));
    });
}

#[test]
fn a_nic_session_ends_with_the_last_compute_node_on_it() {
    with_control(|control| {
        let mut clients = Vec::new();
        let mut with = |control: &mut Control<'_>, role| {
            let (id, client) = connect(control);
            clients.push(client);
            control.connections.get_mut(&id).unwrap().role = role;
            id
        };
        let mut nic = |control: &mut Control<'_>| {
            let session = Session::new(&control.shared.host, SessionLimits::default());
            with(control, Role::Nic(Box::new(session)))
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

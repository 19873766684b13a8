//! Frees of the client code behind other frees that the memory node refuses.

use std::task::{Context, Poll, Waker};

use scheme::{ClientScheme, Error, Grant, Offer};

use super::super::Client;
use super::super::client::FREE_ATTEMPTS;
use super::*;

fn poll<T>(answer: &mut scheme::Answer<'_, T>) -> Poll<Result<T, Error>> {
    answer.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// Runs a request, and the memory node beside it.
fn run<T>(node: &mut Node<SoftNic>, mut answer: scheme::Answer<'_, T>) -> Result<T, Error> {
    loop {
        match poll(&mut answer) {
            Poll::Ready(result) => return result,
            Poll::Pending => drop(node.poll().unwrap()),
        }
    }
}

/// A thread of the compute node frees a foreign chunk before each free of another thread.
#[test]
fn free_behind_refused_frees_ends() {
    let nic = SoftNic::inline();
    let settings = settings(16, 3, 4);
    let mut node = Node::new(nic.clone(), settings.clone()).unwrap();
    let pd = nic.alloc_pd().unwrap();
    let offer = Offer::new(&settings, 0, node.terms());
    let client = Client::new(&nic, &pd, &offer, &[]).unwrap();
    let cq = nic.create_cq(CqAttr { entries: 16, ignore_overrun: false }).unwrap();
    let (receive, access) = (Receive::None, Access::REMOTE_WRITE);
    let qp = || {
        let receive = receive.clone();
        let attr = QpAttr { send_cq: &cq, recv_cq: &cq, send_blocks: 16, receive, access };
        nic.create_qp(&pd, attr).unwrap()
    };
    let access: Vec<Qp> = (0..settings.lanes()).map(|_| qp()).collect();
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let written = nic.reg_mr(&pd, &nic.alloc_dma(bulletin::BYTES).unwrap(), rights).unwrap();
    let request = ConnectRequest {
        management: client.management().iter().map(|qpn| qpn.raw()).collect(),
        groups: vec![access.iter().map(|qp| qp.qpn().raw()).collect()],
        bulletin_addr: written.remote(0).addr,
        bulletin_rkey: written.remote(0).rkey.0,
        ..ConnectRequest::default()
    };
    let admitted = node.admit(ClientId(1), &request).unwrap();
    client.accept(&admitted).unwrap();
    let peers: Vec<_> = admitted.management.iter().map(|qpn| Qpn::new(*qpn).into()).collect();
    client.connect(&peers).unwrap();

    let own = run(&mut node, client.allocate(GroupId(0))).unwrap();
    let foreign = Grant::new(own.addr, own.len, EntryId::new(99), GroupId(0), own.keys());
    let mut free = client.free(&own);
    let mut turns = 0;
    let result = loop {
        let mut refused = client.free(&foreign);
        assert!(poll(&mut refused).is_pending(), "the memory node's CPU refuses a free");
        let polled = poll(&mut free);
        let other = run(&mut node, refused);
        assert!(matches!(other, Err(Error::NotYours { .. })), "{other:?}");
        if let Poll::Ready(result) = polled {
            break result;
        }
        turns += 1;
        assert!(turns < 2 * FREE_ATTEMPTS, "a free is repeated without a bound");
    };
    let text = result.as_ref().expect_err("the free ends with an error").to_string();
    let attempts = FREE_ATTEMPTS;
    assert!(matches!(result, Err(Error::Contended { attempts: n, .. }) if n == attempts), "{text}");
    assert!(
        text.starts_with("freeing chunk ") && text.contains("no success in 64 attempts: "),
        "{text}"
    );
    assert_eq!(turns, attempts);
    // The chunk is this compute node's still, and can be freed.
    run(&mut node, client.free(&own)).unwrap();
    assert_eq!(node.status().unwrap().free, 16);
    node.audit().unwrap();
}

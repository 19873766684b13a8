//! A FineMem client and its memory node in one thread, on the inline NIC.
//!
//! Every operation has completed when its call returns. The work of the memory node's CPU happens
//! when the caller polls the node.

use pool::{ClientId, ConnectRequest, Error};
use rnic::nic::SoftNic;
use scheme::{ClientScheme, NodeScheme, NodeSettings, Offer};
use schemes::finemem::{Client, Node};
use verbs::{Access, CqAttr, Nic, QpAttr, Qpn, QueuePair, Receive};

type Qp = <SoftNic as Nic>::Qp;

/// An admitted client.
pub struct Connection {
    /// Allocates and frees.
    pub client: Client<SoftNic>,
    /// Identifies the client at the memory node.
    pub id: ClientId,
    _lanes: Vec<Qp>,
}

/// Connects client `number` (from 1) to the memory node on this NIC.
///
/// # Errors
/// Errors of the pool.
pub fn connect(
    nic: &SoftNic,
    node: &mut Node<SoftNic>,
    settings: &NodeSettings,
    number: u32,
) -> Result<Connection, Error> {
    let offer = Offer::new(settings, node.functions(), node.terms());
    let pd = nic.alloc_pd()?;
    let client = Client::new(nic, &pd, &offer)?;
    let cq = nic.create_cq(CqAttr { entries: 16, ignore_overrun: false })?;
    let lane = || {
        let attr = QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: 16,
            receive: Receive::None,
            access: Access::NONE,
        };
        nic.create_qp(&pd, attr)
    };
    let lanes = (0..settings.lanes()).map(|_| lane()).collect::<Result<Vec<_>, _>>()?;
    let id = ClientId(number);
    let request = ConnectRequest {
        management: client.management().iter().map(|qpn| qpn.raw()).collect(),
        groups: vec![lanes.iter().map(|qp| qp.qpn().raw()).collect()],
        ..ConnectRequest::default()
    };
    let admitted = node.admit(id, &request)?;
    client.accept(&admitted)?;
    let peers: Vec<_> = admitted.management.iter().map(|qpn| Qpn::new(*qpn).into()).collect();
    client.connect(&peers)?;
    Ok(Connection { client, id, _lanes: lanes })
}

//! A compute node's client beside the memory node it is connected to, in one thread: on the inline NIC every operation
//! is over when its call is, and what the memory node's CPU does is done by who calls its turns.

use fabric::soft::SoftNic;
use fabric::{Access, CqAttr, Nic, QpAttr, Qpn, QueuePair, Receive};
use pool::finemem::{Client, Node};
use pool::protocol::Welcome;
use pool::scheme::{ClientScheme, NodeScheme};
use pool::{Admission, ClientId, Error, Settings};

type Qp = <SoftNic as Nic>::Qp;

/// A client that was admitted.
pub struct Connection {
    /// What allocates and frees.
    pub client: Client<SoftNic>,
    /// Its number at the memory node.
    pub id: ClientId,
    _lanes: Vec<Qp>,
}

/// Connects client `number` (from 1) to the memory node on this NIC.
///
/// # Errors
/// What the pool says.
pub fn connect(
    nic: &SoftNic,
    node: &mut Node<SoftNic>,
    settings: &Settings,
    number: u32,
) -> Result<Connection, Error> {
    let welcome = Welcome::of(settings, node.functions(), 1);
    let pd = nic.alloc_pd()?;
    let client = Client::new(nic, &pd, &welcome)?;
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
    let request = Admission {
        management: client.management().iter().map(|qpn| qpn.raw()).collect(),
        groups: vec![lanes.iter().map(|qp| qp.qpn().raw()).collect()],
        ..Admission::default()
    };
    let admitted = node.admit(id, &request)?;
    client.admitted(&admitted);
    let peers: Vec<_> = admitted.management.iter().map(|qpn| Qpn::new(*qpn).into()).collect();
    client.connect(&peers)?;
    Ok(Connection { client, id, _lanes: lanes })
}

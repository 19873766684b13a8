//! Scheme `rpc-mw-1` with spare QPs. Its memory node takes the spare QPs of a lane for further
//! lanes, which all have the same key.

use std::net::UdpSocket;
use std::sync::Arc;
use std::time::Duration;

use pool::nic::NicHost;
use pool::{ClientId, ConnectReply, ConnectRequest, Error, GroupId, Lane, Scheme, schemes};
use rnic::nic::SoftNic;
use scheme::options::Terms;
use scheme::registry::{
    ClientFamily, ClientParts, ClientRegistry, Family, NodeFamily, NodeRegistry,
};
use scheme::route::Start;
use scheme::{ClientScheme, Cpu, NodeScheme, NodeSettings, NodeStatus, Offer, QpSet};

/// `rpc-mw-1` with this number of spare QPs of each lane.
struct Spared(u32);

static SPARED: [Spared; 4] = [Spared(0), Spared(1), Spared(2), Spared(3)];

impl Spared {
    /// The size of a group for a scheme that takes spare QPs for lanes.
    fn group_size(&self, group_size: u32) -> u32 {
        1 + (group_size - 1) * (1 + self.0)
    }
}

impl Family for Spared {
    fn schemes(&self) -> &'static [Scheme] {
        &[schemes::RPC_MW_1]
    }
}

impl NodeFamily<SoftNic> for Spared {
    fn node(&self, nic: &SoftNic, settings: &NodeSettings) -> Result<Box<dyn NodeScheme>, Error> {
        let group_size = self.group_size(settings.group_size);
        let settings = NodeSettings { group_size, ..settings.clone() };
        let node = schemes::nodes().node(nic, &settings)?;
        Ok(Box::new(SparedNode { node, spares: self.0 }))
    }
}

impl ClientFamily<SoftNic> for Spared {
    fn client(&self, parts: &ClientParts<'_, SoftNic>) -> Result<Box<dyn ClientScheme>, Error> {
        assert_eq!(parts.offer.spares, self.0);
        let group_size = self.group_size(parts.offer.group_size);
        let offer = Offer { group_size, ..parts.offer.clone() };
        let (_, family) = schemes::clients::<SoftNic>().known(&offer.scheme)?;
        let ClientParts { nic, pd, access, options, .. } = *parts;
        family.client(&ClientParts { nic, pd, offer: &offer, access, options })
    }
}

struct SparedNode {
    node: Box<dyn NodeScheme>,
    spares: u32,
}

impl NodeScheme for SparedNode {
    fn admit(&mut self, client: ClientId, request: &ConnectRequest) -> Result<ConnectReply, Error> {
        self.node.admit(client, request)
    }
    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        self.node.retire(client)
    }
    fn is_retired(&self, client: ClientId) -> bool {
        self.node.is_retired(client)
    }
    fn poll(&mut self) -> Result<bool, Error> {
        self.node.poll()
    }
    fn next_poll(&self) -> Option<Duration> {
        self.node.next_poll()
    }
    fn reset_management(&mut self, client: ClientId) -> Result<Option<Vec<u32>>, Error> {
        self.node.reset_management(client)
    }
    fn management_is_open(&self, client: ClientId) -> Result<bool, Error> {
        self.node.management_is_open(client)
    }
    fn reset_access(&mut self, client: ClientId, group: GroupId, lane: Lane) -> Result<u32, Error> {
        self.node.reset_access(client, group, lane)
    }
    fn set_start(&mut self, client: ClientId, part: QpSet, start: Start) {
        self.node.set_start(client, part, start);
    }
    fn cpu(&mut self) -> Cpu {
        self.node.cpu()
    }
    fn terms(&self) -> Terms {
        self.node.terms()
    }
    fn spares(&self) -> u32 {
        self.spares
    }
    fn first_chunk(&self) -> Option<u64> {
        self.node.first_chunk()
    }
    fn status(&mut self) -> Result<NodeStatus, Error> {
        self.node.status()
    }
    fn audit(&self) -> Result<(), Error> {
        self.node.audit()
    }
}

/// The schemes of a memory node with this number of spare QPs of each lane.
pub fn nodes(spares: u32) -> NodeRegistry<SoftNic> {
    schemes::nodes().with(&SPARED[spares as usize])
}

/// The schemes of its compute nodes.
pub fn clients(spares: u32) -> ClientRegistry<SoftNic> {
    schemes::clients().with(&SPARED[spares as usize])
}

/// Opens the NIC of a memory node.
pub fn open(wire: Option<UdpSocket>) -> Result<(SoftNic, Arc<dyn NicHost>), Error> {
    let (nic, host) = match wire {
        None => SoftNic::host()?,
        Some(wire) => SoftNic::host_over(wire)?,
    };
    Ok((nic, Arc::new(host)))
}

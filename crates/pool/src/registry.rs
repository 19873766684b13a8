//! Enum dispatch over the schemes. The scheme is chosen at run time, when a memory node starts.

use std::sync::Arc;
use std::time::Duration;

use fabric::direct::DirectNic;
use fabric::{Nic, PeerAddress, Qpn};

use crate::protocol::NodeHello;
use crate::remote::Start;
use crate::scheme::{
    CasStats, ClientId, ClientScheme, ConnectReply, ConnectRequest, CpuEvents, Grant, GroupId,
    Lane, NodeScheme, NodeStatus, QpSet, WhenIdle, Worker,
};
use crate::settings::Settings;
use crate::{Error, finemem, odrp, onesidedmw, rpc, schemes};

/// The memory node's side of any scheme.
#[non_exhaustive]
pub enum AnyNode<N: DirectNic> {
    /// [`onesidedmw`].
    OneSidedMw(Box<onesidedmw::Node<N>>),
    /// [`finemem`].
    FineMem(Box<finemem::Node<N>>),
    /// [`odrp`].
    Odrp(Box<odrp::Node<N>>),
    /// [`rpc`].
    Rpc(Box<rpc::Node<N>>),
}

impl<N: DirectNic> AnyNode<N> {
    /// Creates the scheme that `settings` select, on `nic`.
    pub fn new(nic: &N, settings: &Settings) -> Result<Self, Error> {
        Ok(match settings.scheme {
            schemes::ONESIDEDMW => {
                Self::OneSidedMw(Box::new(onesidedmw::Node::new(nic.clone(), settings.clone())?))
            }
            schemes::FINEMEM | schemes::FINEMEM_PAPER | schemes::PREMMAP_ONESIDED => {
                Self::FineMem(Box::new(finemem::Node::new(nic, settings)?))
            }
            schemes::ODRP => Self::Odrp(Box::new(odrp::Node::new(nic.clone(), settings.clone())?)),
            _ => Self::Rpc(Box::new(rpc::Node::new(nic, settings)?)),
        })
    }
}

macro_rules! each {
    ($self:expr, $node:ident => $body:expr) => {
        match $self {
            AnyNode::OneSidedMw($node) => $body,
            AnyNode::FineMem($node) => $body,
            AnyNode::Odrp($node) => $body,
            AnyNode::Rpc($node) => $body,
        }
    };
}

impl<N: DirectNic> NodeScheme for AnyNode<N> {
    fn admit(&mut self, client: ClientId, request: &ConnectRequest) -> Result<ConnectReply, Error> {
        each!(self, node => node.admit(client, request))
    }

    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        each!(self, node => node.retire(client))
    }

    fn is_retired(&self, client: ClientId) -> bool {
        each!(self, node => node.is_retired(client))
    }

    fn poll(&mut self) -> Result<bool, Error> {
        each!(self, node => node.poll())
    }

    fn is_watching(&self) -> bool {
        each!(self, node => node.is_watching())
    }

    fn next_poll(&self) -> Option<Duration> {
        each!(self, node => node.next_poll())
    }

    fn client_waits(&mut self, client: ClientId) -> Result<bool, Error> {
        each!(self, node => node.client_waits(client))
    }

    fn reset_management(&mut self, client: ClientId) -> Result<Option<Vec<u32>>, Error> {
        each!(self, node => node.reset_management(client))
    }

    fn management_is_open(&self, client: ClientId) -> Result<bool, Error> {
        each!(self, node => node.management_is_open(client))
    }

    fn reset_access(&mut self, client: ClientId, group: GroupId, lane: Lane) -> Result<u32, Error> {
        each!(self, node => node.reset_access(client, group, lane))
    }

    fn set_start(&mut self, client: ClientId, part: QpSet, start: Start) {
        each!(self, node => node.set_start(client, part, start))
    }

    fn events(&self) -> Option<Arc<dyn CpuEvents>> {
        each!(self, node => node.events())
    }

    fn functions(&self) -> u32 {
        each!(self, node => node.functions())
    }

    fn workers(&self) -> usize {
        each!(self, node => node.workers())
    }

    fn take_workers(&mut self) -> Vec<Box<dyn Worker>> {
        each!(self, node => node.take_workers())
    }

    fn status(&mut self) -> Result<NodeStatus, Error> {
        each!(self, node => node.status())
    }

    fn audit(&self) -> Result<(), Error> {
        each!(self, node => node.audit())
    }
}

/// The compute node's side of any scheme.
#[non_exhaustive]
pub enum AnyClient<N: Nic> {
    /// [`onesidedmw`].
    OneSidedMw(onesidedmw::Client<N>),
    /// [`finemem`].
    FineMem(finemem::Client<N>),
    /// [`odrp`].
    Odrp(odrp::Client<N>),
    /// [`rpc`].
    Rpc(rpc::Client<N>),
}

impl<N: Nic> AnyClient<N> {
    /// Creates the client of the scheme that `welcome` selects, on `nic`.
    pub fn new(nic: &N, pd: &N::Pd, welcome: &NodeHello) -> Result<Self, Error> {
        Ok(match schemes::find(&welcome.scheme)? {
            schemes::ONESIDEDMW => Self::OneSidedMw(onesidedmw::Client::new(nic, pd, welcome)?),
            schemes::FINEMEM | schemes::FINEMEM_PAPER | schemes::PREMMAP_ONESIDED => {
                Self::FineMem(finemem::Client::new(nic, pd, welcome)?)
            }
            schemes::ODRP => Self::Odrp(odrp::Client::new(nic, pd, welcome)?),
            _ => Self::Rpc(rpc::Client::new(nic, pd, welcome)?),
        })
    }
}

impl<N: Nic> AnyClient<N> {
    /// Passes the first access QP of each group to a scheme that allocates over these QPs.
    pub(crate) fn share_access_qps(
        &self,
        nic: &N,
        pd: &N::Pd,
        credits: u32,
        groups: Vec<onesidedmw::client::SharedQp<N>>,
    ) -> Result<(), Error> {
        match self {
            AnyClient::OneSidedMw(client) => client.share_access_qps(nic, pd, credits, groups),
            _ => Ok(()),
        }
    }

    /// The page access of a scheme whose access is not one-sided.
    pub fn pages(&self) -> Option<&odrp::Client<N>> {
        match self {
            AnyClient::Odrp(client) => Some(client),
            _ => None,
        }
    }
}

macro_rules! each_client {
    ($self:expr, $client:ident => $body:expr) => {
        match $self {
            AnyClient::OneSidedMw($client) => $body,
            AnyClient::FineMem($client) => $body,
            AnyClient::Odrp($client) => $body,
            AnyClient::Rpc($client) => $body,
        }
    };
}

impl<N: Nic> ClientScheme for AnyClient<N> {
    async fn allocate(&self, group: GroupId) -> Result<Grant, Error> {
        each_client!(self, client => client.allocate(group).await)
    }

    async fn allocate_bytes(&self, group: GroupId, bytes: u64) -> Result<Grant, Error> {
        each_client!(self, client => client.allocate_bytes(group, bytes).await)
    }

    async fn free(&self, grant: &Grant) -> Result<(), Error> {
        each_client!(self, client => client.free(grant).await)
    }

    fn management(&self) -> Vec<Qpn> {
        each_client!(self, client => client.management())
    }

    fn is_broken(&self) -> bool {
        each_client!(self, client => client.is_broken())
    }

    fn is_closed(&self) -> bool {
        each_client!(self, client => client.is_closed())
    }

    fn reset(&self) -> Result<(), Error> {
        each_client!(self, client => client.reset())
    }

    fn break_management(&self) -> Result<(), Error> {
        each_client!(self, client => client.break_management())
    }

    async fn recall(&self) -> Result<(), Error> {
        each_client!(self, client => client.recall().await)
    }

    fn cas_stats(&self) -> CasStats {
        each_client!(self, client => client.cas_stats())
    }

    fn when_idle(&self, look: &WhenIdle) {
        each_client!(self, client => client.when_idle(look))
    }

    fn name_access(&self, peers: Vec<Vec<Qpn>>) {
        each_client!(self, client => client.name_access(peers))
    }

    fn admitted(&self, terms: &ConnectReply) {
        each_client!(self, client => client.admitted(terms))
    }

    fn connect(&self, peers: &[PeerAddress]) -> Result<(), Error> {
        each_client!(self, client => client.connect(peers))
    }
}

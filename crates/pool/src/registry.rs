//! Enum dispatch over the schemes. The scheme is chosen at run time, when a memory node starts.

use std::sync::Arc;
use std::time::Duration;

use verbs::direct::DirectNic;
use verbs::{Caps, Nic};

use crate::protocol::NodeHello;
use crate::remote::Start;
use crate::request_queue::SharedQp;
use crate::scheme::{
    ClientId, ClientScheme, ConnectReply, ConnectRequest, CpuEvents, GroupId, Lane, NodeScheme,
    NodeStatus, QpSet, Worker,
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

impl NodeScheme for Box<dyn NodeScheme> {
    fn admit(&mut self, client: ClientId, request: &ConnectRequest) -> Result<ConnectReply, Error> {
        (**self).admit(client, request)
    }

    fn retire(&mut self, client: ClientId) -> Result<(), Error> {
        (**self).retire(client)
    }

    fn is_retired(&self, client: ClientId) -> bool {
        (**self).is_retired(client)
    }

    fn poll(&mut self) -> Result<bool, Error> {
        (**self).poll()
    }

    fn is_watching(&self) -> bool {
        (**self).is_watching()
    }

    fn next_poll(&self) -> Option<Duration> {
        (**self).next_poll()
    }

    fn client_waits(&mut self, client: ClientId) -> Result<bool, Error> {
        (**self).client_waits(client)
    }

    fn reset_management(&mut self, client: ClientId) -> Result<Option<Vec<u32>>, Error> {
        (**self).reset_management(client)
    }

    fn management_is_open(&self, client: ClientId) -> Result<bool, Error> {
        (**self).management_is_open(client)
    }

    fn reset_access(&mut self, client: ClientId, group: GroupId, lane: Lane) -> Result<u32, Error> {
        (**self).reset_access(client, group, lane)
    }

    fn set_start(&mut self, client: ClientId, part: QpSet, start: Start) {
        (**self).set_start(client, part, start)
    }

    fn events(&self) -> Option<Arc<dyn CpuEvents>> {
        (**self).events()
    }

    fn functions(&self) -> u32 {
        (**self).functions()
    }

    fn workers(&self) -> usize {
        (**self).workers()
    }

    fn take_workers(&mut self) -> Vec<Box<dyn Worker>> {
        (**self).take_workers()
    }

    fn status(&mut self) -> Result<NodeStatus, Error> {
        (**self).status()
    }

    fn audit(&self) -> Result<(), Error> {
        (**self).audit()
    }
}

/// Creates the memory node of the scheme that `settings` select, on a NIC that executes chains.
pub fn node<N: DirectNic>(nic: &N, settings: &Settings) -> Result<Box<dyn NodeScheme>, Error> {
    Ok(Box::new(AnyNode::new(nic, settings)?))
}

/// Creates the memory node of the scheme that `settings` select, without chains: on any NIC.
///
/// # Errors
/// The scheme needs chains.
pub fn node_without_chains<N: Nic>(
    nic: &N,
    settings: &Settings,
) -> Result<Box<dyn NodeScheme>, Error> {
    settings.scheme.check_caps(&Caps { chains: false, ..nic.caps() })?;
    match settings.scheme {
        schemes::FINEMEM | schemes::FINEMEM_PAPER | schemes::PREMMAP_ONESIDED => {
            Ok(Box::new(finemem::Node::new(nic, settings)?))
        }
        _ => Ok(Box::new(rpc::Node::new(nic, settings)?)),
    }
}

/// Creates the client of the scheme that `welcome` selects, on `nic`. `access` lists the first
/// access QP of each group.
pub(crate) fn client<N: Nic>(
    nic: &N,
    pd: &N::Pd,
    welcome: &NodeHello,
    access: &[SharedQp<N>],
) -> Result<Box<dyn ClientScheme>, Error> {
    Ok(match schemes::find(&welcome.scheme)? {
        schemes::ONESIDEDMW => Box::new(onesidedmw::Client::new(nic, pd, welcome, access)?),
        schemes::FINEMEM | schemes::FINEMEM_PAPER | schemes::PREMMAP_ONESIDED => {
            Box::new(finemem::Client::new(nic, pd, welcome)?)
        }
        schemes::ODRP => Box::new(odrp::Client::new(nic, pd, welcome)?),
        _ => Box::new(rpc::Client::new(nic, pd, welcome)?),
    })
}

//! The memory node's table of clients: their access QPs, and the requests that concern the QPs of
//! one client.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use verbs::{Nic, PeerAddress, QpChange, QpState, QueuePair};

use crate::Error;
use crate::options::Terms;
use crate::route::Start;
use crate::route::with_start;
use crate::settings::NodeSettings;
use crate::{ClientId, ConnectReply, ConnectRequest, GroupId, Lane, QpSet};

/// A QP of the memory node, and the client's QP that it is connected to.
pub struct PeerQp<N: Nic> {
    /// The memory node's side.
    pub qp: N::Qp,
    /// The client's side.
    pub peer: PeerAddress,
}

impl<N: Nic> PeerQp<N> {
    /// Connects the QP, for the first time or again.
    pub fn connect(&self) -> Result<(), Error> {
        Ok(self.qp.connect(self.peer)?)
    }

    /// Connects the QP again before the memory node posts work of its own to it.
    ///
    /// The compute node may break its QP at any moment, also between the changes of state. Then the
    /// QP stays in the error state and the work fails, but the memory node goes on.
    ///
    /// # Errors
    /// [`Error::Gone`] if the NIC has exited.
    pub fn connect_for_work(&self) -> Result<(), Error> {
        match self.qp.connect(self.peer) {
            Err(verbs::Error::Refused { .. }) => Ok(()),
            result => Ok(result?),
        }
    }

    /// Sets the initial state for the next connect.
    pub fn set_start(&mut self, start: Start) {
        self.peer = with_start(self.peer, start);
    }

    /// True if the QP is connected and not in the error state.
    pub fn is_ready(&self) -> Result<bool, Error> {
        Ok(self.qp.state()? == QpState::ReadyToSend)
    }
}

/// The access QPs of a client, by group and lane. A group has its lanes for each function of the
/// NIC that contains windows.
pub struct AccessQps<N: Nic>(pub Vec<Vec<PeerQp<N>>>);

impl<N: Nic> AccessQps<N> {
    /// Creates and connects a QP for each access QP that `request` lists. `create` gets the index
    /// of the QP in its group.
    pub fn new(
        request: &ConnectRequest,
        mut create: impl FnMut(usize) -> Result<N::Qp, Error>,
    ) -> Result<Self, Error> {
        let mut groups = Vec::new();
        for group in &request.groups {
            let mut lanes = Vec::new();
            for (index, &peer) in group.iter().enumerate() {
                let lane = PeerQp { qp: create(index)?, peer: request.peer(peer) };
                lane.connect()?;
                lanes.push(lane);
            }
            groups.push(lanes);
        }
        Ok(Self(groups))
    }

    /// The QP of a lane.
    pub fn get(&self, group: GroupId, lane: Lane) -> Option<&PeerQp<N>> {
        self.0.get(group.0 as usize)?.get(lane.0 as usize)
    }

    fn get_mut(&mut self, group: GroupId, lane: Lane) -> Option<&mut PeerQp<N>> {
        self.0.get_mut(group.0 as usize)?.get_mut(lane.0 as usize)
    }

    /// All QPs.
    pub fn iter(&self) -> impl Iterator<Item = &PeerQp<N>> {
        self.0.iter().flatten()
    }

    /// Numbers of the QPs, for [`ConnectReply::groups`].
    pub fn qpns(&self) -> Vec<Vec<u32>> {
        self.0.iter().map(|lanes| lanes.iter().map(|lane| lane.qp.qpn().raw()).collect()).collect()
    }

    /// Takes all QPs to Error: the keys of their windows are useless from now on.
    pub fn shut_down(&self) -> Result<(), Error> {
        Ok(self.iter().try_for_each(|lane| lane.qp.modify(QpChange::Error))?)
    }
}

impl<N: Nic> From<Vec<Vec<PeerQp<N>>>> for AccessQps<N> {
    fn from(groups: Vec<Vec<PeerQp<N>>>) -> Self {
        Self(groups)
    }
}

/// A client in a [`ClientTable`].
pub trait ClientEntry {
    /// The NIC of its QPs.
    type Nic: Nic;

    /// The access QPs.
    fn access(&self) -> &AccessQps<Self::Nic>;

    /// The access QPs.
    fn access_mut(&mut self) -> &mut AccessQps<Self::Nic>;

    /// Sets the initial state of the management QPs for their next connect.
    fn set_management_start(&mut self, start: Start);

    /// True if the management QPs execute and answer requests.
    fn is_open(&self) -> Result<bool, Error>;

    /// True if the client has departed.
    fn is_leaving(&self) -> bool {
        false
    }
}

/// A client with one management QP that leaves at once, and a scheme's own state `own`.
pub struct SimpleClient<N: Nic, T> {
    /// The management QP.
    pub management: PeerQp<N>,
    /// The access QPs.
    pub access: AccessQps<N>,
    /// State of the scheme.
    pub own: T,
}

impl<N: Nic, T> ClientEntry for SimpleClient<N, T> {
    type Nic = N;

    fn access(&self) -> &AccessQps<N> {
        &self.access
    }

    fn access_mut(&mut self) -> &mut AccessQps<N> {
        &mut self.access
    }

    fn set_management_start(&mut self, start: Start) {
        self.management.set_start(start);
    }

    fn is_open(&self) -> Result<bool, Error> {
        self.management.is_ready()
    }
}

/// The clients of a memory node.
pub struct ClientTable<C>(BTreeMap<ClientId, C>);

impl<C> Default for ClientTable<C> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<C> Deref for ClientTable<C> {
    type Target = BTreeMap<ClientId, C>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<C> DerefMut for ClientTable<C> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

/// Requirements of a scheme on a client's request to be admitted.
pub struct Requirements<'a> {
    /// NodeSettings of the memory node.
    pub settings: &'a NodeSettings,
    /// Management QPs.
    pub management: usize,
    /// Access QPs of a group.
    pub lanes: usize,
    /// Clients that are being reclaimed and are not in the table.
    pub leaving: usize,
}

impl<C: ClientEntry> ClientTable<C> {
    /// Checks a request to be admitted.
    pub fn check(
        &self,
        client: ClientId,
        request: &ConnectRequest,
        expected: &Requirements<'_>,
    ) -> Result<(), Error> {
        let Requirements { settings, management, lanes, leaving } = *expected;
        let (here, max) = (self.len() + leaving, settings.clients_max as usize);
        let (qps, groups) = (request.management.len(), &request.groups);
        let why = if here >= max {
            format!("the limit is reached: {here} clients are connected or being reclaimed")
        } else if client.0 == 0 || self.contains_key(&client) {
            format!("client {} is already connected", client.0)
        } else if qps != management {
            format!("the scheme has {management} management QPs, but the request names {qps}")
        } else if !(1..=settings.groups_max as usize).contains(&groups.len()) {
            format!(
                "the request must name 1 to {} QP groups, but names {}",
                settings.groups_max,
                groups.len()
            )
        } else if let Some(group) = groups.iter().find(|group| group.len() != lanes) {
            format!("each QP group must have {lanes} access QPs, but one has {}", group.len())
        } else {
            return Ok(());
        };
        Err(refuse(why))
    }

    /// A client that has not departed.
    pub fn known(&self, client: ClientId) -> Result<&C, Error> {
        self.get(&client).filter(|c| !c.is_leaving()).ok_or_else(|| unknown(client))
    }

    /// A client that has not departed.
    pub fn known_mut(&mut self, client: ClientId) -> Result<&mut C, Error> {
        self.get_mut(&client).filter(|c| !c.is_leaving()).ok_or_else(|| unknown(client))
    }

    /// Number of clients that have departed.
    pub fn leaving(&self) -> u64 {
        self.values().filter(|c| c.is_leaving()).count() as u64
    }

    /// Number of clients that have not departed.
    pub fn connected(&self) -> u64 {
        self.len() as u64 - self.leaving()
    }

    /// See [`NodeScheme::management_is_open`](crate::NodeScheme::management_is_open).
    pub fn management_is_open(&self, client: ClientId) -> Result<bool, Error> {
        self.known(client)?.is_open()
    }

    /// See [`NodeScheme::reset_access`](crate::NodeScheme::reset_access).
    pub fn reset_access(&self, client: ClientId, group: GroupId, lane: Lane) -> Result<u32, Error> {
        let Some(access) = self.known(client)?.access().get(group, lane) else {
            return Err(Error::Refused {
                attempt: format!("re-establishing lane {} of group {}", lane.0, group.0),
                why: "the client has no such QP".into(),
            });
        };
        access.connect()?;
        Ok(access.qp.qpn().raw())
    }

    /// See [`NodeScheme::set_start`](crate::NodeScheme::set_start).
    pub fn set_start(&mut self, client: ClientId, part: QpSet, start: Start) {
        let Some(c) = self.get_mut(&client) else { return };
        match part {
            QpSet::Management => c.set_management_start(start),
            QpSet::Access(group, lane) => {
                if let Some(access) = c.access_mut().get_mut(group, lane) {
                    access.set_start(start);
                }
            }
        }
    }
}

impl ConnectReply {
    /// The reply to `client`, whose QPs have the peers `management` and `access`.
    pub fn of<N: Nic>(
        settings: &NodeSettings,
        client: ClientId,
        management: Vec<u32>,
        access: &AccessQps<N>,
    ) -> Self {
        Self {
            client: client.0,
            chunk_bytes: settings.chunk_bytes,
            group_size: settings.group_size,
            credits: settings.credits,
            management,
            groups: access.qpns(),
            first_chunk: None,
            terms: Terms::new(),
        }
    }
}

/// The error for a request to be admitted that cannot be granted.
pub fn refuse(why: impl ToString) -> Error {
    Error::Refused { attempt: "admitting a client".into(), why: why.to_string() }
}

/// The error for a request of a client that is not connected.
pub fn unknown(client: ClientId) -> Error {
    Error::Refused {
        attempt: format!("serving client {}", client.0),
        why: "the client is not connected".into(),
    }
}

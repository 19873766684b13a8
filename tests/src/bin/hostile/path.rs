//! The path of a hand-made compute node to its memory node: on one host, or over RoCEv2.

use anyhow::Result;
use granary_tests::control::{Control, RemoteRoute};
use pool::remote::token::Nonce;
use pool::remote::{Route, Start};
use verbs::{PeerAddress, Qpn};

use crate::Arguments;

/// The path of the QPs of a compute node.
pub struct Path {
    /// Route to the memory node, if it is on another host.
    way: Option<RemoteRoute>,
    /// Start values of the QPs towards another host.
    start: Start,
}

impl Path {
    /// Opens the control connection to the memory node of the attack.
    pub fn open(a: &Arguments) -> Result<(Control, Self)> {
        let (control, way) = match &a.remote {
            None => (Control::pool(&a.socket)?, None),
            Some(remote) => {
                let (control, way) = Control::remote(remote)?;
                (control, Some(way))
            }
        };
        Ok((control, Self { way, start: Start::default() }))
    }

    /// The way to another host; `None` on the memory node's host.
    pub fn remote(&self) -> Option<&RemoteRoute> {
        self.way.as_ref()
    }

    /// The route to the memory node, if it is on another host.
    pub fn route(&self) -> Option<Route> {
        self.way.map(|way| way.route)
    }

    /// The address of a QP of the memory node.
    pub fn peer(&self, qpn: u32) -> PeerAddress {
        let qpn = Qpn::new(qpn);
        self.way.map_or(qpn.into(), |way| way.route.peer(qpn, self.start))
    }

    /// Draws new start values for the next connections, because packets of the last connections may
    /// still be in flight. Returns the salt from which they follow; `None` on one host.
    pub fn draw(&mut self) -> Result<Option<Nonce>> {
        let Some(way) = self.way else { return Ok(None) };
        let (salt, start) = way.draw()?;
        self.start = start;
        Ok(Some(salt))
    }
}

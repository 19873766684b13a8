//! Registration of schemes. A memory node and a pool client each have a list of families, from
//! which they take the scheme that the settings or the memory node name.

use fabric::Nic;

use crate::Error;
use crate::info::Scheme;
use crate::protocol::NodeHello;
use crate::request_queue::SharedQp;
use crate::scheme::{ClientScheme, NodeScheme};
use crate::settings::Settings;

/// The memory node's side of schemes that share code, on NICs of type `N`.
pub trait NodeFamily<N: Nic>: Send + Sync {
    /// The schemes.
    fn schemes(&self) -> &'static [Scheme];

    /// Creates the memory node of the scheme that `settings` select.
    fn node(&self, nic: &N, settings: &Settings) -> Result<Box<dyn NodeScheme>, Error>;
}

/// The client's side of schemes that share code, on NICs of type `N`.
pub trait ClientFamily<N: Nic>: Send + Sync {
    /// The schemes.
    fn schemes(&self) -> &'static [Scheme];

    /// Receives that the first access QP of each group needs, in a scheme whose requests use it.
    fn access_receives(&self, _hello: &NodeHello) -> u32 {
        0
    }

    /// Creates the client of the scheme that the memory node has.
    fn client(&self, parts: &ClientParts<'_, N>) -> Result<Box<dyn ClientScheme>, Error>;
}

/// What a client is created from.
pub struct ClientParts<'a, N: Nic> {
    /// The NIC.
    pub nic: &'a N,
    /// PD of the client's QPs.
    pub pd: &'a N::Pd,
    /// First message of the memory node.
    pub hello: &'a NodeHello,
    /// The first access QP of each group.
    pub access: &'a [SharedQp<N>],
}

/// A list of families.
pub struct Registry<F: ?Sized + 'static>(Vec<&'static F>);

/// The families of a memory node.
pub type NodeRegistry<N> = Registry<dyn NodeFamily<N>>;

/// The families of a pool client.
pub type ClientRegistry<N> = Registry<dyn ClientFamily<N>>;

impl<F: ?Sized> Clone for Registry<F> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<F: ?Sized> Registry<F> {
    /// A list of these families.
    pub fn new(families: impl IntoIterator<Item = &'static F>) -> Self {
        Self(families.into_iter().collect())
    }

    /// The list with a further family. Its schemes replace schemes of the same name.
    pub fn with(mut self, family: &'static F) -> Self {
        self.0.insert(0, family);
        self
    }
}

impl<N: Nic> NodeRegistry<N> {
    /// Creates the memory node of the scheme that `settings` select.
    pub fn node(&self, nic: &N, settings: &Settings) -> Result<Box<dyn NodeScheme>, Error> {
        let name = settings.scheme.name;
        for family in &self.0 {
            if family.schemes().iter().any(|scheme| scheme.name == name) {
                return family.node(nic, settings);
            }
        }
        Err(Error::Setting {
            setting: "scheme",
            value: name.into(),
            why: "this memory node does not have it".into(),
        })
    }
}

impl<N: Nic> ClientRegistry<N> {
    /// The scheme of this name, and its family.
    pub(crate) fn find(&self, name: &str) -> Result<(Scheme, &dyn ClientFamily<N>), Error> {
        for family in &self.0 {
            if let Some(scheme) = family.schemes().iter().find(|scheme| scheme.name == name) {
                return Ok((scheme, *family));
            }
        }
        Err(crate::scheme::unknown(name))
    }
}

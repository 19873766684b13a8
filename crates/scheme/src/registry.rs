//! Registration of schemes. A memory node and a pool client each have a list of families, from
//! which they take the scheme that the settings or the memory node name.

use verbs::Nic;

use crate::Error;
use crate::connect::Offer;
use crate::info::Scheme;
use crate::options::SchemeOptions;
use crate::request_queue::SharedQp;
use crate::settings::NodeSettings;
use crate::{ClientScheme, NodeScheme};

/// Schemes that share code.
pub trait Family: Send + Sync {
    /// The schemes.
    fn schemes(&self) -> &'static [Scheme];

    /// Checks the options of a scheme of this family.
    fn check(&self, _settings: &NodeSettings) -> Result<(), Error> {
        Ok(())
    }
}

/// The memory node's side of a family, on NICs of type `N`.
pub trait NodeFamily<N: Nic>: Family {
    /// Creates the memory node of the scheme that `settings` select.
    fn node(&self, nic: &N, settings: &NodeSettings) -> Result<Box<dyn NodeScheme>, Error>;
}

/// The client's side of a family, on NICs of type `N`.
pub trait ClientFamily<N: Nic>: Family {
    /// Receives that the first access QP of each group needs, in a scheme whose requests use it.
    fn access_receives(&self, _offer: &Offer) -> u32 {
        0
    }

    /// Creates the client of the scheme that the memory node has.
    fn client(&self, parts: &ClientParts<'_, N>) -> Result<Box<dyn ClientScheme>, Error>;
}

/// Objects from which a client is created.
pub struct ClientParts<'a, N: Nic> {
    /// The NIC.
    pub nic: &'a N,
    /// PD of the client's QPs.
    pub pd: &'a N::Pd,
    /// The memory node's offer.
    pub offer: &'a Offer,
    /// The first access QP of each group.
    pub access: &'a [SharedQp<N>],
    /// The client's own options of the scheme. A scheme ignores those of other schemes.
    pub options: &'a SchemeOptions,
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

impl<F: Family + ?Sized> Registry<F> {
    /// A list of these families.
    pub fn new(families: impl IntoIterator<Item = &'static F>) -> Self {
        Self(families.into_iter().collect())
    }

    /// The list with a further family. Its schemes replace schemes of the same name.
    pub fn with(mut self, family: &'static F) -> Self {
        self.0.insert(0, family);
        self
    }

    /// The scheme of this name, and its family.
    pub fn find(&self, name: &str) -> Option<(Scheme, &'static F)> {
        self.0.iter().find_map(|family| {
            let scheme = family.schemes().iter().find(|scheme| scheme.name == name)?;
            Some((*scheme, *family))
        })
    }
}

impl<N: Nic> NodeRegistry<N> {
    /// Creates the memory node of the scheme that `settings` select.
    pub fn node(&self, nic: &N, settings: &NodeSettings) -> Result<Box<dyn NodeScheme>, Error> {
        let name = settings.scheme.name;
        let Some((_, family)) = self.find(name) else {
            settings.scheme.check_caps(&nic.caps())?;
            return Err(Error::Setting {
                setting: "scheme",
                value: name.into(),
                why: "this memory node does not have it".into(),
            });
        };
        family.check(settings)?;
        family.node(nic, settings)
    }
}

impl<N: Nic> ClientRegistry<N> {
    /// The scheme that a memory node named, and its family.
    pub fn known(&self, name: &str) -> Result<(Scheme, &'static dyn ClientFamily<N>), Error> {
        self.find(name).ok_or_else(|| crate::unknown(name))
    }
}

//! NodeSettings of the schemes in which the client allocates, and the terms that they tell clients.

use scheme::options::parse_terms;
use scheme::{ConnectReply, Error, NodeSettings, Offer};
use serde::{Deserialize, Serialize};

/// NodeSettings of the schemes, which are also their terms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Options {
    /// In schemes with a tree: a client whose CAS fails continues elsewhere and marks the contended
    /// section (FineMem §4.1). If false, it retries in place and all searches begin at the same
    /// section; only for comparison. In scheme `premmap-onesided`: the client applies a CAS only to
    /// words that it has read as free.
    pub contention_control: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { contention_control: true }
    }
}

impl Options {
    /// The options in `settings`.
    pub fn of(settings: &NodeSettings) -> Result<Self, Error> {
        settings.options.parse()
    }

    /// The terms of a memory node.
    pub fn told(offer: &Offer) -> Result<Self, Error> {
        parse_terms(&offer.terms)
    }
}

/// Location of the metadata on which clients allocate with READ and CAS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metadata {
    /// Address of the first word.
    pub addr: u64,
    /// Remote key, valid on the management QP only.
    pub rkey: u32,
    /// Number of the client within the metadata.
    pub user: u16,
    /// Address of the first chunk.
    pub data: u64,
    /// Chunks of the pool.
    pub chunks: u32,
}

/// Terms for an admitted client.
#[derive(Serialize, Deserialize)]
pub(super) struct Admitted {
    #[serde(default)]
    pub metadata: Option<Metadata>,
}

impl Metadata {
    /// The location that the memory node named.
    pub fn of(reply: &ConnectReply) -> Option<Self> {
        parse_terms::<Admitted>(&reply.terms).ok()?.metadata
    }
}

//! Settings of the memory node, options of the compute node, and the terms of a connection.

use scheme::options::{SchemeOptions, Terms, parse_terms, terms};
use scheme::{ConnectReply, Error, NodeSettings, require};
use serde::{Deserialize, Serialize};
use verbs::Key;

use super::PAGE_BYTES;
use super::layout::{Layout, Owner};

/// Settings of a memory node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Bytes of the tiers.
    pub tiers: TierSizes,
    /// Seed of the choice of pages, for reproducible tests. Without a seed, an observer of earlier
    /// choices cannot predict later ones.
    pub seed: Option<u64>,
}

/// Bytes of the memory node's tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TierSizes {
    /// Bytes of tier `fast`.
    pub fast: u64,
    /// Bytes of tier `dram`; by default all other donated memory.
    pub dram: Option<u64>,
}

impl Options {
    /// The options in `settings`.
    pub fn of(settings: &NodeSettings) -> Result<Self, Error> {
        settings.options.parse()
    }

    /// Number of pages of tier `fast`.
    ///
    /// # Errors
    /// The sizes are not those of whole pages, or do not add up to the donated memory.
    pub fn fast_pages(&self, settings: &NodeSettings) -> Result<u32, Error> {
        let TierSizes { fast, dram } = self.tiers;
        let donated = settings.chunks * PAGE_BYTES as u64;
        let whole = |bytes: u64| bytes.is_multiple_of(PAGE_BYTES as u64);
        require(
            whole(fast) && whole(dram.unwrap_or(0)),
            "tiers",
            describe(self.tiers),
            format!("the size of a tier must be a multiple of {PAGE_BYTES} bytes"),
        )?;
        let fits = match dram {
            None => fast <= donated,
            Some(dram) => fast.checked_add(dram) == Some(donated),
        };
        require(
            fits,
            "tiers",
            describe(self.tiers),
            format!(
                "the tiers must add up to the donated {donated} bytes; leave dram out to give it \
                 the rest"
            ),
        )?;
        Ok((fast / PAGE_BYTES as u64) as u32)
    }
}

fn describe(tiers: TierSizes) -> String {
    let dram = tiers.dram.map_or("the rest".to_owned(), |bytes| bytes.to_string());
    format!("fast {}, dram {dram}", tiers.fast)
}

/// Options of a compute node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClientOptions {
    /// Bytes of the compute node's own tier, which holds pages before the memory node does (the
    /// paper's donee-HBM).
    pub local_bytes: u64,
    /// Seed of the choice of pages in that tier, for reproducible tests.
    pub local_seed: Option<u64>,
}

impl ClientOptions {
    /// The options among those of a connection.
    pub fn of(options: &SchemeOptions) -> Result<Self, Error> {
        options.parse()
    }
}

/// The region, as the memory node describes it to an admitted compute node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// Remote key.
    pub rkey: u32,
    /// Number of the compute node as an owner.
    pub owner: Owner,
    /// Addresses.
    pub layout: Layout,
    /// Pages of tier `fast`, which are the first ones.
    pub fast_pages: u32,
}

#[derive(Serialize, Deserialize)]
struct Admitted {
    region: Region,
}

impl Region {
    /// Remote key.
    pub fn key(&self) -> Key {
        Key(self.rkey)
    }

    /// The description as terms.
    pub fn to_terms(self) -> Terms {
        terms(&Admitted { region: self })
    }

    /// The description in the memory node's reply.
    pub fn of(reply: &ConnectReply) -> Result<Self, Error> {
        let region = parse_terms::<Admitted>(&reply.terms)?.region;
        match region.owner > 0 && region.layout.slots >= reply.credits {
            true => Ok(region),
            false => Err(Error::Protocol {
                attempt: "connecting to a memory node with scheme tdmem".into(),
                why: "the memory node named no slots: use the same version of granary".into(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_add_up_to_the_donated_memory() {
        let settings = NodeSettings::new(super::super::TDMEM, 8, 4096);
        let fast = |tiers: TierSizes| {
            let settings = settings.clone().with("tiers", tiers);
            Options::of(&settings).unwrap().fast_pages(&settings)
        };
        assert_eq!(fast(TierSizes::default()).unwrap(), 0);
        assert_eq!(fast(TierSizes { fast: 8192, dram: None }).unwrap(), 2);
        assert_eq!(fast(TierSizes { fast: 8192, dram: Some(6 * 4096) }).unwrap(), 2);
        for (fast_bytes, dram) in
            [(9 * 4096, None), (100, None), (4096, Some(4096)), (u64::MAX - 4095, Some(8192))]
        {
            let error = fast(TierSizes { fast: fast_bytes, dram }).unwrap_err();
            assert!(error.to_string().contains("tiers"), "{error}");
        }
    }
}

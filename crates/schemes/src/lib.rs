//! Allocation schemes: one module for each family of schemes that share code.
//!
//! The modules have the same files where a family has the part: `mod.rs` the facts and the
//! registration, `options.rs` settings and terms, `node.rs` and `connection.rs` the memory node and
//! its clients, `client.rs` the client, `reclaim.rs` the chunks of departed clients, `audit.rs` the
//! check of the tables.

mod answers;
pub mod blocks;
pub mod chain;
mod cores;
pub mod finemem;
pub mod odrp;
pub mod onesidedmw;
pub mod patronus;
pub mod rpc;
pub mod rpc_data;
pub mod tdmem;

pub use crate::finemem::{FINEMEM, FINEMEM_PAPER, PREMMAP_ONESIDED};
pub use crate::odrp::ODRP;
pub use crate::onesidedmw::{ONESIDEDMW, ONESIDEDMW_PAPER};
pub use crate::patronus::{PATRONUS, PATRONUS_2, PATRONUS_MR, PATRONUS_PAPER, UNPROTECTED};
pub use crate::rpc::{
    FINE_MR, ONDEMAND_RPC, PREMMAP_RPC, RPC_MW_1, RPC_MW_2, SHARED_REGION, STATIC_MR,
};
pub use crate::rpc_data::RPC_DATA;
pub use crate::tdmem::TDMEM;

use scheme::registry::{ClientFamily, ClientRegistry, Family, NodeFamily, NodeRegistry, Registry};
use scheme::{Error, NodeSettings, Scheme};
use verbs::Nic;
use verbs::direct::DirectNic;

/// The schemes that pass the conformance suite.
pub const ALL: &[Scheme] = &[
    ONESIDEDMW,
    RPC_MW_2,
    RPC_MW_1,
    FINE_MR,
    STATIC_MR,
    ODRP,
    PATRONUS,
    PATRONUS_2,
    PATRONUS_MR,
    TDMEM,
    FINEMEM,
    FINEMEM_PAPER,
    PREMMAP_ONESIDED,
    PREMMAP_RPC,
    ONDEMAND_RPC,
    SHARED_REGION,
    RPC_DATA,
];

/// Schemes that fail the conformance suite, and exist for comparison. [`find`] knows their names.
pub const NONCONFORMING: &[Scheme] = &[ONESIDEDMW_PAPER, PATRONUS_PAPER, UNPROTECTED];

fn every() -> impl Iterator<Item = Scheme> {
    ALL.iter().chain(NONCONFORMING).copied()
}

/// The families of this crate.
const FAMILIES: &[&dyn Family] = &[
    &onesidedmw::Family,
    &odrp::Family,
    &tdmem::Family,
    &finemem::Family,
    &patronus::Family,
    &rpc::Family,
    &rpc_data::Family,
];

/// The families for the memory node of a NIC that executes chains.
pub fn nodes<N: DirectNic>() -> NodeRegistry<N> {
    nodes_without_chains().with(&odrp::Family).with(&onesidedmw::Family)
}

/// The families for the memory node of any NIC.
pub fn nodes_without_chains<N: Nic>() -> NodeRegistry<N> {
    let families: [&'static dyn NodeFamily<N>; 5] =
        [&finemem::Family, &patronus::Family, &rpc::Family, &rpc_data::Family, &tdmem::Family];
    Registry::new(families)
}

/// The families for a pool client.
pub fn clients<N: Nic>() -> ClientRegistry<N> {
    let families: [&'static dyn ClientFamily<N>; 7] = [
        &onesidedmw::Family,
        &odrp::Family,
        &finemem::Family,
        &patronus::Family,
        &rpc::Family,
        &rpc_data::Family,
        &tdmem::Family,
    ];
    Registry::new(families)
}

/// Checks the settings of a memory node with one of these schemes.
pub fn check(settings: &NodeSettings) -> Result<(), Error> {
    for (name, value) in settings.options.iter() {
        let has = |scheme: &Scheme| scheme.options.contains(&name);
        if !has(&settings.scheme) {
            let names: Vec<_> = every().filter(has).map(|scheme| scheme.name).collect();
            let (last, others) = names.split_last().unwrap_or((&"none", &[]));
            let names = match others {
                [] => format!("scheme {last} has"),
                _ => format!("schemes {} and {last} have", others.join(", ")),
            };
            return Err(Error::Setting {
                setting: name,
                value: value.to_string(),
                why: format!("only {names} this setting"),
            });
        }
    }
    let families = FAMILIES.iter();
    let mut its = families.filter(|family| family.schemes().contains(&settings.scheme));
    its.try_for_each(|family| family.check(settings))
}

/// The scheme with this name.
///
/// # Errors
/// There is none; the error lists the names.
pub fn find(name: &str) -> Result<Scheme, Error> {
    every().find(|scheme| scheme.name == name).ok_or_else(|| {
        let names: Vec<_> = every().map(|scheme| scheme.name).collect();
        Error::Setting {
            setting: "scheme",
            value: name.to_owned(),
            why: format!("must be one of {}", names.join(", ")),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scheme_names_are_read_back() {
        for scheme in every() {
            assert_eq!(find(scheme.name).unwrap(), scheme);
            assert_eq!(serde_json::to_string(scheme).unwrap(), format!("\"{scheme}\""));
        }
        let e = find("rpc").unwrap_err().to_string();
        assert!(e.contains("rpc-mw-2"), "{e}");
    }
}

//! The schemes of this crate.

pub use crate::finemem::{FINEMEM, FINEMEM_PAPER, PREMMAP_ONESIDED};
pub use crate::odrp::ODRP;
pub use crate::onesidedmw::ONESIDEDMW;
pub use crate::registry::{node, node_without_chains};
pub use crate::rpc::{FINE_MR, ONDEMAND_RPC, PREMMAP_RPC, RPC_MW_1, RPC_MW_2, STATIC_MR};

use crate::Error;
use crate::info::Scheme;

/// All schemes.
pub const ALL: &[Scheme] = &[
    ONESIDEDMW,
    RPC_MW_2,
    RPC_MW_1,
    FINE_MR,
    STATIC_MR,
    ODRP,
    FINEMEM,
    FINEMEM_PAPER,
    PREMMAP_ONESIDED,
    PREMMAP_RPC,
    ONDEMAND_RPC,
];

/// The scheme with this name.
///
/// # Errors
/// There is none; the error lists the names.
pub fn find(name: &str) -> Result<Scheme, Error> {
    ALL.iter().copied().find(|scheme| scheme.name == name).ok_or_else(|| {
        let names: Vec<_> = ALL.iter().map(|scheme| scheme.name).collect();
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
        for scheme in ALL {
            assert_eq!(find(scheme.name).unwrap(), *scheme);
            assert_eq!(serde_json::to_string(scheme).unwrap(), format!("\"{scheme}\""));
        }
        let e = find("rpc").unwrap_err().to_string();
        assert!(e.contains("rpc-mw-2"), "{e}");
    }
}

//! Numbers that the papers report: the reader of `claims.toml`.
//!
//! The file has one entry per number that a paper states; its head explains the rules. The file is
//! compiled in, so that tables can always print the paper's column.

use std::sync::OnceLock;

use serde::Deserialize;

use crate::Error;

/// All claims, in the order of the file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claims {
    claim: Vec<Claim>,
}

/// A number that a paper states.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// Unique name, e.g. `osmw.alloc.latency.1`.
    pub id: String,
    /// The paper: `onesidedmw`, `finemem`, `patronus`, `sams`, `tdmem`.
    pub paper: String,
    /// The paper's section with the number.
    pub section: String,
    /// Description of the measured quantity.
    pub setting: String,
    /// The stated value, in `unit`.
    pub value: f64,
    /// Unit of the value (`us`, `1/s`, `MB/s`, `ratio`, `count`).
    pub unit: String,
    /// Whether the value is a single measurement or an extreme over several.
    pub kind: Kind,
    /// True if the value follows from the workload alone. Such a claim tests the harness and is no
    /// evidence.
    #[serde(default)]
    pub arithmetic: bool,
}

/// Kind of a stated value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// One measurement.
    Point,
    /// The largest over several workloads.
    Max,
    /// The smallest over several workloads.
    Min,
}

impl Claims {
    /// The compiled-in claims.
    pub fn builtin() -> &'static Claims {
        static CLAIMS: OnceLock<Claims> = OnceLock::new();
        CLAIMS.get_or_init(|| {
            Claims::parse(include_str!("../claims.toml"))
                .expect("the compiled-in claims.toml is checked by a test")
        })
    }

    /// Reads the text of a `claims.toml`.
    ///
    /// # Errors
    /// [`Error::Claims`] if the text is malformed or contains an id twice.
    pub fn parse(text: &str) -> Result<Claims, Error> {
        let claims: Claims =
            toml::from_str(text).map_err(|error| Error::Claims(error.to_string()))?;
        for (at, claim) in claims.claim.iter().enumerate() {
            if claims.claim[..at].iter().any(|earlier| earlier.id == claim.id) {
                return Err(Error::Claims(format!("the id {} occurs twice", claim.id)));
            }
        }
        Ok(claims)
    }

    /// The claim with this id.
    pub fn get(&self, id: &str) -> Option<&Claim> {
        self.claim.iter().find(|claim| claim.id == id)
    }

    /// All claims, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = &Claim> {
        self.claim.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builtin_claims_parse() {
        let claims = Claims::parse(include_str!("../claims.toml")).unwrap();
        let stated = include_str!("../claims.toml").matches("[[claim]]").count();
        assert_eq!(claims.iter().count(), stated);
        assert!(claims.iter().all(|claim| claim.value.is_finite()));
    }

    #[test]
    fn get_finds_a_claim_by_id() {
        let claim = Claims::builtin().get("osmw.alloc.latency.1").unwrap();
        assert_eq!((claim.value, claim.unit.as_str(), claim.kind), (10.7, "us", Kind::Point));
        assert!(!claim.arithmetic);
        assert!(Claims::builtin().get("osmw.kv.dealloc.4k").unwrap().arithmetic);
        assert!(Claims::builtin().get("no.such.claim").is_none());
    }

    #[test]
    fn parse_rejects_a_duplicate_id() {
        let one = "[[claim]]\nid='a'\npaper='p'\nsection='1'\nsetting='s'\nvalue=1.0\n\
                   unit='us'\nkind='point'\n";
        assert!(Claims::parse(one).is_ok());
        let error = Claims::parse(&one.repeat(2)).unwrap_err();
        assert!(error.to_string().contains("the id a occurs twice"), "{error}");
    }
}

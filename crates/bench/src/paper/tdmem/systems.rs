//! The systems of the experiments: how `granary run` holds the memory that is not local.

/// The holder of a program's memory that is not local.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// All memory is local, and no pager is loaded.
    Plain,
    /// A memory node whose pages the program's process copies itself: the local tier.
    Private,
    /// The same, with pages sealed by the paper's cipher.
    PrivateCrypt,
    /// The same, with pages sealed by the default cipher of `granary run`.
    PrivateCrypt256,
    /// Fastswap: its paths of a fault, over a memory node whose chunks are reached through the NIC.
    Fastswap,
    /// Scheme `tdmem`.
    Tdmem,
    /// Scheme `tdmem`, with pages sealed by the paper's cipher.
    TdmemCrypt,
    /// The same with Fastswap's paths of a fault, so that only the scheme and the seals differ from
    /// [`System::Fastswap`].
    TdmemCryptFastswap,
}

/// Scheme of the memory nodes that stand for TDMEM's donor.
const TDMEM: &str = "tdmem";
/// Cipher of the paper (§6.2.3).
const CIPHER: &str = "aes-128-gcm";

impl System {
    /// Those of figure 15.
    pub const SEQUENTIAL: [Self; 5] =
        [Self::Private, Self::PrivateCrypt, Self::PrivateCrypt256, Self::Tdmem, Self::TdmemCrypt];

    /// Those of figures 16 to 18 with a pager.
    pub const REMOTE: [Self; 4] =
        [Self::Fastswap, Self::Tdmem, Self::TdmemCrypt, Self::TdmemCryptFastswap];

    /// The name in records and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Private => "private-plain",
            Self::PrivateCrypt => "private-crypt",
            Self::PrivateCrypt256 => "private-crypt-256",
            Self::Fastswap => "fastswap",
            Self::Tdmem => "tdmem-plain",
            Self::TdmemCrypt => "tdmem-crypt",
            Self::TdmemCryptFastswap => "tdmem-crypt (fastswap's paths)",
        }
    }

    /// The system that differs by its seals only; itself if the experiments have none.
    pub fn unsealed(self) -> Self {
        match self {
            Self::PrivateCrypt | Self::PrivateCrypt256 => Self::Private,
            Self::TdmemCrypt => Self::Tdmem,
            other => other,
        }
    }

    /// The options of `granary run`; `None` for a program that runs without it.
    pub fn options(self) -> Option<Vec<&'static str>> {
        let (scheme, node, paths, cipher) = match self {
            Self::Plain => return None,
            Self::Private => ("onesidedmw", "direct", "two", "off"),
            Self::PrivateCrypt => ("onesidedmw", "direct", "two", CIPHER),
            Self::PrivateCrypt256 => ("onesidedmw", "direct", "two", "aes-256-gcm"),
            Self::Fastswap => ("onesidedmw", "nic", "fastswap", "off"),
            Self::Tdmem => (TDMEM, "nic", "two", "off"),
            Self::TdmemCrypt => (TDMEM, "nic", "two", CIPHER),
            Self::TdmemCryptFastswap => (TDMEM, "nic", "fastswap", CIPHER),
        };
        let parts = ["--scheme", scheme, "--private-node", node, "--paths", paths];
        Some([&parts[..], &["--seal", cipher]].concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fastswap_differs_from_its_counterpart_in_scheme_and_seals_only() {
        let [ours, base] = [System::TdmemCryptFastswap, System::Fastswap].map(System::options);
        let (ours, base) = (ours.unwrap(), base.unwrap());
        let pairs = ours.chunks(2).zip(base.chunks(2)).filter(|(ours, base)| ours != base);
        let names: Vec<&str> = pairs.map(|(ours, _)| ours[0]).collect();
        assert_eq!(names, ["--scheme", "--seal"]);
    }

    #[test]
    fn schemes_exist_and_seals_are_the_difference_to_the_unsealed_system() {
        for system in [&System::SEQUENTIAL[..], &System::REMOTE].concat() {
            let options = system.options().unwrap();
            assert!(pool::schemes::find(options[1]).is_ok(), "{options:?}");
            let unsealed = system.unsealed().options().unwrap();
            if system != System::TdmemCryptFastswap {
                assert_eq!(options[..6], unsealed[..6], "{}", system.name());
                assert_eq!(unsealed[7], "off");
            }
        }
        assert_eq!(System::Plain.options(), None);
    }
}

//! Records of measurements, and their forms: JSON lines, tables, pictures.
//!
//! A command collects latencies in [`histogram::Latencies`], and pushes one [`record::Record`] per
//! number into a [`report::Report`]. The report prints the records as JSON lines, or as tables and
//! pictures. Tables show the papers' numbers, from [`claims::Claims`], beside ours.
//!
//! | module | content |
//! | --- | --- |
//! | [`record`] | the machine-readable record, one JSON object per line |
//! | [`histogram`] | HDR histograms of latencies |
//! | [`table`] | plain-text tables made of records |
//! | [`plot`] | pictures, SVG and PNG |
//! | [`report`] | output of records and tables |
//! | [`claims`] | the papers' numbers |
//! | [`progress`] | progress bars |

pub mod claims;
pub mod histogram;
pub mod plot;
pub mod progress;
pub mod record;
pub mod report;
pub mod table;

/// Errors of reporting.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `claims.toml` is malformed.
    #[error("cannot read claims.toml: {0}; compare it with the rules at its head")]
    Claims(String),
    /// A picture could not be drawn.
    #[error("cannot draw {picture}: {why}")]
    Draw {
        /// Name of the picture.
        picture: String,
        /// Error message of the plotting library.
        why: String,
    },
    /// A file or directory could not be written.
    #[error("cannot write {path}: {source}; choose another directory with --out")]
    Write {
        /// The file or directory.
        path: std::path::PathBuf,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// Standard output cannot be written.
    #[error("cannot print results: {0}")]
    Print(std::io::Error),
}

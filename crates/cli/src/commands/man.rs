//! `granary man`: writes the manual pages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::CommandFactory;
use clap_mangen::Man;

use crate::Cli;

/// Write the manual pages of granary and its subcommands to a directory
///
/// The pages are made from the help texts: granary.1, and one page for each subcommand, such as
/// granary-bench-access.1. make install puts them where man finds them.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Manual {
    /// Directory for the pages; created if it does not exist
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,
}

const EXAMPLES: &str = "\
Examples:
  granary man ~/.local/share/man/man1
  granary man /tmp/pages && man /tmp/pages/granary-serve.1";

impl Manual {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let directory = &self.directory;
        fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
        let mut command = Cli::command().disable_help_subcommand(true);
        command.build();
        write_pages(&command, directory)
            .with_context(|| format!("write manual pages to {}", directory.display()))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn write_pages(command: &clap::Command, directory: &Path) -> std::io::Result<()> {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        write_pages(sub, directory)?;
    }
    let source = concat!("granary ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone()).source(source).manual("Granary");
    let mut page = Vec::new();
    man.render(&mut page)?;
    // Spaces align the columns of the examples. Only lines that man does not fill keep them.
    let page = String::from_utf8_lossy(&page)
        .replace(".SH EXTRA\nExamples:\n", ".SH EXAMPLES\n.nf\n")
        .replace(".SH VERSION\n", ".fi\n.SH VERSION\n");
    units::files::write(&directory.join(man.get_filename()), page.as_bytes())
}

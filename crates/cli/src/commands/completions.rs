//! `granary completions`: prints a completion script.

use std::process::ExitCode;

use bench_report::report::Report;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::Cli;

/// Print a script that completes the command line of granary in a shell
///
/// The script goes to standard output. make install puts the scripts of bash, zsh and fish where
/// these shells find them.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Completions {
    /// Shell that reads the script
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

const EXAMPLES: &str = "\
Examples:
  granary completions bash > ~/.local/share/bash-completion/completions/granary
  granary completions zsh > ~/.zfunc/_granary
  granary completions fish > ~/.config/fish/completions/granary.fish";

impl Completions {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut shown(&Cli::command()), "granary", &mut script);
        Report::new(false).print(String::from_utf8(script)?.trim_end())?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The command without hidden subcommands and options, which clap's scripts would complete.
fn shown(command: &clap::Command) -> clap::Command {
    let shown = clap::Command::new(command.get_name().to_owned())
        .about(command.get_about().cloned().unwrap_or_default())
        .args(command.get_arguments().filter(|argument| !argument.is_hide_set()))
        .subcommands(command.get_subcommands().filter(|sub| !sub.is_hide_set()).map(shown));
    match command.get_version() {
        Some(version) => shown.version(version.to_owned()),
        None => shown,
    }
}

//! The `granary` command.
//!
//! Each command has one file under [`commands`]: its arguments, its help with examples, and a
//! `run` that wires the crates below together. What can be computed or measured without the
//! command line stands in those crates.
//!
//! Exit codes: 0 the command did what was asked; 1 it failed, and one line on standard error
//! says what was attempted, why it failed and what to do; 2 the command line was wrong.
//! `granary run` passes the program's own exit status through.

mod child;
mod commands;
mod corpus;
mod descriptors;
mod memory;
mod nic;
mod node;
mod options;
mod signals;
mod summary;
mod team;

use std::io;
use std::process::ExitCode;

use clap::Parser;

/// Disaggregated memory: a pool that a NIC allocates from, under unmodified programs.
#[derive(Parser, Debug)]
#[command(name = "granary", version, after_help = EXAMPLES, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: commands::Command,
}

const EXAMPLES: &str = "\
Examples:
  granary quickstart                                   see it work, in two minutes
  granary run --local 256MiB -- sort -S 1G big.txt     the rest of sort's memory in a pool
  granary serve --memory 4GiB                          a memory node for several programs
  granary bench access                                 what an access costs here

Exit codes: 0 done, 1 failed, 2 wrong command line.";

/// A command line that reads well and still makes no sense; exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}; see granary {1} --help")]
struct UsageError(String, &'static str);

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.command.run() {
        Ok(code) => code,
        // Whoever read our output has seen enough (`granary bench … | head`).
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("granary: {error:#}");
            ExitCode::from(if error.is::<UsageError>() { 2 } else { 1 })
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<bench::Error>(),
        Some(bench::Error::Print(error)) if error.kind() == io::ErrorKind::BrokenPipe
    )
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn every_command_has_help_with_examples() {
        fn check(command: &clap::Command, path: &str) {
            let leaf = !command.has_subcommands();
            let help = command.clone().render_long_help().to_string();
            assert!(help.contains("Examples:"), "{path} has no examples");
            assert!(!leaf || help.contains("--"), "{path} explains no option");
            let shown = |sub: &&clap::Command| sub.get_name() != "help" && !sub.is_hide_set();
            for sub in command.get_subcommands().filter(shown) {
                check(sub, &format!("{path} {}", sub.get_name()));
            }
        }
        let mut command = Cli::command();
        command.build();
        command.clone().debug_assert();
        check(&command, "granary");
    }

    #[test]
    fn examples_in_the_help_parse() {
        fn examples(command: &clap::Command, lines: &mut Vec<String>) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let commands = help.lines().map(str::trim).filter(|line| line.starts_with("granary "));
            // Two spaces end the command and begin what is said about it.
            lines.extend(commands.map(|line| line.split("  ").next().unwrap().to_owned()));
            command.get_subcommands().for_each(|sub| examples(sub, lines));
        }
        let mut lines = Vec::new();
        examples(&Cli::command(), &mut lines);
        assert!(lines.len() >= 10, "{lines:?}");
        for line in lines {
            let command = line.split([';', '|', '&', '>']).next().unwrap();
            parse(command).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }

    #[test]
    fn a_wrong_size_says_what_a_size_is() {
        let error = parse("granary run --local 5parsecs -- true").unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(text.contains("\"parsecs\" is not a unit") && text.contains("512MiB"), "{text}");
    }

    #[test]
    fn the_program_keeps_its_own_options() {
        let cli = parse("granary run --local 64MiB -- sort --json -S 1G").unwrap();
        let commands::Command::Run(run) = cli.command else { panic!("not run") };
        assert_eq!(run.program, ["sort", "--json", "-S", "1G"]);
    }
}

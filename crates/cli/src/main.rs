//! The `granary` command.
//!
//! Each command has one file under [`commands`]: its arguments, its help with examples, and a
//! `run` method that calls the other crates. Code that does not depend on the command line belongs
//! in those crates.
//!
//! Exit codes: 0 success; 1 failure, with one line on standard error that names the attempt, the
//! cause and the remedy; 2 wrong command line. `granary run` exits with the program's own status.

// Documentation comments are help texts, whose square brackets are not links.
#![allow(rustdoc::broken_intra_doc_links)]

mod assist;
mod bound;
mod child;
mod commands;
mod corpus;
mod failure;
mod file_descriptors;
mod kernel_swap;
mod lease_options;
mod log;
mod memory;
mod metrics_page;
mod nic;
mod node;
mod options;
mod pressure;
mod signals;
mod summary;
mod worker_process;

use std::io;
use std::process::ExitCode;

use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Disaggregated memory: a memory pool on other machines for unmodified programs.
#[derive(Parser, Debug)]
#[command(name = "granary", version, after_help = EXAMPLES, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: commands::Command,
}

const EXAMPLES: &str = "\
Examples:
  granary quickstart                                   a demonstration that takes two minutes
  granary run --local 256MiB -- sort -S 1G big.txt     256MiB of sort's memory local, the rest paged
  granary serve --memory 4GiB                          a memory node for several programs
  granary bench access                                 latency and bandwidth of READ and WRITE

Exit codes: 0 success, 1 failure, 2 wrong command line.";

/// A command line that parses but has invalid or contradictory values; exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}; see granary {1} --help")]
struct UsageError(String, &'static str);

fn main() -> ExitCode {
    signals::report_file_size_limit();
    let cli = Cli::try_parse().unwrap_or_else(|error| refuse(&error));
    match cli.command.run() {
        Ok(code) => code,
        // The reader of a pipe closed it, as in `granary bench … | head`: not a failure.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("granary: {}", failure::text(&error));
            ExitCode::from(if error.is::<UsageError>() { 2 } else { 1 })
        }
    }
}

/// Prints an error of the command line with its hint, or the help, and exits.
fn refuse(error: &clap::Error) -> ! {
    // A closed standard error leaves only the exit code.
    let _ = error.print();
    let words: Vec<String> =
        std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    if let Some(hint) = separator_hint(error, &words) {
        eprintln!("\n{hint}");
    }
    std::process::exit(error.exit_code())
}

/// Returns the corrected command line if `granary run` has no `--` before its program.
fn separator_hint(error: &clap::Error, words: &[String]) -> Option<String> {
    if error.kind() != ErrorKind::UnknownArgument || words.get(1)? != "run" {
        return None;
    }
    let Some(ContextValue::String(program)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let at = words.iter().position(|word| word == program)?;
    if program.starts_with('-') || words[..at].iter().any(|word| word == "--") {
        return None;
    }
    let (options, program) = (words[1..at].join(" "), words[at..].join(" "));
    Some(format!("Write -- before the program: granary {options} -- {program}"))
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let print = match error.downcast_ref::<bench::Error>() {
        Some(bench::Error::Report(error)) => Some(error),
        _ => error.downcast_ref::<bench_report::Error>(),
    };
    matches!(
        print,
        Some(bench_report::Error::Print(error)) if error.kind() == io::ErrorKind::BrokenPipe
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
    fn only_commands_of_other_commands_are_hidden() {
        let command = Cli::command();
        let hidden = command.get_subcommands().filter(|sub| sub.is_hide_set());
        let hidden: Vec<_> = hidden.map(clap::Command::get_name).collect();
        // granary run starts the assist, benchmarks start workers.
        assert_eq!(hidden, ["assist", "worker"]);
    }

    #[test]
    fn examples_in_the_help_parse() {
        fn examples(command: &clap::Command, lines: &mut Vec<String>) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let commands = help.lines().map(str::trim).filter(|line| line.starts_with("granary "));
            // Two spaces separate the command from its explanation.
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
    fn invalid_size_error_shows_valid_sizes() {
        let error = parse("granary run --local 5parsecs -- true").unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(text.contains("\"parsecs\" is not a unit") && text.contains("512MiB"), "{text}");
    }

    #[test]
    fn missing_separator_is_named_with_the_corrected_line() {
        let hint = |line: &str| {
            let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            separator_hint(&parse(line).unwrap_err(), &words)
        };
        let expected = "Write -- before the program: granary run --local 8MiB -- sort -S 1G x";
        assert_eq!(hint("granary run --local 8MiB sort -S 1G x").as_deref(), Some(expected));
        let expected = "Write -- before the program: granary run -- sort x";
        assert_eq!(hint("granary run sort x").as_deref(), Some(expected));
        assert_eq!(hint("granary run --frobnicate -- sort x"), None);
        assert_eq!(hint("granary serve sort"), None);
    }

    #[test]
    fn options_after_the_program_belong_to_the_program() {
        let cli = parse("granary run --local 64MiB -- sort --json -S 1G").unwrap();
        let commands::Command::Run(run) = cli.command else { panic!("not run") };
        assert_eq!(run.program, ["sort", "--json", "-S", "1G"]);
    }
}

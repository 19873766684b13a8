//! Programs under test are built before use: never older than their sources, wherever cargo puts
//! them.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use granary_tests::built::{build, granary, library};
use granary_tests::pager::Scratch;

/// A package that prints `word`, in a workspace of its own.
fn package(scratch: &Scratch, word: &str) {
    let file = |name: &str, text: &str| fs::write(scratch.0.join(name), text).unwrap();
    fs::create_dir_all(scratch.0.join("src")).unwrap();
    file("Cargo.toml", "[package]\nname = \"word\"\nedition = \"2024\"\n\n[workspace]\n");
    file("src/main.rs", &format!("fn main() {{ print!({word:?}) }}\n"));
}

/// Where cargo puts what it builds of the package.
fn artifacts(scratch: &Scratch, directory: &str) -> PathBuf {
    let configuration = scratch.0.join(".cargo");
    fs::create_dir_all(&configuration).unwrap();
    let target = scratch.0.join(directory);
    let text = format!("[build]\ntarget-dir = {:?}\n", target.to_str().unwrap());
    fs::write(configuration.join("config.toml"), text).unwrap();
    target
}

#[test]
fn a_program_older_than_its_source_is_built_again() {
    let scratch = Scratch::new("built");
    artifacts(&scratch, "first");
    let mut paths = Vec::new();
    for word in ["old", "new"] {
        package(&scratch, word);
        let program = build(&scratch.0, &["-p", "word"], "word").unwrap();
        let output = Command::new(&program).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), word);
        paths.push(program);
    }
    assert_eq!(paths[0], paths[1]);
    // Cargo's environment outranks its configuration.
    if std::env::var_os("CARGO_TARGET_DIR").is_none() {
        let second = artifacts(&scratch, "second");
        let program = build(&scratch.0, &["-p", "word"], "word").unwrap();
        assert!(program.starts_with(&second), "{}", program.display());
    }
}

#[test]
fn a_program_that_does_not_build_is_refused_with_the_command_to_run() {
    let scratch = Scratch::new("unbuilt");
    artifacts(&scratch, "target");
    package(&scratch, "good");
    build(&scratch.0, &["-p", "word"], "word").unwrap();
    fs::write(scratch.0.join("src/main.rs"), "fn main() { 1 }\n").unwrap();
    let refused = build(&scratch.0, &["-p", "word"], "word").unwrap_err().to_string();
    assert!(refused.contains("cannot build word") && refused.contains("`cargo build -p word`"));
    package(&scratch, "good");
    let refused = build(&scratch.0, &["-p", "word"], "other").unwrap_err().to_string();
    assert_eq!(refused, "`cargo build -p word` makes no other");
}

#[test]
fn the_command_and_its_library_are_side_by_side() {
    assert!(granary().is_file());
    assert!(granary().with_file_name(pager::run::LIBRARY).is_file());
    assert!(library().is_file());
}

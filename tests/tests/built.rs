//! Tests of the helper that builds the programs under test: programs are never older than their
//! sources, in any target directory.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use granary_tests::built::{build, granary, library};
use granary_tests::pager::Scratch;

/// Creates a package, in its own workspace, whose program prints `word`.
fn package(scratch: &Scratch, word: &str) {
    let file = |name: &str, text: &str| fs::write(scratch.0.join(name), text).unwrap();
    fs::create_dir_all(scratch.0.join("src")).unwrap();
    file("Cargo.toml", "[package]\nname = \"word\"\nedition = \"2024\"\n\n[workspace]\n");
    file("src/main.rs", &format!("fn main() {{ print!({word:?}) }}\n"));
}

/// Sets the package's target directory and returns its path.
fn artifacts(scratch: &Scratch, directory: &str) -> PathBuf {
    let configuration = scratch.0.join(".cargo");
    fs::create_dir_all(&configuration).unwrap();
    let target = scratch.0.join(directory);
    let text = format!("[build]\ntarget-dir = {:?}\n", target.to_str().unwrap());
    fs::write(configuration.join("config.toml"), text).unwrap();
    target
}

#[test]
fn stale_program_is_rebuilt() {
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
fn build_failure_names_the_command_to_run() {
    let scratch = Scratch::new("unbuilt");
    artifacts(&scratch, "target");
    package(&scratch, "good");
    build(&scratch.0, &["-p", "word"], "word").unwrap();
    fs::write(scratch.0.join("src/main.rs"), "fn main() { 1 }\n").unwrap();
    let refused = build(&scratch.0, &["-p", "word"], "word").unwrap_err().to_string();
    assert!(refused.contains("cannot build word") && refused.contains("`cargo build -p word`"));
    package(&scratch, "good");
    let refused = build(&scratch.0, &["-p", "word"], "other").unwrap_err().to_string();
    assert_eq!(refused, "`cargo build -p word` does not make other");
}

#[test]
fn command_and_library_are_in_one_directory() {
    assert!(granary().is_file());
    assert!(granary().with_file_name(pager::run::LIBRARY).is_file());
    assert!(library().is_file());
}

//! The programs under test, built by cargo before a test uses them: never older than their sources.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// The release build of the `granary` command; the preload library is beside it.
///
/// Cargo builds both when the first test of a process asks, which takes under a second where
/// nothing has changed. The path is what cargo says: `CARGO_TARGET_DIR` counts, and cargo's
/// configuration.
pub fn granary() -> PathBuf {
    static GRANARY: OnceLock<PathBuf> = OnceLock::new();
    let packages = ["--release", "-p", "granary-cli", "-p", "granary-preload"];
    GRANARY.get_or_init(|| of_this_workspace(&packages, "granary")).clone()
}

/// The preload library with the profile of these tests (with debug assertions in `make test`).
pub fn library() -> PathBuf {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    let package = ["--profile", profile, "-p", "granary-preload"];
    LIBRARY.get_or_init(|| of_this_workspace(&package, pager::run::LIBRARY)).clone()
}

fn of_this_workspace(arguments: &[&str], file: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    build(&root, arguments, file).unwrap_or_else(|e| panic!("{e:#}"))
}

/// Brings what `arguments` name of the workspace at `root` up to date by `cargo build`; gives the
/// path of the artifact called `file`.
///
/// # Errors
/// Cargo does not start or fails, or makes no such file. The error says which command to run.
pub fn build(root: &Path, arguments: &[&str], file: &str) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let by_hand = format!("cargo build {}", arguments.join(" "));
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--message-format", "json-render-diagnostics"]);
    command.args(arguments).current_dir(root).env_remove("LD_PRELOAD").stderr(Stdio::inherit());
    let built = command
        .output()
        .with_context(|| format!("cannot start cargo to build {file}: run `{by_hand}` first"))?;
    ensure!(
        built.status.success(),
        "cannot build {file} for the tests; cargo says why on standard error: run `{by_hand}` in {}",
        root.display()
    );
    // One JSON object a line. An artifact that was up to date has a line, too.
    for line in built.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let message: Value = serde_json::from_slice(line).context("reading what cargo says")?;
        let files = message["filenames"].as_array().into_iter().flatten();
        if let Some(path) = files
            .filter_map(Value::as_str)
            .map(Path::new)
            .find(|path| path.file_name().is_some_and(|name| name == file))
        {
            return Ok(path.to_path_buf());
        }
    }
    bail!("`{by_hand}` makes no {file}")
}

//! Builds the programs under test with cargo before a test uses them, so that they are never older
//! than their sources.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// The release build of the `granary` command; the preload library is in the same directory.
///
/// The first call in a process runs cargo, which takes less than a second if nothing has changed.
/// The path comes from cargo's output, so `CARGO_TARGET_DIR` and cargo's configuration apply.
pub fn granary() -> PathBuf {
    static GRANARY: OnceLock<PathBuf> = OnceLock::new();
    let packages = ["--release", "-p", "granary-cli", "-p", "granary-preload"];
    GRANARY.get_or_init(|| build_in_workspace(&packages, "granary")).clone()
}

/// The preload library, built with the profile of these tests (with debug assertions in
/// `make test`).
pub fn library() -> PathBuf {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    let package = ["--profile", profile, "-p", "granary-preload"];
    LIBRARY.get_or_init(|| build_in_workspace(&package, pager::run::LIBRARY)).clone()
}

fn build_in_workspace(arguments: &[&str], file: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    build(&root, arguments, file).unwrap_or_else(|e| panic!("{e:#}"))
}

/// Runs `cargo build` with `arguments` in the workspace at `root`. Returns the path of the artifact
/// `file`.
///
/// # Errors
/// If cargo does not start, fails, or does not make the file. The error names the command to run.
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
        "cannot build {file} for the tests; see cargo's error above, or run `{by_hand}` in {}",
        root.display()
    );
    // One JSON object per line, also for artifacts that were up to date.
    for line in built.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let message: Value = serde_json::from_slice(line).context("parsing cargo's output")?;
        let files = message["filenames"].as_array().into_iter().flatten();
        if let Some(path) = files
            .filter_map(Value::as_str)
            .map(Path::new)
            .find(|path| path.file_name().is_some_and(|name| name == file))
        {
            return Ok(path.to_path_buf());
        }
    }
    bail!("`{by_hand}` does not make {file}")
}

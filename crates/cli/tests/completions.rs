//! Tests of what `make install` generates: completion scripts and manual pages.

use std::collections::BTreeSet;
use std::process::{Command, Output};

fn granary<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_granary")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Subcommands that the help of `path` lists, each as a whole path such as `["bench", "access"]`.
fn subcommands(path: &[String]) -> Vec<Vec<String>> {
    let arguments = path.iter().map(String::as_str).chain(["--help"]);
    let help = String::from_utf8(granary(arguments).stdout).unwrap();
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty());
    // A continuation of a description is indented further.
    let names = listed.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = names.filter_map(|line| line.split_whitespace().next());
    let names = names.filter(|name| *name != "help");
    names.map(|name| [path, &[name.to_owned()]].concat()).collect()
}

#[test]
fn manual_has_one_page_for_each_subcommand() {
    let directory = tempfile::tempdir().unwrap();
    let pages = directory.path().join("man1");
    granary(["man", pages.to_str().unwrap()]);
    let written: BTreeSet<String> = pages
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();

    let mut expected = BTreeSet::from(["granary.1".to_owned()]);
    let mut paths = subcommands(&[]);
    while let Some(path) = paths.pop() {
        expected.insert(format!("granary-{}.1", path.join("-")));
        paths.extend(subcommands(&path));
    }
    assert_eq!(written, expected);
    assert!(written.contains("granary-bench-access.1"), "{written:?}");

    for name in written {
        let page = std::fs::read_to_string(pages.join(&name)).unwrap();
        for part in [".TH ", ".SH NAME", ".SH SYNOPSIS", ".SH EXAMPLES", "granary "] {
            assert!(page.contains(part), "{name} has no {part}");
        }
    }
}

#[test]
fn bash_accepts_the_completion_script() {
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("granary");
    std::fs::write(&script, granary(["completions", "bash"]).stdout).unwrap();
    let output = Command::new("bash").arg("-n").arg(&script).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    // Calls the script's function as the shell does when the user presses the tab key.
    let complete = r#". "$1"; COMP_WORDS=("${@:2}"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        _granary granary "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"; echo "${COMPREPLY[*]}""#;
    for (line, completed) in [
        (&["granary", "ser"][..], "serve"),
        (&["granary", "bench", "a"], "access alloc"),
        (&["granary", "serve", "--pri"], ""),
        (&["granary", "wor"], ""),
    ] {
        let mut bash = Command::new("bash");
        let output = bash.args(["-c", complete, "bash"]).arg(&script).args(line).output().unwrap();
        let found = String::from_utf8_lossy(&output.stdout);
        assert_eq!(
            found.trim(),
            completed,
            "{line:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

#[test]
fn every_shell_has_a_completion_script() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = String::from_utf8(granary(["completions", shell]).stdout).unwrap();
        assert!(script.contains("quickstart"), "{shell}: {script}");
        assert!(!script.contains("worker"), "{shell} completes a hidden command");
    }
}

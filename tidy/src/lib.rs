//! Reads the files of the tree for the checks in `tests/tidy.rs`: lines, comments, pages.
//!
//! The checks enforce `docs/style.md`. There is no list of exceptions: a rule that does not fit a
//! kind of line (a table row, a code block) leaves out the kind, not the place.

pub mod waits;

use std::fmt;
use std::path::{Path, PathBuf};

/// A line that breaks a rule.
#[derive(Debug)]
pub struct Finding {
    /// Path relative to the root of the tree.
    pub file: String,
    /// Number of the line, from 1.
    pub line: usize,
    /// Rule and text.
    pub why: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.why)
    }
}

/// A text file of the tree.
#[derive(Debug)]
pub struct File {
    /// Path relative to the root, with `/` between its parts.
    pub path: String,
    /// Content.
    pub text: String,
}

impl File {
    /// True for a path that ends in `.extension`.
    pub fn is(&self, extension: &str) -> bool {
        self.path.rsplit_once('.').is_some_and(|(_, own)| own == extension)
    }

    /// A finding in this file; `line` counts from 0.
    pub fn finding(&self, line: usize, why: impl Into<String>) -> Finding {
        Finding { file: self.path.clone(), line: line + 1, why: why.into() }
    }

    /// The lines of prose with their numbers from 0: comments of code, or a page without its code
    /// blocks.
    pub fn prose(&self) -> Vec<(usize, &str)> {
        if self.is("md") { self.page() } else { self.comments() }
    }

    /// Lines of a page that are not in a code block.
    pub fn page(&self) -> Vec<(usize, &str)> {
        let mut in_code = false;
        let mut lines = Vec::new();
        for (number, line) in self.text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                in_code = !in_code;
            } else if !in_code {
                lines.push((number, line));
            }
        }
        lines
    }

    /// Comments that fill a line: the text behind `//`, `///`, `//!`, `#` or within `/* */`.
    fn comments(&self) -> Vec<(usize, &str)> {
        let marks: &[&str] = match self.path.rsplit_once('.') {
            Some((_, "rs")) => &["//!", "///", "//"],
            Some((_, "c" | "h")) => &["//", "/*", "*"],
            _ => &["#"],
        };
        let comment = |line| {
            let line = str::trim(line);
            marks.iter().find_map(|mark| line.strip_prefix(mark)).map(str::trim)
        };
        let lines = self.text.lines().enumerate();
        lines.filter_map(|(number, line)| Some((number, comment(line)?))).collect()
    }
}

/// Root of the tree.
pub fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().expect("this package lies in the tree").to_path_buf()
}

/// All text files of the tree, without build outputs, hidden folders and lock files.
///
/// # Panics
/// If the tree cannot be read.
pub fn files() -> Vec<File> {
    let mut found = Vec::new();
    walk(&root(), "", &mut found);
    found.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(found.len() > 100, "the tree has more files than {}", found.len());
    found
}

const OUTPUTS: [&str; 3] = ["target", "out", "mutants.out"];
const EXTENSIONS: [&str; 10] = ["rs", "md", "c", "h", "toml", "py", "sh", "mk", "patch", "json"];

fn walk(folder: &Path, path: &str, found: &mut Vec<File>) {
    let entries = std::fs::read_dir(folder).expect("a folder of the tree is readable");
    for entry in entries {
        let entry = entry.expect("an entry of a folder is readable");
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if path.is_empty() { name.clone() } else { format!("{path}/{name}") };
        let kind = entry.file_type().expect("an entry has a type");
        if name.starts_with('.') || OUTPUTS.contains(&name.as_str()) {
            continue;
        }
        if kind.is_dir() {
            walk(&entry.path(), &path, found);
        } else if has_text(&path, &name)
            && let Ok(text) = std::fs::read_to_string(entry.path())
        {
            found.push(File { path, text });
        }
    }
}

fn has_text(path: &str, name: &str) -> bool {
    match name.rsplit_once('.') {
        Some((_, extension)) => EXTENSIONS.contains(&extension),
        None => path.starts_with("scripts/") || name == "Makefile",
    }
}

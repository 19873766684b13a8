//! A search for blocking waits and retry loops, which `docs/internals/waits.md` lists.
//!
//! The search is by text: a construct that blocks a thread or repeats an attempt, and the function
//! that contains it. A `loop` over values in memory is found too, and has a row.

use std::collections::BTreeSet;

use regex_lite::Regex;

use crate::File;

/// The page with the rows.
pub const PAGE: &str = "docs/internals/waits.md";

/// Crates that are not part of the product.
const TOOLS: [&str; 4] = ["bench", "bench-report", "model", "sim"];
/// Folders and files of tests and benchmarks within the crates of the product.
const TESTS: [&str; 8] = [
    "tests",
    "conformance",
    "conformance.rs",
    "sim",
    "check",
    "bench",
    "corpus.rs",
    "kernel_swap.rs",
];

/// Constructs that block or repeat.
const CONSTRUCTS: [&str; 7] = [
    r"\bloop \{",
    r"\bwhile .*compare_exchange",
    r"\b(yield_now|sched_yield|spin_loop|snooze|sleep|park|park_timeout|sleep_until|sleep_once)\(",
    r"\.wait(_\w+)?\(",
    r"\b(event::poll|libc::poll|epoll::wait|futex::wait|futex_wait|FUTEX_WAIT\w*|flock)\b",
    r"\b(recvmsg|socket::receive|channel::receive|read_exact|read_to_end|read_line)\(",
    r"\.recv(_timeout)?\(|\b(waitpid|waitid|wait4|accept_with)\(|\.accept\(\)|\.join\(\)",
];

/// Calls with a name of [`CONSTRUCTS`] that wait for nothing: of token buckets, and work requests
/// for a program of the NIC.
const NO_WAITS: &str =
    r"\b(b|bucket|repairs|requests|openings|limits|queues)\.wait\(|self\.wait\(qpn";

/// A construct that blocks or repeats.
#[derive(Debug, PartialEq, Eq)]
pub struct Wait {
    /// Number of the line, from 0.
    pub line: usize,
    /// The function that contains it; empty if there is none.
    pub function: String,
}

/// A row of the page: all functions of all files that it names.
#[derive(Debug)]
pub struct Row {
    /// Number of the line, from 0.
    pub line: usize,
    /// Paths relative to `crates`.
    pub files: Vec<String>,
    /// Names of functions, without their types.
    pub functions: Vec<String>,
}

/// The search.
#[derive(Debug)]
pub struct Search {
    constructs: Vec<Regex>,
    no_waits: Regex,
    function: Regex,
    code: Regex,
}

impl Default for Search {
    fn default() -> Self {
        let regex = |text: &str| Regex::new(text).expect("an expression of this file");
        let words = r"(pub(\([^)]*\))? |const |async |unsafe |extern \x22C\x22 )*";
        Self {
            constructs: CONSTRUCTS.map(regex).into(),
            no_waits: regex(NO_WAITS),
            function: regex(&format!(r"^ *{words}fn (\w+)")),
            code: regex("`([^`]+)`"),
        }
    }
}

impl Search {
    /// True for a source file of the product, without its tests.
    pub fn is_searched(path: &str) -> bool {
        let parts: Vec<&str> = path.split('/').collect();
        let ["crates", krate, "src", rest @ ..] = &parts[..] else { return false };
        let is_test = |part: &&str| {
            TESTS.contains(part) || part.ends_with("tests.rs") || part.starts_with("test_")
        };
        path.ends_with(".rs") && !TOOLS.contains(krate) && !rest.iter().any(is_test)
    }

    /// The constructs of a file, without those of its module of tests.
    pub fn waits(&self, text: &str) -> Vec<Wait> {
        let lines: Vec<&str> = text.lines().collect();
        let is_tests = |pair: &[&str]| {
            let is_module = pair[1].starts_with("mod ") && pair[1].ends_with('{');
            is_module && pair[0].starts_with("#[cfg(") && pair[0].contains("test")
        };
        let end = lines.windows(2).position(is_tests).unwrap_or(lines.len());
        let mut functions: Vec<(usize, String)> = Vec::new();
        let mut found = Vec::new();
        for (number, line) in lines[..end].iter().enumerate() {
            let indent = line.len() - line.trim_start().len();
            let code = line.trim_start();
            if code.is_empty() || code.starts_with("//") || code.starts_with("use ") {
                continue;
            }
            functions.retain(|(outer, _)| *outer < indent || code.starts_with([')', '}', '{']));
            if let Some(hit) = self.function.captures(line) {
                functions.retain(|(outer, _)| *outer < indent);
                functions.push((indent, hit[3].to_owned()));
                continue;
            }
            let line = self.no_waits.replace_all(line, "");
            if self.constructs.iter().any(|construct| construct.is_match(&line)) {
                let function = functions.iter().rev().find(|(outer, _)| *outer < indent);
                let function = function.map(|(_, name)| name.clone()).unwrap_or_default();
                found.push(Wait { line: number, function });
            }
        }
        found
    }

    /// The rows of the page.
    pub fn rows(&self, page: &File) -> Vec<Row> {
        let mut rows = Vec::new();
        for (line, text) in page.page() {
            let mut cells = text.split(" | ");
            let (Some(files), Some(functions)) = (cells.next(), cells.next()) else { continue };
            let codes = |cell: &str| -> Vec<String> {
                self.code.captures_iter(cell).map(|hit| hit[1].to_owned()).collect()
            };
            let files: Vec<String> =
                codes(files).into_iter().filter(|file| file.ends_with(".rs")).collect();
            let name = |path: String| path.rsplit("::").next().unwrap_or_default().to_owned();
            let functions = codes(functions).into_iter().map(name).collect();
            if text.starts_with("| `") && !files.is_empty() {
                rows.push(Row { line, files, functions });
            }
        }
        rows
    }

    /// Names of the functions of a file.
    pub fn functions(&self, text: &str) -> BTreeSet<String> {
        text.lines().filter_map(|line| Some(self.function.captures(line)?[3].to_owned())).collect()
    }
}

//! Each blocking wait and retry loop has a row in `docs/internals/waits.md`, and each row is of a
//! function that exists.

use tidy::waits::{PAGE, Search, Wait};
use tidy::{File, files};

#[test]
fn waits_and_retry_loops_have_rows() {
    let (search, all) = (Search::default(), files());
    let page = all.iter().find(|file| file.path == PAGE).expect("the page");
    let rows = search.rows(page);
    let mut found = Vec::new();
    for file in all.iter().filter(|file| Search::is_searched(&file.path)) {
        let path = file.path.trim_start_matches("crates/");
        let mut waits = search.waits(&file.text);
        waits.dedup_by(|a, b| a.function == b.function);
        for Wait { line, function } in waits {
            let is_listed = rows.iter().any(|row| {
                row.files.iter().any(|own| own == path) && row.functions.contains(&function)
            });
            if !is_listed {
                found.push(file.finding(line, format!("`{function}` waits or repeats")));
            }
        }
    }
    let list: Vec<_> = found.iter().map(ToString::to_string).collect();
    assert!(
        found.is_empty(),
        "{} functions without a row in {PAGE}, which says what each waits for, its bound, and \
         what ends it:\n{}",
        found.len(),
        list.join("\n")
    );
}

#[test]
fn rows_name_functions_that_exist() {
    let (search, all) = (Search::default(), files());
    let page = all.iter().find(|file| file.path == PAGE).expect("the page");
    let mut found = Vec::new();
    for row in search.rows(page) {
        let mut names = std::collections::BTreeSet::new();
        for path in &row.files {
            match all.iter().find(|file| file.path == format!("crates/{path}")) {
                Some(file) => names.extend(search.functions(&file.text)),
                None => found.push(page.finding(row.line, format!("crates/{path} does not exist"))),
            }
        }
        for function in row.functions.iter().filter(|name| !names.contains(*name)) {
            let why = format!("{} has no function `{function}`", row.files.join(", "));
            found.push(page.finding(row.line, why));
        }
    }
    let list: Vec<_> = found.iter().map(ToString::to_string).collect();
    assert!(found.is_empty(), "rows of nothing:\n{}", list.join("\n"));
}

/// The tests that `docs/internals/faults.md` cites.
#[test]
fn cited_tests_of_faults_exist() {
    let all = files();
    let page = all.iter().find(|file| file.path == "docs/internals/faults.md").expect("the page");
    let rust = || all.iter().filter(|file| file.is("rs"));
    let mut count = 0;
    let mut found = Vec::new();
    for (number, line) in page.page() {
        let names = line.split('`').skip(1).step_by(2);
        for name in names.filter(|name| name.matches('_').count() >= 2 && is_name(name)) {
            count += 1;
            let function = format!("fn {name}(");
            if !rust().any(|file| file.text.contains(&function)) {
                found.push(page.finding(number, format!("no test {name}")));
            }
        }
    }
    let list: Vec<_> = found.iter().map(ToString::to_string).collect();
    assert!(found.is_empty(), "tests that do not exist:\n{}", list.join("\n"));
    assert!(count > 20, "the page cites tests");
}

fn is_name(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

#[test]
fn search_names_the_function_of_each_construct() {
    let text = "\
fn plain() {
    for i in 0..3 {}
}

impl S {
    pub(crate) async fn turns(
        &self,
    ) -> bool {
        let other = |a| {
            loop {
                a += 1;
            }
        };
        // loop { in a comment
        self.cq.wait_unless(1)
    }

    fn swap(&self) {
        fn inner() {
            std::thread::park();
        }
        while self.word.compare_exchange(a, b).is_err() {}
    }
}

#[cfg(test)]
mod tests {
    fn only_a_test() {
        loop {}
    }
}
";
    let search = Search::default();
    let waits = search.waits(text);
    let names: Vec<_> = waits.iter().map(|wait| (wait.line, &*wait.function)).collect();
    assert_eq!(names, [(9, "turns"), (14, "turns"), (19, "inner"), (21, "swap")]);
    let row = "| `a/src/b.rs`, `a/src/c.rs` | `S::turns`, `swap` | nothing | none |\n";
    let page = File { path: PAGE.to_owned(), text: row.to_owned() };
    let rows = search.rows(&page);
    assert_eq!(rows[0].files, ["a/src/b.rs", "a/src/c.rs"]);
    assert_eq!(rows[0].functions, ["turns", "swap"]);
}

#[test]
fn search_leaves_out_tests_and_tools() {
    for path in ["crates/pool/src/client/mod.rs", "crates/kv-server/src/worker.rs"] {
        assert!(Search::is_searched(path), "{path}");
    }
    let not = ["crates/sim/src/net.rs", "crates/pool/tests/schemes.rs", "tests/src/run.rs"];
    for path in not.iter().chain(&["crates/pool/src/client/leases_tests.rs"]) {
        assert!(!Search::is_searched(path), "{path}");
    }
}

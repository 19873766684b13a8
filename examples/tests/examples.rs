//! Runs each example as a user would. An example that returns an error or panics fails the test.

use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn every_example_runs_and_prints_its_result() {
    // Cargo builds examples into a directory beside that of the tests.
    let test = std::env::current_exe().unwrap();
    let built = test.ancestors().nth(2).unwrap().join("examples");
    let mut count = 0;
    for entry in Path::new(env!("CARGO_MANIFEST_DIR")).read_dir().unwrap() {
        let source = entry.unwrap().path();
        if source.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let example = built.join(source.file_stem().unwrap());
        let name = example.display();
        let output = Command::new(&example).stdin(Stdio::null()).output().unwrap_or_else(|error| {
            panic!("{name}: {error}; cargo test -p granary-examples builds the examples")
        });
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{name}: {}: {}", output.status, text(&output.stderr));
        assert!(output.stderr.is_empty(), "{name}: {}", text(&output.stderr));
        assert!(output.stdout.ends_with(b"\n"), "{name} prints nothing");
        count += 1;
    }
    assert!(count >= 5, "{count} examples");
}

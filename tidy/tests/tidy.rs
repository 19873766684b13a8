//! The rules of `docs/style.md` that a program can check. A failure lists each line with its rule.

use std::collections::BTreeSet;

use regex_lite::Regex;
use tidy::{File, Finding, files, root};

const COLUMNS: usize = 100;
const LINES: usize = 700;

#[track_caller]
fn assert_none(rule: &str, found: &[Finding]) {
    let list: Vec<_> = found.iter().map(ToString::to_string).collect();
    assert!(found.is_empty(), "{rule} (docs/style.md): {}\n{}", found.len(), list.join("\n"));
}

fn is_written_by_hand(file: &File) -> bool {
    ["rs", "md", "c", "h", "py", "sh", "mk"].iter().any(|kind| file.is(kind))
        || file.path.starts_with("scripts/")
        || file.path == "Makefile"
}

/// Phrases that hide the subject of a sentence, or that stand for the field's own term.
const PHRASES: [(&str, &str); 8] = [
    ("relative clause as subject", r"(^|[.;:(]\s+)(Who|Whoever|Whatever|Whichever)\s"),
    ("relative clause as object", r"\b(for|to|of|by|from|than|and|or|but|that|so|with) who\b"),
    (
        "relative clause as subject",
        r"(?x) (^|[.;:]\s+) What\ 
          (is|was|has|comes|came|goes|cannot|no|a|the|it|they|takes|waits|one)\b",
    ),
    (
        "no named subject",
        r"\b([Ss]omebody|[Nn]obody|[Aa]nybody|[Ee]verybody|[Ss]omeone|[Nn]o one)\b",
    ),
    ("archaic word", r"\b(anew|thereof|therein|whereof|thereby|hitherto|henceforth)\b"),
    (
        "a component receives, reports or returns",
        r"\b(hears?|heard|(is|are|was|were|has) told|tells it|says so|said so)\b",
    ),
    (
        "idiom",
        r"(?x)\b(be\ it|for\ want\ of|of\ its\ own\ accord|in\ its\ turn|comes?\ by|gives\ up|
          given\ up|left\ to|minds|looks\ after|sees\ to)\b",
    ),
    ("unfinished", r"\b(T[O]DO|F[I]XME|X[X]X)\b"),
];

#[test]
fn prose_names_its_subjects() {
    let phrases = PHRASES.map(|(rule, phrase)| (rule, Regex::new(phrase).unwrap()));
    // Without "that" or "as" behind them these count nothing.
    let counts = Regex::new(r"\b[Ss]o (many|much|often|long)\b( (that|as)\b)?").unwrap();
    let code = Regex::new("`[^`]*`").unwrap();
    let mut found = Vec::new();
    for file in files().iter().filter(|file| is_written_by_hand(file)) {
        for (number, line) in file.prose() {
            let text = code.replace_all(line, "`");
            for (rule, phrase) in &phrases {
                if let Some(hit) = phrase.find(&text) {
                    found.push(file.finding(number, format!("{rule}: {:?}", hit.as_str())));
                }
            }
            if counts.captures_iter(&text).any(|hit| hit.get(2).is_none()) {
                found.push(file.finding(number, "a count without a comparison"));
            }
        }
    }
    assert_none("phrases that hide the subject", &found);
}

/// Texts in the code reach a user. Only whole words that no identifier has.
#[test]
fn messages_name_their_subjects() {
    let words = "[Ss]omebody|[Nn]obody|[Aa]nybody|[Ee]verybody|[Ww]hoever|anew";
    let words = Regex::new(&format!(r#""[^"]*\b({words})\b[^"]* [^"]*""#)).unwrap();
    let mut found = Vec::new();
    for file in files().iter().filter(|file| file.is("rs") && !file.path.starts_with("tidy/")) {
        for (number, line) in file.text.lines().enumerate() {
            if words.is_match(line) {
                found.push(file.finding(number, line.trim()));
            }
        }
    }
    assert_none("messages that hide the subject", &found);
}

#[test]
fn names_of_tests_begin_with_an_object() {
    let pronouns = "who|what|whoever|whatever|nobody|somebody";
    let name = Regex::new(&format!(r"^\s*(async )?fn (({pronouns})_\w+)")).unwrap();
    let mut found = Vec::new();
    for file in files().iter().filter(|file| file.is("rs")) {
        for (number, line) in file.text.lines().enumerate() {
            if let Some(hit) = name.captures(line) {
                found.push(file.finding(number, &hit[2]));
            }
        }
    }
    assert_none("names of functions that begin with a pronoun", &found);
}

#[test]
fn lines_have_at_most_100_columns() {
    let mut found = Vec::new();
    for file in files().iter().filter(|file| file.is("rs") || file.is("md") || file.is("c")) {
        let is_page = file.is("md");
        let lines: Vec<_> = match is_page {
            true => file.page(),
            false => file.text.lines().enumerate().collect(),
        };
        for (number, line) in lines {
            let columns = line.chars().count();
            // A table row, a heading and a link cannot be broken.
            let text = line.trim_start().trim_start_matches(['/', '!', ' ']);
            let is_whole =
                text.starts_with('|') || is_page && (text.starts_with('#') || is_one_word(line));
            if columns > COLUMNS && !is_whole {
                found.push(file.finding(number, format!("{columns} columns")));
            }
        }
    }
    assert_none("long lines", &found);
}

/// True if breaking at a space would not bring the line within the columns.
fn is_one_word(line: &str) -> bool {
    let longest = line.split_inclusive("](").flat_map(str::split_whitespace).map(str::len).max();
    longest.unwrap_or(0) > COLUMNS / 2
}

#[test]
fn files_have_at_most_700_lines() {
    let all = files();
    let too_long = |file: &&File| file.is("rs") && file.text.lines().count() > LINES;
    let long: Vec<_> = all.iter().filter(too_long).collect();
    let found: Vec<_> =
        long.iter().map(|f| f.finding(0, format!("{} lines", f.text.lines().count()))).collect();
    assert_none("long files", &found);
}

#[test]
fn links_of_pages_resolve() {
    let link = Regex::new(r"\]\(([^)\s]+)\)").unwrap();
    let all = files();
    let mut found = Vec::new();
    for file in all.iter().filter(|file| file.is("md")) {
        for (number, line) in file.page() {
            for hit in link.captures_iter(line) {
                let target = &hit[1];
                if target.contains("://") || target.starts_with("mailto:") {
                    continue;
                }
                if let Err(why) = resolve(&all, file, target) {
                    found.push(file.finding(number, format!("{target}: {why}")));
                }
            }
        }
    }
    assert_none("links that lead nowhere", &found);
}

fn resolve(all: &[File], from: &File, target: &str) -> Result<(), String> {
    let (path, anchor) = target.split_once('#').map_or((target, None), |(p, a)| (p, Some(a)));
    let folder = from.path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let path = if path.is_empty() { from.path.clone() } else { join(folder, path) };
    if !root().join(&path).exists() {
        return Err(format!("{path} does not exist"));
    }
    let Some(anchor) = anchor else { return Ok(()) };
    let page = all.iter().find(|file| file.path == path).ok_or("an anchor in a file of no text")?;
    let mut headings = BTreeSet::new();
    for (_, line) in page.page() {
        if line.starts_with('#') {
            let base = slug(line.trim_start_matches('#').trim());
            let again = (1..).map(|n| format!("{base}-{n}"));
            let name = std::iter::once(base.clone()).chain(again).find(|n| !headings.contains(n));
            headings.extend(name);
        }
    }
    headings.contains(anchor).then_some(()).ok_or(format!("{path} has no such heading"))
}

fn join(folder: &str, path: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The anchor of a heading, as the pages' hosts make it.
fn slug(heading: &str) -> String {
    let link = Regex::new(r"\[([^\]]*)\]\([^)]*\)").unwrap();
    let text = link.replace_all(heading, "$1").to_lowercase();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Paths and names of files in comments, in scripts and in code spans of pages.
#[test]
fn named_files_exist() {
    let kinds = "rs|md|toml|mk|patch";
    let name = Regex::new(&format!(r"(^|[\s`(\x22])((?:[\w.-]+/)*[\w-]+\.(?:{kinds}))\b")).unwrap();
    let all = files();
    let mut found = Vec::new();
    for file in all.iter().filter(|file| is_written_by_hand(file)) {
        let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        for (number, line) in file.prose() {
            for hit in name.captures_iter(line) {
                let named = hit[2].trim_start_matches("./").to_string();
                let there = all.iter().any(|f| {
                    f.path == named
                        || root().join(&named).exists()
                        || f.path == join(folder, &named)
                        || f.path.ends_with(&format!("/{named}"))
                });
                if !there {
                    found.push(file.finding(number, format!("{named} does not exist")));
                }
            }
        }
    }
    assert_none("names of files that do not exist", &found);
}

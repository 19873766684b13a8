//! Checks the value of a parameter, and brings the value to the form that CONFIG GET shows.

use redis_formats::conf::{parse_memory, parse_yes_no};
use redis_formats::number::{parse_f64, parse_i64};

use super::table::{Kind, Parameter};
use crate::client::OutputLimit;
use crate::notify;

/// Checks the words of a value. Returns the value as one text.
///
/// # Errors
///
/// The reason, in Redis's words where Redis has them.
pub(crate) fn check(parameter: &Parameter, words: &[&[u8]], old: &str) -> Result<String, String> {
    if parameter.kind == Kind::Checked {
        return checked(parameter.name, words, old);
    }
    let [word] = words else { return Err("wrong number of arguments".to_owned()) };
    let text = str::from_utf8(word).map_err(|_| "argument must be UTF-8 text".to_owned())?;
    match parameter.kind {
        Kind::Switch => match parse_yes_no(word) {
            Some(value) => Ok(if value { "yes" } else { "no" }.to_owned()),
            None => Err("argument must be 'yes' or 'no'".to_owned()),
        },
        Kind::Number(min, max) => number(word, min, max),
        Kind::Memory(min, max) => {
            let bytes = parse_memory(word).ok_or("argument must be a memory value")?;
            if !(min..=max).contains(&bytes) {
                return Err(between(min, max));
            }
            Ok(bytes.to_string())
        }
        Kind::Word(choices) => {
            let found = choices.iter().find(|own| word.eq_ignore_ascii_case(own.as_bytes()));
            found.map(|own| (*own).to_owned()).ok_or_else(|| {
                format!("argument(s) must be one of the following: {}", choices.join(", "))
            })
        }
        Kind::Only(why) if !text.eq_ignore_ascii_case(parameter.default) => Err(why.to_owned()),
        Kind::Only(_) => Ok(parameter.default.to_owned()),
        Kind::Text | Kind::Checked => Ok(text.to_owned()),
    }
}

fn between(min: impl std::fmt::Display, max: impl std::fmt::Display) -> String {
    format!("argument must be between {min} and {max} inclusive")
}

fn number(word: &[u8], min: i64, max: i64) -> Result<String, String> {
    let value = parse_i64(word).ok_or("argument couldn't be parsed into an integer")?;
    if !(min..=max).contains(&value) {
        return Err(between(min, max));
    }
    Ok(value.to_string())
}

/// The words of a value, which CONFIG SET gives as one argument and a file as several.
fn split<'a>(words: &[&'a [u8]]) -> Result<Vec<&'a str>, String> {
    let mut all = Vec::new();
    for word in words {
        let text = str::from_utf8(word).map_err(|_| "argument must be UTF-8 text".to_owned())?;
        all.extend(text.split_ascii_whitespace());
    }
    Ok(all)
}

fn checked(name: &str, words: &[&[u8]], old: &str) -> Result<String, String> {
    let all = split(words)?;
    match name {
        "save" => save(&all),
        "notify-keyspace-events" => {
            let flags = notify::parse(all.concat().as_bytes()).ok_or_else(|| {
                "Invalid event class character. Use 'Ag$lshzxeKEtmdn'.".to_owned()
            })?;
            Ok(notify::print(flags))
        }
        "client-output-buffer-limit" => output_limits(&all, old),
        "latency-tracking-info-percentiles" => {
            for word in &all {
                let value = parse_f64(word.as_bytes()).ok_or("argument couldn't be parsed")?;
                if !(0.0..=100.0).contains(&value) {
                    return Err("argument must be between 0 and 100".to_owned());
                }
            }
            Ok(all.join(" "))
        }
        "unixsocketperm" => match u32::from_str_radix(all.first().unwrap_or(&"0"), 8) {
            Ok(mode) if mode <= 0o777 && all.len() <= 1 => Ok(format!("{mode:o}")),
            _ => Err("argument must be an octal mode from 0 to 777".to_owned()),
        },
        "maxmemory-clients" => match all[..] {
            [text] if text.ends_with('%') => match text.trim_end_matches('%').parse::<u64>() {
                Ok(..=100) => Ok(text.to_owned()),
                Ok(_) => Err("percentage argument must be less or equal to 100".to_owned()),
                Err(_) => Err("argument must be a memory or percent value".to_owned()),
            },
            [text] => parse_memory(text.as_bytes())
                .map(|bytes| bytes.to_string())
                .ok_or_else(|| "argument must be a memory or percent value".to_owned()),
            _ => Err("wrong number of arguments".to_owned()),
        },
        "tls-protocols" => {
            let known = |word: &&str| ["TLSv1.2", "TLSv1.3"].contains(word);
            if !all.iter().all(known) {
                return Err("argument must be empty, TLSv1.2, TLSv1.3 or both".to_owned());
            }
            Ok(all.join(" "))
        }
        "dbfilename" => match words {
            [name] if !name.is_empty() && !name.contains(&b'/') => {
                String::from_utf8(name.to_vec()).map_err(|_| "argument must be UTF-8 text".into())
            }
            _ => Err("dbfilename can't be a path, just a filename".to_owned()),
        },
        "dir" => {
            let [dir] = words else { return Err("wrong number of arguments".to_owned()) };
            let dir = String::from_utf8(dir.to_vec()).map_err(|_| "argument must be UTF-8 text")?;
            let full = std::fs::canonicalize(&dir).map_err(|error| error.to_string())?;
            full.into_os_string().into_string().map_err(|_| "argument must be UTF-8 text".into())
        }
        _ => Ok(all.join(" ")),
    }
}

/// Points for saving: seconds and changes, in pairs.
fn save(words: &[&str]) -> Result<String, String> {
    let wrong = || "Invalid save parameters".to_owned();
    if !words.len().is_multiple_of(2) {
        return Err(wrong());
    }
    for pair in words.chunks(2) {
        let seconds = parse_i64(pair[0].as_bytes()).ok_or_else(wrong)?;
        let changes = parse_i64(pair[1].as_bytes()).ok_or_else(wrong)?;
        if seconds < 1 || changes < 0 {
            return Err(wrong());
        }
    }
    Ok(words.join(" "))
}

/// Classes of connections, in the order of CONFIG GET.
const CLASSES: [&str; 3] = ["normal", "slave", "pubsub"];

fn output_limits(words: &[&str], old: &str) -> Result<String, String> {
    if words.is_empty() || !words.len().is_multiple_of(4) {
        return Err("Wrong number of arguments in buffer limit configuration.".to_owned());
    }
    let mut rows: Vec<String> = old
        .split_ascii_whitespace()
        .collect::<Vec<_>>()
        .chunks(4)
        .map(|row| row.join(" "))
        .collect();
    for row in words.chunks(4) {
        let class = if row[0].eq_ignore_ascii_case("replica") { "slave" } else { row[0] };
        let at = CLASSES.iter().position(|own| own.eq_ignore_ascii_case(class));
        let at = at.ok_or("Invalid client class specified in buffer limit configuration.")?;
        let bytes = |text: &str| parse_memory(text.as_bytes());
        let limit = bytes(row[1]).zip(bytes(row[2])).zip(parse_i64(row[3].as_bytes()));
        let Some(((hard, soft), seconds @ 0..)) = limit else {
            return Err(
                "Error in hard, soft or soft_seconds setting in buffer limit configuration."
                    .to_owned(),
            );
        };
        rows[at] = format!("{} {hard} {soft} {seconds}", CLASSES[at]);
    }
    Ok(rows.join(" "))
}

/// The limit of a class in the text of `client-output-buffer-limit`.
pub(crate) fn output_limit(text: &str, class: &str) -> OutputLimit {
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    let Some(row) = words.chunks_exact(4).find(|row| row[0] == class) else {
        return OutputLimit::default();
    };
    let number = |at: usize| row[at].parse().unwrap_or(0);
    OutputLimit { hard: number(1), soft: number(2), soft_s: number(3) }
}

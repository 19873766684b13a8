//! A scraper of the page of `--metrics`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// A page of metrics.
#[derive(Debug)]
pub struct Page {
    /// Values by name and label.
    pub values: BTreeMap<String, f64>,
    /// Names of metrics, without labels, and without the suffixes of a histogram's samples.
    pub names: BTreeSet<String>,
}

/// Requests a path over HTTP; returns the status line and the body.
pub fn get(address: SocketAddr, path: &str) -> Result<(String, String)> {
    let mut stream = TcpStream::connect(address).context("connecting to the page")?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").context("no end of the header")?;
    let status = head.lines().next().unwrap_or_default();
    Ok((status.into(), body.into()))
}

/// The address of a URL `http://ADDRESS:PORT/metrics`.
pub fn address_of(url: &str) -> Result<SocketAddr> {
    let rest = url.strip_prefix("http://").context("not HTTP")?;
    Ok(rest.trim_end_matches("/metrics").parse()?)
}

impl Page {
    /// Requests and parses the page.
    pub fn scrape(address: SocketAddr) -> Result<Self> {
        let (status, body) = get(address, "/metrics")?;
        ensure!(status == "HTTP/1.1 200 OK", "{status}: {body}");
        Self::parse(&body)
    }

    /// Parses a page in the OpenMetrics text format. Each sample must follow the type of its
    /// metric.
    fn parse(text: &str) -> Result<Self> {
        ensure!(text.ends_with("# EOF\n"), "the page does not end with EOF");
        let (mut values, mut names) = (BTreeMap::new(), BTreeSet::new());
        let mut described = ("", "");
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                described = rest.split_once(' ').context("a type without a name")?;
            }
            if line.starts_with('#') {
                continue;
            }
            let (key, value) = line.rsplit_once(' ').context("a sample without a value")?;
            let name = key.split_once('{').map_or(key, |(name, _)| name);
            let suffix = name.strip_prefix(described.0).context("a sample of another metric")?;
            let known = match described.1 {
                "counter" => suffix == "_total",
                "gauge" => suffix.is_empty(),
                "histogram" => ["_sum", "_count", "_bucket"].contains(&suffix),
                _ => false,
            };
            ensure!(known, "{line} does not suit the type {described:?}");
            let metric = if described.1 == "histogram" { described.0 } else { name };
            names.insert(metric.into());
            let is_new = values.insert(key.into(), value.parse::<f64>()?).is_none();
            ensure!(is_new, "{key} is there twice");
        }
        Ok(Self { values, names })
    }

    /// A value by name and label.
    pub fn value(&self, key: &str) -> Result<f64> {
        self.values.get(key).copied().with_context(|| format!("no {key} in {:?}", self.values))
    }
}

/// The names in the tables of docs/user/metrics.md, without labels.
pub fn names_in_docs() -> Result<BTreeSet<String>> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/user/metrics.md");
    let page = std::fs::read_to_string(page)?;
    let names = page.lines().filter_map(|line| line.strip_prefix("| `granary_"));
    let names = names.filter_map(|rest| rest.split(['`', '{']).next());
    Ok(names.map(|name| format!("granary_{name}")).collect())
}

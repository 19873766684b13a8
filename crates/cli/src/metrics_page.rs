//! The option `--metrics`: a page with the metrics of this command, for a scraper.

use std::net::SocketAddr;

use anyhow::Context;
use metrics::Samples;
use metrics::server::{self, Server};

use crate::failure;

/// The option `--metrics`.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct MetricsPage {
    /// Serve metrics in the OpenMetrics format, at http://ADDRESS:PORT/metrics. A port alone
    /// means the loopback interface. Every user and host that reaches the address may read them
    #[arg(long, value_name = "[ADDRESS:]PORT", value_parser = server::parse_address)]
    metrics: Option<SocketAddr>,
}

impl MetricsPage {
    /// Starts to serve the samples of `source`, if the option is given.
    pub fn start(
        &self,
        source: impl Fn() -> anyhow::Result<Samples> + Send + 'static,
    ) -> anyhow::Result<Option<Server>> {
        let Some(address) = self.metrics else { return Ok(None) };
        let page = move || {
            let page = source().and_then(|samples| Ok(metrics::page(samples)?));
            page.map_err(|e| failure::text(&e))
        };
        let attempt = || format!("serve metrics at {address}; choose another --metrics");
        let server = Server::start(address, page).with_context(attempt)?;
        tracing::info!(url = server.url(), "metrics are served");
        Ok(Some(server))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use metrics::Metric;

    fn declared() -> impl Iterator<Item = &'static Metric> {
        let pool_and_pager = pool::metrics::declared().chain(pager::metrics::declared());
        pool_and_pager.chain(kv_server::metrics::declared())
    }

    /// A row of the table in docs/user/metrics.md.
    fn row(metric: &Metric) -> String {
        let name = metric.full_name();
        let name = metric.label.map_or(name.clone(), |label| format!("{name}{{{}}}", label.name));
        let unit = metric.unit.name().unwrap_or_default();
        format!("| `{name}` | {} | {unit} | {} |", metric.kind.name(), metric.help)
    }

    #[test]
    fn table_in_the_docs_has_exactly_the_declared_metrics() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/user/metrics.md");
        let page = std::fs::read_to_string(page).unwrap();
        let in_docs: Vec<&str> =
            page.lines().filter(|line| line.starts_with("| `granary_")).collect();
        let declared: Vec<String> = declared().map(row).collect();
        let all = declared.join("\n");
        for row in &in_docs {
            assert!(declared.iter().any(|d| d == row), "not declared: {row}; the rows are\n{all}");
        }
        for row in &declared {
            assert!(in_docs.contains(&row.as_str()), "not in the docs: {row}; the rows are\n{all}");
        }
        assert_eq!(in_docs.len(), declared.len(), "a row is there twice");
    }

    #[test]
    fn names_are_unique_and_follow_openmetrics() {
        let mut names = BTreeMap::new();
        for metric in declared() {
            let name = metric.full_name();
            let letters = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            assert!(name.chars().all(letters), "{name}");
            assert!(metric.help.ends_with('.') && !metric.help.contains('\n'), "{name}");
            assert!(!metric.name.ends_with("_total"), "{name}");
            assert_eq!(names.insert(name.clone(), ()), None, "{name} is declared twice");
        }
    }
}

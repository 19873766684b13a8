//! What a paper's experiments are: names, claims, how they run and how they are drawn.

use std::path::{Path, PathBuf};

use sim::Params;

use super::Run;
use super::finding::Findings;
use crate::Error;

/// A paper with the experiments of it that there are.
#[derive(Debug)]
pub struct Paper {
    /// Its name on the command line and in names of files.
    pub name: &'static str,
    /// Its name with where it was published.
    pub title: &'static str,
    /// The cluster that is simulated.
    pub cluster: &'static str,
    /// The timing model's parameters of that cluster.
    pub params: fn() -> Params,
    /// All of them, in the order in which they run.
    pub experiments: &'static [Experiment],
    /// Why a claim is off by more than a tenth.
    pub note: fn(&str) -> Option<&'static str>,
    /// What is to be said of the measured tables.
    pub measured: &'static str,
}

/// An experiment.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// Its name on the command line and in records.
    pub name: &'static str,
    /// What it is, in a line.
    pub title: &'static str,
    /// The claims that it covers.
    pub claims: &'static [&'static str],
    /// Steps of its bar.
    pub steps: fn(&Run<'_>) -> usize,
    /// Runs it.
    pub run: fn(&Run<'_>, &mut Findings) -> Result<(), Error>,
    /// Draws its pictures.
    pub draw: fn(&Findings, &Canvas<'_>) -> Result<Vec<PathBuf>, Error>,
}

/// Where pictures go.
#[derive(Clone, Copy, Debug)]
pub struct Canvas<'a> {
    /// Under each title.
    pub subtitle: &'a str,
    /// The directory.
    pub directory: &'a Path,
    /// What names of files begin with.
    pub name: &'a str,
}

impl Canvas<'_> {
    /// The name of a picture.
    pub fn file(&self, rest: &str) -> String {
        if rest.is_empty() { self.name.to_owned() } else { format!("{}-{rest}", self.name) }
    }
}

impl Paper {
    /// The experiment of that name.
    ///
    /// # Errors
    /// The names that there are.
    pub fn experiment(&self, name: &str) -> Result<&Experiment, String> {
        self.experiments.iter().find(|e| e.name == name).ok_or_else(|| {
            let names: Vec<_> = self.experiments.iter().map(|e| e.name).collect();
            format!("--experiment {name}: it is one of {}", names.join(", "))
        })
    }
}

impl Experiment {
    /// Runs it. `params` are those of the timing model, if it is simulated.
    ///
    /// # Errors
    /// As what runs.
    pub fn run(&self, run: &Run<'_>, params: Option<&Params>) -> Result<Findings, Error> {
        let mut findings = Findings::new(self.name, params);
        (self.run)(run, &mut findings)?;
        Ok(findings)
    }

    /// Draws its pictures; names of files begin with `prefix` and its own name.
    ///
    /// # Errors
    /// As [`crate::plot`].
    pub fn draw(
        &self,
        findings: &Findings,
        subtitle: &str,
        directory: &Path,
        prefix: &str,
    ) -> Result<Vec<PathBuf>, Error> {
        let name = format!("{prefix}-{}", self.name);
        (self.draw)(findings, &Canvas { subtitle, directory, name: &name })
    }
}

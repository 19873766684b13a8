//! Description of a paper and its experiments: names, claims, and functions that run and draw them.

use std::path::{Path, PathBuf};

use sim::Params;

use super::Run;
use super::results::Results;
use crate::Error;

/// A paper with its reproduced experiments.
#[derive(Debug)]
pub struct Paper {
    /// Name on the command line and in file names.
    pub name: &'static str,
    /// Name and venue.
    pub title: &'static str,
    /// Description of the simulated cluster.
    pub cluster: &'static str,
    /// The timing model's parameters of that cluster.
    pub params: fn() -> Params,
    /// The experiments, in the order in which they run.
    pub experiments: &'static [Experiment],
    /// The experiments that run programs in processes. They run only if they are named, because
    /// each takes many minutes.
    pub programs: &'static [ProgramExperiment],
    /// Explains why a claim, given by its id, is off by more than a tenth.
    pub note: fn(&str) -> Option<&'static str>,
    /// Note printed after the measured tables.
    pub measured: &'static str,
}

/// An experiment of a paper.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// Name on the command line and in records.
    pub name: &'static str,
    /// Title of its tables.
    pub title: &'static str,
    /// Ids of the claims that the experiment covers.
    pub claims: &'static [&'static str],
    /// Number of steps of the progress bar.
    pub steps: fn(&Run<'_>) -> usize,
    /// Runs the experiment.
    pub run: fn(&Run<'_>, &mut Results) -> Result<(), Error>,
    /// Draws the pictures.
    pub draw: fn(&Results, &Canvas<'_>) -> Result<Vec<PathBuf>, Error>,
}

/// An experiment of a paper that runs programs in processes on this machine.
#[derive(Clone, Copy, Debug)]
pub struct ProgramExperiment {
    /// Name on the command line and in records.
    pub name: &'static str,
    /// Title in the list of experiments.
    pub title: &'static str,
    /// Ids of the claims that the experiment covers.
    pub claims: &'static [&'static str],
}

/// Output parameters of pictures.
#[derive(Clone, Copy, Debug)]
pub struct Canvas<'a> {
    /// Line under each title.
    pub subtitle: &'a str,
    /// Directory of the files.
    pub directory: &'a Path,
    /// Prefix of the file names.
    pub name: &'a str,
}

impl Canvas<'_> {
    /// The file name of a picture, without its extension.
    pub fn file(&self, rest: &str) -> String {
        if rest.is_empty() { self.name.to_owned() } else { format!("{}-{rest}", self.name) }
    }
}

impl Paper {
    /// Finds an experiment by name; `None` if it runs programs in processes.
    ///
    /// # Errors
    /// A message with the existing names.
    pub fn experiment(&self, name: &str) -> Result<Option<&Experiment>, String> {
        let found = self.experiments.iter().find(|e| e.name == name);
        if found.is_some() || self.programs.iter().any(|e| e.name == name) {
            return Ok(found);
        }
        let names = self.experiments.iter().map(|e| e.name);
        let names: Vec<_> = names.chain(self.programs.iter().map(|e| e.name)).collect();
        Err(format!("--experiment {name}: must be one of {}", names.join(", ")))
    }
}

impl Experiment {
    /// Runs the experiment. `params`: the timing model's parameters if the testbed is simulated.
    ///
    /// # Errors
    /// Errors of the testbed.
    pub fn run(&self, run: &Run<'_>, params: Option<&Params>) -> Result<Results, Error> {
        let mut results = Results::new(self.name, params);
        (self.run)(run, &mut results)?;
        Ok(results)
    }

    /// Draws the pictures; file names begin with `prefix` and the experiment's name.
    ///
    /// # Errors
    /// As [`bench_report::plot`].
    pub fn draw(
        &self,
        results: &Results,
        subtitle: &str,
        directory: &Path,
        prefix: &str,
    ) -> Result<Vec<PathBuf>, Error> {
        let name = format!("{prefix}-{}", self.name);
        (self.draw)(results, &Canvas { subtitle, directory, name: &name })
    }
}

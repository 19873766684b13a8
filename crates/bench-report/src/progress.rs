//! Progress bars on standard error.
//!
//! No bar is drawn if standard error is not a terminal or if the output is JSON, so that logs and
//! pipes never contain a bar.

use std::io::{self, IsTerminal};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Time between two drawings of a bar. A step may take minutes, and the time that it has taken must
/// go on meanwhile.
const TICK: Duration = Duration::from_secs(1);

/// Whether progress bars are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Bars are drawn on standard error.
    Drawn,
    /// No bars.
    Silent,
}

impl Progress {
    /// Bars if standard error is a terminal and the output is not JSON.
    pub fn new(json: bool) -> Self {
        if !json && io::stderr().is_terminal() { Self::Drawn } else { Self::Silent }
    }

    /// A bar over `steps` steps; dropping it removes it from the screen.
    pub fn bar(self, what: &str, steps: u64) -> Bar {
        let style = ProgressStyle::with_template(
            "{msg:32} [{bar:32}] {pos}/{len} {elapsed_precise} eta {eta}",
        )
        .expect("the template names known fields only")
        .progress_chars("=> ");
        let bar = ProgressBar::with_draw_target(Some(steps), self.target());
        Bar(self.start(bar, style, what, TICK))
    }

    /// A spinner for work of unknown length.
    pub fn spinner(self, what: &str) -> Bar {
        let style = ProgressStyle::with_template("{spinner} {msg} {elapsed_precise}")
            .expect("the template names known fields only");
        let bar = ProgressBar::with_draw_target(None, self.target());
        Bar(self.start(bar, style, what, Duration::from_millis(100)))
    }

    fn target(self) -> ProgressDrawTarget {
        match self {
            Self::Drawn => ProgressDrawTarget::stderr_with_hz(10),
            Self::Silent => ProgressDrawTarget::hidden(),
        }
    }

    fn start(
        self,
        bar: ProgressBar,
        style: ProgressStyle,
        what: &str,
        tick: Duration,
    ) -> ProgressBar {
        bar.set_style(style);
        bar.set_message(what.to_owned());
        if self == Self::Drawn {
            bar.enable_steady_tick(tick);
        }
        bar
    }
}

/// A progress bar; dropping it removes it from the screen.
#[derive(Debug)]
pub struct Bar(ProgressBar);

impl Bar {
    /// Advances the bar by one step. Too slow for the inside of a measured loop.
    pub fn step(&self) {
        self.0.inc(1);
    }

    /// Sets the description of the current step.
    pub fn say(&self, what: &str) {
        self.0.set_message(what.to_owned());
    }

    /// Prints a line above the bar; nothing if bars are not drawn.
    pub fn note(&self, line: &str) {
        self.0.println(line);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_silent_with_json() {
        assert_eq!(Progress::new(true), Progress::Silent);
        let bar = Progress::Silent.bar("measure", 3);
        assert!(bar.0.is_hidden());
        bar.step();
        bar.say("measure more");
        assert_eq!(bar.0.position(), 1);
    }
}

//! Progress bars of long work, on standard error.
//!
//! Silent when standard error is no terminal, or when the caller asked for machine output,
//! so that a log or a pipe never holds a bar.

use std::io::{self, IsTerminal};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Whether bars are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Bars on standard error.
    Drawn,
    /// None.
    Silent,
}

impl Progress {
    /// Bars if a person is looking: standard error is a terminal, and `for_machines` is not set.
    pub fn new(for_machines: bool) -> Self {
        if !for_machines && io::stderr().is_terminal() { Self::Drawn } else { Self::Silent }
    }

    /// A bar over `steps` steps. It goes away when it is dropped.
    pub fn bar(self, what: &str, steps: u64) -> Bar {
        let style = ProgressStyle::with_template(
            "{msg:32} [{bar:32}] {pos}/{len} {elapsed_precise} eta {eta}",
        )
        .expect("the template names known fields only")
        .progress_chars("=> ");
        Bar(self.start(ProgressBar::with_draw_target(Some(steps), self.target()), style, what))
    }

    /// A sign of life for work whose length is not known.
    pub fn spinner(self, what: &str) -> Bar {
        let style = ProgressStyle::with_template("{spinner} {msg} {elapsed_precise}")
            .expect("the template names known fields only");
        let bar = self.start(ProgressBar::with_draw_target(None, self.target()), style, what);
        if self == Self::Drawn {
            bar.enable_steady_tick(Duration::from_millis(100));
        }
        Bar(bar)
    }

    fn target(self) -> ProgressDrawTarget {
        match self {
            Self::Drawn => ProgressDrawTarget::stderr_with_hz(10),
            Self::Silent => ProgressDrawTarget::hidden(),
        }
    }

    fn start(self, bar: ProgressBar, style: ProgressStyle, what: &str) -> ProgressBar {
        bar.set_style(style);
        bar.set_message(what.to_owned());
        bar
    }
}

/// One bar; cleared from the screen when it is dropped.
#[derive(Debug)]
pub struct Bar(ProgressBar);

impl Bar {
    /// One step more. Not for the inside of a measured loop.
    pub fn step(&self) {
        self.0.inc(1);
    }

    /// Says what is being done now.
    pub fn say(&self, what: &str) {
        self.0.set_message(what.to_owned());
    }

    /// Prints a line above the bar, on standard error, where bars are drawn.
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
    fn silent_for_machines() {
        assert_eq!(Progress::new(true), Progress::Silent);
        let bar = Progress::Silent.bar("measure", 3);
        assert!(bar.0.is_hidden());
        bar.step();
        bar.say("measure more");
        assert_eq!(bar.0.position(), 1);
    }
}

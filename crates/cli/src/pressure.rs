//! The bound of a run that follows memory pressure: `granary run --local MIN..MAX`.
//!
//! The kernel reports pressure stall information (PSI): the part of the last ten seconds in which
//! some thread waited for memory. [`next`] is the controller. It makes no system call.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Pressure in percent above which the bound shrinks.
const HIGH_PERCENT: f64 = 5.0;
/// Pressure in percent below which the bound grows.
const LOW_PERCENT: f64 = 1.0;
/// Part of the bound by which it shrinks each second.
const SHRINK_PER_S: f64 = 0.05;
/// Part of the bound by which it grows each second.
const GROW_PER_S: f64 = 0.02;

/// Returns the bound in bytes after `seconds` of a pressure in percent. `now` is the present
/// bound, which the user may have set outside of the range.
pub fn next(now: u64, range: (u64, u64), pressure: f64, seconds: f64) -> u64 {
    let factor = if pressure > HIGH_PERCENT {
        (1.0 - SHRINK_PER_S).powf(seconds)
    } else if pressure < LOW_PERCENT {
        (1.0 + GROW_PER_S).powf(seconds)
    } else {
        1.0
    };
    ((now as f64 * factor) as u64).clamp(range.0, range.1)
}

/// Returns `avg10` of the line `some` of a file in the kernel's format.
fn parse(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let value = line.split(' ').find_map(|field| field.strip_prefix("avg10="))?;
    value.parse().ok().filter(|percent: &f64| percent.is_finite())
}

/// A file with memory pressure.
#[derive(Clone, Debug)]
pub struct Source(PathBuf);

impl Source {
    /// The given file; otherwise the file of this process's control group, or that of the machine.
    pub fn new(file: Option<PathBuf>) -> Self {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let of_group = || group_file(&groups, Path::new("/sys/fs/cgroup"));
        Self(file.or_else(of_group).unwrap_or_else(|| "/proc/pressure/memory".into()))
    }

    /// Returns the file.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Reads the pressure in percent.
    ///
    /// # Errors
    /// The kernel does not measure pressure, or the file has another format.
    pub fn read(&self) -> io::Result<f64> {
        let text = fs::read_to_string(&self.0)?;
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, "it has no line \"some avg10=\"");
        parse(&text).ok_or_else(wrong)
    }
}

/// Returns the pressure file of the control group in the text of `/proc/self/cgroup`, if it is not
/// the root group.
fn group_file(groups: &str, root: &Path) -> Option<PathBuf> {
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let file = |root: &Path| root.join(group).join("memory.pressure");
    let files = [file(root), file(&root.join("unified"))];
    files.into_iter().find(|file| !group.is_empty() && file.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: (u64, u64) = (100 << 20, 1000 << 20);

    #[test]
    fn bound_follows_pressure_within_the_range() {
        let at = 500 << 20;
        assert_eq!(next(at, RANGE, 5.1, 1.0), 475 << 20);
        assert_eq!(next(at, RANGE, 0.9, 1.0), 510 << 20);
        for steady in [1.0, 3.0, 5.0] {
            assert_eq!(next(at, RANGE, steady, 1.0), at);
        }
        assert_eq!(next(at, RANGE, 50.0, 0.0), at, "no time has passed");
        let two = next(next(at, RANGE, 9.0, 1.0), RANGE, 9.0, 1.0);
        assert!(next(at, RANGE, 9.0, 2.0).abs_diff(two) < 4096, "two seconds at once");
        assert_eq!(next(at, RANGE, 100.0, 3600.0), RANGE.0);
        assert_eq!(next(at, RANGE, 0.0, 3600.0), RANGE.1);
        assert_eq!(next(4 << 20, RANGE, 3.0, 1.0), RANGE.0, "set below the range");
        assert_eq!(next(1 << 40, RANGE, 3.0, 1.0), RANGE.1, "set above the range");
    }

    #[test]
    fn pressure_is_the_line_some() {
        let text = "some avg10=12.34 avg60=1.00 avg300=0.10 total=99\n\
                    full avg10=5.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(parse(text), Some(12.34));
        for wrong in ["", "full avg10=1.00", "some avg10=x", "some avg60=1", "some avg10=inf"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn pressure_of_the_own_group_comes_first() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("unified/user/app");
        fs::create_dir_all(&group).unwrap();
        let file = group.join("memory.pressure");
        assert_eq!(group_file("0::/user/app\n", root.path()), None);
        fs::write(&file, "some avg10=7.00 total=1\n").unwrap();
        fs::write(root.path().join("unified/memory.pressure"), "").unwrap();
        let groups = "4:memory:/old\n0::/user/app\n";
        assert_eq!(group_file(groups, root.path()), Some(file.clone()));
        assert_eq!(group_file("0::/\n", root.path()), None, "the machine's file is the same");
        assert_eq!(Source::new(Some(file)).read().unwrap(), 7.0);
        let missing = Source::new(Some(root.path().join("none")));
        assert!(missing.read().is_err());
    }
}

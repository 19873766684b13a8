//! Results of the calls that the program makes: `errno` values, and two internal results.

/// An `errno` value.
pub type Errno = i32;

/// Internal result, not an `errno`: in a forked child, another pager has replaced this one.
pub(crate) const MOVED: Errno = -1;
/// Internal result, not an `errno`: the forked child must get a pager of its own before this call
/// can succeed.
pub(crate) const NEEDS_PROMOTION: Errno = -2;

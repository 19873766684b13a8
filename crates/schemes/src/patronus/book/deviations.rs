//! Rules of the book that the schemes for comparison break.

/// The rules that a book breaks in a scheme that exists for comparison. [`Deviations::NONE`] in
/// every other scheme.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deviations {
    /// Each compute node may acquire and free every object, also without a domain.
    pub everybody: bool,
    /// Bytes in front of each object for the header of a permission (Patronus §5.4, contiguity).
    pub hole: u64,
    /// A permission of an object that is being freed ends with its keys valid while memory is
    /// adequate (Patronus §5.4, delayed unbinding).
    pub delays: bool,
    /// The memory of freed objects is not cleared.
    pub dirty: bool,
    /// There are no permissions: an allocation only names memory.
    pub unprotected: bool,
}

impl Deviations {
    /// The rules of the safe schemes.
    pub const NONE: Self =
        Self { everybody: false, hole: 0, delays: false, dirty: false, unprotected: false };
}

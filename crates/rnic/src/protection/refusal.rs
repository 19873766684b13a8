//! Reasons why the key table does not allow an access or an operation.

/// Reason why a key did not allow an access or an operation. The value is the CQE's vendor error.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[repr(u8)]
pub enum Refusal {
    /// The index is unused, or names a region where a window is required, or a window where a
    /// region is required.
    #[error("no such key")]
    NoKey = 1,
    /// The tag is not the current tag.
    #[error("stale tag")]
    Tag = 2,
    /// The key belongs to another protection domain.
    #[error("another protection domain")]
    Pd = 3,
    /// The window is not bound.
    #[error("the window is free")]
    Free = 4,
    /// The window is already bound.
    #[error("the window is bound")]
    Bound = 5,
    /// The window is bound to another QP.
    #[error("bound to another QP")]
    Qpn = 6,
    /// The range is outside the region or window.
    #[error("out of range")]
    Range = 7,
    /// The key lacks a required right.
    #[error("right missing")]
    Rights = 8,
    /// Only a privileged QP may execute the operation.
    #[error("only a privileged QP may do this")]
    Privilege = 9,
    /// The region under the window does not allow the bind.
    #[error("the region under the window does not allow it")]
    Region = 10,
    /// The UMR's fields contradict each other.
    #[error("the UMR's fields contradict each other")]
    Form = 11,
    /// The operation requires a type-2 window: a type-1 window is bound to no QP.
    #[error("not possible with a window of this type")]
    Type = 12,
    /// The guard word does not admit the QP.
    #[error("the window's guard word does not admit the QP")]
    Guard = 13,
    /// The region's engine does not allow the access.
    #[error("the region's engine does not allow the access")]
    Engine = 14,
}

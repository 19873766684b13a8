//! What opens a range of the donated memory to a compute node.
//!
//! | door | scheme | keys are valid on | handover | spare QPs |
//! | --- | --- | --- | --- | --- |
//! | a type-1 window | `patronus` | every QP of the compute node | yes | yes |
//! | a type-2 window for each lane | `patronus-2` | the lane's QP | no | no |
//! | a region | `patronus-mr` | every QP of the compute node | no | yes |
//! | type-1 windows of the memory node | `patronus-paper` | every QP | of all compute nodes | yes |
//! | one region over all memory | `unprotected` | every QP | no | yes |
//!
//! All windows and regions of a compute node are in its own PD, but those of the two last doors:
//! these schemes have one PD for all compute nodes. The worker has the windows of
//! `patronus-paper` (`manager`).

pub mod manager;
mod qp_windows;
mod regions;
mod windows;

use scheme::client_table::AccessQps;
use scheme::{Error, GroupId, Lane, Right};
use smallvec::SmallVec;
use verbs::wqe::Umr;
use verbs::{Access, Key, Nic};

pub use self::qp_windows::QpWindows;
pub use self::regions::Regions;
pub use self::windows::Windows;
use super::book::Place;
use super::message::PermissionNumber;

/// The doors of a compute node.
pub enum Door<N: Nic> {
    /// A type-1 window for each permission.
    Window(Windows<N>),
    /// A type-2 window for each permission and lane.
    QpWindows(QpWindows<N>),
    /// A region for each permission.
    Region(Regions<N>),
    /// The windows of the core that serves the compute node.
    Manager,
    /// One region over all memory, with this key.
    Unprotected(Key),
}

/// A kind of door.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DoorKind {
    /// [`Door::Window`].
    Window,
    /// [`Door::QpWindows`].
    QpWindows,
    /// [`Door::Region`].
    Region,
    /// [`Door::Manager`].
    Manager,
    /// [`Door::Unprotected`].
    Unprotected,
}

impl DoorKind {
    /// True if all compute nodes share one PD, which is unsafe.
    pub fn has_common_pd(self) -> bool {
        matches!(self, Self::Manager | Self::Unprotected)
    }
}

/// A range to open for a permission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opening {
    /// The permission.
    pub number: PermissionNumber,
    /// The range.
    pub place: Place,
    /// The operations.
    pub right: Right,
    /// The group whose QPs use the keys.
    pub group: GroupId,
    /// The bytes in front of the range are free for the header, in the published form.
    pub has_hole: bool,
}

/// The QP to which a window operation is posted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum PostTo {
    /// The compute node's binder.
    Binder,
    /// The memory node's side of an access QP.
    Lane(GroupId, Lane),
}

/// A window operation.
#[derive(Clone, Debug)]
pub struct Post {
    /// The QP to which it is posted.
    pub to: PostTo,
    /// The operation.
    pub umr: Umr,
}

/// How a door opens or closes.
pub enum Change {
    /// It is open or closed already.
    Done,
    /// By window operations, all of which must complete.
    Posts(SmallVec<[Post; 2]>),
    /// The NIC has no window or region left.
    Impossible,
}

impl<N: Nic> Door<N> {
    /// Allocates windows ahead if few are free. True if it did.
    pub fn fill(&mut self, nic: &N) -> Result<bool, Error> {
        match self {
            Door::Window(windows) => windows.fill(nic),
            Door::QpWindows(windows) => windows.fill(nic),
            Door::Region(_) | Door::Manager | Door::Unprotected(_) => Ok(false),
        }
    }

    /// Number of windows or regions.
    pub fn count(&self) -> usize {
        match self {
            Door::Window(windows) => windows.count(),
            Door::QpWindows(windows) => windows.count(),
            Door::Region(regions) => regions.count(),
            Door::Manager | Door::Unprotected(_) => 0,
        }
    }

    /// Writes the keys of an open permission, one for each lane.
    pub fn keys(&self, number: PermissionNumber, keys: &mut [Key]) {
        match self {
            Door::Window(windows) => keys.fill(windows.key(number).unwrap_or_default()),
            Door::QpWindows(windows) => windows.keys(number, keys),
            Door::Region(regions) => keys.fill(regions.key(number).unwrap_or_default()),
            Door::Manager => {}
            Door::Unprotected(key) => keys.fill(*key),
        }
    }

    /// Opens a range.
    pub fn open(&mut self, nic: &N, opening: &Opening, access: &AccessQps<N>) -> Change {
        let post = match self {
            Door::Window(windows) => windows.bind(nic, opening),
            Door::QpWindows(windows) => return windows.bind(nic, opening, access),
            Door::Region(regions) => return regions.register(nic, opening),
            Door::Manager => return Change::Impossible,
            Door::Unprotected(_) => return Change::Done,
        };
        post.map_or(Change::Impossible, |umr| {
            Change::Posts(SmallVec::from_iter([Post { to: PostTo::Binder, umr }]))
        })
    }

    /// Closes one permission and opens another one in one operation (MW handover, Patronus §5.4);
    /// `None` if this door cannot.
    pub fn hand_over(&mut self, old: PermissionNumber, opening: &Opening) -> Option<Post> {
        match self {
            Door::Window(windows) => {
                let umr = windows.rebind(old, opening)?;
                Some(Post { to: PostTo::Binder, umr })
            }
            Door::QpWindows(_) | Door::Region(_) | Door::Manager | Door::Unprotected(_) => None,
        }
    }

    /// Closes a permission. After its operations, [`Door::release`] is called.
    pub fn close(&mut self, number: PermissionNumber) -> Change {
        match self {
            Door::Window(windows) => match windows.unbind(number) {
                Some(umr) => Change::Posts(SmallVec::from_iter([Post { to: PostTo::Binder, umr }])),
                // Its bind has failed, so that no key is valid.
                None => Change::Done,
            },
            Door::QpWindows(windows) => windows.unbind(number),
            Door::Region(regions) => {
                regions.deregister(number);
                Change::Done
            }
            Door::Manager | Door::Unprotected(_) => Change::Done,
        }
    }

    /// Frees the windows of a permission whose close has completed.
    pub fn release(&mut self, number: PermissionNumber) {
        match self {
            Door::Window(windows) => windows.release(number),
            Door::QpWindows(windows) => windows.release(number),
            Door::Region(_) | Door::Manager | Door::Unprotected(_) => {}
        }
    }

    /// Deallocates what opens a permission, which invalidates its keys: an operation has failed.
    pub fn discard(&mut self, number: PermissionNumber) {
        match self {
            Door::Window(windows) => windows.discard(number),
            Door::QpWindows(windows) => windows.discard(number),
            Door::Region(regions) => regions.deregister(number),
            Door::Manager | Door::Unprotected(_) => {}
        }
    }
}

/// The rights of a key for `right`.
fn rights(right: Right) -> Access {
    match right {
        Right::Read => Access::REMOTE_READ,
        Right::Write => Access::REMOTE_ALL,
    }
}

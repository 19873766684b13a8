//! The client's side of a scheme.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use verbs::completion::WhenIdle;
use verbs::{PeerAddress, Qpn};

use crate::Error;
use crate::connect::ConnectReply;
use crate::grant::Grant;
use crate::ids::GroupId;
use crate::info::Scheme;
use crate::lease::LeaseScheme;
use crate::request_queue::ManagementQp;
use crate::status::Counter;

/// Operations on the chunks of a scheme.
pub enum Access<'a> {
    /// READ, WRITE and atomics over the access QPs, with the keys of a grant.
    OneSided,
    /// Whole pages only. A grant names a page that the memory node looks up at each access.
    Paged(&'a dyn PageAccess),
    /// Any bytes, by requests to the memory node's CPU. A grant has no key for the NIC.
    ByRpc(&'a dyn RpcAccess),
}

/// Access by whole pages.
///
/// These futures must be polled to completion; the pool ensures this when a caller drops one
/// early.
pub trait PageAccess: Send + Sync {
    /// Bytes of a page.
    fn page_bytes(&self) -> usize;

    /// Reads a page. A page that was never written reads as zeros.
    fn read_page<'a>(&'a self, page: &'a Grant, into: &'a mut [u8]) -> Answer<'a, ()>;

    /// Writes a page. The first write allocates memory for it.
    fn write_page<'a>(&'a self, page: &'a Grant, from: &'a [u8]) -> Answer<'a, ()>;
}

/// Access by requests that the memory node's CPU executes, after a check against the object's owner
/// and range (Patronus §7, the baseline "RPC in the data path").
///
/// Offsets count from the first byte of the grant. These futures must be polled to completion; the
/// pool ensures this when a caller drops one early.
///
/// # Errors
/// [`Error::NoSuchObject`] if the memory node refuses the access: the object was freed, belongs to
/// another client, or ends before the range does. Nothing was changed.
pub trait RpcAccess: Send + Sync {
    /// Most bytes that one request transfers, at least 8.
    fn data_bytes(&self) -> usize;

    /// Reads at most [`RpcAccess::data_bytes`].
    fn read<'a>(&'a self, grant: &'a Grant, offset: u64, into: &'a mut [u8]) -> Answer<'a, ()>;

    /// Writes at most [`RpcAccess::data_bytes`].
    fn write<'a>(&'a self, grant: &'a Grant, offset: u64, from: &'a [u8]) -> Answer<'a, ()>;

    /// Executes an atomic operation on the big-endian word at `offset`, a multiple of 8. Returns
    /// the previous value.
    fn atomic<'a>(&'a self, grant: &'a Grant, offset: u64, atomic: Atomic) -> Answer<'a, u64>;
}

/// An atomic operation on a word of 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Atomic {
    /// Stores `new` if the word holds `expected`.
    CompareAndSwap {
        /// Compared with the word.
        expected: u64,
        /// Replaces the word if it equals `expected`.
        new: u64,
    },
    /// Adds, with wrap-around.
    FetchAndAdd {
        /// The addend.
        add: u64,
    },
}

/// The future of a request.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// The error for a request of `bytes` that exceeds `most`, the largest allocation.
pub fn too_large(bytes: u64, most: u64, has_sizes: bool) -> Error {
    let why = match has_sizes {
        true => format!("the largest block of this pool has {most}; allocate several"),
        false => format!(
            "this pool's scheme has chunks of {most} bytes only; serve with larger ones (--chunk), \
             or with scheme finemem"
        ),
    };
    Error::Setting { setting: "bytes", value: bytes.to_string(), why }
}

/// Checks that an access by pages is to a whole page of `page_bytes`.
///
/// # Errors
/// [`Error::Setting`] for another length.
pub fn check_whole_page(
    scheme: Scheme,
    access: &str,
    len: usize,
    page_bytes: usize,
) -> Result<(), Error> {
    if len == page_bytes {
        return Ok(());
    }
    Err(Error::Setting {
        setting: "length",
        value: len.to_string(),
        why: format!("scheme {scheme} transfers whole pages: {access} {page_bytes} bytes"),
    })
}

/// The error for a memory node whose scheme this client does not have.
pub fn unknown(name: &str) -> Error {
    Error::Protocol {
        attempt: "connecting to a memory node".into(),
        why: format!("its scheme {name} is unknown here: use the same version of granary"),
    }
}

/// The compute node's side of a scheme.
///
/// A client is connected in three steps, because the QPs of either side need the numbers of their
/// peers: the scheme's module creates a client whose management QPs are not connected, the memory
/// node admits the numbers of [`ClientScheme::management`], and [`ClientScheme::connect`] connects
/// them.
pub trait ClientScheme: Send + Sync {
    /// Allocates a chunk whose keys are for the QPs of `group`.
    fn allocate(&self, group: GroupId) -> Answer<'_, Grant>;

    /// Allocates at least `bytes`. A scheme with a single size refuses more than one chunk holds.
    fn allocate_bytes(&self, group: GroupId, bytes: u64) -> Answer<'_, Grant> {
        Box::pin(async move {
            let grant = self.allocate(group).await?;
            if bytes <= grant.len {
                return Ok(grant);
            }
            self.free(&grant).await?;
            Err(too_large(bytes, grant.len, false))
        })
    }

    /// Frees a chunk. When this returns, the chunk is released or in quarantine:
    /// [`SchemeInfo::release`](crate::SchemeInfo::release).
    fn free<'a>(&'a self, grant: &'a Grant) -> Answer<'a, ()>;

    /// Operations on the chunks.
    fn access(&self) -> Access<'_> {
        Access::OneSided
    }

    /// Operations on objects and permissions, in a scheme with leases.
    fn leases(&self) -> Option<&dyn LeaseScheme> {
        None
    }

    /// Calls `each` with the management QPs, in the scheme's order.
    fn each_queue(&self, each: &mut dyn FnMut(&dyn ManagementQp));

    /// Reads the memory node's terms, before the QPs are connected for the first time.
    fn accept(&self, _terms: &ConnectReply) -> Result<(), Error> {
        Ok(())
    }

    /// Completes what failed requests have left open, once the management QPs are re-established.
    /// If the call itself fails, it is repeated at once or with the next request.
    fn settle(&self) -> Answer<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    /// A grant of all chunks for the QPs of `group`, in a scheme that gives every compute node the
    /// key to all memory. It cannot be freed.
    fn whole_pool(&self, _group: GroupId) -> Option<Grant> {
        None
    }

    /// What this client counts.
    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }

    /// Numbers of the management QPs that are not access QPs, for
    /// [`ConnectRequest::management`](crate::ConnectRequest::management).
    fn management(&self) -> Vec<Qpn> {
        let mut qpns = Vec::new();
        self.each_queue(&mut |queue| {
            if !queue.is_shared() {
                qpns.push(queue.qpn());
            }
        });
        qpns
    }

    /// True if a management QP is in the error state. Requests are then refused until the QPs are
    /// re-established: [`ClientScheme::reset`], then
    /// [`reset_management`](crate::NodeScheme::reset_management) on the other side, then
    /// [`ClientScheme::connect`].
    fn is_broken(&self) -> bool {
        let mut broken = false;
        self.each_queue(&mut |queue| broken |= queue.is_broken());
        broken
    }

    /// True from a [`ClientScheme::reset`], or from a request [without an answer in
    /// time](ClientScheme::is_late), until the [`ClientScheme::connect`] that follows. That
    /// period may be long, because the memory node may refuse to re-establish the QPs for a while.
    /// A request posted to a QP in Reset would never complete. Cheap, because it is called before
    /// each request.
    fn is_closed(&self) -> bool {
        let mut closed = false;
        self.each_queue(&mut |queue| closed |= queue.is_closed());
        closed
    }

    /// True if a request had no answer within the time limit, since the last connect. Its slot is
    /// still in use, so that no request is accepted until the QPs are reset.
    fn is_late(&self) -> bool {
        let mut late = false;
        self.each_queue(&mut |queue| late |= queue.is_late());
        late
    }

    /// Takes the management QPs to Reset. Requests in flight end with an error that leaves open
    /// whether they were executed.
    fn reset(&self) -> Result<(), Error> {
        self.try_each(&mut |queue| queue.reset())
    }

    /// Takes the management QPs to Error: requests in flight end with an error.
    fn break_management(&self) -> Result<(), Error> {
        self.try_each(&mut |queue| queue.break_off())
    }

    /// Registers `look`, which a waiting request calls periodically while its answer is overdue.
    fn when_idle(&self, look: &WhenIdle) {
        self.each_queue(&mut |queue| queue.when_idle(look));
    }

    /// Sets the time limit of requests, and the memory node's name.
    fn set_limit(&self, limit: Duration, peer: &str) {
        self.each_queue(&mut |queue| queue.set_limit(limit, peer));
    }

    /// Notes whether the memory node's program answers questions over the control connection.
    fn set_peer_silent(&self, is_silent: bool) {
        self.each_queue(&mut |queue| queue.set_peer_silent(is_silent));
    }

    /// Connects the management QPs with their peers, which are listed in the scheme's order.
    fn connect(&self, peers: &[PeerAddress]) -> Result<(), Error> {
        let own = self.management().len();
        if peers.len() != own {
            return Err(Error::Protocol {
                attempt: "connecting the management QPs".into(),
                why: format!("the memory node named {} peers for {own} QPs", peers.len()),
            });
        }
        let mut peers = peers.iter().copied();
        self.try_each(&mut |queue| {
            let peer = if queue.is_shared() { None } else { peers.next() };
            queue.connect(peer)
        })
    }

    /// Calls `each` with the management QPs until one fails.
    fn try_each(
        &self,
        each: &mut dyn FnMut(&dyn ManagementQp) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut result = Ok(());
        self.each_queue(&mut |queue| {
            if result.is_ok() {
                result = each(queue);
            }
        });
        result
    }
}

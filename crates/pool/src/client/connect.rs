//! Connections to memory nodes of other processes: the control connection first, then the NIC.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use verbs::{Error as VerbsError, Nic};

use super::control::{ControlPlane, SocketControl, until_admitted};
use super::{Options, Pool, access_sizes};
use crate::nic::{LocalFunction, NicOpener, RemoteFunction};
use crate::protocol::NodeHello;
use crate::remote::roce_end;
use crate::{Address, Error, Remote};

/// Repeats the connection of a pool, with the given options.
pub(super) type Reconnect<N> = Arc<dyn Fn(Options) -> Result<Pool<N>, Error> + Send + Sync>;

impl<N: Nic> Pool<N> {
    /// Connects to the memory node at `address`, with a NIC from `opener`.
    pub fn connect_with<O: NicOpener<Nic = N>>(
        opener: O,
        address: &Address,
        options: Options,
    ) -> Result<Self, Error> {
        until_admitted(|| match address {
            Address::Shm(path) => connect_local(&opener, path, options.clone()),
            Address::Roce(to) => connect_remote(&opener, to, options.clone()),
        })
    }
}

fn again<O: NicOpener>(opener: &O, address: Address) -> Reconnect<O::Nic> {
    let opener = opener.clone();
    Arc::new(move |options| Pool::connect_with(opener.clone(), &address, options))
}

fn connect_local<O: NicOpener>(
    opener: &O,
    path: &Path,
    options: Options,
) -> Result<Pool<O::Nic>, Error> {
    let control = SocketControl::connect_within(path, options.answer_timeout)?;
    check_place(control.welcome())?;
    let lending = lending(opener, &options, control.welcome())?;
    let LocalFunction { nic, session } = lending.open_local(path).map_err(not_admitted)?;
    let again = again(opener, Address::Shm(path.to_path_buf()));
    let control = Box::new(control.with_session(session));
    Pool::from(nic, control, options, Some(again), &schemes::clients())
}

fn connect_remote<O: NicOpener>(
    opener: &O,
    to: &Remote,
    options: Options,
) -> Result<Pool<O::Nic>, Error> {
    let token = to.token()?;
    let patience = options.answer_timeout;
    let mut nic = None;
    let control =
        SocketControl::connect_remote(&to.to, token.as_ref(), patience, |link, welcome| {
            check_place(welcome)?;
            let system =
                |source| Error::System { attempt: format!("opening a NIC for {}", to.to), source };
            let local = link.as_remote().map(|link| link.local);
            let local = local.ok_or_else(|| system(ErrorKind::NotConnected.into()))?;
            let lending = lending(opener, &options, welcome)?;
            let RemoteFunction { nic: opened, port } =
                lending.open_remote(local, to.nic.as_ref())?;
            nic = Some(opened);
            roce_end(link, port).map(Some).map_err(|e| system(e.into()))
        })?;
    let nic = nic.expect("opened while it connected");
    let again = again(opener, Address::Roce(to.clone()));
    Pool::from(nic, Box::new(control), options, Some(again), &schemes::clients())
}

/// The opener for a NIC with the queues that the options ask for.
fn lending<O: NicOpener>(opener: &O, options: &Options, welcome: &NodeHello) -> Result<O, Error> {
    if !options.is_lendable {
        return Ok(opener.clone());
    }
    let (groups, sizes) = access_sizes(options, welcome)?;
    Ok(opener.lending(&sizes.queues(groups)))
}

/// Checks for a free client slot before QPs are created. The admission checks again.
fn check_place(welcome: &NodeHello) -> Result<(), Error> {
    match &welcome.full {
        None => Ok(()),
        Some(why) => {
            Err(Error::Full { attempt: "connecting to the memory node".into(), why: why.clone() })
        }
    }
}

/// Converts the error of attaching to the memory node's NIC over a second connection. If the memory
/// node closes that one, it has reached its limit of connections.
fn not_admitted(error: VerbsError) -> Error {
    let is_closed = |e: &ErrorKind| matches!(e, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset);
    match error {
        VerbsError::Gone { why, .. } => Error::NotAdmitted { why },
        VerbsError::System { attempt, source } if is_closed(&source.kind()) => {
            Error::NotAdmitted { why: format!("{attempt}: {source}") }
        }
        error => error.into(),
    }
}

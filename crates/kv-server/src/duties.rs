//! Tasks of a thread that serve no connection: loading, the end, accepting.

use std::io::{self, ErrorKind};
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::net::{SendFlags, send};

use crate::keyspace::Keyspace;
use crate::net::event_loop::{Job, Readiness, Seat};
use crate::net::listen::{Accepted, Listener};
use crate::worker::Worker;

/// Pause after a failed attempt to accept, for example without free descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Interval of the lines of the log about failed attempts of one listener.
const ACCEPT_LINE: Duration = Duration::from_secs(30);

const TOO_MANY: &[u8] = b"-ERR max number of clients reached\r\n";
const PROTECTED: &[u8] = b"-DENIED Redis is running in protected mode because protected mode is \
    enabled and no password is set for the default user. In this mode connections are only \
    accepted from the loopback interface. To connect from other hosts, set a password with \
    requirepass, or set protected-mode to no if every host that reaches the port may use the \
    data.\r\n";

/// Loads the file.
pub(crate) async fn load<K: Keyspace>(seat: &Seat<K>) {
    let server = &seat.worker.server;
    match seat.store.load(&seat.worker).await {
        Ok(()) => server.loaded(),
        Err(text) => server.fail(text),
    }
}

/// Ends the server, after a last save if the configuration has points for saving. Goes on if the
/// save fails, as SHUTDOWN does, because the data would be lost.
pub(crate) async fn finish<K: Keyspace>(seat: &Seat<K>) {
    if let Err(why) = seat.store.finish(&seat.worker, None).await {
        tracing::error!(
            why,
            "saving before the end failed: the server goes on; repair the cause and end it again, \
             or end it without a save by SHUTDOWN NOSAVE"
        );
        return seat.worker.server.go_on();
    }
    seat.worker.server.end();
}

/// Accepts connections, and passes them to the threads.
pub(crate) async fn accept<K: Keyspace>(listener: Listener, seat: &Seat<K>) {
    let server = &seat.worker.server;
    let mut line_ns = 0;
    loop {
        match listener.accept(server.config.live.keepalive_s()) {
            Ok(accepted) => place(accepted, &seat.worker),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                seat.readiness.readable.set(false);
                if !readable(&seat.readiness, &seat.worker).await {
                    return;
                }
            }
            Err(error) if is_of_peer(&error) => {}
            Err(error) => {
                if seat.worker.elapsed_ns() >= line_ns {
                    line_ns = seat.worker.elapsed_ns() + ACCEPT_LINE.as_nanos() as u64;
                    tracing::warn!(
                        address = listener.address,
                        %error,
                        "accepting a connection failed: new connections wait, and the others are \
                         served; without descriptors, end connections or raise the limit (ulimit \
                         -n)"
                    );
                }
                seat.worker.wait(ACCEPT_PAUSE).await;
            }
        }
        if server.is_ending() {
            return;
        }
    }
}

/// Waits until the socket is readable. Returns false if the server ends.
async fn readable(readiness: &Readiness, worker: &Worker) -> bool {
    let _rest = worker.rest();
    readiness.wait(|| worker.server.is_ending() || readiness.readable.get()).await;
    !worker.server.is_ending()
}

/// Returns whether an error concerns the accepted connection only.
fn is_of_peer(error: &io::Error) -> bool {
    let kinds = [
        ErrorKind::ConnectionAborted,
        ErrorKind::ConnectionReset,
        ErrorKind::Interrupted,
        ErrorKind::NotConnected,
        ErrorKind::InvalidInput,
    ];
    kinds.contains(&error.kind())
}

/// Gives a connection to the thread with the fewest ones, or refuses the connection.
fn place(accepted: Accepted, worker: &Worker) {
    let server = &worker.server;
    let refuse = |text: &[u8]| {
        worker.stats().refused.add(1);
        // Without TLS, because a handshake would cost time. The peer need not read the text.
        let _ = send(&accepted.fd, text, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    };
    worker.stats().connections.add(1);
    let is_open = || server.users.first_login().is_authenticated;
    if server.config.live.is_protected() && !accepted.is_local && is_open() {
        return refuse(PROTECTED);
    }
    if !server.clients.enter(server.config.live.max_clients()) {
        return refuse(TOO_MANY);
    }
    let thread = &server.threads[server.idlest()];
    thread.connections.fetch_add(1, Ordering::Relaxed);
    thread.inbox.push(Job::Serve(accepted));
}

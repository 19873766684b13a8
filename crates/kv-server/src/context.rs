//! Everything that the execution of a command uses: arguments, reply, connection, store.

use redis_formats::command::{Arguments, Command};
use redis_formats::reply::Writer;
use redis_formats::request::RequestArguments;

use crate::keyspace::Keyspace;
use crate::server::Server;
use crate::session::{Queued, Session};
use crate::worker::Worker;

/// A value that was read from the socket into memory of its own.
#[derive(Debug, Default)]
pub struct Large {
    /// Index of the argument.
    pub index: usize,
    /// The value.
    pub bytes: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
enum Source<'a> {
    Request(RequestArguments<'a>, &'a [Large]),
    Queued(&'a Queued),
}

/// The arguments of a command, its name first.
#[derive(Clone, Copy, Debug)]
pub struct Args<'a> {
    source: Source<'a>,
}

impl<'a> Args<'a> {
    pub(crate) fn of_request(request: RequestArguments<'a>, large: &'a [Large]) -> Self {
        Self { source: Source::Request(request, large) }
    }

    /// The arguments of a command that waited for EXEC.
    pub fn of_queued(queued: &'a Queued) -> Self {
        Self { source: Source::Queued(queued) }
    }

    /// Number of arguments.
    pub fn count(&self) -> usize {
        match self.source {
            Source::Request(request, _) => request.len(),
            Source::Queued(queued) => queued.count(),
        }
    }

    /// Returns the argument `index`, or an empty one if there are fewer.
    pub fn get(&self, index: usize) -> &'a [u8] {
        self.find(index).unwrap_or_default()
    }

    /// Returns the argument `index`, if there is one.
    pub fn find(&self, index: usize) -> Option<&'a [u8]> {
        match self.source {
            Source::Request(request, large) => match request.diverted(index) {
                None => request.get(index),
                Some(_) => large.iter().find(|own| own.index == index).map(|own| &own.bytes[..]),
            },
            Source::Queued(queued) => queued.get(index),
        }
    }

    /// Returns whether the argument `index` is `word`, in any case.
    pub fn is(&self, index: usize, word: &str) -> bool {
        self.find(index).is_some_and(|own| own.eq_ignore_ascii_case(word.as_bytes()))
    }

    /// Iterates over the arguments from `first` on.
    pub fn from(&self, first: usize) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        let all = *self;
        (first.min(all.count())..all.count()).map(move |index| all.get(index))
    }
}

impl Arguments for Args<'_> {
    fn len(&self) -> usize {
        self.count()
    }

    fn at(&self, index: usize) -> &[u8] {
        self.get(index)
    }
}

/// The execution of one command.
pub struct Context<'a, K: Keyspace> {
    /// The command or subcommand.
    pub command: &'static Command,
    /// Arguments.
    pub args: Args<'a>,
    /// Output buffer of the connection.
    pub out: &'a mut Vec<u8>,
    /// State of the connection.
    pub session: &'a mut Session,
    /// Watched keys of the connection.
    pub watches: &'a mut K::Watches,
    /// Thread of the connection.
    pub worker: &'a Worker,
    /// The store.
    pub store: &'a K,
}

impl<'a, K: Keyspace> Context<'a, K> {
    /// The server.
    pub fn server(&self) -> &'a Server {
        &self.worker.server
    }

    /// The time in milliseconds since 1970, as of the begin of the wave.
    pub fn now_ms(&self) -> u64 {
        self.worker.now_ms()
    }

    /// Writes a reply in the protocol of the connection.
    pub fn reply(&mut self) -> Writer<'_> {
        Writer::new(self.out, self.session.protocol)
    }

    /// Replies with an error, whose first word is its code.
    pub fn error(&mut self, text: impl AsRef<[u8]>) {
        self.reply().error(text);
    }

    /// Replies with the error of a wrong option.
    pub fn syntax_error(&mut self) {
        self.error("ERR syntax error");
    }

    /// Publishes a change of `key` as a keyspace event, if the configuration asks for events of
    /// this class: a letter of `notify-keyspace-events`.
    pub fn notify(&self, class: u8, event: &str, db: u8, key: &[u8]) {
        self.server().notify(class, event, db, key);
    }

    /// The context of a command that waited for EXEC.
    pub fn of_queued<'b>(&'b mut self, queued: &'b Queued) -> Context<'b, K> {
        Context {
            command: queued.command,
            args: Args::of_queued(queued),
            out: self.out,
            session: self.session,
            watches: self.watches,
            worker: self.worker,
            store: self.store,
        }
    }
}

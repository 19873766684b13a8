//! State of a connection that its own thread has.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use kv::Ahead;
use redis_formats::command::{Arguments, Command};
use redis_formats::reply::Protocol;

use crate::channels::To;
use crate::client::Client;
use crate::users::Login;

/// A command that waits for EXEC.
#[derive(Debug)]
pub struct Queued {
    /// The command.
    pub command: &'static Command,
    bytes: Box<[u8]>,
    spans: Box<[Range<usize>]>,
}

impl Queued {
    /// Copies the arguments.
    pub fn new<A: Arguments + ?Sized>(command: &'static Command, arguments: &A) -> Self {
        let mut bytes = Vec::new();
        let spans = (0..arguments.len()).map(|index| {
            let begin = bytes.len();
            bytes.extend_from_slice(arguments.at(index));
            begin..bytes.len()
        });
        let spans = spans.collect();
        Self { command, bytes: bytes.into(), spans }
    }

    /// Number of arguments.
    pub fn count(&self) -> usize {
        self.spans.len()
    }

    /// Returns the argument `index`.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        Some(&self.bytes[self.spans.get(index)?.clone()])
    }

    /// Bytes of all arguments.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }
}

/// The commands between MULTI and EXEC.
#[derive(Debug, Default)]
pub struct Queue {
    /// The commands.
    pub commands: Vec<Queued>,
    /// Bytes of all arguments.
    bytes: usize,
    /// A command was refused, so EXEC is refused.
    pub is_broken: bool,
}

impl Queue {
    /// Adds a command.
    pub(crate) fn push(&mut self, queued: Queued) {
        self.bytes += queued.bytes();
        self.commands.push(queued);
    }

    /// Bytes of all arguments.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Which replies CLIENT REPLY suppresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Suppress {
    /// None.
    #[default]
    No,
    /// The reply of the next command.
    Next,
    /// The reply of the present command.
    This,
    /// All replies.
    All,
}

/// Subscriptions of a connection.
#[derive(Debug, Default)]
pub struct Subscriptions {
    /// Channels.
    pub channels: BTreeSet<Arc<[u8]>>,
    /// Patterns.
    pub patterns: BTreeSet<Arc<[u8]>>,
    /// Shard channels.
    pub shards: BTreeSet<Arc<[u8]>>,
}

impl Subscriptions {
    pub(crate) fn of(&self, to: To) -> &BTreeSet<Arc<[u8]>> {
        match to {
            To::Channel => &self.channels,
            To::Pattern => &self.patterns,
            To::Shard => &self.shards,
        }
    }

    pub(crate) fn of_mut(&mut self, to: To) -> &mut BTreeSet<Arc<[u8]>> {
        match to {
            To::Channel => &mut self.channels,
            To::Pattern => &mut self.patterns,
            To::Shard => &mut self.shards,
        }
    }

    /// The number that a confirmation has: shard channels count apart.
    pub(crate) fn count(&self, to: To) -> usize {
        match to {
            To::Shard => self.shards.len(),
            To::Channel | To::Pattern => self.channels.len() + self.patterns.len(),
        }
    }
}

/// State of a connection.
#[derive(Debug)]
pub struct Session {
    /// What other threads see of the connection.
    pub client: Arc<Client>,
    /// Number of the database.
    pub db: u8,
    /// Protocol of replies.
    pub protocol: Protocol,
    /// The user and its rights.
    pub(crate) login: Login,
    /// Commands that wait for EXEC, after MULTI.
    pub queue: Option<Queue>,
    /// Subscriptions.
    pub subscriptions: Subscriptions,
    /// Replies that are not sent.
    pub suppress: Suppress,
    /// The connection ends behind the present reply.
    pub is_closing: bool,
    /// The present command runs within EXEC.
    pub in_exec: bool,
    /// The reply of the present command, if EXEC has executed the command already.
    pub(crate) prepared: Option<Vec<u8>>,
    /// Values that the next requests read.
    pub(crate) ahead: Ahead,
}

impl Session {
    pub(crate) fn new(client: Arc<Client>, login: Login) -> Self {
        Self {
            client,
            db: 0,
            protocol: Protocol::Resp2,
            login,
            queue: None,
            subscriptions: Subscriptions::default(),
            suppress: Suppress::No,
            is_closing: false,
            in_exec: false,
            prepared: None,
            ahead: Ahead::default(),
        }
    }

    /// Selects a database.
    pub fn select(&mut self, db: u8) {
        self.db = db;
        self.client.set_db(db);
    }

    /// Selects the protocol of replies.
    pub fn set_protocol(&mut self, protocol: Protocol) {
        self.protocol = protocol;
        self.client.set_protocol(protocol);
    }

    /// Begins a transaction.
    pub fn begin_queue(&mut self) {
        self.queue = Some(Queue::default());
        self.show_queue();
    }

    /// Ends a transaction, and returns its commands.
    pub fn take_queue(&mut self) -> Option<Queue> {
        let queue = self.queue.take();
        self.show_queue();
        queue
    }

    /// Shows CLIENT LIST the number of commands that wait.
    pub(crate) fn show_queue(&self) {
        let count = self.queue.as_ref().map(|queue| queue.commands.len());
        let bytes = self.queue.as_ref().map_or(0, Queue::bytes);
        self.client.set_queued(count, bytes);
    }

    /// Notes that a command was refused. A transaction cannot be executed then.
    pub(crate) fn break_queue(&mut self) {
        if let Some(queue) = &mut self.queue {
            queue.is_broken = true;
        }
    }

    /// Shows CLIENT LIST the subscriptions.
    pub(crate) fn show_subscriptions(&self) {
        self.client.set_subscriptions(To::ALL.map(|to| self.subscriptions.of(to).len()));
    }

    /// With RESP2, a connection with subscriptions executes few commands only.
    pub(crate) fn is_subscriber(&self) -> bool {
        To::ALL.into_iter().any(|to| !self.subscriptions.of(to).is_empty())
    }
}

//! The execution of a data command on keys that are locked: pure, and so repeatable.
//!
//! A store may call a change again after a split. Therefore a command reads its keys from
//! [`Cells`], and leaves its changes there and its reply and its events in an [`Output`].

use std::borrow::Cow;

use kv::Measure;
use redis_formats::command::Command;
use redis_formats::number::parse_i64;
use redis_formats::reply::{Protocol, Writer};

use crate::context::Args;

/// A data command with its arguments.
#[derive(Clone, Copy)]
pub(super) struct Call<'v> {
    pub command: &'static Command,
    pub args: Args<'v>,
    /// Number of the database, as clients see it.
    pub db: u8,
    /// Milliseconds since 1970.
    pub now_ms: u64,
    /// Maximum bytes of a string.
    pub bulk_max: usize,
    /// Maximum bytes of a string that this command makes longer: what the pool has room for.
    pub room: u64,
}

/// An error reply.
pub(super) type Refusal = Cow<'static, str>;

/// The end of an execution.
pub(super) type Done = Result<(), Refusal>;

/// The code of a data command.
pub(super) type Body =
    for<'c, 'v, 'o> fn(&Call<'v>, &mut Cells<'_, 'c, 'v>, &mut Output<'o>) -> Done;

pub(super) const SYNTAX: &str = "ERR syntax error";
/// The refusal of a value for which there is no room.
pub(super) const FULL: &str = "OOM command not allowed when used memory > 'maxmemory'.";
pub(super) const NOT_INTEGER: &str = "ERR value is not an integer or out of range";

/// A refusal with a constant text.
pub(super) fn refuse<T>(text: &'static str) -> Result<T, Refusal> {
    Err(Cow::Borrowed(text))
}

impl<'v> Call<'v> {
    /// Reads the argument `index` as an integer.
    pub fn integer(&self, index: usize) -> Result<i64, Refusal> {
        parse_i64(self.args.get(index)).ok_or(Cow::Borrowed(NOT_INTEGER))
    }

    /// The error of an expiry that is impossible.
    pub fn bad_expiry(&self) -> Refusal {
        Cow::Owned(format!("ERR invalid expire time in '{}' command", self.command.name))
    }

    /// Refuses a string of `size + more` bytes that is too long.
    pub fn check_length(&self, size: usize, more: usize) -> Done {
        match size.checked_add(more) {
            Some(total) if total <= self.bulk_max => Ok(()),
            _ => refuse("ERR string exceeds maximum allowed size (proto-max-bulk-len)"),
        }
    }

    /// Copies `old` to a string of `len` bytes, whose rest is zeros. Because `len` comes from a
    /// request, the pool is asked before memory is taken, and the lack of memory is no abort.
    pub fn grow(&self, old: &[u8], len: usize) -> Result<Vec<u8>, Refusal> {
        let mut value = Vec::new();
        let has_room = len <= old.len() || len as u64 <= self.room;
        if !has_room || value.try_reserve_exact(len).is_err() {
            return refuse(FULL);
        }
        value.extend_from_slice(old);
        value.resize(len, 0);
        Ok(value)
    }
}

/// The state in which a command leaves a key.
#[derive(Debug)]
pub(super) enum Change<'v> {
    None,
    /// A value and its expiry in milliseconds since 1970; 0: none.
    Put(Cow<'v, [u8]>, u64),
    Delete,
    Expire(u64),
}

/// A key of a command.
#[derive(Debug)]
pub(super) struct Cell<'c, 'v> {
    current: Option<&'c [u8]>,
    expiry: u64,
    change: Change<'v>,
}

impl<'c, 'v> Cell<'c, 'v> {
    /// A key with its value (empty if the command needs none) and its expiry.
    pub fn new(current: Option<&'c [u8]>, expiry: u64) -> Self {
        Self { current, expiry, change: Change::None }
    }

    pub fn value(&self) -> Option<&[u8]> {
        match &self.change {
            Change::Put(value, _) => Some(value),
            Change::Delete => None,
            Change::None | Change::Expire(_) => self.current,
        }
    }

    pub fn exists(&self) -> bool {
        self.value().is_some()
    }

    /// Milliseconds since 1970; 0: none.
    pub fn expiry(&self) -> u64 {
        match self.change {
            Change::Put(_, expiry) | Change::Expire(expiry) => expiry,
            Change::Delete => 0,
            Change::None => self.expiry,
        }
    }

    pub fn put(&mut self, value: impl Into<Cow<'v, [u8]>>, expiry: u64) {
        self.change = Change::Put(value.into(), expiry);
    }

    /// Writes a value. The expiry stays.
    pub fn replace(&mut self, value: impl Into<Cow<'v, [u8]>>) {
        let expiry = self.expiry();
        self.put(value, expiry);
    }

    pub fn delete(&mut self) -> bool {
        let was_there = self.exists();
        if was_there {
            self.change = Change::Delete;
        }
        was_there
    }

    pub fn expire(&mut self, at: u64) {
        match &mut self.change {
            Change::Put(_, expiry) => *expiry = at,
            Change::Delete => {}
            Change::None | Change::Expire(_) => self.change = Change::Expire(at),
        }
    }

    /// True if the command creates the key.
    pub fn is_new(&self) -> bool {
        self.current.is_none() && matches!(self.change, Change::Put(..))
    }

    /// True if the command changes the key.
    pub fn is_changed(&self) -> bool {
        !matches!(self.change, Change::None)
    }

    pub fn into_change(self) -> Change<'v> {
        self.change
    }
}

/// The keys of a command, by their number among its keys. Equal keys share a cell.
pub(super) struct Cells<'s, 'c, 'v> {
    pub cells: &'s mut [Cell<'c, 'v>],
    /// The cell of each key.
    pub of: &'s [usize],
}

impl<'c, 'v> Cells<'_, 'c, 'v> {
    pub fn len(&self) -> usize {
        self.of.len()
    }

    pub fn are_same(&self, one: usize, other: usize) -> bool {
        self.of[one] == self.of[other]
    }

    pub fn at(&self, key: usize) -> &Cell<'c, 'v> {
        &self.cells[self.of[key]]
    }

    pub fn key(&mut self, key: usize) -> &mut Cell<'c, 'v> {
        &mut self.cells[self.of[key]]
    }

    /// Undoes all changes.
    pub fn undo(&mut self) {
        self.cells.iter_mut().for_each(|cell| cell.change = Change::None);
    }
}

/// A keyspace event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub class: u8,
    pub name: &'static str,
    /// Number of the key among the command's keys.
    pub key: usize,
}

/// What an execution has brought besides its reply.
#[derive(Debug, Default)]
pub(super) struct Effects {
    /// False: the configuration asks for no events.
    pub are_told: bool,
    pub events: Vec<Event>,
    pub hits: u64,
    pub misses: u64,
    pub is_changed: bool,
    /// The uses of the only key, which RESTORE sets.
    pub worth: Option<(Measure, u64)>,
    /// The command has panicked: its connection ends.
    pub has_panicked: bool,
}

impl Effects {
    pub fn new(are_told: bool) -> Self {
        Self { are_told, ..Self::default() }
    }

    fn tell(&mut self, class: u8, name: &'static str, key: usize) {
        if self.are_told {
            self.events.push(Event { class, name, key });
        }
    }

    pub fn clear(&mut self) {
        self.events.clear();
        (self.hits, self.misses, self.is_changed) = (0, 0, false);
        self.worth = None;
    }
}

/// Reply and effects of an execution.
pub(super) struct Output<'o> {
    pub out: &'o mut Vec<u8>,
    pub protocol: Protocol,
    pub effects: &'o mut Effects,
}

impl Output<'_> {
    pub fn reply(&mut self) -> Writer<'_> {
        Writer::new(self.out, self.protocol)
    }

    pub fn integer(&mut self, value: i64) {
        self.reply().integer(value);
    }

    pub fn boolean(&mut self, value: bool) {
        self.integer(value.into());
    }

    pub fn ok(&mut self) {
        self.reply().ok();
    }

    pub fn null(&mut self) {
        self.reply().null();
    }

    /// Notes an event of a key.
    pub fn event(&mut self, class: u8, name: &'static str, key: usize) {
        self.effects.tell(class, name, key);
        self.effects.is_changed = true;
    }

    /// Counts a read of a key that is there, or is not.
    pub fn note_read(&mut self, key: usize, was_there: bool) {
        if was_there {
            self.effects.hits += 1;
        } else {
            self.effects.misses += 1;
            self.effects.tell(b'm', "keymiss", key);
        }
    }
}

/// Executes `body`. An error undoes all changes, and so does a panic.
pub(super) fn perform<'v>(
    body: Body,
    call: &Call<'v>,
    cells: &mut Cells<'_, '_, 'v>,
    output: &mut Output<'_>,
) {
    let begin = output.out.len();
    // A command works on copies, so a panic leaves the store as it was.
    let run = std::panic::AssertUnwindSafe(|| body(call, cells, output));
    let done = std::panic::catch_unwind(run).unwrap_or_else(|_| {
        output.effects.has_panicked = true;
        refuse("ERR the server failed in this command, changed nothing, and closes the connection")
    });
    if let Err(text) = done {
        cells.undo();
        output.effects.clear();
        output.out.truncate(begin);
        output.reply().error(text.as_bytes());
        return;
    }
    tell_new(cells, &mut output.effects.events);
}

/// Adds the events of keys that the command creates, each before the first event of its key.
fn tell_new(cells: &Cells<'_, '_, '_>, events: &mut Vec<Event>) {
    if events.is_empty() || !cells.cells.iter().any(Cell::is_new) {
        return;
    }
    let mut is_told: Vec<bool> = cells.cells.iter().map(|cell| !cell.is_new()).collect();
    for event in std::mem::take(events) {
        let was_told = std::mem::replace(&mut is_told[cells.of[event.key]], true);
        if !was_told && event.name != "new" {
            events.push(Event { class: b'n', name: "new", key: event.key });
        }
        events.push(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Queued;

    #[test]
    fn panic_in_a_command_changes_nothing() {
        let words = ["SET", "key", "new"];
        let command = redis_formats::command::lookup(&words[..]).unwrap();
        let queued = Queued::new(command, &words[..]);
        let args = Args::of_queued(&queued);
        let call = Call { command, args, db: 0, now_ms: 0, bulk_max: 100, room: 100 };
        let (mut out, mut effects) = (b"+before\r\n".to_vec(), Effects::new(true));
        let mut cells = [Cell::new(Some(b"old"), 7)];
        let mut keys = Cells { cells: &mut cells, of: &[0] };
        let mut output = Output { out: &mut out, protocol: Protocol::Resp2, effects: &mut effects };
        let body: Body = |call, cells, out| {
            cells.key(0).put(call.args.get(2), 0);
            out.event(b'$', "set", 0);
            out.ok();
            panic!("the test panics");
        };
        perform(body, &call, &mut keys, &mut output);
        assert!(effects.has_panicked && effects.events.is_empty() && !effects.is_changed);
        assert!(!cells[0].is_changed() && cells[0].value() == Some(b"old"));
        assert!(out.starts_with(b"+before\r\n-ERR the server failed in this command"));
    }

    #[test]
    fn string_grows_within_the_room_of_the_pool() {
        let words = ["APPEND", "key", "x"];
        let command = redis_formats::command::lookup(&words[..]).unwrap();
        let queued = Queued::new(command, &words[..]);
        let args = Args::of_queued(&queued);
        let call = Call { command, args, db: 0, now_ms: 0, bulk_max: 100, room: 10 };
        assert_eq!(call.grow(b"ab", 4).unwrap(), b"ab\0\0");
        assert_eq!(call.grow(b"ab", 11).unwrap_err(), FULL);
        assert_eq!(call.grow(&[1; 20], 20).unwrap(), [1; 20]);
        assert!(call.check_length(60, 40).is_ok() && call.check_length(60, 41).is_err());
        assert!(call.check_length(usize::MAX, 1).is_err());
    }
}

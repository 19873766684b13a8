//! Commands on strings.

use std::borrow::Cow;

use super::call::{Call, Cells, Done, Output, Refusal, SYNTAX, refuse};

/// Unit and base of an expiry among the options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Time {
    Seconds,
    Milliseconds,
    AtSeconds,
    AtMilliseconds,
}

/// Options of SET and GETEX.
#[derive(Clone, Copy, Debug, Default)]
struct Options {
    if_absent: bool,
    if_present: bool,
    get: bool,
    keep: bool,
    persist: bool,
    /// Unit, and the index of the argument.
    expiry: Option<(Time, usize)>,
}

impl Options {
    /// Reads the arguments from `first` on. `is_set`: those of SET, else of GETEX.
    fn parse(call: &Call<'_>, first: usize, is_set: bool) -> Result<Self, Refusal> {
        let mut options = Self::default();
        let mut at = first;
        while at < call.args.count() {
            let is = |word| call.args.is(at, word);
            let has_value = at + 1 < call.args.count();
            let unit = match () {
                () if is("ex") => Some(Time::Seconds),
                () if is("px") => Some(Time::Milliseconds),
                () if is("exat") => Some(Time::AtSeconds),
                () if is("pxat") => Some(Time::AtMilliseconds),
                () => None,
            };
            let is_untimed = !options.keep && !options.persist;
            if let Some(unit) = unit {
                let is_same = options.expiry.is_none_or(|(other, _)| other == unit);
                if !is_untimed || !is_same || !has_value {
                    return refuse(SYNTAX);
                }
                options.expiry = Some((unit, at + 1));
                at += 1;
            } else if is_set && is("nx") && !options.if_present {
                options.if_absent = true;
            } else if is_set && is("xx") && !options.if_absent {
                options.if_present = true;
            } else if is_set && is("get") {
                options.get = true;
            } else if is_set && is("keepttl") && options.expiry.is_none() {
                options.keep = true;
            } else if !is_set && is("persist") && options.expiry.is_none() {
                options.persist = true;
            } else {
                return refuse(SYNTAX);
            }
            at += 1;
        }
        Ok(options)
    }

    /// The expiry in milliseconds since 1970, if there is one.
    fn time(&self, call: &Call<'_>) -> Result<Option<u64>, Refusal> {
        self.expiry.map(|(unit, at)| time(call, unit, at)).transpose()
    }
}

/// Reads an expiry that must lie after 1970 and, if relative, in the future.
pub(super) fn time(call: &Call<'_>, unit: Time, at: usize) -> Result<u64, Refusal> {
    let value = call.integer(at)?;
    let in_seconds = matches!(unit, Time::Seconds | Time::AtSeconds);
    let is_relative = matches!(unit, Time::Seconds | Time::Milliseconds);
    let scaled = value.checked_mul(if in_seconds { 1000 } else { 1 }).filter(|own| *own > 0);
    let base = if is_relative { call.now_ms as i64 } else { 0 };
    let absolute = scaled.and_then(|own| own.checked_add(base));
    absolute.map(|own| own as u64).ok_or_else(|| call.bad_expiry())
}

pub(super) fn get(_: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let value = cells.at(0).value();
    out.note_read(0, value.is_some());
    out.reply().bulk_or_null(value);
    Ok(())
}

pub(super) fn set<'v>(
    call: &Call<'v>,
    cells: &mut Cells<'_, '_, 'v>,
    out: &mut Output<'_>,
) -> Done {
    let options = Options::parse(call, 3, true)?;
    let time = options.time(call)?;
    let cell = cells.key(0);
    if options.get {
        out.note_read(0, cell.exists());
        out.reply().bulk_or_null(cell.value());
    }
    if options.if_absent && cell.exists() || options.if_present && !cell.exists() {
        if !options.get {
            out.null();
        }
        return Ok(());
    }
    let expiry = time.unwrap_or(if options.keep { cell.expiry() } else { 0 });
    cell.put(call.args.get(2), expiry);
    out.event(b'$', "set", 0);
    if time.is_some() {
        out.event(b'g', "expire", 0);
    }
    if !options.get {
        out.ok();
    }
    Ok(())
}

pub(super) fn setnx<'v>(
    call: &Call<'v>,
    cells: &mut Cells<'_, '_, 'v>,
    out: &mut Output<'_>,
) -> Done {
    let is_absent = !cells.at(0).exists();
    if is_absent {
        cells.key(0).put(call.args.get(2), 0);
        out.event(b'$', "set", 0);
    }
    out.boolean(is_absent);
    Ok(())
}

fn set_with_time<'v>(
    call: &Call<'v>,
    cells: &mut Cells<'_, '_, 'v>,
    out: &mut Output<'_>,
    unit: Time,
) -> Done {
    let expiry = time(call, unit, 2)?;
    cells.key(0).put(call.args.get(3), expiry);
    out.event(b'$', "set", 0);
    out.event(b'g', "expire", 0);
    out.ok();
    Ok(())
}

pub(super) fn setex<'v>(
    call: &Call<'v>,
    cells: &mut Cells<'_, '_, 'v>,
    out: &mut Output<'_>,
) -> Done {
    set_with_time(call, cells, out, Time::Seconds)
}

pub(super) fn psetex<'v>(
    call: &Call<'v>,
    cells: &mut Cells<'_, '_, 'v>,
    out: &mut Output<'_>,
) -> Done {
    set_with_time(call, cells, out, Time::Milliseconds)
}

pub(super) fn getset<'v>(
    call: &Call<'v>,
    cells: &mut Cells<'_, '_, 'v>,
    out: &mut Output<'_>,
) -> Done {
    let cell = cells.key(0);
    out.note_read(0, cell.exists());
    out.reply().bulk_or_null(cell.value());
    cell.put(call.args.get(2), 0);
    out.event(b'$', "set", 0);
    Ok(())
}

pub(super) fn getdel(_: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let cell = cells.key(0);
    out.note_read(0, cell.exists());
    out.reply().bulk_or_null(cell.value());
    if cell.delete() {
        out.event(b'g', "del", 0);
    }
    Ok(())
}

pub(super) fn getex(call: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let options = Options::parse(call, 2, false)?;
    let cell = cells.key(0);
    out.note_read(0, cell.exists());
    if !cell.exists() {
        out.null();
        return Ok(());
    }
    let time = options.time(call)?;
    out.reply().bulk_or_null(cell.value());
    match time {
        Some(at) if at <= call.now_ms => {
            cell.delete();
            out.event(b'g', "del", 0);
        }
        Some(at) => {
            cell.expire(at);
            out.event(b'g', "expire", 0);
        }
        None if options.persist && cell.expiry() != 0 => {
            cell.expire(0);
            out.event(b'g', "persist", 0);
        }
        None => {}
    }
    Ok(())
}

pub(super) fn mget(_: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    out.reply().array(cells.len());
    for key in 0..cells.len() {
        let value = cells.at(key).value();
        out.note_read(key, value.is_some());
        out.reply().bulk_or_null(value);
    }
    Ok(())
}

/// Writes the pairs of MSET and MSETNX.
fn put_pairs<'v>(call: &Call<'v>, cells: &mut Cells<'_, '_, 'v>, out: &mut Output<'_>) {
    for key in 0..cells.len() {
        cells.key(key).put(call.args.get(2 * key + 2), 0);
        out.event(b'$', "set", key);
    }
}

fn check_pairs(call: &Call<'_>) -> Done {
    if call.args.count().is_multiple_of(2) {
        let text = format!("ERR wrong number of arguments for '{}' command", call.command.name);
        return Err(Cow::Owned(text));
    }
    Ok(())
}

pub(super) fn mset<'v>(
    call: &Call<'v>,
    cells: &mut Cells<'_, '_, 'v>,
    out: &mut Output<'_>,
) -> Done {
    check_pairs(call)?;
    put_pairs(call, cells, out);
    out.ok();
    Ok(())
}

pub(super) fn msetnx<'v>(
    call: &Call<'v>,
    cells: &mut Cells<'_, '_, 'v>,
    out: &mut Output<'_>,
) -> Done {
    check_pairs(call)?;
    let is_free = (0..cells.len()).all(|key| !cells.at(key).exists());
    if is_free {
        put_pairs(call, cells, out);
    }
    out.boolean(is_free);
    Ok(())
}

pub(super) fn strlen(_: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let value = cells.at(0).value();
    out.note_read(0, value.is_some());
    out.integer(value.map_or(0, <[u8]>::len) as i64);
    Ok(())
}

pub(super) fn append<'v>(
    call: &Call<'v>,
    cells: &mut Cells<'_, '_, 'v>,
    out: &mut Output<'_>,
) -> Done {
    let (cell, more) = (cells.key(0), call.args.get(2));
    let old = cell.value().unwrap_or_default();
    if cell.exists() {
        call.check_length(old.len(), more.len())?;
    }
    let mut value = call.grow(old, old.len() + more.len())?;
    value[old.len()..].copy_from_slice(more);
    out.integer(value.len() as i64);
    cell.replace(value);
    out.event(b'$', "append", 0);
    Ok(())
}

/// The range of bytes from `start` to `end`, of which negative ones count from the end.
pub(super) fn range(start: i64, end: i64, len: usize) -> std::ops::Range<usize> {
    if start < 0 && end < 0 && start > end {
        return 0..0;
    }
    let len = len as i64;
    let absolute = |index: i64| if index < 0 { (len + index).max(0) } else { index };
    let (start, end) = (absolute(start), absolute(end).min(len - 1));
    if start > end || len == 0 { 0..0 } else { start as usize..end as usize + 1 }
}

pub(super) fn getrange(
    call: &Call<'_>,
    cells: &mut Cells<'_, '_, '_>,
    out: &mut Output<'_>,
) -> Done {
    let (start, end) = (call.integer(2)?, call.integer(3)?);
    let value = cells.at(0).value();
    out.note_read(0, value.is_some());
    let value = value.unwrap_or_default();
    out.reply().bulk(&value[range(start, end, value.len())]);
    Ok(())
}

pub(super) fn setrange(
    call: &Call<'_>,
    cells: &mut Cells<'_, '_, '_>,
    out: &mut Output<'_>,
) -> Done {
    let Ok(offset) = usize::try_from(call.integer(2)?) else {
        return refuse("ERR offset is out of range");
    };
    let (cell, new) = (cells.key(0), call.args.get(3));
    let old = cell.value().unwrap_or_default();
    if new.is_empty() {
        out.integer(old.len() as i64);
        return Ok(());
    }
    call.check_length(offset, new.len())?;
    let mut value = call.grow(old, old.len().max(offset + new.len()))?;
    value[offset..offset + new.len()].copy_from_slice(new);
    out.integer(value.len() as i64);
    cell.replace(value);
    out.event(b'$', "setrange", 0);
    Ok(())
}

//! Commands on the expiry of keys.

use std::borrow::Cow;

use redis_formats::command::Id;

use super::call::{Call, Cells, Done, Output, Refusal, refuse};

/// When an expiry is set.
#[derive(Clone, Copy, Debug, Default)]
struct Conditions {
    if_none: bool,
    if_some: bool,
    if_later: bool,
    if_earlier: bool,
}

impl Conditions {
    fn parse(call: &Call<'_>) -> Result<Self, Refusal> {
        let mut own = Self::default();
        for at in 3..call.args.count() {
            match () {
                () if call.args.is(at, "nx") => own.if_none = true,
                () if call.args.is(at, "xx") => own.if_some = true,
                () if call.args.is(at, "gt") => own.if_later = true,
                () if call.args.is(at, "lt") => own.if_earlier = true,
                () => {
                    let option = String::from_utf8_lossy(call.args.get(at)).into_owned();
                    return Err(Cow::Owned(format!("ERR Unsupported option {option}")));
                }
            }
        }
        if own.if_none && (own.if_some || own.if_later || own.if_earlier) {
            return refuse("ERR NX and XX, GT or LT options at the same time are not compatible");
        }
        if own.if_later && own.if_earlier {
            return refuse("ERR GT and LT options at the same time are not compatible");
        }
        Ok(own)
    }

    /// `old`: the present expiry; 0: none.
    fn allow(&self, old: u64, new: i64) -> bool {
        let is_timed = old != 0;
        let old = old as i64;
        !(self.if_none && is_timed
            || self.if_some && !is_timed
            || self.if_later && (!is_timed || new <= old)
            || self.if_earlier && is_timed && new >= old)
    }
}

/// The time of EXPIRE, PEXPIRE, EXPIREAT, PEXPIREAT in milliseconds since 1970.
fn time(call: &Call<'_>) -> Result<i64, Refusal> {
    let in_seconds = matches!(call.command.id, Id::Expire | Id::Expireat);
    let is_relative = matches!(call.command.id, Id::Expire | Id::Pexpire);
    let value = call.integer(2)?.checked_mul(if in_seconds { 1000 } else { 1 });
    let base = if is_relative { call.now_ms as i64 } else { 0 };
    value.and_then(|own| own.checked_add(base)).ok_or_else(|| call.bad_expiry())
}

pub(super) fn expire(call: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let conditions = Conditions::parse(call)?;
    let at = time(call)?;
    let cell = cells.key(0);
    if !cell.exists() || !conditions.allow(cell.expiry(), at) {
        out.boolean(false);
    } else if at <= call.now_ms as i64 {
        cell.delete();
        out.event(b'g', "del", 0);
        out.boolean(true);
    } else {
        cell.expire(at as u64);
        out.event(b'g', "expire", 0);
        out.boolean(true);
    }
    Ok(())
}

pub(super) fn persist(_: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let cell = cells.key(0);
    let is_timed = cell.exists() && cell.expiry() != 0;
    if is_timed {
        cell.expire(0);
        out.event(b'g', "persist", 0);
    }
    out.boolean(is_timed);
    Ok(())
}

/// TTL, PTTL, EXPIRETIME, PEXPIRETIME.
pub(super) fn ttl(call: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let cell = cells.at(0);
    out.note_read(0, cell.exists());
    if !cell.exists() {
        out.integer(-2);
        return Ok(());
    }
    if cell.expiry() == 0 {
        out.integer(-1);
        return Ok(());
    }
    let is_absolute = matches!(call.command.id, Id::Expiretime | Id::Pexpiretime);
    let in_seconds = matches!(call.command.id, Id::Ttl | Id::Expiretime);
    let since = if is_absolute { 0 } else { call.now_ms };
    let ms = cell.expiry().saturating_sub(since);
    out.integer(if in_seconds { (ms + 500) / 1000 } else { ms } as i64);
    Ok(())
}

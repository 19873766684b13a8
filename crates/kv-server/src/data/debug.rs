//! Subcommands of DEBUG that need the data.

use redis_formats::command::Id;
use redis_formats::number::parse_i64;
use verbs::Nic;

use super::Data;
use super::run::text_of;
use crate::context::Context;

/// Maximum length of the text of DEBUG STRINGMATCH-LEN.
const MATCHED_MAX: usize = 1 << 20;

pub(super) async fn execute<N: Nic>(cx: &mut Context<'_, Data<N>>) {
    debug_assert_eq!(cx.command.id, Id::Debug);
    let count = cx.args.count();
    let data = cx.store;
    if cx.args.is(1, "reload") {
        match reload(cx).await {
            Ok(()) => cx.reply().ok(),
            Err(text) => cx.error(format!("ERR {text}")),
        }
    } else if cx.args.is(1, "flushall") && count == 2 {
        data.abort_save();
        match data.store.flush_all().await {
            Ok(()) => cx.reply().ok(),
            Err(error) => cx.error(text_of(&error)),
        }
    } else if cx.args.is(1, "object") && count == 3 {
        object(cx).await;
    } else if cx.args.is(1, "stringmatch-len") && count == 4 {
        let pattern = cx.args.get(3);
        let len = parse_i64(cx.args.get(2)).and_then(|len| usize::try_from(len).ok());
        let Some(len) = len.filter(|len| *len <= MATCHED_MAX) else {
            return cx.error(format!("ERR the length must be between 0 and {MATCHED_MAX}"));
        };
        let is_match = redis_formats::glob::matches(pattern, &vec![b'a'; len]);
        cx.reply().integer(is_match.into());
    } else {
        crate::commands::unknown_debug(cx);
    }
}

/// Describes a value as Redis does. The address is that of no object.
async fn object<N: Nic>(cx: &mut Context<'_, Data<N>>) {
    let (store, db) = (&cx.store.store, cx.store.state.physical(cx.session.db));
    let key = cx.args.get(2);
    let (value, worth) = match (store.get(db, key).await, store.worth(db, key).await) {
        (Ok(Some(value)), Ok(worth)) => (value, worth.unwrap_or(0)),
        (Ok(None), _) => return cx.error("ERR no such key"),
        (Err(error), _) | (_, Err(error)) => return cx.error(text_of(&error)),
    };
    let text = format!(
        "Value at:0x0 refcount:1 encoding:{} serializedlength:{} lru:0 lru_seconds_idle:{worth}",
        super::keys::encoding(&value),
        value.len()
    );
    cx.reply().simple(&text);
}

/// Saves, unless told not to, and loads the file into an empty store.
async fn reload<N: Nic>(cx: &mut Context<'_, Data<N>>) -> Result<(), String> {
    let data = cx.store;
    let is = |word| (2..cx.args.count()).any(|at| cx.args.is(at, word));
    if !is("nosave") {
        if !data.begin_save(cx.now_ms()) {
            return Err("a save is in progress".to_owned());
        }
        data.save(cx.worker).await?;
    }
    if !is("noflush") {
        data.abort_save();
        data.store.flush_all().await.map_err(|error| text_of(&error))?;
    }
    data.load_file(cx.worker).await
}

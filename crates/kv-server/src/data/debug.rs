//! Subcommands of DEBUG that need the data.

use redis_formats::command::Id;
use verbs::Nic;

use super::Data;
use super::run::text_of;
use crate::context::Context;

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
    } else if cx.args.is(1, "stringmatch-len") && count == 4 {
        let pattern = cx.args.get(3);
        let text =
            vec![b'a'; redis_formats::number::parse_i64(cx.args.get(2)).unwrap_or(0) as usize];
        let is_match = redis_formats::glob::matches(pattern, &text);
        cx.reply().integer(is_match.into());
    } else {
        crate::commands::unknown_debug(cx);
    }
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

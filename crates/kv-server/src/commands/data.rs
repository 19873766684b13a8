//! Commands on data, and the work of the store in the background.

use std::time::Duration;

use redis_formats::command::{Command, Id};
use verbs::Nic;

use crate::context::Context;
use crate::data::Data;
use crate::dispatch::execute_one;
use crate::keyspace::Fact;
use crate::server::Server;
use crate::session::Queue;
use crate::worker::Worker;

/// Interval of the work in the background.
const INTERVAL: Duration = Duration::from_millis(100);

/// Executes a command on data.
pub(crate) async fn execute<N: Nic>(cx: &mut Context<'_, Data<N>>) {
    match cx.command.id {
        Id::Debug => super::debug::unknown(cx),
        _ => {
            let refusal = redis_formats::command::Refusal::Command;
            let args = cx.args;
            cx.reply().error_with(|out| refusal.text(&args, out));
        }
    }
}

/// Executes the commands of EXEC.
pub(crate) async fn execute_queue<N: Nic>(cx: &mut Context<'_, Data<N>>, queue: &Queue) {
    if cx.watches.iter().any(kv::Watch::is_changed) {
        return cx.reply().null_array();
    }
    cx.reply().array(queue.commands.len());
    for queued in &queue.commands {
        execute_one(&mut cx.of_queued(queued)).await;
    }
}

/// Evicts keys until the memory in use is below `maxmemory`.
pub(crate) async fn make_room<N: Nic>(data: &Data<N>, worker: &Worker, _: &Command) -> bool {
    let stats = data.store.stats();
    stats.usage.live + stats.usage.limbo <= worker.server.config.live.max_memory()
}

/// Loads the file of the configuration.
pub(crate) async fn load<N: Nic>(_: &Data<N>, _: &Worker) -> Result<(), String> {
    Ok(())
}

/// Works in the background until the server ends.
pub(crate) async fn maintain<N: Nic>(data: &Data<N>, worker: &Worker) {
    while !worker.server.is_ending() {
        worker.wait(INTERVAL).await;
        if worker.index == 0
            && let Err(error) = kv::blocks::Blocks::tend(data.store.blocks()).await
        {
            tracing::warn!(%error, "work in the background failed");
        }
    }
}

/// Saves before the end.
pub(crate) async fn finish<N: Nic>(
    _: &Data<N>,
    _: &Worker,
    save: Option<bool>,
) -> Result<(), String> {
    match save {
        Some(true) => Err("this version cannot save".to_owned()),
        _ => Ok(()),
    }
}

/// Fields of INFO on files.
pub(crate) fn persistence<N: Nic>(_: &Data<N>) -> Vec<Fact> {
    Vec::new()
}

/// A parameter has changed.
pub(crate) fn configured<N: Nic>(_: &Data<N>, _: &Server) {}

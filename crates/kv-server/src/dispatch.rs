//! Checks a request, queues or executes its command, and counts it.

use std::future::poll_fn;
use std::task::Poll;

use redis_formats::acl::Denied;
use redis_formats::command::bits::flag::{
    ADMIN, DENYOOM, LOADING, NO_AUTH, NO_MULTI, PUBSUB, SKIP_MONITOR, SKIP_SLOWLOG, WRITE,
};
use redis_formats::command::{Arguments, Command, Id, Refusal, is_http, lookup};
use redis_formats::reply::Protocol;

use crate::client::flag;
use crate::commands;
use crate::context::{Args, Context};
use crate::keyspace::Keyspace;
use crate::security_log;
use crate::server::is_publish;
use crate::session::{Queued, Session, Suppress};
use crate::slowlog::{self, Entry};
use crate::worker::Worker;

/// A request, and what its execution needs.
pub(crate) struct Request<'a, K: Keyspace> {
    pub args: Args<'a>,
    pub out: &'a mut Vec<u8>,
    pub session: &'a mut Session,
    pub watches: &'a mut K::Watches,
    pub worker: &'a Worker,
    pub store: &'a K,
}

const UNSAVED: &[u8] = b"MISCONF Redis is configured to save RDB snapshots, but it's currently \
    unable to persist to disk. Commands that may modify the data set are disabled, because this \
    instance is configured to report errors during writes if RDB snapshotting fails \
    (stop-writes-on-bgsave-error option). Please check the Redis logs for details about the RDB \
    error.";

/// Executes a request, or refuses it. An empty request has no reply.
pub(crate) async fn execute<K: Keyspace>(request: Request<'_, K>) {
    let Request { args, out, session, watches, worker, store } = request;
    if args.is_empty() {
        return;
    }
    if session.suppress == Suppress::Next {
        session.suppress = Suppress::This;
    }
    let begin = out.len();
    let mut is_message = false;
    match lookup(&args) {
        Err(refusal) => refuse(&refusal, &args, out, session, worker),
        Ok(command) => {
            session.client.note_command(command, worker.now_ms());
            let mut context = Context { command, args, out, session, watches, worker, store };
            admit(&mut context).await;
            is_message = is_confirmed_by_message(command.id) && out.get(begin) != Some(&b'-');
        }
    }
    if matches!(session.suppress, Suppress::All | Suppress::This) && !is_message {
        out.truncate(begin);
    }
    if session.suppress == Suppress::This {
        session.suppress = Suppress::No;
    }
}

/// Commands that are answered by a message, which CLIENT REPLY does not suppress.
fn is_confirmed_by_message(id: Id) -> bool {
    matches!(
        id,
        Id::Subscribe
            | Id::Psubscribe
            | Id::Ssubscribe
            | Id::Unsubscribe
            | Id::Punsubscribe
            | Id::Sunsubscribe
    )
}

/// Replies to a request that names no command, or has a wrong number of arguments.
fn refuse(
    refusal: &Refusal,
    args: &Args<'_>,
    out: &mut Vec<u8>,
    session: &mut Session,
    worker: &Worker,
) {
    if is_http(args.get(0)) {
        tracing::warn!(
            address = &*session.client.address,
            "a connection sent a request of HTTP and is closed: a web page may attack the server"
        );
        session.is_closing = true;
        return;
    }
    if let Refusal::Arity { command, .. } = refusal {
        worker.stats().of(command.id).rejected.add(1);
    }
    let begin = out.len();
    out.push(b'-');
    refusal.text(args, out);
    out.extend(b"\r\n");
    session.break_queue();
    count_error(&out[begin..], worker);
}

/// Checks whether the command may be executed now. Queues or executes it.
async fn admit<K: Keyspace>(context: &mut Context<'_, K>) {
    let command = context.command;
    let server = context.server();
    if !server.users.renew(&mut context.session.login) {
        // The user was deleted.
        return context.session.client.kill();
    }
    if let Some(text) = check_state(context) {
        return reject(context, &text);
    }
    if let Err(denied) = check_rights(context) {
        let mut text = Vec::new();
        denied.text(command, &mut text);
        return reject(context, &text);
    }
    if server.config.live.max_memory() > 0
        && !context.store.make_room(context.worker, command).await
        && needs_memory(context)
    {
        return reject(context, b"OOM command not allowed when used memory > 'maxmemory'.");
    }
    if context.store.is_save_broken() && stops(context) {
        return reject(context, UNSAVED);
    }
    if context.session.is_subscriber()
        && context.session.protocol == Protocol::Resp2
        && !is_for_subscribers(command.id)
    {
        let name = crate::client::full_name(command.id);
        let text = format!(
            "ERR Can't execute '{name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / \
             RESET are allowed in this context"
        );
        return reject(context, text.as_bytes());
    }
    if server.is_loading() && !command.has(LOADING) {
        return reject(context, b"LOADING Redis is loading the dataset in memory");
    }
    if !wait_for_pause(context).await {
        return;
    }
    let is_queued = context.session.queue.is_some() && !ends_queue(command.id);
    if is_queued {
        queue(context);
    } else if command.id == Id::Exec {
        exec(context).await;
    } else {
        execute_one(context).await;
    }
}

/// The error of a connection that may not execute the command, whoever its user is.
fn check_state<K: Keyspace>(context: &Context<'_, K>) -> Option<Vec<u8>> {
    let command = context.command;
    let session = &*context.session;
    if command.id == Id::Debug {
        let config = &context.server().config;
        let is_allowed = config.is("enable-debug-command", "yes")
            || config.is("enable-debug-command", "local") && commands::is_local(&session.client);
        if !is_allowed {
            return Some(
                b"ERR DEBUG command not allowed. If the enable-debug-command option is set to \
                  \"local\", you can run it from a local connection, otherwise you need to set \
                  this option in the configuration file, and then restart the server."
                    .to_vec(),
            );
        }
    }
    if !session.login.is_authenticated && !command.has(NO_AUTH) {
        return Some(b"NOAUTH Authentication required.".to_vec());
    }
    if session.queue.is_some() && command.has(NO_MULTI) {
        return Some(b"ERR Command not allowed inside a transaction".to_vec());
    }
    None
}

/// Returns whether the user may execute the command.
pub(crate) fn is_allowed<K: Keyspace>(context: &Context<'_, K>) -> bool {
    let login = &context.session.login;
    login.is_unrestricted || login.user.check(context.command, &context.args).is_ok()
}

/// Checks the rights of the user, and logs a refusal.
fn check_rights<K: Keyspace>(context: &Context<'_, K>) -> Result<(), Denied> {
    let session = &*context.session;
    if session.login.is_unrestricted {
        return Ok(());
    }
    let result = session.login.user.check(context.command, &context.args);
    if let Err(denied) = result {
        let (reason, object) = match denied {
            Denied::Command => ("command", crate::client::full_name(context.command.id).into()),
            Denied::Key(index) => ("key", context.args.get(index).to_vec()),
            Denied::Channel(index) => ("channel", context.args.get(index).to_vec()),
        };
        log_refusal(context, reason, object, &session.login.name);
    }
    result
}

/// Adds an entry to ACL LOG.
pub(crate) fn log_refusal<K: Keyspace>(
    context: &Context<'_, K>,
    reason: &'static str,
    object: Vec<u8>,
    user: &[u8],
) {
    let session = &*context.session;
    let in_transaction = session.queue.is_some() || session.in_exec;
    let mut client = Vec::new();
    session.client.describe(context.now_ms(), &mut client);
    let entry = security_log::Entry {
        count: 1,
        reason,
        context: if in_transaction { "multi" } else { "toplevel" },
        object,
        user: user.to_vec(),
        client,
        created_ms: 0,
        updated_ms: 0,
    };
    let limit = context.server().config.live.acl_log_entries();
    context.server().security_log.add(entry, limit, context.now_ms());
    context.worker.stats().denied.add(1);
}

/// Replies with an error before the execution.
fn reject<K: Keyspace>(context: &mut Context<'_, K>, text: &[u8]) {
    let begin = context.out.len();
    context.worker.stats().of(context.command.id).rejected.add(1);
    if context.command.id == Id::Exec {
        // An EXEC that is refused ends the transaction.
        context.session.take_queue();
        context.store.unwatch(context.watches);
        let abort = b"EXECABORT Transaction discarded because of: ";
        context.error([&abort[..], text].concat());
    } else {
        context.session.break_queue();
        context.error(text);
    }
    count_error(&context.out[begin..], context.worker);
}

/// Commands that RESP2 allows with subscriptions.
fn is_for_subscribers(id: Id) -> bool {
    is_confirmed_by_message(id) || matches!(id, Id::Ping | Id::Quit | Id::Reset)
}

/// Commands that a transaction executes at once.
fn ends_queue(id: Id) -> bool {
    matches!(id, Id::Exec | Id::Discard | Id::Multi | Id::Watch | Id::Quit | Id::Reset)
}

fn any_queued<K: Keyspace>(context: &Context<'_, K>, flags: u32) -> bool {
    let queue = context.session.queue.as_ref().filter(|_| context.command.id == Id::Exec);
    queue.is_some_and(|queue| queue.commands.iter().any(|own| own.command.has(flags)))
}

/// Returns whether a failed save holds the command back (`stop-writes-on-bgsave-error`). PING is
/// among those commands, so that clients which only look for the server learn of the failure.
fn stops<K: Keyspace>(context: &Context<'_, K>) -> bool {
    let (command, config) = (context.command, &context.server().config);
    let writes = command.has(WRITE) || any_queued(context, WRITE);
    (writes || command.id == Id::Ping)
        && config.is("stop-writes-on-bgsave-error", "yes")
        && !config.get("save").is_empty()
}

fn needs_memory<K: Keyspace>(context: &Context<'_, K>) -> bool {
    // A queue takes memory of this process, whatever its commands do.
    let is_queued = context.session.queue.is_some() && !ends_queue(context.command.id);
    context.command.has(DENYOOM) || is_queued || any_queued(context, DENYOOM)
}

/// Waits while a pause holds the command back. Returns false if the connection was ended.
async fn wait_for_pause<K: Keyspace>(context: &Context<'_, K>) -> bool {
    let (server, worker, client) = (context.server(), context.worker, &context.session.client);
    let writes = any_queued(context, WRITE);
    let holds = || server.pause.holds(context.command, writes, worker.now_ms());
    let Some(mut until_ms) = holds() else { return true };
    client.set(flag::PAUSED);
    let _rest = worker.rest();
    poll_fn(|cx| {
        if client.has(flag::KILLED) || server.is_ending() {
            return Poll::Ready(());
        }
        let Some(next_ms) = holds() else { return Poll::Ready(()) };
        until_ms = until_ms.max(next_ms);
        let rest_ms = until_ms.saturating_sub(worker.now_ms()).max(1);
        worker.timers.add(worker.elapsed_ns() + rest_ms * 1_000_000, cx.waker().clone());
        server.pause.register(cx.waker().clone());
        Poll::Pending
    })
    .await;
    client.clear(flag::PAUSED);
    !client.has(flag::KILLED) && !server.is_ending()
}

fn queue<K: Keyspace>(context: &mut Context<'_, K>) {
    let queued = Queued::new(context.command, &context.args);
    if let Some(queue) = &mut context.session.queue {
        queue.push(queued);
    }
    context.session.show_queue();
    context.reply().simple("QUEUED");
}

async fn exec<K: Keyspace>(context: &mut Context<'_, K>) {
    let (start, begin) = (context.worker.elapsed_ns(), context.out.len());
    match context.session.take_queue() {
        None => context.error("ERR EXEC without MULTI"),
        Some(queue) if queue.is_broken => {
            context.store.unwatch(context.watches);
            context.error("EXECABORT Transaction discarded because of previous errors.");
        }
        Some(queue) => {
            context.session.in_exec = true;
            K::execute_queue(context, &queue).await;
            context.session.in_exec = false;
            context.store.unwatch(context.watches);
            context.worker.note_freed(queue.bytes());
        }
    }
    show(context);
    settle(context, begin, start);
}

/// Executes a command that was admitted, and counts it. [`Keyspace::execute_queue`] calls this for
/// each command of a transaction.
pub async fn execute_one<K: Keyspace>(context: &mut Context<'_, K>) {
    let (start, begin) = (context.worker.elapsed_ns(), context.out.len());
    match check_in_exec(context) {
        Err(denied) => {
            let mut text = Vec::new();
            denied.text_in_exec(&mut text);
            context.error(text);
        }
        Ok(()) => {
            commands::execute(context).await;
            show(context);
        }
    }
    settle(context, begin, start);
}

/// Rights may have changed since a command was queued.
fn check_in_exec<K: Keyspace>(context: &mut Context<'_, K>) -> Result<(), Denied> {
    if context.session.in_exec { check_rights(context) } else { Ok(()) }
}

/// Shows an executed command to MONITOR: the commands of a transaction before EXEC, as Redis does.
fn show<K: Keyspace>(context: &Context<'_, K>) {
    let server = context.server();
    if server.monitors.is_any() && !context.command.has(SKIP_MONITOR | ADMIN) {
        let session = &*context.session;
        let limit = server.config.live.output_limit("pubsub");
        let redacted = |index| is_secret(context.command, &context.args, index);
        server.monitors.show(&session.client, session.db, &context.args, redacted, limit);
    }
}

/// Counts an execution whose reply begins at `begin`.
fn settle<K: Keyspace>(context: &mut Context<'_, K>, begin: usize, start_ns: u64) {
    let (command, worker, server) = (context.command, context.worker, context.server());
    let live = &server.config.live;
    let ns = worker.elapsed_ns() - start_ns;
    let stats = worker.stats();
    stats.commands.add(1);
    stats.of(command.id).executed(ns, live.tracks_latency());
    if context.out.get(begin) == Some(&b'-') {
        stats.of(command.id).failed.add(1);
        count_error(&context.out[begin..], worker);
    }
    let us = (ns / 1000) as i64;
    if live.slow_us() >= 0 && us >= live.slow_us() && !command.has(SKIP_SLOWLOG) {
        note_slow(context, us as u64);
    }
    let ms = ns / 1_000_000;
    if live.latency_ms() > 0 && ms >= live.latency_ms() {
        let is_fast = command.has(redis_formats::command::bits::flag::FAST);
        let event = if is_fast { "fast-command" } else { "command" };
        server.latency.add(event, context.now_ms() / 1000, ms);
    }
    // Messages of this command come before its reply, as clients of RESP3 expect.
    let precedes = (!command.has(PUBSUB) || is_publish(command.id))
        && context.session.suppress == Suppress::No;
    if precedes && !context.session.in_exec && context.session.client.has(flag::MAIL) {
        let reply = context.out.len() - begin;
        context.session.client.take_mail(context.out);
        context.out[begin..].rotate_left(reply);
    }
}

fn note_slow<K: Keyspace>(context: &Context<'_, K>, us: u64) {
    let server = context.server();
    let redacted = |index| is_secret(context.command, &context.args, index);
    let entry = Entry {
        id: 0,
        at_s: context.now_ms() / 1000,
        us,
        arguments: slowlog::shorten(&context.args, redacted),
        address: context.session.client.address.clone(),
        name: context.session.client.name(),
    };
    server.slowlog.add(entry, server.config.live.slow_entries());
}

/// Returns whether an argument is a password.
fn is_secret(command: &Command, args: &Args<'_>, index: usize) -> bool {
    match command.id {
        Id::Auth => index > 0,
        Id::Hello => {
            let is_auth = |at: usize| at > 0 && args.is(at, "auth");
            index >= 2 && (is_auth(index - 1) || is_auth(index - 2))
        }
        Id::AclSetuser => index > 1,
        Id::ConfigSet => {
            let name = args.get(index.saturating_sub(1));
            let secrets = ["requirepass", "masterauth", "masteruser"];
            index > 2 && secrets.iter().any(|own| name.eq_ignore_ascii_case(own.as_bytes()))
        }
        _ => false,
    }
}

/// Counts an error reply by its code.
fn count_error(reply: &[u8], worker: &Worker) {
    worker.stats().errors.add(1);
    let text = reply.strip_prefix(b"-").unwrap_or(reply);
    let code = text.split(|byte| *byte == b' ' || *byte == b'\r').next().unwrap_or_default();
    let mut errors = worker.server.errors.lock();
    // Texts of users (DEBUG ERROR) could be many.
    if errors.len() < 128 || errors.contains_key(code) {
        *errors.entry(code.to_vec()).or_default() += 1;
    }
}

//! A store in local memory for tests of the server: GET, SET, DEL, APPEND, WATCH.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kv_server::context::Context;
use kv_server::execute_one;
use kv_server::keyspace::{Fact, Keyspace, Outages, Size, Usage};
use kv_server::server::Server;
use kv_server::session::Queue;
use kv_server::worker::Worker;
use parking_lot::Mutex;
use redis_formats::command::{Command, Id};

type Key = (u8, Vec<u8>);

/// The store.
#[derive(Default)]
pub struct Map {
    values: Mutex<BTreeMap<Key, Vec<u8>>>,
    changes: Mutex<BTreeMap<Key, u64>>,
    limit: AtomicU64,
    /// `finish` fails.
    pub refuses_to_end: AtomicBool,
    /// Calls of `finish`.
    pub ends: AtomicU64,
}

impl Map {
    fn change(&self, db: u8, key: &[u8], value: Option<Vec<u8>>) -> bool {
        let key = (db, key.to_vec());
        *self.changes.lock().entry(key.clone()).or_default() += 1;
        match value {
            Some(value) => self.values.lock().insert(key, value).is_some(),
            None => self.values.lock().remove(&key).is_some(),
        }
    }

    fn version(&self, db: u8, key: &[u8]) -> u64 {
        self.changes.lock().get(&(db, key.to_vec())).copied().unwrap_or(0)
    }
}

impl Keyspace for Map {
    type Watches = Vec<(Key, u64)>;

    async fn execute(cx: &mut Context<'_, Self>) {
        let (store, db, key) = (cx.store, cx.session.db, cx.args.get(1));
        match cx.command.id {
            Id::Get => {
                let value = store.values.lock().get(&(db, key.to_vec())).cloned();
                cx.reply().bulk_or_null(value.as_deref());
            }
            Id::Set => {
                store.change(db, key, Some(cx.args.get(2).to_vec()));
                cx.notify(b'$', "set", db, key);
                cx.reply().ok();
            }
            Id::Strlen => {
                let len = store.values.lock().get(&(db, key.to_vec())).map_or(0, Vec::len);
                cx.reply().integer(len as i64);
            }
            Id::Del => {
                let was_there = store.change(db, key, None);
                cx.reply().integer(was_there.into());
            }
            Id::Watch => {
                for key in cx.args.from(1) {
                    cx.watches.push(((db, key.to_vec()), store.version(db, key)));
                }
                cx.reply().ok();
            }
            _ => cx.error("ERR not in this test"),
        }
    }

    async fn execute_queue(cx: &mut Context<'_, Self>, queue: &Queue) {
        let is_changed =
            cx.watches.iter().any(|((db, key), since)| cx.store.version(*db, key) != *since);
        if is_changed {
            return cx.reply().null_array();
        }
        cx.reply().array(queue.commands.len());
        for queued in &queue.commands {
            execute_one(&mut cx.of_queued(queued)).await;
        }
    }

    async fn read_ahead<'k>(
        &self,
        _: &Worker,
        _: u8,
        _: impl Iterator<Item = &'k [u8]>,
        _: &mut kv::Ahead,
    ) {
    }

    fn unwatch(&self, watches: &mut Self::Watches) {
        watches.clear();
    }

    async fn make_room(&self, _: &Worker, _: &Command) -> bool {
        self.usage().used <= self.limit.load(Ordering::Relaxed)
    }

    async fn load(&self, _: &Worker) -> Result<(), String> {
        Ok(())
    }

    async fn maintain(&self, worker: &Worker) {
        while !worker.server.is_ending() {
            worker.wait(Duration::from_secs(3600)).await;
        }
    }

    async fn finish(&self, _: &Worker, _: Option<bool>) -> Result<(), String> {
        self.ends.fetch_add(1, Ordering::Relaxed);
        match self.refuses_to_end.load(Ordering::Relaxed) {
            true => Err("the test refuses".to_owned()),
            false => Ok(()),
        }
    }

    fn poll(&self) -> usize {
        0
    }

    fn park(&self, _: Duration) {}

    fn size(&self, db: u8) -> Size {
        let keys = self.values.lock().keys().filter(|key| key.0 == db).count() as u64;
        Size { keys, ..Size::default() }
    }

    fn usage(&self) -> Usage {
        let used = self.values.lock().values().map(|value| value.len() as u64).sum();
        Usage { used, held: used, payload: used, ..Usage::default() }
    }

    fn persistence(&self) -> Vec<Fact> {
        vec![Fact { name: "rdb_saves", value: "7".to_owned() }]
    }

    fn is_save_broken(&self) -> bool {
        false
    }

    fn outages(&self) -> Outages {
        Outages::default()
    }

    fn facts(&self) -> Vec<Fact> {
        vec![Fact { name: "pool_chunks", value: "3".to_owned() }]
    }

    fn configured(&self, server: &Server) {
        self.limit.store(server.config.live.max_memory(), Ordering::Relaxed);
    }
}

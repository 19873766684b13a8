//! Saves and loads the data as a file in Redis's format.
//!
//! A save has the data of one time, without a copy of the process. It begins while no command
//! runs, and then reads subtable after subtable, each while no writer is inside. A command that
//! changes a key behind the save's position first keeps the key as it was; the save writes that.

use std::io::BufReader;
use std::path::PathBuf;
use std::sync::atomic::{Ordering, fence};

use kv::{Expiry, SetOptions};
use redis_formats::rdb::{Event, Limits, Reader, Value};
use units::files;
use verbs::Nic;

use super::Data;
use super::save_file::{Entries, Part, Target};
use crate::keyspace::{DATABASES, Fact};
use crate::server::Server;
use crate::worker::Worker;

pub(super) const BUFFER: usize = 1 << 20;

/// The path of the file.
pub(super) fn path(server: &Server) -> PathBuf {
    PathBuf::from(server.config.get("dir")).join(server.config.get("dbfilename"))
}

impl<N: Nic> Data<N> {
    /// Begins a save. The caller runs alone, so that all databases are those of one time.
    pub(super) fn begin_save(&self, now_ms: u64) -> bool {
        let saves = &self.state.saves;
        if !saves.begin() {
            return false;
        }
        saves.progress.lock().next = [Some(0); DATABASES];
        saves.since_ms.store(now_ms, Ordering::Relaxed);
        saves.tried_s.store(now_ms / 1000, Ordering::Relaxed);
        true
    }

    /// Writes the file of a save that has begun. Other commands may run meanwhile.
    pub(super) async fn save(&self, worker: &Worker) -> Result<(), String> {
        let saves = &self.state.saves;
        let (since_ms, changes) =
            (saves.since_ms.load(Ordering::Relaxed), self.state.changes.load(Ordering::Relaxed));
        let result = self.write_file(worker, since_ms).await;
        saves.end();
        let now_ms = worker.now_ms();
        saves.seconds.store(now_ms.saturating_sub(since_ms) / 1000, Ordering::Relaxed);
        match &result {
            Ok(()) => {
                saves.has_failed.store(false, Ordering::Relaxed);
                saves.count.fetch_add(1, Ordering::Relaxed);
                saves.last_s.store(now_ms / 1000, Ordering::Relaxed);
                self.state.changes.fetch_sub(changes, Ordering::Relaxed);
            }
            Err(error) => tracing::error!(error, "saving the data failed"),
        }
        result
    }

    async fn write_file(&self, worker: &Worker, now_ms: u64) -> Result<(), String> {
        let target = Target::create(&worker.server, now_ms)?;
        let result = self.write_databases(worker, &target).await;
        // A thread that has failed ends the save, and knows the reason.
        target.finish(worker, result.is_ok()).await.and(result)
    }

    async fn write_databases(&self, worker: &Worker, target: &Target) -> Result<(), String> {
        // The order at the begin of the save. SWAPDB ends a running save.
        let order: [u8; DATABASES] = std::array::from_fn(|db| self.state.physical(db as u8));
        for (logical, db) in order.into_iter().enumerate() {
            let has_images = {
                let progress = self.state.saves.progress.lock();
                progress.images.keys().any(|(own, ..)| *own == db)
            };
            if self.store.is_empty(db) && !has_images {
                self.state.saves.progress.lock().next[usize::from(db)] = None;
            } else {
                let (number, keys) = (logical as u64, self.store.len(db));
                target.send(worker, Part::Database { number, keys }).await?;
                self.write_database(worker, target, db).await?;
            }
            // A flush leaves no key to read, so the look at the flag comes behind the keys.
            self.check_save()?;
        }
        Ok(())
    }

    async fn write_database(&self, worker: &Worker, target: &Target, db: u8) -> Result<(), String> {
        let saves = &self.state.saves;
        let mut next = Some(0);
        while let Some(from) = next {
            self.check_save()?;
            let mut entries = Entries::default();
            let each = |own: kv::Visited<'_>| {
                let name = (db, own.position, own.key.to_vec());
                if !saves.progress.lock().images.contains_key(&name) {
                    entries.push(own.key, own.value, own.expiry);
                }
            };
            let walked = self.store.walk(db, from, each, |end| {
                saves.progress.lock().next[usize::from(db)] = end;
                next = end;
            });
            walked.await.map_err(|error| error.to_string())?;
            self.take_images(db, next, &mut entries);
            target.send(worker, Part::Entries(entries)).await?;
            worker.yield_now().await;
        }
        Ok(())
    }

    /// Fails if a flush or SWAPDB has come since the begin of the save.
    fn check_save(&self) -> Result<(), String> {
        // A save that has seen keys missing sees the flag.
        fence(Ordering::Acquire);
        match self.state.saves.is_aborted.load(Ordering::Relaxed) {
            true => Err("saving: a flush or SWAPDB came; save again".to_owned()),
            false => Ok(()),
        }
    }

    /// Moves the images of `db` in front of position `end` to `entries`.
    fn take_images(&self, db: u8, end: Option<u64>, entries: &mut Entries) {
        let images = {
            let mut progress = self.state.saves.progress.lock();
            let mut own = progress.images.split_off(&(db, 0, Vec::new()));
            let bound = end.map_or((db + 1, 0, Vec::new()), |end| (db, end, Vec::new()));
            let mut behind = own.split_off(&bound);
            progress.images.append(&mut behind);
            own
        };
        for ((_, _, key), image) in images {
            if let Some((value, expiry)) = image {
                entries.push(&key, &value, expiry);
            }
        }
    }

    /// Loads the file, if there is one.
    pub(super) async fn load_file(&self, worker: &Worker) -> Result<(), String> {
        // As in Redis, the start counts as a save.
        self.state.saves.last_s.store(worker.now_ms() / 1000, Ordering::Relaxed);
        let path = path(&worker.server);
        let at = |cause: &dyn std::fmt::Display| {
            let path = path.display();
            format!("loading {path}: {cause}; repair the file, or move it away")
        };
        let file = match files::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(at(&error)),
        };
        let limits = Limits { value: worker.server.config.live.bulk_max() };
        let input = BufReader::with_capacity(BUFFER, file);
        let mut reader = Reader::new(input, limits).map_err(|error| at(&error))?;
        let skips = worker.server.config.is("rdb-skip-unknown", "yes");
        let (mut db, mut loaded, mut expired, mut skipped) = (0, 0_u64, 0_u64, 0_u64);
        while let Some(event) = reader.next().map_err(|error| at(&error))? {
            let entry = match event {
                Event::Database(number) => {
                    db = u8::try_from(number).unwrap_or(u8::MAX);
                    if usize::from(db) >= DATABASES && !skips {
                        return Err(at(&format!("database {number} is above 15")));
                    }
                    continue;
                }
                Event::Entry(entry) => entry,
                _ => continue,
            };
            if skips && (usize::from(db) >= DATABASES || matches!(entry.value, Value::Skipped(_))) {
                skipped += 1;
                continue;
            }
            let Value::String(value) = entry.value else {
                let Value::Skipped(kind) = entry.value else { continue };
                let key = String::from_utf8_lossy(entry.key).into_owned();
                return Err(at(&format!(
                    "the key {key:?} has the type {kind}, which is absent here; start with \
                     --rdb-skip-unknown to load the other keys"
                )));
            };
            let expiry = match entry.meta.expires_ms {
                None => Expiry::Never,
                Some(ms) if ms <= worker.now_ms() as i64 => {
                    expired += 1;
                    continue;
                }
                Some(ms) => Expiry::At(ms as u64),
            };
            let options = SetOptions { expiry, ..SetOptions::default() };
            let physical = self.state.physical(db);
            self.store
                .set(physical, entry.key, value, options)
                .await
                .map_err(|error| at(&error))?;
            loaded += 1;
            if loaded.is_multiple_of(256) {
                worker.yield_now().await;
            }
        }
        let saves = &self.state.saves;
        saves.loaded.store(loaded, Ordering::Relaxed);
        saves.loaded_expired.store(expired, Ordering::Relaxed);
        saves.loaded_without.store(skipped, Ordering::Relaxed);
        if skipped > 0 {
            tracing::warn!(
                file = %path.display(),
                loaded,
                skipped,
                "keys of other types, or of databases above 15, were left out; the next save \
                 replaces the file without them, so keep a copy"
            );
        }
        if loaded + expired > 0 {
            tracing::info!(file = %path.display(), loaded, expired, "loaded the data");
        }
        Ok(())
    }

    /// Ends a save whose data a flush or SWAPDB takes away.
    pub(super) fn abort_save(&self) {
        if self.state.saves.is_running() {
            self.state.saves.is_aborted.store(true, Ordering::Relaxed);
            fence(Ordering::Release);
        }
    }

    /// Fields of INFO.
    pub(super) fn facts_of_saves(&self) -> Vec<Fact> {
        let saves = &self.state.saves;
        let fact = |name, value: u64| Fact { name, value: value.to_string() };
        let load = |own: &std::sync::atomic::AtomicU64| own.load(Ordering::Relaxed);
        let status = if saves.has_failed.load(Ordering::Relaxed) { "err" } else { "ok" };
        vec![
            fact("rdb_changes_since_last_save", load(&self.state.changes)),
            fact("rdb_bgsave_in_progress", saves.is_running().into()),
            fact("rdb_last_save_time", load(&saves.last_s)),
            Fact { name: "rdb_last_bgsave_status", value: status.to_owned() },
            fact("rdb_last_bgsave_time_sec", load(&saves.seconds)),
            fact("rdb_saves", load(&saves.count)),
            fact("rdb_last_load_keys_expired", load(&saves.loaded_expired)),
            fact("rdb_last_load_keys_skipped", load(&saves.loaded_without)),
            fact("rdb_last_load_keys_loaded", load(&saves.loaded)),
        ]
    }
}

/// Reads `save`: pairs of seconds and changes.
pub(super) fn points(server: &Server) -> Vec<(u64, u64)> {
    let text = server.config.get("save");
    let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    numbers.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
}

#[cfg(test)]
mod tests {
    use pool::Pool;

    use super::*;

    fn data() -> Data {
        let settings = pool::Settings { chunk_bytes: 64 << 10, ..Default::default() };
        let pool = Pool::embedded(pool::Settings { donate_bytes: 4 << 20, ..settings }).unwrap();
        Data::create(pool, heap::Settings::default(), kv::Settings::default()).unwrap()
    }

    /// The key at the position of the save is not saved yet, and the one in front of it is.
    #[test]
    fn images_are_of_the_keys_from_the_position_on() {
        let data = data();
        let keep = |key: &[u8]| data.state.keep_image(&data.store, 0, key, Some(b"old"), 7);
        let count = || data.state.saves.progress.lock().images.len();
        let taken = |end| {
            let mut entries = Entries::default();
            data.take_images(0, end, &mut entries);
            entries.count()
        };
        keep(b"key");
        assert_eq!(count(), 0, "no save runs");
        assert!(data.begin_save(1) && !data.begin_save(1));
        let position = data.store.position(b"key");
        for (next, kept) in [
            (Some(position), 1),
            (Some(position + 1), 0),
            (Some(position - 1), 1),
            (Some(0), 1),
            (None, 0),
        ] {
            let mut progress = data.state.saves.progress.lock();
            progress.images.clear();
            progress.next[0] = next;
            drop(progress);
            keep(b"key");
            // The first image of a key counts.
            keep(b"key");
            assert_eq!(count(), kept, "{next:?}");
        }
        data.state.saves.progress.lock().next[0] = Some(0);
        keep(b"key");
        data.state.keep_image(&data.store, 1, b"key", None, 0);
        assert_eq!((taken(Some(position)), count()), (0, 2), "in front of the position");
        assert_eq!((taken(Some(position + 1)), count()), (1, 1), "another database");
        data.state.saves.end();
        assert_eq!(count(), 0);
    }

    #[test]
    fn save_sees_a_flush_at_any_time() {
        let data = data();
        data.abort_save();
        assert!(data.begin_save(1));
        assert_eq!(data.check_save(), Ok(()));
        data.abort_save();
        assert!(data.check_save().unwrap_err().contains("a flush or SWAPDB came"));
        data.state.saves.end();
        assert!(data.begin_save(1));
        assert_eq!(data.check_save(), Ok(()));
    }
}

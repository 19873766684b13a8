//! Creation of a store, and of a database's directory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use super::access::Steps;
use super::atomically::Journal;
use super::cache::Cache;
use super::database::{Database, Directory};
use super::image::{Image, entry_of, root_word};
use super::scratch::Buffers;
use super::trips::{Counters, Operation};
use super::{Form, Settings, Store};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::hash::{Hasher, SECRET_BYTES};
use crate::layout::root::{DATABASES, DirectoryRoot, Fixed, Mode, ROOT_BYTES, Root};
use crate::layout::table::{BucketWord, Header, Shape};
use crate::place::Place;
use crate::reach::{Reach, Step};
use crate::table::{Budget, Table};
use crate::ticket::Tickets;

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Creates an empty store. [`Store::root`] is the place by which a successor finds the store.
    pub async fn create(
        reach: R,
        blocks: B,
        environment: E,
        settings: Settings,
    ) -> Result<Self, Error> {
        let slab = blocks.slab();
        let groups = settings.groups.map_or(Shape::groups_of(slab), u32::from);
        if settings.stripe_bits > 6 {
            return Err(Error::Setting("a store has at most 64 stripes; use fewer stripe bits"));
        }
        let mut secret = [0; SECRET_BYTES];
        for word in secret.chunks_exact_mut(8) {
            word.copy_from_slice(&environment.secret().to_be_bytes());
        }
        let place = blocks.allocate(0, ROOT_BYTES as u32).await?;
        let stripes = 1 << settings.stripe_bits;
        let fixed = Fixed {
            mode: Mode::Alone,
            stripe_bits: settings.stripe_bits,
            partition: 0,
            groups: groups as u16,
            slab,
            slots: (0, 16383),
            epochs: Place::default(),
            secret,
        };
        let directories = [DirectoryRoot::default(); DATABASES];
        let journal = Place::default();
        let mut root = Root { fixed, directories, generation: 1, journal };
        let mut store = Self::with(reach, blocks, environment, settings, place, &root)?;
        let mut owned = store.owned();
        root.journal = owned.allocate(0, 8 * stripes).await?;
        let mut places = Vec::new();
        for stripe in 0..stripes {
            places.push(owned.allocate(stripe, 8).await?);
        }
        owned.keep();
        drop(owned);
        store.write_root(&root, &places).await?;
        store.journal = Journal::new(places);
        store.reserve_records().await?;
        Ok(store)
    }

    /// Writes the root, and an empty journal whose stripes have their words at `places`.
    async fn write_root(&self, root: &Root, places: &[Place]) -> Result<(), Error> {
        let trip = self.trip(Operation::Maintain);
        let (bytes, empty) = (root.encode(), [0; 8]);
        let list: Vec<u8> = places.iter().flat_map(|place| place.bits().to_be_bytes()).collect();
        let mut steps: Steps<'_> =
            places.iter().map(|place| Step::Write { at: place.at(0), from: &empty }).collect();
        steps.push(Step::Write { at: root.journal.at(0), from: &list });
        steps.push(Step::Write { at: self.root.at(0), from: &bytes });
        self.run(&trip, &mut steps).await
    }

    /// A store with the sizes and the secret of `root`, and without directories.
    pub(super) fn with(
        reach: R,
        blocks: B,
        environment: E,
        settings: Settings,
        place: Place,
        root: &Root,
    ) -> Result<Self, Error> {
        let slab = blocks.slab();
        if root.fixed.slab != slab {
            return Err(Error::Setting(
                "the slabs differ from the root's; use the same chunk size",
            ));
        }
        let shape = Shape::new(root.fixed.groups.into(), slab);
        let Some(shape) = shape else {
            return Err(Error::Setting(
                "a subtable fits no slab; use fewer groups or larger chunks",
            ));
        };
        let settings = Settings { stripe_bits: root.fixed.stripe_bits, ..settings };
        let cache_bytes =
            if settings.mirror && settings.form == Form::Fused { settings.cache_bytes } else { 0 };
        let index_cache = settings.index_cache;
        let counts_uses = AtomicBool::new(settings.measure == crate::uses::Measure::Frequency);
        Ok(Self {
            reach,
            blocks,
            environment,
            cache: Cache::new(cache_bytes),
            mirrors: Budget::new(index_cache),
            settings,
            root: place,
            generation: root.generation,
            journal: Journal::default(),
            hasher: Hasher::new(&root.fixed.secret),
            shape,
            slab,
            databases: std::array::from_fn(|number| Database::new(number as u8)),
            tickets: Tickets::new(),
            watches: Arc::default(),
            due: super::sweep::Due::default(),
            buffers: Buffers::default(),
            counters: Counters::default(),
            sequence: AtomicU64::new(1),
            interrupted: AtomicBool::new(false),
            counts_uses,
            removed: super::stats::Removed::default(),
            forgotten: AtomicU32::new(0),
        })
    }

    /// Gives a database its first directory, with one subtable in each stripe.
    pub(super) async fn begin_database(&self, db: u8) -> Result<(), Error> {
        let database = &self.databases[usize::from(db)];
        let _structure = database.structure.close().await;
        if database.directory.read().is_some() {
            return Ok(());
        }
        let trip = self.trip(Operation::Maintain);
        let depth = u32::from(self.settings.stripe_bits);
        let mut owned = self.owned();
        let mut tables: Vec<Arc<Table>> = Vec::new();
        let mut images = Vec::new();
        for stripe in 0..1_u32 << depth {
            let spot = self.allocate_table(&mut owned, stripe).await?;
            let prefix = crate::hash::prefix(u64::from(stripe) << (63 - depth) << 1, depth);
            let word = BucketWord { depth, prefix, ..BucketWord::default() };
            let table = self.new_table(spot, db, word, true);
            let header = Header { db, whole: word, sequence: table.sequence };
            images.push(Image::new(&table.spot, header, &vec![0; self.shape.slots()]));
            tables.push(table);
        }
        let entries = tables.iter().map(|table| entry_of(table, table.local.lock().word));
        let written = self.encode_directory(&mut owned, depth, entries).await?;
        let mut steps: Steps<'_> = written.write_all();
        for (table, image) in tables.iter().zip(&images) {
            steps.extend(image.write_all(&table.spot));
        }
        self.run(&trip, &mut steps).await?;
        let directory =
            Directory { depth, header: written.header, pieces: written.pieces.clone(), tables };
        let new = directory.root().word();
        owned.keep();
        if self.swap(&trip, root_word(self.root, db), 0, new).await? != 0 {
            self.lost_root(&trip, db).await?;
        }
        *database.directory.write() = Some(directory);
        Ok(())
    }

    /// An error after a CAS on a root's word found another word.
    pub(super) async fn lost_root(
        &self,
        trip: &super::trips::Trip<'_>,
        db: u8,
    ) -> Result<(), Error> {
        let at = root_word(self.root, db);
        self.lost_swap(trip, at, true).await?;
        self.interrupted.store(true, std::sync::atomic::Ordering::Relaxed);
        Err(Error::Diverged(at))
    }
}

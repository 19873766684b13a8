//! Creation and opening of a shared store.

use std::sync::Arc;

use parking_lot::Mutex;

use super::epochs::{Epochs, LINE, clients_of};
use super::members::register;
use super::words::PLACE_END;
use super::{SharedSettings, SharedStore};
use crate::blocks::SharedBlocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::hash::{Hasher, SECRET_BYTES};
use crate::layout::put;
use crate::layout::root::{DATABASES, DirectoryRoot, Fixed, Mode, ROOT_BYTES, Root};
use crate::layout::table::Shape;
use crate::place::Place;
use crate::reach::{Reach, Step};
use crate::region::RegionBlocks;
use crate::store::scratch::Buffers;
use crate::store::trips::Counters;

/// The first epoch. Epochs of clients that are there are not 0.
const FIRST: u64 = 1;

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// Creates an empty index, and its first client. Other clients open the index by
    /// [`SharedStore::root`].
    pub async fn create(
        reach: R,
        blocks: B,
        environment: E,
        settings: SharedSettings,
    ) -> Result<Self, Error> {
        let slab = blocks.slab();
        let groups = settings.groups.map_or(Shape::groups_of(slab), u32::from);
        let mut secret = [0; SECRET_BYTES];
        for word in secret.chunks_exact_mut(8) {
            word.copy_from_slice(&environment.secret().to_be_bytes());
        }
        let place = blocks.allocate(ROOT_BYTES as u32).await?;
        let lines = LINE * (1 + clients_of(slab));
        let epochs = blocks.allocate(lines as u32).await?;
        let fixed = Fixed {
            mode: Mode::Shared,
            stripe_bits: 0,
            partition: 0,
            groups: groups as u16,
            slab,
            slots: (0, 16383),
            epochs,
            secret,
        };
        let directories = [DirectoryRoot::default(); DATABASES];
        let root = Root { fixed, directories, generation: 1, journal: Place::default() };
        shape_of(&root, slab)?;
        let mut block = vec![0; lines];
        put(&mut block, 0, FIRST);
        let bytes = root.encode();
        let mut steps = [
            Step::Write { at: epochs.at(0), from: &block },
            Step::Write { at: place.at(0), from: &bytes },
        ];
        reach.run(&mut steps).await?;
        Self::open(reach, blocks, environment, settings, place).await
    }

    /// Opens the index with its root at `place`, as a further client.
    pub async fn open(
        reach: R,
        blocks: B,
        environment: E,
        settings: SharedSettings,
        place: Place,
    ) -> Result<Self, Error> {
        let mut bytes = [0; ROOT_BYTES];
        reach.run(&mut [Step::Read { at: place.at(0), into: &mut bytes }]).await?;
        let root = Root::parse(&bytes).map_err(Error::malformed(place.at(0)))?;
        if root.fixed.mode != Mode::Shared {
            return Err(Error::Setting(
                "the root is of a store in mode `alone`; use `Store::open`",
            ));
        }
        let slab = blocks.slab();
        let shape = shape_of(&root, slab)?;
        let block = root.fixed.epochs;
        if place.bits() >= PLACE_END || block.bits() >= PLACE_END {
            return Err(Error::Setting("mode `shared` has the memory nodes 0 to 63; use fewer"));
        }
        let client = register(&reach, block, slab, environment.random()).await?;
        let epochs = Arc::new(Epochs::new(block, client, slab, environment.now()));
        Ok(Self {
            reach,
            blocks,
            environment,
            settings,
            root: place,
            hasher: Hasher::new(&root.fixed.secret),
            shape,
            slab,
            epochs,
            directories: std::array::from_fn(|_| Mutex::new(None)),
            split: Mutex::default(),
            buffers: Buffers::default(),
            counters: Counters::default(),
        })
    }
}

impl<R, B: SharedBlocks, E> SharedStore<R, B, E> {
    /// Another handle of this client, for another thread: with a way to remote memory, an
    /// allocator and a cached directory of its own.
    ///
    /// All handles are one client in the epochs, so that one of them ticks for all. The client has
    /// left when one of its handles [leaves](SharedStore::leave): the others must have ended.
    pub fn fork(&self, reach: R, blocks: B, environment: E) -> Self {
        Self {
            reach,
            blocks,
            environment,
            settings: self.settings.clone(),
            root: self.root,
            hasher: self.hasher.clone(),
            shape: self.shape,
            slab: self.slab,
            epochs: self.epochs.clone(),
            directories: std::array::from_fn(|_| Mutex::new(None)),
            split: Mutex::default(),
            buffers: Buffers::default(),
            counters: Counters::default(),
        }
    }

    /// Frees an index that no other client knows. Returns the allocator.
    pub(crate) fn discard(self) -> B {
        self.blocks.release(self.root, ROOT_BYTES as u32);
        self.blocks.release(self.epochs.place(), self.epochs.block_bytes() as u32);
        self.blocks
    }
}

impl<R: Reach + Clone, E: Environment + Clone> SharedStore<R, RegionBlocks<R>, E> {
    /// Opens the index of the region at `region`, and creates an empty one if the region has none.
    ///
    /// Each client of the index joins, whichever comes first.
    pub async fn join(
        reach: R,
        environment: E,
        settings: SharedSettings,
        region: Place,
    ) -> Result<Self, Error> {
        let blocks = RegionBlocks::join(reach.clone(), region).await?;
        if let Some(root) = blocks.root().await? {
            return Self::open(reach, blocks, environment, settings, root).await;
        }
        let created =
            Self::create(reach.clone(), blocks, environment.clone(), settings.clone()).await?;
        let root = created.blocks.set_root(created.root).await?;
        if root == created.root {
            return Ok(created);
        }
        // Another client was faster.
        let blocks = created.discard();
        Self::open(reach, blocks, environment, settings, root).await
    }
}

/// The shape of the subtables. In mode `shared` a subtable is one block.
fn shape_of(root: &Root, slab: u32) -> Result<Shape, Error> {
    if root.fixed.slab != slab {
        return Err(Error::Setting("the slabs differ from the root's; use the same chunk size"));
    }
    let shape = Shape::new(root.fixed.groups.into(), slab).filter(|shape| shape.pieces == 0);
    shape.ok_or(Error::Setting("a subtable fits no slab; use fewer groups or larger chunks"))
}

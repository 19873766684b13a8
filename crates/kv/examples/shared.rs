//! An index that two compute nodes change: a memory node, a keeper of the chunks, two clients.
//!
//! All are threads of this process here. As processes, they would connect to one address, and the
//! keeper would tell the clients the number of the region.
//!
//! `cargo run -p granary-kv --example shared`

use std::borrow::Cow;

use kv::environment::System;
use kv::pooled::{RegionKeeper, SharedPoolStore, WholePool};
use kv::{Expiry, SetOptions, SharedSettings, Update};
use pool::{EmbeddedNode, GroupId, Options, Pool};

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let settings = pool::Settings {
        donate_bytes: 64 << 20,
        chunk_bytes: 64 << 10,
        scheme: pool::schemes::find("shared-region")?,
        ..Default::default()
    };
    let node = EmbeddedNode::start(&settings)?.into();
    let connect = || {
        let options = Options { groups: Some(1), ..Options::default() };
        Pool::embedded_in(&node, options)
    };

    // The chunks belong to the keeper, so a client that ends takes no data along.
    let keeper = RegionKeeper::start_blocking(connect()?, 0, 512)?;
    let client = || -> Result<SharedPoolStore, Failure> {
        let memory = WholePool::new_blocking(connect()?, 0, GroupId(0))?;
        let settings = SharedSettings::default();
        Ok(SharedPoolStore::join_blocking(memory, System, settings, keeper.region())?)
    };

    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|me| {
                let store = client()?;
                Ok(scope.spawn(move || work(&store, me)))
            })
            .collect::<Result<_, Failure>>()?;
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a client panicked")?)
    })?;

    let store = client()?;
    let counter = store.get_blocking(0, b"counter")?.unwrap_or_default();
    println!("{} keys, counter {}", store.len_blocking(0)?, String::from_utf8(counter)?);
    Ok(())
}

fn work(store: &SharedPoolStore, me: u32) -> Result<(), Failure> {
    for i in 0..1000 {
        let key = format!("client:{me}:{i}");
        store.set_blocking(0, key.as_bytes(), b"value", SetOptions::default())?;
        store.update_blocking(0, b"counter", |value, _| {
            let text = std::str::from_utf8(value.unwrap_or(b"0")).unwrap_or("0");
            let next = text.parse::<u64>().unwrap_or(0) + 1;
            Update::Put(Cow::Owned(next.to_string().into_bytes()), Expiry::Never)
        })?;
        // A background task would call this once in about 10 ms.
        if i % 100 == 0 {
            store.tend_blocking()?;
        }
    }
    Ok(())
}

//! The clients of an index: joining, leaving, and clients that have ended without leaving.

use super::SharedStore;
use super::epochs::{LINE, client_word, clients_of, epoch_of, line_word};
use crate::blocks::SharedBlocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::word;
use crate::place::{Address, PLACE_BITS, Place, UNIT};
use crate::reach::{Reach, Step};

/// Ticks for which a client that leaves waits until its unlinked blocks are free.
const PATIENCE: usize = 16;

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// Strikes client `client`: its epoch holds back no unlinked block any more.
    ///
    /// The client must not reach remote memory any more. A client that only stalls may know blocks
    /// that would be used again. Clients strike each other by themselves if the memory has
    /// [words of life](Reach::life), as a pool has.
    pub async fn strike(&self, client: u32) -> Result<(), Error> {
        let (at, mut life) = (self.epochs.client_word(client).plus(8), [0; 8]);
        self.reach.run(&mut [Step::Read { at, into: &mut life }]).await?;
        clear_line(&self.reach, self.epochs.client_word(client), u64::from_be_bytes(life)).await
    }

    /// Leaves the index: ends the client's part in the epochs, and gives back the blocks that the
    /// client has taken and not used. Unlinked blocks that other clients may still read after some
    /// ticks stay allocated.
    pub async fn leave(self) -> Result<(), Error> {
        for _ in 0..PATIENCE {
            self.tick_after(0).await?;
            if self.limbo_bytes() == 0 {
                break;
            }
        }
        self.blocks.leave().await?;
        self.strike(self.epochs.client()).await
    }

    /// Strikes a client that holds the epoch back, if its connection has ended. `life`: the second
    /// word of the client's line.
    pub(super) async fn examine(&self, client: u32, life: u64) -> Result<(), Error> {
        if has_ended(&self.reach, life).await? {
            clear_line(&self.reach, self.epochs.client_word(client), life).await?;
        }
        Ok(())
    }
}

/// Addresses of the two words of a line.
fn line(at: Address) -> [Address; 2] {
    [at, at.plus(8)]
}

/// True if the client with `life` in its line has ended.
async fn has_ended<R: Reach>(reach: &R, life: u64) -> Result<bool, Error> {
    let place = Place::of(life);
    if life == 0 || place.is_none() {
        return Ok(false);
    }
    let mut found = [0; 8];
    reach.run(&mut [Step::Read { at: place.at(0), into: &mut found }]).await?;
    Ok(u64::from_be_bytes(found) != life)
}

/// Takes a line in the block of epochs. Returns the number of the line, and of the client in it.
pub(super) async fn register<R: Reach>(
    reach: &R,
    block: Place,
    slab: u32,
    random: u64,
) -> Result<(u32, u64), Error> {
    let tag = (random | 1) << PLACE_BITS;
    let at = reach.life().filter(|at| at.offset.is_multiple_of(UNIT));
    let place = at.and_then(|at| Place::new(at.node, at.offset / UNIT));
    let life = tag | place.unwrap_or_default().bits();
    if let Some(place) = place {
        let from = &life.to_be_bytes();
        reach.run(&mut [Step::Write { at: place.at(0), from }]).await?;
    }
    let clients = clients_of(slab);
    for _ in 0..2 {
        let mut bytes = vec![0; LINE * (1 + clients)];
        reach.run(&mut [Step::Read { at: block.at(0), into: &mut bytes }]).await?;
        let lives = (0..clients as u32).map(|i| (i, word(&bytes, LINE * (1 + i as usize) + 8)));
        for (client, _) in lives.clone().filter(|(_, life)| *life == 0) {
            if let Some(count) = take_line(reach, block, client, life).await? {
                return Ok((client, count));
            }
        }
        for (client, life) in lives {
            if has_ended(reach, life).await? {
                clear_line(reach, client_word(block, client), life).await?;
            }
        }
    }
    Err(Error::TooManyClients(clients))
}

/// Takes the lines of all clients but `client`, so that no other client joins. Returns the numbers
/// of the lines, and their second word.
pub(super) async fn exclude<R: Reach>(
    reach: &R,
    block: Place,
    slab: u32,
    client: u32,
) -> Result<(Vec<u32>, u64), Error> {
    let clients = clients_of(slab);
    let mut bytes = vec![0; LINE * (1 + clients)];
    reach.run(&mut [Step::Read { at: block.at(0), into: &mut bytes }]).await?;
    let life = |i: u32| word(&bytes, LINE * (1 + i as usize) + 8);
    let mine = life(client);
    let mut taken = Vec::new();
    for other in (0..clients as u32).filter(|other| *other != client) {
        let [_, second] = line(client_word(block, other));
        let life = life(other);
        if life != 0 && has_ended(reach, life).await? {
            clear_line(reach, client_word(block, other), life).await?;
        }
        if swap(reach, second, 0, mine).await? != 0 {
            admit(reach, block, &(taken, mine)).await?;
            return Err(Error::NotAlone(other));
        }
        taken.push(other);
    }
    Ok((taken, mine))
}

/// Gives lines back that [`exclude`] has taken.
pub(super) async fn admit<R: Reach>(
    reach: &R,
    block: Place,
    (lines, mine): &(Vec<u32>, u64),
) -> Result<(), Error> {
    for other in lines {
        let [_, second] = line(client_word(block, *other));
        swap(reach, second, *mine, 0).await?;
    }
    Ok(())
}

/// Takes a line that has no client. Returns the number of the client in this line.
async fn take_line<R: Reach>(
    reach: &R,
    block: Place,
    client: u32,
    life: u64,
) -> Result<Option<u64>, Error> {
    let [first, second] = line(client_word(block, client));
    if swap(reach, second, 0, life).await? != 0 {
        return Ok(None);
    }
    let (mut epoch, mut before) = ([0; 8], [0; 8]);
    let mut steps = [
        Step::Read { at: block.at(0), into: &mut epoch },
        Step::Read { at: first, into: &mut before },
    ];
    reach.run(&mut steps).await?;
    let before = u64::from_be_bytes(before);
    let count = (before + 1) & 0xff;
    // An epoch that has passed meanwhile holds others back until the next tick.
    let word = line_word(u64::from_be_bytes(epoch), count);
    match swap(reach, first, before, word).await? == before {
        true => Ok(Some(count)),
        false => Ok(None),
    }
}

/// Lets the line at `at` have no client, if it has the one with `life`.
async fn clear_line<R: Reach>(reach: &R, at: Address, life: u64) -> Result<(), Error> {
    let [first, second] = line(at);
    let (mut word, mut again) = ([0; 8], [0; 8]);
    let mut steps =
        [Step::Read { at: first, into: &mut word }, Step::Read { at: second, into: &mut again }];
    reach.run(&mut steps).await?;
    let word = u64::from_be_bytes(word);
    // The line may have another client meanwhile. The first word was read before the second one, so
    // it is of this client if the second word is.
    if u64::from_be_bytes(again) != life {
        return Ok(());
    }
    let is_struck = epoch_of(word) == 0;
    if is_struck || swap(reach, first, word, line_word(0, word)).await? == word {
        swap(reach, second, life, 0).await?;
    }
    Ok(())
}

async fn swap<R: Reach>(reach: &R, at: Address, expected: u64, new: u64) -> Result<u64, Error> {
    let mut old = 0;
    reach.run(&mut [Step::Cas { at, expected, new, old: &mut old }]).await?;
    Ok(old)
}

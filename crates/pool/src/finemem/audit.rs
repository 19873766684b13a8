//! What must be true of tree, logs and keys while no request is in flight.

use fabric::Nic;

use super::array::Taker;
use super::header::{CHUNKS, Header, SPANS, Spread, chunk_mask};
use super::layout::{Block, SECTION};
use super::log::{Capability, FullLog};
use super::map::Map;
use super::node::Node;
use crate::Error;

/// Checks that every chunk is free, or in one block that its log names and a compute node has; and that the
/// capability table has the keys that the windows have.
pub(super) fn check<N: Nic>(node: &Node<N>) -> Result<(), Error> {
    match node.map {
        Map::Tree(_) => check_tree(node)?,
        Map::Array(_) => check_array(node)?,
    }
    for entry in (0..node.shape.entries()).filter(|entry| !node.scan.is_releasing(*entry)) {
        let capability = Capability::parse(node.words.load(node.shape.capability(entry)));
        if !node.keys.fits(entry, capability) {
            let keys = node.keys.capability(entry);
            return wrong(format!(
                "the table has {capability:?} for entry {entry}, whose keys are {keys:?}"
            ));
        }
    }
    Ok(())
}

fn wrong(why: String) -> Result<(), Error> {
    Err(Error::Protocol { attempt: "auditing the pool".into(), why })
}

fn check_array<N: Nic>(node: &Node<N>) -> Result<(), Error> {
    let word = |chunk| node.words.load(node.shape.log(chunk));
    for chunk in 0..node.shape.chunks {
        let Some(taker) = Taker::parse(word(chunk)) else { continue };
        if node.peers.values().all(|peer| peer.user != taker.user) {
            let user = taker.user.raw();
            return wrong(format!("chunk {chunk} is user {user}'s, who is not there"));
        }
        let block = taker.block(node.shape, chunk);
        if !block.is_some_and(|block| block.chunks().all(|other| word(other) == word(chunk))) {
            return wrong(format!("chunk {chunk} is of a block that was taken in part: {taker:?}"));
        }
    }
    Ok(())
}

fn check_tree<N: Nic>(node: &Node<N>) -> Result<(), Error> {
    let (shape, load) = (node.shape, |at| node.words.load(at));
    let section = |index| Header(load(shape.section(index)));
    let span = |index| Header(load(shape.span(index)));
    let mut owned = vec![false; shape.chunks as usize];
    for chunk in 0..shape.chunks {
        let log = FullLog::parse(load(shape.log(chunk)));
        if !log.taken {
            continue;
        }
        if node.peers.values().all(|peer| peer.user != log.user) {
            return wrong(format!("chunk {chunk} is user {}'s, who is not there", log.user.raw()));
        }
        let block = Block::of(chunk, log);
        // Of several sections each says so.
        let here = if block.parts().is_some() { Block::section(chunk / SECTION) } else { block };
        for chunk in here.chunks() {
            match owned.get_mut(chunk as usize) {
                Some(owned @ false) => *owned = true,
                _ => return wrong(format!("chunk {chunk} is in two blocks, or in none")),
            }
        }
    }
    for chunk in 0..shape.chunks {
        let (index, at) = (chunk / SECTION, chunk / CHUNKS % SPANS);
        let header = span(chunk / CHUNKS);
        let taken = match section(index).spread(at) {
            Spread::Empty if header.in_use() || header.bitmap() != 0 => {
                return wrong(format!(
                    "span {} is empty for its section, and not for itself",
                    chunk / CHUNKS
                ));
            }
            _ if header.in_use() => header.bitmap() & chunk_mask(chunk % CHUNKS, 0) != 0,
            spread => spread == Spread::Full,
        };
        if taken != owned[chunk as usize] {
            let of = if taken { "taken, and no log says so" } else { "free, and a log says not" };
            let log = FullLog::parse(load(shape.log(chunk)));
            return wrong(format!(
                "chunk {chunk} is {of}: its span's header is {:#018x}, its section's {:#018x}, {log:?}",
                header.0,
                section(index).0
            ));
        }
    }
    Ok(())
}

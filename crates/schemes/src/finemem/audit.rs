//! Consistency check of tree, logs and keys. No request may be in flight.

use scheme::Error;
use scheme::index::IndexRange;
use verbs::Nic;

use super::array::Taker;
use super::block::{Block, CHUNK_ORDER};
use super::header::{Header, Spread, chunk_mask};
use super::log::FullLog;
use super::map::Map;
use super::node::Node;

/// Checks that every chunk is free, or in one block that its log names and a client owns, and that
/// the capability table has the keys of the windows.
pub(super) fn check<N: Nic>(node: &Node<N>) -> Result<(), Error> {
    match node.map {
        Map::Tree(_) => check_tree(node)?,
        Map::Array(_) => check_array(node)?,
    }
    for entry in node.shape.each_entry().filter(|entry| !node.scan.is_releasing(*entry)) {
        let capability = node.capability(entry);
        if !node.keys.fits(entry, capability) {
            let keys = node.keys.capability(entry);
            return wrong(format!(
                "the table has {capability:?} for entry {entry}, but its windows have {keys:?}"
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
    for chunk in node.shape.each_chunk() {
        let Some(taker) = Taker::parse(word(chunk)) else { continue };
        if node.peers.values().all(|peer| peer.user != taker.user) {
            let user = taker.user.raw();
            return wrong(format!("chunk {chunk} belongs to user {user}, which is not connected"));
        }
        let block = taker.block(node.shape, chunk);
        if !block.is_some_and(|block| block.chunks().iter().all(|other| word(other) == word(chunk)))
        {
            return wrong(format!("chunk {chunk} belongs to a partly taken block: {taker:?}"));
        }
    }
    Ok(())
}

fn check_tree<N: Nic>(node: &Node<N>) -> Result<(), Error> {
    let (shape, load) = (node.shape, |at| node.words.load(at));
    let section = |index| Header(load(shape.section(index)));
    let span = |index| Header(load(shape.span(index)));
    let mut owned = vec![false; shape.chunks as usize];
    for chunk in shape.each_chunk() {
        let log = FullLog::parse(load(shape.log(chunk)));
        if !log.taken {
            continue;
        }
        if node.peers.values().all(|peer| peer.user != log.user) {
            return wrong(format!(
                "chunk {chunk} belongs to user {}, which is not connected",
                log.user.raw()
            ));
        }
        let block = log.block(chunk);
        // In a block of several sections, each section has a log.
        let here = if block.parts().is_some() { Block::section(chunk.section()) } else { block };
        for chunk in here.chunks().iter() {
            match owned.get_mut(chunk.as_usize()) {
                Some(owned @ false) => *owned = true,
                _ => return wrong(format!("chunk {chunk} is in two blocks, or beyond the pool")),
            }
        }
    }
    for chunk in shape.each_chunk() {
        let (header, of_section) = (span(chunk.span()), section(chunk.section()));
        let taken = match of_section.spread(chunk.span().in_section()) {
            Spread::Empty if header.in_use() || header.bitmap() != 0 => {
                return wrong(format!(
                    "span {} is empty in its section's header but not in its own",
                    chunk.span()
                ));
            }
            _ if header.in_use() => header.bitmap() & chunk_mask(chunk.in_span(), CHUNK_ORDER) != 0,
            spread => spread == Spread::Full,
        };
        if taken != owned[chunk.as_usize()] {
            let state =
                if taken { "taken without a log" } else { "free, but a log names an owner" };
            let log = FullLog::parse(load(shape.log(chunk)));
            return wrong(format!(
                "chunk {chunk} is {state}: its span's header is {:#018x}, its section's {:#018x}, \
                 {log:?}",
                header.0, of_section.0
            ));
        }
    }
    Ok(())
}

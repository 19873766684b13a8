//! Operations of the model test, and their random generation.

use super::{CLIENT, CLIENTS, LANES, SERVER, WINDOWS};
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Write,
    Read,
    FetchAdd,
    CompareSwap,
}

/// A key by its object: a window or the n-th region, with the right or a wrong tag.
#[derive(Clone, Copy, Debug)]
pub struct Name {
    pub window: bool,
    pub index: usize,
    pub stale: bool,
}

#[derive(Clone, Debug)]
pub enum Op {
    Register {
        at: usize,
        len: usize,
        access: u8,
        meta: bool,
    },
    Deregister {
        region: usize,
    },
    Bind {
        window: Name,
        region: usize,
        to: usize,
        by: usize,
        at: usize,
        len: usize,
        access: u8,
        check: bool,
    },
    Unbind {
        window: Name,
        by: usize,
        check: bool,
    },
    Invalidate {
        window: Name,
        by: usize,
    },
    Access {
        lane: usize,
        kind: Kind,
        key: Name,
        at: usize,
        len: usize,
        local: usize,
    },
    Send {
        lane: usize,
        back: bool,
        len: usize,
        room: [usize; 2],
        key: Name,
    },
}

pub fn name() -> impl Strategy<Value = Name> {
    (any::<bool>(), 0..8usize, proptest::bool::weighted(0.1))
        .prop_map(|(window, index, stale)| Name { window, index, stale })
}

pub fn window() -> impl Strategy<Value = Name> {
    (0..WINDOWS, proptest::bool::weighted(0.1)).prop_map(|(index, stale)| Name {
        window: true,
        index,
        stale,
    })
}

pub fn op() -> impl Strategy<Value = Op> {
    let lane = 0..CLIENTS * LANES;
    let by = 0..=CLIENTS * LANES;
    // Mostly all rights, so that many operations succeed.
    let access = || prop_oneof![2 => Just(0x7cu8), 1 => any::<u8>().prop_map(|a| a & 0x7c)];
    let kind = prop_oneof![
        Just(Kind::Write),
        Just(Kind::Read),
        Just(Kind::FetchAdd),
        Just(Kind::CompareSwap)
    ];
    prop_oneof![
        2 => (0..32usize, 1..=32usize, access(), proptest::bool::weighted(0.2))
            .prop_map(|(at, len, access, meta)| {
                let at = at * 64;
                Op::Register { at, len: (len * 64).min(SERVER - at), access, meta }
            }),
        1 => (0..8usize).prop_map(|region| Op::Deregister { region }),
        6 => (
            window(), 0..8usize, lane.clone(), by.clone(), 0..36usize, 0..12usize, access(),
            any::<bool>(),
        )
            .prop_map(|(window, region, to, by, at, len, access, check)| {
                Op::Bind { window, region, to, by, at: at * 60, len: len * 50, access, check }
            }),
        2 => (window(), by.clone(), any::<bool>())
            .prop_map(|(window, by, check)| Op::Unbind { window, by, check }),
        1 => (window(), by).prop_map(|(window, by)| Op::Invalidate { window, by }),
        12 => (lane.clone(), kind, name(), 0..SERVER + 64, 0..300usize, 0..CLIENT + 16)
            .prop_map(|(lane, kind, key, at, len, local)| {
                Op::Access { lane, kind, key, at, len, local }
            }),
        3 => (lane, any::<bool>(), 0..200usize, [0..160usize, 0..160usize], name())
            .prop_map(|(lane, back, len, room, key)| Op::Send { lane, back, len, room, key }),
    ]
}

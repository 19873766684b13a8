//! What a seed draws: how large the world is, who is in it, and what goes wrong.

use pool::Settings;
use pool::odrp::PAGE_BYTES;

use super::case::Case;
use crate::random::Random;
use crate::time::Time;

/// A world to be checked.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The memory node's settings.
    pub settings: Settings,
    /// Who is there from the start.
    pub clients: Vec<Role>,
    /// What goes wrong.
    pub trouble: Trouble,
    /// Groups of each client.
    pub groups: u16,
    /// Who is hostile does forbidden things with its NIC too.
    pub meddling: bool,
    /// The memory node's background work is broken off again and again, in the middle of anything, and begins anew.
    pub breaks: bool,
    /// What it is a world of.
    pub case: Case,
}

/// What a client does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Role {
    /// It keeps to no rule.
    pub hostile: bool,
    /// Things that it does.
    pub rounds: u32,
    /// How it ends.
    pub end: End,
}

/// How a client ends that comes to the end of what it does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// It frees what it has, and says goodbye.
    Tidy,
    /// It says goodbye, with chunks in its hands.
    Careless,
    /// Its process dies.
    Dies,
}

/// What goes wrong while clients work.
#[derive(Clone, Copy, Debug)]
pub struct Trouble {
    /// Most events between two troubles; 0: there are none.
    pub gap: u64,
    /// Processes die, so many at most; a new one comes for each.
    pub crashes: u32,
    /// Clients stand still, for so long at most.
    pub stalls: Time,
    /// The memory node's CPU stands still, for so long at most.
    pub node_stalls: Time,
    /// Packets are lost, one in so many; 0: none.
    pub loss: u64,
    /// Packets are late, one in so many; 0: none.
    pub late: u64,
    /// Nodes cannot reach each other, for so long at most.
    pub partitions: Time,
    /// Then requests arrive, and answers do not.
    pub one_way: bool,
}

impl Trouble {
    /// True if the network loses or delays anything.
    pub fn of_network(&self) -> bool {
        self.loss > 0 || self.late > 0 || self.partitions > Time::ZERO
    }
}

/// Bytes of a chunk: the smallest, and somewhat larger.
const CHUNK_BYTES: [u64; 3] = [512, 512, 1024];

impl Scenario {
    /// What `seed` draws.
    pub fn draw(case: Case, seed: u64) -> Self {
        let r = &mut Random::new(seed, 100);
        let count = 1 + r.below(4) as usize;
        let hostile = r.below(3) == 0 && case.may_be_hostile() && !case.sizes;
        let mut clients: Vec<Role> = (0..count)
            .map(|at| Role {
                hostile: hostile && (at == 0 || r.below(4) == 0),
                rounds: 4 + r.below(20) as u32,
                end: *r.pick(&[End::Tidy, End::Tidy, End::Careless, End::Dies]),
            })
            .collect();
        let chunk_bytes = *r.pick(&CHUNK_BYTES);
        let chunk_bytes = if case.is_paged() { PAGE_BYTES as u64 } else { chunk_bytes };
        let chunks = match case.sizes {
            // Within a section, one and a part of another, and several.
            true => *r.pick(&[48, 544, 1024, 1100, 2048]),
            false => 2 + r.below(7),
        };
        let chunk_bytes = if case.sizes { CHUNK_BYTES[0] } else { chunk_bytes };
        let groups = 1 + r.below(2) as u16;
        let settings = case.set(Settings {
            donate_bytes: chunks * chunk_bytes,
            chunk_bytes,
            group_size: 2 + r.below(2) as u32,
            credits: *r.pick(&[1, 2, 4]),
            groups_max: groups as u32,
            // A process that died may still be there when the next one comes.
            clients_max: 8,
            cores: if case.scheme.is_by_rpc() { 1 + r.below(2) as u32 } else { 1 },
            ..Settings::default()
        });
        let mut trouble = Trouble::draw(r);
        // Later inventions draw elsewhere, so that worlds without them are what they were.
        let more = &mut Random::new(seed, 102);
        let meddling = more.below(2) == 0;
        trouble.one_way = more.below(2) == 0;
        let breaks = case.has_tree() && more.below(2) == 0;
        if case.sizes && case.may_be_hostile() && more.below(3) == 0 {
            for (at, role) in clients.iter_mut().enumerate() {
                role.hostile = at == 0 || more.below(4) == 0;
            }
        }
        Self { settings, clients, trouble, groups, meddling, breaks, case }
    }
}

impl Trouble {
    fn draw(r: &mut Random) -> Self {
        let mut up_to =
            |most: Time| if r.below(2) == 0 { Time(1 + r.below(most.0)) } else { Time::ZERO };
        let stalls = up_to(Time::us(400));
        let node_stalls = up_to(Time::us(1500));
        let partitions = if r.below(3) == 0 { Time::us(100 + r.below(2000)) } else { Time::ZERO };
        let once_in = |r: &mut Random, least: u64| match r.below(3) {
            0 => least + r.below(8 * least),
            _ => 0,
        };
        Self {
            gap: if r.below(8) == 0 { 0 } else { 20 + r.below(600) },
            crashes: if r.below(2) == 0 { 1 + r.below(3) as u32 } else { 0 },
            stalls,
            node_stalls,
            loss: once_in(r, 5),
            late: once_in(r, 4),
            partitions,
            one_way: false,
        }
    }
}

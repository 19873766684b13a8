//! Scenarios: a seed determines the size of the world, its clients and its faults.

use pool::Settings;
use schemes::odrp::PAGE_BYTES;

use super::case::Case;
use super::lease_plan::LeasePlan;
use crate::random::Random;
use crate::time::Time;

/// A world to be checked.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The memory node's settings.
    pub settings: Settings,
    /// The initial clients.
    pub clients: Vec<Role>,
    /// The faults.
    pub faults: FaultPlan,
    /// Number of groups of each client.
    pub groups: u16,
    /// Whether hostile clients also misuse their NIC functions.
    pub nic_abuse: bool,
    /// Whether the memory node's background work is aborted and restarted repeatedly.
    pub aborts_enabled: bool,
    /// Clocks, pauses and domains, in a scheme with leases.
    pub leases: Option<LeasePlan>,
    /// The case.
    pub case: Case,
}

/// Behaviour of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Role {
    /// The client violates the protocol.
    pub hostile: bool,
    /// The client uses objects and permissions, not only grants.
    pub leases: bool,
    /// Number of rounds of operations.
    pub rounds: u32,
    /// How the client ends.
    pub end: End,
}

/// How a client ends after its rounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// It frees its chunks and closes the connection.
    Tidy,
    /// It closes the connection while it still holds chunks.
    Careless,
    /// Its process is killed.
    Dies,
}

/// Faults that are injected while clients work.
#[derive(Clone, Copy, Debug)]
pub struct FaultPlan {
    /// Maximum number of events between two faults; 0 for no faults.
    pub gap: u64,
    /// Maximum number of processes that are killed; each is replaced by a new one.
    pub crashes: u32,
    /// Maximum length of a client's stall.
    pub stalls: Time,
    /// Maximum length of a stall of the memory node's CPU.
    pub node_stalls: Time,
    /// One packet in this number is lost; 0 for none.
    pub loss: u64,
    /// One packet in this number is late; 0 for none.
    pub late: u64,
    /// Maximum length of a network partition.
    pub partitions: Time,
    /// Partitions affect answers only: requests arrive.
    pub one_way: bool,
}

impl FaultPlan {
    /// Returns whether the network has faults.
    pub fn of_network(&self) -> bool {
        self.loss > 0 || self.late > 0 || self.partitions > Time::ZERO
    }
}

/// Bytes of a chunk: the minimum, or somewhat larger.
const CHUNK_BYTES: [u64; 3] = [512, 512, 1024];

impl Scenario {
    /// Returns the scenario that `seed` determines.
    pub fn draw(case: Case, seed: u64) -> Self {
        let r = &mut Random::new(seed, 100);
        let count = 1 + r.below(4) as usize;
        let is_drawn = r.below(3) == 0 || case.misuse.is_some();
        let hostile = is_drawn && case.may_be_hostile() && !case.sizes;
        let mut clients: Vec<Role> = (0..count)
            .map(|at| Role {
                hostile: hostile && (at == 0 || r.below(4) == 0),
                leases: false,
                rounds: 4 + r.below(20) as u32,
                end: *r.pick(&[End::Tidy, End::Tidy, End::Careless, End::Dies]),
            })
            .collect();
        let chunk_bytes = *r.pick(&CHUNK_BYTES);
        let chunk_bytes = if case.is_paged() { PAGE_BYTES as u64 } else { chunk_bytes };
        let chunks = match case.sizes {
            // Within a section, one section and a part of another, and several sections.
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
            // A killed client may not be forgotten yet when its replacement connects.
            clients_max: 8,
            ..Settings::default()
        });
        let cores = if case.scheme.needs_cpu() { 1 + r.below(2) as u32 } else { 1 };
        let settings = if cores > 1 { settings.with("cores", cores) } else { settings };
        let mut faults = FaultPlan::draw(r);
        // Newer options use another random sequence, so that worlds without them stay the same.
        let more = &mut Random::new(seed, 102);
        let nic_abuse = more.below(2) == 0 && case.misuse.is_none();
        faults.one_way = more.below(2) == 0;
        let aborts_enabled = case.has_tree() && more.below(2) == 0;
        if case.sizes && case.may_be_hostile() && more.below(3) == 0 {
            for (at, role) in clients.iter_mut().enumerate() {
                role.hostile = at == 0 || more.below(4) == 0;
            }
        }
        let mut leases =
            case.has_leases().then(|| LeasePlan::draw(case.scheme, seed, clients.len()));
        if let Some(plan) = leases.as_mut().filter(|_| case.timely) {
            plan.be_timely();
            (faults.loss, faults.late, faults.partitions) = (0, 0, Time::ZERO);
        }
        for role in clients.iter_mut().filter(|_| leases.is_some()) {
            role.leases = more.below(4) != 0;
        }
        let settings = match &leases {
            Some(plan) => plan.set(settings),
            None => settings,
        };
        Self { settings, clients, faults, groups, nic_abuse, aborts_enabled, leases, case }
    }
}

impl FaultPlan {
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

//! The part of a scenario that only schemes with leases have: clocks, pauses, domains and limits.

use pool::{Scheme, Settings, schemes};
use scheme::DomainToken;

use crate::clock::Clock;
use crate::ids::NodeId;
use crate::random::Random;
use crate::time::Time;

/// Clocks and settings of a world with leases.
#[derive(Clone, Debug)]
pub struct LeasePlan {
    /// The clock of each node: the memory node's, then those of the compute nodes.
    pub clocks: Vec<Clock>,
    /// Setting `clock_drift_ppm_max`.
    pub drift_ppm_max: u32,
    /// Whether the clocks keep to that setting.
    pub drift_is_bounded: bool,
    /// Setting `lease_max_us`.
    pub lease_max_us: u64,
    /// The domain of each initial client and of its replacements, by number; `None` for none.
    pub domains: Vec<Option<u8>>,
    /// Whether clients and the memory node's CPU stand still for several leases.
    pub pauses: bool,
    /// Setting `permissions_max`.
    pub permissions_max: u32,
    /// Setting `spares`.
    pub spares: u32,
    /// One window operation of the memory node in this number fails; 0 for none.
    pub window_faults: u64,
    /// Whether permissions are windows of type 2, which are bound by operations on the QPs of
    /// accesses.
    pub has_qp_windows: bool,
    /// Windows of the memory node's NIC, if they are too few for all clients and permissions.
    pub windows: Option<u32>,
    /// Whether two threads of a client use a permission at the same time.
    pub has_threads: bool,
}

/// Largest difference of a clock's rate from that of virtual time, in parts per million.
const RATE_PPM: i32 = 10_000;
/// Upper bound of the difference of the rates of two such clocks: 1.01 / 0.99 is less than 1.0203.
const PAIR_PPM: u32 = 20_300;
/// Windows that the memory node allocates at an admission: those of permissions, and that of the
/// lifetime words.
const ADMISSION_WINDOWS: u32 = 33;
/// Setting `lease_min_us`.
pub(super) const LEASE_MIN_US: u64 = 50;

impl LeasePlan {
    /// Returns the plan that `seed` determines for a scheme and a number of initial clients.
    pub fn draw(scheme: Scheme, seed: u64, clients: usize) -> Self {
        let r = &mut Random::new(seed, 104);
        let differ = r.below(4) != 0;
        let drift_is_bounded = !differ || r.below(4) != 0;
        let clocks = (0..=clients).map(|_| Self::clock(r, differ)).collect();
        // One domain, two domains, or none.
        let domains = 1 + r.below(2);
        let domain = |r: &mut Random| (r.below(8) != 0).then(|| r.below(domains) as u8);
        // Newer options use another random sequence, so that worlds without them stay the same.
        let more = &mut Random::new(seed, 105);
        let has_windows = ![schemes::PATRONUS_MR, schemes::UNPROTECTED].contains(&scheme);
        let fails = has_windows && more.below(4) == 0;
        let window_faults = if fails { *more.pick(&[2, 5, 20, 60]) } else { 0 };
        // The windows of the published form belong to cores, not to compute nodes.
        let is_short = has_windows && more.below(8) == 0 && scheme != schemes::PATRONUS_PAPER;
        let windows = is_short.then(|| {
            let clients = 1 + more.below(clients as u64) as u32;
            clients * ADMISSION_WINDOWS + more.below(ADMISSION_WINDOWS.into()) as u32
        });
        let has_threads = more.below(3) == 0;
        Self {
            clocks,
            drift_ppm_max: if drift_is_bounded { PAIR_PPM } else { 100 },
            drift_is_bounded,
            lease_max_us: LEASE_MIN_US + *r.pick(&[50, 150, 450, 1950]),
            domains: (0..clients).map(|_| domain(r)).collect(),
            pauses: r.below(3) != 0,
            permissions_max: *r.pick(&[2, 8, 64]),
            spares: r.below(3) as u32,
            window_faults,
            has_qp_windows: scheme == schemes::PATRONUS_2,
            windows,
            has_threads,
        }
    }

    fn clock(r: &mut Random, differs: bool) -> Clock {
        let drift = r.below(2 * RATE_PPM as u64 + 1) as i32 - RATE_PPM;
        // Whole nanoseconds up to ten hours.
        let offset = Time(1_000 * r.below(36_000_000_000_000));
        if differs { Clock::new(drift, offset) } else { Clock::new(0, offset) }
    }

    /// Returns the token of the domain of a compute node's clients.
    pub fn domain(&self, node: NodeId) -> Option<DomainToken> {
        let number = *self.domains.get(usize::from(node.0).checked_sub(1)?)?;
        number.map(|number| DomainToken([number + 1; 32]))
    }

    /// Applies the plan to `settings`.
    pub fn set(&self, settings: Settings) -> Settings {
        let settings = settings
            .with("clock_drift_ppm_max", self.drift_ppm_max)
            .with("lease_min_us", LEASE_MIN_US)
            .with("lease_max_us", self.lease_max_us)
            .with("permissions_max", self.permissions_max);
        let settings = Settings { nic_windows: self.windows, ..settings };
        // Other keys are valid on one QP only, or have no spare QPs.
        match settings.scheme == schemes::PATRONUS {
            true => settings.with("spares", self.spares),
            false => settings,
        }
    }

    /// Has each access of an honest client arrive before its lease ends: clocks keep to the bound,
    /// no client stands still at a verb, and no permission is revoked while another thread uses it.
    pub fn be_timely(&mut self) {
        (self.drift_ppm_max, self.drift_is_bounded) = (PAIR_PPM, true);
        (self.pauses, self.has_threads) = (false, false);
    }

    /// Returns the plan with clocks that began to count at other times.
    pub fn with_offsets(mut self, offset: Time) -> Self {
        for clock in &mut self.clocks {
            clock.leap(offset);
        }
        self
    }

    /// Returns whether the memory node may be unable to open a range.
    pub fn windows_may_fail(&self) -> bool {
        self.window_faults > 0 || self.windows.is_some()
    }

    /// Returns a length of a pause: up to ten of the longest leases, most often about one.
    pub fn some_pause(&self, random: &mut Random) -> Time {
        let lease = Time::us(self.lease_max_us);
        let most = *random.pick(&[Time(lease.0 / 4), lease, lease, Time(10 * lease.0)]);
        Time(1 + random.below(most.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounded_plans_have_clocks_within_their_bound() {
        let (mut bounded, mut beyond) = (0, 0);
        for seed in 0..200 {
            let plan = LeasePlan::draw(schemes::PATRONUS, seed, 3);
            assert_eq!((plan.clocks.len(), plan.domains.len()), (4, 3));
            let second = |clock: &Clock| {
                clock.read(Time::us(1_000_000)).since(clock.read(Time::ZERO)).0 as f64
            };
            let rates: Vec<f64> = plan.clocks.iter().map(second).collect();
            let (least, most) = rates
                .iter()
                .fold((f64::MAX, 0_f64), |(least, most), rate| (least.min(*rate), most.max(*rate)));
            let is_within = most / least <= 1.0 + f64::from(plan.drift_ppm_max) / 1e6;
            assert!(is_within || !plan.drift_is_bounded, "seed {seed}: {rates:?}");
            bounded += u32::from(plan.drift_is_bounded);
            beyond += u32::from(!is_within);
        }
        assert!(bounded > 50 && beyond > 20, "{bounded} bounded, {beyond} beyond the bound");
    }
}

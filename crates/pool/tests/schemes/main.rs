//! What every allocation scheme must keep, on every attachment of the NIC: one list of checks,
//! run for each scheme in each place.

mod checks;
#[path = "../common/mod.rs"]
mod common;
mod gone;
mod pages;
mod place;

use place::{How, Place};
use pool::SchemeKind;

macro_rules! run {
    ($how:expr, $place:expr, [$($check:ident),* $(,)?]) => {
        $(
            #[test]
            fn $check() {
                let setup = crate::Setup { how: $how, place: $place };
                crate::checks::$check(&setup);
            }
        )*
    };
}

macro_rules! scheme {
    ($name:ident, $how:expr) => {
        mod $name {
            mod inline {
                scheme!(@all $how, crate::Place::Embedded);
            }
            mod shm {
                scheme!(@all $how, crate::Place::SameProcess);
            }
            mod shm_other_process {
                scheme!(@all $how, crate::Place::OtherProcess);

                #[test]
                fn operations_end_when_the_node_dies() {
                    crate::gone::operations_end_when_the_node_dies($how);
                }
            }
        }
    };
    (@all $how:expr, $place:expr) => {
        run!($how, $place, [
            a_chunk_is_zero_and_keeps_what_is_written,
            the_next_owner_reads_zeros,
            keys_are_dead_after_free,
            ranges_are_kept,
            a_grant_is_of_no_use_to_another_client,
            a_key_is_for_its_lane_only,
            what_is_not_owned_is_not_freed,
            an_empty_pool_is_waited_for,
            nobody_shares_a_chunk,
            threads_share_a_pool,
            long_and_odd_lengths,
            batches_over_groups,
            given_up_operations_harm_nobody,
            given_up_requests_leave_nothing_behind,
            a_bad_access_disturbs_no_neighbour,
            leaving_gives_everything_back,
            counters_count,
        ]);
    };
}

/// What a check is run with.
#[derive(Clone, Copy)]
pub struct Setup {
    how: How,
    place: Place,
}

impl Setup {
    /// True if a key is for one QP, not for all of a compute node's.
    fn keys_are_for_one_qp(&self) -> bool {
        matches!(self.how.scheme, SchemeKind::OneSidedMw | SchemeKind::RpcMw2)
    }

    /// True if a key is for one compute node: not with type-1 windows that nothing guards (OneSidedMW §2.3).
    fn keys_are_for_one_client(&self) -> bool {
        !self.how.scheme.has_type1_windows() || self.how.scheme.is_guarded()
    }

    /// True if a chunk is cleared before it has another owner.
    fn clears(&self) -> bool {
        self.how.scheme.releases()
    }

    /// True if a chunk's keys are dead when its free returns: with type-1 windows they are when somebody
    /// gets the chunk, at the latest.
    fn dies_with_its_free(&self) -> bool {
        !self.how.scheme.releases_late()
    }
}

scheme!(onesidedmw, crate::How::by(pool::SchemeKind::OneSidedMw));
// Each access QP carries a chain that allocates for it.
scheme!(
    onesidedmw_without_separation,
    crate::How { separation: false, ..crate::How::by(pool::SchemeKind::OneSidedMw) }
);
scheme!(rpc_mw_2, crate::How::by(pool::SchemeKind::RpcMw2));
scheme!(rpc_mw_1, crate::How::by(pool::SchemeKind::RpcMw1));
scheme!(fine_mr, crate::How::by(pool::SchemeKind::FineMr));
scheme!(static_mr, crate::How::by(pool::SchemeKind::StaticMr));
scheme!(finemem, crate::How::by(pool::SchemeKind::FineMem));
scheme!(finemem_paper, crate::How::by(pool::SchemeKind::FineMemPaper));
// Windows in several functions of the NIC.
scheme!(
    finemem_over_functions,
    crate::How { few_windows: true, ..crate::How::by(pool::SchemeKind::FineMem) }
);
scheme!(
    finemem_paper_over_functions,
    crate::How { few_windows: true, ..crate::How::by(pool::SchemeKind::FineMemPaper) }
);
scheme!(premmap_onesided, crate::How::by(pool::SchemeKind::PremmapOneSided));
scheme!(premmap_rpc, crate::How::by(pool::SchemeKind::PremmapRpc));
scheme!(ondemand_rpc, crate::How::by(pool::SchemeKind::OnDemandRpc));

/// Access is by pages: the checks of [`checks`] that are about keys, ranges and parts of a chunk do not
/// apply; those that do are made with pages.
mod odrp {
    macro_rules! pages {
        ($name:ident, $place:expr, [$($check:ident),* $(,)?]) => {
            mod $name {
                $(
                    #[test]
                    fn $check() {
                        crate::pages::$check($place);
                    }
                )*
            }
        };
        ($name:ident, $place:expr) => {
            pages!($name, $place, [
                a_page_is_zero_and_keeps_what_is_written,
                memory_is_allocated_by_the_first_write,
                what_is_not_owned_is_not_freed,
                an_empty_pool_is_waited_for,
                nobody_shares_a_page,
                given_up_requests_harm_nobody,
                leaving_gives_everything_back,
                what_is_not_a_page_is_refused,
            ]);
        };
    }
    pages!(inline, crate::Place::Embedded);
    pages!(shm, crate::Place::SameProcess);
    pages!(shm_other_process, crate::Place::OtherProcess);

    #[test]
    fn operations_end_when_the_node_dies() {
        crate::pages::operations_end_when_the_node_dies();
    }
}

/// Requests are answered by several cores.
mod several_cores {
    macro_rules! cores {
        ($name:ident, $kind:expr) => {
            mod $name {
                use crate::{How, Place, Setup, checks};

                fn setup(place: Place) -> Setup {
                    Setup { how: How { cores: 3, ..How::by($kind) }, place }
                }

                #[test]
                fn nobody_shares_a_chunk() {
                    checks::nobody_shares_a_chunk(&setup(Place::Embedded));
                    checks::nobody_shares_a_chunk(&setup(Place::SameProcess));
                }

                #[test]
                fn an_empty_pool_is_waited_for() {
                    checks::an_empty_pool_is_waited_for(&setup(Place::Embedded));
                    checks::an_empty_pool_is_waited_for(&setup(Place::SameProcess));
                }

                #[test]
                fn leaving_gives_everything_back() {
                    checks::leaving_gives_everything_back(&setup(Place::Embedded));
                }
            }
        };
    }
    cores!(rpc_mw_2, pool::SchemeKind::RpcMw2);
    cores!(rpc_mw_1, pool::SchemeKind::RpcMw1);
    cores!(fine_mr, pool::SchemeKind::FineMr);
    cores!(static_mr, pool::SchemeKind::StaticMr);
    cores!(premmap_rpc, pool::SchemeKind::PremmapRpc);
    cores!(ondemand_rpc, pool::SchemeKind::OnDemandRpc);
}

/// A CPU that polls for RPCs instead of sleeping.
mod rpc_mw_2_polling {
    run!(
        crate::How {
            control: pool::ControlMode::Polling,
            ..crate::How::by(pool::SchemeKind::RpcMw2)
        },
        crate::Place::SameProcess,
        [
            a_chunk_is_zero_and_keeps_what_is_written,
            an_empty_pool_is_waited_for,
            nobody_shares_a_chunk
        ]
    );
}

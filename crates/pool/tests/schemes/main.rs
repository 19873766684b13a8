//! Requirements on every allocation scheme: one list of checks, run for each scheme and each
//! attachment of the NIC.

mod batches;
mod by_rpc;
mod checks;
#[path = "../common/mod.rs"]
mod common;
mod event_loop;
mod gone;
mod pages;
mod place;
mod steps;

use place::{How, Place};
use scheme::info::Isolation;

macro_rules! run {
    ($how:expr, $place:expr, [$($check:ident),* $(,)?]) => {
        run!(checks, $how, $place, [$($check),*]);
    };
    ($checks:ident, $how:expr, $place:expr, [$($check:ident),* $(,)?]) => {
        $(
            #[test]
            fn $check() {
                let setup = crate::Setup { how: $how, place: $place };
                crate::$checks::$check(&setup);
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

                #[test]
                fn tasks_end_when_the_node_dies() {
                    crate::event_loop::tasks_end_when_the_node_dies($how);
                }
            }
        }
    };
    (@all $how:expr, $place:expr) => {
        run!($how, $place, [
            chunk_is_zero_and_keeps_written_data,
            chunks_are_named_by_their_offset,
            only_a_shared_region_is_one_grant,
            the_next_owner_reads_zeros,
            keys_are_dead_after_free,
            accesses_beyond_the_grant_are_refused,
            grant_is_useless_to_another_client,
            key_is_valid_on_its_lane_only,
            foreign_chunk_is_not_freed,
            empty_pool_wait_ends_when_a_chunk_is_freed,
            chunk_has_one_owner_at_a_time,
            threads_share_a_pool,
            long_and_odd_lengths,
            batches_over_groups,
            batches_are_polled_to_their_end,
            abandoned_operations_have_no_side_effect,
            abandoned_requests_leak_no_chunk,
            bad_access_does_not_disturb_other_operations,
            departure_returns_all_chunks,
            counters_match_the_operations,
        ]);
        run!(steps, $how, $place, [
            lists_are_executed_in_order,
            failed_list_says_how_far_it_came,
            refused_list_has_no_effect,
            lists_survive_bad_accesses_of_other_threads,
            abandoned_lists_keep_their_memory,
        ]);
        run!(event_loop, $how, $place, [
            tasks_allocate_use_and_free,
            loops_of_two_threads_share_a_group,
        ]);
    };
}

/// Configuration of a check.
#[derive(Clone, Copy)]
pub struct Setup {
    how: How,
    place: Place,
}

impl Setup {
    /// True if a key is bound to one QP rather than to all QPs of a compute node.
    fn keys_are_for_one_qp(&self) -> bool {
        self.how.scheme.isolation == Isolation::QpWindows
    }

    /// True if a key is valid for one compute node only; false for unguarded type-1 windows
    /// (OneSidedMW §2.3), and for one key to all memory.
    fn keys_are_for_one_client(&self) -> bool {
        let isolation = self.how.scheme.isolation;
        let guarded = !isolation.has_type1_windows() || isolation == Isolation::GuardedWindows;
        guarded && self.keys_are_for_one_grant()
    }

    /// True if a key opens the chunk of its grant only; false for one key to all memory.
    fn keys_are_for_one_grant(&self) -> bool {
        self.how.scheme.isolation != Isolation::SharedRegion
    }

    /// True if a chunk is cleared before it is reallocated.
    fn clears(&self) -> bool {
        self.how.scheme.clears()
    }

    /// True if a chunk's keys are dead when its free returns. With type-1 windows they die later,
    /// before the chunk is reallocated.
    fn dies_with_its_free(&self) -> bool {
        !self.how.scheme.releases_late()
    }
}

scheme!(onesidedmw, crate::How::by(pool::schemes::ONESIDEDMW));
// Each access QP carries an allocation chain.
scheme!(
    onesidedmw_without_separation,
    crate::How { separation: false, ..crate::How::by(pool::schemes::ONESIDEDMW) }
);
scheme!(rpc_mw_2, crate::How::by(pool::schemes::RPC_MW_2));
scheme!(rpc_mw_1, crate::How::by(pool::schemes::RPC_MW_1));
scheme!(fine_mr, crate::How::by(pool::schemes::FINE_MR));
scheme!(static_mr, crate::How::by(pool::schemes::STATIC_MR));
scheme!(finemem, crate::How::by(pool::schemes::FINEMEM));
scheme!(finemem_paper, crate::How::by(pool::schemes::FINEMEM_PAPER));
// Windows in several functions of the NIC.
scheme!(
    finemem_over_functions,
    crate::How { few_windows: true, ..crate::How::by(pool::schemes::FINEMEM) }
);
scheme!(
    finemem_paper_over_functions,
    crate::How { few_windows: true, ..crate::How::by(pool::schemes::FINEMEM_PAPER) }
);
scheme!(premmap_onesided, crate::How::by(pool::schemes::PREMMAP_ONESIDED));
scheme!(premmap_rpc, crate::How::by(pool::schemes::PREMMAP_RPC));
scheme!(ondemand_rpc, crate::How::by(pool::schemes::ONDEMAND_RPC));
scheme!(patronus, crate::How::by(pool::schemes::PATRONUS));
scheme!(patronus_2, crate::How::by(pool::schemes::PATRONUS_2));
scheme!(patronus_mr, crate::How::by(pool::schemes::PATRONUS_MR));
scheme!(shared_region, crate::How::by(pool::schemes::SHARED_REGION));

/// Access by pages: the checks of [`checks`] for keys, ranges and parts of a chunk do not apply;
/// the others have a version with pages.
macro_rules! paged_scheme {
    ($name:ident, $how:expr) => {
        mod $name {
            mod inline {
                paged_scheme!(@all $how, crate::Place::Embedded);
            }
            mod shm {
                paged_scheme!(@all $how, crate::Place::SameProcess);
            }
            mod shm_other_process {
                paged_scheme!(@all $how, crate::Place::OtherProcess);

                #[test]
                fn operations_end_when_the_node_dies() {
                    crate::pages::operations_end_when_the_node_dies($how);
                }
            }
        }
    };
    (@all $how:expr, $place:expr) => {
        run!(pages, $how, $place, [
            page_is_zero_and_keeps_written_data,
            memory_is_allocated_by_the_first_write,
            full_pool_keeps_pages_writable,
            foreign_chunk_is_not_freed,
            empty_pool_wait_ends_when_a_chunk_is_freed,
            page_has_one_owner_at_a_time,
            abandoned_page_requests_have_no_side_effect,
            departure_returns_all_chunks,
            access_that_is_not_a_whole_page_is_refused,
        ]);
    };
}

paged_scheme!(odrp, crate::How::by(pool::schemes::ODRP));
paged_scheme!(tdmem, crate::How::by(pool::schemes::TDMEM));

/// Access by requests: the checks of grants that name a place, of lanes, and of accesses in flight
/// from registered memory do not apply.
macro_rules! scheme_by_rpc {
    ($name:ident, $how:expr) => {
        mod $name {
            mod inline {
                scheme_by_rpc!(@all $how, crate::Place::Embedded);
            }
            mod shm {
                scheme_by_rpc!(@all $how, crate::Place::SameProcess);
            }
            mod shm_other_process {
                scheme_by_rpc!(@all $how, crate::Place::OtherProcess);

                #[test]
                fn operations_end_when_the_node_dies() {
                    crate::gone::operations_end_when_the_node_dies($how);
                }

                #[test]
                fn tasks_end_when_the_node_dies() {
                    crate::event_loop::tasks_end_when_the_node_dies($how);
                }
            }
        }
    };
    (@all $how:expr, $place:expr) => {
        run!($how, $place, [
            chunk_is_zero_and_keeps_written_data,
            only_a_shared_region_is_one_grant,
            the_next_owner_reads_zeros,
            keys_are_dead_after_free,
            accesses_beyond_the_grant_are_refused,
            grant_is_useless_to_another_client,
            foreign_chunk_is_not_freed,
            empty_pool_wait_ends_when_a_chunk_is_freed,
            chunk_has_one_owner_at_a_time,
            threads_share_a_pool,
            long_and_odd_lengths,
            batches_over_groups,
            abandoned_requests_leak_no_chunk,
            bad_access_does_not_disturb_other_operations,
            departure_returns_all_chunks,
            counters_match_the_operations,
        ]);
        run!(steps, $how, $place, [
            lists_are_executed_in_order,
            failed_list_says_how_far_it_came,
            refused_list_has_no_effect,
            lists_survive_bad_accesses_of_other_threads,
        ]);
        run!(event_loop, $how, $place, [
            tasks_allocate_use_and_free,
            loops_of_two_threads_share_a_group,
        ]);
        run!(by_rpc, $how, $place, [
            registered_memory_is_refused_by_name,
            abandoned_accesses_end_on_their_own,
            objects_are_shared_within_their_domain,
            objects_go_with_their_owner_or_domain,
        ]);
    };
}

scheme_by_rpc!(rpc_data, crate::How::by(pool::schemes::RPC_DATA));

/// Several cores answer the requests.
mod several_cores {
    macro_rules! cores {
        ($name:ident, $kind:expr) => {
            mod $name {
                use crate::{How, Place, Setup, checks};

                fn setup(place: Place) -> Setup {
                    Setup { how: How { cores: 3, ..How::by($kind) }, place }
                }

                #[test]
                fn chunk_has_one_owner_at_a_time() {
                    checks::chunk_has_one_owner_at_a_time(&setup(Place::Embedded));
                    checks::chunk_has_one_owner_at_a_time(&setup(Place::SameProcess));
                }

                #[test]
                fn empty_pool_wait_ends_when_a_chunk_is_freed() {
                    checks::empty_pool_wait_ends_when_a_chunk_is_freed(&setup(Place::Embedded));
                    checks::empty_pool_wait_ends_when_a_chunk_is_freed(&setup(Place::SameProcess));
                }

                #[test]
                fn departure_returns_all_chunks() {
                    checks::departure_returns_all_chunks(&setup(Place::Embedded));
                }
            }
        };
    }
    cores!(rpc_mw_2, pool::schemes::RPC_MW_2);
    cores!(rpc_mw_1, pool::schemes::RPC_MW_1);
    cores!(fine_mr, pool::schemes::FINE_MR);
    cores!(static_mr, pool::schemes::STATIC_MR);
    cores!(patronus, pool::schemes::PATRONUS);
    cores!(premmap_rpc, pool::schemes::PREMMAP_RPC);
    cores!(ondemand_rpc, pool::schemes::ONDEMAND_RPC);
    cores!(shared_region, pool::schemes::SHARED_REGION);
    cores!(rpc_data, pool::schemes::RPC_DATA);
}

/// The CPU polls for RPCs instead of sleeping.
mod rpc_mw_2_polling {
    run!(
        crate::How {
            control: pool::ControlMode::Polling,
            ..crate::How::by(pool::schemes::RPC_MW_2)
        },
        crate::Place::SameProcess,
        [
            chunk_is_zero_and_keeps_written_data,
            empty_pool_wait_ends_when_a_chunk_is_freed,
            chunk_has_one_owner_at_a_time
        ]
    );
}

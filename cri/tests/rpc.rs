//! The runtime's calls beside the life of a pod: lists in pieces, new limits, figures, events, cancellation,
//! over gRPC where the transport matters. Judged by what the kernel shows.
//!
//! Runs as root in a network namespace of its own. The binary is its own shim, as the real one is:
//! called with `shim --dir DIR` it becomes a pod.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test with a main of its own"
)]

#[path = "rpc/asked.rs"]
mod asked;
#[path = "rpc/cancel.rs"]
mod cancel;
#[path = "rpc/checkpoint.rs"]
mod checkpoint;
#[path = "rpc/checkpoint_frozen.rs"]
mod checkpoint_frozen;
#[path = "rpc/checkpoint_killed.rs"]
mod checkpoint_killed;
#[path = "rpc/checkpoint_pod.rs"]
mod checkpoint_pod;
#[path = "lifecycle/client.rs"]
#[allow(dead_code, reason = "shared with another test, which uses the rest")]
mod client;
#[path = "rpc/cut.rs"]
mod cut;
#[path = "rpc/events.rs"]
mod events;
#[path = "rpc/exec.rs"]
mod exec;
#[path = "rpc/figures.rs"]
mod figures;
#[path = "lifecycle/fixture.rs"]
#[allow(dead_code, reason = "shared with another test, which uses the rest")]
mod fixture;
#[path = "rpc/images.rs"]
mod images;
#[path = "rpc/later.rs"]
mod later;
#[path = "rpc/lists.rs"]
mod lists;
#[path = "rpc/load.rs"]
mod load;
#[path = "rpc/spdy.rs"]
mod spdy;
#[path = "rpc/streams.rs"]
mod streams;
#[path = "rpc/update.rs"]
mod update;
#[path = "rpc/wedged.rs"]
mod wedged;
#[path = "rpc/wire.rs"]
mod wire;

use std::process::ExitCode;

use fixture::{NamedTest, Session, tests};
use nix::sched::CloneFlags;

fn main() -> ExitCode {
    let other = checkpoint_frozen::wait_if_called()
        .or_else(checkpoint_killed::checkpoint_if_called)
        .or_else(later::stand_in_if_called);
    if let Some(end) = other {
        return end;
    }
    let session = match Session::begin(CloneFlags::CLONE_NEWNET) {
        Ok(session) => session,
        Err(end) => return end,
    };
    let mut tests = tests![
        lists::streams_say_what_lists_say,
        lists::filters_take_truncated_ids_that_name_one,
        lists::what_is_unknown_is_told,
        lists::a_log_is_reopened_while_its_container_runs,
        update::limits_change_in_the_kernel_and_on_record,
        update::limits_by_their_files_reach_the_kernel,
        update::a_refused_change_changes_nothing,
        update::a_pods_size_is_remembered,
        figures::every_metric_has_a_value_and_its_labels,
        figures::rates_and_sizes_are_true,
        figures::the_runtime_describes_itself,
        figures::pods_get_addresses_from_the_range_that_is_told,
        asked::a_pod_gets_the_addresses_that_it_asks_for,
        events::a_start_that_cannot_be_recorded_is_told,
        events::what_ended_while_nobody_was_there_is_told,
        events::a_pod_that_died_alone_is_told,
        events::what_nobody_heard_is_told_by_a_later_life,
        events::the_server_stops_though_somebody_listens,
        cancel::cancelled_calls_leave_nothing,
        cancel::cancelled_changes_leave_nothing,
        cancel::a_name_is_given_again_while_what_had_it_is_undone,
        cancel::deadlines_leave_nothing,
        cancel::a_cancelled_exec_is_killed,
        cancel::a_cancelled_pull_leaves_no_image,
        exec::a_late_command_tells_what_it_wrote_last,
        exec::what_was_written_is_returned_though_it_is_held_open,
        exec::a_late_command_takes_with_it_whatever_it_started,
        exec::a_full_answer_fits_into_a_message,
        exec::outputs_of_one_pod_take_bounded_memory,
        exec::thousands_of_execs_leave_nothing,
        streams::a_client_that_has_said_its_last_word_still_hears_the_pod,
        streams::a_client_that_goes_leaves_no_connection,
        streams::a_stream_on_which_nothing_moves_is_given_up,
        streams::a_client_that_says_nothing_is_not_waited_for,
        images::removals_pulls_and_creations_at_once_agree,
        images::a_failed_pull_says_what_the_kubelet_shows,
        load::a_hundred_commands_at_once_have_each_its_own,
        load::a_hundred_forwards_at_once_have_each_its_own,
        load::a_client_that_reads_late_reads_all,
        load::a_client_that_never_reads_keeps_no_container_waiting,
        load::a_container_that_never_stops_writing_needs_no_runtime,
        later::records_of_a_later_version_are_left_to_it,
        later::a_shim_that_refuses_this_version_is_left_alone,
        later::what_a_later_shim_says_beside_is_passed_over,
        later::a_pod_outlives_its_executable,
    ];
    tests.extend(tests_of_broken_parts());
    session.run(tests)
}

/// Tests of parts that are frozen, disconnected or do not respond.
fn tests_of_broken_parts() -> Vec<NamedTest> {
    tests![
        checkpoint::a_running_container_is_checkpointed_and_goes_on,
        checkpoint_pod::a_pod_is_restored_where_it_was,
        checkpoint_pod::what_cannot_be_checkpointed_is_refused,
        checkpoint_pod::a_pod_that_is_not_wholly_restored_is_undone,
        checkpoint_frozen::what_a_dead_runtime_left_frozen_goes_on,
        checkpoint_frozen::a_criu_that_outlived_its_runtime_keeps_nobody_waiting,
        checkpoint_frozen::what_is_frozen_can_be_stopped,
        checkpoint_killed::a_runtime_that_ends_behind_any_step_of_a_checkpoint_leaves_none,
        checkpoint_killed::a_runtime_killed_while_criu_dumps_finds_all_again,
        checkpoint_killed::a_pod_is_stopped_while_criu_dumps_it,
        cut::a_connection_that_was_cut_is_made_again,
        cut::a_pod_is_stopped_while_its_connection_is_cut,
        cut::a_command_has_an_environment_of_any_size,
        wedged::a_shim_that_stands_still_keeps_no_runtime_from_starting,
        wedged::a_pod_whose_shim_wakes_is_ready_again,
        wedged::a_shim_that_stops_answering_keeps_nobody_waiting,
        wedged::a_command_whose_client_goes_before_it_begins_is_killed,
        wedged::a_command_that_starts_when_nobody_waits_is_ended,
        wedged::a_shim_that_takes_no_more_connections_is_asked_again,
        wedged::a_shim_that_is_never_ready_is_ended,
        wedged::a_container_whose_record_is_lost_does_not_run_on,
        cut::pods_keep_the_limit_of_open_files_that_the_node_began_with,
    ]
}

//! Calls of the runtime besides the pod lifecycle: chunked lists, updates, statistics, events, cancellation; over
//! gRPC where the transport matters. Checked by the kernel's view.
//!
//! Runs as root in its own network namespace. The test program is also the shim, as the real binary is: with the
//! arguments `shim --dir DIR` it holds a pod.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test program with its own main"
)]

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
#[allow(dead_code, reason = "shared with another test program, which uses the other functions")]
mod client;
#[path = "rpc/disconnected.rs"]
mod disconnected;
#[path = "rpc/events.rs"]
mod events;
#[path = "rpc/exec.rs"]
mod exec;
#[path = "lifecycle/fixture.rs"]
#[allow(dead_code, reason = "shared with another test program, which uses the other functions")]
mod fixture;
#[path = "rpc/images.rs"]
mod images;
#[path = "rpc/lists.rs"]
mod lists;
#[path = "rpc/load.rs"]
mod load;
#[path = "rpc/other_versions.rs"]
mod other_versions;
#[path = "rpc/requested_addresses.rs"]
mod requested_addresses;
#[path = "rpc/spdy.rs"]
mod spdy;
#[path = "rpc/statistics.rs"]
mod statistics;
#[path = "rpc/streams.rs"]
mod streams;
#[path = "rpc/unresponsive_shim.rs"]
mod unresponsive_shim;
#[path = "rpc/update.rs"]
mod update;
#[path = "rpc/wire.rs"]
mod wire;

use std::process::ExitCode;

use fixture::{NamedTest, Session, tests};
use nix::sched::CloneFlags;

fn main() -> ExitCode {
    let other = checkpoint_frozen::wait_if_called()
        .or_else(checkpoint_killed::checkpoint_if_called)
        .or_else(other_versions::stand_in_if_called);
    if let Some(end) = other {
        return end;
    }
    let session = match Session::begin(CloneFlags::CLONE_NEWNET) {
        Ok(session) => session,
        Err(end) => return end,
    };
    let mut tests = tests![
        lists::streamed_lists_equal_lists,
        lists::filters_take_truncated_ids_that_name_one,
        lists::unknown_ids_are_reported,
        lists::a_too_large_message_is_refused,
        lists::a_log_is_reopened_while_its_container_runs,
        update::limits_change_in_the_kernel_and_on_record,
        update::unified_limits_reach_the_kernel,
        update::a_refused_change_changes_nothing,
        update::an_update_of_pod_resources_is_recorded,
        statistics::every_metric_has_a_value_and_its_labels,
        statistics::rates_and_sizes_match_the_usage,
        statistics::the_runtime_describes_itself,
        statistics::pods_get_addresses_from_the_configured_range,
        requested_addresses::a_pod_gets_the_addresses_that_it_requests,
        events::a_start_that_cannot_be_recorded_still_has_an_event,
        events::exits_without_a_runtime_are_reported,
        events::an_event_reports_a_pod_that_ended_without_a_runtime,
        events::undelivered_events_are_sent_by_the_next_runtime,
        events::the_server_stops_despite_listeners,
        cancel::cancelled_calls_leave_nothing,
        cancel::cancelled_changes_are_completed,
        cancel::a_retry_gets_the_name_after_the_first_attempt_is_undone,
        cancel::deadlines_leave_nothing,
        cancel::a_cancelled_exec_is_killed,
        cancel::a_cancelled_pull_leaves_no_image,
        exec::an_exec_timeout_returns_the_output,
        exec::output_is_returned_while_a_descendant_holds_the_pipe,
        exec::an_exec_timeout_kills_all_descendants,
        exec::the_largest_exec_output_fits_into_a_message,
        exec::outputs_of_one_pod_take_bounded_memory,
        exec::thousands_of_execs_leave_nothing,
        images::concurrent_removals_pulls_and_creations_are_consistent,
        images::a_failed_pull_has_the_error_that_the_kubelet_shows,
        other_versions::records_of_a_later_version_are_not_changed,
        other_versions::a_shim_that_refuses_this_version_is_left_alone,
        other_versions::unknown_messages_of_a_later_shim_are_ignored,
        other_versions::a_pod_outlives_its_executable,
    ];
    tests.extend(tests_of_streams());
    tests.extend(tests_of_broken_parts());
    session.run(tests)
}

/// Tests of exec, attach and port-forward with their clients.
fn tests_of_streams() -> Vec<NamedTest> {
    tests![
        streams::a_long_head_of_a_request_is_refused,
        streams::a_half_closed_stream_still_delivers_the_pods_answer,
        streams::a_disconnected_client_leaves_no_connection,
        streams::a_client_that_is_gone_is_noticed_while_its_command_does_not_read,
        streams::an_idle_stream_is_closed,
        streams::a_silent_client_is_disconnected,
        load::a_message_of_many_megabytes_reaches_the_command,
        load::a_hundred_concurrent_commands_do_not_mix_their_streams,
        load::a_hundred_concurrent_forwards_do_not_mix_their_streams,
        load::a_slow_client_gets_the_complete_output,
        load::a_client_that_does_not_read_does_not_block_the_container,
        load::a_container_that_never_stops_writing_needs_no_runtime,
    ]
}

/// Tests with shims that are frozen, disconnected or do not respond.
fn tests_of_broken_parts() -> Vec<NamedTest> {
    tests![
        checkpoint::a_checkpointed_container_continues,
        checkpoint_pod::a_pod_is_restored_where_it_was,
        checkpoint_pod::unsupported_checkpoints_are_refused,
        checkpoint_pod::a_partly_restored_pod_is_undone,
        checkpoint_frozen::containers_that_a_dead_runtime_froze_continue,
        checkpoint_frozen::a_criu_that_outlives_its_runtime_delays_only_its_container,
        checkpoint_frozen::a_frozen_container_can_be_stopped,
        checkpoint_killed::a_runtime_that_aborts_at_any_step_leaves_no_checkpoint,
        checkpoint_killed::a_runtime_killed_during_a_dump_recovers,
        checkpoint_killed::a_pod_is_stopped_while_criu_dumps_it,
        disconnected::the_runtime_reconnects_after_a_broken_connection,
        disconnected::a_pod_is_stopped_while_its_connection_is_cut,
        disconnected::a_large_environment_reaches_the_command,
        unresponsive_shim::a_stopped_shim_does_not_block_the_start_of_the_runtime,
        unresponsive_shim::a_pod_is_ready_again_when_its_shim_responds,
        unresponsive_shim::an_unresponsive_shim_blocks_no_call,
        unresponsive_shim::a_command_whose_client_disconnects_before_its_start_is_killed,
        unresponsive_shim::a_command_that_starts_after_its_timeout_is_killed,
        unresponsive_shim::the_runtime_retries_a_shim_with_a_full_backlog,
        unresponsive_shim::a_shim_that_does_not_become_ready_is_killed,
        unresponsive_shim::a_container_without_a_record_is_killed,
        disconnected::pods_have_the_original_limit_of_open_files,
    ]
}

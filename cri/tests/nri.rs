//! NRI plugins against the real runtime, over the real socket: what they hear, what they change, and
//! that none of them can hold the runtime up. What was changed is asked of the kernel.
//!
//! Runs as root in a network namespace of its own. The binary is its own shim, as the real one is, and
//! also a pre-installed plugin.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test with a main of its own"
)]

#[path = "nri/adjusting.rs"]
mod adjusting;
#[path = "lifecycle/fixture.rs"]
#[allow(dead_code, reason = "shared with the tests of lifecycles")]
mod fixture;
#[path = "nri/joining.rs"]
mod joining;
#[path = "nri/plugin.rs"]
mod plugin;
#[path = "nri/telling.rs"]
mod telling;

use std::process::ExitCode;

use fixture::{Session, tests};
use nix::sched::CloneFlags;

fn main() -> ExitCode {
    if std::env::args().nth(1).is_some_and(|role| role == "plugin") {
        return joining::preinstalled();
    }
    let session = match Session::begin(CloneFlags::CLONE_NEWNET) {
        Ok(session) => session,
        Err(end) => return end,
    };
    session.run(tests![
        telling::every_event_comes_once_in_order_and_with_names,
        telling::an_older_plugin_hears_of_changes_of_state,
        telling::a_plugin_that_refuses_leaves_nothing_behind,
        telling::a_plugin_that_does_not_answer_is_dropped,
        adjusting::an_adjustment_reaches_the_kernel,
        adjusting::hooks_run_at_every_stage,
        adjusting::plugins_that_disagree_make_nothing,
        adjusting::a_device_of_a_vendor_is_injected,
        adjusting::what_is_not_supported_is_refused_by_name,
        adjusting::a_validator_has_the_last_word,
        adjusting::a_container_can_be_evicted,
        adjusting::limits_of_existing_containers_change,
        joining::a_late_plugin_learns_of_all_that_there_is,
        joining::a_plugin_with_a_wrong_name_is_not_taken,
        joining::a_preinstalled_plugin_is_there_from_the_start,
    ])
}

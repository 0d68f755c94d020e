//! NRI plugins with the real runtime over the real socket: their events, their adjustments, and their failures, which
//! do not block the runtime. Adjustments are checked by the kernel's view.
//!
//! Runs as root in its own network namespace. By its arguments, the test program is also the shim, like the real binary,
//! and a pre-installed plugin.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test program with its own main"
)]

#[path = "nri/adjusting.rs"]
mod adjusting;
#[path = "nri/events.rs"]
mod events;
#[path = "lifecycle/fixture.rs"]
#[allow(dead_code, reason = "shared with the lifecycle tests")]
mod fixture;
#[path = "nri/joining.rs"]
mod joining;
#[path = "nri/plugin.rs"]
mod plugin;

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
        events::every_event_is_delivered_once_in_order_and_with_names,
        events::an_older_plugin_gets_state_changes,
        events::a_refusal_by_a_plugin_leaves_nothing,
        events::a_plugin_that_does_not_answer_is_dropped,
        adjusting::an_adjustment_reaches_the_kernel,
        adjusting::hooks_run_at_every_stage,
        adjusting::conflicting_plugins_fail_the_creation,
        adjusting::a_cdi_device_is_injected,
        adjusting::unsupported_adjustments_are_refused_by_name,
        adjusting::a_validating_plugin_can_refuse_the_adjustments,
        adjusting::a_container_can_be_evicted,
        adjusting::limits_of_existing_containers_change,
        joining::a_late_plugin_is_synchronized,
        joining::a_plugin_with_an_invalid_name_is_refused,
        joining::a_preinstalled_plugin_is_started_with_the_runtime,
    ])
}

//! What separates pods and containers, asked of the kernel: user namespaces, volumes, devices, groups.
//!
//! Runs as root in a network namespace of its own. The binary is its own shim, as the real one is.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test with a main of its own"
)]

#[path = "isolation/confinement.rs"]
mod confinement;
#[path = "isolation/fields.rs"]
mod fields;
#[path = "isolation/first_process.rs"]
mod first_process;
#[path = "lifecycle/fixture.rs"]
#[allow(dead_code, reason = "shared with the tests of lifecycles")]
mod fixture;
#[path = "isolation/processes.rs"]
mod processes;
#[path = "isolation/user_namespace.rs"]
mod user_namespace;
#[path = "isolation/volumes.rs"]
mod volumes;

use std::process::ExitCode;

use fixture::{Machine, Session, tests};
use nix::sched::CloneFlags;

fn main() -> ExitCode {
    let session = match Session::begin(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS) {
        Ok(session) => session,
        Err(end) => return end,
    };
    session.run(tests![
        user_namespace::root_inside_is_nobody_outside_and_owns_what_is_inside,
        user_namespace::volumes_show_their_ids_as_the_mapping_says,
        user_namespace::everything_that_a_container_has_is_there,
        user_namespace::a_shared_pid_namespace_and_the_nodes_network_are_possible,
        user_namespace::a_wrong_mapping_is_refused,
        confinement::devices_of_a_vendor_are_there_with_all_that_belongs_to_them,
        confinement::of_devices_a_container_has_those_that_are_its_own,
        confinement::groups_are_those_of_the_policy,
        confinement::the_default_profile_holds_where_there_is_apparmor,
        confinement::what_the_kernel_cannot_confine_is_refused,
        fields::a_seccomp_profile_of_old_counts,
        fields::what_cannot_be_honoured_is_refused,
        fields::a_privileged_container_needs_a_pod_for_it,
        fields::numbers_that_mean_nothing_are_refused,
        first_process::it_is_under_the_pods_seccomp_profile,
        first_process::it_is_whom_the_pod_runs_as,
        first_process::a_profile_that_cannot_be_is_refused_and_leaves_nothing,
        first_process::it_is_under_the_pods_apparmor_profile_where_there_is_apparmor,
        processes::a_container_joins_the_processes_of_another,
        processes::a_container_that_ends_leaves_nobody_behind,
        processes::a_command_runs_in_a_container_that_has_cgroups_of_its_own,
        volumes::a_volume_hides_nothing_of_the_pod,
        volumes::read_only_is_recursive_when_asked,
        volumes::an_image_is_a_volume_whole_and_in_part,
        volumes::an_image_is_a_volume_of_a_pod_with_a_user_namespace,
    ])
}

/// Runs a command under `sh -c` in a container and returns what it wrote, when it ends well.
async fn sh(machine: &Machine, id: &str, script: &str) -> String {
    let answer = machine.exec(id, &["sh", "-c", script], 0).await.expect("exec");
    let text = String::from_utf8_lossy(&answer.stdout).trim().to_owned();
    let error = String::from_utf8_lossy(&answer.stderr).into_owned();
    assert_eq!(answer.exit_code, 0, "{script}: {text} {error}");
    text
}

//! Isolation of pods and containers, checked by the kernel's view: user namespaces, volumes, devices, groups.
//!
//! Runs as root in its own network namespace. The test program is also the shim, as the real binary is.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test program with its own main"
)]

#[path = "isolation/confinement.rs"]
mod confinement;
#[path = "isolation/fields.rs"]
mod fields;
#[path = "isolation/first_process.rs"]
mod first_process;
#[path = "lifecycle/fixture.rs"]
#[allow(dead_code, reason = "shared with the lifecycle tests")]
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
        user_namespace::root_of_a_user_namespace_has_no_rights_outside,
        user_namespace::volumes_show_their_ids_as_the_mapping_says,
        user_namespace::a_container_with_a_user_namespace_has_all_features,
        user_namespace::a_privileged_container_in_a_user_namespace_opens_no_disks,
        user_namespace::a_user_namespace_works_with_a_shared_pid_namespace_and_the_host_network,
        user_namespace::a_wrong_mapping_is_refused,
        confinement::a_cdi_device_has_its_mounts_hooks_and_environment,
        confinement::a_container_accesses_only_its_devices,
        confinement::supplemental_groups_follow_the_policy,
        confinement::the_default_profile_applies_if_the_kernel_has_apparmor,
        confinement::an_absent_profile_a_global_sysctl_and_a_slice_are_refused,
        fields::the_deprecated_seccomp_field_is_honoured,
        fields::unsupported_fields_are_refused,
        fields::a_privileged_container_needs_a_privileged_pod,
        fields::unknown_enumeration_values_are_refused,
        first_process::process_1_has_the_pods_seccomp_profile,
        first_process::process_1_runs_as_the_pods_user,
        first_process::an_unusable_profile_is_refused_and_leaves_nothing,
        first_process::process_1_has_the_pods_apparmor_profile_if_the_kernel_has_apparmor,
        processes::a_container_joins_the_pid_namespace_of_another,
        processes::an_exited_container_leaves_no_process,
        processes::an_exec_runs_in_a_container_with_child_cgroups,
        volumes::a_volume_does_not_hide_files_of_the_pod,
        volumes::recursive_read_only_covers_submounts,
        volumes::an_image_volume_can_have_a_sub_path,
        volumes::an_image_is_a_volume_of_a_pod_with_a_user_namespace,
    ])
}

/// Runs a command under `sh -c` in a container. Returns its output if it succeeds.
async fn sh(machine: &Machine, id: &str, script: &str) -> String {
    let answer = machine.exec(id, &["sh", "-c", script], 0).await.expect("exec");
    let text = String::from_utf8_lossy(&answer.stdout).trim().to_owned();
    let error = String::from_utf8_lossy(&answer.stderr).into_owned();
    assert_eq!(answer.exit_code, 0, "{script}: {text} {error}");
    text
}

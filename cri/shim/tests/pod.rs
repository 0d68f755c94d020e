//! Tests of pods on the real kernel, as root. By its arguments, this binary runs the tests, a shim, or a client that
//! the tests kill.
//!
//! The tests check what the kernel shows: log files, /proc, cgroups, mounts. Every test has its own directory
//! and cgroup, and ends with a check that nothing of it is left.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test")]
#![allow(missing_docs, unreachable_pub, dead_code, reason = "the client is compiled in, and used in part")]

// Links to files of the runtime's client: the shim is tested without the runtime.
#[path = "../../src/pidfd.rs"]
mod pidfd;
mod shim_client;

#[path = "pod/attach.rs"]
mod attach;
#[path = "pod/exec.rs"]
mod exec;
#[path = "pod/fixture.rs"]
mod fixture;
#[path = "pod/keys.rs"]
mod keys;
#[path = "pod/lifecycle.rs"]
mod lifecycle;
#[path = "pod/process1.rs"]
mod process1;
#[path = "pod/recovery.rs"]
mod recovery;
#[path = "pod/root.rs"]
mod root;

use std::path::PathBuf;
use std::pin::Pin;
use std::process::ExitCode;
use std::time::Duration;

use coracle_testing::{Suite, Test};
use fixture::Pod;

type Run = fn(Pod) -> Pin<Box<dyn Future<Output = ()>>>;

macro_rules! tests {
    ($($module:ident :: $name:ident),* $(,)?) => {
        &[$((concat!(stringify!($module), "::", stringify!($name)), |pod| Box::pin($module::$name(pod)))),*]
    };
}

const TESTS: &[(&str, Run)] = tests![
    lifecycle::a_container_runs_and_its_output_and_code_are_kept,
    lifecycle::a_missing_command_fails_at_start_by_name,
    lifecycle::a_missing_working_directory_is_made,
    lifecycle::a_signal_ends_a_container_and_is_reported,
    lifecycle::a_container_over_its_memory_limit_is_reported_as_oom_killed,
    lifecycle::a_grandchild_that_holds_the_output_delays_the_exit_briefly,
    lifecycle::a_program_starts_with_default_signals,
    lifecycle::nested_cgroups_are_removed,
    lifecycle::a_broken_spec_leaves_nothing_and_names_the_cause,
    lifecycle::a_shared_pid_namespace_has_an_init_that_reaps,
    lifecycle::process_1_gives_no_access_to_the_node,
    lifecycle::process_1_starts_without_a_label_that_is_unknown,
    process1::process_1_has_its_own_program_and_root,
    process1::the_end_of_process_1_ends_the_pod_and_the_exits_are_reported,
    process1::a_creator_joins_no_process_that_is_not_of_the_pod,
    process1::inherited_descriptors_stay_outside,
    lifecycle::long_lines_are_written_in_parts,
    lifecycle::an_ordinary_user_with_a_profile_runs_without_no_new_privileges,
    lifecycle::each_volume_has_its_requested_propagation,
    lifecycle::a_user_namespace_is_joined_by_an_exec_too,
    lifecycle::a_log_is_rotated_as_it_grows_and_reopened_when_asked,
    lifecycle::a_full_disk_loses_complete_lines_only,
    lifecycle::a_pod_that_cannot_be_made_names_the_failed_step,
    lifecycle::many_containers_in_a_row_leave_memory_and_descriptors_as_they_were,
    root::a_link_in_an_image_cannot_redirect_a_mount,
    root::masked_paths_are_empty_and_read_only_paths_cannot_be_written,
    root::nothing_but_proc_is_mounted_at_proc,
    root::a_container_with_hooks_is_made_by_the_library_and_behaves_the_same,
    exec::an_exec_reads_writes_and_ends_with_its_code,
    exec::an_exec_has_the_seccomp_profile_and_the_limits_of_its_container,
    exec::absent_and_non_executable_commands_are_distinguished,
    exec::an_exec_with_a_terminal_has_one,
    exec::a_terminal_without_a_client_is_hung_up,
    exec::execs_of_a_frozen_container_leave_descriptors_for_the_pod,
    exec::an_exec_as_another_user_has_its_ids_and_no_more_rights,
    keys::a_container_has_no_key_of_the_runtime,
    keys::each_exec_has_a_keyring_of_its_own,
    attach::readers_get_what_is_written_and_a_slow_one_is_dropped,
    attach::stdin_goes_to_the_container_and_ends_with_its_only_writer,
    attach::a_terminal_is_attached_both_ways,
    attach::a_port_of_the_pod_is_reached_from_outside,
    attach::attached_clients_leave_descriptors_for_the_pod,
    attach::connections_in_progress_leave_descriptors_for_the_pod,
    recovery::exits_wait_for_the_next_agent_and_are_repeated_until_acknowledged,
    recovery::a_client_killed_in_the_middle_leaves_the_pod_running,
    recovery::a_terminated_shim_ends_its_pod_at_once,
    recovery::a_killed_shim_ends_its_containers,
    recovery::a_creator_ends_when_its_shim_is_killed,
    recovery::a_delete_during_creation_leaves_nothing,
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("shim") => coracle_shim::main(coracle_shim::ShimArgs { dir: PathBuf::from(&args[3]) }),
        Some("client") => runtime().block_on(recovery::client(PathBuf::from(&args[2]))),
        _ if std::env::var_os(fixture::RUN).is_some() => run(Suite::from_args()),
        _ => confined(&Suite::from_args(), &args[1..]),
    }
}

/// Runs the tests in a new pid namespace: they cannot signal processes of the machine, and none of their processes
/// outlives them.
fn confined(suite: &Suite, args: &[String]) -> ExitCode {
    let name = std::process::id().to_string();
    let mut command = std::process::Command::new("unshare");
    command.args(["--pid", "--mount-proc", "--kill-child", "--fork"]);
    let status = command.arg(std::env::current_exe().unwrap()).args(args).env(fixture::RUN, &name).status();
    if suite.is_run() {
        runtime().block_on(fixture::clean(&name));
    }
    if status.expect("unshare").success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn run(suite: Suite) -> ExitCode {
    keys::add_key_of_the_runtime();
    // The root mount is shared, as on a machine with systemd. The change stays in the mount namespace of `unshare`.
    let (none, flags) = (None::<&str>, nix::mount::MsFlags::MS_REC | nix::mount::MsFlags::MS_SHARED);
    nix::mount::mount(none, "/", none, flags, none).unwrap();
    let tests = TESTS.iter().map(|(name, test)| -> Test {
        let run = move || {
            runtime().block_on(async {
                let limit = Duration::from_secs(600);
                tokio::time::timeout(limit, test(Pod::start().await)).await.expect("the test ends");
            });
        };
        (name, Box::new(run))
    });
    suite.run(tests.collect())
}

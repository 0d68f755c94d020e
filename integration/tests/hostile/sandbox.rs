//! Pods that attack process 1 of their sandbox, their shim and the pids that the node has recorded.

use std::fs;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;

use coracle_integration::{Cluster, Machine, eventually, on_a_cluster, on_a_machine};
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn with_cluster(test: impl FnOnce(&mut Machine, &mut Cluster) + Send + 'static) {
    on_a_cluster(|machine, cluster| {
        test(machine, cluster);
        cluster.down();
    });
}

/// Starts a pod whose containers share a pid namespace and have SYS_PTRACE.
fn start_shared(cluster: &Cluster, name: &str) {
    let container = |name: &str| {
        format!(
            r#"{{"name":"{name}","image":"busybox","command":["sleep","100000"],
                "securityContext":{{"capabilities":{{"add":["SYS_PTRACE"]}}}}}}"#
        )
    };
    let (one, two) = (container("one"), container("two"));
    cluster.apply(&format!(
        r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"{name}"}},"spec":{{"shareProcessNamespace":true,
            "terminationGracePeriodSeconds":0,"containers":[{one},{two}]}}}}"#
    ));
    eventually("the pod to be ready", 60, || is_ready(cluster, name));
}

fn is_ready(cluster: &Cluster, pod: &str) -> bool {
    let statuses = cluster.get(&["pod", pod])["status"]["containerStatuses"].clone();
    let statuses = statuses.as_array().cloned().unwrap_or_default();
    statuses.len() == 2 && statuses.iter().all(|status| status["ready"] == true)
}

fn has_apparmor() -> bool {
    fs::read_to_string("/sys/module/apparmor/parameters/enabled").is_ok_and(|text| text.trim() == "Y")
}

fn sh(cluster: &Cluster, pod: &str, script: &str) -> String {
    cluster.kubectl(&["exec", pod, "-c", "one", "--", "sh", "-c", script])
}

/// Process 1 of the only pod with a shared pid namespace, and its shim.
fn process_1(machine: &Machine) -> Option<(i32, i32)> {
    let run = machine.path("run");
    let pids = fs::read_dir("/proc").unwrap().flatten();
    let mut pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.find_map(|pid| {
        let read =
            |pid: i32, name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let stat = read(pid, "stat");
        let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
        let is_ours =
            read(pid, "comm") == "coracle-init\n" && read(parent, "cmdline").contains(run.to_str()?);
        is_ours.then_some((pid, parent))
    })
}

/// In an earlier version, a container with `SYS_PTRACE` could reach the node's root by `/proc/1/root/..`.
#[test]
fn process_1_of_a_shared_pid_namespace_exposes_nothing_of_the_node() {
    with_cluster(|machine, cluster| {
        let secret = machine.path("secret");
        fs::write(&secret, "of the node\n").unwrap();
        start_shared(cluster, "tracer");
        let read =
            |place: &str| sh(cluster, "tracer", &format!("cat {place}{} 2>&1; true", secret.display()));
        for place in ["root", "root/..", "root/../..", "cwd", "cwd/..", "cwd/../..", "task/1/root/../.."] {
            let read = read(&format!("/proc/1/{place}"));
            // AppArmor denies the way out of the container before the kernel looks for the file.
            let is_denied = ["No such file", "Permission denied"].iter().any(|text| read.contains(text));
            assert!(is_denied, "{place}: {read}");
        }
        let mounts = sh(cluster, "tracer", "cat /proc/1/mountinfo");
        assert!(mounts.lines().count() == 1 && mounts.contains(" - tmpfs "), "{mounts}");
        if has_apparmor() {
            // The container's AppArmor profile denies access to files in /proc of a process with another profile.
            for name in ["root/", "cwd/", "fd/0", "map_files/", "exe", "environ", "maps"] {
                // A directory is listed, a file is read.
                let look = format!(
                    "if [ -d /proc/1/{name} ]; then ls /proc/1/{name}; else cat /proc/1/{name}; fi 2>&1; true"
                );
                let output = sh(cluster, "tracer", &look);
                // `ls` of busybox does not report an error of reading a directory.
                let is_unread = name == "map_files/" && output.trim().is_empty();
                assert!(output.contains("Permission denied") || is_unread, "{name}: {output}");
            }
            return;
        }
        for place in ["root", "root/..", "root/../..", "cwd", "cwd/..", "cwd/../..", "task/1/root/../.."] {
            let listed = sh(cluster, "tracer", &format!("ls -A /proc/1/{place}/"));
            assert_eq!(listed.trim(), "coracle-init", "{place}");
        }
        // The file is read-only, even for root.
        let errors = sh(cluster, "tracer", "touch /proc/1/root/x 2>&1; true");
        assert!(errors.contains("Read-only file system"), "{errors}");
        let open = sh(cluster, "tracer", "cd /proc/1/fd; for fd in *; do readlink $fd; done");
        assert!(open.lines().count() == 3 && open.lines().all(|open| open.starts_with("pipe:")), "{open}");
        let program = sh(cluster, "tracer", "readlink /proc/1/exe; wc -c </proc/1/exe; cat /proc/1/environ");
        let mut program = program.lines();
        assert_eq!(program.next(), Some("/coracle-init"));
        assert!(program.next().unwrap().trim().parse::<u32>().unwrap() < 4096);
        assert_eq!(program.next(), None, "the first process has environment variables");
        // The kernel refuses the targets of the links to processes without CAP_CHECKPOINT_RESTORE in the initial user
        // namespace.
        let links = "cd /proc/1/map_files && ls | while read file; do readlink $file || echo refused; done";
        let mapped = sh(cluster, "tracer", links);
        let mut targets = mapped.lines();
        assert!(!mapped.is_empty() && targets.all(|to| to == "/coracle-init" || to == "refused"), "{mapped}");
        let maps = sh(cluster, "tracer", "cat /proc/1/maps");
        let files = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
        assert!(files.clone().all(|file| file.starts_with('[') || file == "/coracle-init"), "{maps}");
        assert_eq!(sh(cluster, "tracer", "cat /proc/1/cmdline | tr '\\0' ' '").trim(), "coracle-init");
    });
}

/// In an earlier version, a pod stayed ready after its process 1 had exited, and its containers failed to start.
#[test]
fn a_pod_ends_with_its_process_1() {
    with_cluster(|machine, cluster| {
        start_shared(cluster, "ends");
        let (init, shim) = process_1(machine).unwrap();
        kill(Pid::from_raw(init), Signal::SIGKILL).unwrap();
        eventually("the shim to end", 10, || !Path::new(&format!("/proc/{shim}/cwd")).exists());
        eventually("the containers to run again", 60, || {
            let status = cluster.get(&["pod", "ends"])["status"].to_string();
            status.contains(r#""restartCount":1"#) && is_ready(cluster, "ends")
        });
        eventually("the event", 10, || cluster.get(&["events"]).to_string().contains("SandboxChanged"));
        let (next, _) = process_1(machine).unwrap();
        assert_ne!(next, init);
        let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap();
        let inside = sh(cluster, "ends", "readlink /proc/self/ns/pid");
        assert_eq!(Path::new(inside.trim()), namespace(&next.to_string()));
        assert_ne!(Path::new(inside.trim()), namespace("self"));
    });
}

/// Process 1 of a pod ends while the agent is not running. The next agent must not trust recorded pids.
#[test]
fn the_next_agent_notices_the_end_of_process_1() {
    with_cluster(|machine, cluster| {
        start_shared(cluster, "ends");
        let (init, shim) = process_1(machine).unwrap();
        cluster.kill();
        kill(Pid::from_raw(init), Signal::SIGKILL).unwrap();
        eventually("the shim to end", 10, || !Path::new(&format!("/proc/{shim}/cwd")).exists());
        cluster.start();
        eventually("the containers to run again", 60, || {
            let status = cluster.get(&["pod", "ends"])["status"].clone();
            let codes = status.to_string().contains(r#""exitCode":137"#);
            codes && is_ready(cluster, "ends")
        });
    });
}

/// A container may kill processes in its pid namespace, and process 1 as a tracer. The shim and the node are unaffected.
#[test]
fn a_tracer_of_process_1_can_only_end_its_own_pod() {
    with_cluster(|machine, cluster| {
        start_shared(cluster, "attacker");
        cluster.kubectl(&["run", "bystander", "--image=busybox", "--command", "--", "sleep", "100000"]);
        let (init, _) = process_1(machine).unwrap();
        // Signals from inside the pid namespace do not reach process 1.
        sh(cluster, "attacker", "kill -STOP 1; kill -KILL 1; kill -TERM 1; true");
        assert_eq!(process_1(machine).map(|(pid, _)| pid), Some(init));
        // SIGSTOP from outside, as by a tracer: containers still start, run and stop.
        kill(Pid::from_raw(init), Signal::SIGSTOP).unwrap();
        // Kills the first processes of both containers, including the killer.
        let kills = "for at in /proc/[0-9]*; do grep -q '(sleep)' $at/stat && kill -9 ${at#/proc/}; done";
        let _ended = cluster.try_kubectl(&["exec", "attacker", "-c", "one", "--", "sh", "-c", kills]);
        eventually("the container to run again", 60, || {
            let status = cluster.get(&["pod", "attacker"])["status"].to_string();
            status.contains(r#""restartCount":1"#) && is_ready(cluster, "attacker")
        });
        assert_eq!(process_1(machine).map(|(pid, _)| pid), Some(init));
        cluster.kubectl(&["delete", "pod", "attacker", "--wait", "--timeout=60s"]);
        eventually("process 1 to end", 10, || process_1(machine).is_none());
        assert_eq!(cluster.get(&["pod", "bystander"])["status"]["containerStatuses"][0]["restartCount"], 0);
    });
}

/// In an earlier version, agents used abstract socket names as locks. Root in a hostNetwork pod could bind these names.
#[test]
fn abstract_socket_names_do_not_keep_the_agent_from_starting() {
    on_a_machine(|machine| {
        let names = [
            "bridge/coracle0",
            "nftables table/coracle",
            "overlay interface/flannel.1",
            "overlay interface/coracle.1",
        ];
        let held = names.map(|name| {
            let address = SocketAddr::from_abstract_name(format!("coracle/{name}")).unwrap();
            UnixListener::bind_addr(&address).unwrap()
        });
        let mirrors = machine.start_registry();
        let mut cluster = Cluster::up(machine, &mirrors);
        assert!(!cluster.log().contains("has the name"), "{}", cluster.log());
        cluster.down();
        drop(held);
    });
}

/// In an earlier version, shims inherited the descriptors of the process that started the node.
#[test]
fn shims_and_containers_inherit_no_descriptor_of_the_nodes_parent() {
    on_a_machine(|machine| {
        let secret = machine.path("inherited");
        fs::write(&secret, "secret").unwrap();
        let file = fs::File::open(&secret).unwrap();
        // The descriptor has no close-on-exec flag, like descriptors inherited from a shell.
        let inherited = fcntl(&file, FcntlArg::F_DUPFD(200)).unwrap();
        let mirrors = machine.start_registry();
        let mut cluster = Cluster::up(machine, &mirrors);
        nix::unistd::close(inherited).unwrap();
        start_shared(&cluster, "heir");
        sh(&cluster, "heir", "(sleep 100 &)");
        let own = format!("/proc/{}", cluster.pid());
        let has = |process: &Path| {
            let open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
            open.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|file| file == secret)
        };
        assert!(
            has(Path::new(&own)),
            "the test does not find a descriptor that its own process has inherited"
        );
        let processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
        let ours: Vec<_> = processes
            .filter(|process| {
                let read = |name: &str| fs::read_to_string(process.join(name)).unwrap_or_default();
                let is_shim = read("cmdline").contains(machine.path("run").to_str().unwrap());
                (is_shim || read("cgroup").contains(machine.name())) && *process != Path::new(&own)
            })
            .collect();
        assert!(ours.len() >= 4, "{ours:?}");
        assert_eq!(ours.iter().filter(|process| has(process)).count(), 0);
        cluster.down();
    });
}

//! Invalid input is rejected with an error in Kubernetes' format and leaves no partial state. A machine that cannot
//! be a node gets one sentence with the remedy.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Output};

use coracle_integration::{Cluster, Machine, ResourceSnapshot, eventually, on_a_cluster, on_a_machine};
use coracle_testing::ip;
use nix::libc;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

/// Asserts that the API rejects the manifest with an error that contains all of `expected`.
fn assert_rejected(cluster: &Cluster, manifest: &str, expected: &[&str]) {
    let output = cluster.kubectl_of("1.37", &["create", "-f", "-"], manifest);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "accepted: {manifest}");
    for text in expected {
        assert!(errors.contains(text), "{text:?} is not in: {errors}");
    }
}

fn pod(spec: &str) -> String {
    format!(r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"p"}},"spec":{spec}}}"#)
}

/// Waits until the pod's container waits with this reason.
fn wait_for_waiting_reason(cluster: &Cluster, pod: &str, reason: &str) {
    eventually(&format!("{pod} to wait with {reason}"), 60, || {
        let status = cluster.get(&["pod", pod]);
        let waiting = &status["status"]["containerStatuses"][0]["state"]["waiting"];
        waiting["reason"] == reason
    });
}

/// Waits for an event with this reason, whose message contains `expected`.
fn wait_for_event(cluster: &Cluster, reason: &str, expected: &str) {
    eventually(&format!("an event {reason} with {expected:?}"), 30, || {
        let events = cluster.get(&["events"]);
        events["items"]
            .as_array()
            .unwrap()
            .iter()
            .any(|e| e["reason"] == reason && e["message"].as_str().is_some_and(|m| m.contains(expected)))
    });
}

/// kubectl itself rejects unknown kinds, and validates lists. It uses the protobuf form of `/openapi/v2`.
fn kubectl_validates_by_openapi(cluster: &Cluster) {
    let unknown = r#"{"apiVersion":"example.com/v1","kind":"Unknown","metadata":{"name":"u"}}"#;
    let output = cluster.kubectl_of("1.37", &["create", "-f", "-"], unknown);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && errors.contains("no matches for kind \"Unknown\""), "{errors}");
    assert!(!errors.contains("--validate=false"), "{errors}");
    let list = |field: &str| {
        let map = |name: &str, field: &str| {
            format!(
                r#"{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"name":"{name}"}},"{field}":{{"a":"b"}}}}"#
            )
        };
        let (first, second) = (map("first", "data"), map("second", field));
        format!(r#"{{"apiVersion":"v1","kind":"List","items":[{first},{second}]}}"#)
    };
    assert_rejected(cluster, &list("dat"), &["unknown field", "dat"]);
    // The server would have created the first item before it rejects the second.
    let found = cluster.kubectl(&["get", "configmaps", "first", "--ignore-not-found", "-o", "name"]);
    assert_eq!(found, "", "the list was not validated before its first item was sent");
    let output = cluster.kubectl_of("1.37", &["create", "-f", "-"], &list("data"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn invalid_manifests_are_rejected_with_field_paths_and_not_stored() {
    on_a_cluster(|_, cluster| {
        assert_rejected(
            cluster,
            &pod(r#"{"containers":[{"name":"c"}],"hostNetwork":"yes"}"#),
            &["hostNetwork"],
        );
        assert_rejected(
            cluster,
            &pod(r#"{"containers":[{"name":"c","image":"i","imgae":"x"}]}"#),
            &["unknown field", "imgae"],
        );
        assert_rejected(cluster, &pod(r#"{"containers":[]}"#), &["spec.containers", "Required value"]);
        assert_rejected(
            cluster,
            &pod(r#"{"containers":[{"name":"C_","image":"i","ports":[{"containerPort":70000}]}]}"#),
            &["spec.containers[0].name", "Invalid value", "spec.containers[0].ports[0].containerPort"],
        );
        assert_eq!(cluster.kubectl(&["get", "pods", "-o", "name"]), "");
        kubectl_validates_by_openapi(cluster);

        cluster.kubectl(&["create", "deployment", "d", "--image=busybox", "--replicas=0"]);
        let patch = r#"{"spec":{"selector":{"matchLabels":{"app":"other"}}}}"#;
        let output = cluster.try_kubectl(&["patch", "deployment", "d", "-p", patch]);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(errors.contains("field is immutable"), "{errors}");
    });
}

#[test]
fn image_errors_end_in_back_off_with_their_reason() {
    on_a_cluster(|machine, cluster| {
        cluster.kubectl(&["run", "absent", "--image=nosuchimage:1"]);
        // The test does not use `kubectl run`, which rejects the reference before the API server sees it.
        cluster.apply(
            r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"badname"},"spec":{"containers":[{"name":"c","image":"UPPER//case"}]}}"#,
        );
        cluster.kubectl(&["run", "never", "--image=nginx", "--image-pull-policy=Never"]);
        wait_for_waiting_reason(cluster, "absent", "ImagePullBackOff");
        wait_for_waiting_reason(cluster, "badname", "InvalidImageName");
        wait_for_waiting_reason(cluster, "never", "ErrImageNeverPull");
        wait_for_event(cluster, "Failed", "nosuchimage:1");
        machine.stop_registry();
        cluster.kubectl(&["run", "down", "--image=nginx"]);
        wait_for_waiting_reason(cluster, "down", "ImagePullBackOff");
        assert_eq!(fs::read_dir(machine.path("state/images/layers")).map_or(0, Iterator::count), 0);
    });
}

#[test]
fn an_image_for_another_processor_is_refused_with_both_names() {
    on_a_cluster(|machine, cluster| {
        let (own, other) = if cfg!(target_arch = "x86_64") { ("amd64", "arm64") } else { ("arm64", "amd64") };
        machine.push_for_architecture("foreign", other);
        let expected = format!("no image for linux/{own} (available: linux/{other}");
        cluster.kubectl(&["run", "foreign", "--image=foreign"]);
        wait_for_waiting_reason(cluster, "foreign", "ImagePullBackOff");
        wait_for_event(cluster, "Failed", &expected);
        let directories = ["state", "run"].map(|name| machine.path(name).to_str().unwrap().to_owned());
        let pull = ["image", "pull", "foreign", "--state-dir", &directories[0], "--run-dir", &directories[1]];
        let output = Command::new(Machine::coracle()).args(pull).output().unwrap();
        assert_one_line_error(&output, &["foreign", &expected, "use one that is built for this machine"]);

        // An image with a wrong label: its program is for Itanium (ELF: little endian, machine 50), which no emulator of
        // binfmt_misc runs.
        let root = machine.path("itanium");
        fs::create_dir(&root).unwrap();
        let mut program = [b"\x7fELF\x02\x01\x01".as_slice(), &[0; 57]].concat();
        program[16..20].copy_from_slice(&[2, 0, 50, 0]);
        fs::write(root.join("program"), program).unwrap();
        fs::set_permissions(root.join("program"), fs::Permissions::from_mode(0o755)).unwrap();
        machine.push_root("mislabelled", &root, &[]);
        cluster.kubectl(&["run", "mislabelled", "--image=mislabelled", "--command", "--", "/program"]);
        let reason = format!(
            "exec \"/program\": exec format error: the program is for the ELF machine 50, this machine runs linux/{own}; \
             use an image that is built for this machine"
        );
        wait_for_event(cluster, "Failed", &reason);
    });
}

#[test]
fn container_errors_have_the_states_and_reasons_of_kubernetes() {
    on_a_cluster(|_, cluster| {
        cluster.kubectl(&["run", "nocommand", "--image=busybox", "--command", "--", "/no/such"]);
        cluster.kubectl(&["run", "crash", "--image=busybox", "--command", "--", "sh", "-c", "exit 3"]);
        cluster.kubectl(&["run", "done", "--image=busybox", "--restart=Never", "--command", "--", "true"]);
        cluster.apply(
            r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"novolume"},"spec":{"containers":[{"name":"c","image":"busybox",
            "volumeMounts":[{"name":"v","mountPath":"/v"}]}],"volumes":[{"name":"v","configMap":{"name":"absent"}}]}}"#,
        );
        cluster.kubectl(&["run", "toobig", "--image=busybox", "--overrides",
            r#"{"spec":{"containers":[{"name":"toobig","image":"busybox","resources":{"requests":{"cpu":"9999"}}}]}}"#]);
        wait_for_event(cluster, "FailedMount", "configmap \"absent\" not found");
        wait_for_event(cluster, "FailedScheduling", "0/1 nodes are available: 1 Insufficient cpu");
        wait_for_waiting_reason(cluster, "crash", "CrashLoopBackOff");
        eventually("the pod `done` to succeed", 30, || {
            cluster.get(&["pod", "done"])["status"]["phase"] == "Succeeded"
        });
        let crash = cluster.get(&["pod", "crash"]);
        assert_eq!(crash["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"], 3);
        eventually("the start error", 30, || {
            let status = cluster.get(&["pod", "nocommand"])["status"]["containerStatuses"][0].clone();
            status.to_string().contains("/no/such")
        });
    });
}

#[test]
fn a_pod_waits_for_a_handler_that_the_runtime_does_not_have() {
    on_a_cluster(|_, cluster| {
        cluster.apply(
            r#"{"apiVersion":"node.k8s.io/v1","kind":"RuntimeClass","metadata":{"name":"other"},"handler":"sandboxed"}"#,
        );
        let of_other = r#"{"spec":{"runtimeClassName":"other"}}"#;
        cluster.kubectl(&["run", "waits", "--image=busybox", "--overrides", of_other]);
        wait_for_event(cluster, "FailedCreatePodSandBox", "runtime handler \"sandboxed\" does not exist");
        assert_eq!(cluster.get(&["pod", "waits"])["status"]["phase"], "Pending");
        let of_absent = r#"{"spec":{"runtimeClassName":"absent"}}"#;
        let absent = cluster.try_kubectl(&["run", "absent", "--image=busybox", "--overrides", of_absent]);
        let errors = String::from_utf8_lossy(&absent.stderr);
        assert!(!absent.status.success() && errors.contains("RuntimeClass \"absent\" not found"), "{errors}");
    });
}

#[test]
fn a_pod_without_a_log_directory_gets_an_event_and_starts_later() {
    on_a_cluster(|machine, cluster| {
        let logs = machine.path("logs");
        fs::remove_dir(&logs).unwrap();
        fs::write(&logs, "not a directory").unwrap();
        cluster.kubectl(&["run", "waits", "--image=busybox", "--command", "--", "sleep", "1000"]);
        wait_for_event(cluster, "FailedCreatePodSandBox", "Failed to create pod sandbox: cannot make ");
        fs::remove_file(&logs).unwrap();
        cluster.kubectl(&["wait", "pod/waits", "--for=condition=Ready", "--timeout=60s"]);
    });
}

#[test]
fn unauthenticated_and_unauthorized_requests_are_rejected() {
    on_a_cluster(|_, cluster| {
        let server = ["--server=https://127.0.0.1:6443", "--insecure-skip-tls-verify"];
        let unknown = [&["--token=nonsense", "--kubeconfig=/dev/null"][..], &server].concat();
        for (flags, error) in [
            (&["--as=jane"][..], "User \"jane\" cannot list resource \"pods\""),
            (&unknown[..], "You must be logged in to the server"),
        ] {
            let output = cluster.try_kubectl(&[&["get", "pods"][..], flags].concat());
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && errors.contains(error), "{error:?} is not in: {errors}");
        }
    });
}

/// Arguments of `coracle up` with the directories of the machine.
fn arguments(machine: &Machine) -> Vec<String> {
    let directories = [("--state-dir", "state"), ("--run-dir", "run"), ("--pod-log-dir", "logs")];
    let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
    let flags = directories.into_iter().flat_map(|(flag, name)| [flag.to_owned(), path(name)]);
    let cgroup = ["--cgroup-root".to_owned(), format!("/{}", machine.name())];
    ["up".to_owned()].into_iter().chain(flags).chain(cgroup).collect()
}

fn up(machine: &Machine, more: &[&str]) -> Output {
    Command::new(Machine::coracle()).args(arguments(machine)).args(more).output().unwrap()
}

/// Asserts a failure with one line on standard error that contains all of `expected`.
fn assert_one_line_error(output: &Output, expected: &[&str]) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{errors}");
    let sentence = errors.lines().last().unwrap_or_default();
    assert!(sentence.starts_with("coracle: "), "{errors}");
    for text in expected {
        assert!(sentence.contains(text), "{text:?} is not in: {sentence}");
    }
    let parts: Vec<&str> = sentence.split(": ").collect();
    assert!(parts.windows(2).all(|pair| pair[0] != pair[1]), "a part is repeated: {sentence}");
    assert!(sentence.matches("cannot pull").count() <= 1, "the operation is repeated: {sentence}");
}

#[test]
fn a_failed_start_reports_the_cause_and_leaves_nothing() {
    on_a_machine(|machine| {
        let before = ResourceSnapshot::of(machine);
        let taken = std::net::TcpListener::bind("0.0.0.0:6443").unwrap();
        assert_one_line_error(&up(machine, &[]), &["6443", "--listen sets another address", "in use"]);
        drop(taken);
        let file = machine.path("wrong.toml");
        fs::write(&file, "[node]\nbrigde = \"x\"\n").unwrap();
        assert_one_line_error(
            &up(machine, &["--config", file.to_str().unwrap()]),
            &["wrong.toml", "brigde", "did you mean bridge?"],
        );
        for (cidr, expected) in [
            ("10.42.0.0/28", ["cluster-cidr 10.42.0.0/28 is smaller", "a /24 (node-cidr-mask-size-ipv4)"]),
            ("fd42::/72", ["cluster-cidr fd42::/72 is smaller", "a /64 (node-cidr-mask-size-ipv6)"]),
            (
                "10.0.0.0/8",
                ["cluster-cidr 10.0.0.0/8 and service-cidr 10.43.0.0/16 overlap", "address of a service"],
            ),
        ] {
            assert_one_line_error(&up(machine, &["--cluster-cidr", cidr]), &expected);
        }
        let left: Vec<String> =
            ResourceSnapshot::of(machine).added_since(&before).into_iter().map(str::to_owned).collect();
        assert!(left.iter().all(|l| l.starts_with("file ")), "{left:?}");
    });
}

#[test]
fn a_full_disk_is_reported_with_the_remedy() {
    on_a_machine(|machine| {
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_FS).unwrap();
        let (none, state) = (None::<&str>, machine.path("state"));
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        fs::create_dir(&state).unwrap();
        mount(Some("tmpfs"), &state, Some("tmpfs"), MsFlags::empty(), Some("size=64k")).unwrap();
        // First the disk is full; then it has room for the keys, but not for the store.
        for free in [0, 24 << 10] {
            let path = state.join("fill");
            let mut file = fs::File::create(&path).unwrap();
            while file.write_all(&[7; 4096]).is_ok() {}
            file.set_len(file.metadata().unwrap().len() - free).unwrap();
            assert_one_line_error(
                &up(machine, &[]),
                &["cannot", "No space left on device", "free disk space"],
            );
        }
    });
}

/// Simulates a kernel without nftables: opening a netfilter socket fails. A process with this filter cannot remove it
/// (seccomp(2)).
#[allow(unsafe_code, reason = "the child sets its own filter before it executes the program")]
fn without_nftables(command: &mut Command) -> &mut Command {
    const NETFILTER: u32 = 12;
    let line = |code: u32, jt, jf, k| libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k };
    let load = |offset| line(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset);
    let unless = |value, jf| line(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, jf, value);
    let end = |result| line(libc::BPF_RET | libc::BPF_K, 0, 0, result);
    let number = |value: i64| u32::try_from(value).unwrap();
    // The number of the system call, and the lower halves of its first and third arguments.
    let mut program = [
        load(0),
        unless(number(libc::SYS_socket), 5),
        load(16),
        unless(number(libc::AF_NETLINK.into()), 3),
        load(32),
        unless(NETFILTER, 1),
        end(libc::SECCOMP_RET_ERRNO | number(libc::EPROTONOSUPPORT.into())),
        end(libc::SECCOMP_RET_ALLOW),
    ];
    let set = move || {
        let filter = libc::sock_fprog { len: 8, filter: program.as_mut_ptr() };
        // SAFETY: prctl(2) reads the program, which lives in this closure.
        let done = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } == 0
            // SAFETY: as above.
            && unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) } == 0;
        done.then_some(()).ok_or_else(std::io::Error::last_os_error)
    };
    // SAFETY: the closure makes system calls only.
    unsafe { command.pre_exec(set) }
}

#[test]
fn a_missing_feature_of_the_kernel_is_named_with_the_remedy() {
    on_a_machine(|machine| {
        let mut up = Command::new(Machine::coracle());
        let output = without_nftables(up.args(arguments(machine))).output().unwrap();
        assert_one_line_error(
            &output,
            &["cannot open the pod network", "nftables", "`coracle check` lists missing features"],
        );
        let mut check = Command::new(Machine::coracle());
        let output = without_nftables(check.arg("check").args(&arguments(machine)[1..5])).output().unwrap();
        let report = String::from_utf8_lossy(&output.stdout);
        let missing = "MISSING  bridge, veth and nftables (nat, maps, fib): cannot ";
        assert!(!output.status.success() && report.contains(missing), "{report}");
        assert!(report.contains("The node cannot start without it.\n"), "{report}");

        let unmount =
            "awk '$3 ~ /^cgroup/ {print $2}' /proc/mounts | sort -r | xargs -n1 umount -l && exec \"$@\"";
        let mut without_cgroups = Command::new("unshare");
        without_cgroups.args(["--mount", "sh", "-c", unmount, "sh"]).arg(Machine::coracle());
        let output = without_cgroups.args(arguments(machine)).output().unwrap();
        assert_one_line_error(
            &output,
            &["cannot prepare the cgroups of pods", "no cgroup hierarchy is mounted; mount one"],
        );
    });
}

#[test]
fn a_foreign_bridge_with_the_same_name_is_refused_and_unchanged() {
    on_a_machine(|machine| {
        ip("link add theirs0 address 0a:00:00:00:00:01 type bridge");
        ip("addr add 192.0.2.1/24 dev theirs0");
        ip("link set theirs0 up");
        // The state of the uplink is not compared, because the kernel may report the carrier of the uplink later.
        let state = || {
            let links = ip("-o link show");
            let names: Vec<String> =
                links.lines().filter_map(|line| Some(line.split(": ").nth(1)?.to_owned())).collect();
            (names, ip("addr show dev theirs0"))
        };
        let before = state();
        let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
        let listen = format!("unix://{}", path("cri.sock"));
        let flags =
            ["--bridge", "theirs0", "--cgroup-root", &format!("/{}", machine.name())].map(str::to_owned);
        let output = Command::new(Machine::coracle())
            .args(["runtime", "--root", &path("state"), "--state", &path("run"), "--listen", &listen])
            .args(["--cni-conf-dir", ""])
            .args(&flags)
            .output()
            .unwrap();
        assert_one_line_error(
            &output,
            &["theirs0 exists and was not made by coracle", "--bridge", "ip link delete theirs0"],
        );
        assert_eq!(state(), before);
        let down = Command::new(Machine::coracle())
            .args(["down", "--state-dir", &path("state"), "--run-dir", &path("run")])
            .args(&flags)
            .output()
            .unwrap();
        assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
        assert_eq!(state(), before);
    });
}

#[test]
fn a_second_node_with_the_same_bridge_is_refused() {
    on_a_cluster(|machine, _cluster| {
        let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
        let output = Command::new(Machine::coracle())
            .args(["runtime", "--root", &path("second"), "--state", &path("second-run")])
            .args(["--listen", &format!("unix://{}", path("second.sock")), "--cni-conf-dir", ""])
            .args(["--cgroup-root", &format!("/{}", machine.name()), "--nft-table", "second"])
            .output()
            .unwrap();
        assert_one_line_error(
            &output,
            &["the bridge coracle0 is in use by another runtime or agent", "--bridge"],
        );
    });
}

#[test]
fn a_second_node_on_the_same_directories_is_refused() {
    on_a_cluster(|machine, cluster| {
        assert_one_line_error(&up(machine, &[]), &["in use by process", &cluster.pid().to_string()]);
    });
}

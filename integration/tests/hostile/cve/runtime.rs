//! Vulnerabilities of runtimes and of the kubelet that a container or a pod's specification triggers.

use std::fs;
use std::process::Command;

use coracle_integration::{Cri, Kubectl, eventually, on_a_cluster, on_a_machine, process_status};
use coracle_testing::{NO_IDMAPPED_TMPFS, has_idmapped_tmpfs, skip};
use serde_json::json;

use super::{denied, refused, run_pod, sh, sleeper};

/// CVE-2018-1000400, CVE-2022-24769, CVE-2022-27652, CVE-2022-29162: containers and execs had inheritable capabilities.
#[test]
fn cve_2022_24769_no_process_has_inheritable_capabilities() {
    on_a_cluster(|_, cluster| {
        let sets = |pod: &str, process: &str| {
            sh(cluster, pod, &format!("grep -E '^Cap(Inh|Prm|Eff|Amb)' /proc/{process}/status"))
        };
        let is_none = |sets: &str, name: &str| sets.contains(&format!("{name}:\t0000000000000000"));
        let added = json!({"add": ["NET_ADMIN", "SYS_TIME"]});
        for (name, context, is_root) in [
            ("user", json!({"runAsUser": 1000}), false),
            ("user-with-added", json!({"runAsUser": 1000, "capabilities": added}), false),
            ("root", json!({}), true),
            ("root-with-added", json!({"capabilities": added}), true),
            ("privileged", json!({"privileged": true}), true),
        ] {
            run_pod(cluster, name, &sleeper(name, &json!({}), &json!({"securityContext": context})));
            for process in ["1", "self"] {
                let sets = sets(name, process);
                assert!(is_none(&sets, "CapInh") && is_none(&sets, "CapAmb"), "{name}, {process}: {sets}");
                assert_eq!(is_none(&sets, "CapEff"), !is_root, "{name}, {process}: {sets}");
            }
        }
    });
}

/// CVE-2017-1002102: a container replaced files of a volume that the kubelet writes by links. The kubelet then deleted
/// files of the host.
#[test]
fn cve_2017_1002102_root_cannot_write_volumes_of_the_kubelet() {
    on_a_cluster(|_, cluster| {
        cluster.kubectl(&["create", "secret", "generic", "s", "--from-literal=key=value"]);
        let item = json!({"path": "name", "fieldRef": {"fieldPath": "metadata.name"}});
        let pod = json!({"volumes": [{"name": "s", "secret": {"secretName": "s"}},
            {"name": "d", "downwardAPI": {"items": [item]}}]});
        let container = json!({"volumeMounts": [{"name": "s", "mountPath": "/s"}, {"name": "d", "mountPath": "/d"},
            {"name": "s", "mountPath": "/part", "subPath": "key"}]});
        run_pod(cluster, "p", &sleeper("p", &pod, &container));
        for attack in [
            "ln -s / /s/link",
            "rm /s/..data",
            "mv /d/..data /d/other",
            "touch /s/..data/file",
            "echo x >/part",
            "rm /var/run/secrets/kubernetes.io/serviceaccount/..data",
            "mount -o remount,rw /s",
        ] {
            let output = sh(cluster, "p", &format!("({attack}) 2>&1 && echo done"));
            assert!(!output.contains("done\n"), "{attack}: {output}");
        }
        assert_eq!(sh(cluster, "p", "cat /s/key /part"), "valuevalue");
    });
}

/// CVE-2022-0532: sysctls of a pod in namespaces of the host were set on the host.
#[test]
fn cve_2022_0532_sysctls_of_namespaces_of_the_host_are_refused() {
    on_a_cluster(|_, cluster| {
        for (field, name) in
            [("hostNetwork", "net.ipv4.tcp_keepalive_time"), ("hostIPC", "kernel.shm_rmid_forced")]
        {
            let sysctls = json!({"sysctls": [{"name": name, "value": "1"}]});
            let pod = sleeper("p", &json!({(field): true, "securityContext": sysctls}), &json!({}));
            let errors = denied(cluster, &["--validate=false"], &pod);
            assert!(errors.contains(name) && errors.contains(field), "{errors}");
        }
    });
}

/// CVE-2022-0811: the value of a sysctl set another sysctl of the host.
#[test]
fn cve_2022_0811_a_sysctl_value_sets_no_other_sysctl() {
    on_a_cluster(|_, cluster| {
        let pattern = || fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
        let before = pattern();
        let value = "1+kernel.core_pattern=|/evil #";
        let context = json!({"sysctls": [{"name": "kernel.shm_rmid_forced", "value": value}]});
        cluster.apply(&sleeper("p", &json!({"securityContext": context}), &json!({})));
        eventually("the sandbox to be refused", 60, || {
            let events = cluster.get(&["events"]).to_string();
            events.contains("FailedCreatePodSandBox") || events.contains("kernel.shm_rmid_forced")
        });
        assert_ne!(cluster.get(&["pod", "p"])["status"]["phase"], "Running");
        assert_eq!(pattern(), before);
    });
}

/// CVE-2022-4318, CVE-2026-15809: a line end in the variable HOME added an account to /etc/passwd.
#[test]
fn cve_2022_4318_an_environment_variable_adds_no_account() {
    on_a_cluster(|_, cluster| {
        let env = json!({"env": [{"name": "HOME", "value": "/\nintruder::0:0::/:/bin/sh"}],
            "securityContext": {"runAsUser": 4321}});
        run_pod(cluster, "p", &sleeper("p", &json!({}), &env));
        let accounts = sh(cluster, "p", "cat /etc/passwd");
        assert!(accounts.contains("root:") && !accounts.contains("intruder"), "{accounts}");
    });
}

/// CVE-2022-31030, CVE-2022-1708: the output of an exec probe filled the runtime's memory.
#[test]
fn cve_2022_31030_the_output_of_a_probe_is_bounded() {
    on_a_cluster(|_, cluster| {
        let probe = json!({"livenessProbe": {"exec": {"command": ["sh", "-c", "echo >>/runs; head -c 300000000 /dev/zero"]},
            "timeoutSeconds": 30, "periodSeconds": 1}});
        let before = process_status(cluster.pid(), "VmHWM");
        run_pod(cluster, "p", &sleeper("p", &json!({}), &probe));
        // The second probe starts after the first one has ended, with success or failure.
        eventually("a second probe", 60, || sh(cluster, "p", "cat /runs").starts_with("\n\n"));
        let grown = process_status(cluster.pid(), "VmHWM").saturating_sub(before);
        assert!(grown < 100_000, "grown by {grown} kB");
    });
}

/// CVE-2020-8551: requests to the kubelet's port stayed in its memory, for example as labels of metrics.
#[test]
fn cve_2020_8551_requests_of_unknown_clients_leave_no_memory_in_the_kubelet() {
    const REQUESTS: usize = 10_000;
    on_a_cluster(|_, cluster| {
        let memory = || process_status(cluster.pid(), "VmRSS");
        // One curl sends all requests, each with another path of four kilobytes. It connects again if it must.
        let flood = |kind: &str, requests: usize| {
            let path = "x".repeat(4_000);
            let url = format!("https://127.0.0.1:10250/{kind}-[1-{requests}]-{path}");
            let options = ["-ks", "-o", "/dev/null", "-w", "%{http_code}\\n", &url];
            let curl = Command::new("curl").args(options).output().unwrap();
            let codes = String::from_utf8(curl.stdout).unwrap();
            let refused = codes.lines().filter(|code| ["401", "404"].contains(code)).count();
            assert!(
                refused > requests / 2,
                "{refused} of {requests} were answered: {:?}",
                codes.lines().last()
            );
        };
        // The first connections allocate what later ones use again.
        flood("first", 500);
        let before = memory();
        flood("more", REQUESTS);
        let grown = memory().saturating_sub(before);
        assert!(grown < 20_000, "{REQUESTS} requests with 40 MB of paths take {grown} kB");
    });
}

/// CVE-2022-23471, CVE-2025-64329: disconnected clients of exec and attach left tasks and descriptors.
#[test]
fn cve_2022_23471_disconnected_clients_leave_no_descriptors() {
    on_a_cluster(|_, cluster| {
        run_pod(cluster, "p", &sleeper("p", &json!({}), &json!({"stdin": true, "tty": true})));
        let descriptors = |pid: u32| fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        let pid = cluster.pid();
        let clients = |kubectl: &Kubectl| {
            let before = descriptors(pid);
            let attach = ["attach", "p", "-i", "-t"];
            let exec = ["exec", "p", "-i", "-t", "--", "sleep", "1000"];
            let mut started: Vec<_> =
                (0..10).flat_map(|_| [kubectl.start(&attach), kubectl.start(&exec)]).collect();
            let all = before + started.len();
            eventually("the connections of all clients", 30, || descriptors(pid) >= all);
            for client in &mut started {
                client.kill().unwrap();
                client.wait().unwrap();
            }
        };
        clients(cluster);
        let mut before = 0;
        eventually("a constant number of descriptors", 30, || {
            let now = descriptors(pid);
            std::mem::replace(&mut before, now) == now
        });
        for _ in 0..2 {
            clients(cluster);
            eventually("the descriptors of the clients to be closed", 30, || descriptors(pid) <= before + 4);
        }
    });
}

/// CVE-2026-53495: a probe whose child processes hold its outputs open never ended, and left a task and descriptors.
#[test]
fn cve_2026_53495_children_of_a_probe_leave_no_descriptors() {
    on_a_cluster(|_, cluster| {
        let command = json!(["sh", "-c", "echo >>/runs; sleep 1000 & exit 0"]);
        // A busy machine may need seconds for an exec. Three probes that wait for the children restart the container.
        let probe = json!({"exec": {"command": command}, "periodSeconds": 1, "timeoutSeconds": 5});
        // Each probe takes as long as its outputs may stay open. Two kinds of probes run side by side.
        let probes_of_both_kinds = json!({"livenessProbe": probe, "readinessProbe": probe});
        run_pod(cluster, "p", &sleeper("p", &json!({}), &probes_of_both_kinds));
        let descriptors = || fs::read_dir(format!("/proc/{}/fd", cluster.pid())).unwrap().count();
        let probes = |number: usize| {
            eventually("probes", 60, || {
                sh(cluster, "p", "wc -l </runs").trim().parse::<usize>().is_ok_and(|runs| runs >= number)
            });
        };
        probes(2);
        let before = descriptors();
        probes(16);
        eventually("the descriptors to be closed", 30, || descriptors() <= before + 4);
        let status = &cluster.get(&["pod", "p"])["status"]["containerStatuses"][0];
        assert_eq!(status["restartCount"], 0, "the commands have exited in time: {status}");
    });
}

/// CVE-2023-2431: an empty profile of the type Localhost ran the container without seccomp.
#[test]
fn cve_2023_2431_an_empty_localhost_profile_is_refused() {
    on_a_cluster(|_, cluster| {
        let with = |profile: serde_json::Value| {
            sleeper("p", &json!({"securityContext": {"seccompProfile": profile}}), &json!({}))
        };
        let errors = denied(cluster, &[], &with(json!({"type": "Localhost"})));
        assert!(errors.contains("localhostProfile"), "{errors}");
        // The API server accepts an empty path, as upstream's; the node rejects it.
        let why = refused(cluster, "p", &with(json!({"type": "Localhost", "localhostProfile": ""})));
        assert!(why.contains("rofile"), "{why}");
        let climbing =
            json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "../../etc/passwd"}});
        let errors = denied(cluster, &[], &sleeper("p", &json!({"securityContext": climbing}), &json!({})));
        assert!(errors.contains("localhostProfile"), "{errors}");
    });
}

/// CVE-2024-10220, CVE-2025-1767: a gitRepo volume ran hooks on the host.
#[test]
fn cve_2024_10220_git_volumes_are_refused() {
    on_a_cluster(|_, cluster| {
        let volume = json!({"name": "v", "gitRepo": {"repository": "/", "directory": ".git/hooks"}});
        cluster.apply(&sleeper("p", &json!({"volumes": [volume]}), &json!({})));
        eventually("the volume to be refused", 60, || {
            let pod = cluster.get(&["pod", "p"]);
            assert_ne!(pod["status"]["phase"], "Running");
            let text = pod["status"].to_string() + &cluster.get(&["events"]).to_string();
            text.contains("gitRepo")
        });
    });
}

/// CVE-2025-0750: the path of a container's log was outside of the pod's log directory.
#[test]
fn cve_2025_0750_a_log_path_does_not_leave_its_directory() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cri = Cri::runtime(machine, &mirrors);
        let image = "docker.io/library/busybox:latest";
        cri.crictl(&["pull", image]);
        let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
        let pod = json!({"metadata": {"name": "p", "namespace": "default", "uid": "1"},
            "log_directory": path("logs/pod"), "linux": {}});
        fs::write(path("pod.json"), pod.to_string()).unwrap();
        let sandbox = cri.crictl(&["runp", &path("pod.json")]);
        for log in ["inside.log", "../escaped.log", "a/../../escaped.log", &path("escaped.log")] {
            let container = json!({"metadata": {"name": "c"}, "image": {"image": image}, "log_path": log,
                "command": ["sh", "-c", "echo line; sleep 1000"], "linux": {}});
            fs::write(path("c.json"), container.to_string()).unwrap();
            let output = cri.try_crictl(&["create", &sandbox, &path("c.json"), &path("pod.json")]);
            assert!(output.status.success() || log != "inside.log", "{output:?}");
            if output.status.success() {
                let id = String::from_utf8(output.stdout).unwrap();
                let _ = cri.try_crictl(&["start", id.trim()]);
                if log == "inside.log" {
                    eventually("the log", 10, || machine.path("logs/pod/inside.log").exists());
                }
                let _ = cri.try_crictl(&["rm", "-f", id.trim()]);
            }
            assert!(
                !machine.path("logs/escaped.log").exists() && !machine.path("escaped.log").exists(),
                "{log}"
            );
        }
        cri.down();
    });
}

/// CVE-2019-14891: the process that writes a container's log was killed with the container for lack of memory.
#[test]
fn cve_2019_14891_lack_of_memory_ends_only_the_container() {
    on_a_cluster(|_, cluster| {
        let greedy = json!({"command": ["sh", "-c", "echo begin; exec tail /dev/zero"],
            "resources": {"limits": {"memory": "24Mi"}}});
        cluster.apply(&sleeper("p", &json!({}), &greedy));
        eventually("a second start after the kill", 60, || {
            let status = cluster.get(&["pod", "p"])["status"]["containerStatuses"][0].clone();
            let killed = status.to_string().contains("OOMKilled");
            killed && status["restartCount"].as_u64() > Some(0)
        });
        assert!(cluster.kubectl(&["logs", "p", "--previous"]).contains("begin"));
    });
}

/// CVE-2025-47291: containers of pods with a user namespace were not subject to their cgroup's limits.
#[test]
fn cve_2025_47291_limits_hold_in_a_user_namespace() {
    if !has_idmapped_tmpfs() {
        skip!(NO_IDMAPPED_TMPFS);
    }
    on_a_cluster(|_, cluster| {
        let greedy = json!({"command": ["tail", "/dev/zero"], "resources": {"limits": {"memory": "24Mi"}}});
        let pod = json!({"hostUsers": false, "restartPolicy": "Never"});
        cluster.apply(&sleeper("p", &pod, &greedy));
        eventually("the kill for lack of memory", 60, || {
            let pod = cluster.get(&["pod", "p"]);
            pod["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] == "OOMKilled"
        });
    });
}

/// CVE-2018-10892, GHSA-7ww5-4wqc-m92c (CVE-2020-8694), GHSA-jq35-85cj-fj4p, CVE-2022-0492: kernel files that expose or
/// change state of the host.
#[test]
fn cve_2020_8694_files_of_the_host_kernel_are_masked() {
    on_a_cluster(|_, cluster| {
        run_pod(cluster, "p", &sleeper("p", &json!({}), &json!({})));
        let mounts = sh(cluster, "p", "cut -d ' ' -f 5 /proc/self/mountinfo");
        for masked in [
            "/proc/kcore",
            "/proc/keys",
            "/proc/latency_stats",
            "/proc/timer_list",
            "/proc/sched_debug",
            "/proc/asound",
            "/proc/acpi",
            "/proc/scsi",
            "/proc/interrupts",
            "/sys/firmware",
            "/sys/devices/virtual/powercap",
        ] {
            let content = sh(
                cluster,
                "p",
                &format!("if [ -d {masked} ]; then ls {masked}; else head -c 64 {masked}; fi"),
            );
            // On a machine with AppArmor, the profile denies files that mounts hide on other machines.
            let is_denied = ["No such file", "Permission denied"].iter().any(|text| content.contains(text));
            assert!(content.is_empty() || is_denied, "{masked}: {content}");
            // The mount is checked too, because an unmasked file may be empty at the moment.
            let is_masked = mounts.lines().any(|mount| mount == masked);
            assert!(is_masked || !fs::exists(masked).unwrap(), "{masked} is not masked: {mounts}");
        }
        for written in [
            "/proc/sys/kernel/core_pattern",
            "/proc/sysrq-trigger",
            "/proc/irq/default_smp_affinity",
            "/sys/kernel/uevent_helper",
            "/sys/fs/cgroup/memory/release_agent",
        ] {
            let output = sh(cluster, "p", &format!("echo x >{written} && echo written"));
            assert!(!output.contains("written\n"), "{written}: {output}");
        }
        let mounted = sh(cluster, "p", "mkdir /m && mount -t cgroup -o memory cgroup /m && echo mounted");
        assert!(!mounted.contains("mounted\n"), "{mounted}");
    });
}

/// CVE-2021-21334: containers of one image that started at the same time saw each other's environment.
#[test]
fn cve_2021_21334_containers_have_their_own_environment() {
    const PODS: usize = 12;
    on_a_cluster(|_, cluster| {
        // One command creates all pods, so the node starts their containers side by side.
        let pods = (0..PODS).map(|number| {
            let name = format!("p{number}");
            let env = json!({"env": [{"name": "SECRET_OF", "value": name}, {"name": format!("OF_P{number}"), "value": "x"}]});
            sleeper(&name, &json!({}), &env)
        });
        cluster.apply(&pods.collect::<Vec<_>>().join("\n---\n"));
        for number in 0..PODS {
            let name = format!("p{number}");
            eventually("the pod to run", 60, || cluster.get(&["pod", &name])["status"]["phase"] == "Running");
            // The environment of the container's process, whose variables are separated by NUL, and the environment of
            // an exec.
            for command in ["tr '\\0' '\\n' </proc/1/environ", "env"] {
                let environment = sh(cluster, &name, command);
                let mut own: Vec<_> = environment
                    .lines()
                    .filter(|line| line.starts_with("SECRET_OF=") || line.starts_with("OF_P"))
                    .collect();
                own.sort_unstable();
                let expected = [format!("OF_P{number}=x"), format!("SECRET_OF={name}")];
                assert_eq!(own, expected, "{command}: {environment}");
            }
        }
    });
}

/// CVE-2026-30892: an exec with the user id 1 ran as root.
#[test]
fn cve_2026_30892_an_exec_has_the_user_of_its_container() {
    on_a_cluster(|_, cluster| {
        let command = json!(["sh", "-c", "test $(id -u):$(id -g) = 1:1"]);
        let probe = json!({"exec": {"command": command}, "periodSeconds": 1, "timeoutSeconds": 30});
        let context = json!({"runAsUser": 1, "runAsGroup": 1});
        let container = json!({"securityContext": context, "readinessProbe": probe});
        run_pod(cluster, "p", &sleeper("p", &json!({}), &container));
        assert_eq!(sh(cluster, "p", "id -u; id -g"), "1\n1\n");
        cluster.kubectl(&["wait", "pod/p", "--for=condition=Ready", "--timeout=120s"]);
    });
}

/// CVE-2026-33186: servers of grpc-go served a path without its first slash, for which rules that deny paths had no effect.
#[test]
fn cve_2026_33186_a_grpc_path_without_its_first_slash_is_no_method() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cri = Cri::runtime(machine, &mirrors);
        let [socket, message] = ["run/cri.sock", "message"].map(|name| machine.path(name));
        // A message without fields: it is not compressed, and has no bytes.
        fs::write(&message, [0; 5]).unwrap();
        let data = format!("@{}", message.display());
        let call = |path: &str| {
            let mut curl = Command::new("curl");
            curl.args(["-s", "-m", "60", "--http2-prior-knowledge", "-D", "-", "-o", "/dev/null"]);
            curl.args(["-H", "content-type: application/grpc", "-H", "te: trailers"]);
            curl.args(["--data-binary", &data, "--request-target", path, "http://localhost/"]);
            let output = curl.arg("--unix-socket").arg(&socket).output().unwrap();
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let method = "runtime.v1.RuntimeService/Version";
        let succeeds = |path: &str| call(path).contains("grpc-status: 0");
        assert!(succeeds(&format!("/{method}")), "{}", call(&format!("/{method}")));
        for path in [method.to_owned(), format!("./{method}"), format!("//{method}")] {
            assert!(!succeeds(&path), "{path}");
        }
        cri.crictl(&["version"]);
        cri.down();
    });
}

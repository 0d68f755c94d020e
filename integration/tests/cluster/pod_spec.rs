//! The kernel's state matches the pod's specification: volumes, environment, devices, users, limits, host ports, container order.

use std::fs;
use std::path::Path;

use coracle_integration::{Cluster, Machine, eventually, http_get, on_a_cluster, on_a_machine};
use serde_json::json;

fn run(cluster: &Cluster, manifest: &str, pod: &str) {
    cluster.apply(manifest);
    cluster.kubectl(&["wait", &format!("pod/{pod}"), "--for=condition=Ready", "--timeout=300s"]);
}

#[test]
fn volumes_environment_and_devices_have_the_specified_values() {
    on_a_cluster(|machine, cluster| {
        cluster.kubectl(&[
            "create",
            "configmap",
            "settings",
            "--from-literal=colour=blue",
            "--from-literal=size=9",
        ]);
        cluster.kubectl(&["create", "secret", "generic", "key", "--from-literal=password=hush"]);
        run(
            cluster,
            r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p","labels":{"a":"b"}},"spec":{"terminationGracePeriodSeconds":0,
            "initContainers":[{"name":"first","image":"busybox","command":["sh","-c","echo made > /shared/by"],
              "volumeMounts":[{"name":"shared","mountPath":"/shared"}]}],
            "containers":[{"name":"c","image":"busybox","command":["sleep","100000"],
              "env":[{"name":"COLOUR","valueFrom":{"configMapKeyRef":{"name":"settings","key":"colour"}}},
                     {"name":"PASSWORD","valueFrom":{"secretKeyRef":{"name":"key","key":"password"}}},
                     {"name":"ME","valueFrom":{"fieldRef":{"fieldPath":"metadata.name"}}},
                     {"name":"BOTH","value":"$(ME)-$(COLOUR)"}],
              "resources":{"limits":{"memory":"64Mi","cpu":"500m"}},
              "volumeMounts":[{"name":"shared","mountPath":"/shared"},{"name":"settings","mountPath":"/settings"},
                {"name":"key","mountPath":"/key","readOnly":true},{"name":"info","mountPath":"/info"}]}],
            "volumes":[{"name":"shared","emptyDir":{}},{"name":"settings","configMap":{"name":"settings"}},
              {"name":"key","secret":{"secretName":"key"}},
              {"name":"info","downwardAPI":{"items":[{"path":"labels","fieldRef":{"fieldPath":"metadata.labels"}}]}}]}}"#,
            "p",
        );
        let read = |command: &str| cluster.kubectl(&["exec", "p", "--", "sh", "-c", command]);
        assert_eq!(read("cat /shared/by"), "made\n");
        assert_eq!(read("cat /settings/colour /settings/size"), "blue9");
        assert_eq!(read("cat /key/password"), "hush");
        assert_eq!(read("cat /info/labels").trim(), "a=\"b\"");
        assert_eq!(read("echo $COLOUR $PASSWORD $BOTH"), "blue hush p-blue\n");
        let token = read("cat /var/run/secrets/kubernetes.io/serviceaccount/token");
        assert_eq!(token.split('.').count(), 3, "{token}");
        let certificate = read("cat /var/run/secrets/kubernetes.io/serviceaccount/ca.crt");
        assert!(certificate.starts_with("-----BEGIN CERTIFICATE-----"));

        cluster.kubectl(&["patch", "configmap", "settings", "-p", r#"{"data":{"colour":"red"}}"#]);
        eventually("the volume to have the new value", 10, || read("cat /settings/colour") == "red");
        crate::devices::a_pod_gets_the_device_of_its_claim(machine, cluster);
        crate::device_plugins::a_pod_gets_the_device_of_a_plugin(machine, cluster);
    });
}

/// Value of a cgroup file of the pod's only container.
fn limit(machine: &Machine, controller: &str, file: &str) -> String {
    fn find(dir: &Path, file: &str, found: &mut Vec<String>) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten().filter(|e| e.path().is_dir()) {
            let is_container = entry.file_name().len() == 64;
            if is_container && let Ok(value) = fs::read_to_string(entry.path().join(file)) {
                found.push(value.trim().to_owned());
            }
            find(&entry.path(), file, found);
        }
    }
    let mut found = Vec::new();
    find(
        &Path::new("/sys/fs/cgroup").join(controller).join(machine.name()).join("kubepods"),
        file,
        &mut found,
    );
    assert_eq!(found.len(), 1, "{file}: {found:?}");
    found.remove(0)
}

#[test]
fn limits_users_and_capabilities_are_applied() {
    on_a_cluster(|machine, cluster| {
        run(
            cluster,
            r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p"},"spec":{"terminationGracePeriodSeconds":0,
            "securityContext":{"runAsUser":1234,"runAsGroup":5678,"supplementalGroups":[42],"seccompProfile":{"type":"RuntimeDefault"}},
            "containers":[{"name":"c","image":"busybox","command":["sleep","100000"],
              "resources":{"limits":{"memory":"64Mi","cpu":"500m"}},
              "securityContext":{"readOnlyRootFilesystem":true,"allowPrivilegeEscalation":false,"capabilities":{"drop":["ALL"]}}}]}}"#,
            "p",
        );
        assert_eq!(limit(machine, "memory", "memory.limit_in_bytes"), "67108864");
        assert_eq!(limit(machine, "cpu", "cpu.cfs_quota_us"), "50000");
        let read = |command: &str| cluster.kubectl(&["exec", "p", "--", "sh", "-c", command]);
        assert_eq!(read("id -u; id -g"), "1234\n5678\n");
        assert!(read("id -G").contains("42"));
        let status = read("cat /proc/self/status");
        for line in ["CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"] {
            assert!(status.contains(line), "{line} is not in: {status}");
        }
        assert!(!cluster.try_kubectl(&["exec", "p", "--", "touch", "/x"]).status.success());
        assert_eq!(cluster.get(&["pod", "p"])["status"]["qosClass"], "Guaranteed");
    });
}

/// Settings of a KubeletConfiguration and of a file in `--config-dir` apply to pods that do not set these fields.
#[test]
fn the_nodes_settings_of_all_pods_apply_to_pods_of_the_api_and_to_static_pods() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let (file, parts, manifests) =
            (machine.path("kubelet.yaml"), machine.path("parts"), machine.path("manifests"));
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        fs::create_dir(&parts).unwrap();
        fs::create_dir(&manifests).unwrap();
        let settings = format!("staticPodPath: {}\nserializeImagePulls: true\n", manifests.display());
        fs::write(&file, format!("{head}{settings}seccompDefault: false\n")).unwrap();
        let part = "seccompDefault: true\nallowedUnsafeSysctls: [net.core.somaxconn]\ncpuCFSQuota: false\n\
                    crashLoopBackOff: {maxContainerRestartPeriod: 9s}\n";
        fs::write(parts.join("10.conf"), format!("{head}{part}")).unwrap();
        let pod = |name: &str, sysctl: &str| {
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
                "terminationGracePeriodSeconds": 0,
                "securityContext": {"sysctls": [{"name": sysctl, "value": "99"}]},
                "containers": [{"name": "c", "image": "busybox", "command": ["sleep", "100000"],
                    "resources": {"limits": {"cpu": "100m"}}}]}})
            .to_string()
        };
        fs::write(manifests.join("static.json"), pod("static", "net.core.somaxconn")).unwrap();
        let (file, parts) = (file.to_str().unwrap(), parts.to_str().unwrap());
        let flags = ["--image-gc-high-threshold", "100", "--config", file, "--config-dir", parts];
        let cluster = Cluster::up_with(machine, &mirrors, &flags);
        run(&cluster, &pod("p", "net.core.somaxconn"), "p");
        eventually("the static pod", 120, || {
            cluster.try_kubectl(&["exec", "static-node-1", "--", "true"]).status.success()
        });
        for name in ["p", "static-node-1"] {
            let read = |path: &str| cluster.kubectl(&["exec", name, "--", "cat", path]);
            assert!(read("/proc/1/status").contains("Seccomp:\t2"), "{name}");
            assert_eq!(read("/proc/sys/net/core/somaxconn"), "99\n", "{name}");
            let command = "cat /sys/fs/cgroup/cpu.max 2>/dev/null || cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us";
            let quota = cluster.kubectl(&["exec", name, "--", "sh", "-c", command]);
            assert!(quota.starts_with("max") || quota.starts_with("-1"), "{name}: {quota}");
        }
        let crash = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "crash"}, "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "c", "image": "busybox", "command": ["false"]}]}});
        cluster.apply(&crash.to_string());
        // Without the setting, the first wait is 10 s.
        eventually("the wait of a container that crashes", 120, || {
            let pod = cluster.get(&["pod", "crash"]);
            let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"];
            waiting["message"].as_str().is_some_and(|text| text.starts_with("back-off 9s restarting"))
        });
        cluster.apply(&pod("refused", "net.ipv4.ip_forward"));
        eventually("the rejection of a sysctl that is not allowed", 60, || {
            cluster.get(&["pod", "refused"])["status"]["reason"] == "SysctlForbidden"
        });
    });
}

#[test]
fn a_pod_may_have_a_user_namespace_and_image_volumes() {
    on_a_cluster(|_, cluster| {
        cluster.kubectl(&["create", "configmap", "settings", "--from-literal=colour=blue"]);
        run(
            cluster,
            r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p"},"spec":{"terminationGracePeriodSeconds":0,
            "hostUsers":false,"containers":[{"name":"c","image":"busybox","command":["sleep","100000"],
              "volumeMounts":[{"name":"data","mountPath":"/data"},{"name":"settings","mountPath":"/settings"},
                {"name":"whole","mountPath":"/whole","readOnly":true,"recursiveReadOnly":"Enabled"},
                {"name":"nginx","mountPath":"/nginx"}]}],
            "volumes":[{"name":"data","emptyDir":{}},{"name":"settings","configMap":{"name":"settings"}},
              {"name":"whole","emptyDir":{}},{"name":"nginx","image":{"reference":"nginx","pullPolicy":"IfNotPresent"}}]}}"#,
            "p",
        );
        let read = |command: &str| cluster.kubectl(&["exec", "p", "--", "sh", "-c", command]);
        let first = first_id(&read("cat /proc/self/uid_map"));
        assert_eq!(read("id -u; cat /settings/colour; echo x > /data/x; stat -c %u /data/x"), "0\nblue0\n");
        assert_eq!(read("touch /whole/x 2>/dev/null || echo no; ls /nginx | grep -w etc"), "no\netc\n");
        let two = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"q"},"spec":{"terminationGracePeriodSeconds":0,
            "hostUsers":false,"containers":[{"name":"c","image":"busybox","command":["sleep","100000"]}]}}"#;
        run(cluster, two, "q");
        let second = first_id(&cluster.kubectl(&["exec", "q", "--", "cat", "/proc/self/uid_map"]));
        assert!(first >= 65536 && second > first, "{first} {second}");
    });
}

/// The first id on the node of a user namespace with a block of ids. Blocks with subordinate ids of local users are left
/// out, so the first block depends on the machine.
fn first_id(map: &str) -> u32 {
    let [inside, first, count] = map.split_whitespace().collect::<Vec<_>>()[..] else { panic!("{map}") };
    assert_eq!((inside, count), ("0", "65536"), "{map}");
    let first = first.parse::<u32>().unwrap();
    assert_eq!(first % 65536, 0, "{map}");
    first
}

#[test]
fn host_ports_and_the_host_network_reach_the_pod() {
    on_a_cluster(|_, cluster| {
        run(
            cluster,
            r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"port"},"spec":{"containers":[
            {"name":"c","image":"nginx","ports":[{"containerPort":80,"hostPort":8088}]}]}}"#,
            "port",
        );
        for at in ["127.0.0.1:8088", "198.51.100.10:8088"] {
            assert!(eventually("the page", 5, || http_get(at, "/")).contains("Welcome to nginx"));
        }
        run(
            cluster,
            r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"host"},"spec":{"hostNetwork":true,"containers":[
            {"name":"c","image":"nginx"}]}}"#,
            "host",
        );
        assert_eq!(cluster.get(&["pod", "host"])["status"]["podIP"], "198.51.100.10");
        assert!(eventually("the page", 5, || http_get("127.0.0.1:80", "/")).contains("Welcome to nginx"));
    });
}

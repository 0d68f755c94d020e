//! AppArmor: the default profile confines containers, execs and probes if the kernel has AppArmor.
//!
//! `MUST_HAVE_APPARMOR=1` fails the test on a kernel without it; the row `scripts/test-vm hostile` sets it.

use std::fs;

use coracle_integration::{Cluster, eventually, on_a_machine};
use serde_json::{Value, json};

/// Root with the capability to mount: without a profile each attempt of `ATTEMPTS` succeeds.
const CAPABILITIES: [&str; 1] = ["SYS_ADMIN"];

/// Prints the label of the shell, and the names of the attempts that succeed.
const ATTEMPTS: &str = "cat /proc/self/attr/current 2>/dev/null || echo none; \
    mount -t tmpfs x /tmp 2>/dev/null && umount /tmp && echo mounts; \
    sleep 100 & kill $! && echo signals";

fn is_enabled() -> bool {
    let enabled = fs::read_to_string("/sys/module/apparmor/parameters/enabled");
    let enabled = enabled.is_ok_and(|text| text.trim() == "Y");
    assert!(enabled || std::env::var_os("MUST_HAVE_APPARMOR").is_none(), "the kernel has no AppArmor");
    enabled
}

fn pod(name: &str, profile: &Value) -> String {
    let security = json!({"capabilities": {"add": CAPABILITIES}, "appArmorProfile": profile});
    // The readiness probe succeeds only with the label of the container's own process.
    let probe = "cat /proc/self/attr/current >/probed 2>/dev/null; cmp -s /probed /label || test ! -s /label";
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": "busybox", "securityContext": security,
            "command": ["sh", "-c", "cat /proc/self/attr/current >/label 2>/dev/null; sleep 1000"],
            "readinessProbe": {"exec": {"command": ["sh", "-c", probe]}, "periodSeconds": 1, "timeoutSeconds": 30}}]}})
    .to_string()
}

fn run(cluster: &Cluster, name: &str, profile: &Value) -> String {
    cluster.apply(&pod(name, profile));
    eventually(&format!("{name} to be ready"), 60, || {
        (cluster.get(&["pod", name])["status"]["containerStatuses"][0]["ready"] == true).then_some(())
    });
    let first = cluster.kubectl(&["exec", name, "--", "cat", "/label"]);
    let exec = cluster.kubectl(&["exec", name, "--", "sh", "-c", ATTEMPTS]);
    assert!(
        first.is_empty() || exec.starts_with(first.as_str()),
        "{name}: {first:?} runs, {exec:?} is entered"
    );
    exec.trim().to_owned()
}

/// A pod without a profile gets the default profile, as with containerd.
#[test]
fn the_default_profile_confines_pods_where_the_kernel_has_apparmor() {
    let is_enabled = is_enabled();
    on_a_machine(move |machine| {
        let mirrors = machine.start_registry();
        let mut cluster = Cluster::up(machine, &mirrors);
        let (confined, free) = if is_enabled {
            ("coracle-default (enforce)\nsignals", "unconfined\nmounts\nsignals")
        } else {
            ("none\nmounts\nsignals", "none\nmounts\nsignals")
        };
        assert_eq!(run(&cluster, "default", &json!({"type": "RuntimeDefault"})), confined);
        assert_eq!(run(&cluster, "silent", &Value::Null), confined);
        assert_eq!(run(&cluster, "free", &json!({"type": "Unconfined"})), free);
        cluster.apply(&pod("absent", &json!({"type": "Localhost", "localhostProfile": "no-such-profile"})));
        eventually("a profile that is not loaded to be refused", 60, || {
            let state = cluster.get(&["pod", "absent"])["status"]["containerStatuses"][0]["state"].clone();
            assert!(state["running"].is_null(), "it runs: {state}");
            state["waiting"]["message"].as_str()?.contains("no-such-profile").then_some(())
        });
        cluster.down();
    });
}

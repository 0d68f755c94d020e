use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::json;

use super::*;
use crate::cgroup::resources::{Amount, pod_requests};
use crate::node::Pressure;
use crate::pod_policy::AllowedSysctl;

static NOTHING: BTreeMap<String, Quantity> = BTreeMap::new();

fn pod(spec: serde_json::Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u"}, "spec": spec})).unwrap()
}

fn plain() -> serde_json::Value {
    json!({"containers": [{"name": "c"}]})
}

fn decide(wanted: serde_json::Value, others: &[serde_json::Value], node: serde_json::Value) -> String {
    let mut used = UsedResources { pods: others.len(), ..UsedResources::default() };
    for other in others.iter().map(|other| pod(other.clone())) {
        let amount = pod_requests(&other);
        used.requested.cpu_millis += amount.cpu_millis;
        used.requested.memory += amount.memory;
        for (name, amount) in other_requests(&other) {
            *used.others.entry(name).or_default() += amount;
        }
        used.ports.extend(host_ports(&other));
    }
    let node: Node = serde_json::from_value(node).unwrap();
    let allocatable = Amount { cpu_millis: 2000, memory: 1 << 30 };
    let machine = [("ephemeral-storage", "10Gi"), ("hugepages-2Mi", "4Mi")];
    let machine: BTreeMap<String, Quantity> =
        machine.map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned()))).into();
    let managed = vec!["x.io/managed".to_owned()];
    let (pod, pressure) = (&pod(wanted), Pressure::default());
    let input = AdmissionInput {
        pod,
        used,
        managed,
        node: Some(&node),
        max_pods: 2,
        allocatable,
        of_machine: &machine,
        pressure,
        is_shutting_down: false,
        allowed_sysctls: &["net.core.*", "kernel.msgmax"].map(|name| name.parse::<AllowedSysctl>().unwrap()),
    };
    match admit(&input) {
        Ok(shortages) if shortages.is_empty() => "admitted".to_owned(),
        Ok(shortages) => {
            let missing: Vec<String> =
                shortages.iter().map(|one| format!("{}={}", one.name, one.missing())).collect();
            format!("needs {}", missing.join(" "))
        }
        Err(verdict) => verdict.reason,
    }
}

#[test]
fn a_critical_pod_needs_the_resources_of_other_pods_and_is_not_rejected() {
    let cpu = |priority: i32| {
        let requests = json!({"cpu": "1500m"});
        json!({"priority": priority, "containers": [{"name": "c", "resources": {"requests": requests}}]})
    };
    let others = [cpu(0), plain()];
    assert_eq!(decide(cpu(1_999_999_999), &others, json!({})), "OutOfpods");
    assert_eq!(decide(cpu(2_000_000_000), &others, json!({})), "needs pods=1 cpu=1000");
    let mut elsewhere = cpu(2_000_000_000);
    elsewhere["nodeSelector"] = json!({"disk": "ssd"});
    assert_eq!(decide(elsewhere, &others, json!({})), "NodeAffinity", "no pod ends in vain");
}

#[test]
fn resources_and_places_are_limited() {
    let cpu = |cpu: &str| json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]});
    assert_eq!(decide(cpu("2"), &[], json!({})), "admitted");
    assert_eq!(decide(cpu("1500m"), &[cpu("1")], json!({})), "OutOfcpu");
    assert_eq!(decide(plain(), &[plain(), plain()], json!({})), "OutOfpods");
    let memory = json!({"containers": [{"name": "c", "resources": {"requests": {"memory": "2Gi"}}}]});
    assert_eq!(decide(memory, &[], json!({})), "OutOfmemory");
}

#[test]
fn ephemeral_storage_and_huge_pages_are_limited() {
    let requests = |list: serde_json::Value| {
        let resources = json!({"requests": list, "limits": list});
        json!({"containers": [{"name": "c", "resources": resources}]})
    };
    let storage = |amount: &str| requests(json!({"ephemeral-storage": amount}));
    assert_eq!(decide(storage("10Gi"), &[], json!({})), "admitted");
    assert_eq!(decide(storage("5Gi"), &[storage("6Gi")], json!({})), "OutOfephemeral-storage");
    let pages = |size: &str, amount: &str| {
        let name = format!("hugepages-{size}");
        requests(json!({name: amount, "memory": "1Mi"}))
    };
    assert_eq!(decide(pages("2Mi", "2Mi"), &[pages("2Mi", "2Mi")], json!({})), "admitted");
    assert_eq!(decide(pages("2Mi", "4Mi"), &[pages("2Mi", "2Mi")], json!({})), "OutOfhugepages-2Mi");
    assert_eq!(decide(pages("1Gi", "1Gi"), &[], json!({})), "OutOfhugepages-1Gi", "none of this size");
    let both = requests(json!({"ephemeral-storage": "11Gi", "a.io/x": "2", "hugepages-2Mi": "8Mi"}));
    let node = json!({"status": {"allocatable": {"a.io/x": "1"}}});
    assert_eq!(decide(both.clone(), &[], node.clone()), "OutOfephemeral-storage", "the first, as upstream");
    let mut critical = both;
    critical["priority"] = json!(2_000_000_000);
    let missing = format!("needs ephemeral-storage={} a.io/x=1 hugepages-2Mi={}", 1_i64 << 30, 4 << 20);
    assert_eq!(decide(critical, &[], node), missing);
}

#[test]
fn a_disk_of_unknown_size_has_no_ephemeral_storage_for_requests() {
    let on_unknown_disk = |spec: serde_json::Value| {
        let input = AdmissionInput {
            pod: &pod(spec),
            used: UsedResources::default(),
            managed: Vec::new(),
            node: None,
            max_pods: 9,
            allocatable: Amount { cpu_millis: 1000, memory: 1 << 30 },
            of_machine: &NOTHING,
            pressure: Pressure::default(),
            is_shutting_down: false,
            allowed_sysctls: &[],
        };
        admit(&input).err().map(|verdict| verdict.reason)
    };
    let requests = json!({"requests": {"ephemeral-storage": "1"}});
    let storage = json!({"containers": [{"name": "c", "resources": requests}]});
    assert_eq!(on_unknown_disk(storage).as_deref(), Some("OutOfephemeral-storage"));
    assert_eq!(on_unknown_disk(plain()), None);
}

/// The message of the rejection on a node with these conditions. None if the pod is admitted.
fn rejected_under(pressure: Pressure, spec: serde_json::Value) -> Option<String> {
    let input = AdmissionInput {
        pod: &pod(spec),
        used: UsedResources::default(),
        managed: Vec::new(),
        node: None,
        max_pods: 9,
        allocatable: Amount { cpu_millis: 1000, memory: 1 << 30 },
        of_machine: &NOTHING,
        pressure,
        is_shutting_down: false,
        allowed_sysctls: &[],
    };
    let verdict = admit(&input).err()?;
    assert_eq!(rejection_event(&verdict).0, "Evicted");
    assert_eq!(verdict.reason, "Evicted");
    Some(verdict.message)
}

#[test]
fn a_node_under_memory_pressure_rejects_pods_of_the_class_best_effort() {
    let memory = Pressure { memory: true, ..Pressure::default() };
    let message = "Pod was rejected: The node had condition: [MemoryPressure]. ";
    assert_eq!(rejected_under(memory, plain()).as_deref(), Some(message));
    let requests = json!({"requests": {"memory": "1Mi"}});
    let burstable = || json!({"containers": [{"name": "c", "resources": requests}]});
    assert_eq!(rejected_under(memory, burstable()), None);
    let tolerate = |key: &str| {
        let mut spec = plain();
        spec["tolerations"] = json!([{"key": key, "operator": "Exists"}]);
        spec
    };
    assert_eq!(rejected_under(memory, tolerate("node.kubernetes.io/memory-pressure")), None);
    let other = tolerate("node.kubernetes.io/disk-pressure");
    assert_eq!(rejected_under(memory, other).as_deref(), Some(message));
    let both = Pressure { disk: true, ..memory };
    let message = "Pod was rejected: The node had condition: [MemoryPressure DiskPressure]. ";
    assert_eq!(rejected_under(both, burstable()).as_deref(), Some(message));
}

#[test]
fn a_node_without_process_ids_rejects_all_pods_but_critical_ones() {
    let pids = Pressure { pids: true, ..Pressure::default() };
    let mut spec = json!({"containers": [{"name": "c", "resources": {"requests": {"memory": "1Mi"}}}]});
    let message = "Pod was rejected: The node had condition: [PIDPressure]. ";
    assert_eq!(rejected_under(pids, spec.clone()).as_deref(), Some(message));
    spec["priority"] = json!(2_000_000_000);
    assert_eq!(rejected_under(pids, spec), None);
    assert_eq!(rejected_under(Pressure::default(), plain()), None);
}

#[test]
fn extended_resources_of_the_node_are_limited() {
    let gpus = |count: &str| {
        let requests = json!({"x.io/gpu": count});
        json!({"containers": [{"name": "c", "resources": {"requests": requests, "limits": requests}}]})
    };
    let node = || json!({"status": {"allocatable": {"x.io/gpu": "2"}}});
    assert_eq!(decide(gpus("2"), &[], node()), "admitted");
    assert_eq!(decide(gpus("1"), &[gpus("1")], node()), "admitted");
    assert_eq!(decide(gpus("2"), &[gpus("1")], node()), "OutOfx.io/gpu");
    let node = json!({"status": {"allocatable": {"x.io/managed": "0"}}});
    let managed = json!({"containers": [{"name": "c", "resources": {"requests": {"x.io/managed": "1"}}}]});
    assert_eq!(decide(managed, &[], node), "admitted", "the allocation of devices decides");
    // A node without the resource ignores it, as upstream.
    assert_eq!(decide(gpus("9"), &[], json!({})), "admitted");
    let verdict = Verdict { reason: "OutOfx.io/gpu".to_owned(), message: "m".to_owned() };
    assert_eq!(rejection_event(&verdict), ("OutOfExtendedResources", "m"));
}

#[test]
fn host_ports_are_taken_by_address_and_protocol() {
    let port = |ip: &str, protocol: &str| {
        json!({"containers": [{"name": "c", "ports":
            [{"containerPort": 80, "hostPort": 8080, "hostIP": ip, "protocol": protocol}]}]})
    };
    assert_eq!(decide(port("", "TCP"), &[port("1.1.1.1", "TCP")], json!({})), "NodePorts");
    assert_eq!(decide(port("2.2.2.2", "TCP"), &[port("1.1.1.1", "TCP")], json!({})), "admitted");
    assert_eq!(decide(port("", "UDP"), &[port("", "TCP")], json!({})), "admitted");
}

#[test]
fn very_many_host_ports_are_compared_in_linear_time() {
    let all = |ip: &str| {
        let ports: Vec<_> = (1..60_000)
            .map(|port| json!({"containerPort": 80, "hostPort": port, "hostIP": ip, "protocol": "TCP"}))
            .collect();
        json!({"containers": [{"name": "c", "ports": ports}]})
    };
    assert_eq!(decide(all("2.2.2.2"), &[all("1.1.1.1")], json!({})), "admitted");
}

#[test]
fn the_node_must_be_selected_and_tolerated() {
    let mut wants = plain();
    wants["nodeSelector"] = json!({"disk": "ssd"});
    assert_eq!(decide(wants.clone(), &[], json!({})), "NodeAffinity");
    assert_eq!(decide(wants, &[], json!({"metadata": {"labels": {"disk": "ssd"}}})), "admitted");
    let tainted = json!({"spec": {"taints": [{"key": "k", "value": "v", "effect": "NoExecute"}]}});
    assert_eq!(decide(plain(), &[], tainted.clone()), "TaintToleration");
    let mut tolerant = plain();
    tolerant["tolerations"] = json!([{"key": "k", "operator": "Exists"}]);
    assert_eq!(decide(tolerant, &[], tainted), "admitted");
}

#[test]
fn unsupported_fields_are_rejected_by_name_or_reported() {
    let mut gated = plain();
    gated["schedulingGates"] = json!([{"name": "g"}]);
    assert_eq!(decide(gated, &[], json!({})), "UnsupportedField");
    let mut class = plain();
    class["runtimeClassName"] = json!("r");
    assert_eq!(decide(class, &[], json!({})), "admitted", "the runtime knows its handlers");
    let device = json!({"containers": [{"name": "c", "volumeDevices": [{"devicePath": "/d", "name": "v"}]}]});
    let verdict = unsupported::check(&pod(device)).unwrap_err();
    assert_eq!(verdict.message, "Pod was rejected: this node does not support containers[c].volumeDevices");
    let mut overhead = plain();
    overhead["overhead"] = json!({"cpu": "1"});
    assert_eq!(unsupported::ignored(&pod(overhead)), ["spec.overhead"]);
    let escape = json!({"containers": [{"name": "c", "securityContext":
        {"seccompProfile": {"type": "Localhost", "localhostProfile": "../../etc/x"}}}]});
    assert_eq!(decide(escape, &[], json!({})), "UnsupportedField");
    let restarts =
        json!({"containers": [{"name": "c"}], "initContainers": [{"name": "i", "restartPolicy": "Never"}]});
    assert_eq!(decide(restarts, &[], json!({})), "admitted");
}

#[test]
fn the_event_of_a_rejection_has_its_reason_and_message() {
    let rejected = |spec: serde_json::Value| {
        let pod = pod(spec);
        let used = UsedResources::default();
        let (managed, allocatable) = (Vec::new(), Amount::default());
        let pressure = Pressure::default();
        let input = AdmissionInput {
            pod: &pod,
            used,
            managed,
            node: None,
            max_pods: 9,
            allocatable,
            of_machine: &NOTHING,
            pressure,
            is_shutting_down: false,
            allowed_sysctls: &[],
        };
        admit(&input).unwrap_err()
    };
    let devices =
        devices_unavailable("requested number of devices unavailable for x.io/a. Requested: 1, Available: 0");
    let message = "Allocate failed due to requested number of devices unavailable for x.io/a. Requested: 1, \
                   Available: 0, which is unexpected";
    assert_eq!(rejection_event(&devices), ("UnexpectedAdmissionError", message));
    let mut windows = plain();
    windows["os"] = json!({"name": "windows"});
    let sysctl =
        json!({"containers": [], "securityContext": {"sysctls": [{"name": "kernel.x", "value": "1"}]}});
    for (spec, event) in [
        (windows, ("PodOSNotSupported", "Failed to admit pod as the OS field doesn't match node OS")),
        (sysctl, ("SysctlForbidden", "forbidden sysctl: \"kernel.x\" not allowlisted")),
    ] {
        let verdict = rejected(spec);
        assert_eq!(rejection_event(&verdict), event);
        assert_eq!(verdict.message, format!("Pod was rejected: {}", event.1));
    }
}

#[test]
fn a_sysctl_must_be_safe_and_of_the_pod_itself() {
    let with = |name: &str, host: bool| {
        let context = json!({"sysctls": [{"name": name, "value": "1"}]});
        json!({"containers": [{"name": "c"}], "hostNetwork": host, "securityContext": context})
    };
    assert_eq!(decide(with("net.ipv4.tcp_syncookies", false), &[], json!({})), "admitted");
    assert_eq!(decide(with("net/ipv4/tcp_syncookies", false), &[], json!({})), "admitted");
    assert_eq!(decide(with("net.ipv4.tcp_syncookies", true), &[], json!({})), "SysctlForbidden");
    assert_eq!(decide(with("kernel.core_pattern", false), &[], json!({})), "SysctlForbidden");
    assert_eq!(decide(with("kernel/core_pattern", false), &[], json!({})), "SysctlForbidden");
}

/// The node of [`decide`] allows `net.core.*` and `kernel.msgmax`.
#[test]
fn an_unsafe_sysctl_is_admitted_if_the_node_allows_it_and_the_pod_has_its_own_namespace() {
    let of = |name: &str, host: &str| {
        let context = json!({"sysctls": [{"name": name, "value": "1"}]});
        decide(
            json!({"containers": [{"name": "c"}], (host): true, "securityContext": context}),
            &[],
            json!({}),
        )
    };
    for name in ["net.core.somaxconn", "net/core/somaxconn", "kernel.msgmax"] {
        assert_eq!(of(name, "hostPID"), "admitted", "{name}");
    }
    for name in ["net.ipv4.ip_forward", "kernel.msgmnb", "net/core/../../kernel/core_pattern"] {
        assert_eq!(of(name, "hostPID"), "SysctlForbidden", "{name}");
    }
    assert_eq!(of("net.core.somaxconn", "hostNetwork"), "SysctlForbidden");
    assert_eq!(of("kernel.msgmax", "hostIPC"), "SysctlForbidden");
}

#[test]
fn a_pod_for_another_system_is_refused() {
    let with = |os: &str| {
        let mut spec = plain();
        spec["os"] = json!({"name": os});
        spec
    };
    assert_eq!(decide(with("linux"), &[], json!({})), "admitted");
    assert_eq!(decide(with("windows"), &[], json!({})), "PodOSNotSupported");
    let mut both = with("windows");
    both["schedulingGates"] = json!([{"name": "g"}]);
    assert_eq!(decide(both, &[], json!({})), "PodOSNotSupported", "before fields that other systems have");
}

#[test]
fn a_node_that_shuts_down_rejects_every_pod() {
    let critical = json!({"priority": 2_000_000_000, "containers": [{"name": "c"}]});
    for spec in [critical, json!({"containers": [{"name": "c"}]})] {
        let input = AdmissionInput {
            pod: &pod(spec),
            used: UsedResources::default(),
            managed: Vec::new(),
            node: None,
            max_pods: 9,
            allocatable: Amount { cpu_millis: 1000, memory: 1 << 30 },
            of_machine: &NOTHING,
            pressure: Pressure::default(),
            is_shutting_down: true,
            allowed_sysctls: &[],
        };
        let verdict = admit(&input).unwrap_err();
        let event = ("NodeShutdown", "Pod was rejected as the node is shutting down.");
        assert_eq!(rejection_event(&verdict), event);
        assert_eq!(verdict.reason, event.0);
    }
}

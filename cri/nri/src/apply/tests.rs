use coracle_proto::nri::{
    Hook, Hooks, HugepageLimit, KeyValue, LinuxContainerAdjustment, LinuxDevice, LinuxIoPriority,
    LinuxMemory, LinuxMemoryPolicy, LinuxNamespace, LinuxNetDevice, LinuxPids, LinuxRdt, LinuxResources,
    LinuxScheduler, LinuxSeccomp, LinuxSyscall, Mount, OptionalBool, OptionalInt, OptionalInt64,
    OptionalString, OptionalUInt64, PosixRlimit,
};
use oci_spec::runtime as oci;
use serde_json::json;

use super::*;
use crate::describe;

const V1: Features = Features { unified: false, hugetlb: false };
const V2: Features = Features { unified: true, hugetlb: true };

fn spec() -> Spec {
    serde_json::from_value(json!({
        "ociVersion": "1.2.0",
        "annotations": { "kept": "1", "gone": "1" },
        "process": {
            "user": { "uid": 7, "gid": 8 },
            "cwd": "/",
            "args": ["sh"],
            "env": ["A=1", "B=2"],
            "rlimits": [{ "type": "RLIMIT_NOFILE", "hard": 10, "soft": 10 }],
        },
        "mounts": [
            { "destination": "/proc", "type": "proc", "source": "proc" },
            { "destination": "/data", "type": "bind", "source": "/image", "options": ["rbind"] },
        ],
        "linux": {
            "namespaces": [{ "type": "mount" }, { "type": "ipc", "path": "/proc/1/ns/ipc" }],
            "devices": [{ "path": "/dev/old", "type": "c", "major": 1, "minor": 2 }],
            "resources": { "memory": { "limit": 100, "swap": 100 } },
            "sysctl": { "net.a": "1" },
        },
    }))
    .expect("a spec")
}

fn linux(linux: LinuxContainerAdjustment) -> ContainerAdjustment {
    ContainerAdjustment { linux: Some(linux), ..Default::default() }
}

fn limits(resources: LinuxResources) -> ContainerAdjustment {
    linux(LinuxContainerAdjustment { resources: Some(resources), ..Default::default() })
}

fn variable(key: &str, value: &str) -> KeyValue {
    KeyValue { key: key.into(), value: value.into() }
}

#[test]
fn the_process_is_adjusted() {
    let mut spec = spec();
    let asked = ContainerAdjustment {
        annotations: [("-gone".to_owned(), String::new()), ("new".to_owned(), "2".to_owned())].into(),
        env: vec![variable("-A", ""), variable("B", "3"), variable("C", "4=5")],
        args: vec!["run".into(), "it".into()],
        rlimits: vec![PosixRlimit { r#type: "RLIMIT_NOFILE".into(), hard: 20, soft: 15 }],
        hooks: Some(Hooks {
            create_runtime: vec![Hook {
                path: "/bin/hook".into(),
                args: vec!["hook".into(), "x".into()],
                timeout: Some(OptionalInt { value: 3 }),
                ..Default::default()
            }],
            ..Default::default()
        }),
        linux: Some(LinuxContainerAdjustment {
            oom_score_adj: Some(OptionalInt { value: 500 }),
            io_priority: Some(LinuxIoPriority { class: 2, priority: 6 }),
            scheduler: Some(LinuxScheduler { policy: 4, nice: 5, flags: vec![0], ..Default::default() }),
            ..Default::default()
        }),
        ..Default::default()
    };
    apply(&mut spec, &asked, V1).expect("apply");
    let adjusted = describe::container(&spec);
    assert_eq!(adjusted.env, ["B=3", "C=4=5"]);
    assert_eq!(adjusted.args, ["run", "it"]);
    assert_eq!(adjusted.annotations, [("kept".into(), "1".into()), ("new".into(), "2".into())].into());
    assert_eq!(adjusted.rlimits, asked.rlimits);
    assert_eq!(adjusted.hooks, asked.hooks);
    let process = spec.process().as_ref().expect("process");
    assert_eq!(process.oom_score_adj(), Some(500));
    let json = serde_json::to_value(process).expect("json");
    assert_eq!(json["ioPriority"], json!({ "class": "IOPRIO_CLASS_BE", "priority": 6 }));
    assert_eq!(json["scheduler"]["policy"], "SCHED_BATCH");
    assert_eq!(json["scheduler"]["flags"], json!(["SCHED_RESET_ON_FORK"]));
}

#[test]
fn mounts_are_replaced_removed_and_nested_in_order() {
    let mut spec = spec();
    let mount = |destination: &str, source: &str| Mount {
        destination: destination.into(),
        r#type: "bind".into(),
        source: source.into(),
        options: vec!["rbind".into(), "ro".into()],
    };
    let asked = ContainerAdjustment {
        mounts: vec![mount("/data/inner", "/b"), mount("-/proc", ""), mount("/data", "/a")],
        ..Default::default()
    };
    apply(&mut spec, &asked, V1).expect("apply");
    let adjusted = describe::container(&spec).mounts;
    assert_eq!(adjusted, [mount("/data", "/a"), mount("/data/inner", "/b")]);
    let relative = ContainerAdjustment { mounts: vec![mount("data", "/a")], ..Default::default() };
    assert!(apply(&mut spec, &relative, V1).is_err());
}

#[test]
fn the_linux_part_is_adjusted() {
    let mut spec = spec();
    let device =
        LinuxDevice { path: "/dev/new".into(), r#type: "b".into(), major: 8, minor: 1, ..Default::default() };
    let namespace = |typ: &str| LinuxNamespace { r#type: typ.into(), path: String::new() };
    let asked = linux(LinuxContainerAdjustment {
        devices: vec![LinuxDevice { path: "-/dev/old".into(), ..Default::default() }, device.clone()],
        cgroups_path: "/elsewhere/c".into(),
        namespaces: vec![namespace("-ipc"), namespace("uts")],
        sysctl: [("-net.a".to_owned(), String::new()), ("net.b".to_owned(), "2".to_owned())].into(),
        seccomp_policy: Some(LinuxSeccomp {
            default_action: "SCMP_ACT_ALLOW".into(),
            architectures: vec!["SCMP_ARCH_X86_64".into()],
            syscalls: vec![LinuxSyscall {
                names: vec!["mkdir".into()],
                action: "SCMP_ACT_ERRNO".into(),
                ..Default::default()
            }],
            ..Default::default()
        }),
        memory_policy: Some(LinuxMemoryPolicy { mode: 2, nodes: "0".into(), flags: vec![0] }),
        ..Default::default()
    });
    apply(&mut spec, &asked, V1).expect("apply");
    let adjusted = describe::container(&spec).linux.expect("linux");
    assert_eq!(adjusted.devices, [device]);
    assert_eq!(adjusted.cgroups_path, "/elsewhere/c");
    let names: Vec<_> = adjusted.namespaces.iter().map(|namespace| namespace.r#type.as_str()).collect();
    assert_eq!(names, ["mount", "uts"]);
    assert_eq!(adjusted.sysctl, [("net.b".into(), "2".into())].into());
    assert_eq!(adjusted.seccomp_policy, asked.linux.expect("linux").seccomp_policy);
    let rules = adjusted.resources.expect("limits").devices;
    assert_eq!((rules[0].r#type.as_str(), rules[0].access.as_str()), ("b", "rwm"));
    let json = serde_json::to_value(spec.linux()).expect("json");
    assert_eq!(json["memoryPolicy"]["mode"], "MPOL_BIND");
}

#[test]
fn limits_are_set_and_swap_follows_memory() {
    let mut spec = spec();
    let memory = LinuxMemory { limit: Some(OptionalInt64 { value: 50 }), ..Default::default() };
    let asked = limits(LinuxResources {
        memory: Some(memory),
        pids: Some(LinuxPids { limit: 9 }),
        ..Default::default()
    });
    apply(&mut spec, &asked, V1).expect("apply");
    let adjusted = describe::container(&spec).linux.and_then(|linux| linux.resources).expect("limits");
    let memory = adjusted.memory.expect("memory");
    assert_eq!((memory.limit, memory.swap), (memory.swap, Some(OptionalInt64 { value: 50 })));
    assert_eq!(adjusted.pids, Some(LinuxPids { limit: 9 }));
}

#[test]
fn unsupported_adjustments_are_refused_by_name() {
    let named = |value: &str| Some(OptionalString { value: value.into() });
    let unified = [("memory.high".to_owned(), "1".to_owned())].into();
    let page = HugepageLimit { page_size: "2MB".into(), limit: 1 };
    let swappiness = LinuxMemory { swappiness: Some(OptionalUInt64 { value: 1 }), ..Default::default() };
    let flat = LinuxMemory { use_hierarchy: Some(OptionalBool { value: false }), ..Default::default() };
    let cases = [
        (limits(LinuxResources { blockio_class: named("fast"), ..Default::default() }), V1, "blockio_class"),
        (limits(LinuxResources { rdt_class: named("gold"), ..Default::default() }), V1, "rdt_class"),
        (limits(LinuxResources { unified, ..Default::default() }), V1, "unified"),
        (limits(LinuxResources { hugepage_limits: vec![page], ..Default::default() }), V1, "hugepage_limits"),
        (limits(LinuxResources { memory: Some(swappiness), ..Default::default() }), V2, "memory.swappiness"),
        (limits(LinuxResources { memory: Some(flat), ..Default::default() }), V1, "memory.use_hierarchy"),
        (
            linux(LinuxContainerAdjustment {
                net_devices: [("eth1".to_owned(), LinuxNetDevice::default())].into(),
                ..Default::default()
            }),
            V1,
            "net_devices",
        ),
        (
            linux(LinuxContainerAdjustment {
                rdt: Some(LinuxRdt { clos_id: named("x"), ..Default::default() }),
                ..Default::default()
            }),
            V1,
            "rdt",
        ),
        (
            linux(LinuxContainerAdjustment {
                seccomp_policy: Some(LinuxSeccomp { default_action: "ALLOW".into(), ..Default::default() }),
                ..Default::default()
            }),
            V1,
            "seccomp_policy",
        ),
        (
            linux(LinuxContainerAdjustment {
                namespaces: vec![LinuxNamespace { r#type: "-mount".into(), path: String::new() }],
                ..Default::default()
            }),
            V1,
            "namespaces",
        ),
        (
            linux(LinuxContainerAdjustment {
                oom_score_adj: Some(OptionalInt { value: 5000 }),
                ..Default::default()
            }),
            V1,
            "oom_score_adj",
        ),
    ];
    for (asked, features, field) in cases {
        let error = apply(&mut spec(), &asked, features).expect_err(field);
        assert_eq!(error.field, field);
    }
    let none = limits(LinuxResources { blockio_class: named(""), ..Default::default() });
    apply(&mut spec(), &none, V1).expect("an empty class is accepted");
}

#[test]
fn an_empty_adjustment_changes_nothing() {
    let mut adjusted = spec();
    apply(&mut adjusted, &linux(LinuxContainerAdjustment::default()), V2).expect("apply");
    assert_eq!(
        serde_json::to_value(&adjusted).expect("json"),
        serde_json::to_value::<oci::Spec>(spec()).expect("json")
    );
}

//! Decides whether a spec can be created directly, without the container library.

use libcontainer::oci_spec::runtime::{
    Linux, LinuxNamespace, LinuxNamespaceType, LinuxSeccompAction, Process, Spec,
};

/// Whether `launch` and `first_process` implement everything that the spec requests. They implement all
/// fields that are not checked here.
pub(super) fn is_supported(spec: &Spec) -> bool {
    let has_hooks = spec.hooks().is_some();
    let process = spec.process().as_ref().is_some_and(process_is_supported);
    let linux = spec.linux().as_ref().is_some_and(linux_is_supported);
    !has_hooks && process && linux
}

fn process_is_supported(process: &Process) -> bool {
    process.io_priority().is_none() && process.scheduler().is_none() && process.exec_cpu_affinity().is_none()
}

fn linux_is_supported(linux: &Linux) -> bool {
    let propagation = linux.rootfs_propagation().as_deref();
    linux.net_devices().is_none()
        && linux.intel_rdt().is_none()
        && linux.memory_policy().is_none()
        && linux.personality().is_none()
        && linux.time_offsets().is_none()
        && matches!(propagation, None | Some("private" | "slave" | "shared"))
        && linux.namespaces().iter().flatten().all(namespace_is_supported)
        && has_a_mount_namespace(linux)
        && !has_listener(linux)
        && limits_are_supported(linux)
}

/// Whether the direct creation supports a namespace. Only the library sets a host name in a new UTS namespace. The
/// direct creation mounts only in a mount namespace that the container owns.
fn namespace_is_supported(namespace: &LinuxNamespace) -> bool {
    match namespace.typ() {
        LinuxNamespaceType::Uts => namespace.path().is_some(),
        LinuxNamespaceType::Mount => namespace.path().is_none(),
        LinuxNamespaceType::Time => false,
        LinuxNamespaceType::Network
        | LinuxNamespaceType::Ipc
        | LinuxNamespaceType::Pid
        | LinuxNamespaceType::User
        | LinuxNamespaceType::Cgroup => true,
    }
}

fn has_a_mount_namespace(linux: &Linux) -> bool {
    linux.namespaces().iter().flatten().any(|namespace| namespace.typ() == LinuxNamespaceType::Mount)
}

/// Whether a seccomp listener (SCMP_ACT_NOTIFY) decides on some calls.
fn has_listener(linux: &Linux) -> bool {
    let rules = linux.seccomp().iter().flat_map(|seccomp| seccomp.syscalls().iter().flatten());
    rules.into_iter().any(|rule| rule.action() == LinuxSeccompAction::ScmpActNotify)
}

fn limits_are_supported(linux: &Linux) -> bool {
    linux.resources().as_ref().is_none_or(|resources| {
        resources.block_io().is_none() && resources.network().is_none() && resources.rdma().is_none()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn spec() -> Value {
        json!({
            "ociVersion": "1.2.0",
            "process": { "cwd": "/", "user": { "uid": 0, "gid": 0 }, "args": ["x"] },
            "linux": {
                "namespaces": [{ "type": "mount" }, { "type": "pid" }, { "type": "uts", "path": "/proc/1/ns/uts" }],
                "rootfsPropagation": "private",
                "resources": { "memory": { "limit": 1 } },
            },
        })
    }

    fn with(pointer: &str, name: &str, value: Value) -> bool {
        let mut spec = spec();
        spec.pointer_mut(pointer).unwrap().as_object_mut().unwrap().insert(name.to_owned(), value);
        is_supported(&serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn specs_with_library_only_fields_are_rejected() {
        assert!(is_supported(&serde_json::from_value(spec()).unwrap()));
        assert!(with("/linux", "maskedPaths", json!(["/proc/kcore"])));
        assert!(!with("", "hooks", json!({ "createContainer": [] })));
        assert!(!with("/process", "ioPriority", json!({ "class": "IOPRIO_CLASS_IDLE", "priority": 1 })));
        assert!(!with("/process", "scheduler", json!({ "policy": "SCHED_BATCH" })));
        assert!(!with("/linux", "rootfsPropagation", json!("unbindable")));
        assert!(!with("/linux", "namespaces", json!([{ "type": "mount" }, { "type": "uts" }])));
        assert!(!with("/linux", "namespaces", json!([{ "type": "pid" }])));
        assert!(!with("/linux/resources", "blockIO", json!({ "weight": 100 })));
        let listener = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [{ "names": ["mkdir"], "action": "SCMP_ACT_NOTIFY" }],
        });
        assert!(!with("/linux", "seccomp", listener));
    }
}

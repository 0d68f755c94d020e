//! Which containers are made by our own way: those that ask for nothing that it does not do.

use libcontainer::oci_spec::runtime::{
    Linux, LinuxNamespace, LinuxNamespaceType, LinuxSeccompAction, Process, Spec,
};

/// Whether all that the spec asks for is what [`super::launch`] and [`super::first`] do. What a field means that
/// is not named here they honour.
pub(super) fn is_ordinary(spec: &Spec) -> bool {
    let has_hooks = spec.hooks().is_some();
    let process = spec.process().as_ref().is_some_and(is_ordinary_process);
    let linux = spec.linux().as_ref().is_some_and(is_ordinary_linux);
    !has_hooks && process && linux
}

fn is_ordinary_process(process: &Process) -> bool {
    process.io_priority().is_none() && process.scheduler().is_none() && process.exec_cpu_affinity().is_none()
}

fn is_ordinary_linux(linux: &Linux) -> bool {
    let propagation = linux.rootfs_propagation().as_deref();
    linux.net_devices().is_none()
        && linux.intel_rdt().is_none()
        && linux.memory_policy().is_none()
        && linux.personality().is_none()
        && linux.time_offsets().is_none()
        && matches!(propagation, None | Some("private" | "slave" | "shared"))
        && linux.namespaces().iter().flatten().all(is_ordinary_namespace)
        && has_a_mount_namespace(linux)
        && !has_listener(linux)
        && has_ordinary_limits(linux)
}

/// A name of the host is set by the library; a mount namespace of somebody else's is no container's own.
fn is_ordinary_namespace(namespace: &LinuxNamespace) -> bool {
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

/// A filter whose decisions somebody else makes.
fn has_listener(linux: &Linux) -> bool {
    let rules = linux.seccomp().iter().flat_map(|seccomp| seccomp.syscalls().iter().flatten());
    rules.into_iter().any(|rule| rule.action() == LinuxSeccompAction::ScmpActNotify)
}

fn has_ordinary_limits(linux: &Linux) -> bool {
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
        is_ordinary(&serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn what_only_the_library_does_goes_to_the_library() {
        assert!(is_ordinary(&serde_json::from_value(spec()).unwrap()));
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

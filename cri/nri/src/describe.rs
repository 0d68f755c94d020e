//! Converts a container's OCI spec to NRI messages. No I/O.

use std::collections::HashMap;

use coracle_proto::nri::{
    Container, Hook, Hooks, HugepageLimit, IoPrioClass, LinuxContainer, LinuxCpu, LinuxDevice,
    LinuxDeviceCgroup, LinuxIoPriority, LinuxMemory, LinuxNamespace, LinuxPids, LinuxResources, LinuxSeccomp,
    LinuxSeccompArg, LinuxSyscall, Mount, OptionalBool, OptionalFileMode, OptionalInt, OptionalInt64,
    OptionalUInt32, OptionalUInt64, PosixRlimit, User,
};
use oci_spec::runtime as oci;

/// The container as described by the spec. The caller adds id, names, state and times.
#[must_use]
pub fn container(spec: &oci::Spec) -> Container {
    let mut container = Container {
        annotations: sorted(spec.annotations().as_ref()),
        mounts: spec.mounts().iter().flatten().map(mount).collect(),
        hooks: spec.hooks().as_ref().map(hooks),
        ..Container::default()
    };
    let mut linux = spec.linux().as_ref().map(linux).unwrap_or_default();
    if let Some(process) = spec.process() {
        container.args = process.args().clone().unwrap_or_default();
        container.env = process.env().clone().unwrap_or_default();
        container.rlimits = process.rlimits().iter().flatten().map(rlimit).collect();
        let user = process.user();
        container.user = Some(User {
            uid: user.uid(),
            gid: user.gid(),
            additional_gids: user.additional_gids().clone().unwrap_or_default(),
        });
        linux.oom_score_adj = process.oom_score_adj().map(|score| OptionalInt { value: score.into() });
        linux.io_priority = process.io_priority().map(|priority| LinuxIoPriority {
            class: match priority.class() {
                oci::IOPriorityClass::IoprioClassRt => IoPrioClass::IoprioClassRt.into(),
                oci::IOPriorityClass::IoprioClassBe => IoPrioClass::IoprioClassBe.into(),
                oci::IOPriorityClass::IoprioClassIdle => IoPrioClass::IoprioClassIdle.into(),
            },
            priority: i32::try_from(priority.priority()).unwrap_or_default(),
        });
    }
    container.linux = Some(linux);
    container
}

/// Converts resources.
#[must_use]
pub fn resources(limits: &oci::LinuxResources) -> LinuxResources {
    LinuxResources {
        memory: limits.memory().as_ref().map(memory),
        cpu: limits.cpu().as_ref().map(cpu),
        hugepage_limits: limits.hugepage_limits().iter().flatten().map(hugepages).collect(),
        unified: sorted(limits.unified().as_ref()),
        devices: limits.devices().iter().flatten().map(device_rule).collect(),
        pids: limits.pids().map(|pids| LinuxPids { limit: pids.limit() }),
        ..LinuxResources::default()
    }
}

fn sorted(map: Option<&HashMap<String, String>>) -> std::collections::BTreeMap<String, String> {
    map.into_iter().flatten().map(|(name, value)| (name.clone(), value.clone())).collect()
}

fn text(path: Option<&std::path::PathBuf>) -> String {
    path.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default()
}

fn mount(mount: &oci::Mount) -> Mount {
    Mount {
        destination: mount.destination().to_string_lossy().into_owned(),
        r#type: mount.typ().clone().unwrap_or_default(),
        source: text(mount.source().as_ref()),
        options: mount.options().clone().unwrap_or_default(),
    }
}

fn hooks(hooks: &oci::Hooks) -> Hooks {
    let list = |hooks: &Option<Vec<oci::Hook>>| hooks.iter().flatten().map(hook).collect();
    Hooks {
        prestart: list(hooks.prestart()),
        create_runtime: list(hooks.create_runtime()),
        create_container: list(hooks.create_container()),
        start_container: list(hooks.start_container()),
        poststart: list(hooks.poststart()),
        poststop: list(hooks.poststop()),
    }
}

fn hook(hook: &oci::Hook) -> Hook {
    Hook {
        path: hook.path().to_string_lossy().into_owned(),
        args: hook.args().clone().unwrap_or_default(),
        env: hook.env().clone().unwrap_or_default(),
        timeout: hook.timeout().map(|value| OptionalInt { value }),
    }
}

fn rlimit(limit: &oci::PosixRlimit) -> PosixRlimit {
    PosixRlimit { r#type: limit.typ().to_string(), hard: limit.hard(), soft: limit.soft() }
}

fn linux(linux: &oci::Linux) -> LinuxContainer {
    LinuxContainer {
        namespaces: linux.namespaces().iter().flatten().map(namespace).collect(),
        devices: linux.devices().iter().flatten().map(device).collect(),
        resources: linux.resources().as_ref().map(resources),
        cgroups_path: text(linux.cgroups_path().as_ref()),
        seccomp_policy: linux.seccomp().as_ref().map(seccomp),
        sysctl: sorted(linux.sysctl().as_ref()),
        ..LinuxContainer::default()
    }
}

/// The name of the namespace type in the OCI's JSON.
pub(crate) fn namespace_type(typ: oci::LinuxNamespaceType) -> &'static str {
    match typ {
        oci::LinuxNamespaceType::Mount => "mount",
        oci::LinuxNamespaceType::Cgroup => "cgroup",
        oci::LinuxNamespaceType::Uts => "uts",
        oci::LinuxNamespaceType::Ipc => "ipc",
        oci::LinuxNamespaceType::User => "user",
        oci::LinuxNamespaceType::Pid => "pid",
        oci::LinuxNamespaceType::Network => "network",
        oci::LinuxNamespaceType::Time => "time",
    }
}

fn namespace(namespace: &oci::LinuxNamespace) -> LinuxNamespace {
    LinuxNamespace {
        r#type: namespace_type(namespace.typ()).to_owned(),
        path: text(namespace.path().as_ref()),
    }
}

fn device(device: &oci::LinuxDevice) -> LinuxDevice {
    LinuxDevice {
        path: device.path().to_string_lossy().into_owned(),
        r#type: device.typ().as_str().to_owned(),
        major: device.major(),
        minor: device.minor(),
        file_mode: device.file_mode().map(|value| OptionalFileMode { value }),
        uid: device.uid().map(|value| OptionalUInt32 { value }),
        gid: device.gid().map(|value| OptionalUInt32 { value }),
    }
}

fn device_rule(rule: &oci::LinuxDeviceCgroup) -> LinuxDeviceCgroup {
    LinuxDeviceCgroup {
        allow: rule.allow(),
        r#type: rule.typ().map(|typ| typ.as_str().to_owned()).unwrap_or_default(),
        major: rule.major().map(|value| OptionalInt64 { value }),
        minor: rule.minor().map(|value| OptionalInt64 { value }),
        access: rule.access().clone().unwrap_or_default(),
    }
}

fn memory(memory: &oci::LinuxMemory) -> LinuxMemory {
    let number = |value: Option<i64>| value.map(|value| OptionalInt64 { value });
    let flag = |value: Option<bool>| value.map(|value| OptionalBool { value });
    LinuxMemory {
        limit: number(memory.limit()),
        reservation: number(memory.reservation()),
        swap: number(memory.swap()),
        kernel: number(memory.kernel()),
        kernel_tcp: number(memory.kernel_tcp()),
        swappiness: memory.swappiness().map(|value| OptionalUInt64 { value }),
        disable_oom_killer: flag(memory.disable_oom_killer()),
        use_hierarchy: flag(memory.use_hierarchy()),
    }
}

fn cpu(cpu: &oci::LinuxCpu) -> LinuxCpu {
    let size = |value: Option<u64>| value.map(|value| OptionalUInt64 { value });
    let number = |value: Option<i64>| value.map(|value| OptionalInt64 { value });
    LinuxCpu {
        shares: size(cpu.shares()),
        quota: number(cpu.quota()),
        period: size(cpu.period()),
        realtime_runtime: number(cpu.realtime_runtime()),
        realtime_period: size(cpu.realtime_period()),
        cpus: cpu.cpus().clone().unwrap_or_default(),
        mems: cpu.mems().clone().unwrap_or_default(),
    }
}

fn hugepages(limit: &oci::LinuxHugepageLimit) -> HugepageLimit {
    HugepageLimit {
        page_size: limit.page_size().clone(),
        limit: u64::try_from(limit.limit()).unwrap_or(u64::MAX),
    }
}

fn seccomp(policy: &oci::LinuxSeccomp) -> LinuxSeccomp {
    LinuxSeccomp {
        default_action: policy.default_action().to_string(),
        default_errno: policy.default_errno_ret().map(|value| OptionalUInt32 { value }),
        architectures: policy.architectures().iter().flatten().map(ToString::to_string).collect(),
        flags: policy.flags().iter().flatten().map(ToString::to_string).collect(),
        listener_path: text(policy.listener_path().as_ref()),
        listener_metadata: policy.listener_metadata().clone().unwrap_or_default(),
        syscalls: policy.syscalls().iter().flatten().map(syscall).collect(),
    }
}

fn syscall(syscall: &oci::LinuxSyscall) -> LinuxSyscall {
    LinuxSyscall {
        names: syscall.names().clone(),
        action: syscall.action().to_string(),
        errno_ret: syscall.errno_ret().map(|value| OptionalUInt32 { value }),
        args: syscall.args().iter().flatten().map(argument).collect(),
    }
}

fn argument(argument: &oci::LinuxSeccompArg) -> LinuxSeccompArg {
    LinuxSeccompArg {
        index: u32::try_from(argument.index()).unwrap_or(u32::MAX),
        value: argument.value(),
        value_two: argument.value_two().unwrap_or_default(),
        op: argument.op().to_string(),
    }
}

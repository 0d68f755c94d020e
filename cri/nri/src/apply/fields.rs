//! Applies all adjustments except resources.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use coracle_proto::nri::{
    self, ContainerAdjustment, IoPrioClass, LinuxContainerAdjustment, LinuxSchedulerFlag,
    LinuxSchedulerPolicy, MpolFlag, MpolMode,
};
use oci_spec::runtime as oci;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::{Applied, ApplyError, refuse};
use crate::describe::namespace_type;
use crate::mark::{unmark, variable};

/// Removes and sets entries of a map. Removals come first, because an entry may be removed and set again.
fn change_entries(map: &mut HashMap<String, String>, requested: &BTreeMap<String, String>) {
    for name in requested.keys() {
        if let (bare, true) = unmark(name) {
            map.remove(bare);
        }
    }
    for (name, value) in requested {
        if !unmark(name).1 {
            map.insert(name.clone(), value.clone());
        }
    }
}

pub(super) fn annotations(spec: &mut oci::Spec, requested: &BTreeMap<String, String>) {
    if !requested.is_empty() {
        change_entries(spec.annotations_mut().get_or_insert_default(), requested);
    }
}

/// Parses a value from JSON in the format of the OCI. NRI and OCI use the same names of values. If a name is unknown,
/// the error contains the name.
fn parse<T: DeserializeOwned>(field: &'static str, value: serde_json::Value) -> Result<T, ApplyError> {
    serde_json::from_value(value).map_err(|error| refuse(field, error.to_string()))
}

pub(super) fn process(spec: &mut oci::Spec, requested: &ContainerAdjustment) -> Applied {
    let linux = requested.linux.as_ref();
    let process = spec.process_mut().get_or_insert_default();
    env(process, &requested.env);
    if !requested.args.is_empty() {
        process.set_args(Some(requested.args.clone()));
    }
    let mut limits = process.rlimits().clone().unwrap_or_default();
    for limit in &requested.rlimits {
        let limit: oci::PosixRlimit =
            parse("rlimits", json!({ "type": limit.r#type, "hard": limit.hard, "soft": limit.soft }))?;
        limits.retain(|known| known.typ() != limit.typ());
        limits.push(limit);
    }
    if !limits.is_empty() {
        process.set_rlimits(Some(limits));
    }
    if let Some(score) = linux.and_then(|linux| linux.oom_score_adj) {
        let score = i32::try_from(score.value).ok().filter(|score| (-1000..=1000).contains(score));
        let why = "the score must be from -1000 to 1000";
        process.set_oom_score_adj(Some(score.ok_or_else(|| refuse("oom_score_adj", why))?));
    }
    if let Some(requested) = linux.and_then(|linux| linux.io_priority.as_ref()) {
        process.set_io_priority(io_priority(*requested)?);
    }
    if let Some(requested) = linux.and_then(|linux| linux.scheduler.as_ref()) {
        process.set_scheduler(scheduler(requested)?);
    }
    Ok(())
}

fn env(process: &mut oci::Process, requested: &[nri::KeyValue]) {
    if requested.is_empty() {
        return;
    }
    let mut env = process.env().clone().unwrap_or_default();
    for entry in requested {
        let (bare, removed) = unmark(&entry.key);
        let at = env.iter().position(|known| variable(known) == bare);
        match (at, removed) {
            (Some(at), true) => drop(env.remove(at)),
            (Some(at), false) => env[at] = format!("{bare}={}", entry.value),
            (None, true) => {}
            (None, false) => env.push(format!("{bare}={}", entry.value)),
        }
    }
    process.set_env(Some(env));
}

fn io_priority(requested: nri::LinuxIoPriority) -> Result<Option<oci::LinuxIOPriority>, ApplyError> {
    let class = IoPrioClass::try_from(requested.class)
        .map_err(|_unknown| refuse("io_priority", format!("unknown class {}", requested.class)))?;
    if class == IoPrioClass::IoprioClassNone {
        return Ok(None);
    }
    let value = json!({ "class": class.as_str_name(), "priority": requested.priority });
    parse("io_priority", value).map(Some)
}

fn scheduler(requested: &nri::LinuxScheduler) -> Result<Option<oci::Scheduler>, ApplyError> {
    let policy = LinuxSchedulerPolicy::try_from(requested.policy)
        .map_err(|_unknown| refuse("scheduler", format!("unknown policy {}", requested.policy)))?;
    if policy == LinuxSchedulerPolicy::SchedNone {
        return Ok(None);
    }
    let mut flags: Vec<oci::LinuxSchedulerFlag> = Vec::new();
    for flag in &requested.flags {
        flags.push(match LinuxSchedulerFlag::try_from(*flag) {
            Ok(LinuxSchedulerFlag::SchedFlagResetOnFork) => oci::LinuxSchedulerFlag::SchedResetOnFork,
            Ok(LinuxSchedulerFlag::SchedFlagReclaim) => oci::LinuxSchedulerFlag::SchedFlagReclaim,
            Ok(LinuxSchedulerFlag::SchedFlagDlOverrun) => oci::LinuxSchedulerFlag::SchedFlagDLOverrun,
            Ok(LinuxSchedulerFlag::SchedFlagKeepPolicy) => oci::LinuxSchedulerFlag::SchedFlagKeepPolicy,
            Ok(LinuxSchedulerFlag::SchedFlagKeepParams) => oci::LinuxSchedulerFlag::SchedFlagKeepParams,
            Ok(LinuxSchedulerFlag::SchedFlagUtilClampMin) => oci::LinuxSchedulerFlag::SchedFlagUtilClampMin,
            Ok(LinuxSchedulerFlag::SchedFlagUtilClampMax) => oci::LinuxSchedulerFlag::SchedFlagUtilClampMax,
            Err(_unknown) => return Err(refuse("scheduler", format!("unknown flag {flag}"))),
        });
    }
    let deadline = |value: u64| (value != 0).then_some(value);
    let mut scheduler: oci::Scheduler = parse("scheduler", json!({ "policy": policy.as_str_name() }))?;
    scheduler.set_nice(Some(requested.nice));
    scheduler.set_priority(Some(requested.priority));
    scheduler.set_flags((!flags.is_empty()).then_some(flags));
    scheduler.set_runtime(deadline(requested.runtime));
    scheduler.set_deadline(deadline(requested.deadline));
    scheduler.set_period(deadline(requested.period));
    Ok(Some(scheduler))
}

/// Appends hooks to the existing hooks.
pub(super) fn hooks(spec: &mut oci::Spec, requested: &nri::Hooks) {
    if *requested == nri::Hooks::default() {
        return;
    }
    let hooks = spec.hooks_mut().get_or_insert_default();
    let add = |known: &mut Option<Vec<oci::Hook>>, requested: &[nri::Hook]| {
        if !requested.is_empty() {
            known.get_or_insert_default().extend(requested.iter().map(hook));
        }
    };
    add(hooks.prestart_mut(), &requested.prestart);
    add(hooks.create_runtime_mut(), &requested.create_runtime);
    add(hooks.create_container_mut(), &requested.create_container);
    add(hooks.start_container_mut(), &requested.start_container);
    add(hooks.poststart_mut(), &requested.poststart);
    add(hooks.poststop_mut(), &requested.poststop);
}

fn hook(requested: &nri::Hook) -> oci::Hook {
    let some = |list: &[String]| (!list.is_empty()).then(|| list.to_vec());
    let mut hook = oci::Hook::default();
    hook.set_path(PathBuf::from(&requested.path));
    hook.set_args(some(&requested.args));
    hook.set_env(some(&requested.env));
    hook.set_timeout(requested.timeout.map(|timeout| timeout.value));
    hook
}

/// Replaces, adds and removes mounts by destination. Then sorts them by depth, so that parents come first.
pub(super) fn mounts(spec: &mut oci::Spec, requested: &[nri::Mount]) -> Applied {
    if requested.is_empty() {
        return Ok(());
    }
    let mut mounts = spec.mounts().clone().unwrap_or_default();
    for mount in requested {
        let (destination, removed) = unmark(&mount.destination);
        if !destination.starts_with('/') {
            return Err(refuse("mounts", format!("the destination {destination:?} is not absolute")));
        }
        mounts.retain(|known| known.destination() != Path::new(destination));
        if !removed {
            let mut added = oci::Mount::default();
            added.set_destination(destination.into());
            added.set_typ((!mount.r#type.is_empty()).then(|| mount.r#type.clone()));
            added.set_source((!mount.source.is_empty()).then(|| mount.source.clone().into()));
            added.set_options((!mount.options.is_empty()).then(|| mount.options.clone()));
            mounts.push(added);
        }
    }
    // A stable sort: mounts of equal depth keep their order.
    mounts.sort_by_key(|mount| mount.destination().components().count());
    spec.set_mounts(Some(mounts));
    Ok(())
}

pub(super) fn linux(spec: &mut oci::Spec, requested: &LinuxContainerAdjustment) -> Applied {
    let linux = spec.linux_mut().get_or_insert_default();
    for device in &requested.devices {
        set_device(linux, device)?;
    }
    if !requested.cgroups_path.is_empty() {
        linux.set_cgroups_path(Some(requested.cgroups_path.clone().into()));
    }
    for namespace in &requested.namespaces {
        set_namespace(linux, namespace)?;
    }
    if !requested.sysctl.is_empty() {
        let mut sysctls = linux.sysctl().clone().unwrap_or_default();
        change_entries(&mut sysctls, &requested.sysctl);
        linux.set_sysctl(Some(sysctls));
    }
    if let Some(policy) = &requested.seccomp_policy {
        linux.set_seccomp(Some(seccomp(policy)?));
    }
    if let Some(policy) = &requested.memory_policy {
        linux.set_memory_policy(Some(memory_policy(policy)?));
    }
    if requested.net_devices.keys().any(|name| !unmark(name).1) {
        let why = "moving a network device of the host into a pod is not supported";
        return Err(refuse("net_devices", why));
    }
    if requested
        .rdt
        .as_ref()
        .is_some_and(|rdt| *rdt != nri::LinuxRdt { remove: rdt.remove, ..Default::default() })
    {
        return Err(refuse("rdt", "classes of Resource Director Technology are not supported"));
    }
    Ok(())
}

fn set_device(linux: &mut oci::Linux, requested: &nri::LinuxDevice) -> Applied {
    let (path, removed) = unmark(&requested.path);
    let mut devices = linux.devices().clone().unwrap_or_default();
    devices.retain(|known| known.path() != Path::new(path));
    if !removed {
        let mut device: oci::LinuxDevice = parse(
            "devices",
            json!({ "path": path, "type": requested.r#type, "major": requested.major, "minor": requested.minor }),
        )?;
        device.set_file_mode(requested.file_mode.map(|mode| mode.value & 0o7777));
        device.set_uid(requested.uid.map(|id| id.value));
        device.set_gid(requested.gid.map(|id| id.value));
        let resources = linux.resources_mut().get_or_insert_default();
        let access = if device.typ() == oci::LinuxDeviceType::B { "rwm" } else { "rw" };
        let mut rule = oci::LinuxDeviceCgroup::default();
        rule.set_allow(true);
        rule.set_typ(Some(device.typ()));
        rule.set_major(Some(device.major()));
        rule.set_minor(Some(device.minor()));
        rule.set_access(Some(access.to_owned()));
        resources.devices_mut().get_or_insert_default().push(rule);
        devices.push(device);
    }
    linux.set_devices(Some(devices));
    Ok(())
}

fn set_namespace(linux: &mut oci::Linux, requested: &nri::LinuxNamespace) -> Applied {
    let (name, removed) = unmark(&requested.r#type);
    let known = linux.namespaces().clone().unwrap_or_default();
    let mut kept: Vec<_> = known.into_iter().filter(|known| namespace_type(known.typ()) != name).collect();
    if removed {
        if name == "mount" {
            return Err(refuse("namespaces", "a container needs a mount namespace of its own"));
        }
    } else {
        let mut added: oci::LinuxNamespace = parse("namespaces", json!({ "type": name }))?;
        added.set_path((!requested.path.is_empty()).then(|| requested.path.clone().into()));
        kept.push(added);
    }
    linux.set_namespaces(Some(kept));
    Ok(())
}

fn seccomp(requested: &nri::LinuxSeccomp) -> Result<oci::LinuxSeccomp, ApplyError> {
    let named = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let syscalls: Vec<_> = requested.syscalls.iter().map(syscall).collect();
    parse(
        "seccomp_policy",
        json!({
            "defaultAction": requested.default_action,
            "defaultErrnoRet": requested.default_errno.map(|errno| errno.value),
            "architectures": (!requested.architectures.is_empty()).then_some(&requested.architectures),
            "flags": (!requested.flags.is_empty()).then_some(&requested.flags),
            "listenerPath": named(&requested.listener_path),
            "listenerMetadata": named(&requested.listener_metadata),
            "syscalls": syscalls,
        }),
    )
}

fn syscall(requested: &nri::LinuxSyscall) -> serde_json::Value {
    let args: Vec<_> = requested
        .args
        .iter()
        .map(|arg| json!({ "index": arg.index, "value": arg.value, "valueTwo": arg.value_two, "op": arg.op }))
        .collect();
    json!({
        "names": requested.names,
        "action": requested.action,
        "errnoRet": requested.errno_ret.map(|errno| errno.value),
        "args": (!args.is_empty()).then_some(args),
    })
}

fn memory_policy(requested: &nri::LinuxMemoryPolicy) -> Result<oci::LinuxMemoryPolicy, ApplyError> {
    let field = "memory_policy";
    let mode = MpolMode::try_from(requested.mode)
        .map_err(|_unknown| refuse(field, format!("unknown mode {}", requested.mode)))?;
    let mut flags = Vec::new();
    for flag in &requested.flags {
        let flag =
            MpolFlag::try_from(*flag).map_err(|_unknown| refuse(field, format!("unknown flag {flag}")))?;
        flags.push(flag.as_str_name());
    }
    let nodes = (!requested.nodes.is_empty()).then_some(&requested.nodes);
    let flags = (!flags.is_empty()).then_some(flags);
    parse(field, json!({ "mode": mode.as_str_name(), "nodes": nodes, "flags": flags }))
}

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
fn entries(map: &mut HashMap<String, String>, asked: &BTreeMap<String, String>) {
    for name in asked.keys() {
        if let (bare, true) = unmark(name) {
            map.remove(bare);
        }
    }
    for (name, value) in asked {
        if !unmark(name).1 {
            map.insert(name.clone(), value.clone());
        }
    }
}

pub(super) fn annotations(spec: &mut oci::Spec, asked: &BTreeMap<String, String>) {
    if !asked.is_empty() {
        entries(spec.annotations_mut().get_or_insert_default(), asked);
    }
}

/// Converts a value through the OCI's JSON, whose names NRI shares. The error names an unknown value.
fn parse<T: DeserializeOwned>(field: &'static str, value: serde_json::Value) -> Result<T, ApplyError> {
    serde_json::from_value(value).map_err(|error| refuse(field, error.to_string()))
}

pub(super) fn process(spec: &mut oci::Spec, asked: &ContainerAdjustment) -> Applied {
    let linux = asked.linux.as_ref();
    let process = spec.process_mut().get_or_insert_default();
    env(process, &asked.env);
    if !asked.args.is_empty() {
        process.set_args(Some(asked.args.clone()));
    }
    let mut limits = process.rlimits().clone().unwrap_or_default();
    for limit in &asked.rlimits {
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
    if let Some(asked) = linux.and_then(|linux| linux.io_priority.as_ref()) {
        process.set_io_priority(io_priority(*asked)?);
    }
    if let Some(asked) = linux.and_then(|linux| linux.scheduler.as_ref()) {
        process.set_scheduler(scheduler(asked)?);
    }
    Ok(())
}

fn env(process: &mut oci::Process, asked: &[nri::KeyValue]) {
    if asked.is_empty() {
        return;
    }
    let mut env = process.env().clone().unwrap_or_default();
    for entry in asked {
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

fn io_priority(asked: nri::LinuxIoPriority) -> Result<Option<oci::LinuxIOPriority>, ApplyError> {
    let class = IoPrioClass::try_from(asked.class)
        .map_err(|_unknown| refuse("io_priority", format!("unknown class {}", asked.class)))?;
    if class == IoPrioClass::IoprioClassNone {
        return Ok(None);
    }
    let value = json!({ "class": class.as_str_name(), "priority": asked.priority });
    parse("io_priority", value).map(Some)
}

fn scheduler(asked: &nri::LinuxScheduler) -> Result<Option<oci::Scheduler>, ApplyError> {
    let policy = LinuxSchedulerPolicy::try_from(asked.policy)
        .map_err(|_unknown| refuse("scheduler", format!("unknown policy {}", asked.policy)))?;
    if policy == LinuxSchedulerPolicy::SchedNone {
        return Ok(None);
    }
    let mut flags: Vec<oci::LinuxSchedulerFlag> = Vec::new();
    for flag in &asked.flags {
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
    scheduler.set_nice(Some(asked.nice));
    scheduler.set_priority(Some(asked.priority));
    scheduler.set_flags((!flags.is_empty()).then_some(flags));
    scheduler.set_runtime(deadline(asked.runtime));
    scheduler.set_deadline(deadline(asked.deadline));
    scheduler.set_period(deadline(asked.period));
    Ok(Some(scheduler))
}

/// Appends hooks to the existing ones.
pub(super) fn hooks(spec: &mut oci::Spec, asked: &nri::Hooks) {
    if *asked == nri::Hooks::default() {
        return;
    }
    let hooks = spec.hooks_mut().get_or_insert_default();
    let add = |known: &mut Option<Vec<oci::Hook>>, asked: &[nri::Hook]| {
        if !asked.is_empty() {
            known.get_or_insert_default().extend(asked.iter().map(hook));
        }
    };
    add(hooks.prestart_mut(), &asked.prestart);
    add(hooks.create_runtime_mut(), &asked.create_runtime);
    add(hooks.create_container_mut(), &asked.create_container);
    add(hooks.start_container_mut(), &asked.start_container);
    add(hooks.poststart_mut(), &asked.poststart);
    add(hooks.poststop_mut(), &asked.poststop);
}

fn hook(asked: &nri::Hook) -> oci::Hook {
    let some = |list: &[String]| (!list.is_empty()).then(|| list.to_vec());
    let mut hook = oci::Hook::default();
    hook.set_path(PathBuf::from(&asked.path));
    hook.set_args(some(&asked.args));
    hook.set_env(some(&asked.env));
    hook.set_timeout(asked.timeout.map(|timeout| timeout.value));
    hook
}

/// Replaces, adds and removes mounts by destination. Then sorts them by depth, so that parents come first.
pub(super) fn mounts(spec: &mut oci::Spec, asked: &[nri::Mount]) -> Applied {
    if asked.is_empty() {
        return Ok(());
    }
    let mut mounts = spec.mounts().clone().unwrap_or_default();
    for mount in asked {
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

pub(super) fn linux(spec: &mut oci::Spec, asked: &LinuxContainerAdjustment) -> Applied {
    let linux = spec.linux_mut().get_or_insert_default();
    for device in &asked.devices {
        set_device(linux, device)?;
    }
    if !asked.cgroups_path.is_empty() {
        linux.set_cgroups_path(Some(asked.cgroups_path.clone().into()));
    }
    for namespace in &asked.namespaces {
        set_namespace(linux, namespace)?;
    }
    if !asked.sysctl.is_empty() {
        let mut sysctls = linux.sysctl().clone().unwrap_or_default();
        entries(&mut sysctls, &asked.sysctl);
        linux.set_sysctl(Some(sysctls));
    }
    if let Some(policy) = &asked.seccomp_policy {
        linux.set_seccomp(Some(seccomp(policy)?));
    }
    if let Some(policy) = &asked.memory_policy {
        linux.set_memory_policy(Some(memory_policy(policy)?));
    }
    if asked.net_devices.keys().any(|name| !unmark(name).1) {
        let why = "moving a network device of the host into a pod is not supported";
        return Err(refuse("net_devices", why));
    }
    if asked
        .rdt
        .as_ref()
        .is_some_and(|rdt| *rdt != nri::LinuxRdt { remove: rdt.remove, ..Default::default() })
    {
        return Err(refuse("rdt", "resource director groups are not supported"));
    }
    Ok(())
}

fn set_device(linux: &mut oci::Linux, asked: &nri::LinuxDevice) -> Applied {
    let (path, removed) = unmark(&asked.path);
    let mut devices = linux.devices().clone().unwrap_or_default();
    devices.retain(|known| known.path() != Path::new(path));
    if !removed {
        let mut device: oci::LinuxDevice = parse(
            "devices",
            json!({ "path": path, "type": asked.r#type, "major": asked.major, "minor": asked.minor }),
        )?;
        device.set_file_mode(asked.file_mode.map(|mode| mode.value & 0o7777));
        device.set_uid(asked.uid.map(|id| id.value));
        device.set_gid(asked.gid.map(|id| id.value));
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

fn set_namespace(linux: &mut oci::Linux, asked: &nri::LinuxNamespace) -> Applied {
    let (name, removed) = unmark(&asked.r#type);
    let known = linux.namespaces().clone().unwrap_or_default();
    let mut kept: Vec<_> = known.into_iter().filter(|known| namespace_type(known.typ()) != name).collect();
    if removed {
        if name == "mount" {
            return Err(refuse("namespaces", "a container needs a mount namespace of its own"));
        }
    } else {
        let mut added: oci::LinuxNamespace = parse("namespaces", json!({ "type": name }))?;
        added.set_path((!asked.path.is_empty()).then(|| asked.path.clone().into()));
        kept.push(added);
    }
    linux.set_namespaces(Some(kept));
    Ok(())
}

fn seccomp(asked: &nri::LinuxSeccomp) -> Result<oci::LinuxSeccomp, ApplyError> {
    let named = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let syscalls: Vec<_> = asked.syscalls.iter().map(syscall).collect();
    parse(
        "seccomp_policy",
        json!({
            "defaultAction": asked.default_action,
            "defaultErrnoRet": asked.default_errno.map(|errno| errno.value),
            "architectures": (!asked.architectures.is_empty()).then_some(&asked.architectures),
            "flags": (!asked.flags.is_empty()).then_some(&asked.flags),
            "listenerPath": named(&asked.listener_path),
            "listenerMetadata": named(&asked.listener_metadata),
            "syscalls": syscalls,
        }),
    )
}

fn syscall(asked: &nri::LinuxSyscall) -> serde_json::Value {
    let args: Vec<_> = asked
        .args
        .iter()
        .map(|arg| json!({ "index": arg.index, "value": arg.value, "valueTwo": arg.value_two, "op": arg.op }))
        .collect();
    json!({
        "names": asked.names,
        "action": asked.action,
        "errnoRet": asked.errno_ret.map(|errno| errno.value),
        "args": (!args.is_empty()).then_some(args),
    })
}

fn memory_policy(asked: &nri::LinuxMemoryPolicy) -> Result<oci::LinuxMemoryPolicy, ApplyError> {
    let field = "memory_policy";
    let mode = MpolMode::try_from(asked.mode)
        .map_err(|_unknown| refuse(field, format!("unknown mode {}", asked.mode)))?;
    let mut flags = Vec::new();
    for flag in &asked.flags {
        let flag =
            MpolFlag::try_from(*flag).map_err(|_unknown| refuse(field, format!("unknown flag {flag}")))?;
        flags.push(flag.as_str_name());
    }
    let nodes = (!asked.nodes.is_empty()).then_some(&asked.nodes);
    let flags = (!flags.is_empty()).then_some(flags);
    parse(field, json!({ "mode": mode.as_str_name(), "nodes": nodes, "flags": flags }))
}

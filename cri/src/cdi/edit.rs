//! The changes of a CDI device to a container's spec.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use nix::sys::stat::{major, minor};
use oci_spec::runtime::{
    Hook as OciHook, HookBuilder, Hooks, Linux, LinuxDevice, LinuxDeviceCgroup, LinuxDeviceType,
    Mount as OciMount, Process, Spec,
};

use super::error::CdiError;
use super::spec::{ContainerEdits, DeviceNode, Hook, Mount};

/// Applies the changes of a device to a spec.
pub(super) fn apply(spec: &mut Spec, device: &str, edits: &ContainerEdits) -> Result<(), CdiError> {
    let unsupported = |what| Err(CdiError::Unsupported { device: device.to_owned(), what });
    if !edits.net_devices.is_empty() {
        return unsupported("a network device of the node");
    }
    if edits.intel_rdt.is_some() {
        return unsupported("an Intel RDT class");
    }
    let (mut uid, mut gid) = (0, 0);
    if let Some(process) = spec.process_mut() {
        (uid, gid) = (process.user().uid(), process.user().gid());
        add_env(process, &edits.env);
        add_groups(process, &edits.additional_gids);
    }
    if let Some(linux) = spec.linux_mut() {
        for node in &edits.device_nodes {
            add_node(linux, node, uid, gid)?;
        }
    }
    let mounts = spec.mounts_mut().get_or_insert_default();
    for mount in &edits.mounts {
        mounts.retain(|other| other.destination() != Path::new(&mount.container_path));
        mounts.push(oci_mount(mount));
    }
    edits.hooks.iter().try_for_each(|hook| add_hook(spec, hook))
}

fn add_env(process: &mut Process, entries: &[String]) {
    let key = |entry: &str| entry.split('=').next().unwrap_or_default().to_owned();
    let mut env = process.env().clone().unwrap_or_default();
    for entry in entries {
        env.retain(|other| key(other) != key(entry));
        env.push(entry.clone());
    }
    process.set_env(Some(env));
}

/// Group 0 is left out, as in the specification's own code, because every process could have this group.
fn add_groups(process: &mut Process, gids: &[u32]) {
    let mut user = process.user().clone();
    let mut groups = user.additional_gids().clone().unwrap_or_default();
    for gid in gids {
        if *gid != 0 && !groups.contains(gid) {
            groups.push(*gid);
        }
    }
    user.set_additional_gids(Some(groups));
    process.set_user(user);
}

fn add_node(linux: &mut Linux, node: &DeviceNode, uid: u32, gid: u32) -> Result<(), CdiError> {
    let mut device = oci_device(node)?;
    device.set_uid(Some(owner(node.uid, uid, device.uid())));
    device.set_gid(Some(owner(node.gid, gid, device.gid())));
    let access = if node.permissions.is_empty() { "rwm" } else { &node.permissions };
    if device.typ() != LinuxDeviceType::P {
        let mut rule = LinuxDeviceCgroup::default();
        rule.set_allow(true);
        rule.set_typ(Some(device.typ()));
        rule.set_major(Some(device.major()));
        rule.set_minor(Some(device.minor()));
        rule.set_access(Some(access.to_owned()));
        let mut resources = linux.resources().clone().unwrap_or_default();
        let mut rules = resources.devices().clone().unwrap_or_default();
        rules.push(rule);
        resources.set_devices(Some(rules));
        linux.set_resources(Some(resources));
    }
    let mut devices = linux.devices().clone().unwrap_or_default();
    devices.retain(|other| other.path() != device.path());
    devices.push(device);
    linux.set_devices(Some(devices));
    Ok(())
}

/// The owner in the file; else the container's user, unless it is root; else the owner on the node.
fn owner(in_file: Option<u32>, user: u32, found: Option<u32>) -> u32 {
    in_file.or((user > 0).then_some(user)).or(found).unwrap_or(0)
}

fn oci_device(node: &DeviceNode) -> Result<LinuxDevice, CdiError> {
    let host = Path::new(if node.host_path.is_empty() { &node.path } else { &node.host_path });
    let mut device = LinuxDevice::default();
    device.set_path(node.path.clone().into());
    if node.kind.is_empty() || (node.major == 0 && node.minor == 0 && node.kind != "p") {
        let failed = |source: io::Error| CdiError::Node { path: host.to_owned(), source };
        let found = std::fs::metadata(host).map_err(failed)?;
        let typ = match found.file_type() {
            kind if kind.is_char_device() => LinuxDeviceType::C,
            kind if kind.is_block_device() => LinuxDeviceType::B,
            kind if kind.is_fifo() => LinuxDeviceType::P,
            _ => return Err(CdiError::NoNode { path: host.to_owned() }),
        };
        device.set_typ(typ);
        device.set_major(i64::try_from(major(found.rdev())).unwrap_or_default());
        device.set_minor(i64::try_from(minor(found.rdev())).unwrap_or_default());
        device.set_file_mode(Some(node.file_mode.unwrap_or(found.mode()) & 0o7777));
        device.set_uid(Some(found.uid()));
        device.set_gid(Some(found.gid()));
        return Ok(device);
    }
    device.set_typ(match node.kind.as_str() {
        "b" => LinuxDeviceType::B,
        "c" | "u" => LinuxDeviceType::C,
        "p" => LinuxDeviceType::P,
        _ => return Err(CdiError::NoNode { path: host.to_owned() }),
    });
    device.set_major(node.major);
    device.set_minor(node.minor);
    device.set_file_mode(Some(node.file_mode.unwrap_or(0o666) & 0o7777));
    device.set_uid(Some(0));
    device.set_gid(Some(0));
    Ok(device)
}

fn oci_mount(mount: &Mount) -> OciMount {
    let mut oci = OciMount::default();
    oci.set_destination(mount.container_path.clone().into());
    oci.set_source(Some(mount.host_path.clone().into()));
    let kind = if mount.kind.is_empty() { "bind" } else { &mount.kind };
    oci.set_typ(Some(kind.to_owned()));
    let mut options = mount.options.clone();
    if kind == "bind" && !options.iter().any(|option| option == "bind" || option == "rbind") {
        options.insert(0, "rbind".to_owned());
    }
    oci.set_options(Some(options));
    oci
}

fn add_hook(spec: &mut Spec, hook: &Hook) -> Result<(), CdiError> {
    let built = HookBuilder::default().path(&hook.path).args(hook.args.clone()).env(hook.env.clone());
    let built = match hook.timeout {
        Some(seconds) => built.timeout(seconds),
        None => built,
    };
    let built = built.build().map_err(|_missing| CdiError::Hook(hook.hook_name.clone()))?;
    let mut hooks: Hooks = spec.hooks().clone().unwrap_or_default();
    let with = |list: &Option<Vec<OciHook>>| {
        let mut list = list.clone().unwrap_or_default();
        list.push(built);
        Some(list)
    };
    // The setters return the previous value.
    match hook.hook_name.as_str() {
        #[allow(deprecated, reason = "part of the specification")]
        "prestart" => drop(hooks.set_prestart(with(hooks.prestart()))),
        "createRuntime" => drop(hooks.set_create_runtime(with(hooks.create_runtime()))),
        "createContainer" => drop(hooks.set_create_container(with(hooks.create_container()))),
        "startContainer" => drop(hooks.set_start_container(with(hooks.start_container()))),
        "poststart" => drop(hooks.set_poststart(with(hooks.poststart()))),
        "poststop" => drop(hooks.set_poststop(with(hooks.poststop()))),
        other => return Err(CdiError::Hook(other.to_owned())),
    }
    spec.set_hooks(Some(hooks));
    Ok(())
}

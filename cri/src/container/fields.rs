//! Validation of a container's configuration. Pure.
//!
//! Values that the kernel or a library would silently ignore are refused.

use coracle_proto::cri::{
    ContainerConfig, Device, LinuxContainerResources, LinuxContainerSecurityContext, MountPropagation,
    NamespaceMode, NamespaceOption, Signal, SupplementalGroupsPolicy,
};

use crate::error::Error;
use crate::known::known;
use crate::security_profile;

/// Refuses contradictory fields and unknown enum values.
pub(crate) fn check(config: &ContainerConfig) -> Result<(), Error> {
    check_texts(config)?;
    known::<Signal>("stop_signal", config.stop_signal)?;
    for mount in &config.mounts {
        known::<MountPropagation>("mounts.propagation", mount.propagation)?;
    }
    config.devices.iter().try_for_each(check_device)?;
    let Some(linux) = &config.linux else { return Ok(()) };
    linux.resources.as_ref().map_or(Ok(()), check_limits)?;
    linux.security_context.as_ref().map_or(Ok(()), check_security)
}

/// Refuses zero bytes, because a C string ends there. Invalid UTF-8, for example from a Secret whose keys become
/// variables, is not refused. It is replaced, as in containerd, because the spec is JSON.
fn check_texts(config: &ContainerConfig) -> Result<(), Error> {
    let zero = |text: &str| text.contains('\0');
    if config.command.iter().chain(&config.args).any(|word| zero(word)) || zero(&config.working_dir) {
        return Err(Error::invalid("command, args, working_dir", "must not contain a zero byte"));
    }
    for entry in &config.envs {
        let why = if entry.key.is_empty() || entry.key.contains(['=', '\0']) {
            "is not a variable name"
        } else if entry.value.contains(&0) {
            "has a value with a zero byte"
        } else {
            continue;
        };
        return Err(Error::invalid("envs", format!("{:?} {why}", entry.key)));
    }
    Ok(())
}

fn check_device(device: &Device) -> Result<(), Error> {
    let relative = |path: &str| !path.is_empty() && !path.starts_with('/');
    if device.host_path.is_empty() || relative(&device.host_path) || relative(&device.container_path) {
        return Err(Error::invalid("devices", "paths must be absolute"));
    }
    match device.permissions.chars().find(|letter| !matches!(letter, 'r' | 'w' | 'm')) {
        Some(letter) => Err(Error::invalid("devices.permissions", format!("{letter:?} must be r, w or m"))),
        None => Ok(()),
    }
}

/// Refuses invalid limits, as an update does.
fn check_limits(limits: &LinuxContainerResources) -> Result<(), Error> {
    for (field, value) in [("cpu_shares", limits.cpu_shares), ("cpu_period", limits.cpu_period)] {
        if value < 0 {
            return Err(Error::invalid(field, "is negative"));
        }
    }
    let wrong = limits
        .hugepage_limits
        .iter()
        .find(|limit| limit.page_size.is_empty() || limit.page_size.contains('/'));
    match wrong {
        Some(limit) => {
            Err(Error::invalid("hugepage_limits", format!("{:?} is not a page size", limit.page_size)))
        }
        None => Ok(()),
    }
}

fn check_security(security: &LinuxContainerSecurityContext) -> Result<(), Error> {
    known::<SupplementalGroupsPolicy>("supplemental_groups_policy", security.supplemental_groups_policy)?;
    for (field, requested) in [("seccomp", &security.seccomp), ("apparmor", &security.apparmor)] {
        requested.as_ref().map_or(Ok(()), |requested| security_profile::check(field, requested))?;
    }
    let Some(options) = &security.namespace_options else { return Ok(()) };
    let pid: NamespaceMode = known("namespace_options.pid", options.pid)?;
    if (pid == NamespaceMode::Target) == options.target_id.is_empty() {
        let why = "must be set with pid mode TARGET, and only with it";
        return Err(Error::invalid("namespace_options.target_id", why));
    }
    Ok(())
}

/// Refuses namespaces that differ from the pod's. The network and System V IPC are created with the pod and shared. A pid
/// namespace of the pod exists only if the pod was created with one.
pub(crate) fn check_shared(config: &ContainerConfig, pod: &NamespaceOption) -> Result<(), Error> {
    let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let Some(own) = security.and_then(|security| security.namespace_options.as_ref()) else { return Ok(()) };
    let shared = [
        ("namespace_options.network", own.network, pod.network()),
        ("namespace_options.ipc", own.ipc, pod.ipc()),
    ];
    for (field, requested, pods) in shared {
        match known(field, requested)? {
            // POD is the default.
            NamespaceMode::Pod => {}
            NamespaceMode::Node if pods == NamespaceMode::Node => {}
            NamespaceMode::Node => return Err(Error::invalid(field, "the pod has its own namespace")),
            mode @ (NamespaceMode::Container | NamespaceMode::Target) => {
                let why =
                    format!("{} is not supported for a namespace that the pod shares", mode.as_str_name());
                return Err(Error::invalid(field, why));
            }
        }
    }
    if own.pid() == NamespaceMode::Pod && pod.pid() == NamespaceMode::Container {
        let why = "the pod was not created with a shared pid namespace (POD)";
        return Err(Error::invalid("namespace_options.pid", why));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::{HugepageLimit, KeyValue, LinuxContainerConfig, Mount, SecurityProfile};

    use super::*;

    fn secured(security: LinuxContainerSecurityContext) -> ContainerConfig {
        let linux = LinuxContainerConfig { security_context: Some(security), ..Default::default() };
        ContainerConfig { linux: Some(linux), ..Default::default() }
    }

    fn limited(resources: LinuxContainerResources) -> ContainerConfig {
        let linux = LinuxContainerConfig { resources: Some(resources), ..Default::default() };
        ContainerConfig { linux: Some(linux), ..Default::default() }
    }

    fn namespaces(options: NamespaceOption) -> ContainerConfig {
        secured(LinuxContainerSecurityContext { namespace_options: Some(options), ..Default::default() })
    }

    fn variable(key: &str, value: &[u8]) -> ContainerConfig {
        let envs = vec![KeyValue { key: key.into(), value: value.into() }];
        ContainerConfig { envs, ..Default::default() }
    }

    fn device(host_path: &str, container_path: &str, permissions: &str) -> ContainerConfig {
        let (host_path, container_path) = (host_path.to_owned(), container_path.to_owned());
        let devices = vec![Device { host_path, container_path, permissions: permissions.into() }];
        ContainerConfig { devices, ..Default::default() }
    }

    #[test]
    fn values_that_would_be_ignored_are_refused() {
        let target = NamespaceMode::Target.into();
        let right = [
            ContainerConfig::default(),
            variable("A", "b=ä".as_bytes()),
            variable("A", b"\xff"),
            device("/dev/null", "", ""),
            device("/dev/null", "/dev/n", "mrw"),
            namespaces(NamespaceOption { pid: target, target_id: "c".into(), ..Default::default() }),
        ];
        for right in right {
            assert!(check(&right).is_ok(), "{right:?}");
        }
        let profile = Some(SecurityProfile { profile_type: 7, ..Default::default() });
        let pages = vec![HugepageLimit { page_size: "../2MB".into(), limit: 0 }];
        let mount = Mount { propagation: 3, ..Default::default() };
        let wrong = [
            variable("", b"x"),
            variable("a=b", b"x"),
            variable("a\0", b"x"),
            variable("a", b"\0"),
            ContainerConfig { args: vec!["a\0b".into()], ..Default::default() },
            ContainerConfig { working_dir: "/\0".into(), ..Default::default() },
            ContainerConfig { stop_signal: 66, ..Default::default() },
            ContainerConfig { mounts: vec![mount], ..Default::default() },
            device("", "/dev/n", ""),
            device("dev/null", "", ""),
            device("/dev/null", "n", ""),
            device("/dev/null", "", "rx"),
            limited(LinuxContainerResources { cpu_shares: -1, ..Default::default() }),
            limited(LinuxContainerResources { cpu_period: -1, ..Default::default() }),
            limited(LinuxContainerResources { hugepage_limits: pages, ..Default::default() }),
            secured(LinuxContainerSecurityContext { supplemental_groups_policy: 2, ..Default::default() }),
            secured(LinuxContainerSecurityContext { seccomp: profile.clone(), ..Default::default() }),
            secured(LinuxContainerSecurityContext { apparmor: profile, ..Default::default() }),
            namespaces(NamespaceOption { pid: 4, ..Default::default() }),
            namespaces(NamespaceOption { pid: target, ..Default::default() }),
            namespaces(NamespaceOption { target_id: "c".into(), ..Default::default() }),
        ];
        for wrong in wrong {
            assert!(check(&wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn requested_namespaces_must_match_the_namespaces_of_the_pod() {
        let (own, nodes) = (NamespaceOption::default(), {
            let node = NamespaceMode::Node.into();
            NamespaceOption { network: node, ipc: node, ..Default::default() }
        });
        for pod in [&own, &nodes] {
            assert!(check_shared(&ContainerConfig::default(), pod).is_ok());
            assert!(check_shared(&namespaces(own.clone()), pod).is_ok());
        }
        assert!(check_shared(&namespaces(nodes.clone()), &nodes).is_ok());
        for mode in 1..=4 {
            let network = NamespaceOption { network: mode, ..Default::default() };
            let ipc = NamespaceOption { ipc: mode, ..Default::default() };
            assert!(check_shared(&namespaces(network), &own).is_err(), "{mode}");
            assert!(check_shared(&namespaces(ipc), &own).is_err(), "{mode}");
        }
        let apart = NamespaceOption { pid: NamespaceMode::Container.into(), ..Default::default() };
        assert!(check_shared(&namespaces(NamespaceOption::default()), &apart).is_err());
        assert!(check_shared(&ContainerConfig::default(), &apart).is_ok());
        for pid in [NamespaceMode::Container, NamespaceMode::Node, NamespaceMode::Target] {
            let requested = NamespaceOption { pid: pid.into(), ..Default::default() };
            assert!(check_shared(&namespaces(requested), &apart).is_ok(), "{pid:?}");
        }
    }
}

//! Validation of a pod's configuration. Pure.

use coracle_proto::cri::{
    LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption, PodSandboxConfig, Protocol,
    SupplementalGroupsPolicy,
};

use super::first_process;
use crate::error::Error;
use crate::known::known;
use crate::namespaces;
use crate::security_profile;

/// Refuses contradictory fields and unknown enum values.
pub(crate) fn check(config: &PodSandboxConfig) -> Result<(), Error> {
    if !config.log_directory.is_empty() && !config.log_directory.starts_with('/') {
        return Err(Error::invalid("log_directory", "must be absolute"));
    }
    for mapping in &config.port_mappings {
        known::<Protocol>("port_mappings.protocol", mapping.protocol)?;
    }
    namespaces::security(config).map_or(Ok(()), check_security)
}

fn check_security(security: &LinuxSandboxSecurityContext) -> Result<(), Error> {
    known::<SupplementalGroupsPolicy>("supplemental_groups_policy", security.supplemental_groups_policy)?;
    first_process::user(security)?;
    first_process::seccomp(security)?;
    security.apparmor.as_ref().map_or(Ok(()), |requested| security_profile::check("apparmor", requested))?;
    security.namespace_options.as_ref().map_or(Ok(()), check_namespaces)
}

/// A pod has its own namespaces or the node's. Only pid namespaces can be separate for each container.
fn check_namespaces(options: &NamespaceOption) -> Result<(), Error> {
    let modes = [
        ("namespace_options.network", options.network),
        ("namespace_options.ipc", options.ipc),
        ("namespace_options.pid", options.pid),
    ];
    for (field, number) in modes {
        match known(field, number)? {
            NamespaceMode::Pod | NamespaceMode::Node => {}
            NamespaceMode::Container if field == "namespace_options.pid" => {}
            mode @ (NamespaceMode::Container | NamespaceMode::Target) => {
                return Err(Error::invalid(
                    field,
                    format!("{} is not supported for a pod", mode.as_str_name()),
                ));
            }
        }
    }
    if !options.target_id.is_empty() {
        return Err(Error::invalid("namespace_options.target_id", "must be empty for a pod"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::{Int64Value, LinuxPodSandboxConfig, PortMapping, SecurityProfile};

    use super::*;

    fn secured(security: LinuxSandboxSecurityContext) -> PodSandboxConfig {
        let linux = LinuxPodSandboxConfig { security_context: Some(security), ..Default::default() };
        PodSandboxConfig { linux: Some(linux), ..Default::default() }
    }

    fn namespaces(options: NamespaceOption) -> PodSandboxConfig {
        secured(LinuxSandboxSecurityContext { namespace_options: Some(options), ..Default::default() })
    }

    #[test]
    fn configurations_of_the_kubelet_are_accepted() {
        let node = NamespaceMode::Node.into();
        let nodes = NamespaceOption { network: node, pid: node, ipc: node, ..Default::default() };
        let kubelets = LinuxSandboxSecurityContext {
            namespace_options: Some(nodes),
            run_as_user: Some(Int64Value { value: 1000 }),
            run_as_group: Some(Int64Value { value: 3000 }),
            supplemental_groups: vec![2000],
            supplemental_groups_policy: SupplementalGroupsPolicy::Strict.into(),
            readonly_rootfs: true,
            privileged: true,
            seccomp: Some(SecurityProfile::default()),
            ..Default::default()
        };
        let right = [PodSandboxConfig::default(), secured(kubelets), {
            namespaces(NamespaceOption { pid: NamespaceMode::Container.into(), ..Default::default() })
        }];
        for right in right {
            assert!(check(&right).is_ok(), "{right:?}");
        }
    }

    #[test]
    fn values_that_would_be_ignored_are_refused() {
        let profile =
            |profile_type, name: &str| Some(SecurityProfile { profile_type, localhost_ref: name.to_owned() });
        let id = |value| Some(Int64Value { value });
        let security = LinuxSandboxSecurityContext::default;
        let port = PortMapping { protocol: 3, ..Default::default() };
        let wrong = [
            PodSandboxConfig { log_directory: "logs".into(), ..Default::default() },
            PodSandboxConfig { port_mappings: vec![port], ..Default::default() },
            secured(LinuxSandboxSecurityContext { supplemental_groups_policy: 2, ..security() }),
            secured(LinuxSandboxSecurityContext { run_as_group: id(1), ..security() }),
            secured(LinuxSandboxSecurityContext { run_as_user: id(-1), ..security() }),
            secured(LinuxSandboxSecurityContext { run_as_user: id(u32::MAX.into()), ..security() }),
            secured(LinuxSandboxSecurityContext { supplemental_groups: vec![1 << 40], ..security() }),
            secured(LinuxSandboxSecurityContext { seccomp: profile(3, ""), ..security() }),
            secured(LinuxSandboxSecurityContext { seccomp: profile(2, "p.json"), ..security() }),
            secured(LinuxSandboxSecurityContext { seccomp: profile(0, "/p.json"), ..security() }),
            secured(LinuxSandboxSecurityContext { apparmor: profile(3, ""), ..security() }),
            secured(LinuxSandboxSecurityContext { apparmor: profile(2, ""), ..security() }),
            namespaces(NamespaceOption { network: 1, ..Default::default() }),
            namespaces(NamespaceOption { ipc: 1, ..Default::default() }),
            namespaces(NamespaceOption { ipc: 3, ..Default::default() }),
            namespaces(NamespaceOption { pid: 3, ..Default::default() }),
            namespaces(NamespaceOption { pid: 4, ..Default::default() }),
            namespaces(NamespaceOption { target_id: "c".into(), ..Default::default() }),
        ];
        for wrong in wrong {
            assert!(check(&wrong).is_err(), "{wrong:?}");
        }
    }
}

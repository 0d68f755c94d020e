//! Whether a checkpoint can be restored as the requested pod. Pure.
//!
//! Arguments, environment and privileges are in the memory of a process: a restored process keeps them. A request with other
//! values is refused, as in CRI-O. The pod's network, files, limits and labels are taken from the request.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use coracle_proto::cri;

use super::criu::is_misread;
use super::manifest::{Manifest, SavedContainer, name_of};
use crate::namespaces::{self, PidNamespace};
use crate::sandbox::user_namespace::Mapping;

/// Pairs each container of a checkpoint with its requested configuration.
pub(crate) fn fit<'a>(
    manifest: &'a Manifest,
    sandbox: &cri::PodSandboxConfig,
    wanted: &'a [cri::ContainerConfig],
) -> Result<Vec<(&'a SavedContainer, &'a cri::ContainerConfig)>, String> {
    fit_sandbox(&manifest.sandbox, sandbox)?;
    let names = |names: BTreeSet<&str>| names.into_iter().collect::<Vec<_>>().join(", ");
    let there: BTreeSet<&str> = manifest.containers.iter().map(|saved| saved.name.as_str()).collect();
    let requested: BTreeSet<&str> = wanted.iter().map(name_of).collect();
    if there != requested {
        return Err(format!(
            "the checkpoint has the containers {}, but the request has {}",
            names(there),
            names(requested)
        ));
    }
    let mut fitting = Vec::new();
    for config in wanted {
        let saved = manifest.containers.iter().find(|saved| saved.name == name_of(config));
        let Some(saved) = saved else { continue };
        fit_container(&saved.config, config)
            .and_then(|()| restorable(sandbox, config))
            .and_then(|()| parsable(&saved.restore.external))
            .map_err(|why| format!("container {:?}: {why}", saved.name))?;
        fitting.push((saved, config));
    }
    Ok(fitting)
}

fn fit_sandbox(saved: &cri::PodSandboxConfig, wanted: &cri::PodSandboxConfig) -> Result<(), String> {
    let linux = |config: &cri::PodSandboxConfig| config.linux.clone().unwrap_or_default();
    let (before, after) = (linux(saved), linux(wanted));
    let security = |linux: &cri::LinuxPodSandboxConfig| linux.security_context.clone().unwrap_or_default();
    let same = [
        ("host name", saved.hostname == wanted.hostname),
        ("pod security context", security(&before) == security(&after)),
        ("sysctls", before.sysctls == after.sysctls),
        ("port mappings", saved.port_mappings == wanted.port_mappings),
    ];
    first_difference(&same)
}

fn fit_container(saved: &cri::ContainerConfig, wanted: &cri::ContainerConfig) -> Result<(), String> {
    let security = |config: &cri::ContainerConfig| {
        config.linux.as_ref().and_then(|linux| linux.security_context.clone()).unwrap_or_default()
    };
    let same = [
        ("command", saved.command == wanted.command),
        ("arguments", saved.args == wanted.args),
        ("working directory", saved.working_dir == wanted.working_dir),
        ("environment", environment(saved) == environment(wanted)),
        ("security context", security(saved) == security(wanted)),
        ("terminal", saved.tty == wanted.tty),
        ("standard input", saved.stdin == wanted.stdin),
        ("mounts", mount_destinations(saved) == mount_destinations(wanted)),
        ("devices", saved.devices == wanted.devices && saved.cdi_devices == wanted.cdi_devices),
    ];
    first_difference(&same)
}

fn first_difference(same: &[(&str, bool)]) -> Result<(), String> {
    match same.iter().find(|(_, same)| !same) {
        Some((what, _)) => Err(format!("the {what} differs")),
        None => Ok(()),
    }
}

fn environment(config: &cri::ContainerConfig) -> BTreeMap<&str, &[u8]> {
    config.envs.iter().map(|env| (env.key.as_str(), env.value.as_slice())).collect()
}

/// Destination and access of each mount. The source may differ.
fn mount_destinations(config: &cri::ContainerConfig) -> BTreeSet<(&str, bool)> {
    config.mounts.iter().map(|mount| (mount.container_path.trim_end_matches('/'), mount.readonly)).collect()
}

/// Refuses configurations that CRIU cannot restore with the options that Coracle uses.
fn restorable(sandbox: &cri::PodSandboxConfig, config: &cri::ContainerConfig) -> Result<(), String> {
    let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let options = security.and_then(|security| security.namespace_options.as_ref());
    let of_pod = namespaces::options(sandbox);
    match namespaces::pids(&of_pod, options) {
        PidNamespace::Container => {}
        PidNamespace::Pod => return Err("its pid namespace is shared by the pod".to_owned()),
        PidNamespace::Node => return Err("its pid namespace is the node's".to_owned()),
        PidNamespace::Target => return Err("its pid namespace is another container's".to_owned()),
    }
    if !matches!(Mapping::of(Some(&of_pod)), Ok(None)) {
        return Err("the pod has a user namespace".to_owned());
    }
    if config.tty {
        return Err("it has a terminal".to_owned());
    }
    let spreads = |mount: &&cri::Mount| mount.propagation() != cri::MountPropagation::PropagationPrivate;
    if let Some(mount) = config.mounts.iter().find(spreads) {
        return Err(format!("the mount at {} has mount propagation", mount.container_path));
    }
    Ok(())
}

/// Refuses mount points whose names CRIU misreads.
fn parsable(external: &[String]) -> Result<(), String> {
    match external.iter().find(|place| is_misread(Path::new(place))) {
        Some(place) => Err(format!("criu cannot parse its mount point {place:?}")),
        None => Ok(()),
    }
}

/// Fuzz target for any bytes as manifest: a valid manifest fits itself, or is refused with a reason.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(manifest) = serde_json::from_slice::<Manifest>(data) else { return };
    let wanted: Vec<_> = manifest.containers.iter().map(|saved| saved.config.clone()).collect();
    match fit(&manifest, &manifest.sandbox, &wanted) {
        Ok(fitting) => assert_eq!(fitting.len(), wanted.len()),
        Err(why) => assert!(!why.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::NamespaceMode;

    use super::*;
    use crate::records::RestoreRecord;

    fn sandbox(pid: NamespaceMode) -> cri::PodSandboxConfig {
        let options = cri::NamespaceOption { pid: pid.into(), ..Default::default() };
        cri::PodSandboxConfig {
            hostname: "h".into(),
            linux: Some(cri::LinuxPodSandboxConfig {
                security_context: Some(cri::LinuxSandboxSecurityContext {
                    namespace_options: Some(options),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    fn container(name: &str) -> cri::ContainerConfig {
        let metadata = cri::ContainerMetadata { name: name.into(), attempt: 0 };
        cri::ContainerConfig { metadata: Some(metadata), command: vec!["x".into()], ..Default::default() }
    }

    fn manifest(pid: NamespaceMode, containers: Vec<cri::ContainerConfig>) -> Manifest {
        let saved = |config: cri::ContainerConfig| SavedContainer {
            name: name_of(&config).to_owned(),
            id: "i".into(),
            archive: "i.tar".into(),
            sha256: String::new(),
            image_id: String::new(),
            config,
            restore: RestoreRecord::default(),
        };
        Manifest {
            version: 1,
            engine: "coracle".into(),
            runtime_handler: String::new(),
            sandbox_id: "s".into(),
            sandbox: sandbox(pid),
            containers: containers.into_iter().map(saved).collect(),
        }
    }

    fn refusal(
        change_pod: impl FnOnce(&mut cri::PodSandboxConfig),
        change: impl FnOnce(&mut cri::ContainerConfig),
    ) -> String {
        let manifest = manifest(NamespaceMode::Container, vec![container("a")]);
        let (mut pod, mut wanted) = (manifest.sandbox.clone(), container("a"));
        change_pod(&mut pod);
        change(&mut wanted);
        fit(&manifest, &pod, &[wanted]).map(|_| ()).err().unwrap_or_default()
    }

    #[test]
    fn values_of_processes_must_match_and_values_of_the_pod_may_differ() {
        let same = refusal(
            |pod| pod.metadata = Some(cri::PodSandboxMetadata { name: "other".into(), ..Default::default() }),
            |wanted| wanted.log_path = "other".into(),
        );
        assert_eq!(same, "");
        for (expected, found) in [
            ("host name", refusal(|pod| pod.hostname = "other".into(), |_| {})),
            ("command", refusal(|_| {}, |wanted| wanted.command.clear())),
            ("environment", refusal(|_| {}, |wanted| wanted.envs.push(cri::KeyValue::default()))),
            ("mounts", refusal(|_| {}, |wanted| wanted.mounts.push(cri::Mount::default()))),
            ("terminal", refusal(|_| {}, |wanted| wanted.tty = true)),
        ] {
            assert!(found.contains(expected), "{expected}: {found:?}");
        }
        let two = manifest(NamespaceMode::Container, vec![container("a"), container("b")]);
        let why = fit(&two, &two.sandbox, &[container("a")]).map(|_| ()).unwrap_err();
        assert!(why.contains("containers a, b, but the request has a"), "{why}");
    }

    /// CVE-2024-8676: the mounts of a checkpoint were used. CVE-2026-53492: the annotations of a checkpoint for devices
    /// were used.
    #[test]
    fn cve_2024_8676_mounts_and_annotations_are_those_of_the_request() {
        let mount = |host_path: &str| cri::Mount {
            container_path: "/data".into(),
            host_path: host_path.into(),
            ..Default::default()
        };
        let image = |image: &str| cri::ImageSpec { image: image.into(), ..Default::default() };
        let (mut saved, mut wanted) = (container("a"), container("a"));
        saved.mounts.push(mount("/"));
        saved.log_path = "../../of-the-checkpoint".into();
        saved.image = Some(image("of-the-checkpoint"));
        wanted.log_path = "of-the-request".into();
        wanted.image = Some(image("of-the-request"));
        saved.annotations.insert("cdi.k8s.io/x".into(), "vendor.example/disk=0".into());
        wanted.mounts.push(mount("/volume"));
        let manifest = manifest(NamespaceMode::Container, vec![saved]);
        let wanted = [wanted];
        let fitting = fit(&manifest, &manifest.sandbox, &wanted).expect("fitting");
        assert_eq!(
            fitting.iter().map(|(_, config)| *config).collect::<Vec<_>>(),
            wanted.iter().collect::<Vec<_>>()
        );
        let without_mount = [container("a")];
        assert!(
            fit(&manifest, &manifest.sandbox, &without_mount).is_err(),
            "a mount that only the checkpoint has"
        );
    }

    /// CVE-2024-8676: devices and privileges of a checkpoint were used.
    #[test]
    fn cve_2024_8676_devices_and_privileges_of_a_checkpoint_alone_are_refused() {
        let refused = |change: fn(&mut cri::ContainerConfig)| {
            let mut saved = container("a");
            change(&mut saved);
            let manifest = manifest(NamespaceMode::Container, vec![saved]);
            fit(&manifest, &manifest.sandbox, &[container("a")]).map(|_| ()).err().unwrap_or_default()
        };
        assert_eq!(refused(|_| {}), "");
        let why = refused(|saved| saved.devices.push(cri::Device::default()));
        assert!(why.contains("devices"), "{why}");
        let why = refused(|saved| saved.cdi_devices.push(cri::CdiDevice::default()));
        assert!(why.contains("devices"), "{why}");
        let why = refused(|saved| {
            let security = cri::LinuxContainerSecurityContext { privileged: true, ..Default::default() };
            saved.linux.get_or_insert_default().security_context = Some(security);
        });
        assert!(why.contains("security context"), "{why}");
    }

    #[test]
    fn mount_points_that_criu_misreads_are_refused() {
        let fitting = |place: &str| {
            let mut manifest = manifest(NamespaceMode::Container, vec![container("a")]);
            manifest.containers[0].restore.external = vec!["/data".to_owned(), place.to_owned()];
            fit(&manifest, &manifest.sandbox, &[container("a")]).map(|_| ())
        };
        assert_eq!(fitting("/etc/hosts"), Ok(()));
        let why = fitting("/data]:/etc").unwrap_err();
        assert!(why.contains("/data]:/etc"), "{why}");
    }

    #[test]
    fn unrestorable_options_are_refused_by_name() {
        let refused = |pid, change: fn(&mut cri::ContainerConfig)| {
            let mut wanted = container("a");
            change(&mut wanted);
            let manifest = manifest(pid, vec![wanted.clone()]);
            fit(&manifest, &manifest.sandbox, &[wanted]).map(|_| ()).err().unwrap_or_default()
        };
        assert_eq!(refused(NamespaceMode::Container, |_| {}), "");
        let why = refused(NamespaceMode::Pod, |_| {});
        assert!(why.contains("shared by the pod"), "{why}");
        let why = refused(NamespaceMode::Container, |wanted| wanted.tty = true);
        assert!(why.contains("terminal"), "{why}");
        let why = refused(NamespaceMode::Container, |wanted| {
            wanted.mounts.push(cri::Mount {
                container_path: "/v".into(),
                propagation: cri::MountPropagation::PropagationBidirectional.into(),
                ..Default::default()
            });
        });
        assert!(why.contains("/v has mount propagation"), "{why}");
    }
}

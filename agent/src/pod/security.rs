//! CRI security contexts of pods and containers.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use coracle_proto::cri;
use coracle_proto::cri::security_profile::ProfileType;
use k8s_openapi::api::core::v1::{AppArmorProfile, Container, PodSpec, SeccompProfile, SecurityContext};

const MASKED: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Directories with the CPUs' counts of thermal throttling. The counts show how busy other containers are.
static THROTTLE_COUNTS: LazyLock<Vec<String>> =
    LazyLock::new(|| throttle_counts(Path::new("/sys/devices/system/cpu")));

fn throttle_counts(cpus: &Path) -> Vec<String> {
    let is_cpu = |name: &str| name.strip_prefix("cpu").is_some_and(|number| number.parse::<u32>().is_ok());
    let entries = std::fs::read_dir(cpus).into_iter().flatten().flatten();
    let cpus = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_cpu));
    let counts = cpus.map(|cpu| cpu.path().join("thermal_throttle")).filter(|counts| counts.is_dir());
    counts.map(|counts| counts.to_string_lossy().into_owned()).collect()
}

/// Rules to convert seccomp profiles to CRI.
#[derive(Clone, Debug)]
pub(crate) struct SeccompRules {
    /// Directory of the profiles with the type `Localhost`.
    pub(crate) dir: PathBuf,
    /// Whether a container without a profile has the runtime's default profile, as with the kubelet's `seccompDefault`.
    /// Otherwise it is unconfined.
    pub(crate) is_default: bool,
}

/// The user that an image sets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ImageUser {
    pub(crate) uid: Option<i64>,
    pub(crate) name: String,
}

/// The reason why a container's user or seccomp profile is rejected.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SecurityError {
    #[error("container's runAsUser breaks non-root policy (container: {0})")]
    RunsAsRoot(String),
    #[error("container has runAsNonRoot and image will run as root (container: {0})")]
    ImageRunsAsRoot(String),
    #[error(
        "container has runAsNonRoot and image has non-numeric user ({user}), cannot verify user is non-root (container: {container})"
    )]
    UserUnknown { user: String, container: String },
    #[error("localhostProfile must be set if seccompProfile type is Localhost.")]
    NoSeccompFile,
}

/// The namespaces that a pod shares with its node or among its containers.
pub(crate) fn namespaces(spec: &PodSpec, users: Option<cri::IdMapping>) -> cri::NamespaceOption {
    let node_or =
        |host: Option<bool>, other| if host == Some(true) { cri::NamespaceMode::Node } else { other };
    let own_pid = match spec.share_process_namespace {
        Some(true) => cri::NamespaceMode::Pod,
        _ => cri::NamespaceMode::Container,
    };
    cri::NamespaceOption {
        network: node_or(spec.host_network, cri::NamespaceMode::Pod).into(),
        pid: node_or(spec.host_pid, own_pid).into(),
        ipc: node_or(spec.host_ipc, cri::NamespaceMode::Pod).into(),
        userns_options: users.map(|range| cri::UserNamespace {
            mode: cri::NamespaceMode::Pod.into(),
            uids: vec![range],
            gids: vec![range],
        }),
        ..cri::NamespaceOption::default()
    }
}

/// Security context of the sandbox.
pub(crate) fn sandbox(spec: &PodSpec, users: Option<cri::IdMapping>) -> cri::LinuxSandboxSecurityContext {
    let context = spec.security_context.clone().unwrap_or_default();
    let contexts = spec.init_containers.iter().flatten().chain(&spec.containers).map(|c| &c.security_context);
    let contexts = contexts.chain(spec.ephemeral_containers.iter().flatten().map(|c| &c.security_context));
    let privileged = contexts.flatten().any(|context| context.privileged == Some(true));
    cri::LinuxSandboxSecurityContext {
        namespace_options: Some(namespaces(spec, users)),
        run_as_user: context.run_as_user.map(|value| cri::Int64Value { value }),
        // The CRI forbids a group without a user in a sandbox. Containers get the group with the users of their images.
        run_as_group: context.run_as_user.and(context.run_as_group).map(|value| cri::Int64Value { value }),
        supplemental_groups: groups(spec),
        supplemental_groups_policy: groups_policy(spec),
        privileged,
        // The pause process always runs with the default profile: a container's profile may forbid its system calls.
        seccomp: Some(plain(ProfileType::RuntimeDefault)),
        selinux_options: context.se_linux_options.as_ref().map(selinux),
        ..cri::LinuxSandboxSecurityContext::default()
    }
}

/// Security context of a container.
pub(crate) fn container(
    spec: &PodSpec,
    container: &Container,
    image: &ImageUser,
    rules: &SeccompRules,
    users: Option<cri::IdMapping>,
) -> Result<cri::LinuxContainerSecurityContext, SecurityError> {
    let own = container.security_context.clone().unwrap_or_default();
    let pods = spec.security_context.clone().unwrap_or_default();
    let privileged = own.privileged == Some(true);
    let user = own.run_as_user.or(pods.run_as_user);
    if own.run_as_non_root.or(pods.run_as_non_root) == Some(true) {
        non_root(container, user, image)?;
    }
    let uid = user.or(image.uid).or(image.name.is_empty().then_some(0));
    let unmasked = own.proc_mount.as_deref() == Some("Unmasked");
    let paths = |list: &[&str], more: &[String]| -> Vec<String> {
        let all = list.iter().map(|&path| path.to_owned()).chain(more.iter().cloned());
        if unmasked { Vec::new() } else { all.collect() }
    };
    let profile = seccomp(own.seccomp_profile.as_ref().or(pods.seccomp_profile.as_ref()), rules)?;
    Ok(cri::LinuxContainerSecurityContext {
        capabilities: Some(capabilities(&own)),
        privileged,
        namespace_options: Some(namespaces(spec, users)),
        selinux_options: own.se_linux_options.as_ref().or(pods.se_linux_options.as_ref()).map(selinux),
        run_as_user: uid.map(|value| cri::Int64Value { value }),
        run_as_username: if uid.is_none() { image.name.clone() } else { String::new() },
        run_as_group: own.run_as_group.or(pods.run_as_group).map(|value| cri::Int64Value { value }),
        readonly_rootfs: own.read_only_root_filesystem == Some(true),
        supplemental_groups: groups(spec),
        supplemental_groups_policy: groups_policy(spec),
        no_new_privs: own.allow_privilege_escalation == Some(false),
        masked_paths: paths(&MASKED, THROTTLE_COUNTS.as_slice()),
        readonly_paths: paths(&READ_ONLY, &[]),
        seccomp: Some(if privileged { plain(ProfileType::Unconfined) } else { profile }),
        apparmor: own.app_armor_profile.as_ref().or(pods.app_armor_profile.as_ref()).map(apparmor),
        ..cri::LinuxContainerSecurityContext::default()
    })
}

/// The AppArmor profile of a container. `localhostProfile` is the name of a profile that is loaded in the kernel.
fn apparmor(profile: &AppArmorProfile) -> cri::SecurityProfile {
    match (profile.type_.as_str(), &profile.localhost_profile) {
        ("RuntimeDefault", _) => plain(ProfileType::RuntimeDefault),
        ("Localhost", name) => cri::SecurityProfile {
            profile_type: ProfileType::Localhost.into(),
            localhost_ref: name.clone().unwrap_or_default(),
        },
        _ => plain(ProfileType::Unconfined),
    }
}

fn non_root(container: &Container, user: Option<i64>, image: &ImageUser) -> Result<(), SecurityError> {
    let name = container.name.clone();
    match (user, image.uid) {
        (Some(0), _) => Err(SecurityError::RunsAsRoot(name)),
        (Some(_), _) => Ok(()),
        (None, Some(0)) => Err(SecurityError::ImageRunsAsRoot(name)),
        (None, Some(_)) => Ok(()),
        (None, None) if image.name.is_empty() => Err(SecurityError::ImageRunsAsRoot(name)),
        (None, None) => Err(SecurityError::UserUnknown { user: image.name.clone(), container: name }),
    }
}

fn groups(spec: &PodSpec) -> Vec<i64> {
    let Some(context) = &spec.security_context else { return Vec::new() };
    let mut groups: Vec<i64> = context.supplemental_groups.clone().unwrap_or_default();
    groups.extend(context.fs_group);
    groups.dedup();
    groups
}

fn groups_policy(spec: &PodSpec) -> i32 {
    let policy = spec.security_context.as_ref().and_then(|c| c.supplemental_groups_policy.as_deref());
    match policy {
        Some("Strict") => cri::SupplementalGroupsPolicy::Strict.into(),
        _ => cri::SupplementalGroupsPolicy::Merge.into(),
    }
}

fn capabilities(context: &SecurityContext) -> cri::Capability {
    let given = context.capabilities.clone().unwrap_or_default();
    cri::Capability {
        add_capabilities: given.add.unwrap_or_default(),
        drop_capabilities: given.drop.unwrap_or_default(),
        ..cri::Capability::default()
    }
}

fn selinux(options: &k8s_openapi::api::core::v1::SELinuxOptions) -> cri::SeLinuxOption {
    cri::SeLinuxOption {
        user: options.user.clone().unwrap_or_default(),
        role: options.role.clone().unwrap_or_default(),
        r#type: options.type_.clone().unwrap_or_default(),
        level: options.level.clone().unwrap_or_default(),
    }
}

fn plain(kind: ProfileType) -> cri::SecurityProfile {
    cri::SecurityProfile { profile_type: kind.into(), localhost_ref: String::new() }
}

/// The seccomp profile of a container. The API server checks the profiles of its pods. It does not check static pods,
/// so a missing file is an error here. Source: `fieldSeccompProfile` of upstream's `pkg/kubelet/kuberuntime`.
fn seccomp(
    profile: Option<&SeccompProfile>,
    rules: &SeccompRules,
) -> Result<cri::SecurityProfile, SecurityError> {
    let Some(profile) = profile else {
        let kind = if rules.is_default { ProfileType::RuntimeDefault } else { ProfileType::Unconfined };
        return Ok(plain(kind));
    };
    Ok(match (profile.type_.as_str(), profile.localhost_profile.as_deref()) {
        ("RuntimeDefault", _) => plain(ProfileType::RuntimeDefault),
        ("Localhost", None | Some("")) => return Err(SecurityError::NoSeccompFile),
        ("Localhost", Some(file)) => cri::SecurityProfile {
            profile_type: ProfileType::Localhost.into(),
            localhost_ref: rules.dir.join(file).to_string_lossy().into_owned(),
        },
        _ => plain(ProfileType::Unconfined),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn context(
        spec: serde_json::Value,
        image: &ImageUser,
    ) -> Result<cri::LinuxContainerSecurityContext, SecurityError> {
        with_default(spec, image, false)
    }

    fn with_default(
        spec: serde_json::Value,
        image: &ImageUser,
        is_default: bool,
    ) -> Result<cri::LinuxContainerSecurityContext, SecurityError> {
        let spec: PodSpec = serde_json::from_value(spec).unwrap();
        let rules = SeccompRules { dir: "/seccomp".into(), is_default };
        container(&spec, &spec.containers[0], image, &rules, None)
    }

    #[test]
    fn the_nodes_default_profile_is_for_containers_without_a_profile() {
        let of = |pods: serde_json::Value, own: serde_json::Value, is_default: bool| {
            let spec = json!({"securityContext": {"seccompProfile": pods},
                "containers": [{"name": "c", "securityContext": own}]});
            with_default(spec, &ImageUser::default(), is_default).unwrap().seccomp.unwrap()
        };
        let (unconfined, default) = (plain(ProfileType::Unconfined), plain(ProfileType::RuntimeDefault));
        assert_eq!(of(json!(null), json!(null), true), default);
        assert_eq!(of(json!(null), json!({"runAsUser": 5}), true), default);
        assert_eq!(of(json!(null), json!(null), false), unconfined);
        let own = json!({"seccompProfile": {"type": "Unconfined"}});
        assert_eq!(of(json!(null), own.clone(), true), unconfined);
        assert_eq!(of(json!({"type": "Unconfined"}), json!(null), true), unconfined);
        assert_eq!(of(json!({"type": "RuntimeDefault"}), own, true), unconfined, "the container's own");
        assert_eq!(of(json!(null), json!({"privileged": true}), true), unconfined, "it is not confined");
        let file = json!({"type": "Localhost", "localhostProfile": "a.json"});
        assert_eq!(of(file, json!(null), true).localhost_ref, "/seccomp/a.json");
    }

    #[test]
    fn a_local_profile_without_a_file_is_refused_and_not_unconfined() {
        for profile in [json!({"type": "Localhost"}), json!({"type": "Localhost", "localhostProfile": ""})] {
            let spec = json!({"containers": [{"name": "c", "securityContext": {"seccompProfile": profile}}]});
            assert_eq!(context(spec, &ImageUser::default()), Err(SecurityError::NoSeccompFile));
        }
    }

    #[test]
    fn a_container_without_a_context_runs_as_the_images_user() {
        let spec = json!({"containers": [{"name": "c"}]});
        let uid = |c: cri::LinuxContainerSecurityContext| c.run_as_user.map(|u| u.value);
        assert_eq!(uid(context(spec.clone(), &ImageUser::default()).unwrap()), Some(0));
        let image = ImageUser { uid: Some(101), name: String::new() };
        assert_eq!(uid(context(spec.clone(), &image).unwrap()), Some(101));
        let named = context(spec, &ImageUser { uid: None, name: "www".into() }).unwrap();
        assert_eq!((named.run_as_user, named.run_as_username.as_str()), (None, "www"));
    }

    #[test]
    fn a_containers_apparmor_profile_takes_precedence_over_its_pods() {
        let profile = |pods: serde_json::Value, own: serde_json::Value| {
            let spec = json!({"securityContext": {"appArmorProfile": pods},
                "containers": [{"name": "c", "securityContext": {"appArmorProfile": own}}]});
            context(spec, &ImageUser::default()).unwrap().apparmor
        };
        let default = json!({"type": "RuntimeDefault"});
        let named = json!({"type": "Localhost", "localhostProfile": "mine"});
        assert_eq!(profile(json!(null), json!(null)), None);
        assert_eq!(profile(named.clone(), default.clone()), Some(plain(ProfileType::RuntimeDefault)));
        assert_eq!(profile(default, named).unwrap().localhost_ref, "mine");
        let unconfined = profile(json!({"type": "Unconfined"}), json!(null));
        assert_eq!(unconfined, Some(plain(ProfileType::Unconfined)));
    }

    #[test]
    fn a_pod_with_its_own_ids_requests_a_user_namespace() {
        let spec: PodSpec = serde_json::from_value(json!({"hostUsers": false, "containers": []})).unwrap();
        let range = cri::IdMapping { container_id: 0, host_id: 65536, length: 65536 };
        let options = namespaces(&spec, Some(range)).userns_options.unwrap();
        assert_eq!((options.mode(), options.uids.as_slice()), (cri::NamespaceMode::Pod, &[range][..]));
        assert_eq!(namespaces(&spec, None).userns_options, None);
    }

    #[test]
    fn a_sandbox_runs_under_the_default_profile_and_as_a_user_or_not_at_all() {
        let of = |context: serde_json::Value| {
            let spec = json!({"securityContext": context, "containers": [{"name": "c"}]});
            sandbox(&serde_json::from_value(spec).unwrap(), None)
        };
        let id = |value| Some(cri::Int64Value { value });
        let both = of(json!({"runAsUser": 5, "runAsGroup": 6,
            "seccompProfile": {"type": "Localhost", "localhostProfile": "strict.json"}}));
        assert_eq!((both.run_as_user, both.run_as_group), (id(5), id(6)));
        assert_eq!(both.seccomp, Some(plain(ProfileType::RuntimeDefault)));
        assert_eq!(of(json!({"runAsGroup": 6})).run_as_group, None);
    }

    #[test]
    fn a_sandbox_allows_a_privileged_container_of_any_kind() {
        let privileged = json!({"name": "p", "securityContext": {"privileged": true}});
        for kind in ["initContainers", "containers", "ephemeralContainers"] {
            let mut spec = json!({"containers": [{"name": "c"}]});
            assert!(!sandbox(&serde_json::from_value(spec.clone()).unwrap(), None).privileged);
            spec[kind] = json!([privileged]);
            assert!(sandbox(&serde_json::from_value(spec).unwrap(), None).privileged, "{kind}");
        }
    }

    #[test]
    fn counts_of_thermal_throttling_are_masked_on_cpus_that_have_them() {
        let dir = tempfile::tempdir().unwrap();
        for made in ["cpu1/thermal_throttle", "cpu2", "cpufreq/thermal_throttle"] {
            std::fs::create_dir_all(dir.path().join(made)).unwrap();
        }
        let expected = dir.path().join("cpu1/thermal_throttle").to_string_lossy().into_owned();
        assert_eq!(throttle_counts(dir.path()), [expected]);
    }

    #[test]
    fn run_as_non_root_refuses_root_from_any_source() {
        let spec = |user: Option<i64>| json!({"securityContext": {"runAsNonRoot": true, "runAsUser": user}, "containers": [{"name": "c"}]});
        let root = ImageUser { uid: Some(0), name: String::new() };
        assert_eq!(context(spec(None), &root).unwrap_err(), SecurityError::ImageRunsAsRoot("c".into()));
        assert_eq!(context(spec(Some(0)), &root).unwrap_err(), SecurityError::RunsAsRoot("c".into()));
        assert!(context(spec(Some(5)), &root).is_ok());
        let named = ImageUser { uid: None, name: "www".into() };
        assert!(matches!(context(spec(None), &named), Err(SecurityError::UserUnknown { .. })));
    }

    /// The files of CVE-2018-10892 and CVE-2020-8694. A test machine may lack them.
    #[test]
    fn cve_2018_10892_files_of_devices_are_masked_by_default() {
        let spec = json!({"containers": [{"name": "c"}]});
        let masked = context(spec, &ImageUser::default()).unwrap().masked_paths;
        for path in
            ["/proc/acpi", "/proc/kcore", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap"]
        {
            assert!(masked.iter().any(|one| one == path), "{path}");
        }
    }

    #[test]
    fn privileged_and_unmasked_lift_their_restrictions() {
        let spec = json!({"containers": [{"name": "c", "securityContext":
            {"privileged": true, "procMount": "Unmasked", "seccompProfile": {"type": "RuntimeDefault"}}}]});
        let context = context(spec, &ImageUser::default()).unwrap();
        assert!(context.privileged && context.masked_paths.is_empty());
        assert_eq!(context.seccomp.unwrap().profile_type, i32::from(ProfileType::Unconfined));
    }
}

//! Tests of specs: parts of the spec for given configurations.

use std::collections::HashMap;
use std::sync::Arc;

use coracle_proto::cri::{
    self, ContainerConfig, LinuxContainerSecurityContext, NamespaceMode, PodSandboxConfig,
};
use serde_json::{Value, json};

use super::*;

fn spec_of(config: &ContainerConfig, sandbox: &PodSandboxConfig) -> Value {
    let spec = sample::spec(config, sandbox, &sample::host()).expect("spec");
    serde_json::to_value(spec).expect("json")
}

fn secured(security: LinuxContainerSecurityContext) -> ContainerConfig {
    let linux = cri::LinuxContainerConfig { resources: None, security_context: Some(security) };
    ContainerConfig { linux: Some(linux), ..Default::default() }
}

fn networked(network: NamespaceMode, ipc: NamespaceMode) -> PodSandboxConfig {
    let mut options = cri::NamespaceOption::default();
    options.set_network(network);
    options.set_ipc(ipc);
    let security =
        cri::LinuxSandboxSecurityContext { namespace_options: Some(options), ..Default::default() };
    let linux = cri::LinuxPodSandboxConfig { security_context: Some(security), ..Default::default() };
    PodSandboxConfig { linux: Some(linux), ..Default::default() }
}

fn mount_at<'a>(spec: &'a Value, destination: &str) -> &'a Value {
    let mounts = spec["mounts"].as_array().expect("mounts");
    let mut found = mounts.iter().filter(|mount| mount["destination"] == destination);
    let mount = found.next().expect("a mount there");
    assert!(found.next().is_none(), "two mounts at {destination}");
    mount
}

/// A capability set in order: in the spec it is unordered.
fn capabilities(spec: &Value, set: &str) -> Vec<String> {
    let names = spec["process"]["capabilities"][set].as_array().expect("a set");
    let mut names: Vec<String> = names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect();
    names.sort_unstable();
    names
}

#[test]
fn a_plain_container_joins_the_pod() {
    let spec = spec_of(&ContainerConfig::default(), &PodSandboxConfig::default());
    assert_eq!(
        spec["linux"]["namespaces"],
        json!([
            {"type": "mount"},
            {"type": "network", "path": "/proc/42/ns/net"},
            {"type": "uts", "path": "/proc/42/ns/uts"},
            {"type": "ipc", "path": "/proc/42/ns/ipc"},
            {"type": "pid", "path": "/proc/43/ns/pid"},
        ])
    );
    assert_eq!(spec["process"]["args"], json!(["run"]));
    assert_eq!(capabilities(&spec, "effective"), ["CAP_CHOWN", "CAP_KILL"]);
    assert!(spec["process"].get("noNewPrivileges").is_none());
    assert!(spec.get("hostname").is_none());
    assert!(spec["linux"].get("seccomp").is_none());
    assert_eq!(spec["linux"]["cgroupsPath"], "/kubepods/pod1/c");
    assert_eq!(spec["linux"]["resources"]["devices"][0]["allow"], false);
    assert_eq!(mount_at(&spec, "/dev/shm")["source"], "/s/shm");
    assert_eq!(mount_at(&spec, "/etc/hosts")["source"], "/s/hosts");
}

#[test]
fn the_nodes_namespaces_are_not_created() {
    let spec = spec_of(&ContainerConfig::default(), &networked(NamespaceMode::Node, NamespaceMode::Node));
    assert_eq!(
        spec["linux"]["namespaces"],
        json!([{"type": "mount"}, {"type": "pid", "path": "/proc/43/ns/pid"}])
    );
    assert_eq!(mount_at(&spec, "/dev/shm")["source"], "/dev/shm");
}

#[test]
fn a_pod_with_a_user_namespace_maps_the_ids_of_its_volumes() {
    let range = cri::IdMapping { container_id: 0, host_id: 70000, length: 65536 };
    let mut sandbox = networked(NamespaceMode::Node, NamespaceMode::Pod);
    let linux = sandbox.linux.get_or_insert_default().security_context.get_or_insert_default();
    linux.namespace_options.get_or_insert_default().userns_options =
        Some(cri::UserNamespace { mode: NamespaceMode::Pod.into(), uids: vec![range], gids: vec![range] });
    let volume = cri::Mount {
        container_path: "/v".into(),
        host_path: "/h".into(),
        uid_mappings: vec![range],
        gid_mappings: vec![range],
        ..Default::default()
    };
    let plain = cri::Mount { container_path: "/plain".into(), host_path: "/h".into(), ..Default::default() };
    let config = ContainerConfig { mounts: vec![volume, plain], ..Default::default() };
    let spec = spec_of(&config, &sandbox);
    let mapped = json!([{"containerID": 0, "hostID": 70000, "size": 65536}]);
    assert_eq!(spec["linux"]["namespaces"][0], json!({"type": "user"}));
    assert_eq!(spec["linux"]["uidMappings"], mapped);
    assert_eq!(mount_at(&spec, "/v")["uidMappings"], mapped);
    assert_eq!(mount_at(&spec, "/v")["gidMappings"], mapped);
    // The pod's files belong to its root, so their mounts need no mapping.
    for place in ["/etc/hosts", "/plain"] {
        assert!(mount_at(&spec, place).get("uidMappings").is_none(), "{place}");
    }
    assert_eq!(mount_at(&spec, "/sys")["type"], "bind", "the node's network belongs to the node");
}

#[test]
fn a_target_determines_the_pid_namespace() {
    let mut options = cri::NamespaceOption::default();
    options.set_pid(NamespaceMode::Target);
    let security = LinuxContainerSecurityContext { namespace_options: Some(options), ..Default::default() };
    let spec = spec_of(&secured(security), &PodSandboxConfig::default());
    assert_eq!(spec["linux"]["namespaces"][4], json!({"type": "pid", "path": "/proc/7/ns/pid"}));
}

#[test]
fn pid_namespaces_follow_container_and_pod() {
    let of = |pod: NamespaceMode, asked: Option<NamespaceMode>| {
        let mut sandbox = networked(NamespaceMode::Node, NamespaceMode::Node);
        let linux = sandbox.linux.get_or_insert_default().security_context.get_or_insert_default();
        linux.namespace_options.get_or_insert_default().set_pid(pod);
        let options = asked.map(|mode| cri::NamespaceOption { pid: mode.into(), ..Default::default() });
        let security = LinuxContainerSecurityContext { namespace_options: options, ..Default::default() };
        spec_of(&secured(security), &sandbox)["linux"]["namespaces"].as_array().expect("a list")[1..].to_vec()
    };
    let own = vec![json!({"type": "pid"})];
    assert_eq!(of(NamespaceMode::Container, None), own);
    assert_eq!(of(NamespaceMode::Pod, Some(NamespaceMode::Container)), own);
    assert_eq!(of(NamespaceMode::Node, Some(NamespaceMode::Container)), own);
    for nodes in
        [of(NamespaceMode::Node, Some(NamespaceMode::Pod)), of(NamespaceMode::Pod, Some(NamespaceMode::Node))]
    {
        assert!(nodes.is_empty(), "{nodes:?}");
    }
}

#[test]
fn privileged_means_all_our_capabilities_and_no_masked_paths() {
    let profile = cri::SecurityProfile::default();
    let spec = spec_of(
        &secured(LinuxContainerSecurityContext {
            privileged: true,
            seccomp: Some(profile),
            masked_paths: vec!["/proc/kcore".into()],
            ..Default::default()
        }),
        &PodSandboxConfig::default(),
    );
    assert_eq!(capabilities(&spec, "bounding"), ["CAP_CHOWN", "CAP_KILL", "CAP_SYS_ADMIN"]);
    assert_eq!(spec["linux"]["maskedPaths"], json!([]));
    assert!(spec["linux"].get("seccomp").is_none());
    assert_eq!(spec["linux"]["resources"]["devices"][0]["allow"], true);
    let options = mount_at(&spec, "/sys")["options"].as_array().expect("options");
    assert!(options.contains(&json!("rw")));
}

#[test]
fn a_privileged_container_in_a_user_namespace_may_not_use_all_devices() {
    let range = cri::IdMapping { container_id: 0, host_id: 70_000, length: 65_536 };
    let users =
        cri::UserNamespace { mode: cri::NamespaceMode::Pod.into(), uids: vec![range], gids: vec![range] };
    let context = cri::LinuxSandboxSecurityContext {
        namespace_options: Some(cri::NamespaceOption { userns_options: Some(users), ..Default::default() }),
        ..Default::default()
    };
    let linux = cri::LinuxPodSandboxConfig { security_context: Some(context), ..Default::default() };
    let pod = PodSandboxConfig { linux: Some(linux), ..Default::default() };
    let privileged = secured(LinuxContainerSecurityContext { privileged: true, ..Default::default() });
    let spec = spec_of(&privileged, &pod);
    let rules = spec["linux"]["resources"]["devices"].as_array().expect("rules");
    assert_eq!(rules.len(), 1, "the test has no device nodes");
    assert_eq!(rules[0]["allow"], false);
}

#[test]
fn a_profile_is_set_unless_unconfined() {
    let mut profile = cri::SecurityProfile::default();
    let context = |profile: &cri::SecurityProfile| {
        secured(LinuxContainerSecurityContext { seccomp: Some(profile.clone()), ..Default::default() })
    };
    let spec = spec_of(&context(&profile), &PodSandboxConfig::default());
    assert_eq!(spec["linux"]["seccomp"]["defaultAction"], "SCMP_ACT_ERRNO");
    profile.set_profile_type(ProfileType::Unconfined);
    let spec = spec_of(&context(&profile), &PodSandboxConfig::default());
    assert!(spec["linux"].get("seccomp").is_none());
}

#[test]
fn volumes_replace_default_mounts_and_the_widest_propagation_wins() {
    let mut shared = cri::Mount {
        container_path: "/data//x/".into(),
        host_path: "/h".into(),
        readonly: true,
        ..Default::default()
    };
    shared.set_propagation(cri::MountPropagation::PropagationHostToContainer);
    let hosts =
        cri::Mount { container_path: "/etc/hosts".into(), host_path: "/mine".into(), ..Default::default() };
    let config = ContainerConfig { mounts: vec![shared, hosts], ..Default::default() };
    let spec = spec_of(&config, &PodSandboxConfig::default());
    assert_eq!(mount_at(&spec, "/etc/hosts")["source"], "/mine");
    assert_eq!(mount_at(&spec, "/data/x")["options"], json!(["rbind", "rslave", "ro"]));
    assert_eq!(spec["linux"]["rootfsPropagation"], "slave");
}

#[test]
fn oom_scores_are_clamped_to_the_host_limit() {
    for (requested, expected) in [(-998, 0), (0, 0), (1000, 1000), (2000, 1000)] {
        let resources = cri::LinuxContainerResources { oom_score_adj: requested, ..Default::default() };
        let linux = cri::LinuxContainerConfig { resources: Some(resources), security_context: None };
        let config = ContainerConfig { linux: Some(linux), ..Default::default() };
        let spec = spec_of(&config, &PodSandboxConfig::default());
        assert_eq!(spec["process"]["oomScoreAdj"], expected);
    }
}

#[test]
fn mounts_of_the_pod_follow_the_volumes_above_them() {
    let volume =
        |path: &str| cri::Mount { container_path: path.into(), host_path: "/h".into(), ..Default::default() };
    let spec_with = |mounts: Vec<cri::Mount>| {
        let config = ContainerConfig { mounts, ..Default::default() };
        spec_of(&config, &PodSandboxConfig::default())
    };
    let places = |spec: &Value| -> Vec<String> {
        let mounts = spec["mounts"].as_array().expect("mounts").iter();
        mounts.map(|mount| mount["destination"].as_str().expect("a place").to_owned()).collect()
    };
    let spec =
        spec_with(vec![volume("/etc/hostname"), volume("/etc"), volume("/dev/"), volume("/dev/shm/x")]);
    let all = places(&spec);
    let at = |place: &str| all.iter().position(|known| known == place).expect("a mount there");
    for (above, below) in
        [("/etc", "/etc/hosts"), ("/etc", "/etc/hostname"), ("/dev", "/dev/shm"), ("/dev/shm", "/dev/shm/x")]
    {
        assert!(at(above) < at(below), "{all:?}");
    }
    assert_eq!(mount_at(&spec, "/etc/hostname")["source"], "/h");
    assert_eq!(mount_at(&spec, "/dev")["source"], "/h");
    assert!(!all.iter().any(|place| place == "/dev/pts" || place == "/dev/mqueue"), "{all:?}");
    // A bidirectional volume gets no nested mounts.
    let shared = cri::Mount { propagation: 2, ..volume("/etc") };
    assert!(!places(&spec_with(vec![shared])).contains(&"/etc/hosts".to_owned()));
}

/// The spec's capabilities come from unordered sets, so their order is random.
fn with_sorted_capabilities(mut spec: Value) -> Value {
    let sets = spec["process"]["capabilities"].as_object_mut().into_iter().flat_map(|sets| sets.values_mut());
    for set in sets.filter_map(Value::as_array_mut) {
        set.sort_by_key(Value::to_string);
    }
    spec
}

/// CVE-2023-6476, CVE-2024-3154: annotations of a pod set properties of its cgroups, devices and mounts.
#[test]
fn cve_2023_6476_annotations_set_nothing_of_a_container() {
    let names = [
        "io.kubernetes.cri-o.cgroup2-mount-hierarchy-rw",
        "io.kubernetes.cri-o.unified-cgroup",
        "io.kubernetes.cri-o.UnifiedCgroup.c",
        "io.kubernetes.cri-o.Devices",
        "io.kubernetes.cri-o.ShmSize",
        "io.kubernetes.cri-o.userns-mode",
        "cpu-quota.crio.io",
        "org.systemd.property.ExecStartPre",
        "run.oci.mount_context_type",
    ];
    let annotations: HashMap<String, String> =
        names.iter().map(|name| ((*name).to_owned(), "true;/dev/sda:rwm".to_owned())).collect();
    let config = ContainerConfig { annotations: annotations.clone(), ..Default::default() };
    let sandbox = PodSandboxConfig { annotations, ..Default::default() };
    let mut spec = spec_of(&config, &sandbox);
    spec["annotations"] = json!({});
    let plain = spec_of(&ContainerConfig::default(), &PodSandboxConfig::default());
    assert_eq!(with_sorted_capabilities(spec), with_sorted_capabilities(plain));
}

/// CVE-2022-23648: volumes in an image's configuration copied files of the host. CVE-2026-53488: an image's labels
/// became labels of the container, and commands of the host.
#[test]
fn cve_2022_23648_volumes_and_labels_of_an_image_set_nothing_of_a_container() {
    let mut image = sample::image(&["run"], &[], &[]);
    let mut hostile = oci_spec::image::ImageConfiguration::clone(&image.config);
    let mut process = hostile.config().clone().expect("config");
    process.set_volumes(Some(vec!["/../../../etc".to_owned(), "/var/lib/../../root".to_owned()]));
    let label = ("containerd.io/restart.loguri".to_owned(), "binary:///bin/sh".to_owned());
    process.set_labels(Some(HashMap::from([label])));
    hostile.set_config(Some(process));
    image.config = Arc::new(hostile);
    let (config, sandbox) = (ContainerConfig::default(), PodSandboxConfig::default());
    let spec = sample::spec_of_image(&image, &config, &sandbox, &sample::host()).expect("spec");
    let spec = serde_json::to_value(spec).expect("json");
    assert_eq!(with_sorted_capabilities(spec), with_sorted_capabilities(spec_of(&config, &sandbox)));
}

//! The desired Node object, and the patches that lead to it. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use coracle_cni::Announcement;
use coracle_values::CollectMap;
use coracle_values::go::architecture;
use coracle_values::names::is_extended_resource;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    ContainerImage, DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints, NodeSpec,
    NodeStatus,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde_json::{Value, json};

use super::cloud;
use super::config::NodeConfig;
use super::devices::{self, DeviceCounts};
use super::pressure::Pressure;
use super::properties::MachineProperties;
use crate::overlay::{self, State};

/// Condition type of the overlay. Other network providers also write conditions of this type. The condition belongs to
/// this agent only if its reason is [`IS_UP`] or [`FAILED`].
const UNAVAILABLE: &str = "NetworkUnavailable";
const IS_UP: &str = "OverlayIsUp";
const FAILED: &str = "OverlayFailed";
/// Condition type for faults of the paths to other nodes. Only this agent writes it.
const IMPAIRED: &str = "PodNetworkImpaired";
/// Maximum faults in the message of the condition `PodNetworkImpaired`.
const FAULTS_MAX: usize = 20;

/// Features that a node must declare before pods on it can use them, sorted. The features are resizes of pod-level
/// resources and of init containers, and restarts of all containers.
const DECLARED_FEATURES: [&str; 3] = [
    "InPlacePodLevelResourcesVerticalScaling",
    "InPlacePodVerticalScalingInitContainers",
    "RestartAllContainersOnContainerExits",
];

/// The node's state that changes while it runs.
#[derive(Clone, Debug)]
pub(super) struct CurrentState {
    /// The node's addresses, the primary one first.
    pub(super) ips: Vec<IpAddr>,
    /// Whether the pod network is ready; the reason if not.
    pub(super) network: Result<(), String>,
    pub(super) overlay: State,
    /// Conditions of pressure.
    pub(super) pressure: Pressure,
    /// Images in the store. None if the images are not listed yet.
    pub(super) images: Option<Vec<ContainerImage>>,
    /// Numbers of the devices of device plugins.
    pub(super) devices: DeviceCounts,
    /// Whether the machine shuts down and the pods end.
    pub(super) is_shutting_down: bool,
    pub(super) now: Timestamp,
}

/// The Node object for registration.
pub(super) fn node(
    config: &NodeConfig,
    properties: &MachineProperties,
    current_state: &CurrentState,
) -> Node {
    let taints = config.taints.iter().cloned().chain(cloud::taint(config));
    let taints = Some(taints.collect::<Vec<_>>()).filter(|taints| !taints.is_empty());
    let provider_id = config.provider_id.clone();
    let has_spec = taints.is_some() || provider_id.is_some();
    Node {
        metadata: ObjectMeta {
            name: Some(config.name.clone()),
            labels: Some(labels(config)),
            annotations: Some(
                local_volumes(config, properties)
                    .into_iter()
                    .chain([(cloud::NODE_IPS, cloud::node_ips(config))])
                    .filter_map(|(name, value)| Some((name.to_owned(), value?)))
                    .collect_map(),
            ),
            ..ObjectMeta::default()
        },
        spec: has_spec.then(|| NodeSpec { taints, provider_id, ..NodeSpec::default() }),
        status: Some(status(config, properties, current_state, &NodeStatus::default())),
    }
}

fn declared_features() -> Vec<String> {
    DECLARED_FEATURES.map(str::to_owned).to_vec()
}

/// Completes the response to a patch of the status: a server before v1.35 drops the declared features. These features
/// count as written, so that the node does not send them repeatedly.
pub(super) fn keep_declared_features(written: &mut Node) {
    if let Some(status) = &mut written.status {
        status.declared_features.get_or_insert_with(declared_features);
    }
}

/// Labels of every node, and configured labels.
fn labels(config: &NodeConfig) -> BTreeMap<String, String> {
    let arch = architecture();
    let own = [
        ("kubernetes.io/hostname", config.name.as_str()),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", arch),
        ("beta.kubernetes.io/os", "linux"),
        ("beta.kubernetes.io/arch", arch),
    ];
    let own = own.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned()));
    config.labels.clone().into_iter().chain(own).collect_map()
}

/// The annotations with the directory of local volumes and the size of its file system. The control plane uses them to
/// provision volumes. None if the node does not have the annotation.
fn local_volumes(config: &NodeConfig, properties: &MachineProperties) -> [(&'static str, Option<String>); 2] {
    let directory = config.local_volume_dir.to_string_lossy().into_owned();
    let size = properties.local_volume_kib.map(|kib| format!("{kib}Ki"));
    [("coracle.dev/local-volumes", Some(directory)), ("coracle.dev/local-volumes-disk", size)]
}

/// The merge patch of missing labels and of outdated overlay annotations.
pub(super) fn metadata_patch(
    config: &NodeConfig,
    properties: &MachineProperties,
    announced: Option<&Announcement>,
    observed: &Node,
) -> Option<Value> {
    let mut patch = serde_json::Map::new();
    let held = observed.metadata.labels.clone().unwrap_or_default();
    let missing: BTreeMap<_, _> =
        labels(config).into_iter().filter(|(key, value)| held.get(key) != Some(value)).collect_map();
    if !missing.is_empty() {
        patch.insert("labels".to_owned(), json!(missing));
    }
    let held = observed.metadata.annotations.clone().unwrap_or_default();
    let mut missing: BTreeMap<_, _> = match announced {
        Some(Announcement { kind, ends }) => overlay::annotations(*kind, ends, &held),
        // The annotations are removed together with the conditions. The reasons of the conditions show that
        // this agent wrote both: flannel uses the same annotations.
        None if !stale(config, observed.status.as_ref()).is_empty() => overlay::without_annotations(&held),
        None => BTreeMap::new(),
    };
    let own = local_volumes(config, properties).into_iter();
    for (name, value) in own.chain([(cloud::NODE_IPS, cloud::node_ips(config))]) {
        if held.get(name) != value.as_ref() {
            missing.insert(name, value);
        }
    }
    if !missing.is_empty() {
        patch.insert("annotations".to_owned(), json!(missing));
    }
    (!patch.is_empty()).then(|| json!({"metadata": patch}))
}

/// The strategic patch of outdated fields. None if only times would differ.
pub(super) fn status_patch(
    config: &NodeConfig,
    properties: &MachineProperties,
    current_state: &CurrentState,
    observed: &Node,
) -> Option<Value> {
    let held = observed.status.clone().unwrap_or_default();
    let (want, stale) = (status(config, properties, current_state, &held), stale(config, Some(&held)));
    let mut patch = serde_json::Map::new();
    // The value is replaced as a whole if it differs. A null removes fields that a merge would keep.
    put(&mut patch, "capacity", &held.capacity, &want.capacity);
    put(&mut patch, "allocatable", &held.allocatable, &want.allocatable);
    if let Some(allocatable) = patch.get_mut("allocatable").and_then(Value::as_object_mut) {
        let removed =
            held.allocatable.iter().flatten().map(|(name, _)| name).filter(|name| is_extended_resource(name));
        for name in removed {
            allocatable.entry(name.clone()).or_insert(Value::Null);
        }
    }
    put(&mut patch, "daemonEndpoints", &held.daemon_endpoints, &want.daemon_endpoints);
    put(&mut patch, "nodeInfo", &held.node_info, &want.node_info);
    put(&mut patch, "declaredFeatures", &held.declared_features, &want.declared_features);
    // The API returns an empty list as an absent list.
    put(&mut patch, "images", &Some(held.images.unwrap_or_default()), &want.images);
    if held.addresses != want.addresses {
        // A strategic merge by type would merge two addresses of one type.
        let addresses = want.addresses.into_iter().flatten().map(|address| json!(address));
        patch.insert(
            "addresses".to_owned(),
            [json!({"$patch": "replace"})].into_iter().chain(addresses).collect(),
        );
    }
    let conditions: Vec<NodeCondition> = want.conditions.into_iter().flatten().collect();
    let is_held = |wanted: &NodeCondition| {
        held.conditions.iter().flatten().any(|c| c.type_ == wanted.type_ && are_equal_except_times(c, wanted))
    };
    if !stale.is_empty() || !conditions.iter().all(is_held) {
        let stale = stale.iter().map(|type_| json!({"$patch": "delete", "type": type_}));
        let conditions = conditions.iter().map(|condition| json!(condition)).chain(stale);
        patch.insert("conditions".to_owned(), conditions.collect());
    }
    (!patch.is_empty()).then(|| json!({"status": patch}))
}

fn put<T: PartialEq + serde::Serialize>(
    patch: &mut serde_json::Map<String, Value>,
    name: &str,
    held: &Option<T>,
    want: &Option<T>,
) {
    if held != want && want.is_some() {
        patch.insert(name.to_owned(), json!(want));
    }
}

fn status(
    config: &NodeConfig,
    properties: &MachineProperties,
    current_state: &CurrentState,
    held: &NodeStatus,
) -> NodeStatus {
    // An administrator or a program may have added resources. As in the kubelet, the whole capacity of an extended
    // resource is allocatable.
    let extended = held.capacity.iter().flatten().filter(|(name, _)| is_extended_resource(name));
    let others = held.allocatable.iter().flatten().filter(|(name, _)| !is_extended_resource(name));
    let mut capacity = with_others(&properties.capacity, held.capacity.iter().flatten());
    let mut allocatable = with_others(&properties.allocatable, others.chain(extended));
    devices::add(&current_state.devices, &mut capacity, &mut allocatable);
    NodeStatus {
        addresses: Some(addresses(config, current_state, held)),
        capacity: Some(capacity),
        allocatable: Some(allocatable),
        conditions: Some(conditions(current_state, held)),
        daemon_endpoints: Some(NodeDaemonEndpoints {
            kubelet_endpoint: Some(DaemonEndpoint { port: i32::from(config.kubelet_port) }),
        }),
        declared_features: Some(declared_features()),
        images: current_state.images.clone(),
        node_info: Some(properties.info.clone()),
        ..NodeStatus::default()
    }
}

/// The addresses of the node. A cloud controller manager replaces the addresses of the first status. The node then
/// keeps the addresses that are in the status.
fn addresses(config: &NodeConfig, current_state: &CurrentState, held: &NodeStatus) -> Vec<NodeAddress> {
    if let Some(kept) = cloud::kept_addresses(config, held) {
        return kept;
    }
    let address = |type_: &str, address: String| NodeAddress { type_: type_.to_owned(), address };
    let ips = current_state.ips.iter().filter(|_| !cloud::sets_addresses(config));
    let internal = ips.map(|ip| address("InternalIP", ip.to_string()));
    internal.chain([address("Hostname", config.name.clone())]).collect()
}

/// The resources of `own`, and the resources of `others` that `own` does not have.
fn with_others<'a>(
    own: &'a BTreeMap<String, Quantity>,
    others: impl Iterator<Item = (&'a String, &'a Quantity)>,
) -> BTreeMap<String, Quantity> {
    others.chain(own).map(|(name, amount)| (name.clone(), amount.clone())).collect_map()
}

/// Status, reason and message of a condition.
struct Verdict {
    is: bool,
    reason: &'static str,
    message: String,
}

fn conditions(current_state: &CurrentState, held: &NodeStatus) -> Vec<NodeCondition> {
    let pressure = current_state.pressure;
    let verdict = |is: bool, yes: (&'static str, &str), no: (&'static str, &str)| {
        let (reason, message) = if is { yes } else { no };
        Verdict { is, reason, message: message.to_owned() }
    };
    let all = [
        (
            "MemoryPressure",
            verdict(
                pressure.memory,
                ("KubeletHasInsufficientMemory", "kubelet has insufficient memory available"),
                ("KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
            ),
        ),
        (
            "DiskPressure",
            verdict(
                pressure.disk,
                ("KubeletHasDiskPressure", "kubelet has disk pressure"),
                ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
            ),
        ),
        (
            "PIDPressure",
            verdict(
                pressure.pids,
                ("KubeletHasInsufficientPID", "kubelet has insufficient PID available"),
                ("KubeletHasSufficientPID", "kubelet has sufficient PID available"),
            ),
        ),
        ("Ready", ready(current_state)),
    ];
    all.into_iter()
        .chain(overlay_conditions(&current_state.overlay))
        .map(|(type_, verdict)| condition(type_, verdict, held, current_state.now))
        .collect()
}

/// The condition `Ready`.
fn ready(current_state: &CurrentState) -> Verdict {
    let not_ready = |message: String| Verdict { is: false, reason: "KubeletNotReady", message };
    if current_state.is_shutting_down {
        return not_ready("node is shutting down".to_owned());
    }
    match &current_state.network {
        Ok(()) => Verdict {
            is: true,
            reason: "KubeletReady",
            message: "kubelet is posting ready status".to_owned(),
        },
        Err(reason) => not_ready(format!(
            "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:{reason}"
        )),
    }
}

/// The conditions `NetworkUnavailable` and `PodNetworkImpaired`.
fn overlay_conditions(state: &State) -> Vec<(&'static str, Verdict)> {
    let Some(reached) = &state.reached else { return Vec::new() };
    let unavailable = match reached {
        Ok(()) => {
            Verdict { is: false, reason: IS_UP, message: "pods of other nodes can be reached".to_owned() }
        }
        Err(reason) => Verdict { is: true, reason: FAILED, message: reason.clone() },
    };
    let impaired = match &state.impaired[..] {
        [] => Verdict {
            is: false,
            reason: "NothingFound",
            message: "the paths to other nodes have no known fault".to_owned(),
        },
        found => Verdict { is: true, reason: "PeersNotReached", message: fault_message(found) },
    };
    vec![(UNAVAILABLE, unavailable), (IMPAIRED, impaired)]
}

/// The message about faults. The paths to all other nodes can have faults at the same time.
fn fault_message(faults: &[String]) -> String {
    let shown = faults.iter().take(FAULTS_MAX).cloned().collect::<Vec<_>>().join("; ");
    match faults.len().saturating_sub(FAULTS_MAX) {
        0 => shown,
        more => format!("{shown}; and {more} more faults"),
    }
}

/// Conditions of the overlay that are left after the overlay was disabled. `NetworkUnavailable` may belong to another
/// network provider: the condition belongs to this agent only if it has a reason of this agent.
fn stale(config: &NodeConfig, held: Option<&NodeStatus>) -> Vec<&'static str> {
    if config.overlay.is_some() {
        return Vec::new();
    }
    let conditions = || held.and_then(|held| held.conditions.as_ref()).into_iter().flatten();
    let is_ours = |one: &NodeCondition| match one.type_.as_str() {
        UNAVAILABLE => one.reason.as_ref().is_some_and(|reason| [IS_UP, FAILED].contains(&reason.as_str())),
        other => other == IMPAIRED,
    };
    let all = [UNAVAILABLE, IMPAIRED].into_iter();
    all.filter(|type_| conditions().any(|one| one.type_ == *type_ && is_ours(one))).collect()
}

fn condition(type_: &str, verdict: Verdict, held: &NodeStatus, now: Timestamp) -> NodeCondition {
    let status = if verdict.is { "True" } else { "False" };
    let before = held.conditions.iter().flatten().find(|held| held.type_ == type_ && held.status == status);
    NodeCondition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: Some(verdict.reason.to_owned()),
        message: Some(verdict.message),
        last_heartbeat_time: Some(Time(now)),
        last_transition_time: before.and_then(|held| held.last_transition_time.clone()).or(Some(Time(now))),
    }
}

/// Whether two conditions differ in times only.
fn are_equal_except_times(a: &NodeCondition, b: &NodeCondition) -> bool {
    (&a.status, &a.reason, &a.message) == (&b.status, &b.reason, &b.message)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::devices::DeviceCount;
    use super::*;

    fn config() -> NodeConfig {
        let labels = BTreeMap::from([("zone".to_owned(), "a".to_owned())]);
        NodeConfig { labels, ..NodeConfig::for_test(Path::new("/var/lib/coracle")) }
    }

    fn properties() -> MachineProperties {
        let capacity = BTreeMap::from([("cpu".to_owned(), Quantity("2".to_owned()))]);
        MachineProperties {
            name: "n1".to_owned(),
            ips: vec!["192.0.2.1".parse().expect("address")],
            allocatable: capacity.clone(),
            capacity,
            memory_of_pods: 0,
            local_volume_kib: Some(1000),
            info: k8s_openapi::api::core::v1::NodeSystemInfo::default(),
        }
    }

    fn current_state(network: Result<(), String>, second: i64) -> CurrentState {
        CurrentState {
            ips: vec!["192.0.2.1".parse().expect("address")],
            network,
            overlay: State::default(),
            pressure: Pressure::default(),
            images: None,
            devices: DeviceCounts::new(),
            is_shutting_down: false,
            now: Timestamp::from_second(second).expect("time"),
        }
    }

    fn ready(node: &Node) -> NodeCondition {
        let conditions = node.status.as_ref().and_then(|s| s.conditions.as_ref()).expect("conditions");
        conditions.iter().find(|c| c.type_ == "Ready").expect("Ready").clone()
    }

    #[test]
    fn a_new_node_has_the_configured_id_of_its_cloud_provider() {
        let of = |config: &NodeConfig| node(config, &properties(), &current_state(Ok(()), 1)).spec;
        assert_eq!(of(&config()), None);
        let id = Some("vendor://zone/machine".to_owned());
        let spec = of(&NodeConfig { provider_id: id.clone(), ..config() }).expect("spec");
        assert_eq!((spec.provider_id, spec.taints), (id, None));
    }

    #[test]
    fn a_cloud_controller_manager_sets_the_addresses_and_removes_the_taint() {
        let external = NodeConfig { has_external_cloud: true, ..config() };
        let state = current_state(Ok(()), 1);
        let new = node(&external, &properties(), &state);
        let spec = new.spec.clone().expect("spec");
        let taint = &spec.taints.expect("taints")[0];
        assert_eq!(taint.key, "node.cloudprovider.kubernetes.io/uninitialized");
        assert_eq!((taint.value.as_deref(), taint.effect.as_str()), (Some("true"), "NoSchedule"));
        let configured = NodeConfig { taints: vec![taint.clone()], ..external.clone() };
        let taints = node(&configured, &properties(), &state).spec.and_then(|spec| spec.taints);
        assert_eq!(taints.as_deref(), Some(std::slice::from_ref(taint)), "only one");
        let addresses = |node: &Node| node.status.clone().expect("status").addresses.expect("addresses");
        assert_eq!(addresses(&new).len(), 1, "only the host name: {:?}", addresses(&new));
        let given = NodeConfig { ips: vec!["192.0.2.1".parse().expect("address")], ..external.clone() };
        assert_eq!(addresses(&node(&given, &properties(), &state)).len(), 2);
        let mut completed = new;
        let outside = NodeAddress { type_: "ExternalIP".to_owned(), address: "198.51.100.1".to_owned() };
        completed.status.as_mut().expect("status").addresses = Some(vec![outside]);
        assert_eq!(status_patch(&external, &properties(), &state, &completed), None);
        let replaced = status_patch(&config(), &properties(), &state, &completed).expect("a patch");
        assert!(replaced["status"]["addresses"].is_array(), "{replaced}");
    }

    #[test]
    fn the_annotation_with_the_given_addresses_is_for_a_cloud_controller_manager_only() {
        let ips = ["192.0.2.1", "2001:db8::1"].map(|ip| ip.parse().expect("address")).to_vec();
        let given = NodeConfig { ips, has_external_cloud: true, ..config() };
        let made = node(&given, &properties(), &current_state(Ok(()), 1));
        assert_eq!(
            made.metadata.annotations.clone().expect("some")[cloud::NODE_IPS],
            "192.0.2.1,2001:db8::1"
        );
        assert_eq!(metadata_patch(&given, &properties(), None, &made), None);
        let without = NodeConfig { has_external_cloud: false, ..given };
        let patch = metadata_patch(&without, &properties(), None, &made).expect("a patch");
        assert_eq!(patch, json!({"metadata": {"annotations": {(cloud::NODE_IPS): null}}}));
    }

    #[test]
    fn a_status_that_differs_in_times_only_is_not_written() {
        let node = node(&config(), &properties(), &current_state(Ok(()), 1));
        assert_eq!(status_patch(&config(), &properties(), &current_state(Ok(()), 99), &node), None);
    }

    #[test]
    fn the_condition_of_the_overlay_names_few_faults() {
        let faults: Vec<String> = (0..5000).map(|number| format!("n{number}: no packets reach it")).collect();
        assert_eq!(fault_message(&faults[..2]), "n0: no packets reach it; n1: no packets reach it");
        let state = State { reached: Some(Ok(())), impaired: faults, announced: None };
        let messages: Vec<String> =
            overlay_conditions(&state).into_iter().map(|(_, verdict)| verdict.message).collect();
        assert!(messages[1].ends_with("n19: no packets reach it; and 4980 more faults"), "{}", messages[1]);
    }

    #[test]
    fn a_node_that_shuts_down_is_not_ready() {
        let state = CurrentState { is_shutting_down: true, ..current_state(Ok(()), 1) };
        let ready = ready(&node(&config(), &properties(), &state));
        assert_eq!((ready.status.as_str(), ready.reason.as_deref()), ("False", Some("KubeletNotReady")));
        assert_eq!(ready.message.as_deref(), Some("node is shutting down"));
    }

    #[test]
    fn extended_resources_of_the_capacity_are_allocatable_until_they_are_removed() {
        let mut node = node(&config(), &properties(), &current_state(Ok(()), 1));
        let patched = |node: &Node| status_patch(&config(), &properties(), &current_state(Ok(()), 1), node);
        let (dongles, other) = ("example.com/dongle".to_owned(), "attachable-volumes-x".to_owned());
        let status = node.status.as_mut().expect("status");
        status.capacity.get_or_insert_default().insert(dongles.clone(), Quantity("4".to_owned()));
        let allocatable = json!({"cpu": "2", "example.com/dongle": "4"});
        assert_eq!(patched(&node), Some(json!({"status": {"allocatable": allocatable}})));
        let status = node.status.as_mut().expect("status");
        status.allocatable.get_or_insert_default().insert(dongles.clone(), Quantity("4".to_owned()));
        assert_eq!(patched(&node), None);
        let status = node.status.as_mut().expect("status");
        status.capacity.get_or_insert_default().remove(&dongles);
        status.allocatable.get_or_insert_default().insert(other, Quantity("1".to_owned()));
        let allocatable = json!({"cpu": "2", "attachable-volumes-x": "1", "example.com/dongle": null});
        assert_eq!(patched(&node), Some(json!({"status": {"allocatable": allocatable}})));
        let status = node.status.as_mut().expect("status");
        status.allocatable.get_or_insert_default().remove(&dongles);
        status.capacity.get_or_insert_default().insert("hugepages-3Mi".to_owned(), Quantity("0".to_owned()));
        assert_eq!(patched(&node), None, "resources of others are not written again and again");
    }

    #[test]
    fn devices_of_plugins_replace_the_numbers_in_the_status() {
        let mut node = node(&config(), &properties(), &current_state(Ok(()), 1));
        let name = "example.com/dongle".to_owned();
        let status = node.status.as_mut().expect("status");
        status.capacity.get_or_insert_default().insert(name.clone(), Quantity("4".to_owned()));
        status.allocatable.get_or_insert_default().insert(name.clone(), Quantity("4".to_owned()));
        let mut state = current_state(Ok(()), 1);
        state.devices.insert(name.clone(), DeviceCount { capacity: 3, allocatable: 2 });
        let capacity = json!({"cpu": "2", "example.com/dongle": "3"});
        let allocatable = json!({"cpu": "2", "example.com/dongle": "2"});
        let expected = json!({"status": {"capacity": capacity, "allocatable": allocatable}});
        assert_eq!(status_patch(&config(), &properties(), &state, &node), Some(expected));
        // The plugin did not come back: as upstream, the resource stays with zero devices.
        state.devices.insert(name.clone(), DeviceCount::default());
        let patch = status_patch(&config(), &properties(), &state, &node).expect("a patch");
        assert_eq!(patch["status"]["capacity"][&name], "0");
        assert_eq!(patch["status"]["allocatable"][&name], "0");
    }

    #[test]
    fn features_are_declared_once_even_if_the_server_drops_them() {
        let mut node = node(&config(), &properties(), &current_state(Ok(()), 1));
        node.status.as_mut().expect("status").declared_features = None;
        let patch = status_patch(&config(), &properties(), &current_state(Ok(()), 1), &node);
        assert_eq!(patch, Some(json!({"status": {"declaredFeatures": DECLARED_FEATURES}})));
        keep_declared_features(&mut node);
        assert_eq!(status_patch(&config(), &properties(), &current_state(Ok(()), 1), &node), None);
    }

    #[test]
    fn a_missing_network_is_a_condition_and_its_setup_a_transition() {
        let node = node(&config(), &properties(), &current_state(Err("no range".to_owned()), 1));
        let condition = ready(&node);
        assert_eq!(
            (condition.status.as_str(), condition.reason.as_deref()),
            ("False", Some("KubeletNotReady"))
        );
        assert!(condition.message.is_some_and(|message| message.contains("no range")));
        let patch =
            status_patch(&config(), &properties(), &current_state(Ok(()), 5), &node).expect("a patch");
        assert_eq!(patch["status"].as_object().expect("status").keys().collect::<Vec<_>>(), ["conditions"]);
        let conditions = patch["status"]["conditions"].as_array().expect("conditions");
        assert_eq!(conditions[3]["lastTransitionTime"], "1970-01-01T00:00:05Z");
        assert_eq!(conditions[0]["lastTransitionTime"], "1970-01-01T00:00:01Z", "memory did not change");
    }

    #[test]
    fn an_unknown_node_reports_ready_again() {
        let mut node = node(&config(), &properties(), &current_state(Ok(()), 1));
        let conditions = node.status.as_mut().and_then(|s| s.conditions.as_mut()).expect("conditions");
        conditions.iter_mut().for_each(|c| c.status = "Unknown".to_owned());
        assert!(status_patch(&config(), &properties(), &current_state(Ok(()), 5), &node).is_some());
    }

    #[test]
    fn changed_addresses_replace_the_old_ones() {
        let node = node(&config(), &properties(), &current_state(Ok(()), 1));
        let mut moved = current_state(Ok(()), 1);
        moved.ips.push("2001:db8::1".parse().expect("address"));
        let patch = status_patch(&config(), &properties(), &moved, &node).expect("a patch");
        let addresses = &patch["status"]["addresses"];
        assert_eq!(addresses[0], json!({"$patch": "replace"}));
        assert_eq!(addresses.as_array().map(Vec::len), Some(4));
    }

    #[test]
    fn images_are_reported_after_the_first_list_even_if_there_are_none() {
        let mut node = node(&config(), &properties(), &current_state(Ok(()), 1));
        let with = |images| CurrentState { images, ..current_state(Ok(()), 1) };
        let patched = |images, node: &Node| status_patch(&config(), &properties(), &with(images), node);
        assert_eq!(patched(Some(Vec::new()), &node), None, "no list is an empty one");
        let image = ContainerImage { names: Some(vec!["a:1".to_owned()]), size_bytes: Some(7) };
        let patch = patched(Some(vec![image.clone()]), &node).expect("a patch");
        assert_eq!(patch, json!({"status": {"images": [{"names": ["a:1"], "sizeBytes": 7}]}}));
        node.status.as_mut().expect("status").images = Some(vec![image.clone()]);
        assert_eq!((patched(Some(vec![image]), &node), patched(None, &node)), (None, None));
        assert_eq!(patched(Some(Vec::new()), &node), Some(json!({"status": {"images": []}})));
    }

    #[test]
    fn a_disabled_overlay_leaves_no_addresses_or_annotations() {
        let mut led = current_state(Ok(()), 1);
        led.overlay.reached = Some(Err("no".to_owned()));
        let mut node = node(&config(), &properties(), &led);
        let annotations = ["backend-type", "public-ip", "public-ip-overwrite"]
            .map(|key| (format!("flannel.alpha.coreos.com/{key}"), "x".to_owned()));
        node.metadata.annotations.get_or_insert_default().extend(annotations);
        let gone = json!({"flannel.alpha.coreos.com/backend-type": null, "flannel.alpha.coreos.com/public-ip": null});
        assert_eq!(
            metadata_patch(&config(), &properties(), None, &node),
            Some(json!({"metadata": {"annotations": gone}})),
            "foreign fields stay"
        );
        let patch =
            status_patch(&config(), &properties(), &current_state(Ok(()), 5), &node).expect("a patch");
        let conditions = patch["status"]["conditions"].as_array().expect("conditions");
        assert_eq!(
            conditions[4..],
            [
                json!({"$patch": "delete", "type": "NetworkUnavailable"}),
                json!({"$patch": "delete", "type": "PodNetworkImpaired"})
            ]
        );
        // Another network provider has replaced the overlay.
        let held = node.status.as_mut().and_then(|status| status.conditions.as_mut()).expect("conditions");
        held.retain(|one| one.type_ != IMPAIRED);
        held.iter_mut().filter(|one| one.type_ == UNAVAILABLE).for_each(|one| {
            one.reason = Some("FlannelIsUp".to_owned());
        });
        assert_eq!(metadata_patch(&config(), &properties(), None, &node), None);
        assert_eq!(status_patch(&config(), &properties(), &current_state(Ok(()), 5), &node), None);
    }

    #[test]
    fn a_node_has_the_size_of_the_disk_with_its_local_volumes() {
        let mut node = node(&config(), &properties(), &current_state(Ok(()), 1));
        let name = "coracle.dev/local-volumes-disk";
        let annotations = node.metadata.annotations.as_mut().expect("annotations");
        assert_eq!(annotations.insert(name.to_owned(), "5Ki".to_owned()).as_deref(), Some("1000Ki"));
        let patch = metadata_patch(&config(), &properties(), None, &node);
        assert_eq!(patch, Some(json!({"metadata": {"annotations": {name: "1000Ki"}}})), "a larger disk");
        let unknown = MachineProperties { local_volume_kib: None, ..properties() };
        let patch = metadata_patch(&config(), &unknown, None, &node);
        assert_eq!(patch, Some(json!({"metadata": {"annotations": {name: null}}})), "a disk of unknown size");
    }

    #[test]
    fn an_adopted_node_gets_only_the_labels_it_lacks() {
        let mut node = node(&config(), &properties(), &current_state(Ok(()), 1));
        assert_eq!(metadata_patch(&config(), &properties(), None, &node), None);
        node.metadata.labels.as_mut().expect("labels").remove("kubernetes.io/os");
        assert_eq!(
            metadata_patch(&config(), &properties(), None, &node),
            Some(json!({"metadata": {"labels": {"kubernetes.io/os": "linux"}}}))
        );
    }
}

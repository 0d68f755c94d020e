//! Scheduling of the pods of a given cluster, without an API server. The differential test compares the decisions with
//! the decisions of the real kube-scheduler's plugins.

use std::collections::BTreeMap;

use coracle_values::object::{Key, ObjectExt};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::de::Error as _;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::{Profile, SchedulerConfig};
use crate::decide::{Unschedulable, filter, refused_beside_nominated};
use crate::object::{Namespace, Node, Pod, PodDisruptionBudget, decode};
use crate::preempt::{candidates, disruption_cost, preempt, with_outcome};
use crate::reserve::reserve;
use crate::score;
use crate::snapshot::Snapshot;

/// The objects of a cluster, and pods without a node.
#[derive(Deserialize)]
struct Case {
    nodes: Vec<Node>,
    pods: Vec<Pod>,
    pending: Vec<Pod>,
    /// Objects of other kinds.
    #[serde(default)]
    others: Vec<Value>,
    /// A `KubeSchedulerConfiguration` with one profile. Without it, the pods have the default profile.
    #[serde(default)]
    config: Option<Value>,
}

/// Message of a pod that does not enter the queue, because it has scheduling gates, or its claims do not exist.
const GATED: &str = "gated";

/// Start time of the first pending pod, in seconds since 1970. The pods of the cluster start earlier.
const FIRST_START: i64 = 1_800_000_000;

/// The outcome for one pod.
#[derive(Default, Serialize)]
struct Decision {
    pod: String,
    /// Scores of the nodes that can run the pod, by plugin, with the weights applied.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    scores: BTreeMap<String, BTreeMap<&'static str, i64>>,
    /// Message of the event FailedScheduling.
    #[serde(skip_serializing_if = "String::is_empty")]
    message: String,
    /// The nodes on which preemption helps, with the names of the victims.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    victims: BTreeMap<String, Vec<String>>,
    /// The best nodes for preemption.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    nominated: Vec<String>,
}

/// Schedules the pods of a JSON case in order, with the profile of the case or the default profile. Each pod is placed
/// on the best node (the first by name) before the next pod is scheduled.
///
/// # Errors
/// The case does not have the format of the differential test.
pub fn decide_case(case: &str) -> Result<String, serde_json::Error> {
    let case: Case = serde_json::from_str(case)?;
    let profile = Profile { percentage: 100, ..profile_of(case.config.as_ref())? };
    let mut snapshot = Snapshot::default();
    for node in &case.nodes {
        snapshot.set_node(node);
    }
    for pod in &case.pods {
        snapshot.place(pod, pod.node().unwrap_or_default());
    }
    for object in case.others {
        add(&mut snapshot, object)?;
    }
    for pod in &case.pending {
        let node = pod.status.nominated_node_name.as_deref();
        if let Some(node) = node.filter(|_| !is_gated(pod, &snapshot)) {
            snapshot.nominate(pod, node);
        }
    }
    let pending = case.pending.into_iter().enumerate();
    let decisions: Vec<Decision> =
        pending.map(|(index, pod)| decide(&mut snapshot, &profile, &started(pod, index))).collect();
    serde_json::to_string(&decisions)
}

fn profile_of(config: Option<&Value>) -> Result<Profile, serde_json::Error> {
    let Some(config) = config else { return Ok(Profile::default()) };
    let config = SchedulerConfig::parse(&config.to_string()).map_err(serde_json::Error::custom)?;
    config.profiles.into_iter().next().ok_or_else(|| serde_json::Error::custom("there is no profile"))
}

fn add(snapshot: &mut Snapshot, object: Value) -> Result<(), serde_json::Error> {
    let kind = object["kind"].as_str().unwrap_or_default().to_owned();
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let key = Key::new(text("/metadata/namespace"), text("/metadata/name"));
    match kind.as_str() {
        "Namespace" => {
            let namespace: Namespace = decode(&object)?;
            let labels = namespace.metadata.labels.clone().unwrap_or_default();
            snapshot.namespaces.insert(namespace.name().to_owned(), labels);
        }
        "PodDisruptionBudget" => {
            snapshot.budgets.set(&decode::<PodDisruptionBudget>(&object)?);
        }
        "Service" => {
            if let Some(selector) = object.pointer("/spec/selector").filter(|selector| !selector.is_null()) {
                snapshot.selectors.set_service(key, decode(selector)?);
            }
        }
        "ReplicaSet" | "StatefulSet" => {
            let kind = if kind == "ReplicaSet" { "ReplicaSet" } else { "StatefulSet" };
            snapshot.selectors.set_workload(kind, key, &decode(&object["spec"]["selector"])?);
        }
        "ReplicationController" => {
            let selector = serde_json::json!({"matchLabels": object["spec"]["selector"]});
            snapshot.selectors.set_workload("ReplicationController", key, &decode(&selector)?);
        }
        _ => {
            snapshot.volumes.add(&kind, &object)?;
            snapshot.devices.add(&kind, &object)?;
        }
    }
    Ok(())
}

/// Sets the start time of a placed pod. Without start times upstream's order of victims is undefined.
fn started(mut pod: Pod, index: usize) -> Pod {
    let second = FIRST_START + i64::try_from(index).unwrap_or_default();
    pod.status.start_time = jiff::Timestamp::from_second(second).ok().map(Time);
    pod
}

fn is_gated(pod: &Pod, snapshot: &Snapshot) -> bool {
    !(pod.needs_node() && snapshot.devices.has_claims_of(pod))
}

fn decide(snapshot: &mut Snapshot, profile: &Profile, pod: &Pod) -> Decision {
    let mut decision = Decision { pod: pod.name().to_owned(), ..Decision::default() };
    if is_gated(pod, snapshot) {
        GATED.clone_into(&mut decision.message);
        return decision;
    }
    let refused_by_nominated = refused_beside_nominated(pod, profile, snapshot);
    let refused = match filter(pod, profile, snapshot, refused_by_nominated) {
        Err(refused) => Some(refused),
        Ok(found) if found.fitting.is_empty() => Some(found.unschedulable()),
        Ok(found) => {
            for (plugin, scores) in score::scores(pod, profile, found.score_inputs(snapshot)) {
                for (node, score) in found.fitting.iter().zip(scores) {
                    decision.scores.entry(node.properties.name.clone()).or_default().insert(plugin, score);
                }
            }
            None
        }
    };
    let Some(refused) = refused else {
        let total = |scores: &BTreeMap<&str, i64>| scores.values().sum::<i64>();
        // `max_by_key` returns the last of equal nodes. In the reversed order, this is the first node by name.
        let best = decision.scores.iter().rev().max_by_key(|(_, scores)| total(scores));
        if let Some(node) = best.map(|(node, _)| node.clone()) {
            snapshot.remove_nomination(pod.uid());
            match reserve(pod, profile, snapshot, &node) {
                Ok(_) => drop(snapshot.place(pod, &node)),
                Err(why) => decision.message = why,
            }
        }
        return decision;
    };
    make_room(snapshot, pod, profile, &mut decision, refused);
    decision
}

fn make_room(
    snapshot: &mut Snapshot,
    pod: &Pod,
    profile: &Profile,
    decision: &mut Decision,
    refused: Unschedulable,
) {
    decision.message.clone_from(&refused.message);
    if decision.message == "no nodes available to schedule pods" {
        return;
    }
    if let Err(why) = preempt(pod, profile, snapshot, &refused.resolvable) {
        decision.message = with_outcome(&refused, snapshot.devices.outcome(pod), &why);
        return;
    }
    let (found, _) = candidates(pod, profile, snapshot, &refused.resolvable);
    let least = found.iter().map(|one| disruption_cost(&one.victims)).min();
    let best = found.iter().filter(|one| Some(disruption_cost(&one.victims)) == least);
    decision.nominated = best.map(|one| one.node.clone()).collect();
    for one in found {
        let mut names: Vec<String> = one.victims.into_iter().map(|victim| victim.name).collect();
        names.sort();
        decision.victims.insert(one.node, names);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use serde_json::json;

    use super::*;
    use crate::fixture;

    #[test]
    fn a_case_can_have_a_configuration_and_gated_pods() {
        let node = json!({"metadata": {"name": "a", "labels": {"disk": "ssd"}},
            "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "10"}}});
        let pod = |name: &str, spec: Value| json!({"metadata": {"name": name, "namespace": "d", "uid": name}, "spec": spec});
        let claims = json!([{"name": "c", "resourceClaimName": "absent"}]);
        let pending = [
            pod("with-gate", json!({"schedulingGates": [{"name": "g"}]})),
            pod("without-claim", json!({"resourceClaims": claims})),
            pod("refused", json!({})),
        ];
        let terms = json!([{"matchExpressions": [{"key": "disk", "operator": "In", "values": ["hdd"]}]}]);
        let affinity =
            json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
        let plugin = json!({"name": "NodeAffinity", "args": {"addedAffinity": affinity}});
        let config = json!({"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
            "profiles": [{"pluginConfig": [plugin]}]});
        let case = json!({"nodes": [node], "pods": [], "pending": pending, "config": config});
        let decisions = decide_case(&case.to_string()).unwrap();
        let decisions: Vec<Value> = serde_json::from_str(&decisions).unwrap();
        let messages: Vec<&str> = decisions.iter().map(|one| one["message"].as_str().unwrap()).collect();
        assert_eq!(messages[..2], ["gated", "gated"]);
        assert!(messages[2].contains("scheduler-enforced node affinity"), "{}", messages[2]);
    }

    /// Source: `moveToActiveQ` of upstream, which adds the nomination of a pod that enters the queue.
    #[test]
    fn a_gated_pod_is_not_nominated() {
        let node = json!({"metadata": {"name": "a"}, "status": {"allocatable": {"cpu": "1", "pods": "10"}}});
        let containers = json!([{"resources": {"requests": {"cpu": "1"}}}]);
        let message = |gates: Value| {
            let first = json!({"metadata": {"name": "first", "namespace": "d", "uid": "first"},
                "spec": {"containers": containers, "schedulingGates": gates, "nodeSelector": {"absent": "x"}},
                "status": {"nominatedNodeName": "a"}});
            let other = json!({"metadata": {"name": "other", "namespace": "d", "uid": "other"},
                "spec": {"containers": containers}});
            let case = json!({"nodes": [node], "pods": [], "pending": [first, other]});
            let decisions: Value = serde_json::from_str(&decide_case(&case.to_string()).unwrap()).unwrap();
            decisions[1]["message"].as_str().unwrap_or_default().to_owned()
        };
        assert_eq!(message(json!([{"name": "g"}])), "");
        assert!(message(json!([])).contains("1 Insufficient cpu"), "the nominated pod has the node");
    }

    /// Prints the rate of decisions; run it with `--ignored --nocapture`. Requests to the API server are not included.
    #[test]
    #[ignore = "measurement"]
    fn a_thousand_pods_on_a_thousand_nodes() {
        let nodes: Vec<Node> = (0..1000).map(|n| fixture::node(&format!("n{n:04}"), json!({}))).collect();
        let mut snapshot = fixture::snapshot(&nodes);
        let spec = json!({"containers": [{"resources": {"requests": {"cpu": "500m", "memory": "256Mi"}}}]});
        let pods: Vec<Pod> = (0..1000).map(|p| fixture::pod(&format!("p{p}"), spec.clone())).collect();
        let (profile, start) = (Profile::default(), Instant::now());
        for pod in &pods {
            let node = crate::decide::decide(pod, &profile, &mut snapshot).unwrap();
            snapshot.place(pod, &node);
        }
        let elapsed = start.elapsed();
        let rate = 1000.0 / elapsed.as_secs_f64();
        println!("1000 pods on 1000 nodes: {elapsed:?}, {rate:.0} pods a second");
        assert_eq!(snapshot.placed().len(), 1000);
    }
}

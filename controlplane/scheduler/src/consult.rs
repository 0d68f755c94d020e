//! The calls to extenders for one pod: they filter and score nodes, choose victims, or bind the pod. Each call returns
//! an error if an extender fails and is not ignorable.

use std::collections::{BTreeMap, HashMap, HashSet};

use coracle_events::printable;
use coracle_values::CollectMap;
use coracle_values::object::ObjectExt;
use futures::future::join_all;
use kube::Client;
use kube::api::{GetParams, ListParams};
use kube::core::Request;
use serde_json::Value;
use tokio::sync::Semaphore;

use crate::extender::client::{Remote, RequestError};
use crate::extender::result::ExtenderResult;
use crate::extender::wire::{
    Args, BindingArgs, BindingResult, FilterResult, HostPriority, MetaPod, MetaVictims, NodeList,
    PreemptionArgs, PreemptionResult, Victims,
};
use crate::hint::Changes;
use crate::metrics::{Operation, SchedulerMetrics};
use crate::node_score::MAX_NODE_SCORE;
use crate::object::Pod;
use crate::preempt::{Preemption, Victim};
use crate::refusal::Refused;

/// The best score of an extender.
const MAX_EXTENDER_PRIORITY: i64 = 10;
/// Maximum size of a text of an extender in our messages, in bytes.
const REASON_MAX: usize = 256;

/// The objects that extenders get, as read from the API server.
struct Objects {
    pod: Value,
    nodes: HashMap<String, Value>,
}

/// Calls the extenders, which filter and score these nodes for the pod.
pub(crate) async fn nodes(
    client: &Client,
    extenders: &[Remote],
    pod: &Pod,
    nodes: Vec<String>,
    metrics: &SchedulerMetrics,
) -> Result<ExtenderResult, String> {
    let called = || extenders.iter().filter(|one| one.extender.chooses() && one.extender.is_interested(pod));
    if called().next().is_none() {
        return Ok(ExtenderResult {
            scores: nodes.into_iter().map(|node| (node, 0)).collect(),
            ..ExtenderResult::default()
        });
    }
    let with_nodes = called().any(|one| !one.extender.knows_nodes);
    let objects = objects(client, pod, with_nodes.then_some(&nodes)).await?;
    let (mut remaining, mut advice) = (nodes, ExtenderResult::default());
    for one in called() {
        let Some(verb) = one.extender.filter.as_deref().filter(|_| !remaining.is_empty()) else { continue };
        match filter(one, verb, &objects, &remaining).await {
            Ok((accepted, refused)) => {
                remaining.retain(|node| accepted.contains(node));
                advice.refused.extend(refused);
            }
            Err(error) if one.extender.ignorable => {
                tracing::warn!(%error, "an extender failed and is ignored")
            }
            Err(error) => return Err(error.to_string()),
        }
    }
    advice.scores = remaining.iter().map(|node| (node.clone(), 0)).collect();
    if remaining.len() > 1 {
        for scores in join_all(called().map(|one| prioritize(one, &objects, &remaining, metrics))).await {
            for (node, score) in scores {
                if let Some(sum) = advice.scores.get_mut(&node) {
                    *sum = sum.saturating_add(score);
                }
            }
        }
    }
    Ok(advice)
}

/// The accepted nodes, and the reasons against the other nodes.
async fn filter(
    remote: &Remote,
    verb: &str,
    objects: &Objects,
    nodes: &[String],
) -> Result<(HashSet<String>, Vec<(String, Refused)>), RequestError> {
    let result: FilterResult = remote.call(verb, &objects.args(remote, nodes)).await?;
    if let Some(error) = result.error.filter(|error| !error.is_empty()) {
        return Err(remote.error(verb, printable(&error, REASON_MAX)));
    }
    let by_name = result.node_names.filter(|_| remote.extender.knows_nodes);
    let of_objects = || {
        result.nodes.into_iter().flat_map(|list| list.items.unwrap_or_default()).map(|one| one.metadata.name)
    };
    let accepted: HashSet<String> = match by_name {
        Some(names) => names.into_iter().collect(),
        None => of_objects().collect(),
    };
    let sent: HashSet<&String> = nodes.iter().collect();
    if let Some(other) = accepted.iter().find(|node| !sent.contains(node)) {
        let reason = format!(
            "the response has the node {:?}, which is not in the request",
            printable(other, REASON_MAX)
        );
        return Err(remote.error(verb, reason));
    }
    let (failed, unresolvable) =
        (result.failed_nodes.unwrap_or_default(), result.failed_and_unresolvable_nodes.unwrap_or_default());
    let refused = nodes.iter().filter(|node| !accepted.contains(*node)).map(|node| {
        let reason = unresolvable.get(node).or_else(|| failed.get(node));
        let reasons = reason.map(|reason| printable(reason, REASON_MAX)).into_iter().collect();
        let resolvable = failed.contains_key(node) && !unresolvable.contains_key(node);
        // Upstream's name for all extenders.
        let plugin = "Extender";
        (node.clone(), Refused { plugin, reasons, resolvable, helped_by: Changes::ALL })
    });
    let refused = refused.collect();
    Ok((accepted, refused))
}

/// The weighted scores of an extender, on the scale of the scheduler's scores. As in upstream, a failed extender gives
/// no scores.
async fn prioritize(
    remote: &Remote,
    objects: &Objects,
    nodes: &[String],
    metrics: &SchedulerMetrics,
) -> Vec<(String, i64)> {
    let Some(verb) = &remote.extender.prioritize else { return Vec::new() };
    let _running = metrics.running(Operation::PrioritizingExtender);
    let scale = remote.extender.weight.saturating_mul(MAX_NODE_SCORE / MAX_EXTENDER_PRIORITY);
    match remote.call::<Option<Vec<HostPriority>>>(verb, &objects.args(remote, nodes)).await {
        Ok(scores) => {
            let scores = scores.into_iter().flatten();
            scores.map(|one| (one.host, one.score.saturating_mul(scale))).collect()
        }
        Err(error) => {
            tracing::warn!(%error, "an extender failed and is ignored");
            Vec::new()
        }
    }
}

/// Calls the extenders for preemption. `removable` has the pods of lower priority on each node.
pub(crate) async fn preemption(
    client: &Client,
    extenders: &[Remote],
    pod: &Pod,
    mut found: Vec<Preemption>,
    removable: &BTreeMap<String, Vec<Victim>>,
) -> Result<Vec<Preemption>, String> {
    let objects = objects(client, pod, None).await?;
    for one in extenders.iter().filter(|one| one.extender.is_interested(pod)) {
        let Some(verb) = one.extender.preempt.as_deref().filter(|_| !found.is_empty()) else { continue };
        let pods = if one.extender.knows_nodes { HashMap::new() } else { victims(client, &found).await? };
        let request = PreemptionRequest { pod: &objects.pod, pods: &pods, found: &found, removable };
        let result = call_preemption(one, verb, request).await;
        match result {
            Ok(chosen) => found = chosen,
            Err(error) if one.extender.ignorable => {
                tracing::warn!(%error, "an extender failed and is ignored")
            }
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(found)
}

/// Input of an extender's decision about a preemption.
#[derive(Clone, Copy)]
struct PreemptionRequest<'a> {
    pod: &'a Value,
    /// The victims by uid, for an extender that does not know the nodes.
    pods: &'a HashMap<String, Value>,
    /// The nodes that the scheduler found, with their victims.
    found: &'a [Preemption],
    /// The pods of lower priority on each node.
    removable: &'a BTreeMap<String, Vec<Victim>>,
}

async fn call_preemption(
    remote: &Remote,
    verb: &str,
    request: PreemptionRequest<'_>,
) -> Result<Vec<Preemption>, RequestError> {
    let PreemptionRequest { pod, pods, found, removable } = request;
    let violations = |one: &Preemption| one.victims.iter().filter(|victim| victim.violates).count();
    let whole = |one: &Preemption| Victims {
        pods: one.victims.iter().filter_map(|victim| pods.get(&victim.uid)).collect(),
        violations: violations(one),
    };
    let meta = |one: &Preemption| MetaVictims {
        pods: Some(one.victims.iter().map(|victim| MetaPod { uid: victim.uid.clone() }).collect()),
        violations: i64::try_from(violations(one)).unwrap_or(i64::MAX),
    };
    let knows = remote.extender.knows_nodes;
    let args = PreemptionArgs {
        pod,
        node_name_to_victims: (!knows)
            .then(|| found.iter().map(|one| (&*one.node, whole(one))).collect_map()),
        node_name_to_meta_victims: knows
            .then(|| found.iter().map(|one| (&*one.node, meta(one))).collect_map()),
    };
    let result: PreemptionResult = remote.call(verb, &args).await?;
    let mut chosen = Vec::new();
    for (node, victims) in result.node_name_to_meta_victims.unwrap_or_default() {
        let name = printable(&node, REASON_MAX);
        let Some(pods) = removable.get(&node) else {
            return Err(remote
                .error(verb, format!("the response has the node {name:?}, which is not in the request")));
        };
        let uids = victims.and_then(|victims| victims.pods).unwrap_or_default();
        let mut victims = Vec::new();
        for MetaPod { uid } in uids {
            let known = pods.iter().find(|victim| victim.uid == uid);
            victims.extend(Some(known.cloned().ok_or_else(|| {
                let uid = printable(&uid, REASON_MAX);
                remote.error(
                    verb,
                    format!("the node {name:?} has no pod of lower priority with the uid {uid:?}"),
                )
            })?));
        }
        if victims.is_empty() {
            return Err(remote.error(verb, format!("the response has no victim on the node {name:?}")));
        }
        chosen.push(Preemption { node, victims });
    }
    // The response is a map without an order. Sort the nodes by name, so that the choice among equal nodes is
    // deterministic.
    chosen.sort_by(|one, other| one.node.cmp(&other.node));
    Ok(chosen)
}

/// Binds the pod with the first interested extender that has a verb for bindings. `None` if the scheduler must bind the
/// pod.
pub(crate) async fn bind(
    extenders: &[Remote],
    pod: &Pod,
    node: &str,
    permits: &Semaphore,
) -> Option<Result<(), String>> {
    let mut binders = extenders.iter().filter(|one| one.extender.is_interested(pod));
    let (remote, verb) = binders.find_map(|one| Some((one, one.extender.bind.as_deref()?)))?;
    // The semaphore is never closed.
    let _permit = permits.acquire().await;
    let args = BindingArgs { pod_name: pod.name(), pod_namespace: pod.namespace(), pod_uid: pod.uid(), node };
    let error = match remote.call::<BindingResult>(verb, &args).await {
        Ok(result) => match result.error.filter(|error| !error.is_empty()) {
            None => return Some(Ok(())),
            Some(error) => remote.error(verb, printable(&error, REASON_MAX)),
        },
        Err(error) => error,
    };
    if remote.extender.ignorable {
        tracing::warn!(%error, "an extender failed and is ignored");
        return None;
    }
    Some(Err(error.to_string()))
}

async fn objects(client: &Client, pod: &Pod, nodes: Option<&Vec<String>>) -> Result<Objects, String> {
    let whole = get_pod(client, pod.namespace(), pod.name()).await?;
    if whole["metadata"]["uid"] != pod.uid() {
        return Err(format!("pod {} was replaced", pod.key()));
    }
    let mut found = HashMap::new();
    if let Some(wanted) = nodes {
        let wanted: HashSet<&str> = wanted.iter().map(String::as_str).collect();
        let list = Request::new("/api/v1/nodes").list(&ListParams::default().match_any());
        let mut list = get(client, list).await?;
        for node in list["items"].as_array_mut().into_iter().flatten() {
            let name = node["metadata"]["name"].as_str().filter(|name| wanted.contains(name));
            if let Some(name) = name.map(str::to_owned) {
                found.insert(name, node.take());
            }
        }
    }
    Ok(Objects { pod: whole, nodes: found })
}

/// The victims by uid.
async fn victims(client: &Client, found: &[Preemption]) -> Result<HashMap<String, Value>, String> {
    let mut pods = HashMap::new();
    for victim in found.iter().flat_map(|one| &one.victims) {
        pods.insert(victim.uid.clone(), get_pod(client, &victim.namespace, &victim.name).await?);
    }
    Ok(pods)
}

async fn get_pod(client: &Client, namespace: &str, name: &str) -> Result<Value, String> {
    let request =
        Request::new(format!("/api/v1/namespaces/{namespace}/pods")).get(name, &GetParams::default());
    get(client, request).await
}

async fn get(
    client: &Client,
    request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
) -> Result<Value, String> {
    let request = request.map_err(|error| error.to_string())?;
    client.request(request).await.map_err(|error| format!("cannot read the objects for an extender: {error}"))
}

impl Objects {
    fn args<'a>(&'a self, remote: &Remote, nodes: &'a [String]) -> Args<'a> {
        let knows = remote.extender.knows_nodes;
        let items = || nodes.iter().filter_map(|node| self.nodes.get(node)).collect();
        Args {
            pod: &self.pod,
            nodes: (!knows).then(|| NodeList { metadata: BTreeMap::new(), items: items() }),
            node_names: knows.then_some(nodes),
        }
    }
}

#[cfg(test)]
mod tests;

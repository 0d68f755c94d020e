//! Reconciles replica sets and replication controllers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use coracle_values::label_selector::{LabelSelector, has_many_values, has_requirements, selects};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::Replicas;
use super::plan::{self, Change, Failure, Plan, ReplicaCounts, Snapshot};
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, Pod, ReplicaSet, controller_of};
use crate::pod_control::{self, PodControl};
use crate::queue::{Next, Queue};
use crate::queueing::Selecting;
use crate::state::pod_counts::Groups;
use crate::write::Part;

/// Queues changed replica sets, and the replica sets of changed pods.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    listen_to::<ReplicaSet>(context, queue);
}

/// Reconciles one replica set.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    reconcile_one::<ReplicaSet>(context, key).await
}

/// Queues changed objects of a kind, and the owners of changed pods.
pub(crate) fn listen_to<K: Replicas>(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    let cache = K::cache(&context.caches);
    cache.on_change(move |change| {
        if let Some(set) = change.latest() {
            own.add(set.key());
        }
    });
    let may_adopt = |set: &K, pod: &Pod| {
        let selector = &set.spec().selector;
        has_requirements(selector) && selects(selector, pod.metadata.labels.as_ref())
    };
    let is_large = |set: &K| has_many_values(&set.spec().selector);
    let (own, sets) = (queue.clone(), Selecting::new(queue, cache, may_adopt, is_large));
    context.caches.pods.on_change(move |change| {
        if change.old.zip(change.new).is_some_and(|(old, new)| !plan::is_relevant(old, new)) {
            return;
        }
        for pod in [change.old, change.new].into_iter().flatten() {
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            if let Some(owner) = controller_of(&pod.metadata) {
                if owner.kind == K::kind(&()) {
                    own.add(Key::new(namespace, &owner.name));
                }
            } else if change.new.is_some() {
                // Any set whose selector matches may adopt an orphaned pod.
                sets.changed(namespace, pod);
            }
        }
    });
}

/// Reconciles one object of a kind.
pub(crate) async fn reconcile_one<K: Replicas>(context: &Context, key: Key) -> Result<Next, Error> {
    let cache = K::cache(&context.caches);
    let Some(set) = cache.get(&key) else { return Ok(Next::Wait) };
    let selector = pod_control::selector_of(&*set, &set.spec().selector)?;
    if selector.is_empty() {
        return Ok(Next::Wait);
    }
    let counted = context.pod_counts.read(&key.namespace, set.uid(), Groups::clone);
    let counted = context
        .pod_counts
        .read(&key.namespace, "", |orphans| plan::by_counts(&*set, &selector, &counted, orphans));
    let plan = match counted {
        Some(change) => Plan { change, ..Plan::default() },
        None => by_pods(context, &*set, &selector),
    };
    let control = PodControl { context, owner: &*set, cache, component: K::COMPONENT, finalizer: None };
    control.release(&plan.release).await?;
    control.adopt(&plan.adopt).await?;
    let delay = match plan.change {
        Change::Create(_) => creation_delay(context, &*set),
        Change::Nothing | Change::Delete(_) => None,
    };
    let outcome = match plan.change {
        Change::Nothing => Ok(()),
        Change::Create(_) if delay.is_some() => Ok(()),
        Change::Create(count) => {
            let pods = vec![new_pod(&*set); count];
            control.create(&pods).await.map_err(|error| ("FailedCreate", "create pods of", error))
        }
        Change::Delete(pods) => {
            control.delete(&pods).await.map_err(|error| ("FailedDelete", "delete pods of", error))
        }
    };
    let failure = outcome
        .as_ref()
        .err()
        .map(|(reason, _, error)| Failure { reason, message: coracle_events::cause(error) });
    let next = write_status(context, &*set, failure.as_ref()).await?;
    match outcome {
        Ok(()) => Ok(next_within(delay, next)),
        Err((_, verb, error)) => Err(control.failed(verb, error)),
    }
}

/// Delay before the set creates further pods, if its new pods fail.
fn creation_delay<K: Replicas>(context: &Context, set: &K) -> Option<Duration> {
    let failed = context.failed_pods.of_set(set.uid());
    let desired = usize::try_from(plan::desired(set)).unwrap_or_default();
    plan::creation_delay(desired, &failed, Timestamp::now())
}

/// The time of the next reconcile, at the latest after `delay`.
fn next_within(delay: Option<Duration>, next: Next) -> Next {
    match (delay, next) {
        (None, next) => next,
        (Some(delay), Next::After(next)) => Next::After(next.min(delay)),
        (Some(delay), Next::Wait | Next::Pause(_)) => Next::After(delay),
        (Some(_), Next::NotBefore(next)) => Next::NotBefore(next),
        (Some(delay), Next::AfterPause { after, pause }) => {
            Next::AfterPause { after: after.min(delay), pause }
        }
    }
}

/// Plans with all pods of the set and the orphaned pods of its namespace.
fn by_pods<K: Replicas>(context: &Context, set: &K, selector: &LabelSelector) -> Plan {
    let pods = pod_control::candidates(context, set);
    // Neighbours are needed only to choose pods for deletion, and most reconciles delete no pods.
    let desired = usize::try_from(plan::desired(set)).unwrap_or_default();
    let neighbours = if pods.len() > desired { neighbours(context, set) } else { HashMap::new() };
    plan::plan(Snapshot { set, selector, pods, neighbours, now: Timestamp::now() })
}

/// Number of active pods by node, over all sets with the same owner.
fn neighbours<K: Replicas>(context: &Context, set: &K) -> HashMap<String, usize> {
    let mut counts = HashMap::new();
    let sets = match controller_of(set.meta()) {
        Some(owner) => K::cache(&context.caches).owned_by(set.namespace(), &owner.uid),
        None => Vec::new(),
    };
    let own = sets.is_empty().then(|| set.uid().to_owned());
    for uid in sets.iter().map(|set| set.uid().to_owned()).chain(own) {
        for pod in context.caches.pods.owned_by(set.namespace(), &uid) {
            if let (true, Some(node)) = (pod.is_active(), &pod.spec.node_name) {
                *counts.entry(node.clone()).or_default() += 1;
            }
        }
    }
    counts
}

/// A pod from the set's template.
fn new_pod<K: Replicas>(set: &K) -> Value {
    let mut pod = pod_control::from_template(set, &set.spec().template.value());
    // The API server truncates a long prefix and adds the suffix.
    pod["metadata"]["generateName"] = format!("{}-", set.name()).into();
    pod
}

/// Writes the set's status if it has changed. Returns the time of the next reconcile.
async fn write_status<K: Replicas>(
    context: &Context,
    set: &K,
    failure: Option<&Failure>,
) -> Result<Next, Error> {
    let now = Timestamp::now();
    let counts = if plan::min_ready(set) == 0 {
        context.pod_counts.read(set.namespace(), set.uid(), |groups| ReplicaCounts::of_groups(set, groups))
    } else {
        let pods = context.caches.pods.owned_by(set.namespace(), set.uid());
        ReplicaCounts::of_pods(set, &pods, now)
    };
    let status = plan::status(set, &counts, failure, now);
    let mut pause = None;
    if !plan::are_equal(&status, set.status()) {
        let mut status = json!(status);
        // A merge patch removes a field only if it sets the field to null.
        for field in ["fullyLabeledReplicas", "readyReplicas", "availableReplicas", "conditions"] {
            if status.get(field).is_none() {
                status[field] = Value::Null;
            }
        }
        // The patch has no resourceVersion: no other client writes the status, and `observedGeneration` has the
        // generation that the status describes.
        let patch = json!({"metadata": {"uid": set.uid()}, "status": status});
        context.writer(K::cache(&context.caches)).merge(&set.key(), Part::Status, patch).await?;
        pause = counts.pause();
    }
    Ok(match (counts.next(), pause) {
        (Some(next), _) => Next::After(next),
        (None, Some(pause)) => Next::Pause(pause),
        (None, None) => Next::Wait,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn a_set_whose_new_pods_fail_waits_before_it_creates_more() {
        for (failed, created) in [(9, 1), (10, 0)] {
            let metadata =
                json!({"name": "rs", "namespace": "n", "uid": "rs", "resourceVersion": "7", "generation": 1});
            let set = json!({"metadata": metadata, "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "a"}},
                "template": {"metadata": {"labels": {"app": "a"}}, "spec": {"containers": []}}}});
            let pod = |name: &str| {
                json!({"metadata": {"name": name, "namespace": "n", "uid": name, "resourceVersion": "8",
                        "labels": {"app": "a"}, "creationTimestamp": Timestamp::now().to_string(),
                        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs",
                            "controller": true}]},
                    "spec": {"nodeName": "a", "containers": []}, "status": {"phase": "Failed"}})
            };
            let api = TestApi::new(&[
                ("/apis/apps/v1/namespaces/n/replicasets/rs", set.clone()),
                ("/api/v1/namespaces/n/pods", pod("new")),
            ]);
            api.context.failed_pods.follow(&api.context.caches.pods);
            api.context.caches.replica_sets.written(serde_json::from_value(set).unwrap());
            for number in 0..failed {
                api.context.caches.pods.written(serde_json::from_value(pod(&number.to_string())).unwrap());
            }
            let next = reconcile(&api.context, Key::new("n", "rs")).await.unwrap();
            let writes = api.writes();
            assert_eq!(writes.iter().filter(|write| write.method == "POST").count(), created, "{failed}");
            assert_eq!(matches!(next, Next::After(_)), created == 0, "{failed}");
        }
    }
}

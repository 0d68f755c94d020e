//! Applies the plans of daemon sets.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};

use coracle_values::label_selector::{has_many_values, selects};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::fit::new_pod;
use super::observed::Snapshot;
use super::plan;
use crate::cache::Change;
use crate::context::Context;
use crate::error::Error;
use crate::object::{DaemonSet, Key, Node, ObjectExt, Pod, controller_of};
use crate::pod_control::{self, Claim, PodControl};
use crate::queue::{Next, Queue};
use crate::queueing::{Selecting, own_pods, queue_changed};
use crate::revision_history::{self, POD_REVISION, Workload, to_clean};
use crate::write::{Part, status_patch};

const COMPONENT: &str = "daemonset-controller";

/// Queues changed daemon sets, the daemon sets of changed pods, and all daemon sets when a node changes.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    queue_changed(&context.caches.daemon_sets, queue);
    let (own, sets) = (queue.clone(), context.caches.daemon_sets.clone());
    context.caches.nodes.on_change(move |change| {
        if is_relevant(change) {
            sets.all().iter().for_each(|set| own.add(set.key()));
        }
    });
    let may_adopt = |set: &DaemonSet, pod: &Pod| selects(&set.spec.selector, pod.metadata.labels.as_ref());
    let is_large = |set: &DaemonSet| has_many_values(&set.spec.selector);
    let (own, sets) =
        (queue.clone(), Selecting::new(queue, &context.caches.daemon_sets, may_adopt, is_large));
    context.caches.pods.on_change(move |change| {
        for pod in [change.old, change.new].into_iter().flatten() {
            if let Some(owner) = controller_of(&pod.metadata) {
                if owner.kind == "DaemonSet" {
                    own.add(Key::new(pod.namespace(), &owner.name));
                }
            } else if change.new.is_some() {
                sets.changed(pod.namespace(), pod);
            }
        }
    });
}

/// Whether the change of a node can affect daemon pods. Heartbeats have no effect.
fn is_relevant(change: &Change<'_, Node>) -> bool {
    let (Some(old), Some(new)) = (change.old, change.new) else { return true };
    old.metadata.labels != new.metadata.labels || old.taints() != new.taints() || old.uid() != new.uid()
}

/// Reconciles one daemon set.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(set) = context.caches.daemon_sets.get(&key) else {
        context.daemon_backoff.lock().unwrap_or_else(PoisonError::into_inner).forget(&key);
        return Ok(Next::Wait);
    };
    let selector = pod_control::selector_of(&*set, &set.spec.selector)?;
    if selector.is_empty() {
        return Ok(Next::Wait);
    }
    let control = PodControl {
        context,
        owner: &*set,
        cache: &context.caches.daemon_sets,
        component: COMPONENT,
        finalizer: None,
    };
    let candidates = pod_control::candidates(context, &*set);
    let claim = Claim::of(set.is_being_deleted(), &selector, candidates);
    control.apply(&claim).await?;
    if set.is_being_deleted() {
        return Ok(Next::Wait);
    }
    let current = revision_history::current(&control, &workload(&set), &selector).await?;
    let labels = current.revision.metadata.labels.as_ref();
    let hash = labels.and_then(|labels| labels.get(POD_REVISION)).cloned().unwrap_or_default();
    let nodes = context.caches.nodes.all();
    let pods = own_pods(context, &*set, &selector);
    let again = change(&control, &nodes, &pods, &hash).await;
    let pods = own_pods(context, &*set, &selector);
    let (status, next) = {
        let now = Timestamp::now();
        let snapshot =
            Snapshot { set: &set, hash: &hash, nodes: &nodes, pods: &pods, backoff: &|_| None, now };
        plan::status(&snapshot, current.collisions)
    };
    if let Some(patch) = status_patch(&*set, &json!(set.status), &json!(status)) {
        context.writer(&context.caches.daemon_sets).merge(&key, Part::Status, patch).await?;
    }
    let again = again?;
    let labels = pods.iter().map(|pod| pod.metadata.labels.as_ref());
    let of_pods: HashSet<Option<&String>> =
        labels.map(|labels| labels.and_then(|labels| labels.get(POD_REVISION))).collect();
    let old = to_clean(&current.all, set.spec.revision_history_limit, |revision| {
        let hash = revision.metadata.labels.as_ref().and_then(|labels| labels.get(POD_REVISION));
        revision.uid() == current.revision.uid() || of_pods.contains(&hash)
    });
    revision_history::delete(context, &old).await?;
    Ok(again.into_iter().chain(next).min().map_or(Next::Wait, Next::After))
}

/// Creates and deletes pods.
async fn change(
    control: &PodControl<'_, DaemonSet>,
    nodes: &[Arc<Node>],
    pods: &[Arc<Pod>],
    hash: &str,
) -> Result<Option<std::time::Duration>, Error> {
    let (context, set, now) = (control.context, control.owner, Timestamp::now());
    let plan = {
        let backoff = context.daemon_backoff.lock().unwrap_or_else(PoisonError::into_inner);
        let remaining = |node: &str| backoff.remaining(&set.key(), node, now);
        plan::plan(&Snapshot { set, hash, nodes, pods, backoff: &remaining, now })
    };
    {
        let mut backoff = context.daemon_backoff.lock().unwrap_or_else(PoisonError::into_inner);
        plan.failed.iter().for_each(|node| backoff.failed(&set.key(), node, now));
    }
    for event in plan.events {
        control.record(event);
    }
    let new: Vec<Value> = plan.create.iter().map(|node| new_pod(set, node, hash)).collect();
    let created = control.create(&new).await.map_err(|error| control.failed("create pods of", error));
    let deleted = control.delete(&plan.delete).await.map_err(|error| control.failed("delete pods of", error));
    created.and(deleted)?;
    Ok(plan.again)
}

fn workload(set: &DaemonSet) -> Workload<'_> {
    Workload {
        namespace: set.namespace(),
        name: set.name(),
        uid: set.uid(),
        owner: set.controller_reference(),
        template: &set.spec.template,
        annotations: set.metadata.annotations.as_ref(),
        hash_label: POD_REVISION,
        collisions: set.status.collision_count.unwrap_or_default(),
    }
}

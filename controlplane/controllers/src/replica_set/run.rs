//! Applies the plans of replica sets.

use std::collections::HashMap;
use std::sync::Arc;

use coracle_values::label_selector::LabelSelector;
use futures::future::join_all;
use jiff::Timestamp;
use kube::api::DeleteParams;
use serde_json::{Map, Value, json};

use super::plan::{self, Change, Failure, Snapshot};
use coracle_events::Event;

use crate::context::Context;
use crate::error::{Error, is_namespace_terminating};
use crate::object::{Key, ObjectExt, Pod, ReplicaSet, controller_of};
use crate::queue::{Next, Queue};
use crate::write::{Part, owners_patch};

const CONTROLLER: &str = "replicaset-controller";

/// Queues changed replica sets, and the replica sets of changed pods.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.replica_sets.on_change(move |change| {
        if let Some(set) = change.latest() {
            own.add(set.key());
        }
    });
    let (own, sets) = (queue.clone(), context.caches.replica_sets.clone());
    context.caches.pods.on_change(move |change| {
        if change.old.zip(change.new).is_some_and(|(old, new)| !plan::is_relevant(old, new)) {
            return;
        }
        for pod in [change.old, change.new].into_iter().flatten() {
            if let Some(owner) = controller_of(&pod.metadata) {
                if owner.kind == "ReplicaSet" {
                    own.add(Key::new(pod.namespace(), &owner.name));
                }
            } else if change.new.is_some() {
                // Any set whose selector matches may adopt an orphan.
                for set in sets.in_namespace(pod.namespace()) {
                    let selector = LabelSelector::try_from(&set.spec.selector);
                    if selector.is_ok_and(|selector| {
                        !selector.is_empty() && selector.matches(pod.metadata.labels.as_ref())
                    }) {
                        own.add(set.key());
                    }
                }
            }
        }
    });
}

/// Reconciles one replica set.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(set) = context.caches.replica_sets.get(&key) else { return Ok(Next::Wait) };
    let selector = LabelSelector::try_from(&set.spec.selector)
        .map_err(|source| Error::Selector { object: format!("ReplicaSet {key}"), source })?;
    if selector.is_empty() {
        return Ok(Next::Wait);
    }
    let pods = pods(context, &set);
    // Neighbours matter only for deletions, and most reconciles delete no pods.
    let desired = usize::try_from(plan::desired(&set)).unwrap_or_default();
    let neighbours = if pods.len() > desired { neighbours(context, &set) } else { HashMap::new() };
    let snapshot = Snapshot { set: &set, selector: &selector, pods, neighbours, now: Timestamp::now() };
    let plan = plan::plan(snapshot);
    release(context, &set, &plan.release).await?;
    adopt(context, &set, &plan.adopt).await?;
    let outcome = match plan.change {
        Change::Nothing => Ok(()),
        Change::Create(count) => create(context, &set, count).await,
        Change::Delete(pods) => delete(context, &set, &pods).await,
    };
    let next = show(context, &set, outcome.as_ref().err().map(|(failure, _)| failure)).await?;
    match outcome {
        Ok(()) => Ok(next),
        Err((_, error)) => Err(error),
    }
}

/// The pods of this set, and the orphans of its namespace.
fn pods(context: &Context, set: &ReplicaSet) -> Vec<Arc<Pod>> {
    let cache = &context.caches.pods;
    let mut pods = cache.owned_by(set.namespace(), set.uid());
    pods.extend(cache.owned_by(set.namespace(), ""));
    pods
}

/// Active pods by node, over all replica sets with the same controller.
fn neighbours(context: &Context, set: &ReplicaSet) -> HashMap<String, usize> {
    let mut counts = HashMap::new();
    let sets = match controller_of(&set.metadata) {
        Some(owner) => context.caches.replica_sets.owned_by(set.namespace(), &owner.uid),
        None => Vec::new(),
    };
    let own = sets.is_empty().then(|| set.uid().to_owned());
    for uid in sets.iter().map(|set| set.uid().to_owned()).chain(own) {
        for pod in context.caches.pods.owned_by(set.namespace(), &uid) {
            if let (true, Some(node)) = (plan::is_active(&pod), &pod.spec.node_name) {
                *counts.entry(node.clone()).or_default() += 1;
            }
        }
    }
    counts
}

async fn release(context: &Context, set: &ReplicaSet, pods: &[Arc<Pod>]) -> Result<(), Error> {
    for pod in pods {
        let owners: Vec<_> = pod
            .metadata
            .owner_references
            .iter()
            .flatten()
            .filter(|owner| owner.uid != set.uid())
            .cloned()
            .collect();
        context.pods().merge(&pod.key(), Part::Main, owners_patch(&**pod, &owners)).await?;
    }
    Ok(())
}

async fn adopt(context: &Context, set: &ReplicaSet, pods: &[Arc<Pod>]) -> Result<(), Error> {
    if pods.is_empty() {
        return Ok(());
    }
    // The cached set may have been deleted, with its pods orphaned on purpose: ask the API server first.
    let live = context.replica_sets().live(&set.key()).await?;
    if !live.is_some_and(|live| live.uid() == set.uid() && !live.is_being_deleted()) {
        return Ok(());
    }
    for pod in pods {
        let mut owners = pod.metadata.owner_references.clone().unwrap_or_default();
        owners.push(set.controller_reference());
        context.pods().merge(&pod.key(), Part::Main, owners_patch(&**pod, &owners)).await?;
    }
    Ok(())
}

type Outcome = Result<(), (Failure, Error)>;

/// Creates pods in batches of 1, 2, 4 and so on, so that an error of all pods causes only one failed request.
async fn create(context: &Context, set: &ReplicaSet, count: usize) -> Outcome {
    let template = new_pod(set);
    let (mut left, mut batch) = (count, 1);
    while left > 0 {
        batch = batch.min(left);
        let requests = (0..batch).map(|_| context.pods().create_in(set.namespace(), &template));
        let results = join_all(requests).await;
        let mut failure = None;
        for result in results {
            match result {
                Ok(pod) => {
                    let message = format!("Created pod: {}", pod.name());
                    context.record(set, CONTROLLER, Event::normal("SuccessfulCreate", message));
                }
                // The deletion of the namespace deletes the set, too.
                Err(error) if is_namespace_terminating(&error) => return Ok(()),
                Err(error) => failure = Some(error),
            }
        }
        if let Some(error) = failure {
            let message = format!("Error creating: {}", reason(&error));
            context.record(set, CONTROLLER, Event::warning("FailedCreate", message));
            return Err(failed("FailedCreate", "create pods of", set, error));
        }
        left -= batch;
        batch *= 2;
    }
    Ok(())
}

async fn delete(context: &Context, set: &ReplicaSet, pods: &[Arc<Pod>]) -> Outcome {
    let writer = context.pods();
    let results = join_all(pods.iter().map(|pod| writer.delete(pod, DeleteParams::default()))).await;
    let mut outcome = Ok(());
    for (pod, result) in pods.iter().zip(results) {
        match result {
            Ok(()) => {
                let message = format!("Deleted pod: {}", pod.name());
                context.record(set, CONTROLLER, Event::normal("SuccessfulDelete", message));
            }
            Err(error) => {
                let message = format!("Error deleting: {}", reason(&error));
                context.record(set, CONTROLLER, Event::warning("FailedDelete", message));
                outcome = Err(failed("FailedDelete", "delete pods of", set, error));
            }
        }
    }
    outcome
}

fn failed(
    reason_: &'static str,
    verb: &'static str,
    set: &ReplicaSet,
    source: kube::Error,
) -> (Failure, Error) {
    let failure = Failure { reason: reason_, message: reason(&source) };
    (failure, Error::Request { verb, object: format!("ReplicaSet {}", set.key()), source })
}

/// The API server's message, without the client's prefix.
fn reason(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

/// A pod from the set's template.
fn new_pod(set: &ReplicaSet) -> Value {
    let template = set.spec.template.value();
    let mut metadata = Map::new();
    for field in ["labels", "annotations", "finalizers"] {
        if let Some(value) = template.pointer(&format!("/metadata/{field}")).filter(|value| !value.is_null())
        {
            metadata.insert(field.to_owned(), value.clone());
        }
    }
    // The API server cuts a prefix that is too long and adds the suffix.
    metadata.insert("generateName".to_owned(), format!("{}-", set.name()).into());
    metadata.insert("ownerReferences".to_owned(), json!([set.controller_reference()]));
    json!({"metadata": metadata, "spec": template["spec"]})
}

/// Writes the set's status if it has changed.
async fn show(context: &Context, set: &ReplicaSet, failure: Option<&Failure>) -> Result<Next, Error> {
    let pods = context.caches.pods.owned_by(set.namespace(), set.uid());
    let active: Vec<_> = pods.into_iter().filter(|pod| plan::is_active(pod)).collect();
    let (status, next) = plan::status(set, &active, failure, Timestamp::now());
    if !plan::same(&status, &set.status) {
        let mut status = json!(status);
        // A merge patch deletes a field only if it names it with null.
        for field in ["fullyLabeledReplicas", "readyReplicas", "availableReplicas", "conditions"] {
            if status.get(field).is_none() {
                status[field] = Value::Null;
            }
        }
        // Without resourceVersion: no other client writes the status, and it names the generation that it describes.
        let patch = json!({"metadata": {"uid": set.uid()}, "status": status});
        context.replica_sets().merge(&set.key(), Part::Status, patch).await?;
    }
    Ok(next.map_or(Next::Wait, Next::After))
}

//! Writes the status of pod disruption budgets.

use std::sync::Arc;

use coracle_values::CollectMap;
use coracle_values::label_selector::{LabelSelector, has_many_values};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::plan::{self, Controller, SelectedPod, Verdict};
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, ObjectExt, Pod, PodDisruptionBudget, controller_of};
use crate::queue::{Next, Queue, until};
use crate::queueing::{Selecting, queue_stored};
use crate::write::Part;
use coracle_events::Event;

const COMPONENT: &str = "controllermanager";

/// Queues changed budgets, and the budgets of changed pods.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    queue_stored(&context.caches.budgets, queue);
    let is_large = |budget: &PodDisruptionBudget| budget.spec.selector.as_ref().is_some_and(has_many_values);
    let budgets = Selecting::new(queue, &context.caches.budgets, plan::selects, is_large);
    context.caches.pods.on_change(move |change| {
        let is_relabelled =
            |old: &&Arc<Pod>| change.new.is_none_or(|new| new.metadata.labels != old.metadata.labels);
        for pod in change.old.filter(is_relabelled).into_iter().chain(change.new) {
            budgets.changed(pod.namespace(), pod);
        }
    });
}

/// Reconciles one budget.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(budget) = context.caches.budgets.get(&key) else { return Ok(Next::Wait) };
    // The selector is parsed once for all pods, because it can have very many values, and the parser sorts them.
    let selector = budget.spec.selector.as_ref().and_then(|selector| LabelSelector::try_from(selector).ok());
    let is_selected =
        |pod: &Pod| selector.as_ref().is_some_and(|one| one.matches(pod.metadata.labels.as_ref()));
    let pods = context.caches.pods.in_namespace(&key.namespace).into_iter();
    let pods = pods.filter(|pod| is_selected(pod));
    let pods: Vec<_> = pods.map(|pod| SelectedPod { controller: controller(context, &pod), pod }).collect();
    let now = Timestamp::now();
    let verdict = plan::verdict(&budget, &pods, now);
    if verdict.status != budget.status {
        record_events(context, &budget, &verdict, pods.is_empty());
        let patch = json!({
            "metadata": {"uid": budget.uid(), "resourceVersion": budget.metadata.resource_version},
            "status": status(&budget, &verdict),
        });
        context.writer(&context.caches.budgets).merge(&key, Part::Status, patch).await?;
    }
    let wait = verdict.recheck.and_then(|recheck| until(recheck, now));
    Ok(wait.map_or(Next::Wait, Next::After))
}

/// The controller of a pod: a replica set, or the deployment that controls it.
fn controller(context: &Context, pod: &Pod) -> Controller {
    let Some(owner) = controller_of(&pod.metadata) else { return Controller::None };
    let known =
        |uid: &str, scale: Option<i32>| Controller::Known { uid: uid.to_owned(), scale: scale.unwrap_or(1) };
    let deployment = |name: &str, uid: &str| {
        let found = context.caches.deployments.get(&Key::new(pod.namespace(), name));
        found.filter(|found| found.uid() == uid)
    };
    if !owner.api_version.starts_with("apps/") {
        return Controller::Unknown;
    }
    if owner.kind == "Deployment" {
        let found = deployment(&owner.name, &owner.uid);
        return found.map_or(Controller::Unknown, |found| known(found.uid(), found.spec.replicas));
    }
    let set = context.caches.replica_sets.get(&Key::new(pod.namespace(), &owner.name));
    let set = set.filter(|set| owner.kind == "ReplicaSet" && set.uid() == owner.uid);
    let Some(set) = set else { return Controller::Unknown };
    let above = controller_of(&set.metadata).filter(|above| above.kind == "Deployment");
    match above.and_then(|above| deployment(&above.name, &above.uid)) {
        Some(deployment) => known(deployment.uid(), deployment.spec.replicas),
        None => known(set.uid(), set.spec.replicas),
    }
}

/// The status as a merge patch. Fields to delete are null.
fn status(budget: &PodDisruptionBudget, verdict: &Verdict) -> Value {
    let mut status = json!(verdict.status);
    let before = budget.status.disrupted_pods.iter().flatten();
    let mut pods: Map<String, Value> = before.map(|(name, _)| (name.clone(), Value::Null)).collect_map();
    match &verdict.status.disrupted_pods {
        Some(waiting) => {
            pods.extend(waiting.iter().map(|(name, since)| (name.clone(), json!(since))));
            status["disruptedPods"] = pods.into();
        }
        None => status["disruptedPods"] = Value::Null,
    }
    status
}

/// Records events for the administrator.
fn record_events(context: &Context, budget: &PodDisruptionBudget, verdict: &Verdict, none: bool) {
    let record = |event| context.record(budget, COMPONENT, event);
    if none {
        record(Event::normal("NoPods", "No matching pods found"));
    }
    if let Some(why) = &verdict.failure {
        let message = format!("Failed to calculate the number of expected pods: {why}");
        record(Event::warning("CalculateExpectedPodCountFailed", message));
    }
    if verdict.unmanaged {
        let message = "Pods selected by this PodDisruptionBudget have no controller, so that their expected number is \
            not known. To account for them set .spec.minAvailable to an integer.";
        record(Event::warning("UnmanagedPods", message));
    }
    for pod in &verdict.overdue {
        let message = format!("Pod was expected by PDB {} to be deleted but it wasn't", budget.key());
        context.record(&**pod, COMPONENT, Event::warning("NotDeleted", message));
    }
}

//! Writes the status of pod disruption budgets.

use std::sync::Arc;

use coracle_values::CollectMap;
use coracle_values::label_selector::{LabelSelector, has_many_values};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::controller::Controllers;
use super::plan::{self, Controller, SelectedPod, Verdict};
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, ObjectExt, Pod, PodDisruptionBudget};
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
    let pods = pods.filter(|pod| is_selected(pod)).collect();
    let pods = if plan::needs_scale(&budget) {
        Controllers::new(context, &key.namespace).of(pods).await
    } else {
        pods.into_iter().map(|pod| SelectedPod { pod, controller: Controller::None }).collect()
    };
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
    let unread = pods.iter().find_map(|selected| match &selected.controller {
        Controller::Failed(why) => Some(why.clone()),
        _ => None,
    });
    if let Some(why) = unread {
        return Err(Error::Scale { object: format!("PodDisruptionBudget {key}"), why });
    }
    let wait = verdict.recheck.and_then(|recheck| until(recheck, now));
    Ok(wait.map_or(Next::Wait, Next::After))
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

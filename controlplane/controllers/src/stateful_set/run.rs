//! Reconciles stateful sets.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use coracle_events::{Event, cause};
use jiff::Timestamp;
use kube::api::DeleteParams;
use serde_json::{Value, json};

use super::claims::{changed_owners, claim_names, is_stale, missing, stale_ordinals};
use super::plan::{self, Action, Snapshot, ordinals};
use super::pods::{identity_patch, new_pod, ordinal, revision};
use super::status::{Revisions, status};
use crate::context::Context;
use crate::error::{Error, is_already_exists, is_namespace_terminating};
use crate::object::{Key, ObjectExt, Pod, StatefulSet, controller_of};
use crate::pod_control::{self, Claim, PodControl};
use crate::queue::{Next, Queue};
use crate::queueing::{own_pods, queue_changed};
use crate::revision_history::{self, Current, Workload, template_of, to_clean};
use crate::write::{Part, owners_patch, status_patch};

const COMPONENT: &str = "statefulset-controller";
/// Maximum number of claim templates with which the claims of each ordinal are looked up one by one. A set can have
/// thousands of templates. Then one pass over the claims of the namespace is faster.
const FEW_TEMPLATES: usize = 20;
/// Label with the hash of a revision.
const HASH: &str = "controller.kubernetes.io/hash";

/// Queues changed stateful sets, and the stateful sets of changed pods and claims.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    context.config.stateful_set_metrics.forget_all();
    queue_changed(&context.caches.stateful_sets, queue);
    let (own, sets) = (queue.clone(), context.caches.stateful_sets.clone());
    context.caches.pods.on_change(move |change| {
        for pod in [change.old, change.new].into_iter().flatten() {
            if let Some(owner) = controller_of(&pod.metadata) {
                if owner.kind == "StatefulSet" {
                    own.add(Key::new(pod.namespace(), &owner.name));
                }
            } else if change.new.is_some()
                && let Some((name, _)) = pod.name().rsplit_once('-')
                && sets.get(&Key::new(pod.namespace(), name)).is_some()
            {
                own.add(Key::new(pod.namespace(), name));
            }
        }
    });
    let (own, sets) = (queue.clone(), context.caches.stateful_sets.clone());
    context.caches.claims.on_change(move |change| {
        // After a claim was deleted, or an earlier pod no longer owns it, its pod may be created. The claim's name is
        // `template-set-ordinal`.
        let Some(old) = change.old else { return };
        let owners = &old.metadata.owner_references;
        if change.new.is_none_or(|new| new.metadata.owner_references != *owners)
            && let Some((name, _)) = old.name().rsplit_once('-')
        {
            let keys =
                name.match_indices('-').map(|(place, _)| Key::new(old.namespace(), &name[place + 1..]));
            keys.filter(|key| sets.get(key).is_some()).for_each(|key| own.add(key));
        }
    });
}

/// Reconciles one stateful set.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(set) = context.caches.stateful_sets.get(&key) else {
        context.stateful_backoff.lock().unwrap_or_else(PoisonError::into_inner).forget(&key);
        context.config.stateful_set_metrics.forget(&key);
        return Ok(Next::Wait);
    };
    let selector = pod_control::selector_of(&*set, &set.spec.selector)?;
    if selector.is_empty() {
        return Ok(Next::Wait);
    }
    let control = PodControl {
        context,
        owner: &*set,
        cache: &context.caches.stateful_sets,
        component: COMPONENT,
        finalizer: None,
    };
    let candidates = pod_control::candidates(context, &*set);
    let named = candidates.into_iter().filter(|pod| ordinal(&set, pod).is_some()).collect();
    let claim = Claim::of(set.is_being_deleted(), &selector, named);
    control.apply(&claim).await?;
    let own = own_pods(context, &*set, &selector);
    let current = revision_history::current(&control, &workload(&set), &selector).await?;
    let old = current.all.iter().find(|found| Some(found.name()) == set.status.current_revision.as_deref());
    let old = old.unwrap_or(&current.revision).clone();
    let names =
        Revisions { current: old.name(), update: current.revision.name(), collisions: current.collisions };
    if !set.is_being_deleted() {
        keep_claims(context, &set, &own).await?;
        keep_identity(&control, &own).await?;
    }
    let (actions, delay) = due(context, &set, planned(context, &set, &own, names.update), &names);
    let mut outcome = Ok(());
    for action in actions {
        // As upstream, pods above the desired number and outdated pods stay while another pod cannot be created.
        if outcome.is_err() && plan::is_later_step(&set, &action) {
            break;
        }
        let done = match action {
            Action::Create { ordinal, updated } => {
                let revision = if updated { &current.revision } else { &old };
                let pod = new_pod(&set, ordinal, &template_of(revision), revision.name());
                create(&control, ordinal, &pod).await
            }
            Action::Delete(pod) => delete(&control, &pod).await,
        };
        // With parallel management a failure does not delay the other pods.
        outcome = outcome.and(done);
    }
    let own = own_pods(context, &*set, &selector);
    measure(context, &set, &own);
    let (status, again) = status(&set, &own, names, Timestamp::now());
    if let Some(patch) = status_patch(&*set, &json!(set.status), &json!(status)) {
        context.writer(&context.caches.stateful_sets).merge(&key, Part::Status, patch).await?;
    }
    outcome?;
    clean(context, &set, &own, &current).await?;
    Ok(again.into_iter().chain(delay).min().map_or(Next::Wait, Next::After))
}

/// Sets the availability of the stateful set in the metrics.
fn measure(context: &Context, set: &StatefulSet, pods: &[Arc<Pod>]) {
    let metrics = &context.config.stateful_set_metrics;
    match plan::availability(set, pods, Timestamp::now()).filter(|_| !set.is_being_deleted()) {
        Some(availability) => metrics.set(set.key(), availability),
        None => metrics.forget(&set.key()),
    }
}

fn planned(context: &Context, set: &StatefulSet, pods: &[Arc<Pod>], update: &str) -> Vec<Action> {
    let few = set.spec.volume_claim_templates.len() <= FEW_TEMPLATES;
    let known = (!few).then(|| {
        let claims = context.caches.claims.in_namespace(set.namespace());
        stale_ordinals(set, claims.iter().map(|claim| &**claim))
    });
    let stale = |ordinal: i32| match &known {
        Some(known) => known.contains(&ordinal),
        None => has_stale_claim(context, set, ordinal),
    };
    plan::plan(&Snapshot { set, pods, update, stale: &stale, now: Timestamp::now() })
}

/// The actions, except the replacement of failed pods in back-off. Also returns the remaining time of the shortest
/// back-off.
///
/// The back-off is the same as for daemon sets. Without the back-off, a pod that its node refuses would be replaced at
/// once, again and again. Upstream's controller has no back-off. A pod is replaced at once if its replacement has
/// another template.
fn due(
    context: &Context,
    set: &StatefulSet,
    actions: Vec<Action>,
    names: &Revisions<'_>,
) -> (Vec<Action>, Option<Duration>) {
    let (key, now, mut delay) = (set.key(), Timestamp::now(), None::<Duration>);
    let mut backoff = context.stateful_backoff.lock().unwrap_or_else(PoisonError::into_inner);
    backoff.retain(&key, |name| {
        let ordinal = name.rsplit_once('-').and_then(|(_, ordinal)| ordinal.parse::<i32>().ok());
        ordinal.is_some_and(|ordinal| ordinals(set).contains(&ordinal))
    });
    let is_due = |action: &Action| {
        let Action::Delete(pod) = action else { return true };
        let is_updated = ordinal(set, pod).is_none_or(|ordinal| plan::is_updated(set, ordinal));
        let next = if is_updated { names.update } else { names.current };
        let is_failed = pod.status.phase.as_deref() == Some("Failed") && revision(pod) == next;
        if !is_failed || plan::is_above_size(set, action) {
            return true;
        }
        if let Some(remaining) = backoff.remaining(&key, pod.name(), now) {
            delay = Some(delay.map_or(remaining, |delay| delay.min(remaining)));
            return false;
        }
        backoff.failed(&key, pod.name(), now);
        true
    };
    let actions = actions.into_iter().filter(is_due).collect();
    (actions, delay)
}

fn workload(set: &StatefulSet) -> Workload<'_> {
    Workload {
        namespace: set.namespace(),
        name: set.name(),
        uid: set.uid(),
        owner: set.controller_reference(),
        template: &set.spec.template,
        annotations: set.metadata.annotations.as_ref(),
        hash_label: HASH,
        collisions: set.status.collision_count.unwrap_or_default(),
    }
}

/// Whether a claim of this ordinal is about to be deleted. The pod is created after the deletion.
fn has_stale_claim(context: &Context, set: &StatefulSet, ordinal: i32) -> bool {
    claim_names(set, ordinal).iter().any(|name| {
        let claim = context.caches.claims.get(&Key::new(set.namespace(), name));
        claim.is_some_and(|claim| is_stale(set, &claim, ordinal))
    })
}

/// Creates missing claims of pending pods, and sets the owners of claims according to the retention policy.
async fn keep_claims(context: &Context, set: &StatefulSet, pods: &[Arc<Pod>]) -> Result<(), Error> {
    if set.spec.volume_claim_templates.is_empty() {
        return Ok(());
    }
    for pod in pods {
        // Yield to other tasks: a set can have thousands of pods and claim templates, and most of the look-ups below
        // send no request.
        tokio::task::yield_now().await;
        let Some(ordinal) = ordinal(set, pod) else { continue };
        let condemned = !ordinals(set).contains(&ordinal);
        if !condemned && pod.status.phase.as_deref() == Some("Pending") {
            create_claims(context, set, ordinal).await?;
        }
        for name in claim_names(set, ordinal) {
            let key = Key::new(set.namespace(), &name);
            let Some(claim) = context.caches.claims.get(&key) else { continue };
            let present = claim.metadata.owner_references.as_deref().unwrap_or_default();
            if claim.is_being_deleted() {
                continue;
            }
            if let Some(owners) = changed_owners(set, pod, condemned, present) {
                let patch = owners_patch(&*claim, &owners);
                context.writer(&context.caches.claims).merge(&key, Part::Main, patch).await?;
            }
        }
    }
    Ok(())
}

/// Restores the labels of the pods' identity.
async fn keep_identity(control: &PodControl<'_, StatefulSet>, pods: &[Arc<Pod>]) -> Result<(), Error> {
    let set = control.owner;
    for pod in pods.iter().filter(|pod| pod.is_active()) {
        let ordinal = ordinal(set, pod).filter(|ordinal| ordinals(set).contains(ordinal));
        let Some(patch) = ordinal.and_then(|ordinal| identity_patch(pod, ordinal)) else { continue };
        control.context.pods().merge(&pod.key(), Part::Main, patch).await?;
        let message = format!("Update Pod {} in StatefulSet {} successful", pod.name(), set.name());
        control.record(Event::normal("SuccessfulUpdate", message));
    }
    Ok(())
}

async fn create_claims(context: &Context, set: &StatefulSet, ordinal: i32) -> Result<(), Error> {
    let writer = context.writer(&context.caches.claims);
    let exists = |name: &str| context.caches.claims.get(&Key::new(set.namespace(), name)).is_some();
    for claim in missing(set, ordinal, exists) {
        let name = claim["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        match writer.create(set.namespace(), claim).await {
            Ok(_) => {
                let message = format!(
                    "Create Claim {name} Pod {}-{ordinal} in StatefulSet {} success",
                    set.name(),
                    set.name()
                );
                context.record(set, COMPONENT, Event::normal("SuccessfulCreate", message));
            }
            Err(error) if is_already_exists(&error) => {}
            Err(source) => {
                let message = format!(
                    "Create Claim {name} for Pod {}-{ordinal} in StatefulSet {} failed error: {}",
                    set.name(),
                    set.name(),
                    cause(&source)
                );
                context.record(set, COMPONENT, Event::warning("FailedCreate", message));
                let object = format!("PersistentVolumeClaim {}/{name}", set.namespace());
                return Err(Error::Request { verb: "create", object, source });
            }
        }
    }
    Ok(())
}

async fn create(control: &PodControl<'_, StatefulSet>, ordinal: i32, pod: &Value) -> Result<(), Error> {
    let set = control.owner;
    create_claims(control.context, set, ordinal).await?;
    let name = pod["metadata"]["name"].as_str().unwrap_or_default();
    let permits = control.context.pod_creations.permits(set.namespace());
    // The semaphore is never closed.
    let _permit = permits.acquire().await;
    match control.context.pods().create_in(set.namespace(), pod).await {
        Ok(_) => {
            let message = format!("Create Pod {name} in StatefulSet {} successful", set.name());
            control.record(Event::normal("SuccessfulCreate", message));
            Ok(())
        }
        Err(error) if is_namespace_terminating(&error) => Ok(()),
        Err(error) => {
            let message =
                format!("Create Pod {name} in StatefulSet {} failed error: {}", set.name(), cause(&error));
            control.record(Event::warning("FailedCreate", message));
            Err(control.failed("create a pod of", error))
        }
    }
}

async fn delete(control: &PodControl<'_, StatefulSet>, pod: &Pod) -> Result<(), Error> {
    let set = control.owner;
    match control.context.pods().delete(pod, DeleteParams::default()).await {
        Ok(()) => {
            let message = format!("Delete Pod {} in StatefulSet {} successful", pod.name(), set.name());
            control.record(Event::normal("SuccessfulDelete", message));
            Ok(())
        }
        Err(error) => {
            let message = format!(
                "Delete Pod {} in StatefulSet {} failed error: {}",
                pod.name(),
                set.name(),
                cause(&error)
            );
            control.record(Event::warning("FailedDelete", message));
            Err(control.failed("delete a pod of", error))
        }
    }
}

/// Deletes revisions above the history limit that are in use neither by the set nor by a pod.
async fn clean(
    context: &Context,
    set: &StatefulSet,
    pods: &[Arc<Pod>],
    current: &Current,
) -> Result<(), Error> {
    if set.is_being_deleted() {
        return Ok(());
    }
    let of_pods: HashSet<&str> = pods.iter().map(|pod| super::pods::revision(pod)).collect();
    let unused = to_clean(&current.all, set.spec.revision_history_limit, |revision| {
        let name = revision.name();
        name == current.revision.name()
            || set.status.current_revision.as_deref() == Some(name)
            || of_pods.contains(name)
    });
    revision_history::delete(context, &unused).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn a_pod_that_fails_again_is_replaced_after_its_back_off() {
        let api = TestApi::new(&[]);
        let set = |partition: i32| -> StatefulSet {
            let strategy = json!({"type": "RollingUpdate", "rollingUpdate": {"partition": partition}});
            let metadata = json!({"name": "web", "namespace": "n", "uid": format!("web-{partition}")});
            let spec = json!({"replicas": 1, "updateStrategy": strategy});
            serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
        };
        let deletion = |name: &str, revision: &str| {
            let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name,
                    "labels": {"controller-revision-hash": revision}},
                "spec": {"containers": []}, "status": {"phase": "Failed"}});
            vec![Action::Delete(Arc::new(serde_json::from_value(pod).unwrap()))]
        };
        let within = |partition: i32, actions| {
            let names = Revisions { current: "old", update: "new", collisions: 0 };
            let (actions, delay) = due(&api.context, &set(partition), actions, &names);
            (actions.len(), delay.is_some())
        };
        let due = |actions| within(0, actions);
        assert_eq!(due(deletion("web-0", "new")), (1, false), "the first failure");
        for _ in 0..10 {
            let mut backoff = api.context.stateful_backoff.lock().unwrap();
            backoff.failed(&Key::new("n", "web"), "web-0", Timestamp::now());
        }
        assert_eq!(due(deletion("web-0", "new")), (0, true));
        assert_eq!(due(deletion("web-0", "old")), (1, false), "a pod of an older template");
        assert_eq!(due(deletion("web-1", "new")), (1, false), "a pod above the desired number");
        assert_eq!(within(1, deletion("web-0", "old")), (0, true), "the partition keeps the older template");
        assert_eq!(due(vec![Action::Create { ordinal: 0, updated: true }]), (1, false));
    }

    /// A set with very many claim templates.
    fn set_with_templates() -> StatefulSet {
        let template = |number: usize| json!({"metadata": {"name": format!("t{number}")}, "spec": {}});
        let templates: Vec<Value> = (0..=FEW_TEMPLATES).map(template).collect();
        let metadata = json!({"name": "web", "namespace": "n", "uid": "web", "resourceVersion": "1"});
        let spec =
            json!({"replicas": 3, "podManagementPolicy": "Parallel", "volumeClaimTemplates": templates});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    }

    #[tokio::test]
    async fn pods_wait_for_the_deletion_of_claims_also_with_very_many_templates() {
        let (api, set) = (TestApi::new(&[]), set_with_templates());
        let put = |name: &str, deleted: Value| {
            let metadata = json!({"name": name, "namespace": "n", "uid": name, "resourceVersion": "1",
                "deletionTimestamp": deleted});
            let claim = serde_json::from_value(json!({"metadata": metadata})).unwrap();
            api.context.caches.claims.written(claim);
        };
        put("t7-web-1", json!("2026-01-01T00:00:00Z"));
        put("t7-web-2", Value::Null);
        put("other-web-2", json!("2026-01-01T00:00:00Z"));
        let created = |action: &Action| matches!(action, Action::Create { ordinal: 0 | 2, .. });
        let actions = planned(&api.context, &set, &[], "new");
        assert!(actions.len() == 2 && actions.iter().all(created), "{actions:?}");
    }

    #[tokio::test]
    async fn the_claims_of_many_pods_are_looked_up_in_turns_with_other_tasks() {
        let (api, set) = (TestApi::new(&[]), set_with_templates());
        let pod = |ordinal: usize| -> Arc<Pod> {
            let pod = json!({"metadata": {"name": format!("web-{ordinal}"), "namespace": "n"}});
            Arc::new(serde_json::from_value(pod).unwrap())
        };
        let pods: Vec<Arc<Pod>> = (0..3).map(pod).collect();
        let mut kept = std::pin::pin!(keep_claims(&api.context, &set, &pods));
        for _ in &pods {
            assert!(futures::poll!(kept.as_mut()).is_pending());
        }
        kept.await.unwrap();
    }

    #[tokio::test]
    async fn a_deleted_claim_queues_existing_sets_only() {
        let (api, queue) = (TestApi::new(&[]), Arc::new(Queue::new()));
        let caches = &api.context.caches;
        caches.stateful_sets.written(set_with_templates());
        listen(&api.context, &queue);
        let claim =
            json!({"metadata": {"name": "a-b-web-0", "namespace": "n", "uid": "c", "resourceVersion": "1"}});
        caches.claims.written(serde_json::from_value(claim).unwrap());
        caches.claims.removed(&Key::new("n", "a-b-web-0"), "c");
        let keys = std::sync::Mutex::new(Vec::new());
        let work = queue.work("test", |key: Key| {
            keys.lock().unwrap().push(key.to_string());
            async { Ok(Next::Wait) }
        });
        let mut work = std::pin::pin!(work);
        for _ in 0..10 {
            assert!(futures::poll!(work.as_mut()).is_pending());
        }
        assert_eq!(*keys.lock().unwrap(), ["n/web"]);
    }
}

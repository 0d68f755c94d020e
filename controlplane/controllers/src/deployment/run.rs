//! Applies the plans of deployments.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::DeploymentStatus;
use kube::api::DeleteParams;
use serde_json::{Map, Value, json};

use super::condition::{Conditions, PROGRESSING, condition};
use super::plan::{self, NewSet, Plan, Snapshot, Update};
use super::rolling;
use coracle_events::Event;

use crate::context::Context;
use crate::error::{Error, is_already_exists, is_namespace_terminating};
use crate::object::{Deployment, Key, ObjectExt, ReplicaSet, controller_of};
use crate::pod_control;
use crate::queue::{Next, Queue};
use crate::queueing::Selecting;
use crate::template::{HASH_LABEL, name_with_hash};
use crate::write::{Part, owners_patch};

const CONTROLLER: &str = "deployment-controller";
/// Maximum length of a replica set's name in bytes.
const MAX_NAME: usize = 253;

/// Queues changed deployments, and the deployments of changed replica sets and pods.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.deployments.on_change(move |change| {
        if let Some(deployment) = change.latest() {
            own.add(deployment.key());
        }
    });
    let deployments = Selecting::new(queue, &context.caches.deployments, |_, _: &ReplicaSet| true, |_| false);
    let own = queue.clone();
    context.caches.replica_sets.on_change(move |change| {
        for set in [change.old, change.new].into_iter().flatten() {
            match controller_of(&set.metadata) {
                Some(owner) if owner.kind == "Deployment" => own.add(Key::new(set.namespace(), &owner.name)),
                Some(_) => {}
                // Any deployment of the namespace may adopt an orphan; orphans are rare.
                None => deployments.changed(set.namespace(), set),
            }
        }
    });
    let (own, deployments) = (queue.clone(), context.caches.deployments.clone());
    let sets = context.caches.replica_sets.clone();
    context.caches.pods.on_change(move |change| {
        // Only the strategy Recreate waits for the end of the last old pod.
        let (Some(pod), None) = (change.old, change.new) else { return };
        let Some(set) = controller_of(&pod.metadata) else { return };
        let Some(set) = sets.get(&Key::new(pod.namespace(), &set.name)) else { return };
        let Some(owner) = controller_of(&set.metadata) else { return };
        let key = Key::new(pod.namespace(), &owner.name);
        if deployments.get(&key).is_some_and(|deployment| rolling::recreates(&deployment)) {
            own.add(key);
        }
    });
}

/// Reconciles one deployment.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(deployment) = context.caches.deployments.get(&key) else { return Ok(Next::Wait) };
    let selector = pod_control::selector_of(&*deployment, &deployment.spec.selector)?;
    if selector.is_empty() {
        let message = "This deployment is selecting all pods. A non-empty selector is required.".to_owned();
        context.record(&*deployment, CONTROLLER, Event::warning("SelectingAll", message));
        return Ok(Next::Wait);
    }
    let cache = &context.caches.replica_sets;
    let own = cache.owned_by(&key.namespace, deployment.uid());
    let running = if rolling::recreates(&deployment) { running(context, &own) } else { Vec::new() };
    let sets = own.into_iter().chain(cache.owned_by(&key.namespace, "")).collect();
    let plan = plan::plan(Snapshot {
        deployment: &deployment,
        selector: &selector,
        sets,
        running,
        now: Timestamp::now(),
    });
    let again = plan.again;
    apply(context, &deployment, plan).await?;
    Ok(again.map_or(Next::Wait, Next::After))
}

fn running(context: &Context, sets: &[Arc<ReplicaSet>]) -> Vec<String> {
    let has_pods = |set: &&Arc<ReplicaSet>| {
        let pods = context.caches.pods.owned_by(set.namespace(), set.uid());
        pods.iter().any(|pod| !pod.finished())
    };
    sets.iter().filter(has_pods).map(|set| set.uid().to_owned()).collect()
}

async fn apply(context: &Context, deployment: &Deployment, mut plan: Plan) -> Result<(), Error> {
    for set in &plan.release {
        let owners = set.metadata.owner_references.iter().flatten();
        let owners: Vec<_> = owners.filter(|owner| owner.uid != deployment.uid()).cloned().collect();
        context.replica_sets().merge(&set.key(), Part::Main, owners_patch(&**set, &owners)).await?;
    }
    adopt(context, deployment, &plan.adopt).await?;
    if let Some(new) = plan.create.take() {
        create(context, deployment, new, &mut plan.status).await?;
    }
    for change in &plan.update {
        update(context, deployment, change).await?;
    }
    for set in &plan.delete {
        let deleted = context.replica_sets().delete(set, DeleteParams::background()).await;
        deleted.map_err(|source| Error::Request {
            verb: "delete",
            object: format!("ReplicaSet {}", set.key()),
            source,
        })?;
    }
    match (plan.status, plan.revision) {
        (None, None) => Ok(()),
        (status, revision) => write_status(context, deployment, status.as_ref(), revision).await,
    }
}

async fn adopt(context: &Context, deployment: &Deployment, sets: &[Arc<ReplicaSet>]) -> Result<(), Error> {
    if sets.is_empty() {
        return Ok(());
    }
    // The deployment may have been deleted with the option to orphan its sets, and the cache may not have the deletion
    // yet. So the deployment is first read from the API server.
    let live = context.deployments().live(&deployment.key()).await?;
    if !live.is_some_and(|live| live.uid() == deployment.uid() && !live.is_being_deleted()) {
        return Ok(());
    }
    for set in sets {
        let mut owners = set.metadata.owner_references.clone().unwrap_or_default();
        owners.push(deployment.controller_reference());
        context.replica_sets().merge(&set.key(), Part::Main, owners_patch(&**set, &owners)).await?;
    }
    Ok(())
}

/// The name of a deployment's replica set with this hash. Source: `generateReplicaSetName`.
fn set_name(deployment: &Deployment, hash: &str) -> String {
    name_with_hash(deployment.name(), MAX_NAME.saturating_sub(hash.len() + 1), hash)
}

/// The new replica set for the deployment's template.
fn new_set(deployment: &Deployment, new: &NewSet) -> Value {
    let mut template = deployment.spec.template.value();
    let labels = template.pointer("/metadata/labels").filter(|labels| labels.is_object());
    let mut labels = labels.cloned().unwrap_or_else(|| json!({}));
    labels[HASH_LABEL] = new.hash.clone().into();
    if !template["metadata"].is_object() {
        template["metadata"] = Value::Object(Map::new());
    }
    template["metadata"]["labels"] = labels.clone();
    let mut selector = json!(deployment.spec.selector);
    if !selector["matchLabels"].is_object() {
        selector["matchLabels"] = Value::Object(Map::new());
    }
    selector["matchLabels"][HASH_LABEL] = new.hash.clone().into();
    json!({
        "metadata": {
            "name": set_name(deployment, &new.hash),
            "labels": labels,
            "annotations": new.annotations,
            "ownerReferences": [deployment.controller_reference()],
        },
        "spec": {
            "replicas": new.replicas,
            "minReadySeconds": deployment.spec.min_ready_seconds.unwrap_or_default(),
            "selector": selector,
            "template": template,
        },
    })
}

async fn create(
    context: &Context,
    deployment: &Deployment,
    new: NewSet,
    status: &mut Option<DeploymentStatus>,
) -> Result<(), Error> {
    let name = set_name(deployment, &new.hash);
    let created = context.replica_sets().create(deployment.namespace(), new_set(deployment, &new)).await;
    let source = match created {
        Ok(_) => {
            if new.replicas > 0 {
                let message = format!("Scaled up replica set {name} from 0 to {}", new.replicas);
                context.record(deployment, CONTROLLER, Event::normal("ScalingReplicaSet", message));
            }
            let message = format!("Created new replica set \"{name}\"");
            note_progress(deployment, status, "True", "NewReplicaSetCreated", message);
            return Ok(());
        }
        Err(error) if is_namespace_terminating(&error) => return Ok(()),
        Err(error) => error,
    };
    let error = |source| Error::Request { verb: "create", object: format!("ReplicaSet {name}"), source };
    if is_already_exists(&source) {
        return collision(context, deployment, &name).await.and(Err(error(source)));
    }
    let message = format!("Failed to create new replica set \"{name}\": {source}");
    context.record(deployment, CONTROLLER, Event::warning("ReplicaSetCreateError", message.clone()));
    note_progress(deployment, status, "False", "ReplicaSetCreateError", message);
    if let Some(status) = status {
        write_status(context, deployment, Some(status), None).await?;
    }
    Err(error(source))
}

/// Resolves a name collision. If the existing set has another template, the hashes collide: a higher collision count
/// changes the next name. If the existing set has the same template, it is the desired set, and is added to the cache.
async fn collision(context: &Context, deployment: &Deployment, name: &str) -> Result<(), Error> {
    let key = Key::new(deployment.namespace(), name);
    let Some(taken) = context.replica_sets().live(&key).await? else { return Ok(()) };
    let ours = controller_of(&taken.metadata).is_some_and(|owner| owner.uid == deployment.uid());
    if ours && taken.spec.template.equals_ignoring_hash(&deployment.spec.template) {
        context.caches.replica_sets.written(taken);
        return Ok(());
    }
    let count = deployment.status.collision_count.unwrap_or_default() + 1;
    let patch = json!({"metadata": {"uid": deployment.uid()}, "status": {"collisionCount": count}});
    context.deployments().merge(&deployment.key(), Part::Status, patch).await.map(drop)
}

fn note_progress(
    deployment: &Deployment,
    status: &mut Option<DeploymentStatus>,
    value: &str,
    reason: &str,
    message: String,
) {
    if super::status::deadline(deployment).is_none() {
        return;
    }
    let status = status.get_or_insert_with(|| deployment.status.clone());
    let mut conditions = Conditions(status.conditions.take().unwrap_or_default());
    conditions.set(condition(PROGRESSING, value, reason, message, Timestamp::now()));
    status.conditions = Some(conditions.0);
}

async fn update(context: &Context, deployment: &Deployment, change: &Update) -> Result<(), Error> {
    let mut spec = Map::new();
    if let Some(replicas) = change.replicas {
        spec.insert("replicas".to_owned(), replicas.into());
    }
    if let Some(seconds) = change.min_ready_seconds {
        spec.insert("minReadySeconds".to_owned(), seconds.into());
    }
    let patch = json!({
        "metadata": {"uid": change.set.uid(), "annotations": change.annotations},
        "spec": spec,
    });
    context.replica_sets().merge(&change.set.key(), Part::Main, patch).await?;
    if let Some(to) = change.replicas {
        let from = rolling::size(&change.set);
        let way = if to > from { "up" } else { "down" };
        let message = format!("Scaled {way} replica set {} from {from} to {to}", change.set.name());
        context.record(deployment, CONTROLLER, Event::normal("ScalingReplicaSet", message));
    }
    Ok(())
}

/// Writes the status and the revision. The revision is an annotation. As upstream, it is written with the status, so
/// that the generation does not change.
async fn write_status(
    context: &Context,
    deployment: &Deployment,
    status: Option<&DeploymentStatus>,
    revision: Option<String>,
) -> Result<(), Error> {
    let patch = status_patch(deployment, status, revision);
    context.deployments().merge(&deployment.key(), Part::Status, patch).await.map(drop)
}

fn status_patch(
    deployment: &Deployment,
    status: Option<&DeploymentStatus>,
    revision: Option<String>,
) -> Value {
    // The patch has no resourceVersion: no other client writes the status, and `observedGeneration` has the generation
    // that the status describes.
    let mut patch = json!({"metadata": {"uid": deployment.uid()}});
    if let Some(revision) = revision {
        patch["metadata"]["annotations"] = json!({super::revision::REVISION: revision});
    }
    let Some(status) = status else { return patch };
    let mut status = json!(status);
    // A merge patch removes a field only if it sets the field to null.
    for field in [
        "replicas",
        "updatedReplicas",
        "readyReplicas",
        "availableReplicas",
        "unavailableReplicas",
        "terminatingReplicas",
    ] {
        if status.get(field).is_none() {
            status[field] = Value::Null;
        }
    }
    patch["status"] = status;
    patch
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_api::TestApi;

    fn deployment() -> Value {
        let template =
            json!({"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"image": "i:1"}]}});
        json!({"metadata": {"name": "web", "namespace": "n", "uid": "w", "resourceVersion": "7"},
            "spec": {"selector": {"matchLabels": {"app": "web"}}, "template": template},
            "status": {"collisionCount": 2}})
    }

    #[tokio::test]
    async fn a_name_that_another_template_has_increases_the_collision_count() {
        let set = |owner: &str, image: &str| {
            let owners = json!([{"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": owner,
                "controller": true}]);
            let labels = json!({"app": "web", "pod-template-hash": "1"});
            json!({"metadata": {"name": "web-1", "namespace": "n", "uid": "s", "resourceVersion": "8",
                    "ownerReferences": owners},
                "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels},
                    "spec": {"containers": [{"image": image}]}}}})
        };
        for (owner, image, collides) in [("w", "i:1", false), ("w", "i:2", true), ("another", "i:1", true)] {
            let api = TestApi::new(&[
                ("/apis/apps/v1/namespaces/n/replicasets/web-1", set(owner, image)),
                ("/apis/apps/v1/namespaces/n/deployments/web", deployment()),
            ]);
            let deployment: Deployment = serde_json::from_value(deployment()).unwrap();
            collision(&api.context, &deployment, "web-1").await.unwrap();
            let writes = api.writes();
            let counts = writes.iter().map(|write| write.body["status"]["collisionCount"].as_i64());
            let expected = if collides { vec![Some(3)] } else { Vec::new() };
            assert_eq!(counts.collect::<Vec<_>>(), expected, "{owner} {image}");
            let is_known = api.context.caches.replica_sets.get(&Key::new("n", "web-1")).is_some();
            assert_eq!(is_known, !collides, "{owner} {image}");
        }
    }

    #[test]
    fn the_name_of_a_replica_set_has_at_most_253_characters() {
        for (length, kept) in [(13, 13), (242, 242), (243, 242), (253, 242)] {
            let mut deployment = Deployment::default();
            deployment.metadata.name = Some("a".repeat(length));
            let expected = format!("{}-6bb58d578b", "a".repeat(kept));
            assert_eq!(set_name(&deployment, "6bb58d578b"), expected);
            let annotations = std::collections::BTreeMap::new();
            let new = NewSet { hash: "6bb58d578b".to_owned(), replicas: 1, annotations };
            assert_eq!(new_set(&deployment, &new)["metadata"]["name"], expected);
        }
    }

    #[test]
    fn status_and_revision_are_one_patch() {
        let mut deployment = Deployment::default();
        deployment.metadata.uid = Some("u".to_owned());
        let status = DeploymentStatus { replicas: Some(2), ..DeploymentStatus::default() };
        let patch = status_patch(&deployment, Some(&status), Some("3".to_owned()));
        let metadata = json!({"uid": "u", "annotations": {"deployment.kubernetes.io/revision": "3"}});
        assert_eq!(patch["metadata"], metadata);
        assert_eq!(
            (&patch["status"]["replicas"], &patch["status"]["terminatingReplicas"]),
            (&json!(2), &Value::Null)
        );
        assert_eq!(status_patch(&deployment, None, None), json!({"metadata": {"uid": "u"}}));
    }
}

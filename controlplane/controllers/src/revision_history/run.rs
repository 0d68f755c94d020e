//! Creates, adopts and deletes revisions.

use std::sync::Arc;

use coracle_values::label_selector::LabelSelector;
use kube::Resource;
use kube::api::DeleteParams;
use kube::core::NamespaceResourceScope;
use serde_json::json;

use super::{Step, Workload, new_revision, plan, template_of};
use crate::context::Context;
use crate::error::{Error, is_already_exists};
use crate::object::{ControllerRevision, Key, Object, ObjectExt};
use crate::pod_control::PodControl;
use crate::write::{Part, owners_patch};

/// The revision of the current template, all revisions, and the collision count.
#[derive(Debug)]
pub(crate) struct Current {
    pub(crate) revision: Arc<ControllerRevision>,
    pub(crate) all: Vec<Arc<ControllerRevision>>,
    pub(crate) collisions: i32,
}

/// Maximum number of names to try for one revision.
const ATTEMPTS: i32 = 8;

/// Finds or creates the revision of the current template. Adopts orphaned revisions that match the selector.
pub(crate) async fn current<K: Object + Resource<Scope = NamespaceResourceScope>>(
    control: &PodControl<'_, K>,
    workload: &Workload<'_>,
    selector: &LabelSelector,
) -> Result<Current, Error> {
    let context = control.context;
    let writer = context.writer(&context.caches.revisions);
    let mut orphans = context.caches.revisions.owned_by(workload.namespace, "");
    orphans.retain(|orphan| selector.matches(orphan.metadata.labels.as_ref()) && !orphan.is_being_deleted());
    if !orphans.is_empty() && control.may_adopt().await? {
        for orphan in orphans {
            let mut owners = orphan.metadata.owner_references.clone().unwrap_or_default();
            owners.push(workload.owner.clone());
            writer.merge(&orphan.key(), Part::Main, owners_patch(&*orphan, &owners)).await?;
        }
    }
    let all = context.caches.revisions.owned_by(workload.namespace, workload.uid);
    let (revision, collisions) = match plan(workload, &all) {
        Step::Keep(found) => (found, workload.collisions),
        Step::Renumber(found, number) => {
            let patch = json!({"metadata": {"uid": found.uid()}, "revision": number});
            (writer.merge(&found.key(), Part::Main, patch).await?, workload.collisions)
        }
        Step::Create(number) => create(context, workload, number).await?,
    };
    let all = context.caches.revisions.owned_by(workload.namespace, workload.uid);
    Ok(Current { revision, all, collisions })
}

/// Creates a revision. If the name belongs to another template, the collision count is increased to change the name.
async fn create(
    context: &Context,
    workload: &Workload<'_>,
    number: i64,
) -> Result<(Arc<ControllerRevision>, i32), Error> {
    let writer = context.writer(&context.caches.revisions);
    let mut collisions = workload.collisions;
    loop {
        let revision = new_revision(workload, number, collisions);
        let name = revision["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let source = match writer.create(workload.namespace, revision).await {
            Ok(created) => return Ok((created, collisions)),
            Err(source) => source,
        };
        if is_already_exists(&source) && collisions - workload.collisions < ATTEMPTS {
            let found = writer.live(&Key::new(workload.namespace, &name)).await?;
            if let Some(found) = found {
                let ours =
                    found.metadata.owner_references.iter().flatten().any(|owner| owner.uid == workload.uid);
                if ours && template_of(&found).equals_ignoring_hash(workload.template) {
                    return Ok((context.caches.revisions.written(found), collisions));
                }
                collisions += 1;
            }
            continue;
        }
        return Err(Error::Request { verb: "create", object: format!("ControllerRevision {name}"), source });
    }
}

/// Deletes revisions.
pub(crate) async fn delete(context: &Context, revisions: &[Arc<ControllerRevision>]) -> Result<(), Error> {
    let writer = context.writer(&context.caches.revisions);
    for revision in revisions {
        let deleted = writer.delete(revision, DeleteParams::default()).await;
        let object = || format!("ControllerRevision {}", revision.key());
        deleted.map_err(|source| Error::Request { verb: "delete", object: object(), source })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::object::StatefulSet;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn a_workload_that_is_being_deleted_does_not_adopt_revisions() {
        let labels = json!({"app": "a"});
        let set = |deleted: Value| -> Value {
            let metadata = json!({"name": "s", "namespace": "n", "uid": "s", "resourceVersion": "7",
                "deletionTimestamp": deleted});
            json!({"metadata": metadata, "spec": {"selector": {"matchLabels": labels}}})
        };
        let orphan = json!({"metadata": {"name": "s-1", "namespace": "n", "uid": "r", "resourceVersion": "7",
            "labels": labels}, "data": {"spec": {"template": {}}}, "revision": 1});
        for (deleted, adopts) in [(json!(null), true), (json!("2026-01-01T00:00:00Z"), false)] {
            let path = "/apis/apps/v1/namespaces/n/controllerrevisions";
            let created = json!({"metadata": {"name": "s-2", "namespace": "n", "uid": "q"}});
            let api = TestApi::new(&[
                ("/apis/apps/v1/namespaces/n/statefulsets/s", set(deleted)),
                (path, created),
                (&format!("{path}/s-1"), orphan.clone()),
            ]);
            let owner: StatefulSet = serde_json::from_value(set(json!(null))).unwrap();
            api.context.caches.revisions.written(serde_json::from_value(orphan.clone()).unwrap());
            let cache = &api.context.caches.stateful_sets;
            let control = PodControl {
                context: &api.context,
                owner: &owner,
                cache,
                component: "test",
                finalizer: None,
            };
            let workload = Workload {
                namespace: "n",
                name: "s",
                uid: "s",
                owner: owner.controller_reference(),
                template: &owner.spec.template,
                annotations: None,
                hash_label: "hash",
                collisions: 0,
            };
            let selector = LabelSelector::try_from(&owner.spec.selector).unwrap();
            current(&control, &workload, &selector).await.unwrap();
            let adopted = api.writes().iter().any(|write| write.method == "PATCH");
            assert_eq!(adopted, adopts);
        }
    }
}

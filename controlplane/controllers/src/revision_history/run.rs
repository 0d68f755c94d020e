//! Writes revisions.

use std::sync::Arc;

use coracle_values::label_selector::LabelSelector;
use kube::api::DeleteParams;
use serde_json::json;

use super::{Step, Workload, new_revision, plan, template_of};
use crate::context::Context;
use crate::error::{Error, is_already_exists};
use crate::object::{ControllerRevision, Key, ObjectExt};
use crate::write::{Part, owners_patch};

/// The revision of the current template, all revisions, and the collision count.
#[derive(Debug)]
pub(crate) struct Current {
    pub(crate) revision: Arc<ControllerRevision>,
    pub(crate) all: Vec<Arc<ControllerRevision>>,
    pub(crate) collisions: i32,
}

/// Maximum number of names that are tried for one revision.
const ATTEMPTS: i32 = 8;

/// Finds or writes the revision of the current template. Adopts orphaned revisions that match the selector.
pub(crate) async fn current(
    context: &Context,
    workload: &Workload<'_>,
    selector: &LabelSelector,
) -> Result<Current, Error> {
    let writer = context.writer(&context.caches.revisions);
    for orphan in context.caches.revisions.owned_by(workload.namespace, "") {
        if selector.matches(orphan.metadata.labels.as_ref()) && !orphan.is_being_deleted() {
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

/// Creates a revision. If its name belongs to another template, the collision count changes the name.
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

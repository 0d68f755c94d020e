//! Executes migrations.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::stream::{self, TryStreamExt as _};
use jiff::Timestamp;
use kube::api::{ApiResource, ListParams, Patch, PatchParams};
use kube::core::{DynamicObject, GroupVersionKind};
use kube::{Api, Client};
use serde_json::json;

use super::definition;
use super::plan::{self, Outcome, RUNNING, SUCCEEDED, Step, Unfinished, Verdict};
use crate::api_kind::ApiKind;
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, Meta, ObjectExt, StorageVersionMigration};
use crate::queue::{Next, Queue};
use crate::write::Part;

/// Field manager of the writes, as upstream.
const MANAGER: &str = "storage-version-migrator-controller";
/// Maximum number of objects in a page of the list.
const PAGE: u32 = 500;
/// Number of concurrent writes. The store commits concurrent writes together.
const CONCURRENT_WRITES: usize = 8;

/// Queues changed migrations. When a migration ends, also queues the next migration of the same resource.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>, unfinished: &Arc<Mutex<Unfinished>>) {
    let (own, unfinished) = (queue.clone(), unfinished.clone());
    context.caches.migrations.on_change(move |change| {
        let Some(migration) = change.latest() else { return };
        let next = lock(&unfinished).follow(change.old.map(|old| &**old), change.new.map(|new| &**new));
        own.add(migration.key());
        for next in next {
            own.add(Key::new("", &next));
        }
    });
}

fn lock(unfinished: &Mutex<Unfinished>) -> MutexGuard<'_, Unfinished> {
    unfinished.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reconciles one migration.
pub(crate) async fn reconcile(
    context: &Context,
    unfinished: &Mutex<Unfinished>,
    key: Key,
) -> Result<Next, Error> {
    let cache = &context.caches.migrations;
    let Some(migration) = cache.get(&key) else { return Ok(Next::Wait) };
    match plan::step(&migration, || lock(unfinished).is_next(&migration)) {
        Step::Wait => Ok(Next::Wait),
        Step::Begin => {
            mark_definition(&context.client, &migration).await?;
            let (reason, message) = ("MigrationRunning", "The migration is running");
            let outcome = Outcome { type_: RUNNING, holds: true, reason, message };
            set(context, &migration, outcome).await
        }
        Step::Finish => {
            mark_definition(&context.client, &migration).await?;
            let (reason, message) = ("MigrationCompleted", "Migration completed");
            let outcome = Outcome { type_: RUNNING, holds: false, reason, message };
            set(context, &migration, outcome).await
        }
        step @ (Step::Record | Step::Migrate) => with_kind(context, &migration, step).await,
    }
}

/// Performs a step that needs the served kind.
async fn with_kind(
    context: &Context,
    migration: &Arc<StorageVersionMigration>,
    step: Step,
) -> Result<Next, Error> {
    let wanted = &migration.spec.resource;
    let found = context.kinds().await?;
    let is_wanted =
        |kind: &&ApiKind| kind.resource.group == wanted.group && kind.resource.plural == wanted.resource;
    let Some(kind) = found.kinds.iter().find(is_wanted) else {
        return match plan::remaining_wait(migration, Timestamp::now()) {
            Some(wait) => Ok(Next::After(wait)),
            None => set(context, migration, plan::failed("resource does not exist in discovery")).await,
        };
    };
    if !kind.can(&["update", "patch", "list"]) {
        let message = format!(
            "resource \"{}\" does not support discovery operations: [update patch list]",
            kind.name()
        );
        return set(context, migration, plan::failed(&message)).await;
    }
    if step == Step::Record {
        let version = kind.list_version(&context.client).await?;
        let patch = plan::status_patch(migration, &json!({"resourceVersion": version}));
        context.writer(&context.caches.migrations).merge(&migration.key(), Part::Status, patch).await?;
        return Ok(Next::Wait);
    }
    match migrate(&context.client, kind, &migration.status.resource_version).await {
        Ok(()) => {
            let reason = "StorageVersionMigrationSucceeded";
            let outcome = Outcome { type_: SUCCEEDED, holds: true, reason, message: "" };
            set(context, migration, outcome).await
        }
        Err(Stop::Retry(error)) => Err(error),
        Err(Stop::Fail(message)) => set(context, migration, plan::failed(&message)).await,
    }
}

/// The reason why a migration stops early.
enum Stop {
    Retry(Error),
    Fail(String),
}

/// Rewrites the objects that may be stored in an earlier form, page by page.
async fn migrate(client: &Client, kind: &ApiKind, recorded: &str) -> Result<(), Stop> {
    let mut params = ListParams::default().limit(PAGE);
    loop {
        let page = kind.page(client, "", &params).await.map_err(Stop::Retry)?;
        let mut objects = page.items;
        objects.retain(|object| plan::may_be_outdated(object.metadata.resource_version.as_deref(), recorded));
        stream::iter(objects.into_iter().map(Ok))
            .try_for_each_concurrent(CONCURRENT_WRITES, |object| rewrite(client, kind, object))
            .await?;
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(());
        }
    }
}

async fn rewrite(client: &Client, kind: &ApiKind, object: Meta) -> Result<(), Stop> {
    let Err(source) = kind.rewrite(client, &object, MANAGER).await else { return Ok(()) };
    let verdict = match &source {
        kube::Error::Api(status) => plan::verdict(status.code, &status.reason),
        kube::Error::BuildRequest(_) => Verdict::Fail,
        _ => Verdict::Retry,
    };
    match verdict {
        Verdict::Done => Ok(()),
        Verdict::Fail => Err(Stop::Fail(format!("migration encountered unhandled error: {source}"))),
        Verdict::Retry => {
            let object = format!("{} {}", kind.resource.kind, Key::of(&object.metadata));
            Err(Stop::Retry(Error::Request { verb: "apply", object, source }))
        }
    }
}

/// Sets one condition. The resulting change of the migration queues its next step.
async fn set(
    context: &Context,
    migration: &StorageVersionMigration,
    outcome: Outcome<'_>,
) -> Result<Next, Error> {
    let patch = plan::condition_patch(migration, outcome, Timestamp::now());
    context.writer(&context.caches.migrations).merge(&migration.key(), Part::Status, patch).await?;
    Ok(Next::Wait)
}

/// Records the start or the end of a migration in the status of the resource's definition. Built-in resources have no
/// definition.
async fn mark_definition(client: &Client, migration: &StorageVersionMigration) -> Result<(), Error> {
    let resource = &migration.spec.resource;
    if resource.group.is_empty() {
        return Ok(());
    }
    let name = format!("{}.{}", resource.resource, resource.group);
    let failed = |verb: &'static str| {
        let object = format!("CustomResourceDefinition {name}");
        move |source| Error::Request { verb, object, source }
    };
    let kind = GroupVersionKind::gvk("apiextensions.k8s.io", "v1", "CustomResourceDefinition");
    let kind = ApiResource::from_gvk_with_plural(&kind, "customresourcedefinitions");
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
    let Some(found) = api.get_opt(&name).await.map_err(failed("get"))? else { return Ok(()) };
    let (found, now) = (json!(found), Timestamp::now());
    let configuration = if migration.is(RUNNING) {
        definition::finish(&found, migration.is(SUCCEEDED), now)
    } else {
        definition::begin(&found, migration.name(), now)
    };
    let params = PatchParams::apply("migration-runner-controller").force();
    let applied = api.patch_status(&name, &params, &Patch::Apply(configuration)).await;
    applied.map(drop).map_err(failed("apply"))
}

//! The write pipeline below the verbs.
//!
//! | stage | code |
//! |---|---|
//! | decode | `body`: bytes to a tree of the requested version |
//! | convert | `convert`: the stored object to the requested version |
//! | default | `Strategy::default`, before and after admission |
//! | field manager | `field_manager`: which manager owns which field |
//! | mutate | `admit`: mutating admission |
//! | prepare | `coracle_kinds::strategy`: status, generation, fields that only the server sets |
//! | allocate | `allocate`: addresses and ports of services |
//! | validate | permissions (`Admit::precedes_validation`), then `coracle_kinds::validate` |
//! | admit | `admit`: validating admission, with the object that is going to be stored |
//! | quota | `quota`: charges the quotas of the namespace; the charge is held until the commit |
//! | limit | `namespace_limit`: reserves the growth of the object; it is held until the commit |
//! | commit | [`commit`]: the stored version; returns after the watch cache has the commit |
//! | initialize | `initialization`: a create waits for the initializers of its object, if there are any |

mod change;
mod encoded;
mod identity;
pub(crate) mod initialization;
mod limits;
mod namespace_limit;
mod owner_references;
mod preparation;

use std::sync::Arc;

use coracle_kinds::{Resource, initializers, strategy, validate};
use coracle_store::{Expect, Guard};
use futures::future::BoxFuture;
use serde_json::Value;

use self::change::{Changed, changed};
use self::encoded::commit_encoded;
use self::identity::{Identity, fingerprint, keep_identity};
use self::preparation::{put_managed_fields, set_defaults};
pub(crate) use self::{change::Target, encoded::update_encoded, identity::check_uid};
use crate::{
    admit::{Attributes, Operation},
    allocate::{Allocating, is_allocated},
    cache::{ByteLimits, Object, encode, key_of},
    call::Call,
    convert,
    error::{ApiError, Result},
    field_manager::{self, Writer},
    object_meta::generated,
    offload, quota,
    quota_locks::QuotaLock,
    state::State,
};
pub(crate) use crate::{
    object_meta::{metadata_mut, now, text},
    part::Part,
    stored::Stored,
};

/// Maximum attempts of a write. A conflict with another write causes the next attempt.
const MAX_ATTEMPTS: usize = 16;
/// Attempts to find a free name for generateName.
const NAMES: usize = 8;

/// Creates an object. With `generateName`, the full name is generated between mutating and validating admission.
/// Earlier errors contain the prefix as the name. The future is boxed, because the futures of verbs and controllers
/// would otherwise contain it.
pub(crate) fn create(call: &Call, object: Value, writer: Writer) -> BoxFuture<'_, Result<Stored>> {
    Box::pin(create_object(call, object, writer))
}

async fn create_object(call: &Call, mut object: Value, writer: Writer) -> Result<Stored> {
    let kind = &*call.kind;
    call.dry_run()?;
    let applied = (writer == Writer::Apply).then(|| object["metadata"]["managedFields"].take());
    stamp_new(&mut object, writer);
    owner_references::deduplicate_sent(call, &mut object);
    drop_scheduling_group(call, &mut object, None);
    set_defaults(kind, &mut object).await?;
    match applied {
        Some(managed_fields) => object["metadata"]["managedFields"] = managed_fields,
        None => offload::run(call.has_large_body(), || field_manager::record_create(call, &mut object)),
    }
    let is_named = !text(&object, "name").is_empty();
    let base = text(&object, if is_named { "name" } else { "generateName" }).to_owned();
    let attributes = Attributes { is_prefix: !is_named, ..call.attributes(Operation::Create, &base, None) };
    check_definition(call, &base)?;
    let identity = Identity::of(&object);
    call.state.admission.mutate(&attributes, &mut object).await?;
    identity.check(kind, &object)?;
    owner_references::deduplicate_admitted(call, &mut object);
    let waiting = initialization::enter(call, &object)?;
    drop_scheduling_group(call, &mut object, None);
    strategy::prepare_for_create(kind, &mut object);
    set_defaults(kind, &mut object).await?;
    let generate = (!is_named && !base.is_empty()).then_some(base.as_str());
    let requested = is_allocated(kind).then(|| object.clone());
    for _ in 0..MAX_ATTEMPTS {
        let allocating = call.state.allocator.for_create(kind, &mut object).await?;
        call.state.admission.validate_before(&attributes, &object).await?;
        match commit_named(call, &mut object, generate, &allocating).await {
            Err(Failed::Allocated) => {
                if let Some(requested) = &requested {
                    object.clone_from(requested);
                }
            }
            Err(Failed::Conflict) => return Err(ApiError::internal("cannot find a free name")),
            Err(Failed::Other(error)) => return Err(error),
            Ok(stored) => return initialization::finish(call, stored, waiting).await,
        }
    }
    Err(ApiError::modified(kind, &base))
}

/// Commits a new object under its name, or under the first free name that begins with `generate`.
async fn commit_named(
    call: &Call,
    object: &mut Value,
    generate: Option<&str>,
    allocating: &Allocating,
) -> std::result::Result<Stored, Failed> {
    let Some(base) = generate else {
        strategy::prepare_named(&call.kind, object);
        return commit_new(call, object, allocating).await;
    };
    let mut outcome = Err(Failed::Conflict);
    for _ in 0..NAMES {
        if let Some(metadata) = metadata_mut(object) {
            metadata.insert("name".to_owned(), generated(base).into());
        }
        strategy::prepare_named(&call.kind, object);
        outcome = commit_new(call, object, allocating).await;
        if !matches!(&outcome, Err(Failed::Other(error)) if error.reason == "AlreadyExists") {
            break;
        }
    }
    outcome
}

/// Validates an object, runs validating admission and commits the object. Source: `Store.Create` of the generic
/// registry, where the strategy validates first, and `AdmissionToValidateObjectFunc`, which sets the generated name.
async fn commit_new(
    call: &Call,
    object: &Value,
    allocating: &Allocating,
) -> std::result::Result<Stored, Failed> {
    let (kind, name) = (&call.kind, text(object, "name"));
    let attributes = call.attributes(Operation::Create, name, None);
    let other = |error| Err(Failed::Other(error));
    let is_long = kind.strategy().has_long_validation(object, None);
    let check = || offload::run(call.has_large_body(), || validate::create(kind, object));
    let causes = offload::run_long(is_long, check).await.map_err(Failed::Other)?;
    if !causes.is_empty() {
        return other(ApiError::invalid(kind, name, &causes));
    }
    offload::run(call.has_large_body(), || call.warn_about(object, None));
    call.state.admission.validate_after(&attributes, object).await.map_err(Failed::Other)?;
    if !text(object, "resourceVersion").is_empty() {
        return other(ApiError::bad_request("resourceVersion should not be set on objects to be created"));
    }
    let charged = quota::charge(call, name, object, None).await.map_err(Failed::Other)?;
    check_definition(call, name).map_err(Failed::Other)?;
    let namespace = if kind.namespaced { text(object, "namespace") } else { "" };
    if call.dry_run().map_err(Failed::Other)? {
        // The name is also taken if the object with this name cannot be decrypted.
        if !matches!(call.state.cache.find(kind, namespace, name), Ok(None)) {
            return other(taken(kind, object));
        }
        return Ok(Stored::DryRun(object.clone()));
    }
    let reserved = Reservations { allocating: allocating.clone(), charged };
    match commit_held(call, reserved, &key_of(kind, namespace, name), Expect::Absent, Some(object)).await {
        Ok(Some(object)) => Ok(Stored::Committed(object)),
        Ok(None) => other(ApiError::internal("the commit returned no object")),
        Err(Failed::Conflict) => other(taken(kind, object)),
        Err(failed) => Err(failed),
    }
}

/// Refuses a new object of a custom resource if the definition is being deleted or does not exist any more. Unlike
/// upstream, the check is repeated before the commit: a slow body or webhook may delay the request until the other
/// objects are deleted. The new object would then stay in the store, and a later definition with the same name would
/// serve it.
fn check_definition(call: &Call, name: &str) -> Result<()> {
    let kind = &call.kind;
    let registry = call.state.registry.load();
    let current = registry.find_stored(&kind.group, &kind.plural);
    if kind.is_built_in() || current.is_some_and(|current| !current.is_terminating) {
        return Ok(());
    }
    let why = "create not allowed while custom resource definition is terminating";
    Err(ApiError::forbidden_object(kind, name, why))
}

/// The error of a new object whose name another object already has.
fn taken(kind: &Resource, object: &Value) -> ApiError {
    let name = text(object, "name");
    match text(object, "generateName") {
        "" => ApiError::already_exists(kind, name),
        _ => ApiError::no_unique_name(kind, name),
    }
}

/// Sets uid and creation time. Removes the other fields that the server sets, except resourceVersion, which a later
/// check refuses.
fn stamp_new(object: &mut Value, writer: Writer) {
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    for field in ["selfLink", "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields"] {
        metadata.remove(field);
    }
    if writer == Writer::Apply || metadata.get("resourceVersion").is_some_and(|revision| revision == "") {
        metadata.remove("resourceVersion");
    }
    metadata.insert("uid".to_owned(), uuid::Uuid::new_v4().to_string().into());
    metadata.insert("creationTimestamp".to_owned(), now().into());
}

/// Changes an object. `change` makes the new state from the current state; it is called again after a conflict with
/// another write.
pub(crate) fn update(
    call: &Call,
    name: &str,
    part: Part,
    writer: Writer,
    change: impl FnMut(&Value) -> Result<Value> + Send,
) -> impl Future<Output = Result<Stored>> {
    update_target(call, Target { name, revision: "" }, part, writer, change)
}

/// Changes an object like [`update`]. The client may require a revision. Upstream retries until the request times out.
/// Here, each retry waits for its turn among the retries of its owner, so few retries are enough. A retry that must
/// fail does not wait.
pub(crate) async fn update_target(
    call: &Call,
    target: Target<'_>,
    part: Part,
    writer: Writer,
    mut change: impl FnMut(&Value) -> Result<Value> + Send,
) -> Result<Stored> {
    let name = target.name;
    let (kind, is_dry_run) = (&*call.kind, call.dry_run()?);
    let mut turn = None;
    for attempt in 0..MAX_ATTEMPTS {
        if attempt > 0 && turn.is_none() {
            target.check_retry(call)?;
            turn = call.state.write_turns.enter(&key_of(kind, call.namespace(), name)).await;
        }
        let Changed { current, old, has_unknown, new, is_large } = changed(call, name, &mut change).await?;
        let old_object = OldObject { value: &old, is_large };
        let (new, reserved) = prepared(call, part, writer, old_object, new).await?;
        // An object that is stored in another API version, with unknown fields, or encrypted with an earlier key, is
        // written again, even if nothing changes.
        let is_current = !has_unknown && current.api_version() == kind.stored_as().api_version();
        if is_current && strategy::is_noop(&new, &old) && is_encrypted_as_now(call, &current.key).await? {
            return Ok(Stored::Committed(convert::object(kind, current).await?));
        }
        if is_dry_run {
            return Ok(Stored::DryRun(new));
        }
        let expect = Expect::Revision(current.revision);
        let finished = is_finished(&new);
        let value = (!finished).then_some(&new);
        let committed = match value {
            Some(new) if initialization::rejects(call, new) => {
                initialization::reject(call, reserved, &current, new).await
            }
            _ => commit_held(call, reserved, &current.key, expect, value).await,
        };
        match committed {
            Ok(Some(object)) => return Ok(Stored::Committed(object)),
            Ok(None) => return Ok(Stored::DryRun(new)),
            Err(Failed::Conflict | Failed::Allocated) => {}
            Err(Failed::Other(error)) => return Err(error),
        }
    }
    Err(ApiError::modified(kind, name))
}

async fn is_encrypted_as_now(call: &Call, key: &str) -> Result<bool> {
    call.state.store.is_current(key).await.map_err(ApiError::internal)
}

/// Removes `schedulingGroup` of a pod, with a warning, if the server does not serve PodGroups.
fn drop_scheduling_group(call: &Call, object: &mut Value, old: Option<&Value>) {
    if call.state.registry.load().serves_pod_groups() {
        return;
    }
    if strategy::drop_scheduling_group(&call.kind.group, &call.kind.plural, object, old) {
        let text = "schedulingGroup: dropped, because the server does not serve scheduling.k8s.io/v1alpha2";
        call.warnings.add(text.to_owned());
    }
}

/// The current state of an object that is updated.
#[derive(Clone, Copy)]
struct OldObject<'a> {
    value: &'a Value,
    /// Whether the object or the request's body is large.
    is_large: bool,
}

/// Strategy, admission and validation of an update. Large objects are processed off the async workers. Allocated
/// addresses and ports are held until the commit.
async fn prepared(
    call: &Call,
    part: Part,
    writer: Writer,
    old: OldObject<'_>,
    mut new: Value,
) -> Result<(Value, Reservations)> {
    let OldObject { value: old, is_large } = old;
    let kind = &*call.kind;
    let name = text(old, "name").to_owned();
    let requested = metadata_mut(&mut new).and_then(|metadata| metadata.remove("managedFields"));
    keep_identity(kind, &name, old, &mut new)?;
    owner_references::deduplicate_sent(call, &mut new);
    if part != Part::Main {
        // Permission to update a subresource does not include permission to change the initializers.
        initializers::set(&mut new, old["metadata"].get("initializers").cloned());
    }
    if part == Part::Internal {
        return Ok((new, Reservations::default()));
    }
    if writer == Writer::Apply {
        put_managed_fields(&mut new, requested.clone());
    }
    drop_scheduling_group(call, &mut new, Some(old));
    preparation::prepare(kind, part, old, &mut new).await?;
    if writer == Writer::Update {
        offload::run(is_large, || field_manager::record_update(call, old, &mut new, requested.as_ref()));
    }
    let attributes = call.attributes(Operation::Update, &name, Some(old));
    let (before, identity) = (fingerprint(&new), Identity::of(&new));
    call.state.admission.mutate(&attributes, &mut new).await?;
    identity.check(kind, &new)?;
    owner_references::deduplicate_admitted(call, &mut new);
    if fingerprint(&new) != before {
        drop_scheduling_group(call, &mut new, Some(old));
        preparation::repeat(kind, part, old, &mut new).await?;
    }
    let allocating = match part {
        Part::Main => call.state.allocator.for_update(kind, &mut new, old).await?,
        _ => None,
    };
    call.state.admission.validate_before(&attributes, &new).await?;
    let is_long = kind.strategy().has_long_validation(&new, Some(old));
    let check = || offload::run(is_large, || causes_of_update(kind, part, &new, old));
    let causes = offload::run_long(is_long, check).await?;
    if !causes.is_empty() {
        return Err(ApiError::invalid(kind, &name, &causes));
    }
    if part == Part::Main {
        offload::run(is_large, || call.warn_about(&new, Some(old)));
    }
    call.state.admission.validate_after(&attributes, &new).await?;
    let charged = match part {
        Part::Main | Part::Status | Part::Resize => {
            quota::charge(call, &name, &new, Some(quota::Update { old, part })).await?
        }
        _ => None,
    };
    Ok((new, Reservations { allocating, charged }))
}

/// The violations of an update of a part of an object.
fn causes_of_update(kind: &Resource, part: Part, new: &Value, old: &Value) -> Vec<validate::Cause> {
    match part {
        Part::Status if kind.is("", "Pod") && initializers::is_pending(old) => {
            validate::uninitialized_status()
        }
        Part::Status => validate::ratcheted(kind, new, old, validate::status_update),
        Part::EphemeralContainers => validate::ephemeral_containers(new, old),
        Part::Resize => validate::resize(new, old),
        Part::Main | Part::Internal | Part::Approval => validate::ratcheted(kind, new, old, validate::update),
    }
}

/// Whether the object can be removed: it is being deleted, its grace period is 0, and it has no finalizers. A Namespace
/// also must have no finalizers in its spec.
pub(crate) fn is_finished(object: &Value) -> bool {
    let metadata = &object["metadata"];
    let empty = |list: &Value| list.as_array().is_none_or(Vec::is_empty);
    let holds_namespace = object["kind"] == "Namespace" && !empty(&object["spec"]["finalizers"]);
    !metadata["deletionTimestamp"].is_null()
        && metadata["deletionGracePeriodSeconds"].as_i64().unwrap_or(0) == 0
        && empty(&metadata["finalizers"])
        && !holds_namespace
}

/// The reason why a commit failed.
pub(crate) enum Failed {
    /// Another write changed the entry first. The cache contains that write.
    Conflict,
    /// Another server allocated addresses or ports, or used quotas of the namespace meanwhile. The cache contains these
    /// writes.
    Allocated,
    Other(ApiError),
}

/// Reservations of a write until its commit: addresses, ports and charged quotas.
#[derive(Default)]
struct Reservations {
    allocating: Allocating,
    charged: QuotaLock,
}

impl Reservations {
    /// The guard of the commit. Services have the guard of their addresses, which also protects their quotas.
    fn guard(&self) -> Option<Guard> {
        let allocating = self.allocating.as_ref().map(|permit| permit.guard());
        allocating.or_else(|| self.charged.as_ref()?.guard.clone())
    }
}

/// Commits a write, then releases its reservations.
async fn commit_held(
    call: &Call,
    reserved: Reservations,
    key: &str,
    expect: Expect,
    object: Option<&Value>,
) -> std::result::Result<Option<Arc<Object>>, Failed> {
    let byte_limits = namespace_limit::limits(call, expect);
    let expect = Expected { entry: expect, guard: reserved.guard(), byte_limits };
    if reserved.allocating.is_none() && reserved.charged.is_none() {
        return commit(&call.state, &call.kind, key, expect, object).await;
    }
    let (state, kind, key, object) = (call.state.clone(), call.kind.clone(), key.to_owned(), object.cloned());
    // If the caller disconnects, its future is dropped, and this task continues: the reservations are held until the
    // store has finished the write.
    let task = tokio::spawn(async move {
        let committed = commit(&state, &kind, &key, expect, object.as_ref()).await;
        drop(reserved);
        committed
    });
    task.await.unwrap_or_else(|error| Err(Failed::Other(ApiError::internal(error))))
}

/// The object in its stored version, encoded.
async fn stored_encoding(kind: &Resource, object: &Value) -> Result<bytes::Bytes> {
    if kind.is_storage_version() {
        return Ok(encode(kind, object));
    }
    let stored = convert::between(kind, kind.stored_as(), object.clone()).await?;
    Ok(encode(kind.stored_as(), &stored))
}

/// The conditions of a commit.
pub(crate) struct Expected {
    entry: Expect,
    guard: Option<Guard>,
    /// Maximum bytes of all objects in namespaces, if the object grows. `None`: no limit.
    byte_limits: Option<ByteLimits>,
}

impl From<Expect> for Expected {
    fn from(entry: Expect) -> Self {
        Self { entry, guard: None, byte_limits: None }
    }
}

/// Commits an object and waits until the cache has the commit. If `object` is `None`, it deletes the entry and returns
/// `None`.
pub(crate) async fn commit(
    state: &State,
    kind: &Resource,
    key: &str,
    expect: impl Into<Expected>,
    object: Option<&Value>,
) -> std::result::Result<Option<Arc<Object>>, Failed> {
    let (key, expected): (Arc<str>, Expected) = (key.into(), expect.into());
    let value = match object {
        Some(object) => Some(stored_encoding(kind, object).await.map_err(Failed::Other)?),
        None => None,
    };
    let revision = commit_encoded(state, kind, &key, expected, value.clone()).await?;
    if !kind.is_storage_version() {
        return Ok(object.map(|object| Arc::new(Object::of(kind, key, revision, object))));
    }
    Ok(value.map(|bytes| {
        // Shares the object of the cache, unless a later write has replaced that object.
        let cached = state.cache.of(kind).ok().and_then(|objects| objects.lock().get(&key));
        cached
            .filter(|cached| cached.revision == revision)
            .unwrap_or_else(|| Arc::new(Object::from_stored(key, revision, bytes)))
    }))
}

/// Checks the resourceVersion of the client against the object. An empty resource version and "0" match every object.
pub(crate) fn check_revision(kind: &Resource, old: &Value, given: &Value) -> Result<()> {
    let given = given.as_str().unwrap_or_default();
    if given.is_empty() || given == "0" || given == text(old, "resourceVersion") {
        return Ok(());
    }
    Err(ApiError::modified(kind, text(old, "name")))
}

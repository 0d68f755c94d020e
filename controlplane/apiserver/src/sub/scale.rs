//! The subresource `scale`: reads and sets the replicas of a workload of any kind as a Scale object.

use coracle_kinds::{
    Resource, scale,
    schema::{FieldValidation, Parsed},
    table,
};
use serde_json::{Value, json};

use super::{body_of, parent};
use crate::{
    body::{self, Expected},
    call::Call,
    error::{ApiError, Result},
    field_manager::{self, Writer},
    media::{self, BodyType, Form},
    offload,
    reply::{self, Reply},
    verb::{apply, create, patch, update},
    write::{self, Part, Target, check_revision, text},
};

const SCHEMA: &str = "io.k8s.api.autoscaling.v1.Scale";
const API_VERSION: &str = "autoscaling/v1";
const KIND: &str = "Scale";

pub(crate) async fn get(call: &Call) -> Result<Reply> {
    let form = call.form()?;
    let scale = scale::read(&call.kind, &parent(call).await?);
    Ok(match form {
        Form::Table(content) => reply::json(200, &table::scale(&scale, reply::options(content))),
        Form::Partial(version) | Form::PartialProtobuf(version) => {
            reply::json(200, &table::partial_metadata(&scale, version))
        }
        Form::Plain | Form::Protobuf | Form::Discovery => reply::json(200, &scale),
    })
}

pub(crate) async fn update(call: &Call) -> Result<Reply> {
    field_manager::check_parameters(call, false)?;
    let (wanted, warnings) = body_of(call).await?;
    update::same_name(&wanted, &call.resource.name)?;
    let revision = text(&wanted, "resourceVersion");
    let stored = store(call, Writer::Update, revision, |old| changed(call, old, &wanted)).await?;
    Ok(reply::warned(stored, &warnings))
}

pub(crate) async fn patch(call: &Call) -> Result<Reply> {
    let is_apply = media::body_type(&call.headers)? == BodyType::ApplyPatch;
    field_manager::check_parameters(call, is_apply)?;
    if is_apply {
        return apply(call).await;
    }
    let patch = patch::read(call).await?;
    let validation = call.validation()?;
    let field_warnings = patch.field_warnings(validation)?;
    let mut warnings = Vec::new();
    let stored = store(call, Writer::Update, patch.revision(), |old| {
        let value = patch.apply(Some(SCHEMA), &scale::read(&call.kind, old))?;
        let parsed = Parsed { value, duplicates: Vec::new(), keys: Vec::new() };
        let (mut wanted, found) = body::check(parsed, &expected(), validation).map_err(|error| {
            if error.code == 400 { ApiError::invalid_patch(&error.message) } else { error }
        })?;
        create::set_namespace(call, &mut wanted)?;
        update::same_name(&wanted, &call.resource.name)?;
        warnings = found;
        changed(call, old, &wanted)
    })
    .await?;
    Ok(reply::warned(stored, &[field_warnings, warnings].concat()))
}

/// Server-side apply: the manager owns the replicas of the workload through the subresource. A Scale has no other field
/// that can be set. Source: `ScaleHandler` of `managedfields`.
async fn apply(call: &Call) -> Result<Reply> {
    let found = offload::run_body(call.has_slow_yaml(), || config(call)).await?;
    let (config, replicas) = found?;
    store(call, Writer::Apply, text(&config, "resourceVersion"), |old| {
        let kind = &call.kind;
        let mut wanted = scale::read(kind, old);
        let mut fields = json!({"apiVersion": kind.api_version(), "kind": kind.kind});
        if let Some(replicas) = replicas {
            scale::set_replicas(kind, &mut fields, replicas);
        }
        let new = field_manager::apply(call, old, &fields)?;
        // If no manager owns the replicas any more, the merge removes the field, and the Scale has 0 replicas.
        wanted["spec"]["replicas"] = scale::read(kind, &new)["spec"]["replicas"].clone();
        for field in ["uid", "resourceVersion"] {
            if let Some(given) = config["metadata"].get(field) {
                wanted["metadata"][field] = given.clone();
            }
        }
        changed(call, &new, &wanted)
    })
    .await
}

/// The configuration of an apply request, and the replicas that it sets. The replicas are read before decoding, because
/// the decoded Scale omits a 0.
fn config(call: &Call) -> Result<(Value, Option<i64>)> {
    let mut parsed = body::parse_yaml(&call.body)
        .map_err(|error| ApiError::bad_request(format!("error decoding YAML: {}", error.message)))?;
    call.record_object(&parsed.value);
    parsed.duplicates.clear();
    if !parsed.value["metadata"]["managedFields"].is_null() {
        return Err(ApiError::bad_request("metadata.managedFields must be nil"));
    }
    apply::same_type(&parsed.value, API_VERSION, KIND)?;
    let replicas = parsed.value["spec"]["replicas"].as_i64();
    let (mut config, notes) = body::check(parsed, &expected(), FieldValidation::Warn)?;
    if let Some(field) =
        notes.iter().find_map(|note| note.strip_prefix("unknown field \"")?.strip_suffix('"'))
    {
        let (namespace, name) = (text(&config, "namespace"), text(&config, "name"));
        return Err(ApiError::of_apply(format!(
            "failed to create typed patch object ({namespace}/{name}; {API_VERSION}, Kind={KIND}): .{field}: field not \
             declared in schema"
        )));
    }
    create::set_namespace(call, &mut config)?;
    if !text(&config, "name").is_empty() {
        update::same_name(&config, &call.resource.name)?;
    }
    Ok((config, replicas))
}

fn expected() -> Expected<'static> {
    Expected::defined(API_VERSION, KIND, SCHEMA)
}

/// The workload with the replicas of a Scale.
fn changed(call: &Call, old: &Value, wanted: &Value) -> Result<Value> {
    let (kind, name) = (&call.kind, &call.resource.name);
    check_revision(kind, old, &wanted["metadata"]["resourceVersion"])?;
    same_uid(kind, old, wanted)?;
    let mut new = old.clone();
    scale::apply(kind, &mut new, wanted).map_err(|causes| ApiError::invalid_scale(name, &causes))?;
    Ok(new)
}

fn same_uid(kind: &Resource, old: &Value, wanted: &Value) -> Result<()> {
    let (given, stored) = (text(wanted, "uid"), text(old, "uid"));
    if given.is_empty() || given == stored {
        return Ok(());
    }
    let why = format!("Precondition failed: UID in precondition: {given}, UID in object meta: {stored}");
    Err(ApiError::conflict(kind, text(old, "name"), why))
}

/// Changes the workload. `revision` is the resourceVersion that the client requires.
async fn store(
    call: &Call,
    writer: Writer,
    revision: &str,
    change: impl FnMut(&Value) -> Result<Value> + Send,
) -> Result<Reply> {
    let target = Target { name: &call.resource.name, revision };
    let stored = write::update_target(call, target, Part::Main, writer, change).await?;
    Ok(reply::json(200, &scale::read(&call.kind, &stored.value())))
}

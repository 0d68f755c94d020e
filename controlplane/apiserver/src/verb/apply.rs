//! Server-side apply: a PATCH with the fields that its manager owns. It creates the object if it does not exist.

use coracle_kinds::schema::{FieldValidation, Parsed};
use serde_json::{Value, json};

use super::create;
use crate::{
    body::{self, Expected},
    call::Call,
    error::{ApiError, Result},
    field_manager::{self, Writer},
    offload,
    reply::{self, Reply},
    write::{self, Part, Target, metadata_mut, text},
};

/// Maximum attempts while other requests create or delete the object.
const MAX_ATTEMPTS: usize = 5;

/// An applied configuration.
struct Configuration {
    object: Value,
    /// Whether the body has the object's name. Otherwise the name is from the path.
    is_named: bool,
    /// Warnings about unknown fields.
    warnings: Vec<String>,
}

pub(crate) async fn run(call: &Call, part: Part) -> Result<Reply> {
    field_manager::check_parameters(call, true)?;
    let found = offload::run_body(call.has_slow_yaml(), || config(call)).await??;
    let Configuration { object: config, is_named, warnings } = found;
    let target = Target { name: &call.resource.name, revision: text(&config, "resourceVersion") };
    for _ in 0..MAX_ATTEMPTS {
        let updated = write::update_target(call, target, part, Writer::Apply, |old| {
            let new = merged(call, old, &config)?;
            write::check_revision(&call.kind, old, &new["metadata"]["resourceVersion"])?;
            Ok(new)
        })
        .await;
        let stored = match updated {
            Err(error) if error.reason == "NotFound" && call.resource.subresource.is_empty() => {
                if !is_named {
                    return Err(ApiError::no_name(&call.resource.name));
                }
                match created(call, &config).await {
                    Err(error) if error.reason == "AlreadyExists" => continue,
                    other => (201, other?),
                }
            }
            other => (200, other?),
        };
        let reply = reply::object(stored.0, call.form()?, &call.kind, &stored.1);
        return Ok(reply::warned(reply, &warnings));
    }
    Err(ApiError::modified(&call.kind, &call.resource.name))
}

/// Creates the object of a configuration. The user also needs the permission to create.
async fn created(call: &Call, config: &Value) -> Result<write::Stored> {
    call.authorize_also("create").await?;
    if !text(config, "uid").is_empty() {
        let why = format!(
            "uid mismatch: the provided object specified uid {}, and no existing object was found",
            text(config, "uid")
        );
        return Err(ApiError::conflict(&call.kind, &call.resource.name, why));
    }
    let live = json!({"apiVersion": config["apiVersion"], "kind": config["kind"]});
    let object = merged(call, &live, config)?;
    write::create(call, object, Writer::Apply).await
}

/// The merged object in canonical form: nulls and empty lists are dropped.
fn merged(call: &Call, live: &Value, config: &Value) -> Result<Value> {
    let value = field_manager::apply(call, live, config)?;
    let expected = Expected::of(&call.kind).with_initializers(call.has_initializers());
    let parsed = Parsed { value, duplicates: Vec::new(), keys: Vec::new() };
    body::check(parsed, &expected, FieldValidation::Ignore).map(|(object, _)| object)
}

/// Refuses fields that the schema does not declare, as the typed merge of upstream does.
fn declared(call: &Call, parsed: &Parsed, expected: &Expected<'_>) -> Result<()> {
    let Ok((_, found)) = body::check(parsed.clone(), expected, FieldValidation::Warn) else { return Ok(()) };
    let fields =
        found.iter().filter_map(|warning| warning.strip_prefix("unknown field \"")?.strip_suffix('"'));
    let problems: Vec<String> =
        fields.map(|field| format!(".{field}: field not declared in schema")).collect();
    if problems.is_empty() {
        return Ok(());
    }
    Err(field_manager::not_typed(&call.kind, &parsed.value, problems.join("\n")))
}

/// Refuses a configuration of another kind or version. Source: `versionCheckManager` of upstream.
pub(crate) fn same_type(config: &Value, api_version: &str, kind: &str) -> Result<()> {
    let text = |field: &str| config[field].as_str().unwrap_or_default();
    let (given_version, given_kind) = (text("apiVersion"), text("kind"));
    if (given_version, given_kind) == (api_version, kind) {
        return Ok(());
    }
    let slash = if given_version.contains('/') { "" } else { "/" };
    let message = format!("invalid object type: {slash}{given_version}, Kind={given_kind}");
    Err(ApiError::bad_request(message))
}

/// The configuration of the body.
fn config(call: &Call) -> Result<Configuration> {
    let mut parsed: Parsed = body::parse_yaml(&call.body)
        .map_err(|error| ApiError::bad_request(format!("error decoding YAML: {}", error.message)))?;
    call.record_object(&parsed.value);
    if !parsed.value["metadata"]["managedFields"].is_null() {
        return Err(ApiError::bad_request("metadata.managedFields must be nil"));
    }
    same_type(&parsed.value, call.kind.api_version(), &call.kind.kind)?;
    let expected = Expected::config(&call.kind).with_initializers(call.has_initializers());
    declared(call, &parsed, &expected)?;
    let validation = call.validation()?;
    let duplicate = match validation {
        _ if std::mem::take(&mut parsed.duplicates).is_empty() => None,
        FieldValidation::Ignore => None,
        _ => body::first_duplicate(&call.body),
    };
    let duplicate =
        duplicate.map(|line| format!("error converting YAML to JSON: yaml: unmarshal errors:\n  {line}"));
    if let (Some(duplicate), FieldValidation::Strict) = (&duplicate, validation) {
        return Err(ApiError::bad_request(format!("error strict decoding YAML: {duplicate}")));
    }
    let (mut config, mut warnings) = body::check(parsed, &expected, validation)?;
    warnings.extend(duplicate);
    create::set_namespace(call, &mut config)?;
    let name = text(&config, "name").to_owned();
    if !name.is_empty() && name != call.resource.name {
        return Err(ApiError::bad_request(format!(
            "the name of the object ({name}) does not match the name on the URL ({})",
            call.resource.name
        )));
    }
    if let Some(metadata) = metadata_mut(&mut config) {
        metadata.insert("name".to_owned(), call.resource.name.clone().into());
    }
    Ok(Configuration { object: config, is_named: !name.is_empty(), warnings })
}

//! PATCH: JSON patch, merge patch and strategic merge patch. `apply` has server-side apply.

use coracle_kinds::{
    patch::{self, PatchError},
    schema::{self, FieldValidation, Parsed, SchemaError},
    validate::{Causes, Path},
};
use serde_json::{Map, Value};

use crate::{
    body::{self, Expected},
    call::Call,
    error::{ApiError, Result},
    field_manager::{self, Writer},
    media::{self, BodyType},
    offload,
    reply::{self, Reply},
    verb::apply,
    write::{self, Part, Target},
};

/// The fields of an operation of a JSON patch.
const OPERATION_FIELDS: [&str; 4] = ["op", "path", "from", "value"];
/// The media types of patches.
const PATCH_TYPES: &str = "application/json-patch+json, application/merge-patch+json, \
                           application/strategic-merge-patch+json, application/apply-patch+yaml";
/// The media types of patches for kinds without a strategic merge patch, such as custom resources.
const CUSTOM_PATCH_TYPES: &str =
    "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml";
/// Prefix of the errors about unknown and duplicate fields.
const STRICT: &str = "strict decoding error: ";
/// Maximum number of warnings about the operations of one patch.
const MAX_FIELD_WARNINGS: usize = 100;

/// A decoded patch.
pub(crate) enum Patch {
    Json(Value),
    Merge(Value),
    Strategic(Value),
}

pub(crate) async fn run(call: &Call, part: Part) -> Result<Reply> {
    if patch_type(call)? == BodyType::ApplyPatch {
        return apply::run(call, part).await;
    }
    field_manager::check_parameters(call, false)?;
    let patch = read(call).await?;
    let mut warnings = Vec::new();
    let expected = Expected::of(&call.kind).with_initializers(call.has_initializers());
    let validation = call.validation()?;
    let field_warnings = patch.field_warnings(validation)?;
    let apply = |old: &Value| {
        let patched = patch.apply(call.kind.patch_definition(), old)?;
        write::check_revision(&call.kind, old, &patched["metadata"]["resourceVersion"])?;
        same_identity(call, old, &patched)?;
        let parsed = Parsed { value: patched, duplicates: Vec::new(), keys: Vec::new() };
        body::check(parsed, &expected, validation).map_err(|error| match error.code {
            400 => ApiError::invalid_patch(problem(&error.message)),
            _ => error,
        })
    };
    let target = Target { name: &call.resource.name, revision: patch.revision() };
    let stored = write::update_target(call, target, part, Writer::Update, |old| {
        let (new, found) = apply(old)?;
        warnings = found;
        Ok(new)
    })
    .await?;
    let reply = reply::object(200, call.form()?, &call.kind, &stored);
    Ok(reply::warned(reply, &[field_warnings, warnings].concat()))
}

/// Reads the body as the patch that its content type names.
pub(crate) async fn read(call: &Call) -> Result<Patch> {
    let of_tree: fn(Value) -> Patch = match patch_type(call)? {
        BodyType::JsonPatch => Patch::Json,
        BodyType::MergePatch => Patch::Merge,
        BodyType::StrategicPatch => Patch::Strategic,
        BodyType::ApplyPatch => {
            return Err(ApiError::unsupported_media_type(
                "server-side apply (application/apply-patch+yaml) of this subresource is not supported",
            ));
        }
        BodyType::Json | BodyType::Yaml | BodyType::Protobuf => {
            return Err(ApiError::unknown_body(PATCH_TYPES));
        }
    };
    let parsed = || schema::parse_json(&call.body).inspect(|parsed| call.record_object(&parsed.value));
    let parsed = offload::run_body(call.has_large_body(), parsed).await?;
    let parsed = parsed.map_err(|error| {
        let why = match error {
            SchemaError::Syntax(why) => why,
            other => other.to_string(),
        };
        ApiError::bad_request(format!("error decoding patch: {why}"))
    })?;
    Ok(of_tree(parsed.value))
}

/// The type of the patch in the body.
fn patch_type(call: &Call) -> Result<BodyType> {
    let types = if call.kind.patch_definition().is_some() { PATCH_TYPES } else { CUSTOM_PATCH_TYPES };
    match media::body_type(&call.headers) {
        Ok(BodyType::Json | BodyType::Yaml | BodyType::Protobuf) | Err(_) => {
            Err(ApiError::unknown_body(types))
        }
        Ok(BodyType::StrategicPatch) if types == CUSTOM_PATCH_TYPES => Err(ApiError::unknown_body(types)),
        Ok(known) => Ok(known),
    }
}

impl Patch {
    /// Warnings about fields of operations that JSON patch does not have. Strict validation refuses them.
    pub(crate) fn field_warnings(&self, validation: FieldValidation) -> Result<Vec<String>> {
        let Self::Json(Value::Array(operations)) = self else { return Ok(Vec::new()) };
        if validation == FieldValidation::Ignore {
            return Ok(Vec::new());
        }
        let fields = operations.iter().zip(0..).flat_map(|(operation, index)| {
            let names = operation.as_object().into_iter().flat_map(Map::keys);
            let unknown = names.filter(|name| !OPERATION_FIELDS.contains(&name.as_str()));
            unknown.map(move |name| format!("json patch unknown field \"[{index}].{name}\""))
        });
        let field_warnings: Vec<String> = fields.take(MAX_FIELD_WARNINGS).collect();
        if validation == FieldValidation::Strict && !field_warnings.is_empty() {
            return Err(ApiError::invalid_patch(&format!("{STRICT}{}", field_warnings.join(", "))));
        }
        Ok(field_warnings)
    }

    /// The resourceVersion that the patch requires. Empty if the patch has none, and for a JSON patch.
    pub(crate) fn revision(&self) -> &str {
        match self {
            Self::Json(_) => "",
            Self::Merge(tree) | Self::Strategic(tree) => write::text(tree, "resourceVersion"),
        }
    }

    /// Applies the patch. Without a definition a strategic merge patch is refused.
    pub(crate) fn apply(&self, definition: Option<&str>, old: &Value) -> Result<Value> {
        let patched = match self {
            Self::Json(operations) => patch::json(old, operations),
            Self::Merge(tree) => patch::merge(old, tree),
            Self::Strategic(tree) => match definition {
                Some(definition) => patch::strategic(definition, old, tree),
                None => return Err(ApiError::unknown_body(CUSTOM_PATCH_TYPES)),
            },
        };
        patched.map_err(|error| match error {
            PatchError::Malformed(message) => ApiError::bad_request(message),
            PatchError::Unprocessable(message) => ApiError::unprocessable(message),
            PatchError::TooLarge(message) => ApiError::entity_too_large(message),
        })
    }
}

/// The part of a decoding error that upstream shows: errors of strict decoding do not name the kind.
fn problem(message: &str) -> &str {
    message.find(STRICT).and_then(|at| message.get(at..)).unwrap_or(message)
}

fn same_identity(call: &Call, old: &Value, new: &Value) -> Result<()> {
    let (before, after) = (&old["metadata"], &new["metadata"]);
    let name = |object: &Value| object["name"].as_str().unwrap_or_default().to_owned();
    if name(after).is_empty() {
        return Err(ApiError::no_name(&name(before)));
    }
    if before["name"] != after["name"] {
        return Err(ApiError::bad_request(format!(
            "the name of the object ({}) does not match the name on the URL ({})",
            name(after),
            name(before)
        )));
    }
    if before["namespace"] != after["namespace"] {
        return Err(ApiError::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    let uid = &after["uid"];
    if !uid.is_null() && *uid != "" && *uid != before["uid"] {
        let mut causes = Causes::default();
        causes.invalid(&Path::root("metadata").field("uid"), uid, "field is immutable");
        return Err(ApiError::invalid(&call.kind, &name(before), &causes.into_list()));
    }
    Ok(())
}

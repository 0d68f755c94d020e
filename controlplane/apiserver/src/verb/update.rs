//! PUT of an object or its status. For some kinds, a PUT of an object that does not exist creates it.

use serde_json::Value;

use coracle_kinds::validate::Cause;

use crate::{
    call::Call,
    error::{ApiError, Result},
    field_manager::{self, Writer},
    reply::{self, Reply},
    verb::create,
    write::{self, Part, Stored, Target},
};

/// Maximum attempts while other requests create or delete the object.
const MAX_ATTEMPTS: usize = 5;

pub(crate) async fn run(call: &Call, part: Part) -> Result<Reply> {
    field_manager::check_parameters(call, false)?;
    let (mut object, warnings) = call.object().await?;
    create::set_namespace(call, &mut object)?;
    let name = &call.resource.name;
    same_name(&object, name)?;
    let revision = object["metadata"]["resourceVersion"].clone();
    let target = Target { name, revision: revision.as_str().unwrap_or_default() };
    for _ in 0..MAX_ATTEMPTS {
        let updated = write::update_target(call, target, part, Writer::Update, |old| {
            require_revision(call, &revision)?;
            write::check_revision(&call.kind, old, &revision)?;
            Ok(object.clone())
        })
        .await;
        let (code, stored) = match updated {
            Err(error) if part == Part::Main && is_creatable(call, &error) => {
                match created(call, &object).await {
                    Err(error) if error.reason == "AlreadyExists" => continue,
                    made => (201, made?),
                }
            }
            updated => (200, updated?),
        };
        let reply = reply::object(code, call.form()?, &call.kind, &stored);
        return Ok(reply::warned(reply, &warnings));
    }
    Err(ApiError::modified(&call.kind, name))
}

/// Whether an update failed because the object does not exist, and an update of this kind creates it.
fn is_creatable(call: &Call, error: &ApiError) -> bool {
    let exists = || call.state.cache.get(&call.kind, call.namespace(), &call.resource.name).is_some();
    call.kind.create_on_update && error.reason == "NotFound" && !exists()
}

/// Creates the object of an update. The user also needs the permission to create. A uid in the object is a conflict:
/// the client means an object that no longer exists. A revision is ignored. Source: `Store.Update` of the generic
/// registry.
async fn created(call: &Call, object: &Value) -> Result<Stored> {
    call.authorize_also("create").await?;
    write::check_uid(&call.kind, call.resource.name.as_str(), "", write::text(object, "uid"))?;
    let mut object = object.clone();
    if let Some(metadata) = write::metadata_mut(&mut object) {
        metadata.remove("resourceVersion");
    }
    write::create(call, object, Writer::Update).await
}

/// Refuses an update without resourceVersion of a kind that requires one.
fn require_revision(call: &Call, revision: &Value) -> Result<()> {
    if call.kind.unconditional_update || revision.as_str().is_some_and(|given| !given.is_empty()) {
        return Ok(());
    }
    let field = "metadata.resourceVersion".to_owned();
    let message = "Invalid value: 0: must be specified for an update".to_owned();
    let cause = Cause { reason: "FieldValueInvalid", field, message };
    let (kind, name) = (call.kind.stored_as(), &call.resource.name);
    let mut error = ApiError::invalid(kind, name, &[cause]);
    // Upstream names the resource here, not the kind. Source: `Store.Update` of the generic registry.
    let (qualified, resource) = (kind.qualified_kind(), kind.qualified_resource());
    error.message = error.message.replacen(&qualified, &resource, 1);
    error.details["kind"] = kind.plural.as_ref().into();
    Err(error)
}

/// Refuses an object whose name is missing or differs from the name in the path.
pub(crate) fn same_name(object: &Value, name: &str) -> Result<()> {
    match write::text(object, "name") {
        "" => Err(ApiError::no_name(name)),
        found if found == name => Ok(()),
        found => Err(ApiError::bad_request(format!(
            "the name of the object ({found}) does not match the name on the URL ({name})"
        ))),
    }
}

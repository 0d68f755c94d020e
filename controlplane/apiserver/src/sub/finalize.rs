//! PUT namespaces/finalize: sets the finalizers in a namespace's spec. A terminating namespace without finalizers is
//! deleted.

use coracle_kinds::validate;

use super::body_of;
use crate::{
    call::Call,
    error::{ApiError, Result},
    field_manager::Writer,
    reply::{self, Reply},
    write::{self, Part, Target, check_revision, text},
};

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    let (namespace, warnings) = body_of(call).await?;
    let target = Target { name: &call.resource.name, revision: text(&namespace, "resourceVersion") };
    let stored = write::update_target(call, target, Part::Internal, Writer::Update, |old| {
        check_revision(&call.kind, old, &namespace["metadata"]["resourceVersion"])?;
        let mut new = old.clone();
        new["spec"]["finalizers"] =
            namespace["spec"]["finalizers"].as_array().cloned().unwrap_or_default().into();
        let causes = validate::ratcheted(&call.kind, &new, old, validate::update);
        if !causes.is_empty() {
            return Err(ApiError::invalid(&call.kind, &call.resource.name, &causes));
        }
        Ok(new)
    })
    .await?;
    Ok(reply::warned(reply::object(200, call.form()?, &call.kind, &stored), &warnings))
}

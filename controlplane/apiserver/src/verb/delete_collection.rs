//! DELETE of a collection: deletes each object that the selectors match, by the rules of a single deletion.

use serde_json::json;

use crate::{
    cache::Scope,
    call::Call,
    convert,
    error::{ApiError, Result},
    reply::{self, Reply},
    verb::{delete, list, version_fields},
};

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    if call.kind.namespaced && call.namespace().is_empty() {
        return Err(ApiError::method_not_allowed());
    }
    // As upstream, uninitialized objects are deleted, too.
    let mut scope = Scope { initialized_only: false, ..list::scope(call)? };
    let fields = version_fields::take(&call.kind, &mut scope);
    let options = delete::options(call)?;
    let mut objects = list::chosen(call, &scope)?;
    if let Some(fields) = fields {
        objects = version_fields::select(&call.kind, &fields, objects).await?;
    }
    let mut touched = Vec::new();
    for object in objects {
        if !scope.selects(&call.kind, &object) {
            continue;
        }
        // A dry run has no other await point, and policies may evaluate each object.
        tokio::task::yield_now().await;
        match delete::one(call, object.name(), &options).await {
            Ok(_) => touched.push(object),
            // Another request deleted the object meanwhile.
            Err(error) if error.reason == "NotFound" => {}
            Err(error) => return Err(error),
        }
    }
    let touched = convert::objects(&call.kind, touched).await?;
    let meta = json!({"resourceVersion": call.state.cache.revision().to_string()});
    Ok(reply::list(call.form()?, call.kind.clone(), (touched, None), meta).await)
}

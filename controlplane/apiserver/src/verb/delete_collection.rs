//! DELETE of a collection: deletes each object that the selectors match, by the rules of a single deletion. With a
//! `limit` it deletes a page, and returns the token of the next page.

use coracle_kinds::validate::Path;
use serde_json::json;

use crate::{
    cache::Scope,
    call::Call,
    convert,
    error::{ApiError, Result},
    reply::{self, Reply},
    verb::{delete, list, unsafe_delete, version_fields},
};

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    if call.kind.namespaced && call.namespace().is_empty() {
        return Err(ApiError::method_not_allowed());
    }
    // As upstream, uninitialized objects are deleted, too.
    let mut scope = Scope { initialized_only: false, ..list::scope(call)? };
    let fields = version_fields::take(&call.kind, &mut scope);
    let options = delete::options(call).await?;
    if options.ignores_read_error() {
        return Err(call.invalid_parameter(|causes| {
            let detail = "is not allowed with DELETECOLLECTION, try again after removing the option";
            causes.invalid(&Path::root(unsafe_delete::OPTION), &true.into(), detail);
        }));
    }
    let mut objects = list::chosen(call, &scope)?;
    let limit = call.info.query.page_limit();
    // The memory of the response is reserved before the first deletion.
    let memory = match fields {
        Some(fields) => {
            let memory = list::copies(call, &objects)?;
            objects = version_fields::select(&call.kind, &fields, objects).await?;
            memory
        }
        None => {
            let selected = objects.iter().filter(|object| scope.selects(&call.kind, object));
            list::copies(call, selected.take(limit))?
        }
    };
    let (mut touched, mut chosen, mut next) = (Vec::new(), 0, None);
    for object in objects {
        if !scope.selects(&call.kind, &object) {
            continue;
        }
        if chosen == limit {
            next = Some(list::token_from(&object)?);
            break;
        }
        chosen += 1;
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
    let mut meta = json!({"resourceVersion": call.state.cache.revision().to_string()});
    if let Some(next) = next {
        meta["continue"] = next.into();
    }
    Ok(reply::list(call.form()?, call.kind.clone(), touched, memory, meta).await)
}

//! GET of one object.

use crate::{
    call::Call,
    convert,
    error::{ApiError, Result},
    reply::{self, Reply},
    request::parse_revision,
    write::Stored,
};

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    let name = &call.resource.name;
    if let Some(asked) = parse_revision(call.info.query.get("resourceVersion"))? {
        let cache = &call.state.cache;
        let newest = cache.revision().max(cache.of(&call.kind)?.lock().newest());
        if asked > newest {
            return Err(ApiError::future_revision(asked, newest));
        }
    }
    let object = convert::object(&call.kind, call.current(name)?).await?;
    Ok(reply::object(200, call.form()?, &call.kind, &Stored::Committed(object)))
}

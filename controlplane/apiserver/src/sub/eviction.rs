//! POST pods/eviction: a deletion that disruption budgets may refuse. There is no such kind yet, so none does.

use serde_json::Value;

use super::body_of;
use crate::{
    call::Call,
    error::Result,
    reply::{self, Reply},
    verb::delete,
};

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    let (eviction, warnings) = body_of(call)?;
    let options = delete::options_from(call, &eviction["deleteOptions"])?;
    delete::one(call, &call.resource.name, &options).await?;
    Ok(reply::warned(reply::success(201, Value::Null), &warnings))
}

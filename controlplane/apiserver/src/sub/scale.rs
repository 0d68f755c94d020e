//! The subresource `scale`: the replicas of a workload as a Scale object, whatever the workload's kind.

use coracle_kinds::{scale, schema::Parsed};
use serde_json::Value;

use super::{body_of, parent};
use crate::{
    body::{self, Expected},
    call::Call,
    error::{ApiError, Result},
    field_manager::Writer,
    reply::{self, Reply},
    verb::patch,
    write::{self, Part, check_revision},
};

const SCHEMA: &str = "io.k8s.api.autoscaling.v1.Scale";

pub(crate) async fn get(call: &Call) -> Result<Reply> {
    Ok(reply::json(200, &scale::read(&call.kind, &parent(call).await?)))
}

pub(crate) async fn update(call: &Call) -> Result<Reply> {
    let (wanted, _) = body_of(call)?;
    write(call, |_| Ok(wanted.clone())).await
}

pub(crate) async fn patch(call: &Call) -> Result<Reply> {
    let patch = patch::read(call)?;
    let validation = call.validation()?;
    write(call, |current| {
        let value = patch.apply(Some(SCHEMA), current)?;
        let parsed = Parsed { value, duplicates: Vec::new(), keys: Vec::new() };
        let expected = Expected::defined("autoscaling/v1", "Scale", SCHEMA);
        Ok(body::check(parsed, &expected, validation)?.0)
    })
    .await
}

async fn write(call: &Call, wanted: impl Fn(&Value) -> Result<Value> + Send + Sync) -> Result<Reply> {
    let (kind, name) = (&call.kind, &call.resource.name);
    let stored = write::update(call, name, (Part::Main, Writer::Update), |old| {
        let wanted = wanted(&scale::read(kind, old))?;
        check_revision(kind, old, &wanted["metadata"]["resourceVersion"])?;
        let mut new = old.clone();
        scale::apply(kind, &mut new, &wanted).map_err(|causes| ApiError::invalid(kind, name, &causes))?;
        Ok(new)
    })
    .await?;
    Ok(reply::json(200, &scale::read(kind, &stored.value())))
}
